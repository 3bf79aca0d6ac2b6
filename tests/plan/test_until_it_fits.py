"""Runs that do not fit a simulated device at first, and what ``--until-it-fits`` makes of them.

The slow table has a scenario for each phase that can be the first without room, in runs of many kinds, on devices that are a
little too small and much too small. Which sizes these are is measured in a run without a limit.
"""

import itertools
import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.rlt import brief_toy, values_of
from tests.trainer.conftest import AR, LEAST, ready, write_rows
from verl_memopt.cli import main
from verl_memopt.config.keys import shown
from verl_memopt.errors import DeviceMemoryError
from verl_memopt.memory.host_buffers import GIB
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.until_it_fits import Attempts, CommandLine, _checkpoints, everything, train_until_it_fits

ACTOR, MODEL, ROLLOUT = f"{AR}.actor", f"{AR}.model", f"{AR}.rollout"
RUN = {
    "data.max_response_length": 12,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ROLLOUT}.ignore_eos": True,
    f"{ROLLOUT}.n": 4,
    "trainer.track_memory_every_steps": 1,
    "trainer.save_freq": 2,
    "trainer.test_freq": 2,
    "trainer.logger": [],
    "trainer.resume_mode": "disable",
}
KL = {f"{ACTOR}.use_kl_loss": True, f"{AR}.ref.fsdp_config.dtype": "fp32"}
CRITIC = {
    "algorithm.adv_estimator": "gae",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    "critic.optim.lr": 1e-3,
    "critic.ppo_max_token_len_per_gpu": 4096,
    "critic.model.enable_gradient_checkpointing": False,
    "critic.model.fsdp_config.dtype": "fp32",
}
FEW = {f"{ROLLOUT}.max_num_seqs": 4}
PACKED = {f"{ACTOR}.ppo_max_token_len_per_gpu": 64}
ROWS = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16}
PASSES = {f"{AR}.{role}.log_prob_max_token_len_per_gpu": 4096 for role in ("rollout", "ref")}
ALWAYS = {f"{ACTOR}.old_log_prob_pass": "always"}


@pytest.fixture(scope="module")
def values(run_files, tmp_path_factory):
    """Returns a function of a kind of run that gives its keys."""
    folder = tmp_path_factory.mktemp("fits")
    small = str(make_tiny_model(folder / "small", TinyShape(vocab_size=1024), seed=1))
    train = {"data.train_files": write_rows(folder / "train.jsonl", 10)}
    least = LEAST | run_files | train | RUN | {f"{MODEL}.path": small}
    critic = CRITIC | {"critic.model.path": small}

    @cache
    def student():
        keys = RUN | {f"{ACTOR}.ppo_mini_batch_size": 2, "data.max_response_length": 24, "trainer.test_freq": -1}
        return values_of(brief_toy(folder / "rlt"), folder, keys | {f"{ROLLOUT}.n": 3, f"{ROLLOUT}.ignore_eos": False})

    kinds = {
        "rloo": lambda: least,
        "kl": lambda: least | KL,
        "ppo": lambda: least | KL | critic,
        "rlt": student,
        "lora": lambda: least | KL | {f"{MODEL}.lora_rank": 4},
        "lora, engine asleep": lambda: least | FEW | PACKED | {
            f"{MODEL}.lora_rank": 4, f"{ROLLOUT}.free_cache_engine": True, f"{MODEL}.enable_gradient_checkpointing": True
        },
        "rows": lambda: least | KL | ROWS | ALWAYS,
        "validation": lambda: least | {f"{ROLLOUT}.val_kwargs.n": 16, "trainer.val_before_train": True},
        "values": lambda: least | critic | FEW | PACKED | {
            "critic.ppo_max_token_len_per_gpu": 64, "critic.forward_max_token_len_per_gpu": 4096
        },
        "log-probs": lambda: least | KL | FEW | PACKED | PASSES | ALWAYS,
        "offloaded": lambda: least | KL | {
            f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True,
            f"{AR}.ref.fsdp_config.param_offload": True, f"{ROLLOUT}.free_cache_engine": True,
        },
    }  # fmt: skip
    return lambda kind: kinds[kind]()


def overrides(keys):
    return tuple(f"{key}={shown(value)}" for key, value in keys.items())


@pytest.fixture
def command(tmp_path):
    """Returns the command of some keys, which trains in a folder of this test."""

    def make(keys):
        keys = keys | {"trainer.default_local_dir": str(tmp_path / "run")}
        return CommandLine("verl-memopt train", "ppo_trainer", None, overrides(keys))

    return make


class Starts(list):
    """Trains in this process, and notes the settings of each start."""

    def __call__(self, settings):
        self.append(settings)
        with ready(settings) as trainer:
            trainer.run()
        return 0


