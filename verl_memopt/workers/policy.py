"""The policy: a sharded model with an optimizer, which computes log-probs and takes update steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Actor
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.memory.activations.activation_offload import ActivationOffload
from verl_memopt.memory.optimizer.bucketed_adamw import BucketedAdamW
from verl_memopt.memory.optimizer.optimizer_in_backward import StepInBackward
from verl_memopt.memory.parameters.resharding import synced
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.observe.kinds import gradient_kinds, optimizer_scope
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.objective import Objective
from verl_memopt.workers.schedule import build_optimizer, build_schedule
from verl_memopt.workers.scorer import LogProbs, MicroBatch, compute_log_probs, micro_batches_of

SKIPPED = "actor/skipped_updates"
PARTIAL = "actor/partial_updates"
COUNTS = (SKIPPED, PARTIAL)
"""Metrics that are summed over the optimizer steps of an update; the others are averaged."""
SAME_ON_ALL_RANKS = ("actor/grad_norm", "actor/lr", SKIPPED)
"""Metrics that every rank knows; the others are each rank's share of a sum."""


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of the rows of one optimizer step.

    micro_batches: rows of ``batch`` per forward and backward, as many on every rank. counts: tokens and sequences of the
    mini-batch over all ranks, so that the loss does not depend on how it is cut.
    """

    batch: RolloutBatch
    micro_batches: list[list[int]]
    counts: GlobalCounts


@dataclass(frozen=True)
class Updated:
    """What an optimizer step gives that is its own old-log-prob pass. log_probs: fp32 [R] on the host, in batch order."""

    metrics: dict[str, float]
    log_probs: Tensor


class Policy:
    """The trained model. All ranks call the same methods in the same order."""

    def __init__(
        self,
        model: PolicyModel,
        actor: Actor,
        optimizer_steps: int,
        world_size: int,
        device: torch.device,
        offload: ActivationOffload | None = None,
    ) -> None:
        """model: sharded and filled. optimizer_steps: of the whole run, for the schedule. offload: of its activations."""
        self.model = model
        self.offload = offload
        self.actor = actor
        self.shared = actor.use_prefix_grouper
        self.device = device
        self.world_size = world_size
        trained, fsdp = [parameter for parameter in model.parameters() if parameter.requires_grad], actor.fsdp_config
        self.optimizer = build_optimizer(trained, actor.optim, fsdp.optimizer_offload, fsdp.seed)
        self._found: list[Tensor] | None = None
        self.in_backward = None
        if actor.optim.in_backward:
            assert isinstance(self.optimizer, BucketedAdamW), type(self.optimizer)
            self.in_backward = StepInBackward(self.optimizer)
        self.schedule = build_schedule(self.optimizer, actor.optim, optimizer_steps)

    def compute_log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float, with_entropy: bool
    ) -> LogProbs:
        """Gives the log-probs of a batch under the present weights."""
        return compute_log_probs(self.model, batch, micro_batches, temperature, with_entropy, self.device, self.shared)

    def update(self, mini_batches: Sequence[MiniBatch], temperature: float) -> dict[str, float]:
        """Takes one optimizer step per mini-batch and gives the mean of their metrics.

        ``actor/skipped_updates`` counts the steps that :meth:`step` skipped. With ``optim.in_backward`` a skipped step also has
        ``actor/partial_updates``: 1 where this rank had moved parameters by then. The sums over ranks of everything but
        ``SAME_ON_ALL_RANKS`` are the global values.
        """
        if self.in_backward is not None:
            self.in_backward.check(max(len(mini.micro_batches) for mini in mini_batches))
        options = self.shared, self.model.supports_prefix_kv
        steps = [
            self.step(micro_batches_of(mini.batch, mini.micro_batches, *options), mini.counts, temperature)
            for mini in mini_batches
        ]
        metrics = _over_steps(steps)
        if self.offload is not None:
            metrics["memory/activation_offload/bytes_moved"] = float(self.offload.take_bytes_moved())
        return metrics

    def update_on_policy(self, mini: MiniBatch, temperature: float) -> Updated:
        """Takes one optimizer step on a batch without old log-probs and gives, beside its metrics, those it found."""
        assert mini.batch.old_log_probs is None
        self._found = []
        metrics = self.update([mini], temperature)
        parts, self._found = self._found, None
        return Updated(metrics, scatter_tokens(list(zip(mini.micro_batches, parts, strict=True)), mini.batch.responses.sizes()))

    def step(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        """Takes one optimizer step, unless the gradient norm is not finite, and gives its metrics as host tensors.

        A skipped step drops the gradient and leaves weights, optimizer state and schedule as they were. The norm is the same on
        all ranks, so they all decide alike. The host waits for the device once, between the backward and the update.
        """
        learning_rate = self.schedule.get_last_lr()[0]
        metrics = self.accumulate(micro_batches, counts, temperature)
        metrics["actor/grad_norm"] = self.clip()
        metrics["actor/lr"] = torch.tensor(learning_rate)
        if self.in_backward is not None:
            metrics[PARTIAL] = self.in_backward.take_moved()
        metrics = on_host(metrics)
        finite = _is_finite(metrics["actor/grad_norm"])
        metrics[SKIPPED] = torch.tensor(0.0 if finite else 1.0)
        if finite:
            metrics.pop(PARTIAL, None)
            self.apply()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def apply(self) -> None:
        """Updates the weights from their gradients, and goes on in the schedule."""
        with optimizer_scope(self.optimizer, on_host=self.actor.fsdp_config.offload_policy):
            self.optimizer.step()
        self.schedule.step()

    def clip(self) -> Tensor:
        """Gives the global norm of the gradient, and clips it where that is asked for."""
        parameters, limit = self.model.parameters(), self.actor.optim.clip_grad
        if self.in_backward is not None:
            norm = self.in_backward.norm()
        elif limit is None:
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        else:
            norm = clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        """Adds the gradient of a mini-batch, micro-batch by micro-batch, and gives the summed metrics."""
        total: dict[str, Tensor] = {}
        prefix_kv: PrefixKV | None = None
        with gradient_kinds(parameter for block in self.model.blocks() for parameter in block.parameters()):
            for micro in synced(micro_batches, self.model, self.actor.fsdp_config.gradient_sync):
                micro = micro.to(self.device)
                if micro.prompt is not None and prefix_kv is None:
                    with self._offloaded():
                        prefix_kv = self.model.compute_prefix(micro.prompt)
                for name, value in self.backward(micro, counts, temperature, prefix_kv).items():
                    total[name] = total[name] + value if name in total else value
                if micro.ends and prefix_kv is not None:
                    prefix_kv.backward()
                    prefix_kv = None
        return total

    def _offloaded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.offload is None else self.offload.forward()

    def backward(
        self, micro: MicroBatch, counts: GlobalCounts, temperature: float, prefix_kv: PrefixKV | None = None
    ) -> dict[str, Tensor]:
        """Adds the gradient of one micro-batch and gives its metrics; none of its tensors outlives the call.

        prefix_kv: the keys and values of the prompt of its answers, whose own backward is to come.
        """
        with self._offloaded():
            loss, metrics = self.loss(micro, counts, temperature, prefix_kv)
        # FSDP averages gradients over ranks; the loss is this rank's share of a global mean, so it is scaled back up.
        # The head has computed its gradients with the same factor.
        (loss * self.world_size).backward()
        return metrics

    def loss(
        self, micro: MicroBatch, counts: GlobalCounts, temperature: float, prefix_kv: PrefixKV | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gives this micro-batch's share of the loss and of its metrics.

        The backward to follow is that of ``world_size`` times the loss, once.
        """
        objective = Objective(micro, counts, self.actor)
        token_gradient = objective.token_gradient(self.world_size)
        log_probs, entropy = self.model(micro.pack, temperature, objective.with_entropy, token_gradient, prefix_kv)
        if self._found is not None:
            self._found.append(log_probs.detach())
        return objective.loss(log_probs, entropy)


def _over_steps(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Gives the mean of each metric over optimizer steps, and of ``COUNTS`` the sum over those that have it."""
    means = {name: torch.stack([step[name] for step in steps]).mean().item() for name in steps[0] if name not in COUNTS}
    counted = {name: [step[name].item() for step in steps if name in step] for name in COUNTS}
    return means | {name: sum(values) for name, values in counted.items() if values}


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives fp32 scalars on the host: the one place where an optimizer step waits for the device, once."""
    values = {name: value.float() for name, value in metrics.items()}
    there = [name for name, value in values.items() if value.device.type != "cpu"]
    if there:
        values |= zip(there, torch.stack([values[name] for name in there]).cpu(), strict=True)
    return values


def _is_finite(norm: Tensor) -> bool:
    """Says whether a norm on the host is finite. A fake tensor has no value: what plans with it plans an update."""
    return isinstance(norm, FakeTensor) or math.isfinite(float(norm.numpy()))
