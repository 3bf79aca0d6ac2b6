"""Cut the rows of a pass: first into one share per rank, then into micro-batches. The driver decides, by numbers of tokens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch

from verl_memopt.algorithms.kl import EntropyController
from verl_memopt.algorithms.records import LOSSES, load
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, ActorRolloutRef, Critic, Ref, Rollout, Settings, Teacher
from verl_memopt.data.batch import RolloutBatch, token_index
from verl_memopt.errors import ConfigError, TrainingError
from verl_memopt.memory.knob import has_teacher, reference_ranks, sequence_ranks
from verl_memopt.memory.token_budget import LearnedBudget, PassFigures
from verl_memopt.memory.token_packing import RowTokens, alike, balance, largest_pass, pack_fixed, pack_groups_under
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.update_guard import recovery_advice
from verl_memopt.worker.policy import REPLAY_DIFFERS, REPLAYED
from verl_memopt.worker.trained_model import ACTOR, MiniBatch, Role


@dataclass(frozen=True)
class Budget:
    """The size of a micro-batch in one pass.

    Attributes:
        by_tokens: Limit the tokens of a micro-batch. False = limit its rows.
        max_tokens: Most tokens of a micro-batch per rank.
        rows: Rows of a micro-batch if ``by_tokens`` is False.
        key: The setting that errors name.
        learned: A limit that adapts to measured memory peaks, at most ``limit``. None = the limit is constant.
        ranks: Number of neighbouring ranks that share the tokens of a micro-batch (sequence parallelism).
    """

    by_tokens: bool
    max_tokens: int
    rows: int | None
    key: str
    learned: LearnedBudget | None = None
    ranks: int = 1

    @property
    def limit(self) -> int:
        # Most tokens of a micro-batch, as the sum over the ranks that share it.
        return self.max_tokens * self.ranks

    def learning(self, adaptive: bool | None) -> Budget:
        return replace(self, learned=LearnedBudget(self.limit)) if adaptive and self.by_tokens else self

    def shares(self, world_size: int) -> int:
        # The number of groups of ranks. Each group gets other rows of the batch.
        assert world_size % self.ranks == 0, (world_size, self.ranks)
        return world_size // self.ranks

    def micro_batches(self, tokens: RowTokens, names: Sequence[str], in_parts: bool = False) -> list[list[int]]:
        """Return the rows of each micro-batch of one rank. ``in_parts`` is as in :func:`pack_groups_under`.

        Raises:
            ConfigError: A single row exceeds the limit.
        """
        if self.by_tokens:
            lengths = tokens.row_lengths()
            longest = max(lengths, default=1)
            if self.ranks > 1 and longest > self.limit:
                raise ConfigError(
                    f"{self.key}={self.max_tokens}: {names[lengths.index(longest)]} has {longest} tokens, more than the "
                    f"{self.ranks} devices that share a micro-batch may hold. Raise it to at least "
                    f"{-(-longest // self.ranks)}, or lower data.max_prompt_length or data.max_response_length."
                )
            if in_parts and tokens.paths is not None and (longest > self.limit or (self.learned and self.learned.cuts_rows)):
                longest = 1  # no row sets a lower end to what was learned
            limit = self.limit if self.learned is None else self.learned.tokens(longest)
            return pack_groups_under(tokens, limit, names, self.key, in_parts)
        assert self.rows is not None
        return pack_fixed(len(tokens), self.rows)

    def learn(self, cut: Iterable[tuple[RowTokens, Sequence[Sequence[int]]]], figures: PassFigures) -> None:
        """Adapt the limit to the measured figures of a pass that was cut by this budget.

        ``cut`` has one pair (tokens of the rows, micro-batches) per rank.
        """
        if self.learned is not None:
            cut = list(cut)
            fullest = max((largest_pass(tokens, rows) for tokens, bins in cut for rows in bins), default=0)
            longest = max((length for tokens, _ in cut for length in tokens.row_lengths()), default=0)
            self.learned.learn(fullest, figures, longest)


def budgets(roles: ActorRolloutRef) -> tuple[Budget, Budget, Budget]:
    actor, ranks = roles.actor, roles.actor.fsdp_config.sequence_ranks
    tokens, rows = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    update = Budget(actor.use_dynamic_bsz, tokens, rows, key, ranks=ranks).learning(actor.adaptive_token_budget)
    return update, _log_prob_budget(roles.rollout, "rollout", ranks), _log_prob_budget(roles.ref, "ref", reference_ranks(roles))


def teacher_budget(settings: Settings) -> Budget:
    return _log_prob_budget(settings.teacher, "teacher", sequence_ranks(settings, "teacher"))


def _log_prob_budget(role: Rollout | Ref | Teacher, name: str, ranks: int) -> Budget:
    tokens, rows = role.log_prob_max_token_len_per_gpu or 0, role.log_prob_micro_batch_size_per_gpu
    section = name if isinstance(role, Teacher) else f"actor_rollout_ref.{name}"
    key = f"{section}.log_prob_max_token_len_per_gpu"
    budget = Budget(bool(role.log_prob_use_dynamic_bsz), tokens, rows, key, ranks=ranks)
    return budget.learning(role.log_prob_adaptive_token_budget)


def critic_budgets(critic: Critic) -> tuple[Budget, Budget]:
    by_tokens, ranks = bool(critic.use_dynamic_bsz), critic.model.fsdp_config.sequence_ranks
    tokens, rows = critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    update = Budget(by_tokens, tokens, rows, "critic.ppo_max_token_len_per_gpu", ranks=ranks)
    tokens, rows = critic.forward_max_token_len_per_gpu or 0, critic.forward_micro_batch_size_per_gpu
    values = Budget(by_tokens, tokens, rows, "critic.forward_max_token_len_per_gpu", ranks=ranks)
    return update.learning(critic.adaptive_token_budget), values.learning(critic.adaptive_token_budget)


def adaptive_phases(settings: Settings) -> tuple[str, ...]:
    roles, critic, rewards = settings.actor_rollout_ref, settings.critic, settings.reward_model
    adaptive = {
        "update_actor": roles.actor.adaptive_token_budget and roles.actor.use_dynamic_bsz,
        "old_log_prob": roles.rollout.log_prob_adaptive_token_budget and roles.rollout.log_prob_use_dynamic_bsz,
        "ref": roles.ref.log_prob_adaptive_token_budget and roles.ref.log_prob_use_dynamic_bsz,
        "teacher": has_teacher(settings)
        and settings.teacher.log_prob_adaptive_token_budget
        and settings.teacher.log_prob_use_dynamic_bsz,
        "values": critic.adaptive_token_budget and critic.use_dynamic_bsz,
        "update_critic": critic.adaptive_token_budget and critic.use_dynamic_bsz,
        "reward": rewards.adaptive_token_budget and (rewards.use_dynamic_bsz or rewards.recipe is not None),
    }
    return tuple(phase for phase, learns in adaptive.items() if learns)


def mini_batch_rows(num_prompts: int, samples: int, prompts_per_mini: int, shuffle_seed: int | None) -> list[list[int]]:
    # The rows of each mini-batch. The rows of a group stay together.
    order = list(range(num_prompts))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    chunks = [order[start : start + prompts_per_mini] for start in range(0, num_prompts, prompts_per_mini)]
    return [[prompt * samples + sample for prompt in chunk for sample in range(samples)] for chunk in chunks]


def rows_per_rank(tokens: RowTokens, rows: Sequence[int], world_size: int, even_out: bool) -> list[list[int]]:
    """Return the rows of each rank. If all groups have the same size, the numbers of rows differ by at most one.

    Each rank gets the same number of whole groups. The remaining groups are split into one part per rank. A rank may get no row.
    Conversations differ more in tokens than answers do, so :func:`uneven_shares` deals them.

    Args:
        tokens: Tokens of every row of the batch.
        rows: The rows to distribute: whole groups, one after another.
        world_size: Number of ranks.
        even_out: Give each rank about the same number of tokens. False = give each rank neighbouring rows.
    """
    if world_size == 1:
        return [list(rows)]
    if not even_out:
        return _in_parts(rows, world_size)
    if tokens.paths is not None and not tokens.are_answers(rows):
        return [sorted(rows[place] for place in share) for share in uneven_shares(tokens.select(rows), world_size)]
    groups = [list(members) for _, members in groupby(rows, key=lambda row: tokens.groups[row])]
    costs = [tokens.cost(members) for members in groups]
    # Split the cheapest groups, because each part of a split group computes the prompt again.
    left = set(sorted(range(len(groups)), key=costs.__getitem__)[: len(groups) % world_size])
    whole = [number for number in range(len(groups)) if number not in left]
    shares = [
        [row for place in places for row in groups[whole[place]]]
        for places in balance([costs[number] for number in whole], world_size)
    ]
    parts = _in_parts([row for number in sorted(left) for row in groups[number]], world_size)
    # The rank with the fewest tokens gets the most expensive part.
    parts.sort(key=tokens.cost, reverse=True)
    for rank, part in zip(sorted(range(world_size), key=lambda rank: tokens.cost(shares[rank])), parts, strict=True):
        shares[rank] += part
    return [sorted(share) for share in shares]


def _in_parts(rows: Sequence[int], count: int) -> list[list[int]]:
    # Parts of neighbouring rows. Their sizes differ by at most one row.
    bounds = [len(rows) * part // count for part in range(count + 1)]
    return [list(rows[first:last]) for first, last in pairwise(bounds)]


def uneven_shares(tokens: RowTokens, world_size: int) -> list[list[int]]:
    """Return the rows of each rank, so that each rank has about the same number of tokens.

    The numbers of rows may differ, and a rank may get no row. Rows of a group stay together if there are enough groups.
    Conversations that share tokens are also cut where the rank with the most tokens then has fewer.
    """
    families = tokens.families()
    if tokens.paths is not None:
        counts = (max(world_size, len(families)) + more * world_size for more in (0, 1, 3))
        dealt = [_dealt(tokens, tokens.split(families, count), world_size) for count in counts]
        return min(dealt, key=lambda shares: max(map(tokens.cost, shares)))
    units = tokens.split(families, max(world_size, len(families)))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]
    for unit in sorted((rows for rows in units if rows), key=tokens.cost, reverse=True):
        total, rank = heapq.heappop(load)
        shares[rank].extend(unit)
        # A unit without tokens counts as one token, so that empty rows are spread over the ranks too.
        heapq.heappush(load, (total + max(tokens.cost(unit), 1), rank))
    return [sorted(share) for share in shares]


def _dealt(tokens: RowTokens, units: Sequence[list[int]], world_size: int) -> list[list[int]]:
    # Give each unit, most expensive first, to the rank that then has the fewest tokens. Tokens that a rank has anyway are free.
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for unit in sorted(units, key=tokens.cost, reverse=True):
        min(shares, key=lambda share: (tokens.cost([*share, *unit]), len(share))).extend(unit)
    return [sorted(share) for share in shares]


def cut_ranks(tokens_per_rank: Sequence[RowTokens], names: Sequence[Sequence[str]], budget: Budget) -> Sequence[list[list[int]]]:
    """Return the micro-batches of each rank. :func:`alike` adjusts them so that the collectives of all ranks match.

    Raises:
        ConfigError: A single row exceeds the limit, and is no conversation.
    """
    cut = [budget.micro_batches(tokens, name, True) for tokens, name in zip(tokens_per_rank, names, strict=True)]
    return alike(cut, tokens_per_rank)


# Cut the batch of a training step into mini-batches (one per optimizer step), then into rank shares, then into micro-batches.


Prepare = Callable[[list[int], int], RolloutBatch]
"""Called with the rows and the seed of a mini-batch. Returns the batch with data that this mini-batch needs in addition."""


@dataclass(frozen=True)
class MiniBatchCutter:
    """Cuts batches for the optimizer steps of one trained role.

    Attributes:
        role: Settings of the role: mini-batch size, passes over the batch, shuffling.
        samples: Responses per prompt.
    """

    world_size: int
    role: Actor | Critic
    samples: int
    budget: Budget
    balance: bool

    def cut(self, batch: RolloutBatch, names: Sequence[str], step: int, prepare: Prepare | None = None) -> list[list[MiniBatch]]:
        """Return the shares of each rank in the mini-batches, in the order of the optimizer steps.

        ``budget.ranks`` ranks that share their micro-batches count as one rank, here and below.

        ``prepare``: adds the data of one mini-batch to the batch; None = a mini-batch needs no further data.
        """
        mini_batches = []
        for index, rows in enumerate(self.mini_batch_rows(batch, step)):
            prepared = batch if prepare is None else prepare(rows, self.seed(step, index))
            mini_batches.append(self.mini_batches(prepared, rows, names))
        return [list(shares) for shares in zip(*mini_batches, strict=True)]

    def share_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Measure how evenly the tokens of a step are spread over the ranks. The metrics are verl's ``global_seqlen/*``.

        ``min``, ``max`` and ``minmax_diff`` are computed as if each rank had neighbouring rows. ``balanced_*`` are computed from
        the rows that each rank really gets. Tokens that rows share count once. With one rank there are no metrics.
        """
        tokens, ranks = batch.row_tokens(), self.budget.shares(self.world_size)
        if ranks == 1:
            return {}
        plain, even = (
            [tokens.cost(rows) for rows in rows_per_rank(tokens, range(batch.num_rows), ranks, even_out)]
            for even_out in (False, self.balance)
        )
        found = {
            "min": min(plain), "max": max(plain), "minmax_diff": max(plain) - min(plain), "mean": sum(plain) / ranks,
            "balanced_min": min(even), "balanced_max": max(even),
        }  # fmt: skip
        return {f"global_seqlen/{name}": float(value) for name, value in found.items()}

    def learn(self, per_rank: Sequence[Sequence[MiniBatch]], figures: PassFigures) -> None:
        cut = ((mini.batch.row_tokens(), mini.micro_batches) for minis in per_rank for mini in minis)
        self.budget.learn(cut, figures)

    def mini_batch_rows(self, batch: RolloutBatch, step: int) -> list[list[int]]:
        role, rows = self.role, []
        assert role.ppo_epochs is not None, "follows the actor's"
        assert role.ppo_mini_batch_size is not None, "follows the actor's"
        for epoch in range(role.ppo_epochs):
            seed = self.seed(step, epoch) if role.shuffle else None
            rows += mini_batch_rows(batch.num_rows // self.samples, self.samples, role.ppo_mini_batch_size, seed)
        return rows

    def seed(self, step: int, index: int) -> int:
        # The seed depends on nothing that changes between two starts of a run, so every start draws the same.
        return self.role.data_loader_seed * 1_000_003 + step * 1_009 + index

    def shares(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        return rows_per_rank(batch.row_tokens(), rows, self.budget.shares(self.world_size), self.balance)

    def mini_batches(self, batch: RolloutBatch, rows: Sequence[int], names: Sequence[str]) -> list[MiniBatch]:
        tokens, sizes = batch.row_tokens(), batch.kept_sizes()
        # Count at least one token, because the loss of a mini-batch without tokens would be 0 / 0.
        counts = GlobalCounts(tokens=float(max(sum(sizes[row] for row in rows), 1)), sequences=float(len(rows)))
        shares = self.shares(batch, rows)
        bins = cut_ranks([tokens.select(share) for share in shares], [[names[r] for r in share] for share in shares], self.budget)
        return [MiniBatch(batch.select(share), cut, counts) for share, cut in zip(shares, bins, strict=True)]


def role_updates(role: Actor | Critic, train_batch_size: int) -> int:
    assert role.ppo_mini_batch_size is not None, "follows the actor's"
    assert role.ppo_epochs is not None, "follows the actor's"
    return train_batch_size // role.ppo_mini_batch_size * role.ppo_epochs


# The policy update of a step: the mini-batches of each rank, and the metrics of the optimizer steps over all ranks.


SEEDS = 2**63
"""Number of seeds that torch's generator accepts."""


@dataclass(frozen=True)
class PolicyUpdate:
    cutter: MiniBatchCutter
    actor: Actor
    store: CheckpointStore
    entropy: EntropyController | None = None
    """Adapts the weight of the entropy bonus; None = the weight is constant."""
    teacher_states: Callable[[RolloutBatch, Sequence[str], list[list[MiniBatch]]], None] | None = None
    """Lets the teacher compute the states that the update of these mini-batches reads; None = it reads none."""

    def cut(self, batch: RolloutBatch, names: Sequence[str], step: int) -> list[list[MiniBatch]]:
        """Return the mini-batches of each rank. If their update reads states of a teacher, the workers have them then."""
        return self._taught(batch, names, lambda numbered: self._cut(numbered, names, step))

    def cut_whole(self, batch: RolloutBatch, names: Sequence[str], step: int) -> list[MiniBatch]:
        """Return the part of each rank in one mini-batch of all rows, with states of a teacher as in :meth:`cut`."""

        def whole(numbered: RolloutBatch) -> list[list[MiniBatch]]:
            rows = range(numbered.num_rows)
            chosen = with_selection(numbered, rows, self.actor, self.cutter.seed(step, 0))
            return [[mini] for mini in self.cutter.mini_batches(chosen, rows, names)]

        return [mini for (mini,) in self._taught(batch, names, whole)]

    def _taught(
        self, batch: RolloutBatch, names: Sequence[str], cut: Callable[[RolloutBatch], list[list[MiniBatch]]]
    ) -> list[list[MiniBatch]]:
        if self.teacher_states is None:
            return cut(batch)
        batch = batch.clone(recurse=False)
        batch.places = torch.arange(batch.responses.flat.shape[0])
        # Only the teacher's pass reads what a teacher elsewhere has said.
        learned = batch.clone(recurse=False)
        learned.teacher_ids = learned.teacher_top = learned.teacher_rest = None
        per_rank = cut(learned)
        self.teacher_states(batch.unrouted(), names, per_rank)
        return per_rank

    def _cut(self, batch: RolloutBatch, names: Sequence[str], step: int) -> list[list[MiniBatch]]:
        per_rank = self.cutter.cut(batch, names, step, lambda rows, seed: with_selection(batch, rows, self.actor, seed))
        if self.entropy is None:
            return per_rank
        self.entropy.num_updates, weight = len(per_rank[0]), self.entropy.applied
        return [[replace(mini, counts=replace(mini.counts, entropy_coeff=weight)) for mini in minis] for minis in per_rank]

    def entropy_weight(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if self.entropy is not None:
            self.entropy.update(metrics["actor/entropy"])
        weight = self.actor.entropy_coeff if self.entropy is None else self.entropy.weight
        return {"actor/entropy_coeff": weight} if weight or self.entropy is not None else {}

    def metrics(self, per_rank: Sequence[dict[str, float]], step: int) -> dict[str, float]:
        """Return the metrics of the update over all ranks.

        Raises:
            TrainingError: A skipped update had already changed some weights.
        """
        metrics = with_replayed_share(update_metrics(per_rank, ACTOR, step, self.actor.optim.lr, self.store))
        if self.actor.use_kl_loss:
            metrics["actor/kl_coef"] = self.actor.kl_loss_coef
        return metrics


def with_replayed_share(metrics: dict[str, float]) -> dict[str, float]:
    # Turn the count of tokens and layers that replay other experts into their share.
    if REPLAYED in metrics:
        metrics[REPLAY_DIFFERS] /= max(metrics.pop(REPLAYED), 1)
    return metrics


def with_selection(batch: RolloutBatch, rows: Sequence[int], actor: Actor, seed: int) -> RolloutBatch:
    """Return the batch with the further inputs of one mini-batch's loss: the selected tokens, or the engine's log-probs.

    Tokens are selected here, from the whole mini-batch, so that the selection depends neither on micro-batches nor on ranks.
    """
    loss = actor.policy_loss
    if actor.off_policy_mask_threshold is not None and batch.rollout_log_probs is not None:
        batch = batch.clone(recurse=False)
        batch.sampled_log_probs = batch.rollout_log_probs
    selects = LOSSES[loss.loss_mode].selects
    if selects is None:
        return batch
    assert batch.old_log_probs is not None, f"{loss.loss_mode} selects tokens by their old log-probs"
    assert batch.advantages is not None
    tokens = token_index(batch.responses.sizes(), rows)
    generator = torch.Generator().manual_seed(seed % SEEDS)
    selected = torch.zeros(batch.advantages.shape[0], dtype=torch.bool)
    selected[tokens] = load(selects)(batch.old_log_probs[tokens], batch.advantages[tokens], loss, generator)
    marked: RolloutBatch = batch.clone(recurse=False)
    marked.selected = selected
    return marked


def global_metrics(per_rank: Sequence[dict[str, float]], role: Role) -> dict[str, float]:
    assert len({metrics[role.skipped] for metrics in per_rank}) == 1, [metrics[role.skipped] for metrics in per_rank]
    first = per_rank[0]
    return {name: first[name] if name in role.same_on_all_ranks else sum(metrics[name] for metrics in per_rank) for name in first}


def update_metrics(
    per_rank: Sequence[dict[str, float]], role: Role, step: int, lr: float, store: CheckpointStore
) -> dict[str, float]:
    """Return :func:`global_metrics` without the count of partial updates, because a partial update stops the run.

    Raises:
        TrainingError: A skipped update had already changed some weights.
    """
    metrics = global_metrics(per_rank, role)
    if metrics.pop(role.partial, 0.0):
        raise TrainingError(
            f"{role.key}.optim.in_backward=true: in step {step} a gradient was not finite after other parameters had been "
            f"updated, and that cannot be taken back. With in_backward=false such an update is skipped. "
            f"{recovery_advice(role, lr, store)}"
        )
    return metrics
