"""The published shapes, and the inputs of every arm: a model, a long document as prompt, k answers and their rewards."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.cells import PROMPT, RESPONSE, TRUNCATED, TRUNCATED_TOKENS, VOCAB, Arm
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import expand
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model

FIRST_ID = 3
"""Ids below this number are special tokens. No answer contains them."""
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
    """Sizes of the experiment, for policy and reference alike."""

    name: str
    model: TinyShape
    prompt: int = PROMPT
    truncated: int = TRUNCATED_TOKENS
    response: int = RESPONSE
    temperature: float = 0.7 + 1e-7
    """Divides the logits. The published trainer adds 1e-7 to its setting of 0.7."""
    epochs: int = 3
    """Optimizer steps on one batch."""
    learning_rate: float = 3e-6
    clip: float = 0.2
    documents: str | None = None
    """A file or folder with GovReport documents. None = a document that is made locally."""


PUBLISHED_MODEL = TinyShape(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128,
    tie_embeddings=False, max_positions=4096,
)  # fmt: skip
PUBLISHED = Shapes("published", PUBLISHED_MODEL)
SMALL = Shapes("small", PUBLISHED_MODEL, prompt=48, truncated=16, response=8)
"""The published model with a short prompt and short answers: every arm fits on a small machine with real tensors."""
SHAPES = {shapes.name: shapes for shapes in (PUBLISHED, SMALL)}


def shortened(shapes: Shapes) -> Shapes:
    """Return the shapes with short lengths, for runs whose values are compared."""
    return replace(shapes, name=SMALL.name, prompt=SMALL.prompt, truncated=SMALL.truncated, response=SMALL.response)


@dataclass(frozen=True)
class StudyBatch:
    """One prompt with k answers, one row per answer. No row has padding."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    """Multiples of 1/64, so that sums of them are exact."""
    drift: tuple[float, ...]
    """Log-ratio of each answer when values are compared, as if the policy had moved towards the answers above the mean. Without a
    drift, the losses of a group would sum to 0, because its advantages do. The values are multiples of 1/1024, which fp32 adds to
    a log-prob without rounding, and too small to be clipped."""
    dropped: int
    """Prompt tokens that truncation removed, over all rows."""

    @property
    def rows(self) -> int:
        return len(self.answers)

    @property
    def prompt_len(self) -> int:
        return len(self.prompts[0])

    @property
    def response_len(self) -> int:
        return len(self.answers[0])

    def advantages(self) -> list[float]:
        """Return the leave-one-out advantage of each row: its reward minus the mean reward of the other rows."""
        total = sum(self.rewards)
        return [reward - (total - reward) / (self.rows - 1) for reward in self.rewards]

    def ids_sha256(self) -> str:
        """Return a hash of the ids of all rows and of their mask, which is all ones."""
        rows = [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        return hashlib.sha256(json.dumps([rows, [len(row) for row in rows]]).encode()).hexdigest()


def make_model(folder: Path, shapes: Shapes, seed: int) -> Path:
    target = folder / f"{shapes.name}-{seed}"
    return target if (target / "config.json").exists() else make_tiny_model(target, shapes.model, seed=seed)


def make_batch(arm: Arm, shapes: Shapes, tokenizer: Any, seed: int) -> StudyBatch:
    """Return the batch of an arm. Arms with equal seed and prompt length get the same ids, whatever their expansion."""
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

    The document is cut so that the turn fits. A cut word may leave some tokens free. Digits fill them, one token each.
    """

    def turn(document: str) -> str:
        message = {"role": "user", "content": document + INSTRUCTION}
        return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))

    def length(document: str) -> int:
        return len(tokenizer(turn(document), add_special_tokens=False)["input_ids"])

    words = choose_document(shapes, seed).split()
    count, largest = 0, len(words)
    while count < largest:
        middle = (count + largest + 1) // 2
        count, largest = (middle, largest) if length(" ".join(words[:middle])) <= shapes.prompt else (count, middle - 1)
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


def choose_document(shapes: Shapes, seed: int) -> str:
    draw = random.Random(seed)
    if shapes.documents is None:
        # A word has more than one character, and no token of the tiny tokenizer is longer than a word.
        return " ".join(draw.choice(ENGLISH) for _ in range(shapes.prompt))
    return draw.choice(read_documents(Path(shapes.documents)))


def read_documents(path: Path) -> list[str]:
    """Return the documents of a ``.txt`` or JSON-lines file (GovReport as in SCROLLS), or of all such files in a folder."""
    documents: list[str] = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix == ".txt":
            documents.append(file.read_text(encoding="utf-8"))
        elif file.suffix in (".jsonl", ".json"):
            entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            fields = [[entry[name] for name in DOCUMENT_FIELDS if name in entry] for entry in entries]
            documents.extend(found[0] for found in fields if found)
    if not documents:
        names = ", ".join(DOCUMENT_FIELDS)
        raise ConfigError(
            f"documents={path}: no document. Name a .txt file, or a .jsonl file whose lines have one of the fields {names}."
        )
    return documents
