"""Run elementwise statements as one kernel each if compilation is on, and over tiles of rows otherwise.

Uncompiled, each operation of a statement launches one kernel per tile, and small models wait for these launches. A compiled
statement is one or two kernels over all rows. It makes no temporary tensor as large as the rows, so it needs no tiles. On a GPU,
a kernel of :mod:`verl_memopt.memory.kernels` takes the place of the compiled statement where there is one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from subprocess import SubprocessError
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_memopt.memory.kernels import DEVICE_TYPES, KERNELS, KEY
from verl_memopt.observe.phase import COMPILE_FIGURES

TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**23}
NARROW_TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Device type -> elements of a tile of rows. On a CPU a tile fits in the cache of a core; on a GPU it computes for longer than a
kernel launch takes. Narrow tiles are for statements that create no fp32 tensors."""

RECOMPILE_LIMIT = 16
"""Most compiled variants of a statement per width; tensors with other strides need another variant. Dynamo's default limit is
8."""

NO_TEMPORARIES: dict[str, Any] = {f"realize_{what}_threshold": 1000 for what in ("reads", "acc_reads", "opcount")}
"""Inductor options: compute a value again for each operation that reads it. By default inductor would store a value with two
readers in memory, as a tensor of all rows, if computing it takes more than four reads."""

logger = logging.getLogger(__name__)

WARNING = (
    "%s=true: functions cannot be compiled here (%s). The run continues uncompiled, and slower. Install a C compiler (gcc) and "
    "Triton, or set %s=false."
)

FUNCTION_WARNING = (
    "%s=true: %s cannot be compiled (%s), although other functions can. It runs uncompiled from now on, and slower. Set %s=false "
    "to compile nothing."
)

Recorder: TypeAlias = Callable[[Callable[..., Any], Sequence[Tensor | None], Sequence[Any], Callable[[], Any]], Any]
"""Called in place of a compiled function. Its arguments are the function, the tensors with rows, the other arguments, and a call
that runs the function uncompiled. It returns what the function returns."""

_on = False
_recorder: Recorder | None = None
_modes_of_recorder = 0
_warned = False
_given_up: set[Callable[..., Any]] = set()
_numbers = count()
_counts: Counter[str] = Counter()


def take_compile_counts() -> dict[str, Any]:
    """Return (and reset) the number of graphs compiled for the trainer, and of calls that ran uncompiled.

    Both are None in a process that compiles nothing. Graphs that the engine compiles are not counted.
    """
    return {name: _counts.pop(name, 0) if _on else None for name in COMPILE_FIGURES}


