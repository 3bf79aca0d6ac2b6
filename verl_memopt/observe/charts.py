"""The charts of one run: reward and validation over steps, and peak memory by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.observe.drawing import (
    KIND_COLOURS,
    PALETTE,
    colours,
    counted_by,
    figure,
    note,
    save,
    size_text,
    style,
    unit_of,
    whole_steps,
)
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.observe.summary import build_summary
from verl_memopt.observe.timeline_chart import draw_timeline
from verl_memopt.observe.validation import LOSS, VAL_LOSS, headline_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH_FROM = 40
"""Steps from which the reward is drawn as a running mean over its raw values."""

Points = tuple[list[float], list[float]]


def draw_charts(folder: RunFolder, out: Path | None = None) -> list[Path]:
    """Draw a run's three charts from its files and return their paths.

    Args:
        folder: The run.
        out: Folder for the charts. None = the run folder.
    """
    target = out or folder.path
    target.mkdir(parents=True, exist_ok=True)
    metrics, timeline = folder.read_metrics(), folder.read_timeline()
    return [
        draw_reward(metrics, target / "reward_and_validation.png"),
        draw_peaks(build_summary(metrics, timeline), target / "peak_memory_by_phase.png"),
        draw_timeline(timeline, target / "memory_timeline.png"),
    ]


def draw_reward(metrics: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw training reward and validation score over steps, or both losses of a supervised run."""
    drawing = figure(8.5, 4.5)
    axes = drawing.add_subplot()
    is_loss = any(LOSS in row or VAL_LOSS in row for row in metrics)
    titles = ("Loss", "nats per response token") if is_loss else ("Reward and validation score", "mean score")
    style(axes, titles[0], "training step", titles[1])
    rewards, validation = reward_points(metrics), validation_points(metrics)
    if rewards[0]:
        plot_reward(axes, rewards, PALETTE[0], "training loss" if is_loss else "training reward")
    if validation[0]:
        axes.plot(*validation, color=PALETTE[1], marker="o", markersize=5, linewidth=1.8, label="validation", zorder=4)
    if rewards[0] or validation[0]:
        whole_steps(axes)
        axes.margins(y=0.1)
        axes.legend(frameon=False, fontsize=9, loc="best")
    else:
        note(axes, "No step has been logged yet.")
    return save(drawing, path)


def reward_points(metrics: Sequence[Mapping[str, Any]]) -> Points:
    """Return steps and mean scores of the training samples, or their losses in a supervised run."""
    points = [(row["step"], row[name]) for row in metrics for name in ("critic/score/mean", LOSS) if name in row]
    return [step for step, _ in points], [value for _, value in points]


def validation_points(metrics: Sequence[Mapping[str, Any]]) -> Points:
    """Return steps and headline scores of the validations."""
    points = [(row["step"], score) for row in metrics if (score := headline_score(row)) is not None]
    return [step for step, _ in points], [score for _, score in points]


def plot_reward(axes: Axes, points: Points, colour: str, label: str) -> None:
    """Plot a reward curve. A long curve is drawn as its running mean, with the raw values faint behind it."""
    steps, values = points
    if len(steps) < SMOOTH_FROM:
        axes.plot(steps, values, color=colour, marker="o", markersize=3.5, linewidth=1.5, label=label)
        return
    window = max(5, len(steps) // 30)
    axes.plot(steps, values, color=colour, alpha=0.35, linewidth=0.9)
    axes.plot(steps, running_mean(values, window), color=colour, linewidth=1.9, label=f"{label} (mean of {window} steps)")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return, for each position, the mean of the last ``window`` values, or of fewer at the beginning."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def draw_peaks(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw the peak of each phase as a bar, stacked by kind where known, with reserved and used memory as ticks."""
    phases = {name: phase for name, phase in summary["phases"].items() if phase["peak_allocated_bytes"] is not None}
    drawing = figure(8.5, 1.6 + 0.42 * max(3, len(phases)))
    axes = drawing.add_subplot()
    divisor, unit = unit_of(phase[key] for phase in phases.values() for key in ("peak_allocated_bytes", "device_used_bytes"))
    style(axes, "Peak memory by phase", f"peak {counted_by(summary['counter'])}, {unit}", "", grid="x")
    if not phases:
        note(axes, "No phase of this run counted its bytes.")
        return save(drawing, path)
    _stack_bars(axes, phases, divisor)
    _mark_limits(axes, list(phases.values()), divisor)
    for place, phase in enumerate(phases.values()):
        end = max(phase["peak_allocated_bytes"], phase["peak_reserved_bytes"] or 0, phase["device_used_bytes"] or 0) / divisor
        axes.annotate(_bar_text(phase, divisor), (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(phases)), list(phases))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * (1.07 if summary["counter"] == "tracker" else 1.2))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(drawing, path)


def _stack_bars(axes: Axes, phases: Mapping[str, Mapping[str, Any]], divisor: float) -> None:
    present = {kind for phase in phases.values() for kind in phase["kinds"]}
    order = [kind for kind in KIND_COLOURS if kind in present] + sorted(present - set(KIND_COLOURS))
    palette = colours(order, KIND_COLOURS)
    left = [0.0] * len(phases)
    for kind in order:
        widths = [phase["kinds"].get(kind, 0) / divisor for phase in phases.values()]
        axes.barh(range(len(phases)), widths, left=left, height=0.62, color=palette[kind], label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    unlabelled = [phase["peak_allocated_bytes"] / divisor - start for phase, start in zip(phases.values(), left, strict=True)]
    if max(unlabelled) > 1e-9:
        axes.barh(range(len(phases)), unlabelled, left=left, height=0.62, color="#4c78a8" if not order else "#b8bec6",
                  label="live tensors" if not order else "kind unknown")  # fmt: skip


def _mark_limits(axes: Axes, phases: Sequence[Mapping[str, Any]], divisor: float) -> None:
    for key, colour, label in (("peak_reserved_bytes", "#e45756", "reserved"), ("device_used_bytes", "#22272e", "device used")):
        known = [(place, phase[key] / divisor) for place, phase in enumerate(phases) if phase[key] is not None]
        if known:
            places, sizes = zip(*known, strict=True)
            low, high = [place - 0.36 for place in places], [place + 0.36 for place in places]
            axes.vlines(sizes, low, high, color=colour, linewidth=2.2, label=label)


def _bar_text(phase: Mapping[str, Any], divisor: float) -> str:
    live, used = phase["peak_allocated_bytes"] / divisor, phase["device_used_bytes"]
    return size_text(live) if used is None else f"{size_text(live)} live, {size_text(used / divisor)} used"
