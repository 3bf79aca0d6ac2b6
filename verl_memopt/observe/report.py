"""The report of one run, built again from its files, and the comparison of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_memopt.observe.charts import draw_charts
from verl_memopt.observe.comparison import comparison_table, draw_comparison, run_names
from verl_memopt.observe.console import print_folder, print_warnings, summary_tables
from verl_memopt.observe.run_folder import RunFolder, open_run_folder
from verl_memopt.observe.summary import build_summary


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
    return _report_one(folders[0], out, shown) if len(folders) == 1 else _report_many(folders, out, shown)


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


def _report_one(folder: RunFolder, out: Path | None, console: Console) -> list[Path]:
    target = RunFolder(out or folder.path)
    charts = draw_charts(folder, target.path)
    summary = folder.read_summary() | _built(folder)
    target.write_summary(summary)
    for table in summary_tables(summary):
        console.print(table)
        console.print()
    print_warnings(console, summary)
    return _listed([*charts, target.summary], console)


def _report_many(folders: Sequence[RunFolder], out: Path | None, console: Console) -> list[Path]:
    named = dict(zip(run_names(folders), folders, strict=True))
    summaries = {name: build_summary(folder.read_metrics(), folder.read_timeline()) for name, folder in named.items()}
    console.print(comparison_table(summaries))
    console.print()
    return _listed(draw_comparison(named, summaries, out or folders[0].path.resolve().parent / "comparison"), console)


def _listed(paths: list[Path], console: Console) -> list[Path]:
    for path in paths:
        print_folder(console, path)
    return paths
