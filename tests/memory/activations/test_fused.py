import functools
import shutil

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from tests.memory import activation_cases as act
from tests.memory.recomputed import EPS, drawn, relative
from tests.model.attention_cases import flat_inputs, gpu_operators_on_a_cpu, rotary_of
from verl_memopt.algorithms.estimators import sum_of_squares
from verl_memopt.distributed.device import local_device
from verl_memopt.memory import fused
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.fused import compiler_works, fused_statements, over_rows, run_compiled, take_compile_counts, tiles
from verl_memopt.memory.logit_tiles import both_gradients_, log_softmax_, product_gradient_, product_statistics, softmax_
from verl_memopt.memory.recompute_elementwise_torch import (
    RMSNorm,
    SwiGLU,
    _gate_gradient_and_value,
    _norm_gradient_plus,
    _norm_of_sum,
    norm_gradient,
    norm_weight_gradient,
    sum_of,
    zeros_to_sum,
)
from verl_memopt.model.attention_fused import _merge_statement, flash_attention
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import (
    _backward_statement,
    _backward_to_all_statement,
    _forward_statement,
    _weight_statement,
    apply_rotary,
    rotary_backward,
)
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker

CPU = torch.device("cpu")
HEADS, SIZE = 3, 16
PRECISE, HALF = 1e-6, 2**-7
"""Relative to a result's norm: fp32 in another order, and bfloat16 rounded at other places."""


HAS_COMPILER = shutil.which("g++") is not None


def backend(name, *values, slow=False):
    """Return a case that compiles to C++ (``inductor``), or as far as the graph, which then runs statement by statement."""
    needs_compiler = pytest.mark.skipif(name == "inductor" and not HAS_COMPILER, reason="no C++ compiler")
    return pytest.param(name, *values, marks=[needs_compiler, *([pytest.mark.slow] if slow else [])])


BACKENDS = [backend("aot_eager"), backend("inductor", slow=True)]


@pytest.fixture
def compiles(request, monkeypatch):
    """Gives the names of what was compiled with the backend that the test is given."""
    found, compile_ = [], torch.compile
    backend = getattr(request, "param", "aot_eager")

    def noted(function, **options):
        found.append(function.__name__)
        return compile_(function, **options, backend=backend)

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setattr(fused, "_compiled", functools.cache(fused._compiled.__wrapped__))
    monkeypatch.setattr(fused, "_given_up", set())
    yield found
    torch._dynamo.reset()


def gates(rows, dtype):
    """Gives what the statements of an MLP's gate write, over rows that are drawn alike each time."""
    gate, up, above = (drawn(rows, 40, seed=seed, dtype=dtype).detach() for seed in (3, 4, 5))
    gated = SwiGLU().compute((gate, up), ())
    in_place = gate.clone()
    SwiGLU().compute((in_place, up), (), in_place)
    again, value = (gate.clone(), up.clone()), above.clone()
    SwiGLU().differentiate(above, (gate, up), (), (gate, up), ())
    SwiGLU().differentiate_to_value(value, again)
    found = [gated, in_place, gate, up, *again, value]
    gelu, others = SwiGLU(gelu=True), [drawn(rows, 40, seed=seed, dtype=dtype).detach() for seed in (3, 4, 5, 3, 4, 5)]
    found.append(gelu.compute(others[:2], ()))
    gelu.differentiate(others[2], others[:2], (), others[:2], ())
    gelu.differentiate_to_value(others[5], others[3:5])
    return found + others


