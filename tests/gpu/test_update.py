"""One model and one optimizer step on the GPU: log-probs, loss and gradients, what waits, what is compiled, what is repeatable.

Only a GPU has kernels of its own, a queue the host can wait for, and a compiler for its kernels.
"""

import pytest
import torch

from tests.gpu import machine
from tests.memory.activations.test_fused import after_steps
from tests.memory.batching.test_shared_prompt import counts_of, grouped, sharing
from tests.memory.optimizers import give_gradients, parameters
from tests.tensors import whole_of
from tests.worker.test_policy import ACTOR, SMALL, batch, micro_batches, naive_gradients, shares
from verl_memopt.config.schema import Fsdp, Model
from verl_memopt.distributed.device import device_rng_state, set_device_rng_state
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.fused import fused_statements
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import micro_batches_of

FACTOR = 2.0
"""How much farther from fp32 on a CPU our model may be than transformers' own with whole logits, on one device in one dtype."""
FLOOR = {"fp32": 2e-5, "bfloat16": 2**-8}
"""What is always allowed of a gradient, as a share of its norm: a GPU's exponentials, sines and products round by themselves."""
SHAPE = TinyShape(
    hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3, tie_embeddings=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("update") / "model", SHAPE, seed=2)


def policy_on(device, folder, mesh, dtype="fp32", attention="auto", compiled=False, recompute=False, offload=None, **model):
    """Gives a policy on a device. offload: (min_bytes, in_flight) of activation offload; model: settings of the model."""
    settings = Model(path=str(folder), **{"attn_implementation": attention, "logprob_chunk_tokens": 8, **model})
    policy_model = build_policy(
        settings, Fsdp(dtype=dtype), folder, mesh, device, ModelUse(recompute=recompute, compiled=compiled)
    )
    materialize(policy_model, folder, device)
    moved = None if offload is None else ActivationOffload(policy_model, device, *offload)
    return Policy(policy_model, ACTOR, 10, 1, device, moved)


def step_of(policy, mini):
    """Gives the loss and all gradients of a mini-batch, on the host in fp32."""
    metrics = policy.accumulate(micro_batches(mini), mini.counts, 0.9)
    found = {name: whole_of(parameter.grad).float().cpu() for name, parameter in named_weights(policy.model)}
    policy.trained.optimizer.zero_grad()
    return float(metrics["actor/loss"]), found


def largest(found, expected):
    """Gives the largest error of a gradient, as a share of the norm of all."""
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    return max(float((found[name] - gradient).norm() / whole) for name, gradient in expected.items())


CASES = [
    pytest.param(dtype, attention, marks=[pytest.mark.rehearsed] if attention == "auto" else [])
    for dtype in ("fp32", "bfloat16")
    for attention in ("auto", "sdpa", "eager")
]


@pytest.mark.parametrize(("dtype", "attention"), CASES)
def test_loss_and_gradients_are_as_near_to_fp32_on_a_cpu_as_those_of_whole_logits(device, one_rank, folder, dtype, attention):
    """bfloat16 goes through FSDP2 with fp32 masters, which transformers' own copy in bfloat16 does not have."""
    loss, truth = naive_gradients(folder)
    naive_loss, naive = naive_gradients(folder, device, torch.float32 if dtype == "fp32" else getattr(torch, dtype))
    naive = {name: gradient.float().cpu() for name, gradient in naive.items()}
    found_loss, found = step_of(policy_on(device, folder, one_rank, dtype, attention), shares(batch(), 1, SMALL)[0])
    assert largest(found, truth) <= FACTOR * largest(naive, truth) + FLOOR[dtype]
    assert abs(found_loss - loss) <= FACTOR * abs(naive_loss - loss) + FLOOR[dtype] * abs(loss)


