import dataclasses
import gc
import json
import pickle
import re
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.observe.simulated_device import MIB
from verl_memopt.config.keys import replaced
from verl_memopt.config.role_settings import Optim
from verl_memopt.config.schema import Actor, ActorRolloutRef, Critic, Model, RewardModel, Rollout, TrainedFsdp
from verl_memopt.errors import ConfigError, DeviceMemoryError
from verl_memopt.memory.host_buffers import GIB, host_buffer
from verl_memopt.memory.knob import Need, Work
from verl_memopt.memory.out_of_memory import MOST_TENSORS, MemorySnapshot, wake_report
from verl_memopt.observe.byte_tracker import ByteTracker, DeviceLimitError, mark, scope
from verl_memopt.observe.device_ledger import Asleep, ledger_of
from verl_memopt.observe.phase import MemoryProbe
from verl_memopt.plan import advice as room
from verl_memopt.plan.advice import RunParts, Shortage, _bytes_by_kind, _requested_bytes, out_of_memory_report

ADAPTIVE = "actor_rollout_ref.actor.adaptive_token_budget=true"
CPU = torch.device("cpu")
SETTINGS = ActorRolloutRef(actor=Actor(use_dynamic_bsz=True), rollout=Rollout(name="hf"))


def advice(phase, kinds, settings, critic=None, reference=True):
    """Gives the ways in words, without the numbers that follow from what a call needed."""
    need = Need(0.25, 0, 1000, Work(rows=8, tokens=1024, longest=8, responses=1024))
    ways = room.advice(phase, kinds, RunParts(settings, critic, reference), lambda kind: need)
    return [re.sub(r" to [\d.]+| \(the fullest[^)]*\)|; the fullest[^)]*", "", way.text) for way in ways]


def told(body, limit=1000, phase="update_actor"):
    """Gives the error that a body which allocates too much ends with."""
    kept = torch.zeros(50)
    probe = MemoryProbe(CPU, lambda: [("params", kept)], limit)
    with (
        pytest.raises(DeviceMemoryError) as caught,
        out_of_memory_report(phase, CPU, list, RunParts(SETTINGS), limit),
        probe.phase(phase, track=True),
    ):
        body()
    return caught.value


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


def test_the_error_names_phase_limit_kinds_the_largest_and_the_way_out():
    def body():
        held = [torch.zeros(40)]
        with scope(kind="logits"):
            held.append(torch.zeros(200))

    message = str(told(body))
    assert message.startswith("update_actor: out of device memory at")
    assert "logits 0.000763, params 0.000191, activations 0.000153 MiB" in message
    # Of 800 bytes for 960 of logits and activations, half is kept free: 512 * 800 / 960 / 2.
    way_out = f"Most of it is logits: set {ADAPTIVE}\n  or lower actor_rollout_ref.model.logprob_chunk_tokens to 213 (now 512)\n"
    assert way_out in message


GPU = torch.device("cuda", 0)
VLLM_SAYS = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:128"


def fake(size):
    with FakeTensorMode():
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def told_on_gpu(error, resident, phase="update_actor", settings=SETTINGS, limit=None):
    with (
        pytest.raises(DeviceMemoryError) as caught,
        out_of_memory_report(phase, GPU, lambda: resident, RunParts(settings), limit),
    ):
        raise error
    return str(caught.value)


def test_what_rests_on_the_host_is_not_in_the_report(device):
    """A host buffer, a storage that gave its bytes back, and a storage that two kinds share."""
    params, freed = fake(4 * GIB), fake(3 * GIB)
    freed.untyped_storage().resize_(0)
    resident = [("params", params), ("rollout weights", params.view(-1)), ("optimizer", torch.empty(5 * MIB)), ("grads", freed)]
    held = device.empty(6 * GIB)
    message = told_on_gpu(torch.OutOfMemoryError("CUDA out of memory. Tried"), resident)
    assert "at 6 of 32 GiB (CUDA out of memory): params 4, activations 2 GiB\n  Most of it is params" in message
    del held


