"""Products over values that backward computes again, and a norm with its MLP: both against plain autograd."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import gelu, silu
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from tests.memory.recomputed import DOUBLE, EPS, ROUNDING, drawn, gradients, plain_norm, relative, saved_by
from tests.tensors import operations_named
from verl_memopt.memory.fused import JOINS
from verl_memopt.memory.lora_torch import LoraLinear
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS
from verl_memopt.memory.recompute_elementwise_torch import (
    RMSNorm,
    Rows,
    SwiGLU,
    keep,
    kept,
    norm_and_weight,
    recomputed_norm,
    recomputed_products,
)
from verl_memopt.memory.tiled_mlp_torch import recomputed_mlp
from verl_memopt.model.decoder import select_rows
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

TILE = PRODUCT_ROWS["cpu"]
SOME, ABOUT_TILES = st.integers(1, 40), st.integers(TILE - 2, 2 * TILE + 2)


class Products:
    """Two products over a norm or a gate of some rows."""

    def __init__(self, recomputable, rows, dtype=DOUBLE, width=6, outs=(5, 3)):
        self.recomputable, norm = recomputable, isinstance(recomputable, RMSNorm)
        self.sources = tuple(drawn(rows, width, seed=seed, dtype=dtype) for seed in range(recomputable.sources))
        self.parameters = (drawn(width, seed=7, dtype=dtype),) if norm else ()
        self.weights = [drawn(out, width, seed=20 + out, dtype=dtype) for out in outs]

    @property
    def tensors(self):
        return [*self.sources, *self.parameters, *self.weights]

    def plain(self):
        first, *others = self.sources
        if isinstance(self.recomputable, RMSNorm):
            value = plain_norm(first, *self.parameters)
        else:
            value = (gelu(first, approximate="tanh") if self.recomputable.gelu else silu(first)) * others[0]
        return [value @ weight.t() for weight in self.weights]

    def run(self, *rows):
        return list(recomputed_products(self.recomputable, self.sources, self.parameters, self.weights, *rows))

    def widened(self):
        """Gives the same in float64."""
        wide = Products(self.recomputable, 1)
        parts = [
            [one.detach().double().requires_grad_() for one in some] for some in (self.sources, self.parameters, self.weights)
        ]
        wide.sources, wide.parameters, wide.weights = parts
        return wide


class Mlp(nn.Module):
    """A norm's weight and three layers: with ``lora`` over adapters that learn, with ``bias`` over biases."""

    def __init__(self, width=6, wide=10, bias=False, lora=False, dtype=DOUBLE):
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
        # Backward writes the sum of both over x: here x itself.
        self.residual = torch.zeros_like(x)
        return recomputed_mlp(self.residual, x, RMSNorm(EPS), self.weight, list(self.layers), tiles)[0]

    def plain(self, x):
        gate, up, down = self.layers
        normal = plain_norm(x, self.weight)
        return x + down(silu(gate(normal)) * up(normal))


class MlpOfRows:
    """An MLP over some rows, with the interface of :class:`Products`."""

    def __init__(self, rows, dtype=DOUBLE, width=6, wide=10, tiles=2, **kind):
        self.mlp, self.x, self.tiles, self.sizes = (
            Mlp(width, wide, dtype=dtype, **kind),
            drawn(rows, width, dtype=dtype),
            tiles,
            (width, wide),
        )

    @property
    def tensors(self):
        return [self.x, *(parameter for parameter in self.mlp.parameters() if parameter.requires_grad)]

    def plain(self):
        return [self.mlp.plain(self.x)]

    def run(self):
        return [self.mlp(self.x, self.tiles)]

    def widened(self):
        wide = MlpOfRows(1, DOUBLE, *self.sizes)
        wide.mlp, wide.x = wide.mlp.bfloat16().double(), self.x.detach().double().requires_grad_()
        wide.mlp.load_state_dict({name: value.double() for name, value in self.mlp.state_dict().items()})
        return wide