def fitted(line):
    """Gives how many changes a run took, and the error with which it ended, None where it ran."""
    starts = Starts()
    try:
        assert train_until_it_fits(line, starts) == 0
    except DeviceMemoryError as error:
        return len(starts) - 1, str(error)
    return len(starts) - 1, None


def peaks(settings):
    """Gives (phase, peak bytes) of each call of a run, in their order; None where the settings are refused."""
    with ready(settings) as trainer:
        found = [(memory.name, memory.peak_allocated_bytes) for memory in trainer.workers._memories["init"]]
        begin = trainer.workers.begin

        def noted(phase, method, arguments):
            begun = begin(phase, method, arguments)  # in this process a call has ended when it has begun
            found.append((phase, trainer.workers.figures.peak_bytes or 0))
            return begun

        trainer.workers.begin = noted
        trainer.run()
    return found


def first_without_room(found, phase, nth):
    """Gives the sizes of a device, in bytes, between which a call of a phase is the first of a run that has no room.

    ``nth``: of the calls of the phase that need more than all before them.
    """
    high, ranges = 0, []
    for name, peak in found:
        if peak > high:
            ranges += [(high or peak // 2, peak)] if name == phase else []
            high = peak
    return ranges[nth]


TABLE = [
    *(("rloo", phase, nth) for phase, nth in (("init", 0), ("gen", 0), ("update_actor", 0), ("update_actor", 1))),
    *(("kl", phase, nth) for phase, nth in (("init", 0), ("gen", 0), ("ref", 0), ("update_actor", 0), ("update_actor", 1))),
    *(("ppo", phase, 0) for phase in ("init", "gen", "ref", "update_critic", "update_actor")),
    *(("rlt", phase, 0) for phase in ("init", "gen", "update_actor")),
    *(("lora", phase, 0) for phase in ("init", "gen", "ref", "update_actor")),
    *(("lora, engine asleep", phase, 0) for phase in ("init", "update_weights")),
    *(("rows", phase, 0) for phase in ("gen", "old_log_prob", "update_actor")),
    ("validation", "testing", 0),
    ("values", "values", 0),
    ("log-probs", "old_log_prob", 0),
    *(("offloaded", phase, 0) for phase in ("init", "update_actor")),
]
SIZES = {"much": 0.25, "little": 0.8}
"""How much is missing -> where the device's size lies between the two of :func:`first_without_room`."""


@pytest.fixture(scope="module")
def unlimited(values, tmp_path_factory):
    """Returns the calls of a kind of run without a limit."""

    @cache
    def measured(kind):
        line = CommandLine("", "ppo_trainer", None, overrides(values(kind)))
        return peaks(line.having({"trainer.default_local_dir": str(tmp_path_factory.mktemp("unlimited"))}).settings())

    return measured


GROUPS = (
    ("enable_gradient_checkpointing", "enable_activation_offload"),
    ("tiled_mlp",),
    ("param_offload", "optimizer_offload", "bucket_megabytes"),
    ("free_cache_engine", "logprob_"),
    ("bfloat16", "rounding"),
)
"""Words of the knobs that the search switches together."""


@pytest.fixture(scope="module")
def least(values, tmp_path_factory):
    """Returns the least peak of a kind of run, in bytes, that a search by brute force finds.

    The search switches five groups of knobs in every combination, without a limit and with the smallest micro-batches.
    """

    @cache
    def searched(kind):
        folder = str(tmp_path_factory.mktemp("searched") / "run")
        start = CommandLine("", "ppo_trainer", None, overrides(values(kind) | {"trainer.default_local_dir": folder}))
        lossy = {key: value for key, value in everything(start.settings(), 1)[1][0].items() if value is not None}
        lossy |= {key: True for key in lossy if "tiled_mlp" in key}
        found = []
        for chosen in itertools.product((False, True), repeat=len(GROUPS)):
            off = [word for group, on in zip(GROUPS, chosen, strict=True) if not on for word in group]
            keys = {key: value for key, value in lossy.items() if not any(word in f"{key}={value}" for word in off)}
            smallest = {f"{ACTOR}.ppo_max_token_len_per_gpu": 24, f"{ROLLOUT}.max_num_seqs": 1}
            found.append(max(peak for _, peak in peaks(start.having(keys | smallest).settings())))
            shutil.rmtree(folder)
        return min(found)

    return searched


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "phase", "nth"), TABLE, ids=lambda value: str(value))
def test_the_advice_followed_at_most_three_times_ends_in_a_run(
    values, unlimited, least, command, record_property, kind, phase, nth, size
):
    """Or in that it cannot fit, where the search finds nothing that fits either."""
    low, high = first_without_room(unlimited(kind), phase, nth)
    limit = low + SIZES[size] * (high - low)
    line = command(values(kind) | {"memory.device_limit_gb": limit / GIB})
    with pytest.raises(DeviceMemoryError) as first:
        Starts()(line.settings())
    assert first.value.figures.phase == phase
    changes, error = fitted(line)
    record_property("changes", changes)
    record_property("ends", error or "runs")
    assert changes <= 3
    assert error is None or (error.startswith("cannot fit, because") and least(kind) > limit), error


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_cannot_fit_fits_under_no_choice_of_the_knobs(values, least, command):
    for share, fits in ((0.97, False), (1.1, True)):
        changes, error = fitted(command(values("kl") | {"memory.device_limit_gb": share * least("kl") / GIB}))
        assert changes <= 3
        assert (error is None) == fits, error
        assert fits or "cannot fit, because" in error


