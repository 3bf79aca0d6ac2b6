"""Policies whose activations are measured: a deep narrow model, micro-batches of equal rows, and what a step holds."""

from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory.sharded import fake_ranks
from tests.tensors import whole_of
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Actor, Model, Optim, TrainedFsdp
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.lora_torch import initialize_adapters
from verl_memopt.memory.tiled_mlp import TiledMlp
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker
from verl_memopt.observe.device_ledger import fsdp_kinds, optimizer_scope
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MicroBatch, MiniBatch, micro_batch

CPU = torch.device("cpu")
ACTOR = Actor(use_prefix_grouper=False, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.2, optim=Optim(lr=1e-2))
SHAPE = TinyShape(
    vocab_size=1792, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=2, num_kv_heads=1, tie_embeddings=False
)
"""Untied, so that blocks, embedding and head are units of their own; the head is as large as a block, so that the peak of a step
is in the last block, as it is in models of ordinary shape."""
H, KV, D = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
WIDTH, MLP, LAYERS = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_layers
PROMPT, RESPONSE, ROWS = 1, 64, 4
TOKENS, RESPONSES = ROWS * (PROMPT + RESPONSE - 1), ROWS * RESPONSE
"""Of one micro-batch. A response's last token is not computed."""
CHUNK = 2**14
"""Bytes of a chunk of host memory, small enough not to blur what rests in it."""
FP32 = 4

ELEMENTWISE, LORA = {"recompute_elementwise": True}, {"lora_rank": 4, "lora_alpha": 8.0}
TILED = {"tiled_mlp": TiledMlp(True, 4)}
FULL = {"recompute": True}
SELECTIVE = {**FULL, "gradient_checkpointing_mode": "selective"}
EVERY_2 = {**FULL, "gradient_checkpointing_mode": "every_n", "gradient_checkpointing_every": 2}
"""Options of :func:`build` that several files try out."""


def model_folder(parent, shape=SHAPE):
    return make_tiny_model(parent / "deep", shape, seed=5)


def build(
    folder,
    mesh,
    world_size=1,
    offload=None,
    recompute=False,
    dtype="fp32",
    masters="fp32",
    fill=True,
    fsdp=None,
    optim=None,
    **model,
):
    """Return a policy. ``fsdp``: sharding. ``offload``: (min_bytes, in_flight) of activation offload. ``model``: settings."""
    asked = {"attn_implementation": "sdpa", "logprob_chunk_tokens": 64, "recompute_elementwise": False, **model}
    settings = Model(path=str(folder), **asked)
    fsdp = replaced(TrainedFsdp(dtype=dtype, model_dtype=masters), fsdp or {})
    use = ModelUse(recompute=recompute, trained=True, quantization=settings.quantization)
    policy_model = build_policy(settings, fsdp, folder, mesh, CPU, use)
    if fill:
        materialize(policy_model, folder, CPU)
        initialize_adapters(policy_model, 1)
    moved = None if offload is None else ActivationOffload(policy_model, CPU, *offload, chunk_bytes=CHUNK)
    actor = replaced(ACTOR, {"optim": replaced(ACTOR.optim, optim or {})})
    return Policy(policy_model, actor, 10, world_size, CPU, moved)


def quantised(folder, mesh, kind, **model):
    """Return a frozen model with quantised blocks. ``model``: its settings."""
    asked = {"attn_implementation": "sdpa", "logprob_chunk_tokens": 64, **model}
    settings = Model(path=str(folder), **asked)
    policy_model = build_policy(settings, TrainedFsdp(dtype="fp32"), folder, mesh, CPU, ModelUse(quantization=kind))
    policy_model.requires_grad_(False)
    materialize(policy_model, folder, CPU)
    return policy_model


def mini_batch(rank=0, world_size=1, micro_batches=2, response=RESPONSE):
    """Return a rank's share: micro-batches of ROWS equal rows."""
    rows = ROWS * micro_batches
    generator = torch.Generator().manual_seed(7 + rank)

    def ids(length):
        return Ragged.from_rows([torch.randint(256, (length,), generator=generator) for _ in range(rows)], torch.int64)

    tokens = rows * response
    batch = RolloutBatch(
        prompts=ids(PROMPT),
        responses=ids(response),
        group=torch.arange(rows) // 4,
        old_log_probs=torch.randn(tokens, generator=generator) * 0.05 - 5.7,
        advantages=torch.randn(tokens, generator=generator),
        batch_size=[],
    )
    cut = [list(range(start, start + ROWS)) for start in range(0, rows, ROWS)]
    return MiniBatch(batch, cut, GlobalCounts(float(tokens * world_size), float(rows * world_size)))


