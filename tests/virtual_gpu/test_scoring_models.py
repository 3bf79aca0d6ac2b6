"""A model that scores on the virtual GPU, reward model or student of RLT: where its bytes lie, and how often the host waits."""

import dataclasses

import pytest

from tests.end_to_end.covering import all_off
from tests.recipe.rlt.test_student_pass import rows_of
from tests.virtual_gpu.life import PROMPTS, SLACK_BYTES, _batch, _keys, _plan, first_worker
from tests.worker.test_reward_scores import classifier
from verl_memopt.config.schema import Fsdp, ScoringModel
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import Student, StudentPlan
from verl_memopt.rollout.engine import train_sampling

SHARING = {"shared prompt": "on", "batching": "tokens"}
OFFLOADED = {"actor param_offload": "on", "ref param_offload": "on"}
CUT = [[0, 1, 2], [3, 4], [5]]


def phases(folder, world_size, offload, reward_folder=None, residency="separate"):
    """Return the bytes of models on the device after each phase, their sizes, and the host's waits for the scores.

    reward_folder: of a reward model; None for a student, with a policy and a reference that leave the device.
    """
    plan, settings = _plan(all_off() | SHARING | (OFFLOADED if reward_folder is None else {}), folder, world_size, None)
    fsdp = Fsdp(param_offload=offload)
    if reward_folder is None:
        own = None if residency == "alias_ref" else str(folder)
        role = StudentPlan(ScoringModel(path=str(folder), fsdp_config=fsdp), RltReward(), residency, own)
        plan = dataclasses.replace(plan, role=role)
    else:
        plan = dataclasses.replace(plan, reward_model=ScoringModel(fsdp_config=fsdp), reward_folder=str(reward_folder))
    with first_worker(plan, world_size) as (worker, gpu):
        scorer = worker.role.model if reward_folder is None else worker.reward_model
        models = {"policy": worker.policy.model, "reference": worker.reference, "scorer": scorer}
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
        call("old_log_prob", "old_log_probs", batch, CUT, False)
        before = len(gpu.waits)
        if reward_folder is None:
            found = call("reward", "call_role", Student.log_probs, rows_of(9, 7, 3, 6), CUT, 1.0).log_probs
            scores = (found.think, found.solution)
        else:
            scores = (call("reward", "reward_scores", batch, CUT),)
            assert tuple(scores[0].shape) == (6,)
        waits = gpu.waits[before:]
        assert {each.device.type for each in scores} == {"cpu"}
        call("ref", "ref_log_probs", batch, CUT)
        # The others are the phase's own, before and after.
        return seen, sizes, [wait for wait in waits if wait != "torch.cuda.synchronize"]


@pytest.fixture(scope="module")
def scorers(folder, tmp_path_factory):
    return {"reward model": classifier(tmp_path_factory.mktemp("reward") / "model", folder)[0], "student": None}


ONCE = ["aten._to_copy.default to the host"]


def test_an_offloaded_reward_model_lies_on_the_device_after_its_own_phase_alone(on_virtual_gpu, folder, scorers):
    seen, sizes, _ = on_virtual_gpu(phases, folder, 2, True, scorers["reward model"])
    assert seen.pop("reward")["scorer"] >= sizes["scorer"]
    assert all(held["scorer"] <= SLACK_BYTES for held in seen.values())


@pytest.mark.parametrize(("residency", "world_size"), [("alias_ref", 1), ("separate", 2), ("swap", 1)])
def test_one_model_at_a_time_is_on_the_device(on_virtual_gpu, folder, world_size, residency):
    seen, sizes, _ = on_virtual_gpu(phases, folder, world_size, True, residency=residency)
    assert seen["reward"]["scorer"] >= sizes["scorer"]
    assert seen["reward"]["policy"] <= SLACK_BYTES
    assert seen["ref"]["reference"] >= sizes["reference"]
    assert seen["old_log_prob"]["policy"] >= sizes["policy"]
    assert all(seen[phase]["scorer"] <= SLACK_BYTES for phase in ("gen", "old_log_prob", "update_weights"))
    if residency == "separate":
        assert seen["reward"]["reference"] <= SLACK_BYTES
        assert seen["ref"]["scorer"] <= SLACK_BYTES
    else:  # one module and one place
        assert seen["reward"]["scorer"] == seen["ref"]["reference"]


def test_one_that_stays_is_on_the_device_and_the_host_waits_once_for_all_micro_batches(on_virtual_gpu, folder, scorers):
    seen, sizes, waits = on_virtual_gpu(phases, folder, 1, False, scorers["reward model"])
    assert all(held["scorer"] >= sizes["scorer"] for held in seen.values())
    assert waits == ONCE


@pytest.mark.parametrize("scorer", ["reward model", "student"])
def test_one_that_streams_is_never_left_on_the_device_and_the_host_waits_no_more_often(on_virtual_gpu, folder, scorers, scorer):
    seen, _, waits = on_virtual_gpu(phases, folder, 1, "stream", scorers[scorer])
    assert all(held["scorer"] <= SLACK_BYTES for held in seen.values())
    assert waits == ONCE
