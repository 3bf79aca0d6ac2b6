"""Writes the model of a checkpoint as a model folder: in one process, without a GPU, one tensor at a time.

This is ``verl-memopt export``. A run with ``trainer.keep_best_checkpoint`` also calls it at its end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_memopt.distributed.sharded_state import StoredTensors
from verl_memopt.errors import CheckpointError, ConfigError, UserError
from verl_memopt.memory.expert_lora_torch import adapter_module, merged_experts
from verl_memopt.memory.lora import adapter_scale
from verl_memopt.memory.lora_torch import ADAPTERS, with_adapter
from verl_memopt.memory.weight_buckets_torch import dtype_of_weight
from verl_memopt.model.export import ADAPTER, DAMAGED, RECORD, export_stored, stored_dtype, whole_folder, write_record
from verl_memopt.model.families import family_of
from verl_memopt.model.folder import resolve_folder
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.model.weights import WeightFolder, check_dtypes
from verl_memopt.observe.files import check_space
from verl_memopt.observe.run_folder import FINAL_MODEL
from verl_memopt.records import json_of
from verl_memopt.run.checkpoints import GONE, Checkpoint, CheckpointStore, check_driver, is_checkpoint, read_checkpoint
from verl_memopt.run.run_lock import reading

BEST = "best"
"""Value of ``--step`` that selects the best checkpoint."""


@dataclass(frozen=True)
class RoleKeys:
    """Names of a role: its folder in a checkpoint, its sections of the settings, and the driver's key for its shapes."""

    folder: str
    model: str
    fsdp: str
    weights: str


ROLES = {
    "actor": RoleKeys("actor", "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config", "weights"),
    "critic": RoleKeys("critic", "critic.model", "critic.model.fsdp_config", "critic_weights"),
}


