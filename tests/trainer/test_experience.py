import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.conftest import Member, group_of
from tests.worker.test_conversations import conversations
from verl_memopt.agents.conversation import Turn
from verl_memopt.agents.loop import Conversation
from verl_memopt.algorithms.kl import KlController
from verl_memopt.algorithms.records import ESTIMATORS
from verl_memopt.config.aliases import VALUES
from verl_memopt.config.schema import Actor, Algorithm, KlControl
from verl_memopt.config.values import choices
from verl_memopt.data.batch import SharedRows
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import EXPANSIONS, expand
from verl_memopt.errors import RewardError
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.trainer.micro_batching import Budget
from verl_memopt.trainer.rollouts import LogProbPass, RowAnswers, StepBatch, to_batch
from verl_memopt.worker.policy import LogProbs
from verl_memopt.worker.trained_model import micro_batch


def batch_of(responses, log_probs=None, samples=2):
    prompts = [[1] * (2 + row) for row in range(len(responses))]
    return to_batch(RowAnswers([], prompts, Generation(responses, log_probs, []), []), samples, Actor(use_prefix_grouper=False))


RESPONSES = [[5, 6], [], [7], [8, 9, 10]]


def test_a_batch_holds_whole_groups_without_padding_and_may_hold_only_empty_responses():
    batch = batch_of(RESPONSES, [[-0.5, -0.25], [], [-1.0], [-2.0, -3.0, -4.0]])
    assert batch.prompts.sizes() == [2, 3, 4, 5]
    assert batch.responses.sizes() == [2, 0, 1, 3]
    assert batch.responses.flat.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rollout_log_probs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0, -4.0]
    assert batch_of(RESPONSES).rollout_log_probs is None
    batch = batch_of([[], []], [[], []])
    assert (batch.responses.flat.shape, batch.rollout_log_probs.shape) == ((0,), (0,))
    assert (batch.responses.flat.dtype, batch.rollout_log_probs.dtype) == (torch.int64, torch.float32)
    with pytest.raises(AssertionError, match="3 rows are no groups of 2"):
        batch_of(RESPONSES[:3])


class Reader(Member):
    """Scores a token as itself and as its negative, micro-batch by micro-batch, as a pass puts it together."""

    def read(self, batch, micro_batches, with_entropy=False, statistics=()):
        assert sorted(row for rows in micro_batches for row in rows) == list(range(batch.num_rows))
        assert all(sum(batch.row_tokens().row_lengths()[row] for row in rows) <= 8 for rows in micro_batches)
        values = batch.responses.flat.float()
        return LogProbs(values, -values if with_entropy else None, dict.fromkeys(statistics, values / 16))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("even_out", [True, False])
def test_scores_come_back_in_batch_order_however_rows_were_spread(ranks, even_out):
    batch, budget = batch_of(RESPONSES), Budget(True, 8, None, "key")
    workers = group_of(*map(Reader, range(ranks)))
    read = LogProbPass(workers, "old", Reader.read, budget, even_out, (True, {"sums": ""})).compute(batch, "abcd")
    assert read.log_probs.tolist() == [5, 6, 7, 8, 9, 10]
    assert read.entropy.tolist() == [-5, -6, -7, -8, -9, -10]
    assert (16 * read.statistics["sums"]).tolist() == [5, 6, 7, 8, 9, 10]
    counts = {len(member.asked[0][3][1]) for member in workers.group.members}
    assert len(counts) == 1


def test_what_is_not_requested_is_none():
    log_prob_pass = LogProbPass(group_of(Reader(0)), "old", Reader.read, Budget(True, 8, None, "key"), True)
    read = log_prob_pass.compute(batch_of(RESPONSES), "abcd")
    assert read.entropy is None
    assert read.statistics == {}


class Routed(Reader):
    def read(self, batch, micro_batches):
        values = torch.full((len(batch.responses.flat),), float(batch.is_routed))
        return LogProbs(values, None)


