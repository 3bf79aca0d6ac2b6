"""Tasks of reasoning-gym: its generated questions are the rows, and its verifiers give the reward.

The settings of a reasoning-gym dataset stand where others have a file::

    data.custom_cls.path=recipe/agent/reasoning_gym_tasks.py data.custom_cls.name=Tasks
    "data.train_files={name:chain_sum,size:1000,seed:1,max_digits:2}"
    custom_reward_function.path=recipe/agent/reasoning_gym_tasks.py custom_reward_function.name=score
"""

import json
from dataclasses import replace
from typing import Any

from verl_memopt.data.dataset import PromptReader, PromptRow
from verl_memopt.errors import DataError

ASK = "\n\nEnd with the answer alone in <answer></answer>."


class Tasks(list[PromptRow]):
    def __init__(self, files: Any, data: Any, tokenizer: Any, split: str) -> None:
        """``files``: a dict with the ``name`` of a reasoning-gym dataset and its settings."""
        address = f"data.{split}_files"
        try:
            import reasoning_gym
        except ImportError as problem:
            raise DataError(
                f"{address}: reasoning-gym cannot be imported ({problem}). Run pip install reasoning-gym."
            ) from problem
        if not isinstance(files, dict) or "name" not in files:
            raise DataError(f"{address}={files!r:.100}: give the dataset and its settings, such as {{name:chain_sum,size:1000}}.")
        try:
            tasks = list(reasoning_gym.create_dataset(**files))
        except (AssertionError, TypeError, ValueError) as problem:  # from its checks of the settings
            raise DataError(f"{address}={files}: reasoning-gym refuses it ({problem}). Correct the settings.") from problem
        raw = [(f"{address}: task {index}", _columns(files["name"], task)) for index, task in enumerate(tasks)]
        rows = PromptReader(data, tokenizer, split, by_rules=False).read(raw)
        super().__init__(replace(row, index=index) for index, row in enumerate(rows))


def _columns(name: str, task: dict[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": task["question"] + ASK}]
    return {"prompt": prompt, "data_source": name, "answer": task["answer"], "task": json.dumps(task, default=str)}


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Return the score of reasoning-gym's verifier, between 0 and 1."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    task = json.loads(extra_info["task"])
    answer = extract_answer(solution_str)
    return float(get_score_answer_fn(data_source)(solution_str.strip() if answer is None else answer, task))
