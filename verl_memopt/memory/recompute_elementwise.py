"""Recompute norms, rotary embeddings and activations in backward, and keep only what they were computed from.

Use it when: always; it is on. Set it to false only to compare.
Saves: more than half of what a decoder block keeps for its backward, and part of what the last block holds at the peak.
Costs: norms, rotary embeddings and activations once more in backward. These are elementwise, so no product is repeated; on a GPU
    ``actor.use_torch_compile`` fuses each chain of them into one to three kernels.
Works with: every knob. Results differ only in the order of sums. Source: arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.memory.knob import Claim, Knob, LadderRow, activation_saving

PRODUCT_ROWS = {"cpu": 2048, "cuda": 8192}
"""Tokens at most in a tile of a block's products in backward: enough for its products to be as fast as whole ones."""

_KEY = "actor_rollout_ref.model.recompute_elementwise"


@dataclass(frozen=True)
class RecomputeElementwise:
    # It can be false because the ladder measures it against that and its gradients are tested against it. Little would go with
    # the switch: blocks with another activation or other linear layers, which `can_recompute` refuses, keep these values anyway.
    recompute_elementwise: bool = True
    """Recompute the outputs of norms, rotary embeddings and the MLP's activation in backward, without a product. Set it to false
    only to compare."""


KNOB = Knob(
    cost="elementwise work in backward",
    settings={"model": RecomputeElementwise},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(50, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)
