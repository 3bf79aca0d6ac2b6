"""``python -m benchmarks.verl_scripts FOLDER``: which of verl's example scripts compose with this command line as they are.

    python -m benchmarks.verl_scripts verl/examples [--source TEXT] [--set NAME=VALUE ...] [--text FILE] [--json FILE]

README.md says how a script is recorded, and which are counted.
Exit codes: 0 the table is written, 2 the folder has no script that calls the trainer, or a script cannot be recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from benchmarks.common import write_json
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError, UserError
from verl_memopt.model.families import FAMILIES
from verl_memopt.trainer.main_ppo import build_parser

SUFFIXES = (".sh", ".slurm")
CALL = "main_ppo"
COMPOSES, REFUSED, NOT_COUNTED = "composes", "refused", "not counted"
_AR = "actor_rollout_ref"
_BACKENDS = ("megatron", "veomni", "mlite", "torchtitan", "automodel")
_SHARDED = ("fsdp", "fsdp2")
_ENGINES = ("vllm", "hf", "sglang")
STAND_INS = ("python", "python3", "ray", "uv")
"""Commands that are on PATH as files, so that a text tool such as env finds them too."""

TEXT_TOOLS = (
    *("bash", "sh", "env", "basename", "dirname", "cat", "date", "tr", "sed", "head", "tail", "cut", "grep", "seq", "wc"),
    *("realpath", "readlink", "expr", "uname", "mkdir"),
)
"""Commands that really run: what they print goes into the arguments."""

_NO_NPU = 'case "$*" in *torch_npu*) exit 1 ;; esac'
"""Scripts ask so whether they run on an Ascend NPU."""
_STAND_IN = rf"""#!/bin/bash
{_NO_NPU}
printf '%s\0' "$#" "$@" >> "$ARGUMENTS_FILE"
"""
_BEFORE = r"""
command_not_found_handle() { printf '%s\0' "$(($# - 1))" "${@:2}" >> "$ARGUMENTS_FILE"; }
source() { [ ! -f "$1" ] || builtin source "$@"; }
ulimit() { :; }
tee() { cat > /dev/null; }
mkdir() {
    for path; do
        case "$path" in "$HOME"/* | [!/-]*) command mkdir -p "$path" ;; esac
    done
}
"""
"""Read by every bash before a script. A missing command or file, or a limit that cannot be raised, does not end the script.
Folders are made at home and in the working folder only. ``tee`` writes no file, but reads its input to the end, so that nothing
before it in a pipe ends early."""


@dataclass(frozen=True)
class Row:
    """One script."""

    script: str
    verdict: str
    reasons: tuple[str, ...] = ()
    """One sentence for each setting that is refused, or why the script is not counted."""
    models: tuple[str, ...] = ()
    """One sentence for each model that is refused when its config is read."""

    @property
    def would_train(self) -> bool:
        """True if neither a setting nor a model is refused."""
        return self.verdict == COMPOSES and not self.models


def scripts_in(folder: Path) -> list[Path]:
    """Return every shell script below a folder that names the trainer, in the order of their paths."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return [file for file in files if CALL in file.read_text(errors="replace")]


def refusals(arguments: Sequence[str]) -> list[str]:
    """Return what the command line says against the arguments of a call; nothing where they compose."""
    parser = build_parser("main_ppo")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_intermixed_args(list(arguments))
        load_settings(parsed.config_name, parsed.overrides, parsed.config_dir)
    except SystemExit:
        return [said.getvalue().strip().splitlines()[-1]]
    except ConfigError as error:
        first, *others = str(error).splitlines()
        return others or [first]
    return []


def row_of(script: Path, folder: Path, seconds: float, variables: Mapping[str, str]) -> Row:
    """Return what becomes of a script: all its calls of the trainer together."""
    name = script.relative_to(folder)
    calls = record(script, seconds, variables)
    if not calls:
        return Row(name.as_posix(), NOT_COUNTED, (f"it makes no call of {CALL}",))
    why = next((reason for call in calls if (reason := outside(name, call))), "")
    if why:
        return Row(name.as_posix(), NOT_COUNTED, (why,))
    problems = tuple(dict.fromkeys(reason for call in calls for reason in refusals(call)))
    models = tuple(dict.fromkeys(reason for call in calls for reason in refused_models(call)))
    return Row(name.as_posix(), REFUSED if problems else COMPOSES, problems, models)


MODEL_TYPES = (
    (r"Qwen3\.\d-\d+B-A\d+B", "qwen3_5_moe"), (r"Qwen3\.\d-", "qwen3_5"), (r"Qwen3-VL-\d+B-A\d+B", "qwen3_vl_moe"),
    (r"Qwen3-VL-", "qwen3_vl"), (r"gemma-3-", "gemma3"),
    (r"Qwen3-Next", "qwen3_next"), (r"Qwen3-\d+B-A\d+B", "qwen3_moe"), (r"Qwen3-[\d.]+B", "qwen3"), (r"Qwen2", "qwen2"),
    (r"Mistral-Nemo", "mistral"), (r"Seed-OSS", "seed_oss"), (r"llama-?[23]|deepseek-llm", "llama"), (r"gemma-2-", "gemma2"),
)  # fmt: skip
"""Name of a model on the hub -> its ``model_type``, the first that matches."""
_MODEL_KEYS = (f"{_AR}.model.path", "critic.model.path", "reward_model.model.path", "reward.reward_model.model_path")


def refused_models(arguments: Sequence[str]) -> list[str]:
    """Return why models that a call names are refused when their config is read. A model that nobody here knows is among them."""
    found = []
    families = {family.model_type: family for family in FAMILIES}
    values = dict(word.lstrip("+").partition("=")[::2] for word in arguments)
    for name in dict.fromkeys(values[key].strip("\"'") for key in _MODEL_KEYS if values.get(key)):
        kind = next((kind for pattern, kind in MODEL_TYPES if re.search(pattern, name, re.IGNORECASE)), None)
        family = families.get(kind or "")
        if family is None:
            found.append(f"{name}: not among the models that were compared")
        elif family.refused is not None:
            found.append(f"{name}: models of type {kind} {family.refused}")
    return found


class RecordError(UserError):
    """A script that cannot be recorded."""


def record(script: Path, seconds: float = 20.0, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return the arguments of each call of ``main_ppo`` that a script makes, in their order.

    The script's home folder is written as ``/home``, its working folder as ``/work``.

    Args:
        script: a bash script.
        seconds: time limit.
        variables: environment variables that the script asks its user to set.

    Raises:
        RecordError: the script ran into the time limit.
    """
    with tempfile.TemporaryDirectory(prefix="verl-script-") as name:
        folder = Path(name)
        arguments = folder / "arguments"
        arguments.touch()
        environment = {
            "PATH": str(_make_commands(folder / "bin")),
            "HOME": str(_make(folder / "home")),
            "USER": "user",
            "ARGUMENTS_FILE": str(arguments),
            "BASH_ENV": str(folder / "before.sh"),
            **(variables or {}),
        }
        (folder / "before.sh").write_text(_BEFORE)
        process = subprocess.Popen(
            ["bash", str(script.resolve())],
            executable=shutil.which("bash"),
            cwd=_make(folder / "work"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RecordError(f"{script}: it ran longer than {seconds:g} seconds. Raise --seconds.") from None
        finally:
            _end_group(process)
        calls = [_of_trainer(call) for call in _calls(arguments.read_text().replace(name, ""))]
    return [call for call in calls if call is not None]


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _make_commands(folder: Path) -> Path:
    """Return a new folder that holds the stand-ins and links to the text tools."""
    folder.mkdir()
    for name in STAND_INS:
        file = folder / name
        file.write_text(_STAND_IN)
        file.chmod(0o755)
    for name in TEXT_TOOLS:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a script and of what it started in the background."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _calls(text: str) -> list[list[str]]:
    """Return the argument lists that the stand-ins wrote: for each call a count and its arguments, each ended by a zero byte."""
    words = text.split("\0")[:-1]
    calls = []
    position = 0
    while position < len(words):
        count = int(words[position])
        calls.append(words[position + 1 : position + 1 + count])
        position += 1 + count
    return calls


def _of_trainer(call: list[str]) -> list[str] | None:
    """Return what follows ``-m ...main_ppo`` or ``.../main_ppo.py`` in a call, or None if the call does not start the trainer."""
    for position, word in enumerate(call):
        if word.removesuffix(".py").replace("/", ".").split(".")[-1] == CALL:
            return call[position + 1 :]
    return None


def outside(script: PurePath, arguments: Sequence[str]) -> str:
    """Return why a call of the trainer is not counted, or an empty text where it is.

    Args:
        script: path of the script below the examples.
        arguments: of the call.
    """
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in arguments)}
    keys = " ".join(values)
    backends = [word for word in _BACKENDS if any(word in argument for argument in arguments)]
    backends += [
        values[key] for key in (f"{_AR}.actor.strategy", f"{_AR}.ref.strategy") if values.get(key, _SHARDED[0]) not in _SHARDED
    ]
    if backends:
        return f"backend {backends[0]}"
    engine = values.get(f"{_AR}.rollout.name", _ENGINES[0])
    if engine not in _ENGINES:
        return f"engine {engine}"
    if "engine_kwargs.sglang" in keys:
        return "settings of sglang's own"
    if "multi_turn" in keys or "multiturn" in values.get("--config-name", ""):
        return "several turns"
    if any(word in keys for word in ("data.image", "vision", "video")):
        return "images or video"
    if any(word in script.as_posix() for word in ("npu", "ascend")) or values.get("trainer.device") == "npu":
        return "an NPU"
    return ""


def address(reason: str) -> str:
    """Return the ``key=value`` that a reason opens with."""
    return reason.partition(": ")[0]


def render(rows: Sequence[Row], source: str) -> str:
    """Return the table as text.

    Args:
        rows: every script.
        source: which scripts these are.
    """
    counted = [row for row in rows if row.verdict != NOT_COUNTED]
    composed = sum(row.verdict == COMPOSES for row in counted)
    trained = sum(row.would_train for row in counted)
    lines = [f"{source}: {composed} of {len(counted)} scripts compose, {trained} of them with models that are not refused", ""]
    for row in counted:
        lines.append(f"{row.verdict:10}{row.script}")
        lines += [f"{'':12}{address(reason)}" for reason in row.reasons]
        lines += [f"{'':12}{reason}" for reason in row.models]
    reasons = [reason for row in counted for reason in dict.fromkeys(row.reasons)]
    scripts_of = Counter(address(reason) for reason in reasons)
    text_of = {address(reason): reason for reason in reversed(reasons)}
    alone = Counter(address(row.reasons[0]) for row in counted if len(row.reasons) == 1)
    lines += ["", f"{'scripts':>8}{'alone':>7}  reason (alone: scripts that nothing else stops)"]
    for key, number in sorted(scripts_of.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"{number:8}{alone[key]:7}  {text_of[key]}")
    others = [row for row in rows if row.verdict == NOT_COUNTED]
    lines += ["", f"{len(others)} scripts are not counted:"]
    lines += [f"  {row.script}: {row.reasons[0]}" for row in others]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Record and compose every script of a folder, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl_scripts", description=__doc__)
    parser.add_argument("folder", type=Path, help="verl's examples")
    parser.add_argument("--source", default="verl", help="which state of verl this is, for the head of the table")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables that scripts ask for")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of one script (default: 20)")
    parser.add_argument("--text", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parsed = parser.parse_args(argv)
    variables = {name: value for name, _, value in (each.partition("=") for each in parsed.set)}
    logging.disable(logging.WARNING)
    try:
        rows = [row_of(script, parsed.folder, parsed.seconds, variables) for script in scripts_in(parsed.folder)]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    if not rows:
        print(f"{parsed.folder}: no script that calls {CALL}. Give verl's examples folder.", file=sys.stderr)
        return 2
    text = render(rows, parsed.source)
    print(text)
    if parsed.text:
        parsed.text.write_text(text + "\n")
    if parsed.json:
        write_json(parsed.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
