"""What the file of a knob declares, and the list of all knobs.

``config/`` builds its checks and errors from these declarations, and the docs are generated from them. A rule is a function of
the typed settings, so the type checker finds a key that does not exist.
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
    from verl_memopt.config.schema import ActorRolloutRef, Fsdp, ResourcePool, Settings
    from verl_memopt.plan.formulas import Shapes

Predicate = Callable[["Settings"], bool]
"""A yes-or-no question about the settings."""
Sentence = Callable[["Settings"], str]
"""A sentence that contains values of the settings."""

KNOBS = (
    "chunked_logprob", "recompute_elementwise", "prune_last_block", "tiled_mlp", "tiled_block", "activation_checkpointing",
    "activation_offload", "shared_prompt", "token_budget", "bucketed_adamw", "optimizer_offload", "optimizer_state_dtype",
    "stochastic_rounding", "optimizer_in_backward", "grad_offload", "split_masters", "param_offload", "streamed_params",
    "native_offload", "resharding", "sequence_parallel", "sharding_units", "precision", "lora", "quantized_base",
    "quantized_frozen", "weight_buckets", "shared_weights", "rollout_memory", "load_mode", "limits", "profiles",
)  # fmt: skip
"""Files of this folder that define a ``KNOB``, in the order of lists: first knobs of training, from cheap to costly, then of the
engine, then of the host. They are listed and not searched for, because other files of the folder import torch."""

PARTS = ("Use it when", "Saves", "Costs", "Works with")
"""The parts of the docstring of a knob's file. Before them it says what the knob does."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("actor_rollout_ref.model", "critic.model"),
    "policy_model": ("actor_rollout_ref.model",),
    "actor": ("actor_rollout_ref.actor",),
    "critic": ("critic",),
    "optim": ("actor_rollout_ref.actor.optim", "critic.optim"),
    "fsdp": (
        *("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config"),
        *("reward_model.model.fsdp_config", "teacher.fsdp_config"),
    ),
    "trained_fsdp": ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"),
    "ref": ("actor_rollout_ref.ref",),
    "scoring_model": ("reward_model.model",),
    "teacher": ("teacher",),
    "log_prob_pass": ("actor_rollout_ref.rollout", "actor_rollout_ref.ref", "teacher"),
    "rollout": ("actor_rollout_ref.rollout",),
    "memory": ("memory",),
}
"""Sections to which knobs add fields -> the dotted keys at which the section occurs."""

LOWER = "lower"
"""The value of an advice that says to lower a number."""


@dataclass(frozen=True)
class UnusedKey:
    """A rule for when a key has no effect. A user who sets the key then gets a warning."""

    key: str
    when: Predicate
    """Return whether the key has no effect."""
    because: str
    """The reason, as a sentence without a full stop."""


@dataclass(frozen=True)
class Refusal:
    """A refused combination of settings, and the words for the error and the docs page."""

    keys: tuple[str, ...]
    """The keys that the error shows with their values. The key of the knob comes first."""
    when: Predicate
    """Return whether the settings are refused."""
    because: str
    """Why the settings are refused, as a sentence without a full stop."""
    way_out: str | Sentence
    """What to set instead: a sentence, or a function of the settings that returns one."""
    because_here: Sentence | None = None
    """Return the reason for the error, with values of the settings. None = the error uses ``because`` too."""

    def reason_for(self, settings: Settings) -> str:
        return self.because if self.because_here is None else self.because_here(settings)

    def way_out_for(self, settings: Settings) -> str:
        return self.way_out if isinstance(self.way_out, str) else self.way_out(settings)


@dataclass(frozen=True)
class Work:
    """What a call computes on one device. Fields that do not apply are 0."""

    rows: int = 0
    """Sequences of the fullest micro-batch, or sequences that are generated at once."""
    tokens: int = 0
    """Tokens of the fullest micro-batch."""
    longest: int = 0
    """Tokens of the longest sequence."""
    responses: int = 0
    """Response tokens of the fullest micro-batch."""


@dataclass(frozen=True)
class Need:
    """What a call needed when the device ran out of memory. The numbers in an advice are computed from it."""

    share: float
    """Share, from 0 to 1, for which there is room: of the bytes that grow with the work, or of the kind of bytes in the
    advice."""
    over_bytes: int
    """Bytes beyond the limit."""
    limit_bytes: int
    work: Work = Work()

    @property
    def one_fits(self) -> bool:
        # Twice the share, because the share is computed so that half of the room stays free.
        return 2 * self.share * self.work.tokens >= self.work.longest

    def part(self, count: int, least: int = 1) -> int | None:
        fitting = max(int(count * self.share), least)
        # None = all of them fit.
        return fitting if fitting < count else None


