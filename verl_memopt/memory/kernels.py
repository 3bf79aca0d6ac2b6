"""Our own GPU kernels, each in place of one statement of :mod:`verl_memopt.memory.fused`.

A statement names its kernel with :func:`has_kernel`. Before a kernel runs over rows of a new width or dtype, it runs over a few
random rows beside its statement. A kernel that fails or gives other numbers is not used any more, and one warning names it. The
kernels are in ``triton_kernels.py``, which is imported when the first of them runs; here is how each is launched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from subprocess import SubprocessError
from typing import Any, TypeAlias

import torch
from torch import Tensor

KEY = "actor_rollout_ref.actor.use_torch_compile"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on tensors of a CPU, for tests."""
DEVICE_TYPES = {"cuda", "cpu"} if INTERPRETED else {"cuda"}
DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.int64}

ROWS_OF_A_CHECK = 5
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Dtype -> how far a kernel's result may be from its statement's, as a share of the value plus the mean magnitude: a few
roundings."""

Tensors: TypeAlias = Sequence[Tensor | None]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Kernel:
    """How a statement is computed by a kernel of our own.

    Attributes:
        statement: What the kernel computes.
        launch: Launches it. Takes the arguments of the statement.
        access: For each tensor of the statement, whether the kernel reads it (r), writes it (w), or both (b).
        dims: Dimensions of the first tensor.
        strided: Places of tensors whose columns may have any stride. Others need contiguous columns.
        sums: Places, among the other arguments, of tensors that get a sum over rows.
        takes: Whether the kernel takes these tensors and other arguments, beyond dtypes and strides.
    """

    statement: Callable[..., None]
    launch: Callable[..., None]
    access: str
    dims: int
    strided: tuple[int, ...]
    sums: tuple[int, ...]
    takes: Callable[[Tensors, Sequence[Any]], bool] | None
    given_up: bool = False
    _works: dict[Any, bool] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return self.statement.__name__

    def __call__(self, *arguments: Any) -> None:
        """Run the statement, for recorders, which get a kernel in the place of a function."""
        self.statement(*arguments)

    def fits(self, tensors: Tensors, others: Sequence[Any]) -> bool:
        first = tensors[0]
        if self.given_up or first is None or first.dim() != self.dims:
            return False
        for place, tensor in enumerate(tensors):
            if tensor is not None and (
                tensor.dtype not in DTYPES or (tensor.dim() > 1 and tensor.stride(-1) != 1 and place not in self.strided)
            ):
                return False
        for other in others:
            if isinstance(other, Tensor) and (other.dtype not in DTYPES or not other.is_contiguous()):
                return False
        return self.takes is None or self.takes(tensors, others)

    def run(self, tensors: Tensors, others: Sequence[Any]) -> bool:
        """Launch the kernel for tensors that fit. Return False if it does not work; nothing was written then."""
        first = tensors[0]
        assert first is not None
        # With a weight in another dtype a kernel rounds at other places.
        dtypes = tuple(other.dtype for other in others if isinstance(other, Tensor))
        key = first.get_device(), first.dtype, first.shape[-1], dtypes
        works = self._works.get(key)
        if works is None:
            reason = self._why_not(tensors, others)
            works = self._works[key] = reason is None
            if reason is not None:
                self._give_up(reason)
        if not works:
            return False
        try:
            self.launch(*tensors, *others)
        except torch.OutOfMemoryError:  # says nothing about the kernel, and the run may go on with fewer tokens
            raise
        except _failures() as error:  # raised before the launch: the kernel does not compile for these arguments
            self._give_up(_first_line(error))
            return False
        return True

    def partial_bytes(self, tensors: Tensors, others: Sequence[Any]) -> int:
        """Return the bytes of the sums that each program writes, which a second launch adds up. 0 = there is no second launch."""
        first = tensors[0]
        assert first is not None
        summed = any(others[place] is not None for place in self.sums)
        return 4 * _programs(first.shape[0]) * first.shape[-1] * (self.dims - 1) if summed else 0

    def _give_up(self, reason: str) -> None:
        self.given_up = True
        logger.warning(
            "%s=true: this project's GPU kernel of %s is not used (%s). The run continues with what torch compiles.",
            KEY, self.__name__, reason,
        )  # fmt: skip

    @torch.no_grad()
    def _why_not(self, tensors: Tensors, others: Sequence[Any]) -> str | None:
        # Run the kernel and the statement over random rows like these. Return what is wrong, or None.
        first = tensors[0]
        assert first is not None
        if first.device.type == "cuda" and first.device.index != torch.accelerator.current_device_index():
            return f"tensors are on {first.device}, which is not the current device"
        expected, given = _random_rows(tensors), [value.detach() if isinstance(value, Tensor) else value for value in others]
        found, own = _copies(expected), [value.clone() if isinstance(value, Tensor) else value for value in given]
        given = [value.clone() if isinstance(value, Tensor) else value for value in given]
        try:
            self.launch(*found, *own)
            self.statement(*expected, *given)
            pairs = zip([*found, *own], [*expected, *given], strict=True)
            errors = [
                _error(one, two)
                for one, two in pairs
                if isinstance(one, Tensor) and isinstance(two, Tensor) and one.dtype in BOUNDS
            ]
            worst = float(torch.stack(errors).max())  # NaN if any is
        except torch.OutOfMemoryError:
            raise
        except _failures() as error:
            return _first_line(error)
        # Not `worst > 1`, which is false for a NaN.
        return (
            None
            if worst <= 1
            else f"its results differ from the statement's {worst:.3g} times as much as rounding could make them"
        )


KERNELS: dict[Callable[..., None], Kernel] = {}
"""Statement -> its kernel."""


def has_kernel(
    launch: Callable[..., None],
    access: str,
    dims: int = 2,
    strided: tuple[int, ...] = (),
    sums: tuple[int, ...] = (),
    takes: Callable[[Tensors, Sequence[Any]], bool] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a statement as computed by a kernel of our own. Arguments are those of :class:`Kernel`."""

    def marked(statement: Callable[..., None]) -> Callable[..., None]:
        KERNELS[statement] = Kernel(statement, launch, access, dims, strided, sums, takes)
        return statement

    return marked


