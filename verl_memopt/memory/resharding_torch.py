"""What FSDP2 keeps between a unit's forward and its backward, over how many ranks it shards, and when it reduces gradients.

Bytes saved: let N count the parameters, N_u those of the units that are gathered at once, and W the ranks.

* ``reshard_after_forward=true`` frees b_c x (N - N_u) bytes of gathered parameters between forward and backward (b_c is 2 for
  bfloat16 compute), on one device too, where the gathered copy is the cast one. The root's own parameters stay, a tied head among
  them: backward begins with them. A number k keeps b_c x (N - N_u) / k of the bytes.
* ``fsdp_size=F`` keeps (b_w + b_o + b_g) x N / F bytes instead of N / W.
* ``gradient_sync=every`` saves b_r x N x (1 - 1/W) bytes against ``last``, which holds whole gradients until the last micro-batch
  (b_r is 4 for fp32 reduction).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from verl_memopt.distributed.device import fsdp_params, fsdp_units
from verl_memopt.memory.shared_weights_torch import GatheredWeights

Item = TypeVar("Item")


def reshard_units(model: nn.Module) -> None:
    """Free the gathered parameters of every unit, at the end of a pass without backward.

    With ``reshard_after_forward`` false or a number, a unit would keep them until a backward frees them.
    """
    for unit in fsdp_units(model):
        unit.reshard()
        _free_post_forward_shards(unit)


def can_abandon(model: nn.Module) -> bool:
    """Return whether :func:`abandon_pass` works: the model is not sharded, or torch can reset FSDP2 (2.13 and later).

    It does not if ranks share weights with their engines: a repeated gather would write over an engine's weights.
    """
    if getattr(model, "rows", None) is not None:
        return False
    return not isinstance(model, FSDPModule) or hasattr(model, "reset_iter_state")


def abandon_pass(model: nn.Module) -> None:
    """Make a model ready for a new forward after an error in the middle of a forward or a backward.

    Gathered parameters are freed, and whole gradients that wait for their reduction are dropped. The parameters' own gradients
    stay.
    """
    # Before its first forward the model has no state to reset.
    if not isinstance(model, FSDPModule) or model._get_fsdp_state()._is_root is None:
        return
    model.reset_iter_state()
    for unit in fsdp_units(model):
        _free_post_forward_shards(unit)
        for parameter in fsdp_params(unit):
            # Added up over micro-batches that failed; nobody knows which of them are in it.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _free_post_forward_shards(unit: FSDPModule) -> None:
    # Free the larger shards that a number as `reshard_after_forward` leaves; FSDP2 keeps them for a backward.
    for parameter in fsdp_params(unit):
        parameter._sharded_post_forward_param = None
        parameter._sharded_post_forward_param_data = None


def synced(
    micro_batches: Iterable[Item], model: nn.Module, gradient_sync: str, rows: GatheredWeights | None = None
) -> Iterator[Item]:
    """Yield the micro-batches of one optimizer step; before each, tell FSDP2 whether its backward reduces gradients.

    All ranks must have the same number of micro-batches. ``gradient_sync``: ``every`` or ``last``, as in the settings. ``rows``,
    if given, are told instead of FSDP2.
    """
    if not isinstance(model, FSDPModule) and rows is None:
        yield from micro_batches
        return
    iterator = iter(micro_batches)
    following = list(islice(iterator, 1))
    while following:
        # One item ahead, because only the last micro-batch's backward may be the one that reduces.
        item, following = following.pop(), list(islice(iterator, 1))
        reduce = not following or gradient_sync == "every"
        if rows is not None:
            rows.reduces = reduce
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce)
            model.set_is_last_backward(reduce)
        yield item
        del item  # an item that was yielded is not kept while the next one is made
