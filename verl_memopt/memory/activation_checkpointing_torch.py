"""Activation checkpointing: a decoder block keeps only its input, and backward computes the rest again.

Bytes saved: let A be the bytes that a block keeps for its backward, X the bytes of its input, and L the number of blocks. With
``full`` only the block whose backward runs holds A, so the peak falls by (L - 1) x (A - X). With ``every_n`` one block in n keeps
X instead of A. With ``selective`` blocks also keep the outputs of products and of attention. ``plan/formulas.py`` has the whole
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

KEPT_BY_SELECTIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Operators whose outputs ``selective`` keeps: matrix products with a weight, and attention kernels that never store the
scores."""


def chosen_blocks(num_blocks: int, mode: str = "full", every: int = 1) -> range:
    # Counted back from the last block but one: the last block would be recomputed at the peak anyway, and would save nothing.
    return range(num_blocks)[-2::-every] if mode == "every_n" else range(num_blocks)


def checkpointed(function: Callable[..., Any], *args: Any, mode: str) -> Any:
    """Call ``function(*args)`` with non-reentrant checkpointing in mode ``full`` or ``selective``.

    Tensors to be offloaded must be direct arguments, because checkpoint() passes only those to autograd to save.
    """
    contexts: Callable[[], Any] = (
        partial(create_selective_checkpoint_contexts, _keeps) if mode == "selective" else noop_context_fn
    )
    # There is no dropout, so the state of the random generator need not be kept.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


Forward: TypeAlias = Literal["first", "again"]
"""Which of the two forwards of a checkpointed block is computed: the first one, or the one in backward."""


def checkpointed_block(compute: Callable[..., Tensor], hidden: Tensor, *others: Any) -> Tensor:
    """Like ``checkpointed(compute, hidden, *others, mode="full")``, but for a function that returns only one tensor.

    The first forward builds no graph, so its tensors need no hooks. This saves a quarter of the Python calls of a block's update.

    Args:
        compute: Called with all arguments and ``checkpoint=``: ``first`` in the forward, without gradients; ``again`` in
            backward, where it may leave the values of its result uncomputed.
        hidden: The argument that gets a gradient, besides the parameters of the function. It must require one.
        others: Further arguments; tensors among them get no gradient.
    """
    assert hidden.requires_grad
    return _CheckpointedBlock.apply(compute, hidden, *others)


class _CheckpointedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, hidden: Tensor, *others: Any) -> Tensor:
        # Saved by autograd, so that they can be offloaded.
        ctx.save_for_backward(hidden, *(other for other in others if isinstance(other, Tensor)))
        ctx.compute, ctx.others = compute, [None if isinstance(other, Tensor) else other for other in others]
        ctx.places = [place for place, other in enumerate(others) if isinstance(other, Tensor)]
        # Detached: in a forward without gradients, hooks of torch's FLOP counter fail on inputs of modules that require one.
        return compute(hidden.detach(), *others, checkpoint="first")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *tensors = ctx.saved_tensors
        others = list(ctx.others)
        for place, tensor in zip(ctx.places, tensors, strict=True):
            others[place] = tensor
        # A new leaf, so that the backward below ends here. It adds the gradients of the parameters itself.
        start = hidden.detach().requires_grad_()
        del hidden, tensors
        with torch.enable_grad():
            out = ctx.compute(start, *others, checkpoint="again")
        torch.autograd.backward(out, grad)
        return None, start.grad, *(None,) * len(others)


class Checkpointed(nn.Module):
    """Mixin that checkpoints the forward of a block of another architecture. FSDP2 mixes in a class of its own alike."""

    checkpoint_mode: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Tensors among the keywords (rotary tables) become direct arguments.
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # Looked up here, because super() inside the nested function would use that function's first argument as the block.
        own_forward = super().forward

        def run(*tensors: Tensor) -> Any:
            # The tensors are positional arguments, so that autograd sees them as inputs of the checkpointed call.
            filled = list(rest)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            positional, named = tree_unflatten(filled, spec)
            return own_forward(*positional, **named)

        return checkpointed(run, *(leaves[place] for place in places), mode=self.checkpoint_mode)


def checkpoint_blocks(blocks: Sequence[nn.Module], mode: str = "full", every: int = 1) -> None:
    """Make blocks of any architecture recompute their forward in backward; their names and state stay the same.

    Call this before sharding, so that FSDP hooks stay outside the recomputed region.
    """
    for place in chosen_blocks(len(blocks), mode, every):
        block, own = blocks[place], type(blocks[place])
        # A subclass, not a wrapper module: a wrapper would change the names of the parameters.
        block.__class__ = type(own.__name__, (Checkpointed, own), {"checkpoint_mode": mode})


def _keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
