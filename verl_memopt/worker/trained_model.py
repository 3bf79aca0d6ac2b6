"""A trained model with its optimizer and schedule. It takes optimizer steps on a loss that the caller provides."""

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
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.chunked_logprob_torch import TokenGradient
from verl_memopt.memory.grad_offload_torch import OffloadedGradients, StepInBackward, clip_divisor, is_finite
from verl_memopt.memory.pass_order import Cut, InParts
from verl_memopt.memory.resharding_torch import synced
from verl_memopt.memory.residency import OffloadedParams
from verl_memopt.memory.sequence_parallel_torch import largest_of_ranks
from verl_memopt.memory.teaching import AnyTeaching
from verl_memopt.memory.token_budget_torch import attempts
from verl_memopt.memory.token_packing import spans
from verl_memopt.model.open_path import OpenPack, RunPack, path_packs
from verl_memopt.model.packed_model import PackedModel, dtype_of
from verl_memopt.model.packing import Pack, pack_forest, pack_groups, pack_prompt, pack_rows, pack_suffixes
from verl_memopt.model.prefix_kv import PrefixKV
from verl_memopt.model.router_replay import Routes
from verl_memopt.observe.device_ledger import gradient_kinds, optimizer_scope, state_tensors
from verl_memopt.worker.optimizer import build_optimizer, build_schedule
from verl_memopt.worker.parts import Compute, Parts

# Micro-batches: the rows of one forward, packed into one sequence, with the fields that the loss reads.


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
    "teacher_weights",
)
"""The fields of :class:`MicroBatch` with one value per response token."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward. The optional tensors have one value per target, in the order of ``pack.targets``.

    These tensors are fp32 [R], except ``selected`` and ``kept``, which are bool [R]. ``selected`` is True for tokens that the
    losses ``clip_cov`` and ``kl_cov`` act on. ``kept`` is False for tokens that the rollout correction rejects. ``old_values``
    and ``returns`` are for the critic.

    ``prompt`` is None unless several micro-batches share the computation of one prompt. It is then computed before the first of
    them, and ``ends`` is True in the last of them. ``reads`` is False if the rows do not read this prompt, which is then computed
    only to run the same collectives as other ranks.

    ``places`` are those of :class:`RolloutBatch`, int64 [R]. They stay on the host.

    ``is_routed``: its packs replay or record experts.

    ``parts`` is None unless the rows are too long for one forward. ``pack`` then has no tokens, only the numbers of rows.
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
    teacher_weights: Tensor | None = None
    prompt: Pack | None = None
    ends: bool = True
    reads: bool = True
    parts: Parts | None = None
    places: Tensor | None = None
    is_routed: bool = False

    @cached_property
    def lengths(self) -> Tensor:
        """Number of response tokens per row that the rollout correction does not reject, int64 [rows]."""
        pack, kept = self.pack, self.kept
        return pack.row_lengths if kept is None else kept_lengths(kept, pack.row, pack.row_lengths)

    def to(self, device: torch.device) -> MicroBatch:
        found: list[Tensor] = []

        # Two passes over the tensors in the same order: collect them, send all in one copy, then replace each by its copy.
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
        parts = None if self.parts is None else self.parts.map(change)
        return replace(self, pack=self.pack.map(change), prompt=prompt, parts=parts, **fields)

    def routes(self) -> list[Routes]:
        """Return the routes of all packs of the micro-batch, first that of a prompt that other micro-batches read too."""
        steps = [] if self.parts is None else self.parts.steps
        packs = [self.prompt, self.pack, *(step.pack for step in steps if isinstance(step, OpenPack | RunPack))]
        return [pack.routes for pack in packs if pack is not None and pack.routes is not None]

    def outputs(
        self,
        model: PackedModel,
        compute: Compute,
        prefix_kv: PrefixKV | None,
        token_gradient: TokenGradient | None = None,
        teaching: AnyTeaching | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return what ``compute`` returns, one value per sampled token of the rows. ``teaching`` covers these tokens.

        If the rows are computed in parts, the values are leaves of a new graph. After the backward of a loss of them,
        :meth:`Parts.backward` is needed.
        """
        if self.parts is None:
            return compute(self.pack, prefix_kv, token_gradient, teaching)
        return self.parts.outputs(model, compute, token_gradient, teaching)


