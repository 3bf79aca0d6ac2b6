"""How each prompt becomes the n rows that are answered: ``algorithm.expansion``.

Every method gives the same token ids in the same prompt-major order, row = prompt * n + sample. None cuts or strips a prompt:
``data.max_prompt_length`` and ``data.truncation`` do that, alike for all.

Saves: nothing on the device. ``lazy`` holds (n - 1) * P * 8 bytes of ids fewer for each prompt of P tokens: KiB, where logits
cost GiB. See ``docs/decisions/prompt_expansion.md``.
Costs: ``string`` and ``repeat_sampler`` tokenize each prompt n times, ``token`` and ``lazy`` once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.encoder import PromptEncoder, decode, tokenize
from verl_memopt.errors import ConfigError, DataError


@dataclass(frozen=True)
class Expanded:
    """Some prompts, and the ids of all their samples.

    Attributes:
        prompts: Each prompt once.
        ids: Token ids of each row; row = prompt * n + sample. With ``lazy`` all rows of a prompt are one list object.
    """

    prompts: list[PromptRow]
    ids: list[list[int]]


def _token(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Tokenize each prompt once, then repeat its ids. Each row has its own list."""
    return [list(ids) for ids in _lazy(rows, n, encoder)]


def _lazy(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Tokenize each prompt once and keep its ids once. A batch stores one list once, and a micro-batch repeats its ids."""
    return [ids for ids in _encoded(rows[::n], encoder) for _ in range(n)]


def _repeat_sampler(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Tokenize the record of each row. The data set was read for each row."""
    for place, record in enumerate(rows):
        first = rows[place - place % n]
        if (record.text, record.plain, record.ids) != (first.text, first.plain, first.ids):
            raise DataError(
                f"{record.address}: the data set returned another prompt when this row was read again. The samples of a group "
                "must have one prompt: return the same one each time, or set algorithm.expansion=token."
            )
    return _encoded(rows, encoder, n)


def _string(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    """Tokenize each row's text, all in one call."""
    ids = _ids_of_texts(rows, encoder.tokenizer)
    return [encoder.fit(ids[i], row.address, counted=i % n == 0) for i, row in enumerate(rows)]


EXPANSIONS: dict[str, Callable[[Sequence[PromptRow], int, PromptEncoder], list[list[int]]]] = {
    "token": _token,
    "lazy": _lazy,
    "repeat_sampler": _repeat_sampler,
    "string": _string,
}
"""``algorithm.expansion`` by name: gives the ids of each row, from the record of each row and n."""


def expand(dataset: PromptRows, indices: Sequence[int], n: int, method: str, encoder: PromptEncoder) -> Expanded:
    """Return the prompts at some indices of a data set, and the ids of all their samples, prompt-major.

    Args:
        dataset: Returns a prompt for an index.
        indices: The prompts.
        n: Samples of each prompt.
        method: A key of ``EXPANSIONS``.
        encoder: Makes the ids.

    Raises:
        ConfigError: ``method`` is unknown.
        DataError: As :meth:`PromptEncoder.encode` raises it; or ``string`` cannot give the ids of a row whose prompt is ids; or
            ``repeat_sampler`` reads different prompts at one index.
    """
    if method not in EXPANSIONS:
        raise ConfigError(f"algorithm.expansion={method}: unknown method. Use one of {', '.join(EXPANSIONS)}.")
    if method == "repeat_sampler":
        rows = [dataset[index] for index in indices for _ in range(n)]
    else:
        rows = [row for row in map(dataset.__getitem__, indices) for _ in range(n)]
    return Expanded(rows[::n], EXPANSIONS[method](rows, n, encoder))


def check_prompts(rows: Iterable[PromptRow], method: str, tokenizer: Any) -> None:
    """Check before a run that a method can give the ids of all rows whose prompt is ids.

    Raises:
        DataError: ``string`` gives other ids for a row. The message names the row and the first position.
    """
    if method == "string":
        _ids_of_texts([row for row in rows if row.ids is not None], tokenizer)


def _encoded(records: Sequence[PromptRow], encoder: PromptEncoder, copies: int = 1) -> list[list[int]]:
    """Return the ids of each record: those of its text, or those that the file has."""
    texts = [row for row in records if row.ids is None]
    addresses, plain = [row.address for row in texts], [row.plain for row in texts]
    of_texts = iter(encoder.encode([row.text for row in texts], addresses, copies, plain))
    return [
        next(of_texts) if row.ids is None else encoder.fit(list(row.ids), row.address, counted=place % copies == 0)
        for place, row in enumerate(records)
    ]


def _ids_of_texts(rows: Sequence[PromptRow], tokenizer: Any) -> list[list[int]]:
    """Return the ids of each row's text, with no length limit. A prompt that is ids goes through text and must come back."""
    texts = [row.text if row.ids is None else decode(tokenizer, row.ids) for row in rows]
    encoded = tokenize(tokenizer, texts, [row.plain for row in rows])
    for row, ids in zip(rows, encoded, strict=True):
        if row.ids is not None and tuple(ids) != row.ids:
            pairs = enumerate(zip_longest(row.ids, ids))
            position, (own, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            said, got = ("its end" if token is None else f"the token id {token}" for token in (own, other))
            difference = f"the prompt has {said}, and its text gives {got}"
            raise DataError(
                f"{row.address}: position {position}: {difference}. With algorithm.expansion=string a prompt of ids must come "
                "back from its text. Set algorithm.expansion=token, or give the prompt as text."
            )
    return encoded
