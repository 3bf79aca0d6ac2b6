"""The prompts of each step and their token ids. A seed decides the order of prompts, and a checkpoint continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.encoder import PromptEncoder, decode, tokenize
from verl_memopt.data.plugin import load_from_file, refuse_verls_arguments, users_code
from verl_memopt.data.sources import still_reading
from verl_memopt.data.streaming import StreamLoader
from verl_memopt.errors import DataError

END: Any = object()
"""Marks the end of a sampler's indices."""
Sampler = Callable[[int, int, int], Iterable[int]]
"""(num_rows, seed, epoch) -> row indices of the epoch."""
LOOKAHEAD = 1_000_000
"""Most indices of a sampler that are read ahead, unless the dataset has more rows. A longer epoch counts as endless."""


def load_sampler(settings: schema.CustomSampler) -> Sampler | None:
    if settings.class_path is None:
        return None
    sampler = load_from_file(settings.class_path, settings.class_name, key="data.sampler.class_path", error=DataError)
    address = f"data.sampler.class_name={settings.class_name}"
    # verl's samplers take other arguments in another order, and would read the seed as their config.
    refuse_verls_arguments(sampler, ("data_source", "data_config"), "num_rows, seed, epoch", address)

    def order(num_rows: int, seed: int, epoch: int) -> Iterator[int]:
        with users_code(f"{address}: __init__({num_rows}, {seed}, {epoch}) of {settings.class_path}", DataError):
            drawn = sampler(num_rows, seed, epoch)
        iterates = f"{address}: __iter__ of {settings.class_path}"
        with users_code(iterates, DataError):
            indices = iter(drawn)
        while True:
            with users_code(iterates, DataError):
                index = next(indices, END)
            if index is END:
                return
            yield index

    return order


@dataclass(eq=False)
class StepLoader:
    """Returns ``batch_size`` prompts per step, epoch after epoch. Rows left over at the end of an epoch are dropped.

    Its state is a few integers, so a resumed run sees exactly the rows that an uninterrupted run sees.

    Attributes:
        sampler: Gives the row indices of an epoch; ``shuffle`` then has no effect. An epoch of a sampler may be endless: at most
            :data:`LOOKAHEAD` indices are read ahead.
        key: The setting of ``batch_size``, for errors.

    Raises:
        DataError: An epoch has fewer rows than a batch.
    """

    dataset: PromptRows
    batch_size: int
    shuffle: bool
    seed: int
    sampler: Sampler | None = None
    key: str = "data.train_batch_size"

    def __post_init__(self) -> None:
        self.epoch = self._position = 0
        self.steps_per_epoch: int | None = None
        """None if the first epoch has more than :data:`LOOKAHEAD` indices."""
        self._order, length = self._order_of(0)
        if length is not None:
            self.steps_per_epoch = length // self.batch_size

    def next_indices(self) -> list[int]:
        """Return the indices of the next ``batch_size`` rows. A new epoch begins when the current one has no full batch left."""
        chosen = list(islice(self._order, self.batch_size))
        if len(chosen) < self.batch_size:
            self.epoch, self._position = self.epoch + 1, 0
            self._order, _ = self._order_of(self.epoch)
            chosen = list(islice(self._order, self.batch_size))
        self._position += self.batch_size
        return chosen

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position, "num_rows": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("num_rows") != len(self.dataset):
            raise DataError(
                f"data.train_files: the checkpoint was written with {state.get('num_rows')} rows, but there are "
                f"{len(self.dataset)} now. Use the same files and settings, or start again with trainer.resume_mode=disable."
            )
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        order, _ = self._order_of(self.epoch)
        self._order = islice(order, self._position, None)

    def _order_of(self, epoch: int) -> tuple[Iterator[int], int | None]:
        """Return the indices of an epoch and their number. None = there are more indices than were read ahead."""
        indices, read_ahead = self._drawn(epoch), list[int]()
        with still_reading("data.sampler", lambda: len(read_ahead), f"{LOOKAHEAD:,} of its indices are read ahead at most"):
            for index in islice(indices, max(LOOKAHEAD, len(self.dataset))):
                read_ahead.append(index)
        if len(read_ahead) < self.batch_size:
            raise DataError(
                f"{self.key}={self.batch_size}: an epoch has only {len(read_ahead)} rows. "
                f"Lower it to at most {len(read_ahead)}, or add more data."
            )
        following = next(indices, END)
        if following is END:
            return iter(read_ahead), len(read_ahead)
        return chain(read_ahead, [following], indices), None

    def _drawn(self, epoch: int) -> Iterator[int]:
        num_rows = len(self.dataset)
        if self.sampler is None:
            # Seed with both numbers, so that a resumed run can draw its epoch without the epochs before it.
            random = np.random.default_rng([self.seed, epoch])
            yield from random.permutation(num_rows).tolist() if self.shuffle else range(num_rows)
            return
        for index in self.sampler(num_rows, self.seed, epoch):
            if not (isinstance(index, int) and 0 <= index < num_rows):
                raise DataError(
                    f"data.sampler: epoch {epoch} has an index outside of 0..{num_rows - 1}: {index!r}. Correct the sampler."
                )
            yield index