@dataclass(frozen=True)
class StoredModel:
    """The trained model of a role in a checkpoint.

    ``base``: folder of the model from which training started. None = the folder that the settings name.
    """

    checkpoint: Checkpoint
    role: str = "actor"
    base: str | None = None

    def __post_init__(self) -> None:
        check_driver(self.checkpoint)
        if not (self.folder / "huggingface" / "config.json").is_file():
            raise CheckpointError(
                f"{self.checkpoint.folder}: it holds no {self.role}. Only a run with algorithm.adv_estimator=gae has a critic."
            )

    @property
    def keys(self) -> RoleKeys:
        return ROLES[self.role]

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder / self.keys.folder

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.checkpoint.driver["settings"]
        return settings

    @property
    def lora_rank(self) -> int:
        return int(self.settings[f"{self.keys.model}.lora_rank"] or 0)

    @property
    def base_model(self) -> str:
        return str(self.settings[f"{self.keys.model}.path"])

    @property
    def shapes(self) -> Mapping[str, list[int]]:
        # Name -> shape of each weight, without adapters.
        shapes: Mapping[str, list[int]] = self.checkpoint.driver[self.keys.weights]
        return shapes

    @property
    def dtype(self) -> torch.dtype:
        # The dtype of the model from which training started.
        masters = dtype_of(str(self.settings[f"{self.keys.fsdp}.model_dtype"]), f"{self.keys.fsdp}.model_dtype")
        named = self.checkpoint.driver.get("dtypes", {}).get(self.role)
        return stored_dtype(self.folder / "huggingface", masters) if named is None else dtype_of(named, self.role)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the model, with adapters merged, as the run itself would write it.

        The product of the adapters is computed in fp32. The merged weight is rounded to the dtype in which training kept the
        weights, and then to ``dtype``.

        Raises:
            CheckpointError: A tensor is neither in the checkpoint nor in the base model, or has another shape there.
        """
        stored = StoredTensors(self.folder)
        # In the trained module the language model has the name lm. A critic's value head is beside it.
        key = {name.removeprefix("lm."): name for name in stored.names}
        if not key:
            raise CheckpointError(f"{self.folder}: it was saved without the model (checkpoint.save_contents). Give another step.")
        base: WeightFolder | None = None
        for name, shape in self.shapes.items():
            if name in key:
                yield name, stored.read(key[name]).to(dtype_of_weight(name, dtype))
                continue
            base = base or self._base_weights()
            if name not in base.names or list(base.shape(name)) != shape:
                raise CheckpointError(
                    f"{base.folder}: it is not the base of {self.folder}: {name} is missing or has another shape."
                )
            masters = dtype_of(str(self.settings[f"{self.keys.fsdp}.model_dtype"]), "model_dtype")
            weight = base.read(name, ()).to(dtype_of_weight(name, masters))
            down, up = (key.get(f"{adapter_module(name)}.{part}") for part in ADAPTERS)
            if down is not None and up is not None:
                weight = self._merged(weight, stored.read(down), stored.read(up))
            yield name, weight.to(dtype_of_weight(name, dtype))

    def _merged(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        alpha, by_root = (self.settings[f"{self.keys.model}.{name}"] for name in ("lora_alpha", "use_rslora"))
        scale = adapter_scale(self.lora_rank, alpha, bool(by_root))
        if down.ndim == 2:
            return with_adapter(weight, down, up, scale)
        config = json_of(self.folder / "huggingface" / "config.json", dict[str, Any], DAMAGED, CheckpointError)
        return merged_experts(weight, down, up, scale, family_of(config.get("model_type", "")).inputs_first)

    def source(self) -> WeightFolder | None:
        """Return the folder of the whole model, if training started from one with more parts than the trained text model."""
        return self._base_weights() if self.role == "actor" and self.checkpoint.driver.get("has_more") else None

    def _base_weights(self) -> WeightFolder:
        path, trusts = self.base or self.base_model, bool(self.settings[f"{self.keys.model}.trust_remote_code"])
        try:
            folder = resolve_folder(path, "base", trusts)
            check_dtypes(folder, "base")
            return WeightFolder(folder)
        except ConfigError as error:
            what = "it has only adapters, and their base model" if self.lora_rank else "the model that has its other parts"
            raise CheckpointError(
                f"{self.folder}: {what} is missing ({error}) Name it with --base"
                f"{', or write the adapters with --adapter-only' if self.lora_rank else ''}."
            ) from error


@contextmanager
def held_checkpoint(path: Path, step: str | None) -> Iterator[Checkpoint]:
    """Yield the checkpoint of :func:`find_checkpoint`. A run that goes on meanwhile cannot remove it in the body."""
    for _ in range(LOOKS):
        try:
            checkpoint = find_checkpoint(path, step)
        except CheckpointError as error:
            if GONE in str(error) and step in (None, BEST):
                continue
            raise
        with reading(checkpoint.folder) as is_there:
            if is_there:
                yield checkpoint
                return
    raise CheckpointError(f"{path}: the run removes checkpoints faster than they are read. Try again, or keep more of them.")


LOOKS = 20
"""Number of searches for a checkpoint, if a run removes the found checkpoint each time before it can be read."""


def find_checkpoint(path: Path, step: str | None) -> Checkpoint:
    """Return a whole checkpoint, after a check of all checksums.

    ``path``: a ``global_step_N`` folder, or a run folder. ``step``: which checkpoint of a run folder: a number, or ``best``;
    None = the newest.
    """
    folder = path.expanduser()
    if is_checkpoint(folder):
        if step is not None:
            raise UserError(f"--step {step}: {path} is a checkpoint already. Give the run folder, or leave --step out.")
        return read_checkpoint(folder, "")
    store = CheckpointStore(folder, None)
    steps = store.steps()
    if not steps:
        ready = f" Its last model is {folder / FINAL_MODEL}." if (folder / FINAL_MODEL / RECORD).is_file() else ""
        raise CheckpointError(
            f"{path}: there is no checkpoint. Give a run folder with global_step_N folders, or one of these.{ready}"
        )
    if step is None:
        newest = store.newest()
        assert newest is not None, "there are steps"
        return newest
    chosen = store.best() if step == BEST else int(step)
    if chosen is None:
        raise CheckpointError(
            f"{path}: no checkpoint has a validation score (trainer.test_freq). Give --step N of {_listed(steps)}."
        )
    # `steps` was read before the best step, so the best step may be newer and missing in it.
    if step != BEST and chosen not in steps:
        raise CheckpointError(f"{path}: there is no checkpoint of step {chosen}. There are {_listed(steps)}.")
    return read_checkpoint(store.folder(chosen), "")


def export_model(model: StoredModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model folder: weights with adapters merged, config, tokenizer, and the adapters in ``adapter/``.

    The folder gets its name only when it is whole, and then replaces an older one. ``dtype``: dtype of the weights; None = the
    dtype of the model from which training started.
    """
    dtype = model.dtype if dtype is None else dtype
    source = model.source()
    copied = 0 if source is None else source.apart_bytes
    check_space(folder, sum(prod(shape) for shape in model.shapes.values()) * dtype.itemsize + copied)
    with whole_folder(folder) as aside:
        export_stored(aside, model.folder / "huggingface", model.weights(dtype), dtype, source)
        if model.lora_rank:
            shutil.copytree(model.folder / "lora_adapter", aside / ADAPTER)
        write_record(aside, model.checkpoint.step, model.role, model.base_model, dtype)


def export_adapter(model: StoredModel, folder: Path) -> None:
    # Write only the adapters, in the format of peft.
    if not model.lora_rank:
        raise CheckpointError(
            f"{model.folder}: it has no adapter, because the run trained all weights. Leave --adapter-only out."
        )
    with whole_folder(folder) as aside:
        shutil.copytree(model.folder / "lora_adapter", aside, dirs_exist_ok=True)


def check_empty(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: it exists and is not empty. Give a folder that does not exist yet, or remove it.")


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
