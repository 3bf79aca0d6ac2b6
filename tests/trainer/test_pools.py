"""A critic and a reward model on devices of their own: the numbers of shared devices, under Ray with CPU workers."""

import csv
import json

import pytest

from tests.critics import with_value_head
from tests.trainer.conftest import AR, LEAST, learned, ready
from tests.trainer.test_several_ranks import assert_same_steps
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.worker.ray_cluster import Connection, Request

SLOW = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    connection = Connection({"num_cpus": 8}, Request(1, 1, gpu=False))
    yield
    connection.close()


@pytest.fixture(scope="module")
def ppo(run_files, untied_folder, tmp_path_factory):
    """Keys of a PPO run whose reward is that of a model."""
    valued = str(with_value_head(untied_folder, tmp_path_factory.mktemp("valued")))
    both = {"model.fsdp_config.dtype": "fp32", "model.path": valued}
    critic = {"ppo_max_token_len_per_gpu": 40, **both}
    scorer = {
        "enable": True, "model.input_tokenizer": None, "use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 40, **both
    }  # fmt: skip
    files = {key: value for key, value in run_files.items() if key != "custom_reward_function.path"}
    return {
        **LEAST, **files, "data.val_files": None, f"{AR}.rollout.n": 4, "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True, "trainer.val_before_train": False, "trainer.total_training_steps": 3,
        **{f"critic.{key}": value for key, value in critic.items()},
        **{f"reward_model.{key}": value for key, value in scorer.items()},
    }  # fmt: skip


def pools(**devices):
    """Returns the keys of pools with so many devices."""
    own = {f"{role}.enable_resource_pool": True for role in devices}
    own |= {f"{role}.n_gpus_per_node": number for role, number in devices.items()}
    return {"trainer.worker_group": "ray", **own}


def run(values, run_dir, **more):
    with ready(settings_from_mapping({**values, "trainer.default_local_dir": str(run_dir), **more})) as trainer:
        trainer.run()
    return learned(run_dir)


def resumed_from(folder):
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(folder / "global_step_2")}


def test_roles_on_devices_of_their_own_take_the_same_steps_bit_for_bit_and_compute_beside_the_policy(ppo, tmp_path, caplog):
    caplog.set_level("INFO", "verl_memopt.worker.nodes")
    saving = {**ppo, "trainer.save_freq": 2, "trainer.track_memory_every_steps": 1}
    shared, own_dir = run(ppo, tmp_path / "shared"), tmp_path / "own"
    assert run({**saving, **pools(critic=1, reward_model=1)}, own_dir) == shared
    assert run({**ppo, **resumed_from(own_dir)}, tmp_path / "resumed")[-1] == shared[-1], "resumed on shared devices"
    places = [text for text in caplog.messages if "rank 0: " in text]
    assert [text.partition(",")[0] for text in places] == ["policy", "critic", "reward_model"]
    row = [json.loads(line) for line in (own_dir / "metrics.jsonl").read_text().splitlines()][1]
    for role in ("critic", "reward_model"):
        assert {f"timing_s/waiting_for_{role}", f"timing_s/idle_{role}"} <= row.keys()
    assert all(row[f"memory/{phase}/peak_allocated_gb"] > 0 for phase in ("values", "update_critic", "reward", "update_actor"))
    with (own_dir / "memory_timeline.csv").open() as file:
        rows = [(float(line["timestamp"]), line["phase"]) for line in csv.DictReader(file) if line["step"] == "2"]
    began = {phase: at for at, phase in sorted(rows, reverse=True)}  # the first of a phase counts
    # Each is told to begin before the policy is, so it computes while the policy does.
    assert began["reward"] < began["values"] < began["old_log_prob"] < began["ref"] < began["adv"]
    assert began["update_critic"] < began["update_actor"]
    assert {"save_checkpoint", "save_checkpoint_critic"} <= began.keys()


PLACES = {
    "two policies, one critic, two reward models": (2, {"critic": 1, "reward_model": 2}),
    "one policy, two critics and a shared reward model": (1, {"critic": 2}),
    "two critics that share tokens": (1, {"critic": 2, "critic_sharing": 2}),
}


@SLOW
@pytest.mark.parametrize("name", PLACES)
def test_any_number_of_devices_of_each_role_takes_the_five_steps_of_one(ppo, tmp_path, name):
    policies, own = PLACES[name]
    sharing = own.get("critic_sharing", 1)
    five = {**ppo, "trainer.total_training_steps": 5}
    run(five, tmp_path / "shared")
    devices = pools(**{role: number for role, number in own.items() if role != "critic_sharing"})
    size = {"critic.model.fsdp_config.ulysses_sequence_parallel_size": sharing}
    run({**five, **devices, **size, "trainer.n_gpus_per_node": policies}, tmp_path / "own")
    assert_same_steps(tmp_path / "own", tmp_path / "shared", range(1, 6))


@SLOW
def test_a_critics_knobs_work_on_devices_of_its_own_and_a_function_reads_the_models_score(ppo, run_files, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return extra_info['rm_score'] / 2"
    )
    model = {"lora_rank": 4, "lora_alpha": 8, "enable_activation_offload": True, "enable_gradient_checkpointing": True}
    fsdp = {"fsdp_config.param_offload": True, "fsdp_config.optimizer_offload": True}
    keys = {f"critic.model.{key}": value for key, value in {**model, **fsdp}.items()}
    keys |= {"custom_reward_function.path": str(reward), "algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2}
    shared = run({**ppo, **keys}, tmp_path / "shared")
    assert run({**ppo, **keys, **pools(critic=1, reward_model=1)}, tmp_path / "own") == shared