@pytest.mark.rehearsed
@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_log_probs_of_a_gpu_are_those_of_a_cpu(device, one_rank, folder, dtype):
    whole = batch()
    scores = policy_on(device, folder, one_rank, dtype).compute_log_probs(whole, [range(8), range(8, 16)], 0.9, True)
    with machine.on_cpu() as mesh:
        expected = policy_on(torch.device("cpu"), folder, mesh).compute_log_probs(whole, [range(8), range(8, 16)], 0.9, True)
    assert scores.log_probs.device.type == "cpu"
    bound = {"fp32": 2e-5, "bfloat16": 2e-2}[dtype]
    assert (scores.log_probs - expected.log_probs).abs().max() <= bound
    assert (scores.entropy - expected.entropy).abs().max() <= bound


# What the host waits for: nothing between the micro-batches of a step.

LOOPS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "sdpa in bfloat16": {"attention": "sdpa", "dtype": "bfloat16"},
    "recomputed": {"recompute": True},
    "offloaded": {"offload": (64, 2)},
    "recomputed and offloaded in bfloat16": {"dtype": "bfloat16", "recompute": True, "offload": (64, 1)},
    "tiled": {"logprob_vocab_tile": 96},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rehearsed] * (name in ("plain", "eager", "offloaded"))) for name in LOOPS]
)
def test_the_host_waits_for_nothing_between_micro_batches(device, one_rank, folder, name):
    policy, (mini,) = policy_on(device, folder, one_rank, **LOOPS[name]), shares(batch(), 1, SMALL)
    policy.trained.take_step(policy.accumulate(micro_batches(mini), mini.counts, 0.9))  # what is made once may wait
    micros = micro_batches(mini)
    with machine.nothing_waits():
        policy.trained.accumulate(micros, mini.counts, policy.loss_at(0.9))
        norm = policy.trained.clip()  # the host then waits once, to read it
        policy.trained.apply()
    assert float(norm) > 0


@pytest.mark.rehearsed
@pytest.mark.parametrize("options", [{}, {"offload": (64, 2)}, {"dtype": "bfloat16"}], ids=["plain", "offloaded", "bfloat16"])
def test_the_host_waits_for_nothing_where_a_prompt_is_kept(device, one_rank, folder, options):
    policy, whole = policy_on(device, folder, one_rank, **options), sharing(grouped(40, [9, 5, 1, 12, 3, 7]))
    policy.model.supports_prefix_kv = True
    parts = [[0, 1], [2, 3], [4, 5]]
    policy.accumulate(micro_batches_of(whole, parts, True), counts_of(whole), 0.9)
    micros, counts = list(micro_batches_of(whole, parts, True)), counts_of(whole)
    with machine.nothing_waits():
        policy.accumulate(micros, counts, 0.9)
    assert sum(micro.prompt is not None for micro in micros) >= 2


@pytest.mark.rehearsed
def test_a_wait_is_found(device):
    value = torch.ones(1, device=device)
    with pytest.raises((RuntimeError, AssertionError)) as raised, machine.nothing_waits():
        value.item()
    assert machine.waited(raised.value)


@pytest.mark.rehearsed
@pytest.mark.parametrize("slow", ["copies", "both"])
def test_a_prefix_kv_gives_the_gradients_of_one_computed_again(device, one_rank, folder, slow):
    whole, parts, found = sharing(grouped(40, [9, 5, 1, 12, 3, 7])), [[0, 1], [2, 3], [4, 5]], []
    for reuse in (False, True):
        policy = policy_on(device, folder, one_rank, offload=(64, 1) if reuse else None)
        policy.model.supports_prefix_kv = reuse
        with machine.Slowed(slow):
            policy.accumulate(micro_batches_of(whole, parts, reuse), counts_of(whole), 0.9)
        found.append({name: whole_of(parameter.grad).cpu() for name, parameter in named_weights(policy.model)})
    assert largest(found[1], found[0]) <= machine.size(1.6e-5, 2e-6)


# The optimizer.

