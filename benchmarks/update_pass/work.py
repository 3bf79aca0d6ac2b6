"""The work all contestants share: a model's shape, and prompts with k answers each, the same ids for everyone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from dataclasses import dataclass

from verl_memopt.model.tiny import TinyShape

FIRST_ID = 3
"""Ids below it are special tokens; the first is the pad."""


@dataclass(frozen=True)
class Workload:
    """One shape of the update. Lengths are of every row, or medians where ``spread`` is not 0."""

    what: str
    """In a line."""
    shape: TinyShape
    groups: int
    """Prompts."""
    k: int
    """Answers to each."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""
    spread: float = 0.0
    """Standard deviation of the log of lengths; they are cut at four times the median."""
    ks: tuple[int, ...] = ()
    """Group sizes of a series that all contestants run; empty = ``k`` alone."""
    more_ks: tuple[int, ...] = ()
    """Further group sizes, for the project's contestants alone."""
    rows: int | None = None
    """Rows in a micro-batch of those who pad, a divisor of ``k``; None = ``k``, one group."""
    token_budget: int | None = None
    """Most tokens in a micro-batch of the project's contestants; None = the rows that the others take."""
    chunk_tokens: int = 512
    """``logprob_chunk_tokens`` of the project's contestants."""
    dtype: str = "fp32"
    """Of weights, compute and gradients."""
    gpu: bool = False
    """Whether it is meant for a GPU."""

    def series(self, ours: bool) -> tuple[int, ...]:
        return (self.ks or (self.k,)) + (self.more_ks if ours else ())


TINY = TinyShape(
    vocab_size=151_669, hidden_size=8, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128,
    tie_embeddings=False, max_positions=4096,
)  # fmt: skip
SMALL = TinyShape(
    vocab_size=32_000, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
    tie_embeddings=True, max_positions=4096,
)  # fmt: skip
QWEN = TinyShape(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
    tie_embeddings=True, max_positions=40_960,
)  # fmt: skip

HYBRID = TinyShape(
    model_type="qwen3_5_text", vocab_size=32_000, hidden_size=1024, intermediate_size=3584, num_layers=4, num_heads=8,
    num_kv_heads=2, head_dim=256, linear_heads=(16, 16), linear_dims=(128, 128), tie_embeddings=True, max_positions=4096,
)  # fmt: skip
"""Four blocks of Qwen3.5-0.8B, with a smaller vocabulary."""

WORKLOADS = {
    "a": Workload(
        "tiny model, a real vocabulary, a long prompt",
        TINY, groups=1, k=8, prompt=3015, answer=100, ks=(2, 4, 8), more_ks=(16, 32, 64), token_budget=4096, chunk_tokens=64,
    ),
    "b": Workload("long prompt, short answers", SMALL, groups=1, k=8, prompt=1024, answer=64, chunk_tokens=256),
    "h": Workload("blocks of Qwen3.5, a long prompt", HYBRID, groups=1, k=8, prompt=1024, answer=64, chunk_tokens=256),
    "c": Workload("short prompt, long answers", SMALL, groups=1, k=8, prompt=64, answer=1024, chunk_tokens=256),
    "d": Workload(
        "eight groups of ragged lengths", SMALL, groups=8, k=8, prompt=512, answer=128, spread=0.7, token_budget=4096,
        chunk_tokens=256,
    ),
    "e": Workload(
        "the shape of Qwen3-0.6B", QWEN, groups=1, k=8, prompt=2048, answer=256, dtype="bfloat16", gpu=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """prompts: one per group. answers, advantages: one per row, prompt-major; an advantage holds for all tokens of its row."""

    prompts: list[list[int]]
    answers: list[list[int]]
    advantages: list[float]

    @property
    def k(self) -> int:
        return len(self.answers) // len(self.prompts)

    def prompt_of(self, row: int) -> list[int]:
        return self.prompts[row // self.k]

    def hash(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16]


def make_batch(work: Workload, seed: int = 0) -> Batch:
    draw = random.Random(seed)

    def ids(median: int) -> list[int]:
        scale = math.exp(draw.gauss(0.0, work.spread)) if work.spread else 1.0
        length = max(1, min(round(median * scale), 4 * median))
        return [draw.randrange(FIRST_ID, work.shape.vocab_size) for _ in range(length)]

    rewards = [[draw.random() for _ in range(work.k)] for _ in range(work.groups)]
    return Batch(
        prompts=[ids(work.prompt) for _ in range(work.groups)],
        answers=[ids(work.answer) for _ in range(work.groups * work.k)],
        advantages=[reward - (sum(group) - reward) / (work.k - 1) for group in rewards for reward in group],
    )


def shrunk_shape(shape: TinyShape, layers: int | None, shrink: int) -> TinyShape:
    """Gives a shape with fewer layers, and widths and vocabulary divided by ``shrink``.

    Heads stay; their size is at least 8. The vocabulary keeps room for the tokenizer.
    """
    return dataclasses.replace(
        shape, num_layers=layers or shape.num_layers, vocab_size=max(shape.vocab_size // shrink, 320),
        hidden_size=max(shape.hidden_size // shrink, 8), intermediate_size=max(shape.intermediate_size // shrink, 8),
        head_dim=max(shape.head_dim // shrink, 8),
    )  # fmt: skip


def shrunk(work: Workload, layers: int | None, shrink: int) -> Workload:
    shape = shrunk_shape(work.shape, layers, shrink)
    prompt, answer = max(work.prompt // shrink, 2), max(work.answer // shrink, 2)
    budget = None if work.token_budget is None else max(work.token_budget // shrink, prompt + answer)
    return dataclasses.replace(work, shape=shape, prompt=prompt, answer=answer, token_budget=budget)
