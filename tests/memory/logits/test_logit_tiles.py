import functools
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from verl_memopt.algorithms.estimators import sum_of_squares
from verl_memopt.memory import fused
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.logit_tiles import (
    BEFORE_ANY,
    PRODUCT_ROWS,
    ROWS_AT_ONCE,
    SCRATCH_COLUMNS,
    Gradients,
    Head,
    LogitTiles,
    _compiled,
    add_product_,
    add_target_terms_,
    both_gradients_,
    clamped,
    hidden_gradient,
    is_inside,
    log_prob_gradient_,
    log_softmax_,
    product_statistics,
    softmax_,
    sum_of_exponentials,
    target_logits,
)

ROWS, COLUMNS = 6, 50


def logits(seed=0, spread=6.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator) * spread, torch.randint(COLUMNS, (ROWS,), generator=generator)


def scratch(columns):
    return None if columns is None else torch.full((ROWS, columns), torch.nan)


@pytest.mark.parametrize("columns", [None, 1, 7, 50, 64])
def test_a_tile_gives_what_its_softmax_says(columns):
    values, targets = logits()
    exact = values.double().log_softmax(-1)
    picked = target_logits(values, targets)
    top, log_sum, entropy = log_softmax_(values, scratch(columns), True)
    torch.testing.assert_close(values, exact.float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(picked - top - log_sum, exact.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1).float(), rtol=2e-6, atol=2e-6)


def test_a_target_of_another_tile_adds_nothing():
    values, _ = logits()
    for targets in (torch.full((ROWS,), -3), torch.full((ROWS,), COLUMNS)):
        assert torch.equal(target_logits(values, targets), torch.zeros(ROWS))
        log_p = values.log_softmax(-1)
        probabilities = log_p.exp()
        log_prob_gradient_(log_p, torch.full((ROWS,), -2.0))
        add_target_terms_(log_p, targets, torch.full((ROWS,), -2.0))
        assert torch.equal(log_p, 2 * probabilities)


@pytest.mark.parametrize("columns", [None, 7])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_a_tile_are_those_of_autograd(columns, entropy):
    values, targets = logits(1)
    exact = values.double().requires_grad_()
    log_p = exact.log_softmax(-1)
    factors = torch.linspace(-1, 2, ROWS), torch.linspace(0.5, -1, ROWS) * entropy
    entropies = -(log_p.exp() * log_p).sum(-1)
    total = (log_p.gather(-1, targets[:, None])[:, 0] * factors[0]).sum() + (entropies * factors[1]).sum()
    (expected,) = torch.autograd.grad(total, exact)
    found = log_p.detach().float()
    if entropy:
        both_gradients_(found, entropies.detach().float(), *factors, scratch(columns))
    else:
        log_prob_gradient_(found, factors[0])
    add_target_terms_(found, targets, factors[0])
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [0, 1, 13, 25, 49, 50, 1000])
def test_tiles_together_know_what_whole_rows_know(tile):
    values, targets = logits(2)
    weight, hidden = values.t().contiguous(), torch.eye(ROWS)
    weight[7] = -1e4  # a token that is never chosen
    head = Head(weight, None, 2.0, 0, tile, True, False)
    found = LogitTiles(head, hidden).statistics(hidden, targets)
    exact = (weight.t().double() / 2).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, exact.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.entropy, -(exact.exp() * exact).sum(-1).float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("tile", [1, 13, 49, 50])
@pytest.mark.parametrize("entropy", [False, True])
def test_products_of_tiles_one_after_another_know_what_whole_rows_know(tile, entropy):
    values, targets = logits(2)
    products = (values - 1e4 * (torch.arange(COLUMNS) == 7)).bfloat16()  # a token that is never chosen
    known = torch.full((ROWS, 4 if entropy else 3), BEFORE_ANY)
    for start in range(0, COLUMNS, tile):
        before, known = known, torch.full_like(known, torch.nan)
        product_statistics(products[:, start : start + tile], targets - start, before, known, 0.5)
    exact = (products.double() / 2).log_softmax(-1)
    top, log_sum, picked, *found = known.unbind(1)
    assert torch.equal(top, products.float().amax(-1) / 2)
    torch.testing.assert_close(picked - top - log_sum, exact.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)
    for one in found:
        torch.testing.assert_close(one, -(exact.exp() * exact).sum(-1).float(), rtol=2e-6, atol=2e-6)
    if tile == COLUMNS:  # what comes before any tile changes no bit
        assert torch.equal(log_sum, (products.float() * 0.5 - top[:, None]).exp().sum(-1).log())


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(("chunk", "tile"), [(0, 0), (2, 3), (100, 100)])
def test_chunks_and_tiles_cover_everything_once(tokens, chunk, tile):
    head = Head(torch.zeros(11, 1), None, 1.0, chunk, tile, False, False)
    rows = [row for part in head.chunks(tokens) for row in range(tokens)[part]]
    columns = [column for part in head.tiles() for column in range(11)[part]]
    assert (rows, columns) == (list(range(tokens)), list(range(11)))


