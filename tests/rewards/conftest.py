import textwrap

import pytest

from verl_memopt.config.schema import CustomReward
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.score import RewardRow

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"


def rows(*solutions, source="mine"):
    return [RewardRow(source, text, "4", {"index": i}, f"train.jsonl:{i + 1}") for i, text in enumerate(solutions)]


def scored(settings, *solutions, num_workers=1, **more):
    """Return the results of rows with these responses, from a runner of their own."""
    with RewardRunner(settings, num_workers, **more) as runner:
        return runner.score(rows(*solutions))


@pytest.fixture
def custom(tmp_path):
    def make(body, head=HEAD, **settings):
        path = tmp_path / "reward.py"
        path.write_text(head + textwrap.indent(textwrap.dedent(body), "    "))
        return CustomReward(path=str(path), **settings)

    return make
