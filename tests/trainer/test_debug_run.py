import csv
import json
import shutil

import pytest

from tests.rlt import brief_toy, settings_of
from tests.trainer.conftest import AR, LEAST, learned, ready
from verl_memopt.config.debug_modes import MODES
from verl_memopt.config.keys import leaf_values, shown
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError, DataError, DeviceMemoryError, RolloutError
from verl_memopt.rollout.hf_engine import HfEngine
from verl_memopt.trainer.main_ppo import train
from verl_memopt.trainer.replay import debug_settings

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
        with ready(settled(more)) as trainer:
            trainer.run()

    return run


def phases(folder):
    with (folder / "memory_timeline.csv").open() as file:
        return {row["phase"] for row in csv.DictReader(file)}


def dump(folder):
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))}


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


HIT_RATE = "rollout/prefix_cache_hit_rate"


@pytest.fixture(scope="module")
def whole(run_files, tmp_path_factory):
    """Two whole steps with every checkpoint and every response kept: the run folder, and the one with the responses."""
    root = tmp_path_factory.mktemp("whole")
    folders = {"trainer.default_local_dir": str(root / "run"), "trainer.rollout_data_dir": str(root / "dump")}
    kept = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": None}
    with ready(settings_from_mapping(LEAST | run_files | folders | kept)) as trainer:
        trainer.run()
    return root / "run", root / "dump"


def test_generating_scoring_and_training_apart_is_the_first_step_of_a_run(trains, run_dir, whole):
    """Scores are all that a dump gets."""
    trains(mode("rollout_only"))
    trains(NO_FILES | mode("score_only"))
    trains(NO_FILES | mode("train_only") | {f"{AR}.rollout.skip_dump_dir": str(run_dir / "score_only" / "rollouts")})
    assert without(learned(run_dir / "train_only")[0], HIT_RATE) == without(learned(whole[0])[0], HIT_RATE)
    assert phases(run_dir / "rollout_only") == {"init", "update_weights", "gen"}
    assert phases(run_dir / "score_only") == {"init", "reward", "old_log_prob"}
    assert phases(run_dir / "train_only") == {"init", "old_log_prob", "adv", "update_actor"}
    before, after = dump(run_dir / "rollouts"), dump(run_dir / "score_only" / "rollouts")
    assert before.keys() == after.keys() == {"1.jsonl", "2.jsonl"}
    for name, rows in before.items():
        assert {row["score"] for row in rows} == {None}
        assert [row | {"score": 0} for row in after[name]] == [row | {"score": 0} for row in rows]
        assert [row["score"] for row in after[name]] == [sum(map(ord, row["output"])) % 5 / 4 for row in rows]


def test_the_parts_of_a_step_of_rlt_are_the_step_too(tmp_path):
    """The student scores in ``score_only`` alone, between the log-probs of policy and reference."""
    toy, run_dir, apart = brief_toy(tmp_path / "toy"), tmp_path / "run", tmp_path / "apart"

    def run(folder, **more):
        changed = {key.replace("__", "."): value for key, value in more.items()}
        steps = {"trainer.total_training_steps": 1, "data.val_files": None}
        with ready(settings_of(toy, folder, steps | changed)) as trainer:
            trainer.run()

    run(run_dir)
    run(apart, debug__mode="rollout_only")
    run(apart, debug__mode="score_only", data__train_files="???")
    scored = str(apart / "score_only" / "rollouts")
    run(apart, debug__mode="train_only", data__train_files="???", actor_rollout_ref__rollout__skip_dump_dir=scored)
    run(apart, debug__mode="forge", data__train_files="???")
    (whole,), (scores,), (trained,) = (learned(folder) for folder in (run_dir, apart / "score_only", apart / "train_only"))
    by_student = {name for name in whole if name.startswith("rlt/")} - {name for name in whole if "second" in name}
    assert {name: scores[name] for name in by_student} == {name: whole[name] for name in by_student}
    compared = [name for name in trained if name not in by_student and name != HIT_RATE]
    assert {name: trained[name] for name in compared} == {name: whole[name] for name in compared}
    assert trained["actor/grad_norm"] > 0
    assert not any(name.startswith("rlt/") for name in trained)
    (forged,) = learned(apart / "forge")
    assert forged["rlt/status/no_end_tag"] == 1.0, "a forged explanation is as long as it may be"
    assert "reward" in phases(apart / "score_only") & phases(apart / "forge")
    assert "reward" not in phases(apart / "rollout_only") | phases(apart / "train_only")