@pytest.mark.parametrize("routed", [False, True])
def test_only_a_pass_of_the_policy_replays_experts(routed):
    batch = batch_of(RESPONSES).for_record()
    passed = LogProbPass(group_of(Routed(0)), "old", Routed.read, Budget(True, 8, None, "key"), True, routed=routed)
    assert passed.compute(batch, "abcd").log_probs.unique().tolist() == [float(routed)]


def spelled(ids):
    """Gives an engine's record in which the expert of each token but the last says which token it is."""
    return torch.tensor(ids[:-1], dtype=torch.int16).view(-1, 1, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_each_token_has_the_experts_that_the_engine_chose_for_it(shared):
    actor, prompts = Actor(use_prefix_grouper=shared), [[3, 4], [3, 4], [6], [6]]
    pairs = [(spelled([*prompt, 0]), spelled(answer)) for prompt, answer in zip(prompts, RESPONSES, strict=True)]
    pairs[1] = pairs[1][0] + 9, pairs[1][1]  # another choice for the prompt of the first answer
    batch = to_batch(RowAnswers([], prompts, Generation(RESPONSES, None, [], routes=pairs), []), 2, actor)
    experts = batch.prompt_routes
    assert [row.flatten().tolist() for row in experts.flat.split(experts.sizes())] == prompts
    for routes, answer in zip(batch.routes.split(batch.responses.sizes()), RESPONSES, strict=True):
        assert routes.flatten().tolist()[:-1] == answer[:-1]

    rows = [[turn for turn in row if turn.output_ids] for row in conversations()[0]]
    turns = [[Turn(*turn, None, spelled([*turn.prompt_ids, *turn.output_ids])) for turn in row] for row in rows]
    talks = [Conversation(turns=row) for row in turns]
    outputs = [[token for turn in row for token in turn.output_ids] for row in rows]
    batch = to_batch(RowAnswers([], outputs, Generation(outputs, None, []), [], conversations=talks), 3, actor)
    forest = batch.forest
    computed = [number for row in batch.record_places([[len(turn.output_ids) for turn in row] for row in rows]) for number in row]
    places = torch.cat(computed)
    assert torch.equal(forest.routes[places, 0, 0].long(), forest.tokens[places])


RLOO = Algorithm(adv_estimator="rloo")


def step_of(batch, results):
    rows = [PromptRow(0, "1+1=", "s", None, {}, address) for address in ("a:1", "a:1", "a:2", "a:2")]
    return StepBatch(3, None, RowAnswers(rows, [], None, []), batch, results)


def shaped(batch, scores, algorithm=RLOO, controller=None):
    return step_of(batch, list(map(RewardResult, scores))).estimate(algorithm, controller or KlController(algorithm.kl_ctrl))


def test_every_token_of_a_response_gets_the_advantage_of_its_row_normalized_where_asked():
    advantages = shaped(batch_of(RESPONSES), [1.0, 0.0, 0.25, 1.0])
    assert advantages.per_token.tolist() == [1.0, 1.0, -0.75, 0.75, 0.75, 0.75]  # of two: own score minus the other's
    assert advantages.returns.tolist() == advantages.per_token.tolist()
    assert advantages.rewards.tolist() == [1.0, 0.0, 0.25, 1.0]
    assert advantages.kl_mean is None
    settings = Algorithm(adv_estimator="rloo", normalize_advantages=True)
    advantages = shaped(batch_of(RESPONSES), [1.0, 0.0, 0.25, 1.0], settings)
    scale = math.sqrt((2 * 1.0**2 + 2 * 0.75**2) / 3) + 1e-4  # of the advantages 1, -1, -0.75, 0.75
    assert advantages.per_token.tolist() == pytest.approx([1 / scale] * 2 + [-0.75 / scale] + [0.75 / scale] * 3, rel=1e-6)


def with_turns(rewards):
    """A batch of RESPONSES. The first row has two turns."""
    turns = [[[5], [6]], [], [[7]], [[8, 9, 10]]]
    conversations = [Conversation(turns=[Turn([1], output, None) for output in row]) for row in turns]
    batch = step_of(
        batch_of(RESPONSES), [RewardResult(0.0, {} if given is None else {"turn_rewards": given}) for given in rewards]
    )
    batch.answers = replace(batch.answers, conversations=conversations)
    return batch


def test_rewards_of_turns_are_at_the_last_token_of_each_turn_and_count_for_the_whole():
    algorithm = Algorithm(adv_estimator="rloo")
    advantages = with_turns([[1.0, 2.0], None, None, [4.0]]).estimate(algorithm, KlController(algorithm.kl_ctrl))
    assert advantages.rewards.tolist() == [3.0, 0.0, 0.0, 4.0]
    by_token = Algorithm(adv_estimator="reinforce_plus_plus", gamma=1.0)
    advantages = with_turns([[1.0, 2.0], None, None, [4.0]]).estimate(by_token, KlController(by_token.kl_ctrl))
    assert advantages.returns.tolist() == [3.0, 2.0, 0.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("wrong", [[1.0], [1.0, math.inf], "12", [1.0, None]])
def test_rewards_that_do_not_fit_the_turns_are_named(wrong):
    with pytest.raises(RewardError, match=r"turn_rewards of a:1 .* each of its 2 turns"):
        with_turns([wrong, None, None, None]).estimate(RLOO, KlController(RLOO.kl_ctrl))


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus"])
def test_a_rejected_token_without_a_log_prob_takes_no_reward_from_its_row(estimator):
    batch, found = batch_of(RESPONSES), []
    algorithm = Algorithm(adv_estimator=estimator, use_kl_in_reward=True, kl_ctrl=KlControl(kl_coef=0.5))
    batch.ref_log_probs, batch.kept = torch.tensor([-1.0] * 6), torch.tensor([True, True, True, True, True, False])
    for last in (-1.0, math.nan):  # a KL of 0 there, and none
        batch.old_log_probs = torch.tensor([-1.0, -1.0, -1.0, -0.5, -1.0, last])
        found.append(shaped(batch, [1.0, 0.0, 0.25, 1.0], algorithm))
    finite, lost = found
    assert lost.rewards.tolist() == finite.rewards.tolist() == [1.0, 0.0, 0.25, 0.75]
    assert lost.per_token.tolist() == finite.per_token.tolist()
    assert lost.kl_mean == finite.kl_mean == pytest.approx(0.5 / 3 / 4)


def test_rewards_by_name_come_from_the_function_and_a_row_without_one_is_named():
    algorithm = Algorithm(adv_estimator="gdpo", gdpo_reward_keys=["score", "format"])
    results = [RewardResult(1.0, {"format": 0.5}), RewardResult(0.0, failed=True), RewardResult(2.0, {"format": True})]
    step = step_of(batch_of(RESPONSES), [*results, RewardResult(0.0, {"format": -1})])
    # The failed row is in no mean, so the one beside it has nothing to compare with; the other two differ by 2 in each reward.
    advantages = step.estimate(algorithm, KlController(algorithm.kl_ctrl)).per_token
    assert advantages[:2].tolist() == [advantages[0]] * 2
    assert (advantages[2] > 0, advantages[2] > advantages[0] > advantages[3]) == (True, True)
    step.results[0] = RewardResult(1.0, {"acc": 1.0})
    with pytest.raises(
        RewardError, match=r"^algorithm\.gdpo_reward_keys: the reward of a:1 .* no finite number format; it has score"
    ):
        step.estimate(algorithm, KlController(algorithm.kl_ctrl))


def test_a_reward_that_is_none_leaves_its_row_out_of_that_reward_alone():
    algorithm = Algorithm(adv_estimator="gdpo", gdpo_reward_keys=["a", "b"], norm_adv_by_std_in_grpo=False)
    rows = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": None}, {"a": None, "b": 2.0}, {"a": None, "b": None}]
    scores = [1.0, 0.0, 2.0, math.nan]
    results = [RewardResult(score, extra) for score, extra in zip(scores, rows, strict=True)]
    estimated = step_of(batch_of([[1], [1], [1], [1]], samples=4), results).estimate(algorithm, KlController(KlControl()))
    # a: +0.5 and -0.5 of the first two; b: -1 and +1 of the first and the third.
    assert estimated.per_token.tolist() == pytest.approx([*whitened([-0.5, -0.5, 1.0]), 0.0], abs=1e-6)
    assert estimated.counts["invalid_rows"] == 1


def test_a_score_beyond_the_range_counts_as_the_bound_before_the_kl_comes_off_it():
    batch = batch_of(RESPONSES)
    batch.old_log_probs, batch.ref_log_probs = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0, 0.0]), torch.zeros(6)
    settings = Algorithm("rloo", use_kl_in_reward=True, reward_clip_range=[-1.0, 1.0])
    step = step_of(batch, list(map(RewardResult, [9.0, -9.0, 0.25, math.nan])))
    estimated = step.estimate(settings, KlController(KlControl(kl_coef=0.25)))
    assert estimated.rewards.tolist()[:3] == [0.75, -1.0, 0.25]
    assert estimated.per_token[:2].tolist() == [1.75, 1.75]
    assert step.scores.tolist()[:2] == [9.0, -9.0], "what the metrics show"
    step.baselines = torch.full((4,), 5.0)
    remax = step.estimate(Algorithm("remax", reward_clip_range=[-1.0, 1.0]), KlController(KlControl()))
    assert remax.per_token[:2].tolist() == [0.0, 0.0], "score and baseline are clipped alike"