@contextmanager
def fused_statements(on: bool) -> Iterator[None]:
    """Switch compilation of elementwise statements on or off inside the body. Call :func:`compiler_works` first."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@contextmanager
def recorded_calls(recorder: Recorder) -> Iterator[None]:
    """Pass ``recorder`` each call that would be compiled, including calls under the dispatch modes that are active now.

    With it a CPU can count what a GPU would run. Calls under a further dispatch mode (such as selective checkpointing) are not
    passed, because a GPU would not compile them either.
    """
    global _recorder, _modes_of_recorder
    before = _recorder, _modes_of_recorder
    _recorder, _modes_of_recorder = recorder, torch._C._len_torch_dispatch_stack()
    try:
        yield
    finally:
        _recorder, _modes_of_recorder = before


def over_rows(
    statement: Callable[..., None],
    tensors: Sequence[Tensor | None],
    *others: Any,
    narrow: bool = False,
    otherwise: Callable[[], None] | None = None,
) -> None:
    """Run ``statement(*tensors, *others)`` over all rows of ``tensors``. The statement writes its results into some of them.

    Args:
        statement: Elementwise over rows.
        tensors: Tensors with the same number of rows, or None. The first must be a tensor; its size determines the tiles. Two
            tensors that share memory must be the same rows of the same tensor.
        others: Further arguments, which are the same for every tile.
        narrow: The statement creates no fp32 tensors, so its tiles may be larger.
        otherwise: Runs uncompiled in place of the statement, if the statement cannot run over tiles.
    """
    first = tensors[0]
    assert first is not None
    if _on and launched(statement, tensors, *others):
        return
    in_tiles = otherwise or partial(_run_in_tiles, statement, tensors, others, narrow)
    if runs_compiled(first):
        run_compiled(statement, _once_each(tensors), others, in_tiles)
    else:
        in_tiles()


def launched(statement: Callable[..., None], tensors: Sequence[Tensor | None], *others: Any) -> bool:
    """Run a statement over all rows by a kernel of our own. Return False if there is none for these arguments; nothing ran then.

    Such a kernel may overwrite a tensor that it also sums over rows, which a compiled statement may not. A sum is added to a
    tensor of fp32, and overwrites a tensor of a shorter dtype.
    """
    first = tensors[0]
    if not _on or first is None or first.device.type not in DEVICE_TYPES or _observed():
        return False
    kernel = KERNELS.get(statement)
    if kernel is None or not kernel.fits(tensors, others):
        return False
    if _recorder is None:
        return kernel.run(tensors, others)
    _recorder(kernel, tensors, others, lambda: _run_in_tiles(statement, tensors, others))
    return True


def _run_in_tiles(
    statement: Callable[..., None], tensors: Sequence[Tensor | None], others: Sequence[Any], narrow: bool = False
) -> None:
    first = tensors[0]
    assert first is not None
    if first.numel() <= _tile_elements(first, narrow):
        statement(*tensors, *others)
        return
    for rows in tiles(first, narrow):
        statement(*(None if tensor is None else tensor[rows] for tensor in tensors), *others)


def runs_compiled(first: Tensor) -> bool:
    # A tensor of one row would need a variant of its own.
    return _on and first.shape[0] > 1 and not _observed()


def tiles(tensor: Tensor, narrow: bool = False) -> Iterator[slice]:
    size = max(_tile_elements(tensor, narrow) // max(math.prod(tensor.shape[1:]), 1), 1)
    return (slice(start, start + size) for start in range(0, tensor.shape[0], size))


def _tile_elements(tensor: Tensor, narrow: bool) -> int:
    elements = NARROW_TILE_ELEMENTS if narrow else TILE_ELEMENTS
    return elements.get(tensor.device.type, elements["cuda"])


def compiler_works(device: torch.device) -> bool:
    """Compile a small function to find out whether functions compile for a device. Warn once per process if they do not."""
    return _recorder is not None or (not _observed() and _compiles(device))


@cache
def _compiles(device: torch.device) -> bool:
    values = torch.ones(4, 8, device=device)
    try:
        # torch.compile is lazy: a missing compiler shows only when the function runs for the first time.
        torch.compile(_probe, dynamic=True)(values)
    # These errors mean that a compiler, header, package or driver is missing.
    except (RuntimeError, OSError, ImportError, SubprocessError) as error:
        _warn_once(error)
        return False
    return True


def _probe(values: Tensor) -> Tensor:
    return (values.exp() * 2).sum(-1)


def run_compiled(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any], uncompiled: Callable[[], Any]
) -> Any:
    if _recorder is not None:
        return _recorder(function, tensors, others, uncompiled)
    if function not in _given_up:
        before = counters["stats"]["unique_graphs"]
        # Changed only during this call, because the engine compiles its own functions in this process. Set directly, because
        # dynamo_config.patch() takes as long as the compiled call.
        limits = dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit
        dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = RECOMPILE_LIMIT, True
        try:
            return compiled_for_width(function, tensors, others)
        # Both errors are raised before anything ran. Without the error, Dynamo beyond its limit would run the statement
        # uncompiled over all rows.
        except FailOnRecompileLimitHit:
            logger.warning(
                "%s has more than %d compiled variants. It runs uncompiled from now on.", function.__name__, RECOMPILE_LIMIT
            )
        except TorchDynamoException as error:
            _warn_of(function, tensors, error)
        finally:
            dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = limits
            _counts["compiles"] += counters["stats"]["unique_graphs"] - before
        _given_up.add(function)
    _counts["compile_fallbacks"] += 1
    return uncompiled()


def compiled_for_width(function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any]) -> Any:
    # Detached, because `requires_grad` and the class (Parameter or Tensor) would each make another variant.
    inputs = [value.detach() if isinstance(value, Tensor) else value for value in others]
    widths = tuple(None if value is None else (value.dtype, value.shape[1:]) for value in tensors)
    run = _compiled(
        function, widths, tuple((value.dtype, value.shape) if isinstance(value, Tensor) else value for value in inputs)
    )
    return run(tensors, inputs)


@cache
def _compiled(function: Callable[..., Any], widths: tuple[Any, ...], others: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function compiled for rows of one width. A kernel for any width would be two to three times slower on a GPU.

    Dynamo keeps its cache, and its record of sizes that vary, per code object. So each width gets its own code object, which is
    compiled once for any number of rows.
    """
    code = function.__code__
    own = code.replace(co_name=f"{code.co_name}_{next(_numbers)}")
    compiled = torch.compile(
        FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__),
        options=NO_TEMPORARIES,
    )
    marked = False

    def run(tensors: Sequence[Tensor | None], others: Sequence[Any]) -> Any:
        nonlocal marked
        if not marked:
            for tensor in tensors:
                if tensor is not None:
                    # Otherwise Dynamo treats the number of rows in the first call as a constant, and compiles again in the second
                    # call.
                    maybe_mark_dynamic(tensor, 0)
            marked = True
        return compiled(*tensors, *others)

    return run


