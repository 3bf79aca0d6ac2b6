"""Gradients that rest on the host: the same step bit for bit, and no more than two blocks' of them on the device."""

import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch

from tests.memory.optimizers import whole_share
from tests.memory.sharded import assert_equal_runs, local, policy_of, three_steps, wide_model
from tests.ranks import run_ranks
from tests.virtual_gpu.late_streams import late_streams
from tests.worker.test_policy import ACTOR, CPU, micro_batches
from verl_memopt.config.keys import replaced
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.grad_offload_torch import KIND
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.precision import MixedPrecision
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.worker.policy import Policy

SPLIT = {"dtype": "bfloat16", "split_master_weights": True}
KINDS = {
    "state on the device": ({}, (1, 4, 8)),
    "state on the host": ({"optimizer_offload": True}, (4,)),
    "split masters": (SPLIT | {"optimizer_offload": True}, (4,)),
    "split masters, bfloat16 gradients": (SPLIT | {"mixed_precision": MixedPrecision(reduce_dtype="bfloat16")}, (4,)),
    "sharded": ({"dtype": "bfloat16"}, (4,)),
}
"""Settings, and numbers of micro-batches."""


def policy(folder, mesh, offload, fsdp=None, world_size=1, recompute=False, **optim):
    plain = policy_of(folder, mesh, fsdp, world_size, recompute)
    fsdp = replaced(plain.actor.fsdp_config, {"grad_offload": offload})
    actor = replaced(plain.actor, {"fsdp_config": fsdp, "optim": replaced(ACTOR.optim, optim)})
    return Policy(plain.model, actor, 10, world_size, CPU)


def cut(mini, count):
    """Gives the rows of a rank in so many micro-batches."""
    rows = range(mini.batch.num_rows)
    mini.micro_batches[:] = [list(rows[at::count]) for at in range(count)]
    return mini


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_those_of_gradients_on_the_device_bit_for_bit(tmp_path, one_rank, kind):
    fsdp, counts = KINDS[kind]
    folder = wide_model(tmp_path, tie_embeddings=kind != "sharded")
    for count in counts:
        found, expected = (
            three_steps(policy(folder, one_rank, offload, fsdp, clip_grad=0.5), cut(whole_share(), count))
            for offload in (True, False)
        )
        assert_equal_runs(found, expected)
        assert all(metrics["actor/grad_norm"] > 0.5 for _, metrics in found[0])


def two_rank_steps(rank, folder, counts):
    for count in counts:
        found, expected = (
            three_steps(
                policy(folder, training_mesh("cpu", 2, -1), offload, world_size=2, clip_grad=0.5),
                cut(whole_share(rank, 2), count),
            )
            for offload in (True, False)
        )
        assert_equal_runs(found, expected)
    return len(found[0])


@pytest.mark.parametrize("counts", [(4,), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_two_ranks_take_the_steps_of_gradients_on_the_device_bit_for_bit(wide, counts):
    assert run_ranks(two_rank_steps, 2, wide, counts) == [3, 3]


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was_and_the_next_step_begins_anew(wide, one_rank):
    one, other = (policy(wide, one_rank, offload) for offload in (True, False))
    before = [local(parameter).clone() for parameter in one.model.parameters()]
    for each in (one, other):
        broken = whole_share()
        broken.batch.advantages = broken.batch.advantages * math.inf
        assert each.update([broken], 0.9)["actor/skipped_updates"] == 1
    assert all(torch.equal(was, local(now)) for was, now in zip(before, one.model.parameters(), strict=True))
    assert_equal_runs(*(three_steps(each, cut(whole_share(), 2)) for each in (one, other)))


@pytest.mark.parametrize("streams", [nullcontext, late_streams], ids=["at once", "late"])
@pytest.mark.parametrize("vocabulary", [4096, 320])
def test_on_the_device_is_one_matrix_of_the_vocabulary_or_two_blocks_at_most(tmp_path, one_rank, vocabulary, streams):
    folder = wide_model(tmp_path, vocab_size=vocabulary)
    found = {}
    for offload in (False, True):
        with streams(), ByteTracker() as tracker:
            one, mini = policy(folder, one_rank, offload, recompute=True), cut(whole_share(), 2)
            tracker.mark("params", one.model.parameters())
            one.accumulate(micro_batches(mini), mini.counts, 0.9)
            found[offload] = tracker.most()[KIND], tracker.kinds()[KIND] if not offload else tracker.kinds().get(KIND, 0)
            on_host = tracker.kinds("host").get(KIND, 0)
    params = [parameter.numel() for parameter in one.model.parameters()]
    block = sum(parameter.numel() for parameter in one.model.blocks()[0].parameters())
    labelled = 4 * (sum(params) - 64)  # all but that of the final norm
    assert found[False] == (labelled, labelled)
    most, left = found[True]
    if streams is nullcontext:  # the last ones may leave late
        assert left <= 4 * len(params)  # norms
    assert most <= 4 * max(2 * block, vocabulary * 64) + 4 * (len(params) + 64)  # norms, and the gradient of the final one
    assert on_host == 4 * sum(params)


def test_a_policy_that_is_let_go_leaves_nothing_on_the_host(wide, one_rank):
    gc.collect()
    held = host_allocator().held_bytes
    one = policy(wide, one_rank, True)
    three_steps(one, whole_share())
    optimizer = weakref.ref(one.trained.optimizer)
    assert host_allocator().held_bytes - held == 4 * sum(parameter.numel() for parameter in one.model.parameters())
    del one
    gc.collect()
    assert optimizer() is None
    assert host_allocator().held_bytes == held
