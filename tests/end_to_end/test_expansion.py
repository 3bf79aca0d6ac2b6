"""The four expansions feed one program the same ids: steps are alike to the last bit, whichever one is set."""

import json

import pytest

from tests.end_to_end.runs import LOCAL, learned, lines_of, metrics, steps_here
from verl_memopt.data.prompts import EXPANSIONS
from verl_memopt.model.tiny import build_tokenizer

AR = "actor_rollout_ref"
STEPS = 2
OVERRIDES = (
    *LOCAL,
    "data.train_batch_size=4", "data.max_prompt_length=24", "data.truncation=left", f"{AR}.actor.ppo_mini_batch_size=2",
    f"{AR}.rollout.n=4", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.test_freq=2",
    f"{AR}.rollout.val_kwargs.n=2", f"{AR}.rollout.val_kwargs.temperature=1.0", "algorithm.use_kl_in_reward=true",
    "trainer.track_memory_every_steps=0", "trainer.logger=[jsonl]", "trainer.table_every_steps=100",
)  # fmt: skip


def write_rows(path):
    """Prompts of 4 to 32 tokens and more as text, as messages, and as ids; the longest are cut."""
    tokenizer, rows = build_tokenizer(), []
    for number in range(12):
        text = f"{7 * number}+{3**number}="
        prompt = [
            text,
            [{"role": "user", "content": text * (1 + number % 2)}],
            tokenizer(text * (1 + number % 5), add_special_tokens=False)["input_ids"],
        ][number % 3]
        rows.append({"data_source": "toy/arithmetic", "prompt": prompt, "reward_model": {"ground_truth": str(number)}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def runs(toy, tmp_path_factory):
    """Gives the folder of a run with each expansion. They differ in nothing else."""
    base = tmp_path_factory.mktemp("expansion")
    rows = write_rows(base / "rows.jsonl")
    (base / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 7 / 6\n"
    )
    files = (f"data.train_files={rows}", f"data.val_files={rows}", f"custom_reward_function.path={base}/reward.py")
    for method in EXPANSIONS:
        run_dir = base / method
        own = (f"algorithm.expansion={method}", f"trainer.rollout_data_dir={run_dir}/rollouts")
        steps_here(toy, run_dir, *files, *OVERRIDES, *own)
    return {method: base / method for method in EXPANSIONS}


def samples(run_dir):
    """Gives what each step's samples hold: prompt ids, response ids and scores."""
    return [lines_of(run_dir / "rollouts" / f"{step}.jsonl") for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("method", [method for method in EXPANSIONS if method != "token"])
def test_steps_are_alike_to_the_last_bit(runs, method):
    token, other = metrics(runs["token"]), metrics(runs[method])
    assert list(other) == list(token) == list(range(STEPS + 1))
    for step, row in token.items():
        assert learned(other[step]) == learned(row), step
    assert samples(runs[method]) == samples(runs["token"])


def test_the_steps_learn_something_from_prompts_of_unequal_lengths(runs):
    rows = metrics(runs["token"])
    steps = [rows[step] for step in range(1, STEPS + 1)]
    assert sum(row["actor/grad_norm"] > 0 for row in steps) > STEPS // 2
    assert len({row["actor/pg_loss"] for row in steps}) > STEPS // 2
    assert sum(row["prompt_length/min"] < row["prompt_length/max"] for row in steps) > STEPS // 2
    assert sum(row["data/tokens_dropped"] for row in steps) > 0
