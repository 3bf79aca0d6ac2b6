"""One copy of the weights on several ranks: each computes with its engine's, and updates the rows of a shard."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from tests.rollout.tools import tiny_folder as model_folder
from tests.tensors import whole_of
from tests.worker.test_shared_weights import rollout, settings_of
from tests.worker.test_worker import ALL, AR, call, plan_of, same
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.group import LOOPBACK, Placement
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.roles import RoleBuilder
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

FSDP = f"{AR}.actor.fsdp_config"
SHARED, COPIED, SYNCED = "shared", "copied", "synced"


class Moved(TorchDispatchMode):
    """Counts the elements that are copied, and those that come from other ranks."""

    copied = gathered = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.copied += args[0].numel()
        elif func is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].numel() - args[1].numel()
        elif func is torch.ops.c10d.broadcast_.default:
            self.gathered += sum(each.numel() for each in args[0]) * (args[2] != dist.get_rank())
        return func(*args, **(kwargs or {}))


def shared_plan(folder, more):
    devices = {"trainer.worker_group": "ray", "trainer.n_gpus_per_node": dist.get_world_size(), f"{AR}.rollout.n": 12}
    return plan_of(folder, devices | more)


def worker_of(folder, more):
    rank, size = dist.get_rank(), dist.get_world_size()
    return Worker(shared_plan(folder, more), Placement(rank, size, rank, LOOPBACK, 0, "cpu"))


def use(worker, kind, plan=None):
    """Gives the worker a new policy: one that shares the engine's weights, one with a copy of them, or one that FSDP2 shards."""
    shared = None if kind == SYNCED else worker.engine.share_weights()
    if kind == COPIED:
        shared = {name: view.clone() for name, view in shared.items()}
    worker.policy = Policy.built(RoleBuilder(plan or worker.plan, worker.placement, worker.device, worker.residency, shared))
    worker.shares_weights = kind == SHARED


def masters(worker):
    trained = worker.policy.trained
    return {name: whole_of(trained.master(each)).detach().clone() for name, each in named_weights(trained.model)}


