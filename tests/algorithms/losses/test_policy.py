import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.algorithms.modes import LOSSES, SELECTING, TOKEN_LOCAL
from tests.tensors import row_of_each_token
from verl_memopt.algorithms.losses import LossTokens, clip_bounds, policy_loss
from verl_memopt.algorithms.rows import LOSS_AGG_MODES, GlobalCounts
from verl_memopt.config.schema import Actor, PolicyLoss

LENGTHS = [3, 1, 4, 2]
ADVANTAGES = [1.0, -0.5, 2.0, -1.5]
COUNTS = GlobalCounts(tokens=sum(LENGTHS), sequences=len(LENGTHS))
WITH_PPO_RATIO = ("vanilla", "sequence", "gspo")
EACH = torch.tensor([True, False, False, True, False, True, False, False, True, True])  # tokens that a selection might take
ACTOR = Actor(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5, loss_scale_factor=4, tau_pos=1.5, tau_neg=2.5)


def actor(mode, agg="token-mean"):
    return replace(ACTOR, policy_loss=PolicyLoss(loss_mode=mode, ppo_kl_coef=0.7), loss_agg_mode=agg)


def ppo_term(ratio, advantage, dual_clip):
    """-min(ratio * A, clip(ratio) * A), at most -c * A for negative A under the dual clip."""
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    return -max(objective, 1.5 * advantage) if dual_clip and advantage < 0 else -objective


def token_term(mode, ratio, log_prob, advantage, selected):
    """The loss of one token, from the formulas of the papers."""
    if mode == "vanilla":
        return ppo_term(ratio, advantage, dual_clip=True)
    if mode == "cispo":
        return -min(max(ratio, 0.8), 1.3) * advantage * log_prob
    if mode.startswith("dppo"):
        return dppo_factor(mode, ratio, log_prob, advantage) * log_prob
    if mode == "sapo":
        tau = 1.5 if advantage > 0 else 2.5
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if mode == "gpg":
        return -advantage * log_prob
    if mode == "kl_cov":
        return -advantage * ratio + (0.7 * abs(math.log(ratio)) if selected else 0.0)
    loss = ppo_term(ratio, advantage, dual_clip=False)
    return 0.0 if selected and loss == -ratio * advantage else loss


def dppo_counts(mode, ratio, log_prob, advantage):
    """Whether the probability of a token has not moved too far towards where the advantage pushes it, in DPPO."""
    p, old = math.exp(log_prob), math.exp(log_prob) / ratio
    if mode == "dppo_tv":
        return p - old <= 0.3 if advantage > 0 else old - p <= 0.2
    kl = old * math.log(old / p) + (1 - old) * math.log((1 - old + 1e-8) / (1 - p + 1e-8)) if p < 1 else math.inf
    return p <= old or kl <= 0.3 if advantage > 0 else p >= old or kl <= 0.2


def dppo_factor(mode, ratio, log_prob, advantage):
    """The factor of a log-prob in DPPO."""
    return -min(ratio, 1.5) * advantage * dppo_counts(mode, ratio, log_prob, advantage)


def geo_mean_term(ratios, advantage):
    """Ratios clipped to [e^-0.2, e^0.3] where that makes the objective smaller, and their geometric mean."""
    held = [min(max(r, math.exp(-0.2)), math.exp(0.3)) for r in ratios]
    bound = min if advantage > 0 else max
    return -advantage * math.prod(bound(r, h) for r, h in zip(ratios, held, strict=True)) ** (1 / len(ratios))


def vespo_factor(ratio, advantage, weights=()):
    """The factor of a log-prob in VESPO: w^k * exp(lambda * (1 - w))."""
    (power, decay), w = ((3.0, 2.0) if advantage < 0 else (2.0, 3.0)), ratio * math.prod(weights)
    return -(w**power) * math.exp(decay * (1 - w)) * advantage


