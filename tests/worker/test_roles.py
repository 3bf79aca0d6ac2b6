import logging
from dataclasses import replace

import pytest
import torch

from tests.critics import call_critic, critic_mini, critic_plan, with_value_head
from tests.model.own_code import own_code, write_own_code
from tests.worker.test_policy import batch
from tests.worker.test_worker import AR, call, mini_batch, place, plan_of
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.memory import fused
from verl_memopt.memory.residency import Residency
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.roles import RoleBuilder
from verl_memopt.worker.worker import Worker

CPU = torch.device("cpu")


def test_each_offload_of_activations_has_a_metric_of_its_own(made, tiny_folder):
    offloaded = {"enable_activation_offload": True, "activation_offload_min_bytes": 1}
    critic = critic_plan(tiny_folder, {f"critic.model.{name}": value for name, value in offloaded.items()})
    worker = made({f"{AR}.model.{name}": value for name, value in offloaded.items()}, **critic)
    metrics = call(worker, "update_actor", [mini_batch()]), call_critic(worker, "update_critic", [critic_mini()]).value
    moved = ["memory/activation_offload/bytes_moved", "memory/activation_offload/critic_bytes_moved"]
    assert [[name for name in moved if name in each] for each in metrics] == [[moved[0]], [moved[1]]]
    assert metrics[1][moved[1]] > 0


def test_several_devices_without_a_common_engine_cannot_split_masters(tiny_folder):
    plan = plan_of(tiny_folder)
    key = f"{AR}.actor.fsdp_config.split_master_weights"
    fsdp = replace(plan.settings.actor.fsdp_config, split_master_weights=True)
    plan = replace(plan, settings=replace(plan.settings, actor=replace(plan.settings.actor, fsdp_config=fsdp)))
    with pytest.raises(ConfigError, match=f"{key}=true: the run has no engine .* Set {key}=false"):
        Policy.built(RoleBuilder(plan, place(0, 2), CPU, Residency(CPU)))


@pytest.mark.parametrize("has_head", [False, True])
def test_the_log_says_where_the_critics_head_comes_from(made, tiny_folder, tmp_path, caplog, has_head):
    folder = with_value_head(tiny_folder, tmp_path / "valued") if has_head else tiny_folder
    with caplog.at_level(logging.INFO):
        made(**critic_plan(folder))
    expected = f"is that of {folder}" if has_head else f"starts at 0: {folder} has none"
    assert f"the critic's value head {expected}" in caplog.text


def test_full_determinism_and_the_seed_hold_for_the_worker(made):
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


def test_a_mapped_reference_has_its_values_when_its_rows_are_compared(made, tiny_folder):
    mapped = {f"{AR}.actor.use_kl_loss": True, f"{AR}.model.load_mode": "mmap", f"{AR}.ref.fsdp_config.param_offload": True}
    worker = made(mapped, reference_folder=str(tiny_folder))
    found = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]])
    assert torch.isfinite(found.log_probs).all()


def test_a_worker_on_a_cpu_compiles_nothing(made):
    worker = made({f"{AR}.actor.use_torch_compile": True})
    assert not fused._on
    reply = worker.call("update_actor", False, "update_actor", [mini_batch()])
    assert reply.memory.compiles is reply.memory.compile_fallbacks is None
    assert not worker.policy.model.lm.get_output_embeddings().compiled
