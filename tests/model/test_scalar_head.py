import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_memopt.model import value_model as room
from verl_memopt.model.value_model import scalar_head
from verl_memopt.observe.byte_tracker import ByteTracker

HIDDEN = 24


def inputs(tokens, dtype=torch.float32, weight_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(1, HIDDEN, generator=generator).to(weight_dtype).requires_grad_()
    return states, weight, torch.tensor([0.5], dtype=weight_dtype, requires_grad=True)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32",) * 2, ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_values_and_gradients_are_those_of_an_fp32_product(monkeypatch, tokens, dtype, weight_dtype):
    monkeypatch.setattr(room, "TILE_TOKENS", 4)
    tensors = inputs(tokens, getattr(torch, dtype), getattr(torch, weight_dtype))
    above = torch.linspace(-1, 1, tokens)
    states, weight, bias = (tensor.detach().float().requires_grad_() for tensor in tensors)
    expected = states @ weight[0] + bias
    wanted = torch.autograd.grad(expected, (states, weight, bias), above)
    found = scalar_head(*tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for tensor, gradient, like in zip(torch.autograd.grad(found, tensors, above), wanted, tensors, strict=True):
        assert tensor.dtype == like.dtype
        # A gradient is rounded once, to its own dtype.
        rtol = 1e-6 if like.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(tensor.float(), gradient, rtol=rtol, atol=1e-6)


def test_what_needs_no_gradient_gets_none():
    states, weight, bias = inputs(3)
    scalar_head(states.detach(), weight, bias.detach()).sum().backward()
    assert weight.grad is not None
    assert states.grad is bias.grad is None
    with torch.no_grad():
        assert not scalar_head(states, weight, bias).requires_grad


def test_narrow_states_are_never_copied_whole_to_fp32():
    tokens = 8 * room.TILE_TOKENS
    with FakeTensorMode(), ByteTracker() as tracker:
        states, weight, bias = inputs(tokens, torch.bfloat16)
        before = tracker.total("device")
        tracker.enter("here")
        scalar_head(states, weight, bias).sum().backward()
        grown = tracker.peaks["device"].bytes - before
    # The gradient of the states, one tile of them in fp32 and its product, and a few numbers per token.
    assert grown <= states.nbytes + 2 * room.TILE_TOKENS * HIDDEN * 4 + 5 * tokens * 4