def naive_loss(new, old, mode, agg):
    """Row by row from lists of per-token log-probs."""
    ratios = [[math.exp(n - o) for n, o in zip(ns, os, strict=True)] for ns, os in zip(new, old, strict=True)]
    if mode == "sequence":
        terms = [ppo_term(math.prod(row), a, dual_clip=False) for row, a in zip(ratios, ADVANTAGES, strict=True)]
        return sum(terms) / len(terms)
    if mode == "geo_mean":
        return sum(geo_mean_term(row, a) for row, a in zip(ratios, ADVANTAGES, strict=True)) / len(ratios)
    if mode == "vespo":
        rows = [[vespo_factor(math.prod(row), a) * n for n in ns] for row, ns, a in zip(ratios, new, ADVANTAGES, strict=True)]
        return averaged(rows, agg)
    selected = iter(EACH.tolist())
    if mode == "gspo":
        means = [math.prod(row) ** (1 / len(row)) for row in ratios]
        rows = [[ppo_term(r, a, dual_clip=False)] * n for r, a, n in zip(means, ADVANTAGES, LENGTHS, strict=True)]
    else:
        rows = [
            [token_term(mode, r, n, a, next(selected)) for r, n in zip(row, ns, strict=True)]
            for row, ns, a in zip(ratios, new, ADVANTAGES, strict=True)
        ]
    if mode == "sapo":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return averaged(rows, agg)


def averaged(rows, agg):
    if agg in ("token-mean", "token-sum"):
        return sum(map(sum, rows)) / (sum(LENGTHS) if agg == "token-mean" else 1)
    per_row = [sum(row) / len(row) if agg == "seq-mean-token-mean" else sum(row) for row in rows]
    return sum(per_row) / len(rows) / (4 if agg == "seq-mean-token-sum-norm" else 1)


def random_log_probs():
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) * 2
    new = old + 0.6 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    return new, old


def run(new, old, indices, settings):
    """Loss and metrics of the micro-batch that holds the given rows."""
    lengths = torch.tensor([LENGTHS[i] for i in indices])
    cut = [torch.cat([values.split(LENGTHS)[i] for i in indices]) for values in (new, old)]
    row = row_of_each_token(lengths, len(cut[0]))
    advantages = torch.tensor([ADVANTAGES[i] for i in indices], dtype=torch.float64)[row]
    selected = torch.cat([EACH.split(LENGTHS)[i] for i in indices])
    return policy_loss(LossTokens(*cut, advantages, row, lengths, COUNTS, selected=selected), settings)


MODES = [(mode, agg) for mode in LOSSES for agg in (["token-mean"] if LOSSES[mode].by_sequence else LOSS_AGG_MODES)]


@pytest.mark.parametrize(("mode", "agg"), MODES)
def test_the_loss_equals_the_row_by_row_definition(mode, agg):
    new, old = random_log_probs()
    loss, metrics = run(new, old, range(4), actor(mode, agg))
    naive = naive_loss([r.tolist() for r in new.split(LENGTHS)], [r.tolist() for r in old.split(LENGTHS)], mode, agg)
    assert loss.item() == pytest.approx(naive, rel=1e-12)
    assert metrics["pg_loss"].item() == loss.item()


@pytest.mark.parametrize(("mode", "agg"), MODES)
@pytest.mark.parametrize("bins", [[[0], [1], [2], [3]], [[3, 1], [0, 2]]])
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches(mode, agg, bins):
    new, old = random_log_probs()
    whole = new.clone().requires_grad_()
    loss, metrics = run(whole, old, range(4), actor(mode, agg))
    loss.backward()
    parts = new.clone().requires_grad_()
    results = [run(parts, old, indices, actor(mode, agg)) for indices in bins]
    sum(part for part, _ in results).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-15)
    for name, value in metrics.items():
        assert sum(m[name] for _, m in results).item() == pytest.approx(value.item(), rel=1e-12, abs=1e-15)


def one_token(log_ratio, advantage, settings, **options):
    """Gives the loss, with gradient to the log-prob, and the metrics of a mini-batch of one token."""
    new, one = torch.tensor([log_ratio], requires_grad=True), torch.tensor([1])
    tokens = LossTokens(new, torch.zeros(1), torch.tensor([advantage]), one - 1, one, GlobalCounts(1, 1), **options)
    return *policy_loss(tokens, settings), new


def gradient_at(mode, log_ratio, advantage):
    loss, _, new = one_token(log_ratio, advantage, actor(mode), selected=torch.tensor([False]))
    loss.backward()
    return new.grad.item()


