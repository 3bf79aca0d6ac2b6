"""The environment of a run: device, folders and tokenizer on this machine, and the checks that can only be made on it."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_memopt.config.schema import ActorRolloutRef, Critic, RayKwargs, ResourcePool, Rollout, Settings, Trainer
from verl_memopt.distributed.device import device_count, resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.model.families import why_not_replayed
from verl_memopt.model.folder import (
    TOKENIZER_FILES,
    check_vocabulary,
    end_tokens,
    existing_tokenizer,
    load_tokenizer,
    read_tokenizer,
    resolve_folder,
)
from verl_memopt.model.packing_check import TEACHER_KEY, adapter_shape, check_architecture, frozen_causal_model
from verl_memopt.model.weights import WeightFolder, load_model_config, refuse_stacked
from verl_memopt.run.builds import vllm_build

CRITIC_PATH = "critic.model.path"
REFERENCE_PATH = "actor_rollout_ref.ref.model.path"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """What a run finds on this machine.

    Attributes:
        device: cpu or cuda.
        num_devices: Number of devices of all roles, over all nodes.
        folder: Folder of the policy's model.
        tokenizer_folder: Folder of the tokenizer: the model's folder, unless the settings name another.
        reference_folder: Folder of the reference's model; None if the run needs no such model.
        tokenizer: A transformers tokenizer.
        embedding_rows: Rows of the policy's embedding; token ids are below this number.
        eos_token_ids: Ids that end a response.
        free_engine: The engine releases its memory between rollouts.
        run_dir: The run folder.
        weights: Name -> shape of each weight of the policy, without adapters.
        critic_folder: Folder of the critic's model; None in a run without a critic.
        critic_weights: Name -> shape of each weight of the critic, without adapters.
        teacher_folders: Folders of the teachers' models, if they are models of their own: the first one, then the further ones.
        teacher_tokenizer: The tokenizer of a teacher that reads text; None = it reads the policy's tokens.
        has_more: The folder of the policy's model holds more than the text model, or names it otherwise; see ``Checked``.
        features: Entries of the policy's config, ``field=value``, that make its forward unusual.
    """

    device: str
    num_devices: int
    folder: Path
    tokenizer_folder: Path
    reference_folder: Path | None
    tokenizer: Any
    embedding_rows: int
    eos_token_ids: tuple[int, ...]
    free_engine: bool
    run_dir: Path
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    critic_folder: Path | None = None
    critic_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    teacher_folders: tuple[Path, ...] = ()
    teacher_tokenizer: Any = None
    has_more: bool = False
    features: tuple[str, ...] = ()

    @property
    def known_ids(self) -> int | None:
        """Number of ids that have a token. Larger ids are rows of the embedding without a token; None = there are no such rows.

        Many models have a few hundred such rows, which make the size of the embedding a round number.
        """
        num_ids = max((*self.tokenizer.get_vocab().values(), *self.eos_token_ids), default=-1) + 1
        return num_ids if num_ids < self.embedding_rows else None


def resolve_environment(
    settings: Settings,
    reference_path: str | None,
    critic: Critic | None,
    pools: Mapping[str, ResourcePool],
    with_teacher: bool = False,
) -> Environment:
    """Find out what a run can use on this machine, before any worker starts.

    Args:
        settings: Settings of the run.
        reference_path: None if the run needs no model for the reference.
        critic: None in a run without a critic.
        pools: Section of the settings -> the devices that only its role uses.
        with_teacher: The run builds a teacher.

    Raises:
        ConfigError: The machine cannot do what the settings ask for.
    """
    trainer, data, roles = settings.trainer, settings.data, settings.actor_rollout_ref
    model, rollout = roles.model, roles.rollout
    device = resolve_device(trainer.device)
    asked: dict[str, Trainer | ResourcePool] = {"trainer": trainer, **pools}
    _check_devices(asked, settings.ray_kwargs, device)
    _check_engine(rollout.name, trainer.device, device)
    run_dir = _writable(Path(str(trainer.default_local_dir)).expanduser())
    # The code of the tokenizer may be in the model's folder.
    trusted = model.trust_remote_code or (data.trust_remote_code and model.tokenizer_path is None)
    folder = resolve_folder(model.path, "actor_rollout_ref.model.path", trusted)
    # Build the model once without its weights, to find an architecture that cannot be trained before any worker starts.
    longest = data.max_prompt_length + data.max_response_length
    checked = check_architecture(model, folder, longest)
    if roles.actor.router_replay.mode != "disabled":
        _check_router_replay(roles, load_model_config(model, folder), device)
    if checked.apart:
        logger.info(
            "%s: %d weights beside the text model, such as %s, stay on disk as they are, and every saved model gets a copy",
            folder, len(checked.apart), checked.apart[0],
        )  # fmt: skip
        if any(name.startswith("mtp.") for name in checked.apart):
            logger.info("the head for drafting (mtp) is left as it was, so an engine may accept fewer of its drafts")
    tokenizer_folder = folder
    if model.tokenizer_path is not None:
        trusted = model.trust_remote_code or data.trust_remote_code
        tokenizer_folder = resolve_folder(
            model.tokenizer_path, "actor_rollout_ref.model.tokenizer_path", trusted, needs_model=False
        )
    tokenizer = load_tokenizer(tokenizer_folder, model, data.trust_remote_code)
    check_vocabulary(tokenizer, checked.embedding_rows, f"actor_rollout_ref.model.path={folder}")
    reference = None
    if reference_path is not None:
        reference = resolve_folder(reference_path, REFERENCE_PATH, model.trust_remote_code)
        if reference != folder:
            checked_reference = check_architecture(model, reference, longest)
            check_vocabulary(tokenizer, checked_reference.embedding_rows, f"{REFERENCE_PATH}={reference}")
    if model.load_mode == "mmap":
        refuse_stacked(WeightFolder(reference or folder))
    critic_folder, critic_weights = None, {}
    if critic is not None:
        assert critic.model.path is not None, "follows the policy's"
        critic_folder = resolve_folder(critic.model.path, CRITIC_PATH, bool(critic.model.trust_remote_code))
        checked_critic = check_architecture(critic.model, critic_folder, longest)
        critic_weights = checked_critic.weights
        check_vocabulary(tokenizer, checked_critic.embedding_rows, f"{CRITIC_PATH}={critic_folder}")
        key, own, trusted = CRITIC_PATH, critic_folder, bool(critic.model.trust_remote_code)
        if critic.model.tokenizer_path is not None:
            key = "critic.model.tokenizer_path"
            own = resolve_folder(critic.model.tokenizer_path, key, trusted, needs_model=False)
        way_out = f"The critic reads the policy's token ids: give a critic of the same family, or leave {key} out."
        _check_same_tokenizer(tokenizer, tokenizer_folder, own, key, trusted, way_out)
    teachers: dict[str, str] = {}
    if with_teacher and settings.teacher.model.lora_adapter_path is not None:
        adapter_shape(settings.teacher.model.lora_adapter_path)
    if with_teacher and settings.teacher.model.path is not None:
        further = settings.teacher.further_models
        teachers = {f"{TEACHER_KEY}.model.path": settings.teacher.model.path}
        teachers |= {f"{TEACHER_KEY}.further_models.{name}": path for name, path in further.items()}
    reads_text = with_teacher and settings.distill.align == "text"
    words = _read_teacher_tokenizer(settings) if reads_text else None
    found = [_find_teacher(settings, key, path, tokenizer, tokenizer_folder, longest, words) for key, path in teachers.items()]
    return Environment(
        device=device,
        num_devices=sum(pool.nnodes * pool.n_gpus_per_node for pool in asked.values()),
        folder=folder,
        tokenizer_folder=tokenizer_folder,
        reference_folder=reference,
        tokenizer=tokenizer,
        embedding_rows=checked.embedding_rows,
        eos_token_ids=end_tokens(folder, tokenizer),
        free_engine=frees_engine(rollout, device),
        run_dir=run_dir,
        weights=checked.weights,
        critic_folder=critic_folder,
        critic_weights=critic_weights,
        teacher_folders=tuple(found),
        teacher_tokenizer=words,
        has_more=checked.has_more,
        features=checked.features,
    )


def _check_router_replay(roles: ActorRolloutRef, config: Any, device: str) -> None:
    key, mode = "actor_rollout_ref.actor.router_replay.mode", roles.actor.router_replay.mode
    reason = why_not_replayed(config)
    if reason is not None:
        raise ConfigError(f"{key}={mode}: models of type {config.model_type} {reason}. Set {key}=disabled.")
    if mode == "R3" and roles.rollout.name == "vllm" and device == "cpu":
        raise ConfigError(
            f"{key}=R3, actor_rollout_ref.rollout.name=vllm: on a CPU vLLM does not say which experts it chose. "
            f"Set {key}=R2, or actor_rollout_ref.rollout.name=hf."
        )


def _find_teacher(
    settings: Settings, key: str, path: str, tokenizer: Any, tokenizer_folder: Path, longest: int, own: Any
) -> Path:
    """Return the folder of a teacher. ``own``: its tokenizer, if it reads text.

    Raises:
        ConfigError: There is no such folder, its model cannot run here, or its tokenizer is another than the policy's.
    """
    teacher, roles = replace(settings.teacher.model, path=path), settings.actor_rollout_ref
    folder = resolve_folder(path, key, teacher.trust_remote_code)
    section = key.removesuffix(".path")
    checked = check_architecture(frozen_causal_model(teacher, roles.model), folder, longest, section)
    if own is not None:
        check_vocabulary(own, checked.embedding_rows, f"{key}={folder}")
        return folder
    check_vocabulary(tokenizer, checked.embedding_rows, f"{key}={folder}")
    way_out = "Teacher and policy are compared token by token: give a teacher of the policy's family, or set "
    way_out += "distill.align=text."
    _check_same_tokenizer(tokenizer, tokenizer_folder, folder, key, teacher.trust_remote_code, way_out)
    return folder


def _read_teacher_tokenizer(settings: Settings) -> Any:
    """Return the tokenizer of a teacher that reads text (``distill.align``).

    Raises:
        ConfigError: There is none, or it cannot say which part of a text a token is.
    """
    model = settings.teacher.model
    key = f"{TEACHER_KEY}.model.{'path' if model.tokenizer_path is None else 'tokenizer_path'}"
    path = str(model.tokenizer_path or model.path)
    folder = resolve_folder(path, key, model.trust_remote_code, needs_model=False)
    tokenizer = existing_tokenizer(folder, f"{key}={folder}", model.trust_remote_code, "Set teacher.model.tokenizer_path.")
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={folder}: distill.align=text needs a fast tokenizer (tokenizer.json) with an eos token. "
            "Choose another teacher."
        )
    return tokenizer


def _check_same_tokenizer(tokenizer: Any, folder: Path, own: Path, key: str, trusted: bool, way_out: str) -> None:
    # Refuse a model whose tokenizer, in its folder ``own``, differs from the policy's in ``folder``. A folder without a tokenizer
    # uses the policy's.
    if own == folder or not any((own / name).is_file() for name in TOKENIZER_FILES):
        return
    mine, others = tokenizer.get_vocab(), read_tokenizer(own, key, trusted).get_vocab()
    different = sorted(token for token, number in others.items() if mine.get(token) != number)
    if different or len(mine) != len(others):
        example = f", such as {different[0]!r}" if different else ""
        raise ConfigError(
            f"{key}={own}: its tokenizer is another than the policy's in {folder} ({len(others)} and {len(mine)} tokens"
            f"{example}). {way_out}"
        )


def _check_devices(asked: Mapping[str, Trainer | ResourcePool], ray: RayKwargs, device: str) -> None:
    # With several nodes Ray checks this later, when the cluster is known.
    present = device_count(device)
    on_this_machine = device == "cuda" and all(pool.nnodes == 1 for pool in asked.values()) and "address" not in ray.ray_init
    if on_this_machine and sum(pool.n_gpus_per_node for pool in asked.values()) > present:
        keys = ", ".join(f"{section}.n_gpus_per_node={pool.n_gpus_per_node}" for section, pool in asked.items())
        it, own = ("it", "") if len(asked) == 1 else ("their sum", ", or leave out enable_resource_pool to share devices")
        raise ConfigError(f"{keys}: this machine has {present}. Set {it} to at most {present}{own}.")


def _check_engine(engine: str, device_setting: str, device: str) -> None:
    if engine != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm: vLLM is not installed. Run ./setup_env.sh, "
            "or use actor_rollout_ref.rollout.name=hf."
        )
    wanted, build = "cpu" if device == "cpu" else "gpu", vllm_build()
    if build not in (None, wanted):
        raise ConfigError(
            f"trainer.device={device_setting}, actor_rollout_ref.rollout.name=vllm: the run is on the "
            f"{wanted.upper()}, and the installed vLLM is a build for {build.upper()}s. Set "
            f"actor_rollout_ref.rollout.name=hf, or install the other build: VERL_MEMOPT_BUILD={wanted} ./setup_env.sh."
        )
    missing = missing_build_tools() if device == "cuda" else None
    if missing is not None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: vLLM compiles Triton kernels when it starts on a GPU, and this machine has no "
            f"{missing}. Install it, or set actor_rollout_ref.rollout.name=hf."
        )


def missing_build_tools() -> str | None:
    """Return the tool that Triton needs and this machine lacks, and the packages that contain it; None if none is missing.

    Triton builds its launchers with the compiler in ``CC``, gcc or clang, and with the headers of the running Python
    (``triton.runtime.build``).
    """
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "C compiler (apt install gcc, dnf install gcc, or conda install gcc)"
    headers = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"
    if not headers.is_file():
        return f"{headers} (apt install {python}-dev, or dnf install {python}-devel)"
    return None


def frees_engine(rollout: Rollout, device: str) -> bool:
    """Return whether the engine releases its memory between rollouts: ``rollout.free_cache_engine``, by default on a GPU.

    Raises:
        ConfigError: The setting is true with vLLM on a CPU, which cannot release its memory.
    """
    setting = rollout.free_cache_engine
    if setting and device == "cpu" and rollout.name == "vllm":
        raise ConfigError(
            "actor_rollout_ref.rollout.free_cache_engine=true: vLLM on a CPU cannot give its memory back. "
            "Leave the key out, or set it to false; rollout.kv_cache_memory_gb bounds the cache. Or use rollout.name=hf."
        )
    return device != "cpu" if setting is None else setting


def _writable(folder: Path) -> Path:
    # The folder may not exist yet, so its nearest existing parent is checked.
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise ConfigError(
            f"trainer.default_local_dir={folder}: cannot be made ({os.strerror(errno.ENOTDIR)}). Give another folder."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"trainer.default_local_dir={folder}: not writable. Give another folder.")
    return folder.resolve()
