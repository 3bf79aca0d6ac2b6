"""One update of a worker at the shape of a published model, on the counting GPU."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common import fake_process_group
from benchmarks.gpu.reach_cases import SHAPES, make_model_folder, worker_plan
from benchmarks.gpu_cost.device import Counted, CountingGpu
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.memory.fused import recorded_calls
from verl_memopt.model.tiny import TinyShape
from verl_memopt.trainer.micro_batching import budgets, cut_ranks
from verl_memopt.worker.group import Placement
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

_QWEN25 = replace(SHAPES["0.6b"], model_type="qwen2", max_positions=32_768)

MODELS = {
    "0.5b": replace(_QWEN25, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64),
    "0.6b": SHAPES["0.6b"],
    "1.5b": replace(_QWEN25, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2),
    "8b": SHAPES["8b"],
}
"""Qwen2.5-0.5B and -1.5B, Qwen3-0.6B and -8B, as their configs have them."""


@dataclass(frozen=True)
class Case:
    """One update of a model: ``groups`` prompts of ``prompt`` tokens, to each ``group`` answers of ``response`` tokens.

    budget: tokens of a micro-batch; None = as the settings say. off_policy: the old log-probs are given, so that the loss is one
    of ratios. overrides: further settings, as on a command line. teacher: a model to distill from; None = there is none.
    """

    shape: TinyShape
    prompt: int
    response: int
    group: int = 8
    groups: int = 1
    budget: int | None = 16_384
    off_policy: bool = False
    overrides: tuple[str, ...] = ()
    teacher: TinyShape | None = None


@dataclass(frozen=True)
class Update:
    counted: Counted
    micro_batches: int
    tokens: int


def count(case: Case) -> Update:
    """Return what one optimizer step costs, the second of a worker. In a process that has the fake device."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        make_model_folder(case.shape, folder)
        settings = settings_of(case, folder)
        with fake_process_group(), CountingGpu() as gpu, recorded_calls(gpu.record):
            counted, micro_batches, tokens = step_of(case, settings, folder, gpu)
        gpu.finish(counted)
    return Update(counted, micro_batches, tokens)


def settings_of(case: Case, folder: Path) -> Settings:
    # A shape that make_model_folder writes has weights in bfloat16; masters are fp32 as they are by default.
    return load_settings(
        "rloo_trainer",
        [
            "data.train_files=none", "data.val_files=null", f"data.train_batch_size={case.groups}",
            f"data.max_prompt_length={case.prompt}", f"data.max_response_length={case.response}",
            f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.actor.ppo_mini_batch_size={case.groups}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            *([] if case.budget is None else [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={case.budget}"]),
            "actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={case.group}",
            "trainer.worker_group=local", "trainer.device=cuda", *case.overrides,
        ],
    )  # fmt: skip


def step_of(case: Case, settings: Settings, folder: Path, gpu: CountingGpu) -> tuple[Counted, int, int]:
    roles = settings.actor_rollout_ref
    worker = Worker(worker_plan(settings, folder, with_reference=False), Placement(0, 1, 0, "127.0.0.1", 0, "cuda"))
    try:
        batch = make_batch(
            UpdateSize(rows=case.groups * case.group, prompt=case.prompt, response=case.response, group=case.group), roles.actor
        )
        batch.old_log_probs = torch.zeros(batch.advantages.shape) if case.off_policy and batch.advantages is not None else None
        row_tokens = batch.row_tokens()
        (cut,) = cut_ranks([row_tokens], [[f"row {row}" for row in range(batch.num_rows)]], budgets(roles)[0])
        counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))

        def step() -> None:
            mini = MiniBatch(batch, [list(rows) for rows in cut], counts)
            method, asked = ("update_actor", [mini]) if case.off_policy else ("update_on_policy", mini)
            worker.call("update_actor", False, method, asked)

        worker.call("gen", False, "release_engine")
        step()  # makes the optimizer's state, and what later steps find there
        worker.call("gen", False, "release_engine")  # the counted step has parameters come back that rest on the host
        return gpu.counted(step), len(cut), sum(row_tokens.cost(rows) for rows in cut)
    finally:
        worker.close()