def test_a_declared_host_buffer_is_of_no_device(monkeypatch):
    buffer, tensor = host_buffer(1000, CPU, "optimizer"), torch.zeros(100, dtype=torch.uint8)
    assert _bytes_by_kind([("optimizer", buffer), ("optimizer", buffer[:10]), ("params", tensor)], CPU) == {"params": 100}


def test_what_sleeps_is_not_in_the_report(device):
    held = device.empty(9 * GIB)
    with ledger_of(GPU).changing(lambda: Asleep(4 * GIB, 3 * GIB)):
        pass
    ledger_of(GPU).reset_peaks()
    message = told_on_gpu(torch.OutOfMemoryError("CUDA out of memory. Tried"), [("params", fake(5 * GIB))], limit=10 * GIB)
    assert "at 6 of 10 GiB (CUDA out of memory): params 5, activations 1 GiB" in message
    del held


@pytest.mark.parametrize(
    "says", [VLLM_SAYS, "CUDA error: out of memory\nCUDA kernel errors", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"]
)
def test_memory_that_runs_out_beside_the_allocator_is_told_as_well(device, says):
    assert "out of device memory" in told_on_gpu(RuntimeError(says), [])


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (GPU, RuntimeError("CUDA error: an illegal memory access was encountered")),
        (GPU, RuntimeError("shapes do not match")),
        (CPU, ConfigError("x")),
        (CPU, torch.OutOfMemoryError("not the tracker's")),
    ],
)
def test_another_error_passes_unchanged(device, where, error):
    with pytest.raises(type(error)) as caught, out_of_memory_report("gen", where, list, RunParts(SETTINGS), None):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("rollout", "first"),
    [
        ({}, "To make room: lower actor_rollout_ref.rollout.gpu_memory_utilization to 0.37 (now 0.5)\n"),
        ({"kv_cache_memory_gb": 8.0}, "To make room: lower actor_rollout_ref.rollout.kv_cache_memory_gb to 4.0 (now 8.0)\n"),
        ({"kv_cache_memory_gb": "auto"}, "To make room: set actor_rollout_ref.rollout.kv_cache_memory_gb=null"),
    ],
)
def test_a_cache_that_cannot_wake_is_told_with_the_key_that_makes_it_smaller(device, rollout, first):
    settings = dataclasses.replace(SETTINGS, rollout=Rollout(name="vllm", **rollout))
    held = device.empty(20 * GIB)

    def body():
        with wake_report("kv", 16 * GIB, GPU):
            raise RuntimeError(VLLM_SAYS)

    resident = [("params", fake(7 * GIB)), ("optimizer", fake(9 * GIB))]
    with pytest.raises(DeviceMemoryError) as caught, out_of_memory_report("gen", GPU, lambda: resident, RunParts(settings), None):
        body()
    message = str(caught.value)
    assert message.startswith("gen: out of device memory at 36 of 32 GiB (waking kv, 16 GiB: CUDA Error: out of memory")
    assert "kv 16, optimizer 9, params 7, activations 4 GiB\n" in message
    assert first in message
    assert "set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true" in message
    del held


def test_an_error_of_another_kind_while_a_part_wakes_passes_unchanged(device):
    with pytest.raises(RuntimeError, match="invalid argument"), wake_report("kv", GIB, GPU):
        raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:174")


@pytest.mark.parametrize("where", [CPU, GPU], ids=str)
def test_what_the_phase_held_is_let_go_of_while_its_error_lives(device, where):
    """The memory is needed to wake an engine before it is shut down."""
    alive = []

    def body():
        held = torch.zeros(100)
        alive.append(weakref.ref(held))
        raise DeviceLimitError(1, {}, "op", 1) if where == CPU else torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(DeviceMemoryError) as caught, out_of_memory_report("gen", where, list, RunParts(SETTINGS), None):
        body()
    assert alive[0]() is None
    assert caught.value is not None


def test_running_out_in_backward_is_told_as_well():
    def body():
        weight = torch.zeros(30, requires_grad=True)
        mark("params", [weight])
        for _ in range(8):
            (weight * 2).sum().backward(retain_graph=True)
            kept.append(torch.zeros(30))

    kept = []
    assert "activations" in str(told(body))


