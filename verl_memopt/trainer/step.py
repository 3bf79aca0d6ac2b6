"""One training step: generate, reward, log-probs, advantages, update, weight sync, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_memopt.algorithms.corrections import corrects_before_update
from verl_memopt.algorithms.kl import KlController
from verl_memopt.config.schema import Algorithm
from verl_memopt.data.prefetcher import PromptPrefetcher, StepPrompts
from verl_memopt.memory.batching.learned_budget import LearnedBudget, budget_metrics
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.trainer.corrections import BypassUpdate, correct_before_update, divergence_metrics
from verl_memopt.trainer.critic_update import CriticTraining
from verl_memopt.trainer.experience import LogProbPass, StepBatch, compute_advantages, to_batch
from verl_memopt.trainer.forge import Forge
from verl_memopt.trainer.generation import Answers, Generator
from verl_memopt.trainer.group_filter import GroupFilter
from verl_memopt.trainer.log_prob_mismatch import MismatchCheck
from verl_memopt.trainer.reference_sync import ReferenceSync
from verl_memopt.trainer.remax import add_baselines, greedy_batch
from verl_memopt.trainer.replay import NoPrompts, Replay, check_same_prompts
from verl_memopt.trainer.resampling import draw_rows
from verl_memopt.trainer.rewarder import Computed, Scorer
from verl_memopt.trainer.step_metrics import StepMetrics
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.trainer.truncated import mask_truncated
from verl_memopt.trainer.update import PolicyUpdate


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        metrics: Metrics under verl's names.
        answers: Answers of the rollout.
        results: Reward of each answer.
        response_tokens: Response tokens of all answers.
        total_tokens: Total tokens of all prompts and answers.
    """

    metrics: dict[str, float]
    answers: Answers
    results: list[RewardResult]
    response_tokens: int
    total_tokens: int


def nothing() -> None:
    """Do nothing."""


