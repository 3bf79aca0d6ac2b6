import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.memory.recomputed import relative
from verl_memopt.algorithms.estimators import SUM_PI_SQUARED
from verl_memopt.config.schema import Actor, ActorRolloutRef, Model, PolicyLoss, TrainedFsdp
from verl_memopt.memory.chunked_logprob import FREE_TILE, logit_bytes
from verl_memopt.memory.chunked_logprob_torch import _assert_as_precomputed, head_log_probs
from verl_memopt.memory.logit_tiles import Head, Statistic, TokenStatistics
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.plan.formulas import Shapes

VOCAB, WIDTH = 37, 5


def inputs(tokens, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    return draw(tokens, WIDTH), draw(VOCAB, WIDTH), draw(VOCAB) if bias else None, targets


def naive(hidden, weight, bias, targets, temperature, cap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def backward(outputs, factors, tensors):
    """Gives the gradients of a weighted sum of the outputs, through ``.grad``."""
    sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True)).backward()
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


@dataclass(frozen=True)
class Cut:
    """How the head is computed."""

    chunk: int = 0
    tile: int = 0
    precomputed: bool = False
    in_place: bool = False
    cap: float | None = None

    def run(self, hidden, weight, bias, targets, temperature, factors):
        """Gives log-probs and, where there are two factors, entropies, whose gradients will be the factors."""

        def gradient_of(rows, log_probs, entropy):
            assert not log_probs.requires_grad
            assert (entropy is None) == (len(factors) == 1)
            return factors[0][rows], None if entropy is None else factors[1][rows]

        head = Head(weight, bias, temperature, self.chunk, self.tile, len(factors) == 2, cap=self.cap)
        found = head_log_probs(head, hidden, targets, gradient_of if self.precomputed else None, self.in_place)
        return [value for value in found if value is not None]


CUTS = st.builds(
    Cut,
    st.sampled_from([0, 1, 2, 4, 100]),
    st.sampled_from([0, 1, 5, 16, 36, 37, 100]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.5, 30.0]),
)
ALL_KINDS = [
    Cut(16, tile, precomputed, in_place) for tile in (0, 12) for precomputed in (False, True) for in_place in (False, True)
]


