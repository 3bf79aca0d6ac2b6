import logging

import pytest
import torch

from tests.recipe.rlt.test_student_pass import CPU, HEAT, encode, random_samples, scored
from tests.worker.test_build_policy import built
from verl_memopt.recipes.rlt import rank_check
from verl_memopt.recipes.rlt.formula import rlt_scores
from verl_memopt.recipes.rlt.rank_check import RankCheck, rank_correlation
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import compute_exact_log_probs, student_batch, student_micro_batches
from verl_memopt.recipes.rlt.student_rows import THINK

KEY = "reward_model.model.quantization"
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
        return compute_exact_log_probs(self.student, self.folder, rows, bins, HEAT, CPU)

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
    monkeypatch.setattr(rank_check, "MOST_GROUPS", 2)
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
