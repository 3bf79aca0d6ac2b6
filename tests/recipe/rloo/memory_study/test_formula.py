import pytest

from recipe.rloo.memory_study import formula

VOCAB = 151_669


@pytest.mark.parametrize(
    ("rows", "prompt", "mib"),
    [(2, 3015, 13_488), (4, 3015, 26_335), (8, 3015, 52_030), (2, 1024, 5_425), (4, 1024, 10_208), (8, 1024, 19_776)],
)
def test_the_formula_gives_the_figures_of_the_reference(rows, prompt, mib):
    assert round(formula.predicted_bytes(rows, prompt, 100, VOCAB) / formula.MIB) == mib


@pytest.mark.parametrize("run", [run for run in formula.PUBLISHED_RUNS if run.peak_mib], ids=str)
def test_the_formula_is_within_a_hundredth_of_every_completed_run(run):
    predicted = formula.predicted_bytes(run.k, run.prompt, 100, VOCAB) / formula.MIB
    assert abs(predicted / run.peak_mib - 1) < 0.01
