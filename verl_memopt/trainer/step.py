"""One training step, from prompts to weight sync, for every algorithm.

:class:`TrainingStep` shows the order. The classes below it are the parts that differ between algorithms: the source of the
rollouts, the update of the policy, and its old log-probs (the log-probs before the update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_memopt.agents.loop import conversation_metrics, prompt_tokens
from verl_memopt.algorithms.kl import KlController, kl_estimate
from verl_memopt.algorithms.losses import explained_variance
from verl_memopt.algorithms.rollout_correction import corrects_before_update
from verl_memopt.config.schema import Actor, Algorithm, Critic, Distill
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.prompts import PromptPrefetcher, StepPrompts
from verl_memopt.memory.token_budget import LearnedBudget, budget_metrics
from verl_memopt.observe.metrics import LOSS, critic_metrics, length_metrics, reward_metrics, summary_of
from verl_memopt.rewards.score import RewardResult
from verl_memopt.run.checkpoints import CheckpointStore
from verl_memopt.trainer.correct_rollouts import BypassUpdate, MismatchCheck, correct_before_update, divergence_metrics
from verl_memopt.trainer.group_filter import GroupFilter, draw_rows
from verl_memopt.trainer.micro_batching import Budget, MiniBatchCutter, PolicyUpdate, update_metrics
from verl_memopt.trainer.replay import Forge, NoPrompts, Replay, check_same_prompts
from verl_memopt.trainer.rollouts import (
    ForwardPass,
    Generator,
    LogProbPass,
    RowAnswers,
    StepBatch,
    dataset_answers,
    to_batch,
)
from verl_memopt.trainer.scoring import Scorer
from verl_memopt.trainer.teacher_pass import TeacherPass
from verl_memopt.trainer.update_guard import BAD_LOG_PROBS
from verl_memopt.worker.group import Pending, TimedGroup
from verl_memopt.worker.trained_model import ACTOR, CRITIC
from verl_memopt.worker.worker import Worker


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]
    answers: RowAnswers
    results: list[RewardResult]
    response_tokens: int
    total_tokens: int


@dataclass
class TrainingStep:
    """Runs training steps.

    Attributes:
        scorer: Gives each answer its reward.
        policy: Computes the old log-probs, and updates the policy.
        ref_pass: Computes the log-probs of the reference; None = nothing needs a reference.
        critic: Computes values, and is trained on returns; None = the estimator needs no critic.
        kl_control: Adapts the coefficient of the KL in the reward.
        reference_sync: Moves the reference towards the policy; None = the reference keeps its weights.
        teacher: The teacher's pass over the responses; None = there is no teacher.
        distill: What is learned from it.
        before_update: Called just before the update. It may raise Stopped, because a step can be abandoned until then.
    """

    workers: TimedGroup
    rollouts: Rollouts
    scorer: Scorer
    policy: PolicyTraining | BypassUpdate
    ref_pass: LogProbPass | None
    critic: CriticTraining | None
    algorithm: Algorithm
    kl_control: KlController
    step_metrics: StepMetrics
    reference_sync: ReferenceSync | None = None
    teacher: TeacherPass | None = None
    distill: Distill | None = None
    before_update: Callable[[], None] = lambda: None

    def train_step(self, step: int) -> StepResult:
        """Run step number ``step`` and return its result.

        Raises:
            RewardError, WorkerError: A reward or a worker failed.
            TrainingError: Too few groups have a signal.
            RolloutError: The engine's log-probs are too far from the trainer's.
            Stopped: A stop was requested, and the step was abandoned. Only the position in the data has changed.
        """
        critic, updates_policy = self.critic, not self.warms_up(step)
        batch = self.scored(step)  # rollout, reward, old and reference log-probs
        if critic is not None:
            batch.rows.old_values = critic.values(batch)  # a critic with its own devices has begun before the log-probs
        self.advantages(batch)
        self.before_update()
        if critic is not None:  # a critic with its own devices is updated at the same time as the policy
            critic_update = critic.begin_update(*batch.for_update(), step)
        if updates_policy:
            # The workers run forward, backward and optimizer step. If the loss is a sum over tokens, the LM head already
            # computes its gradient in the forward, and backward() only passes it on (memory/chunked_logprob_torch.py).
            self.policy.update(batch)
            batch.metrics |= self.policy.policy_update.entropy_weight(batch.metrics)
        if updates_policy or self.rollouts.generator.frees_engine:  # a sleeping engine keeps no weights
            self.sync_weights()
        if updates_policy and self.reference_sync is not None:
            batch.metrics |= self.reference_sync.after_update(batch.metrics)
        if critic is not None:
            batch.metrics |= critic_update.result()
        self.metrics(batch)
        return self.result(batch)

    def warms_up(self, step: int) -> bool:
        return self.critic is not None and self.critic.warms_up(step)

    def scored(self, step: int) -> StepBatch:
        # A reward model and a critic with their own devices compute while the policy and the reference compute log-probs.
        reads = self.scorer.reads
        batch = self.rollouts.step_batch(step)  # if the scorer reads only text, it has begun or finished
        if self.critic is not None and self.critic.workers.is_apart:
            batch.values = self.critic.begin_values(batch.rows, batch.names)
        self.policy.old_log_probs(batch, update_follows=not self.warms_up(step))
        if reads == {"old_log_probs"}:
            # Score before the reference replaces the policy on the device, because the scorer may use the policy.
            score(self.scorer, batch)
        if self.ref_pass is not None:
            batch.rows.ref_log_probs = self.ref_pass.compute(batch.rows, batch.names).log_probs
        self.ask_teacher(batch)
        if "ref_log_probs" in reads or batch.answers.model_scores is not None:
            score(self.scorer, batch)
        return batch

    def ask_teacher(self, batch: StepBatch) -> None:
        if self.teacher is not None:
            self.teacher.read(batch)

    def correct(self, batch: StepBatch) -> None:
        algorithm = self.algorithm
        if batch.corrected:
            return
        batch.corrected = True
        if corrects_before_update(algorithm.rollout_correction):
            batch.metrics |= correct_before_update(batch.rows, algorithm.rollout_correction)
        if algorithm.mask_truncated_responses:
            batch.metrics |= mask_truncated(batch.rows, batch.answers.generation.finish_reasons)

    def advantages(self, batch: StepBatch) -> StepBatch:
        algorithm = self.algorithm
        with self.workers.clock.phase("adv"):
            # The rollout correction comes first, because the advantages may use its weights.
            self.correct(batch)
            batch.advantages = batch.estimate(algorithm, self.kl_control, self.distill)
            batch.rows.advantages = batch.advantages.per_token
            batch.rows.returns = None if self.critic is None else batch.advantages.returns
            if algorithm.use_pf_ppo:
                draw_rows(batch, algorithm.pf_ppo, self.policy.policy_update.cutter.seed(batch.step, 0))
        return batch

    def sync_weights(self) -> None:
        if self.rollouts.generator.has_engine:
            self.workers.all("update_weights", Worker.update_weights)

    def metrics(self, batch: StepBatch) -> None:
        assert batch.advantages is not None
        batch.metrics |= budget_metrics(self.learned_budgets())
        batch.metrics |= self.policy.policy_update.cutter.share_metrics(batch.rows)
        batch.metrics |= self.step_metrics.describe(batch, self.kl_control.coefficient)
        if batch.advantages.kl_mean is not None:
            # Adapt the coefficient after the metrics, because they report the coefficient that this step used.
            self.kl_control.update(batch.advantages.kl_mean, batch.rows.num_rows)

    def learned_budgets(self) -> dict[str, LearnedBudget]:
        budgets = self.policy.budgets()
        if self.ref_pass is not None:
            budgets["ref"] = self.ref_pass.budget
        if self.critic is not None:
            warm_up = self.critic.warmup_pass
            budgets |= {warm_up.phase: warm_up.budget, "values": self.critic.budget, "update_critic": self.critic.cutter.budget}
        learned = {phase: budget.learned for phase, budget in budgets.items() if budget.learned is not None}
        own = self.scorer.learned_budget
        return learned if own is None else learned | {"reward": own}

    def result(self, batch: StepBatch) -> StepResult:
        num_response_tokens = sum(batch.rows.responses.sizes())
        num_tokens = sum(batch.rows.prompts.sizes()) + num_response_tokens
        return StepResult(batch.metrics, batch.answers, batch.results, num_response_tokens, num_tokens)

    def rollout_step(self, step: int) -> StepResult:
        assert not isinstance(self.rollouts.prompts, NoPrompts)
        batch = self.rollouts.generate(self.rollouts.prompts.next(), step)
        batch.metrics |= self.step_metrics.lengths(batch)
        return self.result(batch)

    def score_step(self, step: int) -> StepResult:
        batch = self.scored(step)
        batch.metrics |= summary_of("critic/score", batch.scores)
        batch.metrics |= reward_metrics(result.extra for result in batch.results)
        old, reference = batch.rows.old_log_probs, batch.rows.ref_log_probs
        assert old is not None
        batch.metrics |= summary_of("score/log_prob", old)
        if reference is not None:
            batch.metrics |= summary_of("score/kl_to_reference", kl_estimate(old, reference, "kl"))
        batch.metrics |= self.step_metrics.lengths(batch)
        return self.result(batch)

    def close(self) -> None:
        self.rollouts.prompts.close()


STEPS: dict[str, Callable[[TrainingStep, int], StepResult]] = {
    "rollout_only": TrainingStep.rollout_step, "score_only": TrainingStep.score_step,
}  # fmt: skip
"""Debug mode -> its step; every other mode runs whole training steps."""


def score(scorer: Scorer, batch: StepBatch) -> StepBatch:
    # Call this only when everything that the scorer reads has been computed.
    batch.results, metrics = scorer.score_answers(batch.answers, batch)
    batch.metrics |= metrics
    return batch


@dataclass
class Rollouts:
    """Provides the answers of a step. They come from the engine, from a dump, or from the dataset.

    Attributes:
        scorer: Scores the answers at once if it needs only their text; otherwise they are scored later in the step. A group
            filter and ReMax need a scorer of the first kind.
        greedy_baseline: Also generate a greedy answer to each prompt (ReMax).
        group_filter: Drops groups without a training signal; None = keep all groups.
        replay: Reads or makes the rows instead of the engine; None = the engine generates them.
        learns_dataset: Train on the responses in the dataset, without scores (supervised fine-tuning).
    """

    prompts: PromptPrefetcher | NoPrompts
    generator: Generator
    scorer: Scorer
    actor: Actor
    greedy_baseline: bool = False
    group_filter: GroupFilter | None = None
    replay: Replay | Forge | None = None
    learns_dataset: bool = False

    def step_batch(self, step: int) -> StepBatch:
        if self.replay is not None:
            return self._replayed(self.replay, step)
        assert not isinstance(self.prompts, NoPrompts)
        if self.learns_dataset:
            prompts = self.prompts.next()
            answers = dataset_answers(prompts.prompts, prompts.prompt_ids, self.generator.tokenizer)
            return self._batch(step, prompts, answers)
        if self.group_filter is not None:
            return self._filtered(self.group_filter, self.prompts, step)
        batch = self.generate(self.prompts.next(), step, stays_awake=self.greedy_baseline)
        if self.greedy_baseline:
            self._add_baselines(batch)
        return self._scored(batch)

    def generate(self, prompts: StepPrompts, step: int, earlier_rounds: int = 0, stays_awake: bool = False) -> StepBatch:
        return self._batch(step, prompts, self.generator.generate(prompts, step, earlier_rounds, stays_awake))

    def _filtered(self, group_filter: GroupFilter, source: PromptPrefetcher, step: int) -> StepBatch:
        def one_round(earlier_rounds: int) -> StepBatch:
            prompts = source.more() if earlier_rounds else source.next()
            return score(self.scorer, self.generate(prompts, step, earlier_rounds, stays_awake=True))

        kept, metrics = group_filter.fill(one_round, step)
        batch = self._batch(step, kept.prompts, kept.answers)
        batch.results, batch.metrics = kept.results, metrics
        if self.greedy_baseline:
            return self._add_baselines(batch)
        self.generator.release_engine()
        return batch

    def _replayed(self, replay: Replay | Forge, step: int) -> StepBatch:
        # The rows come from a dump or are synthetic. An engine still wakes and sleeps, so that it uses memory as in a real step.
        replayed = replay.read(step)
        prompts = replayed.prompts
        if not isinstance(self.prompts, NoPrompts):
            prompts = self.prompts.next()
            check_same_prompts(replayed, prompts)
        if self.generator.has_engine:
            self.generator.wake_and_release()
        batch = self._batch(step, prompts, replayed.answers)
        if replay.scored:
            batch.results = replayed.results or []
            return batch
        return self._scored(batch)

    def _scored(self, batch: StepBatch) -> StepBatch:
        # A scorer with its own devices begins here, and a later call of score() waits for it.
        if self.scorer.reads:
            return batch
        begun = self.scorer.begin(batch.answers)
        if begun is None:
            return score(self.scorer, batch)
        batch.answers = replace(batch.answers, model_scores=begun)
        return batch

    def _add_baselines(self, batch: StepBatch) -> StepBatch:
        # The greedy responses are a separate batch, because they only give baselines and are not trained on.
        answers = self.generator.generate_greedy(batch.prompts, batch.step)
        greedy = score(self.scorer, StepBatch(batch.step, batch.prompts, answers, to_batch(answers, 1, self.actor)))
        return add_baselines(batch, greedy, self.generator.rollout.n)

    def _batch(self, step: int, prompts: StepPrompts, answers: RowAnswers) -> StepBatch:
        return StepBatch(step, prompts, answers, to_batch(answers, self.generator.rollout.n, self.actor))


@dataclass
class PolicyTraining:
    """Gives a step its old log-probs, and updates the policy. The subclasses differ in how they get the old log-probs.

    Attributes:
        old_pass: Computes the old log-probs in a separate forward pass, in the steps that need one.
        mismatch: Compares the engine's log-probs with the trainer's.
    """

    workers: TimedGroup
    old_pass: LogProbPass
    policy_update: PolicyUpdate
    mismatch: MismatchCheck

    def old_log_probs(self, batch: StepBatch, update_follows: bool) -> None:
        """Add the old log-probs to the batch, unless the following update computes them in its own forward."""

    def update(self, batch: StepBatch) -> None:
        batch.metrics |= self.take_steps(batch)

    def budgets(self) -> dict[str, Budget]:
        return {"update_actor": self.policy_update.cutter.budget}

    def take_steps(self, batch: StepBatch) -> dict[str, float]:
        per_rank = self.policy_update.cut(*batch.for_update(), batch.step)
        metrics = self.workers.each("update_actor", Worker.update_actor, [(minis,) for minis in per_rank])
        self.policy_update.cutter.learn(per_rank, self.workers.figures)
        return self.policy_update.metrics(metrics, batch.step)

    def add_old_log_probs(self, batch: StepBatch) -> None:
        rows = batch.rows
        records = self.policy_update.actor.router_replay.mode == "R2"
        old = self.old_pass.compute(rows.for_record() if records else rows, batch.names)
        if records:
            replayed = rows.replaying(old.record)
            rows.routes, rows.prompt_routes, rows.forest = replayed.routes, replayed.prompt_routes, replayed.forest
        batch.rows.old_log_probs, batch.entropy, batch.statistics = old.log_probs, old.entropy, old.statistics
        self.compare_log_probs(batch)

    def compare_log_probs(self, batch: StepBatch) -> None:
        assert batch.rows.old_log_probs is not None, "compare after the pass that computes them"
        batch.metrics |= self.mismatch.compare(batch.rows.rollout_log_probs, batch.rows.old_log_probs, batch.step)
        batch.metrics |= divergence_metrics(batch.rows)


class SeparatePass(PolicyTraining):
    """A separate forward pass computes the old log-probs. So the update may take any number of optimizer steps."""

    def old_log_probs(self, batch: StepBatch, update_follows: bool) -> None:
        self.add_old_log_probs(batch)

    def budgets(self) -> dict[str, Budget]:
        return {self.old_pass.phase: self.old_pass.budget, **super().budgets()}


class OnPolicy(PolicyTraining):
    """The forward of the update also computes the old log-probs. This requires that the update is a single optimizer step."""

    def old_log_probs(self, batch: StepBatch, update_follows: bool) -> None:
        # A step that trains only the critic has no policy update, so it needs the separate pass.
        if not update_follows:
            self.add_old_log_probs(batch)

    def update(self, batch: StepBatch) -> None:
        per_rank = self.policy_update.cut(*batch.for_update(), batch.step)
        # On-policy every ratio is 1, so the loss gradient of each token is known in the forward. The head computes it there,
        # and returns the log-probs of the same forward.
        updates = self.workers.each("update_actor", Worker.update_on_policy, [tuple(minis) for minis in per_rank])
        cutter = self.policy_update.cutter
        (rows,) = cutter.mini_batch_rows(batch.rows, batch.step)  # of the only mini-batch
        parts = [(share, update.log_probs) for share, update in zip(cutter.shares(batch.rows, rows), updates, strict=True)]
        batch.rows.old_log_probs = scatter_tokens(parts, batch.rows.responses.sizes())
        cutter.learn(per_rank, self.workers.figures)
        batch.metrics |= self.policy_update.metrics([update.metrics for update in updates], batch.step)
        self.compare_log_probs(batch)


class Supervised(PolicyTraining):
    """The loss is the negative log-prob of the dataset's responses. It needs no old log-probs."""

    def update(self, batch: StepBatch) -> None:
        metrics = self.take_steps(batch)
        batch.metrics |= {LOSS: metrics["actor/loss"]}
        batch.metrics |= {name: value for name, value in metrics.items() if name not in ROLLOUT_METRICS}


