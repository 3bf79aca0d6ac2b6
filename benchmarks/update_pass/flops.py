"""Floating-point operations: those a pass made, and those that no pass can do without.

Made ones are counted by torch's own counter as ops are dispatched, in custom autograd functions and in backward as well; a
multiplication and an addition are two. Only products and attention count, not what is done element by element.

Fused attention counts the pairs of query and key that its kernel computes, by one definition for every kernel of a CPU and of a
GPU. A causal mask or a window halves the work of a fused kernel, which skips what is hidden; a mask given as a tensor saves
nothing, and neither does attention that is written out as products. Torch's own counter takes no notice of either: it counts the
whole square for a GPU's kernels, and nothing for the CPU's. A forward makes two products of each pair (scores, outputs), a
backward five (the scores again, and the gradients of weights, values, queries and keys).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.update_pass.work import Batch
from verl_memopt.model.tiny import TinyShape

aten = torch.ops.aten

ATTENTION_PRODUCTS = 2
"""Of a forward: query with key, weights with value."""


def _added(target: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **_: Any) -> int:
    return _product(left, right)


def _product(left: Any, right: Any, *args: Any, out_shape: Any = None, **_: Any) -> int:
    *batch, rows, inner = left
    return 2 * (batch[0] if batch else 1) * rows * inner * right[-1]


PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.addmm_: _added, aten.baddbmm_: _added, aten.addmm: _added, aten.baddbmm: _added, aten.bmm: _product, aten.mm: _product,
}  # fmt: skip
"""Torch has none for products added in place, and its own stop with an error where a product names its output's dtype."""


def count(work: Callable[[], None]) -> int:
    counter = FlopCounterMode(display=False, custom_mapping={**PRODUCTS, **attention_formulas()})
    with counter:
        work()
    return counter.get_total_flops()


def floor(shape: TinyShape, batch: Batch, checkpointing: bool) -> int:
    """Gives the least floating-point operations of an update: each prompt once, each answer once, logits for answers alone.

    Three forwards. With checkpointing every block runs its forward once more, but for its last product, whose result nobody
    reads; the head does not. An answer's last token predicts nothing and is not among those computed.
    """
    groups = zip(batch.prompts, range(0, len(batch.answers), batch.k), strict=True)
    parts = [_parts(shape, len(prompt), [len(answer) for answer in batch.answers[at : at + batch.k]]) for prompt, at in groups]
    blocks, last, head = (sum(part[index] for part in parts) for index in range(3))
    again = blocks - last if checkpointing else 0
    return 3 * (blocks + head) + again


def forward_flops(shape: TinyShape, prompt: int, answers: list[int]) -> int:
    blocks, _, head = _parts(shape, prompt, answers)
    return blocks + head


def _parts(shape: TinyShape, prompt: int, answers: list[int]) -> tuple[int, int, int]:
    """Gives a forward's products in all blocks, those of them that are the last of their block, and in the head."""
    tokens = prompt + sum(length - 1 for length in answers)
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    last = 2 * shape.hidden_size * shape.intermediate_size * tokens
    weights = 2 * 2 * shape.hidden_size * (heads + keys) * tokens + 3 * last
    own = sum(attended(length - 1, length - 1, True) + (length - 1) * prompt for length in answers)
    attention = ATTENTION_PRODUCTS * 2 * heads * (attended(prompt, prompt, True) + own)
    head = 2 * shape.hidden_size * shape.vocab_size * sum(answers)
    return shape.num_layers * (weights + attention), shape.num_layers * last, head


UNLIMITED = -1
"""Of a window: as far as there are keys. Kernels also take None for it."""

TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL = 1, 2
"""``custom_mask_type`` of the memory-efficient kernel."""


@dataclass(frozen=True)
class Kernel:
    """An op and its backward, which has the same name and ``_backward``.

    heads_first: tensors are [batch, heads, tokens, D], else [batch, tokens, heads, D]. Both are [tokens, heads, D] where
    cumulative lengths are given. bottom_right: with a causal mask the last query sees the last key, else the first the first.
    """

    forward: str
    heads_first: bool = True
    bottom_right: bool = False

    def ops(self) -> list[Any]:
        """Gives those of the two that are there: the package flash-attn has its own once it is imported."""
        names = self.forward, self.forward.removesuffix("_forward") + "_backward"
        pairs = [name.split(".") for name in names]
        found = [getattr(getattr(torch.ops, namespace), op, None) for namespace, op in pairs]
        return [op for op in found if op is not None]


