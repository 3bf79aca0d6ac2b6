"""``--until-it-fits``: start a run again and again, each time with what its out-of-memory error advises, until it fits.

The first change is the error's own first advice where that alone is likely to be enough. Otherwise, or if memory runs out again,
the cheapest settings follow that are enough by the formulas of ``verl-memopt fit``, then everything that changes no number, then
also what changes numbers. A run that fails with all of it cannot fit. Without the option the error prints the first of these.

A start that fails before its first checkpoint begins anew. One that has saved a checkpoint goes on from there.
"""

from __future__ import annotations

import gc
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from verl_memopt.config.keys import leaf_types, shown, value_at
from verl_memopt.config.loader import changed, load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import ConfigError, DeviceMemoryError, HostMemoryError, OutOfMemory, UserError
from verl_memopt.memory.critic_rules import has_critic, own_pools, twin
from verl_memopt.memory.host_buffers import GIB
from verl_memopt.memory.knob import longest_sample, needs_reference, sequence_ranks
from verl_memopt.memory.param_offload import REFERENCE_KEY, SCORER_KEY, STREAM
from verl_memopt.memory.streamed_params import may_stream
from verl_memopt.model.sizes import size_of
from verl_memopt.observe.log_setup import silent
from verl_memopt.observe.phase import MIB
from verl_memopt.observe.secrets import argument_without_secrets
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.plan.search import Search
from verl_memopt.plan.verdict import Card
from verl_memopt.run.interrupts import process_interrupts

logger = logging.getLogger(__name__)

MOST_CHANGES = 8
"""How often settings are changed at most."""

_AR = "actor_rollout_ref"
_ACTOR, _MODEL, _ROLLOUT, _REF = (f"{_AR}.{section}" for section in ("actor", "model", "rollout", "ref"))
_SCORER = "reward_model.model"

Keys = dict[str, Any]


@dataclass(frozen=True)
class CommandLine:
    program: str
    config_name: str
    config_dir: str | None
    overrides: tuple[str, ...]

    def settings(self) -> Settings:
        """Return the settings of the command.

        Raises:
            ConfigError: See :func:`load_settings`.
        """
        return load_settings(self.config_name, list(self.overrides), self.config_dir)

    def having(self, keys: Mapping[str, Any]) -> CommandLine:
        # The command with other values of some keys, in place of its own overrides of these keys.
        kept = [override for override in self.overrides if override.lstrip("+").partition("=")[0] not in keys]
        return replace(self, overrides=(*kept, *(f"{key}={shown(value)}" for key, value in keys.items())))

    def __str__(self) -> str:
        # As a shell takes it, with a checksum in place of each secret.
        folder = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        overrides = map(argument_without_secrets, self.overrides)
        return f"{self.program} {shlex.join([*folder, '--config-name', self.config_name, *overrides])}"


def train_until_it_fits(line: CommandLine, train: Callable[[Settings], int]) -> int:
    """Train, with other settings after each out-of-memory error, and return the exit code.

    Raises:
        DeviceMemoryError: It cannot fit, or not after :data:`MOST_CHANGES` changes.
        UserError: ``train`` raised it.
    """
    attempts = Attempts(line)
    resumes: Keys = {}
    while True:
        settings = attempts.line.having(resumes).settings()
        run_dir = Path(str(settings.trainer.default_local_dir)).expanduser()
        before = _checkpoints(run_dir)
        try:
            code = train(settings)
        except DeviceMemoryError as error:
            # A new one: the frames of this one hold the tensors of the workers.
            ran_out: DeviceMemoryError | HostMemoryError = DeviceMemoryError(str(error), error.figures, error.ways)
        except HostMemoryError as error:
            ran_out = HostMemoryError(str(error), error.kind)
        else:
            if attempts.changes:
                logger.info("%s: %s", "stopped, under" if code else "with these settings it runs", attempts.line)
            return code
        gc.collect()
        if (stopped := process_interrupts().between_runs()) is not None:
            return stopped
        if _checkpoints(run_dir) - before:
            resumes = {"trainer.resume_mode": "auto"}
        goes_on = bool(_checkpoints(run_dir)) and (resumes or settings.trainer.resume_mode != "disable")
        attempts.change(ran_out, settings, bool(goes_on))


