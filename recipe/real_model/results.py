"""Prints the results of runs of this recipe: the validation score of each, their spread, and answers before and after training.

python -m recipe.real_model.results checkpoints/verl_memopt/real_model_seed*
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from verl_memopt.errors import DataError, UserError
from verl_memopt.observe.charts import build_summary
from verl_memopt.observe.run_folder import RunFolder, open_run_folder


def scores(folders: Sequence[RunFolder]) -> Iterator[str]:
    """Yield a table with one row per run; for several runs also the mean and sample deviation of each column."""
    rows = {}
    for folder in folders:
        summary = build_summary(folder.read_metrics(), folder.read_timeline())
        if None in (row := [summary[key] for key in ("validation_before", "validation_after", "seconds")]):
            raise DataError(f"{folder.path}: it has no validation before and after training. Let it run to its end.")
        rows[folder.path.name] = row
    yield from ("| run | before | after | seconds |", "| --- | ---: | ---: | ---: |")
    yield from (_row(name, ("{:.3f}", "{:.3f}", "{:,.0f}"), row) for name, row in rows.items())
    if len(rows) > 1:
        columns = list(zip(*rows.values(), strict=True))
        yield _row("mean", ("{:.3f}", "{:.3f}", "{:,.0f}"), map(mean, columns))
        yield _row("deviation", ("{:.3f}", "{:.3f}", "{:,.0f}"), map(stdev, columns))


def samples(folder: RunFolder) -> Iterator[str]:
    """Yield a table of validation answers that a run has kept, before the first step and after the last one."""
    rows = [json.loads(line) for line in folder.generations.read_text().splitlines()]
    last = {row["input"]: row for row in rows}  # the last answer to each question
    yield from ("| question | answer | before | after |", "| --- | ---: | --- | --- |")
    for row in (row for row in rows if row["step"] == 0):
        question = row["input"].rpartition("user\n")[2].partition("?")[0]
        yield f"| {_said(question)}? | {row['gts']} | {_said(row['output'])} | {_said(last[row['input']]['output'])} |"


def _row(name: str, forms: Iterable[str], values: Iterable[float]) -> str:
    return f"| {name} | {' | '.join(form.format(value) for form, value in zip(forms, values, strict=True))} |"


def _said(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("*", "\\*").split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; the samples are from the first one")
    arguments = parser.parse_args()
    try:
        folders = [open_run_folder(path) for path in arguments.runs]
        sys.stdout.write("\n".join([*scores(folders), "", *samples(folders[0]), ""]))
    except UserError as problem:
        parser.exit(problem.exit_code, f"{problem}\n")


if __name__ == "__main__":
    main()
