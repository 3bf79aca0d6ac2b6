"""What a run tells a listener, and what a listener can ask of it."""

import pytest

from tests.end_to_end.runs import LOCAL, RECIPES, metrics, settings_of
from tests.trainer.conftest import ready
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError
from verl_memopt.trainer.listener import EarlyStopping, Progress, at_steps


def steps_heard(toy, run_dir, listener, *overrides):
    """Takes the steps of a run that a listener hears."""
    quick = ["trainer.track_memory_every_steps=0", "trainer.logger=[jsonl]", "data.val_max_samples=4", "data.train_batch_size=4"]
    mini = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    arguments = [*settings_of(toy, run_dir)[:-1], *LOCAL, *quick, *mini, *overrides]
    with ready(load_settings("toy", arguments, RECIPES), listener=listener) as trainer:
        trainer.run()
    return metrics(run_dir)


def test_a_listener_hears_every_moment_and_can_validate_save_and_stop(toy, tmp_path):
    heard = []

    def listen(progress):
        heard.append((progress.moment, progress.step))
        if progress.moment == "step":
            assert len(progress.result.answers.texts) == len(progress.result.results) == 8
            progress.validate = progress.step == 1
        progress.save = progress.moment == "logged" and progress.step == 1
        if progress.moment == "validated":
            assert len(progress.validation.answers[0][1]) == 4
        progress.stop = progress.moment == "logged" and progress.metrics["training/global_step"] == 2

    never = ["trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false"]
    rows = steps_heard(toy, tmp_path, listen, "trainer.total_training_steps=5", *never)
    assert heard == [
        ("begin", 0), ("step_begin", 1), ("step", 1), ("logged", 1), ("validated", 1), ("saved", 1),
        ("step_begin", 2), ("step", 2), ("logged", 2), ("end", 2),
    ]  # fmt: skip
    assert list(rows) == [1, 2]
    assert [any(name.startswith("val-core/") for name in row) for row in rows.values()] == [True, False]
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    assert (tmp_path / "model" / "config.json").is_file(), "a run that is stopped so leaves its model"


def test_a_run_without_validation_ends_early_with_a_checkpoint_where_it_saves(toy, tmp_path):
    def stop(progress):
        progress.stop = True

    off = ["trainer.test_freq=-1", "trainer.save_freq=3", "trainer.val_before_train=false"]
    rows = steps_heard(toy, tmp_path, at_steps(stop), "trainer.total_training_steps=5", *off)
    assert list(rows) == [1]
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]


def test_on_step_can_validate_the_next_step_and_is_told_where_there_are_no_rows(toy, tmp_path):
    def validate(progress):
        progress.validate = progress.step == 1

    never = ["trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.total_training_steps=3"]
    rows = steps_heard(toy, tmp_path / "rows", at_steps(validate), *never)
    assert [any(name.startswith("val-core/") for name in row) for row in rows.values()] == [False, True, False]
    with pytest.raises(ConfigError, match=r"^validate: the run has no held-out rows. Set data.val_files"):
        steps_heard(toy, tmp_path / "none", at_steps(validate), *never, "data.val_files=null")


@pytest.mark.parametrize(
    ("metric", "values", "stops"),
    [
        ("val/x", [0.1, 0.3, 0.3, 0.2], [False, False, False, True]),
        ("min:val/x", [0.3, 0.2, 0.25, 0.1], [False, False, False, False]),
        ("min:val/x", [0.3, 0.3, 0.3], [False, False, True]),
    ],
)
def test_early_stopping_ends_a_run_after_so_many_validations_without_a_better_one(metric, values, stops):
    stopping, asked = EarlyStopping(metric, patience=2), []
    for step, value in enumerate(values):
        progress = Progress("logged", step, 9, {"val/x": value})
        stopping(Progress("logged", step, 9, {"actor/lr": 1.0}))
        stopping(progress)
        asked.append(progress.stop)
    assert asked == stops


def test_early_stopping_names_the_metrics_there_are():
    with pytest.raises(ConfigError, match=r"^metric=val/y: the validation has no such metric. It has val/x"):
        EarlyStopping("val/y")(Progress("logged", 1, 9, {"val/x": 1.0}))
    with pytest.raises(ConfigError, match=r"^patience=0"):
        EarlyStopping("val/x", patience=0)
