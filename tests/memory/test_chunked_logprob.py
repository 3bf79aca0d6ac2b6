import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_memopt.memory.chunked_logprob import head_log_probs
from verl_memopt.observe.byte_tracker import ByteTracker

VOCAB, WIDTH = 37, 5


def inputs(tokens, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    return draw(tokens, WIDTH), draw(VOCAB, WIDTH), draw(VOCAB) if bias else None, targets


def naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, weights, tensors):
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, tensors)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([0, 1, 2, 4, 100]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    entropy=st.booleans(),
    bias=st.booleans(),
)
def test_values_and_gradients_equal_those_of_whole_logits(tokens, chunk, temperature, entropy, bias):
    hidden, weight, offset, targets = inputs(tokens, torch.float32, bias)
    expected = naive(hidden, weight, offset, targets, temperature)[: 1 + entropy]
    found = [value for value in head_log_probs(hidden, weight, offset, targets, temperature, chunk, entropy) if value is not None]
    factors = [torch.linspace(-1, 2, tokens), torch.linspace(0.5, -1, tokens)][: 1 + entropy]
    tensors = [hidden, weight] + ([offset] if bias else [])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    for one, other in zip(gradients(found, factors, tensors), gradients(expected, factors, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)


def test_half_precision_is_no_worse_than_whole_logits_in_half_precision():
    hidden, weight, _, targets = inputs(64, torch.float64, bias=False)
    exact = naive(hidden, weight, None, targets, 1.0)[0]
    half = [hidden.detach().bfloat16(), weight.detach().bfloat16()]
    ours = head_log_probs(*half, None, targets, 1.0, 16, False)[0]
    theirs = naive(*half, None, targets, 1.0)[0]
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max() * 1.001


def test_frozen_weights_get_no_gradient():
    hidden, weight, _, targets = inputs(4, torch.float32, bias=False)
    head_log_probs(hidden, weight.detach(), None, targets, 1.0, 2, False)[0].sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_does_not_grow_with_tokens_times_vocabulary(entropy):
    vocab, chunk, width = 4096, 8, 4
    weight = torch.randn(vocab, width, requires_grad=True)
    peaks = {}
    for tokens in (64, 512):
        hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.zeros(tokens, dtype=torch.int64)
        with ByteTracker() as tracker:
            tracker.mark("params", [weight, hidden, targets])
            log_probs, values = head_log_probs(hidden, weight, None, targets, 1.0, chunk, entropy)
            (log_probs.sum() if values is None else log_probs.sum() + values.sum()).backward()
            peaks[tokens] = tracker.peaks["device"].bytes
        weight.grad = None
    per_token = width * 4 * 2 + 8 + 4 * 8  # hidden and its gradient, target, a few fp32 scalars
    assert peaks[512] - peaks[64] <= (512 - 64) * per_token
    assert peaks[512] < 512 * vocab * 4  # less than the logits alone
