"""The prompts of each step, in an order that the seed decides and a checkpoint can continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from verl_memopt.config import schema
from verl_memopt.data.dataset import PromptDataset, PromptRow
from verl_memopt.data.plugin import load_from_file
from verl_memopt.errors import DataError

Sampler = Callable[[int, int, int], Iterable[int]]
"""(num_rows, seed, epoch) -> row indices of that epoch."""


def in_order(num_rows: int, seed: int, epoch: int) -> Iterable[int]:
    """The rows as they stand."""
    return range(num_rows)


def shuffled(num_rows: int, seed: int, epoch: int) -> Iterable[int]:
    """A permutation that depends on seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def load_sampler(settings: schema.CustomSampler) -> Sampler | None:
    """The sampler class that ``data.sampler`` names, or None."""
    if settings.class_path is None:
        return None
    return load_from_file(settings.class_path, settings.class_name, key="data.sampler.class_path", error=DataError)


class StepLoader:
    """Gives ``batch_size`` prompts per step, without end; rows left over at the end of an epoch are dropped.

    Its state is a few integers, so a resumed run sees exactly the rows that the uninterrupted one would have seen. Raises
    DataError when an epoch has fewer rows than a batch.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, shuffle: bool, seed: int, sampler: Sampler | None = None) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._sampler = sampler if sampler is not None else shuffled if shuffle else in_order
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self.steps_per_epoch = len(self._order) // batch_size

    def next_step(self) -> list[PromptRow]:
        """The next ``batch_size`` rows; moves on to the next epoch when the present one has no full batch left."""
        if self._position + self._batch_size > len(self._order):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [self._dataset[index] for index in chosen]

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, rows taken in it, and the dataset's size, to check that it is still the same."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self._position, "num_rows": len(self._dataset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken. Raises DataError when the dataset has another number of rows."""
        if state["num_rows"] != len(self._dataset):
            raise DataError(
                f"data.train_files: the checkpoint was made with {state['num_rows']} rows, now there are {len(self._dataset)}. "
                "Use the same files and settings, or start anew with trainer.resume_mode=disable."
            )
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        num_rows = len(self._dataset)
        order = list(self._sampler(num_rows, self.seed, epoch))
        if not all(isinstance(index, int) and 0 <= index < num_rows for index in order):
            raise DataError(f"data.sampler: epoch {epoch} has an index that is no row of 0..{num_rows - 1}. Mend the sampler.")
        if len(order) < self._batch_size:
            raise DataError(
                f"data.train_batch_size={self._batch_size}: an epoch has only {len(order)} rows. "
                f"Lower it to at most {len(order)}, or give more data."
            )
        return order
