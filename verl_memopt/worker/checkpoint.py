"""Checkpoints of the policy and of the critic: this rank's part of the training state, and a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from verl_memopt.config.schema import Rollout
from verl_memopt.distributed.file_records import Records, record_folder
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.errors import CheckpointError
from verl_memopt.memory.lora_torch import StartingAdapter, merged_weights, save_adapter, starting_adapter
from verl_memopt.memory.quantized_frozen_torch import quantized_layers
from verl_memopt.memory.weight_buckets_torch import WeightSlice, full_weights, weight_slices
from verl_memopt.model.export import ADAPTER, export_folder, saved_dtype, write_generation_config
from verl_memopt.model.packed_model import PackedModel
from verl_memopt.model.value_model import ValueModel, classifier_config
from verl_memopt.model.weights import WeightFolder, base_weights, named_weights
from verl_memopt.observe.byte_tracker import HOST, scope
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import ACTOR, TrainedModel, readable

START = "lora_start"
"""Folder of a checkpoint's policy that holds the adapters it started from, as peft has them."""


def plain_weights(model: PackedModel, exact: Callable[[str], torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    return merged_weights(named_weights(model), model, exact)


def sent_weights(model: PackedModel, rollout: Rollout, dtype: torch.dtype, merged: bool = True) -> Iterator[WeightSlice]:
    """Yield the weights for the engine, bucket by bucket, with adapters ``merged`` or without. Gathered rows have ``dtype``."""
    weights = plain_weights(model) if merged else base_weights(model)
    return weight_slices(weights, dtype, rollout.checkpoint_engine.update_weights_bucket_megabytes)


def save_trained(
    trained: TrainedModel,
    plan: WorkerPlan,
    rank: int,
    folder: Path,
    contents: Sequence[str],
    start: StartingAdapter | None = None,
) -> Records:
    """Write this rank's part of a role's checkpoint and return the record of each file, relative to ``folder``.

    With hf_model in ``contents``, rank 0 also writes the weights in Hugging Face format. Parameters that rest on the host are
    written from there. Every file is forced to disk.

    Args:
        trained: The policy or the critic.
        plan: What the worker was built from.
        rank: Rank of this worker.
        folder: Folder of the role in the checkpoint.
        contents: Parts to write.
        start: The adapters that the policy started from, which its reference needs.

    Raises:
        CheckpointError: The disk refuses. The message names the folder.
    """
    section = plan.settings if trained.role is ACTOR else plan.critic
    assert section is not None
    model, exported, adapter = section.model, folder / "huggingface", folder / "lora_adapter"
    with readable(trained.home):
        with scope("checkpoint", HOST):  # what is written is copied on the host, whose bytes a CPU cannot tell from the device's
            records = save_training_state(
                folder, trained.model, trained.optimizer, trained.schedule, trained.device, contents, trained.masters
            )
        try:
            _export(trained, plan, rank, exported, trained.model.masters, weights="hf_model" in contents)
            if model.lora_rank > 0:
                save_adapter(adapter, trained.model, str(model.path), model, rank == 0)
            if start is not None:
                save_adapter(folder / START, trained.model, str(model.path), model, rank == 0, start)
            if rank == 0:
                # Recorded after both are written: a safetensors file gets its header last, so it cannot be hashed while it is
                # written.
                for written in (exported, adapter, folder / START):
                    records |= record_folder(written, folder)
            return records
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error


def save_model(trained: TrainedModel, plan: WorkerPlan, rank: int, folder: Path) -> None:
    """Write the policy as a model for others to load: weights with merged adapters, and the adapters in ``adapter/``.

    The weights have the dtype of the folder that the policy started from. Only rank 0 writes.

    Raises:
        CheckpointError: The disk refuses. The message names the folder.
    """
    model = plan.settings.model
    with readable(trained.home):
        try:
            _export(trained, plan, rank, folder, saved_dtype(Path(plan.folder), trained.fsdp), weights=True)
            if model.lora_rank > 0:
                save_adapter(folder / ADAPTER, trained.model, str(model.path), model, rank == 0)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error


def _export(trained: TrainedModel, plan: WorkerPlan, rank: int, folder: Path, dtype: torch.dtype, weights: bool) -> None:
    # Only rank 0 writes. The critic becomes a token classifier with one label.
    settings, model, writes = plan.settings, trained.model, rank == 0
    bucket = settings.rollout.checkpoint_engine.update_weights_bucket_megabytes
    # What is gathered is gathered on the device.
    weights_of = plain_weights(model, _exact(plan, model))
    masters = ((name, trained.master(weight, not isinstance(weight, DTensor))) for name, weight in weights_of)
    stream = full_weights(masters, dtype, bucket) if weights else None
    config = classifier_config(model.lm.config) if isinstance(model, ValueModel) else model.lm.config
    export_folder(folder, config, Path(plan.tokenizer_folder), stream, writes, dtype)
    if writes and trained.role is ACTOR:
        write_generation_config(folder, Path(plan.folder), plan.eos_token_ids)
    template = settings.model.custom_chat_template
    if writes and template is not None:
        # transformers prefers this file to tokenizer_config.json.
        (folder / "chat_template.jinja").write_text(template)


def _exact(plan: WorkerPlan, model: PackedModel) -> Callable[[str], torch.Tensor] | None:
    if not quantized_layers(model):
        return None
    # A quantised base is saved from its folder's exact weights, into which the adapters are merged.
    folder = WeightFolder(Path(plan.folder))
    return lambda name: folder.read(name, ()).to(model.masters)


def load_start(folder: Path, model: PackedModel, device: torch.device) -> StartingAdapter | None:
    there = (folder / START).is_dir()
    return starting_adapter(folder / START, model, model.compute, device) if there else None


def load_trained(trained: TrainedModel, folder: Path, contents: Sequence[str]) -> None:
    # A gradient that waits for a step is one of other weights.
    trained.optimizer.zero_grad(set_to_none=True)
    parts = trained.model, trained.optimizer, trained.schedule
    load_training_state(folder, *parts, trained.device, contents, trained.masters)
    trained.changed()
    if trained.home is not None:
        trained.home.changed()
