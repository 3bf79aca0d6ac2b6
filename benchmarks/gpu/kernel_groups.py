"""What a kernel of a GPU does, by its name; and an operation of a CPU, where there are no kernels."""

from __future__ import annotations

import re

PRODUCTS, ATTENTION, ELEMENTWISE, REDUCTIONS = "products", "attention", "elementwise", "reductions"
TO_DEVICE, TO_HOST, ON_DEVICE = "copies H2D", "copies D2H", "copies D2D"
OPTIMIZER, INDEXING, COLLECTIVES, OTHER = "optimizer", "indexing", "collectives", "other"

GROUPS = (
    PRODUCTS, ATTENTION, ELEMENTWISE, REDUCTIONS, ON_DEVICE, TO_DEVICE, TO_HOST, OPTIMIZER, INDEXING, COLLECTIVES, OTHER,
)  # fmt: skip
"""In the order of the table."""

KERNELS = (
    (TO_DEVICE, r"^memcpy htod"),
    (TO_HOST, r"^memcpy dtoh"),
    (ON_DEVICE, r"^memcpy|direct_copy_kernel|bfloat16_copy_kernel|float16_copy_kernel|catarraybatchedcopy|split_with_sizes"),
    (COLLECTIVES, r"^nccl"),
    # Before products: attention of Cutlass, cuDNN and flash-attn is built of them.
    (ATTENTION, r"flash|fmha|sdpa|attention|attn"),
    # Norms of many tensors at once are sums, whatever the optimizer does beside them.
    (REDUCTIONS, r"lpnorm"),
    (OPTIMIZER, r"multi_tensor_apply|multitensorapply|adam|_sgd|foreach"),
    (PRODUCTS, r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitkreduce|triton_(tem|mm|bmm)|dot_kernel|wgmma|_mm_"),
    # Before elementwise: an index kernel is one in its outer name.
    (INDEXING, r"index|gather|scatter|embedding|radixsort|sort|nonzero|deviceselect|masked_select|compute_grad_weight|bitonic"),
    (REDUCTIONS, r"reduce|softmax|logsumexp|triton_(red|per)_|layer_?norm|rms_?norm|scan|cumsum|argmax|topk"),
    (ELEMENTWISE, r"elementwise|triton_poi_|triton_for_|pointwise|fillfunctor|arange|distribution|dropout"),
)
"""Of a GPU, by lower-case name; the first that fits."""

OPERATIONS = (
    (OPTIMIZER, r"adam|_foreach|_fused_"),
    (ATTENTION, r"attention"),
    (PRODUCTS, r"::(mm|addmm|bmm|baddbmm|mv|addmv|dot)_?$|mkldnn_linear"),
    (COLLECTIVES, r"c10d|gloo|nccl"),
    (INDEXING, r"index|gather|scatter|embedding|sort|nonzero|masked_select|::select$|where"),
    (REDUCTIONS, r"sum|mean|softmax|norm|amax|amin|::max$|::min$|argmax|cumsum|::any$|::all$"),
    (ON_DEVICE, r"copy|clone|contiguous|::cat$|::stack$|::to$|repeat_interleave|constant_pad"),
    (
        ELEMENTWISE,
        r"::(add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|square|sigmoid|silu|tanh|fill|zero|clamp|maximum|minimum|lerp|"
        r"addcmul|addcdiv|cos|sin|abs|eq|ne|ge|gt|le|lt|logical_\w+|bitwise_\w+|masked_fill|triu|tril|reciprocal|"
        r"threshold|isfinite|isnan|logaddexp|silu_backward|sigmoid_backward|ones_like|zeros|ones|full|arange|randint)_?$",
    ),
)
"""Of a CPU, by the operation's name. What only calls others, as matmul does, is ``other``."""


def kernel_group(name: str) -> str:
    """Gives what a kernel, or a copy, of a GPU does."""
    return _first(KERNELS, name.lower())


def operation_group(name: str) -> str:
    """Gives what an operation of a CPU does; views and bookkeeping are ``other``."""
    return _first(OPERATIONS, name.lower())


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((group for group, pattern in rules if re.search(pattern, name)), OTHER)
