import math

import pytest
import torch

from tests.trainer.conftest import Member, crew_of
from verl_memopt.algorithms.kl import KlController
from verl_memopt.config.schema import Algorithm, CustomReward, KlControl
from verl_memopt.data.dataset import PromptRow
from verl_memopt.errors import RewardError
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rollout.engine import Generation
from verl_memopt.rollout.sampling import SamplingSettings
from verl_memopt.trainer.experience import Answers, advantages, generate, sampling_seeds, score_answers, scored, to_batch
from verl_memopt.trainer.passes import Budget
from verl_memopt.workers.scorer import Scores


def sampling(log_probs):
    return SamplingSettings(1.0, -1, 1.0, 1.0, True, 4, False, log_probs)


class Doubler(Member):
    """Answers a prompt with its first token, twice that, and the row's seed."""

    def generate(self, prompt_ids, seeds, settings, may_stop):
        responses = [[ids[0], 2 * ids[0], seed] for ids, seed in zip(prompt_ids, seeds, strict=True)]
        log_probs = [[-float(token) for token in row] for row in responses] if settings.log_probs else None
        return Generation(responses, log_probs, ["length"] * len(responses), cached_tokens=len(responses))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_answers_come_in_the_order_of_the_prompts_over_any_number_of_engines(ranks):
    crew = crew_of(*map(Doubler, range(ranks)))
    found = generate(crew, "gen", [[n, 0] for n in range(5)], [100 + n for n in range(5)], sampling(True), 1)
    assert found.response_ids == [[n, 2 * n, 100 + n] for n in range(5)]
    assert found.log_probs == [[-n, -2 * n, -100 - n] for n in range(5)]
    assert found.finish_reasons == ["length"] * 5
    assert found.cached_tokens == 5


def test_prompts_are_spread_evenly_over_engines():
    crew = crew_of(*map(Doubler, range(4)))
    generate(crew, "gen", [[n] for n in range(10)], list(range(10)), sampling(True), 1)
    assert sorted(len(member.asked[0][3][0]) for member in crew.group.members) == [2, 2, 3, 3]


def test_the_ranks_of_one_engine_get_the_same_prompts_and_answer_once():
    crew = crew_of(*map(Doubler, range(4)))
    found = generate(crew, "gen", [[n] for n in range(4)], [0] * 4, sampling(True), 2)
    assert [ids[0] for ids in found.response_ids] == [0, 1, 2, 3]
    given = [member.asked[0][3][0] for member in crew.group.members]
    assert given == [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]]]


def test_log_probs_are_absent_when_not_asked_for():
    assert generate(crew_of(Doubler(0)), "gen", [[1]], [0], sampling(False), 1).log_probs is None


def prompt_row(index, text="1+1="):
    return PromptRow(index, text, "toy/arithmetic", "2", {}, f"rows.jsonl:{index + 1}")


def test_every_sample_has_a_seed_of_its_own_in_every_step():
    rows = [prompt_row(index) for index in range(4)]
    seeds = [seed for step in range(3) for seed in sampling_seeds(rows, 3, 5, step)]
    assert len(set(seeds)) == 4 * 3 * 3


def test_a_seed_depends_on_the_prompt_and_not_on_its_place_in_the_batch():
    rows = [prompt_row(index) for index in range(4)]
    forwards, backwards = sampling_seeds(rows, 2, 5, 1), sampling_seeds(rows[::-1], 2, 5, 1)
    assert forwards[:2] == backwards[-2:]
    assert forwards != sampling_seeds(rows, 2, 6, 1)


def test_answers_are_scored_with_their_own_ground_truth():
    rows = [PromptRow(i, "", "toy/arithmetic", truth, {}, "") for i, truth in enumerate(("2", "3", "4"))]
    answers = Answers(rows, [], Generation([], None, []), ["2", "2", "4"])
    with RewardRunner(CustomReward(), 1) as runner:
        assert [result.score for result in score_answers(runner, answers)] == [1.0, 0.0, 1.0]


def batch_of(responses, log_probs=None, samples=2):
    prompts = [[1] * (2 + row) for row in range(len(responses))]
    return to_batch(Answers([], prompts, Generation(responses, log_probs, []), []), samples)


RESPONSES = [[5, 6], [], [7], [8, 9, 10]]


def test_a_batch_holds_prompts_responses_and_groups_without_padding():
    batch = batch_of(RESPONSES, [[-0.5, -0.25], [], [-1.0], [-2.0, -3.0, -4.0]])
    assert batch.prompts.sizes() == [2, 3, 4, 5]
    assert batch.responses.sizes() == [2, 0, 1, 3]
    assert batch.responses.flat.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rollout_log_probs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0, -4.0]
    assert batch_of(RESPONSES).rollout_log_probs is None


