"""What ``verl-memopt knobs`` shows: the index, and a measured ladder as a table and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from verl_memopt.memory.knobs import Entry, in_yaml
from verl_memopt.observe.drawing import KIND_COLOURS, colours, figure, save, style
from verl_memopt.observe.phase import MIB
from verl_memopt.trainer.ladder import Rung
from verl_memopt.trainer.ladder_plan import ALL_OFF

KINDS = ("params", "grads", "optimizer", "activations", "logits")
"""Kinds with a column of their own; the rest is ``other``."""


def print_index(entries: Sequence[Entry], console: Console) -> None:
    """Prints every knob with its keys, defaults, and what it saves, costs, pairs with and refuses."""
    for entry in entries:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        rows = [("  keys", f"{key} = {in_yaml(entry.defaults[key])}") for key in entry.keys]
        rows += [("  besides", name) for name in entry.besides]
        rows = [(head if place == 0 or head != rows[place - 1][0] else "", text) for place, (head, text) in enumerate(rows)]
        rows += [("  saves", entry.saves), ("  costs", entry.costs), ("  pairs with", entry.pairs)]
        rows += [("  refuses", f"{refusal.setting}: {refusal.reason}") for refusal in entry.refuses]
        for head, text in rows:
            table.add_row(head, _escaped(text).replace("``", ""))
        console.print(f"[bold]{entry.name}[/bold]", _escaped(entry.title), highlight=False)
        console.print(table, "", highlight=False)


def ladder_table(rungs: Sequence[Rung], all_off: Rung | None = None) -> Table:
    """Gives the ladder in MiB: each rung's peak, its share of all off, its phases, kinds at the peak, host and seconds.

    all_off: the first rung, where ``rungs`` does not begin with it; no share is given where it was not measured.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("+ knob", no_wrap=True)
    phases = list(rungs[0].phases)
    for head in ("peak\nMiB", "of\nall off", *(f"{name}\nMiB" for name in phases), *KINDS, "other", "host\nMiB", "s"):
        table.add_column(head, justify="right", no_wrap=True)
    first = all_off or (rungs[0] if rungs[0].knob == ALL_OFF else None)
    for rung in rungs:
        kinds = [rung.kinds.get(kind, 0) for kind in KINDS]
        other = sum(rung.kinds.values()) - sum(kinds)
        sizes = [*(rung.phases[name] for name in phases), *kinds, other, rung.host_bytes]
        table.add_row(
            rung.knob,
            _mib(rung.peak_device_bytes),
            f"{rung.peak_device_bytes / first.peak_device_bytes:.2f}" if first else "-",
            *map(_mib, sizes),
            f"{rung.seconds:.1f}",
        )
    return table


def savings_table(rungs: Sequence[Rung]) -> Table:
    """Gives every claim of the ladder: what a knob's formula says it saves on the rung below, and what it did, in MiB."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("+ knob", "on", "phase", "kind"):
        table.add_column(head, no_wrap=True)
    for head in ("formula\nMiB", "measured\nMiB", "of\nformula"):
        table.add_column(head, justify="right", no_wrap=True)
    for rung in rungs:
        for saving in rung.savings:
            share = f"{saving.measured_bytes / saving.formula_bytes:.3f}" if saving.formula_bytes else "-"
            sizes = (_mib(saving.formula_bytes), _mib(saving.measured_bytes))
            table.add_row(rung.knob, rung.base, saving.phase, saving.kind, *sizes, share)
    return table


def draw_ladder(rungs: Sequence[Rung], path: Path, title: str) -> Path:
    """Draws each rung's peak as a bar, stacked by kind, all off on top."""
    drawing = figure(9.0, 1.8 + 0.42 * len(rungs))
    axes = drawing.add_subplot()
    style(axes, title, "peak live tensor bytes of the update, MiB", "", grid="x")
    found = {kind for rung in rungs for kind in rung.kinds}
    order = [kind for kind in KIND_COLOURS if kind in found] + sorted(found - set(KIND_COLOURS))
    palette = colours(order, KIND_COLOURS)
    places = range(len(rungs))
    left = [0.0] * len(rungs)
    for kind in order:
        widths = [rung.kinds.get(kind, 0) / MIB for rung in rungs]
        axes.barh(places, widths, left=left, height=0.7, color=palette[kind], label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, rung in zip(places, rungs, strict=True):
        axes.text(left[place], place, f"  {_mib(rung.peak_device_bytes)}", va="center", fontsize=9)
    axes.set_yticks(list(places), [rung.knob if place == 0 else f"+ {rung.knob}" for place, rung in enumerate(rungs)])
    axes.invert_yaxis()
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    return save(drawing, path)


def _mib(size: float) -> str:
    return f"{size / MIB:,.{0 if size >= 100 * MIB else 1}f}"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
