"""The prompts of each step, in an order that depends on the seed and that a checkpoint can continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptRow, PromptRows
from verl_memopt.data.plugin import load_from_file, users_code
from verl_memopt.errors import DataError

Sampler = Callable[[int, int, int], Iterable[int]]
"""(num_rows, seed, epoch) -> row indices of that epoch."""


def in_order(num_rows: int, seed: int, epoch: int) -> Iterable[int]:
    """Return the rows in file order."""
    return range(num_rows)


def shuffled(num_rows: int, seed: int, epoch: int) -> Iterable[int]:
    """Return a permutation of the rows that depends on seed and epoch alone."""
    # Seeded by both numbers, so that a resumed run draws its epoch without drawing those before it.
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def load_sampler(settings: schema.CustomSampler) -> Sampler | None:
    """Return the sampler class that ``data.sampler`` names, or None."""
    if settings.class_path is None:
        return None
    sampler = load_from_file(settings.class_path, settings.class_name, key="data.sampler.class_path", error=DataError)
    address = f"data.sampler.class_name={settings.class_name}"

    def order(num_rows: int, seed: int, epoch: int) -> list[int]:
        with users_code(f"{address}: __init__({num_rows}, {seed}, {epoch}) of {settings.class_path}", DataError):
            drawn = sampler(num_rows, seed, epoch)
        with users_code(f"{address}: __iter__ of {settings.class_path}", DataError):
            return list(drawn)

    return order


class StepLoader:
    """Returns ``batch_size`` prompts per step, without end. Rows left over at the end of an epoch are dropped.

    Its state is a few integers, so a resumed run sees exactly the rows that an uninterrupted one would have seen.

    Args:
        dataset: The prompts.
        batch_size: Prompts per step.
        shuffle: Shuffle each epoch. Has no effect where ``sampler`` is given.
        seed: Seed of the order.
        sampler: Returns the row indices of an epoch.
        key: Setting of ``batch_size``, for errors.

    Raises:
        DataError: An epoch has fewer rows than a batch.
    """

    def __init__(
        self,
        dataset: PromptRows,
        batch_size: int,
        shuffle: bool,
        seed: int,
        sampler: Sampler | None = None,
        key: str = "data.train_batch_size",
    ) -> None:
        """Start at the first row of epoch 0."""
        self._key = key
        self.dataset = dataset
        self._batch_size = batch_size
        self._sampler = sampler if sampler is not None else shuffled if shuffle else in_order
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self.steps_per_epoch = len(self._order) // batch_size

    def next_step(self) -> list[PromptRow]:
        """Return the next ``batch_size`` rows, as :meth:`next_indices` chooses them."""
        return [self.dataset[index] for index in self.next_indices()]

    def next_indices(self) -> list[int]:
        """Return the indices of the next ``batch_size`` rows. A new epoch begins when the present one has no full batch left."""
        if self._position + self._batch_size > len(self._order):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
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
        order = list(self._sampler(num_rows, self.seed, epoch))
        if not all(isinstance(index, int) and 0 <= index < num_rows for index in order):
            wrong = next(index for index in order if not (isinstance(index, int) and 0 <= index < num_rows))
            raise DataError(
                f"data.sampler: epoch {epoch} has an index outside of 0..{num_rows - 1}: {wrong!r}. Correct the sampler."
            )
        if len(order) < self._batch_size:
            raise DataError(
                f"{self._key}={self._batch_size}: an epoch has only {len(order)} rows. "
                f"Lower it to at most {len(order)}, or add more data."
            )
        return order