def micro_batch(batch: RolloutBatch, rows: Sequence[int]) -> MicroBatch:
    chosen = batch.select(rows)
    prompts, responses, forest = chosen.prompts, chosen.responses, chosen.forest
    if forest is None:
        tokens = (prompts.flat, prompts.sizes(), responses.flat, responses.sizes())
        pack = pack_groups(*tokens, chosen.prompt_groups())
        if chosen.routes is not None and chosen.prompt_routes is not None:
            pack = pack.routed(torch.cat([chosen.prompt_routes.flat, chosen.routes]))
    else:
        pack = pack_forest(forest.tokens, forest.sizes, forest.parent, forest.place, responses.sizes()).routed(forest.routes)
    return MicroBatch(pack, **_token_tensors(chosen))


def micro_batches_of(batch: RolloutBatch, rows: Sequence[Sequence[int]], with_prefix_kv: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a batch, each packed into one sequence. ``rows`` holds the rows of each micro-batch.

    With ``with_prefix_kv`` neighbouring micro-batches of one prompt share its computation. :func:`spans` groups them.

    Raises:
        ConfigError: A micro-batch needs several passes, and there can be no prefix KV.
    """
    for span, reading in spans(rows, batch.row_tokens()) if with_prefix_kv else [([single], None) for single in rows]:
        if isinstance(span[0], InParts):
            if not with_prefix_kv:
                raise ConfigError(span[0].problem)
            yield _in_parts(batch, span[0])
            continue
        if reading is None:
            yield micro_batch(batch, span[0])
            continue
        # The prompt is packed once for the span, and all micro-batches of the span hold the same object. A rank without a shared
        # prompt computes a prompt of one token, so that it runs the same collectives as the other ranks.
        first = batch.select(span[0][:1]) if reading else None
        prompt = pack_prompt(torch.zeros(1, dtype=torch.int64) if first is None else first.prompts.flat)
        if first is not None and first.prompt_routes is not None:
            prompt = prompt.routed(first.prompt_routes.flat)
        for place, part in enumerate(span):
            chosen, ends = batch.select(part), place == len(span) - 1
            if place < reading:
                pack = pack_suffixes(prompt.input_ids.shape[1], chosen.responses.flat, chosen.responses.sizes())
                pack = pack.routed(chosen.routes)
                yield MicroBatch(pack, **_token_tensors(chosen), prompt=prompt, ends=ends)
            else:
                yield replace(micro_batch(batch, part), prompt=prompt, ends=ends, reads=False)


def _in_parts(batch: RolloutBatch, rows: InParts) -> MicroBatch:
    chosen = batch.select(rows)
    assert chosen.forest is not None
    forest, nothing = chosen.forest.select(torch.arange(len(chosen.forest.place))), torch.zeros(0, dtype=torch.int64)
    pack = replace(pack_rows(nothing, [], nothing, []), row=chosen.response_row(), row_lengths=chosen.responses.lengths)
    return MicroBatch(pack, **_token_tensors(chosen), parts=Parts(path_packs(forest, rows.budget, rows.word)))


def _token_tensors(batch: RolloutBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in (*TOKEN_TENSORS, "places")} | {"is_routed": batch.is_routed}


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of the rows of one optimizer step.

    ``micro_batches`` holds the rows of ``batch`` for each forward and backward. All ranks have equally many micro-batches. After
    an out-of-memory error smaller micro-batches replace them. ``counts`` has the number of tokens and sequences of the
    mini-batch over all ranks, so that the loss does not depend on the split into micro-batches.
    """

    batch: RolloutBatch
    micro_batches: list[list[int]]
    counts: GlobalCounts

    @property
    def num_backwards(self) -> int:
        # At least so many. A micro-batch in parts has one for each pass.
        return len(self.micro_batches) + sum(isinstance(rows, InParts) for rows in self.micro_batches)

    def cut_again(self, micro_batches: Sequence[Sequence[int]]) -> None:
        # In place, because the caller matches the outputs of a step with the micro-batches that really ran.
        self.micro_batches[:] = [rows if isinstance(rows, InParts) else list(rows) for rows in micro_batches]
        if isinstance(micro_batches, Cut):
            assert isinstance(self.micro_batches, Cut), "all ranks must share prompts between the same micro-batches"
            self.micro_batches.spans = micro_batches.spans


LossOf = Callable[[MicroBatch, GlobalCounts, PrefixKV | None], tuple[Tensor, dict[str, Tensor]]]
"""Returns a micro-batch's share of the loss (a scalar with gradient) and of its metrics (scalars without gradient).

Its arguments are the micro-batch on the device, the sizes of the mini-batch, and the prefix KV of the shared prompt or None. The
caller runs one backward of ``world_size * loss``."""


class SavedTensorHooks(Protocol):
    """Moves the tensors that a forward saves for its backward off the device."""

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
        """Number of skipped optimizer steps in an update."""
        self.partial = f"{name}/partial_updates"
        """1 if a skipped step had already changed parameters on this rank. Exists only for skipped steps."""
        self.changed = f"{name}/changed_weights"
        """Share of the half-precision weights that an optimizer step has changed by at least one bit."""
        self.counts = self.skipped, self.partial
        """Metrics that are summed over the optimizer steps of an update. The others are averaged."""
        self.same_on_all_ranks = self.grad_norm, self.lr, self.skipped, self.changed
        """Metrics with the same value on every rank. Of all other metrics each rank has its share of a sum."""


ACTOR = Role("actor", "actor_rollout_ref.actor")
CRITIC = Role("critic", "critic")


@dataclass(eq=False)
class TrainedModel:
    """A sharded model with an optimizer. All ranks call the same methods in the same order.

    Args:
        role: The role of the model.
        model: The model, sharded and filled.
        settings: The role's section of the settings.
        schedule_steps: Length of the schedule in the whole run, in the unit of ``optim.lr_schedule_steps``.
        world_size: Number of ranks.
        device: The device of the model.
        offload: Offloads the activations of the model. None = they stay on the device.

    Attributes:
        home: Moves the parameters between host and device. None = they stay on the device.
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
            # A sum over micro-batches needs a longer dtype than the weights have. FSDP2 sums in this dtype too.
            for parameter in (weight for weight in trained if weight.dtype != torch.float32):
                parameter.grad_dtype = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{self.role.key}.fsdp_config")
        # With adapters most weights are frozen, so the share of changed weights would say nothing.
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
        # With gradient_sync=last, gradients are not sharded until the last micro-batch, so they cannot leave in tiles.
        whole = self.world_size > 1 and fsdp.gradient_sync == "last"
        matrices = () if whole else (model.lm.get_input_embeddings(), model.head)
        reduce = dtype_of(fsdp.mixed_precision.reduce_dtype, f"{self.role.key}.fsdp_config")
        return OffloadedGradients(self.optimizer, model.blocks(), matrices, reduce)

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("params", parameter) for parameter in self.model.parameters())
        yield from (("grads", gradient) for gradient in self._gradients())
        yield from (("optimizer", value) for value in state_tensors(self.optimizer))

    def master(self, parameter: Tensor, on_host: bool = False) -> Tensor:
        """Return the fp32 master weights of a parameter: the parameter itself, or the joined halves if they are split.

        With ``on_host`` split halves are joined on the host if they rest there.
        """
        return parameter if self.masters is None else self.masters.master(parameter, on_host)

    @property
    def has_gradient(self) -> bool:
        return (self.offloaded is not None and self.offloaded.has_any) or bool(self._gradients())

    def update(self, mini_batches: Sequence[MiniBatch], loss_of: LossOf, ends_rollout: bool = True) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics.

        The sum of a metric over ranks is its global value, except for the metrics in ``Role.same_on_all_ranks``.
        ``{role}/skipped_updates`` counts skipped steps. With ``optim.in_backward`` a skipped step also has
        ``{role}/partial_updates``: 1 if this rank had already changed parameters.

        Args:
            mini_batches: One per optimizer step.
            loss_of: Computes the loss of a micro-batch.
            ends_rollout: Whether these are the last mini-batches of a rollout. A schedule that counts rollouts then advances,
                unless every step of the rollout was skipped.
        """
        if self.in_backward is not None:
            # Check all mini-batches before the first step changes a weight.
            self.in_backward.check(max(mini.num_backwards for mini in mini_batches))
        return self.conclude([self.step(mini, loss_of) for mini in mini_batches], ends_rollout)[0]

    def step(self, mini: MiniBatch, loss_of: LossOf) -> dict[str, Tensor]:
        """Take one optimizer step on a mini-batch, and return its metrics as scalar tensors, which may still be on the device.

        The host waits for the device only if the optimizer cannot decide on the device whether to skip the step.
        """
        # If the device decides, the host learns during this step whether earlier steps of the update were skipped.
        learn = self._outcomes()
        metrics = self.forward_backward(mini, loss_of)
        learn()
        return self.take_step(metrics)

    def forward_backward(self, mini: MiniBatch, loss_of: LossOf, adds: bool = False) -> dict[str, Tensor]:
        """Compute the gradient of a mini-batch and return its metrics. With ``adds`` add to the gradient of earlier calls."""
        # A second attempt would lose the gradient of earlier calls, and cannot undo updates that a backward has made.
        restarts = not adds and self.in_backward is None
        passes: Iterable[None] = [None]
        if self.in_backward is not None:
            # With clipping, an update in backward needs an earlier pass that computes the norm.
            passes = self.in_backward.passes(mini.num_backwards, self.optim.clip_grad)
        for _ in passes:
            # After an out-of-memory error on any rank, all ranks start again with smaller micro-batches.
            for attempt in attempts(self.model, mini.batch.row_tokens, mini.micro_batches, restarts):
                with attempt as rows:
                    if restarts:
                        self.optimizer.zero_grad(set_to_none=True)  # drop what a failed attempt has computed
                    micro_batches = micro_batches_of(mini.batch, rows, self.model.supports_prefix_kv)
                    metrics = self.accumulate(micro_batches, mini.counts, loss_of)
        mini.cut_again(rows)
        return metrics

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, loss_of: LossOf) -> dict[str, Tensor]:
        """Compute and sum the gradients of the micro-batches, one after another. Return the sums of their metrics.

        All tensors of a micro-batch are freed before the next one starts. Hooks of the parameters take each gradient as soon as
        backward has computed it: FSDP2 reduces it, and then, if the settings say so, it moves to the host or updates its
        parameter.
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
                if micro.parts is not None:
                    micro.parts.context = self._offloaded_activations
                with self._offloaded_activations() if micro.parts is None else nullcontext():
                    loss, metrics = loss_of(micro, counts, prefix_kv if micro.reads else None)
                # FSDP averages gradients over ranks, but the loss is this rank's share of a global mean, so it is scaled up
                # again. The head may have computed its gradients in its forward above, with the same factor (see
                # _PrecomputedGradient in memory/chunked_logprob_torch.py). Its backward then only passes them on to the blocks.
                (loss * self.world_size).backward()
                self.model.end_backward()
                if micro.parts is not None:
                    micro.parts.backward(self.model)
                del loss
                for name, value in metrics.items():
                    total[name] = total[name] + value if name in total else value
                if micro.ends and prefix_kv is not None:
                    # All responses have now added to the gradient of the prompt's keys and values, so one backward of the prompt
                    # is enough.
                    prefix_kv.backward()
                    self.model.end_backward()
                    prefix_kv = None
        return total

    def take_step(self, metrics: dict[str, Tensor], learning_rate: float | None = None) -> dict[str, Tensor]:
        """Clip the gradient, take the step, drop the gradient, and add the step's metrics to ``metrics``.

        A step whose gradient norm is not finite is skipped: weights, optimizer state and schedule do not change. The norm is
        the same on all ranks, so all ranks decide alike. ``learning_rate`` is for this step only. None = the schedule's rate.
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
        """Wait for queued steps. Return their metrics as :meth:`update` does, and the fp32 tensors ``also`` on the host.

        One copy brings all values to the host. The host waits for it after all work is queued.
        """
        values = [value.float() for step in steps for value in step.values()]
        undecided, self._undecided = self._undecided, []
        fetched = iter(fetched_together([*undecided, *values, *also], self.device)())
        self._note_steps([next(fetched) for _ in undecided])
        metrics_by_step = [{name: next(fetched) for name in step} for step in steps]
        if ends_rollout:
            # A schedule that counts rollouts does not advance if every step since the last rollout was skipped.
            if self._moved and self.optim.lr_schedule_steps == "rollouts":
                self.schedule.step()
            self._moved = False
        metrics = over_steps(metrics_by_step, self.role.counts)
        return metrics if self.offload is None else metrics | self.offload.metrics(), list(fetched)

    # How a step is taken.

    def _clip_and_step_on_device(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        # Queue the clipping and the update. The device skips the update if the norm is not finite.
        metrics[self.role.grad_norm] = norm = self._norm()
        metrics[self.role.skipped] = skipped = norm.isfinite().logical_not_().float()
        # Torch's interface for gradient scalers: the update's kernel divides gradients by grad_scale, or skips if found_inf is 1.
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
            # If several ranks share micro-batches, the driver reads the metrics of only one of them.
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
        # The copy starts now, and the returned function reads it later, so the host does not wait in between.
        return lambda: self._note_steps(fetched())

    @contextmanager
    def _learning_rate(self, own: float | None) -> Iterator[float | Tensor]:
        # Read the schedule's rate before the step, which advances the schedule. A given rate is set for the body only.
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
            # This rank's rows have new values. The gathered weights on all ranks are stale until the next gather.
            self.model.rows.stale = True

    def _step_optimizer(self) -> None:
        if self.home is not None:
            self.home.arrive()  # the step reads weights that left the device after their backward
        with optimizer_scope(self.optimizer, on_host=self.model.stays_on_host):
            self.optimizer.step()

    def _note_steps(self, skipped: Sequence[Tensor]) -> None:
        # A value of 0 means that the step was taken.
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
            # Divide, do not multiply by the inverse: the fused kernel divides, and no knob may change a single bit.
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
