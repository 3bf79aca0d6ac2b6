"""The policy and the critic: log-probs, values and scores of a batch, and update steps on a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_memopt.algorithms.custom import load_statistic
from verl_memopt.algorithms.kl import kl_estimate
from verl_memopt.algorithms.losses import (
    LossAndMetrics,
    LossTokens,
    ValueTokens,
    policy_loss,
    safe_ratio,
    value_loss,
    with_shared_metrics,
)
from verl_memopt.algorithms.records import LOSSES
from verl_memopt.algorithms.rollout_correction import bypass_loss, is_token_local
from verl_memopt.algorithms.rows import GlobalCounts, aggregate, row_means
from verl_memopt.config import schema
from verl_memopt.config.schema import Actor, RolloutCorrection
from verl_memopt.data.batch import RolloutBatch, scatter_tokens, token_index
from verl_memopt.errors import ConfigError
from verl_memopt.memory import residency
from verl_memopt.memory.activation_offload_torch import BYTES_MOVED, CRITIC_BYTES_MOVED
from verl_memopt.memory.chunked_logprob_torch import TokenGradient
from verl_memopt.memory.logit_tiles import LogitGrads, TokenStatistics
from verl_memopt.memory.lora_torch import StartingAdapter, adapters_off, starting_adapter
from verl_memopt.memory.residency import POLICY, REFERENCE, TEACHER
from verl_memopt.memory.split_masters import KEY as SPLIT_KEY
from verl_memopt.memory.teaching import AnyTeaching
from verl_memopt.memory.token_budget_torch import attempts
from verl_memopt.model.assembly import build_critic, build_trained_policy, materialize, materialize_critic
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.packed_model import PackedModel, PolicyModel
from verl_memopt.model.packing import Pack
from verl_memopt.model.prefix_kv import PrefixKV
from verl_memopt.model.value_model import CRITIC_KEY, ValueModel, stored_head
from verl_memopt.worker.roles import RoleBuilder, compiles_functions, fill_masters, start_adapters
from verl_memopt.worker.trained_model import (
    ACTOR,
    CRITIC,
    LossOf,
    MicroBatch,
    MiniBatch,
    SavedTensorHooks,
    TrainedModel,
    micro_batches_of,
)

logger = logging.getLogger(__name__)

REPLAY_DIFFERS, REPLAYED = "actor/router_replay_differs", "actor/router_replay_tokens"
"""Counts of an update. The driver turns the first into a share of the second."""

NO_STATISTICS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Updated:
    """The metrics of a gradient or an optimizer step, and the log-probs of its forward.

    ``log_probs`` is fp32 [R] on the host, in batch order.
    """

    metrics: dict[str, float]
    log_probs: Tensor


class Policy:
    """The policy. :attr:`trained` holds its model and optimizer.

    Arguments are as in :class:`TrainedModel`, where ``actor`` is called ``settings``. ``bypass`` is the rollout correction if it
    runs in bypass mode. None = decoupled mode, or no correction.
    """

    def __init__(
        self,
        model: PolicyModel,
        actor: Actor,
        schedule_steps: int,
        world_size: int,
        device: torch.device,
        offload: SavedTensorHooks | None = None,
    ) -> None:
        self.model = model
        self.bypass: RolloutCorrection | None = None
        self.distill_coef = 0.0
        """Weight of the divergences from the teacher in the loss. 0 = no exact divergence is computed."""
        self.teaching: Callable[[MicroBatch], AnyTeaching] | None = None
        """Returns what the head needs for these divergences."""
        self.start: StartingAdapter | None = None
        """The adapters that training started from. None = it started from the base model."""
        self.actor = actor
        self.trained = TrainedModel(ACTOR, model, actor, schedule_steps, world_size, device, offload)

    @classmethod
    def built(cls, roles: RoleBuilder) -> Policy:
        plan, world_size = roles.plan, roles.placement.world_size
        actor, model, folder = plan.settings.actor, plan.settings.model, Path(plan.folder)
        fsdp, shares = actor.fsdp_config, roles.shared is not None
        if fsdp.split_master_weights and not shares and world_size > 1:
            raise ConfigError(
                f"{SPLIT_KEY}=true: the run has no engine whose weights several devices share, and without it FSDP2 reduces "
                f"gradients into the dtype of the weights. Set {SPLIT_KEY}=false."
            )
        compiled = compiles_functions(actor.use_torch_compile, fsdp, roles.device)
        policy_model = build_trained_policy(model, fsdp, folder, roles.mesh(fsdp), roles.device, compiled, shares)
        if actor.router_replay.mode != "disabled" and not policy_model.computes_experts:
            key, name = f"{ACTOR.key}.router_replay.mode", type(policy_model.lm).__name__
            raise ConfigError(f"{key}={actor.router_replay.mode}: {name} computes its experts itself. Set {key}=disabled.")
        materialize(policy_model, folder, roles.device, roles.shared)
        start_adapters(policy_model, model, fsdp.seed, POLICY_KEY)
        if model.quantization != "none":
            with adapters_off(policy_model):
                roles.log_quantization_error(policy_model, folder, POLICY_KEY, model.quantization)
        roles.check_packing(policy_model, folder, POLICY_KEY)
        offload = roles.activation_offload(policy_model, model, BYTES_MOVED)
        policy = cls(policy_model, actor, plan.schedule_steps, world_size, roles.device, offload)
        fill_masters(policy.trained, folder)
        policy.bypass = plan.bypass
        if model.lora_adapter_path is not None:
            policy.start = starting_adapter(Path(model.lora_adapter_path), policy_model, policy_model.compute, roles.device)
        # With LoRA the reference is the policy with its starting adapters, or without adapters.
        also = (REFERENCE, *roles.also) if model.lora_rank > 0 else ()
        also += (TEACHER,) if plan.teaches_itself else ()
        policy.trained.home = roles.home_of(POLICY, policy_model, fsdp, also)
        return policy

    def compute_log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float, with_entropy: bool
    ) -> LogProbs:
        return compute_log_probs(self.model, batch, micro_batches, temperature, with_entropy, self.trained.device)

    def update(self, mini_batches: Sequence[MiniBatch], temperature: float, ends_rollout: bool = True) -> dict[str, float]:
        return self.trained.update(mini_batches, self.loss_at(temperature), ends_rollout)

    def update_on_policy(self, mini: MiniBatch, temperature: float, ends_rollout: bool = True) -> Updated:
        """Take one optimizer step, and return the log-probs of its forward too.

        If ``mini`` has no old log-probs, the step is strictly on-policy.
        """
        log_probs: list[Tensor] = []
        metrics = self.trained.step(mini, self.loss_at(temperature, log_probs))
        return self._updated(mini, metrics, log_probs, ends_rollout)

    def add_gradient(self, mini: MiniBatch, temperature: float) -> Updated:
        assert self.trained.in_backward is None, "with optim.in_backward every backward already updates the weights"
        log_probs: list[Tensor] = []
        loss = self.loss_at(temperature, log_probs)
        metrics = self.trained.forward_backward(mini, loss, adds=self.trained.has_gradient)
        return self._updated(mini, metrics, log_probs, ends_rollout=False)

    def _updated(self, mini: MiniBatch, metrics: dict[str, Tensor], log_probs: list[Tensor], ends_rollout: bool) -> Updated:
        # Forwards run again after an out-of-memory error, and for clipping with optim.in_backward. Keep the last log-probs.
        parts = log_probs[-len(mini.micro_batches) :]
        found, parts = self.trained.conclude([metrics], ends_rollout, parts)
        return Updated(found, scatter_tokens(list(zip(mini.micro_batches, parts, strict=True)), mini.batch.responses.sizes()))

    def accumulate(self, micro_batches: Iterable[MicroBatch], counts: GlobalCounts, temperature: float) -> dict[str, Tensor]:
        return self.trained.accumulate(micro_batches, counts, self.loss_at(temperature))

    def loss_at(self, temperature: float, kept: list[Tensor] | None = None) -> LossOf:
        """Return a function that runs the forward of a micro-batch and computes its loss.

        The function appends the log-probs to ``kept``, if given.
        """

        def loss(micro: MicroBatch, counts: GlobalCounts, prefix_kv: PrefixKV | None) -> tuple[Tensor, dict[str, Tensor]]:
            teaching = None if self.teaching is None else self.teaching(micro)
            coefficient = 0.0 if teaching is None else self.distill_coef
            objective = Objective(micro, counts, self.actor, self.bypass, coefficient)
            token_gradient = objective.token_gradient(self.trained.world_size)

            def compute(pack: Pack, kv: PrefixKV | None, gradient: TokenGradient | None, taught: AnyTeaching | None) -> Any:
                return self.model(pack, temperature, objective.with_entropy, gradient, kv, teaching=taught)

            # With a token_gradient the head computes its gradient in this forward. The backward() of the loss, which
            # TrainedModel runs, then only passes it on to the blocks.
            log_probs, *others = micro.outputs(self.model, compute, prefix_kv, token_gradient, teaching)
            assert log_probs is not None
            if kept is not None:
                # Detached, because the list outlives the graph of the micro-batch.
                kept.append(log_probs.detach())
            found, metrics = objective.loss(log_probs, *others)
            return found, metrics | replay_metrics(micro)

        return loss


def replay_metrics(micro: MicroBatch) -> dict[str, Tensor]:
    """Return how many tokens replay other experts than the router would choose, over all layers, and how many replay any."""
    if not micro.is_routed:
        return {}
    zero = torch.zeros(2, dtype=torch.int64, device=micro.pack.row.device)
    differing, replayed = sum((part for routes in micro.routes() for part in routes.take_compared()), zero).float()
    return {REPLAY_DIFFERS: differing, REPLAYED: replayed}


# The loss of the policy on one micro-batch, and its gradient per token, which is known before the backward.


EVERYTHING = slice(None)
GSPO = "gspo"
"""The loss with one ratio per response: the geometric mean of the ratios of its tokens."""


@dataclass(frozen=True)
class Objective:
    """The loss of one micro-batch: this rank's share of the loss of a mini-batch. ``counts`` are the sizes of the mini-batch.

    If ``micro`` has no ``old_log_probs``, the update is strictly on-policy: the log-probs of its own forward replace them.
    ``bypass`` is the rollout correction if it runs in bypass mode, where the engine's log-probs are the old log-probs. None =
    decoupled mode, or no correction.
    """

    micro: MicroBatch
    counts: GlobalCounts
    actor: Actor
    bypass: RolloutCorrection | None = None
    distill_coef: float = 0.0
    """Weight of the divergences from the teacher. 0 = the head computes none."""

    @property
    def with_entropy(self) -> bool:
        # An adaptive coefficient needs the measured entropy even while the coefficient is 0.
        return self.actor.entropy_coeff != 0 or self.actor.entropy_ctrl.target is not None

    def loss(self, log_probs: Tensor, entropy: Tensor | None, divergence: Tensor | None = None) -> LossAndMetrics:
        """Return this rank's share of the loss (a scalar with gradient) and of its metrics (scalars without gradient).

        ``log_probs``, ``entropy`` and ``divergence`` are fp32 [R], in the order of ``pack.targets``. ``with_entropy`` says
        whether ``entropy`` is required. ``divergence``: None = the run has no exact divergence from a teacher.
        """
        old = self._old(log_probs, EVERYTHING)
        loss, parts = self._policy(log_probs, old, EVERYTHING)
        metrics = {f"actor/{name}": value for name, value in parts.items()}
        for weight, name, value in self._penalties(log_probs, old, entropy, divergence, EVERYTHING):
            metrics[f"actor/{name}"] = value.detach()
            loss = loss + weight * value
        metrics["actor/loss"] = loss.detach()
        return loss, metrics

    def token_gradient(self, scale: float) -> TokenGradient | None:
        """Return a function that computes the gradient of ``scale * loss`` for some of the tokens, before any backward.

        The function maps (indices of tokens, their log-probs, their entropies) to the gradients of log-probs and entropies, and
        if the head computes divergences from a teacher, also to the gradients of these.
        The result is None if the gradient of a token depends on the log-probs of other tokens. This is so off-policy if the
        tokens of a response share one ratio, and always for terms that read a whole response.
        """
        on_policy = self.micro.old_log_probs is None
        if (not on_policy and not self._is_token_local) or self._reads_responses:
            return None
        # On-policy every ratio is 1, so the gradient of a loss of ratios does not depend on the log-probs.
        is_constant = on_policy and (self.bypass is not None or LOSSES[self.actor.policy_loss.loss_mode].is_ratio)
        on_policy_gradient = self._on_policy_gradient() if is_constant else None
        alone = None if on_policy_gradient is None or self.actor.use_kl_loss else on_policy_gradient * scale
        taught = self._teacher_gradient(scale) if self.distill_coef else None

        def gradient(rows: Any, log_probs: Tensor, entropy: Tensor | None) -> LogitGrads:
            further = () if taught is None else (taught[rows],)
            if alone is not None and entropy is None:
                return alone[rows], None, *further
            with torch.enable_grad():
                # Leaves of a new small graph, because the graph of the head does not exist yet.
                log_probs = log_probs.detach().requires_grad_()
                entropy = None if entropy is None else entropy.detach().requires_grad_()
                old = self._old(log_probs, rows)
                if on_policy_gradient is None:
                    loss, _ = self._policy(log_probs, old, rows)
                else:
                    loss = (log_probs * on_policy_gradient[rows]).sum()
                for weight, _, value in self._penalties(log_probs, old, entropy, None, rows):
                    loss = loss + weight * value
                # TrainedModel runs the backward of the loss times the number of ranks, so this gradient needs the same factor.
                loss = loss * scale
            found = torch.autograd.grad(loss, [log_probs] if entropy is None else [log_probs, entropy])
            return found[0], None if entropy is None else found[1], *further

        return gradient

    def _teacher_gradient(self, scale: float) -> Tensor:
        # The gradients of all divergences, fp32 [R]. They do not depend on the divergences, because the loss averages these.
        with torch.enable_grad():
            divergence = torch.zeros_like(self.micro.pack.row, dtype=torch.float32, requires_grad=True)
            weighted = self._weighted(divergence, EVERYTHING)
            loss = self.distill_coef * scale * self._mean(weighted, self.actor.loss_agg_mode, EVERYTHING)
        return torch.autograd.grad(loss, divergence)[0]

    def _weighted(self, divergence: Tensor, rows: Any) -> Tensor:
        weights = self.micro.teacher_weights
        return divergence if weights is None else divergence * weights[rows]

    def _mean(self, values: Tensor, mode: str, rows: Any) -> Tensor:
        micro = self.micro
        # Set to 0 before the sum. A product with a mask would keep a NaN of a rejected token.
        values = values if micro.kept is None else values.where(micro.kept[rows], 0.0)
        return aggregate(values, micro.pack.row[rows], micro.lengths, mode, self.counts, self.actor.loss_scale_factor)

    def _policy(self, log_probs: Tensor, old: Tensor, rows: Any) -> LossAndMetrics:
        micro = self.micro
        assert micro.advantages is not None
        fields = (micro.weights, micro.kept, micro.selected)
        weights, kept, selected = (None if field is None else field[rows] for field in fields)
        row, counts, advantages = micro.pack.row[rows], self.counts, micro.advantages[rows]
        if self.actor.off_policy_mask_threshold is not None:
            advantages = advantages.where(self._near_policy(log_probs, old), 0.0)
        if self.bypass is None:
            tokens = LossTokens(log_probs, old, advantages, row, micro.lengths, counts, weights, kept, selected)
            return policy_loss(tokens, self.actor)
        tokens = LossTokens(log_probs, old, advantages, row, micro.lengths, counts)
        return with_shared_metrics(tokens, *bypass_loss(tokens, self.actor, self.bypass))

    def _near_policy(self, log_probs: Tensor, old: Tensor) -> Tensor:
        micro, threshold = self.micro, self.actor.off_policy_mask_threshold
        assert micro.advantages is not None
        assert threshold is not None
        sampled = old if micro.sampled_log_probs is None else micro.sampled_log_probs
        moved = sampled - log_probs.detach()
        # Rejected tokens must not make a response look far from the policy.
        moved = moved if micro.kept is None else moved.where(micro.kept, 0.0)
        # False for responses with a negative advantage that the policy has moved away from. Their advantage becomes 0.
        return (micro.advantages >= 0) | (row_means(moved, micro.pack.row, micro.lengths) <= threshold)[micro.pack.row]

    @property
    def _reads_responses(self) -> bool:
        # These terms couple the tokens of a response, even on-policy.
        actor = self.actor
        weighs = actor.use_kl_loss and actor.kl_loss_by_ratio and actor.policy_loss.loss_mode == GSPO
        return weighs or actor.off_policy_mask_threshold is not None

    def _kl_weights(self, log_probs: Tensor, old: Tensor) -> Tensor:
        log_ratio, micro = log_probs - old, self.micro
        if self.actor.policy_loss.loss_mode == GSPO:
            kept = log_ratio if micro.kept is None else log_ratio.where(micro.kept, 0.0)
            # GSPO weighs all tokens of a response by one ratio.
            log_ratio = row_means(kept, micro.pack.row, micro.lengths)[micro.pack.row]
        return safe_ratio(log_ratio)

    @property
    def _is_token_local(self) -> bool:
        if self.bypass is not None:
            return is_token_local(self.bypass, self.actor.loss_agg_mode)
        return LOSSES[self.actor.policy_loss.loss_mode].token_local

    def _old(self, log_probs: Tensor, rows: Any) -> Tensor:
        old, kept = self.micro.old_log_probs, self.micro.kept
        # Detached: strictly on-policy the ratio has the value 1, and only the new log-prob in it has a gradient.
        if old is None:
            return log_probs.detach()
        return old[rows] if kept is None else old[rows].where(kept[rows], log_probs.detach())

    def _penalties(
        self, log_probs: Tensor, old: Tensor, entropy: Tensor | None, divergence: Tensor | None, rows: Any
    ) -> list[tuple[float, str, Tensor]]:
        actor = self.actor
        penalties = []
        if entropy is not None:
            weight = actor.entropy_coeff if self.counts.entropy_coeff is None else self.counts.entropy_coeff
            penalties.append((-weight, "entropy", self._mean(entropy, actor.entropy_agg_mode or actor.loss_agg_mode, rows)))
        if divergence is not None:
            mean = self._mean(self._weighted(divergence, rows), actor.loss_agg_mode, rows)
            penalties.append((self.distill_coef, "distill_loss", mean))
        if actor.use_kl_loss:
            assert self.micro.ref_log_probs is not None
            divergence = kl_estimate(log_probs, self.micro.ref_log_probs[rows], actor.kl_loss_type)
            if actor.kl_loss_by_ratio:
                divergence = divergence * self._kl_weights(log_probs, old)
            penalties.append((actor.kl_loss_coef, "kl_loss", self._mean(divergence, actor.loss_agg_mode, rows)))
        return penalties

    def _on_policy_gradient(self) -> Tensor:
        assert self.micro.advantages is not None
        # Every ratio is 1 for any log-probs, so use zeros as log-probs.
        with torch.enable_grad():
            log_probs = torch.zeros_like(self.micro.advantages, requires_grad=True)
            loss, _ = self._policy(log_probs, log_probs.detach(), EVERYTHING)
        return torch.autograd.grad(loss, log_probs)[0]


# The pass without gradients that computes log-probs, values or scores: one forward per micro-batch.


Output = TypeVar("Output")


Forward = Callable[[Pack, PrefixKV | None, Sequence[int] | Tensor], Output]
"""Runs a model. Its arguments are some rows packed into one sequence, the prefix KV of their prompt or None, and the rows. For a
part of rows, the last argument has the places of its sampled tokens in the batch instead, int64 on the host."""


def forward_pass(
    model: PackedModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    device: torch.device,
    forward: Forward[Output],
    record: list[tuple[Tensor, Tensor]] | None = None,
) -> list[tuple[Sequence[int] | Tensor, Output]]:
    """Run one forward per micro-batch, without gradients, and return (rows, output) of each. Then free gathered parameters.

    A micro-batch in parts has one output for each pass, with the places of its sampled tokens in the batch instead of rows.

    ``micro_batches`` holds the rows of each forward. Every row occurs once, and all ranks have equally many micro-batches.
    After an out-of-memory error :func:`attempts` cuts the remaining rows into smaller micro-batches. If the responses to a
    prompt are in several micro-batches, the prefix KV of the prompt is computed only once. ``record`` gets the experts of the
    tokens, if the batch asks for them (:meth:`RolloutBatch.for_record`).
    """
    record = [] if record is None else record
    outputs: list[list[tuple[Sequence[int] | Tensor, Output]]] = []

    def append_each(micro_batches: Sequence[Sequence[int]]) -> None:
        micros = [micro.to(device) for micro in micro_batches_of(batch, micro_batches, model.supports_prefix_kv)]
        prefix_kv = None
        with torch.no_grad():
            for rows, micro in zip(micro_batches, micros, strict=True):
                if micro.parts is not None:
                    places, passes = token_index(batch.responses.sizes(), rows), micro.parts.passes(model)
                    own = ((places[part.entries_on_host], part, kv) for part, kv in passes)
                    outputs.append([(chosen, forward(part.pack, kv, chosen)) for chosen, part, kv in own])
                    record.extend(filter(None, (routes.take_record() for routes in micro.routes())))
                    continue
                if micro.prompt is not None and prefix_kv is None:
                    prefix_kv = model.compute_prefix(micro.prompt)
                outputs.append([(rows, forward(micro.pack, prefix_kv if micro.reads else None, rows))])
                record.extend(filter(None, (routes.take_record() for routes in micro.routes())))
                prefix_kv = None if micro.ends else prefix_kv

    for attempt in attempts(model, batch.row_tokens, micro_batches, kept=lambda: len(outputs)):
        with attempt as rows:
            append_each(rows)
    model.end_pass()
    return [output for some in outputs for output in some]


# The log-prob pass: log-probs of every response token, without gradients. Policy and reference both use it.


@dataclass(frozen=True)
class LogProbs:
    """The result of a log-prob pass. Each tensor is fp32 [R], on the host, in batch order. ``entropy`` may be None.

    ``record`` has parts of a record of experts, as in :meth:`RolloutBatch.replaying`. It is empty unless the batch asks for them.
    """

    log_probs: Tensor
    entropy: Tensor | None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    record: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def pack_log_probs(
    policy: PolicyModel,
    pack: Pack,
    temperature: float,
    with_entropy: bool,
    prefix_kv: PrefixKV | None = None,
    statistics: TokenStatistics | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and, if requested, entropies of a pack's targets, fp32 [R], without gradients.

    ``statistics`` is filled as in :class:`~verl_memopt.model.packed_model.LogProbHead`.
    """
    with torch.no_grad():
        return policy(pack, temperature, with_entropy, None, prefix_kv, statistics=statistics)


