"""Store the reference's linear layers in 8 or 4 bits; each becomes a plain weight only while it is used.

Use it when: a reference and a policy share one device and parameters are the peak.
Saves: per parameter of the blocks' linear layers, all but 1.03 bytes with int8 and all but 0.56 with nf4.
Costs: the reference's log-probs are not exact. The error is measured when the model is loaded, and logged.
Works with: ``param_offload``, which then moves the codes. It refuses LoRA, whose reference is the policy's own base. Source of
    the nf4 levels: arXiv 2305.14314.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_memopt.knobs.knob import Claim, Knob, LadderRow, switch

_KEY = "actor_rollout_ref.ref.quantization"


@dataclass(frozen=True)
class QuantizedFrozen:
    """Settings of the quantised reference."""

    quantization: Literal["none", "int8", "nf4"] = "none"
    """none, int8 or nf4: width at which the reference's linear layers rest. Lossy; the error is measured at load and logged."""


KNOB = Knob(
    name="quantized_frozen",
    place=200,
    cost="inexact reference",
    settings={"ref": QuantizedFrozen},
    known_as={
        "load_in_8bit": "actor_rollout_ref.ref.quantization",
        "load_in_4bit": "actor_rollout_ref.ref.quantization",
    },
    claims=(Claim("update_actor", "params", lambda _, after: after.linear_params * (after.master_bytes - 1.03)),),
    row=LadderRow(220, on=(f"{_KEY}=int8",), off=(f"{_KEY}=none",), on_top_of="rollout_memory"),
    factors=(switch("quantization", _KEY, lossy=True, none="none", int8="int8", nf4="nf4"),),
)
