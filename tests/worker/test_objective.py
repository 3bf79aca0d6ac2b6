import itertools
from dataclasses import replace

import pytest
import torch

from tests.algorithms.modes import LOSSES, TOKEN_LOCAL
from verl_memopt.algorithms.kl import KL_ESTIMATORS
from verl_memopt.algorithms.records import LOSSES_OF_SEQUENCES
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts
from verl_memopt.config.aliases import PRESETS
from verl_memopt.config.schema import Actor, PolicyLoss
from verl_memopt.config.values import choices
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.model.packing import pack_rows
from verl_memopt.worker.policy import Objective
from verl_memopt.worker.trained_model import MicroBatch

SIZES = [3, 0, 5, 1]
TOKENS, COUNTS = sum(SIZES), GlobalCounts(31.0, 7.0)
KEPT = torch.tensor([True, True, False, True, True, False, False, True, False])
SELECTED = torch.tensor([True, False, True, False, False, True, True, False, True])
VOCAB, WIDTH, CHUNK, SCALE = 29, 4, 2, 3
KL = [None, *KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)]


def objective(loss_mode, agg_mode, kl, entropy_coeff, off_policy, corrected=False, bypass=None):
    """Gives the objective of four rows, one of them empty; the chunks of the head cut through rows."""
    generator = torch.Generator().manual_seed(3)
    pack = pack_rows(torch.zeros(4, dtype=torch.int64), [1] * 4, torch.randint(VOCAB, (TOKENS,), generator=generator), SIZES)
    old, reference, advantages = (torch.randn(TOKENS, generator=generator) for _ in range(3))
    actor = Actor(
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        loss_agg_mode=agg_mode,
        loss_scale_factor=11,
        entropy_coeff=entropy_coeff,
        use_kl_loss=kl is not None,
        kl_loss_coef=0.2,
        kl_loss_type=kl or "k1",
        policy_loss=PolicyLoss(loss_mode=loss_mode),
    )
    micro = MicroBatch(pack, old * 0.3 - 3.4 if off_policy else None, reference * 0.3 - 3.4, advantages, SELECTED)
    if corrected:
        micro = replace(micro, weights=torch.rand(TOKENS, generator=generator), kept=KEPT)
    return Objective(micro, replace(COUNTS, mean_weight=1.3), actor, bypass)


