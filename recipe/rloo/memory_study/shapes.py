"""The published shapes, and what every arm gets: a model, a long document as prompt, k answers and their rewards."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.arms import TRUNCATED, TRUNCATED_TOKENS, Arm
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import expand
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model

FIRST_ID = 3
"""Ids below it are special tokens. No answer has one."""
ENGLISH = (
    "the", "report", "of", "office", "program", "agency", "state", "budget", "review", "law", "fund", "plan", "data", "cost",
    "risk", "public", "service", "year", "officials", "federal", "local", "rule", "audit", "actions", "health", "energy", "water",
    "grants", "spending", "oversight", "contracts", "management", "and", "for", "with", "under", "from",
)  # fmt: skip
"""Words of the documents that are made locally."""
INSTRUCTION = "\nSummarize the report.\n"
DOCUMENT_FIELDS = ("input", "report", "text", "document")
"""Fields of a JSON line that may hold the document, in this order. SCROLLS names it ``input``."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of the experiment."""

    name: str
    model: TinyShape
    """The policy and the reference."""
    prompt: int = 3015
    """Tokens of the whole prompt."""
    truncated: int = TRUNCATED_TOKENS
    """Tokens that a truncated prompt keeps."""
    response: int = 100
    """Tokens of every answer."""
    temperature: float = 0.7 + 1e-7
    """Divides the logits. The published trainer adds 1e-7 to its setting of 0.7."""
    epochs: int = 3
    """Optimizer steps on one batch."""
    learning_rate: float = 3e-6
    clip: float = 0.2
    """Clip of the ratio on both sides."""
    documents: str | None = None
    """A file or folder with GovReport documents. None = a document that is made locally."""


PUBLISHED_MODEL = TinyShape(
    vocab_size=151_669, hidden_size=8, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128,
    tie_embeddings=False, max_positions=4096,
)  # fmt: skip

PUBLISHED = Shapes("published", PUBLISHED_MODEL)
"""Shapes of the published experiment. It draws one prompt a batch."""
SMALL = Shapes("small", PUBLISHED_MODEL, prompt=48, truncated=16, response=8)
"""The published model with a short prompt and short answers: every arm fits on a small machine with real tensors."""
SHAPES = {shapes.name: shapes for shapes in (PUBLISHED, SMALL)}


