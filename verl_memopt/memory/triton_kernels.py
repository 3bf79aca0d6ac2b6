"""Triton kernels. ``kernels.py`` launches them and says which statement each computes.

Each rounds where its statement rounds, and computes in fp32 between. Columns of all tensors are contiguous; ``*_row`` is the
stride of rows. A program reads a value before it overwrites it, so a result may take the place of an input with the same rows.
Sizes that differ from one call to the next are not specialised, so no kernel is compiled again for another number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(value, pointer):
    # Round fp32 values to the dtype of a tensor.
    return value.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def _store(pointer, value, mask):
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


# Norms over rows. A row of one block is read once, because the compiler sees that the second loop reads the same.


@triton.jit
def norm(
    x, residual, total, out, weight, x_row, residual_row, total_row, out_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm of x, or of ``residual + x``, which is written to ``total``."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        value = _load(x + row * x_row + columns, mask)
        if residual is not None:
            value = _rounded(_load(residual + row * residual_row + columns, mask) + value, total)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        value = _load(x + row * x_row + columns, mask)
        scale = _load(weight + columns, mask)
        if residual is not None:
            value = _rounded(_load(residual + row * residual_row + columns, mask) + value, total)
            _store(total + row * total_row + columns, value, mask)
        normal = value * inverse
        if weight.dtype.element_ty != tl.float32:  # otherwise it is rounded once, after the product
            normal = _rounded(normal, out)
        _store(out + row * out_row + columns, normal * scale, mask)


@triton.jit(do_not_specialize=["rows"])
def norm_gradient(
    grad, x, into, plus, weight, partial, rows, grad_row, x_row, into_row, plus_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input, and of its weight unless ``partial`` is None.

    ``partial`` [programs, WIDTH] gets the sum of each program's rows.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(at, tl.int64)
        squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < WIDTH
            value = _load(x + row * x_row + columns, mask)
            squares += value * value
            products += _load(grad + row * grad_row + columns, mask) * value * _load(weight + columns, mask)
        inverse = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        shared = -tl.sum(products) * inverse / WIDTH
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < WIDTH
            normal = _load(x + row * x_row + columns, mask) * inverse
            above = _load(grad + row * grad_row + columns, mask)
            if partial is not None:
                if WIDTH <= BLOCK:
                    sums += above * normal
                else:
                    place = partial + tl.program_id(0).to(tl.int64) * WIDTH + columns
                    before = tl.where(at == tl.program_id(0), 0.0, tl.load(place, mask=mask, other=0.0))
                    tl.store(place, before + above * normal, mask=mask)
            gradient = (above * _load(weight + columns, mask) + normal * shared) * inverse
            if plus is not None:
                gradient = _rounded(gradient, into) + _load(plus + row * plus_row + columns, mask)
            _store(into + row * into_row + columns, gradient, mask)
        if partial is not None and WIDTH > BLOCK:
            tl.debug_barrier()  # the next row reads the sums that other threads of this program may have written
    if partial is not None and WIDTH <= BLOCK:
        columns = tl.arange(0, BLOCK)
        tl.store(partial + tl.program_id(0).to(tl.int64) * WIDTH + columns, sums, mask=columns < WIDTH)


@triton.jit
def _sum_into(pointer, total, mask):
    # An fp32 sum is added to; in a shorter dtype the whole sum is written.
    if pointer.dtype.element_ty == tl.float32:
        total += tl.load(pointer, mask=mask, other=0.0)
    _store(pointer, total, mask)


@triton.jit(do_not_specialize=["programs"])
def sum_partial(
    partial, first, second, programs, FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum ``partial`` [programs, WIDTH] over programs: columns before FIRST into ``first``, the others into ``second``."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < programs)[:, None] & (columns < WIDTH)[None, :]
        sums += tl.load(partial + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, 0)
    if first is not None:
        _sum_into(first + columns, total, columns < FIRST)
    if second is not None:
        _sum_into(second + columns - FIRST, total, (columns >= FIRST) & (columns < WIDTH))


# Gated activations: silu(gate) * up.


@triton.jit
def gate(
    gates, up, out, gate_row, up_row, out_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = _load(gates + row * gate_row + columns, mask)
    active = _rounded(value / (1.0 + tl.exp(-value)), gates)
    _store(out + row * out_row + columns, active * _load(up + row * up_row + columns, mask), mask)


@triton.jit
def gate_gradient(
    grad, gates, up, into_gate, into_up, into_value, grad_row, gate_row, up_row, into_gate_row, into_up_row, into_value_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up, and the value itself unless ``into_value`` is None."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    above = _load(grad + row * grad_row + columns, mask)
    value = _load(gates + row * gate_row + columns, mask)
    factor = _load(up + row * up_row + columns, mask)
    share = 1.0 / (1.0 + tl.exp(-value))
    active = _rounded(value / (1.0 + tl.exp(-value)), gates)
    through = _rounded(above * factor, grad)
    _store(into_up + row * into_up_row + columns, above * active, mask)
    _store(into_gate + row * into_gate_row + columns, through * share * (1.0 + value * (1.0 - share)), mask)
    if into_value is not None:
        _store(into_value + row * into_value_row + columns, active * factor, mask)


# Rotary embeddings. A program takes whole tokens: some heads at a time, the first and the second half of each.


@triton.jit
def _both_halves(pointer, heads, head_stride, columns, mask, HALF: tl.constexpr):
    place = pointer + heads * head_stride + columns
    return _load(place, mask), _load(place + HALF, mask)


@triton.jit
def _store_halves(pointer, first, second, heads, head_stride, columns, mask, HALF: tl.constexpr):
    place = pointer + heads * head_stride + columns
    _store(place, first, mask)
    _store(place + HALF, second, mask)


@triton.jit
def _rotate_heads(
    x, out, weight, x_head, out_head, first_cos, second_cos, first_sin, second_sin, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, HEADS, BLOCK_HEADS):
        heads = (start + tl.arange(0, BLOCK_HEADS))[:, None]
        mask = (heads < HEADS) & (columns < HALF)
        first, second = _both_halves(x, heads, x_head, columns, mask, HALF)
        if weight is not None:
            inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
            first_weight, second_weight = _both_halves(weight, 0, 0, columns, columns < HALF, HALF)
            first *= inverse
            second *= inverse
            if weight.dtype.element_ty != tl.float32:  # otherwise they are rounded once, after the product
                first = _rounded(first, x)
                second = _rounded(second, x)
            first = _rounded(first * first_weight, x)
            second = _rounded(second * second_weight, x)
        turned = _rounded(first * first_cos, out) - second * first_sin
        other = _rounded(second * second_cos, out) + first * second_sin
        _store_halves(out, turned, other, heads, out_head, columns, mask, HALF)


@triton.jit
def rotate(
    query, key, cos, sin, query_out, key_out, query_weight, key_weight,
    query_row, query_head, key_row, key_head, cos_row, sin_row, query_out_row, query_out_head, key_out_row, key_out_head, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm queries and keys where they have weights, and rotate them. KEY_HEADS may be 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    first_cos, second_cos = _both_halves(cos + row * cos_row, 0, 0, columns, columns < HALF, HALF)
    first_sin, second_sin = _both_halves(sin + row * sin_row, 0, 0, columns, columns < HALF, HALF)
    _rotate_heads(
        query + row * query_row, query_out + row * query_out_row, query_weight, query_head, query_out_head,
        first_cos, second_cos, first_sin, second_sin, eps, HEADS, HALF, BLOCK_HEADS, BLOCK,
    )  # fmt: skip
    if KEY_HEADS > 0:
        _rotate_heads(
            key + row * key_row, key_out + row * key_out_row, key_weight, key_head, key_out_head,
            first_cos, second_cos, first_sin, second_sin, eps, KEY_HEADS, HALF, BLOCK_HEADS, BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate_heads_back(
    grad, x, into, weight, first_sums, second_sums, row, grad_row, x_row, into_row, grad_head, x_head, into_head,
    first_cos, second_cos, first_sin, second_sin, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Return the sums of the weight's gradient, with those of these heads added.
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, HEADS, BLOCK_HEADS):
        heads = (start + tl.arange(0, BLOCK_HEADS))[:, None]
        mask = (heads < HEADS) & (columns < HALF)
        above, other = _both_halves(grad + row * grad_row, heads, grad_head, columns, mask, HALF)
        first = _rounded(_rounded(above * first_cos, grad) + other * second_sin, grad)
        second = _rounded(_rounded(other * second_cos, grad) - above * first_sin, grad)
        if weight is not None:
            first_x, second_x = _both_halves(x + row * x_row, heads, x_head, columns, mask, HALF)
            inverse = tl.rsqrt(tl.sum(first_x * first_x + second_x * second_x, 1) / (2 * HALF) + eps)[:, None]
            first_x *= inverse
            second_x *= inverse
            first_sums += first * first_x
            second_sums += second * second_x
            first_weight, second_weight = _both_halves(weight, 0, 0, columns, columns < HALF, HALF)
            products = first * first_x * first_weight + second * second_x * second_weight
            shared = -(tl.sum(products, 1) / (2 * HALF))[:, None]
            first = (first * first_weight + first_x * shared) * inverse
            second = (second * second_weight + second_x * shared) * inverse
        _store_halves(into + row * into_row, first, second, heads, into_head, columns, mask, HALF)
    return first_sums, second_sums


@triton.jit
def _store_sums(partial, first, second, columns, HALF: tl.constexpr):
    tl.store(partial + columns, tl.sum(first, 0), mask=columns < HALF)
    tl.store(partial + HALF + columns, tl.sum(second, 0), mask=columns < HALF)


@triton.jit(do_not_specialize=["rows"])
def rotate_back(
    query_grad, key_grad, query, key, cos, sin, query_into, key_into, value_grad, value_into, query_weight, key_weight,
    partial, rows, query_grad_row, query_grad_head, key_grad_row, key_grad_head, query_row, query_head, key_row, key_head,
    cos_row, sin_row, query_into_row, query_into_head, key_into_row, key_into_head, value_grad_row, value_grad_head,
    value_into_row, value_into_head, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys before norm and rotation, and those of values copied unless they are None.

    ``partial`` [programs, 4 * HALF] gets the sums of both weights' gradients, of queries first.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    first_sums = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    second_sums = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    first_key_sums = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    second_key_sums = tl.zeros([BLOCK_HEADS, BLOCK], tl.float32)
    for at in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(at, tl.int64)
        first_cos, second_cos = _both_halves(cos + row * cos_row, 0, 0, columns, columns < HALF, HALF)
        first_sin, second_sin = _both_halves(sin + row * sin_row, 0, 0, columns, columns < HALF, HALF)
        first_sums, second_sums = _rotate_heads_back(
            query_grad, query, query_into, query_weight, first_sums, second_sums, row, query_grad_row, query_row, query_into_row,
            query_grad_head, query_head, query_into_head,
            first_cos, second_cos, first_sin, second_sin, eps, HEADS, HALF, BLOCK_HEADS, BLOCK,
        )  # fmt: skip
        if KEY_HEADS > 0:
            first_key_sums, second_key_sums = _rotate_heads_back(
                key_grad, key, key_into, key_weight, first_key_sums, second_key_sums, row, key_grad_row, key_row, key_into_row,
                key_grad_head, key_head, key_into_head,
                first_cos, second_cos, first_sin, second_sin, eps, KEY_HEADS, HALF, BLOCK_HEADS, BLOCK,
            )  # fmt: skip
        if value_into is not None:
            for start in range(0, KEY_HEADS, BLOCK_HEADS):
                heads = (start + tl.arange(0, BLOCK_HEADS))[:, None]
                mask = (heads < KEY_HEADS) & (columns < HALF)
                first, second = _both_halves(value_grad + row * value_grad_row, heads, value_grad_head, columns, mask, HALF)
                _store_halves(value_into + row * value_into_row, first, second, heads, value_into_head, columns, mask, HALF)
    if partial is not None:
        columns = tl.arange(0, BLOCK)
        place = partial + tl.program_id(0).to(tl.int64) * (4 * HALF)
        _store_sums(place, first_sums, second_sums, columns, HALF)
        _store_sums(place + 2 * HALF, first_key_sums, second_key_sums, columns, HALF)


# Attention over two sets of keys.


@triton.jit(do_not_specialize=["lse_row", "lse_head", "other_lse_row", "other_lse_head", "into_lse_row", "into_lse_head"])
def merge(
    out, lse, other, other_lse, into, into_lse, out_row, out_head, lse_row, lse_head, other_row, other_head,
    other_lse_row, other_lse_head, into_row, into_head, into_lse_row, into_lse_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK)[None, :]
    exists = heads < HEADS
    mask = exists[:, None] & (columns < WIDTH)
    mine = tl.load(lse + row * lse_row + heads.to(tl.int64) * lse_head, mask=exists, other=0.0)
    theirs = tl.load(other_lse + row * other_lse_row + heads.to(tl.int64) * other_lse_head, mask=exists, other=0.0)
    share = (1.0 / (1.0 + tl.exp(mine - theirs)))[:, None]
    value = _load(out + row * out_row + heads[:, None] * out_head + columns, mask)
    change = _load(other + row * other_row + heads[:, None] * other_head + columns, mask) - value
    merged = tl.where(share < 0.5, value + share * change, value + change - change * (1.0 - share))
    # logaddexp; equal infinities have no difference.
    apart = tl.where(mine == theirs, 0.0, -tl.abs(mine - theirs))
    both = tl.maximum(mine, theirs) + tl.log(1.0 + tl.exp(apart))
    # Several threads read a log-sum-exp that one of them overwrites.
    tl.debug_barrier()
    _store(into + row * into_row + heads[:, None] * into_head + columns, merged, mask)
    _store(into_lse + row * into_lse_row + heads.to(tl.int64) * into_lse_head, both, exists)


# Logits of a tile of the vocabulary.


@triton.jit
def _logits(products, inverse, mask, fill):
    # fp32 products are logits already.
    value = tl.load(products, mask=mask, other=fill)
    if products.dtype.element_ty != tl.float32:
        value = value.to(tl.float32) * inverse
    return value


@triton.jit
def _log_of_sum(first, second):
    return tl.maximum(first, second) + tl.log(1.0 + tl.exp(-tl.abs(first - second)))


@triton.jit
def logit_statistics(
    products, targets, before, known, products_row, targets_row, before_row, known_row, inverse,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The statistics of a row of logits in one pass: sums are kept relative to the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    # Finite, so that a difference of two such values is a number.
    tile_top = tl.full([], -3.0e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    means = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        logits = _logits(products + row * products_row + columns, inverse, mask, -float("inf"))
        top = tl.maximum(tile_top, tl.max(logits, 0))
        above = logits - top
        weights = tl.exp(above)
        share = tl.exp(tile_top - top)
        if ENTROPY:
            means = (means + sums * (tile_top - top)) * share + tl.where(mask, weights * above, 0.0)
        sums = sums * share + weights
        tile_top = top
    total = tl.sum(sums)
    log_total = tl.log(total)
    before_top = tl.load(before + row * before_row)
    top = tl.maximum(before_top, tile_top)
    first = before_top - top + tl.load(before + row * before_row + 1)
    second = tile_top - top + log_total
    log_sum = _log_of_sum(first, second)
    target = tl.load(targets + row * targets_row)
    inside = (target >= 0) & (target < WIDTH)
    picked = _logits(products + row * products_row + target, inverse, inside, 0.0)
    tl.store(known + row * known_row, top)
    tl.store(known + row * known_row + 1, log_sum)
    tl.store(known + row * known_row + 2, tl.where(inside, picked, tl.load(before + row * before_row + 2)))
    if ENTROPY:
        entropy = log_total - tl.sum(means) / total
        mixed = tl.exp(first - log_sum) * (tl.load(before + row * before_row + 3) + log_sum - first)
        tl.store(known + row * known_row + 3, mixed + tl.exp(second - log_sum) * (entropy + log_sum - second))


@triton.jit
def logit_gradient(
    products, targets, normalizer, grad, entropy, grad_entropy,
    products_row, targets_row, normalizer_row, normalizer_column, grad_row, entropy_row, grad_entropy_row, inverse,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite products with their gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    log_p = _logits(products + row * products_row + columns, inverse, mask, 0.0)
    for part in tl.static_range(PARTS):
        log_p -= tl.load(normalizer + row * normalizer_row + part * normalizer_column)
    above = tl.load(grad + row * grad_row)
    factor = above
    if entropy is not None:
        factor += tl.load(grad_entropy + row * grad_entropy_row) * (log_p + tl.load(entropy + row * entropy_row))
    gradient = tl.where(columns == tl.load(targets + row * targets_row), above, 0.0) - tl.exp(log_p) * factor
    _store(products + row * products_row + columns, gradient * inverse, mask)
