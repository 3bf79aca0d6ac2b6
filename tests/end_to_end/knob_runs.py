"""Two steps of a real worker under a row of knobs, alone or as one of several ranks, and what they computed."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.end_to_end.covering import settings_of
from tests.worker.test_policy import batch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.trainer.micro_batching import budgets, cut_ranks, rows_per_rank
from verl_memopt.worker.group import Placement
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

STEPS = 2
PROMPTS = [[40, 41, 42], [50], [60, 61]]
SHAPE = TinyShape(num_layers=3, tie_embeddings=False)
"""Three blocks, or every_n would be full; a head of its own, or own_units would change nothing."""


@dataclass
class Outcome:
    """What a rank computed for a row. Tensors are fp32; lists have one item per step.

    ``log_probs`` and ``ref_log_probs`` are of this rank's tokens, followed by entropies. ``loss`` is this rank's share.
    ``engine_gap`` is the largest difference between the log-probs of the engine and of the policy on the last answers. ``start``
    and ``weights`` are the engine's weights before the first and after the last step, flat.
    """

    log_probs: list[Tensor]
    ref_log_probs: list[Tensor]
    loss: list[float]
    grad_norm: list[float]
    engine_gap: float
    start: Tensor
    weights: Tensor


def make_model(folder):
    return make_tiny_model(Path(folder) / "model", SHAPE, seed=3)


def run_row(row, folder, rank=0, world_size=1, device="cpu", more=None):
    """Return the outcome of a row, in the process group this process is in or a group of one. Errors: as the worker's.

    more: settings on top of the row's.
    """
    settings = settings_of(row, folder, world_size, more)
    worker = Worker(_plan(settings, folder), Placement(rank, world_size, rank, "127.0.0.1", 0, device))
    try:
        call(worker, "update_weights", "update_weights")
        start = _engine_weights(worker)
        steps = [_step(worker, settings, rank, world_size, seed) for seed in range(STEPS)]
        weights = _engine_weights(worker)
        gap = _engine_gap(worker)
    finally:
        worker.close()
    return Outcome(*(list(values) for values in zip(*steps, strict=True)), gap, start, weights)


def run_rows(rank, world_size, rows, folder, stores):
    """Return the outcome of each row on this rank; every row has a process group of its own, as a run has.

    stores: an empty folder, where the ranks find each other.
    """
    outcomes = []
    for number, row in enumerate(rows):
        leave_process_group()
        store = dist.FileStore(str(Path(stores) / str(number)), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        outcomes.append(run_row(row, folder, rank, world_size))
    return outcomes


def call(worker, phase, method, *args):
    return worker.call(phase, False, method, *args).value


def _plan(settings, folder):
    text = str(folder)
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=None if settings.actor_rollout_ref.model.lora_rank else text,
        tokenizer_folder=text,
        eos_token_ids=(2,),
        schedule_steps=STEPS,
        free_engine=bool(settings.actor_rollout_ref.rollout.free_cache_engine),
        track_init=False,
        memory=settings.memory,
    )


def _step(worker, settings, rank, world_size, seed):
    """Score a batch under policy and reference, updates, and syncs the engine."""
    whole = batch(seed=seed)
    whole.prompts = whole.prompts.select([first for first in range(0, whole.num_rows, 4) for _ in range(4)])
    whole.prompt_group = torch.tensor(prompt_groups(whole.group.tolist(), settings.actor_rollout_ref.actor))
    # In order, for a rank must have the same rows under every knob.
    shares = rows_per_rank(whole.row_tokens(), range(whole.num_rows), world_size, even_out=False)

    def cut(budget):
        tokens = whole.row_tokens()
        names = [[f"row {row}" for row in rows] for rows in shares]
        return cut_ranks([tokens.select(rows) for rows in shares], names, budget)[rank]

    update, old, ref = map(cut, budgets(settings.actor_rollout_ref))
    call(worker, "gen", "release_engine")
    own = whole.select(shares[rank])
    scores = call(worker, "old_log_prob", "old_log_probs", own, old, True)
    reference = call(worker, "ref", "ref_log_probs", own, ref).log_probs
    # As after earlier mini-batches: the policy is no longer the one that generated.
    own.old_log_probs = scores.log_probs + (own.old_log_probs + 5.7)
    own.ref_log_probs = reference
    counts = GlobalCounts(float(sum(whole.responses.sizes())), float(whole.num_rows))
    metrics = call(worker, "update_actor", "update_actor", [MiniBatch(own, update, counts)])
    call(worker, "update_weights", "update_weights")
    return torch.cat([scores.log_probs, scores.entropy]), reference, metrics["actor/loss"], metrics["actor/grad_norm"]


def _engine_weights(worker):
    return torch.cat([tensor.float().flatten().cpu() for _, tensor in worker.engine.resident_tensors()])


def _engine_gap(worker):
    sampling = train_sampling(worker.settings.rollout)
    found = call(worker, "gen", "generate", PROMPTS, [1, 2, 3], sampling)
    call(worker, "gen", "release_engine")
    prompts, responses = (
        Ragged.from_rows([torch.tensor(row) for row in rows], torch.int64) for rows in (PROMPTS, found.response_ids)
    )
    answered = RolloutBatch(prompts=prompts, responses=responses, group=torch.arange(3), batch_size=[])
    scores = call(worker, "old_log_prob", "old_log_probs", answered, [[0, 1], [2]], False)
    engine = torch.tensor([value for row in found.log_probs for value in row])
    return float((scores.log_probs - engine).abs().max())
