"""AdamW or SGD that updates its state bucket by bucket, so that a step needs little scratch memory, however large a tensor is.

Use it when: always; AdamW is the default. Lower ``bucket_megabytes`` when optimizer scratch sets the memory peak. If the moments
    of AdamW do not fit, try ``optim.optimizer=SGD`` with a far higher learning rate: without momentum it has no state at all.
Saves: the parameter-sized temporary tensor of torch's unfused AdamW. If the state is offloaded, quantised or rounded, a step
    needs three buckets of scratch memory.
Costs: nothing. With fp32 state on the device the results are those of torch's fused AdamW or SGD, bit for bit. SGD needs a
    learning rate of its own.
Works with: ``optimizer_offload``, ``grad_offload``, ``split_master_weights``, ``optim.state_dtype``,
    ``optim.stochastic_rounding`` and ``optim.in_backward``. These need one of the two optimizers and refuse any other. Source of
    the claim that SGD can replace AdamW in RL: arXiv 2602.07729. Our run on the toy task: ``docs/evidence/2026-11-24-sgd``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from verl_memopt.memory.knob import (
    LOWER,
    Advice,
    Claim,
    Knob,
    LadderRow,
    Need,
    PositiveFloat,
    Predicate,
    Range,
    Refusal,
    UnusedKey,
)

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_OPTIM = "actor_rollout_ref.actor.optim"
OPTIMIZER, IMPL, OVERRIDES = (f"{_OPTIM}.{name}" for name in ("optimizer", "optimizer_impl", "override_optimizer_config"))
BUCKET = f"{_OPTIM}.bucket_megabytes"
SLOTS = 3
"""Buckets (or tiles of a gradient) on the device at once: one is arriving, one is being updated, and one is leaving."""
_ADAMW, _SGD = ("torch.optim", "AdamW"), ("torch.optim", "SGD")
_ARGUMENTS = {_ADAMW: {"lr", "betas", "eps", "weight_decay"}, _SGD: {"lr", "momentum", "nesterov", "weight_decay"}}
MOMENTUM = Range("must be at least 0 and below 1", lambda value: 0 <= value < 1)
_MOMENTUM = f"{_OPTIM}.momentum"
_IN_BUCKETS: list[Predicate] = [lambda settings: _class(settings) == _SGD]
"""One predicate per knob that makes the step update the state in buckets: whether that knob is on."""


@dataclass(frozen=True)
class BucketedAdamWSettings:
    optimizer: str = "AdamW"
    """Name of the optimizer class in ``optimizer_impl``: AdamW, or SGD, which has no moments and saves 8 bytes per parameter in
    fp32."""
    momentum: Annotated[float, MOMENTUM] = 0.0
    """Momentum of SGD. It takes 4 bytes per parameter in fp32; 0 = no state at all. Other optimizer classes that have a momentum
    get it too."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the optimizer class."""
    override_optimizer_config: dict[str, Any] | None = None
    """Further arguments of the optimizer. The optimizer rejects names that it does not know."""
    bucket_megabytes: PositiveFloat = 64
    """Size in MiB of one bucket of state. AdamW updates its state in buckets when the state is offloaded, quantised or rounded;
    SGD always does. A step holds at most three buckets. Lower it when the optimizer step sets the memory peak: a few MiB are
    enough to keep the bus busy."""

    @property
    def num_moments(self) -> int:
        if (self.optimizer_impl, self.optimizer) == _SGD:
            return 1 if self.momentum else 0
        # Optimizer classes of other libraries count as AdamW.
        return 2


def only_with_adamw(key: str, is_on: Predicate) -> tuple[Refusal, ...]:
    """Return the refusals of a knob that needs AdamW or SGD, and register that the step updates buckets while the knob is on."""
    _IN_BUCKETS.append(is_on)
    return (
        Refusal(
            (key, OPTIMIZER, IMPL),
            lambda settings: is_on(settings) and _class(settings) not in _ARGUMENTS,
            "only AdamW and SGD of torch.optim support it",
            f"Remove {key}, or {OPTIMIZER} and optimizer_impl.",
        ),
        Refusal(
            (key, OVERRIDES),
            lambda settings: is_on(settings) and bool(_unknown(settings)),
            f"with {key}, AdamW takes only lr, betas, eps and weight_decay, and SGD only lr, momentum, nesterov and weight_decay",
            lambda settings: f"Remove {', '.join(_unknown(settings))} from {OVERRIDES}.",
        ),
    )


def _class(settings: Settings) -> tuple[str, str]:
    optim = settings.actor_rollout_ref.actor.optim
    return optim.optimizer_impl, optim.optimizer


def _unknown(settings: Settings) -> list[str]:
    given = set(settings.actor_rollout_ref.actor.optim.override_optimizer_config or {})
    return sorted(given - _ARGUMENTS.get(_class(settings), given))


def _small_bucket(need: Need, settings: Settings) -> float | None:
    present = settings.actor_rollout_ref.actor.optim.bucket_megabytes
    smaller = float(f"{min(present * need.share, need.limit_bytes / 2**20 / 256):.3g}")
    return smaller if 0 < smaller < present else None


def _is_compiled_while_counted(settings: Settings) -> bool:
    counted = settings.trainer.device != "cuda" and settings.trainer.track_memory_every_steps > 0
    return counted and _class(settings)[0] == "torchao.optim"


KNOB = Knob(
    cost="nothing",
    settings={"optim": BucketedAdamWSettings},
    unused_keys=(
        UnusedKey(
            BUCKET,
            lambda settings: not any(is_on(settings) for is_on in _IN_BUCKETS),
            "the state is updated as a whole, because it is neither offloaded, quantised nor rounded",
        ),
        UnusedKey(_MOMENTUM, lambda settings: _class(settings) == _ADAMW, "AdamW uses betas instead"),
    ),
    refuses=(
        Refusal(
            (IMPL, OPTIMIZER),
            lambda settings: _class(settings)[0] == "torchao.optim" and _class(settings)[1] not in ("AdamW8bit", "Adam8bit"),
            "this optimizer cannot update sharded parameters",
            f"Remove both and set {_OPTIM}.state_dtype=int4 (or int8), or set {OPTIMIZER}=AdamW8bit.",
        ),
        Refusal(
            (IMPL, OPTIMIZER, "trainer.device", "trainer.track_memory_every_steps"),
            _is_compiled_while_counted,
            "this optimizer compiles its step, and a compiled step cannot run while bytes are counted on a CPU",
            f"Set trainer.track_memory_every_steps=0, or remove both and set {_OPTIM}.state_dtype=int8.",
        ),
    ),
    advice=(Advice("optimizer scratch", BUCKET, LOWER, to=_small_bucket),),
    claims=(Claim("update_actor", "optimizer scratch", lambda _, after: 4 * after.params),),
    row=LadderRow(30, on=(f"{OVERRIDES}={{}}",), off=(f"{OVERRIDES}={{foreach: true, fused: false}}",)),
)
