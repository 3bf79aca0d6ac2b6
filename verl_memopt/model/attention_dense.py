"""Attention by kernels that accept fp32: the memory-efficient kernel on a GPU, the flash kernel on a CPU.

GPUs before Ampere have only the memory-efficient kernel. The two passes and their merge are those of
:mod:`verl_memopt.model.attention_fused`.

A call of the memory-efficient kernel computes several key heads and sequences of any lengths, up to a number of elements (a
tile). So few tokens need few calls, and for many tokens the temporary tensors have the size of a tile or of one key head. A call
of the CPU kernel computes one key head, and sequences of equal length. Few tokens on a CPU are one call with a mask, and so are
neighbouring short segments of one path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_memopt.distributed.device import is_gpu, sent_together
from verl_memopt.model.attention_fused import LSE_ALIGNMENT, Parts, key_heads, merge_into, merge_sinks, sink_gradient
from verl_memopt.model.prefix_layout import PrefixLayout, Round, ranges
from verl_memopt.model.rotary import Rotary, apply_rotary_to_both, rotary_arguments, rotary_backward_to_all, weight_sums


@dataclass(frozen=True, eq=False)
class KernelCall:
    """The sequences of one kernel call.

    Attributes:
        queries: Rows of their queries, one sequence after another: a slice, or int64 indices.
        keys: Rows of their keys, in the same form.
        query_lengths: Number of queries of each sequence.
        key_lengths: Number of keys of each sequence.
        causal: Query i of a sequence sees only the keys up to i. If False, it sees all keys of the sequence.
        device: The device of the rows.
        places: int64 [queries] on the host, places of the queries among all tokens, if the call has one sequence and a mask. A
            query then sees the keys up to its own place. None = no mask.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    device: torch.device
    places: np.ndarray | None = None

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where sequences begin, and which place each query has.

        The tensors are: the first query of each sequence, then the number of queries, int32 [sequences + 1]; the same for keys;
        the sequence of each query, int64 [queries]; the place of each query in its sequence, int64 [queries].
        """
        starts = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (self.query_lengths, self.key_lengths)]
        sizes = np.asarray(self.query_lengths)
        places = np.repeat(np.arange(len(sizes)), sizes), ranges(np.zeros_like(sizes), sizes)
        query_starts, key_starts, sequence, place = sent_together(
            [torch.from_numpy(array) for array in (*starts, *places)], self.device
        )
        return query_starts, key_starts, sequence, place


Calls: TypeAlias = tuple[list[KernelCall], list[KernelCall]]


def calls(layout: PrefixLayout, rows: int) -> Calls:
    """Return the calls of the segment pass (causal) and of all rounds, cached in the layout.

    A call takes neighbouring sequences that have at most ``rows`` rows if all are padded to the longest. Neighbouring segments of
    equal length are always in one call. Rows of keys are places among the queries in the segment pass, and places among all
    tokens in the rounds. No call has spans of several rounds, so no call has a query twice.
    """
    if rows not in layout.plans:
        # Every block of the model needs the same calls, so build them once per pack.
        rounds = [call for some in layout.rounds for call in _round_calls(some, rows)]
        layout.plans[rows] = list(_segment_calls(layout, rows)), rounds
    return layout.plans[rows]


def _segment_calls(layout: PrefixLayout, rows: int) -> Iterator[KernelCall]:
    for some in _cut([(run.count, run.length) for run in layout.runs], rows):
        runs = layout.runs[some]
        place = slice(runs[0].start, runs[-1].start + runs[-1].count * runs[-1].length)
        lengths = tuple(run.length for run in runs for _ in range(run.count))
        yield KernelCall(place, place, lengths, lengths, True, layout.cu_seqlens.device)


def _round_calls(some_spans: Round, rows: int) -> Iterator[KernelCall]:
    pairs = [(span.queries, span.keys) for span in some_spans.spans]
    ends = [np.cumsum([0, *(run.length for run in side)]) for side in zip(*pairs, strict=True)]
    for some in _cut([(1, max(run.length for run in pair)) for pair in pairs], rows):
        sides = list(zip(*pairs[some], strict=True))
        indices = some_spans.index_q, some_spans.index_k
        # The rows of a single span are a view. The rows of several spans must be gathered.
        at_q, at_k = (
            side[0].places if len(side) == 1 else index[end[some.start] : end[some.stop]]
            for side, index, end in zip(sides, indices, ends, strict=True)
        )
        query_lengths, key_lengths = (tuple(run.length for run in side) for side in sides)
        yield KernelCall(at_q, at_k, query_lengths, key_lengths, False, some_spans.index_q.device)


def joined_calls(layout: PrefixLayout, pairs: int) -> Calls | None:
    """Return calls of which some join neighbouring segments of a path, cached in the layout. None = no segments are joined.

    In a block that computes only some tokens a path has many short segments, each with spans over the keys before it. One call
    with a mask can replace neighbouring segments and the spans whose queries are all among theirs. It does so if it computes at
    most ``pairs`` hidden pairs of query and key for each call that it saves.

    The first list has each query in one call, and the second list has the spans that are left. Each call has one sequence, and
    rows of keys are places among all tokens.
    """
    if ("joined", pairs) not in layout.plans:
        # If all tokens are queries, each path is one segment.
        joins = None if layout.query_index is None else _Joins(layout, pairs)
        layout.plans["joined", pairs] = (joins.first, joins.others()) if joins is not None and joins.replaced else None
    found: Calls | None = layout.plans["joined", pairs]
    return found


class _Joins:
    """The search of :func:`joined_calls`.

    Attributes:
        first: Calls that have each query once.
        replaced: Numbers of the spans that these calls replace.
    """

    def __init__(self, layout: PrefixLayout, pairs: int) -> None:
        self.places, self.pairs, self.device = layout.query_places, pairs, layout.cu_seqlens.device
        self.counts = np.asarray(layout.segments)
        self.ends = np.cumsum(self.counts)
        self.spans = sorted(layout.spans, key=lambda span: span.queries.start)
        self.span_starts = [span.queries.start for span in self.spans]
        self.first, self.replaced = list[KernelCall](), set[int]()
        # A path goes on where the first query of the next segment sees the last query of this one.
        goes_on = layout.stops[self.places[self.ends[:-1] - 1]] > self.places[self.ends[:-1]]
        for first, end in pairwise([0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(self.counts)]):
            self._join(first, end)

    def _join(self, first: int, end: int) -> None:
        """Take the segments from ``first`` to ``end - 1`` as one call if it pays. Otherwise try each half of them."""
        queries = slice(int(self.ends[first] - self.counts[first]), int(self.ends[end - 1]))
        places, counts = self.places[queries], self.counts[first:end]
        stop = int(places[-1]) + 1
        if len(counts) == 1:
            self.first.append(self._call(queries, slice(int(places[0]), stop), causal=True))
            return
        near = range(bisect_left(self.span_starts, queries.start), bisect_left(self.span_starts, queries.stop))
        inside = [number for number in near if self.spans[number].queries.places.stop <= queries.stop]
        spans = [self.spans[number] for number in inside]
        begin = min([int(places[0]), *(span.keys.start for span in spans)])
        needed = int((counts * (counts + 1) // 2).sum()) + sum(span.queries.length * span.keys.length for span in spans)
        shown, computed = int((places - begin + 1).sum()), len(places) * (stop - begin)
        # A mask that shows more than these segments and spans shows keys of other paths, or keys of other spans twice.
        if shown == needed and computed - needed <= (len(counts) + len(spans) - 1) * self.pairs:
            self.replaced.update(inside)
            self.first.append(self._call(queries, slice(begin, stop), places=places))
        else:
            half = (first + end) // 2
            self._join(first, half)
            self._join(half, end)

    def others(self) -> list[KernelCall]:
        left = [span for number, span in enumerate(self.spans) if number not in self.replaced]
        return [self._call(span.queries.places, span.keys.places) for span in left]

    def _call(self, queries: slice, keys: slice, causal: bool = False, places: np.ndarray | None = None) -> KernelCall:
        lengths = (queries.stop - queries.start,), (keys.stop - keys.start,)
        return KernelCall(queries, keys, *lengths, causal, self.device, places)


def _cut(parts: Sequence[tuple[int, int]], rows: int) -> Iterator[slice]:
    # Cut a list of (sequences, length) so that the parts between cuts, padded to their longest, have at most `rows` rows.
    first = count = longest = 0
    for place, (more, length) in enumerate(parts):
        if count and (count + more) * max(longest, length) > rows:
            yield slice(first, place)
            first, count, longest = place, 0, 0
        count, longest = count + more, max(longest, length)
    if count:
        yield slice(first, len(parts))


@dataclass(frozen=True)
class PackedKernel:
    """A fused kernel over the sequences of a :class:`KernelCall`.

    Queries are [rows, heads, D], keys and values [rows, kv heads, D].

    Attributes:
        forward: (q, k, v, call, scale) -> output of the shape of q, and log-sum-exp, fp32 [rows, heads].
        backward: (gradient, q, k, v, output, log-sum-exp, call, scale) -> gradients of q, k and v.
        elements: Most query elements of a call with several key heads or segments of different lengths.
        float_parts: As in :class:`Kernel`.
        masked_products: Most products (queries x keys x heads x D) that take one call with a mask in place of all of these. A
            call with a mask that joins segments computes at most so many hidden ones for each call that it saves.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Parts]
    elements: int
    float_parts: bool
    masked_products: int = 0


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    # Repeat key heads [..., kv heads, D] for the query heads that share them. The result is a view if possible.
    kv_heads, size = tensor.shape[-2:]
    repeats = query.shape[-2] // kv_heads
    return tensor[..., None, :].expand(*tensor.shape[:-1], repeats, size).flatten(-3, -2) if repeats > 1 else tensor


