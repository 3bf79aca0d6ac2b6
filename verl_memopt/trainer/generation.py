"""Answers prompts with the rollout engines, for training and for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_memopt.config.schema import Rollout
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prefetcher import StepPrompts
from verl_memopt.errors import Stopped
from verl_memopt.rollout.engine import Generation
from verl_memopt.rollout.sampling import SamplingSettings, row_seed, train_sampling, validation_sampling
from verl_memopt.trainer.timed_group import TimedGroup


@dataclass(frozen=True)
class Answers:
    """Prompts and their responses, row = prompt * n + sample. texts: decoded without special tokens."""

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    generation: Generation
    texts: list[str]


class Generator:
    """Generates responses under the settings of ``rollout``.

    Args:
        rollout: how many samples of a prompt, and how they are drawn.
        tokenizer: decodes the responses.
        workers: hold the engines.
        frees_engine: the engine releases its memory after each rollout.
    """

    def __init__(self, rollout: Rollout, tokenizer: Any, workers: TimedGroup, frees_engine: bool) -> None:
        assert rollout.seed is not None
        self.rollout = rollout
        self.tokenizer = tokenizer
        self.workers = workers
        self.frees_engine = frees_engine
        self.seed: int = rollout.seed

    def generate(self, prompts: StepPrompts, step: int) -> Answers:
        """Return ``rollout.n`` answers to each prompt of a training step; the engine releases its memory afterwards.

        Raises:
            Stopped: a stop was asked for and the rollout was given up.
        """
        seeds = sampling_seeds(prompts.prompts, self.rollout.n, self.seed, step)
        sampling, tensor_parallel = train_sampling(self.rollout), self.rollout.tensor_model_parallel_size
        try:
            generation = generate(self.workers, "gen", prompts.prompt_ids, seeds, sampling, tensor_parallel, may_stop=True)
        except Stopped:
            self.release_engine()
            raise
        self.release_engine()
        return self._decoded(prompts.prompts, self.rollout.n, prompts.prompt_ids, generation)

    def generate_validation(self, rows: Sequence[PromptRow], prompt_ids: list[list[int]], step: int) -> Answers:
        """Return ``val_kwargs.n`` answers to each row. ``prompt_ids``: of all samples, row = prompt * n + sample."""
        samples = self.rollout.val_kwargs.n
        seeds = sampling_seeds(rows, samples, self.seed, step)
        sampling, tensor_parallel = validation_sampling(self.rollout), self.rollout.tensor_model_parallel_size
        generation = generate(self.workers, "testing", prompt_ids, seeds, sampling, tensor_parallel)
        return self._decoded(rows, samples, prompt_ids, generation)

    def release_engine(self) -> None:
        """Let the engine release its memory, where it does so between rollouts."""
        if self.frees_engine:
            self.workers.all("gen", "release_engine")

    def _decoded(self, rows: Sequence[PromptRow], samples: int, prompt_ids: list[list[int]], generation: Generation) -> Answers:
        texts = self.tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
        return Answers([row for row in rows for _ in range(samples)], prompt_ids, generation, texts)


def generate(
    workers: TimedGroup,
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
    engines = workers.world_size // tensor_parallel
    cuts = [len(prompt_ids) * index // engines for index in range(engines + 1)]
    shares = [slice(cuts[index], cuts[index + 1]) for index in range(engines)]
    arguments = [(prompt_ids[share], seeds[share], sampling, may_stop) for share in shares for _ in range(tensor_parallel)]
    answers = workers.each(phase, "generate", arguments)[::tensor_parallel]
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