def _random_rows(tensors: Tensors) -> list[Tensor | None]:
    # A few rows with the dtypes, widths and strides of these tensors. Tensors that are one stay one.
    first = tensors[0]
    assert first is not None
    # A generator of its own, so that the numbers of a run do not depend on which kernels were checked.
    generator = torch.Generator(first.device).manual_seed(0)
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor is None or id(tensor) in made:
            continue
        shape = (ROWS_OF_A_CHECK, *tensor.shape[1:])
        if tensor.dtype == torch.int64:
            # Columns of the first tensor, and places on both sides of them.
            values = torch.randint(-1, first.shape[-1] + 1, shape, generator=generator, device=first.device)
        else:
            values = torch.randn(shape, generator=generator, device=first.device)
        strides = values.stride() if 0 in tensor.stride() else tensor.stride()
        made[id(tensor)] = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=first.device).copy_(values)
    return [None if tensor is None else made[id(tensor)] for tensor in tensors]


def _copies(tensors: Tensors) -> list[Tensor | None]:
    made = {id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            for tensor in tensors if tensor is not None}  # fmt: skip
    return [None if tensor is None else made[id(tensor)] for tensor in tensors]


def _error(one: Tensor, two: Tensor) -> Tensor:
    # The largest error of a result, in units of what is allowed.
    one, two, bound = one.float(), two.float(), BOUNDS[two.dtype]
    return ((one - two).abs() / (two.abs() + two.abs().mean() + 1e-6)).max() / bound


@cache
def _failures() -> tuple[type[Exception], ...]:
    # What a kernel raises that cannot be imported, compiled or launched.
    common = (RuntimeError, OSError, ImportError, SubprocessError, ValueError, TypeError, AttributeError, AssertionError)
    try:
        from triton import TritonError
    except ImportError:
        return common
    return (*common, TritonError)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# How each kernel is launched.

PROGRAMS, ROWS_OF_A_PROGRAM = 512, 8
"""Of a kernel that sums over rows: most programs, and fewest rows of each, so that their sums are small beside the rows."""
MOST_COLUMNS = 8192
"""Of a row in registers. Wider rows are read in parts."""
ELEMENTS = 1024
"""Elements of a block of heads, or of half of each head."""
WIDEST_HEAD = 512


@cache
def _triton() -> Any:
    from verl_memopt.memory import triton_kernels

    return triton_kernels


@cache
def _block(width: int, most: int) -> tuple[int, int]:
    # Columns of a block, and warps of a program.
    block = _power(width)
    block = block if block <= most else most // 2
    return block, 4 if block <= 1024 else 8 if block <= 4096 else 16