CASES = {
    "norm": lambda rows, *args: Products(RMSNorm(EPS), rows, *args),
    "gate": lambda rows, *args: Products(SwiGLU(), rows, *args),
    "gelu gate": lambda rows, *args: Products(SwiGLU(gelu=True), rows, *args),
    "mlp": MlpOfRows,
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
RECOMPUTABLES = pytest.mark.parametrize(
    "recomputable", [RMSNorm(EPS), SwiGLU(), SwiGLU(gelu=True)], ids=["norm", "gate", "gelu gate"]
)


def assert_near(found, expected, bound=ROUNDING):
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) <= bound


# Numbers.


@RECOMPUTABLES
@settings(deadline=None, max_examples=20)
@given(rows=st.one_of(SOME, st.integers(TILE - 2, 3 * TILE + 2)))
def test_products_and_their_gradients_are_those_of_autograd(recomputable, rows):
    case = Products(recomputable, rows)
    expected, found = case.plain(), case.run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    expected = gradients(expected, case.tensors)  # first: a gate's gradients take the place of its sources
    assert_near(gradients(found, case.tensors), expected)


@RECOMPUTABLES
@settings(deadline=None, max_examples=20)
@given(data=st.data(), rows=st.one_of(SOME, ABOUT_TILES))
def test_products_of_some_rows_are_rows_of_the_products(recomputable, data, rows):
    case, first = Products(recomputable, rows), data.draw(st.integers(0, rows - 1))
    places = torch.tensor(sorted({first, *data.draw(st.lists(st.integers(0, rows - 1), max_size=60))}))
    whole, other = case.plain()
    expected, found = [whole[places], other], case.run(Rows(places, places.numpy()), (True, False))
    assert_near(found, expected)
    expected = gradients(expected, case.tensors)
    assert_near(gradients(found, case.tensors), expected)


@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"lora": True}, {"bias": True, "lora": True}], ids=str)
@settings(deadline=None, max_examples=15)
@given(rows=st.one_of(SOME, ABOUT_TILES), tiles=st.integers(1, 5))
def test_the_output_of_an_mlp_and_all_gradients_are_those_of_autograd(kind, rows, tiles):
    case = MlpOfRows(rows, tiles=tiles, **kind)
    expected, found = case.plain(), case.run()
    assert_near(found, expected)
    # The plain ones first, because the backward of ours overwrites x.
    expected = gradients(expected, case.tensors)
    assert_near(gradients(found, case.tensors), expected)


@pytest.mark.parametrize("case", [*CASES.values(), lambda rows: MlpOfRows(rows, tiles=3, bias=True)], ids=[*CASES, "bias"])
def test_a_pack_without_tokens_has_gradients_of_zero(case):
    case = case(0)
    found = gradients(case.run(), case.tensors)
    assert [one.shape for one in found] == [one.shape for one in case.tensors]
    assert not any(one.any() for one in found)


@pytest.mark.parametrize(
    ("case", "frozen"),
    # Of products: the source, the norm's weight, two weights. Of an MLP: the input, the norm's weight, gate, up and down.
    [
        *(("norm", places) for places in ((0,), (1,), (2, 3), (2,))),
        *(("mlp", places) for places in ((0,), (1,), (0, 1), (2,), (1, 2, 3, 4))),
    ],
)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(case, frozen):
    case = CASES[case](50)
    tensors = case.tensors
    expected = gradients(case.plain(), tensors)
    for place in frozen:
        tensors[place].requires_grad_(False)
    asked = [place for place in range(len(tensors)) if place not in frozen]
    assert_near(gradients(case.run(), [tensors[place] for place in asked]), [expected[place] for place in asked])


@EACH
def test_bfloat16_is_as_near_to_the_truth_as_autograd_but_for_one_rounding(case):
    case = case(3 * TILE, torch.bfloat16, 64)
    wide = case.widened()
    truth, plain, found = (
        gradients(outs, one.tensors) for outs, one in ((wide.plain(), wide), (case.plain(), case), (case.run(), case))
    )
    for one, other, true in zip(found, plain, truth, strict=True):
        # A weight's gradient is rounded to 8 bits for each tile, and once more when they are summed.
        assert relative(one.double(), true) <= relative(other.double(), true) + 2**-9


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm, Gemma4RMSNorm, Qwen3_5RMSNorm])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_a_norm_alone_is_that_of_transformers_to_the_bit(kind, dtype, bound):
    x, norm = drawn(300, 16, dtype=dtype), kind(16, EPS)
    norm.weight = nn.Parameter(drawn(16, seed=1, dtype=dtype).detach())
    recomputed, weight = norm_and_weight(norm)
    expected, out = norm(x), recomputed_norm(x, weight, recomputed.eps)
    assert torch.equal(out, expected)
    assert_near(gradients([out], [x, norm.weight]), gradients([expected], [x, norm.weight]), bound)


