import dataclasses
import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.modes import LOSSES, TOKEN_LOCAL
from tests.trainer.conftest import AR, Member, Updater, batch_of, group_of
from verl_memopt.algorithms.losses import LossTokens, policy_loss, select_clip_cov, select_kl_cov
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts
from verl_memopt.config.schema import Actor, Critic
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import ConfigError, TrainingError
from verl_memopt.memory.pass_order import InParts
from verl_memopt.memory.token_budget import PassFigures
from verl_memopt.memory.token_packing import RowTokens
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.micro_batching import (
    Budget,
    MiniBatchCutter,
    budgets,
    cut_ranks,
    mini_batch_rows,
    role_updates,
    rows_per_rank,
    uneven_shares,
)
from verl_memopt.trainer.rollouts import RowAnswers, StepBatch
from verl_memopt.worker.policy import Objective
from verl_memopt.worker.trained_model import micro_batches_of

BY_TOKENS = Budget(True, 10, None, "some.key")
BY_ROWS = Budget(False, 0, 2, "some.key")
alone = RowTokens.alone


def test_uneven_shares_hold_every_row_once_and_groups_whole():
    tokens = RowTokens((5,) * 7, (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 2, 2, 3))
    shares = uneven_shares(tokens, 2)
    assert sorted(chain.from_iterable(shares)) == list(range(7))
    owners = {
        group: {rank for rank, share in enumerate(shares) for row in share if tokens.groups[row] == group} for group in range(4)
    }
    assert {len(ranks) for ranks in owners.values()} == {1}
    costs = [tokens.select(share).cost(range(len(share))) for share in shares]
    assert max(costs) - min(costs) <= 16
    assert uneven_shares(tokens, 1) == [list(range(7))]


def test_ranks_without_a_row_have_an_empty_share_and_a_group_is_cut_only_for_want_of_groups():
    assert sorted(map(len, uneven_shares(alone([3, 4]), 4))) == [0, 0, 1, 1]
    assert uneven_shares(alone([]), 2) == [[], []]
    shares = uneven_shares(RowTokens((5,) * 6, (2,) * 6, (0,) * 6), 4)
    assert sorted(map(len, shares)) == [1, 1, 2, 2]
    lengths = alone([9, 0, 0, 0, 0])
    assert sorted(map(len, uneven_shares(lengths, 2))) == [1, 4]


def conversations(*sizes):
    """Two tasks of 50 tokens with some conversations each, that have a system prompt of 10 tokens in common."""
    tasks = [task for task, own in enumerate(sizes) for _ in own]
    paths = (((0, 10), (100 * task + 1, 50)) for task in tasks)
    own = [size for task in sizes for size in task]
    parents = [task * 100 + 1 if place > 1 else 0 for task in range(len(sizes)) for place in range(100)]
    return RowTokens.of_paths(
        tuple(
            (*path, (100 * task + 2 + row, size)) for row, (path, task, size) in enumerate(zip(paths, tasks, own, strict=True))
        ),
        tasks,
        parents=[-1, *parents[1:]],
    )


@pytest.mark.parametrize("deal", [lambda tokens, ranks: rows_per_rank(tokens, range(len(tokens)), ranks, True), uneven_shares])
def test_conversations_are_dealt_by_their_tokens_and_those_of_a_task_stay_together_if_that_is_even(deal):
    assert sorted(deal(conversations((5, 5), (5, 5)), 2)) == [[0, 1], [2, 3]]
    # One long conversation is as much as three short ones with their tasks.
    assert sorted(deal(conversations((150, 5), (5, 5)), 2)) == [[0], [1, 2, 3]]
    assert sorted(deal(conversations((5, 5), (5, 5)), 1)) == [[0, 1, 2, 3]]
    shares = deal(conversations((40, 30), (20, 10)), 8)
    assert sorted(row for share in shares for row in share) == [0, 1, 2, 3]
    assert max(map(len, shares)) == 1