@dataclass(frozen=True)
class Advice:
    """What to set when a phase runs out of device memory."""

    kind: str
    """Kind of bytes that the advice makes smaller."""
    key: str
    value: object
    """The value to set, or ``LOWER``."""
    when: Predicate = lambda _: True
    """Return whether the advice would help."""
    phases: tuple[str, ...] = ()
    """Phases in which it helps. () = all phases but ``not_in``."""
    not_in: tuple[str, ...] = ()
    """Phases in which it does not help."""
    ends_it: bool = False
    """This advice alone is probably enough, so it is named first."""
    to: Callable[[Need, Settings], float | None] | None = None
    """With ``LOWER``: return the largest number that is small enough, or None if there is none. Without this function, the number
    is lowered in proportion to the bytes."""
    cost: str = ""
    """Cost of the knob; :func:`knobs` fills it in."""

    def helps_in(self, phase: str) -> bool:
        return phase in self.phases if self.phases else phase not in self.not_in


@dataclass(frozen=True)
class Claim:
    phase: str
    kind: str
    """A kind of device bytes, or ``host buffers``."""
    num_bytes: Callable[[Shapes, Shapes], float]
    """Return the bytes saved, from the shapes before and after the knob is turned on."""


def activation_saving(before: Shapes, after: Shapes) -> float:
    return before.activation_bytes - after.activation_bytes


@dataclass(frozen=True)
class LadderRow:
    """The knob's row in the ladder. The ladder turns on one knob after another and measures each."""

    place: int
    """Rows are measured in this order: first knobs that do not change results, precision last."""
    on: tuple[str, ...]
    """Overrides that turn the knob on. ``{pair}`` is replaced by the tokens of two rows of the batch."""
    off: tuple[str, ...]
    """Overrides that turn the knob off. ``{all}`` is replaced by the tokens of all rows of the batch."""
    on_top_of: str = ""
    """Name of the knob whose row this row is added to and compared with, without the rows after that one. "" = the previous
    row."""


@dataclass(frozen=True)
class Knob:
    """One memory knob. The docstring of its file describes it."""

    cost: str
    """What the knob costs, in a few words."""
    name: str = ""
    """Name of its file; :func:`knobs` fills it in."""
    settings: Mapping[str, type] = field(default_factory=dict)
    """Section (of :data:`SECTIONS`) -> frozen dataclass whose fields are added to it."""
    shared_keys: tuple[str, ...] = ()
    """Keys that other files declare and that also belong to this knob."""
    besides: tuple[str, ...] = ()
    """Other ways to set the knob: a choice of a settings group, or an environment variable."""
    unused_keys: tuple[UnusedKey, ...] = ()
    same_numbers: bool = False
    """Whether the results of a run are the same with and without it, bit for bit, so that a resumed run may change it."""
    known_as: Mapping[str, str] = field(default_factory=dict)
    """Name in another project -> key, for the error about an unknown key."""
    refuses: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    claims: tuple[Claim, ...] = ()
    """Savings that the knob promises and the ladder measures."""
    row: LadderRow | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.defaults(), *self.shared_keys)

    @property
    def first_key(self) -> str:
        """The key to set first: the key that the ladder sets. A knob without keys has an entry of ``besides`` instead."""
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
    """Return the text of a knob: "" -> what it does, and one entry for each of :data:`PARTS`."""
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
    """A view of the settings in which a function ``address`` may replace a dotted key by another one, or raise.

    Sections are views too. Other attributes are those of the settings.
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
        if isinstance(derived, property):  # evaluated on the view, so that the keys it reads are replaced too
            return derived.__get__(self)
        value = getattr(section, last)
        is_section = dataclasses.is_dataclass(value) or isinstance(value, SettingsView)
        return SettingsView(self._settings, self._address, f"{key}.") if is_section else value


# Questions about the settings that many rules ask, and ranges of numbers. A number with a range has the type ``Annotated[type,
# Range]``, which the check of values reads.

DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""The keys that :func:`num_devices` reads."""

KL = ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss")
"""The keys that :func:`uses_kl` reads."""


def num_devices(settings: Settings) -> int:
    return settings.trainer.nnodes * settings.trainer.n_gpus_per_node


SequenceRole = Literal["actor", "ref", "teacher", "critic", "reward_model"]

POOL = ("nnodes", "n_gpus_per_node")


def pool_keys(role: SequenceRole) -> tuple[str, str]:
    return f"{role}.{POOL[0]}", f"{role}.{POOL[1]}"


