"""Measures how a student of RLT scores in fp32, bf16, int8 and nf4: ranks, bytes and speed.

    python -m benchmarks.rlt_student [--questions 64] [--samples 16] [--layers 4] [--hidden 1024] [--vocabulary 151936]
                                     [--rows 4] [--think 96] [--solution 32] [--repeats 5] [--json FILE]

Three parts. ``toy``: the trained student and teacher of the toy task. Explanations that the teacher samples are scored in each
precision, and their order within each question is compared. ``shape``: random weights in the shape of Qwen3-0.6B with fewer
layers; bytes of the weights and peaks of a scoring pass. ``logits``: the same model in bf16, with logits in chunks and with whole
logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import CPU, seconds_of, write_json
from recipe.rlt.make_toy import STUDENT, TAG_FORMAT, TEACHER, VALIDATION, RltToyRecipe, make_rlt_toy
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.data.batch import Ragged
from verl_memopt.data.dataset import read_rows
from verl_memopt.data.encoder import tokenize
from verl_memopt.data.toy import Descent
from verl_memopt.distributed.device import join_process_group, leave_process_group, training_mesh
from verl_memopt.memory.quantized_frozen_torch import quantized_layers
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.tiny import SHAPES, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.formula import RltScores, rlt_scores
from verl_memopt.recipes.rlt.scorer import rank_correlation
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student import (
    StudentLogProbs,
    compute_student_log_probs,
    student_batch,
    student_micro_batches,
    teacher_batch,
)
from verl_memopt.recipes.rlt.student_rows import NUM_PARTS, SOLUTION, THINK, StudentEncoder, StudentRows
from verl_memopt.worker.policy import compute_log_probs

KINDS = ("fp32", "bf16", "int8", "nf4")
"""Precisions of the linear layers. All but fp32 rest and compute in bfloat16 elsewhere."""
BF16_WEIGHTS = "bf16 weights"
"""A further precision: weights rest in bfloat16, and everything is computed in fp32."""
TEMPERATURE = 0.7
MICRO_BATCH = 2048
"""Tokens of a micro-batch."""
LONGEST = 24
"""Tokens of a sampled explanation."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    join_process_group(CPU, 0, 1, "127.0.0.1", 0, 60)
    try:
        with TemporaryDirectory() as folder:
            result = _measure(Path(folder), options)
    finally:
        leave_process_group()
    print(json.dumps(result, indent=1))
    if options.json is not None:
        write_json(options.json, result)
    return 0


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    warm_up = Descent(steps=options.warm_up, batch_size=32)
    toy = make_rlt_toy(folder / "toy", 0, RltToyRecipe(student=warm_up, teacher=warm_up))
    heads = options.hidden // 64
    shape = replace(
        SHAPES["qwen3-0.6b"],
        num_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_heads=heads,
        num_kv_heads=max(heads // 2, 1),
        vocab_size=options.vocabulary,
    )
    model = make_tiny_model(folder / "shape", shape)
    rows = random_rows(options.rows, 4, options.think, options.solution, min(options.vocabulary, 320))
    fewer = rows.select(range(min(2 * options.rows, rows.num_rows)))
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "arguments": {name: value for name, value in vars(options).items() if name != "json"},
        "toy": ranks(toy, options.questions, options.samples),
        "shape": precisions(model, rows, 4),
        "logits": chunked_against_whole(model, fewer, options.repeats),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rlt_student")
    for name, default in (
        ("questions", 64), ("samples", 16), ("layers", 4), ("hidden", 1024), ("vocabulary", 151_936), ("rows", 4), ("think", 96),
        ("solution", 32), ("repeats", 5), ("warm-up", 300),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(arguments)


def student_of(folder: Path, kind: str, chunk: int = 512) -> PolicyModel:
    """Return a frozen student.

    Args:
        folder: Folder of the model.
        kind: One of :data:`KINDS`, or :data:`BF16_WEIGHTS`.
        chunk: Tokens whose logits exist at a time; 0 = all.
    """
    rests, computes = ("fp32" if kind in exact else "bfloat16" for exact in (("fp32",), ("fp32", BF16_WEIGHTS)))
    fsdp, model = Fsdp(dtype=computes, model_dtype=rests), Model(path=str(folder), logprob_chunk_tokens=chunk)
    quantization = kind if kind in ("int8", "nf4") else "none"
    mesh = training_mesh("cpu", 1, -1)
    student = build_policy(model, fsdp, folder, mesh, CPU, ModelUse(quantization=quantization))
    student.requires_grad_(False)
    materialize(student, folder, CPU)
    return student


def scored(student: PolicyModel, rows: StudentRows) -> StudentLogProbs:
    """Return the student's log-probs, in micro-batches of :data:`MICRO_BATCH` tokens."""
    cut = student_micro_batches(student_batch(rows).row_tokens(), MICRO_BATCH)
    return compute_student_log_probs(student, rows, cut, TEMPERATURE, CPU)


def model_bytes(student: PolicyModel) -> dict[str, float]:
    """Return the bytes of all weights, and the bytes per parameter of the blocks' linear layers."""
    layers = quantized_layers(student)
    if layers:
        stored = sum(layer.qweight.nbytes for layer in layers.values())
        parameters = sum(layer.in_features * layer.out_features for layer in layers.values())
    else:
        linears = [module for block in student.blocks() for module in block.modules() if isinstance(module, torch.nn.Linear)]
        stored = sum(linear.weight.nbytes for linear in linears)
        parameters = sum(linear.weight.numel() for linear in linears)
    return {"bytes": sum(p.nbytes for p in student.parameters()), "linear_bytes_per_parameter": stored / parameters}


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
    ragged = Ragged.from_rows([torch.tensor(response) for response in responses], torch.int64)
    rows = StudentEncoder(prompts, settings, stops).encode(asked, known, ragged, asked)
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
    rewards: dict[str, Tensor] = {}
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
            seconds[name].append(seconds_of(lambda student=student: scored(student, rows)))
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


def _means(values: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in values.split(lengths.tolist())])


if __name__ == "__main__":
    sys.exit(main())
