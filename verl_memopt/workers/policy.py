"""The policy: a sharded model with an optimizer. It computes log-probs and takes update steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.schema import Actor, RolloutCorrection
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.memory.optimizer.bucketed_adamw import BucketedAdamW
from verl_memopt.memory.optimizer.optimizer_in_backward import StepInBackward
from verl_memopt.memory.parameters.param_offload import ParamHome
from verl_memopt.memory.parameters.resharding import synced
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.observe.kinds import gradient_kinds, optimizer_scope
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.workers.log_probs import LogProbs, compute_log_probs
from verl_memopt.workers.micro_batches import MicroBatch, micro_batches_of
from verl_memopt.workers.objective import Objective
from verl_memopt.workers.schedule import build_optimizer, build_schedule

SKIPPED = "actor/skipped_updates"
PARTIAL = "actor/partial_updates"
COUNTS = (SKIPPED, PARTIAL)
"""Metrics that are summed over the optimizer steps of an update. The others are averaged."""
SAME_ON_ALL_RANKS = ("actor/grad_norm", "actor/lr", SKIPPED)
"""Metrics with the same value on every rank. The others are each rank's share of a sum."""


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of the rows of one optimizer step.

    ``micro_batches`` are the rows of ``batch`` for each forward and backward, as many on every rank. ``counts`` are tokens and
    sequences of the mini-batch over all ranks, so that the loss does not depend on how the mini-batch is split.
    """

    batch: RolloutBatch
    micro_batches: list[list[int]]
    counts: GlobalCounts


@dataclass(frozen=True)
class Updated:
    """The result of an optimizer step that also returns the log-probs of its forward.

    ``log_probs`` is fp32 [R] on the host, in batch order.
    """

    metrics: dict[str, float]
    log_probs: Tensor


class SavedTensorHooks(Protocol):
    """What decides where the tensors rest that a forward saves for its backward."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a context for the forward of one micro-batch."""

    def metrics(self) -> dict[str, float]:
        """Return what was done since the last call."""

    def close(self) -> None:
        """Free what the next step does not need."""