@pytest.mark.parametrize("mode", [*WITH_PPO_RATIO, "geo_mean", "clip_cov"])
def test_the_clip_stops_the_gradient_only_on_the_side_that_binds(mode):
    assert gradient_at(mode, math.log(1.4), advantage=1.0) == 0
    assert gradient_at(mode, math.log(1.4), advantage=-1.0) != 0
    assert gradient_at(mode, math.log(0.7), advantage=-1.0) == 0
    assert gradient_at(mode, math.log(0.7), advantage=1.0) != 0


def test_the_dual_clip_stops_the_gradient_of_a_bad_token_beyond_its_bound():
    assert gradient_at("vanilla", math.log(1.6), advantage=-1.0) == 0
    assert gradient_at("sequence", math.log(1.6), advantage=-1.0) != 0


def test_without_the_dual_clip_a_bad_token_has_its_whole_loss():
    settings = replace(actor("vanilla"), clip_ratio_c=None)
    assert one_token(math.log(50.0), -1.0, settings)[0].item() == pytest.approx(50.0)
    assert one_token(math.log(50.0), -1.0, replace(settings, policy_loss=PolicyLoss("dppo_kl")))[1]["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize(("ratio", "factor"), [(0.1, 0.1), (4.0, 4.0), (7.0, 5.0)])
def test_cispo_with_one_bound_weighs_a_log_prob_by_any_smaller_ratio(ratio, factor):
    settings = replace(ACTOR, policy_loss=PolicyLoss("cispo", cispo_max_ratio=5.0))
    loss, metrics, new = one_token(math.log(ratio), 1.0, settings)
    loss.backward()
    assert new.grad.item() == pytest.approx(-factor)
    assert metrics["pg_clipfrac"].item() == (ratio != factor)


def test_clip_fractions_and_kl_by_hand():
    # ratios 1.4 (clipped above), 1.0, 0.7 (clipped below as A < 0), 1.6 with A < 0 (bounded by c)
    new = torch.tensor([1.4, 1.0, 0.7, 1.6]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    row, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])
    _, metrics = policy_loss(LossTokens(new, torch.zeros(4), advantages, row, lengths, GlobalCounts(4, 2)), actor("vanilla"))
    assert metrics["pg_clipfrac"].item() == 0.5
    assert metrics["pg_clipfrac_lower"].item() == 0.25
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(1.4 * 0.7 * 1.6) / 4, rel=1e-5)
    assert metrics["ratio_clamped"].item() == 0


def test_a_summed_log_ratio_beyond_20_is_clamped_and_counted():
    row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    arguments = (torch.tensor([30.0, 30.0, 0.0]), torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), row, lengths)
    loss, metrics = policy_loss(LossTokens(*arguments, GlobalCounts(3, 2)), actor("sequence"))
    assert loss.item() == pytest.approx((math.exp(20) - 1) / 2, rel=1e-6)
    assert metrics["ratio_clamped"].item() == 0.5


@pytest.mark.parametrize("mode", LOSSES)
def test_a_row_with_an_empty_response_adds_nothing(mode):
    row, lengths = torch.tensor([0, 2]), torch.tensor([1, 0, 1])
    options = {"selected": torch.tensor([True, False])}
    tokens, counts = [torch.ones(2)] * 3, GlobalCounts(2, 3)
    with_empty = policy_loss(LossTokens(*tokens, row, lengths, counts, **options), actor(mode))[0]
    without = policy_loss(LossTokens(*tokens, torch.tensor([0, 1]), torch.tensor([1, 1]), counts, **options), actor(mode))[0]
    assert with_empty.item() == without.item()