@pytest.mark.parametrize(
    ("dtype", "tile", "more", "rows"),
    [
        (torch.bfloat16, 0, {"compiled": False}, 10),
        (torch.bfloat16, 0, {"cap": 30.0}, 10),
        (torch.bfloat16, 0, {}, 30),  # 2 bytes an entry instead of 2 + 4
        (torch.float32, 0, {}, 10),
        # Each token also has 3 sums of 4 bytes and 3 products: 4 * 6 + 18 = 42 bytes become 4 * 2 + 18 = 26.
        (torch.bfloat16, 4, {}, 10 * 42 // 26),
        (torch.float32, 4, {}, 10),
    ],
)
def test_without_the_fp32_buffer_as_many_tokens_as_its_bytes_hold_are_taken_at_once(dtype, tile, more, rows):
    head = Head(torch.zeros(11, 3, dtype=dtype), None, 1.0, 10, tile, **{"compiled": True} | more)
    assert [len(range(100)[part]) for part in head.chunks(100)][:2] == [rows, rows]


def test_a_confident_token_keeps_its_small_gradient_in_half_precision():
    """1 - p is taken in fp32: p alone would be rounded to 1 in bfloat16."""
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    hidden, targets = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    head = Head(weight, None, 1.0, 0, 0, False, False)
    into = Gradients(torch.empty_like(hidden), torch.zeros_like(weight), None)
    logits = LogitTiles(head, hidden)
    found = logits.statistics(hidden, targets)
    logits.differentiate(hidden, targets, found, (torch.ones(1), None), into, True)
    other = 1 / (1 + torch.tensor(8.0).exp())
    torch.testing.assert_close(into.weight[:, 0].float(), torch.stack([other, -other]), rtol=2**-8, atol=0)
    torch.testing.assert_close(into.hidden[0].float(), other[None] * 8, rtol=2**-7, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_are_divided_by_the_temperature_in_half_precision(temperature):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, 8, generator=generator).bfloat16(), torch.randn(COLUMNS, 8, generator=generator).bfloat16()
    targets = torch.arange(ROWS)
    exact = ((hidden @ weight.t()).double() / temperature).log_softmax(-1)
    found = LogitTiles(Head(weight, None, temperature, 0, 0, False, False), hidden).statistics(hidden, targets)
    torch.testing.assert_close(found.log_probs, exact.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)


def test_over_several_tiles_too_the_targets_term_is_added_last():
    columns, tile, width = 120_000, 40_000, 8
    targets = torch.arange(16) * 7_000  # in each of the tiles
    generator = torch.Generator().manual_seed(1)
    weight = 0.05 * torch.randn(columns, width, generator=generator) + 1.0
    weight[targets] *= 100
    hidden = 1e-3 * torch.randn(16, width, generator=generator)
    p = (hidden.double() @ weight.double().t()).softmax(-1)
    exact = (torch.nn.functional.one_hot(targets, columns) - p) @ weight.double()
    tiles = LogitTiles(Head(weight, None, 1.0, 0, tile, False, False), hidden)
    into = Gradients(torch.empty_like(hidden), None, None)
    tiles.differentiate(hidden, targets, tiles.statistics(hidden, targets), (torch.ones(16), None), into, True)
    assert float((into.hidden - exact).norm() / exact.norm()) < 5e-7


class LargestNew(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operator makes a storage of its own for."""

    def __init__(self, known):
        super().__init__()
        self.elements, self._known = 0, known.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.untyped_storage()._cdata != self._known:
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_off_a_cpu_no_second_buffer_of_the_logits_is_made(entropy):
    """The statements of a GPU, on a device without bytes."""
    values = torch.empty(ROWS, 16_384, device="meta")
    with LargestNew(values) as largest:
        log_softmax_(values, torch.empty(ROWS, SCRATCH_COLUMNS, device="meta"), entropy)
    assert largest.elements <= ROWS * SCRATCH_COLUMNS


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("columns", [1, SCRATCH_COLUMNS, 2 * SCRATCH_COLUMNS + 3])
def test_exponentials_are_summed_over_all_columns(columns, compiled, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    values = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))
    torch.testing.assert_close(sum_of_exponentials(values).log(), values.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("with_scratch", [False, True])
def test_the_statements_for_a_compiler_give_softmax_log_softmax_and_entropy(compiled, with_scratch, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    values = 3 * torch.randn(ROWS, SCRATCH_COLUMNS + 9, generator=torch.Generator().manual_seed(0))
    expected = values.double().log_softmax(-1)
    for with_entropy in (True, False):
        found = values.clone()
        top, log_sum, entropy = log_softmax_(found, torch.empty(ROWS, 64) if with_scratch else None, with_entropy)
        torch.testing.assert_close(found, expected.float())
        assert torch.equal(top, values.amax(-1))
        torch.testing.assert_close(top + log_sum, values.double().logsumexp(-1).float())
        assert (entropy is None) == (not with_entropy)
        if entropy is not None:
            torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).float())
    found = values.clone()
    top, log_sum = softmax_(found)
    torch.testing.assert_close(found, expected.exp().float())
    assert torch.equal(top, values.amax(-1))
    torch.testing.assert_close(top + log_sum, values.double().logsumexp(-1).float())


@pytest.mark.parametrize("num_rows", [3, PRODUCT_ROWS, 2 * PRODUCT_ROWS + 5])
def test_a_product_is_added_to_a_sum_of_more_digits_row_by_row_once(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    matrix = torch.randn(4, num_rows, generator=generator).bfloat16()
    hidden, start = torch.randn(4, 2, generator=generator).bfloat16(), torch.randn(num_rows, 2, generator=generator)
    found = start.clone()
    add_product_(found, matrix, hidden)
    torch.testing.assert_close(found, start + (matrix.t() @ hidden).float(), rtol=1e-2, atol=2e-2)


BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


def test_a_function_of_two_rows_and_more_is_compiled_for_detached_tensors():
    asked = []

    def compiler(function, tensors, others, uncompiled):
        asked.append((function, tensors, others))
        return uncompiled()

    def scaled(values, shift, factor):
        return values * factor if shift is None else values * factor + shift

    with fused.recorded_calls(compiler):
        for num_rows in (0, 1, 2, 3):
            values = torch.full((num_rows, 2), 3.0, requires_grad=True)
            result = _compiled(scaled, values, None, 2.0)
            assert torch.equal(result, torch.full((num_rows, 2), 6.0))
            assert result.requires_grad  # uncompiled it gets what was handed in
        assert _compiled(lambda values, factor: factor, None, 4.0) == 4.0
        assert _compiled(lambda factor: factor, 5.0) == 5.0
    assert [(function, others) for function, _, others in asked] == [(scaled, (2.0,))] * 2
    assert [[None if one is None else (len(one), one.requires_grad) for one in tensors] for _, tensors, _ in asked] == [
        [(2, False), None], [(3, False), None],
    ]  # fmt: skip


@pytest.fixture
def compiled_by(monkeypatch):
    """Gives a function that makes all compilation of a test take the named backend."""

    def use(backend):
        if backend == "inductor" and shutil.which("g++") is None:
            pytest.skip("no C++ compiler")
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        monkeypatch.setattr(fused, "_compiled", functools.cache(fused._compiled.__wrapped__))

    return use


@BACKENDS
def test_compiled_functions_give_the_numbers_of_uncompiled_ones_and_are_compiled_once_for_all_rows(backend, compiled_by):
    compiled_by(backend)
    before = counters["stats"]["unique_graphs"]
    for rows in (ROWS, 4, 1, 5):
        values = logits(3)[0][:rows]
        for with_entropy in (False, True):
            expected, found = values.clone(), values.clone()
            for one, two in zip(
                _compiled(log_softmax_, found, None, with_entropy), log_softmax_(expected, None, with_entropy), strict=True
            ):
                assert one is two is None or torch.allclose(one, two, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
        grads = torch.linspace(-1, 2, rows), torch.linspace(0.5, -1, rows)
        entropy = -(expected.exp() * expected).sum(-1)
        _compiled(both_gradients_, found, entropy, *grads, None)
        both_gradients_(expected, entropy, *grads, None)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
        probabilities, same = values.clone(), values.clone()
        for one, two in zip(_compiled(softmax_, probabilities), softmax_(same), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(probabilities, same, rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == before + 4


@BACKENDS
@pytest.mark.parametrize(("tile", "entropy"), [(0, False), (40, True)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_one_buffer_of_products_gives_the_numbers_of_a_buffer_of_fp32_logits_in_fewer_chunks(
    dtype, bound, entropy, tile, backend, compiled_by
):
    compiled_by(backend)
    draw = torch.Generator().manual_seed(7)
    targets, above = torch.randint(COLUMNS, (ROWS,), generator=draw), torch.randn(2, ROWS, generator=draw)

    def found(one_buffer, in_forward):
        weight, hidden, bias = (
            torch.randn(*shape, generator=torch.Generator().manual_seed(8)).to(dtype).requires_grad_()
            for shape in ((COLUMNS, 12), (ROWS, 12), (COLUMNS,))
        )
        head = Head(weight, bias, 0.7, 2, tile, entropy, one_buffer)
        given = (lambda rows, *_: (above[0, rows], above[1, rows] if entropy else None)) if in_forward else None
        log_probs, entropies = head_log_probs(head, hidden, targets, given)
        ((log_probs * above[0]).sum() + ((entropies * above[1]).sum() if entropy else 0)).backward()
        numbers = [log_probs.detach(), *([entropies.detach()] if entropy else ()), hidden.grad, weight.grad, bias.grad]
        return numbers, len(head.chunks(ROWS))

    for in_forward in (False, True):
        (expected, chunks), (numbers, fewer) = found(False, in_forward), found(True, in_forward)
        for one, two in zip(numbers, expected, strict=True):
            assert (one - two).norm() <= bound * two.norm()
        assert fewer < chunks if dtype == torch.bfloat16 else fewer == chunks


@pytest.mark.filterwarnings("error")
def test_scratch_has_the_columns_of_its_part():
    """torch warns when it must resize an output."""
    values, _ = logits()
    entropy = log_softmax_(values, scratch(7), True)[2]
    both_gradients_(values, entropy, torch.ones(ROWS), torch.ones(ROWS), scratch(7))


@pytest.mark.parametrize("largest_first", [False, True])
def test_tiles_of_very_different_size_lose_no_digit(largest_first):
    values, targets = logits(4)
    shift = torch.where((torch.arange(COLUMNS) < COLUMNS // 2) == torch.tensor(largest_first), 1e4, 0.0)
    weight, hidden = (values + shift).t().contiguous(), torch.eye(ROWS)
    targets = shift.argmax() + targets % (COLUMNS // 2)
    found = LogitTiles(Head(weight, None, 1.0, 0, COLUMNS // 2, False, False), hidden).statistics(hidden, targets)
    exact = weight.t().double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs, exact.float(), rtol=1e-6, atol=2e-6)


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU: it says that it lies there, and its numbers lie here."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize("columns", [None, 7])
def test_the_statements_of_a_gpu_turn_logits_into_probabilities_or_log_probs(columns):
    values, targets = logits(7)
    exact, picked = values.double().log_softmax(-1), target_logits(values, targets)
    found, softened = values.clone().as_subclass(OnGpu), values.as_subclass(OnGpu)
    *normalizer, entropy = log_softmax_(found, scratch(columns), True)
    for top, log_sum in (normalizer, softmax_(softened)):
        log_probs = (picked - top - log_sum).as_subclass(torch.Tensor)
        torch.testing.assert_close(log_probs, exact.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), exact.float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(softened.as_subclass(torch.Tensor), exact.exp().float(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(entropy.as_subclass(torch.Tensor), -(exact.exp() * exact).sum(-1).float(), rtol=2e-6, atol=2e-6)


def test_on_a_cpu_probabilities_are_those_of_torchs_own_kernel_bit_for_bit():
    values = torch.randn(64, 1000, generator=torch.Generator().manual_seed(8))
    found, log_p = values.clone(), values.clone()
    softmax_(found)
    log_softmax_(log_p, None, False)
    assert torch.equal(found, values.softmax(-1))
    assert torch.equal(log_p, values.log_softmax(-1))


@pytest.mark.parametrize("into_hidden", [False, True])
def test_with_one_tile_the_gradient_of_the_hidden_states_is_written_where_it_goes(into_hidden):
    rows = 2 * ROWS_AT_ONCE  # more than are copied at a time
    hidden, targets = torch.randn(rows, 64), torch.zeros(rows, dtype=torch.int64)
    head = Head(torch.randn(3, 64), None, 1.0, 0, 0, False, False)
    into = Gradients(torch.empty_like(hidden) if into_hidden else None, torch.zeros(3, 64), None)
    tiles = LogitTiles(head, hidden)
    found = tiles.statistics(hidden, targets)
    with LargestNew(into.hidden if into_hidden else into.weight) as largest:
        tiles.differentiate(hidden, targets, found, (torch.ones(rows), None), into, True)
    assert largest.elements < hidden.numel()


@pytest.mark.parametrize("scratch_columns", [None, 3, 7, 20])
def test_the_sum_of_squares_is_over_all_columns_and_leaves_the_log_probs(scratch_columns):
    log_p = torch.randn(5, 17, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    before, scratch = log_p.clone(), None if scratch_columns is None else torch.full((5, scratch_columns), 3.0)
    total = sum_of_squares(log_p, scratch)
    torch.testing.assert_close(total, before.double().exp().square().sum(1).float(), rtol=1e-6, atol=0)
    assert torch.equal(log_p, before)


# The product with the head, with the target's term last.

WIDTH = 8
TARGETS = torch.tensor([-3, -1, 0, 4, 9, 10, 25])
"""Some of them outside of ten columns."""


def gradient_of(targets, columns, seed=0):
    """Return a gradient of logits as of softmax: small negative terms, and at targets inside nearly 1."""
    matrix = -torch.rand(len(targets), columns, generator=torch.Generator().manual_seed(seed)) / columns
    inside = (targets >= 0) & (targets < columns)
    matrix[inside, targets[inside]] += 1.0
    return matrix


def weights(columns, seed=1):
    return torch.randn(columns, WIDTH, generator=torch.Generator().manual_seed(seed))


def distance(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_a_product_is_the_plain_one_wherever_the_targets_lie():
    matrix, weight = gradient_of(TARGETS, 10), weights(10)
    out = torch.full((len(TARGETS), WIDTH), torch.nan)
    assert hidden_gradient(matrix, weight, TARGETS, out) is out
    torch.testing.assert_close(out, matrix @ weight, atol=1e-6, rtol=1e-6)


def test_the_gradient_of_the_logits_is_the_same_afterwards():
    matrix = gradient_of(TARGETS, 10)
    before = matrix.clone()
    hidden_gradient(matrix, weights(10), TARGETS, torch.empty(len(TARGETS), WIDTH))
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_every_row_gets_its_targets_term(rows):
    targets = torch.arange(rows) % 10
    matrix, weight = gradient_of(targets, 10), weights(10)
    found = hidden_gradient(matrix, weight, targets, torch.empty(rows, WIDTH))
    torch.testing.assert_close(found, matrix @ weight, atol=1e-6, rtol=1e-6)


def test_on_a_long_vocabulary_it_is_several_times_nearer_to_the_exact_product():
    columns = 150_000
    targets = torch.arange(16) * 9_000
    # Targets whose rows are large, and others that point one way, as embeddings of a trained model do.
    matrix, weight = gradient_of(targets, columns), 0.05 * weights(columns) + 1.0
    weight[targets] *= 100
    exact = matrix.double() @ weight.double()
    found = hidden_gradient(matrix.clone(), weight, targets, torch.empty(16, WIDTH))
    assert distance(found, exact) < 5e-7
    assert distance(found, exact) < distance(matrix @ weight, exact) / 3


def test_in_half_precision_it_is_the_plain_product():
    matrix, weight = gradient_of(TARGETS, 10).bfloat16(), weights(10).bfloat16()
    out = torch.empty(len(TARGETS), WIDTH, dtype=torch.bfloat16)
    assert torch.equal(hidden_gradient(matrix, weight, TARGETS, out), matrix @ weight)


def test_targets_outside_are_clamped_and_told_apart():
    logits = torch.empty(len(TARGETS), 10)
    assert is_inside(TARGETS, logits).tolist() == [False, False, True, True, True, False, False]
    assert clamped(TARGETS, logits)[:, 0].tolist() == [0, 0, 0, 4, 9, 9, 9]
