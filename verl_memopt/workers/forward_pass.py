"""A pass without gradients: one forward of each micro-batch. Log-probs, values and scores are all computed by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from verl_memopt.data.batch import RolloutBatch
from verl_memopt.memory.limits.recutting import cut_again
from verl_memopt.memory.parameters.resharding import reshard_units
from verl_memopt.models.pack import Pack
from verl_memopt.models.packed_model import PackedModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.micro_batches import micro_batches_of

Output = TypeVar("Output")


Forward = Callable[[Pack, PrefixKV | None, Sequence[int]], Output]
"""Runs a model on the pack of some rows, with the prefix KV of their prompt if there is one, and the rows themselves."""


def forward_pass(
    model: PackedModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    device: torch.device,
    forward: Forward[Output],
) -> list[tuple[Sequence[int], Output]]:
    """Return (rows, output) of each micro-batch, without gradients. What the pass gathered is freed.

    After an out-of-memory error the rows that are left are cut into smaller micro-batches, where :func:`recutting` allows it.

    Args:
        model: The model, which computes the prefix KV of prompts whose answers lie in several micro-batches.
        batch: The batch of this rank.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        device: The device of the model.
        forward: Runs the model on a pack.
    """
    outputs: list[tuple[Sequence[int], Output]] = []
    remaining: Sequence[Sequence[int]] = micro_batches
    while remaining:
        done = len(outputs)
        try:
            _forward_each(model, batch, remaining, device, forward, outputs)
            break
        except RuntimeError as error:
            remaining = remaining[len(outputs) - done :]
            smaller = cut_again(error, model, batch.row_tokens(), remaining, remaining[0])
            if smaller is None:
                raise
            remaining = smaller
    reshard_units(model)
    return outputs


def _forward_each(
    model: PackedModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    device: torch.device,
    forward: Forward[Output],
    outputs: list[tuple[Sequence[int], Output]],
) -> None:
    """Append (rows, output) of each micro-batch to ``outputs``."""
    micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, model.supports_prefix_kv)]
    prefix_kv: PrefixKV | None = None
    with torch.no_grad():
        for rows, micro in zip(micro_batches, micros, strict=True):
            if micro.prompt is not None and prefix_kv is None:
                prefix_kv = model.compute_prefix(micro.prompt)
            outputs.append((rows, forward(micro.pack, prefix_kv, rows)))
            prefix_kv = None if micro.ends else prefix_kv