@pytest.mark.parametrize("mode", LOSSES)
def test_losses_run_on_fake_tensors(mode):
    with FakeTensorMode():
        log_probs = torch.zeros(6, requires_grad=True)
        lengths = torch.full((3,), 2)
        row = row_of_each_token(lengths, 6)
        fields = (torch.zeros(6), torch.zeros(6), row, lengths, GlobalCounts(6, 3))
        loss, metrics = policy_loss(LossTokens(log_probs, *fields, selected=torch.zeros(6, dtype=torch.bool)), actor(mode))
        loss.backward()
    assert loss.shape == ()
    assert all(not metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("mode", ["sequence", "gspo"])
def test_clip_fractions_of_sequences_by_hand(mode):
    # ratios 1.4 (clipped above), 1.0, 0.7 (clipped below as A < 0), 1.6 with A < 0 (not bounded: sequences have no dual clip)
    new, advantages = torch.tensor([1.4, 1.0, 0.7, 1.6]).log(), torch.tensor([1.0, 1.0, -1.0, -1.0])
    row, lengths = torch.arange(4), torch.ones(4, dtype=torch.int64)
    _, metrics = policy_loss(LossTokens(new, torch.zeros(4), advantages, row, lengths, GlobalCounts(4, 4)), actor(mode))
    assert metrics["pg_clipfrac"].item() == 0.5
    assert metrics["pg_clipfrac_lower"].item() == 0
    assert metrics["ratio_clamped"].item() == 0


def test_gspo_counts_the_tokens_of_clipped_responses():
    """Three tokens of a response with ratio 1.4, which is clipped, and one of another with ratio 1."""
    new, row, lengths = torch.tensor([1.4, 1.4, 1.4, 1.0]).log(), torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    given = LossTokens(new, torch.zeros(4), torch.ones(4), row, lengths, GlobalCounts(4, 2))
    assert policy_loss(given, actor("gspo"))[1]["pg_clipfrac"].item() == 0.75
    assert policy_loss(given, actor("sequence"))[1]["pg_clipfrac"].item() == 0.5


@pytest.mark.parametrize("advantage", [0.5, 0.0])
def test_the_dual_clip_leaves_tokens_that_are_not_bad_alone(advantage):
    loss, metrics, _ = one_token(0.0, advantage, actor("vanilla"))
    assert (loss.item(), metrics["pg_clipfrac_lower"].item()) == (-advantage, 0)


def test_a_bad_token_exactly_at_its_bound_is_not_bounded():
    loss, metrics, new = one_token(0.0, -1.0, replace(actor("vanilla"), clip_ratio_c=1.0))
    loss.backward()
    assert (loss.item(), metrics["pg_clipfrac_lower"].item()) == (1, 0)
    assert new.grad.item() == 1


@pytest.mark.parametrize(("log_ratio", "kl"), [(30.0, -20.0), (-30.0, 20.0)])
def test_the_kl_of_a_token_is_counted_up_to_20(log_ratio, kl):
    assert one_token(log_ratio, 1.0, actor("vanilla"))[1]["ppo_kl"].item() == kl


def test_gspo_holds_a_mean_log_ratio_to_at_most_10_as_verl():
    for log_ratio, held, slope in ((12, 10, 0), (10, 10, math.exp(10)), (9, 9, math.exp(9)), (-30, -30, math.exp(-30))):
        loss, metrics, new = one_token(float(log_ratio), -1.0, replace(actor("gspo"), clip_ratio_low=1.0, clip_ratio_high=1e-6))
        loss.backward()
        assert loss.item() == pytest.approx(math.exp(held) if log_ratio > 0 else 1.0 * math.exp(held), rel=1e-5)
        assert new.grad.item() == pytest.approx(slope, rel=1e-5)
        assert metrics["ratio_clamped"].item() == (log_ratio > 10)


@pytest.mark.parametrize("mode", ["kl_cov", "geo_mean"])
def test_ratios_that_verl_does_not_clamp_are_not_clamped(mode):
    new, one = torch.tensor([25.0], dtype=torch.float64, requires_grad=True), torch.tensor([1])
    fields = (torch.zeros(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64), one - 1, one, GlobalCounts(1, 1))
    loss, _ = policy_loss(LossTokens(new, *fields, selected=torch.tensor([False])), actor(mode))
    assert loss.item() == pytest.approx(math.exp(25), rel=1e-9)


@pytest.mark.parametrize("mode", ["vanilla", "sequence"])
def test_a_log_ratio_below_minus_20_counts_as_minus_20_and_has_no_gradient(mode):
    loss, metrics, new = one_token(-30.0, 1.0, actor(mode))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(-20), rel=1e-5)
    assert (metrics["ratio_clamped"].item(), new.grad.item()) == (1, 0)


@pytest.mark.parametrize("side", ["clip_ratio_low", "clip_ratio_high"])
def test_settings_that_were_not_loaded_are_refused(side):
    with pytest.raises(AssertionError, match=rf"^{side} follows clip_ratio when settings are loaded"):
        one_token(0.0, 1.0, replace(actor("vanilla"), **{side: None}))