def compute_log_probs(
    policy: PolicyModel,
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    with_entropy: bool,
    device: torch.device,
    statistics: Mapping[str, str] = NO_STATISTICS,
) -> LogProbs:
    """Return the log-probs of every response token, without gradients.

    ``micro_batches`` are as in :func:`forward_pass`. The logits are divided by ``temperature``. ``statistics`` maps the name
    of each further value per token to the address of the function that computes it, as
    :func:`verl_memopt.algorithms.custom.statistics_of` returns them.
    """
    asked = {name: load_statistic(address) for name, address in statistics.items()}

    def forward(pack: Pack, prefix_kv: PrefixKV | None, _: Sequence[int] | Tensor) -> LogProbs:
        found = TokenStatistics(asked)
        log_probs, entropy = pack_log_probs(policy, pack, temperature, with_entropy, prefix_kv, found)
        return LogProbs(log_probs, entropy, found.values)

    record: list[tuple[Tensor, Tensor]] = []
    parts = forward_pass(policy, batch, micro_batches, device, forward, record)
    return replace(in_batch_order(parts, batch.responses.sizes()), record=record)


def in_batch_order(parts: Sequence[tuple[Sequence[int] | Tensor, LogProbs]], sizes: Sequence[int]) -> LogProbs:
    entropies = [(rows, part.entropy) for rows, part in parts if part.entropy is not None]
    names = dict.fromkeys(name for _, part in parts for name in part.statistics)
    return LogProbs(
        scatter_tokens([(rows, part.log_probs) for rows, part in parts], sizes),
        scatter_tokens(entropies, sizes) if entropies else None,
        {name: scatter_tokens([(rows, part.statistics[name]) for rows, part in parts], sizes) for name in names},
        [own for _, part in parts for own in part.record],
    )


