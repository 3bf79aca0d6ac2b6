import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.update_pass.flops import attended, attended_in_window, count, floor, forward_flops
from benchmarks.update_pass.ray_stand_in import ray_or_stand_in
from benchmarks.update_pass.work import Batch
from verl_memopt.model.tiny import TinyShape

SHAPE = TinyShape(hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=320)


def forward(model, ids, kept):
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    from verl_memopt.model.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("flops") / "model", SHAPE)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


BATCH, HEADS, SIZE = 2, 4, 8
CAUSAL, SQUARE = 6 * 7 // 2, 6 * 6
"""Pairs of six queries and six keys."""


def test_attention_counts_the_pairs_that_are_seen():
    assert attended(5, 3, causal=True) == 1 + 2 + 3 + 3 + 3
    assert attended(2, 4, causal=True) == 1 + 2
    assert attended(2, 4, causal=False) == 8
    # Causal over five tokens, two back: 1 + 2 + 3 + 3 + 3.
    assert attended_in_window(5, 5, left=2, right=0, offset=0) == 12
    # Two queries at the end of five keys, all before them seen: 4 + 5.
    assert attended_in_window(2, 5, left=-1, right=0, offset=3) == 9
    assert attended_in_window(2, 5, left=-1, right=-1, offset=0) == 10


@pytest.fixture
def no_values():
    """Tensors have shapes alone, so that a GPU's ops can be called where there is none; real lengths of segments stay real."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def dense():
    """Gives query, key and value [batch, heads, tokens, D]."""
    return [torch.empty(BATCH, HEADS, 6, SIZE, requires_grad=True) for _ in range(3)]


def of_cpu(query, key, value, causal):
    return scaled_dot_product_attention(query, key, value, is_causal=causal)


def flash(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]


def efficient(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)[0]


def cudnn(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)[0]


@pytest.mark.parametrize("kernel", [of_cpu, flash, efficient, cudnn])
@pytest.mark.parametrize(("causal", "pairs"), [(True, CAUSAL), (False, SQUARE)])
def test_fused_attention_is_counted_forward_and_backward(no_values, kernel, causal, pairs):
    tensors, per_product = dense(), 2 * BATCH * HEADS * SIZE * pairs
    assert count(lambda: kernel(*tensors, causal)) == 2 * per_product
    assert count(lambda: kernel(*tensors, causal).sum().backward()) == (2 + 5) * per_product


def with_values(numbers):
    with unset_fake_temporarily():
        return torch.tensor(numbers, dtype=torch.int32)


STARTS = [0, 2, 5, 6]
SEGMENTS = 3 + 6 + 1
"""Causal pairs of segments of two, three and one tokens."""


def test_attention_over_segments_counts_each_by_its_own_length(no_values):
    real = with_values(STARTS)
    query = torch.empty(6, 2 * HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.empty(6, HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    per_product = 2 * 2 * HEADS * SIZE * SEGMENTS

    def ours():
        return torch.ops.aten._flash_attention_forward(query, key, value, real, real, 3, 3, 0.0, True, False)

    def backward():
        out, lse, *_ = ours()
        state, unused = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
        torch.ops.aten._flash_attention_backward(out, query, key, value, out, lse, real, real, 3, 3, 0.0, True, state, unused)

    assert count(ours) == 2 * per_product
    assert count(backward) == (2 + 5) * per_product

    heads = [torch.empty(6, HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def attend():
        return varlen_attn(*heads, real, real, 3, 3, window_size=(-1, 0))

    assert count(attend) == per_product
    assert count(lambda: attend().sum().backward()) == (2 + 5) * per_product // 2


def test_products_count_with_another_dtype_of_their_output_and_in_place(no_values):
    left, right = (torch.empty(size, dtype=torch.bfloat16) for size in ((3, 4), (4, 5)))
    batched, product = (left.expand(2, 3, 4), right.expand(2, 4, 5)), 2 * 3 * 4 * 5
    assert count(lambda: torch.addmm(torch.empty(3, 5), left, right, out_dtype=torch.float32)) == product
    assert count(lambda: torch.mm(left, right, out_dtype=torch.float32)) == product
    assert count(lambda: torch.bmm(*batched, out_dtype=torch.float32)) == 2 * product
    left, right = left.float(), right.float()
    assert count(lambda: torch.zeros(3, 5).addmm_(left, right)) == product
    assert count(lambda: torch.mm(left, right, out=torch.zeros(3, 5))) == product
    assert count(lambda: torch.zeros(2, 3, 5).baddbmm_(left.expand(2, 3, 4), right.expand(2, 4, 5))) == 2 * product
    assert count(lambda: (left @ right).softmax(-1) @ torch.zeros(5, 2)) == product + 2 * 3 * 5 * 2  # as attention written out


def test_the_forward_of_one_row_is_what_the_model_is_counted_to_do(model):
    prompt, answer = [5] * 11, [7] * 4
    # The last token of the answer predicts nothing; the head works where an answer's token is predicted.
    counted = count(lambda: forward(model, prompt + answer[:-1], len(answer)))
    assert forward_flops(SHAPE, len(prompt), [len(answer)]) == counted


def test_the_floor_is_three_forwards_and_with_checkpointing_one_more_of_the_blocks():
    batch = Batch(prompts=[[5] * 11, [6] * 3], answers=[[7] * 4, [8] * 2, [9], [7] * 5], advantages=[0.0] * 4)
    forwards = forward_flops(SHAPE, 11, [4, 2]) + forward_flops(SHAPE, 3, [1, 5])
    assert floor(SHAPE, batch, checkpointing=False) == 3 * forwards
    head, last = 2 * 16 * 320 * (4 + 2 + 1 + 5), 3 * 2 * 16 * 24 * (11 + 3 + 1 + 3 + 4)
    assert floor(SHAPE, batch, checkpointing=True) == 4 * forwards - head - last


@pytest.mark.parametrize("installed", [True, False])
def test_a_module_that_names_rays_types_can_be_imported_without_ray_and_uses_it_where_it_is(monkeypatch, installed):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with ray_or_stand_in(installed):
        assert ("ray" in sys.modules) is not installed
        if not installed:
            import ray

            assert list[ray.ObjectRef] == list[object]
            with pytest.raises(ModuleNotFoundError, match=r"ray\.get: Ray is not installed"):
                ray.get(None)
    assert "ray" not in sys.modules
