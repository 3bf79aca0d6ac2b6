"""A reward from a judge: an OpenAI-compatible server on this machine grades each answer from 0 to 10.

    vllm serve Qwen/Qwen2.5-7B-Instruct --port 8000
    verl-memopt train ... custom_reward_function.path=examples/rewards/judge.py \
        custom_reward_function.reward_kwargs.url=http://127.0.0.1:8000/v1/chat/completions \
        custom_reward_function.reward_kwargs.model=Qwen/Qwen2.5-7B-Instruct
"""

import re

from verl_memopt.rewards.judge import Patience, ask_async

QUESTION = (
    "Reference answer:\n{truth}\n\nAnswer of a student:\n{answer}\n\n"
    "Grade the student's answer from 0 (wrong) to 10 (right and clear). Reply with the number alone."
)
PATIENCE = Patience(limit_seconds=45, attempt_seconds=20, attempts=4)


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, url, model):
    question = QUESTION.format(truth=ground_truth, answer=solution_str)
    body = {"model": model, "temperature": 0, "max_tokens": 4, "messages": [{"role": "user", "content": question}]}
    reply = (await ask_async(url, body, PATIENCE))["choices"][0]["message"]["content"]
    grade = re.search(r"\d+", reply)
    # A reply without a grade scores 0 and is counted, so that a judge that does not follow the format shows.
    return {"score": min(int(grade[0]), 10) / 10 if grade else 0.0, "graded": grade is not None}
