"""Golden outputs: what a user sees of this tree, written to a folder, to be compared with another tree's.

python benchmarks/golden.py OUT                     collects bad settings from the tests, too
python benchmarks/golden.py OUT --cases OLD         answers the settings that OLD has answers to, bad ones and good ones
python benchmarks/golden.py --compare OLD NEW       prints each difference; exit code 1 if there is one

    keys.json      every key with its type, default and help
    configs.json   each YAML of the package and of recipe/, composed with its defaults; each preset on top of each recipe
    cases.jsonl    sets of settings: the error that they raise, or what they change and what is logged
    scripts.json   what the example scripts and the launchers of recipes compose
    knobs.json, docs/, commands.json     the index of the knobs, the generated pages, the command line and its help
    ladder.json, update.json             bytes of each row of the ladder on the toy model, FLOPs of an update; no seconds
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# All that is imported from the package. Everything else goes through its command line.
import verl_memopt
from verl_memopt.config.loader import load_settings, settings_from_mapping, to_plain
from verl_memopt.errors import UserError

ROOT = Path(__file__).parents[1]
PACKAGE = Path(verl_memopt.__file__).parent
TESTS = ("tests/config", "tests/recipe/rlt/test_rules.py")
"""Tests that load many settings."""
AR = "actor_rollout_ref"
LEAST = {
    "data.train_files": "train.jsonl", "data.val_files": None, f"{AR}.model.path": "folder", f"{AR}.rollout.name": "hf",
    f"{AR}.rollout.n": 4, f"{AR}.actor.use_dynamic_bsz": True, "algorithm.adv_estimator": "rloo",
}  # fmt: skip
"""Settings whose values are those that the answers to cases differ from."""
GIVEN = ["data.train_files=train.parquet", "data.val_files=val.parquet", f"{AR}.model.path=model"]
FILES = {"TRAIN_FILES": "/data/train.parquet", "VAL_FILES": "/data/test.parquet"}
VARIABLES = {
    "TRAIN_BATCH_SIZE": "48", "PPO_MINI_BATCH_SIZE": "24", "MAX_PROMPT_LENGTH": "20", "MAX_RESPONSE_LENGTH": "5", "SEED": "3",
    "PPO_MAX_TOKEN_LEN_PER_GPU": "5000", "ACTOR_LR": "3e-5", "CRITIC_LR": "4e-5", "KL_COEF": "0.02", "ROLLOUT_N": "16",
    "ROLLOUT_TP": "2", "ROLLOUT_GPU_MEM_UTIL": "0.3", "TOTAL_EPOCHS": "5", "SAVE_FREQ": "7", "TEST_FREQ": "9",
    "PROJECT_NAME": "mine", "EXPERIMENT_NAME": "first", "NGPUS_PER_NODE": "2", "MODEL_PATH": "/models/mine",
}  # fmt: skip
BAD_COMMANDS = (
    [], ["nope"], ["train", "nope=1"], ["train", "--config-name", "nope"], ["train", "--config-dir", "/nowhere"],
    ["train", "a,b"], ["report", "/nowhere"], ["check", "/nowhere"], ["score"], ["knobs", "nope"],
    ["knobs", "--measure"], ["toy"],
)  # fmt: skip
MEASURED = ("seconds", "runs", "timing", "load_after", "utc", "date")


def python(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository, quietly and without a network."""
    return run(sys.executable, *map(str, arguments), **variables)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the root of the repository, on this tree's package."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    env = {**os.environ, **quiet, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of nested mappings. Empty ones are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    return {key: value for name, below in tree.items() for key, value in flat(below, f"{prefix}.{name}".lstrip(".")).items()}


