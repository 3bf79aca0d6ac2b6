import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.trainer.conftest import AR, batch_of, learned, ready
from tests.trainer.test_step import running
from verl_memopt.config.schema import Actor, PfPpo
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import RewardError, TrainingError
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.group_filter import GroupFilter, draw_rows, drawn_rows
from verl_memopt.trainer.rollouts import RowAnswers, StepBatch, to_batch


def round_of(first, scores, samples=2, log_probs=True, extra=None, failed=()):
    """Gives a scored round: each prompt has its number as its only token, each response the prompt and the sample."""
    numbers = [first + index for index in range(len(scores) // samples)]
    rows = [PromptRow(number, "", "toy/arithmetic", "", {}, f"rows:{number}") for number in numbers]
    ids = [[number] for number in numbers for _ in range(samples)]
    responses = [[number, sample] for number in numbers for sample in range(samples)]
    given = [[-float(token) for token in response] for response in responses] if log_probs else None
    generation = Generation(responses, given, ["stop"] * len(ids), cached_tokens=10 * len(ids))
    texts = [str(response) for response in responses]
    answers = RowAnswers([row for row in rows for _ in range(samples)], ids, generation, texts)
    extras = extra or [{}] * len(scores)
    results = [RewardResult(score, own, index in failed) for index, (score, own) in enumerate(zip(scores, extras, strict=True))]
    prompts = StepPrompts(rows, ids, rows_truncated=1, tokens_dropped=3)
    return StepBatch(5, prompts, answers, to_batch(answers, samples, Actor()), results)


def filled(rounds, num_prompts=2, metric=None, max_rounds=0, samples=2):
    asked = []

    def scored(earlier_rounds):
        asked.append(earlier_rounds)
        return rounds[earlier_rounds]

    kept, metrics = GroupFilter(num_prompts, samples, metric, max_rounds).fill(scored, 5)
    assert asked == list(range(len(asked)))
    return kept, metrics, len(asked)


def numbers(kept):
    return [row.index for row in kept.prompts.prompts]


def test_a_full_round_needs_no_other_and_what_is_beyond_the_step_is_dropped():
    kept, metrics, num_rounds = filled([round_of(10, [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.0, 1.0])])
    assert (numbers(kept), num_rounds) == ([10, 12], 1)
    assert metrics == {"train/num_gen_batches": 1.0, "reward/filtered_groups_share": 0.25}


def test_rounds_follow_until_the_step_is_full_and_every_part_stays_beside_its_prompt():
    rounds = [round_of(10, [1.0, 1.0, 0.0, 1.0]), round_of(20, [0.0] * 4), round_of(30, [1.0, 0.0, 0.0, 0.0])]
    kept, metrics, num_rounds = filled(rounds)
    assert (numbers(kept), num_rounds) == ([11, 30], 3)
    assert [row.index for row in kept.answers.rows] == [11, 11, 30, 30]
    assert kept.prompts.prompt_ids == kept.answers.prompt_ids == [[11], [11], [30], [30]]
    assert kept.answers.generation.response_ids == [[11, 0], [11, 1], [30, 0], [30, 1]]
    assert kept.answers.generation.log_probs == [[-11.0, 0.0], [-11.0, -1.0], [-30.0, 0.0], [-30.0, -1.0]]
    assert kept.answers.texts == ["[11, 0]", "[11, 1]", "[30, 0]", "[30, 1]"]
    assert kept.answers.generation.finish_reasons == ["stop"] * 4
    assert [result.score for result in kept.results] == [0.0, 1.0, 1.0, 0.0]
    assert metrics["reward/filtered_groups_share"] == pytest.approx(4 / 6)
    assert (kept.prompts.rows_truncated, kept.prompts.tokens_dropped) == (3, 9)
    assert kept.answers.generation.cached_tokens == 40  # half of the prompt tokens of two rounds


def test_a_prompt_that_is_kept_once_and_log_probs_that_are_absent_stay_so_over_several_rounds():
    rounds = [round_of(10, [1.0, 1.0, 0.0, 1.0], log_probs=False), round_of(30, [1.0, 0.0, 0.0, 0.0], log_probs=False)]
    for batch in rounds:
        shared = [ids for ids in batch.answers.prompt_ids[::2] for _ in range(2)]
        batch.answers = replace(batch.answers, prompt_ids=shared)
    kept, _, _ = filled(rounds)
    assert kept.answers.generation.log_probs is None
    prompts = to_batch(kept.answers, 2, Actor()).prompts
    assert prompts.stored.flat.tolist() == [11, 30]
    assert prompts.flat.tolist() == [11, 11, 30, 30]


@pytest.mark.parametrize("metric", [None, "score", "seq_reward", "seq_final_reward"])
def test_the_score_decides_by_default(metric):
    extra = [{"acc": value} for value in (1.0, 1.0, 0.0, 1.0)]
    assert numbers(filled([round_of(10, [1.0, 0.5, 1.0, 1.0], extra=extra)], 1, metric)[0]) == [10]


def test_another_number_of_the_reward_function_may_decide_if_it_is_there():
    extra = [{"acc": value} for value in (True, True, False, True)]
    assert numbers(filled([round_of(10, [1.0, 0.5, 1.0, 1.0], extra=extra)], 1, "acc")[0]) == [11]
    extra = [{"acc": 1.0}, {"acc": 0.0}, {"acc": "yes"}, {}]
    with pytest.raises(RewardError, match=r"filter_groups\.metric=acc: the reward of rows:11 \(sample of step 5\) has no number"):
        filled([round_of(10, [1.0, 0.5, 1.0, 1.0], extra=extra)], 1, "acc")


def test_a_group_of_one_is_kept_and_rows_without_a_score_do_not_make_a_group_differ():
    rounds = [round_of(10, [math.nan, 1.0, math.nan, math.nan, 1.0, 0.0])]
    assert numbers(filled(rounds, 1)[0]) == [12]
    extra = [{"acc": 1.0}, {}, {"acc": 1.0}, {"acc": 0.0}]
    assert numbers(filled([round_of(10, [1.0, 0.0, 1.0, 1.0], extra=extra, failed={1})], 1, "acc")[0]) == [11]
    assert numbers(filled([round_of(10, [1.0, 1.0], samples=1)], samples=1)[0]) == [10, 11]


def test_a_step_that_is_not_full_at_the_limit_stops_the_run_with_the_way_out():
    rounds = [round_of(10, [1.0, 0.0, 0.0, 0.0]), round_of(20, [1.0] * 4), round_of(30, [1.0, 0.0])]
    assert filled(rounds, max_rounds=3)[2] == 3
    message = r"max_num_gen_batches=2: in step 5 only 1 of 4 groups .* data\.train_batch_size needs 2\. Raise the limit"
    with pytest.raises(TrainingError, match=message):
        filled(rounds, max_rounds=2)


FILTER = {"algorithm.filter_groups.enable": True, "data.gen_batch_size": 3, f"{AR}.rollout.n": 2}


def test_rounds_without_end_are_told_of_ever_more_rarely(caplog):
    never = [round_of(number, [1.0, 1.0]) for number in range(40)]
    filled([*never, round_of(40, [0.0, 1.0, 0.0, 1.0])])
    told = [record.message for record in caplog.records if record.name == "verl_memopt.trainer.group_filter"]
    assert [f"after {rounds} rounds" in text for rounds, text in zip((8, 16, 32), told, strict=True)] == [True] * 3
    assert "step 5 has 0 of 2 groups" in told[0]
    assert "max_num_gen_batches" in told[0]


def test_a_step_trains_on_groups_that_differ_alone_and_goes_on_where_its_prompts_ended(settled):
    results, states = [], []
    for frees_engine in (False, True):  # an engine that slept between two rounds would refuse the second
        with running(settled(FILTER | {f"{AR}.rollout.free_cache_engine": frees_engine})) as learner:
            assert learner.rollouts.generator.frees_engine == frees_engine
            results.append([learner.train_step(step) for step in (1, 2)])
            states.append(learner.rollouts.prompts.state_dict())
            assert learner.workers.group._worker.engine._state.is_awake("kv_cache") != frees_engine
    for result in results[0]:
        scores = [each.score for each in result.results]
        assert len(scores) == 8
        assert all(one != other for one, other in zip(scores[::2], scores[1::2], strict=True))
        assert [row.index for row in result.answers.rows[::2]] == [row.index for row in result.answers.rows[1::2]]
        assert result.metrics["reward/equal_groups_share"] == 0
        assert result.metrics["train/num_gen_batches"] >= 2
        assert result.metrics["actor/grad_norm"] > 0
    assert [result.metrics for result in results[0]] == [result.metrics for result in results[1]]
    assert states[0] == states[1]
    num_rounds = sum(result.metrics["train/num_gen_batches"] for result in results[0])
    assert 3 * num_rounds == 9 * states[0]["epoch"] + states[0]["position"]  # of 10 rows, an epoch has three whole rounds


def test_a_prompt_that_returns_in_a_step_is_answered_anew(settled):
    with running(settled(FILTER | {f"{AR}.rollout.temperature": 2.0})) as learner:
        prompts = learner.rollouts.prompts.next()
        first, same, other = (learner.rollouts.generator.generate(prompts, 1, earlier) for earlier in (0, 0, 1))
    assert first.generation.response_ids == same.generation.response_ids
    assert first.generation.response_ids != other.generation.response_ids


def test_rewards_that_follow_the_rollout_change_no_number(settled, tmp_path):
    """The engine answers two rows at a time, so that the others are generated while those are scored."""
    logged = []
    for follows in (True, False):
        folder = tmp_path / str(follows)
        more = {"trainer.default_local_dir": str(folder), "trainer.test_freq": 1, f"{AR}.rollout.max_num_seqs": 2}
        with ready(settled(FILTER | more)) as trainer:
            rollouts = trainer.learner.rollouts
            if not follows:
                generator = replace(rollouts.generator, follower=None)
                trainer.learner.rollouts = replace(rollouts, generator=generator)
                trainer.validator = replace(trainer.validator, generator=generator)
            trainer.run()
            logged.append(learned(folder))
            assert all(("timing_s/reward_in_rollout" in row) == follows for row in trainer.reporter.folder.read_metrics())
    assert len(logged[0]) == 2
    assert logged[0] == logged[1]


NAN = float("nan")


def test_rows_are_drawn_by_the_power_of_their_score_and_never_without_one():
    counts = Counter(drawn_rows(torch.tensor([1.0, -2.0, 0.0, 3.0] * 500), PfPpo(weight_pow=1.0), 5))
    kinds = [sum(number for row, number in counts.items() if row % 4 == kind) / 2000 for kind in range(4)]
    assert kinds == pytest.approx([1 / 6, 2 / 6, 0, 3 / 6], abs=0.03)
    assert set(drawn_rows(torch.tensor([NAN, 0.5, NAN, 0.25] * 20), PfPpo(), 1)) <= set(range(1, 80, 2))
    assert drawn_rows(torch.tensor([NAN, NAN]), PfPpo(), 1) == [0, 1]
    assert len(set(drawn_rows(torch.zeros(500), PfPpo(), 1))) == pytest.approx(500 * (1 - 1 / 2.718281828), rel=0.1)


def test_a_draw_repeats_with_its_seed_and_changes_with_another():
    scores = torch.linspace(0.1, 1, 40)
    draws = [drawn_rows(scores, PfPpo(), seed) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(draw) == 40 and set(draw) <= set(range(40)) for draw in draws)


def step_batch(scores):
    rows = [PromptRow(index, "", "toy/arithmetic", "", {}, f"rows:{index}") for index in range(len(scores))]
    answers = RowAnswers(rows, [], Generation([], None, []), [])
    results = [RewardResult(score, {}) for score in scores]
    return StepBatch(1, StepPrompts([], [], 0, 0), answers, batch_of([2, 1, 3, 1][: len(scores)]), results)


def test_the_update_reads_the_drawn_rows_and_the_batch_stays():
    batch = step_batch([0.0, 0.0, 1.0, 0.0])
    draw_rows(batch, PfPpo(), 1)
    rows, names = batch.for_update()
    assert batch.drawn == [2, 2, 2, 2]
    assert batch.metrics == {"pf_ppo/drawn_rows_share": 0.25}
    assert names == ["rows:2 (sample of step 1)"] * 4
    assert rows.responses.sizes() == [3, 3, 3, 3]
    assert rows.group.tolist() == [1, 1, 1, 1]
    assert len(set(rows.prompt_groups())) == 1  # the drawn copies compute their prompt once
    assert batch.rows.responses.sizes() == [2, 1, 3, 1]


def test_log_probs_of_an_update_return_to_the_rows_that_it_read():
    batch = step_batch([0.0] * 4)
    assert batch.for_update()[0] is batch.rows
    batch.drawn = [3, 1, 3, 3]
    batch.keep_log_probs(torch.tensor([-3.0, -1.0, -3.0, -3.0]))
    assert batch.rows.old_log_probs.tolist() == [-5.0, -5.0, -1.0, -5.0, -5.0, -5.0, -3.0]
    batch.drawn = None
    batch.keep_log_probs(torch.zeros(7))
    assert batch.rows.old_log_probs.tolist() == [0.0] * 7


def test_a_step_with_pf_ppo_trains_on_the_rows_that_it_drew(settled):
    more = {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"}
    with running(settled(more | {f"{AR}.actor.ppo_mini_batch_size": 4})) as learner:
        batch = learner.advantages(learner.scored(1))
        rows, _ = batch.for_update()
        result = learner.train_step(2).metrics
    scores = batch.scores
    assert all(scores[row] in (scores.max(), scores.min()) for row in batch.drawn)
    assert rows.responses.sizes() == [batch.rows.responses.sizes()[row] for row in batch.drawn]
    assert torch.equal(rows.advantages[: rows.responses.sizes()[0]], batch.rows.select(batch.drawn[:1]).advantages)
    assert result["actor/grad_norm"] > 0
    assert 0 < result["pf_ppo/drawn_rows_share"] < 1


def test_pf_ppo_and_bypass_mode_go_together(settled):
    more = {"algorithm.use_pf_ppo": True, "algorithm.rollout_correction.preset": "bypass_ppo_clip", f"{AR}.rollout.n": 4}
    with running(settled(more)) as learner:
        result = learner.train_step(1).metrics
    assert result["rollout/logprob_diff_mean"] < 1e-4
    assert result["training/log_probs_not_finite"] == result["actor/skipped_updates"] == 0


def test_a_critic_learns_the_returns_of_the_rows_that_were_drawn(settled):
    more = {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 1.0}
    with running(settled(more | {f"{AR}.actor.ppo_mini_batch_size": 4})) as learner:
        batch = learner.scored(1)
        batch.rows.old_values = learner.critic.values(batch)
        learner.advantages(batch)
        rows, _ = batch.for_update()
        batch.metrics |= learner.critic.begin_update(*batch.for_update(), 1).result()
        learner.policy.update(batch)
        result = batch.metrics
    assert torch.equal(rows.returns, torch.cat([batch.rows.select([row]).returns for row in batch.drawn]))
    assert torch.equal(rows.old_values, torch.cat([batch.rows.select([row]).old_values for row in batch.drawn]))
    expected = 0.5 * rows.returns.square().mean().item()  # the value head starts at 0
    assert result["critic/vf_loss"] == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(0.5 * batch.rows.returns.square().mean().item(), rel=1e-2)
    assert result["actor/grad_norm"] > 0
