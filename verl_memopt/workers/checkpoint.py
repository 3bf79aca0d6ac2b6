"""What a checkpoint holds of a policy: this rank's part of its training state, and the policy in Hugging Face format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError

from verl_memopt.distributed.file_records import Records, record_folder
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.errors import CheckpointError
from verl_memopt.memory.parameters.lora import merged_weights, save_adapter
from verl_memopt.models.build import named_weights
from verl_memopt.models.export import export_folder
from verl_memopt.models.policy_model import dtype_of
from verl_memopt.sync.full_weights import full_weights
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.policy import Policy


def policy_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the policy's weights under the names of a plain model: adapters merged, still sharded."""
    return merged_weights(named_weights(policy.model), policy.model)


def save_policy(policy: Policy, plan: WorkerPlan, rank: int, folder: Path, contents: Sequence[str]) -> Records:
    """Write this rank's part of a checkpoint. With hf_model in ``contents``, also write the weights in Hugging Face format.

    Parameters that are on the host are written from there. Every file is forced to disk.

    Args:
        policy: The policy.
        plan: What the worker was built from.
        rank: This rank. Only rank 0 writes the Hugging Face files.
        folder: Folder of the checkpoint.
        contents: Parts to write.

    Returns:
        The record of each file that this rank wrote, relative to ``folder``.

    Raises:
        CheckpointError: The disk refuses. The message names the folder.
    """
    model, exported, adapter = plan.settings.model, folder / "huggingface", folder / "lora_adapter"
    with ExitStack() as stack:
        if policy.home is not None:
            stack.enter_context(policy.home.readable())
        records = save_training_state(folder, policy.model, policy.optimizer, policy.schedule, policy.device, contents)
        try:
            export_policy(policy, plan, rank, exported, weights="hf_model" in contents)
            if model.lora_rank > 0:
                save_adapter(adapter, policy.model, model.path, model.lora_rank, model.lora_alpha, rank == 0)
            if rank == 0:
                records |= record_folder(exported, folder) | record_folder(adapter, folder)
            return records
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error


def export_policy(policy: Policy, plan: WorkerPlan, rank: int, folder: Path, weights: bool) -> None:
    """Write the policy in Hugging Face format: config, tokenizer and chat template, and weights tensor by tensor.

    Args:
        policy: The policy.
        plan: What the worker was built from.
        rank: This rank. Only rank 0 writes.
        folder: The folder to write.
        weights: Write the weights too.
    """
    settings = plan.settings
    masters = dtype_of(settings.actor.fsdp_config.model_dtype, "actor_rollout_ref.actor.fsdp_config.model_dtype")
    bucket = settings.rollout.checkpoint_engine.update_weights_bucket_megabytes
    stream = full_weights(policy_weights(policy), masters, bucket) if weights else None
    export_folder(folder, policy.model.lm.config, Path(plan.tokenizer_folder), stream, rank == 0)
    template = settings.model.custom_chat_template
    if rank == 0 and template is not None:
        # transformers prefers this file to tokenizer_config.json.
        (folder / "chat_template.jinja").write_text(template)


def load_policy(policy: Policy, folder: Path, contents: Sequence[str]) -> None:
    """Read this rank's part of a checkpoint, written by any number of ranks.

    Args:
        policy: The policy. Its parameters are on the device.
        folder: Folder of the checkpoint.
        contents: Parts to read.
    """
    load_training_state(folder, policy.model, policy.optimizer, policy.schedule, policy.device, contents)
    if policy.home is not None:
        policy.home.changed()