def micros(mini):
    return [micro_batch(mini.batch, rows) for rows in mini.micro_batches]


def first_gradients(policy, mini):
    """Return the whole gradients of a mini-batch, for all trained parameters."""
    policy.accumulate(micros(mini), mini.counts, 0.9)
    return [whole(parameter.grad) for parameter in policy.model.parameters() if parameter.grad is not None]


def largest_difference(found, expected):
    """Return the largest difference from the expected tensor, relative to its norm if that is not 0."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - two).norm() / (two.norm() or 1.0)) for one, two in pairs)


def whole(tensor):
    return whole_of(tensor).detach().clone()


def without_traffic(policy):
    """Drop the metric that only offloading has."""
    policy.trained.offload.take_bytes_moved()
    update = policy.update

    def quiet(*args):
        return {name: value for name, value in update(*args).items() if not name.startswith("memory/")}

    policy.update = quiet
    return policy


@contextmanager
def tracking(policy, *inputs):
    with ByteTracker() as tracker, fsdp_kinds():
        tracker.mark("params", [*policy.model.parameters(), *policy.model.buffers()])
        tracker.mark("inputs", [value for one in inputs for value in vars(one).values() if isinstance(value, torch.Tensor)])
        tracker.mark("inputs", [value for one in inputs for value in vars(one.pack).values() if isinstance(value, torch.Tensor)])
        yield tracker


def tracked_step(policy, micro, counts, steps=2):
    """Return the tracker after some steps, with the peaks of the last one's micro-batches. Fake tensors need two steps."""
    with tracking(policy, *micro) as tracker:
        for step in range(steps):
            tracker.enter(f"step {step}")
            policy.accumulate(micro, counts, 0.9)
            peaks = dict(tracker.peaks)
            with optimizer_scope(policy.trained.optimizer):
                policy.trained.optimizer.step()
            policy.trained.optimizer.zero_grad(set_to_none=True)
        tracker.peaks = peaks
    return tracker


def peaks(policy, mini, steps=2):
    """Return the (device, host) bytes at the peaks of the last step's forwards and backwards."""
    tracker = tracked_step(policy, micros(mini), mini.counts, steps)
    return tracker.peaks[DEVICE].bytes, tracker.peaks[HOST].bytes


def kept(policy):
    """Return the (device, host) bytes of activations between the forward and the backward of the second micro-batch."""
    mini = mini_batch()
    micro = micros(mini)
    with tracking(policy, *micro) as tracker:
        policy.accumulate([micro_batch(mini.batch, [0])], mini.counts, 0.9)  # makes what lasts
        before = activations(tracker)
        with nullcontext() if policy.trained.offload is None else policy.trained.offload.forward():
            loss, metrics = policy.loss_at(0.9)(micro[1], mini.counts, None)
        found = activations(tracker) - before, tracker.total(HOST)
        del loss, metrics
    return found


def activations(tracker):
    return tracker.kinds(DEVICE).get("activations", 0)


def close(found, expected, share=0.05):
    return abs(found - expected) <= share * abs(expected)


def step_peaks(folder, mesh, mini=None, **options):
    """Return the (device, host) bytes at the peaks of the first step's forwards and backwards."""
    return peaks(build(folder, mesh, **options), mini or mini_batch(), steps=1)


def assert_fake_tensors_give_the_bytes_of_real_ones(folder, **options):
    """Assert that fake tensors reach the peaks of real ones, on the first of four ranks."""
    mini = mini_batch(response=16)
    real = micros(mini)
    with fake_ranks(4) as mesh:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            micro = [_faked(fake, one) for one in real]
            tracker = tracked_step(build(folder, mesh, fill=False, **options), micro, mini.counts)
        found = tracker.peaks[DEVICE].bytes, tracker.peaks[HOST].bytes
        assert found == peaks(build(folder, mesh, **options), mini)


def _faked(fake, micro):
    flat = (micro.old_log_probs, micro.ref_log_probs, micro.advantages)
    return MicroBatch(micro.pack.map(fake.from_tensor), *(one if one is None else fake.from_tensor(one) for one in flat))
