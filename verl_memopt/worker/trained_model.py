"""A model that is trained: its optimizer, its schedule, and optimizer steps on a loss that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from verl_memopt.algorithms.rollout_correction import kept_lengths
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Critic
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.distributed.device import fetched_together, is_gpu, sent_together
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.grad_offload_torch import OffloadedGradients, StepInBackward, clip_divisor, is_finite
from verl_memopt.memory.resharding_torch import synced
from verl_memopt.memory.residency import OffloadedParams
from verl_memopt.memory.sequence_parallel_torch import largest_of_ranks
from verl_memopt.memory.token_budget_torch import attempts
from verl_memopt.memory.token_packing import Cut, spans
from verl_memopt.model.decoder import PrefixKV
from verl_memopt.model.packed_model import PackedModel, dtype_of
from verl_memopt.model.packing import Pack, pack_groups, pack_prompt, pack_suffixes
from verl_memopt.observe.device_ledger import gradient_kinds, optimizer_scope, state_tensors
from verl_memopt.worker.optimizer import build_optimizer, build_schedule

# Micro-batches: the rows of one forward, packed, with the fields that the loss reads.


TOKEN_TENSORS = (
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "selected",
    "old_values",
    "returns",
    "weights",
    "kept",
    "sampled_log_probs",
)
"""The fields of :class:`MicroBatch` with one value per response token."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward. The optional tensors have one value per target, in the order of ``pack.targets``.

    They are fp32 [R], except ``selected``, bool [R]: tokens that the losses ``clip_cov`` and ``kl_cov`` act on; and ``kept``,
    bool [R]: False for tokens that the rollout correction rejects. ``old_values`` and ``returns`` are for the critic.

    ``prompt`` is the prompt to compute before its first responses, if the pack contains only responses. ``ends`` is True in the
    micro-batch with the last of its responses. ``reads`` is False where the prompt is only computed to keep step with other
    ranks.
    """

    pack: Pack
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    selected: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None
    sampled_log_probs: Tensor | None = None
    prompt: Pack | None = None
    ends: bool = True
    reads: bool = True

    @cached_property
    def lengths(self) -> Tensor:
        """The number of response tokens per row, int64 [rows], without those that the rollout correction rejects."""
        pack, kept = self.pack, self.kept
        return pack.row_lengths if kept is None else kept_lengths(kept, pack.row, pack.row_lengths)

    def to(self, device: torch.device) -> MicroBatch:
        found: list[Tensor] = []

        # Two passes over the tensors in one order: collect them, send all in one copy, and put the copies in their places.
        def take(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._map(take)
        sent = iter(sent_together(found, device))
        return self._map(lambda _: next(sent))

    def _map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        present = {name: getattr(self, name) for name in TOKEN_TENSORS if getattr(self, name) is not None}
        fields: dict[str, Any] = {name: change(tensor) for name, tensor in present.items()}
        prompt = None if self.prompt is None else self.prompt.map(change)
        return replace(self, pack=self.pack.map(change), prompt=prompt, **fields)


def micro_batch(batch: RolloutBatch, rows: Sequence[int]) -> MicroBatch:
    chosen = batch.select(rows)
    prompts, responses = chosen.prompts, chosen.responses
    tokens = (prompts.flat, prompts.sizes(), responses.flat, responses.sizes())
    pack = pack_groups(*tokens, chosen.prompt_groups())
    return MicroBatch(pack, **_token_tensors(chosen))


def micro_batches_of(batch: RolloutBatch, rows: Sequence[Sequence[int]], with_prefix_kv: bool) -> Iterator[MicroBatch]:
    """Yield the packed micro-batches of a batch. ``rows`` holds the rows of each.

    ``with_prefix_kv`` computes a prompt once for neighbouring micro-batches, as :func:`spans` groups them.
    """
    for span, reading in spans(rows, batch.row_tokens()) if with_prefix_kv else [([single], None) for single in rows]:
        if reading is None:
            yield micro_batch(batch, span[0])
            continue
        # The prompt is packed once for the span. Each part holds the same object, and the first one has it computed. A rank
        # that carries none computes one of a single token, because the others do.
        prompt = pack_prompt(batch.select(span[0][:1]).prompts.flat if reading else torch.zeros(1, dtype=torch.int64))
        for place, part in enumerate(span):
            chosen, ends = batch.select(part), place == len(span) - 1
            if place < reading:
                pack = pack_suffixes(prompt.input_ids.shape[1], chosen.responses.flat, chosen.responses.sizes())
                yield MicroBatch(pack, **_token_tensors(chosen), prompt=prompt, ends=ends)
            else:
                yield replace(micro_batch(batch, part), prompt=prompt, ends=ends, reads=False)


def _token_tensors(batch: RolloutBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in TOKEN_TENSORS}


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of the rows of one optimizer step.

    ``micro_batches`` holds the rows of ``batch`` for each forward and backward; every rank has equally many. After an
    out-of-memory error smaller ones replace them. ``counts`` are tokens and sequences of the mini-batch over all ranks, so that
    the loss does not depend on the split.
    """

    batch: RolloutBatch
    micro_batches: list[list[int]]
    counts: GlobalCounts

    def cut_again(self, micro_batches: Sequence[Sequence[int]]) -> None:
        # In place: the caller matches the outputs of a step with the micro-batches that really ran.
        self.micro_batches[:] = map(list, micro_batches)
        if isinstance(micro_batches, Cut):
            assert isinstance(self.micro_batches, Cut), "ranks carry prompts in the same micro-batches"
            self.micro_batches.spans = micro_batches.spans


