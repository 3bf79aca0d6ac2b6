"""A worker's life on the GPU: engine, checkpoints from one device to the other, whole runs, and several ranks.

Only a GPU has NCCL, and checkpoints of its own kind.
"""

import dataclasses
import json
import logging
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.end_to_end.covering import all_off
from tests.end_to_end.knob_runs import make_model, run_row
from tests.end_to_end.runs import LOCAL, metrics, train_here
from tests.end_to_end.test_combinations import key
from tests.gpu import machine
from tests.gpu.test_knobs import ACROSS, UNCOMPILED, bound
from tests.ranks import run_ranks
from tests.rollout.tools import model_of, place_at, prompts, rollout_settings, sampling, weights_of
from tests.worker.test_worker import ALL, AR, call, mini_batch, plan_of
from tests.worker.test_worker import weights as weights_of_worker
from verl_memopt.distributed.device import backend, leave_process_group, local_device
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.rollout.engine import build_engine
from verl_memopt.worker.group import Placement
from verl_memopt.worker.worker import Worker

SHAPE = TinyShape(initializer_range=0.2, max_positions=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("life") / "model", SHAPE, seed=0)


def engine_on(kind, folder, name="hf", **changes):
    """Gives an engine on a kind of device, with the folder's weights."""
    where = torch.device("cpu") if kind == "cpu" else machine.device()
    place = dataclasses.replace(place_at(folder), device=where)
    return build_engine(rollout_settings(name, load_format="auto", **changes), place)


@pytest.mark.rehearsed
@pytest.mark.parametrize("changes", [{"do_sample": False, "temperature": 0.0}, {"top_k": 1}], ids=["greedy", "top 1"])
def test_greedy_tokens_of_a_gpu_are_those_of_a_cpu(device, folder, changes):
    found, expected = (
        engine_on(kind, folder).generate(prompts(6), [0] * 6, sampling(**changes)) for kind in (machine.kind(), "cpu")
    )
    assert found.response_ids == expected.response_ids
    gaps = [
        abs(a - b) for one, two in zip(found.log_probs, expected.log_probs, strict=True) for a, b in zip(one, two, strict=True)
    ]
    assert max(gaps) <= 4e-5


@pytest.mark.rehearsed
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_answers_as_before(device, folder, level):
    engine = engine_on(machine.kind(), folder, sleep_level=level)
    before, held = engine.generate(prompts(4), [3] * 4, sampling()), machine.live_bytes()
    with machine.Slowed("copies"):
        engine.sleep()
        weights = sum(parameter.nbytes for parameter in model_of(folder).parameters())
        assert held - machine.live_bytes() >= machine.size(weights, 0)
        engine.wake_up("weights")
        if level == 2:
            engine.load_weights(weights_of(model_of(folder)))
        engine.wake_up("kv_cache")
    assert engine.generate(prompts(4), [3] * 4, sampling()) == before
    engine.shutdown()


def worker_on(kind, folder, more=None):
    leave_process_group()
    uncompiled = {f"{AR}.actor.use_torch_compile": False}
    return Worker(plan_of(folder, {**uncompiled, **(more or {})}), Placement(0, 1, 0, "127.0.0.1", 0, kind))


CHECKPOINTS = {
    "plain": {},
    "offloaded": {f"{AR}.actor.fsdp_config.optimizer_offload": True, f"{AR}.actor.fsdp_config.param_offload": True},
    "bfloat16": {f"{AR}.actor.fsdp_config.dtype": "bfloat16"},
    "offloaded, cast for compute": {f"{AR}.actor.fsdp_config.param_offload": True, f"{AR}.actor.fsdp_config.dtype": "bfloat16"},
}


@pytest.mark.parametrize("way", ["to a CPU", "from a CPU"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rehearsed] * (name == "offloaded")) for name in CHECKPOINTS]
)
def test_a_checkpoint_of_one_device_goes_on_on_the_other(folder, tmp_path, name, way):
    kinds = [machine.kind(), "cpu"] if way == "to a CPU" else ["cpu", machine.kind()]
    writer = worker_on(kinds[0], folder, CHECKPOINTS[name])
    call(writer, "update_actor", [mini_batch()])
    call(writer, "save", str(tmp_path), [*ALL, "hf_model"])
    with machine.readable(writer):
        saved = {weight: tensor.cpu() for weight, tensor in weights_of_worker(writer).items()}
    writer.close()
    reader = worker_on(kinds[1], folder, CHECKPOINTS[name])
    call(reader, "load", str(tmp_path), ALL)
    with machine.readable(reader):
        loaded = {weight: tensor.cpu() for weight, tensor in weights_of_worker(reader).items()}
    assert all(torch.equal(tensor, saved[weight]) for weight, tensor in loaded.items())
    told = call(reader, "update_actor", [mini_batch()])
    assert told["actor/grad_norm"] > 0
    reader.close()