@settings(deadline=None, max_examples=120)
@given(
    tokens=st.integers(0, 9),
    cut=CUTS,
    temperature=st.sampled_from([1.0, 0.5, 0.7, 2.0]),
    entropy=st.booleans(),
    bias=st.booleans(),
)
def test_values_and_gradients_equal_those_of_whole_logits(tokens, cut, temperature, entropy, bias):
    given = inputs(tokens, torch.float32, bias)
    factors = [torch.linspace(-1, 2, tokens), torch.linspace(0.5, -1, tokens)][: 1 + entropy]
    tensors = [tensor for tensor in given[:3] if tensor is not None]
    expected, found = naive(*given, temperature, cut.cap)[: 1 + entropy], cut.run(*given, temperature, factors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    with torch.no_grad():
        again = cut.run(*given, temperature, factors)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    for one, other in zip(backward(found, factors, tensors), backward(expected, factors, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("cut", ALL_KINDS)
def test_half_precision_is_no_worse_than_whole_logits_in_half_precision(cut):
    hidden, weight, _, targets = inputs(64, torch.float64, bias=False)
    factors = [torch.linspace(-1, 2, 64), torch.linspace(0.5, -1, 64)]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    wide = [tensor.detach().double().requires_grad_() for tensor in half]
    exact, ours, theirs = (
        run(*pair, None, targets, 0.7, *more)
        for run, pair, more in ((naive, wide, []), (cut.run, half, [factors]), (naive, half, []))
    )
    for one, other, value in zip(ours, theirs, exact, strict=True):
        assert (one - value).abs().max() <= (other - value).abs().max() * 1.001
    gradients = [backward(outputs, factors, pair) for outputs, pair in ((exact, wide), (ours, half), (theirs, half))]
    for value, one, other in zip(*gradients, strict=True):
        assert (one - value).norm() <= (other - value).norm() * 1.25


@pytest.mark.parametrize("cut", ALL_KINDS)
@pytest.mark.parametrize("entropy", [False, True])
def test_frozen_weights_get_no_gradient(cut, entropy):
    hidden, weight, bias, targets = inputs(40, torch.float32)
    factors = [torch.linspace(-1, 2, 40), torch.linspace(0.5, -1, 40)][: 1 + entropy]
    frozen = weight.detach(), bias.detach()
    (gradient,) = backward(cut.run(hidden, *frozen, targets, 1.0, factors), factors, [hidden])
    (expected,) = backward(naive(hidden, *frozen, targets, 1.0)[: 1 + entropy], factors, [hidden])
    assert [tensor.grad for tensor in frozen] == [None, None]
    torch.testing.assert_close(gradient, expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("cut", ALL_KINDS)
def test_without_tokens_the_weight_still_gets_a_gradient_of_zeros(cut):
    hidden, weight, bias, targets = inputs(0, torch.float32)
    gradients = backward(cut.run(hidden, weight, bias, targets, 1.0, [torch.zeros(0)]), [torch.zeros(0)], [weight, bias])
    assert [int(gradient.count_nonzero()) for gradient in gradients] == [0, 0]


@pytest.mark.parametrize("cut", ALL_KINDS)
def test_a_second_backward_adds_to_the_first(cut):
    hidden, weight, bias, targets = inputs(40, torch.float32)
    factors = [torch.linspace(-1, 2, 40)]
    once = backward(cut.run(hidden, weight, bias, targets, 1.0, factors), factors, [weight, bias])
    for _ in range(2):
        (cut.run(hidden, weight, bias, targets, 1.0, factors)[0] * factors[0]).sum().backward()
    for parameter, gradient in zip((weight, bias), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precomputed", [False, True])
@pytest.mark.parametrize("tile", [0, 5_000])
def test_capped_logits_over_several_parts_of_a_tile_are_those_of_whole_ones(tile, precomputed):
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(12, 8, generator=generator), torch.randn(9_000, 8, generator=generator)]
    targets, factors = torch.randint(9_000, (12,), generator=generator), [torch.linspace(-1, 2, 12), torch.linspace(0.5, -1, 12)]
    for tensor in tensors:
        tensor.requires_grad_()
    expected = naive(*tensors, None, targets, 0.7, 4.0)
    found = Cut(5, tile, precomputed, cap=4.0).run(*tensors, None, targets, 0.7, factors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=0)
    for one, other in zip(backward(found, factors, tensors), backward(expected, factors, tensors), strict=True):
        assert relative(one, other) < 5e-6


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_other_than_the_precomputed_one_is_refused(which):
    hidden, weight, bias, targets = inputs(8, torch.float32)
    factors = [torch.linspace(-1, 2, 8), torch.linspace(0.5, -1, 8)]
    found = Cut(4, precomputed=True).run(hidden, weight, bias, targets, 1.0, factors)
    actual = [factor.clone() for factor in factors]
    actual[which][3] *= 1.001
    with pytest.raises(RuntimeError, match=r"^the gradient of the log-probs is not the precomputed one"):
        backward(found, actual, [])


def test_a_hook_on_the_weight_sees_its_gradient():
    hidden, weight, bias, targets = inputs(8, torch.float32)
    factors, seen = [torch.ones(8)], []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    (gradient,) = backward(Cut(4, 0, True, True).run(hidden, weight, bias, targets, 1.0, factors), factors, [weight])
    assert torch.equal(seen[0], gradient)


def products(cut, tokens, with_grad=True):
    """Gives how many products of all tokens with the head a pass does."""
    hidden, weight, _, targets = inputs(tokens, torch.float32, bias=False)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(with_grad):
        found = cut.run(hidden, weight, None, targets, 1.0, [torch.ones(tokens)])
        if with_grad:
            backward(found, [torch.ones(tokens)], [])
    return counter.get_total_flops() / (2 * tokens * VOCAB * WIDTH)


def test_precomputed_gradients_spare_a_product():
    assert products(Cut(4), 8, False) == 1
    assert products(Cut(4, 10), 8, False) == 1
    assert products(Cut(4), 8) == 4
    assert products(Cut(4, precomputed=True), 8) == 3
    assert products(Cut(4, 10, precomputed=True), 8) == 4


LARGE, CHUNK, NARROW = 40_960, 8, 4


def measured(cut, tokens, dtype=torch.float32, entropy=False, with_grad=True):
    """Gives the peak of the kind ``logits``, and the peak of everything."""
    weight = torch.randn(LARGE, NARROW).to(dtype).requires_grad_()
    hidden, targets = torch.randn(tokens, NARROW).to(dtype).requires_grad_(), torch.zeros(tokens, dtype=torch.int64)
    factors = [torch.ones(tokens)] * (1 + entropy)
    weight.grad = torch.zeros_like(weight)
    with ByteTracker() as tracker, torch.set_grad_enabled(with_grad):
        tracker.mark("params", [weight, weight.grad, hidden, targets, *factors])
        found = cut.run(hidden, weight, None, targets, 0.7, factors)
        if with_grad:
            sum((value * factor).sum() for value, factor in zip(found, factors, strict=True)).backward()
        return tracker.peaks["device"].kinds["logits"], tracker.peaks["device"].bytes


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut", [Cut(), Cut(1), Cut(CHUNK), Cut(CHUNK, precomputed=True), Cut(CHUNK, LARGE // 4), Cut(0, LARGE // 4, True)]
)
def test_logits_take_the_bytes_the_docstring_says(cut, dtype, entropy, with_grad):
    tokens = 4 * CHUNK
    found, _ = measured(cut, tokens, dtype, entropy, with_grad)
    once = cut.precomputed and with_grad
    rows, columns = min(tokens, cut.chunk or tokens), cut.tile or (FREE_TILE if cut.chunk and not once else LARGE)
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    expected = rows * columns * (4 + narrow) + entropy * rows * 4096 * 4
    assert expected <= found <= expected * 1.01
    assert expected - entropy * rows * 4096 * 4 == logit_bytes(shapes(cut, tokens, dtype), with_grad)


def shapes(cut, tokens, dtype):
    """Gives the symbols of the formula; an update without precomputed gradients is one of sequence ratios."""
    model = Model(path="", logprob_chunk_tokens=cut.chunk, logprob_vocab_tile=cut.tile)
    fsdp = TrainedFsdp(dtype="fp32" if dtype == torch.float32 else "bfloat16")
    mode = PolicyLoss(loss_mode="vanilla" if cut.precomputed else "sequence")
    roles = ActorRolloutRef(model=model, actor=Actor(fsdp_config=fsdp, policy_loss=mode))
    unused = dict.fromkeys(("layers", "hidden", "mlp", "heads", "kv_heads", "head_dim", "params", "block_params"), 0)
    return Shapes(settings=roles, vocab=LARGE, tied=False, tokens=tokens, responses=tokens, **unused)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cut", [Cut(CHUNK, 0, precomputed, True) for precomputed in (False, True)])
def test_memory_does_not_grow_with_tokens_times_vocabulary(cut, entropy):
    few, many = (measured(cut, tokens, entropy=entropy)[1] for tokens in (64, 512))
    per_token = NARROW * 4 * 2 + 8 + 4 * 12  # hidden and its gradient, target, a dozen fp32 scalars
    assert many - few <= (512 - 64) * per_token


@pytest.mark.parametrize("precomputed", [False, True])
def test_adding_in_place_spares_a_gradient(precomputed):
    apart, in_place = (measured(replace(Cut(CHUNK, 0, precomputed), in_place=flag), 64)[1] for flag in (False, True))
    assert apart - in_place == LARGE * NARROW * 4


def test_a_gradient_that_is_not_finite_is_let_through_and_any_other_that_was_not_precomputed_breaks_off():
    precomputed = torch.tensor([math.nan, math.inf, 1.0, 2.0])
    for actual in (precomputed, torch.tensor([0.0, math.nan, 1.0, 2.0]), torch.tensor([math.nan, math.nan, math.nan, 2.0])):
        _assert_as_precomputed(precomputed, actual)
    with pytest.raises(RuntimeError, match="is not the precomputed one"):
        _assert_as_precomputed(precomputed, torch.tensor([math.nan, math.inf, 1.0, 2.1]))


@pytest.mark.parametrize("precomputed", [False, True])
def test_the_logits_of_a_forward_that_waits_for_its_backward_are_counted_as_logits(precomputed):
    weight = torch.randn(LARGE, NARROW).requires_grad_()
    hidden, targets = torch.randn(2 * CHUNK, NARROW).requires_grad_(), torch.zeros(2 * CHUNK, dtype=torch.int64)
    with ByteTracker() as tracker:
        Cut(CHUNK, precomputed=precomputed).run(hidden, weight, None, targets, 1.0, [torch.ones(2 * CHUNK)])
        assert tracker.peaks["device"].kinds["logits"] >= CHUNK * (LARGE if precomputed else FREE_TILE) * 4


def test_a_gradient_of_zeros_can_be_precomputed():
    hidden, weight, bias, targets = inputs(8, torch.float32)
    factors = [torch.zeros(8)]
    found = Cut(4, precomputed=True).run(hidden, weight, bias, targets, 1.0, factors)
    assert [gradient.count_nonzero().item() for gradient in backward(found, factors, [hidden, weight, bias])] == [0, 0, 0]


def test_precomputed_gradients_are_handed_out_once():
    hidden, weight, bias, targets = inputs(8, torch.float32)
    (found,) = Cut(4, precomputed=True).run(hidden, weight, bias, targets, 1.0, [torch.ones(8)])
    found.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match=r"^the gradients of this forward were handed out already"):
        found.sum().backward()


@pytest.mark.parametrize("cut", ALL_KINDS)
def test_a_frozen_hidden_state_gets_no_gradient_and_costs_no_product(cut):
    hidden, weight, bias, targets = inputs(40, torch.float32)
    frozen, factors = hidden.detach(), [torch.linspace(-1, 2, 40)]
    with FlopCounterMode(display=False) as counter:
        found = backward(cut.run(frozen, weight, bias, targets, 1.0, factors), factors, [weight, bias])
    whole_rows_once = cut.precomputed and not cut.tile
    assert counter.get_total_flops() == (2 if whole_rows_once else 3) * 2 * 40 * VOCAB * WIDTH
    for one, other in zip(found, backward(naive(frozen, weight, bias, targets, 1.0)[:1], factors, [weight, bias]), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)
    assert frozen.grad is None


def test_left_alone_all_logits_are_one_buffer_and_gradients_are_handed_to_autograd():
    weight, hidden = torch.randn(LARGE, NARROW).requires_grad_(), torch.randn(CHUNK, NARROW).requires_grad_()
    targets = torch.zeros(CHUNK, dtype=torch.int64)
    with ByteTracker() as tracker:
        tracker.mark("params", [weight, hidden, targets])
        found, entropy = head_log_probs(Head(weight, None, 1.0, 0, 0), hidden, targets)
        assert CHUNK * LARGE * 4 <= tracker.peaks["device"].kinds["logits"] <= CHUNK * LARGE * 4 * 1.01
    assert entropy is None
    gradient = torch.autograd.grad(found.sum(), weight)[0]
    assert gradient.shape == weight.shape
    assert weight.grad is None


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_bias_is_added_to_in_place_too(precomputed):
    hidden, weight, bias, targets = inputs(8, torch.float32)
    handed = []
    for in_place in (False, True):
        bias.grad, weight.grad = torch.zeros_like(bias), torch.zeros_like(weight)
        found = Cut(4, 0, precomputed, in_place).run(hidden, weight, bias, targets, 1.0, [torch.ones(8)])
        found[0].grad_fn.register_hook(lambda given, _: handed.append([gradient is not None for gradient in given[1:3]]))
        found[0].sum().backward()
    assert handed == [[True, True], [False, False]]


SQUARES = {"squares": SUM_PI_SQUARED}


@pytest.mark.parametrize("cut", [Cut(3), Cut(0, 7), Cut(4, 5)])
def test_a_statistic_of_whole_rows_sees_the_whole_vocabulary_however_it_is_cut(cut):
    hidden, weight, bias, targets = inputs(9)
    largest = TokenStatistics({"largest": Statistic(lambda log_p, scratch: log_p.exp().amax(-1)), **SQUARES})
    with torch.no_grad():
        head_log_probs(Head(weight, bias, 0.7, cut.chunk, cut.tile), hidden, targets, statistics=largest)
        probs = torch.nn.functional.linear(hidden, weight, bias).div(0.7).softmax(-1)
    torch.testing.assert_close(largest.values["largest"], probs.amax(-1).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(largest.values["squares"], probs.square().sum(-1).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cut", [Cut(), Cut(3), Cut(0, 7), Cut(4, 5), Cut(1, 1)])
@pytest.mark.parametrize("entropy", [False, True])
def test_sums_of_squared_probabilities_equal_those_of_whole_logits(cut, entropy):
    hidden, weight, bias, targets = inputs(9)
    sums = TokenStatistics(SQUARES)
    with torch.no_grad():
        head = Head(weight, bias, 0.7, cut.chunk, cut.tile, entropy)
        found = head_log_probs(head, hidden, targets, statistics=sums)
        probs = torch.nn.functional.linear(hidden, weight, bias).div(0.7).softmax(-1)
        plain = head_log_probs(head, hidden, targets)
    torch.testing.assert_close(sums.values["squares"], probs.square().sum(-1).float(), rtol=1e-6, atol=0)
    for one, other in zip(found, plain, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_sums_of_squared_probabilities_take_the_bytes_of_an_entropy_and_no_logits():
    weight, hidden, targets = (
        torch.randn(LARGE, NARROW),
        torch.randn(4 * CHUNK, NARROW),
        torch.zeros(4 * CHUNK, dtype=torch.int64),
    )
    with ByteTracker() as tracker, torch.no_grad():
        tracker.mark("params", [weight, hidden, targets])
        head_log_probs(Head(weight, None, 1.0, CHUNK, 0), hidden, targets, statistics=TokenStatistics(SQUARES))
        found = tracker.peaks["device"].kinds["logits"]
    expected = CHUNK * (FREE_TILE + 4096) * 4
    assert expected <= found <= expected * 1.01


def test_sums_of_squared_probabilities_are_refused_where_there_are_gradients():
    hidden, weight, bias, targets = inputs(2)
    with pytest.raises(AssertionError) as error:
        head_log_probs(Head(weight, bias, 1.0, 0, 0), hidden, targets, statistics=TokenStatistics(SQUARES))
    assert str(error.value).splitlines()[0] == "squares: statistics have no gradient"