KERNELS = (
    Kernel("aten._scaled_dot_product_flash_attention_for_cpu"),
    Kernel("aten._scaled_dot_product_flash_attention", bottom_right=True), Kernel("aten._scaled_dot_product_efficient_attention"),
    Kernel("aten._scaled_dot_product_cudnn_attention"), Kernel("aten._cudnn_attention_forward"),
    Kernel("aten._flash_attention_forward", heads_first=False, bottom_right=True),
    Kernel("aten._efficient_attention_forward", heads_first=False),
    Kernel("torch_attn._varlen_attn", heads_first=False, bottom_right=True),
    Kernel("flash_attn._flash_attn_forward", heads_first=False, bottom_right=True),
    Kernel("flash_attn._flash_attn_varlen_forward", heads_first=False, bottom_right=True),
)  # fmt: skip


def attended(queries: int, keys: int, causal: bool) -> int:
    """Gives the pairs of query and key that are computed. Causal: query i sees the first i + 1 keys."""
    if not causal:
        return queries * keys
    seen = min(queries, keys)
    return seen * (seen + 1) // 2 + (queries - seen) * keys


@functools.cache
def attended_in_window(queries: int, keys: int, left: int, right: int, offset: int) -> int:
    """Gives the pairs that are computed where query i stands at key i + ``offset`` and sees ``left`` back and ``right`` ahead."""
    pairs = 0
    for place in range(offset, queries + offset):
        first = 0 if left == UNLIMITED else max(place - left, 0)
        last = keys - 1 if right == UNLIMITED else min(place + right, keys - 1)
        pairs += max(last - first + 1, 0)
    return pairs


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """Gives a formula for each op of ``KERNELS`` that is there, as torch's counter takes them."""
    importlib.import_module("torch.nn.attention.varlen")  # registers its ops
    return {op: _formula(op, kernel) for kernel in KERNELS for op in kernel.ops()}


def _formula(op: Any, kernel: Kernel) -> Callable[..., int]:
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **options: Any) -> int:
        return _count(dict(zip(names, args, strict=False)) | options, kernel, backward=op.__name__.endswith("_backward"))

    formula._get_raw = True  # type: ignore[attr-defined]  # it reads lengths of segments, not only shapes
    return formula


def _count(given: Mapping[str, Any], kernel: Kernel, backward: bool) -> int:
    query, key, value = (_first(given, name, name[0]) for name in ("query", "key", "value"))
    starts = _first(given, "cum_seq_q", "cu_seqlens_q", "cu_seq_q"), _first(given, "cum_seq_k", "cu_seqlens_k", "cu_seq_k")
    packed = starts[0] is not None and (query.dim() == 3 or not kernel.heads_first)
    if packed:
        lengths = zip(_lengths(starts[0]), _lengths(starts[0] if starts[1] is None else starts[1]), strict=True)
        pairs, heads = sum(_pairs(given, kernel, *pair) for pair in lengths), query.shape[-2]
    else:
        tokens, of_heads = (2, 1) if kernel.heads_first else (1, 2)
        pairs = query.shape[0] * _pairs(given, kernel, query.shape[tokens], key.shape[tokens])
        heads = query.shape[of_heads]
    inner, outer = query.shape[-1], value.shape[-1]
    return 2 * heads * pairs * (3 * inner + 2 * outer if backward else inner + outer)


def _pairs(given: Mapping[str, Any], kernel: Kernel, queries: int, keys: int) -> int:
    kind = given.get("custom_mask_type", 0)
    causal = bool(_first(given, "is_causal", "causal")) or kind in (TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL)
    bottom_right = kind == BOTTOM_RIGHT_CAUSAL or (kernel.bottom_right and kind == 0)
    left, right = _window(given)
    right = 0 if causal else right
    if left == right == UNLIMITED:
        return attended(queries, keys, causal=False)
    if left == UNLIMITED and right == 0 and not bottom_right:
        return attended(queries, keys, causal=True)
    return attended_in_window(queries, keys, left, right, keys - queries if bottom_right else 0)


def _window(given: Mapping[str, Any]) -> tuple[int, int]:
    pair = given.get("window_size")
    if isinstance(pair, int):  # the memory-efficient kernel counts a query's own key with those before it
        return (pair - 1, UNLIMITED) if pair > 0 else (UNLIMITED, UNLIMITED)
    sides = pair or (given.get("window_size_left"), given.get("window_size_right"))
    left, right = (UNLIMITED if side is None or side < 0 else side for side in sides)
    return left, right


def _lengths(starts: Tensor) -> list[int]:
    """Gives the lengths of segments from where they start. Errors: ValueError for a tensor without values."""
    if isinstance(starts, FakeTensor) or starts.is_meta:
        raise ValueError(
            "attention over segments cannot be counted on tensors without values: its work depends on the segments' lengths. "
            "Give the cumulative lengths as a real tensor."
        )
    with unset_fake_temporarily():  # the tensors around them may be fake where these lengths are real
        lengths: list[int] = starts.diff().tolist()
    return lengths


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)
