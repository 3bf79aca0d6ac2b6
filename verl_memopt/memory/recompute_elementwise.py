"""Recompute norms, rotary embeddings and activations in backward, and keep only their inputs.

Use it when: always; it is on by default. Set it to false only to compare.
Saves: more than half of what a decoder block keeps for backward, and a part of what the last block holds at the memory peak.
Costs: norms, rotary embeddings and activations are computed once more in backward. They are elementwise, so no matrix product is
    repeated. On a GPU, ``actor.use_torch_compile`` fuses each chain of them into one to three kernels.
Works with: every knob. Results differ only in the order of sums. Source: arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.memory.knob import Claim, Knob, LadderRow, activation_saving

PRODUCT_ROWS = {"cpu": 2048, "cuda": 8192}
"""Most tokens per tile in the backward of a block: enough for the matrix products of a tile to be as fast as those of all
tokens."""

SUM_ELEMENTS = 2**23
"""Most elements of a product in half precision that is added to an fp32 sum at once."""

_KEY = "actor_rollout_ref.model.recompute_elementwise"


@dataclass(frozen=True)
class RecomputeElementwise:
    # The switch exists because the ladder and the tests compare against false. Removing it would remove little code: blocks that
    # `can_recompute` refuses (another activation, other linear layers) keep these values anyway.
    recompute_elementwise: bool = True
    """Recompute the outputs of norms, rotary embeddings and the MLP's activation in backward. No matrix product is repeated. Set
    it to false only to compare."""


KNOB = Knob(
    cost="elementwise work in backward",
    settings={"model": RecomputeElementwise},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(50, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)