def test_a_limit_is_learned_from_the_passes_of_rows_in_parts():
    tokens, budget = conversations((5, 5)), dataclasses.replace(BY_TOKENS, max_tokens=40).learning(True)
    (bins,) = cut_ranks([tokens], ["ab"], budget)
    assert [type(rows) for rows in bins] == [InParts]
    budget.learn([(tokens, bins)], PassFigures(peak_bytes=100, budget_bytes=50))
    # Half the tokens of a pass, and not of the rows.
    assert budget.learned.cap < 20


def test_conversations_that_did_not_fit_whole_are_in_parts_from_then_on():
    tokens, budget = conversations((5,)), dataclasses.replace(BY_TOKENS, max_tokens=200).learning(True)
    (bins,) = cut_ranks([tokens], ["a"], budget)
    budget.learn([(tokens, bins)], PassFigures(cap_after_error=100))
    assert cut_ranks([tokens], ["a"], budget) == [[[0]]]
    budget.learn([(tokens, bins)], PassFigures(cap_after_error=32))
    restored = budget.learning(True)
    restored.learned.load_state_dict(budget.learned.state_dict())
    for known in (budget, restored):
        ((rows,),) = cut_ranks([tokens], ["a"], known)
        assert (rows, rows.budget) == ([0], 32)
    # Several ranks have one order of passes.
    ((one,), (other,)) = cut_ranks([tokens, tokens], ["a", "a"], budget)
    assert (one, other, one.budget, other.budget) == ([0], [0], 32, 32)
    assert one.word == other.word


