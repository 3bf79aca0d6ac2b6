"""Checkpoints of the policy and of the critic. Each holds the training state of all ranks and a Hugging Face folder."""

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
from verl_memopt.model.text_part import is_part
from verl_memopt.model.value_model import ValueModel, classifier_config
from verl_memopt.model.weights import WeightFolder, base_weights, named_weights
from verl_memopt.observe.byte_tracker import HOST, scope
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import ACTOR, TrainedModel, readable

START = "lora_start"
"""Folder in the policy's checkpoint with the adapters that training started from, in the peft format."""


def plain_weights(model: PackedModel, exact: Callable[[str], torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    return merged_weights(named_weights(model), model, exact)


def sent_weights(model: PackedModel, rollout: Rollout, dtype: torch.dtype, merged: bool = True) -> Iterator[WeightSlice]:
    """Yield the policy's weights for the engine, bucket by bucket. Rows that are gathered from several ranks have ``dtype``.

    With ``merged`` the adapters are merged into the weights. Without it these are the base model's weights.
    """
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
    """Write this rank's part of a role's checkpoint, and return the record of each file that this rank wrote.

    The paths of the records are relative to ``folder``. With ``hf_model`` in ``contents``, rank 0 also writes the weights in
    Hugging Face format. Parameters that rest on the host are written from the host. Every file is forced to disk.

    Args:
        trained: The policy or the critic.
        plan: The plan from which the worker was built.
        rank: Rank of this worker.
        folder: Folder of the role in the checkpoint.
        contents: Parts to write: any of ``model``, ``optimizer``, ``extra`` and ``hf_model``.
        start: The adapters that training started from, which the reference needs. None = it started from the base model.

    Raises:
        CheckpointError: A file cannot be written. The message names the folder.
    """
    section = plan.settings if trained.role is ACTOR else plan.critic
    assert section is not None
    model, exported, adapter = section.model, folder / "huggingface", folder / "lora_adapter"
    in_whole = trained.role is ACTOR and plan.has_more and is_part(trained.model.lm.config)
    with readable(trained.home):
        # Writing copies tensors to the host. On a CPU run the byte tracker would count these copies as device bytes.
        with scope("checkpoint", HOST):
            records = save_training_state(
                folder, trained.model, trained.optimizer, trained.schedule, trained.device, contents, trained.masters
            )
        try:
            _export(trained, plan, rank, exported, trained.model.masters, weights="hf_model" in contents)
            if model.lora_rank > 0:
                save_adapter(adapter, trained.model, str(model.path), model, rank == 0, in_whole=in_whole)
            if start is not None:
                save_adapter(folder / START, trained.model, str(model.path), model, rank == 0, start, in_whole)
            if rank == 0:
                # Hash these files only after they are complete: the header of a safetensors file is written last.
                for written in (exported, adapter, folder / START):
                    records |= record_folder(written, folder)
            return records
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error


def save_model(trained: TrainedModel, plan: WorkerPlan, rank: int, folder: Path) -> None:
    """Write the policy as a Hugging Face model: the weights with merged adapters, and in ``adapter/`` the adapters.

    The weights have the dtype of the folder that the policy started from. Only rank 0 writes.

    Raises:
        CheckpointError: A file cannot be written. The message names the folder.
    """
    model = plan.settings.model
    with readable(trained.home):
        try:
            _export(trained, plan, rank, folder, saved_dtype(Path(plan.folder), trained.fsdp), weights=True)
            if model.lora_rank > 0:
                in_whole = plan.has_more and is_part(trained.model.lm.config)
                save_adapter(folder / ADAPTER, trained.model, str(model.path), model, rank == 0, in_whole=in_whole)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error


def _export(trained: TrainedModel, plan: WorkerPlan, rank: int, folder: Path, dtype: torch.dtype, weights: bool) -> None:
    # Only rank 0 writes. The critic becomes a token classifier with one label.
    settings, model, writes = plan.settings, trained.model, rank == 0
    bucket = settings.rollout.checkpoint_engine.update_weights_bucket_megabytes
    # A sharded weight must be on the device, where it is gathered. A whole weight may stay on the host.
    weights_of = plain_weights(model, _exact(plan, model))
    masters = ((name, trained.master(weight, not isinstance(weight, DTensor))) for name, weight in weights_of)
    stream = full_weights(masters, dtype, bucket) if weights else None
    # A critic is written as a classifier of text, even if its folder has more parts.
    whole = WeightFolder(Path(plan.folder)) if trained.role is ACTOR and plan.has_more else None
    config = classifier_config(model.lm.config) if isinstance(model, ValueModel) else model.lm.config
    export_folder(folder, config, Path(plan.tokenizer_folder), stream, writes, dtype, whole)
    if writes and trained.role is ACTOR:
        write_generation_config(folder, Path(plan.folder), plan.eos_token_ids)
    template = settings.model.custom_chat_template
    if writes and template is not None:
        # transformers prefers this file to tokenizer_config.json.
        (folder / "chat_template.jinja").write_text(template)


def _exact(plan: WorkerPlan, model: PackedModel) -> Callable[[str], torch.Tensor] | None:
    if not quantized_layers(model):
        return None
    # Quantised weights are not exact, so read the exact ones from the model's folder and merge the adapters into them.
    folder = WeightFolder(Path(plan.folder))
    return lambda name: folder.read(name, ()).to(model.masters)


def load_start(folder: Path, model: PackedModel, device: torch.device) -> StartingAdapter | None:
    there = (folder / START).is_dir()
    return starting_adapter(folder / START, model, model.compute, device) if there else None


def load_trained(trained: TrainedModel, folder: Path, contents: Sequence[str]) -> None:
    # A gradient that still waits for its step was computed with the old weights.
    trained.optimizer.zero_grad(set_to_none=True)
    parts = trained.model, trained.optimizer, trained.schedule
    load_training_state(folder, *parts, trained.device, contents, trained.masters)
    trained.changed()
    if trained.home is not None:
        trained.home.changed()
