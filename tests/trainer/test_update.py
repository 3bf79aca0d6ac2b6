import math
from itertools import chain

import pytest
import torch

from tests.trainer.conftest import AR, Member, batch_of, group_of
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prefetcher import StepPrompts
from verl_memopt.errors import TrainingError
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.experience import StepBatch
from verl_memopt.trainer.generation import Answers


def test_a_mini_batch_knows_its_tokens_and_sequences_over_all_ranks(alike):
    update = alike(workers=group_of(Member(0), Member(1))).policy_update
    minis = update.mini_batches(batch_of([4, 1, 0, 3, 2, 2, 4, 4]), [0, 1, 2, 3], "abcdefgh")
    assert [mini.counts for mini in minis] == [GlobalCounts(8.0, 4.0)] * 2
    assert [mini.batch.num_rows for mini in minis] == [2, 2]
    assert sorted(token for mini in minis for token in mini.batch.responses.flat.tolist()) == [3, 3, 3, 3, 4, 6, 6, 6]


def test_a_mini_batch_of_empty_responses_counts_one_token_so_that_nothing_is_divided_by_zero(alike):
    (mini,) = alike(workers=group_of(Member(0))).policy_update.mini_batches(batch_of([0, 0]), [0, 1], "ab")
    assert mini.counts == GlobalCounts(1.0, 2.0)


def test_the_samples_of_one_prompt_lie_on_one_rank_or_where_there_are_too_few_prompts_on_several(alike):
    batch = batch_of([4, 4, 1, 1])
    batch.advantages = torch.tensor([1.0] * 4 + [-1.0] * 4 + [0.5, -0.5])
    update = alike(workers=group_of(Member(0), Member(1))).policy_update
    assert [mini.batch.group.tolist() for mini in update.mini_batches(batch, [0, 1], "abcd")] == [[0], [0]]
    minis = update.mini_batches(batch, [0, 1, 2, 3], "abcd")
    assert [mini.batch.group.tolist() for mini in minis] == [[0, 0], [1, 1]]
    assert sorted(value for mini in minis for value in mini.batch.advantages.tolist()) == sorted(batch.advantages.tolist())


class Updater(Member):
    """Takes an update and answers with figures that depend on its rank."""

    norm, partial = 2.0, ()

    def update_actor(self, minis):
        self.minis = minis
        skipped = 0.0 if math.isfinite(self.norm) else 1.0
        metrics = {"actor/loss": 1.0 + self.rank, "actor/grad_norm": self.norm, "actor/lr": 0.5, "actor/skipped_updates": skipped}
        return metrics | ({"actor/partial_updates": self.partial[self.rank]} if self.partial else {})


def updated(alike, more, ranks=1, step=1):
    """Return the first response token of every row, per rank and mini-batch, of an update over eight rows of two samples."""
    workers = group_of(*map(Updater, range(ranks)))
    learner = alike({f"{AR}.actor.old_log_prob_pass": "always", **more}, workers)
    rows = [PromptRow(index, "", "toy/arithmetic", "", {}, f"rows:{index}") for index in range(8)]
    answers = Answers(rows, [], Generation([], None, []), [])
    metrics = learner.update(StepBatch(step, StepPrompts([], [], 0, 0), answers, batch_of([1] * 8))).metrics
    return metrics, [[(mini.batch.responses.flat - 3).tolist() for mini in member.minis] for member in workers.group.members]


def test_an_update_has_one_mini_batch_per_share_of_the_prompts_in_order(alike):
    assert updated(alike, {})[1] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_the_last_mini_batch_is_not_smaller_when_the_batch_is_one(alike):
    assert updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4})[1] == [[list(range(8))]]


def test_ppo_epochs_pass_over_the_batch_again(alike):
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
