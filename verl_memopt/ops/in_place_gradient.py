"""Where the gradient of a large weight is added up: in ``.grad`` itself where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_memopt.observe.byte_tracker import scope


def room_for(parameter: Tensor | None, needed: bool, in_place: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gives the tensor to add a parameter's gradient to, and what autograd is to be handed: None where that is ``.grad``.

    The first is None too where no gradient is needed. A gradient that is new is zeros.
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
    """Says whether a gradient may be added to ``.grad`` behind autograd's back: a leaf that nothing watches.

    The gathered parameter of an FSDP2 unit is one: FSDP2 reads its ``.grad`` when the unit's backward is over.
    """
    watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter.is_leaf and parameter.requires_grad and not watched and type(parameter) in (Tensor, torch.nn.Parameter)