OPTIMIZERS = {
    "fp32": ({}, 2e-6),
    "offloaded": ({"offload": True, "bucket_megabytes": 0.01}, 2e-6),
    "bf16 moments": ({"state_dtype": "bfloat16"}, 2e-3),
    "int8 moments": ({"state_dtype": "int8"}, 5e-2),
    "int4 moments": ({"state_dtype": "int4", "offload": True}, 3e-1),
}
"""Options of our AdamW, and how far four steps may be from a CPU's, as a share of the way: moments in fewer bits are rounded by
numbers drawn at random, which are others on a GPU."""


@pytest.mark.rehearsed
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bucketed_adamw_moves_weights_as_on_a_cpu(device, name):
    options, bound = OPTIMIZERS[name]
    start = torch.cat([parameter.detach().flatten() for parameter in parameters()])
    found, expected = (stepped(where, options) for where in (device, torch.device("cpu")))
    rounded = 4 * 2**-24 * start.norm()  # each of four steps rounds each weight
    assert (found - expected).norm() <= machine.size(bound, 0) * (expected - start).norm() + machine.size(rounded, 0)


def stepped(device, options):
    params = [torch.nn.Parameter(parameter.detach().to(device)) for parameter in parameters()]
    optimizer = BucketedAdamW(params, lr=1e-2, **options)
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in params])


@pytest.mark.rehearsed
def test_bucketed_adamw_is_torchs_fused_adamw_to_the_bit(device):
    params, other = ([torch.nn.Parameter(one.detach().to(device)) for one in parameters()] for _ in range(2))
    ours, theirs = BucketedAdamW(params, lr=1e-2), torch.optim.AdamW(other, lr=1e-2, fused=True)
    for step in range(4):
        for some, optimizer in ((params, ours), (other, theirs)):
            generator = torch.Generator().manual_seed(step)
            for parameter in some:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(params, other, strict=True))


# Compiled functions.


def compiles():
    """Says why functions cannot be compiled here, if they cannot."""
    import shutil

    return None if shutil.which("gcc") or shutil.which("cc") or shutil.which("clang") else "no C compiler is installed"


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_compiled_functions_give_the_gradients_of_uncompiled_ones(device, one_rank, folder, dtype):
    if compiles() is not None:
        pytest.skip(f"compiled functions: {compiles()}")
    (mini,) = shares(batch(), 1, SMALL)
    plain = step_of(policy_on(device, folder, one_rank, dtype), mini)
    compiled = step_of(policy_on(device, folder, one_rank, dtype, compiled=True), mini)
    assert largest(compiled[1], plain[1]) <= {"fp32": 1e-5, "bfloat16": 2**-8}[dtype]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("state_dtype", ["fp32", "int8", "int4"])
def test_a_compiled_step_over_halved_masters_gives_those_of_an_uncompiled_one(device, state_dtype):
    if compiles() is not None:
        pytest.skip(f"compiled functions: {compiles()}")
    *expected, changed = after_steps(state_dtype, device)
    with fused_statements(True):
        *found, changed_too = after_steps(state_dtype, device)
    # A GPU may divide and take roots with fewer digits where it compiles, so a code of a moment may be drawn one higher.
    exact = state_dtype == "fp32"
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two) if exact else (one - two).norm() <= 1e-4 * two.norm()
    torch.testing.assert_close(changed_too, changed, rtol=0, atol=0 if exact else 1e-2)


# What repeats.


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.rehearsed
@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_in_deterministic_mode_a_step_repeats_to_the_bit(device, one_rank, folder, deterministic, dtype):
    (mini,) = shares(batch(), 1, SMALL)
    one, other = (step_of(policy_on(device, folder, one_rank, dtype), mini) for _ in range(2))
    assert one[0] == other[0]
    assert all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())


@pytest.mark.rehearsed
def test_a_restored_generator_draws_the_same_again(device):
    states = torch.get_rng_state(), device_rng_state(device)
    expected = torch.rand(5, device=device)
    torch.set_rng_state(states[0])
    if states[1] is not None:
        set_device_rng_state(device, states[1])
    assert torch.equal(torch.rand(5, device=device), expected)
