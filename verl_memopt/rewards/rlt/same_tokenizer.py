"""Whether teacher and student read the same tokens: the reward compares their log-probs token by token."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from verl_memopt.errors import ConfigError

PARTS = ("vocabulary", "merges", "added tokens", "normalizer", "pre-tokenizer")


def tokenizer_digests(tokenizer: Any) -> dict[str, str]:
    """Return a hash of each part of a tokenizer that decides the ids of a text, by the names in ``PARTS``.

    Args:
        tokenizer: A Hugging Face tokenizer with a fast backend.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((token["id"], token["content"], token["special"]) for token in described["added_tokens"])
    added_names = {name for _, name, _ in added}
    vocabulary = described["model"].pop("vocab", None)
    if isinstance(vocabulary, dict):  # some tokenizers list their added tokens here too, and some do not
        vocabulary = {name: number for name, number in vocabulary.items() if name not in added_names}
    merges = described["model"].pop("merges", None)
    values = (vocabulary, merges, added, described.get("normalizer"), described.get("pre_tokenizer"))
    return {part: _digest(value) for part, value in zip(PARTS, values, strict=True)}


def check_same_tokenizer(teacher: Any, student: Any, student_path: str) -> None:
    """Check that both tokenizers give every text the same ids.

    Args:
        teacher: The tokenizer of the policy.
        student: The tokenizer of the student's folder.
        student_path: The student's folder or hub id, for errors.

    Raises:
        ConfigError: A part of the tokenizers differs. The message names each.
    """
    one, other = tokenizer_digests(teacher), tokenizer_digests(student)
    different = [part for part in PARTS if one[part] != other[part]]
    if different:
        raise ConfigError(
            f"the student {student_path}: its tokenizer differs from the policy's in {', '.join(different)}. The reward compares "
            "both models token by token. Choose a student of the policy's family, or leave it out to use the reference."
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
