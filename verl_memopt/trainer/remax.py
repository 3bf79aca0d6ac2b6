"""ReMax: the score of a greedy response to each prompt is the baseline of its samples."""

from __future__ import annotations

from verl_memopt.config.schema import Actor
from verl_memopt.observe.metrics import summary_of
from verl_memopt.trainer.experience import StepBatch, to_batch
from verl_memopt.trainer.generation import Generator


def greedy_batch(generator: Generator, batch: StepBatch, actor: Actor) -> StepBatch:
    """Return one greedy response to each prompt of a batch, not yet scored. The engine releases its memory afterwards.

    The responses are a batch of their own: they give baselines, and nothing is learned from them.

    Args:
        generator: Its engine still has the memory and the weights with which it answered the batch.
        batch: The sampled responses.
        actor: The section ``actor_rollout_ref.actor``.
    """
    answers = generator.generate_greedy(batch.prompts, batch.step)
    return StepBatch(batch.step, batch.prompts, answers, to_batch(answers, 1, actor))


def add_baselines(batch: StepBatch, greedy: StepBatch, samples: int) -> StepBatch:
    """Add to each row of a batch the score of the greedy response to its prompt, and return the batch.

    Args:
        batch: The sampled responses.
        greedy: The scored greedy responses, one per prompt.
        samples: Sampled responses to each prompt.
    """
    scores = greedy.scores
    batch.baselines = scores.repeat_interleave(samples)
    batch.metrics |= summary_of("critic/baselines", scores[~scores.isnan()])
    return batch
