"""The student of RLT in a worker: the model that scores explanations, whichever module holds its weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_memopt.memory.parameters.lora import adapters_off
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.rewards.rlt.student_rows import StudentRows
from verl_memopt.workers.plan import StudentPlan
from verl_memopt.workers.rlt_scores import StudentLogProbs, compute_exact_log_probs, compute_student_log_probs


@dataclass(frozen=True)
class Scored:
    """The result of a scoring pass on one rank."""

    log_probs: StudentLogProbs
    seconds: float
    """Time of the forwards, without the student's way to the device."""


@dataclass(frozen=True)
class Student:
    """Scores explanations without gradients.

    Attributes:
        model: The student's own model, or another whose weights are the student's: the reference, or the policy without adapters.
        plan: How explanations are scored.
        device: The device of the model.
    """

    model: PolicyModel
    plan: StudentPlan
    device: torch.device

    def log_probs(self, rows: StudentRows, micro_batches: Sequence[Sequence[int]], temperature: float) -> Scored:
        """Return the log-probs of explanations and solutions, with the time that they took.

        Args:
            rows: The rows of this rank.
            micro_batches: Rows of each forward. All ranks have the same number of them.
            temperature: Divides the logits.
        """
        began = time.perf_counter()
        with ExitStack() as scope:
            scope.enter_context(logits_in_chunks(self.model, self.plan.rlt.logits_chunk_tokens))
            scope.enter_context(adapters_off(self.model))
            log_probs = compute_student_log_probs(
                self.model, rows, micro_batches, temperature, self.device, self.plan.shares_prompts
            )
        return Scored(log_probs, time.perf_counter() - began)

    def exact_log_probs(self, rows: StudentRows, micro_batches: Sequence[Sequence[int]], temperature: float) -> Scored:
        """Return the log-probs of a quantised student under its unquantised weights. Arguments as for :meth:`log_probs`."""
        assert self.plan.folder is not None, "a quantised student is a model of its own"
        began = time.perf_counter()
        with logits_in_chunks(self.model, self.plan.rlt.logits_chunk_tokens):
            log_probs = compute_exact_log_probs(
                self.model, Path(self.plan.folder), rows, micro_batches, temperature, self.device, self.plan.shares_prompts
            )
        return Scored(log_probs, time.perf_counter() - began)


@contextmanager
def logits_in_chunks(model: PolicyModel, tokens: int) -> Iterator[None]:
    """Let the logits of at most ``tokens`` tokens exist at a time inside the body.

    Args:
        model: Any model with a log-prob head.
        tokens: Tokens of a chunk.
    """
    before = model.head.chunk_tokens
    model.head.chunk_tokens = tokens
    try:
        yield
    finally:
        model.head.chunk_tokens = before
