"""The look of every chart: size, colours, units, and the words for the source of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_memopt.observe.files import disk_refusals
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
    "optimizer scratch": "#c5ced6",
    "activations": "#f2a541",
    "logits": "#e4572e",
}
"""Colours of the kinds, in stacking order: the trainer's state, the engine's state, then the tensors of a pass."""

COUNTERS = {"tracker": "live tensor bytes (tracker)", "allocator": "live tensor bytes (allocator)"}


def colours(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return a colour for each name. Known names keep theirs in every chart; others take the palette in order."""
    others = [name for name in dict.fromkeys(names) if name not in known]
    return {**known, **{name: PALETTE[index % len(PALETTE)] for index, name in enumerate(others)}}


def unit_of(sizes: Iterable[float | None]) -> tuple[float, str]:
    """Return the divisor and name of the unit for the largest size: GiB from two GiB on, else MiB."""
    largest = max((size for size in sizes if size is not None), default=0)
    return (GIB, "GiB") if largest >= 2 * GIB else (MIB, "MiB")


def size_text(size: float) -> str:
    """Return a size in its unit with about three digits."""
    return f"{size:,.0f}" if size >= 100 else f"{size:,.1f}" if size >= 1 else f"{size:.2g}"


def counted_by(counter: str | None) -> str:
    """Return the words for the source of a chart's bytes."""
    return COUNTERS.get(counter or "", "live tensor bytes")


def figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no window system."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style(axes: Axes, title: str, x: str, y: str, grid: Literal["both", "x", "y"] = "y") -> None:
    """Apply the project's look to axes, with a title at the left and labels."""
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa4af")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def note(axes: Axes, text: str) -> None:
    """Write a sentence in the middle of axes without data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#5b6670", fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def whole_steps(axes: Axes) -> None:
    """Put the ticks of the x axis on whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def save(drawing: Figure, path: Path) -> Path:
    """Write a PNG, completely or not at all, and return its path.

    Raises:
        UserError: The disk refused.
    """
    aside = path.with_name(f".{path.name}.partial")
    with disk_refusals(path):
        drawing.savefig(aside, format="png", dpi=130)
        aside.replace(path)
    return path