def has_pool(settings: Settings, role: SequenceRole) -> bool:
    if role == "critic":
        return settings.critic.enable_resource_pool
    section = {"teacher": settings.teacher, "reward_model": settings.reward_model}.get(role)
    return section is not None and section.enable_resource_pool


def devices_of(settings: Settings, role: SequenceRole) -> int:
    if not has_pool(settings, role):
        return num_devices(settings)
    section = pool_of(settings, role)
    return section.nnodes * section.n_gpus_per_node


def pool_of(settings: Settings, role: str) -> ResourcePool:
    sections: dict[str, ResourcePool] = {
        "critic": settings.critic, "reward_model": settings.reward_model, "teacher": settings.teacher,
    }  # fmt: skip
    return sections[role]


def for_devices(role: SequenceRole, rule: Callable[[tuple[str, str]], Refusal]) -> Iterator[Refusal]:
    if role in ("actor", "ref"):
        yield rule(DEVICES)
        return
    for keys, own in ((DEVICES, False), (pool_keys(role), True)):
        refusal = rule(keys)
        yield dataclasses.replace(refusal, when=_where(role, own, refusal.when))


def _where(role: SequenceRole, own: bool, when: Predicate) -> Predicate:
    return lambda settings: has_pool(settings, role) == own and when(settings)


def fsdp_of(settings: Settings, role: Literal["actor", "ref", "teacher"]) -> Fsdp:
    roles = settings.actor_rollout_ref
    if role == "teacher":
        return settings.teacher.fsdp_config
    return roles.actor.fsdp_config if role == "actor" else roles.ref.fsdp_config


def sequence_ranks(settings: Settings, role: SequenceRole) -> int:
    if role == "critic":
        return settings.critic.model.fsdp_config.sequence_ranks
    if role == "reward_model":
        return settings.reward_model.model.fsdp_config.sequence_ranks
    roles = settings.actor_rollout_ref
    if role == "teacher":
        return teacher_fsdp(settings).sequence_ranks
    return roles.actor.fsdp_config.sequence_ranks if role == "actor" else reference_ranks(roles)


def reference_ranks(roles: ActorRolloutRef) -> int:
    # With LoRA the policy's own base is the reference.
    return (roles.actor if roles.model.lora_rank > 0 else roles.ref).fsdp_config.sequence_ranks


def data_ranks(settings: Settings, role: SequenceRole) -> int:
    return max(devices_of(settings, role) // sequence_ranks(settings, role), 1)


def uneven_shards(devices: int, fsdp: Fsdp) -> bool:
    # Whether the devices do not divide into shard groups. -1 means one group of all devices; another rule reports other sizes
    # below 1.
    return fsdp.fsdp_size > 0 and devices % fsdp.fsdp_size != 0


def longest_sample(settings: Settings) -> int:
    return settings.data.max_prompt_length + settings.data.max_response_length


def has_teacher(settings: Settings) -> bool:
    return bool(settings.distill.coef)


def has_own_teacher(settings: Settings) -> bool:
    # A teacher that is not the policy itself.
    return has_teacher(settings) and settings.teacher.model.path is not None


def teacher_is_elsewhere(settings: Settings) -> bool:
    # What the teacher says comes from a server or a file.
    teacher = settings.teacher
    return has_teacher(settings) and (teacher.endpoint.url is not None or teacher.log_probs_key is not None)


def reference_teaches(settings: Settings) -> bool:
    own = has_teacher(settings) and not has_own_teacher(settings) and not teacher_is_elsewhere(settings)
    return own and settings.teacher.weights == "reference"


def teacher_fsdp(settings: Settings) -> Fsdp:
    # A policy that is its own teacher is sharded as it is.
    roles = settings.actor_rollout_ref
    if settings.teacher.model.path is not None:
        return settings.teacher.fsdp_config
    is_base = roles.model.lora_rank > 0 or not reference_teaches(settings)
    return (roles.actor if is_base else roles.ref).fsdp_config


def uses_kl(settings: Settings) -> bool:
    in_reward, in_loss = settings.algorithm.use_kl_in_reward, settings.actor_rollout_ref.actor.use_kl_loss
    return in_reward or in_loss


def needs_reference(settings: Settings) -> bool:
    return uses_kl(settings) or reference_teaches(settings)


BUILT: Mapping[str, Predicate] = {"ref": needs_reference, "teacher": has_own_teacher}
"""Role of a frozen model -> whether a run builds it."""


@dataclass(frozen=True)
class Range:
    text: str
    """The end of a sentence that begins with "the value"."""
    holds: Callable[[Any], bool]
    """Return whether a value is in the range. It is not called with None."""


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
