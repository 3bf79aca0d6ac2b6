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
from typing import Any, Protocol

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder, decode, tokenize
from verl_memopt.errors import ConfigError, DataError


class PromptSource(Protocol):
    """A data set, as far as an expansion reads it."""

    def __getitem__(self, index: int, /) -> PromptRow:
        """Return the prompt at ``index``."""


@dataclass(frozen=True)
class Expanded:
    """Some prompts, and the ids of all their samples.

    Attributes:
        prompts: Each prompt once.
        ids: Token ids of each row; row = prompt * n + sample. With ``lazy`` all rows of a prompt are one list object.
    """

    prompts: list[PromptRow]
    ids: list[list[int]]


Expansion = Callable[[PromptSource, Sequence[int], int, PromptEncoder], Expanded]


def _token(dataset: PromptSource, indices: Sequence[int], n: int, encoder: PromptEncoder) -> Expanded:
    """Tokenize each prompt once, then repeat its ids. Each row has its own list."""
    prompts = [dataset[index] for index in indices]
    return Expanded(prompts, [list(ids) for ids in _encoded(prompts, encoder) for _ in range(n)])


def _lazy(dataset: PromptSource, indices: Sequence[int], n: int, encoder: PromptEncoder) -> Expanded:
    """Tokenize each prompt once and keep its ids once. A batch stores one list once, and a micro-batch repeats its ids."""
    prompts = [dataset[index] for index in indices]
    return Expanded(prompts, [ids for ids in _encoded(prompts, encoder) for _ in range(n)])


def _repeat_sampler(dataset: PromptSource, indices: Sequence[int], n: int, encoder: PromptEncoder) -> Expanded:
    """Repeat each index n times in a row, read a record for each, and tokenize all records."""
    records = [dataset[index] for index in indices for _ in range(n)]
    prompts = records[::n]
    for place, record in enumerate(records):
        first = prompts[place // n]
        if (record.text, record.plain, record.ids) != (first.text, first.plain, first.ids):
            raise DataError(
                f"{record.address}: the data set returned another prompt when this row was read again. The samples of a group "
                "must have one prompt: return the same one each time, or set algorithm.expansion=token."
            )
    return Expanded(prompts, _encoded(records, encoder, n))


def _string(dataset: PromptSource, indices: Sequence[int], n: int, encoder: PromptEncoder) -> Expanded:
    """Repeat each prompt's text n times in a row, then tokenize all texts in one call."""
    prompts = [dataset[index] for index in indices]
    copies = [row for row in prompts for _ in range(n)]
    ids = _ids_of_texts(copies, encoder.tokenizer)
    return Expanded(prompts, [encoder.fit(ids[i], row.address, counted=i % n == 0) for i, row in enumerate(copies)])


EXPANSIONS: dict[str, Expansion] = {"token": _token, "lazy": _lazy, "repeat_sampler": _repeat_sampler, "string": _string}
"""``algorithm.expansion`` by name."""


def expand(dataset: PromptSource, indices: Sequence[int], n: int, method: str, encoder: PromptEncoder) -> Expanded:
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
    return EXPANSIONS[method](dataset, indices, n, encoder)


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
    """Return the ids of each row's text, with no length limit. A prompt that is ids goes through text and back.

    Raises:
        DataError: The text of ids does not give them back.
    """
    texts = [row.text if row.ids is None else decode(tokenizer, row.ids) for row in rows]
    encoded = tokenize(tokenizer, texts, [row.plain for row in rows])
    for row, ids in zip(rows, encoded, strict=True):
        if row.ids is not None and tuple(ids) != row.ids:
            pairs = enumerate(zip_longest(row.ids, ids))
            position, (own, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            difference = f"the prompt has {_token_or_end(own)}, and its text gives {_token_or_end(other)}"
            raise DataError(
                f"{row.address}: position {position}: {difference}. With algorithm.expansion=string a prompt of ids must come "
                "back from its text. Set algorithm.expansion=token, or give the prompt as text."
            )
    return encoded


def _token_or_end(token: int | None) -> str:
    return "its end" if token is None else f"the token id {token}"
