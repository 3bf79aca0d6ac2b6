"""Elementwise statements as one kernel each: compiled if compiling is on, else over tiles of rows.

Uncompiled, each statement of a chain is a kernel launch for each tile, and small models wait for launches. Compiled, the chain is
one or two kernels over all rows. It makes no temporary tensor of the rows' size, so it needs no tiles.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
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

from verl_memopt.memory.formulas import NARROW_TILE_ELEMENTS, TILE_ELEMENTS
from verl_memopt.observe.phase import COMPILE_FIGURES

KEY = "actor_rollout_ref.actor.use_torch_compile"

RECOMPILE_LIMIT = 16
"""Variants of a statement compiled for one width: the strides of its tensors make some. Dynamo's own limit is 8."""

NO_TEMPORARIES: dict[str, Any] = {f"realize_{what}_threshold": 1000 for what in ("reads", "acc_reads", "opcount")}
"""Has inductor compute a value of all rows again for each of its readers. It otherwise keeps one with two readers in memory if
it is computed from more than four reads."""

logger = logging.getLogger(__name__)

WARNING = (
    "%s=true: functions cannot be compiled here (%s). The run goes on uncompiled, and slower. Install a C compiler (gcc) and "
    "Triton, or set %s=false."
)

Recorder: TypeAlias = Callable[[Callable[..., Any], Sequence[Tensor | None], Sequence[Any], Callable[[], Any]], Any]
"""Stands in for a compiled call. Gets the function, its tensors with rows, its other arguments, and a call that runs uncompiled;
returns what the function returns."""

_on = False
_recorder: Recorder | None = None
_modes_of_recorder = 0
_warned = False
_given_up: set[Callable[..., Any]] = set()
_numbers = count()
_counts: Counter[str] = Counter()


def take_compile_counts() -> dict[str, Any]:
    """Return the graphs compiled for functions of the trainer, and their calls that ran uncompiled, since the last call of this.

    None each where this process compiles nothing. The engine's graphs are not among them.
    """
    return {name: _counts.pop(name, 0) if _on else None for name in COMPILE_FIGURES}


@contextmanager
def fused_statements(on: bool) -> Iterator[None]:
    """Set inside the body whether this process compiles elementwise statements. Ask :func:`compiler_works` first."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@contextmanager
def recorded_calls(recorder: Recorder) -> Iterator[None]:
    """Give ``recorder`` each call that would be compiled, also under the dispatch modes that are active now.

    It counts what a GPU would run. Under a further mode, such as selective checkpointing's, nothing is compiled there either.
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
    """Run ``statement(*tensors, *others)`` over all rows of ``tensors``. The statement writes into some of its tensors.

    The tensors have the same number of rows, or are None. The first is a tensor, and its size decides the tiles. Two tensors that
    share memory must be the same rows of the same tensor. The others are the same for every tile. ``narrow``: the statement
    creates nothing in fp32, so its tiles may be larger. ``otherwise`` runs in place of a statement that cannot run over tiles.
    """
    first = tensors[0]
    assert first is not None

    def in_tiles() -> None:
        if otherwise is not None:
            otherwise()
            return
        if first.shape[0] <= _tile_rows(first, narrow):
            statement(*tensors, *others)
            return
        for rows in tiles(first, narrow):
            statement(*(None if tensor is None else tensor[rows] for tensor in tensors), *others)

    if runs_compiled(first):
        run_compiled(statement, _once_each(tensors), others, in_tiles)
    else:
        in_tiles()


def runs_compiled(first: Tensor) -> bool:
    """Return whether :func:`over_rows` compiles statements over the rows of ``first``.

    A statement may then not overwrite a tensor that it also sums over rows: torch 2.11 may run the sum after the write.
    """
    # A tensor of one row would be a variant of its own.
    return _on and first.shape[0] > 1 and not _observed()


def tiles(tensor: Tensor, narrow: bool = False) -> Iterator[slice]:
    """Return slices of a tensor's rows, each small enough for elementwise statements to be fast."""
    size = _tile_rows(tensor, narrow)
    return (slice(start, start + size) for start in range(0, tensor.shape[0], size))


