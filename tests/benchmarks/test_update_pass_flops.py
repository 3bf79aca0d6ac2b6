import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.update_pass.flops import attended, count, floor, forward_flops
from benchmarks.update_pass.work import Batch
from verl_memopt.models.tiny import TinyShape

SHAPE = TinyShape(hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=320)


def forward(model, ids, kept):
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    from verl_memopt.models.tiny import make_tiny_model

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
