"""``python -m benchmarks.start_time [--against FOLDER]``: where the seconds of a short run go, from the shell to the prompt.

It runs the single-GPU example script for five toy steps with Ray and vLLM, and prints when each milestone came. With --against
it does the same in another checkout of this project, in turns, and prints both and their ratio. The toy task is made before the
first round, so no round pays for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/memory_optimization/run_rloo_single_gpu.sh"
MILESTONES = {
    "settings are read": re.compile(r"objective:"),
    "workers are built, first validation": re.compile(r"^step 0/"),
    "last step": re.compile(r"^step 5/5"),
    "record and charts": re.compile(r"^phase "),
    "back at the prompt": None,
}
"""What is reached, and the line of the run's output that shows it; None is the end of the process."""


def main() -> None:
    """Run the rounds of the command line and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of each round to FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the runs")
    asked = parser.parse_intermixed_args()
    trees = {"here": ROOT} | ({} if asked.against is None else {"against": asked.against.resolve()})
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(folder) / "toy"
        subprocess.run([sys.executable, "-m", "verl_memopt", "toy", str(toy)], cwd=ROOT, check=True, capture_output=True)
        for turn in range(asked.rounds):
            for name in trees if turn % 2 == 0 else reversed(trees):
                seconds[name].append(timed(trees[name], toy, Path(folder) / f"{name}{turn}", asked.overrides))
                sys.stderr.write(f"round {turn + 1}, {name}: {seconds[name][-1]['back at the prompt']:.1f} s\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(seconds, indent=2) + "\n")
    sys.stdout.write(table(seconds))


def timed(tree: Path, toy: Path, folder: Path, overrides: list[str]) -> dict[str, float]:
    """Return the seconds from the start of the script to each milestone, of one run in a checkout.

    Raises:
        SystemExit: the run failed; with the end of its output.
    """
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(tree), "TOY_DIR": str(toy), "OMP_NUM_THREADS": "1"}
    command = ["bash", SCRIPT, "trainer.total_training_steps=5", f"trainer.default_local_dir={folder}", *overrides]
    begun, reached, lines = time.perf_counter(), dict[str, float](), []
    process = subprocess.Popen(
        command, cwd=tree, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        for name, shown_by in MILESTONES.items():
            if shown_by is not None and name not in reached and shown_by.search(line):
                reached[name] = time.perf_counter() - begun
    if process.wait():
        raise SystemExit("".join(lines[-20:]))
    return reached | {"back at the prompt": time.perf_counter() - begun}


def table(seconds: dict[str, list[dict[str, float]]]) -> str:
    """Return the medians of each milestone, and the ratio of the two checkouts round by round where there are two."""
    rows = [f"{'seconds until, median':38}" + "".join(f"{name:>10}" for name in seconds)]
    for milestone in MILESTONES:
        medians = [statistics.median(each[milestone] for each in rounds) for rounds in seconds.values()]
        rows.append(f"{milestone:38}" + "".join(f"{median:10.1f}" for median in medians))
    if len(seconds) == 2:
        here, against = ([each["back at the prompt"] for each in rounds] for rounds in seconds.values())
        ratios = [one / other for one, other in zip(here, against, strict=True)]
        rows.append(
            f"ratio of the whole, round by round: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