def norms_and_rotary(rows, dtype):
    """Gives what all other statements write."""
    values = functools.partial(drawn, dtype=dtype)
    x, weight, grad = (one.detach() for one in (values(rows, 24), values(24, seed=1), values(rows, 24, seed=2)))
    into, sums = torch.empty_like(x), torch.zeros(24)
    RMSNorm(EPS).differentiate(grad, (x,), (weight,), (into,), (sums,))
    plus, total = torch.empty_like(x), torch.empty_like(x)
    RMSNorm(EPS).differentiate(grad, (x,), (weight,), (plus,), (None,), grad)
    of_sum = RMSNorm(EPS).compute_sum(grad, x, total, weight)
    query, turn, cos, sin = (
        values(*shape, seed=6).detach() for shape in ((rows, HEADS, SIZE), (rows, HEADS, SIZE), (rows, SIZE), (rows, SIZE))
    )
    scale, of_scale = values(SIZE, seed=7).detach(), torch.zeros(SIZE)
    turns = apply_rotary(query, scale, EPS, cos, sin), apply_rotary(query, None, EPS, cos, sin)
    # The gradient takes the place of some heads of the query, by another view of them.
    rotary_backward(turn[:, 1:], query[:, 1:], scale, EPS, cos, sin, query[:, 1:], of_scale)
    wide = [RMSNorm(EPS).compute((x,), (weight.float() + 1,)), apply_rotary(query, scale.float() + 1, EPS, cos, sin)]
    part = apply_rotary(turn, scale, EPS, cos[:, : SIZE // 2], sin[:, : SIZE // 2])
    return [RMSNorm(EPS).compute((x,), (weight,)), into, sums, plus, total, of_sum, *turns, query, of_scale, *wide, part]


STATEMENTS = [
    backend("aot_eager", torch.bfloat16, HALF, [gates, norms_and_rotary]),
    *(
        backend("inductor", dtype, bound, [gates, norms_and_rotary], slow=True)
        for dtype, bound in ((torch.float32, PRECISE), (torch.bfloat16, HALF))
    ),
]
NAMES = {
    gates: {f"{kind}_gate{rest}" for kind in ("", "_gelu") for rest in ("", "_gradient", "_gradient_and_value")},
    norms_and_rotary: {
        *("_norm", "norm_gradient", "norm_weight_gradient", "_norm_gradient_plus", "_norm_of_sum"),
        *("_forward_statement", "_backward_statement", "_weight_statement"),
    },
}


@pytest.mark.parametrize(("compiles", "dtype", "bound", "chosen"), STATEMENTS, indirect=["compiles"])
def test_compiled_statements_give_the_numbers_of_uncompiled_ones(compiles, dtype, bound, chosen):
    def run():
        return [written for statements in chosen for rows in (50, 37) for written in statements(rows, dtype)]

    expected = run()
    with fused_statements(True):
        found = run()
    assert set(compiles) == set().union(*(NAMES[statements] for statements in chosen))
    for one, two in zip(found, expected, strict=True):
        assert relative(one.double(), two.double()) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("compiles", BACKENDS, indirect=True)
def test_an_update_with_compiled_statements_differs_by_rounding_only(compiles, kind, tmp_path, one_rank):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type=kind, tie_embeddings=False), seed=3)
    options = {"recompute": True, "offload": (1, 2)}
    mini = act.mini_batch(response=12)
    expected = act.first_gradients(act.build(folder, one_rank, recompute_elementwise=True, **options), mini)
    assert not compiles
    with fused_statements(True):
        found = act.first_gradients(act.build(folder, one_rank, recompute_elementwise=True, **options), mini)
    assert "norm_gradient" in compiles
    assert act.largest_difference(found, expected) <= 2e-6


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler: what inductor makes on a CPU is not covered")
def test_a_statement_compiled_by_inductor_gives_its_numbers():
    x, weight = drawn(40, 8, dtype=torch.float32).detach(), drawn(8, seed=1, dtype=torch.float32).detach()
    expected = RMSNorm(EPS).compute((x,), (weight,))
    with fused_statements(compiler_works(CPU)):
        assert fused._on
        assert relative(RMSNorm(EPS).compute((x,), (weight,)), expected) <= PRECISE
        assert fused._on


@pytest.mark.parametrize("given_up", [False, True])
def test_the_gradient_of_a_norms_weight_is_written_whole_where_one_call_computes_it_and_where_tiles_do(
    given_up, compiles, monkeypatch
):  # fmt: skip
    rows = 9000  # several tiles
    x, grad, weight = (drawn(*shape, seed=seed).detach().bfloat16() for seed, shape in enumerate(((rows, 24), (rows, 24), (24,))))
    into = torch.empty_like(x)
    RMSNorm(EPS).differentiate(grad, (x,), (weight,), (into,), (expected := zeros_to_sum(weight),))
    if given_up:
        monkeypatch.setattr(fused, "_given_up", {norm_weight_gradient})
    with fused_statements(True):
        found = sum_of(weight, [slice(0, rows)], x)
        assert found.dtype == torch.bfloat16
        RMSNorm(EPS).differentiate(grad, (x,), (weight,), (into,), (found.fill_(float("nan")),))
    assert relative(found.double(), expected.double()) <= HALF


