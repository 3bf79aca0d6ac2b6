"""Memory over one update: live and reserved bytes as they were, with the phases shaded. Nothing is smoothed or left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.rloo.memory_study.arms import FULL, LEGACY, TRUNCATED
from recipe.rloo.memory_study.findings import counted
from recipe.rloo.memory_study.formula import PLATEAUS
from recipe.rloo.memory_study.published import LABELS
from recipe.rloo.memory_study.records import COMPLETED, SIMULATED_ALLOCATOR, CellResult, UpdateRecord
from recipe.rloo.memory_study.timeline import Point
from verl_memopt.observe.charts import INK, PALETTE, figure, note, save, size_text, style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED, RED = "#5b6670", "#b8433d"
EVENTS = "changes of the allocator's memory"
K = 4
"""The largest group size at which the published whole-prompt run fits its card."""
PANELS = (
    ((f"token_{FULL}_legacy_coupled", f"string_{FULL}_legacy_coupled"), "Published trainer, whole prompt"),
    ((f"token_{TRUNCATED}_legacy_coupled", f"string_{TRUNCATED}_legacy_coupled"), "Published trainer, prompt cut to 1,024"),
    ((f"token_{FULL}_response_only",), "Whole prompt, logits of the response alone"),
    ((f"token_{FULL}_shared_prompt_checkpointing",), "Whole prompt, this project's update"),
)
"""Arms of each panel: the second one is drawn over the first."""
PHASE_COLOURS = dict(
    zip(
        ("rollout", "old_log_prob", "reference", "reward", "forward", "backward", "optimizer", "weight_sync"),
        PALETTE,
        strict=False,
    )
)


def draw_timeline(results: Sequence[CellResult], path: Path) -> Path:
    """Draw the memory of one update of four arms, each at its own scale."""
    drawing = figure(15, 8.8)
    for axes, (names, title) in zip(drawing.subplots(2, 2).flat, PANELS, strict=True):
        cells = [cell for name in names if (cell := _cell(results, name)) is not None]
        _panel(axes, cells, title)
    return save(drawing, path)


def _cell(results: Sequence[CellResult], name: str) -> CellResult | None:
    """Return the first completed repeat of an arm at K, or at the nearest smaller group size."""
    fitting = [each for each in results if each.cell.arm.name == name and each.outcome == COMPLETED and each.cell.arm.k <= K]
    return min(fitting, key=lambda each: (-each.cell.arm.k, each.cell.repeat), default=None)


def _panel(axes: Axes, cells: Sequence[CellResult], title: str) -> None:
    if not cells:
        style(axes, title, "", "")
        note(axes, "Not measured, or did not complete.")
        return
    arm, record = cells[0].cell.arm, counted(cells[0])[0]
    points, phases = one_update(cells[0])
    highest = max(max(live, reserved or 0) for _, live, reserved in points)
    divisor, unit = unit_of([highest])
    style(axes, f"{title}, k = {arm.k}", _time_of(record), f"{record.measured_by}, {unit}")
    _shade(axes, phases)
    xs, live = [x for x, _, _ in points], [size / divisor for _, size, _ in points]
    axes.fill_between(xs, live, step="post", color=INK, alpha=0.15, linewidth=0)
    axes.step(xs, live, where="post", color=INK, linewidth=1.6, label="live tensors")
    if points[0][2] is not None:
        reserved = [(size or 0) / divisor for _, _, size in points]
        axes.step(xs, reserved, where="post", color=RED, linewidth=1.6, label="reserved by the allocator")
        _mark_peak(axes, xs, reserved, RED, unit)
    for cell in cells[1:]:
        _over(axes, one_update(cell)[0], xs[-1], divisor, cell.cell.arm.expansion)
    _mark_peak(axes, xs, live, INK, unit)
    axes.set_ylim(0, 1.15 * highest / divisor)
    axes.set_xlim(0, xs[-1])
    published = arm.update == LEGACY
    if published:
        _plateaus(axes, record, arm.micro_batch, points[0][1], divisor)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.12 if published else 1.0, 1.0))


def _shade(axes: Axes, phases: Sequence[tuple[str, float, float]]) -> None:
    """Shade each phase over its time."""
    names = [name for name, _, _ in phases]
    for phase in dict.fromkeys(names):
        # This project's update has one phase for both.
        label = phase if "forward" in names or phase != "backward" else "forward and backward"
        stretches = [(begin, end - begin) for name, begin, end in phases if name == phase]
        colour = PHASE_COLOURS.get(phase, MUTED)
        axes.broken_barh(
            stretches, (0, 1), transform=axes.get_xaxis_transform(), color=colour, alpha=0.16, linewidth=0, label=label
        )


def _over(axes: Axes, points: Sequence[Point], length: float, divisor: float, expansion: str) -> None:
    """Draw another arm's live bytes over the first arm's, with its time stretched to the same length."""
    stretch = length / (points[-1][0] or 1.0)
    axes.step([x * stretch for x, _, _ in points], [size / divisor for _, size, _ in points], where="post", color=PALETTE[1],
              linewidth=1.6, linestyle=(0, (1.5, 2.5)), label=f"live tensors, {LABELS[expansion]}")  # fmt: skip


def _time_of(record: UpdateRecord) -> str:
    return f"{EVENTS}, in order" if record.measured_by == SIMULATED_ALLOCATOR else "seconds"


def _plateaus(axes: Axes, record: UpdateRecord, rows: int, base: float, divisor: float) -> None:
    """Mark the published bytes per logit at the right: multiples of B T V above the level between two updates."""
    logits = rows * (record.prompt_len + record.response_len) * record.vocab
    for level in PLATEAUS:
        size = (base + level * logits) / divisor
        if size <= axes.get_ylim()[1]:
            axes.axhline(size, color=MUTED, linewidth=0.7, linestyle=":")
            side = axes.get_yaxis_transform()
            axes.annotate(f"{level:g} B/logit", (1.0, size), (3, 0), xycoords=side, textcoords="offset points", va="center",
                          fontsize=8, color=MUTED)  # fmt: skip


def _mark_peak(axes: Axes, xs: Sequence[float], levels: Sequence[float], colour: str, unit: str) -> None:
    """Write the highest level of a line above it, on the side of it that has room."""
    place = max(range(len(levels)), key=lambda index: levels[index])
    text, where = f"{size_text(levels[place])} {unit}", (xs[place], levels[place])
    late = xs[place] > xs[0] + 0.75 * (xs[-1] - xs[0])
    axes.annotate(
        text, where, (-2 if late else 2, 4), textcoords="offset points", fontsize=9, color=colour, fontweight="bold",
        ha="right" if late else "left",
    )  # fmt: skip


def one_update(result: CellResult) -> tuple[list[Point], list[tuple[str, float, float]]]:
    """Return the points of a run's last update, and its phases as (name, begin, end), from the update's begin.

    Time is seconds. Where it was simulated it is the number of events: a simulation's seconds are not those of a device.
    """
    records = counted(result)
    points, phases, passed = list[Point](), list[tuple[str, float, float]](), 0.0
    for record in records:
        if record.update == records[-1].update:
            stretch = timeline_of(record)
            length = record.seconds
            if record.measured_by == SIMULATED_ALLOCATOR:
                stretch = [(float(place), live, reserved) for place, (_, live, reserved) in enumerate(stretch)]
                length = float(len(stretch))
            points += [(passed + moment, live, reserved) for moment, live, reserved in stretch]
            phases.append((record.phase, passed, passed + length))
            passed += length
    return points, phases


def timeline_of(record: UpdateRecord) -> list[Point]:
    """Return a record's timeline, or its enter, peak and exit where it has none."""
    if record.timeline:
        return list(record.timeline)
    levels = (record.allocated_enter, record.allocated_peak, record.allocated_exit)
    return [(record.seconds * share, level, record.reserved_peak) for share, level in zip((0.0, 0.5, 1.0), levels, strict=True)]
