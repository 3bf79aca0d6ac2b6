"""Kernels of our own against the statements whose places they take, and against gradients in float64.

No GPU is needed: Triton's interpreter runs them on a CPU, in a process in which it is switched on before they are defined. It
truncates where it turns fp32 into bfloat16; in float16 it rounds as a GPU does, so that dtype shows that kernels round where
statements do.
"""

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu.kernel_times import EPS, calls
from tests.memory.activations import interpreted
from tests.memory.recomputed import drawn, relative
from verl_memopt.memory import fused, kernels
from verl_memopt.memory.fused import fused_statements, over_rows
from verl_memopt.memory.kernels import KERNELS, has_kernel
from verl_memopt.memory.logit_tiles import BEFORE_ANY, product_gradient_, product_statistics
from verl_memopt.memory.recompute_elementwise_torch import RMSNorm

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 2**-6}
"""Relative to a result's norm. In float16 nearly all numbers are the same to the bit: one that is not is off by 2**-11."""

SHAPES = {
    # kind: rows, width, (heads of queries, of keys, size), vocabulary
    "odd": (9, 40, (3, 1, 20), 75),
    "even": (3, 32, (4, 2, 16), 64),
    "wide": (9, 56, (1, 1, 2), 5000),
}
"""Of the calls of one kind. ``wide``: rows do not fit in a block, and are read in parts."""
DTYPES = {"odd": (torch.float32, torch.float16), "even": (torch.bfloat16,), "wide": (torch.float32,)}
CALLS = {
    # A copy, because a kernel overwrites tensors that calls have in common.
    (kind, name, dtype): copy.deepcopy(call)
    for kind, shape in SHAPES.items()
    for dtype in DTYPES[kind]
    for name, call in calls(*shape, dtype, CPU).items()
    if kind != "wide" or ("norm" in name and "rotary" not in name) or "logits" in name
}

ROWS, VOCABULARY, TILE = 6, 90, 37
PRODUCTS, TARGETS = drawn(ROWS, VOCABULARY, dtype=torch.float32).detach(), torch.tensor([0, 36, 37, 73, 74, 89])
ABOVE = torch.linspace(-1, 1, ROWS), torch.linspace(0.5, -0.5, ROWS)
"""Gradients of log-probs and of entropies."""
CUTS = [slice(start, min(start + TILE, VOCABULARY)) for start in range(0, VOCABULARY, TILE)]


def tiles_of_a_vocabulary():
    """Gives calls for the tiles of one vocabulary, each over the statistics of the tiles before it."""
    running, made = torch.full((ROWS, 4), BEFORE_ANY), {}
    for cut in CUTS:
        tensors = PRODUCTS[:, cut], TARGETS - cut.start, running, torch.empty_like(running)
        made["statistics", cut.start] = (product_statistics, tensors, (1.0,))
        product_statistics(*tensors, 1.0)
        running = tensors[3].clone()
    for cut in CUTS:
        tensors = PRODUCTS[:, cut].clone(), TARGETS - cut.start, running[:, :2], ABOVE[0], running[:, 3], ABOVE[1]
        made["gradient", cut.start] = (product_gradient_, tensors, (1.0,))
    return made


def after_kernels(given, tmp_path):
    """Gives calls after the kernels ran, by the interpreter."""
    pytest.importorskip("triton")
    path = tmp_path / "calls.pt"
    torch.save(given, path)
    run = [sys.executable, "-W", "ignore", "-m", interpreted.__name__, str(path)]
    subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=240)
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return after_kernels({**CALLS, **tiles_of_a_vocabulary()}, tmp_path_factory.mktemp("kernels"))


def tensors_of(call):
    return [value for value in (*call[1], *call[2]) if isinstance(value, torch.Tensor) and value.is_floating_point()]


@pytest.mark.parametrize(("kind", "name", "dtype"), CALLS, ids=lambda value: str(value).removeprefix("torch."))
def test_a_kernel_writes_what_its_statement_writes_and_nothing_else(kind, name, dtype, found):
    statement, tensors, others = expected = copy.deepcopy(CALLS[kind, name, dtype])
    statement(*tensors, *others)
    for one, two in zip(tensors_of(found[kind, name, dtype]), tensors_of(expected), strict=True):
        assert relative(one.double(), two.double()) <= BOUNDS[max(dtype, one.dtype, key=lambda each: BOUNDS[each])]


