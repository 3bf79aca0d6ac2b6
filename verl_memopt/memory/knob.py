"""What a knob's file declares, and the list of all knobs.

``config/`` builds checks and errors from the declarations, the docs read them. A rule is a function of the typed settings, so a
key that does not exist is found by the type checker.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

if TYPE_CHECKING:
    from verl_memopt.config.schema import ActorRolloutRef, Fsdp, Settings
    from verl_memopt.plan.formulas import Shapes

Predicate = Callable[["Settings"], bool]
"""A question about the settings."""
Sentence = Callable[["Settings"], str]
"""A sentence with numbers of the settings."""

KNOBS = (
    "chunked_logprob", "recompute_elementwise", "prune_last_block", "tiled_mlp", "tiled_block", "activation_checkpointing",
    "activation_offload", "shared_prompt", "token_budget", "bucketed_adamw", "optimizer_offload", "optimizer_state_dtype",
    "stochastic_rounding", "optimizer_in_backward", "grad_offload", "split_masters", "param_offload", "streamed_params",
    "native_offload", "resharding", "sequence_parallel", "sharding_units", "precision", "lora", "quantized_base",
    "quantized_frozen", "weight_buckets", "shared_weights", "rollout_memory", "load_mode", "limits", "profiles",
)  # fmt: skip
"""Files of this folder that end with a ``KNOB``, in the order of lists: first what costs least, within training, then the engine,
then the host. Their mechanisms import torch, so they are named here and not searched."""

PARTS = ("Use it when", "Saves", "Costs", "Works with")
"""What the docstring of a knob's file says, after one sentence on what the knob does."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("actor_rollout_ref.model", "critic.model"),
    "policy_model": ("actor_rollout_ref.model",),
    "actor": ("actor_rollout_ref.actor",),
    "critic": ("critic",),
    "optim": ("actor_rollout_ref.actor.optim", "critic.optim"),
    "fsdp": (
        *("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config"),
        "reward_model.model.fsdp_config",
    ),
    "trained_fsdp": ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"),
    "ref": ("actor_rollout_ref.ref",),
    "scoring_model": ("reward_model.model",),
    "log_prob_pass": ("actor_rollout_ref.rollout", "actor_rollout_ref.ref"),
    "rollout": ("actor_rollout_ref.rollout",),
    "memory": ("memory",),
}
"""Sections that knobs add fields to, and the dotted keys under which each stands."""

LOWER = "lower"
"""Stands for the value of a number that should be lowered."""


@dataclass(frozen=True)
class UnusedKey:
    """When a key has no effect. A user who sets it then gets a warning."""

    key: str
    when: Predicate
    """Return whether the key has no effect."""
    because: str
    """The setting that is the reason, as a sentence without a full stop."""


@dataclass(frozen=True)
class Refusal:
    """A refused combination of settings, in words for both the error and the docs page."""

    keys: tuple[str, ...]
    """The keys that the error shows with their values; the knob's own comes first."""
    when: Predicate
    """Return whether the settings are refused."""
    because: str
    """Why it is refused, as a sentence without a full stop."""
    way_out: str | Sentence
    """What to set in its place: a sentence, or a function of the settings that returns one."""
    because_here: Sentence | None = None
    """Return the reason with the numbers of the settings, for the error; None = ``because`` serves both."""

    def reason_for(self, settings: Settings) -> str:
        return self.because if self.because_here is None else self.because_here(settings)

    def way_out_for(self, settings: Settings) -> str:
        return self.way_out if isinstance(self.way_out, str) else self.way_out(settings)


@dataclass(frozen=True)
class Work:
    """What a call computes on one device; 0 for what it does not have."""

    rows: int = 0
    """Sequences of the fullest micro-batch, or that are generated at once."""
    tokens: int = 0
    """Tokens of the fullest micro-batch."""
    longest: int = 0
    """Tokens of the longest sequence."""
    responses: int = 0
    """Response tokens of the fullest micro-batch."""


