import csv
import json

import pytest

from tests.rlt import brief_toy, values_of
from tests.trainer.conftest import AR, learned
from verl_memopt.cli import train
from verl_memopt.config.debug_modes import MODES
from verl_memopt.config.keys import leaf_values, shown
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError, DataError, DeviceMemoryError
from verl_memopt.trainer.debug_run import debug_settings

NO_FILES = {"data.train_files": "???", "data.val_files": "???"}
"""The files of the data left out, as on a command line without them."""


def mode(name, **more):
    return {"debug.mode": name} | {key.replace("__", "."): value for key, value in more.items()}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def trains(settled):
    """Return a function that runs a command to its end."""

    def run(more):
        assert train(settled(more)) == 0

    return run


def phases(folder):
    with (folder / "memory_timeline.csv").open() as file:
        return {row["phase"] for row in csv.DictReader(file)}


def dump(folder):
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))}


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def test_generating_scoring_and_training_apart_is_the_first_step_of_a_run(trains, run_dir, tmp_path):
    trains({"trainer.default_local_dir": str(tmp_path / "whole"), "trainer.total_training_steps": 1})
    trains(mode("rollout_only", trainer__total_training_steps=None))
    trains(NO_FILES | mode("score_only"))
    trains(NO_FILES | mode("train_only") | {f"{AR}.rollout.skip_dump_dir": str(run_dir / "score_only" / "rollouts")})
    (whole,) = learned(tmp_path / "whole")
    (apart,) = learned(run_dir / "train_only")
    assert without(apart, "rollout/prefix_cache_hit_rate") == without(whole, "rollout/prefix_cache_hit_rate")
    assert phases(run_dir / "rollout_only") == {"init", "update_weights", "gen"}
    assert phases(run_dir / "score_only") == {"init", "reward", "old_log_prob"}
    assert phases(run_dir / "train_only") == {"init", "old_log_prob", "adv", "update_actor"}


def test_the_parts_of_a_step_of_rlt_are_the_step_too(tmp_path):
    """The student scores in ``score_only`` alone, between the log-probs of policy and reference."""
    toy, run_dir, apart = brief_toy(tmp_path / "toy"), tmp_path / "run", tmp_path / "apart"

    def run(folder, **more):
        changed = {key.replace("__", "."): value for key, value in more.items()}
        steps = {"trainer.total_training_steps": 1, "data.val_files": None}
        assert train(settings_from_mapping(values_of(toy, folder, steps | changed))) == 0

    run(run_dir)
    run(apart, debug__mode="rollout_only")
    run(apart, debug__mode="score_only", data__train_files="???")
    scored = str(apart / "score_only" / "rollouts")
    run(apart, debug__mode="train_only", data__train_files="???", actor_rollout_ref__rollout__skip_dump_dir=scored)
    run(apart, debug__mode="forge", data__train_files="???")
    (whole,), (scores,), (trained,) = (learned(folder) for folder in (run_dir, apart / "score_only", apart / "train_only"))
    by_student = {name for name in whole if name.startswith("rlt/")} - {name for name in whole if "second" in name}
    assert {name: scores[name] for name in by_student} == {name: whole[name] for name in by_student}
    compared = [name for name in trained if name not in by_student and name != "rollout/prefix_cache_hit_rate"]
    assert {name: trained[name] for name in compared} == {name: whole[name] for name in compared}
    assert trained["actor/grad_norm"] > 0
    assert not any(name.startswith("rlt/") for name in trained)
    (forged,) = learned(apart / "forge")
    assert forged["rlt/status/no_end_tag"] == 1.0, "a forged explanation is as long as it may be"
    assert "reward" in phases(apart / "score_only") & phases(apart / "forge")
    assert "reward" not in phases(apart / "rollout_only") | phases(apart / "train_only")


def test_a_dump_without_scores_gets_them_and_changes_in_nothing_else(trains, run_dir):
    trains(mode("rollout_only"))
    trains(NO_FILES | mode("score_only"))
    before, after = dump(run_dir / "rollouts"), dump(run_dir / "score_only" / "rollouts")
    assert before.keys() == after.keys() == {"1.jsonl", "2.jsonl"}
    for name, rows in before.items():
        assert {row["score"] for row in rows} == {None}
        assert [row | {"score": 0} for row in after[name]] == [row | {"score": 0} for row in rows]
        assert [row["score"] for row in after[name]] == [sum(map(ord, row["output"])) % 5 / 4 for row in rows]


def test_the_steps_after_a_checkpoint_are_replayed_as_they_were(trains, run_dir, tmp_path):
    more = {"trainer.total_training_steps": 4, "trainer.save_freq": 2, "trainer.rollout_data_dir": str(tmp_path / "dump")}
    trains(more | {"trainer.max_actor_ckpt_to_keep": None})
    path = run_dir / "global_step_2"
    trains(more | NO_FILES | mode("train_only", trainer__resume_mode="resume_path", trainer__resume_from_path=str(path)))
    whole, replayed = learned(run_dir), learned(run_dir / "train_only")
    assert [row["step"] for row in replayed] == [3, 4]
    unread = ("rollout/prefix_cache_hit_rate", "training/epoch")
    assert [without(row, *unread) for row in replayed] == [without(row, *unread) for row in whole[2:]]
    assert sorted(path.name for path in run_dir.glob("global_step_*")) == ["global_step_2", "global_step_4"]