class Policy:
    """The trained model. All ranks call the same methods in the same order.

    Args:
        model: The model, sharded and filled.
        actor: The ``actor`` section of the settings.
        optimizer_steps: Optimizer steps of the whole run, for the schedule.
        world_size: Number of ranks.
        device: The device of the model.
        offload: Offloads its activations. None = they stay on the device.

    Attributes:
        home: The place of the parameters on the host. None = they stay on the device.
        bypass: The rollout correction in bypass mode. None = decoupled mode, or no correction.
    """

    def __init__(
        self,
        model: PolicyModel,
        actor: Actor,
        optimizer_steps: int,
        world_size: int,
        device: torch.device,
        offload: SavedTensorHooks | None = None,
    ) -> None:
        """Build optimizer and schedule."""
        self.model = model
        self.offload = offload
        self.home: ParamHome | None = None
        self.bypass: RolloutCorrection | None = None
        self.actor = actor
        self.device = device
        self.world_size = world_size
        trained, fsdp = [parameter for parameter in model.parameters() if parameter.requires_grad], actor.fsdp_config
        self.optimizer = build_optimizer(trained, actor.optim, fsdp.optimizer_offload, fsdp.seed)
        self._log_probs: list[Tensor] | None = None
        self.in_backward = None
        if actor.optim.in_backward:
            assert isinstance(self.optimizer, BucketedAdamW), type(self.optimizer)
            self.in_backward = StepInBackward(self.optimizer)
        self.schedule = build_schedule(self.optimizer, actor.optim, optimizer_steps)

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of what the policy holds between calls, on the device or on the host."""
        parameters = list(self.model.parameters())
        yield from (("params", parameter) for parameter in parameters)
        yield from (("grads", parameter.grad) for parameter in parameters if parameter.grad is not None)
        values = (value for state in self.optimizer.state.values() for value in state.values())
        yield from (("optimizer", value) for value in values if isinstance(value, Tensor))

    def compute_log_probs(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> LogProbs:
        """Return the log-probs of a batch under the present weights.

        Args:
            batch: The batch of this rank.
            micro_batches: Rows of each forward.
            temperature: Divides the logits.
            with_entropy: Compute entropies too.
            with_sum_pi_squared: Compute the sums of squared probabilities too.
        """
        options = temperature, with_entropy, self.device, with_sum_pi_squared
        return compute_log_probs(self.model, batch, micro_batches, *options)

    def update(self, mini_batches: Sequence[MiniBatch], temperature: float) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics.

        ``actor/skipped_updates`` counts the skipped steps. With ``optim.in_backward`` a skipped step also has
        ``actor/partial_updates``: 1 if this rank had already changed parameters. Sum all metrics over ranks, except those in
        ``SAME_ON_ALL_RANKS``, to get the global values.

        Args:
            mini_batches: One per optimizer step.
            temperature: Divides the logits.
        """
        if self.in_backward is not None:
            self.in_backward.check(max(len(mini.micro_batches) for mini in mini_batches))
        reuse = self.model.supports_prefix_kv
        steps = [
            self.step(micro_batches_of(mini.batch, mini.micro_batches, reuse), mini.counts, temperature) for mini in mini_batches
        ]
        metrics = _over_steps(steps)
        if self.offload is not None:
            metrics |= self.offload.metrics()
        return metrics

    def update_on_policy(self, mini: MiniBatch, temperature: float) -> Updated:
        """Take one optimizer step, and return its metrics with the log-probs of its forward.

        A mini-batch without old log-probs is strictly on-policy.

        Args:
            mini: The mini-batch.
            temperature: Divides the logits.
        """
        self._log_probs = []
        metrics = self.update([mini], temperature)
        parts, self._log_probs = self._log_probs, None
        return Updated(metrics, scatter_tokens(list(zip(mini.micro_batches, parts, strict=True)), mini.batch.responses.sizes()))

    def step(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        """Take one optimizer step, unless the gradient norm is not finite, and return its metrics as host tensors.

        A skipped step drops the gradient and leaves weights, optimizer state and schedule unchanged. The norm is the same on all
        ranks, so they all decide alike. The host waits for the device once, between backward and update.

        Args:
            micro_batches: The micro-batches, read one at a time.
            counts: Tokens and sequences of the mini-batch over all ranks.
            temperature: Divides the logits.
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
        """Update the weights from their gradients, and advance the schedule."""
        with optimizer_scope(self.optimizer, on_host=self.actor.fsdp_config.offload_policy):
            self.optimizer.step()
        self.schedule.step()

    def clip(self) -> Tensor:
        """Return the global gradient norm before clipping, and clip the gradient if ``optim.clip_grad`` is set."""
        parameters, limit = self.model.parameters(), self.actor.optim.clip_grad
        if self.in_backward is not None:
            norm = self.in_backward.norm()
        elif limit is None:
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        else:
            norm = clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        """Add the gradient of a mini-batch, micro-batch by micro-batch, and return the summed metrics.

        Args:
            micro_batches: The micro-batches, read one at a time.
            counts: Tokens and sequences of the mini-batch over all ranks.
            temperature: Divides the logits.
        """
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
        """Add the gradient of one micro-batch and return its metrics. None of its tensors outlives the call.

        Args:
            micro: The micro-batch, on the device.
            counts: Tokens and sequences of the mini-batch over all ranks.
            temperature: Divides the logits.
            prefix_kv: Keys and values of the prompt of its responses, computed before. Their own backward follows later.
        """
        with self._offloaded():
            loss, metrics = self.loss(micro, counts, temperature, prefix_kv)
        # FSDP averages gradients over ranks, but the loss is this rank's share of a global mean, so it is scaled up again.
        # The head has computed its gradients with the same factor.
        (loss * self.world_size).backward()
        return metrics

    def loss(
        self, micro: MicroBatch, counts: GlobalCounts, temperature: float, prefix_kv: PrefixKV | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss and of its metrics.

        The caller must run the backward of ``world_size`` times the loss, exactly once. Arguments as in :meth:`backward`.
        """
        objective = Objective(micro, counts, self.actor, self.bypass)
        token_gradient = objective.token_gradient(self.world_size)
        log_probs, entropy = self.model(micro.pack, temperature, objective.with_entropy, token_gradient, prefix_kv)
        if self._log_probs is not None:
            self._log_probs.append(log_probs.detach())
        return objective.loss(log_probs, entropy)


def _over_steps(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the mean of each metric over optimizer steps, or, for ``COUNTS``, the sum over the steps that have it."""
    means = {name: torch.stack([step[name] for step in steps]).mean().item() for name in steps[0] if name not in COUNTS}
    counted = {name: [step[name].item() for step in steps if name in step] for name in COUNTS}
    return means | {name: sum(values) for name, values in counted.items() if values}


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics as fp32 scalars on the host. An optimizer step waits for the device only here, once."""
    values = {name: value.float() for name, value in metrics.items()}
    on_device = [name for name, value in values.items() if value.device.type != "cpu"]
    if on_device:
        values |= zip(on_device, torch.stack([values[name] for name in on_device]).cpu(), strict=True)
    return values


def _is_finite(norm: Tensor) -> bool:
    """Return whether a norm on the host is finite. A fake tensor, which plans an update, has no value and counts as finite."""
    return isinstance(norm, FakeTensor) or math.isfinite(float(norm.numpy()))
