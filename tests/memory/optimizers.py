"""Optimizers on small sharded and plain parameters, for the knobs of the update."""

from contextlib import contextmanager

import torch
from torch.distributed.fsdp import fully_shard

from tests.memory.sharded import WHOLE, policy_of, share
from tests.worker.test_policy import ACTOR, CPU
from verl_memopt.config.keys import replaced
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.device_ledger import state_tensors
from verl_memopt.worker.policy import Policy

SHAPES = ((300, 96), (33, 70), (96,), (7,), (128, 128), (3, 5, 64))
"""Rows of many lengths, a tensor that fills no vector, norms; a bucket of 0.01 MiB cuts the first in several."""


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        size = torch.rand((), generator=generator)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(parameter)


def weights_after(make, steps=4, dtype=torch.float32, shapes=SHAPES):
    """Return parameters after some steps of the optimizer that ``make`` returns for them."""
    params = parameters(dtype, shapes)
    optimizer = make(params)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return params


def bucketed(**options):
    """Return a factory of our AdamW with these options."""
    return lambda params: BucketedAdamW(params, lr=1e-2, **options)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def policy_with(folder, mesh, world_size=1, fsdp=None, **optim):
    """Return a policy with these optimizer settings."""
    plain = policy_of(folder, mesh, fsdp, world_size)
    actor = replaced(plain.actor, {"optim": replaced(ACTOR.optim, optim)})
    return Policy(plain.model, actor, 10, world_size, CPU)


def whole_share(rank=0, world_size=1):
    """Return this rank's rows as one micro-batch."""
    return share(rank, world_size, WHOLE)


@contextmanager
def counting(model, optimizer):
    """Return a tracker that has counted the present tensors."""
    with ByteTracker() as tracker:
        tracker.mark("params", model.parameters())
        tracker.mark("buffers", model.buffers())
        tracker.mark("optimizer", state_tensors(optimizer))
        yield tracker


def two_linears(mesh, dtype=torch.float32):
    """Return a sharded model of 2 x 1024 x 256 parameters, whose rows are whole blocks of every storage format."""
    torch.manual_seed(0)
    sizes = ((256, 1024), (1024, 256))
    model = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False, dtype=dtype) for size in sizes))
    fully_shard(model, mesh=mesh)
    return model
