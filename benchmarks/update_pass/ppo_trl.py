"""TRL's PPO: the wrapper of both models, the forward and the helpers of its trainer, called in the order of its loop.

TRL 1.16 has no PPO any more. setup.sh puts 1.12, the last version that has it, beside it, and this module imports that one. The
loop of its trainer is one method, so its statements of the loss are written out here, without its statistics.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.update_pass.naive import padded_rows, padded_values
from benchmarks.update_pass.sides import CLIP, CLIP_VALUE, PAD, TEMPERATURE, Job, Side, critic_model, named, plain_model

FOLDER = os.path.join(sys.prefix, "trl-with-ppo")
if not os.path.isdir(FOLDER):
    raise ImportError("trl-with-ppo, which benchmarks/update_pass/setup.sh installs, is missing")
if FOLDER not in sys.path:
    if "trl" in sys.modules:
        raise ImportError("another TRL is loaded already; run the workload with a critic in a process of its own")
    sys.path.insert(0, FOLDER)
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.experimental.ppo.ppo_trainer import (  # noqa: E402
    INVALID_LOGPROB,
    PolicyAndValueWrapper,
    forward,
    masked_mean,
    selective_log_softmax,
)


def build_trl_ppo(job: Job) -> Side:
    """Return the update of both models in one forward and one backward, whole logits, as its trainer has it.

    Its mean over the tokens of a micro-batch is scaled to the share of the sum over a sequence and the mean over sequences.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PolicyAndValueWrapper(plain_model(job), _classifier(job))
    data = [_inputs(job, rows) for rows in job.cuts()]

    def update() -> None:
        for queries, responses, padding, old_log_probs, advantages, values, returns in data:
            output, all_values = forward(model, torch.cat([queries, responses], 1), PAD)
            context = queries.shape[1]
            logits = output.logits[:, context - 1 : -1]
            logits /= TEMPERATURE + 1e-7
            log_probs = torch.masked_fill(selective_log_softmax(logits, responses), padding, INVALID_LOGPROB)
            predictions = torch.masked_fill(all_values[:, context - 1 : -1].squeeze(-1), padding, 0)
            clipped = torch.clamp(predictions, values - CLIP_VALUE, values + CLIP_VALUE)
            errors = torch.max(torch.square(predictions - returns), torch.square(clipped - returns))
            value_loss = 0.5 * masked_mean(errors, ~padding)
            ratio = torch.exp(log_probs - old_log_probs)
            losses = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1.0 - CLIP, 1.0 + CLIP))
            loss = masked_mean(losses, ~padding) + value_loss
            (loss * ((~padding).sum() / len(job.batch.answers))).backward()

    def gradients() -> dict[str, Tensor]:
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        actor = {name.removeprefix("policy."): grad for name, grad in found.items() if name.startswith("policy.")}
        critic = {name.removeprefix("value_model."): grad for name, grad in found.items() if name.startswith("value_model.")}
        return named("actor", actor) | named("critic", critic)

    return Side(model, update, gradients)


def _classifier(job: Job) -> torch.nn.Module:
    """Return the sequence classifier that the wrapper expects, with the head of the critic's folder, bias included."""
    from transformers import AutoModelForSequenceClassification

    model = critic_model(job)
    value_model = AutoModelForSequenceClassification.from_config(model.config, attn_implementation="sdpa")
    value_model.model, value_model.score = model.model, model.score
    return value_model.train()


def _inputs(job: Job, rows: Sequence[int]) -> tuple[Tensor, ...]:
    queries, responses, mask = padded_rows(job, rows)
    padding = mask == 0
    old = torch.masked_fill(padded_values(job.old_log_probs, rows), padding, INVALID_LOGPROB)
    advantages = torch.tensor([job.batch.advantages[row] for row in rows], device=job.device)[:, None].expand(mask.shape)
    return queries, responses, padding, old, advantages, padded_values(job.values, rows), padded_values(job.returns, rows)
