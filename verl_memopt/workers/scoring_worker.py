"""A worker that only scores explanations: the frozen student of RLT and, where the reward reads it, a frozen teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_memopt.config.schema import Actor, Fsdp, Model, RltReward, ScoringModel
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.distributed.device import local_device
from verl_memopt.distributed.process_group import join_process_group, leave_process_group, training_mesh
from verl_memopt.knobs.precision import Precision
from verl_memopt.models.packing_check import check_packing
from verl_memopt.models.policy_model import PolicyModel, dtype_of
from verl_memopt.observe.phase import MemoryProbe, PhaseMemory
from verl_memopt.rewards.rlt.student_rows import StudentRows
from verl_memopt.workers.build_policy import build_policy, materialize
from verl_memopt.workers.group import Placement
from verl_memopt.workers.log_probs import LogProbs, compute_log_probs
from verl_memopt.workers.plan import StudentPlan
from verl_memopt.workers.student import Scored, Student
from verl_memopt.workers.worker import Reply

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class ScoringPlan:
    """What a scoring worker builds.

    Attributes:
        student: Folder of the student's model.
        teacher: Folder of the teacher's model; None where the reward does not read it.
        rlt: Settings of the reward.
        dtype: Of weights and arithmetic: ``fp32`` or ``bfloat16``.
        temperature: Divides the student's logits.
        trust_remote_code: The folders may run their own code.
    """

    student: str
    teacher: str | None
    rlt: RltReward
    dtype: Precision
    temperature: float
    trust_remote_code: bool


class ScoringWorker:
    """Holds the models of a scoring command on one device.

    Args:
        plan: What to build.
        placement: The worker's place in its group.
    """

    def __init__(self, plan: ScoringPlan, placement: Placement) -> None:
        """Build the models."""
        self.plan = plan
        self.device = local_device(placement.device, placement.local_rank)
        self._models: list[PolicyModel] = []
        self.probe = MemoryProbe(self.device, self._resident)
        join_process_group(
            self.device, placement.rank, placement.world_size, placement.master_addr, placement.master_port, TIMEOUT_SECONDS
        )
        with self.probe.phase("init", False) as report:
            student = self._build(plan.student, "--student")
            scores = StudentPlan(ScoringModel(path=plan.student), plan.rlt, "separate", plan.student, shares_prompts=True)
            self.student = Student(student, scores, self.device)
            self.teacher = None if plan.teacher is None else self._build(plan.teacher, "--teacher")
        self._init = report()

    def started(self) -> PhaseMemory:
        """Return the memory of the start."""
        return self._init

    def call(self, phase: str, track: bool, method: str, *args: Any) -> Reply:
        """Run one method as a phase. As :meth:`verl_memopt.workers.worker.Worker.call`."""
        with self.probe.phase(phase, track) as report:
            value = getattr(self, method)(*args)
        return Reply(value, report())

    def student_log_probs(self, rows: StudentRows, micro_batches: Sequence[Sequence[int]]) -> Scored:
        """Return the student's log-probs. As :meth:`verl_memopt.workers.student.Student.log_probs`."""
        return self.student.log_probs(rows, micro_batches, self.plan.temperature)

    def policy_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float) -> LogProbs:
        """Return the log-probs of a batch under the teacher."""
        assert self.teacher is not None
        return compute_log_probs(self.teacher, batch, micro_batches, temperature, False, self.device)

    ref_log_probs = policy_log_probs
    """``kl_teacher=reference`` reads the same model: a scoring command has one teacher."""

    def close(self) -> None:
        """Free the models and leave the process group."""
        self._models = []
        del self.student, self.teacher
        leave_process_group()

    def _build(self, folder: str, key: str) -> PolicyModel:
        model = Model(path=folder, trust_remote_code=self.plan.trust_remote_code, enable_gradient_checkpointing=False)
        fsdp = Fsdp(model_dtype=self.plan.dtype, dtype=self.plan.dtype)
        mesh = training_mesh(self.device.type, 1, -1)
        built = build_policy(model, fsdp, Path(folder), mesh, self.device, key, False, False)
        built.requires_grad_(False)
        materialize(built, Path(folder), self.device)
        check_packing(built, self.device, dtype_of(self.plan.dtype, "--dtype"), Actor(), folder, key)
        self._models.append(built)
        return built

    def _resident(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model in self._models:
            yield from (("params", parameter) for parameter in model.parameters())
