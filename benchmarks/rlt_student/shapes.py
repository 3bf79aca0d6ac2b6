"""Bytes and speed of scoring at the shapes of a published model, with random weights and fewer layers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.rlt_student.students import KINDS, model_bytes, scored, student_of
from verl_memopt.data.batch import Ragged
from verl_memopt.model.policy_model import PolicyModel
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.recipes.rlt.rank_check import rank_correlation
from verl_memopt.recipes.rlt.student_rows import NUM_PARTS, SOLUTION, THINK, StudentRows


def random_rows(questions: int, samples: int, think: int, solution: int, vocabulary: int, seed: int = 0) -> StudentRows:
    """Return student rows of random tokens: some explanations of each question, with its prompt and its solution.

    Args:
        questions: Number of questions.
        samples: Explanations of each.
        think: Tokens of an explanation.
        solution: Tokens of a solution.
        vocabulary: Number of token ids.
        seed: Of the tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(questions):
        prompt, answer = (torch.randint(vocabulary, (length,), generator=draw) for length in (32, solution))
        bridge, end = torch.full((2,), 5), torch.full((2,), 6)
        rows += [
            torch.cat([prompt, torch.randint(vocabulary, (think,), generator=draw), bridge, answer, end]) for _ in range(samples)
        ]
    number = len(rows)
    parts = torch.tensor([[32, think, 2, solution, 2]]).repeat(number, 1)
    assert parts.shape == (number, NUM_PARTS)
    return StudentRows(
        ids=Ragged.from_rows(rows, torch.int64),
        parts=parts,
        status=torch.zeros(number, dtype=torch.int8),
        matched=torch.ones(number, dtype=torch.bool),
        has_text_after=torch.zeros(number, dtype=torch.bool),
    )


def precisions(folder: Path, rows: StudentRows, samples: int) -> dict[str, Any]:
    """Return for each precision the bytes of the model, the peak of a scoring pass and the ranks of r_SS + r_KL's student part.

    The ranks are of random tokens under random weights. They say how noisy a precision is, not how good.
    """
    result: dict[str, Any] = {}
    rewards: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        student = student_of(folder, kind)
        peak, log_probs = _peak(student, rows)
        rewards[kind] = _means(log_probs.solution, rows.parts[:, SOLUTION]) + _means(log_probs.think, rows.parts[:, THINK])
        result[kind] = {**model_bytes(student), "peak_bytes": peak}
        del student
    group = [row // samples for row in range(rows.num_rows)]
    for kind in ("int8", "nf4"):
        result[kind]["spearman_of_random_rows"] = rank_correlation(rewards[kind], rewards["bf16"], group).mean
    return result


def chunked_against_whole(folder: Path, rows: StudentRows, repeats: int) -> dict[str, Any]:
    """Return tokens per second and peaks of scoring with logits in chunks of 512 and with whole logits, measured in turns."""
    students = {"chunked": student_of(folder, "bf16"), "whole": student_of(folder, "bf16", chunk=0)}
    tokens = int(rows.parts[:, :-1].sum())
    peaks = {name: _peak(student, rows)[0] for name, student in students.items()}
    seconds: dict[str, list[float]] = {name: [] for name in students}
    for _ in range(repeats):
        for name, student in students.items():
            began = time.perf_counter()
            scored(student, rows)
            seconds[name].append(time.perf_counter() - began)
    weights = sum(p.nbytes for p in students["whole"].parameters())
    result: dict[str, Any] = {
        name: {
            "tokens_per_second": tokens / statistics.median(values),
            "peak_bytes": peaks[name],
            "peak_without_weights": peaks[name] - weights,
        }
        for name, values in seconds.items()
    }
    ratios = [whole / chunk for chunk, whole in zip(seconds["chunked"], seconds["whole"], strict=True)]
    return {"tokens": tokens, "repeats": repeats, **result, "speed_of_chunked": statistics.median(ratios)}


def _peak(student: PolicyModel, rows: StudentRows) -> tuple[int, Any]:
    with ByteTracker() as tracker:
        tracker.mark("params", student.parameters())
        tracker.mark("buffers", student.buffers())
        tracker.enter("score")
        log_probs = scored(student, rows)
    return tracker.peaks[DEVICE].bytes, log_probs


def _means(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.mean() for part in values.split(lengths.tolist())])