TOKENIZER = build_tokenizer()
PROMPTS = [PromptRow(index, text, "s", None, {}, f"a:{index}") for index, text in enumerate(("1+1=", "123456+7="))]


def expanded_batch(method, use_prefix_grouper=True):
    """Two prompts of unequal lengths with two answers each."""
    expanded = expand(PROMPTS, [0, 1], 2, method, PromptEncoder(TOKENIZER, 100, "error"))
    answers = RowAnswers([], expanded.prompt_ids, Generation([[5, 6], [7], [8], [9, 10, 11]], None, []), [])
    return to_batch(answers, 2, Actor(use_prefix_grouper=use_prefix_grouper))


@pytest.mark.parametrize("method", EXPANSIONS)
@pytest.mark.parametrize("shares_prompts", [True, False])
def test_every_expansion_gives_one_batch_whichever_rows_are_read(method, shares_prompts):
    batch, token = expanded_batch(method, shares_prompts), expanded_batch("token", shares_prompts)
    assert isinstance(batch.prompts, SharedRows) == (method == "lazy")
    for rows in ([0, 1, 2, 3], [3, 0], [2], [1, 1, 2]):
        one, other = batch.select(rows), token.select(rows)
        assert one.row_tokens() == other.row_tokens()
        one, other = micro_batch(batch, rows).pack, micro_batch(token, rows).pack
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.position_ids, other.position_ids)


