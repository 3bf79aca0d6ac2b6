import dataclasses
import math
from contextlib import contextmanager

import pytest
import torch

from tests import rlt
from tests.trainer.conftest import AR, Updater, batch_of, group_of, rewards_of, write_rows
from verl_memopt.algorithms.losses import GlobalCounts, LossTokens, policy_loss
from verl_memopt.config.schema import Actor, Critic, Optim, PolicyLoss
from verl_memopt.data.batch import SharedRows
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prompts import EXPANSIONS, StepPrompts
from verl_memopt.errors import ConfigError, TrainingError
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.recipes.rlt.scorer import ExplanationBatch
from verl_memopt.rewards.score import RewardResult
from verl_memopt.rollout.engine import Generation
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import start_workers
from verl_memopt.trainer.micro_batching import MiniBatchCutter, critic_budgets
from verl_memopt.trainer.rollouts import Advantages, RowAnswers, StepBatch
from verl_memopt.trainer.step import CriticTraining, OnPolicy, StepMetrics, mask_truncated, score
from verl_memopt.worker.worker import Worker


@contextmanager
def learner_of(context, workers, runner=None):
    learner = build_learner(context, workers, runner)
    try:
        yield learner
    finally:
        learner.close()


@contextmanager
def running(settings):
    """A learner with its own workers and reward processes, as in a run."""
    context = build_run(settings)
    with (
        rewards_of(context) as runner,
        start_workers(context, PhaseClock()) as workers,
        learner_of(context, workers, runner) as learner,
    ):
        workers.all("update_weights", Worker.update_weights)
        yield learner


def test_a_step_answers_scores_updates_and_syncs(settled):
    with running(settled({f"{AR}.rollout.max_logprob_diff": 1e-5, f"{AR}.actor.calculate_entropy": True})) as learner:
        results = [learner.train_step(step) for step in (1, 2)]  # the second fails past the threshold if the sync is stale
        phases = [span.name for span in learner.workers.clock.take()]
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


def test_the_batch_of_a_lazy_step_holds_each_prompt_once(settled):
    held = {}
    for method in EXPANSIONS:
        with running(settled({"algorithm.expansion": method})) as learner:
            batch = learner.rollouts.generate(learner.rollouts.prompts.next(), 1)
            learner.policy.old_log_probs(score(learner.scorer, batch), update_follows=True)
            learner.policy.update(learner.advantages(batch))
            assert batch.metrics["actor/grad_norm"] > 0
        held[method] = batch.rows.prompts
    assert {method for method, prompts in held.items() if isinstance(prompts, SharedRows)} == {"lazy"}
    lazy, token = held["lazy"], held["token"]
    assert torch.equal(lazy.flat, token.flat)
    assert token.flat.nbytes - lazy.stored.flat.nbytes == (2 - 1) * sum(lazy.stored.sizes()) * 8 > 0


def test_responses_that_reach_their_limit_are_masked_and_counted(settled):
    with running(settled({"algorithm.mask_truncated_responses": True})) as learner:
        batch = learner.advantages(learner.scored(1))
    truncated = [reason == "length" for reason in batch.answers.generation.finish_reasons]
    assert batch.metrics["reward/masked_rows"] == sum(truncated) > 0
    assert [size == 0 for size in batch.rows.kept_sizes()] == truncated
    assert batch.advantages.per_token.abs().sum() > 0


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
    with running(settled(more)) as learner:
        first, second = (learner.train_step(step).metrics for step in (1, 2))
        after = learner.kl_control.coefficient
    assert first["actor/reward_kl_penalty"] == 0 < second["actor/reward_kl_penalty"]
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 8 / 100))  # far below the target of 0.1
    assert after < second["actor/reward_kl_penalty_coeff"]
    assert first["actor/kl_coef"] == 0.25
    assert second["actor/kl_loss"] > 0
    assert second["critic/rewards/mean"] < second["critic/score/mean"]


