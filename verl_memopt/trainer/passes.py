"""Cuts the rows of a pass: first into the share of each rank, then into micro-batches. The driver decides it, by tokens."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from verl_memopt.algorithms.custom import needed_inputs
from verl_memopt.algorithms.records import LOSSES
from verl_memopt.algorithms.rollout_correction import corrects_before_update
from verl_memopt.config.schema import Actor, ActorRolloutRef, Algorithm, Ref, Rollout
from verl_memopt.memory.batching.learned_budget import LearnedBudget, PassFigures
from verl_memopt.memory.batching.row_tokens import RowTokens, pack_groups_under
from verl_memopt.memory.batching.token_budget import balance, pack_fixed, split_to_count


@dataclass(frozen=True)
class Budget:
    """The size of a micro-batch in one pass.

    Attributes:
        by_tokens: Limit the tokens of a micro-batch, else its rows.
        max_tokens: Hard limit.
        rows: Rows of a micro-batch, without ``by_tokens``.
        key: Setting that errors name.
        learned: A limit that learns from measured peaks, at most ``max_tokens``. None = the limit stays as it is.
    """

    by_tokens: bool
    max_tokens: int
    rows: int | None
    key: str
    learned: LearnedBudget | None = None

    def micro_batches(self, tokens: RowTokens, names: Sequence[str]) -> list[list[int]]:
        """Return the rows of each micro-batch of one rank.

        Args:
            tokens: Tokens of the rank's rows.
            names: Names of the rows, for errors.

        Raises:
            ConfigError: One row alone is over the limit.
        """
        if self.by_tokens:
            limit = self.max_tokens if self.learned is None else self.learned.tokens(max(tokens.each(), default=1))
            return pack_groups_under(tokens, limit, names, self.key)
        assert self.rows is not None
        return pack_fixed(len(tokens), self.rows)

    def learn(self, cut: Iterable[tuple[RowTokens, Sequence[Sequence[int]]]], figures: PassFigures) -> None:
        """Learn from a pass that was cut by this budget.

        Args:
            cut: (tokens of the rows, micro-batches) of each rank.
            figures: What the pass took of the devices.
        """
        if self.learned is not None:
            fullest = max((tokens.cost(rows) for tokens, bins in cut for rows in bins), default=0)
            self.learned.learn(fullest, figures)


def learned_budget(adaptive: bool | None, by_tokens: bool, max_tokens: int) -> LearnedBudget | None:
    """Return the learned limit of a budget; None where the settings ask for none."""
    return LearnedBudget(max_tokens) if adaptive and by_tokens else None


def budgets(roles: ActorRolloutRef) -> tuple[Budget, Budget, Budget]:
    """Return the budgets of the update, of the pass for old log-probs and of the reference pass."""
    actor = roles.actor
    update = Budget(
        actor.use_dynamic_bsz,
        actor.ppo_max_token_len_per_gpu,
        actor.ppo_micro_batch_size_per_gpu,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        learned_budget(actor.adaptive_token_budget, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
    )
    return update, _log_prob_budget(update, roles.rollout, "rollout"), _log_prob_budget(update, roles.ref, "ref")


def _log_prob_budget(update: Budget, role: Rollout | Ref, name: str) -> Budget:
    by_tokens, max_tokens = bool(role.log_prob_use_dynamic_bsz), role.log_prob_max_token_len_per_gpu or 0
    return replace(
        update,
        by_tokens=by_tokens,
        max_tokens=max_tokens,
        rows=role.log_prob_micro_batch_size_per_gpu,
        key=f"actor_rollout_ref.{name}.log_prob_max_token_len_per_gpu",
        learned=learned_budget(role.log_prob_adaptive_token_budget, by_tokens, max_tokens),
    )


def update_gives_old_log_probs(actor: Actor, train_batch_size: int, algorithm: Algorithm) -> bool:
    """Return whether the forward of the only optimizer step computes the old log-probs, so that they need no own pass."""
    once = actor.ppo_epochs == 1 and train_batch_size == actor.ppo_mini_batch_size
    read_before = algorithm.use_kl_in_reward or algorithm.use_pf_ppo or corrects_before_update(algorithm.rollout_correction)
    read_before |= actor.calculate_entropy or LOSSES[actor.policy_loss.loss_mode].selects is not None
    read_before |= "old_log_probs" in needed_inputs(algorithm)
    return actor.old_log_prob_pass == "auto" and once and not read_before


def updates_per_step(train_batch_size: int, mini_batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of one training step: ``epochs`` passes over mini-batches of ``mini_batch_size`` prompts."""
    return train_batch_size // mini_batch_size * epochs


