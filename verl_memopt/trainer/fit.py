"""``verl-memopt fit``: what fits on a card, and what would make a run fit. Needs neither weights nor a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.keys import leaf_types, shown, value_at
from verl_memopt.config.loader import changed
from verl_memopt.config.schema import Model, Settings
from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.memory import grad_offload, quantized_base, split_masters
from verl_memopt.memory.critic_rules import has_critic, own_pools, twin
from verl_memopt.memory.fit import CARDS, CERTAIN, Peaks, Sizes, bytes_beside_cache, on_one_machine, predict
from verl_memopt.memory.formulas import PUBLISHED
from verl_memopt.memory.knob import devices_of, knob_named, knobs, longest_sample, needs_reference, num_devices
from verl_memopt.memory.param_offload import ACTOR_KEY
from verl_memopt.memory.rollout_memory import AUTO, CACHE
from verl_memopt.model.weights import size_of
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.trainer.micro_batching import update_gives_old_log_probs

logger = logging.getLogger(__name__)

NVIDIA_SMI_SECONDS = 20
"""Longest time for nvidia-smi to answer."""

_AR = "actor_rollout_ref"
RESPONSE, SHARE, BUDGET = (
    "data.max_response_length",
    f"{_AR}.rollout.gpu_memory_utilization",
    f"{_AR}.actor.ppo_max_token_len_per_gpu",
)
BUDGETS = (
    BUDGET, f"{_AR}.rollout.log_prob_max_token_len_per_gpu", f"{_AR}.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu",
)  # fmt: skip
"""Tokens of a micro-batch in each pass."""
LONGEST = 2**20
"""Tokens of the longest response that is tried."""
SHARES = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)
"""Shares of the card that are tried for the engine, once nothing but the engine is too large or too small."""
OF_SHARE = {"init", "gen", "testing", "KV cache"}
"""Where the engine's share counts."""


def phases_of(settings: Settings) -> tuple[str, ...]:
    """Return the phases of a run, in the order of a step."""
    actor, data, supervised = settings.actor_rollout_ref.actor, settings.data, settings.algorithm.adv_estimator == SFT
    in_update = supervised or update_gives_old_log_probs(actor, data.train_batch_size, settings.algorithm)
    critic, forged = has_critic(settings), settings.debug.mode == "forge"
    has = {
        "init": True,
        "gen": not (supervised or forged),
        "testing": not (supervised or forged) and data.val_files is not None,
        "reward": settings.reward_model.enable,
        "old_log_prob": not in_update or (critic and settings.trainer.critic_warmup > 0),
        "ref": needs_reference(settings),
        "values": critic,
        "update_critic": critic,
        "update_actor": True,
        "update_weights": not supervised,
        "save_checkpoint": settings.trainer.save_freq > 0,
    }
    return tuple(phase for phase, runs in has.items() if runs)


_KNOWN: dict[tuple[str, ...], Sizes] = {}


def sizes_of_models(settings: Settings) -> Sizes:
    """Return the sizes of the models of a run, which a search asks for again and again.

    Raises:
        ConfigError: A model is neither published, a folder with config.json, nor on the hub.
    """
    own, critic, rewards = settings.actor_rollout_ref.model, settings.critic.model, settings.reward_model
    reference = settings.actor_rollout_ref.ref.model.path if needs_reference(settings) else None
    scorer = rewards.model.path if rewards.enable else None

    def named(path: str) -> Model:
        return dataclasses.replace(own, path=path, hf_config_path=None, override_config={})

    named_by = (own.path, own.hf_config_path, own.override_config, reference, scorer, has_critic(settings), critic)
    key = tuple(map(str, named_by))
    if key not in _KNOWN:
        _KNOWN[key] = Sizes(
            size_of(own, f"{_AR}.model"),
            None if reference in (None, own.path) else size_of(named(str(reference)), f"{_AR}.ref.model"),
            size_of(critic, "critic.model") if has_critic(settings) and critic.path != own.path else None,
            None if scorer is None else size_of(named(scorer), "reward_model.model"),
        )
    return _KNOWN[key]


# The verdict on some settings and a card.


@dataclass(frozen=True)
class Card:
    """What a run may take: bytes of each device, and of the host of all its processes on one machine (None = unknown)."""

    num_bytes: int
    host_bytes: int | None = None
    device: str = "cuda"

    @classmethod
    def of(cls, gigabytes: float) -> Card:
        """Return the card of a size: of the usual ones what nvidia-smi reports, else so many GiB."""
        return cls(round(CARDS.get(f"{gigabytes:g}g", gigabytes * 1024) * MIB))


