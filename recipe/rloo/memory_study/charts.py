"""The four charts. A run that did not complete has a word instead of a bar. Peaks are never smoothed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.rloo.memory_study.cells import (
    CARD_GIB,
    COMPLETED,
    EXPANSIONS,
    FIXED_ROWS,
    FULL,
    GIB,
    KS,
    LABELS,
    LEGACY,
    MIB,
    OOM,
    PEAKS_GIB,
    PLATEAUS,
    PROMPT,
    RESPONSE,
    SIMULATED_ALLOCATOR,
    TRUNCATED,
    TRUNCATED_TOKENS,
    CellResult,
    Point,
    UpdateRecord,
)
from recipe.rloo.memory_study.results import ID_BYTES, SUMMARY_NAME, Row, card_gib, find, held_bytes, live_mib, read_results
from verl_memopt.observe.chart_style import INK, PALETTE, figure, note, save, size_text, style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED, RED, LIGHT_RED, BLUE, LIGHT_BLUE = "#5b6670", "#b8433d", "#e39a97", "#3b6ea5", "#8fb0d0"
LABEL_GIB = 1.6
"""Height of the label above a bar, in GiB of the y axis."""
COLOURS = dict(zip(EXPANSIONS, (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[1]), strict=True))
Summary = Mapping[str, Any]


def draw_all(out: Path) -> list[Path]:
    summary = json.loads((out / SUMMARY_NAME).read_text(encoding="utf-8"))
    return [
        draw_peaks(summary, out / "peak_memory_comparison.png"),
        draw_timeline(read_results(out), out / "memory_usage_timeline.png"),
        draw_methods(summary, out / "method_performance_summary.png"),
        draw_savings(summary, out / "what_really_saves.png"),
    ]


# Peaks: the published ones, and those of every method with the same whole prompt, the same truncated prompt, and a fixed
# micro-batch.


def draw_peaks(summary: Summary, path: Path) -> Path:
    legacy = [row for row in summary["rows"] if row["update"] == LEGACY]
    coupled, fixed = ([row for row in legacy if row["coupled"] == value] for value in (True, False))
    how = " and ".join(sorted({row["measured_by"] for row in legacy if row.get("measured_by")})) or "not measured"
    drawing = figure(13, 8.6)
    panels = drawing.subplots(2, 2, sharey=True)
    published = {(expansion, k): (peak, "" if peak else OOM) for (expansion, k), peak in PEAKS_GIB.items()}
    _method_bars(panels[0, 0], published)
    title, y = "1. Published: String-level takes far less", "peak of the whole card, GiB"
    style(panels[0, 0], title, "its prompts have 1,024 tokens, those of the others 3,015", y)
    for axes, prompt, title, equal, tokens in (
        (panels[0, 1], FULL, "2. Here, the whole prompt for every method", ": no method saves", PROMPT),
        (panels[1, 0], TRUNCATED, "3. Here, the prompt cut for every method", ": all take as little", TRUNCATED_TOKENS),
    ):
        _method_bars(axes, {(row["expansion"], row["k"]): _bar(row) for row in coupled if row["prompt"] == prompt})
        compared = [row for row in summary["findings"]["expansion"] if row["prompt"] == prompt and row["coupled"]]
        # Peaks within 0.5 % are called equal.
        are_equal = compared and all(row["apart"] < 0.005 and len(row["expansions"]) == len(EXPANSIONS) for row in compared)
        style(axes, title + (equal if are_equal else ""), f"{tokens:,} tokens for all; micro-batch = k; {how}", y)
    token = {(row["prompt"], row["k"]): _bar(row) for row in fixed if row["expansion"] == "token"}
    _bars(panels[1, 1], token, ((FULL, RED, "whole prompt"), (TRUNCATED, LIGHT_RED, "cut prompt")))
    if token:
        panels[1, 1].legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    flat = len({round(size, 1) for (prompt, _), (size, _) in token.items() if prompt == FULL and size}) == 1
    title = f"4. Here, {FIXED_ROWS} rows in a forward at every k" + (": flat in k" if flat else "")
    style(panels[1, 1], title, f"Basic; the other methods: summary.json; {how}", y)
    handles = panels[0, 0].get_legend_handles_labels()
    drawing.legend(*handles, loc="outside upper center", ncols=5, frameon=False, fontsize=10)
    return save(drawing, path)


def _bar(row: Row) -> tuple[float | None, str]:
    """Return the GiB of the card that a completed run took, or the outcome of a run that did not complete."""
    return (card_gib(row), "") if row["outcome"] == COMPLETED else (None, row["outcome"])


def _method_bars(axes: Axes, peaks: Mapping[tuple[str, int], tuple[float | None, str]]) -> None:
    _bars(axes, peaks, [(expansion, COLOURS[expansion], LABELS[expansion]) for expansion in EXPANSIONS])


def _bars(axes: Axes, peaks: Mapping[tuple[str, int], tuple[float | None, str]], series: Sequence[tuple[str, str, str]]) -> None:
    """Draw a group of bars per group size, one bar per series (key, colour, label), and the limit of the published card."""
    ks = sorted({*KS, *(k for _, k in peaks)})
    width = 0.8 / len(series)
    for place, (key, colour, label) in enumerate(series):
        for group, k in enumerate(ks):
            size, outcome = peaks.get((key, k), (None, ""))
            middle = group - 0.4 + (place + 0.5) * width
            axes.bar(middle, size or 0.0, width * 0.9, color=colour, label=None if group else label)
            if size is not None:
                # The label is inside its bar if it would otherwise be on the line of the card's limit.
                is_inside = size <= CARD_GIB < size + LABEL_GIB
                place_of = {"va": "top", "color": "white"} if is_inside else {"va": "bottom", "color": INK}
                axes.text(middle, size, f"{size:.2f}", ha="center", fontsize=7.5, **place_of)
            elif outcome:
                words = {OOM: "out of\nmemory"}.get(outcome, outcome)
                axes.text(middle, 0.6, words, ha="center", va="bottom", fontsize=8.5, color=RED, rotation=90, linespacing=1.0)
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])
    axes.set_xlim(-0.6, len(ks) - 0.4)
    axes.margins(y=0.08)
    axes.axhline(CARD_GIB, color=MUTED, linewidth=1, linestyle="--")
    side, words = axes.get_yaxis_transform(), "the published card: 31.8 GiB"
    axes.text(0.005, CARD_GIB, words, transform=side, fontsize=8, color=MUTED, va="bottom")


# Methods: the tokens that each gave the model, its bytes per token, the ids that it saves, and a table with the controls.

PUBLISHED_TOKENS = dict.fromkeys(EXPANSIONS, PROMPT + RESPONSE) | {"string": TRUNCATED_TOKENS + RESPONSE}
"""Number of tokens per row in the published runs."""
TABLE_COLUMNS = (
    "method", "prompt", "tokens\na row", "dropped\na row", "ids of k = 2, 4, 8", "loss at\nk = 4", "gradient\nnorm",
    "peak GiB\nk = 2", "k = 4", "k = 8",
)  # fmt: skip
TABLE_WIDTHS = (0.13, 0.08, 0.07, 0.07, 0.2, 0.09, 0.09, 0.08, 0.08, 0.08)


def draw_methods(summary: Summary, path: Path) -> Path:
    rows = [row for row in summary["rows"] if row["update"] == LEGACY and row["coupled"]]
    drawing = figure(14, 8.8)
    halves: Any = drawing.subfigures(2, 1, height_ratios=[1, 1])
    fed, cost, ids = halves[0].subplots(1, 3)
    methods = [LABELS[name].replace(" ", "\n") for name in EXPANSIONS]
    style(fed, "What the published runs fed the model", "", "tokens of a row")
    bars = fed.bar(range(len(EXPANSIONS)), list(PUBLISHED_TOKENS.values()), 0.6, color=list(COLOURS.values()))
    fed.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
    fed.set_xticks(range(len(EXPANSIONS)), methods, fontsize=8.5)
    _bytes_per_token(cost, rows, methods)
    style(ids, "All that waiting to expand can save: ids", "(k - 1) x prompt tokens x 8 bytes", "KiB")
    bars = ids.bar(range(len(KS)), [(k - 1) * PROMPT * ID_BYTES / 1024 for k in KS], 0.5, color=COLOURS["lazy"])
    ids.bar_label(bars, fmt="{:.0f} KiB", fontsize=9, padding=2)
    ids.set_xticks(range(len(KS)), [f"k = {k}" for k in KS])
    for axes in (fed, cost, ids):
        axes.margins(y=0.12)
    _table(halves[1].subplots(), rows)
    return save(drawing, path)


def _bytes_per_token(axes: Axes, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Draw the peak of a forward divided by its tokens. Equal heights mean that only the length of rows matters."""
    k = max((row["k"] for row in rows if row["outcome"] == COMPLETED and row["prompt"] == FULL), default=None)
    below = "" if k is None else f"k = {k}; dark: whole prompt, light: cut prompt"
    style(axes, "Here: the peak divided by the tokens of a forward", below, "MiB per token")
    if k is None:
        note(axes, "Not measured.")
        return
    for shift, prompt, alpha in ((-0.2, FULL, 1.0), (0.2, TRUNCATED, 0.45)):
        for place, expansion in enumerate(EXPANSIONS):
            row = find(rows, expansion=expansion, prompt=prompt, k=k, outcome=COMPLETED)
            if row is not None and (held := held_bytes(row)) is not None:
                size = held / MIB / (row["micro_batch"] * row["tokens_per_row"])
                bar = axes.bar(place + shift, size, 0.37, color=COLOURS[expansion], alpha=alpha)
                axes.bar_label(bar, fmt="{:.2f}", fontsize=8, padding=2)
    axes.set_xticks(range(len(EXPANSIONS)), methods, fontsize=8.5)
    axes.set_xlim(-0.6, len(EXPANSIONS) - 0.4)


