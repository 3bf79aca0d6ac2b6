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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl_memopt"
SMALL, LARGE = 80, 600
WAY = {
    "driver and worker": (
        "cli.main", "cli.run", "load_settings", "build_run", "start_workers", "Trainer.one_step", "TrainingStep.train_step",
        "Generator.generate", "LogProbPass.compute", "Budget.micro_batches", "AdvantageInputs", "rloo_advantages",
        "PolicyUpdate.cut", "MiniBatchCutter.cut", "TimedGroup", "RayGroup", "Worker.call", "Policy.built", "TrainedModel",
        "Policy.accumulate", "micro_batches_of", "Objective", "forward_pass", "policy_loss", "sequence_loss",
    ),
    "model internals": ("PolicyModel", "PackedModel", "Decoder", "choose_attention", "Pack", "head_log_probs"),
}  # fmt: skip
"""RLOO's way from the command line to ``backward()``: a function or class of each file that a reader opens. A name that moves is
found in its new place; one that is gone is an error."""
NEW_INPUT = ("sum_pi_squared", "optimal_token_baseline")
"""An estimator and the input that it alone needs."""


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
    return 'if __name__ == "__main__":' in path.read_text()


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


# The files of a knob. Which class an attribute is read from follows from annotations, as a reader finds it.

Class = tuple[Path, ast.ClassDef]
Classes = tuple[Class, ...] | None
"""Classes of the package that an expression may be an instance of: () = none of them, None = unknown."""
Scope = dict[str, Classes]
PLANNER = ("memory/held.py", "memory/fit.py", "trainer/fit.py", "trainer/until_it_fits.py")
"""Files that predict what phases hold together, before anything runs. No knob acts in them."""
USERS = ("ladder/", "recipes/")
"""Rooms above the trainer, as import-linter holds: they use the knobs as a program of the user's own would."""
OF_TENSORS = {"dtype"}
"""Fields of knobs that tensors have, too: an object of unknown class with this attribute is taken for a tensor."""


@cache
def names_of(path: Path) -> dict[str, tuple[Path, str]]:
    """Return name in a file -> the file and the name that it is imported from; a module has the name ""."""
    names = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            folder = ROOT.joinpath(*str(node.module).split("."))
            for each in node.names:
                module = (folder / each.name).with_suffix(".py")
                below = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
                names[each.asname or each.name] = (module, "") if module.is_file() else (below, each.name)
    return names