def test_the_coefficient_of_the_kl_follows_the_mean_over_rows_of_each_rows_mean(settled):
    more = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.5,
        "algorithm.kl_ctrl.horizon": 100,
    }
    with running(settled(more)) as learner:
        batch = learner.scored(1)
        batch.rows = batch_of([4, 1, 1, 1, 1, 1, 1, 1])
        # 0.88 for each token of the first row and 0 elsewhere. The mean over rows is 0.11, a tenth above the target of 0.1, and
        # that over tokens is 0.32.
        batch.rows.ref_log_probs = batch.rows.old_log_probs - 0.88 * (batch.rows.response_row() == 0)
        learner.metrics(learner.advantages(batch))
        assert learner.kl_control.coefficient == pytest.approx(0.5 * (1 + 0.1 * 8 / 100), rel=1e-6)


def test_what_truncation_took_is_counted_step_by_step(settled):
    with running(settled({"data.truncation": "left", "data.max_prompt_length": 3})) as learner:
        found = [learner.train_step(step).metrics for step in (1, 2)]
        lengths = [len(learner.rollouts.generator.tokenizer(f"{n}+{n + 1}=")["input_ids"]) for n in range(9)]
    assert min(lengths) == max(lengths) == 4  # every prompt here is four tokens, one too many
    assert [(row["data/rows_truncated"], row["data/tokens_dropped"]) for row in found] == [(4.0, 4.0)] * 2


def test_a_batch_without_a_single_response_token_is_scored_and_updates_nothing(alike):
    learner = alike()
    rows = [PromptRow(index, "", "toy/arithmetic", "", {}, f"rows:{index}") for index in range(8)]
    answers = RowAnswers(rows, [], Generation([[]] * 8, None, []), [""] * 8)
    batch = StepBatch(1, StepPrompts([], [], 0, 0), answers, batch_of([0] * 8))
    learner.policy.old_log_probs(batch, update_follows=True)
    assert batch.rows.old_log_probs.shape == (0,)
    learner.policy.update(batch)
    metrics = batch.metrics
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0


def test_failed_rewards_are_counted(settled, tmp_path):
    (tmp_path / "half.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if int(ground_truth) < 7:\n        return 1.0\n    raise ValueError\n"
    )
    more = {"custom_reward_function.path": str(tmp_path / "half.py"), "custom_reward_function.on_error": "score"}
    more["data.train_files"] = write_rows(tmp_path / "seven.jsonl", 7)  # three of them below 7, and a step takes four
    with running(settled(more)) as learner:
        result = learner.train_step(1)
    failed = sum(int(row.ground_truth) >= 7 for row in result.answers.rows)
    assert result.metrics["reward/failed_rows"] == failed > 0


GAE = {
    "algorithm.adv_estimator": "gae",
    "critic.ppo_max_token_len_per_gpu": 40,
    "critic.model.enable_gradient_checkpointing": False,
    "critic.model.fsdp_config.dtype": "fp32",
    "critic.optim.lr": 1e-3,
}


def test_a_step_with_a_critic_computes_values_and_updates_both_models(settled):
    with running(settled(GAE)) as learner:
        first, second = (learner.train_step(step).metrics for step in (1, 2))
        phases = [span.name for span in learner.workers.clock.take()]
    order = ["gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights"]
    assert phases[2:] == order * 2
    assert first["critic/values/max"] == first["critic/values/min"] == 0  # the head starts at 0
    assert second["critic/values/max"] != 0
    assert first["critic/lr"] == pytest.approx(1e-3)
    assert first["critic/grad_norm"] > 0 < first["actor/grad_norm"]