@dataclass(frozen=True)
class Need:
    """What a call needed when the device had no room: the source of an advice's numbers."""

    share: float
    """How much of the bytes that grow with the work (or of the kind that is advised) there is room for, from 0 to 1."""
    over_bytes: int
    """Bytes beyond the limit."""
    limit_bytes: int
    work: Work = Work()

    @property
    def one_fits(self) -> bool:
        # The share keeps half of the room free.
        return 2 * self.share * self.work.tokens >= self.work.longest

    def part(self, count: int, least: int = 1) -> int | None:
        fitting = max(int(count * self.share), least)
        # None: all of them fit.
        return fitting if fitting < count else None


@dataclass(frozen=True)
class Advice:
    """What to set when a phase runs out of device memory."""

    kind: str
    """Kind of bytes that it makes smaller."""
    key: str
    value: object
    """The value to set, or ``LOWER``."""
    when: Predicate = lambda _: True
    """Return whether it would help."""
    phases: tuple[str, ...] = ()
    """Phases in which it helps; () = all but ``not_in``."""
    not_in: tuple[str, ...] = ()
    """Phases in which it does not help."""
    ends_it: bool = False
    """It alone is likely to be enough, so it is named before all others."""
    to: Callable[[Need, Settings], float | None] | None = None
    """Of a number to lower: return the largest that would be enough, or None where no number is. Without it the number shrinks
    as its bytes must."""
    cost: str = ""
    """Filled in from its knob."""

    def helps_in(self, phase: str) -> bool:
        return phase in self.phases if self.phases else phase not in self.not_in


@dataclass(frozen=True)
class Claim:
    phase: str
    kind: str
    """A kind of device bytes, or ``host buffers``."""
    num_bytes: Callable[[Shapes, Shapes], float]
    """Return the bytes saved, from the shapes before and after the knob is switched on."""


def activation_saving(before: Shapes, after: Shapes) -> float:
    return before.activation_bytes - after.activation_bytes


@dataclass(frozen=True)
class LadderRow:
    """The knob's row in the ladder, which switches on one knob after another and measures each."""

    place: int
    """Rows are measured in this order: first what changes no number, precision last."""
    on: tuple[str, ...]
    """Overrides that switch it on. ``{pair}`` stands for the tokens of two rows of the batch."""
    off: tuple[str, ...]
    """Overrides that switch it off. ``{all}`` stands for the tokens of all rows of the batch."""
    on_top_of: str = ""
    """Name of the knob on whose row this one is measured, in place of those that follow there; "" = the row before."""


@dataclass(frozen=True)
class Knob:
    """One memory knob. Its text is the docstring of its file."""

    cost: str
    """What it costs, in at most five words."""
    name: str = ""
    """Of its file; :func:`knobs` fills it in."""
    settings: Mapping[str, type] = field(default_factory=dict)
    """Section -> frozen dataclass whose fields join it."""
    shared_keys: tuple[str, ...] = ()
    """Keys of other files that belong to it as well."""
    besides: tuple[str, ...] = ()
    """What turns it and is no key: a choice of a settings group, or an environment variable."""
    unused_keys: tuple[UnusedKey, ...] = ()
    same_numbers: bool = False
    """Whether no number of a run depends on it, to the last bit, so that a resumed run may change it."""
    known_as: Mapping[str, str] = field(default_factory=dict)
    """Name in another project -> key, for the error of an unknown key."""
    refuses: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    claims: tuple[Claim, ...] = ()
    """What the ladder holds it to."""
    row: LadderRow | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.defaults(), *self.shared_keys)

    @property
    def first_key(self) -> str:
        """The key to set first: the one that the ladder sets; for a knob without keys, what turns it on instead."""
        from_row = (override.partition("=")[0] for override in (self.row.on if self.row else ()))
        return next(iter((*from_row, *self.keys, *self.besides)))

    def defaults(self) -> dict[str, Any]:
        return {
            f"{prefix}.{name}": value
            for section, settings in self.settings.items()
            for prefix in SECTIONS[section]
            for name, value in _leaves(settings)
        }


