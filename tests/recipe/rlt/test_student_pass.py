"""The student's scoring pass against whole logits of one sample at a time, what must change nothing in it, and its peak."""

import dataclasses
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from tests.recipe.rlt import naive
from tests.recipe.rlt.tokens import ids
from tests.worker.test_build_policy import built
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.data.encoder import tokenize
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.token_packing import RowTokens
from verl_memopt.model.tiny import TinyShape, build_tokenizer, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.formula import rlt_scores
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import (
    compute_student_log_probs,
    join_log_probs,
    student_batch,
    student_micro_batches,
    teacher_batch,
)
from verl_memopt.recipes.rlt.student_rows import (
    EMPTY_THINK,
    NO_END_TAG,
    NUM_PARTS,
    OK,
    SKIPPED,
    SOLUTION,
    THINK,
    THINK_TRUNCATED,
    StudentEncoder,
    StudentRows,
    reused_log_probs,
)
from verl_memopt.worker.policy import compute_log_probs
from verl_memopt.worker.roles import exact_weights_of
from verl_memopt.worker.trained_model import micro_batches_of

CPU = torch.device("cpu")
HEAT = 0.7
TOKENIZER = build_tokenizer()
STOP = {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}
SHORT = FORMATS["short"]
TAG = SHORT.explanation.end
NO_LIMIT = 10**6


