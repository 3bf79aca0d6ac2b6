"""Learning does not hang on a lucky seed."""

import pytest

from tests.end_to_end.runs import assert_nine_of_ten_seeds_learn, succeeded, train


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nine_of_ten_seeds_learn_in_a_shortened_run(tmp_path):
    assert_nine_of_ten_seeds_learn(tmp_path, lambda toy, run_dir, *overrides: succeeded(train(toy, run_dir, *overrides)))
