import pytest
import torch

from tests.models.own_code import own_code, write_own_code
from tests.workers.test_policy import batch
from tests.workers.test_worker import AR, call, made, mini_batch, place, plan_of  # noqa: F401 - made is a fixture
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.ops import fused
from verl_memopt.workers.worker import Worker


def test_full_determinism_and_the_seed_hold_for_the_worker(made):  # noqa: F811
    before = torch.are_deterministic_algorithms_enabled()
    try:
        made({f"{AR}.actor.fsdp_config.full_determinism": True, f"{AR}.actor.fsdp_config.seed": 5})
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.initial_seed() == 5
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_model_that_mixes_rows_is_refused_when_it_is_loaded(tiny_folder, untied_folder, tmp_path, monkeypatch, role):
    own_code(monkeypatch, tmp_path)
    own = str(write_own_code(untied_folder, tmp_path / "own", mixes=True))
    policy, reference = (own, None) if role == "policy" else (tiny_folder, own)
    plan = plan_of(policy, {f"{AR}.model.trust_remote_code": True}, reference_folder=reference)
    with pytest.raises(ConfigError, match=rf"model\.path={own}: models of type own mix the tokens of different rows in"):
        Worker(plan, place())
    leave_process_group()


def test_a_mapped_reference_has_its_values_when_its_rows_are_compared(made, tiny_folder):  # noqa: F811
    mapped = {f"{AR}.actor.use_kl_loss": True, f"{AR}.model.load_mode": "mmap", f"{AR}.ref.fsdp_config.param_offload": True}
    worker = made(mapped, reference_folder=str(tiny_folder))
    found = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]])
    assert torch.isfinite(found.log_probs).all()


def test_a_worker_on_a_cpu_compiles_nothing(made):  # noqa: F811
    worker = made({f"{AR}.actor.use_torch_compile": True})
    assert not fused._on
    call(worker, "update_actor", [mini_batch()])
    assert not worker.policy.model.lm.get_output_embeddings().compiled
