"""The live bytes of one whole step of this project at the study's shapes: rollout, log-probs, update, weight sync.

The worker is the one of a training run, with the project's defaults, transformers' generation and fp32. The byte tracker counts
what is on the device in each phase: the policy, the reference, the optimizer state, the engine's weights and its KV cache. The KV
cache is transformers' own and exists only during the rollout; vLLM's has the size that the user gives it.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.rloo.memory_study.arms import FULL, Arm
from recipe.rloo.memory_study.shapes import Shapes, make_batch, make_model
from recipe.rloo.memory_study.updates import SHARED_CHECKPOINTING, own_settings, project_batch
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.observe.phase import PhaseMemory
from verl_memopt.rollout.engine import train_sampling
from verl_memopt.trainer.micro_batching import budgets
from verl_memopt.worker.group import LocalGroup
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker


@dataclass(frozen=True)
class WholeRun:
    """What a step held.

    Attributes:
        phases: Memory of each phase, in order: gen, old_log_prob, ref, update_actor, update_weights.
        dropped: Prompt tokens that truncation removed. 0 = the prompt is whole.
    """

    phases: list[PhaseMemory]
    dropped: int

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step."""
        return max(memory.peak_allocated_bytes or 0 for memory in self.phases)


def measure_whole_run(shapes: Shapes, k: int, seed: int = 0, device: str = "cpu") -> WholeRun:
    """Run one step with k answers to one whole prompt, and return the memory of its phases.

    Args:
        shapes: The sizes.
        k: Answers to the prompt.
        seed: Seed of model, prompt and rewards.
        device: ``cpu`` or ``cuda``.
    """
    arm = Arm("whole_run", "token", FULL, SHARED_CHECKPOINTING, k, k)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), shapes, seed)
        settings = own_settings(arm, shapes, folder)
        plan = WorkerPlan(
            settings=settings,
            folder=str(folder),
            engine_folder=str(folder),
            reference_folder=str(folder),
            tokenizer_folder=str(folder),
            eos_token_ids=(0,),
            schedule_steps=shapes.epochs,
            free_engine=bool(settings.rollout.free_cache_engine),
            track_init=False,
        )
        group = LocalGroup(functools.partial(Worker, plan), device)
        try:
            return _step(group, plan, arm, shapes, folder, seed)
        finally:
            group.shutdown()


def _step(group: LocalGroup, plan: WorkerPlan, arm: Arm, shapes: Shapes, folder: Path, seed: int) -> WholeRun:
    from transformers import AutoTokenizer

    phases: list[PhaseMemory] = []

    def call(phase: str, method: str, *args: Any) -> Any:
        (reply,) = group.all("call", phase, True, method, *args)
        phases.append(reply.memory)
        return reply.value

    settings = plan.settings
    batch = make_batch(arm, shapes, AutoTokenizer.from_pretrained(folder), seed)
    sampling = dataclasses.replace(train_sampling(settings.rollout), max_tokens=shapes.response, ignore_eos=True)
    prompts = [list(prompt) for prompt in batch.prompts]
    # A training run syncs once before its first rollout.
    group.all("call", "update_weights", False, "update_weights")
    generation = call("gen", "generate", prompts, list(range(arm.k)), sampling)
    group.all("call", "gen", False, "release_engine")
    batch = dataclasses.replace(batch, answers=tuple(map(tuple, generation.response_ids)))
    rows = project_batch(batch, settings)
    cuts = [budget.micro_batches(rows.row_tokens(), [f"answer {row}" for row in range(arm.k)]) for budget in budgets(settings)]
    rows.old_log_probs = call("old_log_prob", "old_log_probs", rows, cuts[1], False).log_probs
    rows.ref_log_probs = call("ref", "ref_log_probs", rows, cuts[2]).log_probs
    counts = GlobalCounts(tokens=float(arm.k * shapes.response), sequences=float(arm.k))
    call("update_actor", "update_actor", [MiniBatch(rows, cuts[0], counts)] * shapes.epochs)
    call("update_weights", "update_weights")
    return WholeRun(phases, batch.dropped)
