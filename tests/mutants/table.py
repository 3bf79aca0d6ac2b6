"""Prints the mutation score by part and the survivors that nobody has looked at: `python tests/mutants/table.py`.

Score = killed / (killed + survived). A mutant counts as killed when a test fails, runs out of time or ends the process. One that
no test reaches has survived, and so has a listed one that ran out of time: there the machine was busy. Exits 1 under 95 %.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from run import SURVIVED

TARGET = 0.95
MUTANTS = Path("mutants")
LIST = Path("tests/mutants/survivors.txt")

PARTS = {
    "algorithms": ("algorithms/",),
    "packing": ("model/packing.py", "model/prefix_layout.py", "memory/token_packing.py", "data/batch.py"),
    "log-probs": ("memory/chunked_logprob_torch.py", "memory/logit_tiles.py", "memory/teaching.py"),
    "residency": ("memory/residency.py",),
    "checkpoints": ("run/", "distributed/"),
}

NOT_RUN = (None, 34)

OUT_OF_TIME = (-24, 24, 36, 152, 255)


def results():
    """Return (source file, mutant, exit code) of every mutant."""
    for meta in sorted(MUTANTS.rglob("*.py.meta")):
        source = meta.relative_to(MUTANTS).with_suffix("")
        for mutant, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            yield source, mutant, code


def part_of(source):
    inside = source.relative_to("verl_memopt").as_posix()
    return next(part for part, places in PARTS.items() if inside.startswith(places))


@cache
def change(source, mutant):
    """Return the change of a mutant as `function: - line, + line`, which stays the same if the mutant's number changes."""
    lines = get_diff_for_mutant(mutant, path=source).splitlines()[3:]
    function = mutant.rpartition(".")[2].rpartition("__mutmut_")[0].removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return f"{function}: {old} -> {new}"


def mark(source, what):
    """Return eight digits for a change of a file. They do not quote it, and stay the same wherever the line moves."""
    return sha256(f"{source}: {what}".encode()).hexdigest()[:8]


def listed():
    """Return the reviewed survivors: {mark: reason}. A reason is a line, and its marks are indented below it."""
    found, reason = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith(" "):
            found.update(dict.fromkeys(line.split(), reason))
        else:
            reason = line
    return found


def main():
    counts = {part: [0, 0, 0, 0] for part in PARTS}  # killed, survived, survivors that are listed, not run
    known, unlisted, met, late = listed(), [], set(), 0
    for source, mutant, code in results():
        row = counts[part_of(source)]
        if code in NOT_RUN:
            row[3] += 1
        elif code in SURVIVED or (code in OUT_OF_TIME and mark(source, change(source, mutant)) in known):
            row[1] += 1
            what = change(source, mutant)
            met.add(found := mark(source, what))
            row[2] += found in known
            if found not in known:
                unlisted.append(f"{found} {mutant}\n    {what}")
        else:
            row[0] += 1
            late += code in OUT_OF_TIME
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    print(f"{'part':<14}{'mutants':>9}{'killed':>9}{'survived':>10}{'looked at':>11}{'not run':>9}{'score':>9}")
    for part, (killed, survived, seen, left) in [*counts.items(), ("all", total)]:
        score = f"{killed / (killed + survived):.1%}" if killed + survived else "-"
        print(f"{part:<14}{killed + survived + left:>9}{killed:>9}{survived:>10}{seen:>11}{left:>9}{score:>9}")
    if late:
        print(f"\n{late} of the killed ran out of time, which a busy machine causes too.")
    stale = [f"{found}: {reason}" for found, reason in known.items() if found not in met]
    if unlisted:
        print(f"\n{len(unlisted)} survivors to look at: kill each by a test, or put its mark below a reason in {LIST}.")
        print(*unlisted, sep="\n")
    if stale:
        print(f"\n{len(stale)} mutants of {LIST} survive no longer:", *stale, sep="\n")
    if total[3]:
        print(f"\n{total[3]} mutants were not run. Run the same command again: it goes on where it stopped.")
    too_few = total[0] < TARGET * (total[0] + total[1])
    if too_few:
        print(f"\nThe score is under {TARGET:.0%}.")
    return 1 if too_few or total[3] else 0


if __name__ == "__main__":
    sys.exit(main())
