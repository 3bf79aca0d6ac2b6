import json
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.observe.test_loggers import WandbError, starting
from tests.trainer.conftest import learned
from verl_memopt.errors import DataError, RewardError
from verl_memopt.trainer.main_ppo import build_parser, train


def test_options_may_stand_before_between_and_after_overrides_and_have_defaults():
    parsed = build_parser("prog").parse_intermixed_args(["a=1", "--config-name", "toy", "b=2", "--config-path", "recipe"])
    assert (parsed.config_name, parsed.config_dir, parsed.overrides) == ("toy", "recipe", ["a=1", "b=2"])
    parsed = build_parser("prog").parse_args([])
    assert (parsed.config_name, parsed.config_dir, parsed.cfg) == ("ppo_trainer", None, None)


@pytest.fixture
def wandb_runs(monkeypatch):
    """The runs that wandb was asked for, by a stand-in."""
    runs = []
    stand_in = SimpleNamespace(init=starting(runs), Table=lambda columns, data: data, errors=SimpleNamespace(Error=WandbError))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return runs


BOTH = {"trainer.logger": ["jsonl", "wandb"], "trainer.test_freq": 2}


def test_a_run_ends_with_code_0_its_record_and_nothing_left_running(settled, tmp_path, capsys, wandb_runs):
    more = {"trainer.save_freq": 2, "trainer.val_before_train": True, "trainer.log_val_generations": 2}
    assert train(settled(BOTH | more)) == 0
    (run,) = wandb_runs
    assert run.end == 0
    assert [len(row["val/generations"]) for row in run.logged if "val/generations" in row] == [2, 2]
    run_dir = tmp_path / "run"
    assert [row["step"] for row in learned(run_dir)] == [0, 1, 2]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 2
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == str(run_dir)
    assert not dist.is_initialized()


STREAMED = """
from verl_memopt.data.dataset import PromptRow

class Once:
    def __init__(self, *arguments): self.rows = iter(range(10))
    def __iter__(self): return self
    def __next__(self):
        number = next(self.rows)
        return PromptRow(number, f"{number}+1=", "s", str(number + 1), {}, f"made:{number}")

class Wrong(Once):
    def __next__(self):
        row = super().__next__()
        return "no row" if row.index == 6 else row
"""


@pytest.mark.parametrize("name", ["Once", "Wrong"])
def test_a_stream_that_ends_early_or_breaks_leaves_what_was_learned(settled, tmp_path, capsys, name):
    (tmp_path / "rows.py").write_text(STREAMED)
    rows = {
        "data.custom_cls.path": str(tmp_path / "rows.py"),
        "data.custom_cls.name": name,
        "data.streaming": True,
        "data.val_files": None,
    }
    settings = settled({**rows, "data.shuffle": False, "trainer.total_training_steps": 9, "trainer.save_freq": 5})
    if name == "Once":
        assert train(settings) == 0
        assert "its 10 rows are used up" in capsys.readouterr().out
        assert (tmp_path / "run" / "model" / "config.json").is_file()
    else:
        with pytest.raises(DataError, match=r"Wrong: row 7: __iter__ yielded a str"):
            train(settings)
    steps = 2 if name == "Once" else 1
    assert [row["step"] for row in learned(tmp_path / "run")] == [1, 2][:steps]
    assert (tmp_path / "run" / f"global_step_{steps}").is_dir()


STOPPING = """
import os, signal
from verl_memopt.data.dataset import PromptDataset

class Rows(PromptDataset):
    reads = 0

    def __getitem__(self, index):
        if self._split == "val":
            self.reads += 1
            if self.reads - len(self) + 1 in (6, 7):  # the start reads every row once, a step all three of them
                os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)
"""


def test_a_second_signal_stops_at_once_and_still_leaves_the_record(settled, tmp_path, capsys):
    (tmp_path / "rows.py").write_text(STOPPING)
    rows = {"data.custom_cls.path": str(tmp_path / "rows.py"), "data.custom_cls.name": "Rows"}
    assert train(settled(rows | {"trainer.test_freq": 1, "trainer.total_training_steps": 4})) == 130
    assert [row["step"] for row in learned(tmp_path / "run")] == [1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    assert not list((tmp_path / "run").glob("global_step_*"))
    assert "stopped at once" in capsys.readouterr().out
    assert not dist.is_initialized()


def test_a_users_mistake_in_the_middle_says_where_the_record_lies_and_leaves_nothing_running(
    settled, tmp_path, capsys, wandb_runs
):
    (tmp_path / "reward.py").write_text("def compute_score(*args, **kwargs):\n    return 'much'\n")
    with pytest.raises(RewardError, match="not a number"):
        train(settled(BOTH | {"custom_reward_function.path": str(tmp_path / "reward.py")}))
    (run,) = wandb_runs
    assert (run.end, [row for row in run.logged if "val/generations" in row]) == (1, [])
    assert f"the record so far: {tmp_path / 'run'}" in capsys.readouterr().out
    assert not dist.is_initialized()