def _sum_key_heads(parts: list[Tensor], kv_heads: int) -> Parts:
    # Sum the gradients of keys and values, [rows, heads, D], over the query heads that share a key head.
    if parts[1].shape[1] != kv_heads:
        for place in (1, 2):  # replaced in the list, so that one unsummed gradient is freed before the next is summed
            parts[place] = parts[place].unflatten(1, (kv_heads, -1)).sum(2)
    dq, dk, dv = parts
    return dq, dk, dv


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_rectangles(q, k, v, call), 0.0, call.causal, attn_mask=_mask_of_call(call, q.dtype), scale=scale
    )
    return _rows(out, k.shape[1]), _rows(lse, k.shape[1])


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: KernelCall, scale: float
) -> Parts:
    grad, out, lse = (_rectangle(tensor, call.query_lengths, k.shape[1]) for tensor in (grad, out, lse))
    given = grad, *_rectangles(q, k, v, call), out, lse
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, 0.0, call.causal, attn_mask=_mask_of_call(call, q.dtype), scale=scale
    )
    if dk.shape[1] > 1:  # sum over the query heads that share a key head
        dk = dk.sum(1, keepdim=True)
        dv = dv.sum(1, keepdim=True)
    return _rows(dq, k.shape[1]), _rows(dk, k.shape[1]), _rows(dv, k.shape[1])


