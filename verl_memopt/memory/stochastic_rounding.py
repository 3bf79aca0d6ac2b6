"""Round updated bfloat16 weights up or down at random, so that small updates are not lost but right on average.

Use it when: weights rest in bfloat16 (``fsdp_config.model_dtype=bfloat16``).
Saves: with it, weights and gradients can rest in bfloat16, which takes 4 bytes per parameter less than fp32.
Costs: each weight is off by up to one bfloat16 spacing (2^-7 of the weight), and by 0 on average. Without it, a learning rate of
    1e-6 never changes a weight above 0.001 at all.
Works with: ``optim.state_dtype`` and ``optimizer_offload``. It refuses fp32 weights, which are not rounded. Source: arXiv
    1502.02551.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from verl_memopt.memory.bucketed_adamw import only_with_adamw
from verl_memopt.memory.knob import Knob, LadderRow, Refusal

_KEY, _MASTERS = "actor_rollout_ref.actor.optim.stochastic_rounding", "actor_rollout_ref.actor.fsdp_config.model_dtype"


@dataclass(frozen=True)
class StochasticRounding:
    stochastic_rounding: bool = False
    """Round updated bfloat16 weights up or down at random, so that they are right on average. Use it with
    ``fsdp_config.model_dtype=bfloat16``, where rounding to nearest would lose updates below 2^-9 of a weight."""


_rounds = attrgetter(_KEY)


KNOB = Knob(
    cost="weights rounded at random",
    settings={"optim": StochasticRounding},
    refuses=(
        *only_with_adamw(_KEY, _rounds),
        Refusal(
            (_KEY, _MASTERS),
            lambda settings: _rounds(settings) and settings.actor_rollout_ref.actor.fsdp_config.model_dtype != "bfloat16",
            "fp32 weights are not rounded",
            f"Set {_MASTERS}=bfloat16, or remove stochastic_rounding.",
        ),
    ),
    row=LadderRow(170, on=(f"{_KEY}=true", f"{_MASTERS}=bfloat16"), off=(f"{_KEY}=false", f"{_MASTERS}=fp32")),
)
