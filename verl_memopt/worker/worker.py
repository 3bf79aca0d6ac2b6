"""One worker process: its roles, and each call measured as a phase of the step."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl_memopt.agents.loop import AgentLoop, Conversation, LoopTimes, Task, build_loop
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import ActorRolloutRef, Distill
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.distributed.device import empty_cache, join_process_group, leave_process_group, local_device
from verl_memopt.distributed.file_records import Records
from verl_memopt.errors import ConfigError, RolloutError, Stopped
from verl_memopt.memory.critic_rules import CRITIC_PHASES
from verl_memopt.memory.fused import fused_statements, take_compile_counts
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.knob import Work
from verl_memopt.memory.lora_torch import as_reference, other_adapter, stored_adapters
from verl_memopt.memory.out_of_memory import MemorySnapshot, available_bytes, limit_bytes, memory_limits
from verl_memopt.memory.quantized_base import KEY as QUANTIZATION
from verl_memopt.memory.residency import Residency
from verl_memopt.memory.rollout_memory import CACHE
from verl_memopt.memory.shared_weights import KEY as SHARE_WEIGHTS
from verl_memopt.memory.shared_weights import ModelTraits, bytes_a_parameter, why_not
from verl_memopt.memory.token_budget_torch import oom_retry
from verl_memopt.model.families import STATE_LAYER, is_mxfp4, layer_types, num_experts
from verl_memopt.model.folder import load_tokenizer
from verl_memopt.model.packed_model import PolicyModel, dtype_of
from verl_memopt.model.packing_check import TEACHER_KEY, adapter_shape
from verl_memopt.model.value_model import ValueModel
from verl_memopt.model.weights import load_model_config, named_weights
from verl_memopt.observe.log_setup import is_set_up, setup_logging
from verl_memopt.observe.own_files import OWNER_ALONE
from verl_memopt.observe.phase import GIB, MIB, MemoryProbe, PhaseMemory
from verl_memopt.plan.advice import RunParts, out_of_memory_report
from verl_memopt.rollout.engine import (
    EnginePlace,
    FinishedRows,
    Generation,
    RolloutEngine,
    SamplingSettings,
    build_engine,
    ignore_row,
    max_model_len,
)
from verl_memopt.rollout.engine_weights import SyncCheck
from verl_memopt.run.interrupts import StopFile, never
from verl_memopt.worker.checkpoint import load_start, load_trained, save_model, save_trained, sent_weights
from verl_memopt.worker.group import Placement
from verl_memopt.worker.nodes import take_listener
from verl_memopt.worker.policy import (
    NO_STATISTICS,
    LogProbs,
    Policy,
    TrainedCritic,
    Updated,
    compute_log_probs,
    compute_scores,
)
from verl_memopt.worker.roles import FrozenRole, MovingReference, RoleBuilder, WorkerPlan, compiles_functions, make_deterministic
from verl_memopt.worker.teacher import Teacher, Teachers
from verl_memopt.worker.trained_model import MiniBatch, TrainedModel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def _built(role: Result | None) -> Result:
    assert role is not None, "the plan of this worker has no such role"
    return role


def import_ahead(engine: str, device: str) -> None:
    if engine == "vllm":
        from verl_memopt.rollout.vllm_engine import import_ahead as import_vllm

        import_vllm(device)


class Worker:
    """The roles of one device. The driver calls :meth:`call`. All members of a group get the same calls in the same order."""

    def __init__(self, plan: WorkerPlan, placement: Placement) -> None:
        if not is_set_up():
            setup_logging(placement.rank)
        if plan.private_files:  # Ray may have started this process without the umask of the run
            os.umask(OWNER_ALONE)
        self.plan = plan
        self.settings = plan.settings
        self.placement = placement
        self.device = local_device(placement.device, placement.local_rank)
        self.temperature = plan.settings.rollout.scoring_temperature
        actor = plan.settings.actor
        make_deterministic(actor.fsdp_config, placement.rank)
        self.device_limit = limit_bytes(plan.memory.device_limit_gb)
        self.probe = MemoryProbe(self.device, self._resident, self.device_limit, plan.kinds_on_gpu)
        self.residency = Residency(self.device)
        folder = plan.snapshot_folder
        self.snapshot = None if folder is None else MemorySnapshot(Path(folder), placement.rank, self.device, self._resident)
        self.engine: RolloutEngine | None = None
        self.shares_weights = False
        self.sync_check = SyncCheck(max_model_len(plan.settings.rollout)) if plan.sync_check else None
        self.policy: Policy | None = None
        self.reference: PolicyModel | None = None
        self.moving_reference: MovingReference | None = None
        self.critic: TrainedCritic | None = None
        self.reward_model: ValueModel | None = None
        self.further_reward_models: list[ValueModel] = []
        self.role: FrozenRole | None = None
        self.teachers: Teachers | None = None
        self.limits = ExitStack()
        try:
            self.limits.enter_context(memory_limits(plan.memory, self.device))
            self.limits.enter_context(
                fused_statements(compiles_functions(actor.use_torch_compile, actor.fsdp_config, self.device))
            )
            counted = plan.track_init and self._counts_engine
            with self._report_out_of_memory("init"), self.probe.phase("init", counted, kind="built") as report:
                self._build()
        except BaseException:
            # A half-built worker holds an engine and limits of the process, and nobody else has a reference to close it.
            self.close()
            raise
        self.init_memory = dataclasses.replace(report(), **take_compile_counts())

    def call(self, phase: str, track: bool, method: str, *args: Any) -> Reply:
        """Run one method as a phase of the step, and measure its memory.

        After an out-of-memory error the method continues with smaller micro-batches if the plan allows it. With ``track`` live
        bytes are counted on a CPU too.
        """
        counted = track and (method != "generate" or self._counts_engine)
        sharing = self._sequence_ranks(phase)
        may_go_on = phase in self.plan.adaptive_phases and sharing == 1
        with (
            self._report_out_of_memory(phase, work_of(args, self.settings.rollout.max_num_seqs, sharing)),
            self.residency.phase(phase),
            self.probe.phase(phase, counted) as report,
            oom_retry(self.device, may_go_on) as recut,
        ):
            # Each phase measures its own peak of host buffers, and of device bytes.
            host_allocator().reset_peak()
            value = getattr(self, method)(*args)
        memory = dataclasses.replace(report(), host_buffer_bytes=host_allocator().peak_bytes, **take_compile_counts())
        # Other processes may have changed the free memory, so the reply has the budget for the next call.
        return Reply(value, memory, available_bytes(self.device, self.device_limit), recut.cap, recut.retries)

    def started(self) -> PhaseMemory:
        return self.init_memory

    # The methods a phase can run.

    def generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: SamplingSettings,
        may_stop: bool = False,
        finished: str | None = None,
    ) -> Generation | None:
        """Return one response per prompt, or None if the rollout was abandoned.

        Args:
            prompt_ids: As in :meth:`RolloutEngine.generate`.
            seeds: As in :meth:`RolloutEngine.generate`.
            sampling: As in :meth:`RolloutEngine.generate`.
            may_stop: Abandon the rollout if the run must stop.
            finished: File to which each row is written once it is complete, as in :class:`FinishedRows`. None = no file.
        """
        assert self.engine is not None
        # Allocate the KV cache only now, because until now the trainer used this memory.
        self.wake_engine()
        if self.sync_check is not None:
            self.sync_check.check_cache(self.engine)
        stoppable = may_stop and self.plan.stop_file is not None
        # The driver writes the file to stop the rollout. The engine looks for the file between its steps.
        stopped = StopFile(Path(str(self.plan.stop_file))).passed if stoppable else never
        try:
            report = ignore_row if finished is None else FinishedRows(Path(finished)).write
            return self.engine.generate(prompt_ids, seeds, sampling, stopped, report)
        except Stopped:
            return None

    def converse(
        self, tasks: Sequence[Task], sampling: SamplingSettings, may_stop: bool = False
    ) -> tuple[list[Conversation], LoopTimes] | None:
        """Return the conversation that each task begins, or None if the rollout was abandoned.

        All ranks of an engine get the same tasks, and the first of them runs the tools. The others return nothing.
        """
        engine = _built(self.engine)
        self.wake_engine()
        if self.sync_check is not None:
            self.sync_check.check_cache(engine)
        stoppable = may_stop and self.plan.stop_file is not None
        stopped = StopFile(Path(str(self.plan.stop_file))).passed if stoppable else never
        try:
            with engine.serving(stopped) as requests:
                if not requests.leads:
                    requests.follow()
                    return [], LoopTimes(0.0, 0.0, 0)
                return self.agent_loop.run(tasks, requests, sampling)
        except Stopped:
            return None

    @cached_property
    def agent_loop(self) -> AgentLoop:
        """The agent loop, with the processes of its tools, which stay until the worker closes."""
        plan, model = self.plan, self.settings.model
        assert plan.agent is not None, "the plan of this worker has no conversations"
        tokenizer = load_tokenizer(Path(plan.tokenizer_folder), model, plan.agent.trust_remote_code)
        return build_loop(self.settings.rollout, plan.agent, tokenizer, plan.eos_token_ids, f"rank {self.placement.rank}")

    def wake_engine(self) -> None:
        if self.plan.free_engine:
            # Only an engine that sleeps between rollouts has freed its cache.
            _built(self.engine).wake_up("kv_cache")

    def release_engine(self) -> None:
        if self.plan.free_engine and self.engine is not None:
            self.engine.sleep()
            empty_cache(self.device)

    def update_weights(self) -> None:
        assert self.engine is not None
        assert self.policy is not None
        rollout = self.settings.rollout
        if self.plan.free_engine:
            # The engine allocates from the CUDA driver, so return the trainer's unused blocks to it first.
            empty_cache(self.device)
            self.engine.wake_up("weights")
        # Start these copies only now: returning memory to the CUDA driver would have waited for them.
        self.residency.copy_out()
        dtype = dtype_of(rollout.dtype, "actor_rollout_ref.rollout.dtype")
        if self.shares_weights:
            with self.policy.model.computing():  # whole weights, with the rows of all ranks
                self.engine.weights_changed(dict(named_weights(self.policy.model)), stored_adapters(self.policy.model))
        else:
            # Bucket by bucket, so that no second copy of the model exists.
            self.engine.load_weights(sent_weights(self.policy.model, rollout, dtype))
        if self.sync_check is not None:
            merged = not self.shares_weights  # an engine that shares the base model gets the adapters separately
            self.sync_check.check_weights(self.engine, sent_weights(self.policy.model, rollout, dtype, merged))

    def old_log_probs(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[Sequence[int]],
        with_entropy: bool,
        statistics: Mapping[str, str] = NO_STATISTICS,
    ) -> LogProbs:
        model = _built(self.policy).model
        return compute_log_probs(model, batch, micro_batches, self.temperature, with_entropy, self.device, statistics)

    def ref_log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float | None = None
    ) -> LogProbs:
        """Return log-probs under the reference, which is a model of its own, or the policy with other adapters.

        With LoRA and no model of its own, the reference is the policy with its starting adapters or without adapters.
        ``temperature`` divides the logits. None = the temperature of the rollouts.
        """
        # Rollouts and all log-probs use the same temperature, unless a recipe gives another one.
        used = self.temperature if temperature is None else temperature
        if self.reference is None:
            with self._as_reference():
                return self.policy_log_probs(batch, micro_batches, used)
        return compute_log_probs(self.reference, batch, micro_batches, used, False, self.device)

    def policy_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], temperature: float) -> LogProbs:
        return _built(self.policy).compute_log_probs(batch, micro_batches, temperature, False)

    def teacher_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], number: int = 0) -> LogProbs:
        """Return log-probs under one of the teachers: 0 = the first one, 1, 2, ... = the further ones in their order."""
        teacher = _built(self.teachers).all[number]
        with teacher.as_teacher():
            return compute_log_probs(teacher.model, batch, micro_batches, self.temperature, False, self.device)

    def teacher_states(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], number: int = 0) -> None:
        """Compute what the next update reads of one of the teachers, for all response tokens of ``batch``."""
        _built(self.teachers).all[number].compute(batch, micro_batches)

    def teacher_top(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], number: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the most probable tokens of one of the teachers, as :meth:`Teacher.top` does."""
        return _built(self.teachers).all[number].top(batch, micro_batches)

    def call_role(self, method: Callable[..., Result], *args: Any) -> Result:
        # This runs in the phase ``reward``, in which the role's model is on the device.
        return method(self.role, *args)

    def sync_reference(self) -> None:
        _built(self.moving_reference).follow(self.settings.ref.sync_mixup_alpha)

    def update_actor(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        with self._taught(len(mini_batches)):
            return _built(self.policy).update(mini_batches, self.temperature)

    def update_on_policy(self, mini: MiniBatch) -> Updated:
        with self._taught(1):
            return _built(self.policy).update_on_policy(mini, self.temperature)

    def _taught(self, steps: int) -> AbstractContextManager[None]:
        return nullcontext() if self.teachers is None else self.teachers.in_update(steps)

    def use_loss(self, changes: Mapping[str, Any]) -> None:
        policy = _built(self.policy)
        policy.actor = replaced(policy.actor, changes)

    def add_gradient(self, mini: MiniBatch) -> Updated:
        with self._taught(1):
            return _built(self.policy).add_gradient(mini, self.temperature)

    def take_step(self, learning_rate: float | None) -> dict[str, float]:
        trained = _built(self.policy).trained
        # This is the only step of its rollout, so a schedule that counts rollouts advances too.
        return trained.conclude([trained.take_step({}, learning_rate)], ends_rollout=True)[0]

    def values(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        return _built(self.critic).values(batch, micro_batches)

    def reward_scores(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], place: int = 0) -> torch.Tensor:
        """Return the scores of one of the reward models, as :func:`compute_scores` does. It runs in the phase ``reward``.

        ``place`` is 0 for the reward model itself, and 1, 2, ... for the further reward models in their order.
        """
        model = (_built(self.reward_model), *self.further_reward_models)[place]
        return compute_scores(model, batch, micro_batches, self.device)

    def update_critic(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        return _built(self.critic).update(mini_batches)

    def update_bypass(self, mini_batches: Sequence[MiniBatch]) -> list[Updated]:
        # The engine's log-probs serve as old log-probs. The policy's log-probs, which the metrics need, come from each step.
        policy, last = _built(self.policy), len(mini_batches) - 1
        with self._taught(len(mini_batches)):
            return [policy.update_on_policy(mini, self.temperature, place == last) for place, mini in enumerate(mini_batches)]

    # Checkpoints and exported models.

    def save(self, folder: str, contents: Sequence[str]) -> Records:
        policy = _built(self.policy)
        return save_trained(policy.trained, self.plan, self.placement.rank, Path(folder), contents, policy.start)

    def save_critic(self, folder: str, contents: Sequence[str]) -> Records:
        return save_trained(_built(self.critic).trained, self.plan, self.placement.rank, Path(folder), contents)

    def save_model(self, folder: str) -> None:
        save_model(_built(self.policy).trained, self.plan, self.placement.rank, Path(folder))

    def load(self, folder: str, contents: Sequence[str]) -> None:
        policy = _built(self.policy)
        load_trained(policy.trained, Path(folder), contents)
        if self.settings.model.lora_rank > 0:
            policy.start = load_start(Path(folder), policy.model, self.device)

    def load_critic(self, folder: str, contents: Sequence[str]) -> None:
        # In the phase ``load_checkpoint`` the policy is on the device. The phase ``load_critic`` replaces it by the critic.
        with self.residency.phase("load_critic"):
            load_trained(_built(self.critic).trained, Path(folder), contents)

    def save_reference(self, folder: str, contents: Sequence[str]) -> Records:
        return _built(self.moving_reference).save(Path(folder))

    def load_reference(self, folder: str, contents: Sequence[str]) -> None:
        # In this phase the reference is on the device. In ``load_checkpoint`` it is not.
        with self.residency.phase("sync_ref"):
            _built(self.moving_reference).load(Path(folder))

    def close(self) -> None:
        if "agent_loop" in vars(self):
            self.agent_loop.close()
        # Free the models first: the engine must wake up before its shutdown, and needs their memory.
        self._free_models()
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.shutdown()
        finally:
            self.limits.close()
            leave_process_group()
            # Models and their hooks refer to each other and to the sockets of the process group. Without this they would still
            # exist when this process starts the next run.
            gc.collect()

    def _free_models(self) -> None:
        for trained in self._trained():
            if trained.offload is not None:
                trained.offload.close()
        self.policy = self.reference = self.moving_reference = self.critic = self.reward_model = self.role = self.teachers = None
        self.further_reward_models = []
        self.residency = Residency(self.device)

    # Building.

    def _build(self) -> None:
        # Build the engine first: it measures the free memory, then sleeps and leaves the device to the trainer.
        place, settings, shared = self.placement, self.settings, None
        seconds, listener = settings.nccl_timeout, take_listener(place.master_port)
        join_process_group(self.device, place.rank, place.world_size, place.master_addr, place.master_port, seconds, listener)
        if self.plan.engine_folder is not None:
            engine_place = self._engine_place(self.plan.engine_folder)
            self.engine = build_engine(settings.rollout, engine_place)
            shared = shared_weights(self.engine, settings, place.world_size, self._unshared, engine_place.quantization)
            self.shares_weights = shared is not None
            self.release_engine()
        roles = RoleBuilder(self.plan, place, self.device, self.residency, shared)
        if self.plan.has_policy:
            self.policy = Policy.built(roles)
            if settings.model.lora_rank == 0:
                parameters = sum(parameter.numel() for parameter in self.policy.model.parameters())
                phases = bytes_a_parameter(settings, place.world_size, self.shares_weights, self.plan.free_engine)
                logger.info("%s", resident_words(parameters, phases))
        # Move each model to its place of rest before building the next one, so that two need not fit on the device at once.
        self.residency.rest()
        if self.plan.reference_folder is not None:
            self.reference = roles.reference(Path(self.plan.reference_folder))
            if self.settings.ref.sync_every_steps is not None:
                self.moving_reference = roles.moving_reference(self.reference, _built(self.policy).trained)
            self.residency.rest()
        if self.plan.distill is not None:
            self.teachers = self._build_teachers(roles, self.plan.distill)
        if self.plan.critic is not None:
            self.critic = TrainedCritic.built(roles, self.plan.critic, Path(str(self.plan.critic_folder)))
            self.residency.rest()
        if self.plan.reward_model is not None:
            self.reward_model = roles.reward_model(Path(str(self.plan.reward_folder)))
            self.residency.rest()
            for folder in self.plan.further_reward_folders or ():
                self.further_reward_models.append(roles.reward_model(Path(folder)))
                self.residency.rest()
        if self.plan.role is not None:
            self.role = self.plan.role.build(roles, _built(self.policy).model, self.reference)
            self.residency.rest()

    def _build_teachers(self, roles: RoleBuilder, distill: Distill) -> Teachers:
        policy, models = self.policy, list[PolicyModel]()
        as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext
        for folder in self.plan.teacher_folders:
            models.append(roles.teacher(Path(folder)))
            self.residency.rest()
        if self.plan.reference_teaches and self.reference is not None:
            models = [self.reference]
        elif not models:
            # A teacher elsewhere has no model here. Only the policy's number of ids is read then.
            models, adapter = [_built(policy).model], self.plan.teacher_adapter
            if adapter is not None:
                scale = dataclasses.replace(self.settings.model, **adapter_shape(adapter)).lora_scale
                place, key = Path(adapter).expanduser(), f"{TEACHER_KEY}.model.lora_adapter_path"
                other = other_adapter(place, models[0], models[0].compute, scale, key)
                as_teacher = partial(as_reference, models[0], other, self.device)
            elif self.plan.reference_teaches:
                as_teacher = self._as_reference
        vocabulary = self.plan.vocabulary or _built(policy).model.head.weight.shape[0]
        teachers = Teachers([Teacher(model, distill, self.temperature, self.device, vocabulary, as_teacher) for model in models])
        if policy is not None and teachers.are_exact:
            assert distill.coef is not None, "derived from the estimator"
            policy.distill_coef, policy.teaching = distill.coef, teachers.of
        return teachers

    def _as_reference(self) -> AbstractContextManager[None]:
        # With LoRA the reference is the policy with its starting adapters or without adapters.
        policy = _built(self.policy)
        return as_reference(policy.model, policy.start if self.settings.ref.adapter == "start" else None, self.device)

    @cached_property
    def _unshared(self) -> str | None:
        # Why engine and policy have a copy of the weights each, as far as the settings and the model's config say.
        assert self.plan.engine_folder is not None
        config = load_model_config(self.settings.model, Path(self.plan.engine_folder))
        states = STATE_LAYER in layer_types(config.get_text_config())
        traits = ModelTraits(num_experts(config) > 1, states, is_mxfp4(config))
        reason = why_not(self.settings, self.placement.world_size, self.plan.free_engine, traits)
        if reason is not None and self.settings.rollout.share_weights is True:
            raise _cannot_share(reason)
        return reason

    def _engine_place(self, folder: str) -> EnginePlace:
        place, plan, model, beside = self.placement, self.plan, self.settings.model, self.plan.beside_cache_bytes
        shares = self._unshared is None
        return EnginePlace(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            tensor_parallel_size=self.settings.rollout.tensor_model_parallel_size,
            device=self.device,
            model_folder=folder,
            tokenizer_folder=plan.tokenizer_folder,
            trust_remote_code=model.trust_remote_code,
            eos_token_ids=plan.eos_token_ids,
            known_ids=plan.known_ids,
            device_limit_bytes=self.device_limit,
            lora_rank=model.lora_rank if shares else 0,
            lora_scale=model.lora_scale,
            adapts_experts=shares and bool(model.target_parameters),
            quantization=model.quantization if shares else "none",
            records_routes=self.settings.actor.router_replay.mode == "R3",
            cache_bytes=None if beside is None else left_for_cache(self.device, self.device_limit, beside),
        )

    def _trained(self) -> list[TrainedModel]:
        return [role.trained for role in (self.policy, self.critic) if role is not None]

    def _frozen(self) -> list[torch.nn.Module]:
        role = None if self.role is None else self.role.model
        # A recipe may use the model of another role. Report each model only once.
        if role is self.reference or (self.policy is not None and role is self.policy.model):
            role = None
        teachers = self.teachers.all if self.teachers is not None and self.plan.teacher_folders else []
        others = (teacher.model for teacher in teachers)
        models = (self.reference, *others, self.reward_model, *self.further_reward_models, role)
        return [model for model in models if model is not None]

    @contextmanager
    def _report_out_of_memory(self, phase: str, work: Work | None = None) -> Iterator[None]:
        snapshot = nullcontext() if self.snapshot is None else self.snapshot.on_out_of_memory(phase)
        has_reference = self.plan.reference_folder is not None
        place, has_policy = self.placement, self.plan.has_policy
        parts = RunParts(
            self.settings, self.plan.critic, has_reference, self.plan.rewards, place.world_size, place.rank, has_policy
        )
        with out_of_memory_report(phase, self.device, self._resident, parts, self.device_limit, work), snapshot:
            yield

    def _sequence_ranks(self, phase: str) -> int:
        own = {
            "ref": self.reference,
            **dict.fromkeys(("teacher", "teacher_log_probs"), None if self.teachers is None else self.teachers.all[0].model),
            # Phases that are not named here use the policy.
            "reward": self.reward_model if self.role is None else self.role.model,
            **dict.fromkeys(CRITIC_PHASES, None if self.critic is None else self.critic.model),
        }.get(phase)
        model = own or (None if self.policy is None else self.policy.model)
        return 1 if model is None or model.sequence is None else model.sequence.size

    @property
    def _counts_engine(self) -> bool:
        # Functions that are first called while bytes are counted are never compiled, so only an eager engine is counted.
        return self.settings.rollout.name == "hf" or self.settings.rollout.enforce_eager

    def _resident(self) -> Iterator[tuple[str, torch.Tensor]]:
        for trained in self._trained():
            yield from trained.resident_tensors()
        for frozen in self._frozen():
            yield from (("params", parameter) for parameter in frozen.parameters())
        if self.engine is not None:
            yield from self.engine.resident_tensors()


def work_of(arguments: Sequence[Any], sequences_at_once: int, sequence_ranks: int = 1) -> Work | None:
    """Return the size of a call's work, for advice after an out-of-memory error. None if the arguments do not show it.

    The arguments that show it are mini-batches, or a batch and its micro-batches, or prompts and their seeds. Tokens are counted
    per rank. Each micro-batch is shared by ``sequence_ranks`` ranks.
    """
    # The first argument of ``call_role`` is a method.
    first, second = (*(argument for argument in arguments if not callable(argument)), None, None)[:2]
    minis = [first] if isinstance(first, MiniBatch) else first if isinstance(first, list) else []
    if minis and all(isinstance(mini, MiniBatch) for mini in minis):
        cut = [(mini.batch, mini.micro_batches) for mini in minis]
    elif isinstance(second, Sequence) and hasattr(first, "row_tokens"):
        cut = [(first, second)]
    elif minis and isinstance(second, list):
        return Work(min(len(minis), sequences_at_once))
    else:
        return None
    found = [
        (len(rows), tokens.cost(rows), max(lengths[row] for row in rows), sum(sizes[row] for row in rows))
        for batch, cuts in cut
        for tokens, sizes in [(batch.row_tokens(), batch.responses.sizes())]
        for lengths in [tokens.row_lengths()]
        for rows in cuts
        if rows
    ]
    if not found:
        return None
    rows, *tokens = map(max, zip(*found, strict=True))
    return Work(rows, *(-(-count // sequence_ranks) for count in tokens))


def left_for_cache(device: torch.device, limit: int | None, beside: int) -> int:
    """Return and log the bytes that are left for the KV cache.

    ``beside`` is the number of bytes that all other data on the device will need. ``limit`` is the number of bytes that the
    process may use on the device; None = no limit.

    Raises:
        ConfigError: Nothing is left.
    """
    free = available_bytes(device, limit)
    assert free is not None, "the driver refuses a device of unknown size"
    if free <= beside:
        raise ConfigError(
            f"{CACHE}=auto: {free / GIB:.2f} GiB of the device are free, and {beside / GIB:.2f} may be needed for other data, so "
            "nothing is left for the cache. Save memory (verl-memopt fit shows how), or set the key to a size in GiB."
        )
    sizes = free / GIB, beside / GIB, (free - beside) / GIB
    logger.info("%.2f GiB of the device are free. Other data needs up to %.2f GiB, and the KV cache gets %.2f GiB", *sizes)
    return free - beside


def shared_weights(
    engine: RolloutEngine, settings: ActorRolloutRef, devices: int, reason: str | None, quantization: str = "none"
) -> dict[str, torch.Tensor] | None:
    """Return the engine's weights, with which the policy computes. None = engine and policy have a copy each. Log which and why.

    ``reason`` is what :func:`~verl_memopt.memory.shared_weights.why_not` returned. ``quantization`` is that of the engine's own
    weights.

    Raises:
        ConfigError: The weights cannot be shared, but ``rollout.share_weights=true`` or a quantised base needs it.
    """
    weights, refused = None, False
    if reason is None:
        try:
            weights = engine.share_weights()
        except RolloutError as error:
            # An engine of quantised weights is empty, and only a policy that shares them fills them. On several devices FSDP2
            # would shard the bytes of the policy's own base.
            reason = f"{error}."
            refused = quantization != "none" or (devices > 1 and settings.model.quantization != "none")
    if weights is None and settings.rollout.share_weights is True:
        raise _cannot_share(reason)
    if weights is None and refused:
        raise ConfigError(
            f"{QUANTIZATION}={settings.model.quantization}: the engine cannot share the quantised base: {reason} Set "
            f"{SHARE_WEIGHTS}=false, so that the engine has its own unquantised weights (on one device), or {QUANTIZATION}=none."
        )
    if weights is None:
        logger.info("engine and policy have a copy of the weights each: %s", reason)
    else:
        num_bytes = sum(weight.numel() * weight.itemsize for weight in weights.values())
        trained = "weights" if settings.model.lora_rank == 0 else "adapters"
        over = "" if devices == 1 else f" on each of {devices} devices, each of which updates its shard of the {trained}"
        logger.info("engine and policy share one copy of the weights, %.1f MiB%s", num_bytes / MIB, over)
    return weights


def _cannot_share(reason: str | None) -> ConfigError:
    return ConfigError(f"{SHARE_WEIGHTS}=true: {reason} Set {SHARE_WEIGHTS}=auto to run with two copies.")


def resident_words(parameters: int, phases: Mapping[str, tuple[float, float]]) -> str:
    """Describe the memory of the training state.

    ``phases`` maps the name of a phase to a pair: bytes per parameter on the devices, and on the host.
    """

    def taken(num_bytes: float, where: str) -> str:
        size = num_bytes * parameters
        shown = f"{size / GIB:,.3g} GiB" if size >= GIB else f"{size / MIB:,.3g} MiB"
        return f"{shown} of {where} memory ({num_bytes:.4g} bytes per parameter)"

    said = []
    for phase, (device, host) in phases.items():
        places = [taken(device, "device"), *([taken(host, "host")] if host else [])]
        said.append(f"{' and '.join(places)} in the {phase}")
    return f"weights, gradients and optimizer state take {', '.join(said)}"


# The answer of a worker to a call.


@dataclass(frozen=True)
class Reply:
    """The result of a call and its memory.

    ``budget_bytes`` is the number of bytes that the process may use on its device; None = no limit. ``retries`` counts the
    out-of-memory errors that the call survived. ``cap_after_error`` is the largest number of tokens in a micro-batch after the
    last of them; None = there was none.
    """

    value: Any
    memory: PhaseMemory
    budget_bytes: int | None = None
    cap_after_error: int | None = None
    retries: int = 0
