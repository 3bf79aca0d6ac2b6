import functools
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from tests.memory.recomputed import relative
from verl_memopt.memory import fused
from verl_memopt.memory.chunked_logprob_torch import head_log_probs
from verl_memopt.memory.fused import recorded_calls
from verl_memopt.memory.logit_tiles import Head
from verl_memopt.memory.teaching import Divergence, MixedTeaching, Teaching, TopTeaching, top_log_probs
from verl_memopt.observe.byte_tracker import ByteTracker

KINDS = ["reverse_kl", "forward_kl", "jsd"]


@dataclass(frozen=True)
class Case:
    """Student and teacher. The teacher is wider, and may have another number of entries."""

    kind: str = "reverse_kl"
    beta: float = 0.3
    temperature: float = 1.0
    cap: float | None = None
    entries: tuple[int, int] = (37, 37)
    widths: tuple[int, int] = (5, 9)
    spread: float = 1.0
    top: int = 0
    bias: bool = True
    entropy: bool = False
    chunk: int = 4
    tile: int = 0
    precomputed: bool = True
    dtype: torch.dtype = torch.float32
    tokens: int = 10
    compiled: bool = False

    def tensors(self):
        """Give the student's hidden states, head and bias, the teacher's three, and targets."""
        draw = torch.Generator().manual_seed(3)

        def made(*shape, scale=1.0):
            return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

        found = []
        for entries, width in zip(self.entries, self.widths, strict=True):
            found += [made(self.tokens, width), made(entries, width, scale=self.spread * width**-0.5), made(entries, scale=0.3)]
        student, teacher = [tensor.to(self.dtype) for tensor in found[:3]], [tensor.to(self.dtype) for tensor in found[3:]]
        targets = torch.randint(min(self.entries), (self.tokens,), generator=draw)
        return student, teacher, targets

    def factors(self):
        at = torch.linspace(-1, 2, self.tokens)
        return [at, at.flip(0) * 0.5 if self.entropy else None, 1.5 - at]


def log_probs_of(case, hidden, weight, bias, columns=None):
    logits = torch.nn.functional.linear(hidden, weight, bias if case.bias else None)
    if case.cap is not None:
        logits = case.cap * (logits / case.cap).tanh()
    return (logits / case.temperature)[:, :columns].log_softmax(-1)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def exact(case):
    """Give outputs and gradients by full logits in fp64."""
    student, teacher, targets = case.tensors()
    student, teacher = [tensor.double().requires_grad_() for tensor in student], [tensor.double() for tensor in teacher]
    shared = min(case.entries)
    log_p, a, b = log_probs_of(case, *student), log_probs_of(case, *student, shared), log_probs_of(case, *teacher, shared)
    if case.top:
        ids = b.topk(case.top).indices
        outside = torch.ones_like(b, dtype=torch.bool).scatter(-1, ids, False)
        a, b = (
            torch.cat([each.gather(-1, ids), each.masked_fill(~outside, -torch.inf).logsumexp(-1, keepdim=True)], 1)
            for each in (a, b)
        )
    if case.kind == "jsd":
        log_m = (case.beta * b.exp() + (1 - case.beta) * a.exp()).log()
        divergence = case.beta * kl(b, log_m) + (1 - case.beta) * kl(a, log_m)
    else:
        divergence = kl(a, b) if case.kind == "reverse_kl" else kl(b, a)
    outputs = [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), divergence]
    return numbers(case, outputs, student)


def numbers(case, outputs, tensors):
    """Give values and gradients of a weighted sum of outputs."""
    used = [(output, factor) for output, factor in zip(outputs, case.factors(), strict=True) if factor is not None]
    sum((output * factor).sum() for output, factor in used).backward()
    return [output.detach() for output, _ in used], [tensor.grad for tensor in tensors if tensor.grad is not None]


def teaching_of(case, teacher):
    head = Head(teacher[1], teacher[2] if case.bias else None, case.temperature, 0, 0, cap=case.cap)
    if not case.top:
        return Teaching(Divergence(case.kind, case.beta), head, teacher[0])
    log_q = log_probs_of(case, *(tensor.double() for tensor in teacher), min(case.entries))
    values, ids = log_q.topk(case.top)
    rest = log_q.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return TopTeaching(case.kind, ids.int(), values.float(), rest.float(), min(case.entries))


