"""Send weights from a sharded policy to the engine one bucket at a time.

Use it when: several devices share a model, and the weight sync sets the memory peak.
Saves: beyond the two models, a sync holds one bucket instead of the largest gathered tensor.
Costs: one collective per bucket. Buckets below 64 MiB do not use the full bandwidth of the links.
Works with: parameter offload and an engine that sleeps, with which memory is shortest during the sync. On one device the engine
    copies straight from the policy, and this key has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_memopt.memory.knob import LOWER, Advice, Knob, LadderRow, PositiveInt

_KEY = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@dataclass(frozen=True)
class BucketEngine:
    update_weights_bucket_megabytes: PositiveInt = 2048
    """Upper bound in MiB of the buffer that carries weights from the trainer to the engine."""


@dataclass(frozen=True)
class WeightBuckets:
    checkpoint_engine: BucketEngine = field(default_factory=BucketEngine)
    """How weights are sent to the engine."""


KNOB = Knob(
    cost="one collective per bucket",
    settings={"rollout": WeightBuckets},
    same_numbers=True,
    advice=(Advice("sync bucket", _KEY, LOWER),),
    row=LadderRow(150, on=(f"{_KEY}=64",), off=(f"{_KEY}=2048",)),
)
