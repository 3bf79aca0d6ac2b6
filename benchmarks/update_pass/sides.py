"""What a contestant is to the benchmark, and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.utils.rnn import pad_sequence

from benchmarks.update_pass.work import Batch, Workload

PAD = 0
"""Never an id of the batch."""
CLIP = 0.2
"""On both sides of the ratio; it binds nowhere, all ratios are 1."""
TEMPERATURE = 1.0


@dataclass(frozen=True)
class Job:
    """One update to compute. old_log_probs: fp32 [R] of each row under the same weights, for those who must be given them."""

    work: Workload
    batch: Batch
    folder: Path
    checkpointing: bool
    device: torch.device
    old_log_probs: Sequence[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.work.dtype == "fp32" else torch.bfloat16

    def cuts(self) -> list[range]:
        """Gives the rows of each micro-batch of a contestant that pads: of one group, its answers side by side."""
        rows = self.work.rows or self.work.k
        assert self.work.k % rows == 0, (self.work.k, rows)
        return [range(start, start + rows) for start in range(0, len(self.batch.answers), rows)]


@dataclass(frozen=True)
class Side:
    """A contestant ready to run.

    update: adds the gradient of the whole batch to the model's parameters. gradients: gives them by Hugging Face name, whole.
    """

    model: nn.Module
    update: Callable[[], None]
    gradients: Callable[[], dict[str, Tensor]]

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def plain_model(job: Job, attention: str = "sdpa") -> nn.Module:
    """Gives transformers' model of the job, in training mode, with its blocks checkpointed where that is asked for.

    Inside a fake mode its weights are fake and hold no values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options = {"dtype": job.dtype, "attn_implementation": attention}
    if detect_fake_mode() is None:
        model = AutoModelForCausalLM.from_pretrained(job.folder, **options).to(job.device)
    else:
        with job.device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder), **options)
    model.train()
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain_side(model: nn.Module, update: Callable[[], None]) -> Side:
    return Side(model, update, lambda: {name: _gradient(parameter) for name, parameter in model.named_parameters()})


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Gives ids and mask, int64 [rows, longest], padded on the left or the right."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    both = (pad_sequence(tensors, batch_first=True, padding_value=PAD, padding_side=side) for tensors in (ids, masks))
    first, second = both
    return first.to(device), second.to(device)
