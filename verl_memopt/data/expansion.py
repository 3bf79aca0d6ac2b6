"""How a prompt becomes the n rows that are answered. Every method gives the same ids in the same, prompt-major, order.

Saves: nothing in the model; ids repeated on the host cost (n - 1) * P * 8 bytes, KiB where logits cost GiB.
Costs: ``string`` tokenizes each prompt n times, ``token`` once.
Pairs with: a rollout engine that shares prompt prefixes, which is where repeated prompts cost memory.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.errors import ConfigError

Expansion = Callable[[list[PromptRow], int, PromptEncoder], list[list[int]]]


def _as_text(rows: list[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Each text is repeated, then all of them are tokenized in one call."""
    copies = [row for row in rows for _ in range(n)]
    return encoder.encode([row.text for row in copies], [row.address for row in copies], n, [row.plain for row in copies])


def _as_tokens(rows: list[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Each text is tokenized once, then its ids are repeated; every row owns its list."""
    prompts = encoder.encode([row.text for row in rows], [row.address for row in rows], plain=[row.plain for row in rows])
    return [list(ids) for ids in prompts for _ in range(n)]


EXPANSIONS: dict[str, Expansion] = {"string": _as_text, "token": _as_tokens}
"""``algorithm.expansion`` by name."""


def expand(rows: list[PromptRow], n: int, method: str, encoder: PromptEncoder) -> list[list[int]]:
    """The prompt ids of len(rows) * n rows, prompt-major: row = prompt * n + sample.

    Raises ConfigError for an unknown method, and DataError as :meth:`PromptEncoder.encode` does.
    """
    if method not in EXPANSIONS:
        raise ConfigError(f"algorithm.expansion={method}: no such method. Use one of {', '.join(EXPANSIONS)}.")
    return EXPANSIONS[method](rows, n, encoder)
