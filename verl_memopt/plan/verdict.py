"""Compare a run with a card, for ``verl-memopt fit``: which phases run, what they need, and what is too much for the card."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl_memopt.algorithms.records import SFT
from verl_memopt.algorithms.rollout_correction import update_gives_old_log_probs
from verl_memopt.config.schema import Model, Settings
from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import CARDS, DATASHEETS, check_card, gigabytes
from verl_memopt.memory.critic_rules import has_critic
from verl_memopt.memory.knob import has_teacher, longest_sample, needs_reference, sequence_ranks, uses_kl
from verl_memopt.memory.rollout_memory import AUTO, CACHE
from verl_memopt.memory.sequence_parallel import KEYS as SEQUENCE
from verl_memopt.memory.sequence_parallel import check_heads
from verl_memopt.model.sizes import PUBLISHED, size_of
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.plan.calibrate import rates_of_machine
from verl_memopt.plan.peaks import Peaks, Sizes, bytes_beside_cache, on_one_machine, predict
from verl_memopt.plan.seconds import Rates, rates_of, seconds_of

logger = logging.getLogger(__name__)

NVIDIA_SMI_SECONDS = 20
"""Seconds that nvidia-smi may take to answer."""

_AR = "actor_rollout_ref"


def phases_of(settings: Settings) -> tuple[str, ...]:
    data, supervised = settings.data, settings.algorithm.adv_estimator == SFT
    in_update = supervised or update_gives_old_log_probs(settings)
    critic, forged = has_critic(settings), settings.debug.mode == "forge"
    has = {
        "init": True,
        "gen": not (supervised or forged),
        "testing": not (supervised or forged) and data.val_files is not None,
        "reward": settings.reward_model.enable,
        "old_log_prob": not in_update or (critic and settings.trainer.critic_warmup > 1),
        "ref": uses_kl(settings),
        "teacher": has_teacher(settings),
        "values": critic,
        "update_critic": critic,
        "update_actor": True,
        "update_weights": not supervised,
        "save_checkpoint": settings.trainer.save_freq > 0,
    }
    return tuple(phase for phase, runs in has.items() if runs)


_KNOWN: dict[tuple[str, ...], Sizes] = {}


def sizes_of_models(settings: Settings) -> Sizes:
    """Return the sizes of a run's models. They are cached, because a search needs them for each of its many trials.

    Raises:
        ConfigError: A model is neither in the list of published sizes, nor a folder with config.json, nor on the hub.
    """
    own, critic, rewards = settings.actor_rollout_ref.model, settings.critic.model, settings.reward_model
    reference = settings.actor_rollout_ref.ref.model.path if needs_reference(settings) else None
    teacher = settings.teacher.model.path if has_teacher(settings) else None
    teachers = list(settings.teacher.further_models.values()) if teacher is not None else []
    scorer, further = (rewards.model.path, rewards.further_models.values()) if rewards.enable else (None, ())

    def named(path: str) -> Model:
        return dataclasses.replace(own, path=path, hf_config_path=None, override_config={})

    named_by = (
        own.path,
        own.hf_config_path,
        own.override_config,
        reference,
        teacher,
        teachers,
        scorer,
        list(further),
        has_critic(settings),
        critic,
    )
    key = tuple(map(str, named_by))
    if key not in _KNOWN:
        _KNOWN[key] = Sizes(
            size_of(own, f"{_AR}.model"),
            None if reference in (None, own.path) else size_of(named(str(reference)), f"{_AR}.ref.model"),
            None if teacher in (None, own.path) else size_of(named(str(teacher)), "teacher.model"),
            size_of(critic, "critic.model") if has_critic(settings) and critic.path != own.path else None,
            None if scorer is None else size_of(named(scorer), "reward_model.model"),
            tuple(size_of(named(path), "reward_model.further_models") for path in further),
            tuple(size_of(named(path), "teacher.further_models") for path in teachers),
        )
    return _KNOWN[key]


# The verdict: whether a run fits a card.


@dataclass(frozen=True)
class Card:
    """The memory that a run may use."""

    num_bytes: int
    """Bytes of each device."""
    host_bytes: int | None = None
    """Host bytes for all processes of the run on one machine; None = unknown."""
    device: str = "cuda"

    @classmethod
    def of(cls, gigabytes: float) -> Card:
        # For a known size use the memory that nvidia-smi reports for such a card.
        return cls(round(CARDS.get(f"{gigabytes:g}g", gigabytes * 1024) * MIB))


def card_asked_for(settings: Settings, gigabytes: float | None, host_gigabytes: float | None = None) -> Card:
    if gigabytes is not None:
        check_card(gigabytes)
    card = known_card(settings) if gigabytes is None else Card.of(gigabytes)
    if card is None:
        raise ConfigError("--memory: the size of the card is not known. Give it in GB (--memory 24), or a profile (memory=24g).")
    return dataclasses.replace(card, host_bytes=None if host_gigabytes is None else round(host_gigabytes * GIB))


def known_card(settings: Settings) -> Card | None:
    limit, card = settings.memory.device_limit_gb, settings.memory.card_gb
    device = resolve_device(settings.trainer.device)
    if limit is not None:
        return Card(round(limit * GIB), device=device)
    if card is not None:
        return Card.of(card)
    return _smallest_card() if device == "cuda" else None


def _smallest_card() -> Card | None:
    # Ask nvidia-smi, because PyTorch would create a context on the GPU, which takes memory.
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS).stdout
        mebibytes = [int(line) for line in answer.split() if line.isdecimal()]
        return Card(min(mebibytes) * MIB) if mebibytes else None
    return None


@dataclass(frozen=True)
class FitVerdict:
    peaks: Peaks
    card: Card
    longest: int
    """Tokens of the longest sequence. The KV cache must have room for one such sequence."""
    processes: int
    """Number of processes on one machine, if all roles are on the same machine."""
    host_bytes: int
    """Host bytes of all these processes."""
    needs_cache: bool
    """The run generates with vLLM, which has a KV cache."""
    cache_takes_the_rest: bool = False
    """With kv_cache_memory_gb=auto, the KV cache takes the memory that is left."""

    @cached_property
    def too_much(self) -> dict[str, int]:
        # Phase or "host" -> bytes above the limit. "KV cache" -> tokens that are missing.
        over = {phase: total - self.card.num_bytes for phase, total in self.peaks.totals.items() if total > self.card.num_bytes}
        if self.needs_cache and self.peaks.kv_tokens < self.longest:
            over["KV cache"] = self.longest - self.peaks.kv_tokens
        if self.card.host_bytes is not None and self.host_bytes > self.card.host_bytes:
            over["host"] = self.host_bytes - self.card.host_bytes
        return over

    @property
    def missing(self) -> str:
        # `too_much` as text.
        return ", ".join(
            f"{what} {over:,} tokens" if what == "KV cache" else f"{what} {over / GIB:.2f} GiB"
            for what, over in self.too_much.items()
        )

    @property
    def fits(self) -> bool:
        return not self.too_much

    @property
    def line(self) -> str:
        peaks, of = self.peaks, f"of {self.card.num_bytes / GIB:.1f} GiB"
        needed = f"{peaks.binding} needs at most {peaks.device_bytes / GIB:.1f} {of}"
        if self.fits:
            rest = f", because the KV cache takes what is left ({peaks.kv_tokens} tokens)" if self.cache_takes_the_rest else ""
            return f"fits: {needed}{rest}"
        over = self.too_much
        why = [f"{peaks.binding} may need {peaks.device_bytes / GIB:.1f} {of}"] if over.keys() - {"KV cache", "host"} else []
        if "KV cache" in over:
            why.append(f"the KV cache has room for {peaks.kv_tokens} tokens, but one sequence can have {self.longest}")
        if "host" in over:
            assert self.card.host_bytes is not None
            why.append(f"the host needs {self.host_bytes / GIB:.1f} of {self.card.host_bytes / GIB:.1f} GiB")
        return f"does not fit: {'; '.join(why)}"


def judge(settings: Settings, card: Card) -> FitVerdict:
    """Predict whether a run fits a card.

    Raises:
        ConfigError: A model is unknown, or the ranks that share a sequence do not divide its heads.
    """
    sizes = sizes_of_models(settings)
    check_heads(sizes.policy.heads, sequence_ranks(settings, "actor"), SEQUENCE["actor"])
    if has_critic(settings):
        check_heads((sizes.critic or sizes.policy).heads, sequence_ranks(settings, "critic"), SEQUENCE["critic"])
    peaks = predict(settings, sizes, phases_of(settings), card.device, card.num_bytes)
    rollout = settings.actor_rollout_ref.rollout
    in_cache = rollout.name == "vllm" and "gen" in peaks.phases
    longest = rollout.max_model_len or longest_sample(settings)
    takes_the_rest = in_cache and rollout.kv_cache_memory_gb == AUTO
    return FitVerdict(peaks, card, longest, *on_one_machine(settings, peaks), in_cache, takes_the_rest)


def cards_like(card: Card) -> tuple[Rates, ...]:
    nearest = min(DATASHEETS, key=lambda size: abs(Card.of(gigabytes(size)).num_bytes - card.num_bytes))
    return tuple(rates_of(datasheet) for datasheet in DATASHEETS[nearest])


def machines(card: Card) -> tuple[Rates, ...]:
    # Return the measured rates of this machine, or else the rates of the known cards with the most similar size.
    own = rates_of_machine(card.device)
    if own is not None:
        return (own,)
    return () if card.device == "cpu" else cards_like(card)


def seconds_with(settings: Settings, verdict: FitVerdict, rates: Rates) -> dict[str, float]:
    sizes, phases = sizes_of_models(settings), verdict.peaks.phases
    return seconds_of(settings, sizes.policy, phases, rates, verdict.peaks.kv_tokens, verdict.card.device, sizes.teacher)


def beside_cache(settings: Settings) -> int | None:
    """Return the bytes that a run needs beside its KV cache, if ``kv_cache_memory_gb=auto``; None with any other value.

    Raises:
        ConfigError: The size of the device, or of a model, is not known.
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


def say_verdict(settings: Settings) -> None:
    card = known_card(settings)
    if card is not None and is_here(settings):
        logger.info("fit: %s (verl-memopt fit shows the figures)", judge(settings, card).line)


def is_here(settings: Settings) -> bool:
    # Return whether the sizes of all models are known without a request to the hub.
    roles, rewards = settings.actor_rollout_ref, settings.reward_model
    paths = [str(roles.model.hf_config_path or roles.model.path), rewards.model.path if rewards.enable else None]
    paths += rewards.further_models.values() if rewards.enable else ()
    paths += [roles.ref.model.path if needs_reference(settings) else None]
    paths += [settings.teacher.model.path, *settings.teacher.further_models.values()] if has_teacher(settings) else []
    paths += [settings.critic.model.path if has_critic(settings) else None]
    return all(path is None or path in PUBLISHED or (Path(path).expanduser() / "config.json").is_file() for path in paths)