HIDDEN = -1e38
"""Added to the score of a hidden pair of query and key. Its weight becomes exactly 0."""


def _mask_of_call(call: KernelCall, dtype: torch.dtype) -> Tensor | None:
    # Not cached, because the masks of all calls would be held together.
    if call.places is None:
        return None
    assert isinstance(call.keys, slice), call.keys
    hidden = torch.arange(call.keys.start, call.keys.stop) > torch.tensor(call.places)[:, None]
    return hidden.to(dtype).mul_(HIDDEN)


def _rectangles(q: Tensor, k: Tensor, v: Tensor, call: KernelCall) -> Parts:
    query = _rectangle(q, call.query_lengths, k.shape[1])
    # Query heads read the key head that they share with a stride of 0.
    keys = (_rectangle(tensor, call.key_lengths, k.shape[1]).expand(-1, query.shape[1], -1, -1) for tensor in (k, v))
    return query, next(keys), next(keys)


def _rectangle(tensor: Tensor, lengths: Sequence[int], kv_heads: int) -> Tensor:
    # A view [sequences or kv heads, heads of each, length, ...] of rows [rows, heads, ...]. All sequences have the same length.
    # There is one sequence or one key head.
    parts = tensor.view(len(lengths), lengths[0], kv_heads, -1, *tensor.shape[2:])
    return parts.movedim(1, 3).flatten(0, 1)


