"""Memory over one update: live and reserved bytes as they were, with the phases shaded. Nothing is smoothed or left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.rloo.memory_study.arms import FULL, TRUNCATED
from recipe.rloo.memory_study.findings import counted
from recipe.rloo.memory_study.formula import LADDER
from recipe.rloo.memory_study.records import COMPLETED, SIMULATED_ALLOCATOR, CellResult, UpdateRecord
from verl_memopt.observe.drawing import INK, PALETTE, figure, note, save, style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED, RED, BLUE = "#5b6670", "#b8433d", "#3b6ea5"
K = 4
"""The largest group size at which the published whole-prompt run fits its card."""
PANELS = (
    ((f"token_{FULL}_legacy_coupled", f"string_{FULL}_legacy_coupled"), "Published trainer, whole prompt"),
    ((f"token_{TRUNCATED}_legacy_coupled", f"string_{TRUNCATED}_legacy_coupled"), "Published trainer, prompt cut to 1,024"),
    ((f"token_{FULL}_response_only",), "Whole prompt, logits of the response alone"),
    ((f"token_{FULL}_shared_prompt",), "Whole prompt, this project's default update"),
)
"""Arms of each panel: the second one is drawn over the first."""
PHASE_COLOURS = dict(
    zip(
        ("rollout", "old_log_prob", "reference", "reward", "forward", "backward", "optimizer", "weight_sync"),
        PALETTE,
        strict=False,
    )
)

Point = tuple[float, int, int | None]


def draw_timeline(results: Sequence[CellResult], path: Path) -> Path:
    """Draw the memory of one update of four arms, each at its own scale."""
    drawing = figure(14, 8.4)
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
    first = cells[0]
    lines = [one_update(cell) for cell in cells]
    divisor, unit = unit_of(size for points, _ in lines for _, live, reserved in points for size in (live, reserved))
    record = counted(first)[0]
    style(axes, f"{title}, k = {first.cell.arm.k}", _seconds_of(record), f"{record.measured_by}, {unit}")
    points, phases = lines[0]
    for phase in dict.fromkeys(name for name, _, _ in phases):
        stretches = [(begin, end - begin) for name, begin, end in phases if name == phase]
        colour = PHASE_COLOURS.get(phase, MUTED)
        axes.broken_barh(
            stretches, (0, 1), transform=axes.get_xaxis_transform(), color=colour, alpha=0.16, linewidth=0, label=phase
        )
    xs, live = [x for x, _, _ in points], [size / divisor for _, size, _ in points]
    axes.fill_between(xs, live, step="post", color=INK, alpha=0.12, linewidth=0)
    axes.step(xs, live, where="post", color=INK, linewidth=1.4, label="live tensors")
    if points[0][2] is not None:
        axes.step(xs, [(size or 0) / divisor for _, _, size in points], where="post", color=RED, linewidth=1.4, label="reserved")
    for other, cell in zip(lines[1:], cells[1:], strict=True):
        _over(axes, other[0], xs[-1], divisor, cell.cell.arm.expansion)
    highest = max(max(size, reserved or 0) for _, size, reserved in points) / divisor
    axes.set_ylim(0, highest * 1.12)
    axes.set_xlim(0, xs[-1])
    if "legacy" in first.cell.arm.name:
        _ladder(axes, record, first.cell.arm.micro_batch, divisor, highest)
    axes.legend(
        frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0 if "legacy" not in first.cell.arm.name else 1.1, 1.0)
    )


def _over(axes: Axes, points: Sequence[Point], length: float, divisor: float, expansion: str) -> None:
    """Draw another arm's live bytes over the first arm's, with its time stretched to the same length."""
    stretch = length / (points[-1][0] or 1.0)
    axes.step([x * stretch for x, _, _ in points], [size / divisor for _, size, _ in points], where="post", color=PALETTE[1],
              linewidth=1.2, linestyle=(0, (2, 2)), label=f"live, {expansion}")  # fmt: skip


def _seconds_of(record: UpdateRecord) -> str:
    return "seconds of the simulation" if record.measured_by == SIMULATED_ALLOCATOR else "seconds"


def _ladder(axes: Axes, record: UpdateRecord, rows: int, divisor: float, highest: float) -> None:
    """Mark the published bytes per logit at the right: multiples of B T V."""
    logits = rows * (record.prompt_len + record.response_len) * record.vocab
    for level in LADDER:
        size = level * logits / divisor
        if size <= highest * 1.1:
            axes.axhline(size, color=MUTED, linewidth=0.7, linestyle=":")
            place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{level:g} B/logit", (1.0, size), (3, 0), **place, fontsize=8, color=MUTED)  # fmt: skip


def one_update(result: CellResult) -> tuple[list[Point], list[tuple[str, float, float]]]:
    """Return the points of a run's last update, and its phases as (name, begin, end), in seconds from the update's begin."""
    records = counted(result)
    records = [record for record in records if record.update == records[-1].update]
    points, phases, passed = list[Point](), list[tuple[str, float, float]](), 0.0
    for record in records:
        points += [(passed + seconds, live, reserved) for seconds, live, reserved in timeline_of(record)]
        phases.append((record.phase, passed, passed + record.seconds))
        passed += record.seconds
    return points, phases


def timeline_of(record: UpdateRecord) -> list[Point]:
    """Return a record's timeline, or its enter, peak and exit where it has none."""
    if record.timeline:
        return list(record.timeline)
    levels = (record.allocated_enter, record.allocated_peak, record.allocated_exit)
    return [(record.seconds * share, level, record.reserved_peak) for share, level in zip((0.0, 0.5, 1.0), levels, strict=True)]
