"""The profile of an update as text and as a picture: launches and time of each kernel group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernel_groups import GROUPS, PRODUCTS
from verl_memopt.observe.charts import INK, PALETTE, figure, save, style

TERA = 1e12
NONE = "–"


def render(record: dict[str, Any]) -> str:
    """Gives the record as text: what ran on what, a line per profile, and launches and time per group."""
    done = [found for found in record["profiles"] if "error" not in found]
    failed = [f"{_name(found)}: {found['error']}" for found in record["profiles"] if "error" in found]
    return "\n".join([*_head(record), "", *_lines(record, done), "", *(_groups(done) if done else ()), *failed])


def _head(record: dict[str, Any]) -> list[str]:
    model, work, stated = record["model"], record["work"], record["stated_flops_per_second"]
    peak = "no stated figure is known" if stated is None else f"{stated / TERA:,.1f} TFLOP/s stated"
    return [
        f"One update on {record['device']}, torch {record['torch']}: {model['name']}, {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab_size']:,}, random weights.",
        f"{work['rows']} answers in groups of {work['group']}, {work['prompt']} + {work['response']} tokens.",
        f"Dense {record['dtype']} peak: {peak}, {record['measured_flops_per_second'] / TERA:,.3g} TFLOP/s measured on one "
        "large product.",
        *(["On a CPU operations stand for kernels, and nothing is compiled."] if record["device"] == "CPU" else ()),
    ]


def _lines(record: dict[str, Any], done: Sequence[dict[str, Any]]) -> list[str]:
    heads = (
        "profile", "compile", "seconds", "micro-\nbatches", "launches", "per micro-\nbatch", "per layer", "products\n% of time",
        "idle\n%", "TFLOP/s", "% of\nstated", "% of\nmeasured",
    )  # fmt: skip
    return _table(heads, [_line(record, found) for found in done])


def _line(record: dict[str, Any], found: dict[str, Any]) -> list[str]:
    products = found["groups"].get(PRODUCTS, {"seconds": 0.0})["seconds"] / found["group_seconds"]
    speed = rate(found)
    peaks = record["stated_flops_per_second"], record["measured_flops_per_second"]
    return [
        found["profile"], found["compile"], f"{found['seconds']:.3f}", str(found["micro_batches"]), f"{found['launches']:,}",
        f"{found['launches_per_micro_batch']:,.0f}", f"{found['launches_per_layer']:,.1f}", f"{100 * products:.1f}",
        NONE if found["idle_share"] is None else f"{100 * found['idle_share']:.1f}",
        NONE if speed is None else f"{speed / TERA:,.3g}",
        *(NONE if speed is None or peak is None else f"{100 * speed / peak:.1f}" for peak in peaks),
    ]  # fmt: skip


def rate(found: dict[str, Any]) -> float | None:
    """Gives the FLOP/s of an update: its products and attention over the time it takes without the profiler."""
    return None if found["flops"] is None else found["flops"] / found["seconds"]


def _groups(done: Sequence[dict[str, Any]]) -> list[str]:
    heads = ["group", *(f"{_name(found)}\n{what}" for found in done for what in ("launches", "ms", "%"))]
    lines = []
    for group in GROUPS:
        cells = []
        for found in done:
            share = found["groups"].get(group)
            part = share and 100 * share["seconds"] / found["group_seconds"]
            cells += [NONE] * 3 if share is None else [f"{share['launches']:,}", f"{1e3 * share['seconds']:,.2f}", f"{part:.1f}"]
        if set(cells) != {NONE}:
            lines.append([group, *cells])
    return _table(heads, lines)


def _name(found: dict[str, Any]) -> str:
    return found["profile"] + (" compiled" if found["compile"] == "on" else "")


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Gives lines of text; heads of two lines stand above each other, all but the first column is flush right."""
    above = [head.split("\n")[0] if "\n" in head else "" for head in heads]
    below = [head.split("\n")[-1] for head in heads]
    rows = [above, below, *lines] if any(above) else [below, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(line).rstrip() for line in lines]


def draw(record: dict[str, Any], path: Path) -> Path | None:
    """Writes a picture: time and launches of each group, a bar per profile. None where no profile was measured."""
    done = [found for found in record["profiles"] if "error" not in found]
    if not done:
        return None
    drawing = figure(12, 1.6 + 0.62 * len(done))
    both = drawing.subplots(1, 2, sharey=True)
    for axes, title, unit, value in (
        (both[0], "Time", "ms of the device" if done[0]["busy_seconds"] else "ms of operations themselves", _milliseconds),
        (both[1], "Launches", "kernels and copies" if done[0]["busy_seconds"] else "operations", _launches),
    ):
        style(axes, title, unit, "", grid="x")
        _stacked(axes, done, value)
    both[0].set_yticks(range(len(done)), [_name(found) for found in done])
    both[0].invert_yaxis()
    drawing.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    model, work = record["model"], record["work"]
    drawing.suptitle(
        f"One update on {record['device']}: {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{work['rows']} answers of {work['prompt']} + {work['response']} tokens",
        x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    return save(drawing, path)


def _milliseconds(share: dict[str, Any]) -> float:
    return 1e3 * share["seconds"]


def _launches(share: dict[str, Any]) -> float:
    return share["launches"]


def _stacked(axes: Any, done: Sequence[dict[str, Any]], value: Any) -> None:
    ends = [0.0] * len(done)
    for index, group in enumerate(name for name in GROUPS if any(name in found["groups"] for found in done)):
        sizes = [value(found["groups"][group]) if group in found["groups"] else 0.0 for found in done]
        colour = PALETTE[index % len(PALETTE)]
        axes.barh(range(len(done)), sizes, left=ends, height=0.6, color=colour, label=group)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end in enumerate(ends):
        axes.annotate(
            f"{end:,.0f}", xy=(end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    axes.set_xlim(0, 1.15 * max(ends))
