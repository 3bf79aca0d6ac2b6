import dataclasses
import pickle
import subprocess
from pathlib import Path

import pytest
import torch

from verl_memopt.config.keys import leaf_types
from verl_memopt.config.schema import Actor, ActorRolloutRef, Memory, Model, Rollout
from verl_memopt.errors import ConfigError, DeviceMemoryError
from verl_memopt.memory.allocators import ADVICE, _asked, _error, advice, engine_share, memory_limits, out_of_memory_told
from verl_memopt.memory.host_buffers import GIB, host_allocator, host_buffer
from verl_memopt.observe.byte_tracker import ByteTracker, DeviceLimitError, mark, scope
from verl_memopt.observe.phase import MemoryProbe

CPU = torch.device("cpu")
SETTINGS = ActorRolloutRef(actor=Actor(use_dynamic_bsz=True), rollout=Rollout(name="hf"))


def told(body, limit=1000, phase="update_actor", settings=SETTINGS):
    """Gives the message of the error that a body which allocates too much ends with."""
    kept = torch.zeros(50)
    probe = MemoryProbe(CPU, lambda: [("params", kept)], limit)
    with (
        pytest.raises(DeviceMemoryError) as caught,
        out_of_memory_told(phase, CPU, list, settings, limit),
        probe.phase(phase, track=True),
    ):
        body()
    return str(caught.value)


def test_the_op_that_passes_the_limit_is_the_one_that_fails():
    kept = torch.zeros(50)
    with ByteTracker(limit_bytes=400) as tracker:
        tracker.mark("params", [kept])
        within = torch.zeros(50)
        assert tracker.total() == 400
        with pytest.raises(DeviceLimitError) as caught, scope(kind="logits"):
            torch.zeros(1)
        assert caught.value.kinds == {"params": 200, "activations": 200, "logits": 4}
        del within


def test_host_bytes_do_not_count_towards_the_device_limit():
    with ByteTracker(limit_bytes=400) as tracker:
        host_buffer(1000, CPU, "params")
        assert tracker.total() == 0


def test_the_error_names_phase_limit_kinds_the_largest_and_the_way_out():
    def body():
        held = [torch.zeros(40)]
        with scope(kind="logits"):
            held.append(torch.zeros(200))

    message = told(body)
    assert message.startswith("update_actor: out of device memory at")
    assert "logits 7.45e-07, params 1.86e-07, activations 1.49e-07 GiB" in message
    assert "Most of it is logits: set actor_rollout_ref.model.logprob_chunk_tokens=256." in message


def test_running_out_in_backward_is_told_as_well():
    def body():
        weight = torch.zeros(30, requires_grad=True)
        mark("params", [weight])
        for _ in range(8):
            (weight * 2).sum().backward(retain_graph=True)
            kept.append(torch.zeros(30))

    kept = []
    assert "activations" in told(body)


def test_other_errors_pass_unchanged():
    with pytest.raises(ConfigError), out_of_memory_told("gen", CPU, list, SETTINGS, None):
        raise ConfigError("x")
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_told("gen", CPU, list, SETTINGS, None):
        raise torch.OutOfMemoryError("not the tracker's")


def test_the_error_reaches_the_driver_and_ends_the_run_with_a_failure():
    error = _error("gen", {"kv": GIB, "params": 2 * GIB}, 3 * GIB, 2 * GIB, "aten.zeros", SETTINGS)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("gen: out of device memory at 3 of 2 GiB (aten.zeros): params 2, kv 1 GiB.")
    assert error.exit_code != 0


def test_the_error_carries_what_was_held_and_asked_for():
    kept = torch.zeros(50)
    probe = MemoryProbe(CPU, lambda: [("params", kept)], 400)
    with (
        pytest.raises(DeviceMemoryError) as caught,
        out_of_memory_told("ref", CPU, list, SETTINGS, 400),
        probe.phase("ref", True),
    ):
        torch.zeros(51)
    error = caught.value
    assert (error.phase, error.held_bytes, error.asked_bytes, error.limit_bytes) == ("ref", 200, 204, 400)


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("512 bytes", 512), ("1.50 KiB", 1536), ("20.00 MiB", 20 * 2**20), ("2.25 GiB", 9 * GIB // 4)]
)
def test_what_torch_says_it_tried_to_allocate_is_read(size, num_bytes):
    message = f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 31.50 GiB of which 1.10 GiB is free."
    assert _asked(message) == num_bytes
    assert _asked("CUDA error: out of memory") is None


