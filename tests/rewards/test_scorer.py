"""How a reward process calls its function, and what it imports."""

import subprocess
import sys
from typing import Any

from verl_memopt.rewards.score import Limits
from verl_memopt.rewards.scorer import score_row

LIMITS = Limits(memory_gb=3, cpu_seconds=60, open_files=64)


def test_a_row_is_scored_by_name() -> None:
    def seen(**row: Any) -> dict[str, Any]:
        return {"score": 1, **row}

    expected = {"data_source": "s", "solution_str": "a", "ground_truth": 3, "extra_info": {"index": 0}}
    assert score_row(seen, LIMITS, 5, ("s", "a", 3, {"index": 0})) == (5, 1.0, expected, None)


def test_a_traceback_begins_in_the_users_function() -> None:
    def broken(**row: Any) -> float:
        raise KeyError(row["solution_str"])

    failed = score_row(broken, LIMITS, 0, ("source", "the response", "truth", {}))[3]
    assert failed is not None
    assert "in broken" in failed
    assert "in score_row" not in failed


def test_a_reward_process_imports_neither_torch_nor_an_engine() -> None:
    heavy = "('torch', 'vllm', 'ray', 'transformers')"
    program = f"import sys, verl_memopt.rewards.supervisor; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
