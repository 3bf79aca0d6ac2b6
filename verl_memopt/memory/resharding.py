"""Choose what FSDP2 keeps gathered between forward and backward, over how many ranks it shards, and when it reduces gradients.

Use it when: gathered parameters or unsharded gradients are a large part of the memory peak. The defaults save the most.
Saves: ``reshard_after_forward=true`` frees gathered parameters between forward and backward. ``gradient_sync=every`` frees
    unsharded gradients after each micro-batch.
Costs: one more gather of each block in backward, and one more gradient reduction of each block per micro-batch.
Works with: activation checkpointing, for which a block is gathered once for recomputation and backward together, and
    ``own_units``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory.knob import (
    Advice,
    CountOrMinusOne,
    Knob,
    LadderRow,
    Refusal,
    fsdp_of,
    needs_reference,
    num_devices,
)

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_RESHARD = tuple(f"actor_rollout_ref.{role}.fsdp_config.reshard_after_forward" for role in ("actor", "ref"))
_SYNC = "actor_rollout_ref.actor.fsdp_config.gradient_sync"


@dataclass(frozen=True)
class Resharding:
    reshard_after_forward: bool | int = True
    """Free gathered parameters between forward and backward. false keeps them, which saves one gather. A number keeps them
    sharded over that many ranks, for example the ranks of one machine."""
    fsdp_size: CountOrMinusOne = -1
    """Ranks per shard group. -1 = all ranks in one group. A smaller number shards within each group and replicates across groups
    (HSDP)."""


@dataclass(frozen=True)
class GradientSync:
    gradient_sync: Literal["every", "last"] = "every"
    """every = reduce gradients at each micro-batch. last = keep gradients unsharded and reduce them once, at the last
    micro-batch. This needs fewer collectives, but holds 4 bytes per parameter (fp32 reduction) instead of this rank's share of
    them. One device reduces nothing, so there both are the same."""


def _refusal(role: Literal["actor", "ref"]) -> Refusal:
    prefix = f"actor_rollout_ref.{role}.fsdp_config"

    def ranks(settings: Settings) -> int:
        size, devices = fsdp_of(settings, role).fsdp_size, num_devices(settings)
        return devices if size == -1 else size

    def does_not_divide(settings: Settings) -> bool:
        number = fsdp_of(settings, role).reshard_after_forward
        if isinstance(number, bool) or (role == "ref" and not needs_reference(settings)):
            return False
        return not (1 < number < ranks(settings) and ranks(settings) % number == 0)

    return Refusal(
        (f"{prefix}.reshard_after_forward", f"{prefix}.fsdp_size"),
        does_not_divide,
        "does not divide the ranks of a shard group into smaller ones",
        lambda settings: f"Set true, false, or a divisor of {ranks(settings)} between 1 and {ranks(settings)}.",
        lambda settings: f"does not divide the {ranks(settings)} ranks of a shard group into smaller ones",
    )


KNOB = Knob(
    cost="one more gather per block",
    settings={"fsdp": Resharding, "trained_fsdp": GradientSync},
    refuses=(_refusal("actor"), _refusal("ref")),
    advice=tuple(Advice(kind, _RESHARD[0], True) for kind in ("gathered parameters", "collective buffers")),
    row=LadderRow(
        130,
        on=(*(f"{key}=true" for key in _RESHARD), f"{_SYNC}=every"),
        off=(*(f"{key}=false" for key in _RESHARD), f"{_SYNC}=last"),
    ),
)
