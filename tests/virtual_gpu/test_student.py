"""The student of RLT on the virtual GPU: where its bytes lie after each phase, and how often the host waits for its log-probs."""

import dataclasses

import pytest

from tests.end_to_end.covering import all_off
from tests.recipe.rlt.test_student_pass import rows_of
from tests.virtual_gpu.life import PROMPTS, SLACK_BYTES, _batch, _keys, _plan, first_worker
from verl_memopt.config.schema import Fsdp, ScoringModel
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, StudentPlan
from verl_memopt.rollout.engine import train_sampling

KNOBS = {"shared prompt": "on", "batching": "tokens", "actor param_offload": "on", "ref param_offload": "on"}


def phases(folder, world_size, residency, offload):
    """Return the bytes of policy, reference and student on the device after each phase, their sizes, and the host's waits."""
    plan, settings = _plan(all_off() | KNOBS, folder, world_size, None)
    model = ScoringModel(path=str(folder), fsdp_config=Fsdp(param_offload=offload))
    own = None if residency == "alias_ref" else str(folder)
    plan = dataclasses.replace(plan, role=StudentPlan(model, RltReward(), residency, own))
    with first_worker(plan, world_size) as (worker, gpu):
        models = {"policy": worker.policy.model, "reference": worker.reference, "student": worker.role.model}
        keys = {name: _keys([*model.parameters(), *model.buffers()]) for name, model in models.items()}
        sizes = {name: sum(each.nbytes for each in model.parameters()) // world_size for name, model in models.items()}
        batch = _batch(0, settings.actor_rollout_ref.actor).select([0, 1, 2, 4, 5, 6])
        seen = {}

        def call(phase, method, *args):
            gpu.truth = phase == "gen"
            value = worker.call(phase, False, method, *args).value
            held = gpu.held()
            seen[phase] = {name: sum(held.get(key, 0) for key in parts) for name, parts in keys.items()}
            return value

        call("update_weights", "update_weights")
        call("gen", "generate", PROMPTS, [1, 2, 3], train_sampling(worker.settings.rollout))
        call("old_log_prob", "old_log_probs", batch, [[0, 1, 2], [3, 4], [5]], False)
        before = len(gpu.waits)
        scored = call("reward", "of_role", Student.log_probs, rows_of(9, 7, 3, 6), [[0, 1, 2], [3, 4], [5]], 1.0)
        waits = gpu.waits[before:]
        assert {each.device.type for each in (scored.log_probs.think, scored.log_probs.solution)} == {"cpu"}
        call("ref", "ref_log_probs", batch, [[0, 1, 2], [3, 4], [5]])
        return seen, sizes, waits


@pytest.mark.parametrize(("residency", "world_size"), [("alias_ref", 1), ("separate", 2), ("swap", 1)])
def test_one_model_at_a_time_is_on_the_device(on_virtual_gpu, folder, world_size, residency):
    seen, sizes, _ = on_virtual_gpu(phases, folder, world_size, residency, True)
    assert seen["reward"]["student"] >= sizes["student"]
    assert seen["reward"]["policy"] <= SLACK_BYTES
    assert seen["ref"]["reference"] >= sizes["reference"]
    assert seen["old_log_prob"]["policy"] >= sizes["policy"]
    assert all(seen[phase]["student"] <= SLACK_BYTES for phase in ("gen", "old_log_prob", "update_weights"))
    if residency == "separate":
        assert seen["reward"]["reference"] <= SLACK_BYTES
        assert seen["ref"]["student"] <= SLACK_BYTES
    else:  # one module and one place
        assert seen["reward"]["student"] == seen["ref"]["reference"]


def test_a_student_that_is_not_offloaded_stays_and_the_host_waits_once_for_the_log_probs_of_all_micro_batches(
    on_virtual_gpu, folder
):
    seen, sizes, waits = on_virtual_gpu(phases, folder, 1, "separate", False)
    assert all(held["student"] >= sizes["student"] for held in seen.values())
    copies = [wait for wait in waits if wait != "torch.cuda.synchronize"]  # those are the phase's own, before and after
    assert copies == ["aten._to_copy.default to the host"]


def test_a_student_that_streams_is_never_left_on_the_device_and_the_host_waits_no_more_often(on_virtual_gpu, folder):
    seen, _, waits = on_virtual_gpu(phases, folder, 1, "separate", "stream")
    assert all(held["student"] <= SLACK_BYTES for held in seen.values())
    assert [wait for wait in waits if wait != "torch.cuda.synchronize"] == ["aten._to_copy.default to the host"]
