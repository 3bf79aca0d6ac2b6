"""A policy and a critic together: the models of PPO's update, what the critic learns, and the gradient all are held to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.update_pass.naive import Reference, reference
from benchmarks.update_pass.sides import CLIP_VALUE, Job, Side

SPREAD = 0.7
"""Standard deviation of the returns, and of how far the old values are from the present ones."""


class Pair(nn.Module):
    """The two models of PPO, so that their parameters and gradients are counted together."""

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        """Hold the policy's model and the critic's."""
        super().__init__()
        self.actor, self.critic = actor, critic


def pair_side(actor: Side, critic: Side, update: Callable[[], None] | None = None) -> Side:
    """Return the side of both models. The critic is updated first, as in verl's loop, unless ``update`` does both."""

    def both() -> None:
        critic.update()
        actor.update()

    def gradients() -> dict[str, Tensor]:
        return named("actor", actor.gradients()) | named("critic", critic.gradients())

    return Side(Pair(actor.model, critic.model), update or both, gradients)


def named(role: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients under names that begin with the role of their model."""
    return {f"{role}.{name}": gradient for name, gradient in gradients.items()}


def make_critic(job: Job, seed: int) -> None:
    """Write the critic's folder: the policy's decoder with a random head of one output."""
    if (job.critic_folder / "config.json").exists():
        return
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(job.folder, num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator) / model.config.hidden_size**0.5)
        model.score.bias.fill_(0.1)
    model.config.classifier_dropout = 0.0  # transformers would drop a tenth of the states
    model.save_pretrained(job.critic_folder)
    AutoTokenizer.from_pretrained(job.folder).save_pretrained(job.critic_folder)


def critic_model(job: Job) -> nn.Module:
    """Return transformers' token classifier of the critic's folder, with its blocks checkpointed where that is asked for."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(job.critic_folder, dtype=job.dtype, attn_implementation="sdpa").to(
        job.device
    )
    model.train()
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_values(job: Job, seed: int) -> Job:
    """Return the job with random returns, and old values at random distances from the critic's own, on both sides of the clip."""
    plain = dataclasses.replace(job, work=dataclasses.replace(job.work, dtype="fp32"), checkpointing=False)
    model, generator, values, returns = critic_model(plain), torch.Generator().manual_seed(seed), [], []
    with torch.no_grad():
        for row in range(len(job.batch.answers)):
            present = row_values(model, job, row)
            drawn = torch.randn(2, present.shape[0], generator=generator).to(job.device)
            values.append(present + SPREAD * drawn[0])
            returns.append(SPREAD * drawn[1])
    return dataclasses.replace(job, values=values, returns=returns)


def row_values(model: nn.Module, job: Job, row: int) -> Tensor:
    """Return the values fp32 [R] of one row alone: each from the state before its token."""
    answer = job.batch.answers[row]
    ids = torch.tensor([job.batch.prompt_of(row) + answer], device=job.device)
    return model(input_ids=ids, use_cache=False).logits[0, -len(answer) - 1 : -1, 0].float()


def clipped_value_loss(predictions: Tensor, values: Tensor, returns: Tensor) -> Tensor:
    """Return half of the larger squared error of each token, with the prediction as it is and clipped around the old value."""
    clipped = torch.clamp(predictions, values - CLIP_VALUE, values + CLIP_VALUE)
    return 0.5 * torch.max((predictions - returns) ** 2, (clipped - returns) ** 2)


def pair_reference(job: Job) -> Reference:
    """Return both gradients from the plainest path in fp32: one row at a time, no padding, torch's own autograd."""
    plain = dataclasses.replace(job, work=dataclasses.replace(job.work, dtype="fp32"), checkpointing=False)
    policy, model = reference(job), critic_model(plain)
    for row, (values, returns) in enumerate(zip(job.values, job.returns, strict=True)):
        loss = clipped_value_loss(row_values(model, job, row), values, returns)
        (loss.sum() / len(job.batch.answers)).backward()
    found = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Reference(named("actor", policy.gradients) | named("critic", found), policy.log_probs)
