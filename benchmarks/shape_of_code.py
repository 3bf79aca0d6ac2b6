"""The shape of the code, counted on the tree in which it runs.

python benchmarks/shape_of_code.py                   all rows; the measured ones train the toy tasks for a step each (a minute)
python benchmarks/shape_of_code.py --static --json   what is counted without a run, as JSON with the names behind each number
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl_memopt"
SMALL, LARGE = 80, 600
WAY = {
    "driver and worker": (
        "cli.main", "cli.run", "load_settings", "build_run", "start_workers", "Trainer.one_step", "TrainingStep.train_step",
        "Generator.generate", "LogProbPass.compute", "Budget.micro_batches", "TokenAdvantages", "rloo_advantages",
        "PolicyUpdate.cut", "MiniBatchCutter.cut", "TimedGroup", "RayGroup", "Worker.call", "RoleBuilder", "TrainedModel",
        "Policy.accumulate", "micro_batches_of", "Objective", "forward_pass", "policy_loss", "sequence_loss",
    ),
    "model internals": ("PolicyModel", "PackedModel", "Decoder", "choose_attention", "Pack", "head_log_probs"),
}  # fmt: skip
"""RLOO's way from the command line to ``backward()``: a function or class of each file that a reader opens. A name that moves is
found in its new place; one that is gone is an error."""
NEW_INPUT = ("sum_pi_squared", "optimal_token_baseline")
"""An estimator and the input that it alone needs."""
SECTIONS = (
    *("actor_rollout_ref", "model", "actor", "critic", "fsdp_config", "optim", "ref", "rollout", "memory", "reward_model"),
    *("trainer", "data", "algorithm"),
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def files() -> tuple[Path, ...]:
    """Return the files of the package without ``__init__.py``."""
    return tuple(path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def code_and_comment_lines(path: Path) -> tuple[int, int]:
    """Return the lines that hold code, and those that hold a comment alone. Docstrings and imports are neither."""
    others = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code, comments = set(), set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= others
    return len(code), len(comments - code)


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the files of the package that a file imports, at any place in it."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PACKAGE.name + "."):
            names.add(node.value.partition(":")[0])  # a name that is resolved at run time
    below = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if name.split(".")[0] == PACKAGE.name]
    return frozenset(each for each in below if each in files())


@cache
def importers(path: Path) -> list[Path]:
    return [each for each in (*files(), *PACKAGE.rglob("__init__.py")) if each != path and path in imported(each)]


def is_program(path: Path) -> bool:
    return (
        "__name__" in {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
        and "__main__" in path.read_text()
    )


def is_knob(path: Path) -> bool:
    return any(isinstance(node, ast.Assign) and "KNOB" in ast.unparse(node.targets[0]) for node in tree_of(path).body)


@cache
def words_of(path: Path) -> set[str]:
    """Return the names and the whole texts in a file's code. Docstrings and comments are not code."""
    words: set[str] = set()
    for node in ast.walk(tree_of(path)):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(text := getattr(node, field, None), str):
                words.update(text.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            words.update(re.split(r"[.=]", node.value))
        elif isinstance(node, ast.JoinedStr):
            words.update(re.findall(r"\w+", ast.unparse(node)))
    return words


def defined(name: str) -> Path:
    """Return the file that defines a name: a function or a class, ``file.function``, or ``Class.method``."""
    first, _, last = name.rpartition(".")
    found = []
    for path in files():
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                of_class = node.name == first and any(getattr(part, "name", "") == last for part in getattr(node, "body", ()))
                of_file = node.name == last and first in ("", path.stem)
                if of_class or of_file:
                    found.append(path)
    if len(found) != 1:
        raise SystemExit(f"WAY: {name} is defined in {len(found)} files: {', '.join(map(name_of, found))}. Mend the list.")
    return found[0]


def knob_files() -> dict[str, list[str]]:
    """Return knob -> its declaration and mechanism, the files that import them, and those that read a key that it alone has."""
    text = subprocess.run(
        [sys.executable, "-m", PACKAGE.name, "knobs", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    words = {}
    for knob in json.loads(text):
        below = [[part for part in key.split(".") if part not in SECTIONS] for key in knob["keys"]]
        words[knob["name"]] = {parts[0] for parts in below if parts} - {"dtype"}  # tensors have it, too
    read = {path: {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)} for path in files()}
    uses = Counter(word for some in words.values() for word in some)
    found = {}
    for name, some in words.items():
        alone = {word for word in some if uses[word] == 1}
        homes = (path for path in files() if name_of(path).startswith(("knobs/", "memory/")))
        own = {path for path in homes if path.stem in (name, f"{name}_torch")}
        found[name] = [name_of(path) for path in files() if path in own or alone & read[path] or own & imported(path)]
    return found


def static_rows() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, number and the names behind it of each row that needs no run."""
    sizes = {name_of(path): num_lines(path) for path in files()}
    largest = max(sizes, key=lambda name: sizes[name])
    yield "files of the package", len(sizes), None
    yield "largest file, lines", sizes[largest], largest
    yield f"files over {LARGE} lines", sum(size > LARGE for size in sizes.values()), None
    all_files = sorted(PACKAGE.rglob("*.py"))
    counted = [code_and_comment_lines(path) for path in all_files]
    code, comments = (sum(pair[part] for pair in counted) for part in (0, 1))
    yield "lines of code, imports apart", code, None
    yield "all lines", sum(map(num_lines, all_files)), None
    yield "lines of tests", sum(map(num_lines, sorted((ROOT / "tests").rglob("*.py")))), None
    small = [
        name_of(path)
        for path in files()
        if num_lines(path) < SMALL and len(importers(path)) == 1 and not is_knob(path) and not is_program(path)
    ]
    yield f"files under {SMALL} lines with one importer", len(small), small
    twice = sorted(name for name, number in Counter(path.stem for path in files()).items() if number > 1)
    yield "base names in several folders", len(twice), twice
    for part, names in WAY.items():
        way = list(dict.fromkeys(name_of(defined(name)) for name in names))
        yield f"RLOO's way, files: {part}", len(way), way
    rlt = [
        name_of(path)
        for path in files()
        if "rlt" not in path.relative_to(PACKAGE).parent.parts
        and any("rlt" in re.split(r"[_\W]", word.lower()) or "Rlt" in word for word in words_of(path))
    ]
    yield "files outside RLT's folders that name RLT", len(rlt), rlt
    yield "  the same by folder", dict(Counter(name.split("/")[0] if "/" in name else "." for name in rlt)), None
    yield "comment lines", comments, None
    yield "  share of code lines", f"1 in {code / max(comments, 1):.0f}", None
    knobs = knob_files()
    counts = sorted(map(len, knobs.values()))
    yield "files of a knob, least, median, most", [counts[0], counts[len(counts) // 2], counts[-1]], knobs
    new = [name_of(path) for path in files() if words_of(path) & set(NEW_INPUT)]
    yield "files that know an estimator with an input of its own", len(new), new


TRACED = """
import json, sys, threading
from pathlib import Path
package, out, *words = sys.argv[1:]
entered, stack, phase = {}, [], [""]
def file_of(frame):
    name = frame.f_code.co_filename
    return name[len(package) + 1:] if name.startswith(package + "/") else None
def hear(frame, event, _):
    if event != "call" or not frame.f_code.co_flags & 1:  # bodies of modules and classes run at import, whoever needs them
        return
    name = file_of(frame)
    if name is not None:
        entered.setdefault(phase[-1], set()).add(name)
import torch
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.cli import main
timed = PhaseClock.phase
def phase_of(self, name):
    class Both:
        def __enter__(inner):
            phase.append(name)
            inner.timed = timed(self, name)
            return inner.timed.__enter__()
        def __exit__(inner, *error):
            phase.pop()
            return inner.timed.__exit__(*error)
    return Both()
PhaseClock.phase = phase_of
backward = torch.Tensor.backward
def seen(self, *args, **more):
    if phase[-1] == "update_actor":
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(file_of(frame))
            frame = frame.f_back
        stack[:] = list(dict.fromkeys(name for name in files if name))
    return backward(self, *args, **more)
torch.Tensor.backward = seen
sys.setprofile(hear)
code = main(words)
sys.setprofile(None)
Path(out).write_text(json.dumps({"code": code, "stack": stack[::-1], "entered": {k: sorted(v) for k, v in entered.items()}}))
"""


def traced(folder: Path, name: str, recipe: str, config: str, *overrides: str) -> dict[str, Any]:
    """Return what one step of a recipe entered: files by phase, and those on the stack at ``backward()``."""
    toy, out = folder / ("rlt" if "rlt" in recipe else "toy"), folder / f"{name}.json"
    model = toy / ("teacher" if "rlt" in recipe else "model")
    given = [
        "train", "--config-dir", f"recipe/{recipe}", "--config-name", config,
        f"data.train_files={toy}/train.parquet", f"data.val_files={toy}/val.parquet", f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}/{name}", "trainer.worker_group=local", "actor_rollout_ref.rollout.name=hf",
        "trainer.total_training_steps=1", "trainer.logger=[jsonl]", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.device=cpu", *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", TRACED, str(PACKAGE), str(out), *given], cwd=ROOT, capture_output=True, text=True
    )
    if not out.is_file():
        raise SystemExit(f"{name}: the step did not run.\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def measured_rows(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, number and the names behind it of each row that is measured on a step of the toy tasks."""
    toys: tuple[tuple[str, Sequence[str]], ...] = (
        ("toy", ("-m", PACKAGE.name, "toy", f"{folder}/toy")), ("rlt", ("recipe/rlt/make_toy.py", f"{folder}/rlt")),
    )  # fmt: skip
    for name, words in toys:
        if not (folder / name).is_dir():
            subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=True)
    rloo, ppo = traced(folder, "rloo", "rloo", "toy"), traced(folder, "ppo", "ppo", "toy")
    grpo = traced(folder, "grpo", "rloo", "toy_grpo")
    rlt = traced(folder, "rlt_run", "rlt/config", "teacher_rlt_toy", f"reward_model.model.path={folder}/rlt/student")
    yield "files on the stack at backward()", len(rloo["stack"]), rloo["stack"]
    near = [
        name
        for name in dict.fromkeys((*rloo["entered"].get("adv", ()), *rloo["entered"]["update_actor"]))
        if name.split("/")[0] in ("algorithms", "trainer", "workers", "worker") and not name.endswith("__init__.py")
    ]
    yield "files of algorithms, trainer, workers entered in adv and update_actor", len(near), near

    def everything(run: dict[str, Any]) -> set[str]:
        return {name for part in run["entered"].values() for name in part}

    more = sorted(everything(ppo) - everything(rloo))
    yield "more files entered with PPO's critic than with RLOO", len(more), more
    more = sorted(everything(rlt) - everything(grpo))
    yield "more files entered with RLT than with GRPO", len(more), more


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", action="store_true", help="leave out the rows that need a run")
    parser.add_argument("--json", action="store_true", help="print JSON, with the names behind each number")
    parser.add_argument("--folder", type=Path, help="keep the toy tasks here, for the next time")
    asked = parser.parse_args(argv)
    rows = list(static_rows())
    if not asked.static:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured_rows(asked.folder or Path(folder))
    if asked.json:
        print(json.dumps({name.strip(): {"is": number, "names": names} for name, number, names in rows}, indent=1))
    else:
        for name, number, _ in rows:
            print(f"{name:72} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
