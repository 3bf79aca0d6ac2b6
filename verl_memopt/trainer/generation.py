"""Generates responses with the rollout engines, for training and for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_memopt.config.schema import Rollout
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.prefetcher import StepPrompts
from verl_memopt.errors import Stopped
from verl_memopt.rollout.engine import Generation
from verl_memopt.rollout.sampling import SamplingSettings, row_seed, train_sampling, validation_sampling
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.worker import Worker


@dataclass(frozen=True)
class Answers:
    """Prompts and their responses; row = prompt * n + sample.

    Attributes:
        rows: Dataset row of each response.
        prompt_ids: Tokens of each prompt. Rows of one prompt may be one list object, and must not be changed.
        generation: Tokens and log-probs of the responses.
        texts: Responses, decoded without special tokens.
    """

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    generation: Generation
    texts: list[str]


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Return the answers of several calls as those of one."""
    generations = [part.generation for part in parts]
    log_probs = [generation.log_probs for generation in generations]
    generation = Generation(
        response_ids=[ids for each in generations for ids in each.response_ids],
        log_probs=None if None in log_probs else [row for each in log_probs for row in each or ()],
        finish_reasons=[reason for each in generations for reason in each.finish_reasons],
        cached_tokens=sum(each.cached_tokens for each in generations),
    )
    return Answers(
        rows=[row for part in parts for row in part.rows],
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        generation=generation,
        texts=[text for part in parts for text in part.texts],
    )


class Generator:
    """Generates responses under the settings of ``rollout``."""

    def __init__(
        self, rollout: Rollout, tokenizer: Any, workers: TimedGroup, frees_engine: bool, has_engine: bool = True
    ) -> None:
        """Keep what later calls need.

        Args:
            rollout: How many samples of a prompt, and how they are drawn; with a concrete seed.
            tokenizer: Decodes the responses.
            workers: Workers that hold the engines.
            frees_engine: The engine releases its memory after each rollout.
            has_engine: The workers have an engine. False = another source gives the responses.
        """
        assert rollout.seed is not None
        self.rollout = rollout
        self.tokenizer = tokenizer
        self.workers = workers
        self.frees_engine = frees_engine and has_engine
        self.has_engine = has_engine
        self.seed: int = rollout.seed

    def generate(self, prompts: StepPrompts, step: int, earlier_rounds: int = 0, stays_awake: bool = False) -> Answers:
        """Return ``rollout.n`` answers to each prompt of a training step. The engine releases its memory afterwards.

        Args:
            prompts: The prompts.
            step: Seeds the sampling.
            earlier_rounds: Calls before this one in the same step. A prompt that returns is answered with other seeds.
            stays_awake: The engine keeps its memory, because another round may follow.

        Raises:
            Stopped: a stop was requested and the rollout abandoned.
        """
        n = self.rollout.n
        # Another round must not repeat the samples of an earlier one, so it counts its samples on from there.
        seeds = sampling_seeds(prompts.prompts, n, self.seed, step, first_sample=earlier_rounds * n)
        sampling, tensor_parallel = train_sampling(self.rollout), self.rollout.tensor_model_parallel_size
        try:
            generation = generate(self.workers, "gen", prompts.prompt_ids, seeds, sampling, tensor_parallel, may_stop=True)
        except Stopped:
            self.release_engine()
            raise
        if not stays_awake:
            self.release_engine()
        return self._decoded(prompts.prompts, n, prompts.prompt_ids, generation)

    def generate_validation(self, rows: Sequence[PromptRow], prompt_ids: list[list[int]], step: int) -> Answers:
        """Return ``val_kwargs.n`` answers to each held-out row.

        Args:
            rows: Rows of the validation set.
            prompt_ids: Tokens of the prompt of each sample; row = prompt * n + sample.
            step: Seeds the sampling.
        """
        samples = self.rollout.val_kwargs.n
        seeds = sampling_seeds(rows, samples, self.seed, step)
        sampling, tensor_parallel = validation_sampling(self.rollout), self.rollout.tensor_model_parallel_size
        generation = generate(self.workers, "testing", prompt_ids, seeds, sampling, tensor_parallel)
        return self._decoded(rows, samples, prompt_ids, generation)

    def generate_greedy(self, prompts: StepPrompts, step: int) -> Answers:
        """Return one greedy answer to each prompt of a training step. The engine releases its memory afterwards.

        Args:
            prompts: The prompts, each ``rollout.n`` times in ``prompt_ids``.
            step: Number of the step.

        Raises:
            Stopped: a stop was requested and the rollout abandoned.
        """
        prompt_ids = prompts.prompt_ids[:: self.rollout.n]
        seeds = sampling_seeds(prompts.prompts, 1, self.seed, step)
        sampling = replace(train_sampling(self.rollout), do_sample=False, log_probs=False)
        tensor_parallel = self.rollout.tensor_model_parallel_size
        try:
            generation = generate(self.workers, "gen", prompt_ids, seeds, sampling, tensor_parallel, may_stop=True)
        finally:
            self.release_engine()
        return self._decoded(prompts.prompts, 1, prompt_ids, generation)

    def wake_and_release(self) -> None:
        """Let the engine take all its memory, as for a rollout, and release it."""
        self.workers.all("gen", Worker.wake_engine)
        self.release_engine()

    def release_engine(self) -> None:
        """Let the engine release its memory, if it does so between rollouts."""
        if self.frees_engine:
            self.workers.all("gen", Worker.release_engine)

    def restore_engine(self) -> None:
        """Give an engine that released its memory the policy's weights again."""
        if self.frees_engine:
            self.workers.all("update_weights", Worker.update_weights)

    def _decoded(self, rows: Sequence[PromptRow], samples: int, prompt_ids: list[list[int]], generation: Generation) -> Answers:
        texts = self.tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
        return Answers([row for row in rows for _ in range(samples)], prompt_ids, generation, texts)


