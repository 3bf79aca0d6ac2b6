import pytest
import torch

from tests.memory import activation_cases as act
from tests.memory.activation_cases import FP32, KV, LAYERS, MLP, RESPONSES, TOKENS, WIDTH, close
from tests.memory.activation_cases import D as HEAD_SIZE
from tests.memory.activation_cases import H as HEADS
from tests.memory.sharded import assert_equal_runs, three_steps
from verl_memopt.memory.activation_checkpointing_torch import KEPT_BY_SELECTIVE, Checkpointed, checkpoint_blocks, chosen_blocks
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.observe.byte_tracker import ByteTracker

EVERY_2 = {"gradient_checkpointing_mode": "every_n", "gradient_checkpointing_every": 2}
SELECTIVE = {"gradient_checkpointing_mode": "selective"}
MODES = {"full": {}, "every_n": EVERY_2, "selective": SELECTIVE}

INPUT = TOKENS * WIDTH * FP32
QUERIES, KEYS = HEADS * HEAD_SIZE, KV * HEAD_SIZE


def block_bytes(compute):
    """Gives what one Qwen3 block keeps, from its code: each norm an fp32 input (that of the first is the block's own in fp32),
    its normed value and its output; the value; attention's output; gate, activation, up and their product; and the norms' and
    the attention's scalars."""
    norms = (4 + 2 * compute) * (2 * WIDTH + QUERIES + KEYS)
    rest = compute * (KEYS + QUERIES + 4 * MLP)
    return TOKENS * (norms + rest + 4 * (2 + 2 * HEADS + KV))


def selective_bytes(compute):
    """Gives what stays beside the input: the outputs of seven products and of attention, whose normalizer is fp32."""
    return TOKENS * ((2 * QUERIES + 2 * KEYS + 2 * WIDTH + 2 * MLP) * compute + 4 * HEADS)


def test_no_mode_changes_a_bit_of_three_steps(untied_folder, one_rank):
    mini = act.mini_batch(response=12)
    expected = three_steps(act.build(untied_folder, one_rank), mini)
    for mode in MODES.values():
        assert_equal_runs(three_steps(act.build(untied_folder, one_rank, recompute=True, **mode), mini), expected)


def test_one_block_in_n_is_computed_again_and_never_the_last():
    def recomputed(num_blocks, every):
        blocks = [torch.nn.Identity() for _ in range(num_blocks)]
        checkpoint_blocks(blocks, "every_n", every)
        found = [number for number, block in enumerate(blocks) if isinstance(block, Checkpointed)]
        assert found == sorted(chosen_blocks(num_blocks, "every_n", every))
        return found

    assert recomputed(6, 1) == [0, 1, 2, 3, 4]
    assert recomputed(6, 2) == [0, 2, 4]
    assert recomputed(6, 4) == [0, 4]
    assert recomputed(6, 9) == [4]
    assert recomputed(1, 1) == []


@pytest.mark.parametrize(("dtype", "compute"), [("fp32", 4), ("bfloat16", 2)])
def test_a_block_keeps_what_its_mode_says(deep_folder, dtype, compute):
    whole, own = block_bytes(compute), INPUT * compute // FP32
    expected = {
        "full": LAYERS * own,
        "every_n": LAYERS // 2 * (own + whole),
        "selective": LAYERS * (own + selective_bytes(compute)),
    }
    # The final norm keeps an fp32 input and its normed value, the head its hidden states; rotary tables are of two halves.
    beside = TOKENS * (WIDTH * (4 + compute) + 2 * HEAD_SIZE * compute) + RESPONSES * WIDTH * compute
    with act.fake_ranks(2) as mesh:
        assert close(act.kept(act.build(deep_folder, mesh, dtype=dtype))[0], LAYERS * whole + beside)
        for mode, bytes_kept in expected.items():
            found, _ = act.kept(act.build(deep_folder, mesh, recompute=True, dtype=dtype, **MODES[mode]))
            assert close(found, bytes_kept + beside), mode


def kept_by_decoder(policy, sizes):
    """Gives the bytes that the decoder keeps of layout of these sizes between forward and backward."""
    layout, decoder = PrefixLayout.of(sizes), policy.model.decoder
    ids = torch.zeros(1, sum(layout.segments), dtype=torch.int64)
    with ByteTracker() as tracker:
        tracker.mark("params", [*policy.model.parameters(), *policy.model.buffers(), ids])
        before = tracker.total()
        hidden = decoder.norm(decoder(ids, ids, layout))
        found = tracker.total() - before
        del hidden
    return found


def test_selective_keeps_of_a_shared_prompt_what_attention_over_it_gives_each_suffix(deep_folder, one_rank):
    policy = act.build(deep_folder, one_rank, recompute=True, **SELECTIVE)
    alone, shared = (kept_by_decoder(policy, sizes) for sizes in (((90, ()),), ((30, (20, 20, 20)),)))
    assert shared - alone == LAYERS * 60 * (QUERIES + HEADS) * FP32


def test_every_operator_that_torch_has_is_spelled_as_torch_does():
    for name in KEPT_BY_SELECTIVE - {"flash_attn::_flash_attn_varlen_forward"}:
        namespace, operator = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), operator), name