LossOf = Callable[[MicroBatch, GlobalCounts, PrefixKV | None], tuple[Tensor, dict[str, Tensor]]]
"""Returns a micro-batch's share of the loss (scalar, with gradient) and of its metrics (scalars, without).

Its arguments are the micro-batch on the device, the sizes of the mini-batch, and the prefix KV of the prompt of its responses.
The caller runs the backward of ``world_size`` times the loss, once."""


class SavedTensorHooks(Protocol):
    """Keeps the tensors that a forward saves for its backward elsewhere than on the device."""

    def forward(self) -> AbstractContextManager[None]: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Role:
    def __init__(self, name: str, key: str) -> None:
        self.name, self.key = name, key
        self.grad_norm = f"{name}/grad_norm"
        """The global gradient norm before clipping."""
        self.lr = f"{name}/lr"
        """The learning rate."""
        self.skipped = f"{name}/skipped_updates"
        """How many optimizer steps of an update were skipped."""
        self.partial = f"{name}/partial_updates"
        """In a skipped step: 1 if this rank had already changed parameters."""
        self.changed = f"{name}/changed_weights"
        """The share of the weights that compute, in half precision, whose bits an optimizer step has changed."""
        self.counts = self.skipped, self.partial
        """Metrics that are summed over the optimizer steps of an update. The others are averaged."""
        self.same_on_all_ranks = self.grad_norm, self.lr, self.skipped, self.changed
        """Metrics with the same value on every rank. The others are each rank's share of a sum."""


ACTOR = Role("actor", "actor_rollout_ref.actor")
CRITIC = Role("critic", "critic")