def exact(function, *inputs):
    """Gives the gradients of a function of float64 inputs, for a given gradient of its value."""
    *values, above = (value.double() for value in inputs)
    values = [value.requires_grad_() for value in values]
    return torch.autograd.grad(function(*values), values, above)


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def close(one, two):
    assert relative(one.double(), two) <= 1e-6


def before(name):
    return copy.deepcopy(CALLS["odd", name, torch.float32])[1:]


def test_kernels_of_norms_give_the_gradients_of_float64(found):
    (grad, x, _), (weight, *_) = before("norm gradient and sum")
    _, (_, _, into), (*_, sums) = found["odd", "norm gradient and sum", torch.float32]
    x_grad, weight_grad = exact(rms, x, weight, grad)
    close(into, x_grad)
    close(sums - 1, weight_grad)  # they began with ones


def test_the_kernel_of_a_gate_gives_the_gradients_of_float64(found):
    (grad, gate, up), _ = before("gate gradient and value")
    _, (value, gate_grad, up_grad), _ = found["odd", "gate gradient and value", torch.float32]
    silu = torch.nn.functional.silu
    for one, two in zip((gate_grad, up_grad), exact(lambda a, b: silu(a) * b, gate, up, grad), strict=True):
        close(one, two)
    close(value, silu(gate.double()) * up.double())


def test_the_kernel_of_rotary_embeddings_gives_the_gradients_of_float64(found):
    name = "rotary and norm gradient of all"
    (dq, dk, query, key, cos, sin, dv, _), (query_weight, key_weight, *_) = before(name)
    _, (_, _, query_grad, key_grad, *_, value_grad), (*_, query_sums, key_sums) = found["odd", name, torch.float32]
    for x, weight, above, into, sums in (
        (query, query_weight, dq, query_grad, query_sums), (key, key_weight, dk, key_grad, key_sums),
    ):  # fmt: skip
        x_grad, weight_grad = exact(lambda a, b: rotated(rms(a, b), cos.double(), sin.double()), x, weight, above)
        close(into, x_grad)
        close(sums - 1, weight_grad)
    assert torch.equal(value_grad, dv)


