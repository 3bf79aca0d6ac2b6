"""The plain ways of PPO's update: the policy as the naive contestants compute it, the critic by transformers on padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.update_pass.naive import build_naive, build_response_logits, forward, padded_rows
from benchmarks.update_pass.pair import clipped_value_loss, critic_model, pair_side
from benchmarks.update_pass.sides import Job, Side, plain_side


def build_naive_ppo(job: Job) -> Side:
    """Return the update with the policy's logits of every position."""
    return _side(job, build_naive)


def build_response_logits_ppo(job: Job) -> Side:
    """Return the update with the policy's logits of the answers' positions alone."""
    return _side(job, build_response_logits)


def _side(job: Job, build_actor: Callable[[Job], Side]) -> Side:
    model = critic_model(job)

    def update() -> None:
        for rows in job.cuts():
            queries, responses, mask = padded_rows(job, rows)
            logits = forward(model, job, torch.cat([queries, responses], 1)).logits
            predictions = logits[:, queries.shape[1] - 1 : -1, 0].float()
            values, returns = (padded_values(column, rows) for column in (job.values, job.returns))
            (clipped_value_loss(predictions, values, returns) * mask).sum().div(len(job.batch.answers)).backward()

    return pair_side(build_actor(job), plain_side(model, update))


def padded_values(column: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return the values of some rows, fp32 [rows, longest], padded with zeros."""
    return pad_sequence([column[row] for row in rows], batch_first=True)
