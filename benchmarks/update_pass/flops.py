"""Floating-point operations: those a pass made, and those that no pass can do without.

Made ones are counted by torch's own counter as ops are dispatched, in custom autograd functions and in backward as well; a
multiplication and an addition are two. Only products and attention count, not what is done element by element. Attention is
counted by :mod:`benchmarks.update_pass.attention_flops`, on every device as the floor counts it: the causal half where a fused
kernel skips the rest, the whole square where attention is written out as products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.update_pass.attention_flops import attended, attention_formulas
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
    aten.addmm_: _added,
    aten.baddbmm_: _added,
    aten.addmm: _added,
    aten.baddbmm: _added,
    aten.bmm: _product,
    aten.mm: _product,
}
"""Torch has none for products added in place, and its own stop with an error where a product names its output's dtype."""


def count(work: Callable[[], None]) -> int:
    """Gives the floating-point operations of a call, the backward passes in it included."""
    counter = FlopCounterMode(display=False, custom_mapping={**PRODUCTS, **attention_formulas()})
    with counter:
        work()
    return counter.get_total_flops()


def floor(shape: TinyShape, batch: Batch, checkpointing: bool, critic: bool = False) -> int:
    """Gives the least floating-point operations of an update: each prompt once, each answer once, logits for answers alone.

    Three forwards. With checkpointing every block runs its forward once more, but for its last product, whose result nobody
    reads; the head does not. An answer's last token predicts nothing and is not among those computed.
    A critic is a second decoder of the same shape; the products of its head, one output, do not count.
    """
    groups = zip(batch.prompts, range(0, len(batch.answers), batch.k), strict=True)
    parts = [_parts(shape, len(prompt), [len(answer) for answer in batch.answers[at : at + batch.k]]) for prompt, at in groups]
    blocks, last, head = (sum(part[index] for part in parts) for index in range(3))
    again = blocks - last if checkpointing else 0
    return 3 * (blocks + head) + again + (3 * blocks + again if critic else 0)


def forward_flops(shape: TinyShape, prompt: int, answers: list[int]) -> int:
    """Gives the products of one forward over a prompt and its answers, each token once."""
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
