import pytest
import torch
from torch import nn

from verl_memopt.memory.embedding_gradient import TokenEmbedding, add_rows, embedding_in_place
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

IDS = torch.tensor([[3, 0, 3, 7, 3, 1]])


def pair(padding=None, dtype=torch.float32):
    torch.manual_seed(0)
    plain = nn.Embedding(50, 8, padding_idx=padding, dtype=dtype)
    twin = nn.Embedding(50, 8, padding_idx=padding, dtype=dtype)
    twin.weight.data.copy_(plain.weight.data)
    return plain, embedding_in_place(twin)


def backward(module, seed=1):
    out = module(IDS)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
    return out


@pytest.mark.parametrize("padding", [None, 3, 7])
def test_rows_and_gradients_are_those_of_torch(padding):
    plain, ours = pair(padding)
    for seed in (1, 2):
        assert torch.equal(backward(plain, seed), backward(ours, seed))
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-7)


def test_a_watched_weight_gets_its_gradient_through_autograd():
    plain, ours = pair()
    seen = []
    ours.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    for module in (plain, ours):
        backward(module)
    torch.testing.assert_close(seen[0], plain.weight.grad)


def test_a_second_gradient_takes_no_second_matrix():
    ours = embedding_in_place(nn.Embedding(10_000, 8))
    backward(ours)
    with ByteTracker() as tracker:
        tracker.mark("params", [ours.weight])
        tracker.mark("grads", [ours.weight.grad])
        start = tracker.total()
        backward(ours)
        assert tracker.peaks[DEVICE].bytes - start < 10_000


def test_a_token_that_occurs_often_is_summed_in_fp32():
    rows, values = torch.zeros(4096, dtype=torch.int64), torch.ones(4096, 2, dtype=torch.bfloat16)
    into = torch.zeros(3, 2, dtype=torch.bfloat16)
    add_rows(into, rows, values)
    assert into.tolist() == [[4096.0, 4096.0], [0.0, 0.0], [0.0, 0.0]]
    assert float(torch.zeros(1, dtype=torch.bfloat16).index_add_(0, rows, values[:, 0])) < 4096


def test_half_precision_sums_each_distinct_row():
    into, expected = torch.zeros(9, 4, dtype=torch.bfloat16), torch.zeros(9, 4)
    rows, values = torch.tensor([8, 2, 8, 0, 5, 2]), torch.arange(24.0).reshape(6, 4)
    add_rows(into, rows, values.to(torch.bfloat16))
    assert torch.equal(into.float(), expected.index_add_(0, rows, values))


def test_an_embedding_that_does_more_than_look_up_is_left_alone():
    normed = nn.Embedding(5, 2, max_norm=1.0)
    assert embedding_in_place(normed) is normed
    assert isinstance(embedding_in_place(nn.Embedding(5, 2)), TokenEmbedding)
