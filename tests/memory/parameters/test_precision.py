import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.memory.sharded import WHOLE, policy_of, score_peak, share
from tests.ranks import run_ranks
from tests.tensors import operations_named, whole_of
from tests.worker.test_policy import micro_batches
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.fused import joined
from verl_memopt.memory.precision_torch import CastUnits
from verl_memopt.memory.resharding_torch import abandon_pass
from verl_memopt.model import attention_dense
from verl_memopt.model.assembly import mixed_precision
from verl_memopt.observe.byte_tracker import ByteTracker

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


def test_computing_in_bfloat16_halves_what_is_gathered(wide, monkeypatch):
    # On a CPU the attention of few tokens, whose call with a mask holds all heads, would be the peak in fp32.
    monkeypatch.setattr(attention_dense, "PACKED_CPU_FLASH", replace(attention_dense.PACKED_CPU_FLASH, masked_products=0))
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


# One device, which has nothing to shard: parameters in fp32 are cast unit by unit.

ONE_BY_ONE = tuple(product((True, False), (True, False)))


@pytest.mark.parametrize(("frees", "own_units"), ONE_BY_ONE)
def test_what_one_device_casts_computes_as_a_model_that_rests_in_bfloat16(untied_folder, one_rank, frees, own_units):
    settings = HALF | {"reshard_after_forward": frees, "own_units": own_units}
    cast, plain = policy_of(untied_folder, one_rank, settings), policy_of(untied_folder, one_rank, HALF_MASTERS)
    mini = share(0, 1, WHOLE)
    scores = [policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs for policy in (cast, plain)]
    assert torch.equal(*scores)
    expected = [torch.zeros_like(parameter, dtype=FP32) for parameter in plain.model.parameters()]
    # Of each micro-batch the gradient is in bfloat16; the sum over micro-batches is in fp32.
    for micro in micro_batches(mini) * 2:
        plain.accumulate([micro], mini.counts, 0.9)
        for whole, parameter in zip(expected, plain.model.parameters(), strict=True):
            whole += parameter.grad
            parameter.grad = None
    cast.accumulate(micro_batches(mini) * 2, mini.counts, 0.9)
    for parameter, gradient in zip(cast.model.parameters(), expected, strict=True):
        assert parameter.dtype == parameter.grad.dtype == FP32
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize(("frees", "own_units"), ONE_BY_ONE)
def test_only_what_computes_is_cast(untied_folder, one_rank, frees, own_units):
    policy = policy_of(untied_folder, one_rank, HALF | {"reshard_after_forward": frees, "own_units": own_units})
    mini, model = share(0, 1, WHOLE), policy.model
    blocks = [2 * sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks()]
    matrix, everything = 2 * model.head.weight.numel(), 2 * sum(parameter.numel() for parameter in model.parameters())
    with ByteTracker() as tracker:
        policy.accumulate(micro_batches(mini), mini.counts, 0.9)
        most, left = tracker.most()["gathered parameters"], tracker.kinds()
    assert "gathered parameters" not in left
    root = everything - sum(blocks) - 2 * own_units * matrix
    at_once = max(matrix * own_units, *blocks) if frees else everything - root
    assert most == pytest.approx(root + at_once, rel=0.01)


def test_a_unit_is_cast_in_one_operation_whose_weights_can_be_multiplied_at_once(tiny_folder, one_rank):
    policy = policy_of(tiny_folder, one_rank, HALF | {"reshard_after_forward": False})
    mini, model = share(0, 1, WHOLE), policy.model
    watch, counts = operations_named(["_foreach_copy_"])
    seen = []

    def look(block, *_):
        attention, mlp = block.self_attn, block.mlp
        for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            seen.append(joined([layer.weight for layer in layers], 0))

    for block in model.blocks():
        block.register_forward_hook(look)
    with watch:
        policy.compute_log_probs(mini.batch, mini.micro_batches[:1], 0.9, False)
    assert counts == {"_foreach_copy_": len(model.blocks()) + 1}
    assert len(seen) == 2 * len(model.blocks())
    assert all(weight is not None and weight.dtype is BF16 for weight in seen)


@pytest.mark.parametrize("breaks_in", ["forward", "backward"])
def test_an_update_that_broke_off_leaves_no_trace_in_the_next(untied_folder, one_rank, breaks_in):
    policy, mini = policy_of(untied_folder, one_rank, HALF), share(0, 1, WHOLE)
    expected = outcome(untied_folder, one_rank, HALF)[1]

    def fail(*_):
        raise RuntimeError("in the middle")

    def watch(_, arguments, output):
        if breaks_in == "forward":
            fail()
        output.register_hook(fail)

    hook = policy.model.blocks()[0].register_forward_hook(watch)
    with pytest.raises(RuntimeError, match="in the middle"):
        policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    hook.remove()
    abandon_pass(policy.model)
    for parameter in policy.model.parameters():
        assert parameter.dtype == FP32
        parameter.grad = None
    policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    assert torch.equal(torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()]), expected)


def test_hooks_of_a_parameter_at_rest_get_the_gradient_of_each_backward(untied_folder, one_rank):
    policy, mini = policy_of(untied_folder, one_rank, HALF), share(0, 1, WHOLE)
    taken = {name: 0 for name, _ in policy.model.named_parameters()}

    def take(name):
        def hook(parameter):
            assert parameter.grad.dtype == FP32
            taken[name] += 1
            parameter.grad = None

        return hook

    for name, parameter in policy.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(take(name))
    policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    assert set(taken.values()) == {len(mini.micro_batches)}
    assert all(parameter.grad is None for parameter in policy.model.parameters())


class Sum(torch.nn.Module):
    """A unit of two inputs, in a tuple."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, pair):
        return pair[0] @ self.weight + (pair[1] @ self.weight).relu()


class Fork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unit = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), Sum()

    def forward(self, x):
        return self.unit((self.first(x), self.second(x))).sum()


def test_a_unit_of_several_inputs_waits_for_the_gradients_of_all_and_casts_what_comes_in():
    torch.manual_seed(0)
    model, x = Fork(), torch.randn(3, 4)
    plain = copy.deepcopy(model).bfloat16()
    casts = CastUnits([model.unit], BF16)
    casts.take_over(model)
    model(x).backward()
    plain(x.bfloat16()).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad.float())
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