@pytest.mark.parametrize("kind", ADVICE)
def test_every_advice_is_a_setting(kind):
    assert {key for key, _ in ADVICE[kind]} <= leaf_types().keys()


@pytest.mark.parametrize(
    ("phase", "dynamic", "key"),
    [
        ("update_actor", True, "actor.ppo_max_token_len_per_gpu (now 16384)"),
        ("update_actor", False, "actor.ppo_micro_batch_size_per_gpu"),
        ("old_log_prob", True, "rollout.log_prob_max_token_len_per_gpu"),
        ("ref", True, "ref.log_prob_max_token_len_per_gpu"),
        ("gen", True, "rollout.max_num_seqs (now 256)"),
    ],
)
def test_activations_are_lowered_by_the_budget_of_their_phase(phase, dynamic, key):
    settings = dataclasses.replace(
        SETTINGS,
        actor=Actor(use_dynamic_bsz=dynamic),
        rollout=Rollout(name="hf", log_prob_use_dynamic_bsz=dynamic),
        ref=dataclasses.replace(SETTINGS.ref, log_prob_use_dynamic_bsz=dynamic),
    )
    assert f"lower actor_rollout_ref.{key}" in advice(phase, ["activations"], settings)


def test_only_the_update_keeps_activations_that_could_be_recomputed_or_moved():
    assert advice("gen", ["activations"], SETTINGS) == ["lower actor_rollout_ref.rollout.max_num_seqs (now 256)"]
    assert len(advice("update_actor", ["activations"], SETTINGS)) > 1


def test_what_is_set_already_is_not_advised():
    offloading = dataclasses.replace(SETTINGS, model=Model(path="", enable_gradient_checkpointing=True))
    assert not any("enable_gradient_checkpointing" in way for way in advice("update_actor", ["activations"], offloading))
    without = dataclasses.replace(SETTINGS, model=Model(path="", enable_gradient_checkpointing=False))
    first = advice("update_actor", ["activations"], without)[0]
    assert first == "set actor_rollout_ref.model.enable_gradient_checkpointing=true"


def test_host_limits_hold_inside_the_body_only():
    with memory_limits(Memory(host_limit_gb=1.5, pinned_limit_gb=0.5), CPU):
        assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (3 * GIB // 2, GIB // 2)
    assert (host_allocator().limit_bytes, host_allocator().pinned_limit_bytes) == (None, None)


def test_the_engines_share_is_of_the_limit_where_that_is_smaller():
    assert engine_share(0.5, 80 * GIB, 32 * GIB) == pytest.approx(0.2)
    assert engine_share(0.5, 80 * GIB, None) == engine_share(0.5, 24 * GIB, 32 * GIB) == 0.5


SCRIPT = Path(__file__).parents[2] / "examples" / "memory_optimization" / "allocator.sh"


def sourced(**variables):
    script = f'set -euo pipefail; . {SCRIPT}; echo "PRELOAD=${{LD_PRELOAD:-}}"; echo "CONF=${{PYTORCH_ALLOC_CONF:-}}"'
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **variables}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)


def test_without_a_choice_nothing_is_preloaded():
    assert "PRELOAD=\n" in sourced().stdout


def test_a_chosen_allocator_is_preloaded_before_what_was_there(tmp_path):
    library = tmp_path / "libtcmalloc_minimal.so.4"
    library.write_text("")
    found = sourced(ALLOCATOR="tcmalloc", ALLOCATOR_DIRS=str(tmp_path), LD_PRELOAD="")
    assert f"PRELOAD={library}\n" in found.stdout


def test_an_allocator_that_is_not_installed_is_an_error_that_says_how_to_get_it(tmp_path):
    found = sourced(ALLOCATOR="jemalloc", ALLOCATOR_DIRS=str(tmp_path))
    assert found.returncode == 2
    assert "ALLOCATOR=jemalloc: no libjemalloc.so found" in found.stderr
    assert "apt-get install libjemalloc2" in found.stderr


def test_an_unknown_allocator_is_refused_with_the_known_ones():
    found = sourced(ALLOCATOR="mimalloc")
    assert found.returncode == 2
    assert "Use tcmalloc or jemalloc" in found.stderr