@pytest.mark.parametrize("kind", [Gemma3RMSNorm, Qwen3_5RMSNorm])
def test_a_norm_by_one_plus_its_weight_has_the_gradients_of_float64(kind):
    x, norm = drawn(30, 16), kind(16, EPS)
    norm.weight = nn.Parameter(drawn(16, seed=1).detach())
    expected = plain_norm(x, torch.ones(16, dtype=DOUBLE)) * (1 + norm.weight)
    expected_gradients = gradients([expected], [x, norm.weight])
    for compute in (
        lambda norm, weight: [recomputed_norm(x, weight, norm.eps)],
        lambda norm, weight: recomputed_products(norm, (x,), (weight,), [torch.eye(16, dtype=DOUBLE)]),
    ):
        outs = compute(*norm_and_weight(norm))
        assert relative(outs[0], expected) <= ROUNDING
        assert_near(gradients(outs, [x, norm.weight]), expected_gradients)


def test_adapters_that_are_off_are_left_out():
    mlp, x = Mlp(lora=True), drawn(7, 6)
    with_adapters = mlp(x)
    for layer in mlp.layers:
        layer.active = False
    assert relative(mlp(x), mlp.plain(x)) <= ROUNDING
    assert relative(mlp(x), with_adapters) > 0.1


# Weights that lie one behind another are one product.


def neighbours(tensors):
    """Gives the same values, one behind another in one storage, each with a gradient of its own."""
    whole = torch.cat([one.detach() for one in tensors])
    return [part.requires_grad_() for part in whole.split([len(one) for one in tensors])]