def test_the_kernels_of_logits_give_log_probs_entropies_and_gradients_of_float64(found):
    _, (*_, statistics), _ = found["statistics", CUTS[-1].start]
    logits = PRODUCTS.double().requires_grad_()
    log_p = logits.log_softmax(-1)
    picked, entropy = log_p.gather(-1, TARGETS[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    close((statistics[:, 2] - statistics[:, 0]) - statistics[:, 1], picked.detach())
    close(statistics[:, 3], entropy.detach())
    (expected,) = torch.autograd.grad(picked @ ABOVE[0].double() + entropy @ ABOVE[1].double(), logits)
    close(torch.cat([found["gradient", cut.start][1][0] for cut in CUTS], 1), expected)


# Where a kernel takes a statement's place.


def test_attention_an_mlp_and_a_head_get_their_values_and_gradients_from_kernels_alone(found):
    expected = interpreted.whole(compiled=False)
    assert found["compiled",] == []
    for one, two in zip(found["whole",], expected, strict=True):
        assert relative(one, two) <= 2e-6
    # Gradients of gates alone, and of one tensor's heads, have other callers.
    names = {statement.__name__ for statement in KERNELS} - {"doubled"}
    assert names - set(found["used",]) == {"_gate_gradient", "_forward_statement", "_backward_statement"}


@pytest.fixture
def doubles(monkeypatch):
    """Gives a statement, and a function that names what launches its kernel, on a CPU, and gives a list of its launches."""

    def doubled(x, out):
        torch.mul(x, 2, out=out)

    def by(launch):
        calls = []

        def noted(*tensors):
            calls.append(len(tensors[0]))
            launch(*tensors)

        monkeypatch.setattr(kernels, "KERNELS", KERNELS)
        has_kernel(noted, "rw")(doubled)
        return calls

    monkeypatch.setattr(fused, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the statement in the place of compiled code
    yield doubled, by
    KERNELS.pop(doubled, None)


def run_doubled(doubled, rows, *, dtype=torch.float32, columns=8):
    x = torch.ones(rows, columns, dtype=dtype)
    over_rows(doubled, (x, out := torch.empty_like(x)))
    assert (out == 2).all()


def test_a_kernel_is_checked_once_for_each_width_and_then_runs_over_all_rows_of_any_number(doubles):
    statement, by = doubles
    launches = by(lambda x, out: torch.add(x, x, out=out))
    with fused_statements(True):
        for rows in (1, 20, 30):
            run_doubled(statement, rows)
        assert launches == [kernels.ROWS_OF_A_CHECK, 1, 20, 30]
        run_doubled(statement, 20, columns=9)
        assert launches[4:] == [kernels.ROWS_OF_A_CHECK, 20]


def test_a_kernel_takes_no_statements_place_while_compilation_is_off_in_double_precision_or_over_strided_columns(doubles):
    statement, by = doubles
    launches = by(lambda x, out: torch.add(x, x, out=out))
    run_doubled(statement, 20)
    with fused_statements(True):
        run_doubled(statement, 20, dtype=torch.float64)
        x = torch.ones(20, 16)[:, ::2]
        over_rows(statement, (x, out := torch.empty(20, 8)))
        assert (out == 2).all()
    assert not launches


def disagrees(x, out):
    torch.mul(x, 2.5, out=out)


def gives_nan(x, out):
    out.fill_(float("nan"))


def fails(x, out):
    raise RuntimeError("no such architecture")


@pytest.mark.parametrize(
    ("launch", "word"), [(disagrees, "differ"), (gives_nan, "nan"), (fails, "no such architecture")],
    ids=["disagrees", "nan", "fails"],
)  # fmt: skip
def test_a_kernel_that_fails_or_disagrees_is_not_used_and_one_warning_names_it(launch, word, doubles, caplog):
    statement, by = doubles
    launches = by(launch)
    with fused_statements(True), caplog.at_level(logging.WARNING):
        for rows, columns in ((20, 8), (30, 8), (20, 9)):
            run_doubled(statement, rows, columns=columns)
    assert launches == [kernels.ROWS_OF_A_CHECK]
    (warning,) = (record.message for record in caplog.records if record.name.startswith("verl_memopt"))
    assert "use_torch_compile" in warning
    assert "doubled" in warning
    assert word in warning


def test_a_kernel_that_fails_after_its_check_is_not_used_either(doubles, caplog):
    statement, by = doubles

    def only_few_rows(x, out):
        if len(x) > kernels.ROWS_OF_A_CHECK:
            raise RuntimeError("out of resources")
        torch.add(x, x, out=out)

    launches = by(only_few_rows)
    with fused_statements(True):
        run_doubled(statement, 20)
        run_doubled(statement, 30)
    assert launches == [kernels.ROWS_OF_A_CHECK, 20]
    assert caplog.text.count("out of resources") == 1


@pytest.mark.parametrize("most", [0, kernels.ROWS_OF_A_CHECK], ids=["in its check", "after it"])
def test_running_out_of_memory_is_raised_and_the_kernel_is_used_again(most, doubles):
    statement, by = doubles
    full = [True]

    def needs_memory(x, out):
        if full[0] and len(x) > most:
            raise torch.OutOfMemoryError("out of memory")
        torch.add(x, x, out=out)

    launches = by(needs_memory)
    with fused_statements(True):
        with pytest.raises(torch.OutOfMemoryError):
            run_doubled(statement, 20)
        full[0] = False
        run_doubled(statement, 10)
    assert launches[-1] == 10


def test_checking_a_kernel_draws_none_of_the_runs_random_numbers(doubles):
    statement, by = doubles
    by(lambda x, out: torch.add(x, x, out=out))
    before = torch.get_rng_state()
    with fused_statements(True):
        run_doubled(statement, 20)
    assert torch.equal(torch.get_rng_state(), before)


# What only Triton's compiler or a GPU shows.

BUILD = """
import sys, torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from verl_memopt.memory import kernels, triton_kernels

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
DIVISIBLE = [["tt.divisibility", 16]]


class Built:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.build

    def build(self, *values, num_warps, **constants):
        types, hints = dict.fromkeys(constants, "constexpr"), {}
        for place, (parameter, value) in enumerate(zip(self.kernel.params, values, strict=False)):
            name, hinted = parameter.name, isinstance(value, int) and not parameter.do_not_specialize
            if value is None or hinted and value == 1:
                types[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name] = NAMES[value.dtype]
                hints[place,] = DIVISIBLE
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
                if hinted and value % 16 == 0:
                    hints[place,] = DIVISIBLE
        types = {parameter.name: types[parameter.name] for parameter in self.kernel.params}
        source = ASTSource(fn=self.kernel, signature=types, constexprs=constants, attrs=hints)
        built = compile(source, target=GPUTarget("cuda", int(sys.argv[2]), 32), options={"num_warps": num_warps})
        print(self.kernel.__name__, len(built.asm["cubin"]))


class All:
    def __getattr__(self, name):
        return Built(getattr(triton_kernels, name))


kernels._triton = All
for statement, tensors, others in torch.load(sys.argv[1], weights_only=False):
    kernels.KERNELS[statement].launch(*tensors, *others)
"""


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (90, ["norm gradient and rounded sum", "gradient of logits and entropy"]),
        *(pytest.param(capability, None, marks=pytest.mark.slow) for capability in (80, 90, 120)),
    ],
)
def test_kernels_compile_for_gpus_that_are_not_here(capability, names, tmp_path):
    pytest.importorskip("triton")
    shapes = [(64, 1024, (16, 8, 128), 320), (64, 9216, (4, 2, 80), 303)][: None if names is None else 1]
    chosen = [call for shape in shapes for name, call in calls(*shape, torch.bfloat16, CPU).items() if not names or name in names]
    torch.save(chosen, path := tmp_path / "calls.pt")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    built = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(path), str(capability)],
        env={**variables, "TRITON_CACHE_DIR": str(tmp_path)}, check=True, timeout=280, capture_output=True, text=True,
    )  # fmt: skip
    kinds = {line.split()[0] for line in built.stdout.splitlines()}
    assert kinds >= ({"norm_gradient", "sum_partial", "logit_gradient"} if names else ALL)


