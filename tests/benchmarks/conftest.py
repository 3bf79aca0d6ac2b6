import pytest

from verl_memopt.distributed.device import leave_process_group
from verl_memopt.model.tiny import TinyShape

TINY = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_positions=256)


@pytest.fixture(autouse=True)
def process_group():
    yield
    leave_process_group()
