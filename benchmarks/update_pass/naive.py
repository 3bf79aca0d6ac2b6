"""The plain ways: all logits and everything kept, or logits of the answers alone; and the gradient all are held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.update_pass.sides import CLIP, PAD, TEMPERATURE, Job, Side, padded, plain_model, plain_side


def build_naive(job: Job) -> Side:
    """Gives the older TRL's order of statements: the prompt once per answer, padded, logits of every position in fp32."""
    model = plain_model(job)

    def update() -> None:
        for rows in job.cuts():
            _naive_micro_batch(model, job, rows)

    return plain_side(model, update)


def _naive_micro_batch(model: nn.Module, job: Job, rows: Sequence[int]) -> None:
    queries, responses, mask = padded_rows(job, rows)
    advantages = _advantages(job, rows)
    context = queries.shape[1]
    output = forward(model, job, torch.cat([queries, responses], 1))
    logits = output.logits[:, context - 1 : -1]
    logits /= TEMPERATURE
    all_log_probs = torch.nn.functional.log_softmax(logits, dim=-1)
    log_probs = torch.gather(all_log_probs, 2, responses.unsqueeze(-1)).squeeze(-1)
    log_probs = torch.masked_fill(log_probs, mask == 0, 0.0)
    _clipped(log_probs.sum(1), advantages, len(job.batch.answers)).backward()


def build_response_logits(job: Job) -> Side:
    """Gives the same with logits of the answers' positions only (``logits_to_keep``), and no tensor held longer than needed."""
    model = plain_model(job)

    def update() -> None:
        for rows in job.cuts():
            queries, responses, mask = padded_rows(job, rows)
            log_probs = _kept_log_probs(model, job, queries, responses) * mask
            _clipped(log_probs.sum(1), _advantages(job, rows), len(job.batch.answers)).backward()

    return plain_side(model, update)


def _kept_log_probs(model: nn.Module, job: Job, queries: Tensor, responses: Tensor) -> Tensor:
    kept = responses.shape[1] + 1
    logits = forward(model, job, torch.cat([queries, responses], 1), logits_to_keep=kept).logits[:, :-1]
    chosen = torch.gather(logits, 2, responses.unsqueeze(-1)).squeeze(-1)
    return chosen.float() - torch.logsumexp(logits.float(), dim=-1)


def forward(model: nn.Module, job: Job, ids: Tensor, **options: Any) -> Any:
    mask = ids != PAD
    position_ids = mask.cumsum(1) - mask.long()
    # Without padding transformers comes to no mask by itself, but by reading values, which a fake tensor lacks.
    given = mask if job.work.spread else {"full_attention": None}
    return model(input_ids=ids, attention_mask=given, position_ids=position_ids, use_cache=False, **options)


def padded_rows(job: Job, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    queries, _ = padded([job.batch.prompt_of(row) for row in rows], "left", job.device)
    responses, mask = padded([job.batch.answers[row] for row in rows], "right", job.device)
    return queries, responses, mask


def _advantages(job: Job, rows: Sequence[int]) -> Tensor:
    return torch.tensor([job.batch.advantages[row] for row in rows], device=job.device)


def _clipped(sums: Tensor, advantages: Tensor, count: int) -> Tensor:
    """Gives RLOO's loss: one ratio per sequence, and their sum over ``count`` sequences of the whole batch."""
    ratio = (sums - sums.detach()).exp()
    losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return losses.sum() / count


@dataclass(frozen=True)
class Reference:
    """What all must compute. gradients: fp32, by name, on the host. log_probs: fp32 [R] of each row, on the device."""

    gradients: dict[str, Tensor]
    log_probs: list[Tensor]


def plainest(job: Job) -> Job:
    return dataclasses.replace(job, work=dataclasses.replace(job.work, dtype="fp32"), checkpointing=False)


def reference(job: Job) -> Reference:
    """Gives gradient and log-probs from the plainest path in fp32: one row at a time, no padding, torch's own autograd."""
    model = plain_model(plainest(job))
    found = []
    for row, answer in enumerate(job.batch.answers):
        ids = torch.tensor([job.batch.prompt_of(row) + answer], device=job.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        targets = ids[0, -len(answer) :]
        log_probs = torch.nn.functional.log_softmax(logits / TEMPERATURE, dim=-1).gather(1, targets[:, None]).squeeze(1)
        # At a ratio of 1 the gradient of the clipped loss is that of minus advantage times log-prob.
        (-job.batch.advantages[row] * log_probs.sum() / len(job.batch.answers)).backward()
        found.append(log_probs.detach())
    return Reference({name: parameter.grad.cpu() for name, parameter in model.named_parameters()}, found)