@cache
def definition(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Return what defines a name of a file, and where."""
    for node in tree_of(path).body if path.is_file() else ():
        if getattr(node, "name", "") == name or any(getattr(target, "id", "") == name for target, _ in assigned(node)):
            return path, node
    origin = names_of(path).get(name) if path.is_file() else None
    return definition(*origin) if origin and origin[1] else None


def class_named(path: Path, node: ast.expr | None) -> Class | None:
    """Return the class of the package that ``Name`` or ``module.Name`` means in a file."""
    found = None
    if isinstance(node, ast.Name):
        found = definition(path, node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names_of(path):
        found = definition(names_of(path)[node.value.id][0], node.attr)
    return (found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None


def annotated(path: Path, node: ast.expr | None) -> Classes:
    """Return the classes that an annotation names. ``Any`` is an object of another package: settings are never passed as that."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if node is None:
        return None
    if isinstance(node, ast.BinOp):
        sides = annotated(path, node.left), annotated(path, node.right)
        return None if None in sides else (*(sides[0] or ()), *(sides[1] or ()))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
        return annotated(path, node.slice.elts[0])
    if found := class_named(path, node):
        return (found,)
    alias = definition(path, node.id) if isinstance(node, ast.Name) else None
    return annotated(alias[0], alias[1].value) if alias and isinstance(alias[1], ast.Assign) else ()


@dataclass
class Member:
    """An attribute of a class: the class that has it, its annotation, and the value or the function that it is."""

    of: Class
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    function: ast.FunctionDef | None = None


@cache
def members(of: Class) -> dict[str, Member | None]:
    """Return the attributes of a class and its bases; "" -> None where a base is not known."""
    path, node = of
    found: dict[str, Member | None] = {}
    for base in reversed(node.bases):
        known = class_named(path, base)
        # A base of another package has none of our fields; one that is computed may have any.
        computed = isinstance(base, ast.Name) and isinstance(
            (definition(path, base.id) or (path, None))[1], ast.AnnAssign | ast.Assign
        )
        found |= members(known) if known else {"": None} if computed else {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = Member(of, part.annotation)
        elif isinstance(part, ast.Assign):
            found |= {target.id: Member(of, value=value) for target, value in assigned(part) if isinstance(target, ast.Name)}
        elif isinstance(part, ast.FunctionDef):
            is_property = any("property" in ast.unparse(each) for each in part.decorator_list)
            found[part.name] = Member(of, part.returns) if is_property else Member(of, function=part)
            for inner in ast.walk(part):
                for target, value in assigned(inner):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr not in found:
                        found[target.attr] = Member(of, getattr(inner, "annotation", None), value, part)
    return found


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment and its value, where there is one for it alone."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else ():
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
            yield from zip(target.elts, values, strict=False)
        else:
            yield target, node.value


class Reader(ast.NodeVisitor):
    """Finds in one file what is used of other files, outside of annotations, and from which class each attribute is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.scope, self.of = path, cast(Scope, {}), cast("Class | None", None)
        self.names: set[tuple[Path, str]] = set()
        self.owners: set[tuple[Path, str]] = set()
        """File of the class that has an attribute, and the attribute."""
        self.unknown: set[str] = set()
        """Attributes of objects whose class is not known."""

    def classes(self, node: ast.expr | None, depth: int = 12) -> Classes:
        """Return the classes of an expression."""
        if isinstance(node, ast.Name):
            return self.scope.get(node.id)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare | ast.List | ast.Dict | ast.ListComp):
            return ()
        if isinstance(node, ast.IfExp | ast.BoolOp):
            all_of = [self.classes(each) for each in ([node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values)]
            return None if None in all_of else tuple(each for some in all_of for each in some or ())
        if isinstance(node, ast.Attribute) and depth:
            return self._through(self.classes(node.value, depth - 1), node.attr, depth)
        if not isinstance(node, ast.Call) or not depth:
            return None
        if found := class_named(self.path, node.func):
            return (found,)
        if isinstance(node.func, ast.Name):
            if node.func.id == "replace":
                return self.classes(node.args[0], depth - 1)
            called = definition(self.path, node.func.id)
            return annotated(called[0], called[1].returns) if called and isinstance(called[1], ast.FunctionDef) else None
        owners = self.classes(node.func.value, depth - 1) if isinstance(node.func, ast.Attribute) else None
        methods = [members(owner).get(cast(ast.Attribute, node.func).attr) for owner in owners or ()]
        returned = [annotated(each.of[0], each.function.returns) for each in methods if each and each.function and not each.value]
        return returned[0] if returned and len(returned) == len(methods) else None

    def _through(self, owners: Classes, name: str, depth: int) -> Classes:
        found: tuple[Class, ...] = ()
        for owner in owners or ():
            member = members(owner).get(name)
            if member is None:
                return None
            if member.annotation is not None:
                classes = annotated(member.of[0], member.annotation)
            else:  # self.name = value, in a method
                inner = Reader(member.of[0])
                if member.function is not None and member.value is not None:
                    inner.enter(member.function, member.of)
                classes = inner.classes(member.value, depth - 1)
            if classes is None:
                return None
            found += classes
        return None if owners is None else found

    def enter(self, node: ast.FunctionDef | ast.Lambda, of: Class | None) -> None:
        """Put the arguments of a function into the scope."""
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.scope[each.arg] = (of,) if of and each.arg == "self" else annotated(self.path, each.annotation)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.of = self.of, (self.path, node)
        for part in node.body:
            self.visit(part)
        self.of = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        for each in (*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(each)
        before, of = dict(self.scope), self.of
        self.enter(node, self.of)
        self.of = None
        for part in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(part)
        self.scope, self.of = before, of

    visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_Assign(node)
        if isinstance(node.target, ast.Name):
            self.scope[node.target.id] = annotated(self.path, node.annotation)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        for target, value in assigned(node):
            if isinstance(target, ast.Name):
                self.scope[target.id] = self.classes(value)
            else:
                self.visit(target)

    def visit_comprehension(self, node: ast.comprehension | ast.For) -> None:
        self.scope |= {each.id: None for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        self.generic_visit(node)

    visit_For = visit_comprehension  # noqa: N815

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in names_of(self.path):
            self.names.add(names_of(self.path)[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and not isinstance(node.args[1], ast.Constant):
            for owner in self.classes(node.args[0]) or ():  # by a name that stands somewhere in the file
                self._read(owner, words_of(self.path) & set(members(owner)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owners = self.classes(node.value)
        for owner in owners or ():
            self._read(owner, {node.attr})
        if owners is None:
            self.unknown.add(node.attr)

    def _read(self, owner: Class, names: set[str]) -> None:
        known = members(owner)
        for name in names:
            if member := known.get(name):
                self.owners.add((member.of[0], name))
            elif "" in known:
                self.unknown.add(name)


@cache
def read_in(path: Path) -> Reader:
    reader = Reader(path)
    reader.visit(tree_of(path))
    return reader


def knob_files() -> dict[str, list[str]]:
    """Return knob -> the files that somebody opens who wants to understand or change how it works.

    They are its declaration and its mechanism (``name.py`` and ``name_torch.py``); the files of the settings whose classes derive
    from the declaration's or have it as a field; and each file where it acts, which is one that

    * uses a name of the mechanism or of the declaration, outside of annotations, or an attribute of a class defined there;
    * or reads a field or a property of the declaration's settings, also by ``getattr``. The class of the object decides: the same
      name on another class is no read of the knob, and on an object of unknown class it is one.

    A constant or a small function counts as much as the call that does the work: what another file needs and is not the knob
    should lie elsewhere. These files do not count, as nothing acts in them:

    * Other declarations, the files that declarations import (their vocabulary: rules and predicted bytes), and the rest of
      ``config/``. They refuse, warn, rename and predict before anything runs, and import-linter holds that they do not reach
      torch. A rule belongs to the knob that refuses. The mechanism of another knob does count.
    * The rooms of ``USERS``, which nothing of the rest imports.

    A setting that one file hands to another as a plain number is followed no further, and what the mechanism itself calls does
    not count either. A knob without a file for its mechanism acts where its settings are read.
    """
    homes = [path for path in files() if name_of(path).startswith(("knobs/", "memory/"))]
    declarations = [path for path in homes if is_knob(path)]
    idle = {*declarations, *(each for path in declarations for each in imported(path))}
    idle |= {path for path in files() if name_of(path).startswith(("config/", *USERS))}
    text = subprocess.run(
        [sys.executable, "-m", PACKAGE.name, "knobs", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for name in (knob["name"] for knob in json.loads(text)):
        own = {path for path in homes if path.stem in (name, f"{name}_torch")}
        fields = {key for path in own & {*declarations} for key in fields_of(path)} - OF_TENSORS
        schema = {path for path in files() if name_of(path).startswith("config/") and is_built_from(path, own)}
        acts = {
            path
            for path in {*files()} - idle
            if any(origin in own for origin, _ in read_in(path).names | read_in(path).owners) or fields & read_in(path).unknown
        }
        found[name] = [name_of(path) for path in files() if path in own | schema | acts]
    return found


@cache
def settings_classes() -> frozenset[Class]:
    """Return the classes of the settings: those of ``config/``, their bases, the types of their fields, and so on."""
    homes = [path for path in files() if name_of(path).startswith("config/")]
    new = {(path, node) for path in homes for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    found = set(new)
    while new:
        parts = [(path, part) for path, node in new for part in (*node.bases, *node.body)]
        named = (
            annotated(path, getattr(part, "annotation", part))
            for path, part in parts
            if isinstance(part, ast.AnnAssign | ast.Name)
        )
        new = {each for some in named for each in some or ()} - found
        found |= new
    return frozenset(found)


def fields_of(path: Path) -> set[str]:
    """Return the fields of the settings of a file."""
    parts = (part for home, node in settings_classes() if home == path for part in node.body)
    return {part.target.id for part in parts if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}


def is_built_from(path: Path, own: set[Path]) -> bool:
    """Return whether a class of a file has a class of other files as base or as the type of a field."""
    classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    parts = [part.annotation for node in classes for part in node.body if isinstance(part, ast.AnnAssign)]
    named = [class_named(path, node) for node in (*parts, *(base for node in classes for base in node.bases))]
    return any(each is not None and each[0] in own for each in named)


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
    counts = sorted(sum(name not in PLANNER for name in names) for names in knobs.values())
    yield "  the same without the planner's files", [counts[0], counts[len(counts) // 2], counts[-1]], None
    new = [name_of(path) for path in files() if words_of(path) & set(NEW_INPUT)]
    yield "files that know an estimator with an input of its own", len(new), new


TRACED = """
import json, sys
from contextlib import contextmanager
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
@contextmanager
def phase_of(self, name):
    phase.append(name)
    try:
        with timed(self, name):
            yield
    finally:
        phase.pop()
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
