"""The files that the page on extending shows work as they are."""

import json
import re

import pytest

from tests.docs.pages import DOCS, blocks, commands
from tests.end_to_end.runs import LOCAL, metrics, succeeded, train

PAGE = DOCS / "extend.md"


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    """Two steps with the page's own reward, dataset, sampler, estimator and loss, given as the page's commands give them."""
    folder = tmp_path_factory.mktemp("extend")
    for text in blocks(PAGE, "python"):
        if (named := re.match(r"# (my_\w+\.py)\n", text)) is not None:
            (folder / named[1]).write_text(text)
    told = [override for command in commands(PAGE) for override in re.search(r'ARGS="(.*)"', command)[1].split()]
    overrides = [override.replace("=my_", f"={folder}/my_") for override in told if "experiment_name" not in override]
    assert sum("/my_" in override for override in overrides) == 5
    run_dir = folder / "run"
    short = ["trainer.total_training_steps=2", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    kept = [f"trainer.rollout_data_dir={run_dir}/rollouts", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    succeeded(train(toy, run_dir, *LOCAL, *short, *kept, *overrides))
    rows = [[json.loads(line) for line in (run_dir / "rollouts" / f"{step}.jsonl").read_text().splitlines()] for step in (1, 2)]
    return rows, metrics(run_dir)


def test_the_dataset_and_the_sampler_decide_which_rows_are_answered(run):
    sums = [f"{a}+{b}=" for a in range(1, 10) for b in range(1, 10)]
    answered = [list(dict.fromkeys(re.search(r"\d\+\d=", row["input"])[0] for row in rows)) for rows in run[0]]
    assert answered == [sums[0:8:2], sums[8:16:2]]


def test_the_reward_and_its_argument_decide_the_scores(run):
    rows = [row for step in run[0] for row in step]
    for row in rows:
        answer = row["output"].strip()
        assert row["score"] == (1.0 if answer == row["gts"] else 0.2 if answer.isdigit() else 0.0)
        assert row["pred"] == answer
    assert len({row["score"] for row in rows}) > 1


def test_the_estimator_and_the_loss_train(run):
    samples, rows = run
    for step, answers in zip((1, 2), samples, strict=True):
        assert rows[step]["actor/skipped_updates"] == 0
        groups = {}
        for answer in answers:
            groups.setdefault(answer["input"], []).append(answer["score"])
        medians = {prompt: sorted(scores)[(len(scores) - 1) // 2] for prompt, scores in groups.items()}
        leads = [score - medians[prompt] for prompt, scores in groups.items() for score in scores]
        assert (rows[step]["actor/grad_norm"] > 0) == any(leads), leads
        assert rows[step]["critic/advantages/max"] == pytest.approx(max(leads), abs=1e-6)
        assert rows[step]["critic/advantages/min"] == pytest.approx(min(leads), abs=1e-6)
    assert any(rows[step]["actor/grad_norm"] > 0 for step in (1, 2))
