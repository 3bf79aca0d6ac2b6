"""Liger's chunked fused linear GRPO loss, on the hidden states of the answers."""

from __future__ import annotations

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from benchmarks.update_pass.sides import CLIP, TEMPERATURE, Job, Side, padded, plain_model, plain_side


def build_liger(job: Job) -> Side:
    """Gives the update with Liger's loss: gradients made in the forward, a sequence at a time; its compile is off, as for all."""
    model = plain_model(job)
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, compiled=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="dr_grpo",
        max_completion_length=1, temperature=TEMPERATURE,
    )  # fmt: skip

    def update() -> None:
        for rows in job.cuts():
            queries, query_mask = padded([job.batch.prompt_of(row) for row in rows], "left", job.device)
            responses, mask = padded([job.batch.answers[row] for row in rows], "right", job.device)
            advantages = torch.tensor([job.batch.advantages[row] for row in rows], device=job.device)
            ids, attended = torch.cat([queries, responses], 1), torch.cat([query_mask, mask], 1)
            hidden = model.model(input_ids=ids, attention_mask=attended, use_cache=False).last_hidden_state
            hidden = hidden[:, -responses.shape[1] - 1 : -1]
            loss, _ = loss_of(hidden, model.lm_head.weight, responses, mask, advantages)
            (loss * len(rows) / len(job.batch.answers)).backward()

    return plain_side(model, update)