# The pass of a reward model: one score per conversation, without gradients.


def compute_scores(
    model: ValueModel, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Return a reward model's score of each row, fp32 [B] on the host, in batch order.

    The score is computed from the hidden state of the conversation's last token, as in transformers' sequence classifiers.
    :class:`ValueModel` assigns the value of a hidden state to the next token. So each response in ``batch`` must end with one
    extra token, whose value is the score. The model does not read this token. ``micro_batches`` are as in :func:`forward_pass`.
    """
    assert all(batch.responses.sizes()), "each conversation must end with one token more"

    def forward(pack: Pack, prefix_kv: PrefixKV | None, _: Sequence[int] | Tensor) -> Tensor:
        return model(pack, prefix_kv)[pack.row_lengths.cumsum(0) - 1]

    scores = torch.empty(batch.num_rows, dtype=torch.float32)
    parts = forward_pass(model, batch, micro_batches, device, forward)
    scores[[row for rows, _ in parts for row in rows]] = torch.cat([part for _, part in parts]).cpu()  # one wait for all
    return scores


# The critic: values of a batch, and update steps on the clipped value loss.


class TrainedCritic:
    def __init__(
        self,
        model: ValueModel,
        settings: schema.Critic,
        schedule_steps: int,
        world_size: int,
        device: torch.device,
        offload: SavedTensorHooks | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        self.trained = TrainedModel(CRITIC, model, settings, schedule_steps, world_size, device, offload)

    @classmethod
    def built(cls, roles: RoleBuilder, settings: schema.Critic, folder: Path) -> TrainedCritic:
        model, fsdp = settings.model, settings.model.fsdp_config
        with roles.own_seed(fsdp):
            value_model = build_critic(model, folder, roles.mesh(fsdp), roles.device)
        has_head = materialize_critic(value_model, folder, roles.device)
        logger.info("the critic's value head %s", f"is that of {folder}" if has_head else f"starts at 0: {folder} has none")
        start_adapters(value_model, model, fsdp.seed, CRITIC_KEY)
        roles.check_packing(value_model, folder, CRITIC_KEY)
        offload, world_size = roles.activation_offload(value_model, model, CRITIC_BYTES_MOVED), roles.placement.world_size
        critic = cls(value_model, settings, roles.plan.critic_schedule_steps, world_size, roles.device, offload)
        fill_masters(critic.trained, folder, stored_head(folder, CRITIC_KEY))
        critic.trained.home = roles.home_of(residency.CRITIC, value_model, fsdp)
        return critic

    def values(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        """Return the value of the state before each response token, fp32 [R] on the host, in batch order."""
        parts = forward_pass(self.model, batch, micro_batches, self.trained.device, lambda pack, kv, _: self.model(pack, kv))
        return scatter_tokens(parts, batch.responses.sizes())

    def update(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        return self.trained.update(mini_batches, self.loss)

    def loss(
        self, micro: MicroBatch, counts: GlobalCounts, prefix_kv: PrefixKV | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (predictions,) = micro.outputs(
            self.model, lambda pack, kv, *_: (self.model(pack, kv),), prefix_kv, self._token_gradient(micro, counts)
        )
        assert predictions is not None
        loss, metrics = self._loss(micro, counts, predictions, EVERYTHING)
        return loss, {f"{CRITIC.name}/{name}": value for name, value in metrics.items()}

    def _loss(self, micro: MicroBatch, counts: GlobalCounts, predictions: Tensor, places: Any) -> LossAndMetrics:
        # The loss of the tokens at some places.
        settings = self.settings
        assert micro.old_values is not None
        assert micro.returns is not None
        assert settings.loss_agg_mode is not None
        kept = None if micro.kept is None else micro.kept[places]
        values, returns, row = micro.old_values[places], micro.returns[places], micro.pack.row[places]
        tokens = ValueTokens(predictions, values, returns, row, micro.lengths, counts, kept)
        return value_loss(tokens, settings.cliprange_value, settings.loss_agg_mode, settings.loss_scale_factor)

    def _token_gradient(self, micro: MicroBatch, counts: GlobalCounts) -> TokenGradient:
        # The gradient of a token needs no other token. See :meth:`Objective.token_gradient`.
        def gradient(places: Any, predictions: Tensor, entropy: Tensor | None) -> tuple[Tensor, None]:
            with torch.enable_grad():
                leaf = predictions.detach().requires_grad_()
                loss, _ = self._loss(micro, counts, leaf, places)
            return torch.autograd.grad(loss * self.trained.world_size, leaf)[0], None

        return gradient
