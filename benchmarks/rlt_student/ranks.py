"""Ranks of explanations that a trained teacher samples, by a trained student in several precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rlt_student.students import BF16_WEIGHTS, CPU, KINDS, TEMPERATURE, scored, student_of, student_rows
from verl_memopt.data.batch import Ragged
from verl_memopt.data.dataset import read_rows
from verl_memopt.data.encoder import tokenize
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.formula import RltScores, rlt_scores
from verl_memopt.recipes.rlt.lessons import STUDENT, TAG_FORMAT, TEACHER, VALIDATION
from verl_memopt.recipes.rlt.rank_check import rank_correlation
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import student_micro_batches, teacher_batch
from verl_memopt.recipes.rlt.student_rows import StudentEncoder, StudentRows
from verl_memopt.worker.policy import compute_log_probs

LONGEST = 24
"""Tokens of a sampled explanation."""


def ranks(folder: Path, questions: int, samples: int, seed: int = 0) -> dict[str, Any]:
    """Return for each precision how its rewards agree with those of the student in bf16, and bf16 with fp32.

    Args:
        folder: The toy task.
        questions: Held-out questions.
        samples: Explanations that the teacher samples of each. Equal ones count once.
        seed: Seed of the samples.
    """
    prompts, settings = _prompts(folder), RltReward(tag_format=TAG_FORMAT)
    problems = [columns for _, columns in read_rows(str(folder / VALIDATION), "data.val_files")[:questions]]
    responses, group = _sampled(folder, prompts, problems, samples, seed)
    stops = {prompts.tokenizer.eos_token_id, prompts.tokenizer.pad_token_id}
    asked, known = ([problems[number][name] for number in group] for name in ("question", "solution"))
    rows = student_rows(prompts, StudentEncoder(prompts, settings, stops), asked, known, responses)
    teacher = _teacher_log_probs(folder, prompts, asked, known, rows)
    scores = {kind: _scores(folder, kind, settings, rows, teacher, asked) for kind in (*KINDS, BF16_WEIGHTS)}
    result: dict[str, Any] = {"rows": len(group), "questions": questions, "samples": samples}
    for kind, base in ((BF16_WEIGHTS, "fp32"), ("bf16", "fp32"), ("int8", "bf16"), ("nf4", "bf16")):
        agreement = rank_correlation(scores[kind].training_rewards(), scores[base].training_rewards(), group)
        change = (scores[kind].reward - scores[base].reward).abs()
        result[f"{kind} against {base}"] = {
            "spearman_mean": agreement.mean,
            "spearman_lowest": agreement.lowest,
            "groups": agreement.num_groups,
            "reward_change_mean": float(change.mean()),
            "reward_change_largest": float(change.max()),
        }
    result["reward_std_in_group"] = _spread(scores["bf16"].reward, group)
    return result


def _prompts(folder: Path) -> RltPrompts:
    return RltPrompts(AutoTokenizer.from_pretrained(folder / STUDENT), FORMATS[TAG_FORMAT])


def _sampled(
    folder: Path, prompts: RltPrompts, problems: list[dict[str, Any]], samples: int, seed: int
) -> tuple[list[list[int]], list[int]]:
    """Return the different explanations that the teacher samples, and the number of the problem of each."""
    teacher = AutoModelForCausalLM.from_pretrained(folder / TEACHER).eval()
    end = prompts.tokenizer.eos_token_id
    responses: list[list[int]] = []
    group: list[int] = []
    torch.manual_seed(seed)
    for number, problem in enumerate(problems):
        (ids,) = tokenize(prompts.tokenizer, [prompts.teacher(problem["question"], problem["solution"])[0]])
        with torch.no_grad():
            prompt = torch.tensor([ids] * samples)
            options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": LONGEST, "pad_token_id": end}
            drawn = teacher.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        different = {tuple(_until(row[len(ids) :].tolist(), end)) for row in drawn}
        responses += [list(row) for row in sorted(different)]
        group += [number] * len(different)
    return responses, group


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _teacher_log_probs(
    folder: Path, prompts: RltPrompts, questions: list[str], solutions: list[str], rows: StudentRows
) -> Tensor:
    texts = [prompts.teacher(question, solution)[0] for question, solution in zip(questions, solutions, strict=True)]
    ids = Ragged.from_rows([torch.tensor(each) for each in tokenize(prompts.tokenizer, texts)], torch.int64)
    batch = teacher_batch(ids, rows)
    cut = student_micro_batches(batch.row_tokens(), 4096)
    return compute_log_probs(student_of(folder / TEACHER, "fp32"), batch, cut, TEMPERATURE, False, CPU).log_probs


def _scores(folder: Path, kind: str, settings: RltReward, rows: StudentRows, teacher: Tensor, addresses: list[str]) -> RltScores:
    log_probs = scored(student_of(folder / STUDENT, kind), rows)
    return rlt_scores(settings, rows, log_probs.think, teacher, log_probs.solution, addresses)


def _spread(rewards: Tensor, group: list[int]) -> float:
    """Return the mean standard deviation of the rewards of a group."""
    number = torch.tensor(group)
    spreads = [rewards[number == each].std() for each in number.unique() if int((number == each).sum()) > 1]
    return float(torch.stack(spreads).mean())