def test_a_batch_may_hold_only_empty_responses():
    batch = batch_of([[], []], [[], []])
    assert (batch.responses.flat.shape, batch.rollout_log_probs.shape) == ((0,), (0,))
    assert (batch.responses.flat.dtype, batch.rollout_log_probs.dtype) == (torch.int64, torch.float32)


class Reader(Member):
    """Scores a token as itself and as its negative, micro-batch by micro-batch, as a pass puts it together."""

    def read(self, batch, micro_batches, with_entropy=False):
        assert sorted(row for rows in micro_batches for row in rows) == list(range(batch.num_rows))
        assert all(sum(batch.row_tokens(shared=False).each()[row] for row in rows) <= 8 for rows in micro_batches)
        values = batch.responses.flat.float()
        return Scores(values, -values if with_entropy else None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("even_out", [True, False])
def test_scores_come_back_in_batch_order_however_rows_were_spread(ranks, even_out):
    batch, budget = batch_of(RESPONSES), Budget(True, 8, None, "key")
    crew = crew_of(*map(Reader, range(ranks)))
    found, entropy = scored(crew, "old", "read", batch, budget, "abcd", even_out, True)
    assert found.tolist() == [5, 6, 7, 8, 9, 10]
    assert entropy.tolist() == [-5, -6, -7, -8, -9, -10]
    counts = {len(member.asked[0][3][1]) for member in crew.group.members}
    assert len(counts) == 1


def test_without_entropy_there_is_none():
    assert scored(crew_of(Reader(0)), "old", "read", batch_of(RESPONSES), Budget(True, 8, None, "key"), "abcd", True)[1] is None


RLOO = Algorithm(adv_estimator="rloo")
ADDRESSES = ["a:1", "a:1", "a:2", "a:2"]


def shaped(batch, scores, algorithm=RLOO, controller=None):
    controller = controller or KlController(algorithm.kl_ctrl)
    return advantages(batch, torch.tensor(scores), ADDRESSES, algorithm, controller)


def test_every_token_of_a_response_gets_the_advantage_of_its_row():
    found = shaped(batch_of(RESPONSES), [1.0, 0.0, 0.25, 1.0])
    assert found.per_row.tolist() == [1.0, -1.0, -0.75, 0.75]  # of two samples: own score minus the other's
    assert found.per_token.tolist() == [1.0, 1.0, -0.75, 0.75, 0.75, 0.75]
    assert found.rewards.tolist() == [1.0, 0.0, 0.25, 1.0]
    assert found.kl_mean is None


def test_grpo_divides_by_the_groups_spread_unless_told_not_to():
    scores = [1.0, 0.0, 0.25, 1.0]
    found = shaped(batch_of(RESPONSES), scores, Algorithm(adv_estimator="grpo"))
    assert found.per_row.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)] * 1 + [-(0.5**0.5), 0.5**0.5], rel=4e-6)
    plain = shaped(batch_of(RESPONSES), scores, Algorithm(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    assert plain.per_row.tolist() == [0.5, -0.5, -0.375, 0.375]


def test_the_kl_to_the_reference_is_taken_off_each_rows_reward():
    batch = batch_of(RESPONSES)
    batch.old_log_probs = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0, 0.0])
    batch.ref_log_probs = torch.zeros(6)
    controller = KlController(KlControl(kl_coef=0.25))
    found = shaped(batch, [1.0, 0.0, 0.25, 1.0], Algorithm("rloo", use_kl_in_reward=True), controller)
    assert found.rewards.tolist() == [0.75, 0.0, 0.25, 0.75]  # sums of kl by row: 1, 0, 0, 1
    assert found.per_row.tolist() == [0.75, -0.75, -0.5, 0.5]
    assert found.kl_mean == pytest.approx(2 / 6, rel=1e-6)


def test_a_batch_without_a_token_has_a_kl_of_zero():
    batch = batch_of([[], [], [], []])
    batch.old_log_probs = batch.ref_log_probs = torch.zeros(0)
    found = shaped(batch, [1.0, 0.0, 0.0, 0.0], Algorithm("rloo", use_kl_in_reward=True))
    assert (found.kl_mean, found.per_token.shape) == (0.0, (0,))


def test_a_score_that_does_not_fit_a_float_is_named_with_its_row():
    with pytest.raises(RewardError, match="a:2: the reward is inf"):
        shaped(batch_of(RESPONSES), [1.0, 0.0, math.inf, 0.0])


def test_groups_that_teach_nothing_are_counted():
    assert shaped(batch_of(RESPONSES), [1.0, 1.0, 0.0, 1.0]).counts["equal_groups_share"] == 0.5