ALL = {
    *("norm", "norm_gradient", "sum_partial", "gate", "gate_gradient", "rotate", "rotate_back", "merge"),
    *("logit_statistics", "logit_gradient"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1000, 1024, (16, 8, 128), 5000), (777, 896, (14, 2, 64), 4999), (130, 9216, (4, 2, 80), 303)])
def test_on_a_gpu_every_kernel_runs_and_writes_what_its_statement_writes(shape, dtype):
    device, unlike = torch.device("cuda", 0), []
    for name, call in calls(*shape, dtype, device).items():
        statement, tensors, others = expected = copy.deepcopy(call)
        statement(*tensors, *others)
        statement, tensors, others = call
        kernel = KERNELS[statement]
        assert kernel.fits(tensors, others), name
        ran = kernel.run(tensors, others)
        bounds = {**BOUNDS, torch.bfloat16: 2**-8}
        errors = [
            relative(one.double(), two.double()) / bounds[max(dtype, one.dtype, key=lambda each: bounds[each])]
            for one, two in zip(tensors_of(call), tensors_of(expected), strict=True)
        ]
        if not ran or not max(errors) <= 5:
            unlike.append((name, ran, max(errors)))
    assert not unlike


@pytest.mark.gpu
def test_on_a_gpu_no_kernel_is_compiled_again_for_another_number_of_rows():
    from verl_memopt.memory import triton_kernels

    device, counts = torch.device("cuda", 0), []
    for rows in (7, 1000, 1001, 1024, 4096):
        for statement, tensors, others in calls(rows, 896, (14, 2, 64), 5000, torch.bfloat16, device).values():
            assert KERNELS[statement].run(tensors, others)
        counts.append(sum(len(getattr(triton_kernels, name).device_caches[0][0]) for name in ALL))
    assert len(set(counts)) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_norm_and_its_gradients_are_four_launches():
    x, weight = (drawn(*shape, dtype=torch.bfloat16).detach().cuda() for shape in ((4096, 1024), (1024,)))

    def run():
        out, into, sums = RMSNorm(EPS).compute((x,), (weight,)), torch.empty_like(x), torch.zeros(1024, device="cuda")
        RMSNorm(EPS).differentiate(out, (x,), (weight,), (into,), (sums,))

    with fused_statements(True):
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 4, names  # norm, zeros, gradient, sum over programs
