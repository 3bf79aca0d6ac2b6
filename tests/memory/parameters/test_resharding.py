from collections import Counter

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from tests.memory.sharded import fake_ranks, policy_of, share
from tests.worker.test_policy import micro_batches
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.device_ledger import fsdp_kinds

FP32, BF16 = 4, 2
VOCABULARY, HIDDEN, BLOCK, N = 4096, 64, 61_632, 770_880
HEAD = VOCABULARY * HIDDEN
"""Parameters of the head, of a block and of the whole wide model."""


def test_the_wide_model_has_the_sizes_that_the_sums_below_use(wide, one_rank):
    policy = policy_of(wide, one_rank)
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == N
    assert sum(parameter.numel() for parameter in policy.model.blocks()[0].parameters()) == BLOCK


def test_resharding_frees_every_gathered_unit_but_the_one_in_use(peak):
    # The peak is in the head's backward, where the next unit, a block, is gathered already.
    kept = FP32 * (N - HEAD) - FP32 * BLOCK
    assert peak(4, reshard_after_forward=False).bytes - peak(4).bytes == pytest.approx(kept, rel=0.01)


def test_on_one_rank_it_frees_the_cast_copies_and_without_a_cast_there_are_none(peak):
    whole, half = {"reshard_after_forward": False}, {"dtype": "bfloat16"}
    assert peak(1, **whole).bytes == peak(1).bytes
    assert peak(1, **whole, **half).bytes - peak(1, **half).bytes == pytest.approx(BF16 * (N - HEAD), rel=0.01)


def test_resharding_to_a_number_of_ranks_keeps_that_share_of_the_model(peak):
    # The peak is where the head is cut: what is kept of it lies beside the whole of it and its gradient.
    kept = FP32 * N / 2
    assert peak(4, reshard_after_forward=2).bytes - peak(4).bytes == pytest.approx(kept, rel=0.05)


def test_a_shard_group_of_half_the_ranks_holds_twice_the_training_state(peak):
    for kind, width in (("params", 4), ("grads", 4), ("optimizer", 8)):
        whole, half = peak(4).kinds[kind], peak(4, fsdp_size=2).kinds[kind]
        assert half - whole == pytest.approx(width * N * (1 / 2 - 1 / 4), rel=0.001), kind


@pytest.mark.parametrize("world_size", [1, 4])
def test_reducing_at_the_last_micro_batch_keeps_whole_gradients_until_then(peak, world_size):
    # On several ranks the peak is otherwise beside the head's reduction, where this rank's share of its gradient lies twice.
    kept = FP32 * N * (1 - 1 / world_size) - FP32 * HEAD / world_size * (world_size > 1)
    assert peak(world_size, gradient_sync="last").bytes - peak(world_size).bytes == pytest.approx(kept, rel=1e-4)


def test_whole_gradients_are_gradients_to_the_tracker(peak):
    assert peak(2, gradient_sync="last").kinds["grads"] == pytest.approx(FP32 * N, rel=0.01)


def gathers(policy, mini):
    """Gives how often each unit's gather buffer is asked for in one update, by the unit's parameters."""
    counts = Counter()
    original = fsdp.foreach_all_gather

    def counted(fsdp_params, *args, **kwargs):
        counts[sum(p._orig_size.numel() for p in fsdp_params)] += 1
        return original(fsdp_params, *args, **kwargs)

    fsdp.foreach_all_gather = counted
    try:
        policy.accumulate(micro_batches(mini)[:1], mini.counts, 0.9)
    finally:
        fsdp.foreach_all_gather = original
    return counts


def test_embedding_and_head_are_gathered_once_an_update_and_blocks_twice(wide):
    with fake_ranks(4) as mesh:
        policy, mini = policy_of(wide, mesh, {}, 4), share()
        found = gathers(policy, mini)
    # Embedding and head are alike in size. Neither's backward reads its weight: the head's gradients are there already.
    assert found[HEAD] == 2
    assert found[BLOCK] == 2 * len(policy.model.blocks())


@pytest.mark.parametrize("choice", [False, 2])
def test_a_pass_without_backward_leaves_nothing_gathered(wide, choice):
    with fake_ranks(4) as mesh:
        policy, mini = policy_of(wide, mesh, {"reshard_after_forward": choice}, 4), share()
        with ByteTracker() as tracker, fsdp_kinds():
            tracker.mark("params", policy.model.parameters())
            policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False)
            assert tracker.kinds(DEVICE).get("gathered parameters", 0) <= HIDDEN * FP32
            assert tracker.kinds(DEVICE)["params"] == FP32 * N // 4