@pytest.mark.parametrize("rows", [30, 2 * TILE + 1])
def test_neighbours_are_one_product_with_the_numbers_of_several(rows, monkeypatch):
    monkeypatch.setitem(JOINS, "cpu", True)
    case = Products(RMSNorm(EPS), rows, width=6, outs=(5, 3, 2))
    biases = [drawn(out, seed=40 + out, dtype=DOUBLE) for out in (5, 3, 2)]
    found, launched = [], []
    for kind in (list, neighbours):
        weights, own = kind(case.weights), kind(biases)
        watch, products = operations_named(["mm", "addmm"])
        with FlopCounterMode(display=False) as counter, watch:
            outs = recomputed_products(case.recomputable, case.sources, case.parameters, weights, biases=own, passed=True)
            joint = torch.cat([*outs[:-1], outs[-1]], 1)
            # A gradient of the whole, as attention gives it: parts of one tensor.
            grads = torch.autograd.grad(joint.square().sum(), [*case.sources, *case.parameters, *weights, *own])
        found.append([*outs, *grads])
        launched.append((products.total(), counter.get_total_flops()))
    assert_near(*found)
    assert launched[0][1] == launched[1][1]
    # Forward one in place of three; backward one of the input and one of the weights, a tile.
    tiles = -(-rows // TILE)
    assert (launched[0][0], launched[1][0]) == (3 + 6 * tiles, 1 + 2 * tiles)


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_that_are_neighbours_are_one_product_with_the_numbers_of_two(bias, monkeypatch):
    monkeypatch.setitem(JOINS, "cpu", True)
    found, launched = [], []
    for apart in (True, False):
        mlp, x = Mlp(bias=bias), drawn(20, 6, dtype=DOUBLE)
        gate, up, _ = mlp.layers
        for name in () if apart else ("weight", "bias") if bias else ("weight",):
            for layer, value in zip((gate, up), neighbours([getattr(gate, name), getattr(up, name)]), strict=True):
                setattr(layer, name, nn.Parameter(value))
        watch, products = operations_named(["mm", "addmm"])
        with watch:
            out = mlp(x)
            grads = gradients([out], [x, *mlp.parameters()])
        found.append([out, *grads])
        launched.append(products.total())
    assert_near(*found)
    # Gate and up: forward and again in backward, of the input, of the weights.
    assert launched[0] - launched[1] == 4


# Bytes.


@pytest.mark.parametrize("case", [CASES["norm"], CASES["gate"], lambda rows: MlpOfRows(rows, bias=True, lora=True)])
def test_inputs_and_parameters_are_all_that_is_kept(case):
    case = case(30)
    found, _ = saved_by(case.run)
    given = [case.x, case.mlp.residual, *case.mlp.parameters()] if isinstance(case, MlpOfRows) else case.tensors
    assert {one.data_ptr() for one in found} == {one.data_ptr() for one in given}


def test_the_gradients_of_a_gate_take_the_place_of_what_it_was_made_of():
    rows, width = 4 * TILE, 64
    case = Products(SwiGLU(), rows, torch.float32, width, (8,))
    leaves = [source.detach().requires_grad_() for source in case.sources]
    with ByteTracker() as tracker:
        gate, up = (leaf * 1 for leaf in leaves)
        (out,) = recomputed_products(SwiGLU(), (gate, up), (), case.weights)
        above = torch.ones_like(out)
        before = tracker.total()
        tracker.enter("backward")
        del gate, up
        out.backward(above)
        found = tracker.peaks[DEVICE].bytes - before
    # One tile of the value beside gate and up, the weight's gradient and a few tiles of elementwise statements.
    tile = TILE * width * 4
    assert tile <= found <= 1.2 * tile + 3 * 2**17 * 4


@pytest.mark.parametrize("tiles", [1, 4, 12])
def test_wide_tensors_exist_for_one_tile_at_a_time(tiles):
    rows, width, wide = 3 * TILE, 8, 96
    mlp, x = Mlp(width, wide, dtype=torch.float32), drawn(rows, width, dtype=torch.float32)
    with ByteTracker() as tracker:
        tracker.mark("params", [*mlp.parameters(), x])
        tracker.enter("forward")
        before = tracker.total()
        out = mlp(x, tiles)
        forward = tracker.peaks[DEVICE].bytes - before
        tracker.enter("backward")
        before = tracker.total()
        out.sum().backward()
        backward = tracker.peaks[DEVICE].bytes - before
    tile = rows // max(tiles, 3)
    slack = 4 * 2**16 * 4 + 8 * width * wide * 4 + 4 * rows * width * 4  # elementwise tiles; weights; what is of x's size
    assert 2 * tile * wide * 4 <= forward <= 2 * tile * wide * 4 + slack
    assert 3 * tile * wide * 4 <= backward <= 3 * tile * wide * 4 + slack


# A graph runs backward once.


@EACH
def test_a_second_backward_is_an_error(case):
    out = case(5).run()[0].sum()
    out.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="runs backward once"):
        out.backward()


def test_nothing_is_kept_where_nothing_learns_and_else_a_tensor_of_the_node():
    """Before torch 2.13 a node gives up its tensors once no tensor refers to it, and every backward failed."""
    assert keep(torch.ones(2)) is None
    held = keep(torch.arange(2.0, requires_grad=True))
    (output,) = held
    assert output.numel() == 0
    assert [one.tolist() for one in kept(SimpleNamespace(kept=held))] == [[0.0, 1.0]]


# Some rows of a tensor that is used whole as well.

ROWS = torch.tensor([1, 2, 4])


def test_no_second_gradient_of_the_whole_is_made():
    x = torch.randn(1000, 8).requires_grad_()
    with ByteTracker() as tracker:
        whole, some = select_rows(x * 1, ROWS)
        held = tracker.total()
        torch.autograd.grad((whole, some), x, (torch.ones(1000, 8), torch.ones(3, 8)))
        # The two gradients that were given, and the product's own.
        assert tracker.peaks[DEVICE].bytes <= held + 2 * 1000 * 8 * 4 + 3 * 8 * 4
