"""Keep only the input of each decoder block, and compute the rest again in backward (activation checkpointing).

Use it when: activations set the memory peak. It is on by default, in mode ``full``. The modes ``every_n`` and ``selective`` are
    faster and use more memory.
Saves: everything that checkpointed blocks would keep for backward, except their inputs. With ``selective`` a block also keeps the
    outputs of matrix products and of attention.
Costs: ``full``: one more forward, which is about a third more compute. ``every_n``: 1/n of that. ``selective``: only elementwise
    work is done twice.
Works with: every knob. With FSDP a block is gathered once for recomputation and backward together. With activation offload only
    the inputs of blocks move to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_memopt.memory.knob import Advice, Claim, Knob, LadderRow, PositiveInt, UnusedKey, activation_saving

_MODEL = "actor_rollout_ref.model"
_ON, _MODE, _EVERY = (
    f"{_MODEL}.{key}" for key in ("enable_gradient_checkpointing", "gradient_checkpointing_mode", "gradient_checkpointing_every")
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    enable_gradient_checkpointing: bool = True
    """Recompute decoder blocks in backward (non-reentrant). This saves activations and costs one more forward."""
    gradient_checkpointing_mode: Literal["full", "every_n", "selective"] = "full"
    """full = every block keeps only its input; every_n = one block in ``gradient_checkpointing_every`` keeps only its input, and
    the other blocks keep everything; selective = every block also keeps the outputs of matrix products and of attention, and
    recomputes the rest."""
    gradient_checkpointing_every: PositiveInt = 2
    """With every_n: one block in n is recomputed, counted back from the last block but one. Raise it while there is memory left:
    a block that keeps everything is faster."""

    @property
    def checkpointing(self) -> str | None:
        return self.gradient_checkpointing_mode if self.enable_gradient_checkpointing else None


KNOB = Knob(
    cost="one more forward",
    settings={"model": ActivationCheckpointing},
    same_numbers=True,
    known_as={"gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing"},
    unused_keys=(
        UnusedKey(
            _MODE,
            lambda settings: settings.actor_rollout_ref.model.checkpointing is None,
            "model.enable_gradient_checkpointing is false",
        ),
        UnusedKey(
            _EVERY,
            lambda settings: settings.actor_rollout_ref.model.checkpointing != "every_n",
            "model.gradient_checkpointing_mode is not every_n",
        ),
    ),
    advice=(Advice("activations", _ON, True, phases=("update_actor",)),),
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(80, on=(f"{_ON}=true",), off=(f"{_ON}=false",)),
)
