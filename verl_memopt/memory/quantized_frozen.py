"""Store the linear layers of a frozen model in 8 or 4 bits. Each layer is decoded only while it is used.

Use it when: a reference or a reward model shares a device with the policy, and parameters set the memory peak.
Saves: most bytes of the blocks' linear layers. They take 1.03 bytes per parameter with int8, and 0.56 with nf4.
Costs: log-probs and scores are not exact. The error of a reference is measured when it is loaded, and logged.
Works with: ``param_offload``, which then moves the quantised bytes. It refuses LoRA, because the reference is then the policy's
    own base, and mixtures of experts that our decoder computes. Source of the nf4 levels: arXiv 2305.14314.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from verl_memopt.memory.knob import Claim, Knob, LadderRow


class Format(NamedTuple):
    bits: int
    group: int  # weights along the input that share an fp32 scale


FORMATS = {"int8": Format(8, 128), "nf4": Format(4, 64)}
"""Formats of quantised weights, by their names in the settings."""


QUANTIZED_AT_ONCE = 2**22
"""Elements of a weight that are quantised at once while it is loaded."""


def groups_of(kind: str, width: int) -> int:
    return -(-width // FORMATS[kind].group)


def code_bytes(kind: str, width: int) -> int:
    return groups_of(kind, width) * FORMATS[kind].group * FORMATS[kind].bits // 8


def row_bytes(kind: str, width: int) -> int:
    return code_bytes(kind, width) + 4 * groups_of(kind, width)


MXFP4_GROUP = 32
"""Weights along the input that share a scale of one byte in MXFP4, the format in which gpt-oss is published."""


def mxfp4_row_bytes(width: int) -> int:
    return width // 2 + width // MXFP4_GROUP


def mxfp4_width(row_bytes: int) -> int:
    return row_bytes * 2 * MXFP4_GROUP // (MXFP4_GROUP + 2)


_KEY = "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class QuantizedFrozen:
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Format in which the linear layers of the frozen model rest: none, int8 or nf4 (4 bits). It loses precision: the error of a
    reference is measured when it is loaded, and logged."""


KNOB = Knob(
    cost="inexact reference",
    settings={"ref": QuantizedFrozen, "scoring_model": QuantizedFrozen, "teacher": QuantizedFrozen},
    claims=(Claim("update_actor", "params", lambda _, after: after.linear_params * (after.master_bytes - 1.03)),),
    row=LadderRow(220, on=(f"{_KEY}=int8",), off=(f"{_KEY}=none",), on_top_of="rollout_memory"),
)