def card_asked_for(settings: Settings, gigabytes: float | None, host_gigabytes: float | None = None) -> Card:
    """Return the card of a command line, else the one of the settings, else this machine's."""
    card = known_card(settings) if gigabytes is None else Card.of(gigabytes)
    if card is None:
        raise ConfigError("--memory: the size of the card is not known. Give it in GB (--memory 24), or a profile (memory=24g).")
    return dataclasses.replace(card, host_bytes=None if host_gigabytes is None else round(host_gigabytes * GIB))


def known_card(settings: Settings) -> Card | None:
    """Return what the settings say of the device's size, else the present GPU; None where nothing says it."""
    limit, card = settings.memory.device_limit_gb, settings.memory.card_gb
    device = resolve_device(settings.trainer.device)
    if limit is not None:
        return Card(round(limit * GIB), device=device)
    if card is not None:
        return Card.of(card)
    return _smallest_card() if device == "cuda" else None


def _smallest_card() -> Card | None:
    """Return the smallest GPU of this machine, by nvidia-smi: asking PyTorch would take memory of the GPU."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS).stdout
        mebibytes = [int(line) for line in answer.split() if line.isdecimal()]
        return Card(min(mebibytes) * MIB) if mebibytes else None
    return None


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits a card, and by how much each limit is missed, in bytes."""

    peaks: Peaks
    card: Card
    longest: int
    """Tokens of the longest sequence, of which the KV cache must hold one."""
    processes: int
    """On one machine, if all roles share it."""
    host_bytes: int
    """Of all these processes."""
    needs_cache: bool
    cache_takes_the_rest: bool = False

    @property
    def too_much(self) -> dict[str, int]:
        """What is too large -> bytes beyond its limit; a KV cache that is too small by its missing tokens."""
        over = {phase: total - self.card.num_bytes for phase, total in self.peaks.totals.items() if total > self.card.num_bytes}
        if self.needs_cache and self.peaks.kv_tokens < self.longest:
            over["KV cache"] = self.longest - self.peaks.kv_tokens
        if self.card.host_bytes is not None and self.host_bytes > self.card.host_bytes:
            over["host"] = self.host_bytes - self.card.host_bytes
        return over

    @property
    def fits(self) -> bool:
        """Whether nothing is too large."""
        return not self.too_much

    @property
    def line(self) -> str:
        """The verdict in one sentence."""
        peaks, of = self.peaks, f"of {self.card.num_bytes / GIB:.1f} GiB"
        most = f"{peaks.binding} needs at most {peaks.device_bytes / GIB:.1f} {of}"
        if self.fits:
            rest = f", as the KV cache takes what is left: {peaks.kv_tokens} tokens" if self.cache_takes_the_rest else ""
            return f"fits: {most}{rest}"
        over = self.too_much
        why = [f"{peaks.binding} may need {peaks.device_bytes / GIB:.1f} {of}"] if over.keys() - {"KV cache", "host"} else []
        if "KV cache" in over:
            why.append(f"the KV cache has room for {peaks.kv_tokens} tokens, and one sequence has {self.longest}")
        if "host" in over:
            assert self.card.host_bytes is not None
            why.append(f"{self.host_bytes / GIB:.1f} GiB rest on a host of {self.card.host_bytes / GIB:.1f}")
        return f"does not fit: {'; '.join(why)}"


def judge(settings: Settings, card: Card) -> Verdict:
    """Return the verdict on a run. As :func:`sizes_of_models` it raises where a model is unknown."""
    peaks = predict(settings, sizes_of_models(settings), phases_of(settings), card.device, card.num_bytes)
    rollout = settings.actor_rollout_ref.rollout
    in_cache = rollout.name == "vllm" and "gen" in peaks.phases
    longest = rollout.max_model_len or longest_sample(settings)
    takes_the_rest = in_cache and rollout.kv_cache_memory_gb == AUTO
    return Verdict(peaks, card, longest, *on_one_machine(settings, peaks), in_cache, takes_the_rest)


