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


def test_causal_attention_counts_the_pairs_that_are_seen():
    assert attended(3, 3, causal=True) == 1 + 2 + 3
    assert attended(5, 3, causal=True) == 1 + 2 + 3 + 3 + 3
    assert attended(2, 4, causal=True) == 1 + 2
    assert attended(2, 4, causal=False) == 8


@pytest.mark.parametrize(("causal", "pairs"), [(True, 6 * 7 // 2), (False, 36)])
def test_fused_attention_is_counted_forward_and_backward(causal, pairs):
    query, key, value = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))

    def attend():
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    per_product = 2 * 2 * 4 * 8 * pairs
    assert count(attend) == 2 * per_product
    assert count(lambda: attend().sum().backward()) == (2 + 5) * per_product


BATCH, HEADS, SIZE = 2, 4, 8
CAUSAL, SQUARE = 6 * 7 // 2, 6 * 6
"""Pairs of six queries and six keys."""


@pytest.fixture
def no_values():
    """Tensors have shapes alone, so that a GPU's ops can be called where there is none; real lengths of segments stay real."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def dense(tokens=6, keys=None):
    """Gives query, key and value [batch, heads, tokens, D]."""
    lengths = (tokens, keys or tokens, keys or tokens)
    return [torch.empty(BATCH, HEADS, length, SIZE, requires_grad=True) for length in lengths]


def flash(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]


def efficient(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)[0]


def cudnn(query, key, value, causal):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)[0]


@pytest.mark.parametrize("kernel", [flash, efficient, cudnn])
@pytest.mark.parametrize(("causal", "pairs"), [(True, CAUSAL), (False, SQUARE)])
def test_the_fused_kernels_of_a_gpu_count_as_those_of_a_cpu(no_values, kernel, causal, pairs):
    tensors, per_product = dense(), 2 * BATCH * HEADS * SIZE * pairs
    assert count(lambda: kernel(*tensors, causal)) == 2 * per_product
    assert count(lambda: kernel(*tensors, causal).sum().backward()) == (2 + 5) * per_product


def test_a_mask_that_is_a_tensor_skips_nothing(no_values):
    mask, tensors = torch.empty(BATCH, HEADS, 6, 6), dense()
    counted = count(lambda: torch.ops.aten._scaled_dot_product_efficient_attention(*tensors, mask, True))
    assert counted == 2 * 2 * BATCH * HEADS * SIZE * SQUARE


def test_heads_that_share_a_key_count_as_heads(no_values):
    query, (_, key, value) = torch.empty(BATCH, 3 * HEADS, 6, SIZE), dense()
    assert count(lambda: flash(query, key, value, True)) == 2 * 2 * BATCH * 3 * HEADS * SIZE * CAUSAL


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


def test_torchs_attention_over_segments_counts_forward_and_backward(no_values):
    real = with_values(STARTS)
    query, key, value = (torch.empty(6, HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    per_product = 2 * HEADS * SIZE * SEGMENTS

    def attend():
        return varlen_attn(query, key, value, real, real, 3, 3, window_size=(-1, 0))

    assert count(attend) == 2 * per_product
    assert count(lambda: attend().sum().backward()) == (2 + 5) * per_product


def test_segments_without_values_are_an_error_and_no_guess(no_values):
    tensors, starts = [torch.empty(6, HEADS, SIZE)] * 3, torch.tensor(STARTS, dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot be counted on tensors without values"):
        count(lambda: torch.ops.aten._flash_attention_forward(*tensors, starts, starts, 3, 3, 0.0, True, False))


def test_a_window_counts_what_is_in_it():
    # Causal over five tokens, two back: 1 + 2 + 3 + 3 + 3.
    assert attended_in_window(5, 5, left=2, right=0, offset=0) == 12
    # Two queries at the end of five keys, all before them seen: 4 + 5.
    assert attended_in_window(2, 5, left=-1, right=0, offset=3) == 9
    assert attended_in_window(2, 5, left=-1, right=-1, offset=0) == 10


def test_the_package_flash_attn_counts_by_its_own_names(no_values):
    # The package needs a GPU to be installed; its ops stand here with their real signatures.
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False) -> Tensor"
    )
    library.impl("_flash_attn_varlen_forward", lambda q, *_: torch.empty_like(q), "Meta")
    try:
        real = with_values(STARTS)
        tensors = [torch.empty(6, HEADS, SIZE)] * 3
        attend = torch.ops.flash_attn._flash_attn_varlen_forward
        whole, near = (count(lambda left=left: attend(*tensors, real, real, 3, 3, 0.0, 1.0, True, left)) for left in (-1, 1))
    finally:
        library._destroy()
    assert whole == 2 * 2 * HEADS * SIZE * SEGMENTS
    assert near == 2 * 2 * HEADS * SIZE * (3 + 5 + 1)


def test_attention_that_is_written_out_counts_the_square():
    query, key, value = (torch.randn(BATCH, HEADS, 6, SIZE) for _ in range(3))
    square = 2 * 2 * BATCH * HEADS * SIZE * SQUARE

    def eager():
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return (query @ key.transpose(2, 3)).masked_fill(hidden, float("-inf")).softmax(-1) @ value

    assert count(eager) == square


def test_products_that_name_the_dtype_of_their_output_count(no_values):
    total, left, right = torch.empty(3, 5), *(torch.empty(size, dtype=torch.bfloat16) for size in ((3, 4), (4, 5)))
    assert count(lambda: torch.addmm(total, left, right, out_dtype=torch.float32, out=total)) == 2 * 3 * 4 * 5
    assert count(lambda: torch.mm(left, right, out_dtype=torch.float32)) == 2 * 3 * 4 * 5
    batched = left.expand(2, 3, 4), right.expand(2, 4, 5)
    assert count(lambda: torch.bmm(*batched, out_dtype=torch.float32)) == 2 * 2 * 3 * 4 * 5


def test_products_added_in_place_count_as_products():
    target, left, right = torch.zeros(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    assert count(lambda: target.addmm_(left, right)) == 2 * 3 * 4 * 5
    assert count(lambda: torch.mm(left, right, out=target)) == 2 * 3 * 4 * 5
    batched = torch.zeros(2, 3, 5)
    assert count(lambda: batched.baddbmm_(left.expand(2, 3, 4), right.expand(2, 4, 5))) == 2 * 2 * 3 * 4 * 5


def test_products_inside_an_autograd_function_count():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, left, right):
            ctx.save_for_backward(left, right)
            return left @ right

        @staticmethod
        def backward(ctx, grad):
            left, right = ctx.saved_tensors
            return grad @ right.t(), left.t() @ grad

    left, right = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    assert count(lambda: Twice.apply(left, right).sum().backward()) == 3 * (2 * 3 * 4 * 5)


def test_the_forward_of_one_row_is_what_the_model_is_counted_to_do(model):
    prompt, answer = [5] * 11, [7] * 4
    # The last token of the answer predicts nothing; the head works where an answer's token is predicted.
    counted = count(lambda: forward(model, prompt + answer[:-1], len(answer)))
    assert forward_flops(SHAPE, len(prompt), [len(answer)]) == counted


def test_sharing_computes_the_prompt_once():
    prompt, answers = 11, [4, 6, 1]
    apart = sum(forward_flops(SHAPE, prompt, [length]) for length in answers)
    # What a prompt costs alone: a row whose answer is one token, less that token's logits.
    alone = forward_flops(SHAPE, prompt, [1]) - 2 * 16 * 320
    assert forward_flops(SHAPE, prompt, answers) == apart - 2 * alone


def test_the_floor_is_three_forwards_and_with_checkpointing_one_more_of_the_blocks():
    batch = Batch(prompts=[[5] * 11, [6] * 3], answers=[[7] * 4, [8] * 2, [9], [7] * 5], advantages=[0.0] * 4)
    forwards = forward_flops(SHAPE, 11, [4, 2]) + forward_flops(SHAPE, 3, [1, 5])
    assert floor(SHAPE, batch, checkpointing=False) == 3 * forwards
    head, last = 2 * 16 * 320 * (4 + 2 + 1 + 5), 3 * 2 * 16 * 24 * (11 + 3 + 1 + 3 + 4)
    assert floor(SHAPE, batch, checkpointing=True) == 4 * forwards - head - last


def test_a_module_that_names_rays_types_can_be_imported_without_ray(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with ray_or_stand_in(installed=False):
        import ray

        assert list[ray.ObjectRef] == list[object]
        with pytest.raises(ModuleNotFoundError, match=r"ray\.get: Ray is not installed"):
            ray.get(None)
    assert "ray" not in sys.modules


def test_ray_itself_is_used_where_it_is_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with ray_or_stand_in(installed=True):
        assert "ray" not in sys.modules
