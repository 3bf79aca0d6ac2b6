"""What FSDP2 keeps between forward and backward of a unit, over how many ranks it shards, and when it reduces gradients.

Bytes saved: N counts the parameters, N_u those of the units that are gathered at once, and W the ranks. b_c, b_w, b_o, b_g and
b_r are the bytes per parameter of compute, weights at rest, optimizer state, gradients and gradient reduction.

* ``reshard_after_forward=true`` frees b_c x (N - N_u) bytes of gathered parameters between forward and backward (b_c is 2 for
  bfloat16 compute). This also holds on one device, where a unit is cast instead of gathered. The parameters of the root unit
  stay, such as a tied head, because backward begins with them. With a number k, b_c x (N - N_u) / k bytes are kept.
* ``fsdp_size=F`` keeps (b_w + b_o + b_g) x N / F bytes instead of N / W.
* ``gradient_sync=every`` saves b_r x N x (1 - 1/W) bytes compared with ``last``, which holds unsharded gradients until the last
  micro-batch (b_r is 4 for fp32 reduction).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl_memopt.distributed.device import fsdp_params, fsdp_units
from verl_memopt.memory.precision_torch import CastUnits
from verl_memopt.memory.shared_weights_torch import GatheredWeights

Item = TypeVar("Item")


def reshard_units(model: nn.Module) -> None:
    """Free the gathered parameters of every unit, at the end of a pass without backward.

    If ``reshard_after_forward`` is false or a number, a unit would keep them until a backward frees them.
    """
    for unit in fsdp_units(model):
        unit.reshard()
        _free_post_forward_shards(unit)


def can_abandon(model: nn.Module) -> bool:
    """Return whether :func:`abandon_pass` works: the model is not sharded, or torch can reset FSDP2 (2.13 and later).

    It does not work if ranks share weights with their engines: repeating a gather would overwrite the weights of an engine.
    """
    if getattr(model, "rows", None) is not None:
        return False
    return not isinstance(model, FSDPModule) or hasattr(model, "reset_iter_state")


def abandon_pass(model: nn.Module) -> None:
    """Prepare a model for a new forward after an error in the middle of a forward or backward.

    Gathered parameters are freed, and unsharded gradients that are not yet reduced are dropped. The sharded gradients stay.
    """
    casts: CastUnits | None = getattr(model, "casts", None)
    if casts is not None:
        casts.abandon()
    graphs: Any = getattr(model, "graphs", None)
    if graphs is not None:
        graphs.clear()  # smaller micro-batches need less memory at fixed addresses
    # Before its first forward the model has no state to reset.
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return
    model.reset_iter_state()
    for unit in fsdp_units(model):
        _free_post_forward_shards(unit)
        for parameter in fsdp_params(unit):
            # A sum over micro-batches of which one failed. It is unknown which of them it contains.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _free_post_forward_shards(unit: FSDPModule) -> None:
    # If `reshard_after_forward` is a number, FSDP2 keeps larger shards for backward. Free them.
    for parameter in fsdp_params(unit):
        parameter._sharded_post_forward_param = None
        parameter._sharded_post_forward_param_data = None


def synced(
    micro_batches: Iterable[Item], model: nn.Module, gradient_sync: str, rows: GatheredWeights | None = None
) -> Iterator[Item]:
    """Yield the micro-batches of one optimizer step; before each, tell FSDP2 whether its backward reduces gradients.

    All ranks must have the same number of micro-batches. ``gradient_sync`` is ``every`` or ``last``, as in the settings. If
    ``rows`` is given, it is told instead of FSDP2.
    """
    if not isinstance(model, FSDPModule) and rows is None:
        yield from micro_batches
        return
    iterator = iter(micro_batches)
    following = list(islice(iterator, 1))
    while following:
        # Read one item ahead, to know which micro-batch is the last one: with ``last`` only its backward reduces.
        item, following = following.pop(), list(islice(iterator, 1))
        reduce = not following or gradient_sync == "every"
        if rows is not None:
            rows.reduces = reduce
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce)
            model.set_is_last_backward(reduce)
        yield item
        del item  # so that it is freed before the next item is made