def beside_cache(settings: Settings) -> int | None:
    """Return what a run holds beside the KV cache where that takes the rest of the device; None where it has a size of its own.

    Raises:
        ConfigError: The size of the device is not known, or the sizes of a model are not.
    """
    rollout, device = settings.actor_rollout_ref.rollout, resolve_device(settings.trainer.device)
    phases = phases_of(settings)
    if rollout.kv_cache_memory_gb != AUTO or rollout.name != "vllm" or "gen" not in phases:
        return None
    if device == "cpu" and settings.memory.device_limit_gb is None:
        raise ConfigError(
            f"{CACHE}=auto, memory.device_limit_gb=null: a CPU has no device memory of which the cache could take the rest. Set "
            f"memory.device_limit_gb, or give {CACHE} a size in GiB."
        )
    return bytes_beside_cache(settings, sizes_of_models(settings), phases, device)


# The search: what would make a run fit, and how long a response may be.


@dataclass(frozen=True)
class Change:
    """One step of the search: the keys it sets, and what it saves at the highest peak."""

    name: str
    keys: Mapping[str, Any]
    changes_numbers: bool = False
    saved_bytes: int = 0


@dataclass(frozen=True)
class Findings:
    """What ``verl-memopt fit`` found out about a run."""

    verdict: Verdict
    changes: tuple[Change, ...] = ()
    """What makes it fit, if it does not and can."""
    after: Verdict | None = None
    """The verdict with the changes, or with all that help where they are not enough."""
    response: int = 0
    """Tokens of the longest response that fits, with the changes; 0 = none."""
    most: int = 0
    """Tokens of the longest response that was tried."""
    budget: int = 0
    """Tokens of the largest micro-batch of the update that fits, with the changes."""

    @property
    def fits(self) -> bool:
        """Whether the run fits, with the changes at least."""
        return self.verdict.fits or (self.after is not None and self.after.fits)


