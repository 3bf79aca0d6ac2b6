"""Merge and move the files of the package by a map. Read /tmp/move/README.txt first.

    python /tmp/move/move.py [--root DIR] [--map FILE] [--edits FILE] [--check] [--skip PREFIX ...]

Run it in the root of a clean checkout. It edits the working tree and commits nothing.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import shutil
import subprocess
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PKG = "verl_memopt"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TEXTS = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cfg", ".ini", ".txt", ""}
NO_TEXT = ("docs/record/", "docs/evidence/", "docs/images/", "CHANGELOG.md", "requirements")
LIGHT = (f"{PKG}", f"{PKG}.cli", f"{PKG}.config", f"{PKG}.config.schema", f"{PKG}.config.loader", f"{PKG}.rewards.process", f"{PKG}.trainer.run",
         f"{PKG}.workers.guardian", f"{PKG}.workers.ray_group", f"{PKG}.errors", f"{PKG}.knobs.index", f"{PKG}.trainer.main_ppo")
HEAVY = ("torch", "ray", "vllm", "transformers", "pyarrow", "matplotlib", "numpy", "hydra", "omegaconf", "tensordict", "rich", "psutil")

REPORT: dict[str, list[str]] = defaultdict(list)


def say(kind, text):
    if text not in REPORT[kind]:
        REPORT[kind].append(text)


# ---------------------------------------------------------------------------------------------------------------- scopes


@dataclass(eq=False)
class Scope:
    kind: str
    parent: Scope | None
    bound: set = field(default_factory=set)
    globals: set = field(default_factory=set)
    nonlocals: set = field(default_factory=set)

    def resolve(self, name):
        scope, first = self, True
        while scope is not None:
            if scope.kind != "class" or first:
                if name in scope.globals:
                    return scope.module()
                if name in scope.bound and name not in scope.nonlocals:
                    return scope
            scope, first = scope.parent, False
        return None

    def module(self):
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def between(self, owner):
        """Scopes from this one up to the owner, without the owner, as far as lookups pass through them."""
        scope, first = self, True
        while scope is not None and scope is not owner:
            if scope.kind != "class" or first:
                yield scope
            scope, first = scope.parent, False


class Analysis(ast.NodeVisitor):
    """Every name of a file with the scope it is used in."""

    def __init__(self, tree):
        self.top = Scope("module", None)
        self.scope = self.top
        self.names = []  # (node, id, scope)
        self.defs = []  # (node, name, scope)
        self.aliases = []  # (statement, alias, local name, scope, depth in functions)
        self.declared = []  # Global and Nonlocal
        self.parents = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.visit(tree)

    def bind(self, name):
        self.scope.bound.add(name)

    def visit_Name(self, node):
        if isinstance(node.ctx, (ast.Store, ast.Del)):
            self.bind(node.id)
        self.names.append((node, node.id, self.scope))

    def visit_Global(self, node):
        self.scope.globals |= set(node.names)
        self.declared.append((node, self.scope))

    def visit_Nonlocal(self, node):
        self.scope.nonlocals |= set(node.names)

    def visit_Import(self, node):
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            if local != "*":
                self.bind(local)
            self.aliases.append((node, alias, local, self.scope))

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, node):
        if node.name:
            self.bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node):
        if node.name:
            self.bind(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_NamedExpr(self, node):
        self.visit(node.value)
        scope = self.scope
        while scope.kind == "comp":
            scope = scope.parent
        scope.bound.add(node.target.id)
        self.names.append((node.target, node.target.id, self.scope))

    def arguments(self, args):
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if arg is not None:
                self.bind(arg.arg)

    def function(self, node):
        args = node.args
        for each in [*getattr(node, "decorator_list", []), *args.defaults, *filter(None, args.kw_defaults)]:
            self.visit(each)
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if arg is not None and arg.annotation:
                self.visit(arg.annotation)
        if getattr(node, "returns", None):
            self.visit(node.returns)
        outer, self.scope = self.scope, Scope("function", self.scope)
        self.arguments(args)
        for each in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(each)
        self.scope = outer

    def visit_FunctionDef(self, node):
        self.bind(node.name)
        self.defs.append((node, node.name, self.scope))
        self.function(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node):
        self.function(node)

    def visit_ClassDef(self, node):
        self.bind(node.name)
        self.defs.append((node, node.name, self.scope))
        for each in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(each)
        outer, self.scope = self.scope, Scope("class", self.scope)
        for each in node.body:
            self.visit(each)
        self.scope = outer

    def comprehension(self, node):
        self.visit(node.generators[0].iter)
        outer, self.scope = self.scope, Scope("comp", self.scope)
        for index, part in enumerate(node.generators):
            self.visit(part.target)
            if index:
                self.visit(part.iter)
            for test in part.ifs:
                self.visit(test)
        for name in ("key", "value", "elt"):
            if hasattr(node, name):
                self.visit(getattr(node, name))
        self.scope = outer

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension


# ----------------------------------------------------------------------------------------------------------------- files


class Source:
    """A Python file as it is before the move."""

    def __init__(self, root, path):
        self.path = path  # relative to the root
        self.text = (root / path).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.an = Analysis(self.tree)
        self.module = dotted(path)
        self.is_package = path.name == "__init__.py"

    def at(self, line, col):
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return self.starts[line - 1] + len(text.encode()[:col].decode())

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def has_line_to_itself(self, node):
        start, end = self.span(node)
        line_start = self.starts[node.lineno - 1]
        line_end = self.starts[node.end_lineno]
        rest = self.text[end:line_end].strip()
        return not self.text[line_start:start].strip() and (not rest or rest.startswith("#"))

    @property
    def doc(self):
        first = self.tree.body[0] if self.tree.body else None
        return first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str) else None

    def definitions(self):
        """Names that the module defines itself, without imports."""
        if not hasattr(self, "_definitions"):
            self._definitions = self._find_definitions()
        return self._definitions

    def _find_definitions(self):
        found = {}
        for node, name, scope in self.an.defs:
            if scope is self.an.top:
                found.setdefault(name, node)
        for node, name, scope in self.an.names:
            if isinstance(node.ctx, ast.Store) and scope.resolve(name) is self.an.top:
                found.setdefault(name, node)
        return found

    def imports(self):
        """Local name -> (statement, alias) of imports at the module's level, nested in if or try included."""
        if not hasattr(self, "_imports"):
            self._imports = {local: (node, alias) for node, alias, local, scope in self.an.aliases if scope is self.an.top}
        return self._imports


def dotted(path):
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


# ------------------------------------------------------------------------------------------------------------------- map


