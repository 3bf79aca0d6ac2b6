"""TRL's RLOOTrainer and GRPOTrainer: their own loss functions, called with the tensors their training loops give them.

Trimmed, TRL does on a CPU what it does on a GPU: it scores the answers' positions only, in tiles no wider than the vocabulary.
As it comes it sends every position through the head, because it takes a device without Triton for one that recompiles
when shapes change.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.update_pass.sides import CLIP, TEMPERATURE, Job, Side, padded, plain_model, plain_side

logging.getLogger("trl").setLevel(logging.ERROR)


def build_rloo(job: Job, trimmed: bool = False) -> Side:
    """Gives RLOOTrainer's loss: one ratio per sequence. Its loop divides by the number of micro-batches; so does this."""
    return _side(job, RLOOTrainer, _config(RLOOConfig, job), trimmed, 1 / len(job.cuts()))


def build_grpo(job: Job, trimmed: bool = False) -> Side:
    """Gives GRPOTrainer's loss, strictly on-policy: one ratio per token, summed over a sequence, mean over sequences.

    That is ``dr_grpo`` with a constant length of 1, the aggregation it has in common with RLOO.
    """
    config = _config(GRPOConfig, job, loss_type="dr_grpo", max_completion_length=1)
    return _side(job, GRPOTrainer, config, trimmed, 1.0)


def _config(kind: type, job: Job, **options: Any) -> Any:
    return kind(
        output_dir=str(job.folder / "trl"), use_cpu=job.device.type == "cpu", bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=job.work.rows or job.work.k, gradient_accumulation_steps=len(job.cuts()),
        num_generations=job.work.k, temperature=TEMPERATURE, beta=0.0, num_iterations=1, epsilon=CLIP, report_to="none",
        disable_tqdm=True, save_strategy="no", **options,
    )  # fmt: skip


def _side(job: Job, kind: type, config: Any, trimmed: bool, scale: float) -> Side:
    model = plain_model(job)
    trainer = kind(
        model=model,
        reward_funcs=_no_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * len(job.batch.answers)),
        processing_class=AutoTokenizer.from_pretrained(job.folder, padding_side="left"),
    )
    trainer.current_gradient_accumulation_steps = len(job.cuts())
    as_asked = functools.partial(_trimmed, job.work.shape.vocab_size) if trimmed else nullcontext
    model.train()
    with as_asked():
        inputs = [_inputs(job, rows, trainer) for rows in job.cuts()]

    def update() -> None:
        with as_asked():
            for given in inputs:
                (trainer._compute_loss(model, given) * scale).backward()
        for metrics in trainer._metrics.values():
            metrics.clear()

    return plain_side(model, update)


def _no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _inputs(job: Job, rows: Sequence[int], trainer: Any) -> dict[str, Tensor]:
    """Gives what the loss functions take. Only RLOO's reads the old log-probs; GRPO's are the policy's own.

    They come from the trainer's own function, as in its loop: a sum over a thousand tokens is rounded to 1e-3 nats.
    """
    prompt_ids, prompt_mask = padded([job.batch.prompt_of(row) for row in rows], "left", job.device)
    completion_ids, completion_mask = padded([job.batch.answers[row] for row in rows], "right", job.device)
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    with torch.no_grad():
        found, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion_ids.shape[1])
    return {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([job.batch.advantages[row] for row in rows], device=job.device),
        "old_logps": (found * completion_mask).sum(1),
    }  # fmt: skip


@contextmanager
def _trimmed(vocabulary: int) -> Iterator[None]:
    room = trl.trainer.utils
    before = room._use_triton, room._CHUNKED_LOGPROB_CHUNK_SIZE
    # Asked here to choose positions only; what folds the tiles asks in another module, and stays torch's.
    room._use_triton = lambda device: True
    room._CHUNKED_LOGPROB_CHUNK_SIZE = min(vocabulary, before[1])
    try:
        yield
    finally:
        room._use_triton, room._CHUNKED_LOGPROB_CHUNK_SIZE = before
