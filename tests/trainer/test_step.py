import dataclasses
import math
from contextlib import contextmanager
from itertools import chain

import pytest
import torch

from tests.trainer.conftest import AR, Member, crew_of, write_rows
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.errors import ConfigError, RolloutError, TrainingError
from verl_memopt.memory.shared_prompt import RowTokens
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.assemble import prepare, reward_processes, workers
from verl_memopt.trainer.experience import Answers, to_batch
from verl_memopt.trainer.step import Stepper, budgets, leaves_out_old_pass, same_distribution


@contextmanager
def stepper_of(job, crew, runner=None):
    made = Stepper(job, crew, runner)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def running(settings):
    """A stepper with workers and reward processes of its own, as a run has."""
    job = prepare(settings)
    with reward_processes(job) as runner, workers(job, PhaseClock()) as crew, stepper_of(job, crew, runner) as stepper:
        crew.all("update_weights", "update_weights")
        yield stepper


@pytest.fixture
def alike(settled, base_job, base_crew):
    """Gives a stepper on the module's worker with some of the driver's settings changed."""
    open_steppers = []

    def build(more=None, crew=base_crew):
        stepper = Stepper(dataclasses.replace(base_job, settings=settled(more)), crew, None)
        open_steppers.append(stepper)
        return stepper

    yield build
    for stepper in open_steppers:
        stepper.close()


def batch_of(lengths, samples=2):
    responses = [[3 + row] * length for row, length in enumerate(lengths)]
    prompts = [[40 + row] * 3 for row in range(len(lengths))]
    batch = to_batch(Answers([], prompts, Generation(responses, None, []), []), samples)
    batch.old_log_probs = torch.full((sum(lengths),), -5.0)
    batch.advantages = torch.ones(sum(lengths))
    return batch


# Budgets.


def test_scoring_passes_follow_the_actors_budget(settled):
    update, old, reference = budgets(settled())
    assert (update.by_tokens, update.max_tokens, update.rows) == (True, 40, None)
    assert (old.by_tokens, old.max_tokens, old.rows) == (True, 40, None)
    assert (reference.by_tokens, reference.max_tokens, reference.rows) == (True, 40, None)


def test_each_pass_may_have_a_budget_of_its_own(settled):
    more = {
        f"{AR}.rollout.log_prob_max_token_len_per_gpu": 50,
        f"{AR}.ref.log_prob_use_dynamic_bsz": False,
        f"{AR}.ref.log_prob_micro_batch_size_per_gpu": 3,
    }
    update, old, reference = budgets(settled(more))
    assert (update.max_tokens, old.max_tokens) == (40, 50)
    assert (reference.by_tokens, reference.rows) == (False, 3)


@pytest.mark.parametrize(
    ("which", "key"),
    [
        (0, f"{AR}.actor.ppo_max_token_len_per_gpu"),
        (1, f"{AR}.rollout.log_prob_max_token_len_per_gpu"),
        (2, f"{AR}.ref.log_prob_max_token_len_per_gpu"),
    ],
)
def test_a_row_over_a_budget_is_told_under_the_key_of_its_pass(settled, which, key):
    with pytest.raises(ConfigError, match=f"{key}=40: rows:7 has 41 tokens"):
        budgets(settled())[which].micro_batches(RowTokens.alone([41]), ["rows:7"])


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({}, True),
        ({f"{AR}.actor.old_log_prob_pass": "always"}, False),
        ({f"{AR}.actor.ppo_epochs": 2}, False),
        ({f"{AR}.actor.ppo_mini_batch_size": 1}, False),
        ({"algorithm.use_kl_in_reward": True}, False),
        ({f"{AR}.actor.calculate_entropy": True}, False),
        ({f"{AR}.actor.use_kl_loss": True}, True),
    ],
)
def test_the_old_pass_is_left_out_where_one_update_follows_a_rollout_and_nothing_else_reads_it(settled, more, left_out):
    batch = settled().data.train_batch_size
    given = {f"{AR}.actor.old_log_prob_pass": "auto", f"{AR}.actor.ppo_mini_batch_size": batch, **more}
    assert leaves_out_old_pass(settled(given)) is left_out


# Mini-batches.


def test_a_mini_batch_knows_its_tokens_and_sequences_over_all_ranks(alike):
    stepper = alike(crew=crew_of(Member(0), Member(1)))
    minis = stepper.mini_batches(batch_of([4, 1, 0, 3, 2, 2, 4, 4]), [0, 1, 2, 3], "abcdefgh")
    assert [mini.counts for mini in minis] == [GlobalCounts(8.0, 4.0)] * 2
    assert [mini.batch.num_rows for mini in minis] == [2, 2]
    assert sorted(token for mini in minis for token in mini.batch.responses.flat.tolist()) == [3, 3, 3, 3, 4, 6, 6, 6]