@pytest.mark.parametrize("log_ratio", [20.0, -20.0, 20.5])
@pytest.mark.parametrize("mode", ["vanilla", "sapo", "dppo_tv"])
def test_a_log_ratio_of_exactly_20_is_not_clamped(mode, log_ratio):
    assert one_token(log_ratio, 1.0, actor(mode))[1]["ratio_clamped"].item() == (log_ratio > 20)


@pytest.mark.parametrize(("old", "new", "advantage"), [(0.0, math.log(0.9), -1.0), (math.log(0.999), 0.0, 1.0)])
def test_a_probability_of_1_before_or_after_has_a_finite_divergence(old, new, advantage):
    leaf, one = torch.tensor([new], dtype=torch.float64, requires_grad=True), torch.ones(1, dtype=torch.int64)
    given = torch.tensor([old], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    _, metrics = policy_loss(LossTokens(leaf, *given, one - 1, one, GlobalCounts(1, 1)), actor("dppo_kl"))
    assert metrics["pg_clipfrac"].item() == 0  # 0.105 nats down and 0.0105 nats up


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_dppo_does_not_cut_a_ratio_exactly_at_its_bound(mode):
    assert one_token(0.0, 1.0, replace(actor(mode), clip_ratio_c=1.0))[1]["pg_clipfrac_lower"].item() == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_counts_a_token_whose_probability_moved_exactly_to_its_bound(advantage):
    old, new = (torch.tensor([each], dtype=torch.float64).log() for each in ((0.25, 0.5) if advantage > 0 else (0.5, 0.25)))
    bound, one = abs(new.exp() - old.exp()).item(), torch.ones(1, dtype=torch.int64)
    given = LossTokens(new.requires_grad_(), old, torch.tensor([advantage]).double(), one - 1, one, GlobalCounts(1, 1))
    settings = replace(actor("dppo_tv"), clip_ratio_low=bound, clip_ratio_high=bound)
    assert policy_loss(given, settings)[1]["pg_clipfrac"].item() == 0


@pytest.mark.parametrize("mode", LOSSES)
def test_the_gradient_equals_that_of_differences_of_the_row_by_row_definition(mode):
    new, old = random_log_probs()
    leaf = new.clone().requires_grad_()
    run(leaf, old, range(4), actor(mode))[0].backward()
    old_rows, step = [row.tolist() for row in old.split(LENGTHS)], 1e-6
    ratios, advantages = (new - old).exp().tolist(), [a for a, size in zip(ADVANTAGES, LENGTHS, strict=True) for _ in range(size)]
    for place in range(sum(LENGTHS)):
        # The factors of CISPO, DPPO and VESPO have no gradient: they stay as they are while the log-prob moves.
        if mode == "cispo":
            expected = -min(max(ratios[place], 0.8), 1.3) * advantages[place] / sum(LENGTHS)
        elif mode == "vespo":
            row = row_of_each_token(torch.tensor(LENGTHS), 10)[place]
            expected = vespo_factor(math.prod(torch.tensor(ratios).double().split(LENGTHS)[row].tolist()), ADVANTAGES[row]) / 10
        elif mode.startswith("dppo"):
            expected = dppo_factor(mode, ratios[place], new[place].item(), advantages[place]) / sum(LENGTHS)
        else:
            moved = [new.clone() for _ in range(2)]
            moved[0][place] += step
            moved[1][place] -= step
            up, down = (naive_loss([r.tolist() for r in m.split(LENGTHS)], old_rows, mode, "token-mean") for m in moved)
            expected = (up - down) / (2 * step)
        assert leaf.grad[place].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", LOSSES)
def test_local_modes_alone_have_gradients_that_ignore_the_other_tokens(mode):
    old = random_log_probs()[1]
    gradients = []
    for shift in (0.0, 0.05):  # of a token of the third row; no ratio is clipped
        leaf = old + 0.01
        leaf[5] += shift
        leaf.requires_grad_()
        run(leaf, old, range(4), actor(mode))[0].backward()
        gradients.append(leaf.grad[[4, 6, 7]].tolist())
    assert (gradients[0] == gradients[1]) == (mode in TOKEN_LOCAL)


def test_importance_weights_of_vespo_are_part_of_the_ratio_of_their_row():
    new, old = random_log_probs()
    row, lengths = row_of_each_token(torch.tensor(LENGTHS), 10), torch.tensor(LENGTHS)
    weights = torch.rand(10, generator=torch.Generator().manual_seed(9), dtype=torch.float64) + 0.5
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[row]
    leaf = new.clone().requires_grad_()
    policy_loss(LossTokens(leaf, old, advantages, row, lengths, COUNTS, weights=weights), actor("vespo"))[0].backward()
    per_row = zip((new - old).exp().split(LENGTHS), ADVANTAGES, weights.split(LENGTHS), strict=True)
    expected = [vespo_factor(math.prod(ratios.tolist()), a, own.tolist()) / 10 for ratios, a, own in per_row]
    assert leaf.grad.tolist() == pytest.approx([expected[at] for at in row], rel=1e-12)


@pytest.mark.parametrize(("far", "held"), [(25.0, 20.0), (-25.0, -20.0)])
def test_the_log_ratio_of_a_token_is_held_before_vespo_adds_up_its_row(far, held):
    near = -held * 0.99
    given = LossTokens(
        torch.tensor([far - 60, near - 60], requires_grad=True), torch.tensor([-60.0, -60.0]), torch.tensor([1.0, 1.0]),
        torch.tensor([0, 0]), torch.tensor([2]), GlobalCounts(2, 1),
    )  # fmt: skip
    weight = policy_loss(given, actor("vespo"))[1]["vespo_weight"].item()
    assert weight == pytest.approx(-vespo_factor(math.exp(held + near), 1.0), rel=1e-4)


def test_a_rejected_row_of_vespo_has_the_least_weight_and_no_nan():
    row, lengths = torch.tensor([0, 0]), torch.tensor([2])
    given = LossTokens(
        torch.tensor([-0.5, -1.0], requires_grad=True), torch.tensor([-0.4, -1.2]), torch.tensor([1.0, 1.0]), row, lengths,
        GlobalCounts(2, 1), weights=torch.tensor([0.0, 1.0]),
    )  # fmt: skip
    loss, metrics = policy_loss(given, actor("vespo"))
    assert 0 < loss.item() < 1e-12
    assert metrics["vespo_weight"].item() == pytest.approx(math.exp(3) * (1e-8 * math.exp(0.1)) ** 2, rel=1e-4)


@pytest.mark.parametrize("mode", [mode for mode in LOSSES if mode != "vespo"])
def test_importance_weights_multiply_the_loss_of_each_token_or_one_weight_a_row_that_of_the_row(mode):
    new, old = random_log_probs()
    row, lengths = row_of_each_token(torch.tensor(LENGTHS), 10), torch.tensor(LENGTHS)
    weights = torch.rand(10, generator=torch.Generator().manual_seed(9), dtype=torch.float64) + 0.5
    if mode not in TOKEN_LOCAL:
        weights = torch.tensor([0.5, 1.0, 2.0, 1.5], dtype=torch.float64)[row]
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[row]
    leaves, losses = [new.clone().requires_grad_() for _ in range(2)], []
    for leaf, own in zip(leaves, (weights, None), strict=True):
        tokens = LossTokens(leaf, old, advantages, row, lengths, COUNTS, selected=EACH, weights=own)
        losses.append(policy_loss(tokens, actor(mode))[0])
        losses[-1].backward()
    rtol, atol = (1e-12, 1e-15) if mode in TOKEN_LOCAL else (1e-9, 1e-12)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad * weights, rtol=rtol, atol=atol)
    assert losses[0].item() != losses[1].item()