def test_a_run_with_stored_responses_learns_what_the_run_that_stored_them_did(trains, run_dir, tmp_path):
    stored = {"trainer.rollout_data_dir": str(tmp_path / "dump")}
    trains(stored)
    trains(stored | {f"{AR}.rollout.skip_rollout": True, "trainer.default_local_dir": str(tmp_path / "again")})
    first, again = learned(run_dir), learned(tmp_path / "again")
    assert [without(row, "rollout/prefix_cache_hit_rate") for row in again] == [
        without(row, "rollout/prefix_cache_hit_rate") for row in first
    ]
    assert "update_weights" in phases(tmp_path / "again")


def test_stored_responses_to_other_prompts_are_refused(trains, tmp_path):
    stored = {"trainer.rollout_data_dir": str(tmp_path / "dump")}
    trains(stored)
    with pytest.raises(DataError, match=r"dump/1\.jsonl, row \d: it does not answer row \d of this step"):
        trains(stored | {f"{AR}.rollout.skip_rollout": True, "data.seed": 8, "trainer.resume_mode": "disable"})


def test_forged_rows_have_the_largest_lengths_and_go_through_every_phase(trains, run_dir):
    trains(NO_FILES | mode("forge", trainer__total_training_steps=None) | {f"{AR}.rollout.free_cache_engine": True})
    rows = learned(run_dir / "forge")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["prompt_length/min"], row["prompt_length/max"], row["response_length/min"]) == (12, 12, 4)
        assert row["actor/grad_norm"] > 0
    assert phases(run_dir / "forge") >= {"gen", "old_log_prob", "adv", "update_actor", "update_weights"}


def test_a_mode_that_runs_a_part_saves_and_moves_no_checkpoint(trains, run_dir):
    trains({"trainer.save_freq": 1, "trainer.rollout_data_dir": str(run_dir / "dump")})
    kept = sorted(path.name for path in run_dir.iterdir())
    trains(NO_FILES | mode("train_only", trainer__resume_mode="disable", trainer__save_freq=1) | {
        f"{AR}.rollout.skip_dump_dir": str(run_dir / "dump")
    })  # fmt: skip
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([*kept, "train_only"])


def test_two_deterministic_runs_without_a_seed_agree_in_every_bit(trains, tmp_path):
    for name in ("one", "two"):
        trains(mode("deterministic", data__seed=None) | {"trainer.default_local_dir": str(tmp_path / name)})
    assert learned(tmp_path / "one") == learned(tmp_path / "two")


def test_the_memory_of_each_phase_is_shown_after_every_step(trains, run_dir, capsys):
    trains(mode("memory"))
    rows = [json.loads(line) for line in (run_dir / "phase_memory.jsonl").read_text().splitlines()]
    for step in (1, 2):
        own = {row["phase"]: row for row in rows if row["step"] == step}
        assert own.keys() >= {"gen", "old_log_prob", "update_actor", "update_weights"}
        assert all(0 < row["enter_bytes"] <= row["peak_bytes"] for row in own.values())
    first, second = (row for row in rows if row["phase"] == "update_actor")
    born = first["exit_bytes"] - first["enter_bytes"]
    assert born > 100_000, "the optimizer's state"
    assert abs(second["exit_bytes"] - second["enter_bytes"]) < born / 100
    shown = capsys.readouterr().out
    assert shown.index("memory of step 1, MiB") < shown.index("memory of step 2, MiB")


def test_a_snapshot_is_written_when_memory_runs_out(settled, run_dir):
    with pytest.raises(DeviceMemoryError, match="out of device memory"):
        train(settled(mode("memory") | {"memory.device_limit_gb": 1.5e-3}))
    snapshot = json.loads((run_dir / "out_of_memory_rank0.json").read_text())
    assert {"params", "rollout weights"} <= {tensor["kind"] for tensor in snapshot["tensors"]}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_logs_each_setting_that_it_decides(settled, name, caplog):
    caplog.set_level("INFO")
    settings = settled(mode(name, trainer__total_training_steps=None))
    before, after = leaf_values(settings), leaf_values(debug_settings(settings))
    changed = [f"{key}={shown(after[key])}" for key in before if before[key] != after[key]]
    told = [message.removeprefix(f"debug.mode={name} sets ").split(", ") for message in caplog.messages]
    assert sorted(changed) == sorted(word for words in told for word in words)


def test_a_replay_needs_no_data_and_other_modes_do(settled):
    assert settled(NO_FILES | mode("train_only")).data.train_files is None
    with pytest.raises(ConfigError, match=r"data\.train_files: required"):
        settled(NO_FILES | mode("memory"))


def test_settings_of_a_training_run_stay_the_same_object():
    assert debug_settings(settings := Settings()) is settings