@dataclass
class Learner:
    """Runs training steps, phase by phase.

    Attributes:
        workers: Workers that hold the models and the engines.
        prompts: Prompts of the next step; none where the rows of ``replay`` bring their own.
        generator: Answers the prompts.
        scorer: Scores the answers, once everything that it reads exists.
        critic: Computes values and learns returns; None where the estimator needs no critic.
        group_filter: Leaves out groups without a signal; None to keep all.
        old_pass: Log-probs before the update; None where the forward of the update gives them.
        ref_pass: Log-probs of the reference; None where the settings have no KL.
        mismatch: Compares the engine's log-probs with the trainer's.
        bypass: The update of bypass mode, in which the engine's log-probs are the old ones; None in any other.
        greedy_baseline: Answer each prompt greedily as well (ReMax).
        algorithm: Settings of the advantages.
        kl_control: The coefficient of the KL in the reward, saved and restored with the run.
        policy_update: Cuts the batch for the optimizer steps, and reads their results.
        step_metrics: Describes the batch at the end.
        replay: Gives the rows of a step in place of the engine; None where the engine generates them.
        reference_sync: Moves the reference towards the policy; None where the reference keeps its weights.
        before_update: Called just before the update; it may raise Stopped. Until then a step can be abandoned.
    """

    workers: TimedGroup
    prompts: PromptPrefetcher | NoPrompts
    generator: Generator
    scorer: Scorer
    critic: CriticTraining | None
    group_filter: GroupFilter | None
    old_pass: LogProbPass | None
    ref_pass: LogProbPass | None
    mismatch: MismatchCheck
    bypass: BypassUpdate | None
    greedy_baseline: bool
    algorithm: Algorithm
    kl_control: KlController
    policy_update: PolicyUpdate
    step_metrics: StepMetrics
    replay: Replay | Forge | None = None
    reference_sync: ReferenceSync | None = None
    before_update: Callable[[], None] = nothing

    def train_step(self, step: int) -> StepResult:
        """Run step number ``step`` and return its result.

        Raises:
            RewardError, WorkerError: A reward or a worker failed.
            TrainingError: Too few groups have a signal.
            RolloutError: The engine's log-probs are too far from the trainer's.
            Stopped: a stop was requested and the step abandoned. Only the position in the data has changed.
        """
        batch = self.scored(step)
        batch = self.values(batch)
        batch = self.advantages(batch)
        self.before_update()
        batch = self.update_critic(batch)
        if not self.warms_up(step):
            batch = self.update(batch)
        if not self.warms_up(step) or self.generator.frees_engine:  # a sleeping engine keeps no weights
            self.sync_weights()
        batch = self.sync_reference(batch)
        batch = self.metrics(batch)
        return self.result(batch)

    def warms_up(self, step: int) -> bool:
        """Return whether a step trains the critic alone, so that the policy stays as it is."""
        return self.critic is not None and self.critic.warms_up(step)

    def scored(self, step: int) -> StepBatch:
        """Answer the prompts of a step, compute the log-probs, and score the answers when all that the scorer reads exists."""
        reads = self.scorer.reads
        batch = self.policy_log_probs(self.rollouts(step))
        if reads == {"old_log_probs"}:
            self.score(batch)  # before the reference takes the policy's place on the device: a scorer may use the policy
        self.reference_log_probs(batch)
        return self.score(batch) if "ref_log_probs" in reads else batch

    def rollouts(self, step: int) -> StepBatch:
        """Answer the prompts of a step, and score the answers where their text is enough.

        With a group filter, further prompts follow until the step is full.
        """
        if self.replay is not None:
            return self.replayed(self.replay, step)
        assert not isinstance(self.prompts, NoPrompts)
        if self.group_filter is None:
            batch = self.baselines(self.generate(self.prompts.next(), step, stays_awake=self.greedy_baseline))
            return batch if self.scorer.reads else self.score(batch)

        source = self.prompts

        def one_round(earlier_rounds: int) -> StepBatch:
            prompts = source.more() if earlier_rounds else source.next()
            return self.score(self.generate(prompts, step, earlier_rounds, stays_awake=True))

        kept, metrics = self.group_filter.fill(one_round, step)
        rows = to_batch(kept.answers, self.generator.rollout.n, self.policy_update.actor)
        batch = StepBatch(step, kept.prompts, kept.answers, rows, kept.results, metrics=metrics)
        if self.greedy_baseline:
            return self.baselines(batch)
        self.generator.release_engine()
        return batch

    def replayed(self, replay: Replay | Forge, step: int) -> StepBatch:
        """Return the rows of a step that no engine generates, with their scores. An engine wakes and rests all the same."""
        replayed = replay.read(step)
        prompts = replayed.prompts
        if not isinstance(self.prompts, NoPrompts):
            prompts = self.prompts.next()
            check_same_prompts(replayed, prompts)
        if self.generator.has_engine:
            self.generator.wake_and_release()
        answers = replayed.answers
        batch = StepBatch(step, prompts, answers, to_batch(answers, self.generator.rollout.n, self.policy_update.actor))
        if replay.scored:
            batch.results = replayed.results or []
            return batch
        return batch if self.scorer.reads else self.score(batch)

    def generate(self, prompts: StepPrompts, step: int, earlier_rounds: int = 0, stays_awake: bool = False) -> StepBatch:
        """Answer the prompts, ``rollout.n`` times each. Arguments as in :meth:`Generator.generate`."""
        answers = self.generator.generate(prompts, step, earlier_rounds, stays_awake)
        return StepBatch(step, prompts, answers, to_batch(answers, self.generator.rollout.n, self.policy_update.actor))

    def baselines(self, batch: StepBatch) -> StepBatch:
        """Add the score of a greedy response to each prompt, where the estimator compares with it. The engine is released."""
        if not self.greedy_baseline:
            return batch
        greedy = self.score(greedy_batch(self.generator, batch, self.policy_update.actor))
        return add_baselines(batch, greedy, self.generator.rollout.n)

    def score(self, batch: StepBatch) -> StepBatch:
        """Score each answer. What the scorer reads must exist."""
        scored = self.scorer.score_answers(batch.answers, Computed(batch.rows, batch.names))
        batch.results = scored.results
        batch.metrics |= scored.metrics
        return batch

    def log_probs(self, batch: StepBatch) -> StepBatch:
        """Add the policy's log-probs before the update and, where the settings have a KL, the reference's."""
        return self.reference_log_probs(self.policy_log_probs(batch))

    def policy_log_probs(self, batch: StepBatch) -> StepBatch:
        """Add the policy's log-probs before the update, unless the update computes them."""
        old_pass = self.old_pass
        if self.bypass is not None:
            batch.rows.old_log_probs = batch.rows.rollout_log_probs
        elif self.critic is not None and self.warms_up(batch.step):
            old_pass = self.critic.warmup_pass
        if old_pass is None:
            return batch
        old = old_pass.compute(batch.rows, batch.names)
        batch.rows.old_log_probs, batch.entropy, batch.sum_pi_squared = old.log_probs, old.entropy, old.sum_pi_squared
        return self.compare_log_probs(batch)

    def reference_log_probs(self, batch: StepBatch) -> StepBatch:
        """Add the reference's log-probs, where the settings have a KL."""
        if self.ref_pass is not None:
            batch.rows.ref_log_probs = self.ref_pass.compute(batch.rows, batch.names).log_probs
        return batch

    def values(self, batch: StepBatch) -> StepBatch:
        """Add the value before each response token, where there is a critic."""
        if self.critic is not None:
            batch.rows.old_values = self.critic.values(batch.rows, batch.names)
        return batch

    def advantages(self, batch: StepBatch) -> StepBatch:
        """Add the advantage of each response token, after the rollout correction that they may read."""
        algorithm = self.algorithm
        with self.workers.clock.phase("adv"):
            if corrects_before_update(algorithm.rollout_correction):
                batch.metrics |= correct_before_update(batch.rows, algorithm.rollout_correction)
            if algorithm.mask_truncated_responses:
                batch.metrics |= mask_truncated(batch.rows, batch.answers.generation.finish_reasons)
            own = batch.baselines, batch.sum_pi_squared
            batch.advantages = compute_advantages(batch.rows, batch.scores, batch.names, algorithm, self.kl_control, *own)
            batch.rows.advantages = batch.advantages.per_token
            batch.rows.returns = None if self.critic is None else batch.advantages.returns
            if algorithm.use_pf_ppo:
                draw_rows(batch, algorithm.pf_ppo, self.policy_update.cutter.seed(batch.step, 0))
        return batch

    def update_critic(self, batch: StepBatch) -> StepBatch:
        """Take the critic's optimizer steps on the workers, where there is a critic."""
        if self.critic is not None:
            batch.metrics |= self.critic.update(*batch.for_update(), batch.step)
        return batch

    def update(self, batch: StepBatch) -> StepBatch:
        """Take the optimizer steps on the workers. Without a pass of their own, the old log-probs come from the update."""
        if self.bypass is not None:
            self.bypass.update(batch)
            return batch
        per_rank = self.policy_update.cut(*batch.for_update(), batch.step)
        if self.old_pass is not None:
            metrics = self.workers.each("update_actor", "update_actor", [(minis,) for minis in per_rank])
        else:
            updates = self.workers.each("update_actor", "update_on_policy", [tuple(minis) for minis in per_rank])
            log_probs = [update.log_probs for update in updates]
            batch.rows.old_log_probs = self.policy_update.gather_log_probs(batch.rows, log_probs, batch.step)
            metrics = [update.metrics for update in updates]
        self.policy_update.cutter.learn(per_rank, self.workers.figures)
        batch.metrics |= self.policy_update.metrics(metrics, batch.step)
        return self.compare_log_probs(batch) if self.old_pass is None else batch

    def sync_weights(self) -> None:
        """Give the engines the policy's weights, where there are engines."""
        if not self.generator.has_engine:
            return
        self.workers.all("update_weights", "update_weights")

    def sync_reference(self, batch: StepBatch) -> StepBatch:
        """Move the reference towards the policy, where it follows the policy and it is time."""
        if self.reference_sync is not None and not self.warms_up(batch.step):
            batch.metrics |= self.reference_sync.after_update(batch.metrics)
        return batch

    def compare_log_probs(self, batch: StepBatch) -> StepBatch:
        """Compare the engine's log-probs with the trainer's."""
        assert batch.rows.old_log_probs is not None, "compare after the pass that computes them"
        batch.metrics |= self.mismatch.compare(batch.rows.rollout_log_probs, batch.rows.old_log_probs, batch.step)
        batch.metrics |= divergence_metrics(batch.rows)
        return batch

    def metrics(self, batch: StepBatch) -> StepBatch:
        """Add the metrics of the batch, and adapt the coefficient of the KL to the KL that was measured."""
        assert batch.advantages is not None
        batch.metrics |= budget_metrics(self.learned_budgets())
        batch.metrics |= self.step_metrics.describe(batch, self.kl_control.coefficient)
        if batch.advantages.kl_mean is not None:
            self.kl_control.update(batch.advantages.kl_mean, batch.rows.num_rows)
        return batch

    def learned_budgets(self) -> dict[str, LearnedBudget]:
        """Return the token budgets that learn, by phase."""
        passes = [self.old_pass, self.ref_pass, None if self.critic is None else self.critic.warmup_pass]
        budgets = {each.phase: each.budget for each in passes if each is not None}
        budgets["update_actor"] = self.policy_update.cutter.budget
        if self.critic is not None:
            budgets |= {"values": self.critic.budget, "update_critic": self.critic.cutter.budget}
        learned = {phase: budget.learned for phase, budget in budgets.items() if budget.learned is not None}
        own = self.scorer.learned_budget
        return learned if own is None else learned | {"reward": own}

    def result(self, batch: StepBatch) -> StepResult:
        """Return the result of a finished step."""
        num_response_tokens = int(batch.rows.responses.lengths.sum())
        num_tokens = sum(batch.rows.prompts.sizes()) + sum(batch.rows.responses.sizes())
        return StepResult(batch.metrics, batch.answers, batch.results, num_response_tokens, num_tokens)

    def close(self) -> None:
        """Stop preparing prompts in the background."""
        self.prompts.close()
