"""The critic: values of a batch, and update steps on the clipped value loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.losses import ValueTokens, value_loss
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config import schema
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.model.decoder import PrefixKV
from verl_memopt.model.packing import Pack
from verl_memopt.model.value_model import ValueModel
from verl_memopt.worker.policy import forward_pass
from verl_memopt.worker.trained_model import CRITIC, MicroBatch, MiniBatch, SavedTensorHooks, TrainedModel


@dataclass(eq=False)
class Critic:
    """The trained critic. Arguments are as in :class:`TrainedModel`. All ranks call the same methods in step."""

    model: ValueModel
    settings: schema.Critic
    schedule_steps: int
    world_size: int
    device: torch.device
    offload: SavedTensorHooks | None = None

    def __post_init__(self) -> None:
        """Build optimizer and schedule."""
        steps, world_size, device = self.schedule_steps, self.world_size, self.device
        self.trained = TrainedModel(CRITIC, self.model, self.settings, steps, world_size, device, self.offload)

    def values(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        """Return the value of the state before each response token, fp32 [R] on the host, in batch order.

        ``micro_batches`` are as in :func:`forward_pass`.
        """

        def forward(pack: Pack, prefix_kv: PrefixKV | None, rows: Sequence[int]) -> Tensor:
            return self.model(pack, prefix_kv)

        parts = forward_pass(self.model, batch, micro_batches, self.trained.device, forward)
        return scatter_tokens(parts, batch.responses.sizes())

    def update(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics, as :meth:`TrainedModel.update`.

        The batches have ``old_values`` and ``returns``.
        """
        return self.trained.update(mini_batches, self.loss)

    def loss(
        self, micro: MicroBatch, counts: GlobalCounts, prefix_kv: PrefixKV | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of the clipped value loss, and of its metrics."""
        assert micro.old_values is not None
        assert micro.returns is not None
        settings, pack = self.settings, micro.pack
        assert settings.loss_agg_mode is not None
        predictions = self.model(pack, prefix_kv)
        tokens = ValueTokens(predictions, micro.old_values, micro.returns, pack.row, micro.lengths, counts, micro.kept)
        loss, metrics = value_loss(tokens, settings.cliprange_value, settings.loss_agg_mode, settings.loss_scale_factor)
        return loss, {f"{CRITIC.name}/{name}": value for name, value in metrics.items()}
