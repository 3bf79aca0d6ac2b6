"""Labels for the bytes of an optimizer and of plain gradients. They do nothing if no tracker is active."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from verl_memopt.observe.byte_tracker import HOST, active_tracker, declare_host, mark, scope, storages_of


@contextmanager
def optimizer_scope(optimizer: torch.optim.Optimizer, on_host: bool = False) -> Iterator[None]:
    """Label allocations of ``step()`` as ``optimizer scratch``, and the remaining state as ``optimizer``.

    Args:
        optimizer: Its step runs in the body.
        on_host: The step runs on the host, and its state stays there.
    """
    tier = HOST if on_host else None
    with scope("optimizer scratch", tier):
        yield
    for storage in (storage for tensor in state_tensors(optimizer) for storage in storages_of(tensor)) if on_host else ():
        declare_host(storage)
    mark("optimizer", state_tensors(optimizer), tier)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield every tensor of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@contextmanager
def gradient_kinds(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Label the gradients of plain parameters as ``grads`` when they are accumulated."""

    def label(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            mark("grads", [parameter.grad])

    plain = [p for p in parameters if p.requires_grad and type(p) is torch.nn.Parameter] if active_tracker() else []
    hooks = [p.register_post_accumulate_grad_hook(label) for p in plain]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