def write(path: Path, value: Any) -> None:
    """Write text, or a value as JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True) + "\n")


class Heard(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def answer(case: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a set of settings comes to: its error, or the values that differ from ``base``, and what is logged."""
    heard = Heard()
    logger = logging.getLogger(PACKAGE.name)
    logger.addHandler(heard)
    propagates, logger.propagate = logger.propagate, False
    try:
        if "mapping" in case:
            settings = settings_from_mapping(case["mapping"])
        else:
            folder = case["dir"] if case["dir"] is None else str(ROOT / case["dir"])
            settings = load_settings(case["name"], case["overrides"], folder)
    except UserError as error:
        return {"error": f"{type(error).__name__}: {error}".replace(str(ROOT), "ROOT"), "log": heard.lines}
    except Exception as error:  # noqa: BLE001 - a traceback is an answer too
        return {"traceback": f"{type(error).__name__}: {error}".replace(str(ROOT), "ROOT"), "log": heard.lines}
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagates
    values = flat(to_plain(settings))
    return {
        "settings": {key: value for key, value in values.items() if key not in base or base[key] != value},
        "log": heard.lines,
    }


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and a case for each YAML of the package and of recipe/, and for each preset on top of it."""
    yaml = PACKAGE / "config" / "yaml"
    yaml = yaml if yaml.is_dir() else next(PACKAGE.rglob("ppo_trainer.yaml")).parent
    groups = sorted(path.relative_to(yaml) for path in yaml.glob("*/*.yaml"))
    presets = [f"{path.parent}={path.stem}" for path in groups]
    packaged = [*GIVEN, f"{AR}.rollout.name=vllm", f"{AR}.actor.use_dynamic_bsz=true", "critic.use_dynamic_bsz=true"]
    for path in sorted(yaml.glob("*.yaml")):
        for preset in ([], *([each] for each in presets)):
            yield " ".join([path.stem, *preset]), {"name": path.stem, "dir": None, "overrides": [*packaged, *preset]}
    for path in sorted((ROOT / "recipe").rglob("*.yaml")):
        folder = path.parent
        if any(folder.parent.glob("*.yaml")):  # a group's file
            continue
        own = [f"{each.parent.name}={each.stem}" for each in sorted(folder.glob("*/*.yaml"))]
        for preset in ([], *([each] for each in (*presets, *own, *(f"+{each}" for each in own)))):
            name = path.relative_to(ROOT).as_posix()
            yield (
                " ".join([name, *preset]),
                {"name": path.stem, "dir": str(folder.relative_to(ROOT)), "overrides": [*GIVEN, *preset]},
            )


def collect(path: Path) -> int:
    """Run the tests of settings and write each set of settings that they load."""
    import pytest

    found: dict[str, None] = {}

    def keep(case: dict[str, Any]) -> None:
        with contextlib.suppress(TypeError, ValueError):
            line = json.dumps(case)
            if json.loads(line) == case and "/tmp/" not in line and line not in found:
                found[line] = None
                log.write(line + "\n")

    def hear_mapping(tree: Mapping[str, Any], of_presets: Any = frozenset(), written: Any = None) -> Any:
        if not of_presets and written is None:
            keep({"mapping": dict(tree)})
        return settings_from_mapping(tree, of_presets, written)

    def hear_overrides(config_name: str, overrides: list[str], config_dir: str | None = None) -> Any:
        folder = None if config_dir is None else os.path.relpath(config_dir, ROOT)
        if folder is None or not folder.startswith(".."):
            keep({"name": config_name, "dir": folder, "overrides": list(overrides)})
        return load_settings(config_name, overrides, config_dir)

    # The tests import these names after this, so they get the ones that listen.
    module = sys.modules[load_settings.__module__]
    module.__dict__.update(settings_from_mapping=hear_mapping, load_settings=hear_overrides)
    with path.open("w", buffering=1) as log:
        pytest.main(["-q", "-p", "no:cacheprovider", *TESTS])
    return 0 if found else 1


def cases(out: Path, old: Path | None) -> None:
    """Write the answer to each case of an earlier output, or to those that the tests load."""
    with tempfile.TemporaryDirectory() as folder:
        if old is None:
            lines = Path(folder) / "cases"
            python(__file__, "--collect", lines)
            asked = [
                *map(json.loads, lines.read_text().splitlines()),
                *odd_cases((out / "docs" / "configuration.md").read_text()),
            ]
        else:
            asked = [json.loads(line)["case"] for line in (old / "cases.jsonl").read_text().splitlines()]
    base = flat(to_plain(settings_from_mapping(LEAST)))
    rows = [{"case": case, "answer": answer(case, base)} for case in asked]
    (out / "cases.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def odd_cases(page: str) -> Iterator[dict[str, Any]]:
    """Yield, for each key and each other spelling on the page, a sibling that does not exist and odd values."""
    elsewhere = re.findall(r"^\| `([\w.*]+)` \|", page.partition("## Other spellings")[2], re.MULTILINE)
    for key in dict.fromkeys((*keys(page), *(name.replace("*", "key") for name in elsewhere))):
        for odd in ({f"{key}_": 1}, {key: {"x": []}}, {key: -1}, {key: 10**30}, {key: "odd"}):
            yield {"mapping": LEAST | odd}


def keys(page: str) -> dict[str, list[str]]:
    """Return key -> type, default and help, from the generated page of all keys."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.strip("# `")
        elif (match := re.match(r"\| `([^`]+)` \| (.*) \|$", line)) and " " not in section:
            found[f"{section}.{match[1]}"] = re.split(r"(?<!\\) ?\| ", match[2])
    return found