def _rows(tensor: Tensor, kv_heads: int) -> Tensor:
    parts = tensor.view(-1, kv_heads, *tensor.shape[1:])
    return parts.movedim(3, 1).flatten(2, 3).flatten(0, 1)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float) -> tuple[Tensor, Tensor]:
    query_starts, key_starts, sequence, place = call.on_device
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], _repeated(k, q)[None], _repeated(v, q)[None], None, query_starts, key_starts, max(call.query_lengths),
        max(call.key_lengths), 0.0, int(call.causal), True, scale=scale,
    )  # fmt: skip
    return out[0], lse.transpose(1, 2)[sequence, place]  # lse: [sequences, heads, padded length]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: KernelCall, scale: float
) -> Parts:
    query_starts, key_starts, sequence, place = call.on_device
    longest = max(call.query_lengths)
    # The kernel turns a padding of infinity into attention weights of 0.
    sizes = len(call.query_lengths), q.shape[1], -(-longest // LSE_ALIGNMENT) * LSE_ALIGNMENT
    padded = torch.full(sizes, float("inf"), dtype=torch.float32, device=q.device)
    padded.transpose(1, 2)[sequence, place] = lse
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state for dropout, which is off
    head_grads = torch.ops.aten._efficient_attention_backward(
        # The kernel assumes that the tokens of the output have a stride of heads x D.
        grad[None], q[None], _repeated(k, q)[None], _repeated(v, q)[None], None, out.contiguous()[None], query_starts, key_starts,
        longest, max(call.key_lengths), padded, 0.0, unused, unused, int(call.causal), False, scale=scale,
    )  # fmt: skip
    parts = [part[0] for part in head_grads[:3]]
    del head_grads
    return _sum_key_heads(parts, k.shape[1])


ATTENTION_ELEMENTS = {"cpu": 0, "cuda": 2**21}
"""Most query elements of an attention call with several key heads or segments of different lengths. So many elements keep a GPU
busy for longer than the launch of a call takes. A CPU has no launches, so it computes one key head and one length per call."""

MASKED_PRODUCTS = {"cpu": 2**18, "cuda": 0}
"""Most products of an attention call with a mask. It replaces a call for each key head, run of equal lengths and shared prefix.

A CPU computes so many in the time in which Python prepares one call.
"""

JOINED_ELEMENTS = 2**18
"""Most elements of queries, or of keys, of the key heads that joined calls on a CPU compute at once."""

PACKED_CPU_FLASH = PackedKernel(
    _cpu_forward, _cpu_backward, ATTENTION_ELEMENTS["cpu"], float_parts=True, masked_products=MASKED_PRODUCTS["cpu"]
)
PACKED_EFFICIENT = PackedKernel(_efficient_forward, _efficient_backward, ATTENTION_ELEMENTS["cuda"], float_parts=False)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    rotary: Rotary | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [Q, heads, D] by kernels that accept fp32.

    It saves the arguments, the output and one log-sum-exp per token and head for backward. At once it computes as many key heads,
    with the query heads that share them, as fit in a tile of elements. Temporary tensors have only these heads.

    Args:
        query: [Q, heads, D], the queries of the layout. Its last stride is 1.
        key: [T, kv heads, D], all tokens. Its last stride is 1.
        value: As ``key``.
        layout: Which tokens share a prefix.
        scale: Factor of the products of queries and keys.
        rotary: Rotates queries and keys here, and again in backward. Backward then overwrites the arguments with their
            gradients.
        sinks: [heads], the score of one more key of each head, whose value is zero. None = there is none.
    """
    kernel = PACKED_EFFICIENT if is_gpu(query.device) else PACKED_CPU_FLASH
    return _DenseAttention.apply(query, key, value, *rotary_arguments(rotary), layout, scale, kernel, sinks)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        layout: PrefixLayout,
        scale: float,
        kernel: PackedKernel,
        sinks: Tensor | None,
    ) -> Tensor:
        norms, tables = (query_norm, key_norm), (layout.at_queries(cos, sin), (cos, sin))
        at_once, run = _heads_and_passes(query, key, layout, scale, kernel)
        if at_once == key.shape[1]:
            q, k = apply_rotary_to_both(query, key, norms, eps, *tables)
            out, lse = run.forward(None, *run.working(q, k, value))
        else:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            # Rotated queries and keys exist for these heads only.
            for queries, keys in key_heads(query, key, at_once):
                q, k = apply_rotary_to_both(query[:, queries], key[:, keys], norms, eps, *tables)
                run.forward((out[:, queries], lse[:, queries]), *run.working(q, k, value[:, keys]))
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks, query.dtype)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, cos, sin, query_norm, key_norm, sinks, out, lse)
        ctx.eps, ctx.at_once, ctx.run = eps, at_once, run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cos, sin, query_norm, key_norm, sinks, out, lse = ctx.saved_tensors
        layout, run, grad = ctx.run.layout, ctx.run, grad.contiguous()
        norms, tables = (query_norm, key_norm), (layout.at_queries(cos, sin), (cos, sin))
        sink_grad = None if sinks is None else sink_gradient(grad, out, lse, sinks).to(sinks.dtype)
        # The gradients of the norms' weights are sums over all heads.
        sums = weight_sums(norms, ctx.needs_input_grad[5:7])
        # After its backward a head's saved queries, keys and values are not read again, so gradients overwrite them.
        into = (query, key, value) if cos is not None else tuple(torch.empty_like(x) for x in (query, key, value))
        is_whole = ctx.at_once == key.shape[1]

        def of(tensor: Tensor, heads: slice) -> Tensor:
            return tensor if is_whole else tensor[:, heads]

        for queries, keys in key_heads(query, key, ctx.at_once):
            inputs = of(query, queries), of(key, keys), of(value, keys)
            targets = inputs if cos is not None else (of(into[0], queries), of(into[1], keys), of(into[2], keys))
            q, k = apply_rotary_to_both(*inputs[:2], norms, ctx.eps, *tables)
            working = run.working(q, k, inputs[2], of(grad, queries), of(out, queries))
            del q, k
            # Back to the dtype of the inputs, because merged passes on a CPU compute in fp32.
            parts = tuple(part.to(query.dtype) for part in run.backward(*working, of(lse, queries)))
            del working
            if cos is not None:
                parts = rotary_backward_to_all(parts, inputs, norms, ctx.eps, *tables, sums)
            for target, part in zip(targets, parts, strict=True):
                if target is not part:
                    target.copy_(part)
            del parts, part  # freed before the gradients of the next heads are allocated
        norm_grads = (None if total is None else total.to(norm.dtype) for total, norm in zip(sums, norms, strict=True))
        return *into, None, None, *norm_grads, None, None, None, None, sink_grad


def _heads_and_passes(
    query: Tensor, key: Tensor, layout: PrefixLayout, scale: float, kernel: PackedKernel
) -> tuple[int, _Passes | _MaskedCall]:
    # How many key heads are computed at once, and how.
    (tokens, heads, size), kv_heads = query.shape, key.shape[1]
    is_one_call = kv_heads == 1 and len(layout.runs) == 1 and not layout.rounds
    if not is_one_call and tokens * key.shape[0] * heads * size <= kernel.masked_products:
        return kv_heads, _MaskedCall(layout, kv_heads, scale)
    elements_of_key_head = heads // kv_heads * size
    if kernel.masked_products:
        at_once = key_heads_at_once(max(tokens * elements_of_key_head, key.shape[0] * size), kv_heads, JOINED_ELEMENTS)
        joined = joined_calls(layout, kernel.masked_products // (at_once * elements_of_key_head))
        if joined is not None:
            return at_once, _Passes(layout, kernel, *joined, True, scale)
    at_once = key_heads_at_once(tokens * elements_of_key_head, kv_heads, kernel.elements)
    # A call with several sequences may have so many rows.
    rows = kernel.elements // (at_once * elements_of_key_head)
    return at_once, _Passes(layout, kernel, *calls(layout, rows), False, scale)


@dataclass(frozen=True)
class _MaskedCall:
    """All heads and sequences of few tokens in one call of the CPU kernel, with a mask of all pairs of tokens.

    It computes in fp32, which takes a CPU no longer, and rounds once.
    """

    layout: PrefixLayout
    kv_heads: int
    scale: float

    def working(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys = (self._for_query_heads(tensor, q.shape[1], dtype) for tensor in (k, v))
        return q.to(dtype), *keys, *(tensor.to(dtype) for tensor in others)

    def _for_query_heads(self, tensor: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        # Repeat key heads [T, kv heads, D] for the query heads that share them.
        tokens, kv_heads, size = tensor.shape
        if kv_heads == heads:
            return tensor.to(dtype)
        out = torch.empty((tokens, kv_heads, heads // kv_heads, size), dtype=dtype, device=tensor.device)
        return out.copy_(tensor[:, :, None]).view(tokens, heads, size)

    def forward(self, into: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention [Q, heads, D] and its log-sum-exps [Q, heads]."""
        assert into is None, "all heads are computed at once"
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_as_batch, (q, k, v)), 0.0, False, attn_mask=_mask(self.layout, q.dtype), scale=self.scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Parts:
        """Return the gradients of queries [Q, heads, D], and of keys and values [T, kv heads, D]."""
        given = map(_as_batch, (grad, q, k, v, out, lse))
        head_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, False, attn_mask=_mask(self.layout, q.dtype), scale=self.scale
        )
        parts = [part[0].transpose(0, 1) for part in head_grads]
        del head_grads
        return _sum_key_heads(parts, self.kv_heads)