@cache
def plain_lm(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_samples(count, seed=0, repeats=3):
    """Returns (question, solution, response tokens) of ``count`` samples, a few for each question."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, low=0):
        return int(torch.randint(low, high, (1,), generator=generator))

    def tokens(most, least=0):
        return torch.randint(3, len(TOKENIZER), (draw(most, least),), generator=generator).tolist()

    samples = []
    while len(samples) < count:
        question = f"{draw(90)} and {draw(9)}?" if draw(4) else "7"
        solution = ["7", "55\n\n", "\u00e9\U0001f642 is it", f"it is {draw(1000)}", " x"][draw(5)]
        for _ in range(repeats):
            pieces = [tokens(25), ids(TOKENIZER, TAG) if draw(4) else [], tokens(6) if draw(3) == 0 else []]
            pieces.append([TOKENIZER.eos_token_id] if draw(3) else [])
            samples.append((question, solution, [token for piece in pieces for token in piece]))
    return samples[:count]


def encode(samples, **settings):
    prompts = RltPrompts(TOKENIZER, SHORT)
    encoder = StudentEncoder(prompts, RltReward(**settings), STOP)
    questions, solutions, responses = zip(*samples, strict=True)
    rows = encoder.encode(questions, solutions, Ragged.from_rows(responses, torch.int64), addresses(samples))
    rendered = [prompts.teacher(question, solution) for question, solution, _ in samples]
    teacher_prompts = tokenize(TOKENIZER, [text for text, _ in rendered], [plain for _, plain in rendered])
    return rows, Ragged.from_rows(teacher_prompts, torch.int64)


def addresses(samples):
    return [f"f:{place}" for place in range(1, len(samples) + 1)]


def scored(student, rows, max_tokens=512, temperature=HEAT, shared=True):
    micro_batches = student_micro_batches(student_batch(rows, shared).row_tokens(), max_tokens)
    return compute_student_log_probs(student, rows, micro_batches, temperature, CPU, shared)


def old_log_probs(teacher, samples, teacher_prompts, temperature=HEAT):
    """Returns the log-probs of whole responses, as a step computes them before the update."""
    number = torch.arange(len(samples))
    responses = Ragged.from_rows([response for _, _, response in samples], torch.int64)
    batch = RolloutBatch(prompts=teacher_prompts, responses=responses, group=number, prompt_group=number, batch_size=[])
    bins = [list(range(start, min(start + 16, len(samples)))) for start in range(0, len(samples), 16)]
    flat = compute_log_probs(teacher, batch, bins, temperature, False, CPU).log_probs
    return Ragged(flat=flat, lengths=responses.lengths, batch_size=[])


@pytest.fixture
def student(tiny_folder, one_rank):
    return built(tiny_folder, one_rank)


@pytest.fixture
def teacher(untied_folder, one_rank):
    return built(untied_folder, one_rank)


def close(one, other, atol=1e-5):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def test_log_probs_are_the_naive_ones(student, teacher, tiny_folder, untied_folder):
    samples = random_samples(60)
    rows, teacher_prompts = encode(samples)
    log_probs = scored(student, rows)
    v = reused_log_probs(old_log_probs(teacher, samples, teacher_prompts), rows.parts[:, THINK])
    naive_samples = [naive.sample_of(TOKENIZER, SHORT, *sample, STOP) for sample in samples]
    lms = plain_lm(tiny_folder), plain_lm(untied_folder)
    references = [naive.spans(*lms, sample, HEAT, HEAT) for sample in naive_samples]
    for found, expected in zip((log_probs.solution, log_probs.think, v), zip(*references, strict=True), strict=True):
        close(found, torch.tensor([value for row in expected for value in row]))
    assert rows.matched.tolist() == [sample.matched for sample in naive_samples]
    assert {OK, NO_END_TAG, EMPTY_THINK} == set(rows.status.tolist())


def test_reused_log_probs_are_those_of_a_pass_of_the_teacher_over_explanations(teacher):
    samples = random_samples(12, seed=1)
    rows, teacher_prompts = encode(samples)
    own = compute_log_probs(teacher, teacher_batch(teacher_prompts, rows), [range(12)], HEAT, False, CPU).log_probs
    close(reused_log_probs(old_log_probs(teacher, samples, teacher_prompts), rows.parts[:, THINK]), own, atol=2e-6)


def test_the_order_of_rows_the_cap_and_the_chunk_do_not_show(student):
    samples = random_samples(24, seed=2)
    rows, _ = encode(samples)
    longest = max(student_batch(rows).row_tokens().row_lengths())
    expected = scored(student, rows, NO_LIMIT, shared=False)
    for cap in (64, 256, longest, NO_LIMIT):
        for shared in (True, False):
            log_probs = scored(student, rows, cap, shared=shared)
            close(log_probs.think, expected.think)
            close(log_probs.solution, expected.solution)
    for chunk in (1, 7, 512):
        student.head.chunk_tokens = chunk
        close(scored(student, rows).solution, expected.solution)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    permuted = scored(student, encode([samples[place] for place in order])[0])
    for values, whole, part in ((permuted.think, expected.think, THINK), (permuted.solution, expected.solution, SOLUTION)):
        by_row = whole.split(rows.parts[:, part].tolist())
        close(values, torch.cat([by_row[place] for place in order]))


def test_a_prompt_computed_ahead_of_several_micro_batches_does_not_show(student):
    rows = rows_of(80, 20, 10, count=8)
    expected = scored(student, rows, NO_LIMIT, shared=False)
    student.supports_prefix_kv = True
    batch = student_batch(rows)
    bins = student_micro_batches(batch.row_tokens(), 150)
    prompts_ahead = [micro.prompt is not None for micro in micro_batches_of(batch, bins, True)]
    assert prompts_ahead == [True] * len(bins) == [True] * 4
    log_probs = scored(student, rows, 150)
    close(log_probs.think, expected.think)
    close(log_probs.solution, expected.solution)


def test_shares_of_rows_join_to_the_whole(student):
    rows, _ = encode(random_samples(9, seed=7))
    expected, parts = scored(student, rows), []
    for share in ([8, 0, 3], [1], [], [7, 2, 6, 5, 4]):
        parts.append((share, scored(student, rows.select(share))))
    joined = join_log_probs(parts, rows)
    close(joined.think, expected.think)
    close(joined.solution, expected.solution)


@pytest.mark.parametrize("align", ["concat", "retokenize"])
def test_the_forced_prefix_gets_log_probs_of_both_models(student, teacher, tiny_folder, untied_folder, align):
    samples = [("q", "s", ids(TOKENIZER, "why", TAG)), ("q", "s", ids(TOKENIZER, TAG))]
    rows, _ = encode(samples, include_forced_prefix=True, align=align)
    prompts = [RltPrompts(TOKENIZER, SHORT).teacher("q", "s")[0].removesuffix("\n\n") for _ in samples]
    teacher_prompts = Ragged.from_rows(tokenize(TOKENIZER, prompts), torch.int64)
    u = scored(student, rows).think
    v = compute_log_probs(teacher, teacher_batch(teacher_prompts, rows), [[0, 1]], HEAT, False, CPU).log_probs
    for place, thought in enumerate(rows.part(THINK).rows()):
        assert TOKENIZER.decode(thought) == ["\n\nwhy", "\n\n"][place]
        prefix = rows.part(0).rows()[place].tolist()
        think = slice(sum(rows.parts[:place, THINK].tolist()), sum(rows.parts[: place + 1, THINK].tolist()))
        expected = naive.log_probs(plain_lm(tiny_folder), prefix + thought.tolist(), HEAT)[len(prefix) - 1 :]
        close(u[think], torch.tensor(expected))
        prompt = teacher_prompts.rows()[place].tolist()
        expected = naive.log_probs(plain_lm(untied_folder), prompt + thought.tolist(), HEAT)[len(prompt) - 1 :]
        close(v[think], torch.tensor(expected))


def test_cut_and_skipped_rows_leave_the_others_as_they_are(student):
    samples = [
        ("q", "1", ids(TOKENIZER, "12345678", TAG)),
        ("q", "1" * 60, ids(TOKENIZER, "1", TAG)),
        ("q", "1", ids(TOKENIZER, TAG)),
    ]
    whole, _ = encode(samples)
    limit = int(whole.ids.lengths[0]) - 3
    rows, _ = encode(samples, max_student_len=limit)
    assert rows.status.tolist() == [THINK_TRUNCATED, SKIPPED, EMPTY_THINK]
    log_probs, of_whole = scored(student, rows), scored(student, whole)
    assert (log_probs.think.shape, log_probs.solution.shape) == ((5,), (2,))
    close(log_probs.think, of_whole.think[:5])
    close(log_probs.solution[1], of_whole.solution[-1])
    scores = rlt_scores(RltReward(), rows, log_probs.think, log_probs.think, log_probs.solution, addresses(samples))
    assert torch.isfinite(scores.reward).all()
    assert scores.reward[1] == 0


def test_no_rows_and_skipped_rows_alone_have_nothing_to_score(student):
    rows, _ = encode([("q", "1" * 60, []), ("r", "1" * 60, [])], max_student_len=40)
    for some_rows in (rows, dataclasses.replace(rows, ids=Ragged.from_rows([], torch.int64), parts=rows.parts[:0])):
        log_probs = scored(student, some_rows)
        assert (log_probs.think.tolist(), log_probs.solution.tolist()) == ([], [])


def rows_of(prefix, think, solution, count):
    """Returns rows of random tokens with a common prompt."""
    lengths = [prefix, think, 4, solution, 2]
    generator = torch.Generator().manual_seed(0)
    opening = torch.randint(3, 300, (prefix,), generator=generator)
    tokens = [torch.cat([opening, torch.randint(3, 300, (sum(lengths[1:]),), generator=generator)]) for _ in range(count)]
    return StudentRows(
        ids=Ragged.from_rows(tokens, torch.int64),
        parts=torch.tensor([lengths] * count, dtype=torch.int64).reshape(-1, NUM_PARTS),
        status=torch.zeros(count, dtype=torch.int8),
        matched=torch.ones(count, dtype=torch.bool),
        has_text_after=torch.zeros(count, dtype=torch.bool),
    )


def test_the_cap_is_hard_a_longer_row_goes_alone_and_rows_of_one_question_compute_its_prompt_once():
    tokens = RowTokens.alone([6, 6, 6, 4, 4, 4, 25, 11])
    bins = student_micro_batches(tokens, 10)
    assert bins[-2:] == [[6], [7]]
    assert sorted(row for rows in bins for row in rows) == list(range(8))
    assert all(tokens.cost(rows) <= 10 for rows in bins[:-2])
    assert len(bins) == 5
    assert student_micro_batches(RowTokens.alone([25]), 10) == [[0]]
    assert student_micro_batches(RowTokens.alone([]), 10) == [[]]
    tokens = student_batch(rows_of(100, 10, 6, count=5)).row_tokens()
    assert tokens.cost(range(5)) == 100 + 5 * (10 + 4 + 6 - 1)
    assert student_batch(rows_of(100, 10, 6, count=5), share_prefixes=False).row_tokens().cost(range(5)) == 5 * (100 + 19)
    assert len(student_micro_batches(tokens, 200)) == 1


def peak_of(student, rows, max_tokens):
    """Returns the peak of live bytes of a scoring pass above the weights, and of its logits alone."""
    with ByteTracker() as tracker:
        tracker.mark("params", student.parameters())
        tracker.enter("score")
        held = tracker.total()
        scored(student, rows, max_tokens)
        return tracker.peaks[DEVICE].bytes - held, tracker.most()["logits"]


@pytest.fixture
def wide_student(tmp_path, one_rank):
    """A student with a vocabulary beside which its states are small."""
    student = built(make_tiny_model(tmp_path / "wide", TinyShape(vocab_size=16_384)), one_rank)
    student.head.chunk_tokens = 64
    return student


def test_the_peak_grows_neither_with_the_solution_nor_with_the_number_of_rows(wide_student):
    peaks = {}
    for think, solution, count in ((240, 8, 4), (128, 120, 4), (8, 240, 4), (128, 120, 12)):
        peaks[think, solution, count], logits = peak_of(wide_student, rows_of(20, think, solution, count), 512)
        assert logits == pytest.approx(64 * 16_384 * 4, rel=0.01)
    assert max(peaks.values()) < 1.1 * min(peaks.values()), peaks


def test_a_row_over_the_cap_adds_the_states_of_its_tokens_and_no_logits(wide_student):
    (short, logits), (long, logits_of_long) = (peak_of(wide_student, rows_of(20, 100, each, 2), 300) for each in (150, 1200))
    assert logits_of_long == pytest.approx(logits, rel=0.01)
    whole_logits = (1200 - 150) * 16_384 * 4
    assert long - short < whole_logits / 10


CUTS = (4, 6)


def on_rank(rank, folder, samples):
    """Returns this rank's log-probs for each cut: the rows of its share, in as many micro-batches as the busiest rank has."""
    student, found = built(folder, training_mesh("cpu", 2, -1)), []
    for cut in CUTS:
        share = (samples[:cut], samples[cut:])[rank]
        rows, _ = encode(share) if share else (rows_of(1, 1, 1, 0), None)
        micro_batches = student_micro_batches(student_batch(rows).row_tokens(), 128)
        micro_batches += [[]] * (8 - len(micro_batches))
        log_probs = compute_student_log_probs(student, rows, micro_batches, HEAT, CPU)
        found.append((log_probs.think.tolist(), log_probs.solution.tolist()))
    return found


def test_two_ranks_give_the_log_probs_of_one_with_unequal_shares(student, tiny_folder):
    samples = random_samples(6, seed=6)
    expected = scored(student, encode(samples)[0])
    for one, other in zip(*run_ranks(on_rank, 2, tiny_folder, samples), strict=True):
        close(torch.tensor(one[0] + other[0]), expected.think)
        close(torch.tensor(one[1] + other[1]), expected.solution)


# A quantised student.


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_student_knows_what_its_unquantised_weights_would_say(tiny_folder, one_rank, kind):
    quantised, exact = (built(tiny_folder, one_rank, quantization=each) for each in (kind, "none"))
    rows, _ = encode(random_samples(12, seed=4))
    bins = student_micro_batches(student_batch(rows).row_tokens(), 256)
    expected = scored(exact, rows)
    before = scored(quantised, rows)
    with exact_weights_of(quantised, tiny_folder, CPU):
        log_probs = compute_student_log_probs(quantised, rows, bins, HEAT, CPU)
    close(log_probs.solution, expected.solution)
    close(log_probs.think, expected.think)
    assert (before.solution - expected.solution).abs().max() > 1e-4
    close(scored(quantised, rows).solution, before.solution, atol=0)
