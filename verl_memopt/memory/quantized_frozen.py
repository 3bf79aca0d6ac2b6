"""Store the linear layers and experts of a frozen model in 8 or 4 bits. Each is decoded only while it is used.

Use it when: a reference or a reward model shares a device with the policy, and parameters set the memory peak.
Saves: most bytes of the blocks' linear layers and experts. They take 1.03 bytes per parameter with int8, and 0.56 with nf4.
Costs: log-probs and scores are not exact. The error of a reference is measured when it is loaded, and logged.
Works with: ``param_offload``, which then moves the quantised bytes. Experts of a folder in MXFP4 keep its bytes. Routers, small
    gates and convolutions are not quantised. It refuses LoRA, because the reference is then the policy's own base. Source of
    the nf4 levels: arXiv 2305.14314.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from verl_memopt.memory.knob import Claim, Knob, LadderRow


class Format(NamedTuple):
    bits: int
    group: int  # weights along the input that share a scale
    scale_bytes: int = 4


FORMATS = {"int8": Format(8, 128), "nf4": Format(4, 64)}
"""Formats of quantised weights, by their names in the settings."""
MXFP4 = "mxfp4"
"""The format in which gpt-oss is published. Only experts have it, and nothing is encoded in it here."""
STORED = {**FORMATS, MXFP4: Format(4, 32, 1)}
"""All formats in which weights rest."""


QUANTIZED_AT_ONCE = 2**22
"""Elements of a weight that are quantised at once while it is loaded."""
DECODED_AT_ONCE = 2**24
"""Elements of the weights of some experts that a GPU decodes at once, for one product of all of them. At least one expert is."""


def groups_of(kind: str, width: int) -> int:
    return -(-width // STORED[kind].group)


def code_bytes(kind: str, width: int) -> int:
    return groups_of(kind, width) * STORED[kind].group * STORED[kind].bits // 8


def row_bytes(kind: str, width: int) -> int:
    return code_bytes(kind, width) + STORED[kind].scale_bytes * groups_of(kind, width)


_KEY = "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class QuantizedFrozen:
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Format in which the linear layers and experts of the frozen model rest: none, int8 or nf4 (4 bits). It loses precision: the
    error of a reference is measured when it is loaded, and logged."""


KNOB = Knob(
    cost="inexact reference",
    settings={"ref": QuantizedFrozen, "scoring_model": QuantizedFrozen, "teacher": QuantizedFrozen},
    claims=(Claim("update_actor", "params", lambda _, after: after.quantized_params * (after.master_bytes - 1.03)),),
    row=LadderRow(220, on=(f"{_KEY}=int8",), off=(f"{_KEY}=none",), on_top_of="rollout_memory"),
)
