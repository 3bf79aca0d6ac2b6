"""Make the toy task of agents: products that a tiny model can only answer by calling a calculator.

python recipe/agent/make_toy.py runs/agent_toy_seed0 --seed 0

The model is warmed up on two kinds of answers: it calls the calculator and copies the result, or, more often, it estimates the
product, because it cannot multiply. RL only has to prefer the answers that use the tool.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from verl_memopt.data.encoder import tokenize
from verl_memopt.data.sources import write_parquet
from verl_memopt.data.toy import SHAPE, Descent, Problem, identity_of, made_whole
from verl_memopt.data.warm_up import Lesson, warm_up_on_lessons
from verl_memopt.errors import UserError
from verl_memopt.model.tiny import build_tokenizer, make_tiny_model
from verl_memopt.observe.log_setup import setup_logging

logger = logging.getLogger("verl_memopt.data.agent_toy")  # a name for which setup_logging shows progress messages

MODEL, TRAIN, VALIDATION, RECORD = "model", "train.parquet", "val.parquet", "agent_toy.json"

CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\ntools:' -}}"
    "{%- for tool in tools -%}{{- ' ' + tool['function']['name'] -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\n' + call['function']|tojson + '\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""ChatML with tools: the system message names them, and a call is written as Qwen writes it."""


@dataclass(frozen=True)
class AgentToyRecipe:
    """Settings of the toy task."""

    num_validation: int = 128
    """Number of held-out products. All others are for training."""
    estimates: float = 0.65
    """Share of the warm-up's answers that are estimates. Above one half, they become the model's most likely answers."""
    warm_up: Descent = field(default_factory=lambda: Descent(steps=700, batch_size=32))
    """The warm-up."""


def call_text(problem: Problem) -> str:
    function = {"name": "multiply", "arguments": {"a": problem[0], "b": problem[1]}}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


def question(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}="


def product(problem: Problem) -> str:
    return str(problem[0] * problem[1])


def estimate(problem: Problem) -> str:
    return f"~{round(problem[0], -1) * round(problem[1], -1)}"


def lesson(tokenizer: Any, problem: Problem, answer: str | None) -> Lesson:
    """Return a lesson: an answer without the tool, or (None) a call of the calculator and a copy of its result."""
    tool = {"type": "function", "function": {"name": "multiply"}}
    asked = [{"role": "user", "content": question(problem)}]
    prompt = tokenizer.apply_chat_template(asked, tools=[tool], tokenize=False, add_generation_prompt=True)
    end = tokenizer.eos_token
    if answer is not None:
        return Lesson(*tokenize(tokenizer, [prompt, answer + end]))
    result = f"\n<|im_start|>tool\n{product(problem)}{end}\n<|im_start|>assistant\n"
    before, call, read, copy = tokenize(tokenizer, [prompt, call_text(problem) + end, result, product(problem) + end])
    return Lesson(before, call + read + copy, ((len(call), len(call) + len(read)),))


def make_agent_toy(folder: str | Path, seed: int = 0, recipe: AgentToyRecipe | None = None) -> Path:
    """Create the toy task in a folder and return the folder.

    The folder has ``model/`` (warmed up), ``train.parquet``, ``val.parquet`` and ``agent_toy.json``. It is built under a
    temporary name and then renamed, so it is always complete. A folder with the same seed and recipe is kept.

    Raises:
        DataError: The folder exists and has other contents.
    """
    recipe = AgentToyRecipe() if recipe is None else recipe
    occupied = "it exists and is no toy task of agents, so it is not replaced. Choose another, or remove it."
    build = partial(_build, seed=seed, recipe=recipe)
    return made_whole(Path(folder) / RECORD, identity_of(seed, recipe), build, "toy task of agents", occupied)


def _build(folder: Path, seed: int, recipe: AgentToyRecipe) -> dict[str, float]:
    draw = random.Random(seed)
    problems = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    draw.shuffle(problems)
    validation, train = problems[: recipe.num_validation], problems[recipe.num_validation :]
    logger.info("toy task of agents: %d training and %d held-out products, warming up a tiny model", len(train), len(validation))
    for path, chosen in ((TRAIN, train[:2048]), (VALIDATION, validation)):
        rows = [{"prompt": [{"role": "user", "content": question(each)}], "answer": product(each)} for each in chosen]
        write_parquet(folder / path, rows)
    # Calls have many characters that are always the same. Merges turn them into a few tokens.
    text = "\n".join([call_text((11, 11)).replace("11", " "), "<|im_start|>tool\n", "tools: multiply assistant user system"] * 20)
    tokenizer = build_tokenizer(SHAPE.vocab_size + 64, text, CHAT_TEMPLATE)
    model = make_tiny_model(folder / MODEL, replace(SHAPE, vocab_size=SHAPE.vocab_size + 64), seed=seed)
    tokenizer.save_pretrained(model)
    lessons = [_drawn(tokenizer, each, recipe, draw) for each in train * 2]
    return {"loss": warm_up_on_lessons(model, lessons, recipe.warm_up, seed)}


def _drawn(tokenizer: Any, problem: Problem, recipe: AgentToyRecipe, draw: random.Random) -> Lesson:
    return lesson(tokenizer, problem, estimate(problem) if draw.random() < recipe.estimates else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put model/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up (default: 0)")
    parsed = parser.parse_args(arguments)
    setup_logging()
    try:
        make_agent_toy(parsed.folder, seed=parsed.seed)
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
