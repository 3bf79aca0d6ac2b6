import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe.rlt.test_student_pass import CPU, HEAT, encode, random_samples, scored
from tests.worker.test_build_policy import built
from verl_memopt.memory.quantized_frozen_torch import FORMATS
from verl_memopt.recipes.rlt import scorer
from verl_memopt.recipes.rlt.formula import rlt_scores
from verl_memopt.recipes.rlt.scorer import ACCEPTED, RankCheck, rank_correlation, spearman
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import compute_student_log_probs, student_batch, student_micro_batches
from verl_memopt.recipes.rlt.student_rows import THINK
from verl_memopt.worker.roles import exact_weights_of

KEY = "reward_model.model.quantization"


def naive_spearman(one, other):
    """Pearson's correlation of mean ranks, with the ranks from sorting."""

    def ranks(values):
        ordered = sorted(values)
        places = {value: [i for i, each in enumerate(ordered) if each == value] for value in values}
        return [sum(places[value]) / len(places[value]) for value in values]

    a, b = ranks(one), ranks(other)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


def test_orders_by_hand():
    rising = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(rising, torch.tensor([-5.0, 0.0, 0.1, 99.0])) == pytest.approx(1.0)
    assert spearman(rising, -rising) == pytest.approx(-1.0)
    # One pair of neighbours swapped: 1 - 6 x 2 / (4 x 15).
    assert spearman(rising, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert math.isnan(spearman(rising, torch.ones(4)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_ties_share_their_mean_rank(pairs):
    one, other = ([float(pair[place]) for pair in pairs] for place in (0, 1))
    result = spearman(torch.tensor(one), torch.tensor(other))
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(naive_spearman(one, other), abs=1e-9)


def test_groups_count_alike_and_what_has_no_order_is_left_out():
    exact = torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0, 101.0])
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 101.0, 100.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 0, 1, 1])
    assert (agreement.mean, agreement.lowest, agreement.num_groups) == (0.0, -1.0, 2)
    exact = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 7.0])
    rewards = torch.tensor([0.0, math.nan, 2.0, 1.0, 2.0, 3.0])
    agreement = rank_correlation(rewards, exact, [0, 0, 0, 1, 1, 2])
    assert (agreement.mean, agreement.num_groups) == (1.0, 1)
    nothing = rank_correlation(rewards, exact, list(range(6)))
    assert nothing.num_groups == 0
    assert nothing.warning("nf4", KEY) is None


def test_a_low_agreement_is_warned_of_with_the_way_out():
    rewards = torch.tensor([1.0, 3.0, 2.0, 4.0])
    agreement = rank_correlation(rewards, torch.tensor([1.0, 2.0, 3.0, 4.0]), [0] * 4)
    text = agreement.warning("nf4", KEY)
    assert text.startswith(f"{KEY}=nf4: ")
    assert "0.800 only (mean over 1 groups; 0.95 is expected)" in text
    assert text.endswith(f"Set {KEY}=int8 or none.")
    assert agreement.warning("int8", KEY).endswith(f"Set {KEY}=none.")
    assert rank_correlation(rewards, rewards, [0] * 4).warning("int8", KEY) is None


def test_each_quantisation_has_its_bound():
    assert ACCEPTED.keys() == FORMATS.keys()


SETTINGS = RltReward()


class Pass:
    """A scored batch: its rows, its scores, and the unquantised weights as a function."""

    def __init__(self, folder, mesh, kind, repeats=4):
        samples = random_samples(24, seed=7, repeats=repeats)
        self.student, self.folder = built(folder, mesh, quantization=kind), folder
        self.rows, _ = encode(samples)
        self.addresses = [f"train.jsonl:{place // repeats}" for place in range(24)]
        tokens = int(self.rows.parts[:, THINK].sum())
        self.teacher = torch.randn(tokens, generator=torch.Generator().manual_seed(1)) - 5.0
        self.scores = self.scored(scored(self.student, self.rows))
        self.exact_rows = []

    def scored(self, log_probs):
        return rlt_scores(SETTINGS, self.rows, log_probs.think, self.teacher, log_probs.solution, self.addresses)

    def exact(self, rows):
        self.exact_rows.append(rows.num_rows)
        bins = student_micro_batches(student_batch(rows).row_tokens(), 512)
        with exact_weights_of(self.student, self.folder, CPU):
            return compute_student_log_probs(self.student, rows, bins, HEAT, CPU)

    def check(self, kind):
        check = RankCheck(SETTINGS, kind, KEY)
        return check, check.check(self.rows, self.scores, self.teacher, self.addresses, self.exact)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_correlation_is_that_of_two_whole_scorings(tiny_folder, one_rank, kind):
    scored_batch = Pass(tiny_folder, one_rank, kind)
    _, metrics = scored_batch.check(kind)
    whole = scored_batch.scored(scored(built(tiny_folder, one_rank), scored_batch.rows))
    group = [place // 4 for place in range(24)]
    expected = rank_correlation(scored_batch.scores.training_rewards(), whole.training_rewards(), group)
    assert expected.num_groups == 6
    assert metrics == {"rank_correlation": pytest.approx(expected.mean, abs=1e-9)}


def test_the_check_is_made_once_and_on_some_groups_alone(tiny_folder, one_rank, monkeypatch):
    monkeypatch.setattr(scorer, "MOST_GROUPS", 2)
    scored_batch = Pass(tiny_folder, one_rank, "nf4")
    check, _ = scored_batch.check("nf4")
    assert scored_batch.exact_rows == [8]
    arguments = scored_batch.rows, scored_batch.scores, scored_batch.teacher, scored_batch.addresses, scored_batch.exact
    assert check.check(*arguments) == {}
    assert scored_batch.exact_rows == [8]


def test_a_batch_without_groups_is_left_to_the_next(tiny_folder, one_rank):
    scored_batch = Pass(tiny_folder, one_rank, "nf4", repeats=1)
    check, metrics = scored_batch.check("nf4")
    assert metrics == {}
    assert not check.done
    assert scored_batch.exact_rows == []


@pytest.mark.parametrize(("spoilt", "warns"), [(False, False), (True, True)])
def test_a_student_that_orders_otherwise_is_warned_of(tiny_folder, one_rank, caplog, spoilt, warns):
    scored_batch = Pass(tiny_folder, one_rank, "int8")
    if spoilt:
        with torch.no_grad():  # codes that say nothing, under scales that are right
            for name, parameter in scored_batch.student.named_parameters():
                if name.endswith("qweight"):
                    codes = parameter[:, :64]
                    parameter[:, :64] = codes[:, torch.randperm(64, generator=torch.Generator().manual_seed(2))]
        scored_batch.scores = scored_batch.scored(scored(scored_batch.student, scored_batch.rows))
    with caplog.at_level(logging.INFO):
        _, metrics = scored_batch.check("int8")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warnings) == warns
    assert (metrics["rank_correlation"] < 0.98) == warns
    if warns:
        assert warnings[0].startswith(f"{KEY}=int8: the student orders")
