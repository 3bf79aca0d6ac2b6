import math
from itertools import chain

import pytest
import torch

from tests.algorithms.modes import LOSSES, TOKEN_LOCAL
from tests.trainer.conftest import AR, Member, batch_of, group_of
from verl_memopt.algorithms.losses import LossTokens, policy_loss, select_clip_cov, select_kl_cov
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import TrainingError
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.rollouts import Answers, StepBatch
from verl_memopt.worker.policy import Objective
from verl_memopt.worker.trained_model import micro_batches_of


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