ROLLOUT_METRICS = ("actor/loss", "actor/pg_loss", "actor/ppo_kl")
"""Metrics of the update that supervised fine-tuning leaves out. The loss has another name there, and the others need rollouts."""


@dataclass(frozen=True)
class CriticTraining:
    """Computes values with the critic, and updates the critic.

    Attributes:
        budget: Cuts the rows of a rank into micro-batches for the values pass.
        warmup: The first step that also trains the policy. Earlier steps train only the critic.
        warmup_pass: Computes the old log-probs in those earlier steps, which have no policy update.
        store: The checkpoints. An error names one of them to continue from.
    """

    workers: TimedGroup
    critic: Critic
    cutter: MiniBatchCutter
    budget: Budget
    warmup: int
    warmup_pass: LogProbPass
    store: CheckpointStore

    def warms_up(self, step: int) -> bool:
        return step < self.warmup

    def values(self, batch: StepBatch) -> Tensor:
        # The value before each response token, fp32 [R]. Wait for the pass that has begun, or run it now.
        begun = batch.values or self.begin_values(batch.rows, batch.names)
        return begun.result()

    def begin_values(self, batch: RolloutBatch, names: Sequence[str]) -> Pending[Tensor]:
        """Begin to compute the value before each response token, fp32 [R]. See :meth:`TimedGroup.begin`."""
        values = ForwardPass(self.workers, "values", Worker.values, self.budget, self.cutter.balance)
        return values.begin(batch, names).then(lambda parts: scatter_tokens(parts, batch.responses.sizes()))

    def begin_update(self, batch: RolloutBatch, names: Sequence[str], step: int) -> Pending[dict[str, float]]:
        """Begin the critic's optimizer steps. The result is the metrics over all ranks. See :meth:`TimedGroup.begin`.

        Reading the result raises TrainingError if a skipped update had already changed some weights.
        """
        per_rank = self.cutter.cut(batch.unrouted(), names, step)

        def metrics(results: list[dict[str, float]]) -> dict[str, float]:
            self.cutter.learn(per_rank, self.workers.figures)
            return update_metrics(results, CRITIC, step, self.critic.optim.lr, self.store)

        return self.workers.begin("update_critic", Worker.update_critic, [(minis,) for minis in per_rank]).then(metrics)