@dataclass(eq=False)
class TrainedModel:
    """A sharded model with an optimizer. All ranks call the same methods in the same order.

    Args:
        role: The role of the model.
        model: The model, sharded and filled.
        settings: The role's section of the settings.
        schedule_steps: Length of the schedule over the whole run, as ``optim.lr_schedule_steps`` counts it.
        world_size: Number of ranks.
        device: The device of the model.
        offload: Offloads its activations. None = they stay on the device.

    Attributes:
        home: The place of the parameters on the host. None = they stay on the device.
    """

    role: Role
    model: PackedModel
    settings: Actor | Critic
    schedule_steps: int
    world_size: int
    device: torch.device
    offload: SavedTensorHooks | None = None
    home: OffloadedParams | None = None

    def __post_init__(self) -> None:
        settings, key = self.settings, f"{self.role.key}.optim"
        self.optim = optim = settings.optim
        self.fsdp = fsdp = settings.fsdp_config if isinstance(settings, Actor) else settings.model.fsdp_config
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        masters = self.model.masters if fsdp.split_master_weights else None
        self.optimizer = build_optimizer(trained, optim, fsdp.optimizer_offload, fsdp.seed, key, masters, fsdp.grad_offload)
        self.masters = self.optimizer if isinstance(self.optimizer, Bucketed) and fsdp.split_master_weights else None
        if self.masters is not None:
            # Sums over micro-batches need more digits than the weights have, as FSDP2's reduced gradients do.
            for parameter in (weight for weight in trained if weight.dtype != torch.float32):
                parameter.grad_dtype = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{self.role.key}.fsdp_config")
        # With adapters most weights that compute are the frozen model's, so a share of changed ones would say nothing.
        half, whole = (torch.bfloat16, torch.float16), len(trained) == len(list(self.model.parameters()))
        self.bucketed = self.optimizer if isinstance(self.optimizer, Bucketed) else None
        if self.bucketed is not None and whole and self.model.compute in half:
            self.bucketed.computes_in = self.model.compute
        self.in_backward = None
        if optim.in_backward:
            self.in_backward = StepInBackward(self.optimizer, self.role.key, self.device)
        self.offloaded = self._offload_gradients() if fsdp.grad_offload else None
        self.schedule = build_schedule(self.optimizer, optim, self.schedule_steps, key)
        self._moved, self._undecided = False, list[Tensor]()

    def _offload_gradients(self) -> OffloadedGradients:
        model, fsdp = self.model, self.fsdp
        # What is reduced at the last micro-batch alone is summed whole until then.
        whole = self.world_size > 1 and fsdp.gradient_sync == "last"
        matrices = () if whole else (model.lm.get_input_embeddings(), model.head)
        reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{self.role.key}.fsdp_config")
        return OffloadedGradients(self.optimizer, model.blocks(), matrices, reduce)

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("params", parameter) for parameter in self.model.parameters())
        yield from (("grads", gradient) for gradient in self._gradients())
        yield from (("optimizer", value) for value in state_tensors(self.optimizer))

    def master(self, parameter: Tensor, on_host: bool = False) -> Tensor:
        """Return the fp32 values of a parameter: the parameter, or both halves joined, ``on_host`` if they rest there."""
        return parameter if self.masters is None else self.masters.master(parameter, on_host)

    @property
    def has_gradient(self) -> bool:
        return (self.offloaded is not None and self.offloaded.has_any) or bool(self._gradients())

    def update(self, mini_batches: Sequence[MiniBatch], loss_of: LossOf, ends_rollout: bool = True) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics.

        Summed over ranks the metrics are global, except those in ``Role.same_on_all_ranks``. ``{role}/skipped_updates`` counts
        skipped steps. With ``optim.in_backward`` a skipped step also has ``{role}/partial_updates``: 1 if this rank had already
        changed parameters.

        Args:
            mini_batches: One per optimizer step.
            loss_of: The loss of a micro-batch.
            ends_rollout: No further mini-batches of the same rollout follow. A schedule that counts rollouts then advances,
                unless every step of the rollout was skipped.
        """
        if self.in_backward is not None:
            # Of all mini-batches, before the step of the first one changes a weight.
            self.in_backward.check(max(len(mini.micro_batches) for mini in mini_batches))
        return self.conclude([self.step(mini, loss_of) for mini in mini_batches], ends_rollout)[0]

    def step(self, mini: MiniBatch, loss_of: LossOf) -> dict[str, Tensor]:
        """Take one optimizer step on a mini-batch, and return its metrics as scalars on their devices.

        The host waits for the device only with an optimizer that cannot decide there whether to skip the step.
        """
        # Where the host decides nothing, it learns during this step whether earlier ones of the update were skipped.
        learn = self._outcomes()
        metrics = self.forward_backward(mini, loss_of)
        learn()
        return self.take_step(metrics)

    def forward_backward(self, mini: MiniBatch, loss_of: LossOf, adds: bool = False) -> dict[str, Tensor]:
        """Compute the gradient of a mini-batch and return its metrics. ``adds``: to the gradient of earlier calls."""
        # Starting again would lose the gradient of earlier calls, and weights that were updated in backward cannot go back.
        restarts = not adds and self.in_backward is None
        passes: Iterable[None] = [None]
        if self.in_backward is not None:
            # An update in backward that clips needs a pass before it, for the norm.
            passes = self.in_backward.passes(len(mini.micro_batches), self.optim.clip_grad)
        for _ in passes:
            # After an out-of-memory error on any rank all starts again, with smaller micro-batches.
            for attempt in attempts(self.model, mini.batch.row_tokens, mini.micro_batches, restarts):
                with attempt as rows:
                    if restarts:
                        self.optimizer.zero_grad(set_to_none=True)  # what a failed attempt or call has left
                    micro_batches = micro_batches_of(mini.batch, rows, self.model.supports_prefix_kv)
                    metrics = self.accumulate(micro_batches, mini.counts, loss_of)
        mini.cut_again(rows)
        return metrics

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, loss_of: LossOf) -> dict[str, Tensor]:
        """Add the gradient of each micro-batch, one after another, and return the sums of their metrics.

        No tensor of a micro-batch outlives its turn. Hooks of the parameters take gradients away as soon as backward has them:
        FSDP2 reduces them, and then they leave for the host or update their parameters, where the settings say so.
        """
        total: dict[str, Tensor] = {}
        prefix_kv: PrefixKV | None = None
        plain = (parameter for block in self.model.blocks() for parameter in block.parameters())
        with self.model.computing(), gradient_kinds(plain):
            for micro in synced(micro_batches, self.model, self.fsdp.gradient_sync, self.model.rows):
                micro = micro.to(self.device)
                if micro.prompt is not None and prefix_kv is None:
                    with self._offloaded_activations():
                        prefix_kv = self.model.compute_prefix(micro.prompt)
                with self._offloaded_activations():
                    loss, metrics = loss_of(micro, counts, prefix_kv if micro.reads else None)
                # FSDP averages gradients over ranks, but the loss is this rank's share of a global mean, so it is scaled up
                # again. The head may have computed its gradients in its forward above, with the same factor (see
                # _PrecomputedGradient in memory/chunked_logprob_torch.py). Its backward then only hands them on to the blocks.
                (loss * self.world_size).backward()
                self.model.end_backward()
                del loss
                for name, value in metrics.items():
                    total[name] = total[name] + value if name in total else value
                if micro.ends and prefix_kv is not None:
                    # All its responses have added to the gradient of the prompt's keys and values, so the prompt's own backward
                    # runs once.
                    prefix_kv.backward()
                    self.model.end_backward()
                    prefix_kv = None
        return total

    def take_step(self, metrics: dict[str, Tensor], learning_rate: float | None = None) -> dict[str, Tensor]:
        """Clip the gradient, take the step, drop the gradient, and add the step's metrics to ``metrics``.

        A step whose gradient norm is not finite is skipped: weights, optimizer state and schedule stay as they are. The norm is
        the same on all ranks, so they all decide alike. ``learning_rate`` is for this step alone; None = the schedule's.
        """
        role = self.role
        with self._learning_rate(learning_rate) as rate:
            metrics[role.lr] = torch.tensor(rate)
            if self.in_backward is None and getattr(self.optimizer, "_step_supports_amp_scaling", False):
                metrics = self._clip_and_step_on_device(metrics)
            else:
                metrics = self._clip_and_step(metrics)
            self.changed()
            if self.bucketed is not None and self.bucketed.computes_in is not None:
                metrics[role.changed] = self.bucketed.changed_share()
        self._undecided.append(metrics[role.skipped])
        if not is_gpu(self.device):
            self._outcomes()()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def conclude(
        self, steps: Sequence[Mapping[str, Tensor]], ends_rollout: bool = False, also: Sequence[Tensor] = ()
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Wait for queued steps. Return their metrics as :meth:`update` does, and the further fp32 tensors ``also`` on the host.

        Everything comes to the host in one copy, for which the host waits after the last launch.
        """
        values = [value.float() for step in steps for value in step.values()]
        undecided, self._undecided = self._undecided, []
        fetched = iter(fetched_together([*undecided, *values, *also], self.device)())
        self._note_steps([next(fetched) for _ in undecided])
        metrics_by_step = [{name: next(fetched) for name in step} for step in steps]
        if ends_rollout:
            # A schedule that counts rollouts stays where it is if every step since the last rollout was skipped.
            if self._moved and self.optim.lr_schedule_steps == "rollouts":
                self.schedule.step()
            self._moved = False
        metrics = over_steps(metrics_by_step, self.role.counts)
        return metrics if self.offload is None else metrics | self.offload.metrics(), list(fetched)

    # How a step is taken.

    def _clip_and_step_on_device(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        # Queues clipping and update, which the device skips if the norm is not finite.
        metrics[self.role.grad_norm] = norm = self._norm()
        metrics[self.role.skipped] = skipped = norm.isfinite().logical_not_().float()
        # Torch's protocol for gradient scalers: the kernel of the update divides the gradient, or does nothing.
        optimizer: Any = self.optimizer
        optimizer.found_inf = skipped
        optimizer.grad_scale = None if self.optim.clip_grad is None else clip_divisor(norm, self.optim.clip_grad)
        try:
            self._step_optimizer()
        finally:
            del optimizer.found_inf, optimizer.grad_scale
        return metrics

    def _clip_and_step(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        # The host must read the norm here: this optimizer cannot skip a step on the device.
        role = self.role
        metrics[role.grad_norm] = self.clip()
        if self.in_backward is not None:
            moved, sequence = self.in_backward.take_moved(), self.model.sequence
            # The driver reads the metrics of one rank of those that share micro-batches.
            metrics[role.partial] = moved if sequence is None else largest_of_ranks(moved, sequence)
        metrics = on_host(metrics)
        finite = is_finite(metrics[role.grad_norm])
        metrics[role.skipped] = torch.tensor(0.0 if finite else 1.0)
        if finite:
            metrics.pop(role.partial, None)
            self._step_optimizer()
        return metrics

    def _outcomes(self) -> Callable[[], None]:
        fetched, self._undecided = fetched_together(self._undecided, self.device), []
        # The copy starts now and is read later, so the host does not wait in between.
        return lambda: self._note_steps(fetched())

    @contextmanager
    def _learning_rate(self, own: float | None) -> Iterator[float | Tensor]:
        # The schedule's, read before the step, which advances the schedule; or another one for the body alone.
        scheduled = self.schedule.get_last_lr()
        if own is None:
            yield scheduled[0]
            return
        self._set_learning_rates([own] * len(scheduled))
        yield own
        self._set_learning_rates(scheduled)

    def _set_learning_rates(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def apply(self) -> None:
        self._step_optimizer()
        self.changed()
        self._note_steps([torch.tensor(0.0)])

    def changed(self) -> None:
        if self.model.rows is not None:
            # This rank's rows have new values. The whole weights on all ranks are old until the next gather.
            self.model.rows.stale = True

    def _step_optimizer(self) -> None:
        if self.home is not None:
            self.home.arrive()  # weights that have left since their backward are read here before any forward
        with optimizer_scope(self.optimizer, on_host=self.model.stays_on_host):
            self.optimizer.step()

    def _note_steps(self, skipped: Sequence[Tensor]) -> None:
        # Zeros are the steps that were taken.
        for was_skipped in skipped:
            if isinstance(was_skipped, FakeTensor) or not float(was_skipped.numpy()):
                self._moved = True
                if self.optim.lr_schedule_steps == "updates":
                    self.schedule.step()

    def clip(self) -> Tensor:
        norm, limit = self._norm(), self.optim.clip_grad
        if self.offloaded is not None:
            self.offloaded.divide(None if limit is None else clip_divisor(norm, limit))
        elif self.in_backward is None and limit is not None:
            shards = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in self._gradients()]
            # Divided, not multiplied by the inverse: the fused kernel divides, and no knob may change the last bit.
            torch._foreach_div_(shards, clip_divisor(norm, limit).to(shards[0].device))
        return norm

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _norm(self) -> Tensor:
        if self.in_backward is not None:
            norm = self.in_backward.norm()
        elif self.offloaded is not None:
            norm = self.offloaded.norm()
        else:
            norm = get_total_norm(self._gradients())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _offloaded_activations(self) -> AbstractContextManager[None]:
        return nullcontext() if self.offload is None else self.offload.forward()


def readable(home: OffloadedParams | None) -> AbstractContextManager[None]:
    return nullcontext() if home is None else home.readable()


def over_steps(steps: Sequence[Mapping[str, Tensor]], counts: Sequence[str]) -> dict[str, float]:
    means = {name: torch.stack([step[name] for step in steps]).mean().item() for name in steps[0] if name not in counts}
    counted = {name: [step[name].item() for step in steps if name in step] for name in counts}
    return means | {name: sum(values) for name, values in counted.items() if values}


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = [value.float() for value in metrics.values()]
    return dict(zip(metrics, fetched_together(values, values[0].device)(), strict=True))