def mini_batch_rows(num_prompts: int, samples: int, prompts_per_mini: int, shuffle_seed: int | None) -> list[list[int]]:
    """Return the rows of each mini-batch. The rows of a group stay together.

    Args:
        num_prompts: Groups of the batch.
        samples: Rows of a group.
        prompts_per_mini: Groups of a mini-batch.
        shuffle_seed: Shuffles the groups; None keeps their order.
    """
    order = list(range(num_prompts))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    chunks = [order[start : start + prompts_per_mini] for start in range(0, num_prompts, prompts_per_mini)]
    return [[prompt * samples + sample for prompt in chunk for sample in range(samples)] for chunk in chunks]


def rows_per_rank(tokens: RowTokens, rows: Sequence[int], world_size: int, even_out: bool) -> list[list[int]]:
    """Return the rows of each rank, the same number on each. Rows of a group stay together as far as that allows.

    Args:
        tokens: Tokens of every row of the batch.
        rows: The rows to distribute: whole groups, one after another.
        world_size: ranks.
        even_out: Give each rank about the same number of tokens.
    """
    if world_size == 1:
        return [list(rows)]
    assert len(rows) % world_size == 0, (len(rows), world_size)
    share = len(rows) // world_size
    if not even_out:
        return [list(rows[rank * share : (rank + 1) * share]) for rank in range(world_size)]
    unit = _together(tokens, rows, share)
    # Units of equal size, because each rank must have the same number of rows.
    units = [rows[start : start + unit] for start in range(0, len(rows), unit)]
    parts = balance([tokens.cost(members) for members in units], world_size)
    return [sorted(row for index in part for row in units[index]) for part in parts]


def _together(tokens: RowTokens, rows: Sequence[int], share: int) -> int:
    """Return how many rows can stay together: the greatest common divisor of a rank's share and of all group sizes."""
    sizes = [len(list(members)) for _, members in groupby(rows, key=lambda row: tokens.groups[row])]
    return math.gcd(share, *sizes)


def uneven_shares(tokens: RowTokens, world_size: int) -> list[list[int]]:
    """Return the rows of each rank, any number on each, with about the same tokens. A rank may have none.

    Rows of a group stay together where there are enough groups.

    Args:
        tokens: Tokens of every row.
        world_size: Number of ranks.
    """
    families = tokens.families()
    units = split_to_count(families, max(world_size, len(families)), tokens.each())
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]
    for unit in sorted((rows for rows in units if rows), key=tokens.cost, reverse=True):
        total, rank = heapq.heappop(load)
        shares[rank].extend(unit)
        # A unit without tokens counts as one, so that empty rows are spread over the ranks too.
        heapq.heappush(load, (total + max(tokens.cost(unit), 1), rank))
    return [sorted(share) for share in shares]


def cut_ranks(tokens_per_rank: Sequence[RowTokens], names: Sequence[Sequence[str]], budget: Budget) -> list[list[list[int]]]:
    """Return the micro-batches of each rank. All ranks get the same number, since their collectives must match.

    Args:
        tokens_per_rank: Tokens of the rows of each rank.
        names: Names of the rows of each rank, for errors.
        budget: Size of a micro-batch.

    Raises:
        ConfigError: One row alone is over the limit.
    """
    cut = [budget.micro_batches(tokens, name) for tokens, name in zip(tokens_per_rank, names, strict=True)]
    count = max(len(bins) for bins in cut)
    return [split_to_count(bins, count, tokens.each()) for bins, tokens in zip(cut, tokens_per_rank, strict=True)]
