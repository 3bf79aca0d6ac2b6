"""What ``verl-memopt knobs`` shows: the index, and a measured ladder as a table and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table

from verl_memopt.ladder.plan import ALL_OFF
from verl_memopt.ladder.row import OUT_OF_MEMORY, OutOfMemory, Rung, Saving, split
from verl_memopt.observe.drawing import KIND_COLOURS, colours, figure, save, style
from verl_memopt.observe.phase import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("params", "grads", "optimizer", "activations", "logits")
"""Kinds with a column of their own; the rest is ``other``."""

FAILED = "#b02a30"
"""Colour of the words in the place of a bar."""


def ladder_tables(rungs: Sequence[Rung]) -> list[RenderableType]:
    """Return the whole report of a ladder: climb, branches, what did not fit, and what each knob saves."""
    climbed, branches = split(rungs)
    all_off = climbed[0] if climbed and climbed[0].knob == ALL_OFF else None
    parts: list[RenderableType] = [ladder_table(climbed, all_off)] if climbed else []
    if branches:
        parts += ["\nInstead of what follows a rung:", ladder_table(branches, all_off)]
    if any(rung.out_of_memory for rung in rungs):
        parts += ["\nWhere a rung ran out of memory:", failures_table(rungs)]
    if any(rung.savings for rung in rungs):
        parts += ["\nWhat each saves on the rung below:", savings_table(rungs)]
    return parts


def ladder_table(rungs: Sequence[Rung], all_off: Rung | None = None) -> Table:
    """Return the ladder in MiB: each rung's peak, its share of all off, its phases, kinds at the peak, host and seconds.

    A rung that ran out of memory has no peak. The phases that ended before have theirs.

    all_off: the first rung, where it was measured; without its peak no share is given.
    """
    table = _table("+ knob")
    phases = list(dict.fromkeys(name for rung in rungs for name in rung.phases))
    for head in ("peak\nMiB", "of\nall off", *(f"{name}\nMiB" for name in phases), *KINDS, "other", "host\nMiB", "s"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    whole = None if all_off is None else all_off.peak_device_bytes
    for rung in rungs:
        table.add_row(
            rung.knob,
            _mib(rung.peak_device_bytes),
            "-" if whole is None or rung.peak_device_bytes is None else f"{rung.peak_device_bytes / whole:.2f}",
            *(_mib(rung.phases.get(name)) for name in phases),
            *map(_mib, _kind_sizes(rung)),
            _mib(rung.host_bytes),
            "-" if rung.seconds is None else f"{rung.seconds:.1f}",
            rung.status,
        )
    return table


def _kind_sizes(rung: Rung) -> list[int | None]:
    """Return the bytes of each of ``KINDS`` at the peak, then of all others together."""
    if rung.out_of_memory:
        return [None] * (len(KINDS) + 1)
    sizes = [rung.kinds.get(kind, 0) for kind in KINDS]
    return [*sizes, sum(rung.kinds.values()) - sum(sizes)]


def failures_table(rungs: Sequence[Rung]) -> Table:
    """Return where each rung ran out of memory, in MiB: what it held then, what it asked for, and the limit."""
    table = _table("+ knob", "phase")
    for head in ("held\nMiB", "asked for\nMiB", "limit\nMiB"):
        table.add_column(head, justify="right", no_wrap=True)
    for rung in rungs:
        if rung.out_of_memory:
            ran_out = rung.out_of_memory
            sizes = (ran_out.held_bytes, ran_out.asked_bytes, ran_out.limit_bytes)
            table.add_row(rung.knob, ran_out.phase, *map(_mib, sizes))
    return table


def ran_out_words(ran_out: OutOfMemory) -> str:
    """Return where a rung ran out of memory, what it held, what it asked for, and the limit."""
    figures = (("held", ran_out.held_bytes), ("asked for", ran_out.asked_bytes), ("limit", ran_out.limit_bytes))
    known = ", ".join(f"{word} {_mib(size)}" for word, size in figures if size is not None)
    return f"{OUT_OF_MEMORY} in {ran_out.phase}" + (f": {known} MiB" if known else "")


def outcome(rung: Rung) -> str:
    """Return a rung's result in a few words: its peak and seconds, or where it ran out of memory."""
    if rung.out_of_memory:
        return ran_out_words(rung.out_of_memory)
    return f"peak {_mib(rung.peak_device_bytes)} MiB, {rung.seconds:.1f} s"


def savings_table(rungs: Sequence[Rung]) -> Table:
    """Return every claim of the ladder: what a knob's formula says it saves on the rung below, and what it did, in MiB.

    A saving cannot be measured where the rung or the one below it ran out of memory; the last column says which.
    """
    table = _table("+ knob", "on", "phase", "kind")
    for head in ("formula\nMiB", "measured\nMiB", "of\nformula"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    failed = {rung.knob for rung in rungs if rung.out_of_memory}
    for rung in rungs:
        which = " and ".join(knob for knob in (rung.base, rung.knob) if knob in failed)
        why = f"not measurable: {which} ran out of memory" if which else ""
        for saving in rung.savings:
            sizes = (_mib(saving.formula_bytes), _mib(saving.measured_bytes))
            table.add_row(rung.knob, rung.base, saving.phase, saving.kind, *sizes, _share(saving), why)
    return table


def _share(saving: Saving) -> str:
    if saving.measured_bytes is None or not saving.formula_bytes:
        return "-"
    return f"{saving.measured_bytes / saving.formula_bytes:.3f}"


def draw_ladder(rungs: Sequence[Rung], path: Path, title: str) -> Path:
    """Draw each rung's peak as a bar, stacked by kind, all off on top; a rung that ran out of memory has words and no bar."""
    drawing = figure(9.0, 1.8 + 0.42 * len(rungs))
    axes = drawing.add_subplot()
    style(axes, title, "peak live tensor bytes of the update, MiB", "", grid="x")
    measured = [(place, rung) for place, rung in enumerate(rungs) if not rung.out_of_memory]
    _draw_bars(axes, measured)
    _draw_failures(axes, rungs)
    axes.set_yticks(range(len(rungs)), [rung.knob if place == 0 else f"+ {rung.knob}" for place, rung in enumerate(rungs)])
    axes.set_ylim(len(rungs) - 0.5, -0.5)
    if measured:
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    return save(drawing, path)


def _draw_bars(axes: Axes, measured: Sequence[tuple[int, Rung]]) -> None:
    found = {kind for _, rung in measured for kind in rung.kinds}
    order = [kind for kind in KIND_COLOURS if kind in found] + sorted(found - set(KIND_COLOURS))
    palette = colours(order, KIND_COLOURS)
    places = [place for place, _ in measured]
    left = [0.0] * len(measured)
    for kind in order:
        widths = [rung.kinds.get(kind, 0) / MIB for _, rung in measured]
        axes.barh(places, widths, left=left, height=0.7, color=palette[kind], label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for end, (place, rung) in zip(left, measured, strict=True):
        axes.text(end, place, f"  {_mib(rung.peak_device_bytes)}", va="center", fontsize=9)


def _draw_failures(axes: Axes, rungs: Sequence[Rung]) -> None:
    """Write where a rung ran out of memory in the place of its bar."""
    for place, rung in enumerate(rungs):
        if rung.out_of_memory:
            words = f"  {ran_out_words(rung.out_of_memory)}"
            axes.text(0, place, words, va="center", fontsize=9, color=FAILED, fontstyle="italic")


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / MIB:,.{0 if size >= 100 * MIB else 1}f}"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
