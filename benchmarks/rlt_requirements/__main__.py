"""Measure the passes of RLT for each model, and write the table of what a card needs.

``python -m benchmarks.rlt_requirements --measure qwen2_5_0_5b ...`` counts the passes of these models into results.json.
``python -m benchmarks.rlt_requirements`` writes results.txt from it. That is arithmetic and takes a moment.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from benchmarks.rlt_requirements.passes import PassPeaks, Rows, measure_passes
from benchmarks.rlt_requirements.table import table
from tests.config.card_memory import MODELS
from verl_memopt.config.loader import load_settings

FOLDER = Path(__file__).parent
RESULTS, TABLE = FOLDER / "results.json", FOLDER / "results.txt"
RECIPE = "recipe/rlt/config"
SOLUTION = 1024
"""Tokens of the longest solution. The teacher's prompt of 2,048 tokens holds it beside the question."""


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", default=[], choices=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    settings = load_settings("teacher_rlt_mono", [], RECIPE)
    data = settings.data
    rows = Rows(data.max_prompt_length, data.max_response_length, data.max_prompt_length - SOLUTION, SOLUTION)
    for model in arguments.measure:
        began = time.monotonic()
        peaks = measure_passes(MODELS[model], settings, rows)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[model] = vars(peaks)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        sys.stdout.write(f"{model}: {vars(peaks)} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    results = json.loads(RESULTS.read_text())
    text = table({model: PassPeaks(**results[model]) for model in MODELS if model in results}, settings, rows)
    TABLE.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
