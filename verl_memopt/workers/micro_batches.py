"""Micro-batches: the rows of one forward, packed, with the fields that the loss reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.data.batch import RolloutBatch
from verl_memopt.memory.batching.row_tokens import chains
from verl_memopt.models.pack import Pack, pack_groups, pack_prompt, pack_suffixes

Field = Tensor | None
TokenTensors = tuple[Field, Field, Field, Field, Field, Field, Field, Field]
"""The tensors with one value per response token, in the order of the fields of :class:`MicroBatch`."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward of some rows. The optional tensors have one value per target, in the order of ``pack.targets``.

    ``selected`` is bool [R]: the tokens that the losses ``clip_cov`` and ``kl_cov`` act on. ``kept`` is bool [R]: False for
    tokens that the rollout correction rejects. The others are fp32 [R]; ``old_values`` and ``returns`` are for the critic.
    ``prompt`` is the prompt to compute before the first of its responses, if the pack contains responses alone. ``ends`` is True
    if the last of its responses is in this micro-batch.
    """

    pack: Pack
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    selected: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None
    prompt: Pack | None = None
    ends: bool = True

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device. The copies are asynchronous."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        fields = (
            moved(self.old_log_probs), moved(self.ref_log_probs), moved(self.advantages), moved(self.selected),
            moved(self.old_values), moved(self.returns), moved(self.weights), moved(self.kept),
        )  # fmt: skip
        prompt = None if self.prompt is None else self.prompt.to(device)
        return MicroBatch(self.pack.to(device), *fields, prompt, self.ends)


def micro_batch(batch: RolloutBatch, rows: Sequence[int]) -> MicroBatch:
    """Return the micro-batch of the chosen rows, on the host. Only this function reads lengths from tensors."""
    chosen = batch.select(rows)
    prompts, responses = chosen.prompts, chosen.responses
    tokens = (prompts.flat, prompts.sizes(), responses.flat, responses.sizes())
    pack = pack_groups(*tokens, chosen.prompt_groups())
    return MicroBatch(pack, *_flat(chosen))


def micro_batches_of(batch: RolloutBatch, rows: Sequence[Sequence[int]], with_prefix_kv: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the chosen rows.

    Args:
        batch: The batch.
        rows: Rows of each micro-batch.
        with_prefix_kv: Compute one prompt for neighbouring micro-batches, as :func:`chains` groups them.
    """
    for chain in chains(rows, batch.row_tokens()) if with_prefix_kv else [[single] for single in rows]:
        if len(chain) == 1:
            yield micro_batch(batch, chain[0])
            continue
        # The prompt is packed once for the chain. Each part holds the same object, and the first one has it computed.
        prompt = pack_prompt(batch.select(chain[0][:1]).prompts.flat)
        for part in chain:
            chosen = batch.select(part)
            pack = pack_suffixes(prompt.input_ids.shape[1], chosen.responses.flat, chosen.responses.sizes())
            yield MicroBatch(pack, *_flat(chosen), prompt, part is chain[-1])


def _flat(batch: RolloutBatch) -> TokenTensors:
    return (
        batch.old_log_probs, batch.ref_log_probs, batch.advantages, batch.selected, batch.old_values, batch.returns,
        batch.weights, batch.kept,
    )  # fmt: skip
