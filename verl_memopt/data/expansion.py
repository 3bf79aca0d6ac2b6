"""How a prompt becomes the n rows that are answered. Every method returns the same ids in the same prompt-major order.

Saves: nothing on the device. Repeated ids cost (n - 1) * P * 8 bytes on the host: KiB, where logits cost GiB.
Costs: ``string`` tokenizes each prompt n times, ``token`` once.
Works with: a rollout engine that shares prompt prefixes. Repeated prompts cost memory there, not here.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.errors import ConfigError

Expansion = Callable[[list[PromptRow], int, PromptEncoder], list[list[int]]]


def _as_text(rows: list[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Repeat each text, then tokenize all of them in one call."""
    copies = [row for row in rows for _ in range(n)]
    return encoder.encode([row.text for row in copies], [row.address for row in copies], n, [row.plain for row in copies])


def _as_tokens(rows: list[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Tokenize each text once, then repeat its ids. Every row owns its list."""
    prompts = encoder.encode([row.text for row in rows], [row.address for row in rows], plain=[row.plain for row in rows])
    return [list(ids) for ids in prompts for _ in range(n)]


EXPANSIONS: dict[str, Expansion] = {"string": _as_text, "token": _as_tokens}
"""``algorithm.expansion`` by name."""


def expand(rows: list[PromptRow], n: int, method: str, encoder: PromptEncoder) -> list[list[int]]:
    """Return the prompt ids of len(rows) * n rows, prompt-major: row = prompt * n + sample.

    Args:
        rows: The prompts.
        n: Samples of each prompt.
        method: A key of ``EXPANSIONS``.
        encoder: Makes the ids.

    Raises:
        ConfigError: ``method`` is unknown.
        DataError: As :meth:`PromptEncoder.encode` raises it.
    """
    if method not in EXPANSIONS:
        raise ConfigError(f"algorithm.expansion={method}: unknown method. Use one of {', '.join(EXPANSIONS)}.")
    return EXPANSIONS[method](rows, n, encoder)