class Map:
    """The lines of the map: targets, TOOLS, DELETE, DOC, RENAME, PACKAGE, DATA, DROP."""

    def __init__(self, file, skip):
        self.targets, self.delete, self.docs, self.renames = {}, [], {}, {}
        self.packages, self.data, self.titles = {}, {}, {}
        for number, raw in enumerate(file.read_text().splitlines(), 1):
            line = raw.split("#")[0].strip()
            if not line:
                continue
            head, _, rest = line.partition(":")
            words = head.split()
            if head == "DELETE":
                self.delete += [f"{name}.py" if not name.endswith(".py") else name for name in rest.split()]
            elif words[0] == "DOC":
                self.docs[words[1]] = raw.split(":", 1)[1].strip()
            elif words[0] == "TITLE":
                self.titles[words[1]] = raw.split(":", 1)[1].strip()
            elif words[0] == "RENAME":
                module, *pairs = line.split()[1:]
                for pair in pairs:
                    old, new = pair.split("=")
                    self.renames[module, old] = new
            elif words[0] == "PACKAGE":
                self.packages[words[1]] = rest.strip()
            elif words[0] == "DATA":
                self.data[words[1]] = rest.strip()
            elif not head.endswith(".py"):
                sys.exit(f"{file}:{number}: what is this? {raw}")
            elif not any(head.startswith(prefix) for prefix in skip):
                assert head not in self.targets, f"{file}:{number}: {head} a second time"
                self.targets[head] = [f"{name}.py" for name in rest.split()]


# ------------------------------------------------------------------------------------------------------------------ move


