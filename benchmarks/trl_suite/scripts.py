"""``python -m benchmarks.trl_suite.scripts``: TRL's example scripts, and the examples of its pages, on :mod:`verl_memopt.trl`.

    python -m benchmarks.trl_suite.scripts TRL --out FOLDER [--python PYTHON]

Those count that make a ``GRPOTrainer`` or an ``RLOOTrainer`` and load their rows, without tools, environments and images. One
step is taken of each, with a tiny model and local rows of the same columns.
Exit codes: 0 the table is written, 1 an example does not run, 2 there is no such repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.trl_suite.__main__ import ROOT, SETTINGS, extract, git
from benchmarks.trl_suite.models import OWNER, make_models

ASIDE = r"tools=|environment|[Ii]mage|vlm|VL|rollout_func|experimental|continuous_batching|async_grpo"
"""What examples that are left out name."""
MAKES = r"\b(GRPO|RLOO)Trainer\("
ONE_STEP = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
"""What every example is told, whatever it says itself."""
ARGUMENTS = ["--model_name_or_path", "MODEL", "--output_dir", "out", "--lr_scheduler_type", "linear", "--use_cpu", "true"]
"""The command line of a script that reads one."""
SECONDS = 120

_BEFORE = """
import dataclasses, datasets, sys
from verl_memopt import api
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
ROW = {"prompt": CHAT, "solution": "$2$", "problem": "1 + 1", "messages": CHAT, "answer": "2", "dataset": "x"}

def load_dataset(name, config=None, split=None, **more):
    rows = datasets.Dataset.from_list([ROW] * 4)
    return [rows for _ in split] if isinstance(split, list) else rows if split else datasets.DatasetDict(train=rows, test=rows)

datasets.load_dataset = load_dataset
load = api.Call.load

def one_step(call):
    fixed = SETTINGS | ONE_STEP
    ours = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_train_epochs")
    ours += ("use_vllm", "use_cpu", "bf16")  # what SETTINGS say under our names
    kept = {name: value for name, value in call.settings.items() if name not in ours and not name.startswith("vllm_")}
    return load(dataclasses.replace(call, settings=kept | fixed))

api.Call.load = one_step
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_suite.scripts", description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, help="git directory or checkout of TRL")
    parser.add_argument("--out", type=Path, required=True, help="folder for models, scripts and what they print")
    parser.add_argument("--python", default=sys.executable, help="as in benchmarks.trl_suite")
    parsed = parser.parse_args()
    commit = git(parsed.trl, "log", "-1", "--format=%H %cs")
    if not commit:
        print(f"{parsed.trl}: no git directory of TRL", file=sys.stderr)
        return 2
    out = parsed.out.absolute()
    extract(parsed.trl, out / "suite", "trl")
    model = make_models({"tiny-Qwen3ForCausalLM"}, out / "models")[f"{OWNER}/tiny-Qwen3ForCausalLM"]
    lines, failed = [f"TRL {commit.strip()}"], 0
    for name, text in examples(parsed.trl):
        outcome = run(name, rewritten(text, model), out, parsed.python, model)
        failed += outcome != "runs"
        lines.append(f"{name:45} {outcome}")
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if failed else 0


def examples(trl: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each example that counts."""
    for path in git(trl, "ls-tree", "-r", "--name-only", "HEAD", "examples/scripts", "docs/source").splitlines():
        text = git(trl, "show", f"HEAD:{path}") if path.endswith((".py", ".md")) else ""
        blocks = [text] if path.endswith(".py") else re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks, start=1):
            if re.search(MAKES, block) and "load_dataset" in block and not re.search(ASIDE, block + Path(path).name):
                yield (path if len(blocks) == 1 else f"{path} #{number}"), block


def rewritten(text: str, model: str) -> str:
    """Return an example with the trainers, configs and rewards of this package, and a tiny model."""
    ours = "GRPOTrainer|RLOOTrainer" + ("" if "TrlParser" in text else "|GRPOConfig|RLOOConfig")
    text = re.sub(r"(?m)^from trl\.rewards import", "from verl_memopt.trl import", text)
    imported = sorted(set(re.findall(rf"\b({ours})\b", text)))
    line = rf"\g<0>\nfrom verl_memopt.trl import {', '.join(imported)}"
    text = re.sub(r"(?m)^(from trl import [^(\n]*)$|^(from trl import \((?:\n.*)*?\n\))$", line, text)
    text = re.sub(r'((?:model|from_pretrained)\s*[=(]\s*)"[\w.-]+/[\w.-]+"', rf'\1"{model}"', text)
    return f"{_BEFORE.replace('SETTINGS', repr(SETTINGS)).replace('ONE_STEP', repr(ONE_STEP))}\n{text}"


def run(name: str, text: str, out: Path, python: str, model: str) -> str:
    """Run an example in a folder of its own, and return whether it runs, or its last line."""
    folder = out / "runs" / re.sub(r"\W+", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.py").write_text(text)
    path = os.pathsep.join([str(ROOT), str(out / "suite")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [model if each == "MODEL" else each for each in ARGUMENTS] if "TrlParser" in text else []
    try:
        process = subprocess.run(
            [python, "script.py", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"takes longer than {SECONDS} s"
    (folder / "log.txt").write_text(process.stdout + process.stderr)
    last = [line for line in process.stderr.splitlines() if "Error" in line]
    if process.returncode and "push_to_hub: the hub did not take" in process.stderr:
        return "runs, up to push_to_hub, which needs the network"
    return "runs" if process.returncode == 0 else (last[-1] if last else json.dumps(process.returncode))


if __name__ == "__main__":
    sys.exit(main())