def test_a_mini_batch_of_empty_responses_counts_one_token_so_that_nothing_is_divided_by_zero(alike):
    (mini,) = alike(crew=crew_of(Member(0))).mini_batches(batch_of([0, 0]), [0, 1], "ab")
    assert mini.counts == GlobalCounts(1.0, 2.0)


def test_the_samples_of_one_prompt_lie_on_one_rank_or_where_there_are_too_few_prompts_on_several(alike):
    batch = batch_of([4, 4, 1, 1])
    batch.advantages = torch.tensor([1.0] * 4 + [-1.0] * 4 + [0.5, -0.5])
    stepper = alike(crew=crew_of(Member(0), Member(1)))
    assert [mini.batch.group.tolist() for mini in stepper.mini_batches(batch, [0, 1], "abcd")] == [[0], [0]]
    minis = stepper.mini_batches(batch, [0, 1, 2, 3], "abcd")
    assert [mini.batch.group.tolist() for mini in minis] == [[0, 0], [1, 1]]
    assert sorted(value for mini in minis for value in mini.batch.advantages.tolist()) == sorted(batch.advantages.tolist())


class Updater(Member):
    """Takes an update and answers with figures that depend on its rank."""

    norm, partial = 2.0, ()

    def update_actor(self, minis):
        self.minis = minis
        skipped = 0.0 if math.isfinite(self.norm) else 1.0
        metrics = {"actor/loss": 1.0 + self.rank, "actor/grad_norm": self.norm, "actor/lr": 0.5, "actor/skipped_updates": skipped}
        return metrics | ({"actor/partial_updates": self.partial[self.rank]} if self.partial else {})


def updated(alike, more, ranks=1, step=1):
    """Gives the first response token of every row, per rank and mini-batch, of an update over eight rows of two samples."""
    crew = crew_of(*map(Updater, range(ranks)))
    metrics = alike({f"{AR}.actor.old_log_prob_pass": "always", **more}, crew).update(
        batch_of([1] * 8), [f"row {row}" for row in range(8)], step
    )
    return metrics, [[(mini.batch.responses.flat - 3).tolist() for mini in member.minis] for member in crew.group.members]


def test_an_update_has_one_mini_batch_per_share_of_the_prompts_in_order(alike):
    assert updated(alike, {})[1] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_the_last_mini_batch_is_not_smaller_when_the_batch_is_one(alike):
    assert updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4})[1] == [[list(range(8))]]


def test_ppo_epochs_pass_over_the_batch_again(alike):
    assert updated(alike, {f"{AR}.actor.ppo_epochs": 2})[1] == [[[0, 1, 2, 3], [4, 5, 6, 7]] * 2]


def test_shuffling_keeps_groups_whole_and_differs_by_epoch_step_and_seed(alike):
    shuffle = {f"{AR}.actor.shuffle": True, f"{AR}.actor.ppo_epochs": 12}
    ((*first,),) = updated(alike, shuffle)[1]
    for rows in first:
        assert {row // 2 for row in rows} == {rows[0] // 2, rows[2] // 2}
        assert len(rows) == 4
    epochs = [first[start : start + 2] for start in range(0, 24, 2)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(8)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1
    assert updated(alike, shuffle)[1] == [first]
    assert updated(alike, shuffle, step=2)[1] != [first]
    assert updated(alike, shuffle | {f"{AR}.actor.data_loader_seed": 1})[1] != [first]


def test_over_ranks_shares_are_summed_and_what_all_ranks_know_is_taken_once(alike):
    metrics, rows = updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2)
    assert metrics == {"actor/loss": 3.0, "actor/grad_norm": 2.0, "actor/lr": 0.5, "actor/skipped_updates": 0.0}
    assert sorted(rows[0][0] + rows[1][0]) == list(range(8))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("partial", [(), (0.0, 0.0)])
def test_an_update_that_two_ranks_skip_is_counted_once(alike, norm, partial, monkeypatch):
    monkeypatch.setattr(Updater, "norm", norm)
    monkeypatch.setattr(Updater, "partial", partial)
    metrics, _ = updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2)
    assert metrics["actor/skipped_updates"] == 1.0
    assert "actor/partial_updates" not in metrics