def _leaves(settings: type) -> Iterator[tuple[str, Any]]:
    # Yield (name, default) of a settings class; fields of nested classes have dotted names.
    types, instance = get_type_hints(settings), settings()
    for setting in dataclasses.fields(settings):
        if dataclasses.is_dataclass(types[setting.name]):
            yield from ((f"{setting.name}.{name}", value) for name, value in _leaves(types[setting.name]))
        else:
            yield setting.name, getattr(instance, setting.name)


def enough_rows(need: Need, _: Settings) -> int | None:
    return need.part(need.work.rows)


@cache
def knobs() -> tuple[Knob, ...]:
    found = ((name, _module(name).KNOB) for name in KNOBS)
    return tuple(
        dataclasses.replace(knob, name=name, advice=tuple(dataclasses.replace(advice, cost=knob.cost) for advice in knob.advice))
        for name, knob in found
    )


def knob_named(name: str) -> Knob:
    return next(knob for knob in knobs() if knob.name == name)


@cache
def text_of(name: str) -> dict[str, str]:
    """Return a knob's text: what it does under "", then one entry for each of :data:`PARTS`."""
    pieces = re.split(rf"^({'|'.join(PARTS)}):", _module(name).__doc__ or "", flags=re.MULTILINE)
    text = {"": pieces[0], **dict(zip(pieces[1::2], pieces[2::2], strict=True))}
    assert tuple(text) == ("", *PARTS), f"memory/{name}.py: its docstring should say {', '.join(PARTS)}; it says {list(text)[1:]}"
    return {part: " ".join(words.split()) for part, words in text.items()}


def as_json() -> list[dict[str, Any]]:
    return [
        {
            "name": knob.name,
            "does": text_of(knob.name)[""],
            **{part.lower().replace(" ", "_"): text_of(knob.name)[part] for part in PARTS},
            "keys": list(knob.keys),
            "defaults": knob.defaults(),
            "besides": list(knob.besides),
            "refuses": [{"keys": list(refusal.keys), "because": refusal.because} for refusal in knob.refuses],
        }
        for knob in knobs()
    ]


def in_yaml(value: object) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _module(name: str) -> Any:
    return importlib.import_module(f"verl_memopt.memory.{name}")


class SettingsView:
    """A view of the settings in which an ``address`` function may rename a dotted key, or raise.

    Sections are views too; other attributes come from the settings.
    """

    def __init__(self, settings: Settings, address: Callable[[str], str], prefix: str = "") -> None:
        self._settings, self._address, self._prefix = settings, address, prefix

    def __getattr__(self, name: str) -> Any:
        key = f"{self._prefix}{name}"
        *sections, last = self._address(key).split(".")
        section: Any = self._settings
        for part in sections:
            section = getattr(section, part)
        derived = getattr(type(section), last, None)
        if isinstance(derived, property):  # it reads keys, which go through the function too
            return derived.__get__(self)
        value = getattr(section, last)
        is_section = dataclasses.is_dataclass(value) or isinstance(value, SettingsView)
        return SettingsView(self._settings, self._address, f"{key}.") if is_section else value


# What settings may hold and what several of them mean together: ranges of numbers, and questions that many rules ask. A number
# with a range is ``Annotated[type, Range]``, read by the check of values.

DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""The keys behind :func:`num_devices`."""

KL = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
"""The keys behind :func:`needs_reference`."""


def num_devices(settings: Settings) -> int:
    return settings.trainer.nnodes * settings.trainer.n_gpus_per_node


SequenceRole = Literal["actor", "ref", "critic", "reward_model"]

POOL = ("nnodes", "n_gpus_per_node")


def pool_keys(role: SequenceRole) -> tuple[str, str]:
    return f"{role}.{POOL[0]}", f"{role}.{POOL[1]}"


def has_pool(settings: Settings, role: SequenceRole) -> bool:
    if role == "critic":
        return settings.critic.enable_resource_pool
    return role == "reward_model" and settings.reward_model.enable_resource_pool


def devices_of(settings: Settings, role: SequenceRole) -> int:
    if not has_pool(settings, role):
        return num_devices(settings)
    section = settings.critic if role == "critic" else settings.reward_model
    return section.nnodes * section.n_gpus_per_node


def for_devices(role: SequenceRole, rule: Callable[[tuple[str, str]], Refusal]) -> Iterator[Refusal]:
    if role in ("actor", "ref"):
        yield rule(DEVICES)
        return
    for keys, own in ((DEVICES, False), (pool_keys(role), True)):
        refusal = rule(keys)
        yield dataclasses.replace(refusal, when=_where(role, own, refusal.when))


def _where(role: SequenceRole, own: bool, when: Predicate) -> Predicate:
    return lambda settings: has_pool(settings, role) == own and when(settings)


def fsdp_of(settings: Settings, role: Literal["actor", "ref"]) -> Fsdp:
    roles = settings.actor_rollout_ref
    return roles.actor.fsdp_config if role == "actor" else roles.ref.fsdp_config


def sequence_ranks(settings: Settings, role: SequenceRole) -> int:
    if role == "critic":
        return settings.critic.model.fsdp_config.sequence_ranks
    if role == "reward_model":
        return settings.reward_model.model.fsdp_config.sequence_ranks
    roles = settings.actor_rollout_ref
    return roles.actor.fsdp_config.sequence_ranks if role == "actor" else reference_ranks(roles)


def reference_ranks(roles: ActorRolloutRef) -> int:
    # With LoRA the policy is the reference.
    return (roles.actor if roles.model.lora_rank > 0 else roles.ref).fsdp_config.sequence_ranks


def data_ranks(settings: Settings, role: SequenceRole) -> int:
    return max(devices_of(settings, role) // sequence_ranks(settings, role), 1)


def uneven_shards(devices: int, fsdp: Fsdp) -> bool:
    # Whether devices do not divide into shard groups. Sizes below 1 mean all devices, or are reported elsewhere.
    return fsdp.fsdp_size > 0 and devices % fsdp.fsdp_size != 0


def longest_sample(settings: Settings) -> int:
    return settings.data.max_prompt_length + settings.data.max_response_length


def needs_reference(settings: Settings) -> bool:
    in_reward, in_loss = settings.algorithm.use_kl_in_reward, settings.actor_rollout_ref.actor.use_kl_loss
    return in_reward or in_loss


@dataclass(frozen=True)
class Range:
    text: str
    """The end of the sentence "the value ..."."""
    holds: Callable[[Any], bool]
    """Return whether a value, which is not None, is in the range."""


@dataclass(frozen=True)
class Words:
    words: tuple[str, ...]


@dataclass(frozen=True)
class Meanings:
    of: tuple[tuple[str, str], ...]
    """(word, meaning)."""


POSITIVE = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must not be negative", lambda value: value >= 0)
MINUS_ONE_OR_POSITIVE = Range("must be above 0, or -1", lambda value: value > 0 or value == -1)
MINUS_ONE_OR_MORE = Range("must not be negative, except -1", lambda value: value >= -1)
SHARE = Range("must lie between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)

PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NaturalInt = Annotated[int, NOT_NEGATIVE]
"""A whole number from 0 up."""
NaturalFloat = Annotated[float, NOT_NEGATIVE]
"""A number from 0 up."""
CountOrMinusOne = Annotated[int, MINUS_ONE_OR_POSITIVE]
Share = Annotated[float, SHARE]
PositiveShare = Annotated[float, POSITIVE_SHARE]
