"""Frozen students in several precisions, built as a worker builds its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.data.batch import Ragged
from verl_memopt.data.encoder import tokenize
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.quantized_frozen_torch import quantized_layers
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.policy_model import PolicyModel
from verl_memopt.recipes.rlt.dataset import RltPrompts
from verl_memopt.recipes.rlt.student import StudentLogProbs, compute_student_log_probs, student_batch, student_micro_batches
from verl_memopt.recipes.rlt.student_rows import StudentEncoder, StudentRows

CPU = torch.device("cpu")
KINDS = ("fp32", "bf16", "int8", "nf4")
"""Precisions of the linear layers. All but fp32 rest and compute in bfloat16 elsewhere."""
BF16_WEIGHTS = "bf16 weights"
"""A further precision: weights rest in bfloat16, and everything is computed in fp32."""
TEMPERATURE = 0.7
MICRO_BATCH = 2048
"""Tokens of a micro-batch."""


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


def student_rows(
    prompts: RltPrompts,
    encoder: StudentEncoder,
    questions: Sequence[str],
    solutions: Sequence[str],
    responses: Sequence[list[int]],
) -> StudentRows:
    """Return the student's sequences for some responses of a teacher."""
    ragged = Ragged.from_rows([torch.tensor(response) for response in responses], torch.int64)
    return encoder.encode(questions, solutions, ragged, list(questions))


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


def tokens_of(prompts: RltPrompts, text: str) -> list[int]:
    """Return the token ids of a text."""
    return tokenize(prompts.tokenizer, [text])[0]
