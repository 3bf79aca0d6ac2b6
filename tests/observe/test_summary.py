"""The summary, against the run the fixture describes."""

from verl_memopt.observe.charts import build_summary, environment
from verl_memopt.observe.phase import MIB


def test_a_summary_holds_the_whole_runs_seconds_scores_and_peaks(make_run):
    folder = make_run(steps=3)
    summary = build_summary(folder.read_metrics(), folder.read_timeline())
    assert (summary["steps"], round(summary["seconds"], 3)) == (3, 9.0)
    assert (summary["validation_before"], summary["validation_after"]) == (0.05, 0.3)
    assert summary["phases"]["update_actor"] == {
        "seconds": 3.0, "count": 3, "peak_allocated_bytes": 13 * MIB, "peak_reserved_bytes": None, "device_used_bytes": None,
        "host_rss_bytes": 100 * MIB, "kinds": {"params": 13 * MIB},
    }  # fmt: skip
    assert summary["phases"]["gen"]["peak_allocated_bytes"] is None
    assert list(summary["phases"]) == ["gen", "update_actor"]


def test_scores_of_a_run_without_validation_are_none(make_run):
    folder = make_run(validated=False)
    summary = build_summary(folder.read_metrics(), folder.read_timeline())
    assert (summary["validation_before"], summary["validation_after"]) == (None, None)


def test_a_run_that_has_not_begun_has_a_summary_of_nothing():
    assert build_summary([], [])["steps"] == 0


def test_the_environment_names_device_command_and_installed_versions():
    found = environment("cpu", ["verl-memopt", "train"])
    assert (found["device"], found["command"]) == ("cpu", ["verl-memopt", "train"])
    assert "torch" in found["versions"]
    assert None not in found["versions"].values()


def test_skipped_updates_are_counted_over_the_whole_run():
    rows = [{"step": 0}, {"step": 1, "actor/skipped_updates": 2.0}, {"step": 2, "actor/skipped_updates": 0.0}]
    assert build_summary([*rows, {"step": 3, "actor/skipped_updates": 1.0}], [])["skipped_updates"] == 3
    assert build_summary([*rows, {"step": 3, "critic/skipped_updates": 4.0}], [])["skipped_updates"] == 6