# The prompts of each step with their ids, prepared while the workers compute the previous step.


@dataclass(frozen=True)
class StepPrompts:
    """Some prompts, the prompt ids of all their samples, and counts of what truncation removed.

    ``prompt_ids`` has the prompt's token ids for each row; row = prompt * n + sample. With the expansion ``lazy`` all rows of a
    prompt share one list object.
    """

    prompts: list[PromptRow]
    prompt_ids: list[list[int]]
    rows_truncated: int
    tokens_dropped: int


class PromptPrefetcher:
    """Prepares the prompts one step ahead of the caller, in a thread.

    Prompts of a stream are not prepared ahead, but in the caller's thread when they are requested.

    :meth:`state_dict` is the loader's state after the last step that was returned, so a resumed run loses and repeats nothing.
    No one else may use ``encoder``, because the prefetcher uses it in its thread.
    """

    def __init__(self, loader: StepLoader | StreamLoader, n: int, expansion: str, encoder: PromptEncoder) -> None:
        self._loader = loader
        self._n = n
        self._expansion = expansion
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt-prefetcher")
        self._state, self.epoch = loader.state_dict(), loader.epoch
        self._before = self._state, self.epoch
        self._prepared: Future[tuple[StepPrompts, dict[str, Any], int]] | None = None

    def next(self) -> StepPrompts:
        self._before = self._state, self.epoch
        return self.more()

    def more(self) -> StepPrompts:
        """Return further prompts for the same step. :meth:`give_back` undoes them together with the :meth:`next` before them."""
        if isinstance(self._loader, StreamLoader):
            step, self._state, self.epoch = self._prepare()
            return step
        prepared = self._thread.submit(self._prepare) if self._prepared is None else self._prepared
        step, self._state, self.epoch = prepared.result()
        self._prepared = self._thread.submit(self._prepare)
        return step

    def give_back(self) -> None:
        """Set :meth:`state_dict` back to the state before the last :meth:`next`, because that step was abandoned.

        No further step may be requested after this.
        """
        self._state, self.epoch = self._before

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step whose :meth:`state_dict` this is. Prompts prepared ahead are dropped."""
        if self._prepared is not None:
            self._prepared.exception()  # waits, because the thread uses the loader
            self._prepared = None
        self._loader.load_state_dict(state)
        self._state, self.epoch = self._loader.state_dict(), self._loader.epoch
        self._before = self._state, self.epoch

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> tuple[StepPrompts, dict[str, Any], int]:
        loader = self._loader
        prompts = expand(loader.dataset, loader.next_indices(), self._n, self._expansion, self._encoder)
        return prompts, loader.state_dict(), loader.epoch


# How each prompt becomes the n rows that are answered: ``algorithm.expansion``.
#
# Every method gives the same token ids in the same prompt-major order, row = prompt * n + sample. No method cuts or strips a
# prompt. Only ``data.max_prompt_length`` and ``data.truncation`` do that, in the same way for all methods.
#
# Saves: nothing on the device. On the host, ``lazy`` saves (n - 1) * P * 8 bytes for each prompt of P tokens. These are KiB,
# while logits take GiB. See ``docs/decisions/prompts.md``.
# Costs: ``string`` and ``repeat_sampler`` tokenize each prompt n times, ``token`` and ``lazy`` once.


def _token(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    # Each row gets its own list, so the batch stores the ids of every row.
    return [list(ids) for ids in _lazy(rows, n, encoder)]


def _lazy(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    # Tokenize each prompt once, and give all its rows the same list. A batch stores this list once; a micro-batch repeats the
    # ids.
    return [ids for ids in _encoded(rows[::n], encoder) for _ in range(n)]


def _repeat_sampler(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    # Tokenize each row separately, because with this expansion the dataset was read once per row.
    for place, record in enumerate(rows):
        first = rows[place - place % n]
        if (record.text, record.plain, record.ids) != (first.text, first.plain, first.ids):
            raise DataError(
                f"{record.address}: the dataset returned another prompt when this row was read again. The samples of a group "
                "must have the same prompt. Return the same prompt each time, or set algorithm.expansion=token."
            )
    return _encoded(rows, encoder, n)


def _string(rows: Sequence[PromptRow], n: int, encoder: PromptEncoder) -> list[list[int]]:
    ids = _ids_of_texts(rows, encoder.tokenizer)
    return [encoder.fit(ids[i], row.address, counted=i % n == 0) for i, row in enumerate(rows)]


EXPANSIONS: dict[str, Callable[[Sequence[PromptRow], int, PromptEncoder], list[list[int]]]] = {
    "token": _token,
    "lazy": _lazy,
    "repeat_sampler": _repeat_sampler,
    "string": _string,
}
"""Value of ``algorithm.expansion`` -> the function that returns the ids of each row."""


def expand(dataset: PromptRows, indices: Sequence[int], n: int, method: str, encoder: PromptEncoder) -> StepPrompts:
    """Return the prompts at some indices of a dataset, and the ids of all their samples, prompt-major.

    Args:
        dataset: The rows.
        indices: Indices of the rows.
        n: Samples per prompt.
        method: A key of ``EXPANSIONS``.
        encoder: Encodes the prompts.

    Raises:
        DataError: As in :meth:`PromptEncoder.fit`. Or ``string`` cannot reproduce a prompt that is given as token ids, or
            ``repeat_sampler`` reads different prompts at the same index.
    """
    if method == "repeat_sampler":
        rows = [dataset[index] for index in indices for _ in range(n)]
    else:
        rows = [row for row in map(dataset.__getitem__, indices) for _ in range(n)]
    # The encoder counts over its whole life, so the counts of this call are differences.
    rows_truncated, tokens_dropped = encoder.rows_truncated, encoder.tokens_dropped
    ids = EXPANSIONS[method](rows, n, encoder)
    return StepPrompts(rows[::n], ids, encoder.rows_truncated - rows_truncated, encoder.tokens_dropped - tokens_dropped)


def check_prompts(rows: Iterable[PromptRow], method: str, tokenizer: Any) -> None:
    # Check before a run that the expansion ``method`` can reproduce all prompts that are given as token ids.
    if method == "string":
        _ids_of_texts([row for row in rows if row.ids is not None], tokenizer)


def _encoded(records: Sequence[PromptRow], encoder: PromptEncoder, copies: int = 1) -> list[list[int]]:
    texts = [row for row in records if row.ids is None]
    addresses, plain, whole = [row.address for row in texts], [row.plain for row in texts], [row.is_text for row in texts]
    encoded = iter(encoder.encode([row.text for row in texts], addresses, copies, plain, whole))
    return [
        next(encoded) if row.ids is None else encoder.fit(list(row.ids), row.address, counted=place % copies == 0)
        for place, row in enumerate(records)
    ]


def _ids_of_texts(rows: Sequence[PromptRow], tokenizer: Any) -> list[list[int]]:
    # A prompt that is given as token ids must be the same after decoding and encoding.
    texts = [row.text if row.ids is None else decode(tokenizer, row.ids) for row in rows]
    encoded = tokenize(tokenizer, texts, [row.plain for row in rows], [row.is_text for row in rows])
    for row, ids in zip(rows, encoded, strict=True):
        if row.ids is not None and tuple(ids) != row.ids:
            pairs = enumerate(zip_longest(row.ids, ids))
            position, (own, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            expected, got = ("its end" if token is None else f"the token id {token}" for token in (own, other))
            difference = f"the prompt has {expected}, and its text gives {got}"
            raise DataError(
                f"{row.address}: position {position}: {difference}. With algorithm.expansion=string a prompt of ids must be the "
                "same after decoding and encoding. Set algorithm.expansion=token, or give the prompt as text."
            )
    return encoded
