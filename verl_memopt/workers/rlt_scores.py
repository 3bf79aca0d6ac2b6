"""The student's scoring pass: log-probs of the explanation and of the solution of each row, without gradients.

Bytes saved: a pass over whole sequences keeps the logits of every token, B x T x V x 4 bytes. Here the rows are cut into
micro-batches of a bounded number of tokens, only tokens of the explanation and of the solution are read, and the logits of
``logits_chunk_tokens`` of them exist at a time. So the peak does not grow with the number of rows, and with the length of a row
only through the states of one micro-batch.

Explanations of one question share the student's prompt, which is computed once for those in a micro-batch. The tokens after the
solution are never computed: in a causal model they change nothing before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from verl_memopt.data.batch import RolloutBatch, scatter_tokens
from verl_memopt.data.ragged import Ragged, token_index
from verl_memopt.memory.batching.row_tokens import RowTokens, pack_groups_under
from verl_memopt.memory.parameters.quantized_frozen import exact_weights
from verl_memopt.models.build import WeightFolder
from verl_memopt.models.pack import Pack
from verl_memopt.models.policy_model import PolicyModel
from verl_memopt.ops.prefix_kv import PrefixKV
from verl_memopt.rewards.rlt.student_rows import BRIDGE, END, PREFIX, SOLUTION, THINK, StudentRows
from verl_memopt.workers.forward_pass import forward_pass
from verl_memopt.workers.log_probs import pack_log_probs


@dataclass(frozen=True)
class StudentLogProbs:
    """The student's log-probs on the host: ``think`` fp32 [tokens of all explanations], ``solution`` fp32 [of all solutions]."""

    think: Tensor
    solution: Tensor


def student_batch(rows: StudentRows, share_prefixes: bool = True) -> RolloutBatch:
    """Return the rows as prompts and responses. A response is explanation, bridge and solution.

    Args:
        rows: The student's sequences.
        share_prefixes: Rows with the same prompt compute it once, together.
    """
    part = rows.part_of_token()
    is_response = (part != PREFIX) & (part != END)
    prompts = rows.part(PREFIX)
    numbers: dict[bytes, int] = {}
    groups = [numbers.setdefault(prompt.numpy().tobytes(), len(numbers)) for prompt in prompts.rows()]
    return RolloutBatch(
        prompts=prompts,
        responses=Ragged(flat=rows.ids.flat[is_response], lengths=rows.parts[:, [THINK, BRIDGE, SOLUTION]].sum(1), batch_size=[]),
        group=torch.tensor(groups, dtype=torch.int64),
        prompt_group=torch.tensor(groups if share_prefixes else range(len(groups)), dtype=torch.int64),
        batch_size=[],
    )


def teacher_batch(prompts: Ragged, rows: StudentRows) -> RolloutBatch:
    """Return the explanations as responses to the teacher's prompts, for a log-prob pass of the teacher.

    Args:
        prompts: int64, the teacher's prompt of each row. It ends where the explanation of ``rows`` begins.
        rows: The student's sequences.
    """
    number = torch.arange(rows.num_rows)
    return RolloutBatch(prompts=prompts, responses=rows.part(THINK), group=number, prompt_group=number, batch_size=[])


def student_micro_batches(tokens: RowTokens, max_tokens: int) -> list[list[int]]:
    """Return micro-batches, as lists of rows, that compute at most ``max_tokens`` tokens each. A longer row goes alone.

    Args:
        tokens: Tokens of the rows, as ``student_batch(rows).row_tokens()`` gives them.
        max_tokens: Hard cap of a micro-batch.
    """
    lengths = tokens.each()
    long = [[row] for row, length in enumerate(lengths) if length > max_tokens]
    others = [row for row, length in enumerate(lengths) if length <= max_tokens]
    if not others and long:
        return long
    bins = pack_groups_under(tokens.select(others), max_tokens, [f"row {row}" for row in others])
    return [[others[place] for place in places] for places in bins] + long


def compute_student_log_probs(
    student: PolicyModel,
    rows: StudentRows,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    device: torch.device,
    share_prefixes: bool = True,
) -> StudentLogProbs:
    """Return the student's log-probs of explanations and solutions.

    Args:
        student: The frozen student.
        rows: Its sequences.
        micro_batches: Rows of each forward. Together they hold every row once, and all ranks have the same number of them.
        temperature: Divides the logits.
        device: The device of the student.
        share_prefixes: As for :func:`student_batch`.
    """
    batch = student_batch(rows, share_prefixes)
    part = rows.part_of_token()
    part = part[(part != PREFIX) & (part != END)]
    is_read, sizes = part != BRIDGE, batch.responses.sizes()

    def forward(pack: Pack, prefix_kv: PrefixKV | None, chosen: Sequence[int]) -> Tensor:
        places = is_read[token_index(sizes, chosen)].nonzero()[:, 0].to(device, non_blocking=True)
        return pack_log_probs(student, targets_at(pack, places), temperature, False, prefix_kv)[0]

    outputs = forward_pass(student, batch, micro_batches, device, forward)
    log_probs = scatter_tokens(outputs, rows.parts[:, [THINK, SOLUTION]].sum(1).tolist())
    is_think = part[part != BRIDGE] == THINK
    return StudentLogProbs(think=log_probs[is_think], solution=log_probs[~is_think])


def join_log_probs(parts: Sequence[tuple[Sequence[int], StudentLogProbs]], rows: StudentRows) -> StudentLogProbs:
    """Return the log-probs of all rows from those of each rank's share.

    Args:
        parts: (rows of the share, their log-probs). Together they hold every row once.
        rows: All rows.
    """
    return StudentLogProbs(
        think=scatter_tokens([(share, part.think) for share, part in parts], rows.parts[:, THINK].tolist()),
        solution=scatter_tokens([(share, part.solution) for share, part in parts], rows.parts[:, SOLUTION].tolist()),
    )


def targets_at(pack: Pack, places: Tensor) -> Pack:
    """Return a pack that computes the log-probs of some of its targets only. Its tokens stay the same.

    Args:
        pack: A pack of any rows.
        places: int64, the places of the targets to keep, ascending.
    """
    row, last = pack.row[places], pack.last_block
    return replace(
        pack,
        predicts=pack.predicts[places],
        targets=pack.targets[places],
        row=row,
        row_lengths=torch.zeros_like(pack.row_lengths).index_add(0, row, torch.ones_like(row)),
        last_block=None if last is None else replace(last, predicts=last.predicts[places]),
    )


def compute_exact_log_probs(
    student: PolicyModel,
    folder: Path,
    rows: StudentRows,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    device: torch.device,
    share_prefixes: bool = True,
) -> StudentLogProbs:
    """Return the log-probs of a quantised student under its unquantised weights. Each weight is read when a layer needs it.

    Args:
        student: The quantised student.
        folder: Folder of its model.
        rows: Its sequences.
        micro_batches: Rows of each forward, with the next three as for :func:`compute_student_log_probs`.
        temperature: Divides the logits.
        device: The device of the student.
        share_prefixes: Rows with the same prompt compute it once.
    """
    weights = WeightFolder(folder)
    with exact_weights(student, lambda name: weights.read(name, ()).to(device)):
        return compute_student_log_probs(student, rows, micro_batches, temperature, device, share_prefixes)