def _tile_rows(tensor: Tensor, narrow: bool) -> int:
    elements = NARROW_TILE_ELEMENTS if narrow else TILE_ELEMENTS
    width = math.prod(tensor.shape[1:])
    return max(elements.get(tensor.device.type, elements["cuda"]) // max(width, 1), 1)


def compiler_works(device: torch.device) -> bool:
    """Return whether functions can be compiled for a device, by compiling one. Warn once a process where they cannot."""
    return _recorder is not None or (not _observed() and _compiles(device))


@cache
def _compiles(device: torch.device) -> bool:
    values = torch.ones(4, 8, device=device)
    try:
        # torch.compile is lazy: a missing compiler shows only when the function runs for the first time.
        torch.compile(_probe, dynamic=True)(values)
    # Errors of a missing compiler, header, package or driver, while compiling or at the first run.
    except (RuntimeError, OSError, ImportError, SubprocessError) as error:
        _warn_once(error)
        return False
    return True


def _probe(values: Tensor) -> Tensor:
    return (values.exp() * 2).sum(-1)


def run_compiled(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any], uncompiled: Callable[[], Any]
) -> Any:
    """Return ``function(*tensors, *others)``, compiled; what ``uncompiled`` returns where the function cannot be compiled."""
    if _recorder is not None:
        return _recorder(function, tensors, others, uncompiled)
    if function not in _given_up:
        before = counters["stats"]["unique_graphs"]
        # Set for this call alone, because the engine compiles functions of its own in this process. They are set one by one:
        # dynamo_config.patch() takes as long as the compiled call.
        limits = dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit
        dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = RECOMPILE_LIMIT, True
        try:
            return compiled_for_width(function, tensors, others)
        # Both are raised before anything ran. Past its limit Dynamo would otherwise run a statement uncompiled over all rows.
        except FailOnRecompileLimitHit:
            logger.warning(
                "%s has more than %d compiled variants. It runs uncompiled from now on.", function.__name__, RECOMPILE_LIMIT
            )
        except TorchDynamoException as error:
            _warn_once(error)
        finally:
            dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = limits
            _counts["compiles"] += counters["stats"]["unique_graphs"] - before
        _given_up.add(function)
    _counts["compile_fallbacks"] += 1
    return uncompiled()


def compiled_for_width(function: Callable[..., Any], tensors: Sequence[Tensor | None], others: Sequence[Any]) -> Any:
    """Call ``function(*tensors, *others)``, compiled for the widths of its tensors and for any number of rows."""
    # Detached, so that neither `requires_grad` nor Parameter or Tensor makes a variant.
    inputs = [one.detach() if isinstance(one, Tensor) else one for one in others]
    widths = tuple(None if one is None else (one.dtype, one.shape[1:]) for one in tensors)
    run = _compiled(function, widths, tuple((one.dtype, one.shape) if isinstance(one, Tensor) else one for one in inputs))
    return run(tensors, inputs)


@cache
def _compiled(function: Callable[..., Any], widths: tuple[Any, ...], others: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function compiled for rows of one width: for rows of any width a kernel is two to three times slower on a GPU.

    Dynamo keeps what it compiled, and which sizes it has seen change, by the place of the code. So each width has its own code,
    which is compiled once, for any number of rows.
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
            for one in tensors:
                if one is not None:
                    # Otherwise Dynamo takes the number of rows of the first call for a constant, and compiles again at the
                    # second.
                    maybe_mark_dynamic(one, 0)
            marked = True
        return compiled(*tensors, *others)

    return run


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(WARNING, KEY, reason, KEY)
        _warned = True


def _observed() -> bool:
    """Return whether a dispatch mode is active, such as the byte tracker. A compiled function would run uncompiled under it."""
    return torch._C._len_torch_dispatch_stack() > (0 if _recorder is None else _modes_of_recorder)


def _once_each(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors with one object for all that share memory; the compiler would copy what may overlap."""
    by_memory: dict[tuple[Any, ...], Tensor] = {}

    def place(one: Tensor) -> tuple[Any, ...]:
        return one.untyped_storage()._cdata, one.storage_offset(), one.dtype, one.shape, one.stride()

    return [None if one is None else by_memory.setdefault(place(one), one.detach()) for one in tensors]


# Weights that lie one behind another, and columns of one product's output.


JOINS = {"cpu": False}
"""Device type -> whether weights that lie one behind another are one product. A CPU gains nothing by its other rounding."""


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return tensors that lie one after another in one storage as one view, longer along ``dim``; None if they do not.

    Rows of weights lie so behind each other (``dim`` 0), and columns of one product's output beside each other (1).
    """
    first, length = tensors[0], 0
    if len(tensors) == 1:
        return first
    # A quantised weight has no memory of its own to join.
    if any(is_traceable_wrapper_subclass(one) for one in tensors):
        return None
    kinds = [(one.dtype, one.stride(), one.untyped_storage()._cdata, *one.shape[:dim], *one.shape[dim + 1 :]) for one in tensors]
    for one, kind in zip(tensors, kinds, strict=True):
        if kind != kinds[0] or one.storage_offset() != first.storage_offset() + length * first.stride(dim):
            return None
        length += one.shape[dim]
    return first.as_strided((*first.shape[:dim], length, *first.shape[dim + 1 :]), first.stride(), first.storage_offset())
