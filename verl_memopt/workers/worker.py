"""One worker process: its roles, and each call measured as a phase of the step."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from verl_memopt.config.schema import Fsdp
from verl_memopt.data.batch import RolloutBatch
from verl_memopt.distributed.device import empty_cache, is_gpu, local_device
from verl_memopt.distributed.file_records import Records, record_folder
from verl_memopt.distributed.process_group import join_process_group, leave_process_group, training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.errors import CheckpointError, Stopped
from verl_memopt.memory.activations.activation_offload import ActivationOffload
from verl_memopt.memory.host.host_buffers import host_allocator
from verl_memopt.memory.limits.allocators import limit_bytes, memory_limits
from verl_memopt.memory.limits.out_of_memory import out_of_memory_told
from verl_memopt.memory.parameters.lora import adapters_off, initialize_adapters, load_adapter, merged_weights, save_adapter
from verl_memopt.memory.parameters.param_offload import ParamHome
from verl_memopt.memory.parameters.residency import POLICY, REFERENCE, Residency
from verl_memopt.memory.rollout.weight_buckets import weight_slices
from verl_memopt.models.attention import refuse_sliding_window
from verl_memopt.models.build import named_weights
from verl_memopt.models.export import export_folder
from verl_memopt.models.packing_check import check_packing
from verl_memopt.models.policy_model import PolicyModel, dtype_of
from verl_memopt.observe.log_setup import is_set_up, setup_logging
from verl_memopt.observe.phase import MemoryProbe, PhaseMemory
from verl_memopt.ops.fused import compiler_works, fused_statements
from verl_memopt.rollout.engine import EnginePlace, Generation, RolloutEngine, build_engine
from verl_memopt.rollout.sampling import SamplingSettings
from verl_memopt.rollout.stop_file import StopFile, never
from verl_memopt.sync.full_weights import full_weights
from verl_memopt.workers import scorer
from verl_memopt.workers.group import Placement
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.policy import MiniBatch, Policy, Updated
from verl_memopt.workers.scorer import LogProbs

logger = logging.getLogger(__name__)

ENGINE_METHODS = ("generate",)
"""Methods that run the engine's own model."""


@dataclass(frozen=True)
class Reply:
    """The result of a call and its memory."""

    value: Any
    memory: PhaseMemory


