"""A sharded policy and its steps, for the knobs that say where parameters and gradients lie."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.worker.test_policy import ACTOR, CPU, batch, micro_batches, shares
from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Model, TrainedFsdp
from verl_memopt.distributed.device import leave_process_group, training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.model.assembly import ModelUse, build_policy, materialize
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.device_ledger import fsdp_kinds, optimizer_scope
from verl_memopt.worker.policy import Policy

WHOLE, SMALL = 10_000, 60
WIDE = TinyShape(vocab_size=4096, hidden_size=64, intermediate_size=256, num_layers=4, tie_embeddings=False)
"""A model whose parameters outweigh its activations."""


def wide_model(folder, **shape):
    return make_tiny_model(folder / "wide", replaced(WIDE, shape), seed=4)


def policy_of(folder, mesh, fsdp=None, world_size=1, recompute=False, prune=True):
    """Return a policy with this sharding and precision. It computes in fp32 unless ``fsdp`` says otherwise."""
    fsdp = replaced(TrainedFsdp(dtype="fp32"), fsdp or {})
    settings = Model(path=str(folder), attn_implementation="sdpa", logprob_chunk_tokens=8, prune_last_block=prune)
    model = build_policy(settings, fsdp, folder, mesh, CPU, ModelUse(recompute=recompute))
    materialize(model, folder, CPU)
    return Policy(model, replaced(ACTOR, {"fsdp_config": fsdp, "entropy_coeff": 0.0}), 10, world_size, CPU)


def share(rank=0, world_size=1, budget=SMALL):
    """Return this rank's share of a batch, in several micro-batches."""
    mini = shares(batch(), world_size, budget)[rank]
    assert budget == WHOLE or len(mini.micro_batches) >= 2
    return mini


def three_steps(policy, mini, around=None):
    """Return the log-probs before each of three steps, the metrics of each, and this rank's shards of the weights after them.

    ``around`` returns a context for a phase by its name.
    """
    found = []
    for _ in range(3):
        with around("old_log_prob") if around else nullcontext():
            log_probs = policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False).log_probs
        with around("update_actor") if around else nullcontext():
            metrics = policy.update([mini], 0.9)
        found.append((log_probs, metrics))
    with around("update_weights") if around else nullcontext():
        weights = {name: local(p).detach().clone() for name, p in policy.model.named_parameters()}
    return found, weights


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def assert_equal_runs(found, expected):
    """Assert that two results of :func:`three_steps` are equal in every bit."""
    for (log_probs, metrics), (other_log_probs, other_metrics) in zip(found[0], expected[0], strict=True):
        assert torch.equal(log_probs, other_log_probs)
        if metrics.keys() != other_metrics.keys():  # torch's own AdamW does not compare weights before and after
            assert metrics.keys() ^ other_metrics.keys() == {"actor/changed_weights"}
            metrics, other_metrics = ({**each, "actor/changed_weights": 0.0} for each in (metrics, other_metrics))
        assert metrics == other_metrics
    assert found[1].keys() == expected[1].keys()
    for name, weight in found[1].items():
        assert torch.equal(weight, expected[1][name]), name


@contextmanager
def fake_ranks(world_size, fsdp_size=-1, rank=0):
    """Return the mesh of one rank in a fake process group, whose collectives allocate as real ones and move nothing."""
    leave_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield training_mesh("cpu", world_size, fsdp_size)
    finally:
        leave_process_group()


def tracked_steps(policy, micro, counts):
    """Return the tracker after two steps, with the peaks of the second."""
    with ByteTracker() as tracker, fsdp_kinds():
        tracker.mark("params", policy.model.parameters())
        tracker.mark("buffers", policy.model.buffers())
        for name in ("first", "second"):
            tracker.enter(name)
            policy.accumulate(micro, counts, 0.9)
            with optimizer_scope(policy.trained.optimizer):
                policy.trained.optimizer.step()
            policy.trained.optimizer.zero_grad(set_to_none=True)
        tracker.second = dict(tracker.peaks)
    return tracker


def device_peak(folder, fsdp=None, world_size=1, fsdp_size=-1, recompute=True, budget=SMALL):
    """Return the device peak of rank 0's second step, and the policy's bytes at rest."""
    with fake_ranks(world_size, fsdp_size) as mesh:
        # The last block whole, so that where the peak is does not depend on what its tokens predict.
        policy = policy_of(folder, mesh, fsdp, world_size, recompute, prune=False)
        mini = share(0, 1, budget)
        tracker = tracked_steps(policy, micro_batches(mini), mini.counts)
        return tracker.second["device"]


def score_peak(folder, fsdp):
    """Return the device peak of a second log-prob pass of the first of four ranks."""
    with fake_ranks(4) as mesh:
        policy, mini = policy_of(folder, mesh, fsdp, 4), share()
        with ByteTracker() as tracker, fsdp_kinds():
            tracker.mark("params", policy.model.parameters())
            for name in ("first", "second"):
                tracker.enter(name)
                policy.compute_log_probs(mini.batch, mini.micro_batches, 0.9, False)
            return tracker.peaks["device"].bytes


def save(policy, folder, contents=("model", "optimizer")):
    save_training_state(folder, policy.model, policy.trained.optimizer, policy.trained.schedule, CPU, list(contents))


def load(policy, folder, contents=("model", "optimizer")):
    load_training_state(folder, policy.model, policy.trained.optimizer, policy.trained.schedule, CPU, list(contents))
