"""The checkpoint with the best value of a named metric is saved when it appears, kept, and found again after a resume."""

import json

import pytest

from tests.trainer.conftest import ready
from verl_memopt.errors import ConfigError
from verl_memopt.run.checkpoints import CheckpointStore, read_checkpoint

METRIC = "val-core/toy/arithmetic/reward/mean@1"
BEST = "trainer.keep_best_checkpoint"
VALIDATED = {"trainer.test_freq": 1, "trainer.save_freq": 100, "trainer.max_actor_ckpt_to_keep": 1, "data.val_max_samples": 3}


def logged(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[METRIC] for row in rows if METRIC in row}


def record(folder):
    return json.loads((folder / "training.json").read_text())


@pytest.mark.parametrize(("metric", "choose"), [(METRIC, max), (f"min:{METRIC}", min)])
def test_the_best_step_of_a_run_and_its_resume_is_kept_and_is_a_model(settled, tmp_path, metric, choose):
    for steps in (3, 5):
        with ready(settled(VALIDATED | {BEST: metric, "trainer.total_training_steps": steps})) as trainer:
            trainer.run()
        scores = logged(tmp_path / "run")
        best = trainer.context.store.best()
        assert list(scores) == list(range(1, steps + 1))
        assert scores[best] == choose(scores.values())
        read_checkpoint(tmp_path / "run" / f"global_step_{best}")
        assert (record(tmp_path / "run" / "model_best")["step"], record(tmp_path / "run" / "model")["step"]) == (best, steps)
        assert {best, steps} <= set(trainer.context.store.steps())


def test_a_metric_that_the_validation_does_not_have_is_refused_at_the_first_one_with_those_it_has(settled):
    with ready(settled(VALIDATED | {BEST: "val/los", "trainer.val_before_train": True})) as trainer:
        with pytest.raises(ConfigError, match=rf"{BEST}=val/los: .*{METRIC}"):
            trainer.run()
        assert trainer.step == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({BEST: METRIC}, "trainer.test_freq"),
        ({BEST: METRIC, "trainer.test_freq": 1, "data.val_files": None}, "data.val_files"),
        ({BEST: METRIC, "trainer.test_freq": 1, "trainer.keep_best": False}, "trainer.keep_best=false"),
        ({BEST: "min:", "trainer.test_freq": 1}, "name of a validation metric"),
    ],
)
def test_a_key_that_could_keep_nothing_is_refused_before_the_run(settled, more, named):
    with pytest.raises(ConfigError) as refused:
        settled(more)
    assert BEST in str(refused.value)
    assert named in str(refused.value)


def save(store, step, score):
    (store.begin(step) / "shard").write_bytes(b"x")
    store.commit(step, {}, 1, score=score)


def test_less_is_better_after_min_and_the_direction_is_read_from_disk(tmp_path):
    store = CheckpointStore(tmp_path, 1, True, "min:val/loss")
    assert store.is_better(0.5)
    save(store, 1, 0.5)
    assert [store.is_better(score) for score in (0.4, 0.5, 0.6, float("nan"), None)] == [True, False, False, False, False]
    save(store, 2, 0.4)
    save(store, 3, 0.6)
    store.prove(3)
    assert store.steps() == [2, 3]
    assert CheckpointStore(tmp_path, None).best() == 2


def test_scores_of_another_metric_are_not_compared(tmp_path):
    save(CheckpointStore(tmp_path, None), 1, 100.0)
    named = CheckpointStore(tmp_path, None, True, "val/acc")
    assert named.is_better(0.1)
    save(named, 2, 0.1)
    assert (named.best(), named.is_better(0.05), CheckpointStore(tmp_path, None).best()) == (2, False, 2)
