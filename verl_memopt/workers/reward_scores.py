"""The pass of a reward model: one score for each conversation, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_memopt.data.batch import RolloutBatch
from verl_memopt.models.pack import Pack
from verl_memopt.models.value_model import ValueModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.forward_pass import forward_pass


def compute_scores(
    model: ValueModel, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Return the score of each row, fp32 [B] on the host, in batch order.

    A score belongs to the last token of its conversation, as in transformers' sequence classifiers. A value belongs to the token
    after its state, so each response ends with one token more, whose value is the score. No model sees that token.

    Args:
        model: A value model with the head of a classifier.
        batch: The conversations of this rank, each with one token more at its end.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        device: The device of the model.
    """
    assert all(batch.responses.sizes()), "each conversation ends with one token more"

    def forward(pack: Pack, prefix_kv: PrefixKV | None, rows: Sequence[int]) -> Tensor:
        return model(pack, prefix_kv)[pack.row_lengths.cumsum(0) - 1]

    scores = torch.empty(batch.num_rows, dtype=torch.float32)
    parts = forward_pass(model, batch, micro_batches, device, forward)
    scores[[row for rows, _ in parts for row in rows]] = torch.cat([part for _, part in parts]).cpu()  # one wait for all
    return scores
