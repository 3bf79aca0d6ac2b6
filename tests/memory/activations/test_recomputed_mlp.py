import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

from tests.memory.recomputed import DOUBLE, EPS, ROUNDING, drawn, gradients, plain_norm, relative, saved_by
from verl_memopt.memory.activation_checkpointing_torch import checkpoint_blocks
from verl_memopt.memory.formulas import PRODUCT_ROWS
from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.quantized_frozen_torch import quantize_blocks
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm
from verl_memopt.memory.tiled_mlp_torch import recomputed_mlp
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

WIDTH, WIDE = 6, 10
ROWS = PRODUCT_ROWS["cpu"]


class Block(nn.Module):
    """A norm's weight and three layers: with ``lora`` over adapters that learn, with ``bias`` over biases."""

    def __init__(self, width=WIDTH, wide=WIDE, bias=False, lora=False, dtype=DOUBLE):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        layers = [nn.Linear(*sizes, bias=bias, dtype=dtype) for sizes in ((width, wide), (width, wide), (wide, width))]
        self.layers = nn.ModuleList(LoraLinear(layer, 2, 0.5) if lora else layer for layer in layers)
        for layer in self.layers if lora else ():
            for parameter in (layer.lora_A, layer.lora_B):
                nn.init.normal_(parameter)
                parameter.requires_grad_()
            layer.weight.requires_grad_(False)

    def forward(self, x, tiles=1):
        return recomputed_mlp(x, RMSNorm(EPS), self.weight, list(self.layers), tiles)

    def plain(self, x):
        gate, up, down = self.layers
        normal = plain_norm(x, self.weight)
        return down(silu(gate(normal)) * up(normal))

    def learning(self):
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class Plain(Block):
    """The same in plain autograd."""

    def forward(self, x):
        return self.plain(x)


# Numbers.


@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"lora": True}, {"bias": True, "lora": True}], ids=str)
@settings(deadline=None, max_examples=15)
@given(rows=st.one_of(st.integers(1, 40), st.integers(ROWS - 2, 2 * ROWS + 2)), tiles=st.integers(1, 5))
def test_the_output_and_all_gradients_are_those_of_autograd(kind, rows, tiles):
    block, x = Block(**kind), drawn(rows, WIDTH)
    tensors = [x, *block.learning()]
    expected = block.plain(x)
    found = block(x, tiles)
    assert relative(found, expected) <= ROUNDING
    for one, other in zip(gradients([found], tensors), gradients([expected], tensors), strict=True):
        assert relative(one, other) <= ROUNDING


def test_a_pack_without_tokens_has_gradients_of_zero():
    block, x = Block(bias=True), drawn(0, WIDTH)
    tensors = [x, *block.learning()]
    found = gradients([block(x, 3)], tensors)
    assert [one.shape for one in found] == [one.shape for one in tensors]
    assert not any(one.any() for one in found)


@pytest.mark.parametrize("frozen", ["x", "norm", "x and norm", "gate", "all but x"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    block, x = Block(), drawn(30, WIDTH)
    everything = [x, *block.parameters()]
    expected = gradients([block.plain(x)], everything)
    chosen = {"x": [0], "norm": [1], "x and norm": [0, 1], "gate": [2], "all but x": [1, 2, 3, 4]}[frozen]
    for place in chosen:
        everything[place].requires_grad_(False)
    asked = [place for place in range(5) if place not in chosen]
    found = gradients([block(x, 2)], [everything[place] for place in asked])
    for one, place in zip(found, asked, strict=True):
        assert relative(one, expected[place]) <= ROUNDING


def test_adapters_that_are_off_are_left_out():
    block, x = Block(lora=True), drawn(7, WIDTH)
    with_adapters = block(x)
    for layer in block.layers:
        layer.active = False
    assert relative(block(x), block.plain(x)) <= ROUNDING
    assert relative(block(x), with_adapters) > 0.1


def test_bfloat16_is_as_near_to_the_truth_as_autograd_but_for_one_rounding():
    x, above = drawn(3 * ROWS, 64, dtype=torch.bfloat16), None
    found = {}
    for name, dtype in (("truth", DOUBLE), ("plain", torch.bfloat16), ("ours", torch.bfloat16)):
        block = Block(64, 96, dtype=torch.bfloat16).to(dtype)
        leaf = x.detach().to(dtype).requires_grad_()
        out = block(leaf) if name == "ours" else block.plain(leaf)
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16() if above is None else above
        found[name] = torch.autograd.grad(out, [leaf, *block.parameters()], above.to(dtype))
    for one, other, true in zip(found["ours"], found["plain"], found["truth"], strict=True):
        # A weight's gradient is rounded to 8 bits for each tile, and once more when they are summed.
        assert relative(one.double(), true) <= relative(other.double(), true) + 2**-9


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_layers_of_any_kind_are_computed_without_a_graph(kind):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block(64, 128, dtype=torch.float32)

    block, x = Whole(), drawn(50, 64, dtype=torch.float32).detach()
    weights = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    quantize_blocks([block], kind)
    for place, layer in enumerate(block.inner.layers):
        layer.qweight.copy_(layer.quantize(weights[f"inner.layers.{place}.weight"]))
    with torch.no_grad():
        assert relative(block.inner(x, 3), block.inner.plain(x)) <= 1e-6  # fp32


# Cost.


def test_inside_a_checkpointed_block_it_costs_no_more_than_one_that_keeps_everything():
    counted = {}
    for name in ("plain", "checkpointed", "ours"):
        block = Block(bias=False) if name == "ours" else Plain(bias=False)
        if name != "plain":
            checkpoint_blocks([block])
        with FlopCounterMode(display=False) as counter:
            block(drawn(32, WIDTH)).sum().backward()
        counted[name] = counter.get_total_flops() / (2 * 32 * WIDTH * WIDE * 3)
    # In forwards of an MLP: one and two for backward; again two of its three products.
    assert counted == pytest.approx({"plain": 3, "checkpointed": 4 - 1 / 3, "ours": 4 - 1 / 3})


# Bytes.


def test_its_input_and_its_parameters_are_all_it_keeps():
    block, x = Block(bias=True, lora=True), drawn(20, WIDTH)
    found, _ = saved_by(lambda: block(x))
    assert {one.data_ptr() for one in found} == {one.data_ptr() for one in (x, *block.parameters())}


@pytest.mark.parametrize("tiles", [1, 4, 12])
def test_wide_tensors_exist_for_one_tile_at_a_time(tiles):
    rows, width, wide = 3 * ROWS, 8, 96
    block, x = Block(width, wide, dtype=torch.float32), drawn(rows, width, dtype=torch.float32)
    with ByteTracker() as tracker:
        tracker.mark("params", [*block.parameters(), x])
        tracker.enter("forward")
        before = tracker.total()
        out = block(x, tiles)
        forward = tracker.peaks[DEVICE].bytes - before
        tracker.enter("backward")
        before = tracker.total()
        out.sum().backward()
        backward = tracker.peaks[DEVICE].bytes - before
    tile = rows // max(tiles, 3)
    slack = 4 * 2**16 * 4 + 8 * width * wide * 4 + 3 * rows * width * 4  # elementwise tiles; weights; what is of x's size
    assert 2 * tile * wide * 4 <= forward <= 2 * tile * wide * 4 + slack
    assert 3 * tile * wide * 4 <= backward <= 3 * tile * wide * 4 + slack


def test_a_second_backward_is_an_error():
    out = Block()(drawn(5, WIDTH)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="runs backward once"):
        out.backward()
