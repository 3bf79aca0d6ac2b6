"""Tiled MLP: each MLP runs over tiles of tokens, and again in backward, so its wide tensors exist for one tile at a time.

Bytes saved: let I be the width of the MLP and n ``tiled_mlp.num_shards``. At the MLP's backward six tensors of T x I x b bytes
(gate, activation, up, their product and two gradients) shrink to one tile each. That is 6 x T x I x b x (1 - 1 / n), less the
sums of the gradients of three weights and of the input. The peak can then move to the backward of attention, which limits the
saving. Without activation checkpointing the other L - 1 blocks also keep 4 x T x I x b less each. Passes without gradients save
3 x T x I x b x (1 - 1 / n), less T x h x b. With ``recompute_elementwise`` a block keeps only gate and up, so less is left to
save. ``knobs/shapes.py`` has the whole formula.

Exact: outputs and gradients of inputs are those of the whole MLP. Gradients of weights differ by the order of one sum over
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.errors import ConfigError
from verl_memopt.memory.activations.recompute_elementwise import FAMILY
from verl_memopt.memory.parameters.lora import LoraLinear
from verl_memopt.ops.recomputation import keep, kept

KEY = "actor_rollout_ref.model.tiled_mlp"

KNOWN = tuple(f"{name}MLP" for name in FAMILY)
"""Classes that compute down(act(gate(x)) * up(x))."""

LAYERS = ("gate_proj", "up_proj", "down_proj")


def check_mlps(blocks: Iterable[nn.Module], trained: bool, key: str = KEY) -> None:
    """Refuse blocks of a Hugging Face model whose MLPs cannot run over tiles.

    Args:
        blocks: The blocks, as transformers made them.
        trained: false for a model that only ever runs without gradients; its layers may then be of any kind (quantised).
        key: The setting to name in errors.

    Raises:
        ConfigError: This file does not know the mathematics of an MLP class, or of a layer in it. The message names it.
    """
    for block in blocks:
        _check(block, getattr(block, "mlp", None), trained, key)


def _check(block: nn.Module, mlp: Any, trained: bool, key: str) -> None:
    if type(mlp).__name__ not in KNOWN:
        actual = "has no mlp" if mlp is None else f"computes {type(mlp).__name__}"
        raise ConfigError(
            f"{key}.enabled=true: {type(block).__name__} {actual}; tiles are known for {', '.join(KNOWN)}. "
            f"Set {key}.enabled=false."
        )
    for name in LAYERS if trained else ():
        layer = getattr(mlp, name)
        if type(layer) not in (nn.Linear, LoraLinear):
            raise ConfigError(
                f"{key}.enabled=true: {name} of {type(mlp).__name__} is {type(layer).__name__}, no linear layer whose gradient "
                f"tiles can sum. Set {key}.enabled=false."
            )


def tiled_mlp(mlp: Any, x: Tensor, num_shards: int) -> Tensor:
    """Return ``mlp.gated(x)`` [T, h] of a normed input x [T, h], computed over ``num_shards`` tiles; keep only x.

    Args:
        mlp: An MLP with ``gate_proj``, ``up_proj``, ``down_proj``, ``act_fn`` and ``gated``.
        x: [T, h].
        num_shards: Tiles of tokens.
    """
    if torch.is_grad_enabled():
        names, weights = zip(*mlp.named_parameters(), strict=True)
        # In a checkpointed block nothing is saved after this, so the block's second forward stops here.
        return _Tiles.apply(mlp, num_shards, keep(x, *weights), names, x, *weights)
    out = torch.empty_like(x)
    for rows in _tiles(x.shape[0], num_shards):
        out[rows] = mlp.gated(x[rows])
    return out


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mlp: nn.Module, num_shards: int, node: Any, names: tuple[str, ...], x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.mlp, ctx.num_shards, ctx.kept, ctx.names = mlp, num_shards, node, names
        held, out = dict(zip(names, weights, strict=True)), torch.empty_like(x)
        for rows in _tiles(x.shape[0], num_shards):
            out[rows] = _mlp(mlp, x[rows], held, {})
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = kept(ctx)
        # Detached, because each tile's backward adds to the sums itself. Autograd would make a new gradient for every tile.
        held = {name: weight.detach() for name, weight in zip(ctx.names, weights, strict=True)}
        needed = dict(zip(ctx.names, ctx.needs_input_grad[5:], strict=True))
        sums = {name: torch.zeros_like(weight) for name, weight in held.items() if needed[name]}
        x = x.detach()
        grad_x = torch.empty_like(x)
        for rows in _tiles(x.shape[0], ctx.num_shards):
            with torch.enable_grad():
                tile = x[rows].requires_grad_()
                out = _mlp(ctx.mlp, tile, held, sums)
            (grad_x[rows],) = torch.autograd.grad(out, tile, grad[rows])
        return None, None, None, None, grad_x, *(sums.get(name) for name in ctx.names)


def _tiles(tokens: int, num_shards: int) -> list[slice]:
    size = max(-(-tokens // num_shards), 1)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _mlp(mlp: Any, x: Tensor, held: dict[str, Tensor], sums: dict[str, Tensor]) -> Tensor:
    """Return the MLP's output for a tile; its backward adds the weights' gradients to ``sums``."""

    def project(name: str, x: Tensor) -> Tensor:
        layer = getattr(mlp, name)
        out = _linear(x, f"{name}.weight", f"{name}.bias", held, sums)
        if not isinstance(layer, LoraLinear) or not layer.active:
            return out
        thin = _linear(x, f"{name}.lora_A", "", held, sums)
        return out + layer.scale * _linear(thin, f"{name}.lora_B", "", held, sums)

    return project("down_proj", mlp.act_fn(project("gate_proj", x)) * project("up_proj", x))


def _linear(x: Tensor, weight: str, bias: str, held: dict[str, Tensor], sums: dict[str, Tensor]) -> Tensor:
    return _SummingLinear.apply(x, held[weight], held.get(bias), sums.get(weight), sums.get(bias))


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward adds its weight's gradient to a tensor in place, without a temporary of its size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_sum: Tensor | None, bias_sum: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = weight_sum, bias_sum
        # Written into ``out``: selective checkpointing keeps the outputs of products, and these are to be recomputed.
        out = x.new_empty(x.shape[0], weight.shape[0])
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_sum, bias_sum = ctx.sums
        if weight_sum is not None:
            # In place; torch's FLOP counter counts this form.
            torch.addmm(weight_sum, grad.t(), x, out=weight_sum)
        if bias_sum is not None:
            bias_sum.add_(grad.sum(0))
        return grad @ weight, None, None, None, None
