"""Memory over time with the phases shaded. A long run shows its peaks by step, and its last counted steps in full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_memopt.observe.drawing import INK, PALETTE, colours, counted_by, figure, note, save, style, unit_of
from verl_memopt.observe.timeline import TimelineRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOLE_UP_TO = 60
"""Largest number of phases that one panel can show clearly."""
PHASES = (
    "gen", "update_actor", "old_log_prob", "ref", "update_weights", "adv", "reward", "testing", "save_checkpoint", "init",
    "values", "update_critic",
)  # fmt: skip
PHASE_COLOURS = dict(zip(PHASES, PALETTE, strict=True))


def draw_timeline(rows: Sequence[TimelineRow], path: Path) -> Path:
    """Draw live bytes over running time with the phases shaded, and the host's resident memory below."""
    shown = rows if len(rows) <= WHOLE_UP_TO else _last_counted_steps(rows)
    panels = 3 if len(shown) < len(rows) else 2
    drawing = figure(10.5, 3.0 * panels - 0.4)
    grid = drawing.subplots(panels, 1, height_ratios=[1.5] * (panels - 1) + [0.8])
    if panels == 3:
        _draw_overview(grid[0], rows)
    _draw_phases(grid[-2], shown, whole=panels == 2)
    _draw_host(grid[-1], rows)
    return save(drawing, path)


def _last_counted_steps(rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """Return the last one or two steps whose bytes were counted, or the last step if none was."""
    counted = sorted({row.step for row in rows if row.peak_allocated_bytes is not None and row.step > 0}) or [rows[-1].step]
    last = counted[-1]
    first = last - 1 if last - 1 in counted else last
    return [row for row in rows if first <= row.step <= last]


def _draw_overview(axes: Axes, rows: Sequence[TimelineRow]) -> None:
    divisor, unit = unit_of(row.device_used_bytes or row.peak_allocated_bytes for row in rows)
    style(axes, "Highest peak of each step", "", f"{_what(rows)}, {unit}")
    for name, label, colour, line in (
        ("peak_allocated_bytes", "peak live", PALETTE[0], "-"),
        ("peak_reserved_bytes", "peak reserved", PALETTE[4], "--"),
        ("device_used_bytes", "device used", INK, ":"),
    ):
        points = _highest_by_step(rows, name)
        if points:
            times, sizes = zip(*points, strict=True)
            marker = "o" if len(points) <= 40 else ""
            axes.plot(times, [size / divisor for size in sizes], line, color=colour, label=label, marker=marker, markersize=3.5)
    if axes.lines:
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, _end(rows))
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        note(axes, "No phase of this run counted its bytes.")


def _highest_by_step(rows: Sequence[TimelineRow], name: str) -> list[tuple[float, int]]:
    best: dict[int, tuple[float, int]] = {}
    for row in rows:
        size = getattr(row, name)
        if size is not None and size > best.get(row.step, (0.0, -1))[1]:
            best[row.step] = (row.elapsed_seconds, size)
    return list(best.values())


def _draw_phases(axes: Axes, rows: Sequence[TimelineRow], whole: bool) -> None:
    steps = sorted({row.step for row in rows})
    title = "Memory over time" if whole else f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"
    counted = {row.step for row in rows if row.peak_allocated_bytes is not None}
    title += ", phase by phase" + (
        f" (bytes counted in {len(counted)} of {len(steps)} steps)" if len(counted) < len(steps) else ""
    )
    divisor, unit = unit_of(row.device_used_bytes or row.peak_allocated_bytes for row in rows)
    style(axes, title, "" if whole else "seconds of running", f"{_what(rows)}, {unit}")
    if not rows:
        note(axes, "No phase has been recorded yet.")
        return
    palette = colours([row.phase for row in rows], PHASE_COLOURS)
    for phase in dict.fromkeys(row.phase for row in rows):
        stretches = [(row.elapsed_seconds, row.seconds) for row in rows if row.phase == phase]
        axes.broken_barh(stretches, (0, 1), transform=axes.get_xaxis_transform(), color=palette[phase], alpha=0.28,
                         linewidth=0, label=phase)  # fmt: skip
    _plot_figures(axes, rows, divisor)
    axes.set_xlim(rows[0].elapsed_seconds, _end(rows))
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_figures(axes: Axes, rows: Sequence[TimelineRow], divisor: float) -> None:
    counted = [row for row in rows if row.peak_allocated_bytes is not None]
    if not counted:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "bytes were not counted here", transform=axes.transAxes, ha="center", color="#5b6670")
        return
    for name, label, colour, line in (
        ("peak_allocated_bytes", "peak live", INK, "-"),
        ("peak_reserved_bytes", "peak reserved", PALETTE[4], "--"),
        ("device_used_bytes", "device used", "#5b6670", ":"),
    ):
        known = [row for row in counted if getattr(row, name) is not None]
        if known:
            axes.hlines([getattr(row, name) / divisor for row in known], [row.elapsed_seconds for row in known],
                        [row.elapsed_seconds + row.seconds for row in known], color=colour, linestyle=line, linewidth=2.2,
                        label=label)  # fmt: skip
    live = [row for row in counted if row.allocated_bytes is not None]
    axes.plot([row.elapsed_seconds + row.seconds for row in live], [(row.allocated_bytes or 0) / divisor for row in live],
              "o", color=INK, markerfacecolor="white", markersize=4.5, label="live at end", clip_on=False, zorder=4)  # fmt: skip
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)


def _draw_host(axes: Axes, rows: Sequence[TimelineRow]) -> None:
    known = [(row.elapsed_seconds + row.seconds, row.host_rss_bytes) for row in rows if row.host_rss_bytes is not None]
    divisor, unit = unit_of(size for _, size in known)
    style(axes, "Host, all processes", "seconds of running", f"resident memory, {unit}")
    if not known:
        note(axes, "Not recorded.")
        return
    times, sizes = zip(*known, strict=True)
    axes.plot(times, [size / divisor for size in sizes], color=PALETTE[5], linewidth=1.6, marker="o" if len(times) == 1 else "")
    axes.set_ylim(bottom=0, top=1.15 * max(sizes) / divisor)
    axes.set_xlim(0, _end(rows))


def _what(rows: Sequence[TimelineRow]) -> str:
    counter = next((row.counter for row in rows if row.counter), None)
    return "device memory (live: allocator)" if counter == "allocator" else counted_by(counter)


def _end(rows: Sequence[TimelineRow]) -> float:
    return max(row.elapsed_seconds + row.seconds for row in rows) or 1.0
