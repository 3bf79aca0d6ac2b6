"""Validation: every held-out prompt answered and scored, under sampling settings of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.expansion import expand
from verl_memopt.observe.validation import ValidationRow, validation_metrics
from verl_memopt.rewards.rows import RewardResult
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rollout.sampling import validation_sampling
from verl_memopt.trainer.assemble import Job
from verl_memopt.trainer.crew import Crew
from verl_memopt.trainer.experience import Answers, generate, sampling_seeds, score_answers


@dataclass(frozen=True)
class Validation:
    """What a validation found: metrics under verl's names, the mean score, and every answer with its score."""

    metrics: dict[str, float]
    score: float
    answers: list[tuple[Answers, list[RewardResult]]]


def validate(job: Job, crew: Crew, runner: RewardRunner, step: int) -> Validation:
    """Answers the whole validation set, ``data.val_batch_size`` prompts a call, and scores it."""
    assert job.validation is not None
    answered = []
    prompts = [job.validation[index] for index in range(len(job.validation))]
    for rows in _batches(prompts, job.settings.data.val_batch_size):
        answers = _answer(job, crew, rows, step)
        answered.append((answers, score_answers(runner, answers)))
    samples = job.settings.actor_rollout_ref.rollout.val_kwargs.n
    scored = [
        ValidationRow(str(answers.rows[index].index), answers.rows[index].data_source, result.score, result.extra)
        for answers, results in answered
        for index, result in enumerate(results)
    ]
    assert len(scored) == len(prompts) * samples, (len(scored), len(prompts), samples)
    return Validation(validation_metrics(scored), sum(row.score for row in scored) / len(scored), answered)


def _answer(job: Job, crew: Crew, rows: list[PromptRow], step: int) -> Answers:
    rollout = job.settings.actor_rollout_ref.rollout
    samples = rollout.val_kwargs.n
    prompt_ids = expand(rows, samples, job.settings.algorithm.expansion, job.encoder)
    assert rollout.seed is not None
    seeds = sampling_seeds(rows, samples, rollout.seed, step)
    sampling = validation_sampling(rollout)
    generation = generate(crew, "testing", prompt_ids, seeds, sampling, rollout.tensor_model_parallel_size)
    texts = job.site.tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
    return Answers([row for row in rows for _ in range(samples)], prompt_ids, generation, texts)


def _batches(rows: list[PromptRow], size: int | None) -> Iterator[list[PromptRow]]:
    step = len(rows) if size is None else size
    return (rows[start : start + step] for start in range(0, len(rows), step))