def test_ranks_get_equally_many_groups_of_answers_to_prompts_that_begin_alike():
    # The answers of the first group are longer than all others together.
    paths = tuple(
        ((0, 100), (10 * group + 1, 50), (10 * group + 2 + row, 5 if group else 200)) for group in range(4) for row in range(3)
    )
    tokens = RowTokens.of_paths(paths, [row // 3 for row in range(12)], [150] * 12)
    shares = rows_per_rank(tokens, range(12), 2, True)
    assert [len({row // 3 for row in share}) for share in shares] == [2, 2]
    assert [len(share) for share in shares] == [6, 6]


def test_a_rank_gets_conversations_of_the_rows_that_it_is_asked_for():
    tokens = conversations((5, 5), (5, 5), (5, 5))
    assert sorted(rows_per_rank(tokens, [2, 3, 4, 5], 2, True)) == [[2, 3], [4, 5]]
    assert rows_per_rank(tokens, [2, 3, 4, 5], 2, False) == [[2, 3], [4, 5]]


def test_mini_batches_are_whole_groups_in_order_or_in_that_of_a_seed():
    assert mini_batch_rows(4, 3, 2, None) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    plain, shuffled = mini_batch_rows(16, 3, 4, None), mini_batch_rows(16, 3, 4, 1)
    assert shuffled != plain
    assert sorted(chain.from_iterable(shuffled)) == sorted(chain.from_iterable(plain))
    for rows in shuffled:
        assert all(rows[i : i + 3] == [rows[i], rows[i] + 1, rows[i] + 2] and rows[i] % 3 == 0 for i in range(0, 12, 3))
    assert mini_batch_rows(16, 1, 4, 1) == mini_batch_rows(16, 1, 4, 1)
    assert mini_batch_rows(16, 1, 4, 1) != mini_batch_rows(16, 1, 4, 2)


def test_rows_are_dealt_as_they_stand_unless_balancing_evens_out_their_tokens():
    assert rows_per_rank(alone([1, 2, 3]), [2, 0], 1, True) == [[2, 0]]
    assert rows_per_rank(alone([9, 1, 1, 1]), [3, 2, 1, 0], 2, False) == [[3, 2], [1, 0]]
    tokens = [9, 7, 1, 1]
    shares = rows_per_rank(alone(tokens), range(4), 2, True)
    assert sorted(sum(tokens[row] for row in rows) for rows in shares) == [8, 10]
    assert [len(rows) for rows in shares] == [2, 2]
    tokens = [100, 5, 100, 1, 1, 5]
    shares = rows_per_rank(alone(tokens), [1, 3, 4, 5], 2, True)
    assert sorted(chain.from_iterable(shares)) == [1, 3, 4, 5]
    assert [sum(tokens[row] for row in rows) for rows in shares] == [6, 6]


@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_every_row_is_on_one_rank_and_ranks_differ_by_at_most_one_row(data, world, num_groups, samples, even_out):
    order = data.draw(st.permutations(range(num_groups)))
    num_rows = num_groups * samples
    lengths = st.lists(st.integers(0, 50), min_size=num_rows, max_size=num_rows)
    tokens = RowTokens(tuple(data.draw(lengths)), tuple(data.draw(lengths)), tuple(row // samples for row in range(num_rows)))
    rows = [group * samples + sample for group in order for sample in range(samples)]
    shares = rows_per_rank(tokens, rows, world, even_out)
    assert sorted(chain.from_iterable(shares)) == sorted(rows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    ranks_of = [{rank for rank, share in enumerate(shares) if {row // samples for row in share} & {group}} for group in order]
    # Only as many prompts are computed on several ranks as are left over once each rank has as many as any other.
    assert sum(len(ranks) > 1 for ranks in ranks_of) <= (num_groups % world if even_out else world - 1)


def test_fifteen_answers_lie_on_two_ranks_with_one_group_cut_the_cheapest():
    tokens = RowTokens((9,) * 5 + (4,) * 5 + (9,) * 5, (3,) * 15, (0,) * 5 + (1,) * 5 + (2,) * 5)
    assert rows_per_rank(tokens, range(15), 2, True) == [[0, 1, 2, 3, 4, 7, 8, 9], [5, 6, 10, 11, 12, 13, 14]]


def test_a_token_budget_is_a_hard_cap_that_a_row_may_fill_and_a_row_budget_cuts_by_count():
    assert BY_TOKENS.micro_batches(alone([6, 5, 4, 5]), "abcd") == [[0, 2], [1, 3]]
    assert BY_TOKENS.micro_batches(alone([10, 10]), "ab") == [[0], [1]]
    with pytest.raises(ConfigError, match=r"some\.key=10: b has 11 tokens"):
        BY_TOKENS.micro_batches(alone([10, 11]), "ab")
    assert BY_ROWS.micro_batches(alone([60, 1, 1]), "abc") == [[0, 1], [2]]


def test_every_rank_runs_as_many_micro_batches_as_the_busiest_if_need_be_empty_ones():
    cut = cut_ranks([alone([10, 10, 10]), alone([2, 2, 1])], ["abc", "def"], BY_TOKENS)
    assert [len(bins) for bins in cut] == [3, 3]
    assert [sorted(chain.from_iterable(bins)) for bins in cut] == [[0, 1, 2], [0, 1, 2]]
    assert cut_ranks([alone([10, 10]), alone([3])], ["ab", "c"], BY_TOKENS) == [[[0], [1]], [[0], []]]


GROUPS = RowTokens(prompts=(5,) * 8, answers=(1, 2, 3, 4, 1, 1, 1, 9), groups=(0, 0, 0, 0, 1, 1, 1, 1))


def test_groups_stay_whole_where_they_can_and_ranks_are_balanced_by_what_is_computed():
    assert sorted(rows_per_rank(GROUPS, range(8), 2, True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shares = rows_per_rank(GROUPS, range(8), 4, True)
    assert sorted(shares) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    tokens = RowTokens(prompts=(90, 90, 50, 50, 10, 10, 20, 20), answers=(10, 0) * 4, groups=(0, 0, 1, 1, 2, 2, 3, 3))
    # Computed: 100, 60, 20 and 30 with one prompt a group; evenly dealt, 120 and 90.
    assert sorted(rows_per_rank(tokens, range(8), 2, True)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_scoring_passes_follow_the_actors_budget_unless_they_have_their_own(settled):
    update, old, reference = budgets(settled().actor_rollout_ref)
    assert (update.by_tokens, update.max_tokens, update.rows) == (True, 40, None)
    assert (old.by_tokens, old.max_tokens, old.rows) == (True, 40, None)
    assert (reference.by_tokens, reference.max_tokens, reference.rows) == (True, 40, None)
    more = {
        f"{AR}.rollout.log_prob_max_token_len_per_gpu": 50,
        f"{AR}.ref.log_prob_use_dynamic_bsz": False,
        f"{AR}.ref.log_prob_micro_batch_size_per_gpu": 3,
    }
    update, old, reference = budgets(settled(more).actor_rollout_ref)
    assert (update.max_tokens, old.max_tokens) == (40, 50)
    assert (reference.by_tokens, reference.rows) == (False, 3)


@pytest.mark.parametrize(
    ("which", "key"),
    [
        (0, f"{AR}.actor.ppo_max_token_len_per_gpu"),
        (1, f"{AR}.rollout.log_prob_max_token_len_per_gpu"),
        (2, f"{AR}.ref.log_prob_max_token_len_per_gpu"),
    ],
)
def test_a_row_over_a_budget_is_told_under_the_key_of_its_pass(settled, which, key):
    with pytest.raises(ConfigError, match=f"{key}=40: rows:7 has 41 tokens"):
        budgets(settled().actor_rollout_ref)[which].micro_batches(RowTokens.alone([41]), ["rows:7"])


def test_a_mini_batch_knows_its_tokens_and_sequences_over_all_ranks(alike):
    cutter = alike(workers=group_of(Member(0), Member(1))).policy.policy_update.cutter
    minis = cutter.mini_batches(batch_of([4, 1, 0, 3, 2, 2, 4, 4]), [0, 1, 2, 3], "abcdefgh")
    assert [mini.counts for mini in minis] == [GlobalCounts(8.0, 4.0)] * 2
    assert [mini.batch.num_rows for mini in minis] == [2, 2]
    empty = cutter.mini_batches(batch_of([0, 0]), [0, 1], "ab")  # one token, so that nothing is divided by zero
    assert [mini.counts for mini in empty] == [GlobalCounts(1.0, 2.0)] * 2
    assert sorted(token for mini in minis for token in mini.batch.responses.flat.tolist()) == [3, 3, 3, 3, 4, 6, 6, 6]


def test_the_samples_of_one_prompt_lie_on_one_rank_or_where_there_are_too_few_prompts_on_several(alike):
    batch = batch_of([4, 4, 1, 1])
    batch.advantages = torch.tensor([1.0] * 4 + [-1.0] * 4 + [0.5, -0.5])
    cutter = alike(workers=group_of(Member(0), Member(1))).policy.policy_update.cutter
    assert [mini.batch.group.tolist() for mini in cutter.mini_batches(batch, [0, 1], "abcd")] == [[0], [0]]
    minis = cutter.mini_batches(batch, [0, 1, 2, 3], "abcd")
    assert [mini.batch.group.tolist() for mini in minis] == [[0, 0], [1, 1]]
    assert sorted(value for mini in minis for value in mini.batch.advantages.tolist()) == sorted(batch.advantages.tolist())


CRITIC = Critic(ppo_mini_batch_size=2, ppo_epochs=1, shuffle=False, use_dynamic_bsz=True)


def cutter_of(critic=CRITIC, world_size=1, max_tokens=40):
    budget = Budget(True, max_tokens, None, "critic.ppo_max_token_len_per_gpu")
    return MiniBatchCutter(world_size, critic, 2, budget, True)


def test_a_critic_cuts_the_batch_by_its_own_settings():
    batch = batch_of([4] * 8)
    assert cutter_of().mini_batch_rows(batch, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    twice = dataclasses.replace(CRITIC, ppo_epochs=2, ppo_mini_batch_size=1)
    assert cutter_of(twice).mini_batch_rows(batch, 1) == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2
    shuffled = dataclasses.replace(twice, shuffle=True, data_loader_seed=3)
    orders = [cutter_of(dataclasses.replace(shuffled, data_loader_seed=seed)).mini_batch_rows(batch, 1) for seed in range(4)]
    assert len({str(order) for order in orders}) > 1
    assert all(sorted(map(tuple, order[:4])) == [(0, 1), (2, 3), (4, 5), (6, 7)] for order in orders)


def test_every_share_carries_values_and_returns_of_its_own_tokens():
    batch = batch_of([4, 1, 0, 3, 2, 2, 4, 4])
    batch.old_values = batch.responses.flat.float()
    batch.returns = -batch.responses.flat.float()
    for minis in cutter_of(world_size=2).cut(batch, "abcdefgh", 1):
        for mini in minis:
            assert mini.batch.old_values.tolist() == mini.batch.responses.flat.tolist()
            assert mini.batch.returns.tolist() == (-mini.batch.responses.flat).tolist()


def test_metrics_say_how_even_the_tokens_lie_before_and_after_balancing():
    batch = batch_of([9, 9, 9, 9, 1, 1, 1, 1])
    assert cutter_of().share_metrics(batch) == {}
    found = cutter_of(world_size=2).share_metrics(batch)
    low, high = sorted(batch.row_tokens().cost(rows) for rows in (range(4), range(4, 8)))
    expected = {"min": low, "max": high, "minmax_diff": high - low, "mean": (low + high) / 2}
    even = dict.fromkeys(("balanced_min", "balanced_max"), (low + high) / 2)
    assert found == {f"global_seqlen/{name}": value for name, value in (expected | even).items()}


def test_what_a_mini_batch_adds_is_asked_for_with_its_rows_and_seed():
    batch, calls = batch_of([1] * 8), []

    def prepare(rows, seed):
        calls.append((rows, seed))
        marked = batch.clone(recurse=False)
        marked.returns = torch.full((8,), float(len(calls)))
        return marked

    cutter = cutter_of()
    (minis,) = cutter.cut(batch, "abcdefgh", 5, prepare)
    assert [mini.batch.returns.tolist() for mini in minis] == [[1.0] * 4, [2.0] * 4]
    assert calls == [([0, 1, 2, 3], cutter.seed(5, 0)), ([4, 5, 6, 7], cutter.seed(5, 1))]


def test_the_optimizer_steps_of_a_step_are_passes_over_mini_batches():
    assert role_updates(Actor(ppo_mini_batch_size=4, ppo_epochs=3), 8) == 6
    assert role_updates(dataclasses.replace(CRITIC, ppo_epochs=2), 8) == 8


def updated(alike, more, ranks=1, step=1):
    """Return the first response token of every row, per rank and mini-batch, of an update over eight rows of two samples."""
    workers = group_of(*map(Updater, range(ranks)))
    learner = alike({f"{AR}.actor.old_log_prob_pass": "always", **more}, workers)
    rows = [PromptRow(index, "", "toy/arithmetic", "", {}, f"rows:{index}") for index in range(8)]
    answers = RowAnswers(rows, [], Generation([], None, []), [])
    batch = StepBatch(step, StepPrompts([], [], 0, 0), answers, batch_of([1] * 8))
    learner.policy.update(batch)
    metrics = batch.metrics
    return metrics, [[(mini.batch.responses.flat - 3).tolist() for mini in member.minis] for member in workers.group.members]


def test_an_update_has_one_mini_batch_per_share_of_the_prompts_in_each_pass(alike):
    assert updated(alike, {})[1] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert updated(alike, {f"{AR}.actor.ppo_epochs": 2})[1] == [[[0, 1, 2, 3], [4, 5, 6, 7]] * 2]


def test_shuffling_keeps_groups_whole_and_differs_by_epoch_step_and_seed(alike):
    shuffle = {f"{AR}.actor.shuffle": True, f"{AR}.actor.ppo_epochs": 12}
    ((*first,),) = updated(alike, shuffle)[1]
    for rows in first:
        assert {row // 2 for row in rows} == {rows[0] // 2, rows[2] // 2}
        assert len(rows) == 4
    epochs = [first[start : start + 2] for start in range(0, 24, 2)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(8)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1
    assert updated(alike, shuffle)[1] == [first]
    assert updated(alike, shuffle, step=2)[1] != [first]
    assert updated(alike, shuffle | {f"{AR}.actor.data_loader_seed": 1})[1] != [first]


def test_over_ranks_shares_are_summed_and_what_all_ranks_know_is_taken_once(alike):
    metrics, rows = updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2)
    assert metrics == {"actor/loss": 3.0, "actor/grad_norm": 2.0, "actor/lr": 0.5, "actor/skipped_updates": 0.0}
    assert sorted(rows[0][0] + rows[1][0]) == list(range(8))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("partial", [(), (0.0, 0.0)])
def test_an_update_that_two_ranks_skip_is_counted_once(alike, norm, partial, monkeypatch):
    monkeypatch.setattr(Updater, "norm", norm)
    monkeypatch.setattr(Updater, "partial", partial)
    metrics, _ = updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2)
    assert metrics["actor/skipped_updates"] == 1.0
    assert "actor/partial_updates" not in metrics


def test_weights_that_one_rank_has_updated_in_part_stop_the_run_with_the_way_back(alike, monkeypatch):
    monkeypatch.setattr(Updater, "norm", math.nan)
    monkeypatch.setattr(Updater, "partial", (0.0, 1.0))
    with pytest.raises(
        TrainingError, match=r"in_backward=true: in step 3 a gradient .* cannot be taken back.*trainer\.resume_mode=disable"
    ):
        updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2, step=3)


LENGTHS = [4, 1, 0, 3, 2, 2, 4, 4]
SELECTING = {
    "clip_cov_ratio": 0.25,
    "clip_cov_lb": -0.05,
    "clip_cov_ub": 10.0,
    "kl_cov_ratio": 0.25,
    "ppo_kl_coef": 0.7,
}


def random_batch():
    """Gives a batch that has, in place of the reference's log-probs, those of the policy during the update."""
    batch, generator = batch_of(LENGTHS), torch.Generator().manual_seed(5)
    old, change, advantages = (torch.randn(sum(LENGTHS), generator=generator) for _ in range(3))
    batch.old_log_probs, batch.ref_log_probs, batch.advantages = old - 3, old - 3 + 0.3 * change, advantages
    return batch


def selecting_update(alike, ranks, **actor):
    loss = {f"{AR}.actor.policy_loss.{name}": value for name, value in SELECTING.items()}
    settings = {f"{AR}.actor.{name.replace('__', '.')}": value for name, value in actor.items()}
    return alike(loss | settings, group_of(*map(Member, range(ranks)))).policy.policy_update


def whole_loss(batch, rows, actor, seed):
    """Gives the loss of a mini-batch from one call with all its tokens."""
    chosen = batch.select(rows)
    old, advantages, selected = chosen.old_log_probs, chosen.advantages, None
    if actor.policy_loss.loss_mode == "clip_cov":
        selected = select_clip_cov(old, advantages, actor.policy_loss, torch.Generator().manual_seed(seed))
    elif actor.policy_loss.loss_mode == "kl_cov":
        selected = select_kl_cov(old, advantages, actor.policy_loss, torch.Generator())
    counts = GlobalCounts(float(chosen.responses.lengths.sum()), float(len(rows)))
    row, lengths = chosen.response_row(), chosen.responses.lengths
    tokens = LossTokens(chosen.ref_log_probs, old, advantages, row, lengths, counts, selected=selected)
    return policy_loss(tokens, actor)[0].item()


def test_an_adapted_weight_of_the_entropy_bonus_is_that_of_the_loss_and_moves_with_each_optimizer_step(alike):
    update = selecting_update(alike, 2, entropy_ctrl__target=2.0, entropy_ctrl__delta=0.25, entropy_coeff=0.5)
    batch, weight, applied = random_batch(), 0.5, 0.0
    for measured in (1.0, 3.0, 1.0, 1.0):
        per_rank = update.cut(batch, "abcdefgh", 3)
        mini = per_rank[0][0]
        (micro,) = micro_batches_of(mini.batch, [list(range(mini.batch.num_rows))], False)
        objective = Objective(micro, mini.counts, update.actor)
        assert objective.with_entropy
        metrics = objective.loss(micro.ref_log_probs, torch.ones_like(micro.ref_log_probs))[1]
        bonus = metrics["actor/pg_loss"] - metrics["actor/loss"]
        assert float(bonus / metrics["actor/entropy"]) == pytest.approx(applied, abs=1e-5)
        change = 0.25 * len(per_rank[0])
        weight = min(weight + change, 1.0) if measured <= 2.0 else max(weight - change, 0.0)
        assert update.entropy_weight({"actor/entropy": measured}) == {"actor/entropy_coeff": weight}
        applied = weight if measured <= 2.0 else 0.0


def test_the_weight_of_a_bonus_is_a_metric_and_no_bonus_has_none(alike):
    assert selecting_update(alike, 1, entropy_coeff=0.1).entropy_weight({}) == {"actor/entropy_coeff": 0.1}
    assert selecting_update(alike, 1).entropy_weight({}) == {}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows_of_micro_batch", [1, 3])
@pytest.mark.parametrize("mode", LOSSES)
def test_shares_of_micro_batches_and_ranks_add_up_to_the_loss_of_the_whole_mini_batch(alike, mode, rows_of_micro_batch, ranks):
    sizes = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": rows_of_micro_batch}
    for mean in LOSS_AGG_MODES if mode in TOKEN_LOCAL else LOSS_AGG_MODES[:1]:
        update = selecting_update(alike, ranks, policy_loss__loss_mode=mode, loss_agg_mode=mean, shuffle=True, **sizes)
        batch, losses = random_batch(), []
        for minis in zip(*update.cut(batch, "abcdefgh", 3), strict=True):
            micros = [micro for mini in minis for micro in micro_batches_of(mini.batch, mini.micro_batches, False)]
            assert len(micros) >= 2
            shares = [Objective(micro, minis[0].counts, update.actor).loss(micro.ref_log_probs, None)[0] for micro in micros]
            losses.append(sum(share.item() for share in shares))
        expected = [
            whole_loss(batch, rows, update.actor, update.cutter.seed(3, index))
            for index, rows in enumerate(update.cutter.mini_batch_rows(batch, 3))
        ]
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_tokens_are_selected_anew_in_each_pass_and_alike_in_each_start(alike):
    update = selecting_update(alike, 1, policy_loss__loss_mode="clip_cov", ppo_mini_batch_size=4, ppo_epochs=6)
    batch = random_batch()
    (first,), (again,) = (update.cut(batch, "abcdefgh", 3) for _ in range(2))
    selected = [mini.batch.selected.tolist() for mini in first]
    assert [sum(tokens) for tokens in selected] == [5] * 6
    assert len(set(map(str, selected))) > 1
    assert selected == [mini.batch.selected.tolist() for mini in again]
    assert selected != [mini.batch.selected.tolist() for mini in update.cut(batch, "abcdefgh", 4)[0]]
    assert batch.selected is None


def test_a_loss_that_acts_on_all_tokens_selects_none(alike):
    update = selecting_update(alike, 1, policy_loss__loss_mode="cispo")
    assert [mini.batch.selected for mini in update.cut(random_batch(), "abcdefgh", 3)[0]] == [None, None]
