"""Offloads beside streams that copy as late as they may: the numbers of a run are those of one without streams, bit for bit."""

import pytest
import torch

from tests.end_to_end.covering import all_off
from tests.end_to_end.knob_runs import run_row
from tests.virtual_gpu.late_streams import late_streams
from tests.virtual_gpu.life import STREAMS
from verl_memopt.distributed.device import leave_process_group

SMALL = {"bucket": "small", "actor optimizer_offload": "on"}
ROWS = {
    "activations of checkpoints": {"activation offload": "one in flight", "checkpointing": "full", "recomputed values": "on"},
    "moments in int8": SMALL | {"state": "int8"},
    "moments in backward": SMALL | {"in backward": "on", "clip": "none"},
    "gradients": SMALL | {"actor grad_offload": "on", "batching": "tokens"},
    "a streamed reference": {"shared prompt": "on", "batching": "tokens", "recomputed values": "on"},
    "a mapped reference": {"ref param_offload": "on", "load": "mmap"},
    "all of it": SMALL
    | {"activation offload": "on", "checkpointing": "every_n", "actor param_offload": "on", "ref param_offload": "on"}
    | {"engine": "level 1", "sync": "one", "shared prompt": "on", "batching": "tokens", "recomputed values": "on"},
}


@pytest.fixture(autouse=True)
def no_group():
    leave_process_group()
    yield
    leave_process_group()


def numbers(outcome):
    tensors = [*outcome.log_probs, *outcome.ref_log_probs, outcome.weights]
    return torch.cat([torch.tensor([*outcome.loss, *outcome.grad_norm]), *(tensor.flatten() for tensor in tensors)])


@pytest.mark.parametrize("name", ROWS)
def test_late_copies_change_no_number(name, folder):
    row = all_off() | ROWS[name]
    plain = numbers(run_row(row, folder))
    with late_streams():
        late = numbers(run_row(row, folder, more=STREAMS if name == "a streamed reference" else None))
    assert torch.equal(plain, late)