def dataset_answers(rows: Sequence[PromptRow], prompt_ids: list[list[int]], tokenizer: Any) -> Answers:
    """Return the dataset's own responses to its prompts, one each.

    Args:
        rows: Rows with responses.
        prompt_ids: Tokens of each prompt.
        tokenizer: Decodes the responses.
    """
    responses = [list(row.response) for row in rows]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return Answers(list(rows), prompt_ids, Generation(responses, None, ["stop"] * len(rows)), texts)


def generate(
    workers: TimedGroup,
    phase: str,
    prompt_ids: list[list[int]],
    seeds: list[int],
    sampling: SamplingSettings,
    tensor_parallel: int,
    may_stop: bool = False,
) -> Generation:
    """Generate a response to each prompt, spread over the engines. The ranks of one engine get the same prompts.

    Args:
        workers: Workers that hold the engines.
        phase: Name under which time and memory are recorded.
        prompt_ids: Tokens of each prompt.
        seeds: Seeds of each prompt.
        sampling: How tokens are drawn.
        tensor_parallel: Ranks of one engine.
        may_stop: Engines may abandon the rollout when a stop is requested.

    Raises:
        Stopped: an engine abandoned the rollout.
    """
    num_engines = workers.world_size // tensor_parallel
    # Rounded bounds, so that the shares differ by at most one prompt and none is lost.
    bounds = [len(prompt_ids) * index // num_engines for index in range(num_engines + 1)]
    shares = [slice(bounds[index], bounds[index + 1]) for index in range(num_engines)]
    arguments = [(prompt_ids[share], seeds[share], sampling, may_stop) for share in shares for _ in range(tensor_parallel)]
    # The ranks of one engine return the same answers, so one of each is taken.
    answered = workers.each(phase, Worker.generate, arguments)[::tensor_parallel]
    generations = [generation for generation in answered if generation is not None]
    if len(generations) < len(answered):
        raise Stopped
    return Generation(
        response_ids=[ids for generation in generations for ids in generation.response_ids],
        log_probs=[row for generation in generations for row in generation.log_probs or ()] if sampling.log_probs else None,
        finish_reasons=[reason for generation in generations for reason in generation.finish_reasons],
        cached_tokens=sum(generation.cached_tokens for generation in generations),
    )


def sampling_seeds(rows: Sequence[PromptRow], samples: int, seed: int, step: int, first_sample: int = 0) -> list[int]:
    """Return one seed for each sample of each row. It depends only on the run's seed, the step, the prompt and the sample.

    Args:
        rows: The prompts.
        samples: Samples of each prompt.
        seed: Of the run.
        step: Number of the step.
        first_sample: Number of a prompt's first sample; above 0 where earlier rounds of the step may have had the prompt.
    """
    numbers = range(first_sample, first_sample + samples)
    return [row_seed(seed, step, row.index, sample) for row in rows for sample in numbers]
