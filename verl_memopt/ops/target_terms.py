"""The product of the logits' gradient with the LM head, with the target's term of each token added last.

A row of the gradient holds one large number, at its target, and as many small ones as the vocabulary has entries. A sum that adds
the small terms to the large one loses their last digits: in fp32, with 151,669 entries, gradients of plain autograd are 5e-6
from those in float64. With the large term last they are 4e-7 from them (docs/rloo_memory_study.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 32
"""Tokens whose target's row of the head is copied at a time."""


def hidden_gradient(matrix: Tensor, weight: Tensor, targets: Tensor, out: Tensor) -> Tensor:
    """Return the gradient of the hidden states, ``matrix @ weight``, in ``out``.

    In half precision the target's term is summed with the others: the rounding of the result hides what that loses.

    Args:
        matrix: [c, v] in the compute dtype, the gradient of the logits. It is overwritten and restored.
        weight: [v, H], these columns of the head.
        targets: int64 [c], as columns; they may lie outside of 0 to v - 1.
        out: [c, H], overwritten.
    """
    if matrix.dtype != torch.float32:
        return torch.mm(matrix, weight, out=out)
    places = clamped(targets, matrix)
    terms = matrix.gather(-1, places)
    others = torch.where(is_inside(targets, matrix)[:, None], 0.0, terms)
    matrix.scatter_(-1, places, others)
    torch.mm(matrix, weight, out=out)
    # Restored, because the gradient of the head's weight is computed from this matrix afterwards.
    matrix.scatter_(-1, places, terms)
    # This leaves 0 for targets outside of these columns, whose rows the product has used whole.
    terms -= others
    for start in range(0, out.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows].addcmul_(terms[rows], weight[places[rows, 0]])
    return out


def is_inside(targets: Tensor, logits: Tensor) -> Tensor:
    """Return whether each target [c] is a column of the logits [c, v], bool [c]."""
    return (targets >= 0) & (targets < logits.shape[1])


def clamped(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the targets [c] as columns that the logits [c, v] have, [c, 1]. Those outside become the first or the last."""
    return targets.clamp(0, logits.shape[1] - 1)[:, None]
