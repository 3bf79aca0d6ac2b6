"""``python -m benchmarks.trl_suite``: TRL's own tests of its GRPO and RLOO trainers on :mod:`verl_memopt.trl`.

    python -m benchmarks.trl_suite TRL --out FOLDER [--python PYTHON] [--only TEXT] [--count]

``TRL`` is a git directory of TRL's repository, or a checkout. README.md says what is changed in the tests, and how
outcomes are counted.
Exit codes: 0 the table is written, 2 there is no such repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.trl_suite.models import OWNER, make_models

ROOT = Path(__file__).parents[2]
TESTS = ("tests/test_grpo_trainer.py", "tests/test_rloo_trainer.py")
HELPERS = ("tests/testing_utils.py", "tests/testing_constants.py", "tests/__init__.py")
SETTINGS = {
    "trainer.worker_group": "local", "trainer.device": "cpu", "trainer.track_memory_every_steps": 0,
    "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
}  # fmt: skip
"""What every run of the suite is told, unless the test says otherwise: this process, no Ray, no vLLM, a CPU."""
SECONDS = 60
"""Bound of a test."""

PASSED, FAILED = "passed", "failed"
NOT_APPLICABLE = (
    ("images", r"VLM|vlm|multimodal"),
    ("tools and environments", r"tools|environment|tool_calls|RolloutDispatch"),
    ("vLLM, a GPU or another kernel", r"Slow|vllm|liger"),
    (
        "TRL's internals",
        r"GetHighEntropyMask|ContinuousBatchingContract|get_off_policy_mask|mask_truncated_completions$|prepare_input"
        r"|entropy_bonus_flows|dispatch_batches|num_workers|train_workers|with_iterable_dataset|log_extra",
    ),
)
"""Kinds of tests about what is not here, and how their names are told."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_suite", description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, help="git directory or checkout of TRL")
    parser.add_argument("--out", type=Path, required=True, help="folder for tests, models and outcomes")
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter with verl_memopt's packages, trl, peft and datasets"
    )
    parser.add_argument("--only", help="pytest's -k")
    parser.add_argument("--count", action="store_true", help="count the outcomes that are in the folder, and run nothing")
    parsed = parser.parse_args(argv)
    outcomes = parsed.out / "outcomes.jsonl"
    if not parsed.count:
        commit = prepare(parsed.trl, parsed.out)
        if not commit:
            print(f"{parsed.trl}: no git directory of TRL", file=sys.stderr)
            return 2
        outcomes.unlink(missing_ok=True)
        run(parsed.out, parsed.python, parsed.only, outcomes)
    rows = [json.loads(line) for line in outcomes.read_text().splitlines()]
    text = table(rows, (parsed.out / "commit.txt").read_text())
    (parsed.out / "table.txt").write_text(text)
    print(text)
    return 0


def prepare(trl: Path, out: Path) -> str:
    """Write the tests with other imports, models and rows into a folder, and return the commit that they are of."""
    shown = git(trl, "log", "-1", "--format=%H %cs")
    if not shown:
        return ""
    suite = out / "suite" / "tests"
    suite.mkdir(parents=True, exist_ok=True)
    extract(trl, suite.parent, "trl")  # its tests ask it what is installed
    texts = {name: git(trl, "show", f"HEAD:{name}") for name in (*TESTS, *HELPERS)}
    names = {each for text in texts.values() for each in re.findall(rf"{OWNER}/(tiny-[\w.-]+)", text)}
    models = make_models(names, out / "models")
    for name, text in texts.items():
        (suite / Path(name).name).write_text(rewritten(text, models) if name in TESTS else text)
    (out / "commit.txt").write_text(shown)
    return shown


def git(trl: Path, *arguments: str) -> str:
    process = subprocess.run(["git", f"--git-dir={git_folder(trl)}", *arguments], capture_output=True, text=True)
    return process.stdout if process.returncode == 0 else ""


def extract(trl: Path, target: Path, folder: str) -> None:
    """Write a folder of the repository into another."""
    target.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(["git", f"--git-dir={git_folder(trl)}", "archive", "HEAD", folder], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(target)], input=packed.stdout, check=True)


def git_folder(trl: Path) -> Path:
    return trl / ".git" if (trl / ".git").exists() else trl


def rewritten(text: str, models: Mapping[str, str]) -> str:
    """Return a test file with the trainers of this package, local models and local rows. Nothing else changes."""
    ours = "from benchmarks.trl_suite.models import load_dataset\nfrom verl_memopt.trl import "
    text = re.sub(r"^from trl import (?=(GRPO|RLOO)Config)", ours, text, flags=re.MULTILINE)
    for name, path in sorted(models.items(), key=lambda each: -len(each[0])):
        text = text.replace(f'"{name}"', f'"{path}"')
    return text


def run(out: Path, python: str, only: str | None, outcomes: Path) -> None:
    """Run the tests in one process, under a bound for each."""
    variables = {
        "TRL_SUITE_SETTINGS": json.dumps(SETTINGS), "TRL_SUITE_OUTCOMES": str(outcomes.absolute()), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str((out / "suite").absolute())]), "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [
        python, "-m", "pytest", "tests", "-q", "-p", "benchmarks.trl_suite.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
        f"--timeout={SECONDS}", "--basetemp", str((out / "tmp").absolute()), "--tb=short", *(["-k", only] if only else []),
    ]  # fmt: skip
    with (out / "log.txt").open("w") as log:
        subprocess.run(command, cwd=out / "suite", env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)


def kind(row: Mapping[str, str]) -> str:
    """Return whether a test passed, failed, or is about something that is not here."""
    if row["outcome"] == "passed":
        return PASSED
    for name, pattern in NOT_APPLICABLE:
        if re.search(pattern, row["test"]):
            return name
    return FAILED


def table(rows: Sequence[Mapping[str, str]], commit: str) -> str:
    """Return the counts by kind, and the reason of each test that failed."""
    kinds = Counter(map(kind, rows))
    lines = [f"TRL {commit.strip()}", f"{len(rows)} tests", *(f"{number:5} {name}" for name, number in kinds.most_common())]
    lines.append("")
    failed = [row for row in rows if kind(row) == FAILED]
    reasons = Counter(reason(row) for row in failed)
    for text, number in reasons.most_common():
        lines.append(f"{number:5} {text}")
        lines += [f"        {row['test']}" for row in failed if reason(row) == text]
    return "\n".join(lines) + "\n"


def reason(row: Mapping[str, str]) -> str:
    """Return why a test failed, without paths and numbers that differ from test to test."""
    text = re.sub(r"/\S*/", ".../", row["reason"].strip().splitlines()[0] if row["reason"].strip() else row["outcome"])
    return text[:160]


if __name__ == "__main__":
    sys.exit(main())