class Worker:
    """The roles of one device. The driver calls :meth:`call`. All members of a group make the same calls in step.

    Args:
        plan: What to build.
        placement: The worker's place in its group.
    """

    def __init__(self, plan: WorkerPlan, placement: Placement) -> None:
        """Build the engine, the policy and the reference."""
        if not is_set_up():
            setup_logging(placement.rank)
        self.plan = plan
        self.settings = plan.settings
        self.place = placement
        self.device = local_device(placement.device, placement.local_rank)
        self._make_deterministic(plan.settings.actor.fsdp_config)
        self.device_limit = limit_bytes(plan.memory.device_limit_gb)
        self.probe = MemoryProbe(self.device, self._resident, self.device_limit, plan.kinds_on_gpu)
        self.residency = Residency(self.device)
        self.policy_home: ParamHome | None = None
        self.engine: RolloutEngine | None = None
        self.policy: Policy | None = None
        self.reference: PolicyModel | None = None
        self.limits = ExitStack()
        actor = plan.settings.actor
        try:
            self.limits.enter_context(memory_limits(plan.memory, self.device))
            self.limits.enter_context(fused_statements(self._compiles(actor.use_torch_compile, actor.fsdp_config)))
            counted = plan.track_init and self._counts_engine
            with self._report_out_of_memory("init"), self.probe.phase("init", counted, kind="built") as report:
                self._build()
        except BaseException:
            self.close()
            raise
        self.init_memory = report()

    def call(self, phase: str, track: bool, method: str, *args: Any) -> Reply:
        """Run one method as a phase and return its result with the memory of the phase.

        Args:
            phase: Name of the phase.
            track: Count live bytes on a CPU.
            method: Name of the method.
            *args: Its arguments.
        """
        counted = track and (method not in ENGINE_METHODS or self._counts_engine)
        with self._report_out_of_memory(phase), self.residency.phase(phase), self.probe.phase(phase, counted) as report:
            host_allocator().reset_peak()
            value = getattr(self, method)(*args)
        return Reply(value, dataclasses.replace(report(), host_buffer_bytes=host_allocator().peak_bytes))

    def started(self) -> PhaseMemory:
        """Return the memory of the start."""
        return self.init_memory

    # The methods a phase can run.

    def generate(
        self, prompt_ids: list[list[int]], seeds: list[int], sampling: SamplingSettings, may_stop: bool = False
    ) -> Generation | None:
        """Return one response per prompt, under the weights of the last sync.

        Args:
            prompt_ids: Token ids of each row.
            seeds: One seed per row.
            sampling: How tokens are drawn.
            may_stop: The rollout may be abandoned when the run is asked to stop.

        Returns:
            The responses, or None if the rollout was abandoned.
        """
        assert self.engine is not None
        if self.plan.free_engine:
            self.engine.wake_up("kv_cache")
        stoppable = may_stop and self.plan.stop_file is not None
        stopped = StopFile(Path(str(self.plan.stop_file))).passed if stoppable else never
        try:
            return self.engine.generate(prompt_ids, seeds, sampling, stopped)
        except Stopped:
            return None

    def release_engine(self) -> None:
        """Put the engine to sleep, if it can sleep, so that it returns its device memory."""
        if self.plan.free_engine and self.engine is not None:
            self.engine.sleep()
            empty_cache(self.device)

    def update_weights(self) -> None:
        """Copy the policy's weights into the engine, bucket by bucket."""
        assert self.engine is not None
        assert self.policy is not None
        rollout = self.settings.rollout
        if self.plan.free_engine:
            empty_cache(self.device)
            self.engine.wake_up("weights")
        dtype = dtype_of(rollout.dtype, "actor_rollout_ref.rollout.dtype")
        bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes
        self.engine.load_weights(weight_slices(self._policy_weights(), dtype, bucket))

    def old_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], with_entropy: bool) -> LogProbs:
        """Return the log-probs of a batch under the policy."""
        assert self.policy is not None
        return self.policy.compute_log_probs(batch, micro_batches, self._temperature, with_entropy)

    def ref_log_probs(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> LogProbs:
        """Return the log-probs of a batch under the reference.

        The reference is a model of its own, or with LoRA the policy without its adapters.
        """
        if self.reference is None:
            assert self.policy is not None
            with adapters_off(self.policy.model):
                return self.policy.compute_log_probs(batch, micro_batches, self._temperature, False)
        shared = self.settings.actor.use_prefix_grouper
        return scorer.compute_log_probs(self.reference, batch, micro_batches, self._temperature, False, self.device, shared)

    def update_actor(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return the mean of their metrics."""
        assert self.policy is not None
        return self.policy.update(mini_batches, self._temperature)

    def update_on_policy(self, mini: MiniBatch) -> Updated:
        """Take one optimizer step whose own forward computes the old log-probs."""
        assert self.policy is not None
        return self.policy.update_on_policy(mini, self._temperature)

    def save(self, folder: str, contents: Sequence[str]) -> Records:
        """Write this rank's part of a checkpoint into ``folder``; with hf_model also a Hugging Face folder.

        Parameters that are on the host are written from there. Every file is forced to disk.

        Returns:
            The record of each file that this rank wrote, relative to ``folder``.

        Raises:
            CheckpointError: The disk refuses. The message names the folder.
        """
        with ExitStack() as stack:
            if self.policy_home is not None:
                stack.enter_context(self.policy_home.readable())
            return self._save(Path(folder), contents)

    def _save(self, folder: Path, contents: Sequence[str]) -> Records:
        assert self.policy is not None
        records = save_training_state(
            folder, self.policy.model, self.policy.optimizer, self.policy.schedule, self.device, contents
        )
        exported, adapter = folder / "huggingface", folder / "lora_adapter"
        try:
            self.export(str(exported), weights="hf_model" in contents)
            if self.settings.model.lora_rank > 0:
                model = self.settings.model
                save_adapter(adapter, self.policy.model, model.path, model.lora_rank, model.lora_alpha, self.place.rank == 0)
            if self.place.rank == 0:
                records |= record_folder(exported, folder) | record_folder(adapter, folder)
            return records
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: the model could not be written: {error}.") from error

    def export(self, folder: str, weights: bool) -> None:
        """Write the policy in Hugging Face format: config, tokenizer and chat template, and weights tensor by tensor.

        Args:
            folder: The folder to write.
            weights: Write the weights too.
        """
        assert self.policy is not None
        masters = dtype_of(self.settings.actor.fsdp_config.model_dtype, "actor_rollout_ref.actor.fsdp_config.model_dtype")
        bucket = self.settings.rollout.checkpoint_engine.update_weights_bucket_megabytes
        stream = full_weights(self._policy_weights(), masters, bucket) if weights else None
        config, tokenizer, writes = self.policy.model.lm.config, Path(self.plan.tokenizer_folder), self.place.rank == 0
        export_folder(Path(folder), config, tokenizer, stream, writes)
        template = self.settings.model.custom_chat_template
        if writes and template is not None:
            # transformers prefers this file to tokenizer_config.json.
            (Path(folder) / "chat_template.jinja").write_text(template)

    def load(self, folder: str, contents: Sequence[str]) -> None:
        """Read this rank's part of a checkpoint, written by any number of ranks."""
        assert self.policy is not None
        load_training_state(Path(folder), self.policy.model, self.policy.optimizer, self.policy.schedule, self.device, contents)
        if self.policy_home is not None:
            self.policy_home.changed()

    def close(self) -> None:
        """Free the models and the engine, and leave the process group. A second call does nothing.

        The models are freed first: a sleeping engine must wake before its shutdown, and needs the room.
        """
        if self.policy is not None and self.policy.offload is not None:
            self.policy.offload.close()
        self.policy = self.policy_home = self.reference = None
        self.residency = Residency(self.device)
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.shutdown()
        finally:
            self.limits.close()
            leave_process_group()

    # Building.

    def _build(self) -> None:
        # The engine is first: it measures the free memory, sleeps, and leaves the device to the trainer.
        place, settings = self.place, self.settings
        join_process_group(self.device, place.rank, place.world_size, place.master_addr, place.master_port, settings.nccl_timeout)
        self.engine = build_engine(settings.rollout, self._engine_place())
        self.release_engine()
        self.policy = self._build_policy()
        if settings.actor.fsdp_config.param_offload:
            self.policy_home = ParamHome(POLICY, self.policy.model.parameters(), self.device)
            # With LoRA the reference is the policy without its adapters.
            other_roles = (REFERENCE,) if settings.model.lora_rank > 0 else ()
            self.residency.add(self.policy_home, other_roles)
            self.residency.rest()
        if self.plan.reference_folder is not None:
            self.reference = self._build_reference(Path(self.plan.reference_folder))
            self.residency.rest()

    def _engine_place(self) -> EnginePlace:
        place, plan = self.place, self.plan
        return EnginePlace(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            tensor_parallel_size=self.settings.rollout.tensor_model_parallel_size,
            device=self.device,
            model_folder=plan.engine_folder,
            tokenizer_folder=plan.tokenizer_folder,
            trust_remote_code=self.settings.model.trust_remote_code,
            eos_token_ids=plan.eos_token_ids,
            device_limit_bytes=self.device_limit,
        )

    def _build_policy(self) -> Policy:
        actor, model = self.settings.actor, self.settings.model
        policy = self._sharded(actor.fsdp_config, "actor", actor.use_torch_compile, model.enable_gradient_checkpointing)
        if actor.use_prefix_grouper:
            refuse_sliding_window(policy.lm.config)
        scorer.materialize(policy, Path(self.plan.folder), self.device, actor.fsdp_config.offload_policy)
        if model.lora_adapter_path is not None:
            load_adapter(Path(model.lora_adapter_path), policy)
        else:
            initialize_adapters(policy, actor.fsdp_config.seed)
        self._check_packing(policy, actor.fsdp_config, self.plan.folder)
        offload = None
        if model.enable_activation_offload:
            min_bytes, in_flight = model.activation_offload_min_bytes, model.activation_offload_in_flight
            offload = ActivationOffload(policy, self.device, min_bytes, in_flight)
        return Policy(policy, actor, self.plan.optimizer_steps, self.place.world_size, self.device, offload)

    def _build_reference(self, folder: Path) -> PolicyModel:
        ref = self.settings.ref
        with torch.random.fork_rng(devices=[]):
            self._make_deterministic(ref.fsdp_config)
            model = self._sharded(ref.fsdp_config, "ref", bool(ref.use_torch_compile), False).requires_grad_(False)
            if self.settings.model.load_mode == "mmap":
                mapped = scorer.materialize_mapped(model, folder, self.device)
            else:
                mapped = None
                scorer.materialize(model, folder, self.device, ref.fsdp_config.offload_policy)
        if ref.quantization != "none":
            mean, largest = scorer.quantization_error(model, folder, self.device, self._temperature)
            logger.info(
                "actor_rollout_ref.ref.quantization=%s: log-probs differ from the unquantised reference's by %.2g nats on "
                "average, %.2g at most (256 random tokens)", ref.quantization, mean, largest,
            )  # fmt: skip
        if ref.fsdp_config.param_offload:
            home = ParamHome(REFERENCE, model.parameters(), self.device, mapped)
            self.residency.add(home)
            if mapped is not None:  # the device has no values yet
                home.to_host()
                home.to_device()
        self._check_packing(model, ref.fsdp_config, folder)
        return model

    def _check_packing(self, model: PolicyModel, fsdp: Fsdp, folder: str | Path) -> None:
        dtype = dtype_of(fsdp.dtype, "fsdp_config.dtype")
        check_packing(model, self.device, dtype, self.settings.actor.use_prefix_grouper, str(folder))

    def _sharded(self, fsdp: Fsdp, role: str, compiled: bool, recompute: bool) -> PolicyModel:
        compiles = self._compiles(compiled, fsdp)
        mesh = training_mesh(self.device.type, self.place.world_size, fsdp.fsdp_size)
        folder = self.plan.folder if role == "actor" else self.plan.reference_folder
        key = f"actor_rollout_ref.{role}"
        trained = role == "actor"
        quantization = "none" if trained else self.settings.ref.quantization
        return scorer.build_policy(
            self.settings.model, fsdp, Path(str(folder)), mesh, self.device, key, compiles, recompute, trained, quantization
        )

    def _compiles(self, requested: bool, fsdp: Fsdp) -> bool:
        return requested and is_gpu(self.device) and not fsdp.full_determinism and compiler_works(self.device)

    def _policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the policy's weights under the names of a plain model: adapters merged, still sharded."""
        assert self.policy is not None
        return merged_weights(named_weights(self.policy.model), self.policy.model)

    def _make_deterministic(self, fsdp: Fsdp) -> None:
        torch.manual_seed(fsdp.seed + self.place.rank)
        if fsdp.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _report_out_of_memory(self, phase: str) -> AbstractContextManager[None]:
        return out_of_memory_told(phase, self.device, self._resident, self.settings, self.device_limit)

    @property
    def _counts_engine(self) -> bool:
        # A function that is compiled while bytes are counted stays uncompiled afterwards, so only an eager engine is counted.
        return self.settings.rollout.name == "hf" or self.settings.rollout.enforce_eager

    @property
    def _temperature(self) -> float:
        # Greedy rollouts are scored without a temperature.
        rollout = self.settings.rollout
        return rollout.temperature if rollout.do_sample else 1.0

    def _resident(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that exist before a phase with their kinds, on the device or on the host."""
        if self.policy is not None:
            parameters = list(self.policy.model.parameters())
            yield from (("params", parameter) for parameter in parameters)
            yield from (("grads", parameter.grad) for parameter in parameters if parameter.grad is not None)
            yield from (
                ("optimizer", value)
                for state in self.policy.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            )
        if self.reference is not None:
            yield from (("params", parameter) for parameter in self.reference.parameters())
        if self.engine is not None:
            yield from self.engine.resident_tensors()