def test_the_error_reaches_the_driver_and_ends_the_run_with_a_failure():
    error = Shortage({"kv": GIB, "params": 2 * GIB}, 3 * GIB, 2 * GIB, "aten.zeros").error("gen", RunParts(SETTINGS))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("gen: out of device memory at 3 of 2 GiB (aten.zeros): params 2, kv 1 GiB\n")
    assert error.exit_code != 0


def test_the_error_carries_what_was_held_and_asked_for():
    figures = told(lambda: torch.zeros(51), 400, "ref").figures
    assert (figures.phase, figures.held_bytes, figures.asked_bytes, figures.limit_bytes) == ("ref", 200, 204, 400)


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("512 bytes", 512), ("1.50 KiB", 1536), ("20.00 MiB", 20 * 2**20), ("2.25 GiB", 9 * GIB // 4)]
)
def test_what_torch_says_it_tried_to_allocate_is_read(size, num_bytes):
    message = f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 31.50 GiB of which 1.10 GiB is free."
    assert _requested_bytes(message) == num_bytes
    assert _requested_bytes("CUDA error: out of memory") is None


KINDS = (
    *("activations", "logits", "params", "gathered parameters", "collective buffers", "grads", "optimizer", "optimizer scratch"),
    *("rollout weights", "kv", "sync bucket"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_bytes_has_advice(kind):
    kept = replaced(SETTINGS, {"actor.fsdp_config.reshard_after_forward": False})
    assert advice("update_actor", [kind], kept)


@pytest.mark.parametrize(
    ("phase", "roles"), [("update_actor", ["ref"]), ("old_log_prob", ["ref"]), ("ref", ["actor"]), ("gen", ["ref", "actor"])]
)
def test_only_a_model_that_the_phase_does_not_use_is_advised_to_leave_the_device(phase, roles):
    ways = [f"set actor_rollout_ref.{role}.fsdp_config.param_offload=true" for role in roles]
    assert [way for way in advice(phase, ["params"], SETTINGS) if not way.endswith("=stream")] == ways


STREAM = "actor_rollout_ref.ref.fsdp_config.param_offload=stream"


def test_a_reference_is_advised_to_stream_in_its_own_phase_on_one_device_alone():
    resting = replaced(SETTINGS, {"ref.fsdp_config.param_offload": True, "actor.fsdp_config.param_offload": True})
    assert advice("ref", ["params"], resting) == [f"set {STREAM}"]
    assert [way.text for way in room.advice("ref", ["params"], RunParts(resting, devices=2), lambda kind: Need(1.0, 0, 1))] == []
    for more in ({"ref.fsdp_config.param_offload": "stream"}, {"model.load_mode": "mmap"}):
        assert advice("ref", ["params"], replaced(resting, more)) == []
    streaming = replaced(resting, {"ref.fsdp_config.param_offload": "stream"})
    assert not any("ref.fsdp_config" in way for way in advice("gen", ["params"], streaming))


def test_a_chunk_that_is_small_already_is_not_advised_to_grow():
    small = dataclasses.replace(SETTINGS, model=Model(path="", logprob_chunk_tokens=64))
    assert not any("logprob_chunk_tokens" in way for way in advice("update_actor", ["logits"], small))


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
    ways = advice("update_actor", ["activations"], without)
    assert ways[:2] == [f"set {ADAPTIVE}", "set actor_rollout_ref.model.enable_gradient_checkpointing=true"]


@pytest.mark.parametrize(
    ("changes", "is_first"),
    [
        ({}, True),
        ({"adaptive_token_budget": True}, False),
        ({"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 2}, False),
        ({"optim": Optim(in_backward=True)}, False),
        ({"fsdp_config": TrainedFsdp(ulysses_sequence_parallel_size=2)}, False),
    ],
)
def test_an_update_that_may_learn_its_budget_is_told_so_first(changes, is_first):
    settings = dataclasses.replace(SETTINGS, actor=dataclasses.replace(SETTINGS.actor, **changes))
    for phase in ("update_actor", "old_log_prob", "ref"):
        ways = advice(phase, ["params", "activations"], settings)
        assert (ways[0] == f"set {ADAPTIVE}") == is_first
        assert is_first or f"set {ADAPTIVE}" not in ways


@pytest.mark.parametrize(
    ("start", "lacking"), [("actor_rollout_ref.ref.", {"reference": False}), ("critic.", {"critic": None}), ("reward_model.", {})]
)
def test_keys_of_what_the_run_lacks_are_not_advised(start, lacking):
    for phase in ("init", "gen", "old_log_prob", "reward", "ref", "values", "update_critic", "update_actor", "save_checkpoint"):
        ways = [way for kind in KINDS for way in advice(phase, [kind], SETTINGS, **{"critic": CRITIC, **lacking})]
        assert ways
        assert not any(start in way for way in ways)


CRITIC = Critic(use_dynamic_bsz=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS[:8] if kind != "logits"])
def test_every_kind_of_bytes_of_a_critic_has_advice_in_its_update(kind):
    critic = replaced(CRITIC, {"model.fsdp_config.reshard_after_forward": False})
    ways = advice("update_critic", [kind], SETTINGS, critic)
    assert any("critic." in way or "param_offload" in way for way in ways), ways


def test_the_values_pass_is_lowered_by_its_own_budget():
    ways = advice("values", ["activations"], SETTINGS, CRITIC)
    assert ways == ["set critic.adaptive_token_budget=true", "lower critic.forward_max_token_len_per_gpu"]
    rows = dataclasses.replace(CRITIC, use_dynamic_bsz=False, forward_micro_batch_size_per_gpu=4)
    assert advice("values", ["activations"], SETTINGS, rows)[0] == "lower critic.forward_micro_batch_size_per_gpu (now 4)"
    sharing = replaced(CRITIC, {"model.fsdp_config.ulysses_sequence_parallel_size": 2})
    assert advice("values", ["activations"], SETTINGS, sharing) == ["lower critic.forward_max_token_len_per_gpu"]


LIMIT = 600_000


@pytest.fixture
def weight():
    return torch.zeros(50_000)


@pytest.fixture
def snapshot(tmp_path, weight):
    return MemorySnapshot(tmp_path / "run", 3, CPU, lambda: [("params", weight)])


def allocate_too_much():
    kept = [torch.zeros(30_000, dtype=torch.float64)]
    kept.append(torch.zeros(1_000_000))


def run_out(snapshot, weight):
    probe = MemoryProbe(CPU, lambda: [("params", weight)], LIMIT)
    with pytest.raises(DeviceLimitError), snapshot.on_out_of_memory("update_actor"), probe.phase("update_actor", track=True):
        allocate_too_much()


def test_the_snapshot_lists_what_lived_when_memory_ran_out(snapshot, weight):
    """Tensors that share memory count once, and fake tensors, which torch.compile keeps, not at all."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        kept = mode.from_tensor(torch.zeros(123_456), static_shapes=False)
    part = weight[:10]
    run_out(snapshot, weight)
    read = json.loads(snapshot.path.read_text())
    assert snapshot.path.name == "out_of_memory_rank3.json"
    assert read["phase"] == "update_actor"
    assert "past the limit" in read["error"]
    assert any("allocate_too_much" in line for line in read["traceback"])
    (listed,) = (tensor for tensor in read["tensors"] if tensor["bytes"] == 200_000)
    assert (listed["kind"], listed["dtype"]) == ("params", "torch.float32")
    assert listed["shape"] in ([50_000], [10])
    assert {"bytes": 240_000, "kind": "other", "shape": [30_000], "dtype": "torch.float64"} in read["tensors"]
    assert read["kinds"]["params"] == 200_000
    assert kept.dim() == part.dim() == 1
    assert all(tensor["shape"] != [123_456] for tensor in read["tensors"])
    sizes = [tensor["bytes"] for tensor in read["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= MOST_TENSORS
    assert read["live_bytes"] >= sum(sizes)


def test_tensors_of_a_frozen_heap_are_listed_and_stay_frozen(snapshot, weight):
    gc.freeze()
    run_out(snapshot, weight)
    assert gc.get_freeze_count() > 0
    assert any(tensor["kind"] == "params" for tensor in json.loads(snapshot.path.read_text())["tensors"])


def test_another_error_leaves_no_snapshot(snapshot):
    with pytest.raises(RuntimeError, match="shapes"), snapshot.on_out_of_memory("gen"):
        raise RuntimeError("shapes differ")
    assert not snapshot.path.exists()


def test_a_disk_that_refuses_hides_nothing_of_the_error(tmp_path, weight, caplog):
    (tmp_path / "file").write_text("")
    snapshot = MemorySnapshot(tmp_path / "file" / "run", 0, CPU, lambda: [("params", weight)])
    run_out(snapshot, weight)
    assert "cannot be written" in caplog.text


def numbers(kind, kinds, work, phase="update_actor", settings=SETTINGS, limit=1000, **parts):
    """Gives key -> value of the ways of one kind, where ``work`` failed with these kinds on a device of ``limit`` bytes."""
    short = Shortage(kinds, sum(kinds.values()), limit, "op", first=kind)
    return {key: value for way in short.error(phase, RunParts(settings, **parts), work).ways for key, value in way.settings}


def test_a_token_budget_is_lowered_to_what_there_is_room_for_and_never_below_the_longest_sequence():
    work, tokens = Work(rows=8, tokens=2432, longest=304), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    # 800 of 810 bytes of activations have room; half of that is kept free.
    assert numbers("activations", {"activations": 810, "params": 200}, work)[tokens] == int(2432 * 800 / 810 / 2)
    assert numbers("activations", {"activations": 60, "params": 950}, work)[tokens] == int(2432 * 50 / 60 / 2)
    assert numbers("activations", {"activations": 60, "params": 995}, work)[tokens] == 304
    alone = dataclasses.replace(work, tokens=304)
    assert tokens not in numbers("activations", {"activations": 60, "params": 995}, alone), "no smaller one is possible"


def test_a_budget_that_learns_is_not_named_first_where_the_longest_sequence_has_no_room():
    work = Work(rows=8, tokens=2432, longest=304)
    for params, first in ((750, ADAPTIVE), (1005, "actor_rollout_ref.ref.fsdp_config.param_offload=true")):
        short = Shortage({"params": params, "activations": 300}, params + 300, 1000, "op")
        error = short.error("update_actor", RunParts(SETTINGS), work)
        assert error.ways[0].text == f"set {first}"


@pytest.mark.parametrize(
    ("phase", "key"),
    [
        ("gen", "actor_rollout_ref.rollout.max_num_seqs"),
        ("testing", "actor_rollout_ref.rollout.max_num_seqs"),
        ("update_actor", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("values", "critic.forward_micro_batch_size_per_gpu"),
        ("update_critic", "critic.ppo_micro_batch_size_per_gpu"),
        ("reward", "reward_model.micro_batch_size_per_gpu"),
    ],
)
def test_sequences_are_lowered_to_what_there_is_room_for(phase, key):
    settings = replaced(SETTINGS, {"actor.use_dynamic_bsz": False})
    parts = {"critic": dataclasses.replace(CRITIC, use_dynamic_bsz=False), "reward_model": RewardModel(use_dynamic_bsz=False)}
    assert numbers("activations", {"activations": 810, "params": 200}, Work(rows=8), phase, settings, **parts)[key] == 3


@pytest.mark.parametrize(("phase", "role"), [("update_actor", "actor_rollout_ref.actor"), ("update_critic", "critic")])
@pytest.mark.parametrize(("limit", "megabytes"), [(2**20, 1 / 256), (2**40, 32)])
def test_a_bucket_is_lowered_until_it_is_small_beside_the_device(phase, role, limit, megabytes):
    """Not only as its bytes must be: a bucket that is larger than all parameters holds what they do."""
    lowered = numbers(
        "optimizer scratch", {"params": limit // 2, "optimizer scratch": limit}, None, phase, limit=limit, critic=CRITIC
    )
    assert lowered[f"{role}.optim.bucket_megabytes"] == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize("phase", ["init", "gen", "update_weights", "save_checkpoint", "testing"])
def test_parameters_that_the_phase_does_not_use_may_leave_the_device(phase):
    kind = "built" if phase == "init" else "params"
    assert any("param_offload=true" in way for way in advice(phase, [kind], SETTINGS, CRITIC))
