"""Learning does not hang on a lucky seed."""

import json

import pytest

from tests.end_to_end.runs import succeeded, train
from verl_memopt.data.toy import make_toy


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nine_of_ten_seeds_learn_in_a_shortened_run(tmp_path):
    """Another seed is another set of held-out sums, other first weights, another data order and other samples."""
    found = {}
    for seed in range(10):
        toy = make_toy(tmp_path / f"toy{seed}", seed=seed)
        run_dir = tmp_path / f"run{seed}"
        succeeded(train(toy, run_dir, f"data.seed={seed}", "trainer.total_training_steps=15", "trainer.test_freq=15"))
        summary = json.loads((run_dir / "summary.json").read_text())
        found[seed] = (summary["validation_before"], summary["validation_after"])
    print(found)  # noqa: T201 - the figures are the point of this proof
    assert all(before <= 0.5 for before, _ in found.values()), found
    assert sum(after >= 0.9 for _, after in found.values()) >= 9, found