class Move:
    def __init__(self, root, table):
        self.root, self.table = root, table
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True)
        self.files = [Path(name) for name in listed.stdout.splitlines() if (root / name).is_file() and not (root / name).is_symlink()]
        self.sources = {}  # module -> Source, of all Python files
        for path in self.files:
            if path.suffix == ".py":
                try:
                    source = Source(root, path)
                except SyntaxError as error:
                    say("not parsed", f"{path}: {error}")
                    continue
                self.sources[source.module] = source
        self.package = {name: source for name, source in self.sources.items() if source.path.parts[0] == PKG}
        self.by_path = {source.path: source for source in self.package.values()}
        self.place_targets()
        self.path_of = {dotted(path): path for path in self.targets}
        self.name_everything()

    # -- which module goes where

    def target_path(self, name):
        return Path(name[1:]) if name.startswith("/") else Path(PKG, name)

    def place_targets(self):
        self.targets = {}  # Path -> [Source]
        self.new = {}  # old module -> new module
        by_path = {source.path: source for source in self.package.values()}
        for name in self.table.delete:
            path = Path(PKG, name)
            if path in by_path:
                source = by_path.pop(path)
                self.new[source.module] = None
            else:
                say("in the map, but gone", f"DELETE {name}")
        for name, parts in self.table.targets.items():
            found = []
            for part in parts:
                source = by_path.pop(Path(PKG, part), None)
                if source is None:
                    say("in the map, but gone", f"{name}: {part}")
                else:
                    found.append(source)
            if found:
                self.targets[self.target_path(name)] = found
        for path, source in list(by_path.items()):
            if source.is_package:
                continue
            by_path.pop(path)
            if path in self.targets:
                say("FAULT", f"{path} is left in place, but it is also a target; name it in the map")
                self.targets[path].append(source)
            else:
                self.targets[path] = [source]
                say("not in the map, left in place", str(path.relative_to(PKG)))
        # Packages: what remains of an __init__.py depends on whether its folder still has files.
        alive = {parent for path in self.targets for parent in path.parents}
        self.facades = {}
        for path, source in by_path.items():
            if path.parent in alive or path.parent == Path(PKG):
                assert path not in self.targets
                if dotted(path) in {dotted(other) for other in self.targets}:
                    say("FAULT", f"{path} and a module have one name")
                self.targets[path] = [source]
            else:
                self.facades[source.module] = source
        for path, sources in self.targets.items():
            for source in sources:
                self.new[source.module] = dotted(path)
        for name, source in self.facades.items():
            self.new[name] = None
            own = [each for each in source.definitions() if each != "__all__"]
            if own:
                say("FAULT", f"{source.path} vanishes but defines {', '.join(own)}; name it in the map")

    def target_of(self, module):
        return self.new.get(module)

    # -- what a name stands for

    def origin(self, module, name, depth=0):
        """What `from module import name` gives: ("module", module) or ("name", module, name)."""
        sub = f"{module}.{name}"
        source = self.sources.get(module)
        if source is None:
            return ("module", sub) if sub in self.sources else ("name", module, name)
        if name in source.definitions():
            return ("name", module, name)
        if name in source.imports() and depth < 20:
            node, alias = source.imports()[name]
            inner = self.absolute(source, node)
            if inner and inner.split(".")[0] == PKG and isinstance(node, ast.ImportFrom):
                return self.origin(inner, alias.name, depth + 1)
            if isinstance(node, ast.ImportFrom):
                return ("outside", inner, alias.name)
            return ("outside module", alias.name)
        if sub in self.sources:
            return ("module", sub)
        return ("name", module, name)

    def reexports(self, module):
        """A module that offers the names of others on purpose, and stays."""
        source = self.sources.get(module)
        return source is not None and "__all__" in source.definitions() and self.new.get(module, module) is not None

    def absolute(self, source, node):
        if isinstance(node, ast.Import):
            return None
        if not node.level:
            return node.module
        base = source.module.split(".")
        base = base[: len(base) - node.level + (1 if source.is_package else 0)]
        return ".".join([*base, *([node.module] if node.module else [])])

    # -- the names of definitions after the merge

    def name_everything(self):
        self.final = {}  # (module, name) -> new name
        self.doubles = defaultdict(set)  # module -> names whose definition is dropped, for another source has the same
        for path, sources in self.targets.items():
            taken = {}
            for source in sources:
                base = source.path.stem if not source.is_package else source.path.parent.name
                short = str(source.path.relative_to(PKG).with_suffix("")) if source.path.parts[0] == PKG else str(source.path)
                for name, node in source.definitions().items():
                    wanted = self.table.renames.get((short, name))
                    if wanted:
                        say("renamed by the map", f"{short}: {name} -> {wanted}")
                    new = wanted or name
                    if new in taken and new != "__all__":
                        other, other_node = taken[new]
                        if self.same(source, node, other, other_node):
                            self.doubles[source.module].add(name)
                            say("the same in both, kept once", f"{path}: {new} of {short} and {other.path.stem}")
                            self.final[source.module, name] = new
                            continue
                        new = self.suffixed(name, base)
                        for more in sources:
                            assert new not in more.definitions(), f"{path}: {new}"
                        kind = "renamed, private" if name.startswith("_") else "renamed, PUBLIC (choose a name: RENAME in the map)"
                        say(kind, f"{path}: {name} of {short} -> {new} (as {other.path.stem} has it too)")
                    taken[new] = (source, node)
                    self.final[source.module, name] = new
                    if hasattr(builtins, new):
                        for more in sources:
                            if more is not source and any(i == new and s.resolve(i) is None for _, i, s in more.an.names):
                                say("FAULT", f"{path}: {new} of {short} hides a builtin that {more.path.stem} uses")

    @staticmethod
    def suffixed(name, base):
        base = base.lstrip("_")
        if name.lstrip("_").isupper():
            return f"{name}_{base.upper()}"
        if name.lstrip("_")[:1].isupper():
            camel = "".join(part.capitalize() for part in base.split("_"))
            return f"_{camel}{name[1:]}" if name.startswith("_") else f"{camel}{name}"
        return f"{name}_{base}"

    @staticmethod
    def same(one, one_node, two, two_node):
        """Both are the same statement of plain values, or the same logger."""
        a, b = one.an.parents.get(one_node), two.an.parents.get(two_node)
        if not (isinstance(a, (ast.Assign, ast.AnnAssign)) and type(a) is type(b) and isinstance(one_node, ast.Name)):
            return False
        if isinstance(a, ast.Assign) and (len(a.targets) != 1 or a.targets[0] is not one_node):
            return False
        if ast.dump(a) != ast.dump(b):
            return False
        for each in ast.walk(a):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id in {*one.definitions(), *two.definitions()}:
                return False
        return True

    # -- dotted names and paths in texts

    def new_dotted(self, name):
        """`verl_memopt.a.b.Name` after the move; None where it is unknown."""
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            module = ".".join(parts[:size])
            if module not in self.package:
                if module in self.table_packages():
                    return ".".join([self.table_packages()[module], *parts[size:]])
                continue
            rest = parts[size:]
            target = self.new.get(module)
            if rest and (target is None or self.package[module].is_package):
                found = self.origin(module, rest[0])
                if found[0] == "name" and found[1] != module and not (target and self.reexports(module)):
                    owner, symbol = found[1:]
                    if self.new.get(owner):
                        return ".".join([self.new[owner], self.final.get((owner, symbol), symbol), *rest[1:]])
            if target is None:
                if module in self.table_packages():
                    return ".".join([self.table_packages()[module], *rest])
                return None
            if rest:
                rest[0] = self.final.get((module, rest[0]), rest[0])
            return ".".join([target, *rest])
        return name

    def table_packages(self):
        return {f"{PKG}.{old.replace('/', '.')}": f"{PKG}.{new.replace('/', '.')}" if not new.startswith("/") else new[1:].replace("/", ".")
                for old, new in self.table.packages.items()}

    def rewrite_text(self, text, where):
        def names(match):
            old = match.group()
            new = self.new_dotted(old)
            if new is None:
                if not (self.root / Path(*old.split("."))).is_file():
                    say("a name in a text that no file has any more (edit by hand)", f"{where}: {old}")
                return old
            return new

        def paths(match):
            whole, prefix, rel = match.group(), match.group(1) or "", match.group(2)
            path = Path(PKG, rel)
            source = self.by_path.get(path)
            if source is None:
                return whole
            target = self.new.get(source.module)
            if target is None:
                say("a path in a text that goes (edit by hand)", f"{where}: {whole}")
                return whole
            new = self.path_of[target]
            if new.parts[0] != PKG:
                return str(new)
            return prefix + str(new.relative_to(PKG))

        def folders(match):
            old = match.group(1).rstrip("/")
            folder = self.root / PKG / old
            new = self.table.packages.get(old)
            if folder.is_dir() and new:
                return f"{PKG}/{new}/" if not new.startswith("/") else f"{new[1:]}/"
            if folder.is_dir() and (Path(PKG, old) not in self.alive()):
                say("a folder in a text that goes (PACKAGE in the map, or by hand)", f"{where}: {match.group()}")
            return match.group()

        text = re.sub(rf"\b{PKG}(?:\.[A-Za-z_]\w*)+", names, text)
        text = re.sub(rf"(?<![\w/.-])((?:\.\./)*{PKG}/)?((?:\w+/)*\w+\.py)\b", paths, text) if not where.startswith("benchmarks/peers") else text
        return re.sub(rf"(?<![\w.-]){PKG}/((?:\w+/)+)(?!\w)", folders, text)

    def alive(self):
        return {parent for path in self.targets for parent in path.parents}

    # -- rewriting a file

    def plan(self, source, target, siblings):
        """Edits of one file.

        Args:
            source: the file.
            target: dotted name of the module that it becomes a part of.
            siblings: all sources of that module.

        Returns:
            Edits (start, end, text), and for merged files the imports to put at the head.
        """
        an, edits = source.an, []
        merged = len(siblings) > 1
        local_new = {}  # (scope, local name) -> new name, for names
        attr_of = {}  # (scope, local name) -> (old module, new local or None when it is this very module)
        statements = {}  # import statement -> list of (module, name, asname) | None: left as it is
        inside = source.path.parts[0] == PKG
        moved = {module for module in self.new}

        # Definitions that are renamed.
        for name in source.definitions():
            new = self.final.get((source.module, name), name)
            if new != name:
                local_new[an.top, name] = new

        def other_names(scope):
            return scope.bound

        uses = defaultdict(list)
        for node, name, scope in an.names:
            owner = scope.resolve(name)
            uses[owner, name].append((node, scope))

        def captured(owner, local, new):
            """Is the new name hidden by an inner scope at some use of the old one?"""
            for _, scope in uses[owner, local]:
                if any(new in each.bound for each in scope.between(owner)):
                    return True
            return False

        for node, alias, local, scope in an.aliases:
            if isinstance(node, ast.Import):
                if alias.name.split(".")[0] == PKG and len(alias.name.split(".")) > 1:
                    new = self.new_dotted(alias.name)
                    if new is None:
                        say("FAULT", f"{source.path}:{node.lineno}: import {alias.name}: goes, edit by hand")
                        new = alias.name
                    statements.setdefault(node, []).append((None, new, alias.asname))
                    if alias.asname and alias.name in self.new:
                        attr_of[scope, local] = (alias.name, local)
                else:
                    statements.setdefault(node, []).append((None, alias.name, alias.asname))
                continue
            module = self.absolute(source, node)
            if not module or module.split(".")[0] != PKG or (module not in self.sources and module not in moved):
                statements.setdefault(node, []).append(("." * node.level + (node.module or ""), alias.name, alias.asname))
                continue
            if alias.name == "*":
                say("FAULT", f"{source.path}:{node.lineno}: import *")
            found = self.origin(module, alias.name)
            if found[0] == "module":
                old = found[1]
                new = self.new.get(old, old)
                if new is None:
                    say("FAULT", f"{source.path}:{node.lineno}: imports {old}, which goes")
                    new = old
                if new == target and inside:
                    attr_of[scope, local] = (old, None)
                    statements.setdefault(node, [])
                    continue
                package, base = new.rpartition(".")[::2]
                wanted = local if alias.asname else base
                if not alias.asname and wanted != local:
                    hidden = any(wanted in s.bound for _, s in uses[scope, local] for s in s.between(scope))
                    if hidden or (wanted in scope.bound and not self.is_same_module(source, scope, wanted, new)) or self.clashes(siblings, wanted, new, source):
                        wanted = local
                        say("module kept under its old name (as)", f"{source.path}: {package}.{base} as {local}")
                attr_of[scope, local] = (old, wanted)
                if wanted != local:
                    local_new[scope, local] = wanted
                statements.setdefault(node, []).append((package, base, wanted if wanted != base else None))
            else:
                if found[0] == "name":
                    owner, symbol = found[1:]
                    if self.reexports(module) and owner != module and self.new[module] != target:
                        owner_new, final = self.new[module], self.final.get((owner, symbol), symbol)
                        if self.new.get(owner) == target and inside:
                            owner_new = target
                    else:
                        owner_new, final = self.new.get(owner, owner), self.final.get((owner, symbol), symbol)
                    if owner_new is None:
                        say("FAULT", f"{source.path}:{node.lineno}: imports {owner}.{symbol}, which goes")
                        owner_new = owner
                else:  # a name that the other file imports from outside
                    owner_new, final = found[1], found[-1]
                    say("imported through another file, now from its origin", f"{source.path}: {local} from {owner_new}")
                if owner_new == target and inside:
                    statements.setdefault(node, [])
                    if local != final:
                        if captured(scope, local, final):
                            say("FAULT", f"{source.path}: {local} becomes {final}, which a local name hides")
                        local_new[scope, local] = final
                    elif captured(scope, local, final):
                        say("FAULT", f"{source.path}: {final} hidden")
                    continue
                asname = alias.asname
                if not asname and final != local:
                    if captured(scope, local, final) or final in scope.bound:
                        asname = local
                    else:
                        local_new[scope, local] = final
                statements.setdefault(node, []).append((owner_new, final, asname if asname != final else None))

        # Names at the module's level that another source of the same file has for something else.
        if merged:
            for node, entries in list(statements.items()):
                if self.scope_of(an, node) is not an.top:
                    continue
                for index, (module, name, asname) in enumerate(entries):
                    local = asname or (name if module is not None else name.split(".")[0])
                    identity = (module, name if module is not None or asname else name.split(".")[0])
                    known = self.bindings[target].setdefault(local, (identity, source))
                    defined = any(self.final.get((s.module, d), d) == local for s in siblings for d in s.definitions())
                    if known[0] == identity and not defined:
                        continue
                    base = source.path.stem
                    short = str(source.path.relative_to(PKG).with_suffix("")) if inside else ""
                    new = self.table.renames.get((short, local), f"{local}_{base}")
                    say("import renamed (as)", f"{target}: {local} of {base} -> {new}")
                    entries[index] = (module, name, new)
                    old_local = next(l for n, a, l, s in an.aliases if n is node and a.name.split(".")[-1] in (name, a.name) and (l == local or local_new.get((s, l)) == local))
                    local_new[an.top, old_local] = new
                    if (an.top, old_local) in attr_of:
                        attr_of[an.top, old_local] = (attr_of[an.top, old_local][0], new)

        # Uses.
        fstrings = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.JoinedStr):
                outer, parent = node, an.parents.get(node)
                while parent is not None:
                    if isinstance(parent, ast.JoinedStr):
                        outer = parent
                    parent = an.parents.get(parent)
                for each in ast.walk(node):
                    fstrings[each] = outer
        in_fstrings = defaultdict(dict)
        imports = {node: source.span(node) for node in statements}
        for (owner, name), places in uses.items():
            key = (owner, name)
            if key not in local_new and key not in attr_of:
                continue
            for node, scope in places:
                parent = an.parents.get(node)
                if key in attr_of and isinstance(parent, ast.Attribute) and parent.value is node:
                    old, local = attr_of[key]
                    attr = self.final.get((old, parent.attr), parent.attr)
                    if parent.attr not in self.sources[old].definitions():
                        found = self.origin(old, parent.attr)
                        if found[0] == "name" and found[1] != old and self.new.get(found[1]) == self.new.get(old):
                            attr = self.final.get((found[1], found[2]), attr)
                    new = attr if local is None else f"{local}.{attr}"
                    if local is None and any(attr in s.bound for s in scope.between(an.top)):
                        say("FAULT", f"{source.path}:{node.lineno}: {name}.{parent.attr} becomes {attr}, which a local name hides")
                    old_text, edit = f"{name}.{parent.attr}", parent
                else:
                    if key in attr_of and attr_of[key][1] is None:
                        say("FAULT", f"{source.path}:{node.lineno}: the module {name} itself is used, and is now this file")
                    new = local_new.get(key, name)
                    if any(new in s.bound for s in scope.between(owner)) and new != name:
                        say("FAULT", f"{source.path}:{node.lineno}: {name} becomes {new}, which a local name hides")
                    old_text, edit = name, node
                if new == old_text:
                    continue
                if node in fstrings:
                    in_fstrings[fstrings[node]][old_text] = new
                    continue
                start, end = source.span(edit)
                have = source.text[start:end]
                if have != old_text:
                    if "".join(have.split()) != old_text:
                        say("FAULT", f"{source.path}:{node.lineno}: found {have!r}, not {old_text!r}")
                edits.append((start, end, new))
        for node, name, scope in an.defs:
            if (scope, name) in local_new:
                start = source.span(node)[0]
                match = re.compile(rf"\b{name}\b").search(source.text, start)
                edits.append((match.start(), match.end(), local_new[scope, name]))
        for node, scope in an.declared:
            start, end = source.span(node)
            text = source.text[start:end]
            for name in node.names:
                if (an.top, name) in local_new:
                    text = re.sub(rf"\b{name}\b", local_new[an.top, name], text)
            if text != source.text[start:end]:
                edits.append((start, end, text))
        # setattr(module, "name", ...) and the like.
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[0], ast.Name) and isinstance(node.args[1], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                scope = next((s for n, i, s in an.names if n is node.args[0]), an.top)
                key = (scope.resolve(node.args[0].id), node.args[0].id)
                if called in ("setattr", "delattr", "getattr", "hasattr", "object") and key in attr_of:
                    old, name = attr_of[key][0], node.args[1].value
                    final = self.final.get((old, name), name)
                    if final != name:
                        start, end = source.span(node.args[1])
                        edits.append((start, end, f'"{final}"'))
                        say("renamed in setattr or patch", f"{source.path}:{node.lineno}: {name} -> {final}")
                    if name not in self.sources[old].definitions():
                        say("patched names that the file imports (look at these)", f"{source.path}:{node.lineno}: {old}.{name}")
        # __all__ of a file
        for name, node in source.definitions().items():
            if name == "__all__":
                for each in ast.walk(an.parents[node]):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        new = local_new.get((an.top, each.value))
                        if new:
                            start, end = source.span(each)
                            edits.append((start, end, f'"{new}"'))
        # Names in quoted annotations, casts and the like.
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in fstrings and self.is_annotation(an, node):
                text = node.value
                for (scope, name), new in local_new.items():
                    if scope is an.top:
                        text = re.sub(rf"(?<![\w.]){name}\b", new, text)
                if text != node.value:
                    start, end = source.span(node)
                    edits.append((start, end, repr(text)))
        for outer, pairs in in_fstrings.items():
            start, end = source.span(outer)
            edits.append((start, end, replace_in_braces(source.text[start:end], pairs)))
        # Comments and docstrings naming what is renamed: `name` in double backquotes or as a role.
        for (scope, name), new in local_new.items():
            if scope is an.top and len(name) > 3:
                for match in re.finditer(rf"(``|:\w+:`~?){name}(`|\()", source.text):
                    start = match.start() + len(match.group(1))
                    edits.append((start, start + len(name), new))
        return edits, statements, imports

    def scope_of(self, an, statement):
        return next(scope for node, _, _, scope in an.aliases if node is statement)

    def is_same_module(self, source, scope, local, new):
        """Is the local name an import of the same new module?"""
        for node, alias, name, where in source.an.aliases:
            if where is scope and name == local and isinstance(node, ast.ImportFrom):
                found = self.origin(self.absolute(source, node), alias.name)
                return found[0] == "module" and self.new.get(found[1], found[1]) == new
        return False

    def clashes(self, siblings, name, new, source):
        return any(self.final.get((s.module, d), d) == name for s in siblings for d in s.definitions()) or any(
            name in s.imports() and s is not source and not self.is_same_module(s, s.an.top, name, new) for s in siblings
        )

    @staticmethod
    def is_annotation(an, node):
        child, parent = node, an.parents.get(node)
        while parent is not None and not isinstance(parent, ast.stmt):
            if isinstance(parent, ast.arg):
                return True
            if isinstance(parent, ast.Call):
                return getattr(parent.func, "id", "") in ("cast", "TypeVar") and parent.args and (child is parent.args[0] or getattr(parent.func, "id", "") == "TypeVar")
            child, parent = parent, an.parents.get(parent)
        if isinstance(parent, ast.AnnAssign):
            return child is parent.annotation
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return child is parent.returns
        return False

    def import_text(self, entries, indent=""):
        lines, by_module = [], {}
        for module, name, asname in entries:
            part = f"{name} as {asname}" if asname else name
            if module is None:
                lines.append(f"import {part}")
            else:
                by_module.setdefault(module, [])
                if part not in by_module[module]:
                    by_module[module].append(part)
        for module, parts in by_module.items():
            line = f"from {module} import {', '.join(parts)}"
            if len(indent + line) > 130:
                line = f"from {module} import (\n" + "".join(f"{indent}    {part},\n" for part in parts) + f"{indent})"
            lines.append(line)
        return f"\n{indent}".join(lines)

    def in_place(self, source, statements, unchanged_ok=True):
        """Edits of import statements that stay where they are."""
        edits = []
        for node, entries in statements.items():
            start, end = source.span(node)
            if self.same_import(node, entries):
                continue
            if entries:
                indent = " " * node.col_offset
                edits.append((start, end, self.import_text(entries, indent)))
                continue
            parent = source.an.parents[node]
            block = next(b for name in ("body", "orelse", "finalbody", "handlers") for b in [getattr(parent, name, [])] if isinstance(b, list) and node in b)
            left = [each for each in block if not (each in statements and not statements[each])]
            if left or isinstance(parent, ast.Module):
                line = source.starts[node.lineno - 1]
                after = source.starts[node.end_lineno]
                edits.append((line, after, ""))
            elif node is block[0]:
                edits.append((start, end, "pass"))
                say("a block that has nothing left but pass", f"{source.path}:{node.lineno}")
        return edits

    @staticmethod
    def same_import(node, entries):
        if len(entries) != len(node.names):
            return False
        module = None if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
        return [(module, a.name, a.asname) for a in node.names] == entries

    def finish(self, source, edits, spans):
        """Apply the edits; what lies between them is rewritten as text."""
        done, pos, where = [], 0, str(source.path)
        clean = []
        for start, end, new in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
            if clean and start < clean[-1][1]:
                if (start, end, new) != clean[-1] and not (start >= clean[-1][0] and end <= clean[-1][1] and clean[-1][2] == ""):
                    say("FAULT", f"{source.path}: two edits at {source.text[start:end]!r} {new!r} in {clean[-1]}")
                continue
            clean.append((start, end, new))
        for start, end, new in clean:
            done.append(self.text_between(source, pos, start, spans, where))
            done.append(new)
            pos = end
        done.append(self.text_between(source, pos, len(source.text), spans, where))
        return "".join(done)

    def text_between(self, source, start, end, spans, where):
        out, pos = [], start
        for a, b in sorted(spans):
            if b <= start or a >= end:
                continue
            a, b = max(a, start), min(b, end)
            out.append(self.rewrite_code(source, source.text[pos:a], where))
            out.append(source.text[a:b])
            pos = b
        out.append(self.rewrite_code(source, source.text[pos:end], where))
        return "".join(out)

    def rewrite_code(self, source, text, where):
        """As rewrite_text, and dotted names that an f-string begins with a constant of the file: f"{_HERE}.losses.sapo"."""
        if not hasattr(source, "constants"):
            source.constants = {}
            for node in source.tree.body:
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    value = ast.unparse(node.value)
                    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) and node.value.value.split(".")[0] == PKG:
                        source.constants[node.targets[0].id] = node.value.value
                    elif re.fullmatch(r"__name__\.r(partition|split)\('\.'(, 1|, maxsplit=1)?\)\[0\]", value):
                        source.constants[node.targets[0].id] = source.module.rpartition(".")[0]
                    elif value in ("__package__",):
                        source.constants[node.targets[0].id] = source.module.rpartition(".")[0]

        def whole(match):
            constant = source.constants.get(match.group(1))
            if constant is None:
                return match.group()
            new, base = self.new_dotted(constant + match.group(2)), self.new_dotted(constant) or constant
            if new is None:
                say("FAULT", f"{where}: {match.group()} has no new name")
                return match.group()
            if new.startswith(base + "."):
                return "{" + match.group(1) + "}" + new[len(base):]
            return new

        return self.rewrite_text(re.sub(r"\{(\w+)\}((?:\.[A-Za-z_]\w*)+)", whole, text) if source.constants else text, where)

    # -- writing targets

    def build_alone(self, source, target):
        edits, statements, spans = self.plan(source, target, [source])
        edits += self.in_place(source, statements)
        return self.finish(source, edits, spans.values())

    def build_merged(self, path, sources):
        target = dotted(path)
        self.bindings[target] = {}
        order = self.order(path, sources)
        self.settle_doubles(order)
        heads, checking, sections, mains, future = [], [], {}, [], False
        checked_comments = {}
        lead = sources[0]
        for source in sources:
            edits, statements, spans = self.plan(source, target, sources)
            handled = set()
            body = list(source.tree.body)
            if source.doc is not None:
                body.pop(0)
                start, end = source.span(source.doc)
                edits.append((self.line_start(source, start), self.line_end(source, end), ""))
            in_head, mark = True, source.span(source.doc)[1] if source.doc is not None else 0
            for node in body:
                if in_head and isinstance(node, (ast.Import, ast.ImportFrom)) and source.has_line_to_itself(node):
                    start, end = source.span(node)
                    line_end = self.line_end(source, end)
                    before = self.comments_before(source, node)
                    tail = source.text[end:line_end].strip()
                    handled.add(node)
                    edits.append((before[0], line_end, ""))
                    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                        future = True
                        continue
                    for entry in statements[node]:
                        heads.append((before[1], self.import_text([entry]), tail, entry))
                        before = (before[0], "")
                elif in_head and is_type_checking(node) and all(isinstance(each, (ast.Import, ast.ImportFrom)) for each in node.body) and not node.orelse:
                    start, end = source.span(node)
                    edits.append((self.line_start(source, start), self.line_end(source, end), ""))
                    for each in node.body:
                        handled.add(each)
                        tail = source.text[source.span(each)[1] : self.line_end(source, source.span(each)[1])].strip()
                        for entry in statements[each]:
                            checking.append((self.import_text([entry]), tail, entry))
                elif isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
                    mains.append((source, node))
                    in_head = False
                elif isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
                    isinstance(t, ast.Name) and (t.id in self.doubles[source.module] or (t.id == "__all__" and source is not lead))
                    for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
                ):
                    start, end = source.span(node)
                    stop = self.line_end(source, end)
                    index = source.tree.body.index(node)
                    follower = source.tree.body[index + 1] if index + 1 < len(source.tree.body) else None
                    if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant) and isinstance(follower.value.value, str):
                        stop = self.line_end(source, source.span(follower)[1])
                    edits.append((self.comments_before(source, node)[0], stop, ""))
                    if "__all__" in ast.unparse(node):
                        say("__all__ dropped", str(source.path))
                    in_head = False
                else:
                    in_head = False
            edits += self.in_place(source, {node: entries for node, entries in statements.items() if node not in handled})
            text = self.finish(source, edits, spans.values())
            sections[source] = text
        # the __main__ blocks: at the end of the file
        tail = ""
        for source, node in mains:
            section = sections[source]
            match = re.search(r"^if __name__ == \"__main__\":\n(?:(?:[ \t]+.*)?\n)*", section, re.MULTILINE)
            assert match, source.path
            sections[source] = section[: match.start()] + section[match.end() :]
            tail += "\n\n" + match.group()
            if len(sources) > 1 and len(mains) > 1:
                say("FAULT", f"{path}: two programs: {[str(s.path) for s, _ in mains]}")
        doc = self.doc_text(lead)
        runtime = {(entry[2] or (entry[1] if entry[0] is not None else entry[1].split(".")[0])) for *_, entry in heads}
        out = [doc, "\n\n"]
        if future:
            out.append("from __future__ import annotations\n\n")
            if not all("from __future__ import annotations" in source.text for source in sources):
                say("annotations become lazy", f"{path}")
        seen = set()
        for comment, text, noqa, entry in heads:
            line = f"{text}  {noqa}" if noqa else text
            if line in seen and not comment:
                continue
            seen.add(line)
            out.append(f"{comment}{line}\n")
        kept = []
        for text, noqa, entry in checking:
            local = entry[2] or (entry[1] if entry[0] is not None else entry[1].split(".")[0])
            if local in runtime or text in kept:
                continue
            kept.append(text)
        if kept:
            if "TYPE_CHECKING" not in runtime:
                out.append("from typing import TYPE_CHECKING\n")
            out.append("\nif TYPE_CHECKING:\n" + "".join("    " + text.replace("\n", "\n    ") + "\n" for text in kept))
        for source in order:
            body = sections[source].strip("\n")
            if not body.strip():
                continue
            if source is not lead and source.doc is not None:
                out.append("\n\n" + self.section_comment(source) + "\n")
            out.append("\n\n" + body + "\n")
        out.append(tail)
        return "".join(out)

    def doc_text(self, lead):
        if lead.doc is None:
            return '"""TODO: a docstring."""'
        start, end = lead.span(lead.doc)
        return self.rewrite_text(lead.text[start:end], str(lead.path))

    def settle_doubles(self, order):
        """Of equal statements the first in the file stays."""
        names = {}
        for source in order:
            for name in list(source.definitions()):
                final = self.final.get((source.module, name))
                owners = [s for s in order if final in [self.final.get((s.module, d)) for d in s.definitions()]]
                if len(owners) > 1 and final != "__all__":
                    names[final] = owners
        for final, owners in names.items():
            for index, source in enumerate(owners):
                own = next(d for d in source.definitions() if self.final.get((source.module, d)) == final)
                (self.doubles[source.module].add if index else self.doubles[source.module].discard)(own)

    def section_comment(self, source):
        text = self.rewrite_text(ast.get_docstring(source.tree) or "", str(source.path))
        lines = []
        for paragraph in re.split(r"\n[ \t]*\n", text):
            if any(len(line) > 128 for line in paragraph.splitlines()):
                paragraph = textwrap.fill(" ".join(paragraph.split()), 128, break_long_words=False, break_on_hyphens=False)
            lines += [*(f"# {line}".rstrip() for line in paragraph.splitlines()), "#"]
        return "\n".join(lines[:-1])

    @staticmethod
    def line_start(source, pos):
        return source.text.rfind("\n", 0, pos) + 1

    @staticmethod
    def line_end(source, pos):
        end = source.text.find("\n", pos)
        return len(source.text) if end < 0 else end + 1

    def comments_before(self, source, node):
        """Start and text of the comment lines right above a statement."""
        row = node.lineno - 1
        while row and source.lines[row - 1].lstrip().startswith("#") and source.lines[row - 1].startswith("#"):
            row -= 1
        return source.starts[row], "".join(source.lines[row : node.lineno - 1])

    def order(self, path, sources):
        """The sources, so that what is needed at import time stands above."""
        needs = {source: self.needed_at_import(source, sources) for source in sources}
        left, out = list(sources), []
        while left:
            ready = next((s for s in left if not (needs[s] - set(out) - {s})), None)
            if ready is None:
                say("FAULT", f"{path}: no order of {[str(s.path) for s in left]}")
                ready = left[0]
            left.remove(ready)
            out.append(ready)
        if out != sources:
            say("order changed, as definitions are needed at import time", f"{path}: {', '.join(s.path.stem for s in out)}")
        return out

    def needed_at_import(self, source, sources):
        owners = {s.module: s for s in sources}
        found, seen = set(), set()
        graph = self.closures(source)
        todo = [(source.module, name) for name in graph[""]]
        while todo:
            module, name = todo.pop()
            if (module, name) in seen:
                continue
            seen.add((module, name))
            where = self.sources[module]
            if name in where.definitions():
                if module != source.module:
                    found.add(owners[module])
                todo += [(module, each) for each in self.closures(where).get(name, ())]
                continue
            first, _, rest = name.partition(".")
            if first in where.imports():
                node, alias = where.imports()[first]
                if isinstance(node, ast.ImportFrom):
                    inner = self.absolute(where, node)
                    if inner and inner.split(".")[0] == PKG:
                        origin = self.origin(inner, alias.name)
                        if origin[0] == "module" and rest:
                            origin = self.origin(origin[1], rest.split(".")[0])
                        if origin[0] == "name" and origin[1] in owners:
                            todo.append((origin[1], origin[2]))
        return found

    def closures(self, source):
        """Per global function the names in its body; under "" the names that the module's level itself uses."""
        if hasattr(source, "_closures"):
            return source._closures
        graph = defaultdict(set)
        lazy = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in source.tree.body)
        annotations = set()
        for node in ast.walk(source.tree):
            for each in ("annotation", "returns"):
                part = getattr(node, each, None)
                if isinstance(part, ast.AST) and lazy:
                    annotations |= set(ast.walk(part))
        for node, name, scope in source.an.names:
            if node in annotations or scope.resolve(name) is not source.an.top or isinstance(node.ctx, ast.Store):
                continue
            parent = source.an.parents.get(node)
            full = f"{name}.{parent.attr}" if isinstance(parent, ast.Attribute) and parent.value is node else name
            full = name if name in source.definitions() else full
            owner = self.outer_function(source, node)
            graph[owner].add(full)
        source._closures = graph
        return graph

    @staticmethod
    def outer_function(source, node):
        """Name of the module's function or class in whose body (a method's, say) a node is used when called; "" at import."""
        an, child, name = source.an, node, ""
        parent = an.parents.get(child)
        late = False
        while parent is not None:
            if isinstance(parent, FUNCTIONS) and child in (parent.body if isinstance(parent.body, list) else [parent.body]):
                late = True
            if isinstance(an.parents.get(parent), ast.Module) and late:
                name = getattr(parent, "name", "") if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else "(lambda)"
                if name == "(lambda)":
                    targets = getattr(parent, "targets", None) or [getattr(parent, "target", None)]
                    name = targets[0].id if isinstance(targets[0], ast.Name) else ""
            child, parent = parent, an.parents.get(parent)
        return name

    # -- everything

    def run(self):
        self.bindings = defaultdict(dict)
        written = {}
        for path, sources in self.targets.items():
            if len(sources) == 1:
                written[path] = self.build_alone(sources[0], dotted(path))
            else:
                written[path] = self.build_merged(path, sources)
        for source in self.sources.values():
            if source.path.parts[0] != PKG:
                text = self.build_alone(source, source.module)
                if text != source.text:
                    written[source.path] = text
        for path in self.files:
            name = str(path)
            if path.suffix == ".py" or path.suffix not in TEXTS or name.startswith(NO_TEXT) or path.name == "LICENSE":
                continue
            try:
                text = (self.root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            new = self.rewrite_text(text, name)
            if name == "pyproject.toml":
                new = without_doubles(new)
            if name.endswith("survivors.toml"):
                new = self.survivors(text, new)
            if new != text:
                written[path] = new
        before = self.graph({source.path: source.text for source in self.package.values()})
        for source in self.package.values():
            (self.root / source.path).unlink()
        for path, text in written.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text, encoding="utf-8")
        for old, new in self.table.data.items():
            if (self.root / PKG / old).exists():
                (self.root / PKG / new).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.root / PKG / old, self.root / PKG / new)
                self.replace_everywhere(f"{PKG}/{old}", f"{PKG}/{new}")
                self.replace_everywhere(f'"{old}"', f'"{new}"')
            else:
                say("in the map, but gone", f"DATA {old}")
        self.packages_of_targets()
        for folder in sorted((self.root / PKG).rglob("*"), reverse=True):
            if folder.is_dir() and folder.name != "__pycache__":
                left = [each for each in folder.iterdir() if each.name != "__pycache__"]
                if not left:
                    shutil.rmtree(folder)
        return before

    def replace_everywhere(self, old, new):
        for path in self.files:
            file = self.root / path
            if file.is_file() and path.suffix in TEXTS and not str(path).startswith(NO_TEXT):
                try:
                    text = file.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue
                if old in text:
                    file.write_text(text.replace(old, new), encoding="utf-8")

    def packages_of_targets(self):
        for path in list(self.targets):
            for folder in path.parents:
                if folder.parts and folder.parts[0] == PKG and not (self.root / folder / "__init__.py").exists():
                    name = str(folder.relative_to(PKG))
                    doc = self.table.docs.get(name)
                    if doc is None:
                        say("FAULT", f"DOC {name}: the docstring of the new package is not in the map")
                        doc = "TODO."
                    (self.root / folder / "__init__.py").write_text(f'"""{doc}"""\n')

    def survivors(self, old, new):
        """The list of surviving mutants: one entry a file in each reason; renamed functions under their new names."""
        renames = {}
        for (module, name), final in self.final.items():
            if final != name and module in self.package:
                renames[self.package[module].path.as_posix(), name] = final
        out = []
        for group in re.split(r"(?=^\[\[reason\]\])", old, flags=re.MULTILINE):
            entries = {}
            head = group
            for match in re.finditer(r'^mutants\."([^"]+)" = \[\n((?:    .*\n)*?)\]\n', group, re.MULTILINE):
                path, lines = match.groups()
                head = head.replace(match.group(), "")
                for (where, name), final in renames.items():
                    if where == path:
                        lines = re.sub(rf'(?<![\w."]){name}\b', final, lines)
                        lines = re.sub(rf'^(    "){name}(?=[.:])', rf"\g<1>{final}", lines, flags=re.MULTILINE)
                entries.setdefault(self.rewrite_text(path, "tests/mutants/survivors.toml"), []).append(lines)
            body = "".join(f'mutants."{path}" = [\n{"".join(lines)}]\n' for path, lines in entries.items())
            out.append(head.rstrip("\n") + "\n" + body + "\n" if entries else group)
        return "".join(out).rstrip("\n") + "\n"

    # -- graphs

    def graph(self, texts):
        return import_graph({path: ast.parse(text) for path, text in texts.items() if path.parts[0] == PKG and path.suffix == ".py"})


