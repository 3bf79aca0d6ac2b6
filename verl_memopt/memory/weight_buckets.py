"""Send weights from a sharded policy to the engine one bucket at a time.

Use it when: several devices share a model and the weight sync is the peak.
Saves: what a sync holds beyond the two models falls from the largest gathered tensor to one bucket.
Costs: one collective a bucket. Below 64 MiB the links are no longer full.
Works with: parameter offload and an engine that sleeps, which leave the least room at the moment of the sync. On one device the
    engine copies straight from the policy and the key changes nothing.
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
    """Weight sync."""


KNOB = Knob(
    cost="one collective per bucket",
    settings={"rollout": WeightBuckets},
    same_numbers=True,
    advice=(Advice("sync bucket", _KEY, LOWER),),
    row=LadderRow(150, on=(f"{_KEY}=64",), off=(f"{_KEY}=2048",)),
)