def scripts(toy: Path, rlt_toy: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each script composes: with nothing said, with a preset and a profile, and with every variable."""
    everything = {**FILES, **VARIABLES}
    for path in sorted((ROOT / "examples").rglob("run_*.sh")):
        ray = {"RAY_ADDRESS": "127.0.0.1:1", "NNODES": "2"} if "node" in path.name else {}
        for name, words, variables in (
            ("", [], {"TOY_DIR": str(toy)}),
            ("preset", ["model=qwen3_0_6b", "memory=16g"], FILES),
            ("variables", [], everything),
        ):
            yield f"{path.name} {name}", composed("bash", str(path), "--cfg", "job", *words, DEVICE="cpu", **ray, **variables)
    for path in sorted((ROOT / "recipe").rglob("launch_*.sh")):
        for config in sorted((path.parent / "config").glob("teacher_*.yaml")):
            place = {"TOY_DIR": str(rlt_toy)} if "toy" in config.name else {"MODEL_PATH": "/models/mine", **FILES}
            yield f"{path.name} {config.stem}", composed("bash", str(path), config.stem, "--cfg", "job", DEVICE="cpu", **place)
    for path in sorted((ROOT / "recipe").rglob("warm_up.py")):
        yield path.name, composed(sys.executable, str(path), "--cfg", "job", *GIVEN)


def composed(*command: str, **variables: str) -> dict[str, Any]:
    """Return what a command prints with ``--cfg job``, by key, or its error."""
    import yaml

    done = run(*command, **variables)
    return flat(yaml.safe_load(done.stdout)) if done.returncode == 0 else {"error": done.stderr[-2000:]}


def commands() -> dict[str, dict[str, Any]]:
    """Return exit code and output of each command's help, of the lists of knobs, and of mistakes on the command line."""
    names = re.findall(r"^  (\w+) ", python("-m", PACKAGE.name, "--help").stdout.partition("commands:")[2], re.MULTILINE)
    knobs = [knob["name"] for knob in json.loads(python("-m", PACKAGE.name, "knobs", "--json").stdout)]
    asked = [["--help"], ["--version"], *([name, "--help"] for name in names), ["knobs"], ["knobs", *knobs], *BAD_COMMANDS]
    rows = {" ".join(words): python("-m", PACKAGE.name, *words) for words in asked}
    rows |= {"main_ppo --help": python("-m", f"{PACKAGE.name}.trainer.main_ppo", "--help")}
    rows |= {path.name: python(path, "--help") for path in sorted((ROOT / "recipe").glob("*/*.py")) if path.name != "__init__.py"}
    return {name: {"code": done.returncode, "out": done.stdout, "err": untimed(done.stderr)} for name, done in rows.items()}


def untimed(text: str) -> str:
    """Return log lines without their times, and without the path of this checkout."""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE).replace(str(ROOT), "ROOT")