def limited(values, gigabytes, **more):
    return values("rloo") | {"trainer.save_freq": -1, "trainer.test_freq": -1, "memory.device_limit_gb": gigabytes, **more}


def test_a_run_that_cannot_fit_says_so_with_the_last_command(values, command):
    changes, error = fitted(command(limited(values, 0.0002)))
    assert changes <= 3
    assert error.startswith("cannot fit, because nothing is left that makes room: init: out of device memory")
    assert "fsdp_config.optimizer_offload=true" in error.partition("The last command was: ")[2]


def test_a_start_that_fails_after_a_checkpoint_goes_on_from_there(values, command):
    """The second step has optimizer state, for which there is no room. The command said to begin anew."""
    keys = limited(values, 0.0035, **{"trainer.save_freq": 1, "trainer.logger": ["jsonl"]})
    starts = Starts()
    assert train_until_it_fits(command(keys), starts) == 0
    assert [settings.trainer.resume_mode for settings in starts] == ["disable", "auto"]
    lines = (Path(str(starts[0].trainer.default_local_dir)) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def changed(line, changes=0, goes_on=False):
    """Gives the command after an error without advice, where some changes were made."""
    attempts = Attempts(line, changes, tiers=max(changes - 1, 0), searched=True)
    attempts.change(DeviceMemoryError("init: out of device memory"), line.settings(), goes_on)
    return attempts.line


def test_a_run_does_not_go_on_from_a_checkpoint_under_settings_that_change_numbers(values, command):
    line = command(limited(values, 1))
    assert changed(line, goes_on=True).settings().actor_rollout_ref.model.enable_gradient_checkpointing
    with pytest.raises(
        DeviceMemoryError,
        match=r"cannot continue with such settings: .* Start from the beginning: .* trainer.resume_mode=disable",
    ):
        changed(line, changes=2, goes_on=True)
    assert changed(line, changes=2).settings().actor_rollout_ref.actor.fsdp_config.model_dtype == "bfloat16"


def test_after_eight_changes_it_ends(values, command):
    with pytest.raises(DeviceMemoryError, match="it still does not fit after 8 changes: init"):
        changed(command(limited(values, 1)), changes=8)


def test_what_the_host_has_no_room_for_stays_on_the_device(values, command):
    offloaded = {f"{ACTOR}.fsdp_config.optimizer_offload": True, "memory.host_limit_gb": 0.0005}
    starts = Starts()
    assert train_until_it_fits(command(limited(values, 1, **offloaded)), starts) == 0
    assert [settings.actor_rollout_ref.actor.fsdp_config.optimizer_offload for settings in starts] == [True, False]


def test_the_command_line_option_ends_in_a_run_after_the_first_advice(values, tmp_path, capsys):
    settings = overrides(limited(values, 0.0035) | {"trainer.default_local_dir": str(tmp_path / "run")})
    assert main(["train", *settings]) == 1
    assert "Or add --until-it-fits to the command" in capsys.readouterr().err.splitlines()[-1]
    assert main(["train", "--until-it-fits", *settings]) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith(str(tmp_path / "run"))
    assert f"change 1 of at most 8: {ACTOR}.adaptive_token_budget=true. It costs: more, smaller" in shown.err
    assert "change 2" not in shown.err
    assert "with these settings it runs: verl-memopt train --config-name ppo_trainer" in shown.err


TOGETHER = re.compile(r"Together these make room: (.*?) \(they cost")
FIRST = re.compile(r"(?:set|lower) ([\w.]+(?:=| to )[\w.]*\w)")


def followed(line, message):
    """Gives the overrides once all that makes room together is set, else the first advice of a message, and what that is."""
    said = (TOGETHER.search(message) or FIRST.search(message))[1].replace(" to ", "=")
    keys = dict(advice.split("=", 1) for advice in said.split(" "))
    kept = [override for override in line if override.partition("=")[0] not in keys]
    return [*kept, *(f"{key}={value}" for key, value in keys.items())], said


@pytest.mark.parametrize("gigabytes", [pytest.param(0.0008, marks=pytest.mark.slow), 0.0016])
def test_what_the_error_prints_pasted_behind_the_command_ends_in_a_run(values, tmp_path, capsys, gigabytes):
    """Of what the error says the first thing counts, and of settings that make room together all."""
    line = list(overrides(limited(values, gigabytes) | {"trainer.default_local_dir": str(tmp_path / "run")}))
    for _ in range(3):
        assert main(["train", *line]) == 1
        line, _ = followed(line, capsys.readouterr().err.rpartition("MemoryError: ")[2])
        if main(["train", *line]) == 0:
            return
    pytest.fail(capsys.readouterr().err)


def test_the_error_of_a_full_host_names_what_stays_on_the_device(values, tmp_path, capsys):
    offloaded = {f"{ACTOR}.fsdp_config.optimizer_offload": True, "memory.host_limit_gb": 0.0005}
    line = list(overrides(limited(values, 1, **offloaded) | {"trainer.default_local_dir": str(tmp_path / "run")}))
    assert main(["train", *line]) == 2
    line, said = followed(line, capsys.readouterr().err.rpartition("MemoryError: ")[2])
    assert said == f"{ACTOR}.fsdp_config.optimizer_offload=false"
    assert main(["train", *line]) == 0


def test_a_change_takes_the_place_of_what_the_command_said_and_a_secret_is_not_shown():
    line = CommandLine("verl-memopt train", "toy", "recipe/rloo", ("a.b=1", "++c=[x, y]", "d=2"))
    assert line.having({"c": 3, "a.b": True}).overrides == ("d=2", "c=3", "a.b=true")
    assert str(line) == "verl-memopt train --config-dir recipe/rloo --config-name toy a.b=1 '++c=[x, y]' d=2"
    line = CommandLine("verl-memopt train", "toy", None, ("custom_reward_function.reward_kwargs.api_key='sk-4,2'", "d=2"))
    assert "sk-4" not in str(line)
    assert line.overrides[0].endswith("'sk-4,2'")
    assert str(line).endswith(" d=2")


def test_a_checkpoint_that_is_a_link_to_nowhere_is_one(tmp_path):
    (tmp_path / "global_step_3").symlink_to(tmp_path / "gone")
    assert {name for name, _ in _checkpoints(tmp_path)} == {"global_step_3"}


def test_settings_that_are_refused_beside_the_runs_own_are_left_out(values, command):
    """The state of an optimizer that is neither AdamW nor SGD cannot rest on the host; all else still changes."""
    line = changed(command(limited(values, 1, **{f"{ACTOR}.optim.optimizer": "RMSprop"})))
    assert not line.settings().actor_rollout_ref.actor.fsdp_config.optimizer_offload
    assert line.settings().actor_rollout_ref.actor.fsdp_config.param_offload


def sets(line):
    """Gives all settings that make room: those that change no number, those that do, and a GPU's last resort."""
    return [keys for keys, _ in everything(line.settings(), 0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is the CPU where there is no GPU")
def test_a_device_that_is_a_cpu_by_itself_gets_no_setting_of_a_gpu(values, command):
    """vLLM on a CPU refuses to sleep when it starts, so the run would end there."""
    same, lossy, last = sets(command(values("rloo") | {"trainer.device": "auto", f"{ROLLOUT}.name": "vllm"}))
    assert (same[f"{ROLLOUT}.free_cache_engine"], lossy[f"{ROLLOUT}.free_cache_engine"], last) == (None, None, {})


@pytest.mark.parametrize("sharing", [1, 2])
def test_several_devices_learn_their_budgets_unless_they_share_the_tokens_of_a_micro_batch(values, command, sharing):
    several = {"trainer.worker_group": "ray", "trainer.n_gpus_per_node": 2}
    shared = {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": sharing}
    assert (f"{ACTOR}.adaptive_token_budget" in sets(command(values("rloo") | several | shared))[0]) == (sharing == 1)


@pytest.mark.parametrize(("kind", "has_critic", "has_reference"), [("rloo", 0, 0), ("kl", 0, 1), ("ppo", 1, 1)])
def test_the_parts_that_a_run_does_not_have_are_not_set(values, command, kind, has_critic, has_reference):
    said = str(changed(command(values(kind))))
    assert ("critic.model.fsdp_config.param_offload=true" in said) == has_critic
    assert (f"{AR}.ref.fsdp_config.param_offload=stream" in said) == has_reference
    assert "reward_model.model" not in said
