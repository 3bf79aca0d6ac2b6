"""Responses that reached their limit without an end, left out of the losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_memopt.data.batch import RolloutBatch


def mask_truncated(rows: RolloutBatch, finish_reasons: Sequence[str]) -> dict[str, float]:
    """Mark the tokens of truncated responses as not kept, beside those that the rollout correction rejects.

    Rewards and groups stay, so that a truncated response still counts for the baseline of its group. Source: overlong filtering
    of DAPO, arXiv 2503.14476, and ``mask_truncated_completions`` of TRL.

    Args:
        rows: Batch of the step.
        finish_reasons: ``length`` for a response that was truncated, of each row.

    Returns:
        The metric ``reward/masked_rows``, how many responses are left out.
    """
    ended = torch.tensor([reason != "length" for reason in finish_reasons])
    kept = ended[rows.response_row()]
    rows.kept = kept if rows.kept is None else rows.kept & kept
    return {"reward/masked_rows": float((~ended).sum())}
