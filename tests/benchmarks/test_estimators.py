from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.estimators.__main__ import PEERS, cases_of_ours_alone, compare, main, peer_side, report
from benchmarks.estimators.batch import SIZES, make_batch
from benchmarks.estimators.ours import ALONE, CASES

RECORD = Path(__file__).parents[2] / "docs" / "evidence" / "2026-11-23-estimators"


def test_rows_are_padded_and_flattened_without_loss():
    batch = make_batch(1)
    padded = batch.pad(batch.values)
    assert padded.shape == (len(SIZES), max(SIZES))
    assert torch.equal(batch.flat(padded), batch.values)
    assert padded.count_nonzero() == sum(SIZES)
    assert torch.equal(batch.pad(batch.token_rewards).sum(1), batch.scores)


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_finite_numbers(name):
    values = CASES[name](make_batch(0, name.endswith(ALONE)))
    assert values
    for value in values.values():
        assert not isinstance(value, torch.Tensor) or value.isfinite().all()


def moved(case):
    """Gives a case whose first value is a little off."""

    def values(batch):
        found = case(batch)
        name = next(iter(found))
        return found | {name: found[name] + 1e-4}

    return values


def test_a_peer_that_agrees_is_in_its_bound_and_one_that_does_not_is_named():
    some = {name: CASES[name] for name in ("advantages gae", "loss gspo", "correction presets")}
    rows, text = report({"twin": SimpleNamespace(VERSION="1", VALUES=some)}, seeds=2)
    assert [row.difference for row in rows] == [0.0] * 3
    assert "3 comparisons: 0 with a reason to differ, 0 others beyond" in text
    other = SimpleNamespace(VERSION="2", VALUES={"loss gspo": moved(CASES["loss gspo"])})
    rows, text = report({"other": other}, seeds=1)
    assert rows[0].difference == pytest.approx(1e-4)
    assert (rows[0].where, rows[0].holds) == ("loss", False)
    assert "NOT THE SAME" in text
    assert len(cases_of_ours_alone({"other": other})) == len(CASES) - 1


def test_a_value_that_one_side_lacks_or_shapes_otherwise_is_no_agreement():
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    assert compare("f", "p", "1", one, two).difference == float("inf")
    assert compare("f", "p", "1", one, {"a": torch.ones(3)}).difference == float("inf")
    assert compare("f", "p", "1", {"a": {"x": 1}}, {"a": {"x": 2}}).difference == float("inf")
    assert compare("f", "p", "1", {"a": {"x": 1}}, {"a": {"x": 1}}).difference == 0


def test_without_a_peer_the_command_says_what_to_run(capsys):
    if any(peer_side(name) for name in PEERS):
        pytest.skip("a peer is installed here")
    assert main([]) == 2
    assert "setup.sh" in capsys.readouterr().err
