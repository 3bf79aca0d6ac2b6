import csv
import dataclasses
import json
import logging

import pytest

from tests.trainer.conftest import memory
from verl_memopt.data.dataset import PromptRow
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.run.checkpoints import Checkpoint
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.reporter import Reporter, samples_of
from verl_memopt.trainer.rollouts import RowAnswers
from verl_memopt.trainer.step import StepResult
from verl_memopt.trainer.validate import Validation

GIB = 2**30


@pytest.fixture
def report(settled):
    """Return a function that opens the reporter of a run with some settings; each is closed at the end."""
    opened = []

    def build(more=None, checkpoint=None):
        context = build_run(settled({"trainer.table_every_steps": 2} | (more or {})))
        opened.append(Reporter(dataclasses.replace(context, checkpoint=checkpoint), PhaseClock()).__enter__())
        return opened[-1]

    yield build
    for reporter in opened:
        reporter.__exit__(None, None, None)


def answers_of(count):
    rows = [PromptRow(index, f"{index}=", "toy/arithmetic", f"truth {index}", {}, "") for index in range(count)]
    generation = Generation([[30 + index] for index in range(count)], None, ["stop"] * count)
    results = [RewardResult(index / 10, {"length": index}) for index in range(count)]
    return RowAnswers(rows, [[index] for index in range(count)], generation, [f"text {index}" for index in range(count)]), results


def result_of(count=6, **metrics):
    return StepResult(metrics, *answers_of(count), response_tokens=10, total_tokens=40)


def validation_of(score):
    return Validation({"val-core/toy/arithmetic/reward/mean@1": score}, [answers_of(2), answers_of(1)])


def finish_step(reporter, step, validation=None, epoch=0, **metrics):
    with reporter.clock.phase("step"), reporter.clock.phase("gen"):
        pass
    reporter.step(step, epoch, result_of(**metrics), validation, [memory("gen", peak_allocated_bytes=GIB)])


def finish_save(reporter, step):
    with reporter.clock.phase("save_checkpoint"):
        pass
    reporter.saved(step, [memory("save_checkpoint", host=2 * GIB)])


def logged(reporter, name="metrics.jsonl"):
    path = reporter.folder.path / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timeline(reporter):
    with (reporter.folder.path / "memory_timeline.csv").open() as file:
        return [(int(row["step"]), row["phase"]) for row in csv.DictReader(file)]


def test_a_step_is_one_row_with_its_metrics_times_memory_and_validation(report):
    reporter = report()
    finish_step(reporter, 1, validation_of(0.25), epoch=3, **{"actor/loss": 0.5})
    (row,) = logged(reporter)
    assert (row["step"], row["training/global_step"], row["training/epoch"], row["actor/loss"]) == (1, 1.0, 3.0, 0.5)
    assert row["val-core/toy/arithmetic/reward/mean@1"] == 0.25
    assert row["memory/gen/peak_allocated_gb"] == 1.0
    assert row["perf/total_num_tokens"] == 40.0
    assert row["perf/throughput"] == pytest.approx(40 / row["timing_s/step"])
    assert row["timing_per_token_ms/gen"] == pytest.approx(1000 * row["timing_s/gen"] / 10)


def test_a_save_is_logged_with_the_step_that_follows_and_lies_on_the_timeline_of_its_own(report):
    reporter = report()
    finish_step(reporter, 1)
    finish_save(reporter, 1)
    finish_step(reporter, 2)
    finish_step(reporter, 3)
    rows = logged(reporter)
    assert ["timing_s/save_checkpoint" in row for row in rows] == [False, True, False]
    assert [row.get("memory/save_checkpoint/host_rss_gb") for row in rows] == [None, 2.0, None]
    assert rows[1]["perf/cpu_memory_used_gb"] == pytest.approx(1 / GIB)  # of its own phases alone
    assert timeline(reporter) == [(1, "gen"), (1, "save_checkpoint"), (2, "gen"), (3, "gen")]


def test_the_validation_of_the_first_weights_is_a_row_of_its_own(report):
    reporter = report()
    with reporter.clock.phase("init"):
        pass
    reporter.first_validation(0, validation_of(0.5), [memory("init", peak_allocated_bytes=3 * GIB)])
    finish_step(reporter, 1)
    first, second = logged(reporter)
    assert (first["step"], first["val-core/toy/arithmetic/reward/mean@1"]) == (0, 0.5)
    assert first["memory/init/peak_allocated_gb"] == 3.0
    assert "timing_s/init" in first
    assert "timing_s/init" not in second
    assert timeline(reporter) == [(0, "init"), (1, "gen")]


