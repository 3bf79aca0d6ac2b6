"""What all charts share: size, colours, units, axis labels, and how a chart is saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_memopt.observe.files import disk_refusals, written_aside
from verl_memopt.observe.phase import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22272e"
GRID = "#d9dee4"
PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#7f7f7f", "#2f4b7c",
    "#ff9da6", "#8cd17d",
)  # fmt: skip
KIND_COLOURS = {
    "params": "#3b6ea5",
    "optimizer": "#85b4dd",
    "grads": "#54a24b",
    "rollout weights": "#8e5ea2",
    "kv": "#c9a6d6",
    "inputs": "#b8b0a8",
    "built": "#a9b4bd",
    "gathered parameters": "#2a9d8f",
    "collective buffers": "#8fd3c8",
    "graphs": "#d9a5b3",
    "optimizer scratch": "#c5ced6",
    "activations": "#f2a541",
    "logits": "#e4572e",
}
"""Kind of bytes -> its colour, in stacking order: the trainer's state, the engine's state, then the tensors of a forward or
backward pass."""


def colours(names: Iterable[str], fixed: Mapping[str, str]) -> dict[str, str]:
    """Give each name a colour. A name in ``fixed`` keeps that colour in every chart. The others take ``PALETTE`` in order."""
    others = [name for name in dict.fromkeys(names) if name not in fixed]
    return {**fixed, **{name: PALETTE[index % len(PALETTE)] for index, name in enumerate(others)}}


def unit_of(sizes: Iterable[float | None]) -> tuple[float, str]:
    largest = max((size for size in sizes if size is not None), default=0)
    return (GIB, "GiB") if largest >= 2 * GIB else (MIB, "MiB")


def size_text(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:,.1f}" if size >= 1 else f"{size:.2g}"


def counted_by(counter: str | None) -> str:
    return f"live tensor bytes ({counter})" if counter else "live tensor bytes"


def figure(width: float, height: float) -> Figure:
    # Unlike a figure of pyplot, an object of matplotlib's own class needs no window system.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


def style(axes: Axes, title: str, x: str, y: str, grid: Literal["both", "x", "y"] = "y") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa4af")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def note(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#5b6670", fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.margins(y=0.1)


def legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def stack_kinds(
    axes: Axes, places: Sequence[int], bars: Sequence[Mapping[str, int]], divisor: float, height: float
) -> list[float]:
    """Draw a bar at each place and return where each bar ends. A bar stacks its kinds in the order of ``KIND_COLOURS``."""
    present = {kind for kinds in bars for kind in kinds}
    order = [kind for kind in KIND_COLOURS if kind in present] + sorted(present - set(KIND_COLOURS))
    palette, ends = colours(order, KIND_COLOURS), [0.0] * len(bars)
    for kind in order:
        widths = [kinds.get(kind, 0) / divisor for kinds in bars]
        axes.barh(places, widths, left=ends, height=height, color=palette[kind], label=kind)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends


def save(drawing: Figure, path: Path) -> Path:
    layout = drawing.get_layout_engine()
    if layout is not None:
        # savefig draws a figure that has a layout engine twice. So the layout is made here, and the engine removed.
        layout.execute(drawing)
        drawing.set_layout_engine(None)
    with disk_refusals(path), written_aside(path) as aside:
        drawing.savefig(aside, format="png")
    return path
