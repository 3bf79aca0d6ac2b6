"""Makes the batch of a step: prompts answered, scored, given log-probs and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_memopt.algorithms.advantages import ADVANTAGES, check_rewards, group_counts
from verl_memopt.algorithms.kl import KlController, kl_estimate, shaped_rewards
from verl_memopt.config.schema import Algorithm
from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.ragged import Ragged
from verl_memopt.errors import Stopped
from verl_memopt.rewards.rows import RewardResult, RewardRow
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rollout.engine import Generation
from verl_memopt.rollout.sampling import SamplingSettings, row_seed
from verl_memopt.trainer.crew import Crew
from verl_memopt.trainer.passes import Budget, cut_ranks, rows_per_rank


@dataclass(frozen=True)
class Answers:
    """Prompts and their responses, row = prompt * n + sample. texts: decoded without special tokens."""

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    generation: Generation
    texts: list[str]


def generate(
    crew: Crew,
    phase: str,
    prompt_ids: list[list[int]],
    seeds: list[int],
    sampling: SamplingSettings,
    tensor_parallel: int,
    may_stop: bool = False,
) -> Generation:
    """Answers every prompt, spread over the engines; the ranks of one engine get the same prompts.

    may_stop: engines may give up when the run is asked to stop. Errors: Stopped when one did.
    """
    engines = crew.world_size // tensor_parallel
    cuts = [len(prompt_ids) * index // engines for index in range(engines + 1)]
    shares = [slice(cuts[index], cuts[index + 1]) for index in range(engines)]
    arguments = [(prompt_ids[share], seeds[share], sampling, may_stop) for share in shares for _ in range(tensor_parallel)]
    answers = crew.each(phase, "generate", arguments)[::tensor_parallel]
    if any(answer is None for answer in answers):
        raise Stopped
    return Generation(
        response_ids=[ids for answer in answers for ids in answer.response_ids],
        log_probs=[row for answer in answers for row in answer.log_probs] if sampling.log_probs else None,
        finish_reasons=[reason for answer in answers for reason in answer.finish_reasons],
        cached_tokens=sum(answer.cached_tokens for answer in answers),
    )


def sampling_seeds(rows: Sequence[PromptRow], samples: int, seed: int, step: int) -> list[int]:
    """Gives one seed per row, fixed by the run's seed, the step, the prompt and the sample."""
    return [row_seed(seed, step, row.index, sample) for row in rows for sample in range(samples)]


def score_answers(runner: RewardRunner, answers: Answers) -> list[RewardResult]:
    """Gives each answer's score from the reward processes."""
    return runner.score(
        [
            RewardRow(row.data_source, text, row.ground_truth, row.extra_info, row.address)
            for row, text in zip(answers.rows, answers.texts, strict=True)
        ]
    )


def to_batch(answers: Answers, samples: int) -> RolloutBatch:
    """Gives the ragged batch of the answers."""
    generation = answers.generation
    log_probs = generation.log_probs
    return RolloutBatch(
        prompts=Ragged.from_rows(answers.prompt_ids, torch.int64),
        responses=Ragged.from_rows(generation.response_ids, torch.int64),
        group=torch.arange(len(answers.prompt_ids)) // samples,
        rollout_log_probs=None if log_probs is None else Ragged.from_rows(log_probs, torch.float32).flat,
        batch_size=[],
    )


def scored(
    crew: Crew, phase: str, method: str, batch: RolloutBatch, budget: Budget, names: Sequence[str], even_out: bool, *args: bool
) -> tuple[Tensor, Tensor | None]:
    """Gives (log-probs, entropies or None), fp32 [R], of a pass over the whole batch, spread over the ranks."""
    tokens = batch.row_tokens(budget.shared)
    rows = rows_per_rank(tokens, range(batch.num_rows), crew.world_size, even_out)
    micro = cut_ranks([tokens.select(own) for own in rows], [[names[row] for row in own] for own in rows], budget)
    answers = crew.each(phase, method, [(batch.select(own), bins, *args) for own, bins in zip(rows, micro, strict=True)])
    sizes = batch.responses.sizes()
    log_probs = scatter_tokens([(own, answer.log_probs) for own, answer in zip(rows, answers, strict=True)], sizes)
    if answers[0].entropy is None:
        return log_probs, None
    return log_probs, scatter_tokens([(own, answer.entropy) for own, answer in zip(rows, answers, strict=True)], sizes)


@dataclass(frozen=True)
class Advantages:
    """What the rewards became. per_token: fp32 [R]; per_row, rewards: fp32 [B]; kl_mean: of the KL in the reward, or None."""

    per_token: Tensor
    per_row: Tensor
    rewards: Tensor
    kl_mean: float | None
    counts: dict[str, float]


def advantages(
    batch: RolloutBatch, scores: Tensor, addresses: Sequence[str], algorithm: Algorithm, controller: KlController
) -> Advantages:
    """Gives advantages from scores fp32 [B], with the KL to the reference taken off the reward when asked."""
    valid = check_rewards(scores, addresses)
    rewards, kl_mean, row = scores, None, batch.response_row()
    if algorithm.use_kl_in_reward:
        assert batch.old_log_probs is not None, "the KL in the reward needs old log-probs"
        assert batch.ref_log_probs is not None, "the KL in the reward needs the reference's log-probs"
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
        rewards = shaped_rewards(scores, kl, row, controller.coefficient)
        kl_mean = float(kl.mean()) if kl.numel() else 0.0
    options = {"normalize_by_std": algorithm.norm_adv_by_std_in_grpo} if algorithm.adv_estimator == "grpo" else {}
    per_row = ADVANTAGES[algorithm.adv_estimator](rewards, batch.group, valid, **options)
    return Advantages(per_row[row], per_row, rewards, kl_mean, group_counts(rewards, batch.group, valid))
