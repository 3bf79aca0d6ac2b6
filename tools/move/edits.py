"""Text edits after the move, of what no rule can know. Each is skipped, and reported, where its text is not found."""

import re


def edit(root, move, say):
    def change(name, old, new, count=1):
        path = root / name
        text = path.read_text() if path.is_file() else ""
        if old not in text:
            say("edits.py: not found (already changed, or edit by hand)", f"{name}: {old[:70]!r}")
            return False
        path.write_text(text.replace(old, new) if count == 0 else text.replace(old, new, count))
        return True

    # The knobs by name: importing every file of memory/ would import torch.
    knobs = sorted(source.path.stem for source in move.package.values() if source.path.parts[1:2] == ("knobs",) and "KNOB" in source.definitions())
    index = root / "verl_memopt/memory/knob.py"
    if index.is_file():
        text = index.read_text()
        match = re.search(r'NOT_KNOBS = \([^)]*\)\n(?:""".*?"""\n)?', text, re.DOTALL)
        listing = re.search(r"    names = sorted\(info\.name for info in pkgutil.*\n    return \[_module\(name\) for name in names\]\n", text)
        if match and listing:
            lines, line = [], "   "
            for name in knobs:
                if len(line) + len(name) + 4 > 128:
                    lines.append(line)
                    line = "   "
                line += f' "{name}",'
            names = "\n".join([*lines, line])
            text = text.replace(listing.group(), "    return [_module(name) for name in KNOBS]\n")
            text = text.replace(match.group(), f'KNOBS = (\n{names}\n)  # fmt: skip\n"""Files of this folder that end with a ``KNOB``. Their mechanisms import torch, so they are named here and not searched."""\n')
            text = re.sub(r"^import pkgutil\n", "", text, flags=re.MULTILINE)
            text = re.sub(r"^import verl_memopt\.memory\n", "", text, flags=re.MULTILINE)
            index.write_text(text)
        else:
            say("edits.py: not found (already changed, or edit by hand)", "memory/knob.py: NOT_KNOBS and _modules() (the list of the knobs)")
    change("tests/knobs/test_toy_knob.py", '(folder / "verl_memopt/knobs/toy.py").write_text(TOY)',
           '(folder / "verl_memopt/memory/toy.py").write_text(TOY)\n    index = folder / "verl_memopt/memory/knob.py"\n'
           '    index.write_text(index.read_text().replace("KNOBS = (", \'KNOBS = (\\n    "toy",\', 1))')
    # Rooms in one order.
    change("tests/architecture/test_rooms.py",
           '"errors", "knobs", "config", "distributed", "observe", "ops", "memory", "models", "data", "rollout", "rewards", "algorithms",\n    "sync", "workers", "trainer", "ladder", "cli", "__main__",',
           '"errors", "config", "distributed", "observe", "memory", "model", "data", "run", "rollout", "rewards", "algorithms",\n    "worker", "trainer", "recipes", "ladder", "cli", "__main__",')
    change("tests/mutants/table.py", '"checkpoints": ("trainer/", "distributed/")', '"checkpoints": ("run/", "distributed/")')
    change("pyproject.toml", '    "verl_memopt/algorithms/*/*.py",\n', "")
    # Sections and what reads them are not told apart by packages any more.
    reads = next((str(path) for path in move.targets if any(source.path.stem == "reads" for source in move.targets[path])), "tools/reads.py")
    change(reads, '_SILENT_CALLERS = ("dataclasses", schema.__name__, "verl_memopt.memory.")\n"""Modules whose reads are no use of a value: ``dataclasses.replace``, and the generated ``==`` and ``repr``."""\n',
           '_SILENT_CALLERS = ("__eq__", "__repr__", "__hash__")\n"""Generated methods, whose reads are no use of a value; neither are those of ``dataclasses.replace``."""\n')
    change(reads, 'silent = sys._getframe(1).f_globals["__name__"].startswith(_SILENT_CALLERS)\n',
           'caller = sys._getframe(1)\n        silent = caller.f_globals["__name__"] == "dataclasses" or caller.f_code.co_name in _SILENT_CALLERS\n')
    # Folder names in code.
    change("tests/knobs/test_index.py", '.parent / "knobs" / f"{knob.name}.py"', '.parent / "memory" / f"{knob.name}.py"')
    change("verl_memopt/memory/knob.py", 'f"knobs/{name}.py: its docstring', 'f"memory/{name}.py: its docstring')
    # import-linter: the layers after the move.
    path = root / "pyproject.toml"
    text = path.read_text()
    layers = re.search(r'(?<=^layers = \[\n)(?:    "\w+",\n)+', text, re.MULTILINE)
    if layers:
        names = [name for name in re.findall(r'"(\w+)"', layers.group()) if name not in ("sync", "ops", "knobs")]
        names = [{"models": "model", "workers": "worker"}.get(name, name) for name in names]
        names.insert(names.index("data"), "run")
        text = text.replace(layers.group(), "".join(f'    "{name}",\n' for name in names))
        if "verl_memopt.config.* -> verl_memopt.memory.*" not in text:
            text = text.replace("ignore_imports = [\n", 'ignore_imports = [\n    # The declarations of knobs lie beside their mechanisms, and import nothing but each other.\n    "verl_memopt.config.* -> verl_memopt.memory.*",\n', 1)
        path.write_text(text)