# ReMax: the score of a greedy response to each prompt is the baseline of its samples.


def add_baselines(batch: StepBatch, greedy: StepBatch, samples: int) -> StepBatch:
    scores = greedy.scores
    batch.baselines = scores.repeat_interleave(samples)
    batch.metrics |= summary_of("critic/baselines", scores[~scores.isnan()])
    return batch


# Truncated responses (which reached the length limit without an end token) are left out of the losses.


def mask_truncated(rows: RolloutBatch, finish_reasons: Sequence[str]) -> dict[str, float]:
    """Mark the tokens of truncated responses as not kept, in addition to those that the rollout correction rejects.

    Rewards and groups stay, so a truncated response still counts in the baseline of its group. Source: overlong filtering of
    DAPO, arXiv 2503.14476, and ``mask_truncated_completions`` of TRL.

    Returns:
        The metric ``reward/masked_rows``: the number of truncated responses.
    """
    finished = torch.tensor([reason != "length" for reason in finish_reasons])
    kept = finished[rows.response_row()]
    rows.kept = kept if rows.kept is None else rows.kept & kept
    return {"reward/masked_rows": float((~finished).sum())}


# Metrics that are computed from the batch of a step, under verl's names.


@dataclass(frozen=True)
class StepMetrics:
    """Computes metrics from the batch of a finished step.

    Attributes:
        truncates: Prompts over the length limit are cut, so report the number of cut tokens.
        rewards: The answers have rewards. False = they are the dataset's responses, which have none.
    """

    max_prompt_length: int
    max_response_length: int
    truncates: bool
    rewards: bool = True

    def describe(self, batch: StepBatch, kl_coefficient: float) -> dict[str, float]:
        metrics = self.lengths(batch)
        if self.rewards:
            metrics |= self._rewards(batch, kl_coefficient)
        if self.truncates:
            metrics["data/tokens_dropped"] = float(batch.prompts.tokens_dropped)
            metrics["data/rows_truncated"] = float(batch.prompts.rows_truncated)
        return metrics

    def lengths(self, batch: StepBatch) -> dict[str, float]:
        lengths = batch.rows.prompts.lengths, batch.rows.responses.lengths
        metrics = length_metrics(*lengths, self.max_prompt_length, self.max_response_length)
        if batch.answers.conversations is not None:
            metrics |= conversation_metrics(batch.answers.conversations) | batch.answers.metrics
        return metrics

    def _rewards(self, batch: StepBatch, kl_coefficient: float) -> dict[str, float]:
        advantages = batch.advantages
        assert advantages is not None
        assert batch.rows.old_log_probs is not None
        # Means leave out rows without a score (NaN).
        scores, rewards = (values[~values.isnan()] for values in (batch.scores, advantages.rewards))
        metrics = {BAD_LOG_PROBS: float((~batch.rows.old_log_probs.isfinite()).sum())}
        metrics |= critic_metrics(scores, rewards, advantages.per_token, advantages.returns)
        if batch.rows.old_values is not None:
            metrics |= summary_of("critic/values", batch.rows.old_values)
            metrics["critic/vf_explained_var"] = explained_variance(batch.rows.old_values, advantages.returns)
        metrics |= {f"reward/{name}": value for name, value in advantages.counts.items()}
        metrics |= reward_metrics(result.extra for result in batch.results)
        metrics["reward/failed_rows"] = float(sum(result.failed for result in batch.results))
        if batch.entropy is not None and batch.entropy.numel():
            metrics["actor/entropy"] = summary_of("entropy", batch.entropy)["entropy/mean"]
        if advantages.kl_mean is not None:
            metrics |= {"actor/reward_kl_penalty": advantages.kl_mean, "actor/reward_kl_penalty_coeff": kl_coefficient}
        cached, conversations = batch.answers.generation.cached_tokens, batch.answers.conversations
        prompts = int(batch.rows.prompts.lengths.sum()) if conversations is None else prompt_tokens(conversations)
        metrics["rollout/prefix_cache_hit_rate"] = cached / max(prompts, 1)
        return metrics


# The driver's part of a moving reference: it decides when the reference moves, and saves the count of steps in checkpoints.


@dataclass
class ReferenceSync:
    """Moves the reference towards the policy, once in ``every`` steps that update the policy.

    Attributes:
        optimizer_steps: Number of the policy's optimizer steps per training step.
        steps: Number of steps so far that updated the policy.
    """

    workers: TimedGroup
    every: int
    optimizer_steps: int
    steps: int = 0

    def after_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        # A step whose optimizer steps were all skipped is not counted, because the policy did not change.
        counts = metrics[ACTOR.skipped] < self.optimizer_steps
        self.steps += counts
        is_due = counts and self.steps % self.every == 0
        if is_due:
            self.workers.all("sync_ref", Worker.sync_reference)
        return {"ref/sync": float(is_due)}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]