@pytest.mark.parametrize(("shared", "tokens"), [(True, 3 + 4 + 4), (False, 7 + 7)])
def test_turns_of_a_conversation_share_tokens_and_rows_do_if_the_settings_say_so(shared, tokens):
    talks = [Conversation([Turn([1, 2, 3], [n], None), Turn([1, 2, 3, n, 4], [5, 6], None)]) for n in (7, 8)]
    answers = RowAnswers([], [[1, 2, 3]] * 2, Generation([[7, 5, 6], [8, 5, 6]], None, []), [], conversations=talks)
    batch = to_batch(answers, 2, Actor(use_prefix_grouper=shared))
    assert batch.forest.tokens.numel() == tokens
    assert torch.equal(batch.forest.tokens[batch.forest.place], batch.responses.flat)


def test_the_kl_to_the_reference_is_taken_off_each_rows_reward():
    batch = batch_of(RESPONSES)
    batch.old_log_probs = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0, 0.0])
    batch.ref_log_probs = torch.zeros(6)
    controller = KlController(KlControl(kl_coef=0.25))
    advantages = shaped(batch, [1.0, 0.0, 0.25, 1.0], Algorithm("rloo", use_kl_in_reward=True), controller)
    assert advantages.rewards.tolist() == [0.75, 0.0, 0.25, 0.75]  # sums of kl by row: 1, 0, 0, 1
    assert advantages.per_token.tolist() == [0.75, 0.75, -0.5, 0.5, 0.5, 0.5]
    # The mean over rows of each row's mean, as in verl: 1/2, 0, 0 and 1/3.
    assert advantages.kl_mean == pytest.approx((1 / 2 + 1 / 3) / 4, rel=1e-6)
    batch = batch_of([[], [], [], []])
    batch.old_log_probs = batch.ref_log_probs = torch.zeros(0)
    advantages = shaped(batch, [1.0, 0.0, 0.0, 0.0], Algorithm("rloo", use_kl_in_reward=True))
    assert (advantages.kl_mean, advantages.per_token.shape) == (0.0, (0,))