def test_a_start_without_a_validation_is_no_part_of_the_first_step(report):
    reporter = report()
    for phase in ("init", "update_weights"):
        with reporter.clock.phase(phase):
            pass
    reporter.started(0, [memory("init"), memory("update_weights")])
    finish_step(reporter, 1)
    (row,) = logged(reporter)
    assert {"timing_s/init", "timing_s/update_weights", "memory/init/host_rss_gb"}.isdisjoint(row)
    assert timeline(reporter) == [(0, "init"), (0, "update_weights"), (1, "gen")]


def test_samples_hold_prompt_answer_truth_and_what_the_reward_said():
    first, second = samples_of(*answers_of(2))
    assert (first.uid, first.input, first.output, first.gts, first.score) == ("0", "0=", "text 0", "truth 0", 0.0)
    assert (second.prompt_ids, second.response_ids, second.extra) == ([1], [31], {"length": 1})


def test_some_samples_are_kept_with_each_table(report):
    reporter = report()
    for step in (1, 2, 3, 4):
        finish_step(reporter, step)
    shown = [(row["step"], row["uid"]) for row in logged(reporter, "generations.jsonl")]
    assert shown == [(step, str(uid)) for step in (2, 4) for uid in range(4)]


def test_dumps_hold_every_sample_of_every_step_and_as_many_validation_samples_are_shown_as_asked_for(report, tmp_path):
    folders = {"trainer.rollout_data_dir": str(tmp_path / "train"), "trainer.validation_data_dir": str(tmp_path / "val")}
    reporter = report(folders | {"trainer.log_val_generations": 2})
    reporter.first_validation(0, validation_of(0.5), [])
    finish_step(reporter, 1)
    finish_step(reporter, 2, validation_of(0.5))
    files = {path.relative_to(tmp_path) for folder in ("train", "val") for path in (tmp_path / folder).iterdir()}
    assert {str(path) for path in files} == {"train/1.jsonl", "train/2.jsonl", "val/0.jsonl", "val/2.jsonl"}
    assert len((tmp_path / "train" / "1.jsonl").read_text().splitlines()) == 6
    assert len((tmp_path / "val" / "0.jsonl").read_text().splitlines()) == 3
    assert [row["output"] for row in logged(reporter, "generations.jsonl")[:2]] == ["text 0", "text 1"]
    assert [row["step"] for row in logged(reporter, "generations.jsonl")] == [0, 0, *[2] * 6]


def test_a_resumed_run_drops_the_rows_beyond_its_checkpoint(report, tmp_path):
    first = report()
    for step in (1, 2, 3):
        finish_step(first, step)
    second = report(checkpoint=Checkpoint(tmp_path / "run" / "global_step_2", 2, {"seed": 7, "loader": {}}))
    finish_step(second, 3)
    assert [row["step"] for row in logged(second)] == [1, 2, 3]
    assert timeline(second) == [(1, "gen"), (2, "gen"), (3, "gen")]


def test_a_validation_alone_leaves_the_record_of_the_run_as_it_is(report, tmp_path):
    run = report()
    for step in (1, 2, 3):
        finish_step(run, step)
    before = {path.name: path.read_bytes() for path in run.folder.path.iterdir() if path.is_file()}
    alone = report({"trainer.val_only": True}, Checkpoint(tmp_path, 2, {"seed": 7, "loader": {}}))
    alone.first_validation(2, validation_of(0.5), [])
    assert {path.name: path.read_bytes() for path in run.folder.path.iterdir() if path.is_file()} == before
    assert [(row["step"], row["val-core/toy/arithmetic/reward/mean@1"]) for row in logged(alone)] == [(2, 0.5)]


def test_the_end_writes_the_summary_and_charts_and_prints_the_folder_last(report, capsys):
    reporter = report()
    reporter.first_validation(0, validation_of(0.25), [])
    finish_step(reporter, 1, validation_of(0.75))
    reporter.finish()
    summary = json.loads((reporter.folder.path / "summary.json").read_text())
    assert (summary["steps"], summary["validation_before"], summary["validation_after"]) == (1, 0.25, 0.75)
    assert (summary["device"], "torch" in summary["versions"]) == ("cpu", True)
    assert "train_batch_size: 4" in (reporter.folder.path / "config.yaml").read_text()
    assert (reporter.folder.path / "reward_and_validation.png").stat().st_size > 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == str(reporter.folder.path)


def test_a_warning_is_logged_and_stands_in_the_summary(report, caplog, capsys):
    reporter = report()
    reporter.warn(1, [])
    with caplog.at_level(logging.WARNING):
        reporter.warn(2, ["the reward fell"])
    assert [record.getMessage() for record in caplog.records] == ["step 2: the reward fell"]
    finish_step(reporter, 2)
    reporter.finish()
    assert reporter.folder.read_summary()["warnings"] == [{"step": 2, "warning": "the reward fell"}]
    assert "WARNING, step 2: the reward fell" in capsys.readouterr().out
