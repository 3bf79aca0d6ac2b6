import math

import pytest

from tests import rlt
from tests.trainer.conftest import AR, ready
from verl_memopt.data.dataset import PromptRow
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.build import build_run, build_validator, scorer_of
from verl_memopt.trainer.rollouts import Generator
from verl_memopt.worker.worker import Worker

SAMPLED = {f"{AR}.rollout.val_kwargs.{key}": value for key, value in {"n": 3, "do_sample": True, "temperature": 1.0}.items()}


@pytest.fixture(scope="module")
def runner(base_context):
    with RewardRunner(base_context.settings.custom_reward_function, 1) as runner:
        yield runner


@pytest.fixture
def validated(settled, base_workers, runner):
    """Return the validation at a step, under some settings, of the module's worker."""

    def validate(more=None, step=3):
        context = build_run(settled(more))
        environment, rollout = context.environment, context.settings.actor_rollout_ref.rollout
        generator = Generator(rollout, environment.tokenizer, base_workers, environment.free_engine)
        return build_validator(context, generator, scorer_of(context, base_workers, runner)).validate(step)

    return validate


def rows_of(found):
    return [row.text for answers, _ in found.answers for row in answers.rows]


def responses(found):
    return [ids for answers, _ in found.answers for ids in answers.generation.response_ids]


def scores(found):
    return [result.score for _, results in found.answers for result in results]


def test_held_out_prompts_are_answered_once_or_in_groups_and_scored(validated):
    validation = validated()
    assert rows_of(validation) == ["0+1=", "1+2=", "2+3="]
    assert len(responses(validation)) == 3
    assert all(0 < len(ids) <= 4 for ids in responses(validation))
    assert validation.metrics == {"val-core/toy/arithmetic/reward/mean@1": pytest.approx(sum(scores(validation)) / 3)}
    validation = validated(SAMPLED)
    assert rows_of(validation) == ["0+1="] * 3 + ["1+2="] * 3 + ["2+3="] * 3
    best = [max(scores(validation)[start : start + 3]) for start in (0, 3, 6)]
    assert validation.metrics["val-core/toy/arithmetic/reward/best@3/mean"] == pytest.approx(sum(best) / 3)
    assert len({tuple(ids) for ids in responses(validation)}) > 3


@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_batch_size_changes_the_calls_and_no_answer(validated, more, size):
    whole, cut = validated(more), validated(more | {"data.val_batch_size": size})
    assert [len(answers.rows) for answers, _ in cut.answers] == [
        n * (3 if more else 1) for n in ([1, 1, 1] if size == 1 else [2, 1])
    ]
    assert responses(cut) == responses(whole)
    assert cut.metrics == whole.metrics


def test_validation_has_a_sampling_of_its_own(validated):
    assert responses(validated()) == responses(validated(step=4))  # greedy
    assert responses(validated(SAMPLED)) == responses(validated(SAMPLED))
    assert responses(validated(SAMPLED)) != responses(validated(SAMPLED, step=4))


ENDLESS = """
from verl_memopt.data.dataset import PromptRow

class Rows:
    def __init__(self, files, data, tokenizer, split):
        pass
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return PromptRow(index, f"{index}=", "toy/arithmetic", "1", {}, f"made:{index}")
"""


def test_a_dataset_that_only_has_a_length_and_an_index_is_read_by_both(validated, tmp_path):
    (tmp_path / "rows.py").write_text(ENDLESS)
    validation = validated({"data.custom_cls.path": str(tmp_path / "rows.py"), "data.custom_cls.name": "Rows"})
    assert rows_of(validation) == [f"{index}=" for index in range(6)]
    assert all(isinstance(row, PromptRow) for answers, _ in validation.answers for row in answers.rows)


@pytest.fixture(scope="module")
def rlt_toy(tmp_path_factory):
    return rlt.brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


def student_validation(toy, run_dir, more=None):
    """Returns a validation of a run of RLT, its phases, and the same validation once more."""
    with ready(rlt.settings_of(toy, run_dir, more)) as trainer:
        workers = trainer.workers
        workers.all("update_weights", Worker.update_weights)
        workers.clock.take()
        first = trainer.validator.validate(1)
        phases = [span.name for span in workers.clock.take()]
        return first, phases, trainer.validator.validate(1)


def test_a_student_scores_held_out_answers_after_all_of_them_are_written(rlt_toy, tmp_path):
    whole, phases, again = student_validation(rlt_toy, tmp_path / "whole")
    assert phases == ["testing", "old_log_prob", "reward"]
    more = {"data.val_batch_size": 4, f"{AR}.rollout.free_cache_engine": True}
    cut, phases, after = student_validation(rlt_toy, tmp_path / "cut", more)
    assert phases == ["testing"] * 3 + ["gen", "old_log_prob", "reward", "update_weights"]
    assert [len(answers.rows) for answers, _ in cut.answers] == [4, 4, 1]
    assert cut.metrics == pytest.approx(whole.metrics, abs=1e-5)
    assert again.metrics == whole.metrics
    assert after.metrics == cut.metrics
    known = [score for score in scores(whole) if not math.isnan(score)]
    mean = sum(known) / len(known)
    assert whole.metrics["val-core/rlt/reward/mean@1"] == pytest.approx(mean)
    parts = ("r_ss", "r_kl", "match")
    r_ss, r_kl, match = (whole.metrics[f"val-aux/rlt/{name}/mean@1"] for name in parts)
    assert r_ss - r_kl + match == pytest.approx(mean, abs=1e-4)


def test_a_row_that_is_not_scored_counts_in_no_mean_of_a_validation(rlt_toy, tmp_path):
    more = {f"{rlt.RLT}.max_student_len": 3, f"{rlt.RLT}.overlong": "skip"}
    validation, _, _ = student_validation(rlt_toy, tmp_path / "run", more)
    assert validation.metrics == {}
    assert len(validation.answers[0][1]) == 9
