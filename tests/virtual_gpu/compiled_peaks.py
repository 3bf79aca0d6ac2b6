"""The peak of each pass of a step with compiled functions, beside the formulas.

A worker of a published shape runs its second step on the virtual GPU: PPO with a critic of another width, RLT with a student of
another width, GRPO with a KL, LoRA, and distillation from a teacher of another width. To its count is added what such a device
does not see: the tensors that Inductor keeps inside a compiled function, and those that the kernels of attention's backward
allocate. Rows have their longest lengths, as the formulas of ``verl-memopt fit`` suppose.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import fake_process_group
from benchmarks.gpu.reach_cases import make_model_folder, size_of, worker_plan
from benchmarks.gpu_cost.device import ROWS, _inputs, region_of
from benchmarks.gpu_cost.update import Case
from tests.virtual_gpu.device import VirtualGpu
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.data.batch import Ragged
from verl_memopt.ladder.measure import UpdateSize, make_batch
from verl_memopt.memory.critic_rules import has_critic
from verl_memopt.memory.fused import compiled_for_width, recorded_calls
from verl_memopt.memory.kernels import Kernel
from verl_memopt.memory.knob import has_teacher, needs_reference
from verl_memopt.memory.recompute_elementwise_torch import _norm_of_sum
from verl_memopt.model.tiny import TinyShape
from verl_memopt.plan.peaks import Sizes, predict
from verl_memopt.recipes.rlt.student import Student, StudentPlan, student_batch, student_micro_batches
from verl_memopt.recipes.rlt.student_rows import StudentRows
from verl_memopt.trainer.micro_batching import budgets, critic_budgets, cut_ranks, teacher_budget
from verl_memopt.worker.group import Placement
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

AR = "actor_rollout_ref"
RUNS: dict[str, tuple[str, ...]] = {
    "ppo": ("algorithm.adv_estimator=gae",),
    "rlt": (
        "algorithm.adv_estimator=grpo", f"{AR}.actor.use_kl_loss=true", "reward_model.enable=true",
        "reward_model.reward_manager=rlt", "reward_model.residency=separate",
    ),
    "grpo": ("algorithm.adv_estimator=grpo", f"{AR}.actor.use_kl_loss=true"),
    "lora": ("algorithm.adv_estimator=grpo", f"{AR}.actor.use_kl_loss=true", f"{AR}.model.lora_rank=16"),
    "distill": ("algorithm.adv_estimator=distill",),
    "top_k": ("algorithm.adv_estimator=distill", "distill.top_k=64", "teacher.fsdp_config.param_offload=stream"),
    "graphs": ("algorithm.adv_estimator=grpo", f"{AR}.actor.use_kl_loss=true", f"{AR}.actor.fsdp_config.cuda_graphs=true"),
}  # fmt: skip
"""Run -> its settings. ``ppo`` has a critic of another shape than the policy, ``rlt`` a student, and those that distill a
teacher."""


class CompiledGpu(VirtualGpu):
    """A virtual GPU whose peak has the bytes that compiled functions and kernels keep inside.

    ``regions``: bytes that a compiled function keeps for each row, by what :func:`region_of` returns. Functions that are not
    among them are noted there with 0.
    """

    def __init__(self, regions: dict[Any, float], **options: Any) -> None:
        """Start with an empty device."""
        super().__init__(**options)
        self.regions = regions

    def record(
        self, function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any], uncompiled: Callable[[], Any]
    ) -> Any:
        """Run a call uncompiled, and count what it would hold compiled: its results, and what Inductor or our kernel keeps."""
        before, pool = self.peak, self._pool
        size = 0 if pool is None else pool.size
        result = uncompiled()
        if pool is not None:  # it has grown by what a compiled call does not hold
            self.allocated -= pool.size - max(size, pool.live)
            pool.size = max(size, pool.live)
        self.peak = before
        if isinstance(function, Kernel):
            held = function.partial_bytes(tensors, others)
        else:
            key, rows = region_of(function, tensors, others)
            held = round(self.regions.setdefault(key, 0) * rows)
        self.holds_for_a_moment(held)
        return result

    def _device_op(self, func: Any, args: Any, kwargs: Any, given: Any) -> Any:
        result = super()._device_op(func, args, kwargs, given)
        scratch = SCRATCH.get(func.__name__.partition(".")[0])
        if scratch is not None:
            self.holds_for_a_moment(scratch(args))
        return result


def kept_by(function: Callable[..., Any], shapes: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the most bytes for a row that a function allocates at once, compiled to C++. Arguments as of :func:`kernels_of`."""
    if function is _norm_of_sum:
        # torch 2.13 has no C++ for a statement that reduces a tensor and overwrites it beside another result.
        shapes = [(dtype, width, place) for place, (dtype, width, _) in enumerate(shapes)]
    tensors, rest = _inputs(shapes, others)

    def run() -> None:
        compiled_for_width(function, tensors, rest)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes), default=0) / ROWS


