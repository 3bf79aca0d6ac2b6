"""Every attention path in every dtype against fp32 on a CPU: no farther from it than attention written out in the same dtype.

Only a GPU has these kernels: flash, memory-efficient, and those of the package flash-attn.
"""

import pytest
import torch

from tests.gpu import machine
from tests.model.attention_cases import norm_error, random_inputs, rotary_of, with_gradients, with_rotary_gradients
from tests.model.forests import agent
from verl_memopt.distributed.device import supports_flash
from verl_memopt.model.attention import KERNELS, REGISTERED, AttentionArgs
from verl_memopt.model.prefix_layout import PrefixLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FACTOR = 2.0
"""How much farther from the truth a kernel may be than attention written out. Both round scores and shares, at other places."""
FLOOR = {torch.float32: 4e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}
"""What is always allowed, as a share of the norm: written out may happen to be exact. Half a spacing in half precision; in fp32
what three products of TF32, of which the memory-efficient kernel makes one of fp32, leave out."""

PATHS = ("sdpa", "eager", "varlen", "flash_attention_2")


def layout_of(sizes, skipped=None, times=1):
    """Gives layout of sizes that suit the machine. For a forest ``skipped`` says whether only predictors are queries."""
    if sizes is BRANCHES:
        pack = agent(turns=8, answers=3, context=37 * times, answer=5 * times).pack()
        return pack.last_block.layout if skipped else pack.layout
    grown = tuple((prefix * times, tuple(length * times for length in suffixes)) for prefix, suffixes in sizes)
    return PrefixLayout.of(grown, None if skipped is None else tuple(count * times for count in skipped))


ROWS = ((37, ()), (5, ()), (5, ()), (1, ()))
SHARED = ((37, (20, 20, 3)), (64, ()), (5, (13, 1)))
BRANCHES = "8 turns of 3 answers, of which one goes on"

CASES = {
    # name: (layout, heads, key heads, size of heads, window)
    "rows": (ROWS, None, 4, 4, 64, None),
    "groups of heads": (ROWS, None, 6, 2, 64, None),
    "one key head": (ROWS, None, 4, 1, 128, None),
    "an odd size": (ROWS, None, 4, 2, 20, None),
    "a size of no multiple": (ROWS, None, 2, 2, 66, None),
    "a window": (ROWS, None, 4, 2, 64, 7),
    "a wide window": (ROWS, None, 4, 2, 64, 1000),
    "a shared prompt": (SHARED, None, 4, 4, 64, None),
    "a shared prompt, groups of heads": (SHARED, None, 6, 3, 64, None),
    "a shared prompt, an odd size": (SHARED, None, 4, 2, 20, None),
    "a skipped prefix": (((1, (20, 20, 3)), (64, ()), (1, (13, 1))), (36, 0, 4), 4, 2, 64, None),
    "a prefix kv": (((0, (20, 20, 3)),), (37,), 4, 2, 64, None),
    "a forest": (BRANCHES, False, 4, 2, 64, None),
    "a forest, an odd size": (BRANCHES, False, 2, 2, 20, None),
    "predictors of a forest": (BRANCHES, True, 4, 2, 64, None),
    "a shared prompt under a window": (SHARED, None, 4, 2, 64, 30),
    "a prefix kv under a window": (((0, (20, 20, 3)),), (37,), 4, 2, 64, 30),
    "a forest under a window": (BRANCHES, False, 4, 2, 64, 9),
    "predictors of a forest under a window": (BRANCHES, True, 4, 4, 64, 30),
}
QUICK = {("a shared prompt, groups of heads", "bf16"), ("an odd size", "fp32"), ("a window", "fp32"), ("a prefix kv", "fp16"),
         ("a forest", "bf16"), ("predictors of a forest under a window", "fp16")}  # fmt: skip


def needs(path, dtype, device):
    """Skips a path that this machine does not have, saying which."""
    if path == "flash_attention_2" and not machine.has_flash_attn():
        pytest.skip("attention of the package flash-attn: it is not installed")
    if path in ("varlen", "flash_attention_2") and machine.on_gpu() and not supports_flash(device, dtype):
        pytest.skip("flash kernels: the device's capability is below 8.0")


def applies(path, dtype):
    """Flash kernels are of half precision alone."""
    return not (path in ("varlen", "flash_attention_2") and dtype == "fp32")


def attend(path, layout, window):
    kernel = KERNELS[REGISTERED[path]]

    def run(query, key, value, sinks=None, rotary=None):
        tokens_first = (x[0].transpose(0, 1) for x in (query, key, value))
        return kernel(*tokens_first, AttentionArgs(layout, 0.125, window, rotary, sinks=sinks))[None]

    return run


