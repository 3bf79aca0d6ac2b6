import math
from dataclasses import replace

import pytest
import torch

from tests.algorithms.ragged import Ragged
from verl_memopt.algorithms.losses import LossTokens, vanilla_loss
from verl_memopt.algorithms.rollout_correction import bypass_loss, is_token_local
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.schema import Actor

SAMPLE = Ragged((3, 2, 4), 6)
ENGINE = -SAMPLE.tokens(0).abs()
NEW = ENGINE + 0.4 * SAMPLE.tokens(1)
ADVANTAGES = SAMPLE.rows(2, (1.0, -0.5))[SAMPLE.row]
COUNTS = GlobalCounts(9, 3)
SETTINGS = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3)


def tokens(leaf, mean_weight=None):
    return LossTokens(leaf, ENGINE, ADVANTAGES, SAMPLE.row, SAMPLE.lengths, replace(COUNTS, mean_weight=mean_weight))


def gradient(settings, correction, mean_weight=None):
    leaf = NEW.clone().requires_grad_()
    loss, _ = bypass_loss(tokens(leaf, mean_weight), settings, correction)
    loss.backward()
    return loss.item(), leaf.grad


def test_with_the_clip_it_is_ppos_loss_whatever_weights_are_asked_for():
    expected = vanilla_loss(tokens(NEW), SETTINGS)[0].item()
    for correction in (PRESETS["bypass_ppo_clip"], replace(PRESETS["bypass_ppo_clip"], rollout_is="token")):
        assert gradient(SETTINGS, correction)[0] == expected


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_reinforce_weighs_each_token_by_its_present_ratio_to_the_engine(level):
    correction = replace(PRESETS["bypass_pg_is"], rollout_is=level)
    loss, grad = gradient(SETTINGS, correction)
    expected, weights = [], []
    for new, old, advantages in zip(*map(SAMPLE.lists, (NEW, ENGINE, ADVANTAGES)), strict=True):
        logs = [n - o for n, o in zip(new, old, strict=True)]
        logs = logs if level == "token" else [sum(logs)] * len(logs)
        weights += [min(math.exp(log), 2.0) for log in logs]
        expected += advantages
    expected = [-a * w / 9 for a, w in zip(expected, weights, strict=True)]
    assert grad.tolist() == pytest.approx(expected, rel=1e-6)
    assert loss == pytest.approx(sum(g * n for g, n in zip(expected, NEW.tolist(), strict=True)), rel=1e-6)


@pytest.mark.parametrize("name", ["bypass_ppo_clip_k3_rs", "bypass_pg_geo_rs"])
def test_rejected_rows_have_no_gradient_and_the_loss_divides_by_all_tokens(name):
    geometric = "geo" in name
    correction = replace(PRESETS[name], rollout_rs_threshold="0.85_1.18" if geometric else 0.19)
    _, grad = gradient(SETTINGS, correction)
    free = gradient(SETTINGS, replace(correction, rollout_rs=None))[1]
    kept = []
    for new, old in zip(SAMPLE.lists(NEW), SAMPLE.lists(ENGINE), strict=True):
        logs = [n - o for n, o in zip(new, old, strict=True)]
        k3 = sum(math.exp(log) - 1 - log for log in logs) / len(logs)
        kept.append(0.85 <= math.exp(-sum(logs) / len(logs)) <= 1.18 if geometric else k3 <= 0.19)
    assert 0 < sum(kept) < 3
    assert free.abs().sum() > grad.abs().sum() > 0
    for is_kept, part, whole in zip(kept, grad.split([3, 2, 4]), free.split([3, 2, 4]), strict=True):
        assert torch.equal(part, whole if is_kept else torch.zeros_like(whole))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_divided_by_their_mean_over_tokens_or_rows_or_by_one_that_is_given(level):
    normalized = replace(PRESETS["bypass_pg_is"], rollout_is=level, rollout_is_batch_normalize=True)
    plain = gradient(SETTINGS, replace(normalized, rollout_is_batch_normalize=False))[1]
    logs = (NEW - ENGINE).tolist() if level == "token" else [sum(row) for row in SAMPLE.lists(NEW - ENGINE)]
    mean = sum(min(math.exp(log), 2.0) for log in logs) / len(logs)
    torch.testing.assert_close(gradient(SETTINGS, normalized)[1], plain / mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(SETTINGS, normalized, 4.0)[1], plain / 4, rtol=1e-6, atol=0)


