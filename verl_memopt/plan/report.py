"""The output of ``verl-memopt fit``: bytes by phase and kind, the verdict, what would make the run fit, and the largest sizes."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from verl_memopt.config.keys import replaced, shown, value_at
from verl_memopt.config.loader import changed
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.critic_rules import has_critic, own_pools
from verl_memopt.memory.knob import devices_of, num_devices
from verl_memopt.memory.param_offload import ACTOR_KEY
from verl_memopt.memory.profiles import SETTLED
from verl_memopt.observe.log_setup import silent
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.conversations import assumptions
from verl_memopt.plan.levers import BUDGET
from verl_memopt.plan.search import LONGEST, Findings, Step, find_out
from verl_memopt.plan.seconds import Rates
from verl_memopt.plan.until_it_fits import CommandLine
from verl_memopt.plan.verdict import Card, FitVerdict, machines, seconds_with


def whole_command(settings: Settings, found: Findings, line: CommandLine) -> CommandLine:
    """Return the command with the changes. It gives the settings that were judged, whatever its profile makes of the changes."""
    keys: dict[str, Any] = found.keys
    data = {"data.train_files": settings.data.train_files, "data.val_files": settings.data.val_files}
    with silent():
        judged = changed(settings, keys)
        for _ in SETTLED:
            wanted = {key: value_at(judged, key) for key in SETTLED if key not in keys}
            try:
                loaded = line.having({**data, **keys}).settings()
                differing = {key: value for key, value in wanted.items() if value_at(loaded, key) != value}
            except ConfigError:  # weights that the profile offloads do not go together with the changes
                differing = {key: value for key, value in wanted.items() if key == ACTOR_KEY}
            if not differing:
                break
            keys = {**differing, **keys}
    return line.having(keys)


def as_json(settings: Settings, found: Findings, line: CommandLine) -> dict[str, Any]:
    """Return the findings as plain values for JSON. ``line``: the command that gave the settings."""
    last = found.after if found.after is not None and found.after.fits else found.verdict
    return {
        "model": settings.actor_rollout_ref.model.path,
        "fits": found.verdict.fits,
        "verdict": found.verdict.line,
        "card_bytes": found.verdict.card.num_bytes,
        "binding_phase": found.verdict.peaks.binding,
        "phases": {phase: dict(kinds) for phase, kinds in found.verdict.peaks.phases.items()},
        "host_bytes": dict(found.verdict.peaks.host),
        "conversations": assumptions(settings) if settings.actor_rollout_ref.rollout.converses else None,
        "changes": [
            {
                "knob": change.name,
                "keys": dict(change.keys),
                "changes_numbers": change.changes_numbers,
                "saved_bytes": change.saved_bytes,
                "without": change.without,
            }
            for change in found.changes
        ],
        "fits_with_changes": found.fits,
        "command": str(whole_command(settings, found, line)) if found.fits else None,
        "with_changes": None if found.after is None else {"phases": found.after.peaks.totals, "verdict": found.after.line},
        "estimated_seconds": {rates.name: estimated(settings, last, found, rates) for rates in machines(last.card)},
        "longest_response": found.response,
        "largest_micro_batch_tokens": found.budget,
        "sequences_a_step": found.step.sequences,
        "device_bytes_a_sequence": found.step.sequence_bytes,
        "host_bytes_a_sequence": found.step.host_bytes,
        "kv_cache_tokens": last.peaks.kv_tokens,
        "sequences_at_once": _at_once(settings, last),
    }


def _at_once(settings: Settings, verdict: FitVerdict) -> int:
    return min(verdict.peaks.kv_tokens // max(verdict.longest, 1), settings.actor_rollout_ref.rollout.max_num_seqs)


def estimated(settings: Settings, last: FitVerdict, found: Findings, rates: Rates) -> dict[str, float]:
    return seconds_with(replaced(settings, found.keys) if found.fits else settings, last, rates)


def _print_seconds(settings: Settings, found: Findings, last: FitVerdict, console: Console) -> None:
    rates_of_cards = machines(last.card)
    if not rates_of_cards:
        console.print("\nFor estimated seconds per step, first measure this machine: verl-memopt calibrate (30 seconds).")
        return
    console.print("\nEstimated seconds per step, without rewards, checkpoints and communication between cards:")
    for rates in rates_of_cards:
        seconds = estimated(settings, last, found, rates)
        parts = ", ".join(f"{phase} {_short(phase_seconds)}" for phase, phase_seconds in seconds.items())
        source = "measured rates" if rates.is_measured else "datasheet"
        console.print(f"  {rates.name:22} {_short(sum(seconds.values()))} ({parts}; {source})", soft_wrap=True)


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


KIB = 2**10

GROUPS = {
    "weights": ("params", "rollout weights"),
    "gradients": ("grads", "whole gradients"),
    "optimizer": ("optimizer", "optimizer scratch"),
    "activations": ("activations",),
    "logits": ("logits",),
    "KV cache": ("kv",),
    "gathered": ("gathered parameters", "collective buffers", "sync bucket", "graphs"),
    "engine": ("engine",),
    "context": ("context", "allocator", "other"),
}
"""Column of the table -> the kinds of bytes that it sums."""


def print_findings(settings: Settings, found: Findings, line: CommandLine, console: Console) -> None:
    verdict, roles, data = found.verdict, settings.actor_rollout_ref, settings.data
    devices = num_devices(settings)
    of = f"{devices} x " if devices > 1 else ""
    apart = "".join(f"; {role} on {devices_of(settings, role)} other devices" for role in own_pools(settings))
    console.print(f"{roles.model.path}, {settings.algorithm.adv_estimator}, {of}{verdict.card.num_bytes / GIB:.1f} GiB{apart}")
    _print_peaks(verdict, console)
    if roles.rollout.converses:
        console.print(assumptions(settings))
    console.print(f"\nVerdict: {verdict.line}")
    last = verdict
    if not verdict.fits:
        assert found.after is not None
        _print_changes(found, console)
        last = found.after
    if not last.fits:
        if has_critic(settings):
            console.print("PPO also trains a critic. RLOO and GRPO need none: --config-name rloo_trainer.")
        return
    given = {override.lstrip("+").partition("=")[0] for override in line.overrides}
    files = [f"{key}=FILE" for key in ("data.train_files", "data.val_files") if key not in given and line.config_dir is None]
    add = f"; add {' '.join(files)}" if files else ""
    console.print(f"\nThe whole command{add}:\n  {whole_command(settings, found, line)}", soft_wrap=True)
    with_changes = "" if verdict.fits else " (with these settings)"
    console.print(f"\nThe most that fits{with_changes}:")
    reach = f"data.max_response_length, now {data.max_response_length}"
    if found.response >= found.most:
        reach = "the longest that was tried" if found.most == LONGEST else "the model's limit of positions"
    console.print(f"  longest response       {found.response:,} tokens ({reach})")
    if found.budget:
        console.print(f"  largest micro-batch    {found.budget:,} tokens ({BUDGET.removeprefix('actor_rollout_ref.')})")
    if "gen" in last.peaks.phases and roles.rollout.name == "vllm":
        console.print(
            f"  KV cache               {last.peaks.kv_tokens:,} tokens, enough for {_at_once(settings, last):,} sequences at once"
        )
    console.print(f"  sequences per step     {_sequences(found.step, data.train_batch_size * roles.rollout.n)}", soft_wrap=True)
    _print_seconds(settings, found, last, console)


def _sequences(step: Step, now: int) -> str:
    host = f"at least {step.host_bytes / KIB:,.0f} KiB of the driver's host"
    if not step.phase:
        return f"as many as the host can hold (now {now:,}); the longest takes {host}"
    count = f"{step.sequences:,}{' or more' if step.is_all else ''}" if step.sequences else "unknown"
    on_device = f"{step.sequence_bytes / KIB:,.0f} KiB of a device in {step.phase}"
    return f"{count} (now {now:,}); the longest takes {on_device} and {host}"


def _print_peaks(verdict: FitVerdict, console: Console) -> None:
    peaks = verdict.peaks
    used = [name for name, kinds in GROUPS.items() if any(kind in phase for phase in peaks.phases.values() for kind in kinds)]
    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True, pad_edge=False)
    table.add_column("GiB at most", no_wrap=True)
    for name in (*used, "all"):
        table.add_column(name, justify="right")
    for phase, kinds in peaks.phases.items():
        groups = [sum(kinds.get(kind, 0) for kind in GROUPS[name]) for name in used]
        total = sum(kinds.values())
        marked = " *" if phase == peaks.binding else ""
        over = f"[red]{total / GIB:.2f}[/red]" if total > verdict.card.num_bytes else f"{total / GIB:.2f}"
        table.add_row(phase + marked, *(f"{size / GIB:.2f}" if size else "" for size in groups), over)
    console.print(table)
    host = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in peaks.host.items())
    text = f"{peaks.host_bytes / GIB:.1f} GiB per process ({host})" if host else "nothing"
    host_bytes = verdict.card.host_bytes
    limit = "" if host_bytes is None else f", {verdict.processes} x on a host of {host_bytes / GIB:.1f} GiB"
    console.print(f"* the largest phase. Host: {text}{limit}.", soft_wrap=True)


def _print_changes(found: Findings, console: Console) -> None:
    assert found.after is not None
    if not found.after.fits:
        why = found.after.line.removeprefix("does not fit: ")
        console.print(f"It cannot fit: even with all settings that help, {why}.")
        console.print("Use a smaller model, more or larger cards (--gpus, --memory), or shorter lengths.")
        if not found.changes:
            return
    console.print("It fits with:" if found.after.fits else "These settings help, but are not enough:")
    for change in found.changes:
        lossy = "; changes numbers" if change.changes_numbers else ""
        for key, value in change.keys.items():
            console.print(f"  {key}={shown(value)}")
        without = f"without it, missing memory: {change.without}" if change.without else "another change needs it"
        console.print(f"      {change.name}: {without}{lossy}")


def command(settings: Settings, card: Card, line: CommandLine, as_json_text: bool) -> int:
    found = find_out(settings, card)
    if as_json_text:
        sys.stdout.write(json.dumps(as_json(settings, found, line), indent=2) + "\n")
    else:
        print_findings(settings, found, line, Console(highlight=False, width=max(Console().width, 110)))
    # The exit code tells scripts whether the run fits.
    return 0 if found.verdict.fits else 1
