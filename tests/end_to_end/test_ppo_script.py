"""The seven features of ``run_memory_optimized_ppo.sh``: a key on its command line arrives in the worker that owns it."""

import re
import shlex
import subprocess
from contextlib import contextmanager

import pytest

from tests.end_to_end.runs import LOCAL, ROOT, script_environment
from verl_memopt.config.loader import load_settings
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import start_rewards
from verl_memopt.worker.group import LocalGroup, TimedGroup
from verl_memopt.worker.worker import Worker

AR = "actor_rollout_ref"
SCRIPT = ROOT / "examples" / "memory_optimization" / "run_memory_optimized_ppo.sh"
ENTRY = re.compile(r"^\++ \S+ -m verl_memopt\.trainer\.main_ppo (.*)$", re.MULTILINE)
"""The last command of the script, as the shell traces it."""
SHORT = ["data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8", f"{AR}.rollout.n=4", "data.val_files=null"]


class Watched(Worker):
    """A worker that remembers how the rows of its last updates were cut."""

    def update_actor(self, mini_batches):
        self.actor_cut = [len(mini.micro_batches) for mini in mini_batches]
        return super().update_actor(mini_batches)

    def update_on_policy(self, mini):
        self.actor_cut = [len(mini.micro_batches)]
        return super().update_on_policy(mini)

    def update_critic(self, mini_batches):
        self.critic_cut = [len(mini.micro_batches) for mini in mini_batches]
        return super().update_critic(mini_batches)


@pytest.fixture(scope="module")
def handed(toy):
    """What the script hands to the training entry."""
    env = script_environment(DEVICE="cpu", TOY_DIR=str(toy))
    process = subprocess.run(["bash", "-x", str(SCRIPT), "debug=dry"], env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-3000:]
    words = shlex.split(ENTRY.findall(process.stderr)[-1])
    assert words[:4] == ["--config-dir", "recipe/ppo", "--config-name", "toy"]
    assert words[-1] == "debug=dry"
    return words[4:-1]


@pytest.fixture
def worker(handed, tmp_path):
    """Runs one step with the script's settings and a change of them; yields the worker, which is still alive."""

    @contextmanager
    def run(*changes, local=LOCAL):
        overrides = [*handed, *SHORT, *local, f"trainer.default_local_dir={tmp_path / 'run'}", *changes]
        settings = load_settings("toy", overrides, str(ROOT / "recipe" / "ppo"))
        context, clock = build_run(settings), PhaseClock()
        workers = []

        def build(place):
            workers.append(Watched(context.worker_plan, place))
            return workers[-1]

        group = LocalGroup(build, "cpu")
        try:
            with start_rewards(settings.custom_reward_function, settings.reward_model, tmp_path) as rewards:
                learner = build_learner(context, TimedGroup(group, clock, in_process=True), rewards)
                learner.sync_weights()
                learner.train_step(1)
                yield workers[0]
                learner.close()
        finally:
            group.shutdown()
            context.lock.release()

    return run


def features(it):
    """Gives, for policy and critic each, checkpointing, and whether activations, parameters and optimizer rest on the host."""
    return [
        (
            {block.options.checkpoint for block in trained.model.blocks()},
            trained.offload is not None,
            trained.home is not None,
            isinstance(trained.optimizer, BucketedAdamW) and trained.optimizer._offload,
        )
        for trained in (it.policy.trained, it.critic.trained)
    ]


ON, OFF = ({"full"}, True, True, True), ({None}, False, False, False)


def changed(role, fsdp):
    """Gives the changes that turn every feature of one model off."""
    keys = (f"{role}.model.enable_gradient_checkpointing", f"{role}.model.enable_activation_offload")
    keys += (f"{fsdp}.fsdp_config.param_offload", f"{fsdp}.fsdp_config.optimizer_offload")
    return [f"{key}=false" for key in keys]


def test_every_feature_is_on_unless_the_command_line_says_otherwise(worker):
    with worker(f"{AR}.rollout.free_cache_engine=true") as it:
        assert features(it) == [ON, ON]
        assert (it.policy.trained.home.on_device, it.critic.trained.home.on_device) == (True, False)
        assert it.policy.model.head.chunk_tokens == 256
        assert (it.actor_cut, set(it.critic_cut)) == ([1], {1})
        it.release_engine()
        assert not it.engine._state.is_awake("weights")


def test_keys_of_the_policy_arrive_at_the_policy_alone(worker):
    """Each key is seen in a place of its own, so all are changed in one run."""
    own = [f"{AR}.actor.ppo_max_token_len_per_gpu=64", f"{AR}.model.logprob_chunk_tokens=7"]
    with worker(*changed(AR, f"{AR}.actor"), *own, f"{AR}.rollout.free_cache_engine=false") as it:
        assert features(it) == [OFF, ON]
        assert (max(it.actor_cut) > 1, set(it.critic_cut)) == (True, {1})
        assert it.policy.model.head.chunk_tokens == 7
        it.release_engine()
        assert it.engine._state.is_awake("weights")


def test_keys_of_the_critic_arrive_at_the_critic_alone(worker):
    with worker(*changed("critic", "critic.model"), "critic.ppo_max_token_len_per_gpu=64") as it:
        assert features(it) == [ON, OFF]
        assert (it.actor_cut, max(it.critic_cut) > 1) == ([1], True)


@pytest.mark.slow  # tests/rollout/test_vllm_settings.py holds in every run of the tests that the setting reaches the engine
def test_the_engines_memory(worker):
    with worker(f"{AR}.rollout.gpu_memory_utilization=0.37", local=LOCAL[:1]) as it:
        assert it.engine._llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization == 0.37