def _as_batch(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]  # [1, heads, T, ...]


MASKED = -1
"""The key of a layout's mask among its plans, whose other keys are numbers of rows."""


def _mask(layout: PrefixLayout, dtype: torch.dtype) -> Tensor:
    """Return the mask [Q, T] of a layout on a CPU, cached in the layout: 0 if the query sees the key, and otherwise -inf."""
    mask = layout.plans.get(MASKED)
    if mask is None or mask.dtype != dtype:
        # Every block of the model needs the same mask, so build it once per pack.
        places = layout.query_places[:, None]
        visible = (places >= np.arange(len(layout.stops))) & (places < layout.stops)
        mask = layout.plans[MASKED] = torch.tensor(np.where(visible, 0.0, -np.inf), dtype=dtype)
    return mask


@dataclass(frozen=True)
class _Passes:
    """The segment pass and the rounds of some heads, merged.

    ``segments`` and ``others`` are from :func:`joined_calls` if ``is_joined``, else from :func:`calls`.
    """

    layout: PrefixLayout
    kernel: PackedKernel
    segments: Sequence[KernelCall]
    others: Sequence[KernelCall]
    is_joined: bool
    scale: float

    def working(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Cast tensors to the dtype in which the kernel computes attention over this layout.
        return tuple(tensor.float() for tensor in tensors) if self.kernel.float_parts and self.layout.rounds else tensors

    def _sum_dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.promote_types(tensor.dtype, torch.float32) if self.layout.sums_many else tensor.dtype

    def forward(self, into: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention [Q, heads, D] and its log-sum-exps [Q, heads], in the tensors ``into`` or in new ones."""
        segments, others, dtype = self.segments, self.others, self._sum_dtype(q)
        own = (k, v) if self.is_joined else self.layout.at_queries(k, v)
        # A single call covers all queries and keys, so its outputs are the result.
        if into is None and len(segments) == 1 and not others:
            return self._call(segments[0], q, *own)
        # Do not write to the outputs of the kernel: selective checkpointing keeps them, and rejects changed outputs.
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if into is None else into[1]
        out = torch.empty(q.shape, dtype=dtype, device=q.device) if into is None or into[0].dtype != dtype else into[0]
        for call in segments:
            part, part_lse = self._call(call, q, *own)
            out[call.queries] = part
            lse[call.queries] = part_lse
            del part, part_lse
        del own
        for call in others:
            other = self._call(call, q, k, v)
            merged = out[call.queries], lse[call.queries]
            merge_into(*merged, *other)
            if not isinstance(call.queries, slice):  # indexing has copied the rows, so write them back
                out.index_copy_(0, call.queries, merged[0])
                lse.index_copy_(0, call.queries, merged[1])
            del other, merged
        # The passes were merged in a longer dtype. Round once here.
        if into is not None and out is not into[0]:
            into[0].copy_(out)
        return out, lse

    def _call(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q[call.queries], k[call.keys], v[call.keys], call, self.scale)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Parts:
        """Return the gradients of queries [Q, heads, D], and of keys and values [T, kv heads, D]."""
        segments, others = self.segments, self.others

        def call_gradients(call: KernelCall, keys: Tensor, values: Tensor) -> Parts:
            at = call.queries
            return self.kernel.backward(grad[at], q[at], keys[call.keys], values[call.keys], out[at], lse[at], call, self.scale)

        if self.is_joined:
            dq, dk, dv = (torch.zeros(x.shape, dtype=self._sum_dtype(x), device=x.device) for x in (q, k, v))
            for call in (*segments, *others):
                _collect(Tensor.add_, (dq, dk, dv), call, call_gradients(call, k, v))
            return dq, dk, dv
        own = self.layout.at_queries(k, v)
        if len(segments) == 1:
            # One call writes every row, so no tensors of zeros are needed.
            parts = list(call_gradients(segments[0], *own))
            for place, part in enumerate(parts):
                parts[place] = part.to(self._sum_dtype(part))
            dq, dk, dv = parts
            del parts, part
        else:
            dq, dk, dv = (torch.empty(x.shape, dtype=self._sum_dtype(x), device=x.device) for x in (q, *own))
            for call in segments:
                _collect(Tensor.copy_, (dq, dk, dv), call, call_gradients(call, *own))
        del own
        # Scatter to the places of all tokens, because the rounds also add to keys of tokens that are no queries.
        dk, dv = self.layout.at_keys(dk, k), self.layout.at_keys(dv, v)
        for call in others:
            _collect(Tensor.add_, (dq, dk, dv), call, call_gradients(call, k, v))
        return dq, dk, dv


def _collect(collect: Callable[[Tensor, Tensor], Tensor], targets: Parts, call: KernelCall, parts: Parts) -> None:
    for target, place, part in zip(targets, (call.queries, call.keys, call.keys), parts, strict=True):
        if isinstance(place, slice):
            collect(target[place], part)
        else:
            target.index_add_(0, place, part.to(target.dtype))


def key_heads_at_once(elements: int, kv_heads: int, tile: int) -> int:
    """Return the number of key heads that one attention call computes.

    It divides ``kv_heads``, so that every call computes equally many. ``elements`` is the number of query elements that share a
    key head. ``tile`` is the largest number of query elements in one call.
    """
    most = min(max(tile // max(elements, 1), 1), kv_heads)
    return next(count for count in range(most, 0, -1) if kv_heads % count == 0)