def whitened(values):
    """Gives the values with mean 0 and unbiased standard deviation 1."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def test_reinforce_plus_plus_discounts_the_kl_and_the_score_of_each_later_token():
    batch = batch_of(RESPONSES)
    batch.old_log_probs = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0, 2.0])
    batch.ref_log_probs = torch.zeros(6)
    controller = KlController(KlControl(kl_coef=0.25))
    settings = Algorithm("reinforce_plus_plus", use_kl_in_reward=True, gamma=0.5)
    advantages = shaped(batch, [1.0, 0.0, 0.25, 1.0], settings, controller)
    # Token rewards by row: (-0.125, 1 - 0.25), (), (0.25), (-0.25, 0, 1 - 0.5). Returns from the last token back:
    returns = [-0.125 + 0.5 * 0.75, 0.75, 0.25, -0.25 + 0.5 * 0.25, 0.5 * 0.5, 0.5]
    assert advantages.returns.tolist() == pytest.approx(returns, abs=1e-7)
    assert advantages.per_token.tolist() == pytest.approx(whitened(returns), abs=1e-6)
    assert advantages.rewards.tolist() == pytest.approx([1 - 0.375, 0.0, 0.25, 1 - 0.75])


BY_HAND = {
    "reinforce_plus_plus_baseline": whitened([0.5, 0.5, -0.375, 0.375, 0.375, 0.375]),
    "opo": [0.0, 0.0, -0.5625, 0.1875, 0.1875, 0.1875],  # baselines by length: 1 and (0.25 + 3 * 1) / 4
    "gpg": [4 / 3 * lead for lead in (0.5, 0.5, -0.375, 0.375, 0.375, 0.375)],  # three of four rewards are not 0
    "grpo_passk": [0.5**0.5 * 2, 0.5**0.5 * 2, 0.0, 0.5**0.5 * 2, 0.5**0.5 * 2, 0.5**0.5 * 2],  # lead / std = sqrt(2)
}


@pytest.mark.parametrize("name", BY_HAND)
def test_advantages_are_those_of_the_estimator_that_the_settings_name(name):
    advantages = shaped(batch_of(RESPONSES), [1.0, 0.0, 0.25, 1.0], Algorithm(name))
    assert advantages.per_token.tolist() == pytest.approx(BY_HAND[name], abs=4e-6)


def test_every_estimator_can_be_chosen():
    assert choices()["algorithm.adv_estimator"] == tuple(ESTIMATORS)
    assert set(VALUES["algorithm.adv_estimator"].values()) <= ESTIMATORS.keys()


def test_a_score_that_does_not_fit_a_float_is_named_and_groups_that_teach_nothing_are_counted():
    with pytest.raises(RewardError, match=r"^a:2 \(sample of step 3\): the reward is inf"):
        shaped(batch_of(RESPONSES), [1.0, 0.0, math.inf, 0.0])
    assert shaped(batch_of(RESPONSES), [1.0, 1.0, 0.0, 1.0]).counts["equal_groups_share"] == 0.5