def lies_in_the_engine(worker):
    """Whether this rank's rows of each weight are a part of the engine's own memory, at their offset."""
    if worker.policy.model.rows is None:
        return False
    views = worker.engine.share_weights()
    for name, weight in named_weights(worker.policy.model):
        view, own = views[name], weight._local_tensor
        shards = weight.device_mesh.size(weight.device_mesh.ndim - 1)
        first = dist.get_rank() % shards * -(-view.shape[0] // shards)
        if own.numel() and own.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
            return False
        if own.numel() and own.storage_offset() != view.storage_offset() + first * view.stride(0):
            return False
    return True


def step(worker, number, cuts=((0, 1), (2,))):
    """Syncs, generates, scores and updates rows of this rank's own; gives what is the same in every run that is."""
    rank = dist.get_rank()
    with Moved() as moved:
        call(worker, "update_weights")
    rows, rewards, engine = rollout(worker, 100 * rank + number)
    counts = torch.tensor([float(len(engine)), 3.0])
    dist.all_reduce(counts)
    mini = MiniBatch(rows, [list(cut) for cut in cuts], GlobalCounts(*counts.tolist()))
    metrics = call(worker, "update_actor", [mini])
    learned = rewards.tolist(), metrics["actor/loss"], metrics["actor/grad_norm"]
    return learned, float((engine - rows.old_log_probs).abs().max()), (moved.copied, moved.gathered)


def steps(worker, numbers, tolerance):
    """Takes steps and checks what holds in each; gives what was learned."""
    total = sum(weight.numel() for _, weight in named_weights(worker.policy.model))
    learned = []
    for number in numbers:
        assert lies_in_the_engine(worker) == worker.shares_weights
        found, difference, (copied, gathered) = step(worker, number)
        assert difference <= tolerance
        if worker.shares_weights:
            assert copied == 0
            others = total - sum(each._local_tensor.numel() for _, each in named_weights(worker.policy.model))
            assert gathered in ({others} if number not in (0, HALF) else {0, others})
        else:
            assert copied > 0
        learned.append(found)
    return learned


def three_steps(rank, folder, more):
    worker = worker_of(folder, more)
    found = []
    for kind in (SHARED, SYNCED):
        use(worker, kind)
        found.append((steps(worker, range(3), 1e-4), masters(worker)))
    return found


@pytest.mark.parametrize(("ranks", "more"), [(2, {}), (3, {}), (4, {f"{FSDP}.fsdp_size": 2})])
def test_ranks_that_share_with_their_engines_learn_what_fsdp2_learns_with_a_sync(tmp_path, ranks, more):
    folder = model_folder(tmp_path / "model", tied=True)
    for shared, synced in run_ranks(three_steps, ranks, folder, settings_of(True) | more):
        if ranks == 2:
            assert shared[0] == synced[0]
            assert same(shared[1], synced[1])
        check_close(shared, synced)


def check_close(one, other):
    """Checks that two runs differ by the order of sums alone."""
    for (rewards, loss, norm), theirs in zip(one[0], other[0], strict=True):
        assert rewards == theirs[0]
        assert (loss, norm) == pytest.approx(theirs[1:], rel=1e-5, abs=1e-6)
    for name, master in one[1].items():
        torch.testing.assert_close(master, other[1][name], rtol=1e-5, atol=2e-5)


ONCE = ((0, 1, 2),)
LAST = "gradients reduced at the last micro-batch"
TILES = "gradients of the vocabulary in tiles"
KNOBS = {
    "gradients and moments on the host": {f"{FSDP}.grad_offload": True, f"{FSDP}.optimizer_offload": True},
    TILES: {f"{FSDP}.grad_offload": True, f"{AR}.actor.optim.bucket_megabytes": 0.004},
    "updates in backward": {f"{AR}.actor.optim.in_backward": True},
    LAST: {f"{FSDP}.gradient_sync": "last"},
    "gradients of the root together": {f"{FSDP}.own_units": False},
    "ranks that share tokens": {f"{FSDP}.ulysses_sequence_parallel_size": 2},
    "blocks computed again": {f"{AR}.model.enable_gradient_checkpointing": True, f"{AR}.model.recompute_elementwise": True},
    "blocks in tiles": {
        f"{AR}.model.enable_gradient_checkpointing": True,
        f"{AR}.model.recompute_elementwise": True,
        f"{AR}.model.block_tile_tokens": 8,
    },
    "SGD": {f"{AR}.actor.optim.optimizer": "SGD"},
    "no loss that is known before backward": {f"{AR}.actor.entropy_coeff": 0.01},
}


def steps_with_knobs(rank, folder, names, more):
    """Takes two steps of each kind under each set of knobs, with an engine for all of them."""
    worker = worker_of(folder, settings_of(True) | more)
    found = {}
    for kind in (SYNCED, SHARED):  # an engine that has got adapters apart cannot take merged weights any more
        for name in names:
            plan = shared_plan(folder, settings_of(True) | more | KNOBS[name])
            worker.plan, worker.settings = plan, plan.settings
            use(worker, kind, plan)
            call(worker, "update_weights")
            cuts = ONCE if name == "updates in backward" else ((0, 1), (2,))
            found[name, kind] = [step(worker, number, cuts)[0] for number in range(2)], masters(worker)
    return found


LORA = {f"{AR}.model.lora_rank": 4, f"{AR}.model.lora_alpha": 8, f"{AR}.actor.optim.lr": 1e-2}


@pytest.mark.parametrize(
    ("tied", "more"), [(False, {}), *(pytest.param(True, more, marks=pytest.mark.slow) for more in ({}, LORA))]
)
def test_with_any_knob_ranks_learn_the_same_in_their_engines_weights_as_in_fsdp2s(tmp_path, tied, more):
    for found in run_ranks(steps_with_knobs, 2, model_folder(tmp_path / "model", tied=tied), list(KNOBS), more, timeout=300):
        for name in KNOBS:
            check_close(found[name, SHARED], found[name, SYNCED])
            # FSDP2 sums what a micro-batch adds to head and embedding before it adds the sum.
            assert same(found[name, SHARED][1], found[name, SYNCED][1]) or name == LAST, name


HALF = 3
"""Steps before a run is saved, and after."""


def halves(rank, folder, dtype, engine, saved, resumes):
    """Takes the steps of each kind and saves in the middle, or goes on from what the other kind has saved."""
    share = "auto" if engine == "vllm" and dtype != "split" else True
    worker = worker_of(folder, settings_of(share, dtype, engine))
    assert worker.shares_weights
    learned, found = {}, {}
    # FSDP2 has no masters in halves, so the run with a sync has a copy of the weights instead.
    kinds = {SHARED: SHARED, SYNCED: COPIED if dtype == "split" else SYNCED}
    for name, kind in kinds.items():
        use(worker, kind)
        if resumes:
            (other,) = kinds.keys() - {name}
            call(worker, "load", str(saved / other), ALL)
        first, second, tolerance = range(HALF), range(HALF, 2 * HALF), 1e-4 if dtype == "fp32" else 0.2
        learned[name] = [] if resumes else steps(worker, first, tolerance)
        if not resumes:
            call(worker, "save", str(saved / name), ALL)
        learned[name] += steps(worker, second, tolerance)
        found[name] = masters(worker)
    return learned, found


def check_halves(tmp_path, dtype, engine):
    folder = model_folder(tmp_path / "model", tied=dtype != "bfloat16")
    whole, resumed = (run_ranks(halves, 2, folder, dtype, engine, tmp_path, resumes, timeout=500) for resumes in (False, True))
    for (learned, found), (later, ended) in zip(whole, resumed, strict=True):
        assert learned[SHARED] == learned[SYNCED]
        assert len(learned[SHARED]) == 2 * HALF
        assert same(found[SHARED], found[SYNCED])
        for name in (SHARED, SYNCED):
            assert later[name] == learned[SHARED][HALF:]
            assert same(ended[name], found[SHARED])


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bfloat16", marks=pytest.mark.slow), "split"])
def test_steps_on_two_ranks_are_those_with_a_sync_and_either_kind_goes_on_as_the_other(tmp_path, dtype):
    check_halves(tmp_path, dtype, "hf")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bfloat16", "split"])
def test_steps_in_the_parameters_of_two_vllms_are_those_with_a_sync(tmp_path, dtype):
    check_halves(tmp_path, dtype, "vllm")
