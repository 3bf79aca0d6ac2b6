"""A pass without gradients: one forward of each micro-batch. Log-probs and values are both computed by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from verl_memopt.data.batch import RolloutBatch
from verl_memopt.memory.parameters.resharding import reshard_units
from verl_memopt.models.pack import Pack
from verl_memopt.models.packed_model import PackedModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.micro_batches import micro_batches_of

Output = TypeVar("Output")


def forward_pass(
    model: PackedModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    device: torch.device,
    forward: Callable[[Pack, PrefixKV | None], Output],
) -> list[tuple[Sequence[int], Output]]:
    """Return (rows, output) of each micro-batch, without gradients. What the pass gathered is freed.

    Args:
        model: The model, which computes the prefix KV of prompts whose answers lie in several micro-batches.
        batch: The batch of this rank.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        device: The device of the model.
        forward: Runs the model on a pack.
    """
    micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, model.supports_prefix_kv)]
    outputs: list[tuple[Sequence[int], Output]] = []
    prefix_kv: PrefixKV | None = None
    with torch.no_grad():
        for rows, micro in zip(micro_batches, micros, strict=True):
            if micro.prompt is not None and prefix_kv is None:
                prefix_kv = model.compute_prefix(micro.prompt)
            outputs.append((rows, forward(micro.pack, prefix_kv)))
            prefix_kv = None if micro.ends else prefix_kv
    reshard_units(model)
    return outputs
