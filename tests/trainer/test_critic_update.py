import dataclasses
import math

import pytest
import torch

from tests.trainer.conftest import Member, batch_of, group_of
from verl_memopt.config.schema import Critic, Optim
from verl_memopt.errors import ConfigError, TrainingError
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.critic_update import CriticTraining
from verl_memopt.trainer.micro_batching import MiniBatchCutter, critic_budgets

CRITIC = Critic(
    ppo_mini_batch_size=2,
    ppo_epochs=1,
    shuffle=False,
    use_dynamic_bsz=True,
    ppo_max_token_len_per_gpu=40,
    forward_max_token_len_per_gpu=9,
    optim=Optim(lr=0.5),
)


class Valuer(Member):
    """Gives each token its id as value, and answers an update with figures that depend on its rank."""

    norm, partial = 2.0, ()

    def values(self, batch, micro_batches):
        self.cut = micro_batches
        return batch.responses.flat.float()

    def update_critic(self, minis):
        self.minis = minis
        skipped = 0.0 if math.isfinite(self.norm) else 1.0
        metrics = {"critic/vf_loss": 1.0 + self.rank, "critic/grad_norm": self.norm, "critic/lr": 0.5}
        metrics["critic/skipped_updates"] = skipped
        return metrics | ({"critic/partial_updates": self.partial[self.rank]} if self.partial else {})


def training(tmp_path, ranks=1, critic=CRITIC, warmup=0):
    workers = group_of(*map(Valuer, range(ranks)))
    update, values = critic_budgets(critic)
    cutter = MiniBatchCutter(ranks, critic, 2, update, True)
    return CriticTraining(workers, critic, cutter, values, warmup, None, CheckpointStore(tmp_path / "run", None))


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_in_batch_order_however_they_are_spread(tmp_path, ranks):
    batch = batch_of([4, 1, 0, 3, 2, 2, 4, 4])
    critic = training(tmp_path, ranks)
    assert critic.values(batch, "abcdefgh").tolist() == batch.responses.flat.tolist()
    cuts = [member.cut for member in critic.workers.group.members]
    assert len({len(cut) for cut in cuts}) == 1
    assert len(cuts[0]) > 1, "the values pass has its own budget"


def test_a_row_beyond_the_values_budget_is_named_with_the_key(tmp_path):
    small = dataclasses.replace(CRITIC, forward_max_token_len_per_gpu=3)
    with pytest.raises(ConfigError, match=r"critic\.forward_max_token_len_per_gpu=3: .*a"):
        training(tmp_path, critic=small).values(batch_of([4, 4]), "ab")


def test_an_update_has_the_critics_mini_batches_with_old_values_and_returns(tmp_path):
    batch, critic = batch_of([1] * 8), training(tmp_path)
    batch.old_values, batch.returns = torch.arange(8.0), -torch.arange(8.0)
    metrics = critic.update(batch, "abcdefgh", 1)
    (member,) = critic.workers.group.members
    assert [mini.batch.old_values.tolist() for mini in member.minis] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mini.batch.returns.tolist() for mini in member.minis] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert metrics == {"critic/vf_loss": 1.0, "critic/grad_norm": 2.0, "critic/lr": 0.5, "critic/skipped_updates": 0.0}


def test_shares_of_the_loss_are_summed_over_ranks_and_what_all_know_is_taken_once(tmp_path):
    metrics = training(tmp_path, 2).update(batch_of([1] * 8), "abcdefgh", 1)
    assert metrics == {"critic/vf_loss": 3.0, "critic/grad_norm": 2.0, "critic/lr": 0.5, "critic/skipped_updates": 0.0}


def test_weights_that_one_rank_has_updated_in_part_stop_the_run_and_name_the_critic(tmp_path, monkeypatch):
    monkeypatch.setattr(Valuer, "norm", math.nan)
    monkeypatch.setattr(Valuer, "partial", (0.0, 1.0))
    with pytest.raises(TrainingError, match=r"critic\.optim\.in_backward=true: in step 3 .* critic\.optim\.lr=<less than 0\.5>"):
        training(tmp_path, 2).update(batch_of([1] * 8), "abcdefgh", 3)


def test_the_first_steps_are_the_warm_up(tmp_path):
    critic = training(tmp_path, warmup=2)
    assert [critic.warms_up(step) for step in (1, 2, 3)] == [True, True, False]
    assert not training(tmp_path).warms_up(1)


def test_both_budgets_are_the_critics_own():
    update, values = critic_budgets(CRITIC)
    assert (update.by_tokens, update.max_tokens, update.key) == (True, 40, "critic.ppo_max_token_len_per_gpu")
    assert (values.by_tokens, values.max_tokens, values.key) == (True, 9, "critic.forward_max_token_len_per_gpu")
    by_rows = dataclasses.replace(
        CRITIC, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=3, forward_micro_batch_size_per_gpu=5
    )
    assert [budget.rows for budget in critic_budgets(by_rows)] == [3, 5]