class Search:
    """Tries changes of some settings on a card."""

    def __init__(self, settings: Settings, card: Card) -> None:
        """Begin with the settings as they are."""
        self._card = card
        self.settings = settings

    def judged(self, keys: Mapping[str, Any]) -> Verdict | None:
        """Return the verdict with other values of some keys; None where they are refused together."""
        with suppress(ConfigError):
            with silent():
                settings = changed(self.settings, keys)
            return judge(settings, self._card)
        return None

    def changes(self) -> tuple[tuple[Change, ...], Verdict | None]:
        """Return the fewest changes found that make the run fit, the cheapest first, and the verdict with them.

        Changes are tried in the order of the ladder, and one that helps is kept. In the end those are dropped that the run does
        not need to fit. If all changes together are not enough, those that help are returned with their verdict.
        """
        start = self.judged({})
        assert start is not None
        taken: list[Change] = []
        keys: dict[str, Any] = {}
        present = start
        for change in (Change("none", {}), *self._candidates(), *self._candidates(lossy=True)):
            shared = self._shared(present, keys)
            if shared is not None:
                taken.append(shared[0])
                present = shared[1]
            if present.fits:
                break
            if not change.keys or all(keys.get(key, value_at(self.settings, key)) == value for key, value in change.keys.items()):
                continue
            tried = self.judged({**keys, **change.keys})
            if tried is not None and _missing(tried) < _missing(present):
                saved = present.peaks.device_bytes - tried.peaks.device_bytes
                taken = [each for each in taken if not each.keys.keys() <= change.keys.keys()]
                taken.append(Change(change.name, change.keys, change.changes_numbers, max(saved, 0)))
                keys |= change.keys
                present = tried
        if present.fits:
            for change in sorted(taken, key=lambda each: not each.changes_numbers):
                without = [each for each in taken if each is not change]
                tried = self.judged({key: value for each in without for key, value in each.keys.items()})
                if tried is not None and tried.fits:
                    taken, present = without, tried
        return tuple(taken), present

    def _shared(self, present: Verdict, keys: Mapping[str, Any]) -> tuple[Change, Verdict] | None:
        """Return a share of the card for the engine with which the run fits; None where it fits already, or with no share."""
        if present.fits or not present.too_much.keys() <= OF_SHARE:
            return None
        tried = ((Change("rollout_memory", {SHARE: share}), self.judged({**keys, SHARE: share})) for share in SHARES)
        return next(((change, verdict) for change, verdict in tried if verdict is not None and verdict.fits), None)

    def _candidates(self, lossy: bool = False) -> Iterator[Change]:
        """Yield changes in the order of what they cost: those that change no number, or those that do."""
        settings = self.settings
        if not lossy:
            pair = 2 * longest_sample(settings)
            if settings.actor_rollout_ref.actor.use_dynamic_bsz:
                read = [key for key in BUDGETS if has_critic(settings) or not key.startswith("critic.")]
                read = [key for key in read if needs_reference(settings) or ".ref." not in key]
                yield Change("token_budget", {key: pair for key in read if (value_at(settings, key) or 0) > pair})
        first_lossy = knob_named("precision").row
        assert first_lossy is not None
        for knob in sorted((knob for knob in knobs() if knob.row), key=lambda knob: knob.row.place if knob.row else 0):
            assert knob.row is not None
            changes_numbers = knob.row.place >= first_lossy.place and knob.name != "native_offload"
            if changes_numbers == lossy and knob.name != "token_budget":
                keys = dict(_parsed(knob.row.on))
                if has_critic(settings):
                    keys = {twin(key): value for key, value in keys.items() if twin(key) in leaf_types()} | keys
                yield Change(knob.name, keys, lossy)
        if lossy:
            yield Change("lora", {f"{_AR}.model.lora_rank": 16, f"{_AR}.actor.fsdp_config.model_dtype": "bfloat16"}, True)
            unset = (split_masters.KEY, grad_offload.KEY, *([ACTOR_KEY] if num_devices(settings) > 1 else []))
            off = {key: False for key in unset if value_at(settings, key)}  # of all weights, or of a base that is whole
            rank = settings.actor_rollout_ref.model.lora_rank or 16
            yield Change("quantized_base", {f"{_AR}.model.lora_rank": rank, quantized_base.KEY: "nf4", **off}, True)

    def longest_response(self, keys: Mapping[str, Any]) -> int:
        """Return the tokens of the longest response that fits with some changes and the models' positions; 0 where none does."""
        prompt, rollout = self.settings.data.max_prompt_length, self.settings.actor_rollout_ref.rollout
        follows = rollout.max_model_len == longest_sample(self.settings)

        def fits(response: int) -> bool:
            longer: dict[str, Any] = {RESPONSE: response, f"{_AR}.rollout.response_length": response}
            if follows:
                longer[f"{_AR}.rollout.max_model_len"] = prompt + response
            now = {key: keys.get(key, value_at(self.settings, key)) for key in BUDGETS}
            least = {key: max(int(value), prompt + response) for key, value in now.items() if value is not None}
            verdict = self.judged({**keys, **longer, **least})
            return verdict is not None and verdict.fits

        return _largest(fits, self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest response that is tried: the positions of the trained models are no fewer."""
        sizes = sizes_of_models(self.settings)
        positions = [each.positions for each in (sizes.policy, sizes.critic) if each is not None and each.positions]
        return max(min([LONGEST, *(each - self.settings.data.max_prompt_length for each in positions)]), 1)

    def largest_budget(self, keys: Mapping[str, Any]) -> int:
        """Return the tokens of the largest micro-batch of the update that fits with some changes; 0 where none does."""

        def fits(tokens: int) -> bool:
            verdict = self.judged({**keys, BUDGET: tokens})
            return verdict is not None and verdict.fits

        rows = self.settings.actor_rollout_ref.actor.ppo_mini_batch_size * self.settings.actor_rollout_ref.rollout.n
        return _largest(fits, rows * longest_sample(self.settings), longest_sample(self.settings))


def _missing(verdict: Verdict) -> float:
    """Return how far a verdict is from one that fits."""
    over = dict(verdict.too_much)
    cache_tokens = over.pop("KV cache", 0)
    return sum(over.values()) + cache_tokens * 2**17


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for override in overrides:
        key, text = override.split("=", 1)
        yield key, yaml.safe_load(text)


def _largest(fits: Callable[[int], bool], most: int, least: int = 1) -> int:
    """Return the largest number that fits, to one part in 64, by bisection; 0 where ``least`` does not."""
    if not fits(least):
        return 0
    if fits(most):
        return most
    low, high = least, most
    while high - low > max(low // 64, 1):
        middle = (low + high) // 2 if high < 4 * low else min(2 * low, high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@contextmanager
def silent() -> Iterator[None]:
    """Log nothing below an error: settings that are only tried need no warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def find_out(settings: Settings, card: Card) -> Findings:
    """Return the verdict on a run, what would make it fit, and what is the most that fits."""
    search = Search(settings, card)
    verdict = judge(settings, card)
    changes, after = ((), None) if verdict.fits else search.changes()
    keys = {key: value for change in changes for key, value in change.keys.items()}
    if not verdict.fits and (after is None or not after.fits):
        return Findings(verdict, changes, after)
    return Findings(verdict, changes, after, search.longest_response(keys), search.most_tokens, search.largest_budget(keys))


def say_verdict(settings: Settings) -> None:
    """Log the verdict in one line, where the size of the device is known and the sizes of the models are too."""
    card = known_card(settings)
    if card is not None and _is_here(settings):
        logger.info("fit: %s (verl-memopt fit has the figures)", judge(settings, card).line)


def refuse_what_cannot_fit(settings: Settings) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone are too large for ``memory.card_gb``.

    A model of which nothing is on this machine yet is not looked at.

    Raises:
        ConfigError: It cannot fit. The message says what would make it fit.
    """
    gigabytes = settings.memory.card_gb
    if gigabytes is None or not _is_here(settings):
        return
    card = Card.of(gigabytes)
    peaks = judge(settings, card).peaks
    phase = max(peaks.least, key=peaks.least.__getitem__)
    if peaks.least[phase] <= card.num_bytes:
        return
    changes, after = Search(settings, card).changes()
    way = " ".join(f"{key}={shown(value)}" for change in changes for key, value in change.keys.items())
    out = "No setting makes it fit: take a smaller model, or more or larger cards."
    if after is not None and after.fits:
        out = f"It fits with {way}."
    parts = ", ".join(f"{kind} {each / GIB:.1f}" for kind in CERTAIN if (each := peaks.phases[phase].get(kind, 0)))
    raise ConfigError(
        f"memory.card_gb={gigabytes:g}, {_AR}.model.path={settings.actor_rollout_ref.model.path}: {phase} needs at least "
        f"{peaks.least[phase] / GIB:.1f} GiB of {card.num_bytes / GIB:.1f} ({parts}). {out} Set memory.card_gb=null to start it "
        "all the same."
    )


def _is_here(settings: Settings) -> bool:
    """Return whether the sizes of all models can be known without the hub."""
    roles, rewards = settings.actor_rollout_ref, settings.reward_model
    paths = [str(roles.model.hf_config_path or roles.model.path), rewards.model.path if rewards.enable else None]
    paths += [roles.ref.model.path if needs_reference(settings) else None]
    paths += [settings.critic.model.path if has_critic(settings) else None]
    return all(path is None or path in PUBLISHED or (Path(path).expanduser() / "config.json").is_file() for path in paths)


# What ``verl-memopt fit`` prints: the bytes by phase and kind, the verdict, what would make it fit, and the most that fits.


def as_json(settings: Settings, found: Findings) -> dict[str, Any]:
    """Return what was found as plain values. Sizes are bytes, lengths are tokens."""
    last = found.after if found.after is not None and found.after.fits else found.verdict
    return {
        "model": settings.actor_rollout_ref.model.path,
        "fits": found.verdict.fits,
        "verdict": found.verdict.line,
        "card_bytes": found.verdict.card.num_bytes,
        "binding_phase": found.verdict.peaks.binding,
        "phases": {phase: dict(kinds) for phase, kinds in found.verdict.peaks.phases.items()},
        "host_bytes": dict(found.verdict.peaks.host),
        "changes": [
            {"knob": each.name, "keys": dict(each.keys), "changes_numbers": each.changes_numbers, "saved_bytes": each.saved_bytes}
            for each in found.changes
        ],
        "fits_with_changes": found.fits,
        "with_changes": None if found.after is None else {"phases": found.after.peaks.totals, "verdict": found.after.line},
        "longest_response": found.response,
        "largest_micro_batch_tokens": found.budget,
        "kv_cache_tokens": last.peaks.kv_tokens,
        "sequences_at_once": _at_once(settings, last),
    }


def _at_once(settings: Settings, verdict: Verdict) -> int:
    return min(verdict.peaks.kv_tokens // max(verdict.longest, 1), settings.actor_rollout_ref.rollout.max_num_seqs)


GROUPS = {
    "weights": ("params", "rollout weights"),
    "gradients": ("grads", "whole gradients"),
    "optimizer": ("optimizer", "optimizer scratch"),
    "activations": ("activations",),
    "logits": ("logits",),
    "KV cache": ("kv",),
    "gathered": ("gathered parameters", "collective buffers", "sync bucket"),
    "engine": ("engine",),
    "context": ("context", "allocator", "other"),
}
"""Column of the table -> kinds of bytes in it."""


def print_findings(settings: Settings, found: Findings, console: Console) -> None:
    """Print the bytes by phase and kind, the verdict, what would make it fit, and the most that fits."""
    verdict, roles, data = found.verdict, settings.actor_rollout_ref, settings.data
    devices = num_devices(settings)
    of = f"{devices} x " if devices > 1 else ""
    apart = "".join(f"; {role} on {devices_of(settings, role)} of its own" for role in own_pools(settings))
    console.print(f"{roles.model.path}, {settings.algorithm.adv_estimator}, {of}{verdict.card.num_bytes / GIB:.1f} GiB{apart}")
    _print_peaks(verdict, console)
    console.print(f"\nVerdict: {verdict.line}")
    last = verdict
    if not verdict.fits:
        assert found.after is not None
        _print_changes(found, console)
        last = found.after
    if not last.fits:
        return
    with_changes = "" if verdict.fits else " (with these settings)"
    console.print(f"\nThe most that fits{with_changes}:")
    reach = f"data.max_response_length, now {data.max_response_length}"
    if found.response >= found.most:
        reach = "the longest that was tried" if found.most == LONGEST else "the model has no positions for more"
    console.print(f"  longest response       {found.response:,} tokens ({reach})")
    if found.budget:
        console.print(f"  largest micro-batch    {found.budget:,} tokens ({BUDGET.removeprefix('actor_rollout_ref.')})")
    if "gen" in last.peaks.phases and roles.rollout.name == "vllm":
        console.print(
            f"  KV cache               {last.peaks.kv_tokens:,} tokens, which are {_at_once(settings, last):,} sequences at once"
        )
    rows = data.train_batch_size * roles.rollout.n
    console.print(f"  sequences a step       any number (now {rows:,}): they are computed one micro-batch after another")


def _print_peaks(verdict: Verdict, console: Console) -> None:
    peaks = verdict.peaks
    used = [name for name, kinds in GROUPS.items() if any(kind in phase for phase in peaks.phases.values() for kind in kinds)]
    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
    table.add_column("GiB at most", no_wrap=True)
    for name in (*used, "all"):
        table.add_column(name, justify="right")
    for phase, kinds in peaks.phases.items():
        groups = [sum(kinds.get(kind, 0) for kind in GROUPS[name]) for name in used]
        total = sum(kinds.values())
        marked = " *" if phase == peaks.binding else ""
        over = f"[red]{total / GIB:.2f}[/red]" if total > verdict.card.num_bytes else f"{total / GIB:.2f}"
        table.add_row(phase + marked, *(f"{each / GIB:.2f}" if each else "" for each in groups), over)
    console.print(table)
    host = ", ".join(f"{kind} {each / GIB:.1f}" for kind, each in peaks.host.items())
    text = f"{peaks.host_bytes / GIB:.1f} GiB a process ({host})" if host else "nothing rests there"
    limit = "" if verdict.card.host_bytes is None else f", {verdict.processes} x of {verdict.card.host_bytes / GIB:.1f} GiB"
    console.print(f"* the binding phase. Host: {text}{limit}.")


def _print_changes(found: Findings, console: Console) -> None:
    assert found.after is not None
    if not found.after.fits:
        why = found.after.line.removeprefix("does not fit: ")
        console.print(f"It cannot fit, because even with all that helps {why}.")
        console.print("Use a smaller model, more or larger cards (--gpus, --memory), or shorter lengths.")
        if not found.changes:
            return
    console.print("It fits with:" if found.after.fits else "What helps, and is not enough:")
    for change in found.changes:
        lossy = "; changes numbers" if change.changes_numbers else ""
        for key, value in change.keys.items():
            console.print(f"  {key}={shown(value)}")
        console.print(f"      {change.name}: {change.saved_bytes / GIB:.2f} GiB less at the highest peak{lossy}")


def command(settings: Settings, card: Card, as_json_text: bool) -> int:
    """Print what fits, and return the exit code: 0 where the run fits, else 1."""
    found = find_out(settings, card)
    if as_json_text:
        sys.stdout.write(json.dumps(as_json(settings, found), indent=2) + "\n")
    else:
        print_findings(settings, found, Console(highlight=False, width=max(Console().width, 110)))
    return 0 if found.verdict.fits else 1