@pytest.mark.parametrize(("mode", "agg"), MODES)
def test_rejected_tokens_might_as_well_not_be_there(mode, agg):
    new, old = random_log_probs()
    kept = torch.tensor([True, False, True, False, True, True, False, True, True, True])  # of rows with 3, 1, 4 and 2 tokens
    lengths = torch.tensor([2, 0, 3, 2])
    row = row_of_each_token(torch.tensor(LENGTHS), 10)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[row]
    counts = GlobalCounts(tokens=7, sequences=4)
    leaves = [new.clone().requires_grad_() for _ in range(2)]
    whole = LossTokens(leaves[0], old, advantages, row, lengths, counts, kept=kept, selected=EACH)
    part = LossTokens(leaves[1][kept], old[kept], advantages[kept], row[kept], lengths, counts, selected=EACH[kept])
    masked, metrics = policy_loss(whole, actor(mode, agg))
    cut, cut_metrics = policy_loss(part, actor(mode, agg))
    masked.backward()
    cut.backward()
    assert masked.item() == pytest.approx(cut.item(), rel=1e-12)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-12, atol=1e-15)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {name: value.item() for name, value in cut_metrics.items()}, rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("mode", LOSSES)
def test_a_rejected_token_without_an_old_log_prob_has_no_gradient_and_spoils_none(mode):
    new, old = random_log_probs()
    row, kept = row_of_each_token(torch.tensor(LENGTHS), 10), torch.arange(10) != 5
    lengths, advantages = torch.tensor([3, 1, 3, 2]), torch.tensor(ADVANTAGES, dtype=torch.float64)[row]
    gradients = []
    for value in (math.nan, 0.0):
        leaf, known = new.clone().requires_grad_(), old.clone()
        known[5] = value
        policy_loss(LossTokens(leaf, known, advantages, row, lengths, COUNTS, selected=EACH, kept=kept), actor(mode))[
            0
        ].backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert gradients[0][5] == 0
    assert gradients[0].isfinite().all()


