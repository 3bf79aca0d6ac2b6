"""Where a run takes place: device, folders, tokenizer; everything about this machine that settings alone cannot say."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_memopt.config.checks import needs_reference, world_size
from verl_memopt.config.schema import Settings
from verl_memopt.distributed.device import device_count, resolve_device
from verl_memopt.errors import ConfigError
from verl_memopt.models.folder import end_tokens, load_tokenizer, resolve_folder
from verl_memopt.models.trial_build import check_architecture
from verl_memopt.rollout.vllm_build import vllm_build

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """What a run found. reference_folder is None when no model of its own is needed."""

    device: str
    world_size: int
    folder: Path
    tokenizer_folder: Path
    reference_folder: Path | None
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    free_engine: bool
    run_dir: Path
    weights: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Name -> shape of each weight of the policy, without adapters."""


def survey(settings: Settings) -> Site:
    """Gives the site of a run. Errors: ConfigError for whatever this machine cannot do, before any worker starts."""
    trainer, model = settings.trainer, settings.actor_rollout_ref.model
    device = resolve_device(trainer.device)
    _check_devices(settings, device)
    _check_engine(settings, device)
    run_dir = _writable(Path(str(trainer.default_local_dir)).expanduser())
    trusted = model.trust_remote_code or settings.data.trust_remote_code  # the tokenizer's code, which may lie with the model
    code = trusted if model.tokenizer_path is None else model.trust_remote_code
    folder = resolve_folder(model.path, "actor_rollout_ref.model.path", code)
    # The model is built once here without its weights, so that what cannot be trained shows before any worker starts.
    longest = settings.data.max_prompt_length + settings.data.max_response_length
    shared = settings.actor_rollout_ref.actor.use_prefix_grouper
    weights = check_architecture(model, folder, longest, shared)
    tokens = folder
    if model.tokenizer_path is not None:
        tokens = resolve_folder(model.tokenizer_path, "actor_rollout_ref.model.tokenizer_path", trusted)
    tokenizer = load_tokenizer(tokens, model, settings.data.trust_remote_code)
    reference = None
    if needs_reference(settings) and model.lora_rank == 0:
        path, key = str(settings.actor_rollout_ref.ref.model.path), "actor_rollout_ref.ref.model.path"
        reference = resolve_folder(path, key, model.trust_remote_code)
        if reference != folder:
            check_architecture(model, reference, longest, shared)
    return Site(
        device=device,
        world_size=world_size(settings),
        folder=folder,
        tokenizer_folder=tokens,
        reference_folder=reference,
        tokenizer=tokenizer,
        eos_token_ids=end_tokens(folder, tokenizer),
        free_engine=_free_engine(settings, device),
        run_dir=run_dir,
        weights=weights,
    )


def _check_devices(settings: Settings, device: str) -> None:
    """Refuses more GPUs on one node than there are; over several nodes the cluster is asked when it is known."""
    trainer = settings.trainer
    present = device_count(device)
    if (
        device == "cuda"
        and trainer.nnodes == 1
        and "address" not in settings.ray_kwargs.ray_init
        and trainer.n_gpus_per_node > present
    ):
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has {present}. Set it to at most {present}."
        )


def _check_engine(settings: Settings, device: str) -> None:
    """Refuses vLLM where it is not installed, and where its build is not for the run's device."""
    if settings.actor_rollout_ref.rollout.name != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm: vLLM is not installed. Run ./setup_env.sh, "
            "or use actor_rollout_ref.rollout.name=hf."
        )
    wanted, build = "cpu" if device == "cpu" else "gpu", vllm_build()
    if build not in (None, wanted):
        raise ConfigError(
            f"trainer.device={settings.trainer.device}, actor_rollout_ref.rollout.name=vllm: the run is on the "
            f"{wanted.upper()}, and the installed vLLM is a build for {build.upper()}s. Set "
            f"actor_rollout_ref.rollout.name=hf, or install the other build: VERL_MEMOPT_BUILD={wanted} ./setup_env.sh."
        )


def _free_engine(settings: Settings, device: str) -> bool:
    rollout = settings.actor_rollout_ref.rollout
    asked = rollout.free_cache_engine
    if asked and device == "cpu" and rollout.name == "vllm":
        raise ConfigError(
            "actor_rollout_ref.rollout.free_cache_engine=true: vLLM on a CPU cannot give its memory back. "
            "Leave the key out, or set it to false; rollout.kv_cache_memory_gb bounds the cache. Or use rollout.name=hf."
        )
    return device != "cpu" if asked is None else asked


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: cannot be made ({error.strerror}). Give another folder."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"trainer.default_local_dir={folder}: not writable. Give another folder.")
    return folder.resolve()


def with_seed(settings: Settings, resumed_seed: int | None) -> Settings:
    """Gives settings whose data and rollout seeds are concrete: those given, else the resumed run's, else drawn and logged."""
    seed = settings.data.seed
    if seed is not None and settings.actor_rollout_ref.rollout.seed is not None:
        return settings
    if seed is None:
        seed = secrets.randbelow(2**31) if resumed_seed is None else resumed_seed
        logger.info(
            "data.seed was not given; this run uses %d (%s)", seed, "drawn" if resumed_seed is None else "from the checkpoint"
        )
    rollout = settings.actor_rollout_ref.rollout
    rollout = dataclasses.replace(rollout, seed=seed if rollout.seed is None else rollout.seed)
    return dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, seed=seed),
        actor_rollout_ref=dataclasses.replace(settings.actor_rollout_ref, rollout=rollout),
    )
