"""``--until-it-fits``: start a run again after each out-of-memory error, with other settings, until it fits.

The settings are changed in this order:

1. The error's first advice, if it alone is likely to be enough.
2. The cheapest settings that are enough by the formulas of ``verl-memopt fit``.
3. Everything that saves memory and changes no number.
4. Also what changes numbers. If a run still fails, it cannot fit.

Without the option, the error prints the first of these that applies. A run that has saved a checkpoint continues from it; else it
starts from the beginning.
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
"""Largest number of times that settings are changed."""

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
        # Return the command with new values of some keys, which replace its overrides of these keys.
        kept = [override for override in self.overrides if override.lstrip("+").partition("=")[0] not in keys]
        return replace(self, overrides=(*kept, *(f"{key}={shown(value)}" for key, value in keys.items())))

    def __str__(self) -> str:
        # A line for a shell, with a checksum instead of each secret.
        folder = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        overrides = map(argument_without_secrets, self.overrides)
        return f"{self.program} {shlex.join([*folder, '--config-name', self.config_name, *overrides])}"


def train_until_it_fits(line: CommandLine, train: Callable[[Settings], int]) -> int:
    """Train with other settings after each out-of-memory error, and return the exit code of the run that fits.

    Raises:
        DeviceMemoryError: The run cannot fit, or does not fit after :data:`MOST_CHANGES` changes.
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
            # Make a new error, because the frames of this one hold the tensors of the workers.
            ran_out: DeviceMemoryError | HostMemoryError = DeviceMemoryError(str(error), error.figures, error.ways)
        except HostMemoryError as error:
            ran_out = HostMemoryError(str(error), error.kind)
        else:
            if attempts.changes:
                logger.info("%s: %s", "the run was stopped" if code else "with these settings it runs", attempts.line)
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
    """How many of the tiers of :func:`everything` were tried."""
    searched: bool = False
    """The search for settings that are enough by formula has run."""
    fixed: Keys = field(default_factory=dict)
    """Settings that keep bytes off the host, because the host had no room. They are not changed again."""

    def change(self, error: DeviceMemoryError | HostMemoryError, settings: Settings, goes_on: bool) -> None:
        """Change the command after an error, and log what changes and what the change costs.

        ``goes_on``: the next start would continue from a checkpoint.

        Raises:
            DeviceMemoryError: Nothing is left to change, there were :data:`MOST_CHANGES` changes already, or only settings that
                change numbers are left and the run would continue from a checkpoint.
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
                refused = "cannot fit without settings that change numbers, and a run cannot continue with such settings"
                text = f"{refused}: {why} Start from the beginning: {anew}"
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
        # Yield (settings, their cost in words, whether they change numbers), the cheapest settings first.
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
    """Return a line that names settings which make room together, for a run that ended with an out-of-memory error.

    They are the cheapest settings that are enough by formula, or else all settings that save memory.

    Returns:
        The line, with a newline before it. "" if the error's first advice alone is likely to be enough, or if nothing is left.
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
    """Return the part of ``keys`` that changes the settings and that the rules accept together. Earlier keys win over later ones.

    ``load``: loads the run's settings with new values of some keys, or raises a ConfigError.
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
        logger.debug("no prediction: %s", error)  # the formulas do not know the model
        return
    if changes and after.fits and not any(change.changes_numbers for change in changes):
        keys = {key: value for change in changes for key, value in change.keys.items()}
        costs = dict.fromkeys(change.cost for change in changes)
        yield keys, f"{'; '.join(costs)}. By the formulas of fit this is enough", False


def _off_the_host(kind: str, settings: Settings) -> Iterator[tuple[Keys, str]]:
    # Yield (settings that keep a kind of bytes off the host, their cost in words).
    ways: dict[str, Keys] = {
        "rollout weights": {f"{_ROLLOUT}.sleep_level": 2},
        "activations": {f"{_MODEL}.enable_activation_offload": False},
        "optimizer": {f"{_ACTOR}.fsdp_config.optimizer_offload": False},
        "params": {f"{section}.fsdp_config.param_offload": False for section in (_ACTOR, _REF, _SCORER)},
    }
    keys = ways.get(kind, {key: value for way in ways.values() for key, value in way.items()})
    yield _with_critic(keys, settings), "device memory, because these bytes then stay on the device"


def everything(settings: Settings, limit: float) -> tuple[tuple[Keys, str], ...]:
    """Return all settings that save memory, in three tiers: (settings, their cost in words) for each.

    The first tier changes no losses and gradients. The second also rounds to bfloat16. The third, on a GPU only, also runs the
    optimizer on the host.

    ``limit``: bytes of the device, from which the sizes of some buffers follow; 0 = unknown.
    """
    actor, on_cpu = settings.actor_rollout_ref.actor, resolve_device(settings.trainer.device) == "cpu"
    longest, limit = longest_sample(settings), limit or 8 * GIB
    chunk = min(settings.actor_rollout_ref.model.logprob_chunk_tokens or 512, 128, round(16 * limit / MIB))
    adapts = sequence_ranks(settings, "actor") == 1 and not actor.optim.in_backward
    same: Keys = {f"{_ACTOR}.use_dynamic_bsz": True}
    if adapts:
        same |= {f"{_ACTOR}.adaptive_token_budget": True}
    for key in _caps(settings):
        # An adaptive budget lowers a limit on tokens by itself if the run already uses it. So only other limits are set.
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
    if settings.actor_rollout_ref.rollout.max_logprob_diff in (None, "auto"):  # a limit that the user set may assume fp32
        lossy[f"{_ROLLOUT}.dtype"] = "bfloat16"
    native = {"param_offload": False, "optimizer_offload": False, "offload_policy": True}
    last = {f"{_ACTOR}.fsdp_config.{key}": value for key, value in native.items()}
    tiers = (
        (same, "time: more and smaller micro-batches, a second forward, copies to the host and back. No number changes"),
        (lossy, "accuracy, because weights, moments and products are in bfloat16 with its 8 bits of mantissa; and time"),
        ({} if on_cpu else lossy | last, "much time, because the optimizer runs on the host; and accuracy, because of bfloat16"),
    )
    return tuple((_with_critic(keys, settings), cost) for keys, cost in tiers)


def _tiles_save(settings: Settings, half: bool = False) -> bool:
    """Return whether tiled MLPs need less memory than untiled ones in a micro-batch of one row.

    They can need more, because gradients that are summed over tiles are in fp32.

    ``half``: assume bfloat16 weights and computation, whatever the run has.
    """
    roles, longest = settings.actor_rollout_ref, longest_sample(settings)
    try:
        size = size_of(roles.model, _MODEL)
    except ConfigError:
        return True  # the formulas do not know the model
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
    # Add the critic's keys that correspond to these keys.
    if not has_critic(settings):
        return keys
    existing = leaf_types()
    return {**keys, **{twin(key): value for key, value in keys.items() if twin(key) in existing and twin(key) not in keys}}


def _checkpoints(run_dir: Path) -> set[tuple[str, int]]:
    # The inode shows whether a checkpoint was written again under the same name.
    return {(path.name, path.lstat().st_ino) for path in run_dir.glob("global_step_*")}
