import dataclasses

import torch

from tests.trainer.conftest import Member, batch_of, group_of
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, Critic
from verl_memopt.trainer.micro_batching import Budget, MiniBatchCutter, role_updates


def test_a_mini_batch_knows_its_tokens_and_sequences_over_all_ranks(alike):
    cutter = alike(workers=group_of(Member(0), Member(1))).policy.policy_update.cutter
    minis = cutter.mini_batches(batch_of([4, 1, 0, 3, 2, 2, 4, 4]), [0, 1, 2, 3], "abcdefgh")
    assert [mini.counts for mini in minis] == [GlobalCounts(8.0, 4.0)] * 2
    assert [mini.batch.num_rows for mini in minis] == [2, 2]
    assert sorted(token for mini in minis for token in mini.batch.responses.flat.tolist()) == [3, 3, 3, 3, 4, 6, 6, 6]


def test_a_mini_batch_of_empty_responses_counts_one_token_so_that_nothing_is_divided_by_zero(alike):
    (mini,) = alike(workers=group_of(Member(0))).policy.policy_update.cutter.mini_batches(batch_of([0, 0]), [0, 1], "ab")
    assert mini.counts == GlobalCounts(1.0, 2.0)


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