def test_weights_that_one_rank_has_updated_in_part_stop_the_run_with_the_way_back(alike, monkeypatch):
    monkeypatch.setattr(Updater, "norm", math.nan)
    monkeypatch.setattr(Updater, "partial", (0.0, 1.0))
    with pytest.raises(
        TrainingError, match=r"in_backward=true: in step 3 a gradient .* cannot be taken back.*trainer\.resume_mode=disable"
    ):
        updated(alike, {f"{AR}.actor.ppo_mini_batch_size": 4}, ranks=2, step=3)


# The engine's log-probs beside the trainer's.


def compared(alike, engine, trainer, more=None):
    batch = batch_of([len(engine), 0])
    batch.rollout_log_probs, batch.old_log_probs = torch.tensor(engine), torch.tensor(trainer)
    return alike(more).compare_log_probs(batch, 7)


def test_differences_are_given_in_nats_and_in_probability(alike):
    metrics = compared(
        alike, [math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.25)], {f"{AR}.rollout.max_logprob_diff": 1.0}
    )
    assert metrics == pytest.approx(
        {
            "rollout/logprob_diff_mean": math.log(2) / 2,
            "rollout/logprob_diff_max": math.log(2),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": 0.125,
            "training/rollout_probs_diff_max": 0.25,
            "training/rollout_probs_diff_std": 0.125,
        }
    )


def test_the_correlation_of_probabilities_is_pearsons(alike):
    more = {f"{AR}.rollout.max_logprob_diff": None}
    name = "training/rollout_actor_probs_pearson_corr"
    assert compared(alike, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], more)[name] == pytest.approx(1.0)
    halves = [[math.log(p) for p in probs] for probs in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert compared(alike, *halves, more)[name] == pytest.approx(-1.0)
    assert name not in compared(alike, [-1.0, -1.0], [-1.0, -2.0], more)


@pytest.mark.parametrize("engine", [[-1.0, -1.5], [math.nan, -1.0]])
def test_past_the_threshold_the_run_stops_and_names_the_key_and_the_step(alike, engine):
    more = {f"{AR}.rollout.max_logprob_diff": 0.2}
    with pytest.raises(
        RolloutError, match=rf"{AR}\.rollout\.max_logprob_diff=0\.2: in step 7 .* (0\.25|nan) nats.*rollout\.dtype"
    ):
        compared(alike, engine, [-1.0, -1.0], more)


@pytest.mark.parametrize(
    "more", [{"max_logprob_diff": None}, {"max_logprob_diff": 0.26}, {"max_logprob_diff": 0.2, "top_p": 0.9}], ids=str
)
def test_below_the_threshold_without_one_or_with_filters_the_run_goes_on(alike, more):
    found = compared(alike, [-1.0, -1.5], [-1.0, -1.0], {f"{AR}.rollout.{name}": value for name, value in more.items()})
    assert found["rollout/logprob_diff_mean"] == 0.25


@pytest.mark.parametrize("engine", [[-1.0, -1.0], [math.nan, -1.0]])
@pytest.mark.parametrize("trainer", [math.nan, -math.inf])
def test_where_the_trainers_own_log_probs_are_not_finite_the_sync_is_not_blamed(alike, engine, trainer):
    found = compared(alike, engine, [trainer, -1.0], {f"{AR}.rollout.max_logprob_diff": 0.2})
    assert not math.isfinite(found["rollout/logprob_diff_mean"])


def test_a_difference_of_the_threshold_itself_goes_on_and_any_more_stops(alike):
    key, log_probs = f"{AR}.rollout.max_logprob_diff", ([-1.0, -1.5], [-1.0, -1.0])
    assert compared(alike, *log_probs, {key: 0.25})["rollout/logprob_diff_mean"] == 0.25
    with pytest.raises(RolloutError, match="max_logprob_diff"):
        compared(alike, *log_probs, {key: math.nextafter(0.25, 0)})


def test_by_default_the_limit_is_that_of_the_dtypes(alike):
    assert compared(alike, [-1.0, -1.0005], [-1.0, -1.0])["rollout/logprob_diff_mean"] < 1e-3
    with pytest.raises(RolloutError, match=r"max_logprob_diff=auto \(0\.001 for these dtypes\): in step 7 .* 0\.002 nats"):
        compared(alike, [-1.0, -1.004], [-1.0, -1.0])


def test_nothing_is_compared_without_engine_log_probs_or_without_tokens(alike):
    assert alike().compare_log_probs(batch_of([2, 1]), 1) == {}
    assert compared(alike, [], []) == {}


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"do_sample": False}, False),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "raw_logprobs", "top_p": 0.9}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.7}, False),
    ],
    ids=str,
)
def test_engine_and_trainer_are_comparable_where_they_describe_one_distribution(settled, more, same):
    assert same_distribution(settled({f"{AR}.rollout.{name}": value for name, value in more.items()})) is same