def without_times(value: Any) -> Any:
    """Return plain values without what is measured in seconds."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not any(word in key for word in MEASURED)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def measurements(out: Path, toy: Path) -> None:
    """Write the bytes of the ladder on the toy model, and the FLOPs and bytes of an update."""
    sizes = ["--rows", "4", "--prompt", "32", "--response", "16"]
    ladder = Path(toy) / "ladder.json"
    python("-m", PACKAGE.name, "knobs", "--measure", "--model", toy / "model", *sizes, "--json", ladder)
    write(out / "ladder.json", {**without_times(json.loads(ladder.read_text())), "model": "toy"})
    update = Path(toy) / "update.json"
    ours = ["--contestants", "ours", "ours_no_sharing", "--shrink", "32", "--layers", "2", "--repeats", "1", "--cpu"]
    python("-m", "benchmarks.update_pass", "--workload", "b", *ours, "--json", update)
    write(out / "update.json", [without_times(row) for row in json.loads(update.read_text())["rows"]])


def make(out: Path, old: Path | None, quick: bool) -> None:
    """Write all outputs; with ``quick`` only those that need neither a run of the tests nor a model."""
    out.mkdir(parents=True, exist_ok=True)
    for module, page in re.findall(r"^\t\S*python -m (\S+) > (docs/\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE):
        write(out / page, python("-m", module).stdout)
    write(out / "keys.json", keys((out / "docs" / "configuration.md").read_text()))
    write(out / "knobs.json", json.loads(python("-m", PACKAGE.name, "knobs", "--json").stdout))
    write(out / "commands.json", commands() if not quick else {})
    composed_configs: dict[str, Any] = {}
    for name, case in configs():
        if not quick or " " not in name:
            # A preset is told by what it changes.
            base = composed_configs[name.split()[0]].get("settings", {}) if " " in name else {}
            composed_configs[name] = answer(case, base)
    write(out / "configs.json", composed_configs)
    if old is not None or not quick:
        cases(out, old)
    if quick:
        return
    with tempfile.TemporaryDirectory() as folder:
        toy, rlt_toy = Path(folder) / "toy", Path(folder) / "rlt_toy"
        rows = {name: json.loads(json.dumps(found).replace(folder, "TOYS")) for name, found in scripts(toy, rlt_toy)}
        write(out / "scripts.json", rows)
        measurements(out, toy)


def entries(folder: Path) -> dict[str, str]:
    """Return address -> text of everything in an output folder."""
    found: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".jsonl":
            for line in path.read_text().splitlines():
                row = json.loads(line)
                found[f"{name} {json.dumps(row['case'], sort_keys=True)}"] = json.dumps(row["answer"], indent=1, sort_keys=True)
        elif path.suffix == ".json":
            tree = json.loads(path.read_text())
            parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
            found |= {f"{name} {part}": json.dumps(value, indent=1, sort_keys=True) for part, value in parts}
        else:
            found[name] = path.read_text()
    return found


def changed_lines(old: str, new: str) -> str:
    """Return the lines that left, with a minus, and those that came, with a plus."""
    lines = difflib.unified_diff(old.replace("\\n", "\n").splitlines(), new.replace("\\n", "\n").splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def compare(old: Path, new: Path, shown: int = 5) -> int:
    """Print each difference once, with the outputs that show it, and return 1 where there is one."""
    before, after = entries(old), entries(new)
    where: dict[str, list[str]] = {}
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            where.setdefault(changed_lines(before.get(name, ""), after.get(name, "")), []).append(name)
    for difference, names in where.items():
        print(*names[:shown], *([f"and {len(names) - shown} more"] if len(names) > shown else []), sep="\n")
        print(*(f"    {line}" for line in difference.splitlines()), "", sep="\n")
    print(f"{len(where)} differences, in {sum(map(len, where.values()))} of {len(before | after)} outputs")
    return 1 if where else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder to write")
    parser.add_argument("--cases", type=Path, metavar="OLD", help="answer the cases of this earlier output")
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--collect", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.compare:
        return compare(*asked.compare)
    if asked.collect:
        return collect(asked.collect)
    if asked.out is None:
        parser.error("name a folder, or --compare OLD NEW")
    make(asked.out, asked.cases, asked.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