def replace_in_braces(text, pairs):
    """Replace names in the expressions of f-strings."""
    out, depth, piece = [], 0, ""
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(old)}\b(?!\s*=[^=])" for old in sorted(pairs, key=len, reverse=True)))
    index = 0
    while index < len(text):
        char = text[index]
        if char == "{" and text[index : index + 2] == "{{" and depth == 0:
            out.append("{{")
            index += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}" and depth:
            depth -= 1
            if depth == 0:
                out.append(pattern.sub(lambda m: pairs[m.group()], piece))
                piece = ""
        if depth:
            piece += char
        else:
            out.append(char)
        index += 1
    return "".join(out) + piece


def without_doubles(text):
    out, seen, inside = [], set(), False
    for line in text.splitlines(keepends=True):
        if line.rstrip().endswith("= ["):
            inside, seen = True, set()
        elif line.startswith("]"):
            inside = False
        elif inside:
            if line in seen:
                continue
            seen.add(line)
        out.append(line)
    return "".join(out)


def import_graph(trees):
    """Per module (internal modules, external packages) that its top level imports at run time, and the same anywhere in it."""
    modules = {dotted(path): (path, tree) for path, tree in trees.items()}
    graph = {}
    for name, (path, tree) in modules.items():
        top, inner, outside = set(), set(), set()

        def visit(node, late, name=name, path=path, top=top, inner=inner, outside=outside):
            if is_type_checking(node):
                for each in node.body:
                    visit(each, True)
                for each in node.orelse:
                    visit(each, late)
                return
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = name.split(".")
                    parts = parts[: len(parts) - node.level + (path.name == "__init__.py")]
                    base = ".".join([*parts, *([node.module] if node.module else [])])
                found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
            for each in found:
                if each.split(".")[0] == PKG:
                    pieces = each.split(".")
                    for size in range(1, len(pieces) + 1):
                        part = ".".join(pieces[:size])
                        if part in modules and part != name:
                            (inner if late else top).add(part)
                elif not late:
                    outside.add(each.split(".")[0])
            for child in ast.iter_child_nodes(node):
                visit(child, late or isinstance(node, FUNCTIONS))

        visit(tree, False)
        pieces = name.split(".")
        for size in range(1, len(pieces)):
            if ".".join(pieces[:size]) in modules:
                top.add(".".join(pieces[:size]))
        graph[name] = (top, inner, outside)
    # The schema imports every knob by name while it is imported itself.
    knobs = {name for name, (_, tree) in modules.items() if any(
        isinstance(t, ast.Name) and t.id == "KNOB" for node in tree.body if isinstance(node, ast.Assign) for t in node.targets)}
    for name, (_, tree) in modules.items():
        if ".config." in name and any(isinstance(node, ast.Name) and node.id == "knob_settings" for node in ast.walk(tree)):
            graph[name][0].update(knobs)
    return graph