@pytest.mark.parametrize(
    ("groups", "normed", "rotated"),
    [(((5, (3, 4)),), False, 8), (((5, (3, 4)), (2, (3, 1))), True, 8), (((5, (3, 4)),), True, 4)],
)
@pytest.mark.parametrize("compiles", BACKENDS, indirect=True)
def test_queries_keys_and_values_side_by_side_get_what_they_get_apart(compiles, groups, normed, rotated):
    layout, heads, kv = PrefixLayout.of(groups), 4, 2
    inputs, rotary = flat_inputs(layout, heads, kv), rotary_of(sum(layout.trees), normed=normed, rotated=rotated)

    def run(together):
        whole = torch.cat(inputs, 1).requires_grad_()
        parts = (whole * 1).split([heads, kv, kv], 1)
        given = parts if together else [part.clone() for part in parts]
        out = flash_attention(*given, layout, 0.3, None, rotary)
        asked = [whole, *(norm for norm in rotary.norms if norm is not None)]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), asked)]

    with gpu_operators_on_a_cpu():
        expected = run(together=False)
        with fused_statements(True):
            found = run(together=True)
    assert {"_backward_to_all_statement", "_merge_statement"} <= set(compiles)
    assert compiles.count("_forward_statement") == 1
    for one, two in zip(found, expected, strict=True):
        assert relative(one, two) <= 2 * PRECISE


def after_steps(state_dtype, device=CPU):
    """Gives the masters, and the shares of weights that changed, of some steps over halved masters."""
    weights = [torch.nn.Parameter(drawn(rows, 256, seed=rows).detach().bfloat16().to(device)) for rows in (5, 3, 40)]
    optimizer = BucketedAdamW(weights, 1e-3, state_dtype=state_dtype, split_masters=True, bucket_megabytes=0.02, weight_decay=0.1)
    optimizer.computes_in, shares = torch.bfloat16, []
    for step in range(3):
        for weight in weights:
            weight.grad_dtype = torch.float32
            weight.grad = drawn(*weight.shape, seed=step, dtype=torch.float32).detach().to(device)
        optimizer.step()
        shares.append(optimizer.changed_share())
    return [*map(optimizer.master, weights), torch.stack(shares)]


@pytest.mark.parametrize("state_dtype", ["fp32", "int4"])
@pytest.mark.parametrize("compiles", BACKENDS, indirect=True)
def test_a_compiled_step_over_halved_masters_gives_the_bits_of_an_uncompiled_one(state_dtype, compiles):
    expected = after_steps(state_dtype)
    with fused_statements(True):
        found = after_steps(state_dtype)
    moments = {"_decode_statement", "_encode_statement"} if state_dtype != "fp32" else set()
    assert set(compiles) == {"_join_statement", "_split_statement"} | moments
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_a_compiled_statement_is_one_call_over_all_rows(compiles):
    calls = []

    def statement(x, out):
        calls.append(len(x))
        out.copy_(x * 2)

    x, out = torch.ones(1000, 300), torch.empty(1000, 300)
    over_rows(statement, (x, out))
    assert len(calls) == len(list(tiles(x))) > 1
    calls.clear()
    with fused_statements(True):
        over_rows(statement, (x, out))
    assert compiles == ["statement"]
    assert len(calls) <= 1  # traced, whole
    assert (out == 2).all()


def test_past_its_limit_of_variants_a_statement_runs_in_tiles_and_each_such_call_is_counted(compiles, monkeypatch, caplog):
    monkeypatch.setattr(fused, "RECOMPILE_LIMIT", 1)
    calls = []

    def statement(x, out):
        calls.append(len(x))
        out.copy_(x * 2)

    with fused_statements(True):
        take_compile_counts()
        for x in (torch.ones(1000, 300), *torch.ones(3, 1000, 600)[..., ::2]):
            over_rows(statement, (x, out := torch.empty(1000, 300)))
            assert (out == 2).all()
        assert take_compile_counts() == {"compiles": 1, "compile_fallbacks": 3}
        assert take_compile_counts() == {"compiles": 0, "compile_fallbacks": 0}
    assert len(calls) >= 3 * len(list(tiles(x)))
    assert caplog.text.count("statement has more than 1 compiled variants") == 1


