"""``python benchmarks/gpu/pytest_counts.py JUNIT_XML JSON``: what pytest ran, skipped and why, and what failed."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any


def counts(report: Path) -> dict[str, Any]:
    """Gives numbers of tests by outcome, reasons of skips with how often, and the first line of each failure by test."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    skips: Counter[str] = Counter()
    failures = {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for found in case:
            if found.tag == "skipped":
                skips[found.get("message", "")] += 1
            elif found.tag in ("failure", "error"):
                failures[name] = (found.get("message") or "").split("\n")[0]
    skipped = sum(skips.values())
    passed = len(cases) - skipped - len(failures)
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "skips": dict(skips), "failures": failures}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(counts(Path(sys.argv[1])), indent=1) + "\n")