def ours(case):
    student, teacher, targets = case.tensors()
    for tensor in student:
        tensor.requires_grad_()
    hidden, weight, bias = student
    factors = case.factors()

    def gradient_of(rows, log_probs, entropy):
        return factors[0][rows], None if entropy is None else factors[1][rows], factors[2][rows]

    sizes = case.temperature, case.chunk, case.tile, case.entropy, case.compiled
    head = Head(weight, bias if case.bias else None, *sizes, cap=case.cap)
    given = gradient_of if case.precomputed else None
    found = head_log_probs(head, hidden, targets, given, False, teaching=teaching_of(case, teacher))
    assert [tensor.grad for tensor in teacher] == [None] * 3
    with torch.no_grad():
        again = head_log_probs(head, hidden, targets, teaching=teaching_of(case, teacher))
    # Whether there are gradients changes no bit.
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, again, strict=True))
    return numbers(case, found, student)


CASES = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    beta=st.sampled_from([0.1, 0.5, 0.9]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    cap=st.sampled_from([None, 1.5, 30.0]),
    entries=st.sampled_from([(37, 37), (30, 37), (37, 30), (37, 29)]),
    spread=st.sampled_from([1.0, 4.0]),
    top=st.sampled_from([0, 0, 1, 5]),
    bias=st.booleans(),
    entropy=st.booleans(),
    chunk=st.sampled_from([0, 1, 4, 100]),
    tile=st.sampled_from([0, 1, 7, 36]),
    precomputed=st.booleans(),
    compiled=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(CASES)
def test_values_and_gradients_equal_those_of_whole_logits(case):
    case = replace(case, top=0) if case.kind == "jsd" else case
    with recorded_calls(lambda function, tensors, others, _: function(*tensors, *others)):
        (values, gradients), (found, own) = exact(case), ours(case)
    for one, other in zip(found, values, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-6, atol=4e-6)
    for one, other in zip(own, gradients, strict=True):
        assert relative(one.double(), other) < 2e-6


@settings(deadline=None, max_examples=30)
@given(CASES, st.lists(st.integers(0, 2), min_size=10, max_size=10), st.booleans())
def test_tokens_of_several_teachers_learn_what_each_teacher_says(case, number, chosen):
    case = replace(case, top=0, compiled=False) if case.kind == "jsd" else replace(case, compiled=False)
    (hidden, weight, bias), first, targets = case.tensors()
    others = [first, [first[0].flip(1), first[1] * 0.5, first[2]], [first[0][:, :4], first[1][:, :4], -first[2]]]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(4)) if chosen else torch.arange(10)
    places = [order[torch.tensor(number)[order] == teacher] for teacher in range(3)]
    used = [(teaching_of(case, teacher), own) for teacher, own in zip(others, places, strict=True) if len(own)]

    def learned(rows, teaching):
        head = Head(weight, bias if case.bias else None, case.temperature, case.chunk, case.tile, case.entropy, cap=case.cap)
        factors = [None if factor is None else factor[rows] for factor in case.factors()]
        given = (lambda part, *_: [None if each is None else each[part] for each in factors]) if case.precomputed else None
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden[rows], weight, bias)]
        head = replace(head, weight=inputs[1], bias=inputs[2] if case.bias else None)
        found = head_log_probs(head, inputs[0], targets[rows], given, False, teaching=teaching)
        sum((each * factor).sum() for each, factor in zip(found, factors, strict=True) if factor is not None).backward()
        return found[2].detach(), [tensor.grad for tensor in inputs if tensor.grad is not None]

    counts = {teacher: place for place, teacher in enumerate(sorted(set(number)))}
    numbers_of = torch.tensor([counts[teacher] for teacher in number])
    mixed = MixedTeaching([teaching.at(own.sort().values) for teaching, own in used], numbers_of).at(order)
    divergences, gradients = learned(order, mixed)
    alone = [learned(own, teaching.at(own)) for teaching, own in used]
    # Both are computed in fp32, each within 2e-6 of the truth.
    hidden_alone = torch.zeros_like(gradients[0])
    for (values, own), (_, rows) in zip(alone, used, strict=True):
        at = torch.isin(order, rows)
        torch.testing.assert_close(divergences[at], values, rtol=4e-6, atol=4e-6)
        hidden_alone[at] = own[0]
    assert relative(gradients[0], hidden_alone) < 4e-6
    for place in range(1, len(gradients)):
        assert relative(gradients[place], sum(own[place] for _, own in alone)) < 4e-6


