"""One training step, as one would draw it: rollout, reward, log-probs, advantages, update, weight sync."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_memopt.algorithms.kl import KlController
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.config.checks import needs_reference
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.feed import PromptFeed, StepPrompts
from verl_memopt.errors import RolloutError, Stopped, TrainingError
from verl_memopt.observe.metrics import critic_metrics, length_metrics, summary_of
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rollout.sampling import train_sampling
from verl_memopt.trainer.agreement import log_prob_limit
from verl_memopt.trainer.assemble import Job
from verl_memopt.trainer.crew import Crew
from verl_memopt.trainer.experience import (
    Advantages,
    Answers,
    advantages,
    generate,
    sampling_seeds,
    score_answers,
    scored,
    to_batch,
)
from verl_memopt.trainer.passes import Budget, cut_ranks, mini_batch_rows, rows_per_rank
from verl_memopt.trainer.update_guard import BAD_LOG_PROBS, way_back
from verl_memopt.workers.policy import PARTIAL, SAME_ON_ALL_RANKS, SKIPPED, MiniBatch

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: its metrics, its answers with their scores, and the tokens it computed."""

    metrics: dict[str, float]
    answers: Answers
    results: list[RewardResult]
    response_tokens: int
    total_tokens: int


class Stepper:
    """Runs steps. kl_control: the coefficient of the KL in the reward, saved and restored with the run."""

    def __init__(self, job: Job, crew: Crew, runner: RewardRunner) -> None:
        self.job = job
        self.settings: Settings = job.settings
        self.crew = crew
        self.runner = runner
        self.kl_control = KlController(job.settings.algorithm.kl_ctrl)
        data, n = job.settings.data, job.settings.actor_rollout_ref.rollout.n
        # The feed works in a thread of its own, and so needs a tokenizer of its own.
        tokenizer = copy.deepcopy(job.site.tokenizer)
        encoder = PromptEncoder(tokenizer, data.max_prompt_length, data.truncation, job.site.embedding_rows)
        self.feed = PromptFeed(job.loader, n, job.settings.algorithm.expansion, encoder)
        self.update_budget, self.old_budget, self.ref_budget = budgets(job.settings)
        self.on_policy = leaves_out_old_pass(job.settings)
        self.before_update: Callable[[], None] = lambda: None
        """Called when all is ready for the update; it may raise Stopped. Up to here a step can be given up."""

    def run(self, step: int) -> StepResult:
        """Runs step number ``step`` and gives what it leaves.

        Errors: RewardError, WorkerError; RolloutError when the engine's log-probs are too far from the trainer's; Stopped when
        a stop was asked for and the step was given up, with nothing changed but the position in the data.
        """
        taken = self.feed.take()
        answers = self.rollout(taken, step)
        with self.crew.clock.phase("reward"):
            results = score_answers(self.runner, answers)
        batch = to_batch(answers, self.settings.actor_rollout_ref.rollout.n)
        names = [f"{row.address} (sample of step {step})" for row in answers.rows]
        batch, entropy = self.log_probs(batch, names)
        metrics: dict[str, float] = {} if self.on_policy else self.compare_log_probs(batch, step)
        with self.crew.clock.phase("adv"):
            scores = torch.tensor([result.score for result in results], dtype=torch.float32)
            found = advantages(batch, scores, names, self.settings.algorithm, self.kl_control)
            batch.advantages = found.per_token
        self.before_update()
        metrics |= self.update(batch, names, step)
        if self.on_policy:
            metrics |= self.compare_log_probs(batch, step)
        assert batch.old_log_probs is not None
        metrics[BAD_LOG_PROBS] = float((~batch.old_log_probs.isfinite()).sum())
        self.crew.all("update_weights", "update_weights")
        metrics |= self._describe(batch, scores, found, entropy, results)
        metrics["rollout/prefix_cache_hit_rate"] = answers.generation.cached_tokens / int(batch.prompts.lengths.sum())
        if self.settings.data.truncation != "error":
            metrics |= {"data/tokens_dropped": float(taken.tokens_dropped), "data/rows_truncated": float(taken.rows_truncated)}
        total = sum(batch.prompts.sizes()) + sum(batch.responses.sizes())
        return StepResult(metrics, answers, results, int(batch.responses.lengths.sum()), total)

    def close(self) -> None:
        """Ends what prepares prompts in the background."""
        self.feed.close()

    def rollout(self, taken: StepPrompts, step: int) -> Answers:
        """Answers the step's prompts ``rollout.n`` times each, and lets the engine release its memory."""
        rollout, job = self.settings.actor_rollout_ref.rollout, self.job
        rows = [row for row in taken.prompts for _ in range(rollout.n)]
        assert rollout.seed is not None
        seeds = sampling_seeds(taken.prompts, rollout.n, rollout.seed, step)
        sampling, parallel = train_sampling(rollout), rollout.tensor_model_parallel_size
        try:
            generation = generate(self.crew, "gen", taken.prompt_ids, seeds, sampling, parallel, may_stop=True)
        except Stopped:
            self.release_engine()
            raise
        self.release_engine()
        texts = job.site.tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
        return Answers(rows, taken.prompt_ids, generation, texts)

    def release_engine(self) -> None:
        """Lets the engine release its memory, where it does so between rollouts."""
        if self.job.site.free_engine:
            self.crew.all("gen", "release_engine")

    def log_probs(self, batch: RolloutBatch, names: Sequence[str]) -> tuple[RolloutBatch, Tensor | None]:
        """Adds the policy's log-probs before the update and, where a KL is asked for, the reference's.

        Strictly on-policy the update finds the first by itself, and they are added then.
        """
        even_out, entropy = self.settings.trainer.balance_batch, None
        with_entropy = self.settings.actor_rollout_ref.actor.calculate_entropy
        if not self.on_policy:
            batch.old_log_probs, entropy = scored(
                self.crew, "old_log_prob", "old_log_probs", batch, self.old_budget, names, even_out, with_entropy
            )
        if needs_reference(self.settings):
            batch.ref_log_probs, _ = scored(self.crew, "ref", "ref_log_probs", batch, self.ref_budget, names, even_out)
        return batch, entropy

    def compare_log_probs(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Gives how far the engine's log-probs are from the trainer's, and stops the run past the threshold.

        The two are one distribution only without sampling filters; with filters the figures are given and bind nothing. They bind
        nothing either where the trainer's own are not finite: the weights are at fault then, and not their way to the engine.
        Such a step updates nothing, and :class:`UpdateGuard` counts it.
        """
        if batch.rollout_log_probs is None or not batch.rollout_log_probs.numel():
            return {}
        assert batch.old_log_probs is not None, "compared after the pass that makes them"
        difference = (batch.rollout_log_probs - batch.old_log_probs).abs()
        engine, trainer = batch.rollout_log_probs.exp(), batch.old_log_probs.exp()
        probs = (engine - trainer).abs()
        metrics = {
            "rollout/logprob_diff_mean": float(difference.mean()),
            "rollout/logprob_diff_max": float(difference.max()),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": float(probs.mean()),
            "training/rollout_probs_diff_max": float(probs.max()),
            "training/rollout_probs_diff_std": float(probs.std(correction=0)),
        }
        if engine.numel() > 1 and float(engine.std()) > 0 and float(trainer.std()) > 0:
            metrics["training/rollout_actor_probs_pearson_corr"] = float(torch.corrcoef(torch.stack([engine, trainer]))[0, 1])
        limit = log_prob_limit(self.settings.actor_rollout_ref)
        mean = metrics["rollout/logprob_diff_mean"]
        own_fault = not bool(batch.old_log_probs.isfinite().all())
        if limit is not None and not own_fault and not mean <= limit and same_distribution(self.settings):
            raise RolloutError(
                f"actor_rollout_ref.rollout.max_logprob_diff={self._told_limit(limit)}: in step {step} the engine's log-probs "
                f"are {mean:.4g} nats from the trainer's on average: the weight sync is stale or wrong, or their precisions "
                "differ too much. Compare rollout.dtype with actor.fsdp_config.dtype; raise the limit only if the difference is "
                "expected."
            )
        return metrics

    def _told_limit(self, limit: float) -> str:
        asked = self.settings.actor_rollout_ref.rollout.max_logprob_diff
        return f"auto ({limit} for these dtypes)" if asked == "auto" else str(limit)

    def update(self, batch: RolloutBatch, names: Sequence[str], step: int) -> dict[str, float]:
        """Takes the step's optimizer steps on all ranks and gives the global metrics."""
        actor = self.settings.actor_rollout_ref.actor
        per_rank: list[list[MiniBatch]] = [[] for _ in range(self.crew.world_size)]
        for epoch in range(actor.ppo_epochs):
            seed = actor.data_loader_seed * 1_000_003 + step * 1_009 + epoch if actor.shuffle else None
            num_prompts = batch.num_rows // self.settings.actor_rollout_ref.rollout.n
            minis = mini_batch_rows(num_prompts, self.settings.actor_rollout_ref.rollout.n, actor.ppo_mini_batch_size, seed)
            for rows in minis:
                for rank, mini in enumerate(self.mini_batches(batch, rows, names)):
                    per_rank[rank].append(mini)
        answers = self._updated(batch, per_rank, rows)
        assert len({answer[SKIPPED] for answer in answers}) == 1, [answer[SKIPPED] for answer in answers]
        metrics = {
            name: answers[0][name] if name in SAME_ON_ALL_RANKS else sum(answer[name] for answer in answers)
            for name in answers[0]
        }
        if metrics.pop(PARTIAL, 0.0):
            raise TrainingError(
                f"{ACTOR}.optim.in_backward=true: in step {step} a gradient was not finite after other parameters had been "
                "updated, and that cannot be taken back. With in_backward=false such an update is skipped. "
                f"{way_back(self.settings, self.job.store)}"
            )
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return metrics

    def _updated(
        self, batch: RolloutBatch, per_rank: Sequence[Sequence[MiniBatch]], last_rows: Sequence[int]
    ) -> list[dict[str, float]]:
        """Takes each rank's optimizer steps and gives its metrics; strictly on-policy ``batch`` gets its log-probs.

        last_rows: of the last mini-batch, which on-policy is the only one.
        """
        if not self.on_policy:
            return self.crew.each("update_actor", "update_actor", [(minis,) for minis in per_rank])
        answers = self.crew.each("update_actor", "update_on_policy", [tuple(minis) for minis in per_rank])
        shares = self.shares(batch, last_rows)
        found = [(own, answer.log_probs) for own, answer in zip(shares, answers, strict=True)]
        batch.old_log_probs = scatter_tokens(found, batch.responses.sizes())
        return [answer.metrics for answer in answers]

    def shares(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """Gives each rank's rows of an update's mini-batch."""
        tokens = batch.row_tokens(self.update_budget.shared)
        return rows_per_rank(tokens, rows, self.crew.world_size, self.settings.trainer.balance_batch)

    def mini_batches(self, batch: RolloutBatch, rows: Sequence[int], names: Sequence[str]) -> list[MiniBatch]:
        """Gives each rank's share of one mini-batch."""
        tokens, sizes = batch.row_tokens(self.update_budget.shared), batch.responses.sizes()
        counts = GlobalCounts(tokens=float(max(sum(sizes[row] for row in rows), 1)), sequences=float(len(rows)))
        shares = self.shares(batch, rows)
        micro = cut_ranks([tokens.select(own) for own in shares], [[names[r] for r in own] for own in shares], self.update_budget)
        return [MiniBatch(batch.select(own), bins, counts) for own, bins in zip(shares, micro, strict=True)]

    def _describe(
        self, batch: RolloutBatch, scores: Tensor, found: Advantages, entropy: Tensor | None, results: Sequence[RewardResult]
    ) -> dict[str, float]:
        data, lengths = self.settings.data, batch.responses.lengths
        metrics = critic_metrics(scores, found.rewards, found.per_row, found.per_row, lengths)
        metrics |= length_metrics(batch.prompts.lengths, lengths, data.max_prompt_length, data.max_response_length)
        metrics |= {f"reward/{name}": value for name, value in found.counts.items()}
        metrics["reward/failed_rows"] = float(sum(result.failed for result in results))
        if entropy is not None:
            metrics |= {"actor/entropy": summary_of("entropy", entropy)["entropy/mean"]} if entropy.numel() else {}
        if found.kl_mean is not None:
            metrics |= {"actor/reward_kl_penalty": found.kl_mean, "actor/reward_kl_penalty_coeff": self.kl_control.coefficient}
            self.kl_control.update(found.kl_mean, batch.num_rows)
        return metrics


def budgets(settings: Settings) -> tuple[Budget, Budget, Budget]:
    """Gives the budgets of the update, the old-log-prob pass and the reference pass."""
    actor, rollout, ref = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.ref
    update = Budget(
        actor.use_dynamic_bsz,
        actor.ppo_max_token_len_per_gpu,
        actor.ppo_micro_batch_size_per_gpu,
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        actor.use_prefix_grouper,
    )

    def scoring(section: str, by_tokens: bool | None, max_tokens: int | None, rows: int | None) -> Budget:
        return replace(
            update,
            by_tokens=bool(by_tokens),
            max_tokens=max_tokens or 0,
            rows=rows,
            key=f"actor_rollout_ref.{section}.log_prob_max_token_len_per_gpu",
        )

    old = scoring(
        "rollout",
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_max_token_len_per_gpu,
        rollout.log_prob_micro_batch_size_per_gpu,
    )
    reference = scoring(
        "ref", ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu
    )
    return update, old, reference


def leaves_out_old_pass(settings: Settings) -> bool:
    """Says whether the pass for old log-probs is left out: what it gives, the forward of the only optimizer step gives too."""
    actor, batch = settings.actor_rollout_ref.actor, settings.data.train_batch_size
    once = actor.ppo_epochs == 1 and batch == actor.ppo_mini_batch_size
    needed = settings.algorithm.use_kl_in_reward or actor.calculate_entropy
    return actor.old_log_prob_pass == "auto" and once and not needed


def same_distribution(settings: Settings) -> bool:
    """Says whether the engine's log-probs and the trainer's are of one distribution, so that a difference is a fault."""
    rollout = settings.actor_rollout_ref.rollout
    if not rollout.do_sample:
        return False
    if rollout.logprobs_mode == "raw_logprobs":
        return rollout.temperature == 1.0
    return rollout.top_p == 1.0 and rollout.top_k <= 0 and rollout.repetition_penalty == 1.0