def _table(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw one table row per method and prompt. Values that must be equal are in one column."""
    axes.axis("off")
    title = "The control: equal ids, equal loss, equal memory (allocator's peak)"
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    pairs = [(expansion, prompt) for prompt in (FULL, TRUNCATED) for expansion in EXPANSIONS]
    lines = [_line(rows, *pair) for pair in pairs if find(rows, expansion=pair[0], prompt=pair[1]) is not None]
    if not lines:
        return
    table = axes.table(lines, colLabels=TABLE_COLUMNS, colWidths=TABLE_WIDTHS, cellLoc="right", loc="upper left",
                       edges="horizontal")  # fmt: skip
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.55)
    for (line, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d9dee4")
        if line == 0:
            cell.set_height(cell.get_height() * 1.35)
            cell.set_text_props(color=MUTED)
        if column in (0, 1):
            cell.set_text_props(ha="left")
        if line and lines[line - 1][column].startswith(("out of", "diverged", "failed", "timeout")):
            cell.set_text_props(color=RED)


def _line(rows: Sequence[Row], expansion: str, prompt: str) -> list[str]:
    of_k = {k: find(rows, expansion=expansion, prompt=prompt, k=k) for k in KS}
    ran = {k: row for k, row in of_k.items() if row is not None and "ids_sha256" in row}
    middle: Row = ran.get(4) or next(iter(ran.values()), {})
    counts = [f"{middle[name]:,}" if middle else "-" for name in ("tokens_per_row", "dropped_tokens_per_row")]
    ids = "  ".join(ran[k]["ids_sha256"][:6] if k in ran else "-" for k in KS)
    values = ["-" if (value := middle.get(name)) is None else f"{value:.6g}" for name in ("loss", "grad_norm")]
    return [LABELS[expansion], "whole" if prompt == FULL else "cut", *counts, ids, *values, *(_peak(of_k[k]) for k in KS)]


def _peak(row: Row | None) -> str:
    held = held_bytes(row)
    if row is None or (row["outcome"] == COMPLETED and held is not None):
        return "-" if held is None else f"{held / GIB:.2f}"
    needs = "" if held is None else f"\n(needs {held / GIB:.1f})"
    return ("out of memory" if row["outcome"] == OOM else row["outcome"]) + needs


# Savings: the live peak of each update, at the largest published group size and as a curve over the group size.

STEPS = (
    (f"token_{FULL}_{LEGACY}_coupled", "published trainer", RED),
    (f"token_{TRUNCATED}_{LEGACY}_coupled", "the same, prompt cut to 1,024\n(another task: text is lost)", LIGHT_RED),
    (f"token_{FULL}_no_retention", "nothing kept that nobody reads", LIGHT_BLUE),
    (f"token_{FULL}_response_only", "logits of the response alone", LIGHT_BLUE),
    (f"token_{FULL}_chunked", "no logits: log-prob in chunks", LIGHT_BLUE),
    (f"token_{FULL}_chunked_one_row", "... and one row a forward", LIGHT_BLUE),
    (f"token_{FULL}_shared_prompt", "prompt computed once,\nrows packed together", BLUE),
    (f"token_{FULL}_shared_prompt_checkpointing", "... and checkpointing:\nthis project's update", BLUE),
)
"""Arms from the most memory to the least, with labels and colours."""
LIVE = "live tensors at the peak, MiB (logarithmic)"


def draw_savings(summary: Summary, path: Path) -> Path:
    rows, controls = summary["rows"], summary["controls"]
    drawing = figure(14, 6.2)
    bars, growth = drawing.subplots(1, 2, width_ratios=[1.35, 1])
    ks = [row["k"] for row in rows if row["update"] != LEGACY and row["outcome"] == COMPLETED]
    if not ks:
        for axes in (bars, growth):
            note(axes, "No update that saves was measured.")
        return save(drawing, path)
    _steps(bars, rows, max((size for size in ks if size <= KS[-1]), default=max(ks)))
    _growth(growth, rows)
    loss, norm = (f"{controls[name]:.0e}" if controls[name] else "none" for name in ("loss_error", "grad_norm_error"))
    drawing.supxlabel(
        f"Whole prompt of 3,015 tokens and equal ids, except for the cut one. Largest difference between arms with equal ids: "
        f"loss {loss}, gradient norm {norm} (relative).",
        x=0.01, ha="left", fontsize=9, color=MUTED,
    )  # fmt: skip
    return save(drawing, path)


def _steps(axes: Axes, rows: Sequence[Row], k: int) -> None:
    style(axes, f"One update at k = {k}: peak of live tensors", LIVE, "", grid="x")
    measured = [(words, colour, row, live_mib(row)) for name, words, colour in STEPS if (row := find(rows, name=name, k=k))]
    base = measured[0][3] if measured and measured[0][2]["update"] == LEGACY else None
    sizes = [size for *_, size in measured if size is not None] or [1.0]
    for place, (_, colour, row, size) in enumerate(measured):
        if row["outcome"] == COMPLETED and size is not None:
            axes.barh(place, size, color=colour, height=0.66)
            text = f"{size_text(size)} MiB" + (f", {base / size:,.1f} times less" if base and size < base else "")
            where, colour = size, INK
        else:
            needs = "" if size is None else f" (would need {size_text(size)} MiB)"
            text = ("out of memory" if row["outcome"] == OOM else row["outcome"]) + needs
            where, colour = min(sizes) / 3, RED
        axes.annotate(text, (where, place), (5, 0), textcoords="offset points", va="center", fontsize=9, color=colour)
    axes.set_xscale("log")
    axes.set_xlim(min(sizes) / 3, max(sizes) * 14)
    axes.set_yticks(range(len(measured)), [words for words, *_ in measured])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(measured) - 0.4, -0.6)


def _growth(axes: Axes, rows: Sequence[Row]) -> None:
    below = "k, answers to a prompt; x: simulated, has no room below the limit"
    style(axes, "How the peak grows with the group", below, LIVE, grid="both")
    ks, ends = set[int](), list[tuple[float, int, str, str]]()
    for name, words, colour in STEPS:
        found = sorted((row["k"], size, row["outcome"]) for row in rows if row["name"] == name and (size := live_mib(row)))
        if not found:
            continue
        ks |= {k for k, *_ in found}
        axes.plot([k for k, *_ in found], [size for _, size, _ in found], "-", color=colour, linewidth=1.6)
        for k, size, outcome in found:
            mark, width = ("o", 5) if outcome == COMPLETED else ("x", 7)
            axes.plot([k], [size], mark, color=colour, markersize=width)
        ends.append((found[-1][1], found[-1][0], words.split("\n")[0].removeprefix("... ").rstrip(":,"), colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(ks), [str(k) for k in sorted(ks)])
    axes.set_xlim(right=max(ks) * 7)
    lowest = 0.0
    for size, k, words, colour in sorted(ends, key=lambda end: end[0]):
        height = max(size, lowest)  # keeps a distance from the label below
        axes.text(k * 1.12, height, words, va="center", fontsize=8, color=colour)
        lowest = height * 1.22
    axes.axhline(32 * 1024, color=MUTED, linewidth=1, linestyle="--")
    axes.text(max(ks) * 6.8, 32 * 1024 * 0.95, "a card of 32 GiB", fontsize=8, color=MUTED, ha="right", va="top")


# Timeline: live and reserved bytes during one update, with the phases shaded.

TIMELINE_K = 4
"""The largest group size at which the published whole-prompt run fits its card."""
PANELS = (
    ((f"token_{FULL}_legacy_coupled", f"string_{FULL}_legacy_coupled"), "Published trainer, whole prompt"),
    ((f"token_{TRUNCATED}_legacy_coupled", f"string_{TRUNCATED}_legacy_coupled"), "Published trainer, prompt cut to 1,024"),
    ((f"token_{FULL}_response_only",), "Whole prompt, logits of the response alone"),
    ((f"token_{FULL}_shared_prompt_checkpointing",), "Whole prompt, this project's update"),
)
"""Arms of each panel: the second one is drawn over the first."""
PHASES = ("rollout", "old_log_prob", "reference", "reward", "forward", "backward", "optimizer")
PHASE_COLOURS = dict(zip(PHASES, PALETTE, strict=False))


def draw_timeline(results: Sequence[CellResult], path: Path) -> Path:
    drawing = figure(15, 8.8)
    completed = [result for result in results if result.outcome == COMPLETED and result.cell.arm.k <= TIMELINE_K]
    for axes, (names, title) in zip(drawing.subplots(2, 2).flat, PANELS, strict=True):
        found = [[result for result in completed if result.cell.arm.name == name] for name in names]
        nearest = [min(cells, key=lambda each: (-each.cell.arm.k, each.cell.repeat)) for cells in found if cells]
        _panel(axes, nearest, title)
    return save(drawing, path)


def _panel(axes: Axes, results: Sequence[CellResult], title: str) -> None:
    if not results:
        style(axes, title, "", "")
        note(axes, "Not measured, or did not complete.")
        return
    arm, record = results[0].cell.arm, results[0].records[0]
    points, phases = one_update(results[0])
    highest = max(max(live, reserved or 0) for _, live, reserved in points)
    divisor, unit = unit_of([highest])
    simulated = record.measured_by == SIMULATED_ALLOCATOR
    x = "changes of the allocator's memory, in order" if simulated else "seconds"
    style(axes, f"{title}, k = {arm.k}", x, f"{record.measured_by}, {unit}")
    _shade(axes, phases)
    xs, live = [x for x, _, _ in points], [size / divisor for _, size, _ in points]
    axes.fill_between(xs, live, step="post", color=INK, alpha=0.15, linewidth=0)
    axes.step(xs, live, where="post", color=INK, linewidth=1.6, label="live tensors")
    if points[0][2] is not None:
        reserved = [(size or 0) / divisor for _, _, size in points]
        axes.step(xs, reserved, where="post", color=RED, linewidth=1.6, label="reserved by the allocator")
        _mark_peak(axes, xs, reserved, RED, unit)
    for other in results[1:]:
        over = one_update(other)[0]
        stretch, label = xs[-1] / (over[-1][0] or 1.0), f"live tensors, {LABELS[other.cell.arm.expansion]}"
        axes.step([x * stretch for x, _, _ in over], [size / divisor for _, size, _ in over], where="post", color=PALETTE[1],
                  linewidth=1.6, linestyle=(0, (1.5, 2.5)), label=label)  # fmt: skip
    _mark_peak(axes, xs, live, INK, unit)
    axes.set_ylim(0, 1.15 * highest / divisor)
    axes.set_xlim(0, xs[-1])
    if arm.update == LEGACY:
        _plateaus(axes, record, arm.micro_batch, points[0][1], divisor)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.12 if arm.update == LEGACY else 1.0, 1.0))


def _shade(axes: Axes, phases: Sequence[tuple[str, float, float]]) -> None:
    names = [name for name, _, _ in phases]
    for phase in dict.fromkeys(names):
        # This project's update has one phase for forward and backward.
        label = phase if "forward" in names or phase != "backward" else "forward and backward"
        stretches = [(begin, end - begin) for name, begin, end in phases if name == phase]
        look: dict[str, Any] = {"color": PHASE_COLOURS.get(phase, MUTED), "alpha": 0.16, "linewidth": 0, "label": label}
        axes.broken_barh(stretches, (0, 1), transform=axes.get_xaxis_transform(), **look)


def _plateaus(axes: Axes, record: UpdateRecord, rows: int, base: float, divisor: float) -> None:
    """Mark the published bytes per logit at the right edge: multiples of B T V above the level between two updates."""
    logits = rows * (record.prompt_len + record.response_len) * record.vocab
    for level in PLATEAUS:
        size = (base + level * logits) / divisor
        if size <= axes.get_ylim()[1]:
            axes.axhline(size, color=MUTED, linewidth=0.7, linestyle=":")
            axes.annotate(f"{level:g} B/logit", (1.0, size), (3, 0), xycoords=axes.get_yaxis_transform(),
                          textcoords="offset points", va="center", fontsize=8, color=MUTED)  # fmt: skip


def _mark_peak(axes: Axes, xs: Sequence[float], levels: Sequence[float], colour: str, unit: str) -> None:
    """Write the highest level of a line above its peak, on the side that has room."""
    place = max(range(len(levels)), key=lambda index: levels[index])
    late = xs[place] > xs[0] + 0.75 * (xs[-1] - xs[0])
    axes.annotate(
        f"{size_text(levels[place])} {unit}", (xs[place], levels[place]), (-2 if late else 2, 4), textcoords="offset points",
        fontsize=9, color=colour, fontweight="bold", ha="right" if late else "left",
    )  # fmt: skip


def one_update(result: CellResult) -> tuple[list[Point], list[tuple[str, float, float]]]:
    """Return the points of a run's last update, and its phases as (name, begin, end), from the update's begin.

    Time is seconds. Where it was simulated it is the number of events: a simulation's seconds are not those of a device.
    """
    points, phases, passed = list[Point](), list[tuple[str, float, float]](), 0.0
    for record in result.records:
        if record.update != result.records[-1].update:
            continue
        middle, levels = record.seconds / 2, (record.allocated_enter, record.allocated_peak, record.allocated_exit)
        without = [(middle * place, level, record.reserved_peak) for place, level in enumerate(levels)]
        stretch, length = list(record.timeline) or without, record.seconds
        if record.measured_by == SIMULATED_ALLOCATOR:
            stretch = [(float(place), live, reserved) for place, (_, live, reserved) in enumerate(stretch)]
            length = float(len(stretch))
        points += [(passed + moment, live, reserved) for moment, live, reserved in stretch]
        phases.append((record.phase, passed, passed + length))
        passed += length
    return points, phases
