"""Skip outputs of the last block that nothing reads. For most prompt tokens it computes only keys and values.

Use it when: always; it is on by default. Set it to false only to compare.
Saves: queries, attention output and MLP of the skipped prompt tokens in the last block, in memory and in compute.
Costs: nothing. If prompts are not shared, the last block calls attention twice instead of once.
Works with: every knob. If the last block is of an unknown class, it computes all tokens and logs a warning.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_memopt.memory.knob import Claim, Knob, LadderRow, activation_saving
from verl_memopt.model.families import own_blocks

if TYPE_CHECKING:
    from torch.nn import Module

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.model.prune_last_block"


@dataclass(frozen=True)
class PruneLastBlock:
    prune_last_block: bool = True
    """Let the last block skip prompt outputs that nothing reads. Set it to false only to compare."""

    def left_out(self, num_unread_outputs: int) -> int:
        return num_unread_outputs if self.prune_last_block else 0


KNOB = Knob(
    cost="nothing",
    settings={"model": PruneLastBlock},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(60, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)


def can_prune(block: Module, key: str = _KEY) -> bool:
    """Return whether a transformers block can skip outputs that nothing reads. If it cannot, warn and name ``key``."""
    name = type(block).__name__
    if name not in own_blocks():
        reason = f"{name} is not one of {', '.join(own_blocks())}"
    elif hasattr(block, "linear_attn"):
        reason = f"{name} carries a state from token to token"
    else:
        return True
    logger.warning("%s=true: %s; the last block computes all tokens", key, reason)
    return False
