"""PF-PPO: the rows of the update are drawn from the batch by their score, with replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.algorithms.shaping import pf_ppo_weights, resample_rows
from verl_memopt.config.schema import PfPpo
from verl_memopt.trainer.experience import StepBatch
from verl_memopt.trainer.update import SEEDS


def draw_rows(batch: StepBatch, settings: PfPpo, seed: int) -> None:
    """Draw the rows of the update from a scored batch, and add the share of rows that were drawn.

    Args:
        batch: Batch of a step, with its results.
        settings: The section ``algorithm.pf_ppo``.
        seed: Of the draw.
    """
    batch.drawn = drawn_rows(batch.scores, settings, seed)
    batch.metrics["pf_ppo/drawn_rows_share"] = len(set(batch.drawn)) / len(batch.drawn)


def drawn_rows(scores: Tensor, settings: PfPpo, seed: int) -> list[int]:
    """Return the rows that take the places of a batch, drawn by their weight. A row may be drawn several times or never.

    Rows without a score are not drawn. Without any score the rows stay as they are.

    Args:
        scores: fp32 [B], as the reward function returned them; NaN where no score applies.
        settings: The section ``algorithm.pf_ppo``.
        seed: Of the draw. It is made on the driver, so that it does not depend on ranks.
    """
    valid = ~scores.isnan()
    if not valid.any():
        return list(range(scores.shape[0]))
    weights = pf_ppo_weights(scores, valid, settings.reweight_method, settings.weight_pow)
    return resample_rows(weights, torch.Generator().manual_seed(seed % SEEDS)).tolist()