@dataclass
class Attempts:
    line: CommandLine
    changes: int = 0
    tiers: int = 0
    """How many of the sets of :func:`everything` were tried."""
    searched: bool = False
    """The formulas have been searched for settings that are enough."""
    fixed: Keys = field(default_factory=dict)
    """Settings that were switched off because the host had no room, and stay off."""

    def change(self, error: DeviceMemoryError | HostMemoryError, settings: Settings, goes_on: bool) -> None:
        """Change the command after an error, and log what changes and what that costs.

        ``goes_on``: the next start would continue from a checkpoint.

        Raises:
            DeviceMemoryError: Nothing is left to change, or there were enough changes.
        """
        why = f"{error} The last command was: {self.line}"
        if self.changes == MOST_CHANGES:
            raise _as_device_error(error, f"it still does not fit after {self.changes} changes: {why}")
        for keys, cost, lossy in self._ways(error, settings):
            accepted = _accepted(keys, settings, lambda keys: self.line.having(keys).settings())
            if not accepted:
                continue
            if lossy and goes_on:
                anew = self.line.having(accepted | {"trainer.resume_mode": "disable"})
                refused = "cannot fit without settings that change numbers, and a run does not go on under them"
                text = f"{refused}: {why} Start anew: {anew}"
                raise _as_device_error(error, text)
            self.changes += 1
            self.line = self.line.having(accepted)
            logger.warning("%s", error)
            changed = _overrides(accepted)
            of = f"change {self.changes} of at most {MOST_CHANGES}"
            logger.warning("%s: %s. It costs: %s. Starting again.", of, changed, cost)
            return
        raise _as_device_error(error, f"cannot fit, because nothing is left that makes room: {why}")

    def _ways(self, error: DeviceMemoryError | HostMemoryError, settings: Settings) -> Iterator[tuple[Keys, str, bool]]:
        # Yield what can be set, its cost, and whether it changes numbers, the cheapest first.
        if isinstance(error, HostMemoryError):
            for keys, cost in _off_the_host(error.kind, settings):
                self.fixed |= keys
                yield keys, cost, False
        elif not self.changes:
            yield from ((dict(way.settings), way.cost, False) for way in error.ways[:1] if way.enough)
        if isinstance(error, DeviceMemoryError) and not self.searched:
            self.searched = True
            yield from _by_formula(settings, error.figures.limit_bytes)
        limit = settings.memory.device_limit_gb or 0
        for tier in range(self.tiers, 3):
            self.tiers = tier + 1
            keys, cost = everything(settings, limit * GIB)[tier]
            yield {key: value for key, value in keys.items() if tier > 0 or key not in self.fixed}, cost, tier > 0


def set_together(error: DeviceMemoryError | HostMemoryError, settings: Settings) -> str:
    """Return a sentence that names settings for a run that ended with an out-of-memory error.

    They are the cheapest that are enough by formula. If there are none, they are all that make room.

    Returns:
        The sentence, on a line of its own. "" if the error's first advice alone is likely to be enough, or if nothing is left.
    """
    if isinstance(error, DeviceMemoryError) and error.ways and error.ways[0].enough:
        return ""
    if isinstance(error, HostMemoryError):
        ways = [*_off_the_host(error.kind, settings)]
    else:
        limit = error.figures.limit_bytes
        ways = [(keys, cost) for keys, cost, _ in _by_formula(settings, limit)] + [*everything(settings, limit or 0)]
    for keys, cost in ways:
        accepted = _accepted(keys, settings, partial(changed, settings))
        if accepted:
            return f"\n  Together these make room: {_overrides(accepted)} (they cost {cost})"
    return ""


