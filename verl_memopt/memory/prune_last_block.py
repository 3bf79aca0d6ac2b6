"""Skip those outputs of the last block that nothing reads: for most prompt tokens it computes keys and values only.

Use it when: always; it is on. Set it to false only to compare.
Saves: queries, attention output and the MLP of skipped prompt tokens in the last block, in memory and in compute.
Costs: nothing; where prompts are not shared, two attention calls in the last block in place of one.
Works with: every knob. A last block with sliding-window attention, or of an unknown class, computes all tokens and logs a
    warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.memory.formulas import activation_saving
from verl_memopt.memory.knob import Claim, Knob, LadderRow, switch

_KEY = "actor_rollout_ref.model.prune_last_block"


@dataclass(frozen=True)
class PruneLastBlock:
    """Settings of the pruned last block."""

    prune_last_block: bool = True
    """The last block skips prompt outputs that nothing reads. Set it to false only to compare."""

    def left_out(self, unread: int) -> int:
        """Return how many of so many tokens, which nothing reads, the last block leaves out."""
        return unread if self.prune_last_block else 0


KNOB = Knob(
    cost="nothing",
    settings={"model": PruneLastBlock},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(60, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
    factors=(switch("last block", _KEY, whole=False, pruned=True),),
)