def reach(graph, name):
    seen, todo, outside = set(), [name], set()
    while todo:
        each = todo.pop()
        if each in seen or each not in graph:
            continue
        seen.add(each)
        outside |= graph[each][2]
        todo += graph[each][0]
    return outside, seen


def cycles(graph):
    """Strongly connected parts of the imports at the top of files (a package's __init__ and its modules aside)."""
    index, low, stack, on, out, counter = {}, {}, [], set(), [], [0]
    edges = {name: {t for t in top if t in graph and not name.startswith(t + ".")} for name, (top, _, _) in graph.items()}

    def strong(v):
        index[v] = low[v] = counter[0]
        counter[0] += 1
        stack.append(v)
        on.add(v)
        for w in edges[v]:
            if w not in index:
                strong(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = []
            while True:
                w = stack.pop()
                on.discard(w)
                part.append(w)
                if w == v:
                    break
            if len(part) > 1:
                out.append(sorted(part))

    sys.setrecursionlimit(10000)
    for name in graph:
        if name not in index:
            strong(name)
    return out, edges


def figures(root, old=None, new_of=None):
    def causes(a, b):
        """Edges of the tree before that make a import b."""
        if old is None:
            return ""
        return " by " + "; ".join(
            f"{x[len(PKG) + 1:]} -> {y[len(PKG) + 1:]}{'' if y in old[x][0] else ' (late)'}"
            for x in old for y in sorted(old[x][0] | old[x][1]) if new_of.get(x) == a and new_of.get(y) == b and x != y
        )

    paths = [path.relative_to(root) for path in (root / PKG).rglob("*.py")]
    trees = {path: ast.parse((root / path).read_text()) for path in paths}
    graph = import_graph(trees)
    lines = {path: len((root / path).read_text().splitlines()) for path in paths}
    plain = [path for path in paths if path.name != "__init__.py"]
    print(f"\nfiles without __init__.py: {len(plain)}, lines {sum(lines.values())}; with more than 600 lines: ")
    for path in sorted(plain, key=lines.get, reverse=True)[:12]:
        print(f"   {lines[path]:5} {path}{'   TOO LONG' if lines[path] > 600 else ''}")
    names = defaultdict(list)
    for path in plain:
        names[path.name].append(str(path))
    doubled = {name: where for name, where in names.items() if len(where) > 1}
    print(f"base names in several folders: {len(doubled)}")
    for name, where in doubled.items():
        print(f"   {name}: {', '.join(where)}")
    importers = defaultdict(set)
    for name, (top, inner, _) in graph.items():
        for each in top | inner:
            importers[each].add(name)
    small = [p for p in plain if lines[p] < 80 and len(importers[dotted(p)]) == 1]
    for path in list(small):
        text = (root / path).read_text()
        if re.search(r"^KNOB\b", text, re.MULTILINE) or '__name__ == "__main__"' in text or path.name == "__main__.py":
            small.remove(path)
    print(f"files under 80 lines with one importer (knobs and programs aside): {len(small)}")
    for path in small:
        print(f"   {lines[path]:4} {path}  <- {next(iter(importers[dotted(path)]))}")
    found, edges = cycles(graph)
    print(f"import cycles: {len(found)}")
    for part in found:
        print("   ", part)
        for name in part:
            for other in sorted(edges[name] & set(part)):
                print(f"        {name[len(PKG) + 1:]} -> {other[len(PKG) + 1:]}{causes(name, other)}")
    rooms = defaultdict(set)
    for name, (top, inner, _) in graph.items():
        for each in top | inner:
            a, b = name.split("."), each.split(".")
            if len(a) > 1 and len(b) > 1 and a[1] != b[1]:
                rooms[a[1], b[1]].add((name, each))
    both = sorted({tuple(sorted(pair)) for pair in rooms if pair[::-1] in rooms})
    print(f"pairs of packages that import each other: {len(both)}")
    for a, b in both:
        few = min((rooms[a, b], rooms[b, a]), key=len)
        print(f"   {a} <-> {b}: the fewer:")
        for x, y in sorted(few)[:8]:
            if y.count(".") > 1 and (y != f"{PKG}.{y.split('.')[1]}"):
                print(f"       {x[len(PKG) + 1:]} -> {y[len(PKG) + 1:]}{causes(x, y)}")
    return graph


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--map", type=Path, default=Path(__file__).with_name("map.txt"))
    parser.add_argument("--edits", type=Path, default=Path(__file__).with_name("edits.py"), help="text edits after the move")
    parser.add_argument("--skip", action="append", default=[], help="leave out targets that start so (recipes/rlt/)")
    parser.add_argument("--figures", action="store_true", help="only print the figures of the tree as it is")
    parser.add_argument("--python", default=None, help="interpreter whose folder has ruff (default: ROOT/.venv)")
    options = parser.parse_args()
    root = options.root.resolve()
    if options.figures:
        figures(root)
        return 0
    move = Move(root, Map(options.map, options.skip))
    before = move.run()
    if options.edits.exists():
        space = {"__file__": str(options.edits)}
        exec(compile(options.edits.read_text(), str(options.edits), "exec"), space)
        space["edit"](root, move, say)
    ruff = root / ".venv/bin/ruff"
    subprocess.run([ruff, "format", "--quiet", "."], cwd=root)
    subprocess.run([ruff, "check", "--fix", "--quiet", "--select", "I,F401", "."], cwd=root)
    subprocess.run([ruff, "format", "--quiet", "."], cwd=root)
    for kind, lines in REPORT.items():
        if kind != "FAULT":
            print(f"\n== {kind} ({len(lines)})")
            print(*("   " + line for line in lines), sep="\n")
    graph = figures(root, before, move.new)
    print("\n== what files import at their top, before -> after (heavy packages that came in)")
    bad = 0
    for name in sorted(move.package):
        new = move.new.get(name)
        if new is None or name not in before or new not in graph:
            continue
        had, has = reach(before, name)[0], reach(graph, new)[0]
        more = sorted((has - had) & set(HEAVY))
        light = name in LIGHT
        if name == f"{PKG}.workers.guardian":
            more = sorted(has - set(sys.stdlib_module_names))
        if more and (light or "torch" in more or "ray" in more or "vllm" in more):
            mark = "LIGHT MODULE " if light else ""
            bad += light
            print(f"   {mark}{name} -> {new}: {', '.join(more)}")
            if light:
                for heavy in more:
                    print("        by", path_to(graph, new, heavy))
    heavy = [name for name in sorted(graph) if name.startswith((f"{PKG}.config", f"{PKG}.errors")) and "torch" in reach(graph, name)[0]]
    if heavy:
        bad += 1
        print("   CONFIG IMPORTS TORCH:", [f"{name} by {path_to(graph, name, 'torch')}" for name in heavy[:5]])
    print("   torch at the top, of memory/:", *(f"{n.split('.')[-1]}{'(torch)' if 'torch' in reach(graph, n)[0] else ''}" for n in sorted(graph) if n.startswith(f"{PKG}.memory.")))
    print("\n== ruff check")
    sys.stdout.flush()
    subprocess.run([ruff, "check", "--output-format", "concise", "."], cwd=root)
    print(f"\n== FAULTS ({len(REPORT['FAULT'])})")
    print(*("   " + line for line in REPORT["FAULT"]), sep="\n")
    return 1 if bad or REPORT["FAULT"] else 0


def path_to(graph, start, package):
    todo, seen = [(start,)], {start}
    while todo:
        way = todo.pop(0)
        if package in graph[way[-1]][2]:
            return " > ".join(name.removeprefix(PKG + ".") for name in way)
        for each in sorted(graph[way[-1]][0]):
            if each not in seen and each in graph:
                seen.add(each)
                todo.append((*way, each))
    return "?"


if __name__ == "__main__":
    sys.exit(main())
