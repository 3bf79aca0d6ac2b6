"""What is special about a scored row, as one small number. Where several hold, the largest counts."""

from __future__ import annotations

OK = 0
NO_END_TAG = 1
"""The response has no end tag, and all of it is the explanation."""
EMPTY_THINK = 2
"""The explanation has no token."""
THINK_TRUNCATED = 3
"""The end of the explanation was cut, so that the student's sequence fits."""
SKIPPED = 4
"""The row is not scored, and leaves its group."""

NAMES = {OK: "ok", NO_END_TAG: "no_end_tag", EMPTY_THINK: "empty_think", THINK_TRUNCATED: "think_truncated", SKIPPED: "skipped"}
"""Names of the statuses in metrics."""