def test_the_steps_after_a_checkpoint_are_replayed_as_they_were_and_nothing_is_saved(trains, tmp_path, whole):
    run, stored = (shutil.copytree(folder, tmp_path / folder.name) for folder in whole)
    kept = sorted(path.name for path in run.iterdir())
    goes_on = mode("train_only", trainer__resume_mode="resume_path", trainer__resume_from_path=str(run / "global_step_1"))
    trains(NO_FILES | goes_on | {"trainer.rollout_data_dir": str(stored), "trainer.save_freq": 1})
    (replayed,) = learned(run / "train_only")
    unread = (HIT_RATE, "training/epoch")
    assert without(replayed, *unread) == without(learned(run)[1], *unread)
    assert sorted(path.name for path in run.iterdir()) == sorted([*kept, "train_only"])


def test_a_run_with_stored_responses_learns_what_the_run_that_stored_them_did(trains, run_dir, whole):
    trains({"trainer.rollout_data_dir": str(whole[1]), f"{AR}.rollout.skip_rollout": True})
    first, again = learned(whole[0]), learned(run_dir)
    assert [without(row, HIT_RATE) for row in again] == [without(row, HIT_RATE) for row in first]
    assert "update_weights" in phases(run_dir)


def test_stored_responses_to_other_prompts_are_refused(trains, whole):
    with pytest.raises(DataError, match=r"dump/1\.jsonl, row \d: it does not answer row \d of this step"):
        trains({"trainer.rollout_data_dir": str(whole[1]), f"{AR}.rollout.skip_rollout": True, "data.seed": 8})


def test_forged_rows_have_the_largest_lengths_and_go_through_every_phase(settled, run_dir):
    more = NO_FILES | mode("forge", trainer__total_training_steps=None) | {f"{AR}.rollout.free_cache_engine": True}
    assert train(settled(more)) == 0
    rows = learned(run_dir / "forge")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["prompt_length/min"], row["prompt_length/max"], row["response_length/min"]) == (12, 12, 4)
        assert row["actor/grad_norm"] > 0
    assert phases(run_dir / "forge") >= {"gen", "old_log_prob", "adv", "update_actor", "update_weights"}


def test_two_deterministic_runs_without_a_seed_agree_in_every_bit(trains, tmp_path):
    for name in ("one", "two"):
        trains(mode("deterministic", data__seed=None) | {"trainer.default_local_dir": str(tmp_path / name)})
    assert learned(tmp_path / "one") == learned(tmp_path / "two")


def test_a_checked_run_learns_what_an_unchecked_one_does(trains, run_dir, whole):
    trains(mode("sync_check"))
    assert learned(run_dir) == learned(whole[0])


def test_a_sync_to_the_wrong_place_ends_a_checked_run(trains, monkeypatch):
    load = HfEngine.load_weights

    def load_and_spoil(engine, weights):
        load(engine, weights)
        dict(engine._model.named_parameters())["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1

    monkeypatch.setattr(HfEngine, "load_weights", load_and_spoil)
    with pytest.raises(RolloutError, match=r"1 of the engine's weights differ .* such as model\.layers\.0\.self_attn\.q_proj"):
        trains(mode("sync_check"))


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


def test_a_replay_needs_no_data_and_settings_of_a_training_run_stay_the_same_object(settled):
    assert settled(NO_FILES | mode("train_only")).data.train_files is None
    with pytest.raises(ConfigError, match=r"data\.train_files: required"):
        settled(NO_FILES | mode("memory"))
    assert debug_settings(settings := Settings()) is settings