def errors(found, expected):
    """Gives how far output and gradients are off: of the output, and of all gradients together."""
    found, expected = ([tensor.float().cpu() for tensor in tensors] for tensors in (found, expected))
    gradients = (torch.cat([tensor.flatten() for tensor in tensors[1:]]) for tensors in (found, expected))
    return norm_error(found[0], expected[0]), norm_error(*gradients)


def no_worse(found, naive, truth, dtype):
    """Fails where what was found is farther from the truth than the naive by more than the factor."""
    for what, own, other in zip(("output", "gradients"), errors(found, truth), errors(naive, truth), strict=True):
        assert own <= FACTOR * other + FLOOR[dtype], (what, own, other)


def cases():
    for path in PATHS:
        for dtype in DTYPES:
            for name in CASES:
                if applies(path, dtype):
                    marks = [pytest.mark.rehearsed] if (name, dtype) in QUICK else []
                    yield pytest.param(path, dtype, name, marks=marks, id=f"{path}-{dtype}-{name}")


@pytest.mark.parametrize(("path", "dtype", "name"), cases())
def test_attention_is_as_near_to_fp32_on_a_cpu_as_written_out_in_its_dtype(device, path, dtype, name):
    dtype, (sizes, skipped, heads, kv_heads, head_size, window) = DTYPES[dtype], CASES[name]
    needs(path, dtype, device)
    layout = layout_of(sizes, skipped, machine.size(9, 1))
    rounded = random_inputs(layout, heads, kv_heads, size=head_size, dtype=dtype)
    truth = with_gradients(attend("eager", layout, window), [tensor.float() for tensor in rounded])
    there, inputs = layout.map(lambda tensor: tensor.to(device)), [tensor.to(device) for tensor in rounded]
    # Written out itself is held to what it is on a CPU.
    beside = (layout, rounded) if path == "eager" else (there, inputs)
    naive = with_gradients(attend("eager", beside[0], window), beside[1])
    with machine.gpu_kernels():
        found = with_gradients(attend(path, there, window), inputs)
    assert all(torch.isfinite(tensor).all() for tensor in found)
    no_worse(found, naive, truth, dtype)


@pytest.mark.parametrize("window", [None, pytest.param(30, marks=pytest.mark.rehearsed)])
@pytest.mark.parametrize(
    ("path", "dtype"), [(path, dtype) for path in PATHS for dtype in ("fp32", "bf16") if applies(path, dtype)]
)
def test_sinks_are_as_near_to_fp32_on_a_cpu_as_written_out_in_its_dtype(device, path, dtype, window):
    dtype = DTYPES[dtype]
    needs(path, dtype, device)
    layout = layout_of(SHARED, None, machine.size(9, 1))
    rounded = [*random_inputs(layout, 4, 2, size=64, dtype=dtype), torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=dtype)]
    truth = with_gradients(attend("eager", layout, window), [tensor.float() for tensor in rounded])
    there, inputs = layout.map(lambda tensor: tensor.to(device)), [tensor.to(device) for tensor in rounded]
    naive = with_gradients(attend("eager", there, window), inputs)
    with machine.gpu_kernels():
        found = with_gradients(attend(path, there, window), inputs)
    no_worse(found, naive, truth, dtype)


@pytest.mark.parametrize("head_size", [64, 20])
@pytest.mark.parametrize(("path", "dtype"), [(path, dtype) for path in PATHS for dtype in DTYPES if applies(path, dtype)])
def test_queries_and_keys_rotated_inside_attention_are_as_near_as_rotated_before(device, path, dtype, head_size):
    dtype = DTYPES[dtype]
    needs(path, dtype, device)
    layout = layout_of(SHARED, None, machine.size(9, 1))
    rounded = random_inputs(layout, 4, 2, size=head_size, dtype=dtype)
    tables = rotary_of(sum(layout.trees), head_size)
    truth = apply_rotary("eager", layout, [tensor.float() for tensor in rounded], tables, torch.float32, "cpu")
    there, inputs = layout.map(lambda tensor: tensor.to(device)), [tensor.to(device) for tensor in rounded]
    naive = apply_rotary("eager", there, inputs, tables, dtype, device)
    with machine.gpu_kernels():
        found = apply_rotary(path, there, inputs, tables, dtype, device)
    no_worse(found, naive, truth, dtype)


def apply_rotary(path, layout, inputs, tables, dtype, device):
    rotary = type(tables)(
        tables.cos.to(device, dtype),
        tables.sin.to(device, dtype),
        tuple(norm.detach().to(device, dtype).requires_grad_() for norm in tables.norms),
        tables.eps,
    )
    run = attend(path, layout, None)
    return with_rotary_gradients(lambda *heads: run(*heads, rotary=rotary), inputs, rotary)
