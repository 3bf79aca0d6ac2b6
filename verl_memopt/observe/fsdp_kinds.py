"""Labels for the allocations of FSDP2: gathered parameters, collective buffers and sharded gradients.

The functions are private to torch. No other file names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from verl_memopt.observe.byte_tracker import mark, scope

PATCHED = (
    (fsdp, "foreach_all_gather"),
    (fsdp, "foreach_reduce"),
    (fsdp.FSDPParamGroup, "wait_for_unshard"),
    (fsdp.FSDPParam, "to_accumulated_grad_if_needed"),
)
"""Owners and names under which FSDP2 looks up the functions."""


@contextmanager
def fsdp_kinds() -> Iterator[None]:
    """Label FSDP2's storages with the active tracker while the body runs.

    Gathered parameters are created while FSDP2 waits for the unshard. Collective buffers are created in its all-gather and reduce
    functions. A sharded gradient is ``grads`` from the moment the reduce returns; a whole gradient that is not reduced, from the
    moment FSDP2 stores it.
    """
    originals = [getattr(owner, name) for owner, name in PATCHED]
    gather, reduce, wait, put_by = originals
    gathering, waiting = _inside("collective buffers", gather), _inside("gathered parameters", wait)
    replacements = (gathering, _marking_grads(reduce), waiting, _marking_whole_grad(put_by))
    for (owner, name), replacement in zip(PATCHED, replacements, strict=True):
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in zip(PATCHED, originals, strict=True):
            setattr(owner, name, original)


def _inside(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scope(kind=kind):
            return function(*args, **kwargs)

    return scoped


def _marking_grads(reduce: Callable[..., Any]) -> Callable[..., Any]:
    scoped = _inside("collective buffers", reduce)

    @wraps(reduce)
    def marking(fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
        result = scoped(fsdp_params, *args, **kwargs)
        mark("grads", [p.sharded_param.grad for p in fsdp_params if p.sharded_param.grad is not None])
        return result

    return marking


def _marking_whole_grad(put_by: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(put_by)
    def marking(fsdp_param: Any) -> Any:
        result = put_by(fsdp_param)
        whole = fsdp_param.unsharded_accumulated_grad
        mark("grads", [grad for grad in (whole, fsdp_param._unsharded_param.grad) if grad is not None])
        return result

    return marking