@cache
def _block_of_heads(heads: int, size: int, elements: int = ELEMENTS) -> tuple[int, int]:
    # Heads and columns of a block, where so many columns of each head are read at a time.
    columns = _power(size)
    return min(_power(heads), max(elements // columns, 1)), columns


def _power(size: int) -> int:
    # The next power of two.
    return 1 << max(size - 1, 0).bit_length()


def _programs(rows: int) -> int:
    return max(min(-(-rows // ROWS_OF_A_PROGRAM), PROGRAMS), 1)


def norm(x: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    width = x.shape[1]
    block, warps = _block(width, MOST_COLUMNS)
    _triton().norm[x.shape[0],](
        x, None, None, out, weight, x.stride(0), 0, 0, out.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=warps
    )  # fmt: skip


def norm_of_sum(residual: Tensor, x: Tensor, total: Tensor, out: Tensor, weight: Tensor, eps: float) -> None:
    width = x.shape[1]
    block, warps = _block(width, MOST_COLUMNS)
    _triton().norm[x.shape[0],](
        x, residual, total, out, weight, x.stride(0), residual.stride(0), total.stride(0), out.stride(0), eps,
        WIDTH=width, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def norm_gradient(grad: Tensor, x: Tensor, into: Tensor, weight: Tensor, eps: float, sums: Tensor | None) -> None:
    _norm_gradient(grad, x, into, None, weight, eps, sums)


def norm_gradient_plus(
    grad: Tensor, x: Tensor, into: Tensor, plus: Tensor, weight: Tensor, eps: float, sums: Tensor | None
) -> None:
    _norm_gradient(grad, x, into, plus, weight, eps, sums)


def _norm_gradient(
    grad: Tensor, x: Tensor, into: Tensor, plus: Tensor | None, weight: Tensor, eps: float, sums: Tensor | None
) -> None:
    rows, width = x.shape
    block, warps = _block(width, MOST_COLUMNS)
    programs, partial = rows, None
    if sums is not None:
        programs = _programs(rows)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _triton().norm_gradient[programs,](
        grad, x, into, plus, weight, partial, rows, grad.stride(0), x.stride(0), into.stride(0),
        0 if plus is None else plus.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if partial is not None:
        _sum_partial(partial, sums, None, width)


def _sum_partial(partial: Tensor, first: Tensor | None, second: Tensor | None, first_width: int) -> None:
    programs, width = partial.shape
    _triton().sum_partial[-(-width // 32),](
        partial, first, second, programs, FIRST=first_width, WIDTH=width, ROWS=64, BLOCK=32, num_warps=4
    )


def gate(gates: Tensor, up: Tensor, out: Tensor) -> None:
    rows, width = gates.shape
    block = min(_power(width), 1024)
    _triton().gate[rows, -(-width // block)](
        gates, up, out, gates.stride(0), up.stride(0), out.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )


def gate_gradient(grad: Tensor, gates: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor) -> None:
    _gate_gradient(grad, gates, up, into_gate, into_up, None)


def gate_gradient_and_value(grad: Tensor, gates: Tensor, up: Tensor) -> None:
    _gate_gradient(grad, gates, up, gates, up, grad)


def _gate_gradient(
    grad: Tensor, gates: Tensor, up: Tensor, into_gate: Tensor, into_up: Tensor, into_value: Tensor | None
) -> None:
    rows, width = gates.shape
    block = min(_power(width), 1024)
    _triton().gate_gradient[rows, -(-width // block)](
        grad, gates, up, into_gate, into_up, into_value, grad.stride(0), gates.stride(0), up.stride(0), into_gate.stride(0),
        into_up.stride(0), 0 if into_value is None else into_value.stride(0), WIDTH=width, BLOCK=block, num_warps=4,
    )  # fmt: skip


def has_halves(tensors: Tensors, others: Sequence[Any]) -> bool:
    """Return whether heads [T, heads, D] have two halves that a kernel holds, and rotate as a whole."""
    first = tensors[0]
    if first is None or first.shape[2] % 2 or first.shape[2] > WIDEST_HEAD:
        return False
    return all(tensor is None or tensor.shape[-1] == first.shape[2] for tensor in tensors)


def has_one_norm(tensors: Tensors, others: Sequence[Any]) -> bool:
    weight, key_weight = others[0], others[2] if len(others) > 2 else None
    return has_halves(tensors, others) and key_weight is None and (weight is None or weight.dim() == 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, weight: Tensor | None, eps: float, *unused: Any) -> None:
    rotate_both(x, None, cos, sin, out, None, weight, None, eps)


def rotate_both(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, query_out: Tensor, key_out: Tensor | None,
    query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
) -> None:  # fmt: skip
    rows, heads, size = query.shape
    half = size // 2
    heads_at_once, block = _block_of_heads(heads, half)
    _triton().rotate[rows,](
        query, key, cos, sin, query_out, key_out, query_weight, key_weight, *_heads(query), *_heads(key),
        cos.stride(0), sin.stride(0), *_heads(query_out), *_heads(key_out), eps, HEADS=heads,
        KEY_HEADS=0 if key is None else key.shape[1], HALF=half, BLOCK_HEADS=heads_at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _heads(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else tensor.stride()[:2]  # type: ignore[return-value]


def rotate_back(
    grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, into: Tensor, weight: Tensor | None, eps: float, sums: Tensor | None
) -> None:
    _rotate_back(grad, None, x, None, cos, sin, into, None, None, None, (weight, None), eps, (sums, None))


def rotate_back_both(
    query_grad: Tensor, key_grad: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, value_grad: Tensor | None,
    value: Tensor | None, query_weight: Tensor | None, key_weight: Tensor | None, eps: float, query_sums: Tensor | None,
    key_sums: Tensor | None,
) -> None:  # fmt: skip
    _rotate_back(
        query_grad, key_grad, query, key, cos, sin, query, key, value_grad, value, (query_weight, key_weight), eps,
        (query_sums, key_sums),
    )  # fmt: skip


def _rotate_back(
    query_grad: Tensor, key_grad: Tensor | None, query: Tensor | None, key: Tensor | None, cos: Tensor, sin: Tensor,
    query_into: Tensor, key_into: Tensor | None, value_grad: Tensor | None, value_into: Tensor | None,
    weights: Tensors, eps: float, sums: Tensors,
) -> None:  # fmt: skip
    rows, heads, size = query_grad.shape
    half = size // 2
    heads_at_once, block = _block_of_heads(heads, half)
    programs, partial = rows, None
    if sums[0] is not None or sums[1] is not None:
        programs = _programs(rows)
        partial = torch.empty(programs, 2 * size, dtype=torch.float32, device=cos.device)
    _triton().rotate_back[programs,](
        query_grad, key_grad, query, key, cos, sin, query_into, key_into, value_grad, value_into, *weights, partial, rows,
        *_heads(query_grad), *_heads(key_grad), *_heads(query), *_heads(key), cos.stride(0), sin.stride(0),
        *_heads(query_into), *_heads(key_into), *_heads(value_grad), *_heads(value_into), eps, HEADS=heads,
        KEY_HEADS=0 if key_grad is None else key_grad.shape[1], HALF=half,
        BLOCK_HEADS=heads_at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip
    if partial is not None:
        _sum_partial(partial, sums[0], sums[1], size)


def has_narrow_heads(tensors: Tensors, others: Sequence[Any]) -> bool:
    first = tensors[0]
    return first is not None and first.shape[2] <= WIDEST_HEAD


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, into: Tensor, into_lse: Tensor) -> None:
    rows, heads, size = out.shape
    heads_at_once, block = _block_of_heads(heads, size, 2 * ELEMENTS)
    _triton().merge[rows, -(-heads // heads_at_once)](
        out, lse, other, other_lse, into, into_lse, *_heads(out), *lse.stride(), *_heads(other), *other_lse.stride(),
        *_heads(into), *into_lse.stride(), HEADS=heads, WIDTH=size, BLOCK_HEADS=heads_at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip


def logit_statistics(products: Tensor, targets: Tensor, before: Tensor, known: Tensor, inverse: float) -> None:
    rows, width = products.shape
    _triton().logit_statistics[rows,](
        products, targets, before, known, products.stride(0), targets.stride(0), before.stride(0), known.stride(0), inverse,
        WIDTH=width, BLOCK=min(_power(width), 4096), ENTROPY=known.shape[1] == 4, num_warps=8,
    )  # fmt: skip


def logit_gradient(
    products: Tensor, targets: Tensor, normalizer: Tensor, grad: Tensor, entropy: Tensor | None, grad_entropy: Tensor | None,
    inverse: float,
) -> None:  # fmt: skip
    rows, width = products.shape
    block = min(_power(width), 2048)
    if entropy is None or grad_entropy is None:
        entropy = grad_entropy = None
    _triton().logit_gradient[rows, -(-width // block)](
        products, targets, normalizer, grad, entropy, grad_entropy, products.stride(0), targets.stride(0), *normalizer.stride(),
        grad.stride(0), 0 if entropy is None else entropy.stride(0), 0 if grad_entropy is None else grad_entropy.stride(0),
        inverse, WIDTH=width, PARTS=normalizer.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
