"""Copy a frozen model from host memory while it computes: the next block arrives while the present one computes.

Use it when: a reference, a teacher, a student or a reward model does not fit in its own phase, even with ``param_offload=true``.
Saves: in that phase, all parameters of the model except two blocks, or except the vocabulary matrix where that is larger.
    Building the model takes no more device memory either. On the host the parameters have the compute dtype, which halves their
    bytes with fp32 master weights and bfloat16 compute.
Costs: the model crosses the bus once per micro-batch (8 billion parameters in bfloat16: 16 GB, 0.6 s at 25 GB/s). This takes no
    extra time where a block computes for longer than the next block takes to arrive, so use few, large micro-batches
    (``ref.log_prob_max_token_len_per_gpu``). If the answers to a prompt lie in several micro-batches, the blocks are copied once
    more for the prompt.
Works with: shared prompts, ``ref.quantization`` (the quantised bytes are copied), ``block_tile_tokens``, and any dtype. Log-probs
    stay the same bit for bit. It refuses several devices, trained models, LoRA, ``load_mode=mmap``, ``offload_policy`` and
    ``residency=swap``.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from verl_memopt.memory.knob import (
    Advice,
    Claim,
    Knob,
    LadderRow,
    Predicate,
    Refusal,
    SequenceRole,
    devices_of,
    for_devices,
    has_own_teacher,
    needs_reference,
)
from verl_memopt.memory.param_offload import ACTOR_KEY, REFERENCE_KEY, SCORER_KEY, STREAM, TEACHER_KEY
from verl_memopt.memory.precision import width

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.plan.formulas import Shapes

_RANK, _LOAD = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.load_mode"
_FOLLOWS = "actor_rollout_ref.ref.sync_every_steps"
_DTYPES = tuple(f"actor_rollout_ref.ref.fsdp_config.{name}" for name in ("model_dtype", "dtype"))


def _streams(key: str) -> Predicate:
    return lambda settings: attrgetter(key)(settings) == STREAM


def _has(key: str, settings: Settings) -> bool:
    scorer = settings.reward_model
    built = {REFERENCE_KEY: needs_reference(settings), TEACHER_KEY: has_own_teacher(settings)}
    return built.get(key, scorer.enable and scorer.model.path is not None)


def _role(key: str) -> SequenceRole:
    roles: dict[str, SequenceRole] = {SCORER_KEY: "reward_model", TEACHER_KEY: "teacher"}
    return roles.get(key, "ref")


def _refuses(key: str) -> Iterator[Refusal]:
    native = key.replace("param_offload", "offload_policy")

    def refusal(others: tuple[str, ...], when: Predicate, because: str, way_out: str) -> Refusal:
        return Refusal(
            (key, *others), lambda settings: _streams(key)(settings) and _has(key, settings) and when(settings), because, way_out
        )

    yield from for_devices(
        _role(key),
        lambda devices: refusal(
            devices,
            lambda settings: devices_of(settings, _role(key)) > 1,
            "on several devices FSDP2 shards each block, and gathers it when it computes",
            f"Set {native}=true and {key}=false, so that FSDP2 gathers each block from the host. Or set {key}=true.",
        ),
    )
    yield refusal(
        (_LOAD,),
        lambda settings: settings.actor_rollout_ref.model.load_mode == "mmap",
        "a copy from a mapped file cannot run beside the computation",
        f"Set {_LOAD}=stream, or {key}=true.",
    )


def _would_lose_masters(settings: Settings) -> bool:
    # Whether the reference follows the policy and has master weights in another dtype than that of compute.
    masters, compute = (attrgetter(key)(settings) for key in _DTYPES)
    follows = attrgetter(_FOLLOWS)(settings) is not None and needs_reference(settings)
    return follows and width(masters) != width(compute)


def may_stream(key: str) -> Predicate:
    native = attrgetter(key.replace("param_offload", "offload_policy"))

    def may(settings: Settings) -> bool:
        model, swaps = settings.actor_rollout_ref.model, settings.reward_model.residency == "swap"
        refused = native(settings) or model.load_mode == "mmap" or swaps or devices_of(settings, _role(key)) > 1
        return not refused and not (key == REFERENCE_KEY and (model.lora_rank or _would_lose_masters(settings)))

    return may


def _saved(before: Shapes, _: Shapes) -> float:
    frozen = before.settings.ref.fsdp_config
    most = max(2 * before.block_params, before.vocab * before.hidden)
    return before.reference_bytes - width(frozen.dtype) * most


KNOB = Knob(
    cost="host memory, copies per micro-batch",
    shared_keys=(REFERENCE_KEY, SCORER_KEY, TEACHER_KEY),
    same_numbers=True,
    refuses=(
        Refusal(
            (ACTOR_KEY,),
            _streams(ACTOR_KEY),
            "backward and optimizer need the whole model on the device; only a frozen model streams",
            f"Set {ACTOR_KEY}=true.",
        ),
        Refusal(
            (REFERENCE_KEY, _RANK),
            lambda settings: _streams(REFERENCE_KEY)(settings) and settings.actor_rollout_ref.model.lora_rank > 0,
            "with LoRA the reference is the policy's own base",
            f"Set {REFERENCE_KEY}=false.",
        ),
        *_refuses(REFERENCE_KEY),
        *_refuses(SCORER_KEY),
        *_refuses(TEACHER_KEY),
        Refusal(
            (REFERENCE_KEY, _FOLLOWS, *_DTYPES),
            lambda settings: _streams(REFERENCE_KEY)(settings) and _would_lose_masters(settings),
            "a reference that streams rests in the compute dtype, and one that follows the policy needs its master weights",
            f"Set {_DTYPES[0]} to {_DTYPES[1]}, or {REFERENCE_KEY}=true.",
        ),
    ),
    advice=(
        Advice("params", REFERENCE_KEY, STREAM, may_stream(REFERENCE_KEY), phases=("ref",)),
        Advice("params", SCORER_KEY, STREAM, may_stream(SCORER_KEY), phases=("reward",)),
        Advice("params", TEACHER_KEY, STREAM, may_stream(TEACHER_KEY), phases=("teacher",)),
    ),
    claims=(Claim("ref", "params", _saved),),
    row=LadderRow(235, on=(f"{REFERENCE_KEY}=stream",), off=(f"{REFERENCE_KEY}=false",), on_top_of="param_offload"),
)