def flash_scratch(args: Sequence[Any]) -> int:
    """Return the bytes that the kernel of flash attention's backward allocates beside its results.

    As ``mha_varlen_bwd`` of torch's ``flash_api.cpp`` does: ``dq_accum`` and ``softmax_d`` in fp32, and the gradients of keys and
    values for each query head where there are fewer key heads.
    """
    query, key, sequences = args[1], args[2], args[6].shape[0] - 1
    heads, size = query.shape[-2:]
    round_to = 32 if size <= 128 else 64
    rounded = -(-size // round_to) * round_to
    rows = query.shape[0] + 128 * sequences
    repeated = 2 * key.shape[0] * heads * size * query.itemsize if heads != key.shape[-2] else 0
    return 4 * rows * heads * (rounded + 1) + repeated


def efficient_scratch(args: Sequence[Any]) -> int:
    """Return the bytes that the backward of memory-efficient attention allocates beside its results.

    As torch's ``attention_backward.cu`` does: a workspace in fp32 of the gradient of queries, in blocks of 64 by 64, with each
    sequence as long as the longest; a number for each query and head; and the output's gradient again where it has gaps.
    """
    grad, query, sequences, longest = args[0], args[1], args[6].shape[0] - 1, args[8]
    rows, heads, size = query.shape[1:]
    workspace = 4 * sequences * heads * (longest + -longest % 64) * (size + -size % 64)
    return workspace + 4 * rows * heads + (0 if grad.is_contiguous() else grad.nbytes)


SCRATCH = {"_flash_attention_backward": flash_scratch, "_efficient_attention_backward": efficient_scratch}


def settings_of(run: str, case: Case, folder: Path, other: Path) -> Settings:
    """Return the default settings with the sizes of the work."""
    mini = case.groups
    return load_settings(
        "ppo_trainer",
        [
            "data.train_files=none", "data.val_files=null", f"data.train_batch_size={case.groups}",
            f"data.max_prompt_length={case.prompt}", f"data.max_response_length={case.response}",
            f"{AR}.model.path={folder}", f"{AR}.actor.ppo_mini_batch_size={mini}", f"{AR}.rollout.n={case.group}",
            f"{AR}.rollout.name=hf", f"{AR}.rollout.free_cache_engine=true", f"{AR}.actor.use_dynamic_bsz=true",
            f"{AR}.actor.ppo_max_token_len_per_gpu={case.budget}", f"{AR}.actor.old_log_prob_pass=always",
            "trainer.worker_group=local", "trainer.device=cuda",
            *RUNS[run],
            *((f"critic.model.path={other}", f"critic.ppo_mini_batch_size={mini}") if run == "ppo" else ()),
            *((f"reward_model.model.path={other}",) if run == "rlt" else ()),
            *((f"teacher.model.path={other}",) if "algorithm.adv_estimator=distill" in RUNS[run] else ()), *case.overrides,
        ],
    )  # fmt: skip


def plan_of(run: str, settings: Settings, folder: Path, other: Path) -> WorkerPlan:
    own_reference = needs_reference(settings) and not settings.actor_rollout_ref.model.lora_rank
    plan = worker_plan(settings, folder, own_reference)
    if has_critic(settings):
        return dataclasses.replace(plan, critic=settings.critic, critic_folder=str(other), critic_schedule_steps=1000)
    if has_teacher(settings):
        return dataclasses.replace(plan, teacher=settings.teacher, teacher_folders=(str(other),), distill=settings.distill)
    if run == "rlt":
        rewards = settings.reward_model
        return dataclasses.replace(plan, role=StudentPlan(rewards.model, rewards.rlt, "separate", str(other)))
    return plan


def student_rows(case: Case) -> StudentRows:
    """Return rows of the longest lengths: questions and solutions share a prompt's tokens, and an explanation is a response."""
    rows, solution = case.groups * case.group, case.prompt // 4
    lengths = [case.prompt - solution, case.response, 0, solution, 0]
    ids = [torch.full((sum(lengths),), 7 + row // case.group) for row in range(rows)]
    return StudentRows(
        ids=Ragged.from_rows(ids, torch.int64), parts=torch.tensor([lengths] * rows), status=torch.zeros(rows, dtype=torch.int8),
        matched=torch.ones(rows, dtype=torch.bool), has_text_after=torch.zeros(rows, dtype=torch.bool),
    )  # fmt: skip


def phases(worker: Worker, case: Case, settings: Settings, updates_alone: bool) -> dict[str, int]:
    """Run one step, and return the peak of each pass. ``updates_alone`` leaves out passes without gradients."""
    roles, found = settings.actor_rollout_ref, dict[str, int]()
    work = UpdateSize(rows=case.groups * case.group, prompt=case.prompt, response=case.response, group=case.group)
    batch = make_batch(work, roles.actor)

    def cut(budget: Any) -> list[list[int]]:
        (micros,) = cut_ranks([batch.row_tokens()], [[f"row {row}" for row in range(batch.num_rows)]], budget)[0:1]
        return [list(rows) for rows in micros]

    def call(phase: str, method: str, *args: Any) -> Any:
        reply = worker.call(phase, False, method, *args)
        found[phase] = reply.memory.peak_allocated_bytes
        return reply.value

    update, scoring, of_reference = map(cut, budgets(roles))
    counts = GlobalCounts(float(batch.responses.lengths.sum()), float(batch.num_rows))
    call("gen", "release_engine")
    zeros = torch.zeros(int(counts.tokens))
    batch = dataclasses.replace(batch, old_log_probs=zeros, ref_log_probs=zeros, places=torch.arange(len(zeros)))
    if has_teacher(settings):  # an update needs what its pass leaves
        call("teacher", "teacher_states", batch, cut(teacher_budget(settings)))
    if not updates_alone:
        call("old_log_prob", "old_log_probs", batch, scoring, False)
        if needs_reference(settings):
            call("ref", "ref_log_probs", batch, of_reference)
        if worker.role is not None:
            rows, rlt = student_rows(case), settings.reward_model.rlt
            micros = student_micro_batches(student_batch(rows).row_tokens(), rlt.max_tokens_per_micro_batch)
            call("reward", "call_role", Student.log_probs, rows, micros, 1.0)
    if worker.critic is not None:
        of_critic, of_values = map(cut, critic_budgets(settings.critic))
        valued = dataclasses.replace(batch, old_values=zeros, returns=zeros, old_log_probs=None, ref_log_probs=None)
        if not updates_alone:
            call("values", "values", valued, of_values)
        call("update_critic", "update_critic", [MiniBatch(valued, of_critic, counts)])
    call("update_actor", "update_actor", [MiniBatch(batch, update, counts)])
    del found["gen"]
    return found


def count(run: str, case: Case, other_shape: TinyShape) -> dict[str, Any]:
    """Return the counted peaks of a run's second step, and those of the formulas. Needs the fake device."""
    regions = dict[Any, float]()
    # Blocks are alike: two of them have all functions that are compiled.
    _step(run, *(dataclasses.replace(case, shape=_of_layers(case.shape, 2)), _of_layers(other_shape, 2)), regions)
    kept = {key: kept_by(*key) for key in regions}
    settings, counted = _step(run, case, other_shape, kept)
    assert kept.keys() == regions.keys(), "a deeper model compiles other functions"
    own = size_of(other_shape)
    foreseen = predict(settings, Sizes(size_of(case.shape), critic=own, student=own, teacher=own), tuple(counted), "cuda")
    return {"counted": counted, "foreseen": bare(foreseen.phases)}


def _of_layers(shape: TinyShape, layers: int) -> TinyShape:
    return dataclasses.replace(shape, num_layers=min(layers, shape.num_layers))


def bare(phases: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the bytes of tensors alone, without context and allocator reserve."""
    beside = ("context", "allocator", "engine")
    return {name: sum(size for kind, size in kinds.items() if kind not in beside) for name, kinds in phases.items()}


def _step(run: str, case: Case, other_shape: TinyShape, regions: dict[Any, float]) -> tuple[Settings, dict[str, int]]:
    """Return the settings of a worker, and the peaks of its second step, which begins with the optimizer's state."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_model_folder(case.shape, Path(parent) / "policy")
        other = make_model_folder(other_shape, Path(parent) / "other")
        settings = settings_of(run, case, folder, other)
        plan = plan_of(run, settings, folder, other)
        with fake_process_group(), CompiledGpu(regions, total_bytes=2**40) as gpu, recorded_calls(gpu.record):
            worker = Worker(plan, Placement(0, 1, 0, "127.0.0.1", 0, "cuda"))
            try:
                phases(worker, case, settings, updates_alone=True)
                return settings, phases(worker, case, settings, updates_alone=False)
            finally:
                worker.close()
