import pytest
import torch

from tests.memory.sharded import WHOLE, policy_of, score_peak, share
from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_policy import micro_batches
from verl_memopt.distributed.device import training_mesh
from verl_memopt.model.assembly import mixed_precision

VOCABULARY, HIDDEN, BLOCK, N = 4096, 64, 61_632, 770_880
HEAD = VOCABULARY * HIDDEN
FP32, BF16 = torch.float32, torch.bfloat16
HALF, HALF_MASTERS = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "model_dtype": "bfloat16"}
HALF_REDUCTION = HALF | {"mixed_precision.reduce_dtype": "bfloat16"}


def outcome(folder, mesh, fsdp=None, rank=0, world_size=1):
    """Gives log-probs and all gradients as one vector."""
    policy, mini = policy_of(folder, mesh, fsdp, world_size), share(rank, world_size, WHOLE)
    log_probs = policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs
    policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    parameters = list(policy.model.parameters())
    gradient = torch.cat([whole_of(p.grad).flatten().float() for p in parameters])
    return log_probs, gradient


@pytest.mark.parametrize(
    ("fsdp", "nats", "share_of_gradient"),
    [({"model_dtype": "bfloat16"}, 2e-3, 6e-3), (HALF, 4e-3, 1e-2), (HALF_MASTERS, 4e-3, 1e-2)],
    ids=["model_dtype", "dtype", "both"],
)
def test_the_error_of_a_precision_stays_within_what_its_file_says(untied_folder, one_rank, fsdp, nats, share_of_gradient):
    expected, found = outcome(untied_folder, one_rank), outcome(untied_folder, one_rank, fsdp)
    assert (found[0] - expected[0]).abs().max() <= nats
    assert (found[1] - expected[1]).norm() <= share_of_gradient * expected[1].norm()


def test_on_one_rank_reducing_in_bfloat16_changes_nothing(untied_folder, one_rank):
    # Gradients come out of a bfloat16 backward in bfloat16.
    assert torch.equal(outcome(untied_folder, one_rank, HALF)[1], outcome(untied_folder, one_rank, HALF_REDUCTION)[1])


def two_ranks(rank, folder):
    mesh = training_mesh("cpu", 2, -1)
    whole, rounded = (outcome(folder, mesh, fsdp, rank, 2)[1] for fsdp in (HALF, HALF_REDUCTION))
    return float((rounded - whole).norm() / whole.norm())


def test_on_two_ranks_reducing_in_bfloat16_rounds_a_gradient_once(untied_folder):
    for error in run_ranks(two_ranks, 2, untied_folder):
        assert 0 < error <= 2**-8


def test_masters_in_bfloat16_halve_weights_and_gradients_at_rest(peak):
    found, expected = peak(4, **HALF_MASTERS).kinds, peak(4, **HALF).kinds
    for kind in ("params", "grads"):
        assert expected[kind] - found[kind] == pytest.approx(2 * N / 4, rel=0.001), kind


def test_computing_in_bfloat16_halves_what_is_gathered(wide):
    # The peak is where the head is copied out of its gather, with the last block's still there.
    fp32 = 2 * 4 * HEAD + 4 * BLOCK
    assert score_peak(wide, {}) - score_peak(wide, HALF) == pytest.approx(fp32 / 2, rel=0.02)


def test_reducing_in_bfloat16_halves_the_reduction_of_the_largest_unit(peak):
    # The input of the reduction is half as wide. So is its output, which is then cast into the gradient: 2 x V x h / W bytes.
    saved = 2 * HEAD * (1 - 1 / 4)
    assert peak(4, **HALF).bytes - peak(4, **HALF_REDUCTION).bytes == pytest.approx(saved, rel=0.01)


def test_equal_precisions_ask_for_no_cast():
    assert (mixed_precision(FP32, FP32, FP32).param_dtype, mixed_precision(FP32, FP32, FP32).reduce_dtype) == (None, None)
    assert mixed_precision(FP32, BF16, FP32).param_dtype is BF16
    assert mixed_precision(FP32, BF16, FP32).reduce_dtype is FP32
    assert mixed_precision(BF16, BF16, BF16).reduce_dtype is None