def test_statements_are_neither_compiled_nor_whole_while_bytes_are_counted(compiles):
    x, weight = torch.ones(2000, 300), torch.ones(300)
    peaks = []
    for on in (False, True):
        with fused_statements(on), ByteTracker() as tracker:
            RMSNorm(EPS).compute((x,), (weight,))
            peaks.append(tracker.peaks["device"].bytes)
            assert compiler_works(CPU) is False  # and no word of it
    assert peaks[0] == peaks[1]
    assert not compiles


def test_weights_make_no_variant_and_one_row_is_not_compiled(compiles):
    x, weight = torch.ones(4, 8), torch.nn.Parameter(torch.ones(8))
    with fused_statements(True):
        take_compile_counts()
        for one in (weight, weight.detach(), weight.detach().clone().requires_grad_()):
            RMSNorm(EPS).compute((x,), (one,))
        assert take_compile_counts() == {"compiles": 1, "compile_fallbacks": 0}
        RMSNorm(EPS).compute((x[:1],), (weight.detach(),))
        assert take_compile_counts() == {"compiles": 0, "compile_fallbacks": 0}
    assert compiles == ["_norm"]


def test_the_switch_holds_inside_its_body_only(compiles):
    with fused_statements(True), fused_statements(False):
        RMSNorm(EPS).compute((torch.ones(2, 4),), (torch.ones(4),))
    RMSNorm(EPS).compute((torch.ones(2, 4),), (torch.ones(4),))
    assert not compiles


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("compiles", ["inductor"], indirect=True)
def test_without_a_compiler_the_run_goes_on_with_one_warning_whether_it_asked_first_or_not(asked, compiles, monkeypatch, caplog):
    monkeypatch.setattr(fused, "_warned", False)
    monkeypatch.setattr(fused, "_compiles", functools.cache(fused._compiles.__wrapped__))
    x, weight = drawn(40, 8, dtype=torch.float32).detach(), drawn(8, seed=1, dtype=torch.float32).detach()
    expected = RMSNorm(EPS).compute((x,), (weight,))
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch({"cpp.cxx": ("no-compiler",)}):
        assert not asked or not compiler_works(CPU)
        with fused_statements(not asked):
            for _ in range(3):
                assert torch.equal(RMSNorm(EPS).compute((x,), (weight,)), expected)
        assert not compiler_works(CPU)
    (warning,) = (record.message for record in caplog.records if record.name.startswith("verl_memopt"))
    assert "actor_rollout_ref.actor.use_torch_compile=true: functions cannot be compiled here" in warning


def fails_without_exp(graph, inputs, **_):
    """A backend that fails for all graphs without an exponential, which the function that looks for a compiler has."""
    if not any(getattr(node.target, "__name__", node.target) == "exp" for node in graph.graph.nodes):
        raise KeyError("buf6")
    return graph.forward


@pytest.mark.parametrize("compiles", [fails_without_exp], indirect=True)
def test_a_function_that_cannot_be_compiled_is_named_with_its_cause_and_no_compiler_is_blamed(compiles, monkeypatch, caplog):
    monkeypatch.setattr(fused, "_compiles", functools.cache(fused._compiles.__wrapped__))
    x, weight = drawn(40, 8, dtype=torch.float32).detach(), drawn(8, seed=1, dtype=torch.float32).detach()
    expected = RMSNorm(EPS).compute((x,), (weight,))
    with fused_statements(True):
        for _ in range(3):
            assert torch.equal(RMSNorm(EPS).compute((x,), (weight,)), expected)
    (warning,) = (record.message for record in caplog.records if record.name.startswith("verl_memopt"))
    assert "_norm" in warning
    assert "KeyError: 'buf6'" in warning
    assert "use_torch_compile=false" in warning
    assert "gcc" not in warning


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, HALF)])
def test_on_a_gpu_compiled_statements_give_the_numbers_of_uncompiled_ones_in_a_kernel_or_three(dtype, bound):
    here = local_device("cuda", 0)
    assert compiler_works(here)
    x, weight = (drawn(*shape, dtype=dtype).detach().to(here) for shape in ((4096, 1024), (1024,)))

    def run():
        out, into, sums = RMSNorm(EPS).compute((x,), (weight,)), torch.empty_like(x), torch.zeros(1024, device=here)
        RMSNorm(EPS).differentiate(out, (x,), (weight,), (into,), (sums,))
        return out, into, sums

    expected = run()
    with fused_statements(True):
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            found = run()
    for one, two in zip(found, expected, strict=True):
        assert relative(one.double(), two.double()) <= bound
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) <= 1 + 3 + 2  # and the zeros, and the sum of the weight's gradient in a kernel of its own


