import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory.sharded import device_peak, wide_model
from tests.tensors import Operations
from verl_memopt.memory.embedding_gradient import TrainedEmbedding, add_rows_, adds_in_place, is_plain, room_for
from verl_memopt.observe.byte_tracker import ByteTracker

VOCAB, WIDTH = 11, 3


def plain(padding_idx=None, dtype=torch.float32, vocab=VOCAB, width=WIDTH):
    torch.manual_seed(0)
    return nn.Embedding(vocab, width, padding_idx=padding_idx).to(dtype)


def gradient(embedding, ids, factors):
    (embedding(ids) * factors).sum().backward()
    return embedding.weight.grad


@settings(deadline=None, max_examples=40)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=12), padding_idx=st.sampled_from([None, 0, 4]), there=st.booleans())
def test_values_and_gradients_are_those_of_a_plain_embedding(ids, padding_idx, there):
    ids = torch.tensor(ids, dtype=torch.int64)[None]
    factors = torch.randn(*ids.shape, WIDTH)
    base, ours = plain(padding_idx), TrainedEmbedding(plain(padding_idx))
    if there:
        base.weight.grad, ours.weight.grad = torch.ones(VOCAB, WIDTH), torch.ones(VOCAB, WIDTH)
    assert torch.equal(base(ids), ours(ids))
    assert ours.padding_idx == padding_idx
    torch.testing.assert_close(gradient(ours, ids, factors), gradient(base, ids, factors), rtol=1e-6, atol=1e-6)


def test_repeated_tokens_are_summed_in_fp32_where_gradients_are_kept_in_less():
    """513 is 512 in bfloat16; ones added one by one would stop at 256."""
    ids = torch.tensor([5] * 513 + [2] * 3)
    into = torch.zeros(VOCAB, 300, dtype=torch.bfloat16)
    add_rows_(into, ids, torch.ones(len(ids), 300, dtype=torch.bfloat16))
    expected = torch.zeros(VOCAB, 300)
    expected[5], expected[2] = 512, 3
    assert torch.equal(into.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_gradient_is_made(dtype):
    embedding, ids = TrainedEmbedding(plain(dtype=dtype, vocab=4096, width=64)), torch.arange(7)
    embedding.weight.grad = torch.zeros_like(embedding.weight)
    with ByteTracker() as tracker:
        tracker.mark("params", [embedding.weight, embedding.weight.grad, ids])
        before = tracker.total()
        embedding(ids).sum().backward()
        assert tracker.peaks["device"].bytes - before <= 7 * 64 * 4 * 6


def test_a_fake_weight_is_counted_as_a_real_one():
    with FakeTensorMode():
        assert adds_in_place(TrainedEmbedding(nn.Embedding(VOCAB, WIDTH)).weight)


def test_a_hook_on_the_weight_sees_its_gradient():
    embedding, seen = TrainedEmbedding(plain()), []
    embedding.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum().item()))
    embedding(torch.tensor([1, 1])).sum().backward()
    assert seen == [2 * WIDTH]


def test_a_frozen_embedding_gets_no_gradient():
    embedding = TrainedEmbedding(plain().requires_grad_(False))
    assert not embedding(torch.tensor([1])).requires_grad


def test_only_a_plain_embedding_is_replaced():
    class Scaled(nn.Embedding):
        pass

    assert is_plain(plain())
    assert not is_plain(Scaled(2, 2))
    assert not is_plain(nn.Embedding(2, 2, max_norm=1.0))
    assert not is_plain(nn.Embedding(2, 2, scale_grad_by_freq=True))
    assert not is_plain(nn.Linear(2, 2))


@pytest.mark.parametrize("sync", ["every", "last"])
def test_a_tied_model_holds_one_gradient_of_the_shared_matrix(tmp_path, sync):
    vocabulary, hidden = 16_384, 64
    peak = device_peak(wide_model(tmp_path, vocab_size=vocabulary, tie_embeddings=True), {"gradient_sync": sync})
    held = peak.bytes - peak.kinds["params"] - peak.kinds["optimizer"]
    assert held < 1.5 * vocabulary * hidden * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_a_cpu_rows_without_a_token_are_not_copied(dtype):
    """The statements of a GPU, on a device without bytes. Its ``index_put_`` makes a contiguous copy, and copies that back."""

    def look(func, args, kwargs):
        assert func.overloadpacket is not torch.ops.aten.index_put_ or args[0].is_contiguous()

    into, ids = torch.empty(VOCAB, 600, dtype=dtype, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    with Operations(look):
        add_rows_(into, ids, torch.empty(5, 600, dtype=dtype, device="meta"))


def test_only_a_leaf_that_nothing_watches_is_added_to_in_place():
    leaf = torch.nn.Parameter(torch.zeros(2))
    assert adds_in_place(leaf)
    assert not adds_in_place(leaf * 1)
    assert not adds_in_place(leaf.detach())
    hook = leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert not adds_in_place(leaf)
    hook.remove()
    assert adds_in_place(leaf)
    leaf.register_hook(lambda grad: grad)
    assert not adds_in_place(leaf)


def test_the_gradient_that_is_there_is_the_room_and_otherwise_autograd_is_handed_a_tensor_of_its_own():
    leaf, other = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    with ByteTracker() as tracker:
        room, handed = room_for(leaf, True, True)
        assert tracker.kinds() == {"grads": 32}
    assert room is leaf.grad is room_for(leaf, True, True)[0]
    assert handed is None
    assert not room.any()
    room, handed = room_for(other, True, False)
    assert room is handed
    assert other.grad is None
    for needless in (room_for(other, False, True), room_for(None, True, True)):
        assert needless == (None, None)
