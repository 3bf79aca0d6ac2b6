"""Some steps with every knob on: what they hold does not grow, and what they started is gone when they end."""

import gc
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack, is_traceable_wrapper_subclass

from tests.end_to_end.runs import RECIPES, metrics, survivors
from tests.end_to_end.runs import settings_of as arguments_of
from tests.trainer.conftest import ready
from verl_memopt.config.loader import load_settings
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.observe.run_folder import read_timeline
from verl_memopt.worker.worker import Worker

STEPS, SETTLED = 8, 3
LOOKED = (SETTLED, 5, STEPS)
"""Steps after which all objects of the process are looked through, which takes as long as a step."""

MODEL, ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{section}" for section in ("model", "actor", "ref", "rollout"))
EVERYTHING = [
    "trainer.worker_group=local", f"{ROLLOUT}.name=hf", "data.val_files=null", "trainer.val_before_train=false",
    "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable", "trainer.logger=[jsonl]",
    "trainer.track_memory_every_steps=1", f"trainer.total_training_steps={STEPS}",
    "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=true",
    f"{MODEL}.logprob_chunk_tokens=8", f"{MODEL}.enable_gradient_checkpointing=true", f"{MODEL}.enable_activation_offload=true",
    f"{MODEL}.activation_offload_min_bytes=64", f"{MODEL}.tiled_mlp.enabled=true", f"{MODEL}.tiled_mlp.num_shards=2",
    f"{MODEL}.load_mode=mmap", f"{ACTOR}.fsdp_config.param_offload=true", f"{REF}.fsdp_config.param_offload=true",
    f"{ACTOR}.fsdp_config.optimizer_offload=true", f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
    f"{ACTOR}.optim.stochastic_rounding=true", f"{ACTOR}.optim.state_dtype=int8", f"{ACTOR}.optim.in_backward=true",
    f"{ACTOR}.optim.clip_grad=null", f"{ACTOR}.optim.bucket_megabytes=0.0625", f"{ACTOR}.use_prefix_grouper=true",
    f"{ACTOR}.fsdp_config.forward_prefetch=true", f"{ROLLOUT}.free_cache_engine=true", f"{ROLLOUT}.sleep_level=1",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1", f"{ROLLOUT}.max_num_seqs=8",
    "memory.device_limit_gb=1", "memory.host_limit_gb=1", "memory.pinned_limit_gb=1",
]  # fmt: skip


@dataclass(frozen=True)
class Held:
    """What the process holds between two steps. host: bytes of host buffers. storages: of all live tensors, where looked for."""

    host: int
    storages: int | None


def outside():
    """Gives what this process has from outside, and what torch has in it for good."""
    gc.collect()
    own, module = psutil.Process(), torch.nn.modules.module
    hooks = [registry for name, registry in vars(module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    return SimpleNamespace(
        files=Counter(_target(link) for link in Path("/proc/self/fd").iterdir()),
        threads=Counter(thread.name for thread in threading.enumerate()),
        native_threads=own.num_threads(),
        children=Counter(child.pid for child in own.children(recursive=True)),
        hooks=sum(len(registry) for registry in hooks),
        modes=_len_torch_dispatch_stack(),
    )


def _target(link):
    try:
        return str(link.readlink())
    except FileNotFoundError:  # the folder's own descriptor
        return ""


def live_bytes():
    """Gives the bytes of every storage that a tensor of this process lies in."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({plain._cdata: plain.nbytes() for tensor in tensors for plain in storages_of(tensor)}.values())


def storages_of(tensor):
    """Gives the storages of a tensor: those inside, where it is a wrapper such as a DTensor, and none where it is fake."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from storages_of(inner)
    elif not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def train(toy, run_dir, steps):
    """Trains as a run does and gives what is held after each step."""
    settings = load_settings("toy", [*arguments_of(toy, run_dir), *EVERYTHING], str(RECIPES))
    held = []
    with ready(settings) as trainer:
        trainer.track(0)
        trainer.workers.all("update_weights", Worker.update_weights)
        trainer.reporter.started(0, trainer.workers.take_memories())
        for step in range(1, steps + 1):
            trainer.one_step(step)
            held.append(Held(host_allocator().held_bytes, live_bytes() if step in LOOKED else None))
    return held


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    """What the long run held, and this process before and after it. A short run first loads what is loaded once.

    left: bytes of tensors and of host buffers at the end. models: how many are there then.
    """
    folder = tmp_path_factory.mktemp("many")
    train(toy, folder / "first", 2)
    before, storages = outside(), live_bytes()
    held = train(toy, folder / "run", STEPS)
    survivors(psutil.Process().children(recursive=True), 5)
    storages_after = live_bytes()  # what only refers to itself is gone after it
    models = sum(issubclass(type(thing), PolicyModel) for thing in gc.get_objects())
    return SimpleNamespace(
        held=held, folder=folder / "run", before=before, after=outside(), storages_before=storages,
        left=Held(host_allocator().held_bytes, storages_after), models=models,
    )  # fmt: skip


def test_every_step_was_taken_with_the_knobs_on_and_its_engine_agreed_with_the_policy(run):
    logged = metrics(run.folder)
    assert [row["training/global_step"] for row in logged.values()] == list(range(1, STEPS + 1))
    assert all(row["rollout/logprob_diff_max"] <= 1e-5 for row in logged.values())
    assert all(row["actor/grad_norm"] > 0 for row in logged.values())
    assert all(row["memory/activation_offload/bytes_moved"] > 0 for row in logged.values())
    assert all(held.host > 0 for held in run.held)


def test_what_lies_on_the_device_in_host_buffers_and_in_tensors_after_a_step_does_not_grow(run):
    last = {row.step: row.allocated_bytes for row in read_timeline(run.folder / "memory_timeline.csv")}
    (found,) = {last[step] for step in range(SETTLED, STEPS + 1)}
    assert found > 0
    assert len({held.host for held in run.held[SETTLED - 1 :]}) == 1
    storages = [held.storages for held in run.held if held.storages is not None]
    assert len(storages) == len(LOOKED)
    assert len(set(storages)) == 1


def test_a_run_that_has_ended_leaves_no_model_no_host_buffer_and_no_tensor(run):
    assert run.models == 0
    assert run.left == Held(storages=run.storages_before, host=0)


def test_a_run_that_has_ended_leaves_no_file_thread_child_hook_or_mode(run):
    for kind in ("files", "threads", "children"):
        assert not getattr(run.after, kind) - getattr(run.before, kind), kind
    assert run.after.native_threads <= run.before.native_threads
    assert (run.after.hooks, run.after.modes) == (run.before.hooks, run.before.modes) == (0, 0)