def _overrides(keys: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={shown(value)}" for key, value in keys.items())


def _accepted(keys: Keys, settings: Settings, load: Callable[[Keys], Settings]) -> Keys:
    """Return those of some keys that change something and are accepted in combination; earlier keys have precedence.

    ``load``: returns the run's settings with other values of some keys, or raises a ConfigError.
    """

    def stands(keys: Keys) -> bool:
        try:
            with silent():
                load(keys)
        except ConfigError:
            return False
        return True

    new = {key: value for key, value in keys.items() if value_at(settings, key) != value}
    if stands(new):
        return new
    kept: Keys = {}
    for key, value in new.items():
        if stands({**kept, key: value}):
            kept[key] = value
    return kept


def _as_device_error(error: DeviceMemoryError | HostMemoryError, text: str) -> DeviceMemoryError:
    return DeviceMemoryError(text, error.figures if isinstance(error, DeviceMemoryError) else OutOfMemory())


def _by_formula(settings: Settings, limit_bytes: int | None) -> Iterator[tuple[Keys, str, bool]]:
    if limit_bytes is None:
        return
    host = settings.memory.host_limit_gb
    sections = ("trainer", *own_pools(settings))
    processes = sum(value_at(settings, f"{section}.n_gpus_per_node") for section in sections)
    host_bytes = None if host is None else round(host * GIB) * processes
    try:
        search = Search(settings, Card(limit_bytes, host_bytes, resolve_device(settings.trainer.device)))
        changes, after = search.changes()
    except UserError as error:
        logger.debug("no prediction: %s", error)  # a model that the formulas do not know
        return
    if changes and after.fits and not any(change.changes_numbers for change in changes):
        keys = {key: value for change in changes for key, value in change.keys.items()}
        costs = dict.fromkeys(change.cost for change in changes)
        yield keys, f"{'; '.join(costs)}. By formula this is enough", False


def _off_the_host(kind: str, settings: Settings) -> Iterator[tuple[Keys, str]]:
    # Yield the settings that keep a kind of bytes off the host, with their cost.
    ways: dict[str, Keys] = {
        "rollout weights": {f"{_ROLLOUT}.sleep_level": 2},
        "activations": {f"{_MODEL}.enable_activation_offload": False},
        "optimizer": {f"{_ACTOR}.fsdp_config.optimizer_offload": False},
        "params": {f"{section}.fsdp_config.param_offload": False for section in (_ACTOR, _REF, _SCORER)},
    }
    keys = ways.get(kind, {key: value for way in ways.values() for key, value in way.items()})
    yield _with_critic(keys, settings), "device memory: these bytes stay there"


def everything(settings: Settings, limit: float) -> tuple[tuple[Keys, str], ...]:
    """Return everything that makes room, in three tiers, each with its cost.

    The first tier leaves losses and gradients as they are, the second rounds to bfloat16, and the third, on a GPU alone, also
    runs the optimizer on the host. ``limit``: bytes of the device, of which some values are a small share; 0 = unknown.
    """
    actor, on_cpu = settings.actor_rollout_ref.actor, resolve_device(settings.trainer.device) == "cpu"
    longest, limit = longest_sample(settings), limit or 8 * GIB
    chunk = min(settings.actor_rollout_ref.model.logprob_chunk_tokens or 512, 128, round(16 * limit / MIB))
    adapts = sequence_ranks(settings, "actor") == 1 and not actor.optim.in_backward
    same: Keys = {f"{_ACTOR}.use_dynamic_bsz": True}
    if adapts:
        same |= {f"{_ACTOR}.adaptive_token_budget": True}
    for key in _caps(settings):
        # An adaptive budget lowers a cap that is in force, so only other caps are set.
        if not adapts or not actor.use_dynamic_bsz:
            same[key] = longest
    same |= {
        f"{_MODEL}.enable_gradient_checkpointing": True,
        f"{_MODEL}.enable_activation_offload": True,
        f"{_MODEL}.activation_offload_device_gb": 0,
        f"{_MODEL}.tiled_mlp.enabled": _tiles_save(settings),
        f"{_MODEL}.logprob_chunk_tokens": max(chunk, 1),
        f"{_MODEL}.logprob_vocab_tile": 4096,
        f"{_ROLLOUT}.free_cache_engine": True if settings.actor_rollout_ref.rollout.name == "hf" or not on_cpu else None,
        f"{_ROLLOUT}.max_num_seqs": max(min(settings.actor_rollout_ref.rollout.max_num_seqs, 64) // 16, 1),
        f"{_ACTOR}.fsdp_config.param_offload": True,
        f"{_ACTOR}.fsdp_config.optimizer_offload": True,
        f"{_ACTOR}.optim.bucket_megabytes": round(min(64, max(limit / MIB / 256, 0.01)), 3),
    }
    frozen = [_REF] if needs_reference(settings) else []
    frozen += [_SCORER] if settings.reward_model.enable else []
    rests = {key: STREAM if may_stream(key)(settings) else True for key in (REFERENCE_KEY, SCORER_KEY)}
    same |= {key: rests[key] for key in (f"{section}.fsdp_config.param_offload" for section in frozen)}
    dtypes = {"model_dtype": "bfloat16", "dtype": "bfloat16"}
    lossy: Keys = {**same, f"{_ROLLOUT}.max_num_seqs": 1, f"{_MODEL}.tiled_mlp.enabled": _tiles_save(settings, half=True)}
    lossy |= {f"{_ACTOR}.fsdp_config.{key}": value for key, value in dtypes.items()}
    lossy[f"{_ACTOR}.optim.stochastic_rounding"] = True
    lossy |= {f"{section}.fsdp_config.{key}": "bfloat16" for section in frozen for key in ("model_dtype", "dtype")}
    if settings.actor_rollout_ref.rollout.max_logprob_diff in (None, "auto"):  # a bound that the user set may assume fp32
        lossy[f"{_ROLLOUT}.dtype"] = "bfloat16"
    native = {"param_offload": False, "optimizer_offload": False, "offload_policy": True}
    last = {f"{_ACTOR}.fsdp_config.{key}": value for key, value in native.items()}
    tiers = (
        (same, "time: more and smaller micro-batches, a second forward, copies to the host and back. No number changes"),
        (lossy, "accuracy: weights, moments and products have 8 bits of mantissa (bfloat16); and time"),
        ({} if on_cpu else lossy | last, "much time: the optimizer steps on the host; and accuracy, as before"),
    )
    return tuple((_with_critic(keys, settings), cost) for keys, cost in tiers)


def _tiles_save(settings: Settings, half: bool = False) -> bool:
    """Whether tiled MLPs hold less than whole ones in a micro-batch of one row: gradients summed over tiles are in fp32.

    ``half``: for bfloat16 weights and compute, in place of the run's own.
    """
    roles, longest = settings.actor_rollout_ref, longest_sample(settings)
    try:
        size = size_of(roles.model, _MODEL)
    except ConfigError:
        return True  # a model that the formulas do not know
    work = Pass(longest, settings.data.max_response_length, rows=2, all_tokens=longest)
    fsdp = roles.actor.fsdp_config
    actor = replace(roles.actor, fsdp_config=replace(fsdp, model_dtype="bfloat16", dtype="bfloat16") if half else fsdp)

    def held(tiles: bool) -> int:
        tiled = replace(roles.model.tiled_mlp, enabled=tiles)
        model = replace(roles.model, tiled_mlp=tiled, enable_gradient_checkpointing=True)
        with_tiles = replace(roles, model=model, actor=actor)
        return Shapes.of(size, with_tiles, work, resolve_device(settings.trainer.device)).activation_bytes

    return held(True) < held(False)


def _caps(settings: Settings) -> list[str]:
    roles, critic = settings.actor_rollout_ref, settings.critic
    own = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": True,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": roles.rollout.log_prob_max_token_len_per_gpu is not None,
        f"{_REF}.log_prob_max_token_len_per_gpu": needs_reference(settings),
        "critic.ppo_max_token_len_per_gpu": has_critic(settings),
        "critic.forward_max_token_len_per_gpu": has_critic(settings) and critic.forward_max_token_len_per_gpu is not None,
    }
    return [key for key, is_own in own.items() if is_own]


def _with_critic(keys: Keys, settings: Settings) -> Keys:
    # Keys of the critic that mean the same are set too.
    if not has_critic(settings):
        return keys
    existing = leaf_types()
    return {**keys, **{twin(key): value for key, value in keys.items() if twin(key) in existing and twin(key) not in keys}}


def _checkpoints(run_dir: Path) -> set[tuple[str, int]]:
    # The inode tells a checkpoint that was written again under the same name from the old one.
    return {(path.name, path.lstat().st_ino) for path in run_dir.glob("global_step_*")}