def _warn_of(function: Callable[..., Any], tensors: Sequence[Tensor | None], error: Exception) -> None:
    # If a small function compiles, then no compiler is missing, and the cause is this function. If not, a warning says so.
    if _compiles(next(tensor.device for tensor in tensors if tensor is not None)):
        logger.warning(FUNCTION_WARNING, KEY, function.__name__, _reason(error), KEY)


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        logger.warning(WARNING, KEY, _reason(error), KEY)
        _warned = True


def _reason(error: Exception) -> str:
    # Dynamo's first line may name only the backend. The backend's own error is its cause.
    cause = getattr(error, "inner_exception", error)
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]


def _observed() -> bool:
    # Whether a dispatch mode is active, such as the byte tracker. Under such a mode compiled functions would run uncompiled.
    return torch._C._len_torch_dispatch_stack() > (0 if _recorder is None else _modes_of_recorder)


def _once_each(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    # Use one object for all tensors that share memory: the compiler would copy distinct tensors that may overlap.
    by_memory: dict[tuple[Any, ...], Tensor] = {}

    def place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()

    return [None if tensor is None else by_memory.setdefault(place(tensor), tensor.detach()) for tensor in tensors]


# Join tensors that are neighbours in memory: rows of weights, or columns of the output of one product.


JOINS = {"cpu": False}
"""Device type -> whether neighbouring weights are multiplied in one product; default true. A CPU gains no time by it, and the
results would be rounded differently."""


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """View tensors that are neighbours in one storage as one tensor, longer along ``dim``; None if they are not neighbours.

    ``dim=0`` joins the rows of weights, ``dim=1`` the columns of one product's output.
    """
    first, length = tensors[0], 0
    if len(tensors) == 1:
        return first
    # A quantised weight is a wrapper, without memory that could be joined.
    if any(is_traceable_wrapper_subclass(part) for part in tensors):
        return None
    kinds = [
        (part.dtype, part.stride(), part.untyped_storage()._cdata, *part.shape[:dim], *part.shape[dim + 1 :]) for part in tensors
    ]
    for part, kind in zip(tensors, kinds, strict=True):
        if kind != kinds[0] or part.storage_offset() != first.storage_offset() + length * first.stride(dim):
            return None
        length += part.shape[dim]
    return first.as_strided((*first.shape[:dim], length, *first.shape[dim + 1 :]), first.stride(), first.storage_offset())
