"""The report of one run, built again from its files, and the comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_memopt.observe.charts import (
    PALETTE,
    build_summary,
    counted_by,
    draw_charts,
    figure,
    name_bars,
    note,
    plot_reward,
    reward_points,
    save,
    size_text,
    style,
    unit_of,
    validation_points,
    whole_steps,
)
from verl_memopt.observe.console import print_folder, print_summary, slim_table
from verl_memopt.observe.phase import MIB
from verl_memopt.observe.run_folder import RunFolder, open_run_folder


def report(run_dirs: Sequence[Path], out: Path | None = None, console: Console | None = None) -> list[Path]:
    """Build the charts and summary of a run again, or compare several runs. Print the tables and return the files written.

    Args:
        run_dirs: One run folder or several.
        out: Folder for the files. None = the run folder, or the folder ``comparison`` beside the first of several runs, which are
            not changed.
        console: Where to print. None = standard output.

    Raises:
        UserError: A folder does not exist or contains no run.
        DataError: A file is damaged.
    """
    shown = console or Console(highlight=False)
    folders = [open_run_folder(Path(path)) for path in run_dirs]
    if len(folders) == 1:
        target = RunFolder(out or folders[0].path)
        paths = [*draw_charts(folders[0], target.path), target.summary]
        summary = folders[0].read_summary() | _built(folders[0])
        target.write_summary(summary)
        if target.path == folders[0].path:
            target.seal([path.name for path in paths])
        print_summary(shown, summary)
    else:
        named = dict(zip(run_names(folders), folders, strict=True))
        summaries = {name: build_summary(folder.read_metrics(), folder.read_timeline()) for name, folder in named.items()}
        shown.print(comparison_table(summaries))
        shown.print()
        paths = draw_comparison(named, summaries, out or folders[0].path.resolve().parent / "comparison")
    for path in paths:
        print_folder(shown, path)
    return paths


def finish_summary(folder: RunFolder, environment: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build the summary of a run from its files, write it and return it.

    Args:
        folder: The run.
        environment: Versions, device and command. None = keep those of an earlier summary.
    """
    summary = folder.read_summary() | (environment or {}) | _built(folder)
    folder.write_summary(summary)
    return summary


def _built(folder: RunFolder) -> dict[str, Any]:
    return build_summary(folder.read_metrics(), folder.read_timeline()) | {"warnings": folder.read_warnings()}


# Several runs side by side: one table, one chart of scores, one of peaks.


Summaries = Mapping[str, Mapping[str, Any]]


def run_names(folders: Sequence[RunFolder]) -> list[str]:
    """Return a short, unique name for each run: its folder, with as many parents as needed."""
    paths = [folder.path.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({place})" for place, path in enumerate(paths, start=1)]


def comparison_table(summaries: Summaries) -> Table:
    """Return one column per run: steps, seconds, scores, and the peak live MiB of each phase.

    Peaks show the change against the first run where both were counted in the same way.
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
        table.add_row(f"{phase}, s", *("-" if each is None else f"{each['seconds']:,.1f}" for each in phases))
    for phase in phases_of(summaries):
        peaks = [peak_of(summary, phase) for summary in summaries.values()]
        if any(peak is not None for peak in peaks):
            comparable = len({summary["counter"] for summary in summaries.values() if summary["counter"]}) == 1
            table.add_row(f"{phase}, peak MiB", *(_peak(peak, peaks[0], place, comparable) for place, peak in enumerate(peaks)))
    return table


def phases_of(summaries: Summaries) -> list[str]:
    """Return the phases of all runs, in the order in which they first appear."""
    return list(dict.fromkeys(phase for summary in summaries.values() for phase in summary["phases"]))


def peak_of(summary: Mapping[str, Any], phase: str) -> int | None:
    """Return a phase's peak live bytes, or None if it was not counted or did not run."""
    return summary["phases"][phase]["peak_allocated_bytes"] if phase in summary["phases"] else None


def draw_comparison(folders: Mapping[str, RunFolder], summaries: Summaries, out: Path) -> list[Path]:
    """Draw the runs' scores and their peaks by phase into ``out`` and return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    return [
        _draw_scores(folders, out / "compare_reward_and_validation.png"),
        _draw_peaks(summaries, out / "compare_peak_memory_by_phase.png"),
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
        known = [(row, size / divisor) for row, phase in enumerate(phases) if (size := peak_of(summary, phase)) is not None]
        offsets = [row - 0.4 + (place + 0.5) * height for row, _ in known]
        bars = axes.barh(offsets, [size for _, size in known], height * 0.9, color=PALETTE[place % len(PALETTE)], label=name)
        axes.bar_label(bars, fmt=size_text, padding=3, fontsize=8.5)
    name_bars(axes, phases, 1.06)
    return save(drawing, path)


def _peak(peak: int | None, first: int | None, place: int, comparable: bool) -> str:
    if peak is None:
        return "-"
    size = f"{peak / MIB:,.1f}"
    return f"{size} ({100 * (peak / first - 1):+.1f} %)" if place and first and comparable else size
