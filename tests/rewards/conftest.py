"""Rows to score and files that score them."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_memopt.config.schema import CustomReward
from verl_memopt.rewards.score import RewardRow

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"


def rows(*solutions: str, source: str = "mine") -> list[RewardRow]:
    return [RewardRow(source, text, "4", {"index": i}, f"train.jsonl:{i + 1}") for i, text in enumerate(solutions)]


@pytest.fixture
def custom(tmp_path: Path) -> Callable[..., CustomReward]:
    def make(body: str, **settings: object) -> CustomReward:
        path = tmp_path / "reward.py"
        path.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    "))
        return CustomReward(path=str(path), **settings)  # type: ignore[arg-type]

    return make
