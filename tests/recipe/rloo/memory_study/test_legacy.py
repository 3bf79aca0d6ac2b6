import itertools

import pytest
import torch

from recipe.rloo.memory_study import formula
from recipe.rloo.memory_study.fake_guard import call_in_fake_process
from recipe.rloo.memory_study.legacy import sequence_loss, token_log_probs
from recipe.rloo.memory_study.shapes import PUBLISHED, make_model

QUICK = [(2, "full", 2, 1), (2, "truncated", 2, 1)]
CASES = [*QUICK, *(pytest.param((k, prompt, k, 1), marks=pytest.mark.slow) for k in (4, 8) for prompt in ("full", "truncated"))]
"""Group size, prompt handling, rows of a forward, and rounds of generation. The larger groups are proofs."""
LAZY = (2, "full", 2, 2)
"""Two rounds of generation, as the published lazy and sampler branches have them."""
DECOUPLED = (4, "full", 2, 1)
VOCAB, RESPONSE = PUBLISHED.model.vocab_size, PUBLISHED.response
PROMPTS = {"full": 3015, "truncated": 1024}


class Runs:
    """The published update at the published shapes on a fake GPU. The quick cases run together, and so do the others."""

    def __init__(self, folder):
        self.folder, self.done = make_model(folder, PUBLISHED, 0), {}

    def __getitem__(self, case):
        if case not in self.done:
            quick = [*QUICK, LAZY]
            cases = quick if case in quick else [*(param.values[0] for param in CASES[len(QUICK) :]), DECOUPLED]
            self.done |= call_in_fake_process("tests.recipe.rloo.memory_study.fake_cases:legacy_runs", cases, self.folder)
        return self.done[case]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("legacy"))


def process_bytes(run):
    """Return the peak of the process: the published idle level, which holds the models, and what the step adds to the models."""
    return formula.IDLE_BYTES + max(phase.reserved_peak for phase in run.phases) - models(run)


def models(run):
    return run.phases[0].enter


def logits(case):
    _, prompt, rows, _ = case
    return rows * (PROMPTS[prompt] + RESPONSE) * VOCAB


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_within_two_hundredths_of_the_formula(runs, case):
    predicted = formula.predicted_bytes(case[0], PROMPTS[case[1]], RESPONSE, VOCAB)
    assert abs(process_bytes(runs[case]) / predicted - 1) < 0.02


@pytest.mark.parametrize(
    "published",
    [pytest.param(run, marks=[pytest.mark.slow] * (run.k > 2)) for run in formula.PUBLISHED_RUNS if run.peak_mib],
    ids=str,
)
def test_the_peak_is_within_a_hundredth_of_the_published_run(runs, published):
    run = runs[published.k, published.prompt_handling, published.k, 1]
    assert abs(process_bytes(run) / formula.MIB / published.peak_mib - 1) < 0.01


@pytest.mark.parametrize(("k", "share"), [(2, 55.2), pytest.param(4, 58.8, marks=pytest.mark.slow)])
def test_truncation_takes_the_published_share_of_the_whole_device(runs, k, share):
    before, after = (process_bytes(runs[k, prompt, k, 1]) for prompt in ("full", "truncated"))
    assert abs(100 * formula.reduction(before, after) - share) < 0.6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_in_the_backward(runs, case):
    assert max(runs[case].phases, key=lambda phase: phase.reserved_peak).name == "backward"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_published_plateau_is_a_level_of_the_run(runs, case):
    phases = runs[case].phases
    between = next(phase for phase in phases if (phase.update, phase.name) == (0, "optimizer")).timeline[-1][2]
    reserved = [held for phase in phases for _, _, held in phase.timeline]
    levels = formula.nearest_levels(formula.bytes_per_logit(reserved, between, logits(case)))
    assert all(abs(level / plateau - 1) < 0.03 for plateau, level in levels.items()), levels


@pytest.mark.parametrize("k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (4, 8))])
def test_a_token_more_costs_three_live_fp32_logits_and_two_cached_bytes_beside_them(runs, k):
    full, cut = (k, "full", k, 1), (k, "truncated", k, 1)
    first, second = (
        next(phase for phase in runs[case].phases if (phase.update, phase.name) == (1, "backward")) for case in (full, cut)
    )
    more = logits(full) - logits(cut)
    # Beyond 12 and 14 are the activations, of which a token has the bytes of some thousand logits.
    assert 12 <= (first.peak - second.peak) / more < 12.25
    assert 14 <= (first.reserved_peak - second.reserved_peak) / more < 14.3


def test_emptying_the_cache_gives_the_three_fp32_blocks_back_one_by_one(runs):
    case = (2, "full", 2, 1)
    phases = runs[case].phases
    end = next(phase for phase in phases if (phase.update, phase.name) == (0, "optimizer"))
    levels = formula.bytes_per_logit([held for _, _, held in end.timeline], end.timeline[-1][2], logits(case))
    steps = [before - after for before, after in itertools.pairwise(levels) if before - after > 3]
    assert [round(step, 1) for step in steps] == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_epoch_after_the_first_holds_the_same_bytes(runs, case):
    phases = {(phase.update, phase.name): phase for phase in runs[case].phases}
    for name in ("forward", "backward", "optimizer"):
        assert (phases[1, name].peak, phases[1, name].exit) == (phases[2, name].peak, phases[2, name].exit)


def test_rounds_of_generation_keep_one_more_tensor_of_scores(runs):
    more = process_bytes(runs[LAZY]) - process_bytes(runs[2, "full", 2, 1])
    scores = 4 * 2 * RESPONSE * VOCAB
    assert abs(more / scores - 1) < 0.05
    assert 0.005 < more / formula.device_bytes(process_bytes(runs[2, "full", 2, 1])) < 0.01


@pytest.mark.slow
def test_with_fewer_rows_in_a_forward_the_reference_forward_is_the_peak(runs):
    phases = {(phase.update, phase.name): phase for phase in runs[DECOUPLED].phases}
    assert phases[0, "reference"].reserved_peak > 4 * 2 * logits(DECOUPLED)  # it scores all four rows at once
    assert phases[1, "backward"].reserved_peak < process_bytes(runs[4, "full", 4, 1])


def test_a_log_prob_is_the_logit_minus_the_log_sum_exp():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1, 2], [6, 5, 4]])
    expected = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(token_log_probs(logits, ids), expected, atol=1e-6, rtol=0)


def test_the_ratio_is_clipped_where_it_would_help():
    log_ratio, advantages = torch.tensor([1.0, 1.0, -1.0, 0.1]), torch.tensor([2.0, -2.0, -2.0, 2.0])
    expected = [-2 * 1.2, 2 * torch.tensor(1.0).exp(), 2 * 0.8, -2 * torch.tensor(0.1).exp()]
    torch.testing.assert_close(sequence_loss(log_ratio, advantages, 0.2), torch.tensor(expected))