@dataclass(frozen=True)
class StudyBatch:
    """One prompt with k answers, prompt-major. No row has padding.

    Attributes:
        prompts: Ids of each row's prompt, as the model gets them.
        answers: Ids of each row's answer.
        rewards: One for each row, multiples of 1/64, so that sums of them are exact.
        drift: Log-ratio of each answer where values are compared, as if the policy had moved since the answers were drawn,
            towards those above the mean. Multiples of 1/1024, which fp32 adds to a log-prob without rounding, and too small to be
            clipped. The advantages of a group sum to 0, and without a drift so would its losses.
        dropped: Prompt tokens that truncation removed, over all rows.
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    drift: tuple[float, ...]
    dropped: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.answers)

    @property
    def prompt_len(self) -> int:
        """Tokens of a prompt."""
        return len(self.prompts[0])

    @property
    def response_len(self) -> int:
        """Tokens of an answer."""
        return len(self.answers[0])

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * (self.prompt_len + self.response_len)

    def advantages(self) -> list[float]:
        """Return the leave-one-out advantage of each row: its reward minus the mean of the others'."""
        total = sum(self.rewards)
        return [reward - (total - reward) / (self.rows - 1) for reward in self.rewards]

    def ids_sha256(self) -> str:
        """Return a hash of the ids of all rows and of their mask, which is all ones."""
        rows = [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        return hashlib.sha256(json.dumps([rows, [len(row) for row in rows]]).encode()).hexdigest()


def make_model(folder: Path, shapes: Shapes, seed: int) -> Path:
    """Write the model into a folder, unless it is there, and return the folder."""
    target = folder / f"{shapes.name}-{seed}"
    return target if (target / "config.json").exists() else make_tiny_model(target, shapes.model, seed=seed)


def make_batch(arm: Arm, shapes: Shapes, tokenizer: Any, seed: int) -> StudyBatch:
    """Return the batch of an arm. Arms of one seed and one prompt handling get the same ids, whatever their expansion.

    Args:
        arm: Its expansion, prompt handling and group size.
        shapes: The sizes.
        tokenizer: Tokenizer of the model.
        seed: Seed of the document, the answers and the rewards.
    """
    kept = shapes.truncated if arm.prompt == TRUNCATED else shapes.prompt
    encoder = PromptEncoder(tokenizer, kept, "right", embedding_rows=shapes.model.vocab_size)
    record = PromptRow(0, prompt_text(shapes, tokenizer, seed), "study", "", {}, "the study's document")
    prompts = expand([record], [0], arm.k, arm.expansion, encoder).prompt_ids
    draw = random.Random(seed)
    answers = [tuple(draw.randrange(FIRST_ID, shapes.model.vocab_size) for _ in range(shapes.response)) for _ in range(arm.k)]
    rewards = tuple(draw.randrange(64) / 64 for _ in range(arm.k))
    sizes = [draw.randrange(32, 100) / 1024 for _ in range(arm.k)]
    mean = sum(rewards) / arm.k
    drift = tuple(size if reward > mean else -size for size, reward in zip(sizes, rewards, strict=True))
    dropped = arm.k * (shapes.prompt - len(prompts[0]))
    return StudyBatch(tuple(map(tuple, prompts)), tuple(answers), rewards, drift, dropped)


def prompt_text(shapes: Shapes, tokenizer: Any, seed: int) -> str:
    """Return a chat turn with a document and an instruction, of exactly ``shapes.prompt`` tokens.

    The document is cut to the tokens that the turn leaves. Single digits, which are one token each, fill what a cut word leaves.

    Args:
        shapes: Length of the prompt, and where documents are.
        tokenizer: Tokenizer of the model.
        seed: Chooses the document.

    Raises:
        ConfigError: The document is too short.
    """

    def turn(document: str) -> str:
        message = {"role": "user", "content": document + INSTRUCTION}
        return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))

    def length(document: str) -> int:
        return len(tokenizer(turn(document), add_special_tokens=False)["input_ids"])

    words = choose_document(shapes, seed).split()
    count = _most(len(words), lambda number: length(" ".join(words[:number])) <= shapes.prompt)
    document = " ".join(words[:count])
    missing = shapes.prompt - length(document)
    if missing and count == len(words):
        raise ConfigError(
            f"documents={shapes.documents}: a document of {len(words)} words does not fill a prompt of {shapes.prompt} tokens. "
            "Name longer documents."
        )
    document += "".join(str(place % 10) for place in range(missing))
    assert length(document) == shapes.prompt, (length(document), shapes.prompt)
    return turn(document)


def _most(largest: int, fits: Any) -> int:
    """Return the largest number up to ``largest`` that fits, where all smaller numbers fit too."""
    low, high = 0, largest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def choose_document(shapes: Shapes, seed: int) -> str:
    """Return the document of a seed: from the user's files, or made of random words."""
    draw = random.Random(seed)
    if shapes.documents is None:
        # A word has more than one character, and no token of the tiny tokenizer is longer than a word.
        return " ".join(draw.choice(ENGLISH) for _ in range(shapes.prompt))
    documents = read_documents(Path(shapes.documents))
    return draw.choice(documents)


def read_documents(path: Path) -> list[str]:
    """Return the documents of a JSON-lines or text file, or of all such files of a folder.

    Args:
        path: GovReport as SCROLLS publishes it (``.jsonl``), or one document in a ``.txt`` file.

    Raises:
        ConfigError: There is no document.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    documents: list[str] = []
    for file in files:
        if file.suffix == ".txt":
            documents.append(file.read_text(encoding="utf-8"))
        elif file.suffix in (".jsonl", ".json"):
            documents.extend(_documents_of_lines(file.read_text(encoding="utf-8").splitlines()))
    if not documents:
        raise ConfigError(
            f"documents={path}: no document. Name a .txt file, or a .jsonl file whose lines have one of the fields "
            f"{', '.join(DOCUMENT_FIELDS)}."
        )
    return documents


def _documents_of_lines(lines: Sequence[str]) -> list[str]:
    entries = [json.loads(line) for line in lines if line.strip()]
    return [entry[name] for entry in entries for name in [next((n for n in DOCUMENT_FIELDS if n in entry), None)] if name]


def shortened(shapes: Shapes, to: Shapes = SMALL) -> Shapes:
    """Return the shapes with the short lengths of ``to``, for runs that read values."""
    return replace(shapes, name=to.name, prompt=to.prompt, truncated=to.truncated, response=to.response)