def test_in_half_precision_values_and_gradients_are_those_of_whole_logits_within_its_rounding():
    for kind in KINDS:
        for tile in (0, 7):
            for top in (0, 5) if kind != "jsd" else (0,):
                case = Case(kind, dtype=torch.bfloat16, tile=tile, top=top, spread=2.0, tokens=24, bias=False)
                (values, gradients), (found, own) = exact(case), ours(case)
                for one, other in zip([*found, *own], [*values, *gradients], strict=True):
                    assert relative(one.double(), other) < 1e-2, (kind, tile, top)


@pytest.mark.parametrize("tile", [0, 7])
@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_differences_of_a_hundred_stay_finite_and_near_those_of_fp64(kind, top, tile):
    case = Case(kind, spread=60.0, temperature=0.5, tile=tile, top=0 if kind == "jsd" else top)
    (values, gradients), (found, own) = exact(case), ours(case)
    for one, other in zip([*found, *own], [*values, *gradients], strict=True):
        assert relative(one.double(), other) < 3e-5


SAME = [Case(kind, tile=tile, precomputed=ahead, widths=(9, 9), dtype=dtype)
        for kind in KINDS for tile in (0, 7) for ahead in (False, True) for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("entries", [(37, 37), (37, 30), (30, 37)])
def test_a_student_that_is_its_own_teacher_diverges_by_nothing_and_learns_nothing(entries):
    for case in SAME:
        if case.kind != "forward_kl" and entries[0] > entries[1]:
            continue  # its normalizer over the shared entries is a sum of its own, rounded otherwise
        case = replace(case, entries=entries)
        _, teacher, targets = case.tensors()
        weight = teacher[1] if entries[0] <= entries[1] else torch.cat([teacher[1], teacher[1][:7]])
        hidden, weight = teacher[0].clone().requires_grad_(), weight[: entries[0]].clone().requires_grad_()
        # The teacher may have more entries, and then all of the student's are shared.
        told = (lambda rows, *_: (torch.zeros(10)[rows], None, torch.ones(10)[rows])) if case.precomputed else None
        taught = replace(case, bias=False)
        found = head_log_probs(
            Head(weight, None, 1.0, 4, case.tile), hidden, targets % 30, told, teaching=teaching_of(taught, teacher)
        )
        found[2].sum().backward()
        exactly = entries[0] <= entries[1]
        bound = 0.0 if exactly else 1e-6
        assert float(found[2].detach().abs().max()) <= bound, case
        assert max(float(hidden.grad.abs().max()), float(weight.grad.abs().max())) <= bound, case


@pytest.mark.parametrize("tile", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_logits_sums_to_zero(kind, tile):
    # The gradient of the bias is the sum of that of the logits over the tokens.
    for token in range(3):
        case = Case(kind, tile=tile, tokens=1, spread=4.0 + token, entries=(37, 30))
        _, (_, _, gradient) = ours(case)
        assert abs(float(gradient.sum())) < 2e-6 * float(gradient.norm())


def test_a_constant_added_to_the_bias_of_the_teacher_changes_nothing():
    for kind in KINDS:
        case = Case(kind, tile=7)
        student, teacher, targets = case.tensors()
        head = Head(student[1], student[2], 1.0, 4, 7)
        with torch.no_grad():
            one, other = (
                head_log_probs(head, student[0], targets, teaching=teaching_of(case, [*teacher[:2], teacher[2] + more]))[2]
                for more in (0.0, 5.0)
            )
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def divergence(case, swap=False):
    student, teacher, targets = case.tensors()
    if swap:
        student, teacher = teacher, student
    with torch.no_grad():
        head = Head(student[1], student[2], case.temperature, case.chunk, case.tile)
        return head_log_probs(head, student[0], targets, teaching=teaching_of(case, teacher))[2]


@pytest.mark.parametrize("tile", [0, 7])
def test_a_jsd_is_that_of_exchanged_models_and_shares_and_near_a_bound_a_share_of_a_kl(tile):
    case = Case("jsd", beta=0.2, tile=tile)
    torch.testing.assert_close(divergence(case), divergence(replace(case, beta=0.8), swap=True), rtol=2e-6, atol=1e-7)
    for beta, kind in ((1e-4, "forward_kl"), (1 - 1e-4, "reverse_kl")):
        share = min(beta, 1 - beta)
        found, expected = divergence(replace(case, beta=beta)) / share, divergence(Case(kind, tile=tile))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_jsd_at_its_bounds_is_refused(beta):
    with pytest.raises(AssertionError, match="the bounds 0 and 1"):
        Divergence("jsd", beta)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_all_entries_but_one_and_the_rest_are_the_whole_divergence(kind):
    for tile in (0, 7):
        whole, top = Case(kind, tile=tile), Case(kind, tile=tile, top=36)
        (values, gradients), (found, own) = ours(whole), ours(top)
        for one, other in zip([*found, *own], [*values, *gradients], strict=True):
            torch.testing.assert_close(one, other, rtol=5e-6, atol=5e-6)
    with pytest.raises(AssertionError, match="37 of 37 entries leave no rest"):
        ours(Case(kind, top=37))


@pytest.mark.parametrize("tile", [0, 3])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mass_outside_of_a_few_entries_of_1e_30_loses_no_digits(kind, tile, sign):
    """Of the student, and of the teacher."""
    logits = torch.tensor([[0.0, 1.0, -69.0, -70.0, -71.0, -69.5], [0.5, 0.1, -1.0, -1.5, -0.5, -0.2]], dtype=torch.float64)
    student, teacher = logits if sign > 0 else logits.flip(0)
    case = Case(kind, entries=(6, 6), tokens=1)
    exact_student = student[None].clone().requires_grad_()
    a, b = (each.log_softmax(-1) for each in (exact_student, teacher[None]))
    a, b = (torch.cat([each[:, :2], each[:, 2:].logsumexp(-1, keepdim=True)], 1) for each in (a, b))
    expected = kl(a, b) if kind == "reverse_kl" else kl(b, a)
    expected.sum().backward()
    teaching = TopTeaching(kind, torch.tensor([[0, 1]]), b[:, :2].float(), b[:, 2].float())
    weight, hidden = student.float()[:, None].clone().requires_grad_(), torch.ones(1, 1)
    found = head_log_probs(Head(weight, None, 1.0, 4, tile), hidden, torch.zeros(1, dtype=torch.int64), teaching=teaching)[2]
    found.sum().backward()
    assert case.tokens == len(found)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-7)
    torch.testing.assert_close(weight.grad[:, 0].double(), exact_student.grad[0], rtol=1e-5, atol=1e-7)


def test_the_mean_of_the_sampled_estimate_is_the_gradient_of_the_exact_reverse_kl():
    """Each token in turn, with its probability: a policy gradient whose advantage is log q - log p of the token."""
    case = Case(tokens=1)
    student, teacher, _ = case.tensors()
    a, b = (log_probs_of(case, *(each.double() for each in model))[0] for model in (student, teacher))
    hidden, weight, bias = (tensor.requires_grad_() for tensor in student)
    head, all_tokens = Head(weight, bias, 1.0, 4, 0), torch.arange(37)
    log_probs, _ = head_log_probs(head, hidden.expand(37, -1), all_tokens)
    expected = torch.autograd.grad(-(log_probs * (a.exp() * (b - a)).float()).sum(), [hidden, weight, bias])
    value = head_log_probs(head, hidden, all_tokens[:1], teaching=teaching_of(case, teacher))[2]
    torch.testing.assert_close(value.double(), (a.exp() * (a - b)).sum()[None], rtol=2e-6, atol=0)
    for one, other in zip(torch.autograd.grad(value.sum(), [hidden, weight, bias]), expected, strict=True):
        assert relative(one, other) < 2e-6


def test_a_gradient_other_than_the_precomputed_one_is_refused():
    case = Case()
    student, teacher, targets = case.tensors()
    weight = student[1].requires_grad_()
    told = lambda rows, *_: (torch.zeros(10)[rows], None, torch.ones(10)[rows])  # noqa: E731
    found = head_log_probs(Head(weight, None, 1.0, 4, 0), student[0], targets, told, teaching=teaching_of(case, teacher))
    with pytest.raises(RuntimeError, match=r"is not the precomputed one"):
        (found[2] * 1.001).sum().backward()


@pytest.mark.parametrize("tile", [0, 7, 20])
@pytest.mark.parametrize("vocabulary", [None, 30])
def test_the_most_probable_entries_are_those_of_whole_logits(tile, vocabulary):
    case = Case(spread=3.0, temperature=0.7, cap=4.0)
    _, (states, weight, bias), _ = case.tensors()
    head = Head(weight, bias, 0.7, 4, tile, cap=4.0)
    exact_log_q = log_probs_of(case, states.double(), weight.double(), bias.double(), vocabulary)
    ids, log_probs, log_rest = top_log_probs(head, states, 5, vocabulary)
    values, expected = exact_log_q.topk(5)
    assert torch.equal(ids, expected.int())
    torch.testing.assert_close(log_probs.double(), values, rtol=2e-6, atol=2e-6)
    rest = exact_log_q.scatter(-1, expected, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(log_rest.double(), rest, rtol=2e-6, atol=2e-6)
    with pytest.raises(ValueError, match=r"^top=40: choose at least 1 and fewer than the (37|30) entries"):
        top_log_probs(head, states, 40, vocabulary)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_statements_give_the_numbers_of_uncompiled_ones(kind, backend, monkeypatch):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(fused, "_compiled", functools.cache(fused._compiled.__wrapped__))
    case = Case(kind, entries=(37, 30), spread=4.0, entropy=True, chunk=100)
    before = counters["stats"]["unique_graphs"]
    (values, gradients), (found, own) = ours(case), ours(replace(case, compiled=True))
    assert counters["stats"]["unique_graphs"] > before
    for one, other in zip([*found, *own], [*values, *gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=4e-6, atol=4e-6)


LARGE, NARROW = 8192, 4


def bytes_of(kind, chunk, tokens, tile, dtype=torch.bfloat16, top=0, with_teacher=True):
    """Give the peak of logits and of everything beyond the inputs, in an update with gradients in the forward."""
    draw = torch.Generator().manual_seed(0)
    weight, other = (torch.randn(LARGE, NARROW, generator=draw).to(dtype) for _ in range(2))
    hidden, states = (torch.randn(tokens, NARROW, generator=draw).to(dtype) for _ in range(2))
    targets, ones = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    teaching = Teaching(Divergence(kind), Head(other, None, 1.0, 0, 0), states)
    if top:
        teaching = TopTeaching(kind, *top_log_probs(teaching.head, states, top))
    hidden.requires_grad_()
    weight.requires_grad_().grad = torch.zeros_like(weight)
    held = [weight, weight.grad, other, hidden, states, targets, ones]
    with ByteTracker() as tracker:
        tracker.mark("params", held + ([teaching.ids, teaching.log_probs, teaching.log_rest] if top else []))
        told = (lambda rows, *_: (ones[rows], None, ones[rows])) if with_teacher else lambda rows, *_: (ones[rows], None)
        more = {"teaching": teaching} if with_teacher else {}
        found = head_log_probs(Head(weight, None, 1.0, chunk, tile), hidden, targets, told, True, **more)
        sum(value.sum() for value in found if value is not None).backward()
        return tracker.peaks["device"].kinds["logits"], tracker.peaks["device"].bytes


@pytest.mark.parametrize(("dtype", "tile"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 4096)])
@pytest.mark.parametrize(("kind", "top"), [("reverse_kl", 0), ("forward_kl", 0), ("jsd", 0), ("reverse_kl", 8)])
def test_logits_of_student_and_teacher_take_the_bytes_of_the_students_alone(kind, top, tile, dtype):
    plain, taught = (bytes_of(kind, 48, 48, tile, dtype, top, with_teacher)[0] for with_teacher in (False, True))
    assert 0.85 * plain <= taught <= 1.01 * plain


@pytest.mark.parametrize("tile", [0, 4096])
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_bytes_grow_with_the_chunk_and_not_with_the_tokens_times_the_vocabulary(kind, tile):
    (one, few), (two, _) = (bytes_of(kind, chunk, 24, tile) for chunk in (20, 40))
    assert two == pytest.approx(2 * one, rel=0.1)
    many = bytes_of(kind, 20, 96, tile)[1]
    # Hidden states and their gradient, the target, and two dozen fp32 numbers.
    assert many - few <= (96 - 24) * (NARROW * 2 * 4 + 8 + 4 * 24)
