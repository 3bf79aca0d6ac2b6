"""Where the gradient of a large weight is summed: in ``.grad`` itself where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.observe.byte_tracker import scope


def room_for(parameter: Tensor | None, needed: bool, in_place: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensor to add a parameter's gradient to, and the gradient to return to autograd.

    Args:
        parameter: A weight, or None for one that a layer does not have.
        needed: Whether it needs a gradient.
        in_place: Whether its ``.grad`` may be used.

    Returns:
        The tensor to add to, zeros if it is new, or None where no gradient is needed; then the same tensor for autograd, or None
        where it is ``.grad`` itself.
    """
    if parameter is None or not needed:
        return None, None
    with scope(kind="grads"):
        if not (in_place and adds_in_place(parameter)):
            room = torch.zeros_like(parameter)
            return room, room
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameter.grad, None


def adds_in_place(parameter: Tensor) -> bool:
    """Return whether a gradient may be added to ``.grad`` without autograd: the parameter is a leaf without hooks.

    The gathered parameter of an FSDP2 unit qualifies, because FSDP2 reads its ``.grad`` after the backward of the unit.
    """
    # Autograd calls these hooks only for gradients that it accumulates itself. A gradient that is added here would bypass
    # them.
    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter.is_leaf and parameter.requires_grad and not watched and type(parameter) in (Tensor, torch.nn.Parameter)