# Whole steps.


def test_a_step_answers_scores_updates_and_syncs(settled):
    with running(settled({f"{AR}.rollout.max_logprob_diff": 1e-5, f"{AR}.actor.calculate_entropy": True})) as stepper:
        results = [stepper.run(step) for step in (1, 2)]  # the second fails past the threshold if the sync is stale
        phases = [span.name for span in stepper.crew.clock.take()]
    first = results[0]
    assert len(first.results) == len(first.answers.rows) == 8
    assert [row.index for row in first.answers.rows[::2]] == [row.index for row in first.answers.rows[1::2]]
    assert first.response_tokens == sum(map(len, first.answers.generation.response_ids)) > 0
    assert first.total_tokens == first.response_tokens + sum(map(len, first.answers.prompt_ids))
    scores = [result.score for result in first.results]
    assert first.metrics["critic/score/mean"] == pytest.approx(sum(scores) / 8)
    assert len(set(scores)) > 1
    assert first.metrics["actor/grad_norm"] > 0
    assert first.metrics["actor/lr"] == pytest.approx(1e-3)
    assert 0 < first.metrics["actor/entropy"] <= math.log(320)
    assert first.metrics["actor/skipped_updates"] == first.metrics["training/log_probs_not_finite"] == 0
    assert phases[2:] == ["gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights"] * 2
    assert {"data/tokens_dropped", "actor/kl_loss", "actor/reward_kl_penalty"}.isdisjoint(first.metrics)


def test_a_step_is_the_same_when_it_is_run_again(settled):
    found = []
    for _ in range(2):
        with running(settled()) as stepper:
            found.append([stepper.run(step).metrics for step in (1, 2)])
    assert found[0] == found[1]


def test_the_kl_in_the_reward_and_in_the_loss_start_at_zero_and_grow(settled):
    more = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "mse",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.5,
        "algorithm.kl_ctrl.horizon": 100,
        f"{AR}.actor.use_kl_loss": True,
        f"{AR}.actor.kl_loss_coef": 0.25,
        f"{AR}.ref.fsdp_config.dtype": "fp32",
    }
    with running(settled(more)) as stepper:
        first, second = (stepper.run(step).metrics for step in (1, 2))
        after = stepper.kl_control.coefficient
    assert first["actor/reward_kl_penalty"] == 0 < second["actor/reward_kl_penalty"]
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 8 / 100))  # far below the target of 0.1
    assert after < second["actor/reward_kl_penalty_coeff"]
    assert first["actor/kl_coef"] == 0.25
    assert second["actor/kl_loss"] > 0
    assert second["critic/rewards/mean"] < second["critic/score/mean"]


def test_what_truncation_took_is_counted_step_by_step(settled):
    with running(settled({"data.truncation": "left", "data.max_prompt_length": 3})) as stepper:
        found = [stepper.run(step).metrics for step in (1, 2)]
        lengths = [len(stepper.job.site.tokenizer(row.text)["input_ids"]) for row in stepper.job.validation]
    assert min(lengths) == max(lengths) == 4  # every prompt here is four tokens, one too many
    assert [(row["data/rows_truncated"], row["data/tokens_dropped"]) for row in found] == [(4.0, 4.0)] * 2


def test_a_batch_without_a_single_response_token_is_scored_and_updates_nothing(alike, base_crew):
    stepper = alike()
    batch = batch_of([0] * 8)
    batch, _ = stepper.log_probs(batch, [str(row) for row in range(8)])
    assert batch.old_log_probs.shape == (0,)
    metrics = stepper.update(batch, [str(row) for row in range(8)], 1)
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0


def test_failed_rewards_are_counted(settled, tmp_path):
    (tmp_path / "half.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if int(ground_truth) < 7:\n        return 1.0\n    raise ValueError\n"
    )
    more = {"custom_reward_function.path": str(tmp_path / "half.py"), "custom_reward_function.on_error": "score"}
    more["data.train_files"] = write_rows(tmp_path / "seven.jsonl", 7)  # three of them below 7, and a step takes four
    with running(settled(more)) as stepper:
        result = stepper.run(1)
    failed = sum(int(row.ground_truth) >= 7 for row in result.answers.rows)
    assert result.metrics["reward/failed_rows"] == failed > 0
