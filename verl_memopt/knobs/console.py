"""What ``verl-memopt knobs`` prints: a table of all knobs, or one knob in full."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_memopt.knobs.example import MIB, example
from verl_memopt.knobs.knob import PARTS, Knob, in_yaml, knobs, text_of


def print_knobs(console: Console) -> None:
    """Print one line a knob: its name, its first key and default, what it saved in the example and what it costs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("knob", no_wrap=True)
    table.add_column("key (below\nactor_rollout_ref)", overflow="fold")
    table.add_column("default", no_wrap=True)
    table.add_column("saves\nMiB", justify="right", no_wrap=True)
    table.add_column("costs")
    for knob in knobs():
        saved = example().savings.get(knob.name)
        key = knob.first_key
        default = in_yaml(knob.defaults()[key]) if key in knob.defaults() else ""
        amount = "" if saved is None else f"{saved.num_bytes / MIB:,.0f}"
        table.add_row(knob.name, escape(key.removeprefix("actor_rollout_ref.")), escape(default), amount, knob.cost)
    console.print(table, highlight=False)
    console.print(f"Saves: measured on {example().work}.", highlight=False)
    console.print(
        "One knob in full: verl-memopt knobs NAME. On your model: verl-memopt knobs --measure --model FOLDER.", highlight=False
    )


def print_knob(knob: Knob, console: Console) -> None:
    """Print one knob: what it does, its keys with defaults, its text, and what it refuses."""
    text = text_of(knob.name)
    console.print(f"[bold]{knob.name}[/bold]: {escape(_plain(text['']))}", highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for number, key in enumerate(knob.keys):
        default = f" = {in_yaml(knob.defaults()[key])}" if key in knob.defaults() else ""
        table.add_row("" if number else "  keys", escape(key + default))
    for name in knob.besides:
        table.add_row("  or", escape(name))
    for part in PARTS:
        table.add_row(f"  {part.lower()}", escape(_plain(text[part])))
        saved = example().savings.get(knob.name) if part == "Saves" else None
        if saved is not None:
            table.add_row("", f"{saved.num_bytes / MIB:,.0f} MiB of {saved.kind} in {saved.phase} ({example().work})")
    for refusal in knob.refuses:
        table.add_row("  refuses", escape(f"{' with '.join(refusal.keys)}: {refusal.because}"))
    console.print(table, highlight=False)


def _plain(text: str) -> str:
    """Return text without the marks around code."""
    return text.replace("``", "")
