"""The prompts of each step, in an order that depends on the seed and that a checkpoint can continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.expansion import expand
from verl_memopt.data.plugin import load_from_file, refuse_verls_arguments, users_code
from verl_memopt.errors import DataError

Sampler = Callable[[int, int, int], Iterable[int]]
"""(num_rows, seed, epoch) -> row indices of that epoch."""


def load_sampler(settings: schema.CustomSampler) -> Sampler | None:
    """Return the sampler class that ``data.sampler`` names, or None."""
    if settings.class_path is None:
        return None
    sampler = load_from_file(settings.class_path, settings.class_name, key="data.sampler.class_path", error=DataError)
    address = f"data.sampler.class_name={settings.class_name}"
    refuse_verls_arguments(sampler, ("data_source", "data_config"), "num_rows, seed, epoch", address)

    def order(num_rows: int, seed: int, epoch: int) -> list[int]:
        with users_code(f"{address}: __init__({num_rows}, {seed}, {epoch}) of {settings.class_path}", DataError):
            drawn = sampler(num_rows, seed, epoch)
        with users_code(f"{address}: __iter__ of {settings.class_path}", DataError):
            return list(drawn)

    return order


@dataclass(eq=False)
class StepLoader:
    """Returns ``batch_size`` prompts per step, without end. Rows left over at the end of an epoch are dropped.

    Its state is a few integers, so a resumed run sees exactly the rows that an uninterrupted one would have seen.

    Attributes:
        dataset: The prompts.
        batch_size: Prompts per step.
        shuffle: Shuffle each epoch. Has no effect where ``sampler`` is given.
        seed: Seed of the order.
        sampler: Returns the row indices of an epoch.
        key: Setting of ``batch_size``, for errors.

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
        """Start at the first row of epoch 0."""
        self.epoch = self._position = 0
        self._order = self._order_of(0)
        self.steps_per_epoch = len(self._order) // self.batch_size

    def next_step(self) -> list[PromptRow]:
        """Return the next ``batch_size`` rows, as :meth:`next_indices` chooses them."""
        return [self.dataset[index] for index in self.next_indices()]

    def next_indices(self) -> list[int]:
        """Return the indices of the next ``batch_size`` rows. A new epoch begins when the present one has no full batch left."""
        if self._position + self.batch_size > len(self._order):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        chosen = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        return chosen

    def state_dict(self) -> dict[str, int]:
        """Return seed, epoch, position, and the number of rows, to check on resume that the dataset is the same."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position, "num_rows": len(self.dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            DataError: The dataset has another number of rows.
        """
        if state["num_rows"] != len(self.dataset):
            raise DataError(
                f"data.train_files: the checkpoint was written with {state['num_rows']} rows, but there are "
                f"{len(self.dataset)} now. Use the same files and settings, or start again with trainer.resume_mode=disable."
            )
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        num_rows = len(self.dataset)
        if self.sampler is not None:
            order = list(self.sampler(num_rows, self.seed, epoch))
        elif self.shuffle:
            # Seeded by both numbers, so that a resumed run draws its epoch without drawing those before it.
            order = np.random.default_rng([self.seed, epoch]).permutation(num_rows).tolist()
        else:
            order = list(range(num_rows))
        for index in order:
            if not (isinstance(index, int) and 0 <= index < num_rows):
                raise DataError(
                    f"data.sampler: epoch {epoch} has an index outside of 0..{num_rows - 1}: {index!r}. Correct the sampler."
                )
        if len(order) < self.batch_size:
            raise DataError(
                f"{self.key}={self.batch_size}: an epoch has only {len(order)} rows. "
                f"Lower it to at most {len(order)}, or add more data."
            )
        return order


# The prompts of each step with their ids, prepared while the workers compute the previous step.


@dataclass(frozen=True)
class StepPrompts:
    """A step's prompts, the ids of all their samples as :class:`Expanded` has them, and what truncation removed."""

    prompts: list[PromptRow]
    prompt_ids: list[list[int]]
    rows_truncated: int
    tokens_dropped: int


class PromptPrefetcher:
    """Prepares the prompts one step ahead of the caller.

    :meth:`state_dict` is the loader's state after the last step that was returned, so a resumed run loses and repeats nothing.

    Args:
        loader: Returns the prompts of each step.
        n: Samples of each prompt.
        expansion: How the samples of a prompt get their ids, a key of ``EXPANSIONS``.
        encoder: An encoder of the prefetcher's own, because it works in its own thread.
    """

    def __init__(self, loader: StepLoader, n: int, expansion: str, encoder: PromptEncoder) -> None:
        """Create the thread. It prepares nothing until the first :meth:`next`."""
        self._loader = loader
        self._n = n
        self._expansion = expansion
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt-prefetcher")
        self._state, self.epoch = loader.state_dict(), loader.epoch
        self._before = self._state, self.epoch
        self._prepared: Future[tuple[StepPrompts, dict[str, Any], int]] | None = None

    def next(self) -> StepPrompts:
        """Return the next step's prompts and start to prepare those of the step after it.

        Raises:
            DataError: As the loader and the encoder raise it.
        """
        self._before = self._state, self.epoch
        return self.more()

    def more(self) -> StepPrompts:
        """Return further prompts for the same step. :meth:`give_back` undoes them with the :meth:`next` before them.

        Raises:
            DataError: As the loader and the encoder raise it.
        """
        prepared = self._thread.submit(self._prepare) if self._prepared is None else self._prepared
        step, self._state, self.epoch = prepared.result()
        self._prepared = self._thread.submit(self._prepare)
        return step

    def give_back(self) -> None:
        """Undo the last :meth:`next`, and :meth:`more` after it, in :meth:`state_dict`, because that step was abandoned.

        No further step may be requested after this.
        """
        self._state, self.epoch = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return what the loader needs to continue after the last returned step."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step whose :meth:`state_dict` this is. What was prepared is dropped.

        Raises:
            DataError: The dataset has another number of rows.
        """
        if self._prepared is not None:
            self._prepared.exception()  # waits, because the thread uses the loader
            self._prepared = None
        self._loader.load_state_dict(state)
        self._state, self.epoch = self._loader.state_dict(), self._loader.epoch
        self._before = self._state, self.epoch

    def close(self) -> None:
        """End the thread. What it has prepared is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> tuple[StepPrompts, dict[str, Any], int]:
        encoder, loader = self._encoder, self._loader
        # The encoder counts over the whole run, so the step's own numbers are differences.
        rows, tokens = encoder.rows_truncated, encoder.tokens_dropped
        expanded = expand(loader.dataset, loader.next_indices(), self._n, self._expansion, encoder)
        cut = encoder.rows_truncated - rows, encoder.tokens_dropped - tokens
        return StepPrompts(expanded.prompts, expanded.ids, *cut), loader.state_dict(), loader.epoch