@pytest.mark.parametrize("mode", SELECTING)
def test_a_mode_that_needs_selected_tokens_says_so(mode):
    with pytest.raises(AssertionError, match=f"^{mode} needs the tokens that select_{mode} chose"):
        one_token(0.0, 1.0, actor(mode))


def tokens(**options):
    values = torch.tensor([1.0, 2.0, 4.0])
    row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    return LossTokens(values, torch.zeros(3), torch.ones(3), row, lengths, GlobalCounts(3, 2), **options)


def test_weights_and_rejection_apply_to_values_shares_and_means():
    kept = torch.tensor([True, False, True])
    plain, masked = tokens(), replace(tokens(weights=torch.tensor([2.0, 3.0, 5.0]), kept=kept), lengths=torch.tensor([1, 1]))
    values = torch.tensor([1.0, 2.0, 4.0])
    assert plain.weighted(values).tolist() == [1, 2, 4]
    assert masked.masked(values).tolist() == [1, 0, 4]
    assert masked.masked(torch.tensor([1.0, math.nan, 2.0])).tolist() == [1, 0, 2]  # a rejected token may hold anything
    assert masked.weighted(values).tolist() == [2, 0, 20]
    assert plain.row_means(values).tolist() == [1.5, 4]
    assert masked.row_means(values).tolist() == [1, 4]
    assert plain.share(values > 1).item() == pytest.approx(2 / 3)
    assert masked.share(values > 1).item() == pytest.approx(1 / 3)


def test_clips_and_aggregation_come_from_the_actors_section():
    actor = Actor(clip_ratio_low=0.1, clip_ratio_high=0.3, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=5)
    assert clip_bounds(actor) == (0.1, 0.3)
    assert tokens().aggregated(torch.ones(3), actor).item() == pytest.approx(0.3)


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_dppo_counts_a_token_up_to_its_bound_for_each_old_and_new_probability(mode):
    grid = torch.linspace(0.02, 0.97, 24, dtype=torch.float64)
    old, p = (each.flatten() for each in torch.meshgrid(grid, grid, indexing="ij"))
    settings, row, pairs = actor(mode, "token-sum"), torch.arange(len(p)), (p.tolist(), old.tolist())
    for advantage in (1.0, -1.0, 0.5, -0.5, 0.0):
        new = p.log().requires_grad_()
        tokens = LossTokens(new, old.log(), torch.full_like(p, advantage), row, torch.ones(len(p), dtype=torch.int64), COUNTS)
        loss, metrics = policy_loss(tokens, settings)
        (found,) = torch.autograd.grad(loss, new)
        expected = [dppo_factor(mode, (one / was).item(), one.log().item(), advantage) for one, was in zip(p, old, strict=True)]
        assert found.tolist() == pytest.approx(expected, abs=1e-9)
        share = COUNTS.tokens  # metrics are sums over tokens, divided by the tokens of the mini-batch
        zero = ~torch.tensor([dppo_counts(mode, one / was, math.log(one), advantage) for one, was in zip(*pairs, strict=True)])
        assert metrics["pg_clipfrac"].item() == pytest.approx(zero.sum().item() / share)
        assert metrics["pg_clipfrac_lower"].item() == pytest.approx(((p / old > 1.5) & ~zero).sum().item() / share)
        assert metrics["ratio_clamped"].item() == 0
