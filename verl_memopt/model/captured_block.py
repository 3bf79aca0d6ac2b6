"""Captured blocks: most of a checkpointed decoder block runs as CUDA graphs, so the host launches a few graphs for 200 kernels.

A block is four pieces with attention between them: the norm and the projections of queries, keys and values; the output
projection and the MLP; and the backward of both. A piece reads and writes tensors at fixed addresses (:class:`_Buffers`). On a
GPU it is captured after it has run once, and then replayed. On a CPU it is called. Attention is never captured, so lengths and
shared prompts may change from one micro-batch to the next.

Blocks of equal shapes share the pieces. Before a block computes, its weights are copied to the same addresses (``CastUnits`` in
``memory/precision_torch.py``). The tokens of a micro-batch are padded with zeros to one of a few sizes (``bucket_of``), and each
size has its own pieces.

Bytes: ``Shapes.graph_bytes`` in ``plan/formulas.py``. They stay while other phases run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.distributed.device import Capture, CudaGraphs, is_gpu
from verl_memopt.memory.activation_checkpointing_torch import Forward
from verl_memopt.memory.embedding_gradient import CAST_UNIT
from verl_memopt.memory.fused import joined
from verl_memopt.memory.precision_torch import GRAPHS, CastUnit
from verl_memopt.memory.recompute_elementwise_torch import Products, in_runs, norm_and_weight, product_tiles, products_of
from verl_memopt.memory.token_packing import bucket_of
from verl_memopt.model.attention import Attend
from verl_memopt.model.experts import Experts
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.observe.byte_tracker import scope

if TYPE_CHECKING:
    from verl_memopt.model.decoder import DecoderBlock, Tables


logger = logging.getLogger(__name__)


def why_not_captured(block: Any) -> str | None:
    """Return why a decoder block cannot be captured. None = it can."""
    options = getattr(block, "options", None)
    if options is None:
        return f"{type(block).__name__} computes itself"
    if options.checkpoint != "full":
        return "it is not checkpointed in mode full"
    if not options.recompute:
        return "recompute_elementwise is off"
    if block.tile_tokens is not None:
        return "block_tile_tokens computes it over tiles"
    if block.is_linear or block.self_attn.gated:
        return "its attention is linear or has gates"
    if block.norms_outputs:
        return "the outputs of its attention and MLP have norms"
    if isinstance(block.mlp, Experts):
        return "it has experts, and the host must know how many rows each of them computes"
    layers = [module for module in block.modules() if hasattr(module, "in_features")]
    if any(type(layer) is not nn.Linear for layer in layers):
        return "it has layers with adapters, or quantised ones"
    return None if all(parameter.requires_grad for parameter in block.parameters()) else "some of its parameters are frozen"


class CapturedBlocks:
    """The pieces of all blocks of a model, by the shapes of blocks and by the number of tokens."""

    def __init__(self, capture: Capture | None = None) -> None:
        """``capture`` is for other devices than GPUs. None = pieces are called there."""
        self._given = self._capture = capture
        self.clear()

    def clear(self) -> None:
        """Free all buffers and graphs, as after an out-of-memory error. They are made again when a block computes."""
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._of_block: WeakKeyDictionary[DecoderBlock, _Kind] = WeakKeyDictionary()
        self._capture = self._given

    def compute(self, block: DecoderBlock, hidden: Tensor, tables: Tables, layout: PrefixLayout, attend: Attend) -> Tensor:
        """Return the output [1, T, h] of a block. In a pass with gradients its input ``hidden`` [1, T, h] must require one."""
        kind = self._of_block.get(block) or self._kind(block)
        if torch.is_grad_enabled() and hidden.requires_grad:
            return _CapturedBlock.apply(kind, block, hidden, *tables, layout, attend)
        return kind.forward(block, hidden, tables, layout, attend)

    def _kind(self, block: DecoderBlock) -> _Kind:
        unit: CastUnit = getattr(block, CAST_UNIT)
        norms: Any = block.input_layernorm, block.post_attention_layernorm
        places = tuple((_place(weight.cast), weight.cast.shape) for weight in unit.weights)
        # Whether the last block may be pruned does not matter: pruned, it is not captured.
        key = *places, replace(block.options, prune=False), *(norm_and_weight(norm)[0].eps for norm in norms)
        if key not in self._kinds:
            if self._capture is None and is_gpu(unit.weights[0].cast.device):
                self._capture = CudaGraphs()
            self._kinds[key] = _Kind(block, unit, self._capture)
        self._of_block[block] = self._kinds[key]
        return self._kinds[key]


class _Piece:
    """A function that reads and writes tensors at fixed addresses."""

    def __init__(self, function: Callable[[], None], capture: Capture | None) -> None:
        self._run, self._capture, self._calls = function, capture, 0

    def __call__(self) -> None:
        self._calls += 1
        if self._capture is None or self._calls > 2:
            self._run()
        elif self._calls == 1:
            self._capture.warm_up(self._run)
        else:
            try:
                self._run = self._capture.capture(self._run)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # Nothing has run, so the function can run as it is.
                self._capture = None
                reason = str(error).partition("\n")[0]
                logger.warning("cuda_graphs=true: a part of the blocks is launched kernel by kernel, because %s", reason)
            self._run()


@dataclass
class _Buffers:
    """Tensors at fixed addresses: B rows of the compute dtype.

    Attributes:
        hidden: [B, h], the input of the block.
        states: [B, h], its output; in backward the gradient of its output, of its residual stream, and of its input.
        columns: [B, n], queries, keys and values; in backward their gradients.
        attended: [B, q], the output of attention; in backward its gradient.
    """

    hidden: Tensor
    states: Tensor
    columns: Tensor
    attended: Tensor

    def rows(self, count: int) -> _Buffers:
        return _Buffers(*(tensor[:count] for tensor in vars(self).values()))


@dataclass
class _Pieces:
    buffers: _Buffers
    project: _Piece
    finish: _Piece
    finish_backward: _Piece
    project_backward: _Piece


class _Kind:
    """The pieces of blocks with equal shapes, by their number of tokens. ``template`` is one of these blocks."""

    def __init__(self, template: DecoderBlock, unit: CastUnit, capture: Capture | None) -> None:
        # A proxy, because the block has these pieces, and a cycle would keep its memory until the next garbage collection.
        self._capture, self._block = capture, weakref.proxy(template)
        attention = template.self_attn
        self._layers: list[Any] = [attention.q_proj, attention.k_proj, attention.v_proj]
        # The parameters at the shared addresses. Those of the other blocks are other tensors at the same addresses.
        self._casts = [weight.cast for weight in unit.weights]
        names = {id(parameter): name for name, parameter in template.named_parameters()}
        self._names = [names[id(cast)] for cast in self._casts]
        with scope(kind=GRAPHS):
            self._gradients = [torch.empty_like(cast) for cast in self._casts]
        self._by_name = dict(zip(self._names, self._gradients, strict=True))
        self._widths = [layer.weight.shape[0] for layer in self._layers]
        self._buffers: _Buffers | None = None
        self._pieces: dict[int, _Pieces] = {}

    # What runs once per block and pass.

    def forward(self, block: DecoderBlock, hidden: Tensor, tables: Tables, layout: PrefixLayout, attend: Attend) -> Tensor:
        pieces, own = self._begin(hidden)
        with torch.no_grad():
            pieces.project()
            query, key, value = own.columns.split(self._widths, 1)
            out = block.self_attn.attention(query, key, value, tables, layout, attend)
            _fill(pieces.buffers.attended, out)
            del out
            pieces.finish()
            return own.states.clone()[None]

    def backward(
        self, block: DecoderBlock, hidden: Tensor, tables: Tables, layout: PrefixLayout, attend: Attend, grad: Tensor
    ) -> Tensor:
        pieces, own = self._begin(hidden)
        pieces.project()
        with torch.enable_grad():
            query, key, value = (part.detach().requires_grad_() for part in own.columns.split(self._widths, 1))
            out = block.self_attn.attention(query, key, value, tables, layout, attend)
        _fill(pieces.buffers.attended, out.detach())
        _fill(pieces.buffers.states, grad[0])
        pieces.finish_backward()
        attention = block.self_attn
        norms: Any = [norm.weight for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        grads = torch.autograd.grad(out, [query, key, value, *norms], own.attended)
        del out
        for part, given in zip(own.columns.split(self._widths, 1), grads, strict=False):
            if _place(part) != _place(given):  # attention may have overwritten its arguments with their gradients
                part.copy_(given)
        pieces.buffers.columns[len(hidden[0]) :].zero_()
        for name, given in zip(("q_norm", "k_norm"), grads[3:], strict=False):
            self._by_name[f"self_attn.{name}.weight"].copy_(given)
        del grads, given
        pieces.project_backward()
        unit: CastUnit = getattr(block, CAST_UNIT)
        for weight, gradient in zip(unit.weights, self._gradients, strict=True):
            weight.cast.grad = gradient
        return own.states.clone()[None]

    def _begin(self, hidden: Tensor) -> tuple[_Pieces, _Buffers]:
        tokens = hidden.shape[1]
        size = bucket_of(tokens, 0 if self._buffers is None else len(self._buffers.hidden))
        if self._buffers is None or size > len(self._buffers.hidden):
            # Other addresses, so nothing that was captured is of use.
            self._pieces.clear()
            self._buffers = None
            self._buffers = self._allocate(size, hidden)
        if size not in self._pieces:
            self._pieces[size] = self._make(self._buffers.rows(size))
        pieces = self._pieces[size]
        _fill(pieces.buffers.hidden, hidden.detach()[0])
        return pieces, pieces.buffers.rows(tokens)

    def _allocate(self, size: int, like: Tensor) -> _Buffers:
        width, columns = like.shape[-1], sum(self._widths)
        with scope(kind=GRAPHS):
            return _Buffers(*(like.new_empty(size, wide) for wide in (width, width, columns, self._widths[0])))

    # The pieces.

    def _make(self, buffers: _Buffers) -> _Pieces:
        functions = (self._project, self._finish, self._finish_backward, self._project_backward)
        return _Pieces(buffers, *(_Piece(partial(function, buffers), self._capture) for function in functions))

    @torch.no_grad()
    def _project(self, buffers: _Buffers) -> None:
        weights, biases = self._weights_and_biases()
        norm, weight = norm_and_weight(self._block.input_layernorm)
        value = norm.compute((buffers.hidden,), (weight,))
        rooms = buffers.columns.split(self._widths, 1)
        for run in in_runs(weights, biases):
            parts = products_of(value, weights[run], biases[run])
            into, whole = joined(rooms[run], 1), joined(parts, 1)
            if into is None or whole is None:
                torch._foreach_copy_(rooms[run], list(parts))
            else:
                into.copy_(whole)

    @torch.no_grad()
    def _finish(self, buffers: _Buffers) -> None:
        buffers.states.copy_(self._finished(buffers.hidden, buffers.attended, "first")[0])

    def _finish_backward(self, buffers: _Buffers) -> None:
        hidden, attended = (tensor.detach().requires_grad_() for tensor in (buffers.hidden, buffers.attended))
        first = ("self_attn.o_proj.", "post_attention_layernorm.", "mlp.")
        names = [name for name in self._names if name.startswith(first)]
        parameters = dict(self._block.named_parameters())
        with torch.enable_grad():
            out = self._finished(hidden, attended, "again")
        inputs = [hidden, attended, *(parameters[name] for name in names)]
        grads = torch.autograd.grad(out, inputs, buffers.states[None])
        with torch.no_grad():
            rooms = [buffers.states, buffers.attended, *(self._by_name[name] for name in names)]
            torch._foreach_copy_(rooms, grads)

    @torch.no_grad()
    def _project_backward(self, buffers: _Buffers) -> None:
        weights, biases = self._weights_and_biases()
        norm, weight = norm_and_weight(self._block.input_layernorm)
        columns = buffers.columns.split(self._widths, 1)
        products = Products(norm, 1, None, (False,) * 3, (None,) * 3, in_runs(weights, biases))
        needed = (True,) * 5 + tuple(bias is not None for bias in biases)
        # The gradient of the residual stream is added to that of the norm's input.
        grad, *found = products.gradients((buffers.hidden, weight, *weights), (*columns, buffers.states), needed)
        assert grad is not None
        names = ["input_layernorm.weight"]
        names += [f"self_attn.{name}_proj.{kind}" for kind in ("weight", "bias") for name in "qkv"]
        pairs = [(self._by_name[name], given) for name, given in zip(names, found, strict=True) if given is not None]
        torch._foreach_copy_([buffers.states, *(room for room, _ in pairs)], [grad, *(given for _, given in pairs)])

    def _weights_and_biases(self) -> tuple[list[Tensor], list[Tensor | None]]:
        return [layer.weight for layer in self._layers], [layer.bias for layer in self._layers]

    def _finished(self, hidden: Tensor, attended: Tensor, checkpoint: Forward) -> Tensor:
        block = self._block
        tiles = len(product_tiles(hidden))
        projected = block.self_attn.o_proj(attended)
        return block.mlp.forward_sum(hidden, projected, block.post_attention_layernorm, tiles, checkpoint)


class _CapturedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, block: DecoderBlock, hidden: Tensor, cos: Tensor, sin: Tensor, layout: PrefixLayout, attend: Attend
    ) -> Tensor:
        ctx.save_for_backward(hidden, cos, sin)  # saved by autograd, so that they can be offloaded
        ctx.kind, ctx.block, ctx.layout, ctx.attend = kind, block, layout, attend
        return kind.forward(block, hidden, (cos, sin), layout, attend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, cos, sin = ctx.saved_tensors
        return None, None, ctx.kind.backward(ctx.block, hidden, (cos, sin), ctx.layout, ctx.attend, grad), None, None, None, None


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _fill(room: Tensor, values: Tensor) -> None:
    # Copy values [T, ...] into the first rows of a buffer, and zeros into the others, which may have the NaN of an earlier pass.
    room[: len(values)].copy_(values)
    room[len(values) :].zero_()
