import csv
import json

import pytest

from tests.end_to_end.runs import LOCAL, lines_of, metrics, succeeded, train


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    """Six steps with everything a run can leave behind."""
    run_dir = tmp_path_factory.mktemp("run") / "out"
    process = train(
        toy, run_dir, *LOCAL,
        "trainer.total_training_steps=6", "trainer.test_freq=3", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=2",
        "trainer.track_memory_every_steps=10",
        "trainer.logger=[console,jsonl,tensorboard]", "trainer.table_every_steps=3",
        f"trainer.rollout_data_dir={run_dir}/rollouts", f"trainer.validation_data_dir={run_dir}/validations",
    )  # fmt: skip
    return succeeded(process), run_dir


def test_the_summary_says_steps_seconds_validation_and_phases(run):
    summary = json.loads((run[1] / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["seconds"] > 0
    assert summary["validation_before"] <= 0.5 < summary["validation_after"]
    for name in ("init", "gen", "update_actor", "update_weights", "testing", "save_checkpoint"):
        phase = summary["phases"][name]
        assert phase["seconds"] > 0
        assert phase["peak_allocated_bytes"] > 0
        assert phase["host_rss_bytes"] > 0


def test_every_step_is_logged_with_verls_names(run):
    rows = metrics(run[1])
    assert list(rows) == [0, 1, 2, 3, 4, 5, 6]
    expected = {
        "training/global_step", "actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/ppo_kl", "critic/score/mean",
        "critic/rewards/mean", "critic/advantages/mean", "response_length/mean", "prompt_length/mean", "timing_s/step",
        "timing_s/gen", "perf/throughput", "perf/total_num_tokens", "rollout/logprob_diff_mean", "rollout/logprob_diff_max",
        "memory/update_actor/peak_allocated_gb",
    }  # fmt: skip
    assert expected <= rows[2].keys()
    assert "val-core/toy/arithmetic/reward/mean@1" in rows[0]
    assert "timing_s/save_checkpoint" in rows[3]
    # Engine and trainer agree, and no device figure is made up on a CPU.
    assert all(row["rollout/logprob_diff_max"] <= 1e-4 for step, row in rows.items() if step > 0)
    assert not [name for row in rows.values() for name in row if "reserved" in name or "device_used" in name]


def test_the_run_folder_holds_settings_timeline_samples_and_charts(run):
    run_dir = run[1]
    charts = (f"{name}.png" for name in ("reward_and_validation", "peak_memory_by_phase", "memory_timeline"))
    for name in ("config.yaml", "generations.jsonl", *charts):
        assert (run_dir / name).stat().st_size > 0, name
    with (run_dir / "memory_timeline.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["phase"] for row in rows} >= {"init", "gen", "reward", "adv", "update_actor", "update_weights"}
    assert list((run_dir / "tensorboard").glob("events*"))


def test_dumps_hold_every_sample(run):
    rollouts = lines_of(run[1] / "rollouts" / "4.jsonl")
    assert len(rollouts) == 32 * 8
    names = {"input", "output", "gts", "score", "step", "uid", "data_source", "prompt_ids", "response_ids", "schema"}
    assert names <= rollouts[0].keys()
    assert len((run[1] / "validations" / "0.jsonl").read_text().splitlines()) == 128


def test_the_last_checkpoints_are_kept_and_no_others(run):
    assert sorted(path.name for path in run[1].glob("global_step_*")) == ["global_step_4", "global_step_6"]
    assert (run[1] / "latest_checkpointed_iteration.txt").read_text().strip() == "6"


def test_plain_output_has_a_line_a_step_a_summary_of_80_columns_and_the_run_folder_last(run):
    lines = run[0].stdout.rstrip().splitlines()
    assert lines[-1] == str(run[1])
    for step in range(1, 7):
        (line,) = [line for line in lines if line.startswith(f"step {step}/6 ")]
        assert ("peak_mib=" in line) == line.endswith("(bytes counted)")
    assert "\x1b" not in run[0].stdout
    assert max(len(line) for line in lines if "│" in line or "──" in line) <= 80
