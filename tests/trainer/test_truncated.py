import pytest
import torch

from verl_memopt.algorithms.losses import LossTokens, policy_loss
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.schema import Actor, PolicyLoss
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.trainer.step import mask_truncated


def batch():
    return RolloutBatch(
        prompts=Ragged.from_rows([[1], [1], [2]], torch.int64),
        responses=Ragged.from_rows([[7, 8], [5, 6, 9], [4]], torch.int64),
        group=torch.tensor([0, 0, 1]),
        batch_size=[],
    )


REASONS = ["stop", "length", "stop"]


def test_tokens_of_truncated_responses_are_not_kept_and_all_others_are():
    rows = batch()
    assert mask_truncated(rows, REASONS) == {"reward/masked_rows": 1.0}
    assert rows.kept.tolist() == [True, True, False, False, False, True]
    assert rows.kept_sizes() == [2, 0, 1]
    rows = batch()
    assert mask_truncated(rows, ["stop"] * 3) == {"reward/masked_rows": 0.0}
    assert rows.kept.all()


def test_what_the_rollout_correction_rejects_stays_rejected():
    rows = batch()
    rows.kept = torch.tensor([False, True, True, True, True, True])
    mask_truncated(rows, REASONS)
    assert rows.kept.tolist() == [False, True, False, False, False, True]


@pytest.mark.parametrize("mode", ["sequence", "vanilla"])
def test_a_masked_response_has_no_gradient_and_counts_for_the_mean_over_sequences(mode):
    rows = batch()
    mask_truncated(rows, REASONS)
    lengths = torch.tensor(rows.kept_sizes())
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    actor = Actor(policy_loss=PolicyLoss(loss_mode=mode), loss_agg_mode="seq-mean-token-sum", **clips)
    log_probs = torch.zeros(6, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0, -2.0])
    counts = GlobalCounts(tokens=3.0, sequences=3.0)
    row, kept = rows.response_row(), rows.kept
    loss, _ = policy_loss(LossTokens(log_probs, torch.zeros(6), advantages, row, lengths, counts, kept=kept), actor)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    # At ratio 1 the gradient is -A / 3 for each token of the three sequences.
    torch.testing.assert_close(gradient, torch.tensor([-1 / 3, -1 / 3, 0.0, 0.0, 0.0, 2 / 3]))
