"""How often the advice of an out-of-memory error ends in a run when it is followed as printed, in this tree or an older one.

``python -m benchmarks.advice_rate scenarios FOLDER`` writes the scenarios of ``tests/trainer/test_until_it_fits.py`` to a folder:
the keys of each run, and the size of its device. ``python FILE follow FOLDER OUT`` follows the advice of the tree in which it is
started. That may be an older one: it takes nothing from the package but settings, errors and the trainer of its tests.

Mechanically means: all that the message says makes room together, if it says so, else its first advice. ``set KEY=VALUE`` sets
it. ``lower KEY to N`` takes N. ``lower KEY`` without a number halves the present value, or with ``--lower least`` takes the least
value that the settings accept; a budget that is not set has the value that it inherits. If the settings refuse it, or nothing
would change, the next advice counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_CHANGES = 3
TOGETHER = re.compile(r"Together these make room: (.*?) \(they cost")
"""Settings that make room together, in the message of a run."""
ADVICE = re.compile(r"(set|lower) ([\w.]*\w)(?:=([\w.]*\w)| to ([\d.]*\d))?")
INHERITS = {
    **{f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu": "actor_rollout_ref.actor" for role in ("rollout", "ref")},
    "critic.forward_max_token_len_per_gpu": "critic",
}
"""A budget that is null -> the section whose ``ppo_max_token_len_per_gpu`` counts instead."""


class Writer:
    """A plugin of pytest that writes what a scenario consists of in place of running its test."""

    def __init__(self, folder: Path) -> None:
        """Write to ``scenarios.jsonl`` in a folder."""
        self._file = folder / "scenarios.jsonl"
        self._file.unlink(missing_ok=True)

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Write one line."""
        from tests.trainer.test_until_it_fits import SIZES, first_without_room, overrides
        from verl_memopt.memory.host_buffers import GIB

        given = pyfuncitem.funcargs
        low, high = first_without_room(given["unlimited"](given["kind"]), given["phase"], given["nth"])
        limit = low + SIZES[given["size"]] * (high - low)
        named = {name: given[name] for name in ("kind", "phase", "nth", "size")}
        keys = overrides(given["values"](given["kind"]) | {"memory.device_limit_gb": limit / GIB})
        with self._file.open("a") as file:
            file.write(json.dumps(named | {"overrides": keys}) + "\n")
        return True


def write_scenarios(folder: Path) -> int:
    """Write the scenarios and the files that their runs read."""
    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    words = ["tests/trainer/test_until_it_fits.py", "-m", "slow", "-k", "at_most_three_times", f"--basetemp={folder}/files"]
    return pytest.main([*words, "-p", "no:xdist"], plugins=[Writer(folder)])


def advised(message: str) -> list[tuple[str, str, str | None]]:
    """Return what a message advises: ("set" or "lower", key, value), in its order."""
    return [(how, key, value or number or None) for how, key, value, number in ADVICE.findall(message)]


def run(overrides: list[str]) -> tuple[str | None, str]:
    """Train, and return the phase that ran out of memory (None: it ran, or another error ended it) and what is printed."""
    from tests.trainer.conftest import ready
    from verl_memopt.config.loader import load_settings
    from verl_memopt.errors import DeviceMemoryError, UserError

    try:
        from verl_memopt.trainer.until_it_fits import set_together
    except ImportError:  # an older tree, whose message is the error's own
        set_together = lambda *_: ""  # noqa: E731

    folder = tempfile.mkdtemp()
    settings = load_settings("ppo_trainer", [*overrides, f"trainer.default_local_dir={folder}/run"])
    try:
        with ready(settings) as trainer:
            trainer.run()
        return None, "runs"
    except DeviceMemoryError as error:
        return error.figures.phase, f"{error}{set_together(error, settings)}"
    except UserError as error:
        return None, str(error)
    finally:
        gc.collect()
        shutil.rmtree(folder)


def having(overrides: list[str], key: str, value: Any) -> list[str]:
    """Return overrides with another value of a key."""
    return [*(each for each in overrides if each.partition("=")[0] != key), f"{key}={value}"]


def refusal(overrides: list[str]) -> str | None:
    """Return why settings are refused, None where they are accepted."""
    from verl_memopt.config.loader import load_settings
    from verl_memopt.errors import ConfigError

    try:
        load_settings("ppo_trainer", overrides)
    except ConfigError as error:
        return str(error)
    return None


def lower(overrides: list[str], key: str, present: float, least: bool) -> Iterator[Any]:
    """Yield what a number may be lowered to, the first that counts first."""
    lowest = 1 if isinstance(present, int) else 0.01
    half = present // 2 if isinstance(present, int) else present / 2
    if not least and half >= lowest:
        yield half
    found = re.search(r"at least (\d+)", refusal(having(overrides, key, lowest)) or "")
    yield lowest if found is None else int(found[1])


def followed(overrides: list[str], message: str, least: bool) -> tuple[list[str], str] | None:
    """Return the overrides after the first advice of a message that can be followed, and what changed; None = there is none."""
    from verl_memopt.config.keys import shown, value_at
    from verl_memopt.config.loader import load_settings

    if (together := TOGETHER.search(message)) is not None:
        keys = dict(each.split("=", 1) for each in together[1].split(" "))
        for key, value in keys.items():
            overrides = having(overrides, key, value)
        return overrides, together[1]
    settings = load_settings("ppo_trainer", overrides)
    for how, key, value in advised(message):
        present = value_at(settings, key)
        if value is not None:
            values: list[Any] = [value]
        else:
            if present is None and key in INHERITS:
                present = value_at(settings, f"{INHERITS[key]}.ppo_max_token_len_per_gpu")
            values = [] if present is None else [each for each in lower(overrides, key, present, least) if each < present]
        for each in values:
            changed = having(overrides, key, each)
            if shown(present) != str(each) and refusal(changed) is None:
                return changed, f"{how} {key}={each}"
    return None


def follow(scenario: dict[str, Any], least: bool) -> dict[str, Any]:
    """Follow the advice of a scenario, and return what became of it."""
    overrides, changes, phases = scenario.pop("overrides"), list[str](), list[str]()
    if (refused := refusal(overrides)) is not None:
        return scenario | {"ends": f"refused: {refused}"}
    while True:
        phase, message = run(overrides)
        if phase is None:
            return scenario | {"phases": phases, "changes": changes, "ends": message}
        phases.append(phase)
        further = followed(overrides, message, least) if len(changes) < MOST_CHANGES else None
        if further is None:
            ends = "still out of memory" if len(changes) == MOST_CHANGES else "no further advice"
            return scenario | {"phases": phases, "changes": changes, "ends": ends, "message": message}
        overrides = further[0]
        changes.append(further[1])


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("scenarios", "follow"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--lower", choices=("half", "least"), default="half")
    given = parser.parse_args()
    if given.command == "scenarios":
        return write_scenarios(given.folder.resolve())
    logging.disable(logging.WARNING)
    with given.out.open("w") as file:
        for line in (given.folder / "scenarios.jsonl").read_text().splitlines():
            found = follow(json.loads(line), given.lower == "least")
            print(json.dumps(found), file=file, flush=True)
            print(found["kind"], found["phase"], found["size"], len(found.get("changes", [])), found["ends"][:100], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
