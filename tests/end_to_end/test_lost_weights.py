"""A learning rate that is far too high: what a run says then, and that its advice works when it is followed."""

import json
import re

import pytest

from tests.end_to_end.runs import LOCAL, metrics, train_here

LR = "actor_rollout_ref.actor.optim.lr"
SHORT = [
    *LOCAL,
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.test_freq=4",
    "trainer.track_memory_every_steps=0",
    "actor_rollout_ref.rollout.n=4",
]
GOOD = "2e-4"


@pytest.fixture
def train(toy, tmp_path, capsys):
    """Trains the toy task in this process and gives the exit code and what was said."""

    def run(*overrides):
        capsys.readouterr()
        code = train_here(toy, tmp_path / "run", *SHORT, *overrides)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def advice(said):
    """Gives the settings that an error names, with a lower learning rate in the place it leaves for one."""
    (keys,) = re.findall(rf"(trainer\.resume_mode=.*{re.escape(LR)}=)<less than \S+>", said)
    return [*keys[: -len(LR) - 1].split(), f"{LR}={GOOD}"]


def summary_of(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_run_that_loses_its_weights_names_a_checkpoint_from_which_it_recovers(train, tmp_path):
    assert train("trainer.total_training_steps=3", f"{LR}={GOOD}")[0] == 0
    # Adam moves each weight by about the learning rate, so one step with this one is enough.
    code, said = train("trainer.total_training_steps=9", f"{LR}=1e10")
    assert code == 1
    assert "TrainingError: trainer.max_skipped_steps=3: steps" in said
    assert "Traceback" not in said
    # Step 4 began with the weights of step 3 and had a good gradient; its own update is the first bad one.
    assert "The checkpoint of step 3 is good" in said
    assert (tmp_path / "run" / "global_step_3").is_dir()
    code, said = train("trainer.total_training_steps=9", *advice(said))
    assert code == 0
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["skipped_updates"], summary["warnings"]) == (9, 0, [])
    assert summary["validation_after"] > summary["validation_before"] + 0.3
    assert sorted(metrics(tmp_path / "run")) == list(range(10))


def test_a_run_that_collapses_without_a_bad_number_says_so_at_its_end(train, tmp_path):
    code, said = train("trainer.total_training_steps=8", f"{LR}=1e2")
    assert code == 0
    warned = summary_of(tmp_path)["warnings"]
    assert [row["step"] for row in warned] == [4, 6]
    assert "the validation score is below its start: 0.000 (0.000) at step 4" in warned[0]["warning"]
    assert "the gradient has been exactly 0 for 5 steps" in warned[1]["warning"]
    for row in warned:
        assert said.count(f"WARNING, step {row['step']}: {row['warning']}") == 1
        assert said.count(row["warning"]) == 2  # in the log when it was found, and at the end
