"""Keep parameters in host memory outside the phases that need them.

Use it when: parameters are a large part of the memory peak. Turn it on for the reference first, because only one phase needs the
    reference.
Saves: all parameters of a model in every phase that does not use it: 4 bytes per parameter with fp32 master weights, 2 with
    bfloat16.
Costs: as many bytes of host memory, one copy to the device for each phase that needs the model, and one copy back after each
    update. The first forward of a phase begins while later blocks are still being copied, and the copy back runs beside the
    weight sync.
Works with: an engine that sleeps (``rollout.free_cache_engine``), ``optimizer_offload``, and ``model.load_mode=mmap``, with which
    a reference rests in its file. It refuses ``offload_policy``, with which parameters never leave the host. If a frozen model
    does not fit in its own phase either, let it stream: see ``streamed_params``.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

from verl_memopt.memory.critic_rules import twin
from verl_memopt.memory.knob import Advice, Claim, Knob, LadderRow, Predicate, Range, has_own_teacher

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings

_KEYS = tuple(f"actor_rollout_ref.{role}.fsdp_config.param_offload" for role in ("actor", "ref"))
ACTOR_KEY, REFERENCE_KEY = _KEYS
SCORER_KEY = "reward_model.model.fsdp_config.param_offload"
TEACHER_KEY = "teacher.fsdp_config.param_offload"
STREAM = "stream"
"""Value with which a frozen model is not whole on the device even in its own phase: see ``streamed_params``."""
CHOICE = Range("must be true, false or stream", lambda value: value in (True, False, STREAM))
WITHOUT_ACTOR = ("init", "gen", "testing", "reward", "ref", "teacher", "values", "update_critic", "save_checkpoint")
"""Phases that do not use the policy's parameters."""
WITHOUT_REFERENCE = (
    *("init", "gen", "testing", "reward", "old_log_prob", "teacher", "values", "update_critic", "update_actor"),
    *("update_weights", "save_checkpoint"),
)
"""Phases that do not use the reference's parameters."""
WITHOUT_TEACHER = (*(phase for phase in WITHOUT_REFERENCE if phase != "teacher"), "ref")
"""Phases that do not use the teacher's parameters. An update reads its head at most."""
WITHOUT_CRITIC = (
    *("init", "gen", "testing", "reward", "old_log_prob", "ref", "teacher", "update_actor", "update_weights"),
    "save_checkpoint",
)
"""Phases that do not use the critic's parameters."""
WITHOUT_SCORER = (*(phase for phase in WITHOUT_CRITIC if phase != "reward"), "values", "update_critic")
"""Phases that do not use the parameters of the model that scores."""


@dataclass(frozen=True)
class ParamOffload:
    param_offload: Annotated[bool | str, CHOICE] = False
    """Keep parameters in one host buffer outside the phases that need them. This saves 4 bytes per parameter (fp32) on the
    device. Turn it on for a reference first, because only one phase needs it. stream is for a frozen model on one device: its
    blocks are copied to the device one by one while it computes, and at most two of them are there at once."""

    @property
    def streams(self) -> bool:
        return self.param_offload == STREAM


def _stays(key: str) -> Predicate:
    return lambda settings: not attrgetter(key)(settings)


def _rests_on_device(settings: Settings) -> bool:
    return has_own_teacher(settings) and not settings.teacher.fsdp_config.param_offload


KNOB = Knob(
    cost="host memory, copies per phase",
    settings={"fsdp": ParamOffload},
    same_numbers=True,
    known_as={"offload_untrained_models": REFERENCE_KEY},
    advice=(
        Advice("params", REFERENCE_KEY, True, _stays(REFERENCE_KEY), phases=WITHOUT_REFERENCE),
        Advice("params", _KEYS[0], True, phases=WITHOUT_ACTOR),
        Advice("params", twin(_KEYS[0]), True, phases=WITHOUT_CRITIC),
        Advice("params", SCORER_KEY, True, _stays(SCORER_KEY), phases=WITHOUT_SCORER),
        Advice("params", TEACHER_KEY, True, _rests_on_device, phases=WITHOUT_TEACHER),
    ),
    claims=(
        Claim("update_actor", "params", lambda _, after: after.reference_bytes),
        Claim("ref", "params", lambda _, after: after.params * after.master_bytes),
    ),
    row=LadderRow(120, on=tuple(f"{key}=true" for key in _KEYS), off=tuple(f"{key}=false" for key in _KEYS)),
)