@pytest.mark.parametrize("frees", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_warm_up_leaves_out_the_update_of_the_policy_and_what_it_would_sync(settled, frees):
    more = {"trainer.critic_warmup": 2, f"{AR}.rollout.free_cache_engine": frees, f"{AR}.actor.ppo_mini_batch_size": 4}
    with running(settled(GAE | more)) as learner:
        assert isinstance(learner.policy, OnPolicy), "the policy's update gives the old log-probs"
        first, second = (learner.train_step(step).metrics for step in (1, 2))
        phases = [span.name for span in learner.workers.clock.take()]
    waking = ["update_weights"] if frees else []
    rollout = ["gen", "gen"] if frees else ["gen"]
    warm = [*rollout, "reward", "old_log_prob", "values", "adv", "update_critic", *waking]
    assert phases[2:] == [*warm, *rollout, "reward", "values", "adv", "update_critic", "update_actor", "update_weights"]
    assert "actor/grad_norm" not in first
    assert first["training/log_probs_not_finite"] == 0
    assert second["actor/grad_norm"] > 0


def test_the_discount_and_the_decay_reach_the_advantages(settled):
    returns = {}
    for gamma, lam in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        with running(settled(GAE | {"algorithm.gamma": gamma, "algorithm.lam": lam})) as learner:
            returns[gamma, lam] = learner.train_step(1).metrics["critic/returns/mean"]
    whole, discounted, decayed = returns.values()
    # Values are 0 in the first step, so both halve what a token gets for each token that follows it.
    assert discounted == pytest.approx(decayed, rel=1e-6)
    assert discounted < whole


@pytest.fixture(scope="module")
def rlt_toy(tmp_path_factory):
    return rlt.brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


@pytest.mark.parametrize(
    ("more", "scoring"),
    [
        ({}, ["old_log_prob", "reward", "ref"]),
        ({f"{rlt.RLT}.kl_teacher": "reference"}, ["old_log_prob", "ref", "reward"]),
        (rlt.ALIAS, ["old_log_prob", "reward", "ref"]),
        ({f"{rlt.RLT}.unbias_teacher_log_probs": False}, ["old_log_prob", "old_log_prob", "reward", "ref"]),
    ],
)
def test_a_student_scores_between_the_log_probs_while_the_engine_sleeps(rlt_toy, tmp_path, more, scoring):
    settings = rlt.settings_of(rlt_toy, tmp_path / "run", {f"{AR}.rollout.free_cache_engine": True, **more})
    with running(settings) as learner:
        learner.workers.clock.take()
        metrics = learner.train_step(1).metrics
        phases = [span.name for span in learner.workers.clock.take()]
        assert phases == ["gen", "gen", *scoring, "adv", "update_actor", "update_weights"]
        assert metrics["actor/grad_norm"] > 0
        assert metrics["critic/score/mean"] == pytest.approx(metrics["rlt/reward"])


def test_rows_that_are_not_scored_count_in_no_mean(rlt_toy, tmp_path):
    """A limit between the lengths of the student's sequences skips some rows."""
    with running(rlt.settings_of(rlt_toy, tmp_path / "whole")) as learner:
        batch = learner.scored(1)
        infos = [row.extra_info for row in batch.answers.rows]
        explained = ExplanationBatch.of(infos, batch.answers.generation.response_ids, batch.names)
        lengths = sorted(learner.scorer.score(explained).rows.ids.lengths.tolist())
    more = {f"{rlt.RLT}.max_student_len": (lengths[0] + lengths[-1]) // 2, f"{rlt.RLT}.overlong": "skip"}
    with running(rlt.settings_of(rlt_toy, tmp_path / "cut", more)) as learner:
        result = learner.train_step(1)
    scores = [each.score for each in result.results if not math.isnan(each.score)]
    assert 0 < len(scores) < 6
    assert result.metrics["reward/invalid_rows"] == 6 - len(scores)
    for name in ("score", "rewards"):
        assert result.metrics[f"critic/{name}/mean"] == pytest.approx(sum(scores) / len(scores))
    assert math.isfinite(result.metrics["actor/grad_norm"])
    assert result.metrics["actor/skipped_updates"] == 0


@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_quantised_students_ranks_are_checked_in_the_first_step_alone(rlt_toy, tmp_path, kind):
    with running(rlt.settings_of(rlt_toy, tmp_path / "run", {f"{rlt.MODEL}.quantization": kind})) as learner:
        first, second = (learner.train_step(step).metrics for step in (1, 2))
    assert -1 <= first["rlt/rank_correlation"] <= 1
    assert "rlt/rank_correlation" not in second


def test_a_scoring_pass_whose_budget_learns_has_its_cap_among_the_metrics(rlt_toy, tmp_path):
    more = {f"{AR}.actor.adaptive_token_budget": True, f"{rlt.RLT}.max_tokens_per_micro_batch": 100}
    with running(rlt.settings_of(rlt_toy, tmp_path / "run", more)) as learner:
        metrics = learner.train_step(1).metrics
    assert metrics["perf/token_budget/reward"] == 100.0


ADAPTIVE = {
    f"{AR}.actor.adaptive_token_budget": True, f"{AR}.actor.use_kl_loss": True, f"{AR}.actor.ppo_max_token_len_per_gpu": 64,
    "trainer.track_memory_every_steps": 1,
}  # fmt: skip
PASSES = ("old_log_prob", "ref", "update_actor")


def caps(metrics):
    return {phase: metrics[f"perf/token_budget/{phase}"] for phase in PASSES}


def test_a_learned_budget_falls_under_a_limit_and_changes_no_metric_of_learning(settled):
    learned, plain = [], []
    for rows, more in ((plain, ADAPTIVE | {f"{AR}.actor.adaptive_token_budget": False}), (learned, ADAPTIVE)):
        with running(settled(more)) as learner:
            learner.workers.track = True
            rows += [learner.train_step(1).metrics]
            if more is ADAPTIVE:
                peak = learner.workers.figures.peak_bytes
                assert peak is not None
                assert caps(rows[0]) == dict.fromkeys(PASSES, 64.0)  # a CPU without a limit has nothing to compare with
                assert learner.workers.figures.budget_bytes is None
    assert not any("token_budget" in name for name in plain[0])
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
        assert learned[0][name] == pytest.approx(plain[0][name], abs=1e-5)


def test_a_budget_learns_from_the_limit_of_the_device(settled):
    with running(settled(ADAPTIVE | {"memory.device_limit_gb": 0.1})) as learner:
        learner.workers.track = True
        learner.workers.all("update_weights", Worker.update_weights)
        plenty = learner.train_step(1).metrics
        assert caps(plenty) == dict.fromkeys(PASSES, 64.0)
        budget = learner.learned_budgets()["ref"]
        budget.cap = 20
        batch = learner.rollouts.generate(learner.rollouts.prompts.next(), 2)
        learner.ref_pass.compute(batch.rows, batch.names)
        fullest = max(
            batch.rows.row_tokens().cost(rows)
            for rows in learner.ref_pass.budget.micro_batches(batch.rows.row_tokens(), batch.names)
        )
        assert 20 <= budget.cap <= 25
        assert fullest <= budget.cap


def described(truncates=False, kl_mean=None, entropy=None, old_log_prob=-5.0, values=None):
    """Describes two groups of two: responses of 4, 1, 0 and 3 tokens, rewards 1, 0, 0.5 and 0.5, the last one a failure."""
    rows = batch_of([4, 1, 0, 3])
    rows.old_log_probs[0] = old_log_prob
    rows.old_values = values
    results = [RewardResult(1.0, {}), RewardResult(0.0, {}), RewardResult(0.5, {}), RewardResult(0.5, {}, failed=True)]
    per_token = torch.tensor([1.0, -1.0, 0.0, 0.0])[rows.response_row()]
    scores = torch.tensor([result.score for result in results])
    advantages = Advantages(per_token, per_token + 0.5, scores - 0.25, kl_mean, {"groups": 2.0})
    answers = RowAnswers([], [], Generation([], None, [], cached_tokens=6), [])
    prompts = StepPrompts([], [], rows_truncated=2, tokens_dropped=9)
    batch = StepBatch(3, prompts, answers, rows, results, entropy, advantages)
    return StepMetrics(3, 4, truncates).describe(batch, 0.5)


def test_a_step_is_described_by_means_shares_and_counts():
    metrics = described()
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/mean"] == 0.25
    assert metrics["critic/advantages/mean"] == pytest.approx((4 - 1) / 8)
    assert metrics["critic/returns/mean"] == pytest.approx((4 - 1) / 8 + 0.5)
    assert metrics["prompt_length/clip_ratio"] == 1.0  # each prompt has three tokens, which is the cap
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["response/aborted_ratio"] == 0.25
    assert (metrics["reward/failed_rows"], metrics["reward/groups"]) == (1.0, 2.0)
    assert metrics["rollout/prefix_cache_hit_rate"] == 6 / 12


@pytest.mark.parametrize(("old_log_prob", "count"), [(-5.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_log_probs_that_are_not_finite_are_counted(old_log_prob, count):
    assert described(old_log_prob=old_log_prob)["training/log_probs_not_finite"] == count


def test_what_a_run_does_not_compute_is_absent():
    assert {"actor/entropy", "actor/reward_kl_penalty", "data/tokens_dropped"}.isdisjoint(described())
    assert "actor/entropy" not in described(entropy=torch.zeros(0))
    metrics = described(truncates=True, kl_mean=0.125, entropy=torch.tensor([1.0, 2.0]))
    assert metrics["actor/entropy"] == 1.5
    assert (metrics["actor/reward_kl_penalty"], metrics["actor/reward_kl_penalty_coeff"]) == (0.125, 0.5)
    assert (metrics["data/tokens_dropped"], metrics["data/rows_truncated"]) == (9.0, 2.0)


def test_values_are_described_and_compared_with_the_returns_where_there_is_a_critic():
    assert not any(name.startswith(("critic/values", "critic/vf_")) for name in described())
    returns = torch.tensor([1.5, 1.5, 1.5, 1.5, -0.5, 0.5, 0.5, 0.5])
    metrics = described(values=returns - torch.tensor([0.5, -0.5] * 4))
    assert (metrics["critic/values/min"], metrics["critic/values/max"]) == (-1.0, 2.0)
    residual, total = torch.tensor([0.5, -0.5] * 4).double().var(), returns.double().var()
    assert metrics["critic/vf_explained_var"] == pytest.approx(float(1 - residual / (total + 1e-5)))
    assert described(values=returns)["critic/vf_explained_var"] == 1.0


def test_tokens_of_truncated_responses_are_not_kept_beside_those_that_the_rollout_correction_rejects():
    def masked(reasons, kept=None):
        rows = batch_of([2, 3, 1, 1])
        rows.kept = kept
        return mask_truncated(rows, reasons), rows

    metrics, rows = masked(["stop", "length", "stop", "stop"])
    assert metrics == {"reward/masked_rows": 1.0}
    assert rows.kept.tolist() == [True, True, False, False, False, True, True]
    assert rows.kept_sizes() == [2, 0, 1, 1]
    metrics, rows = masked(["stop"] * 4)
    assert (metrics, bool(rows.kept.all())) == ({"reward/masked_rows": 0.0}, True)
    _, rows = masked(["stop", "length", "stop", "stop"], torch.tensor([False, *[True] * 6]))
    assert rows.kept.tolist() == [False, True, False, False, False, True, True]


FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 2}


def test_the_reference_moves_every_so_many_steps_that_update_the_policy_and_the_count_is_restored(settled):
    with running(settled(FOLLOWS)) as learner:
        sync = learner.reference_sync
        assert (sync.every, sync.optimizer_steps) == (2, 2)
        skipped = [0, 1, 2, 2, 0, 0, 0]  # of two optimizer steps each
        moves = [sync.after_update({"actor/skipped_updates": count})["ref/sync"] for count in skipped]
        assert moves == [0, 1, 0, 0, 0, 1, 0]
        other = dataclasses.replace(sync, steps=0)
        other.load_state_dict(sync.state_dict())
        assert other.after_update({"actor/skipped_updates": 0}) == {"ref/sync": 1.0}


def test_a_run_without_a_kl_has_no_reference_to_move(settled):
    with running(settled({f"{AR}.ref.sync_every_steps": 2})) as learner:
        assert learner.reference_sync is None


CRITIC = Critic(
    ppo_mini_batch_size=2,
    ppo_epochs=1,
    shuffle=False,
    use_dynamic_bsz=True,
    ppo_max_token_len_per_gpu=40,
    forward_max_token_len_per_gpu=9,
    optim=Optim(lr=0.5),
)


class Valuer(Updater):
    """Gives each token its id as value."""

    role = "critic"

    def values(self, batch, micro_batches):
        self.cut = micro_batches
        return batch.responses.flat.float()


def training(tmp_path, ranks=1, critic=CRITIC, warmup=0):
    workers = group_of(*map(Valuer, range(ranks)))
    update, values = critic_budgets(critic)
    cutter = MiniBatchCutter(ranks, critic, 2, update, True)
    return CriticTraining(workers, critic, cutter, values, warmup, None, CheckpointStore(tmp_path / "run", None))


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_are_in_batch_order_however_they_are_spread(tmp_path, ranks):
    batch = batch_of([4, 1, 0, 3, 2, 2, 4, 4])
    critic = training(tmp_path, ranks)
    assert critic.begin_values(batch, "abcdefgh").result().tolist() == batch.responses.flat.tolist()
    cuts = [member.cut for member in critic.workers.group.members]
    assert len({len(cut) for cut in cuts}) == 1
    assert len(cuts[0]) > 1, "the values pass has its own budget"


def test_a_row_beyond_the_values_budget_is_named_with_the_key(tmp_path):
    small = dataclasses.replace(CRITIC, forward_max_token_len_per_gpu=3)
    with pytest.raises(ConfigError, match=r"critic\.forward_max_token_len_per_gpu=3: .*a"):
        training(tmp_path, critic=small).begin_values(batch_of([4, 4]), "ab").result()


def test_an_update_has_the_critics_mini_batches_with_old_values_and_returns(tmp_path):
    batch, critic = batch_of([1] * 8), training(tmp_path)
    batch.old_values, batch.returns = torch.arange(8.0), -torch.arange(8.0)
    metrics = critic.begin_update(batch, "abcdefgh", 1).result()
    (member,) = critic.workers.group.members
    assert [mini.batch.old_values.tolist() for mini in member.minis] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mini.batch.returns.tolist() for mini in member.minis] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert metrics == {"critic/loss": 1.0, "critic/grad_norm": 2.0, "critic/lr": 0.5, "critic/skipped_updates": 0.0}
    two = training(tmp_path, 2).begin_update(batch_of([1] * 8), "abcdefgh", 1)
    assert two.result() == metrics | {"critic/loss": 1.0 + 2.0}


def test_weights_that_one_rank_has_updated_in_part_stop_the_run_and_name_the_critic(tmp_path, monkeypatch):
    monkeypatch.setattr(Valuer, "norm", math.nan)
    monkeypatch.setattr(Valuer, "partial", (0.0, 1.0))
    with pytest.raises(TrainingError, match=r"critic\.optim\.in_backward=true: in step 3 .* critic\.optim\.lr=<less than 0\.5>"):
        training(tmp_path, 2).begin_update(batch_of([1] * 8), "abcdefgh", 3).result()


def test_the_first_steps_are_the_warm_up(tmp_path):
    """As in verl, which trains the policy where ``critic_warmup <= step``."""
    critic = training(tmp_path, warmup=3)
    assert [critic.warms_up(step) for step in (1, 2, 3)] == [True, True, False]
    assert not training(tmp_path, warmup=1).warms_up(1)
    assert not training(tmp_path).warms_up(1)


def test_both_budgets_are_the_critics_own():
    update, values = critic_budgets(CRITIC)
    assert (update.by_tokens, update.max_tokens, update.key) == (True, 40, "critic.ppo_max_token_len_per_gpu")
    assert (values.by_tokens, values.max_tokens, values.key) == (True, 9, "critic.forward_max_token_len_per_gpu")
    by_rows = dataclasses.replace(
        CRITIC, use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=3, forward_micro_batch_size_per_gpu=5
    )
    assert [budget.rows for budget in critic_budgets(by_rows)] == [3, 5]


@pytest.mark.parametrize("mode", ["sequence", "vanilla"])
def test_a_masked_response_has_no_gradient_and_counts_for_the_mean_over_sequences(mode):
    rows = batch_of([2, 3, 1, 0])
    mask_truncated(rows, ["stop", "length", "stop", "stop"])
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "seq-mean-token-sum"}
    log_probs, advantages = torch.zeros(6, requires_grad=True), torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0, -2.0])
    row, lengths = rows.response_row(), torch.tensor(rows.kept_sizes())
    tokens = LossTokens(log_probs, torch.zeros(6), advantages, row, lengths, GlobalCounts(3.0, 4.0), kept=rows.kept)
    loss, _ = policy_loss(tokens, Actor(policy_loss=PolicyLoss(loss_mode=mode), **clips))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-0.25, -0.25, 0.0, 0.0, 0.0, 0.5]))