def step(whole, fused):
    """Gives loss, metrics and gradients of hidden states and head."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,)))
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    ahead = whole.token_gradient(SCALE) if fused else None
    head = Head(weight, bias, 0.7, CHUNK, 0, whole.with_entropy)
    found = head_log_probs(head, hidden, whole.micro.pack.targets, ahead)
    loss, metrics = whole.loss(*found)
    (loss * SCALE).backward()
    return loss, metrics, [leaf.grad for leaf in leaves]


def crossed(modes):
    """Gives each loss with one mean and ``vanilla`` with every mean. The other pairs are proofs."""
    means = len(LOSS_AGG_MODES)
    quick = {(mode, LOSS_AGG_MODES[place % means]) for place, mode in enumerate(modes)}
    quick |= {("vanilla", mean) for mean in LOSS_AGG_MODES}
    slow = set(itertools.product(modes, LOSS_AGG_MODES)) - quick
    cases = [*sorted(quick), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in sorted(slow))]
    return pytest.mark.parametrize(("loss_mode", "agg_mode"), cases)


@crossed(LOSSES)
def test_gradients_told_ahead_are_those_of_the_loss(loss_mode, agg_mode):
    penalties = KL if (loss_mode, agg_mode) == ("vanilla", "token-mean") else (None, "k3+")
    for kl, entropy_coeff, off_policy in itertools.product(penalties, (0.0, 0.01), (False, True)):
        if off_policy and loss_mode not in TOKEN_LOCAL:
            continue
        whole = objective(loss_mode, agg_mode, kl, entropy_coeff, off_policy)
        (loss, metrics, gradients), expected = (step(whole, fused) for fused in (True, False))
        assert torch.equal(loss, expected[0])
        assert metrics == expected[1]
        for one, other in zip(gradients, expected[2], strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm(), (kl, entropy_coeff, off_policy)


@crossed(sorted(TOKEN_LOCAL))
def test_gradients_told_ahead_have_the_weights_and_lack_the_rejected_tokens(loss_mode, agg_mode):
    for kl in (None, "k3+"):
        whole = objective(loss_mode, agg_mode, kl, 0.01, True, corrected=True)
        (loss, _, gradients), expected = (step(whole, fused) for fused in (True, False))
        assert torch.equal(loss, expected[0])
        for one, other in zip(gradients, expected[2], strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm(), kl
        log_probs, entropy = torch.full((TOKENS,), -3.4), torch.ones(TOKENS)
        of_log_probs, of_entropy = whole.token_gradient(SCALE)(slice(None), log_probs, entropy)
        for gradient in (of_log_probs, of_entropy):
            assert not gradient[~KEPT].any()
            assert gradient[KEPT].any()


BYPASS = {
    "clip": PRESETS["bypass_ppo_clip"],
    "clip, token rejection": replace(PRESETS["bypass_ppo_clip"], rollout_rs="token_k1", rollout_rs_threshold="0.2_5.0"),
    "reinforce, token": replace(PRESETS["bypass_pg_is"], rollout_is="token", rollout_is_batch_normalize=True),
}


@pytest.mark.parametrize("name", BYPASS)
def test_gradients_of_bypass_mode_told_ahead_are_those_of_its_loss(name):
    for agg_mode in set(LOSS_AGG_MODES) - ({"seq-mean-token-mean"} if "rejection" in name else set()):
        whole = objective("vanilla", agg_mode, "k3", 0.01, True, bypass=BYPASS[name])
        (loss, _, gradients), expected = (step(whole, fused) for fused in (True, False))
        assert whole.token_gradient(SCALE) is not None
        assert torch.equal(loss, expected[0])
        for one, other in zip(gradients, expected[2], strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm(), agg_mode


def test_a_weight_or_a_rejection_of_whole_responses_waits_for_backward_in_bypass_mode():
    for name in ("bypass_pg_is", "bypass_ppo_clip_geo_rs"):
        assert objective("vanilla", "token-mean", None, 0.0, True, bypass=PRESETS[name]).token_gradient(1.0) is None


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_an_off_policy_ratio_of_sequences_waits_for_backward(loss_mode):
    gradient = objective(loss_mode, "token-mean", None, 0.0, True).token_gradient(1.0)
    assert (gradient is None) == (loss_mode in LOSSES_OF_SEQUENCES)
    assert objective(loss_mode, "token-mean", None, 0.0, False).token_gradient(1.0) is not None


def test_every_loss_and_every_mean_can_be_chosen():
    assert set(choices()["actor_rollout_ref.actor.policy_loss.loss_mode"]) == {*LOSSES, "custom"}
    assert choices()["actor_rollout_ref.actor.loss_agg_mode"] == LOSS_AGG_MODES
    assert set(LOSSES) - TOKEN_LOCAL == set(LOSSES_OF_SEQUENCES)


def test_a_penalty_is_in_the_loss_with_its_coefficient():
    log_probs, entropy = torch.linspace(-4, -3, TOKENS), torch.linspace(1, 2, TOKENS)
    whole = objective("vanilla", "token-mean", "k1", 0.5, False)
    loss, metrics = whole.loss(log_probs, entropy)
    divergence = (log_probs - whole.micro.ref_log_probs).sum() / COUNTS.tokens
    bonus, policy = entropy.sum() / COUNTS.tokens, -whole.micro.advantages.sum() / COUNTS.tokens
    torch.testing.assert_close(loss, policy - 0.5 * bonus + 0.2 * divergence)
    torch.testing.assert_close(
        [metrics[f"actor/{name}"] for name in ("pg_loss", "entropy", "kl_loss", "loss")], [policy, bonus, divergence, loss]
    )