# Tiles.


def test_tiles_cover_every_row_once():
    tensor = torch.empty(1000, 300)
    assert [row for rows in tiles(tensor) for row in range(1000)[rows]] == list(range(1000))
    assert len(list(tiles(tensor))) > 1


# What a compiled function allocates.


def largest_allocation(function, tensors, *others):
    """Gives the bytes of the largest tensor that a function allocates, compiled to C++ for tensors of these widths."""

    def run():
        return run_compiled(function, tensors, others, lambda: pytest.fail("it ran uncompiled"))

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


@pytest.fixture
def thresholds_of_a_gpu():
    """Inductor keeps values as on a GPU: torch 2.13 has other thresholds for a CPU."""
    of_gpu = {"realize_cpu_opcount_threshold": 30, "realize_cpu_acc_reads_threshold": 8}
    with inductor_config.patch({name: value for name, value in of_gpu.items() if hasattr(inductor_config, name)}):
        yield


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler: what inductor makes on a CPU is not covered")
@pytest.mark.parametrize("compiles", [backend("inductor")], indirect=True)
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "every"])
def test_no_compiled_function_holds_a_temporary_of_all_its_rows(compiles, thresholds_of_a_gpu, some):
    rows, vocab = 60, 500
    logits, each = torch.randn(rows, vocab).log_softmax(-1), torch.rand(rows)
    head = {
        softmax_: ([logits.clone()],),
        log_softmax_: ([logits.clone(), None], True),
        both_gradients_: ([logits.clone(), each, each, each, None],),
        sum_of_squares: ([logits, None],),
    }
    half, targets, parts = logits.bfloat16(), torch.arange(rows), torch.rand(rows, 2)
    head |= {
        product_statistics: ([half, targets, *torch.rand(2, rows, 4)], 0.7),
        product_gradient_: ([half, targets, parts, each, each, each], 0.7),
    }
    for function, (tensors, *others) in ({product_gradient_: head[product_gradient_]} if some else head).items():
        assert largest_allocation(function, tensors, *others) <= 4 * rows * 3, function
    x, grad, into = torch.randn(3, rows, HEADS, SIZE).bfloat16()
    cos, sin, weight = *torch.randn(2, rows, SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
    whole, wide, lse = (
        torch.randn(rows, 3 * HEADS, SIZE).bfloat16(),
        torch.randn(4, rows, 40).bfloat16(),
        torch.rand(2, rows, HEADS),
    )
    block = {
        _backward_statement: ([grad, x, cos, sin, into], weight, EPS, None),
        _backward_to_all_statement: ([grad, x, into, whole, cos, sin], weight, weight, EPS),
        _forward_statement: ([whole, cos, sin, whole.clone()], weight, EPS, weight, HEADS),
        _weight_statement: ([grad, x, cos, sin], EPS, torch.zeros(SIZE)),
        _merge_statement: ([x, lse[0], grad, lse[1], x, lse[0]],),
        norm_gradient: ([grad, x, into], weight, EPS, None),
        _norm_of_sum: ([*wide], torch.randn(40).bfloat16(), EPS),
        _norm_gradient_plus: ([*wide], torch.randn(40).bfloat16(), EPS, None),
        _gate_gradient_and_value: ([*wide[:3]],),
    }
    for function, (tensors, *others) in ({norm_gradient: block[norm_gradient]} if some else block).items():
        # Statistics of each head at most.
        assert largest_allocation(function, tensors, *others) <= 4 * rows * 3 * HEADS < 2 * rows * HEADS * SIZE, function
