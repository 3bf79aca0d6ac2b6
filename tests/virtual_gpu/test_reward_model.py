"""The reward model on the virtual GPU: where its bytes lie after each phase, and how often the host waits for its scores."""

import dataclasses

import pytest

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.life import PROMPTS, SLACK_BYTES, _batch, _keys, _plan, first_worker
from tests.worker.test_reward_scores import classifier
from verl_memopt.config.schema import Fsdp, ScoringModel
from verl_memopt.rollout.engine import train_sampling


def phases(folder, reward_folder, world_size, offload):
    """Return the bytes of the reward model on the device after each phase, its size, and the host's waits for its scores."""
    plan, settings = _plan(all_off() | {"shared prompt": "on", "batching": "tokens"}, folder, world_size, None)
    model = ScoringModel(fsdp_config=Fsdp(param_offload=offload))
    plan = dataclasses.replace(plan, reward_model=model, reward_folder=str(reward_folder))
    with first_worker(plan, world_size) as (worker, gpu):
        keys = _keys([*worker.reward_model.parameters(), *worker.reward_model.buffers()])
        size = sum(parameter.nbytes for parameter in worker.reward_model.parameters()) // world_size
        batch = _batch(0, settings.actor_rollout_ref.actor).select([0, 1, 2, 4, 5, 6])
        seen = {}

        def call(phase, method, *args):
            gpu.truth = phase == "gen"
            value = worker.call(phase, False, method, *args).value
            seen[phase] = sum(gpu.held().get(key, 0) for key in keys)
            return value

        call("update_weights", "update_weights")
        call("gen", "generate", PROMPTS, [1, 2, 3], train_sampling(worker.settings.rollout))
        before = len(gpu.waits)
        scores = call("reward", "reward_scores", batch, [[0, 1, 2], [3, 4], [5]])
        waits = gpu.waits[before:]
        assert (scores.device.type, tuple(scores.shape)) == ("cpu", (6,))
        call("old_log_prob", "old_log_probs", batch, [[0, 1, 2], [3, 4], [5]], False)
        return seen, size, waits


@pytest.fixture(scope="module")
def reward_folder(folder, tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("reward") / "model", folder)[0]


def test_an_offloaded_reward_model_lies_on_the_device_after_its_own_phase_alone(on_virtual_gpu, folder, reward_folder):
    seen, size, _ = on_virtual_gpu(phases, folder, reward_folder, 2, True)
    assert seen["reward"] >= size
    assert all(seen[phase] <= SLACK_BYTES for phase in ("update_weights", "gen", "old_log_prob"))


def test_one_that_stays_is_on_the_device_and_the_host_waits_once_for_the_scores_of_all_micro_batches(
    on_virtual_gpu, folder, reward_folder
):
    stays, size, waits = on_virtual_gpu(phases, folder, reward_folder, 1, False)
    assert all(held >= size for held in stays.values())
    copies = [wait for wait in waits if wait != "torch.cuda.synchronize"]  # those are the phase's own, before and after
    assert copies == ["aten._to_copy.default to the host"]


def test_one_that_streams_is_never_left_on_the_device_and_the_host_waits_no_more_often(on_virtual_gpu, folder, reward_folder):
    streams, _, waits = on_virtual_gpu(phases, folder, reward_folder, 1, "stream")
    assert all(held <= SLACK_BYTES for held in streams.values())
    assert [wait for wait in waits if wait != "torch.cuda.synchronize"] == ["aten._to_copy.default to the host"]
