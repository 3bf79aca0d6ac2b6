"""Store the two moments of AdamW in bfloat16, int8 or int4.

The optimizer step decodes one bucket of moments to fp32, updates it and encodes it again.

Use it when: optimizer state does not fit, and offloading it costs too much time.
Saves: fp32 moments take 8 bytes per parameter. bfloat16 saves 4 of them, int8 5.97 and int4 6.94.
Costs: moments are no longer exact. The dtypes of weights and updates do not change. On a small noisy regression the final loss
    differed from that with fp32 moments by 0.01 % (bfloat16), 0.04 % (int8) and 1.5 % (int4).
Works with: ``optimizer_offload`` (fewer bytes cross the bus) and ``optim.stochastic_rounding``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_memopt.memory.bucketed_adamw import OPTIMIZER, only_with_adamw
from verl_memopt.memory.knob import Claim, Knob, LadderRow, Refusal

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_KEY = "actor_rollout_ref.actor.optim.state_dtype"


@dataclass(frozen=True)
class OptimizerStateDtype:
    state_dtype: Literal["fp32", "bfloat16", "int8", "int4"] | None = None
    """dtype in which AdamW's two moments rest: fp32, bfloat16, int8 or int4 (8, 4, 2.03 or 1.06 bytes per parameter). Choose a
    smaller one when optimizer state does not fit and ``optimizer_offload`` costs too much time. int8 and int4 are quantised block
    by block. The momentum of SGD can be fp32 or bfloat16."""

    def moment_bytes(self, master_bytes: int) -> float:
        # Without a ``state_dtype`` moments have the dtype of the master weights.
        if self.state_dtype is None:
            return master_bytes
        return {"fp32": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}[self.state_dtype]


def has_state_dtype(settings: Settings) -> bool:
    actor = settings.actor_rollout_ref.actor
    return actor.optim.state_dtype != actor.fsdp_config.model_dtype


def _is_quantised(settings: Settings) -> bool:
    return settings.actor_rollout_ref.actor.optim.state_dtype in ("int8", "int4")


KNOB = Knob(
    cost="inexact moments",
    settings={"optim": OptimizerStateDtype},
    known_as={
        "optim": "actor_rollout_ref.actor.optim.state_dtype (8-bit and 4-bit AdamW), or actor_rollout_ref.actor.optim.optimizer"
    },
    refuses=(
        *only_with_adamw(_KEY, has_state_dtype),
        Refusal(
            (_KEY, OPTIMIZER),
            lambda settings: _is_quantised(settings) and settings.actor_rollout_ref.actor.optim.num_moments < 2,
            "SGD's momentum cannot be quantised",
            f"Set {_KEY}=bfloat16, or {OPTIMIZER}=AdamW.",
        ),
    ),
    claims=(
        Claim("update_actor", "host buffers", lambda before, after: (before.state_bytes - after.state_bytes) * after.params),
    ),
    row=LadderRow(180, on=(f"{_KEY}=int8",), off=(f"{_KEY}=null",)),
)