def test_a_mean_over_the_tokens_of_a_row_is_over_those_that_are_kept():
    settings = replace(SETTINGS, loss_agg_mode="seq-mean-token-mean")
    correction = replace(PRESETS["bypass_pg_is"], rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.25")
    _, grad = gradient(settings, correction)
    expected, lost = [], 0
    for new, old, advantages in zip(*map(SAMPLE.lists, (NEW, ENGINE, ADVANTAGES)), strict=True):
        kept = [0.8 <= math.exp(o - n) <= 1.25 for n, o in zip(new, old, strict=True)]
        lost += len(kept) - sum(kept)
        expected += [-a / sum(kept) / 3 if keep else 0.0 for a, keep in zip(advantages, kept, strict=True)]
    assert 0 < lost < 9
    assert grad.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "more", "mode", "local"),
    [
        ("bypass_ppo_clip", {}, "seq-mean-token-mean", True),
        ("bypass_ppo_clip", {"rollout_is": "sequence"}, "token-mean", True),
        ("bypass_ppo_clip_k3_rs", {}, "token-mean", False),
        ("bypass_ppo_clip", {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,1"}, "token-mean", True),
        ("bypass_ppo_clip", {"rollout_rs": "token_k1", "rollout_rs_threshold": "2"}, "seq-mean-token-mean", False),
        ("bypass_pg_is", {}, "token-mean", False),
        ("bypass_pg_token_icepop", {}, "seq-mean-token-mean", True),
    ],
)
def test_a_token_is_local_where_its_gradient_stays_while_other_log_probs_move(name, more, mode, local):
    correction, settings = replace(PRESETS[name], **more), replace(SETTINGS, loss_agg_mode=mode)
    assert is_token_local(correction, mode) == local
    here, moved = NEW.clone().requires_grad_(), NEW.clone()
    moved[1:3] -= 1.5  # the other tokens of the first row
    for leaf in (here, moved.requires_grad_()):
        bypass_loss(tokens(leaf), settings, correction)[0].backward()
    assert not local or here.grad[0] == moved.grad[0]


def test_weights_and_kept_tokens_that_the_batch_has_are_not_read():
    given = replace(tokens(NEW), weights=torch.full((9,), 7.0), kept=torch.zeros(9, dtype=torch.bool))
    for name in ("bypass_ppo_clip", "bypass_pg_is"):
        assert bypass_loss(given, SETTINGS, PRESETS[name])[0] == bypass_loss(tokens(NEW), SETTINGS, PRESETS[name])[0] != 0


def test_with_the_clip_a_mean_over_a_row_is_over_its_kept_tokens():
    settings = replace(SETTINGS, loss_agg_mode="seq-mean-token-mean")
    correction = replace(PRESETS["bypass_ppo_clip"], rollout_rs="token_k1", rollout_rs_threshold="0.8_1.25")
    expected = 0.0
    for new, old, advantages in zip(*map(SAMPLE.lists, (NEW, ENGINE, ADVANTAGES)), strict=True):
        logs = [n - o for n, o in zip(new, old, strict=True)]
        losses = [
            max(-a * math.exp(log), -a * min(max(math.exp(log), 0.8), 1.3))
            for a, log in zip(advantages, logs, strict=True)
            if 0.8 <= math.exp(-log) <= 1.25
        ]
        expected += sum(losses) / len(losses) / 3
    assert gradient(settings, correction)[0] == pytest.approx(expected, rel=1e-6)