def train(toy, folder, *overrides):
    return train_here(toy, folder, *LOCAL, f"trainer.device={machine.kind()}", "trainer.total_training_steps=3",
                      "trainer.test_freq=-1", "trainer.save_freq=-1", *overrides)  # fmt: skip


MEMORY = {"nothing": [], "constrained": ["memory=constrained", "actor_rollout_ref.actor.fsdp_config.dtype=fp32"]}


@pytest.mark.parametrize("name", MEMORY)
def test_a_whole_run_trains_and_reports_memory_that_adds_up(toy, tmp_path, name):
    assert train(toy, tmp_path / "run", *MEMORY[name], "trainer.track_memory_every_steps=1") == 0
    rows = metrics(tmp_path / "run")
    assert max(rows) == 3
    for step in (1, 2, 3):
        row = rows[step]
        assert all(value == value and abs(value) != float("inf") for value in row.values() if isinstance(value, float)), step
        assert row["critic/score/mean"] >= 0
        assert row["memory/update_actor/peak_allocated_gb"] > 0
        for phase in ("gen", "old_log_prob", "update_actor", "update_weights") if machine.on_gpu() else ():
            figures = [row.get(f"memory/{phase}/{what}_gb") for what in ("peak_allocated", "peak_reserved", "device_used")]
            if None not in figures:
                assert figures[0] <= figures[1] <= figures[2], (step, phase, figures)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.rehearsed
def test_a_world_of_one_sums_over_its_own_backend(device, one_rank):
    for where in {device.type, "cpu"}:
        values = torch.arange(4.0, device=where)
        dist.all_reduce(values)
        assert values.tolist() == [0, 1, 2, 3]
    gathered = torch.empty(4, device=device)
    dist.all_gather_into_tensor(gathered, torch.arange(4.0, device=device))
    assert gathered.tolist() == [0, 1, 2, 3]


# Several ranks.


def joined_by(rank, world_size, kind, store):
    """Joins ranks over the backend of their devices, each on its own; store: a file of theirs."""
    leave_process_group()
    where, files = local_device(kind, rank), dist.FileStore(str(store), world_size)
    dist.init_process_group(backend(where), store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    return where


def on_rank(rank, kind, rows, folder, stores):
    """Gives the outcomes of rows on one of two devices."""
    logging.disable(logging.WARNING)
    outcomes = []
    for number, row in enumerate(rows):
        joined_by(rank, 2, kind, Path(stores) / str(number))
        outcomes.append(run_row(row, folder, rank, 2, device=kind, more=UNCOMPILED))
    return outcomes


TWO = {
    "all off": {},
    "small buckets of weights": {"sync": "one"},
    "resharded in bfloat16": {"actor dtype": "bf16", "actor reshard_after_forward": "true", "actor forward_prefetch": "on"},
    "all offloaded": {"actor optimizer_offload": "on", "actor param_offload": "on", "activation offload": "on", "sync": "one"},
}


def test_two_devices_compute_what_one_cpu_does(tmp_path, tmp_path_factory):
    if machine.num_devices() < 2:
        pytest.skip("two ranks, weight buckets over NCCL, tensor parallel engines: there is one device")
    folder, rows = make_model(tmp_path_factory.mktemp("two")), [all_off() | changes for changes in TWO.values()]
    both = run_ranks(on_rank, 2, machine.kind(), rows, folder, tmp_path, timeout=280)
    for place, row in enumerate(rows):
        leave_process_group()
        alone, ranks = run_row(row, folder, more=UNCOMPILED), [answers[place] for answers in both]
        most = bound(row, machine.size(ACROSS, 1) * 2)
        for step, loss in enumerate(alone.loss):
            assert abs(sum(own.loss[step] for own in ranks) - loss) <= most.loss, key(row)
            assert ranks[0].grad_norm[step] == pytest.approx(alone.grad_norm[step], rel=most.grad_norm), key(row)
        assert all(torch.equal(ranks[0].weights, own.weights) for own in ranks)
