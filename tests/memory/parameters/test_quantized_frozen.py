import pytest
import torch
from torch import nn

from verl_memopt.memory.quantized_frozen_torch import (
    FORMATS,
    Packing,
    QuantizedLinear,
    exact_weights,
    nf4_pairs,
    quantize_blocks,
    quantized_layers,
)

KINDS = list(FORMATS)


def layer(kind, rows=96, width=256, seed=0):
    torch.manual_seed(seed)
    base = nn.Linear(width, rows, bias=False)
    quantized = QuantizedLinear(base, kind)
    quantized.qweight.data.copy_(quantized.packing.quantize(base.weight.detach()))
    return base, quantized


@pytest.mark.parametrize(("kind", "bits", "group"), [("int8", 8, 128), ("nf4", 4, 64)])
def test_bytes_are_codes_and_one_scale_a_group(kind, bits, group):
    _, quantized = layer(kind, rows=10, width=256)
    assert quantized.qweight.numel() == 10 * (256 * bits // 8 + 4 * 256 // group)
    per_parameter = quantized.qweight.numel() / (10 * 256)
    assert per_parameter <= {"int8": 1.04, "nf4": 0.57}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_weight_is_within_half_a_step_of_its_group(kind):
    base, quantized = layer(kind)
    back = quantized.packing.dequantize(quantized.qweight, torch.float32)
    scale = base.weight.view(96, -1, FORMATS[kind].group).abs().amax(-1).repeat_interleave(FORMATS[kind].group, 1)
    # int8: half of 1/127; nf4: half of the widest gap between levels, between -1 and -0.6962
    step = {"int8": 0.5 / 127, "nf4": (1 - 0.6961928) / 2}[kind]
    assert ((back - base.weight).abs() <= scale * step * 1.0001).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_quantised_apart_give_the_same_bytes(kind):
    base, quantized = layer(kind)
    parts = [quantized.packing.quantize(base.weight.detach()[start : start + 32]) for start in (0, 32, 64)]
    assert torch.equal(torch.cat(parts), quantized.qweight.data)


@pytest.mark.parametrize("kind", KINDS)
def test_widths_that_do_not_divide_by_the_group_and_rows_of_zeros_come_back(kind):
    base = nn.Linear(100, 4, bias=True)
    base.weight.data[2] = 0
    quantized = QuantizedLinear(base, kind)
    quantized.qweight.data.copy_(quantized.packing.quantize(base.weight.detach()))
    back = quantized.packing.dequantize(quantized.qweight, torch.float32)
    assert back.shape == base.weight.shape
    assert (back[2] == 0).all()
    assert torch.isfinite(back).all()


def test_exact_weights_are_used_inside_and_codes_outside():
    block = nn.Sequential(nn.Linear(64, 64, bias=False))
    weights = {"0.weight": block[0].weight.detach().clone()}
    quantize_blocks([block], "nf4")
    ((name, quantized),) = quantized_layers(block).items()
    quantized.qweight.data.copy_(quantized.packing.quantize(weights["0.weight"]))
    x = torch.randn(3, 64)
    with exact_weights(block, lambda key, region: weights[key][region]):
        assert torch.equal(block(x), x @ weights["0.weight"].T)
    assert name == "0"
    assert not torch.equal(block(x), x @ weights["0.weight"].T)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_one_graph_without_a_copy_from_the_host(kind):
    """As vLLM compiles and captures it: no break in the graph, and nothing but the bytes and the levels goes in."""
    packing = Packing(kind, 100)
    stored, pairs, copies = packing.quantize(torch.randn(8, 100)), nf4_pairs(torch.bfloat16), []

    def backend(graph, inputs):
        copies.extend(node for node in graph.graph.nodes if node.op == "call_function" and node.target is torch.tensor)
        return graph

    decode = torch.compile(lambda rows: packing.dequantize(rows, torch.bfloat16, pairs), fullgraph=True, backend=backend)
    assert torch.equal(decode(stored), packing.dequantize(stored, torch.bfloat16))
    assert copies == []
