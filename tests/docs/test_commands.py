"""Every command of the pages that a newcomer follows is run, in the order of the page, in a stand-in for a checkout.

A command that trains resolves all its settings and ends. What it would have left stands there for the commands after it, and
nothing else does.
"""

import json
import re
import shlex
import shutil
import subprocess

import pytest

from recipe.real_model import make_model
from tests.docs.pages import DOCS, README, ROOT, blocks, commands, page_name
from tests.end_to_end.runs import LOCAL, script_environment, succeeded, train
from tests.forked import PYTHON
from verl_memopt.config.loader import load_settings
from verl_memopt.memory.knob import knobs

PAGES = [README, *(DOCS / f"{name}.md" for name in ("get_started", "out_of_memory", "recipes"))]
QUICK_LADDER = "--layers 1 --vocabulary 320 --rows 2 --prompt 8 --response 4 --only chunked_logprob"
"""Options of ``knobs --measure`` that win over those of the page."""
SCRIPT = re.compile(r"bash (examples/memory_optimization/run_\w+\.sh|benchmarks/\S+\.sh|docs/\S+\.sh)")
ENTRY = re.compile(r"^\++ \S+ -m verl_memopt\.trainer\.main_ppo (.*)$", re.MULTILINE)
"""The last command of a script, as the shell traces it."""
MADE = ("runs", "checkpoints", "data", "build")
"""Folders that a checkout has only once a command has made them."""


@pytest.fixture(scope="module")
def run_folder(toy, tmp_path_factory):
    """A run of one step, with a checkpoint."""
    folder = tmp_path_factory.mktemp("commands") / "run"
    succeeded(
        train(toy, folder, *LOCAL, "trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.val_before_train=false")
    )
    return folder


class Checkout:
    """A folder in which the commands of one page run one after another."""

    def __init__(self, folder, toy, run_folder, handed):
        """handed: filled here, for other pages too.

        Variables, script and presets -> arguments of the training entry; a command of ``fit`` -> what it printed.
        """
        self.folder, self.run_folder, self.handed = folder / "checkout", run_folder, handed
        self.folder.mkdir()
        for path in ROOT.iterdir():
            if path.name not in (*MADE, ".git"):
                (self.folder / path.name).symlink_to(path)
        self._make_toy(toy, 0)
        self._make_toy(toy, 3)
        self._make_real_model(toy / "model")
        (self.folder / "FOLDER").symlink_to(toy / "model")
        self.home = folder / "home"
        self._make_gsm8k(self.home / "gsm8k" / "main")
        # A script with a preset would get the data from the hub. Nothing reads what lies here.
        (self.folder / "data" / "gsm8k").mkdir(parents=True)
        (self.folder / "data" / "gsm8k" / "train.parquet").touch()

    def _make_toy(self, toy, seed):
        # Warming up the model of another seed takes as long as all other commands together.
        folder = self.folder / "runs" / f"toy_seed{seed}"
        shutil.copytree(toy, folder)
        told = json.loads((folder / "toy.json").read_text())
        (folder / "toy.json").write_text(json.dumps({**told, "seed": seed}))

    def _make_real_model(self, tiny):
        # The set-up step would get the model from the package index. The tiny one stands in for it.
        folder = self.folder / "runs" / "smollm2_135m"
        shutil.copytree(tiny, folder)
        (folder / make_model.RECORD).write_text(json.dumps(make_model.identity()))

    def _make_gsm8k(self, folder):
        folder.mkdir(parents=True)
        row = json.dumps({"question": "Ann has 2 pens and buys 5. How many?", "answer": "2 + 5 = 7\n#### 7"})
        for name in ("train.jsonl", "test.jsonl"):
            (folder / name).write_text(row + "\n")

    def shell(self, command):
        """Return a command of the shell that has ended well."""
        process = self.ended(command)
        assert process.returncode == 0, f"{command}\n{process.stdout[-2000:]}{process.stderr[-3000:]}"
        return process

    def ended(self, command):
        """Return a command that has ended; its Python is forked from one that has imported torch."""
        command = command.replace(".venv/bin/verl-memopt", f"{PYTHON} -m verl_memopt").replace(".venv/bin/python", PYTHON)
        env = script_environment(DEVICE="cpu", HOME=str(self.home))
        for name in ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
            env.pop(name, None)  # of the make that runs these tests: under it another make says where it is
        return subprocess.run(["bash", "-c", command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=200)

    def train(self, variables, program):
        """Resolve the settings of a training command, and put a run where it would have put its own.

        A script is run once for each set of variables and presets. What it hands to the entry then serves its other overrides.
        """
        script, *overrides = re.sub(r"^bash ", "", program).split()
        presets = " ".join(word for word in overrides if word.startswith(("model=", "memory=")))
        key = (variables, script, presets)
        if key not in self.handed:
            traced = self.shell(f"{variables}bash -x {script} debug=dry {presets}").stderr
            self.handed[key] = shlex.split(ENTRY.findall(traced)[-1])
        handed = self.handed[key]
        name, folder = (handed[handed.index(option) + 1] for option in ("--config-name", "--config-dir"))
        others = [word for word in overrides if word not in presets.split() and word != "--until-it-fits"]
        self._resolve(name, [word for word in handed if "=" in word] + others, folder)

    def fit(self, command):
        """Return what a command prints that leaves nothing behind."""
        if command not in self.handed:
            self.handed[command] = self.shell(command).stdout
        return self.handed[command]

    def _resolve(self, name, overrides, folder="recipe/rloo"):
        settings = load_settings(name, overrides, str(ROOT / folder))
        run_dir = self.folder / settings.trainer.default_local_dir
        if not run_dir.exists():
            shutil.copytree(self.run_folder, run_dir)

    def run(self, command):
        """Run a command of a page, or what it would run."""
        variables, _, program = re.fullmatch(r"((\w+=\S+ )*)(.*)", command).groups()
        if program.startswith("make train"):
            planned = self.shell(f"{variables}make -n {program.removeprefix('make ')}").stdout.splitlines()
            assert planned[0] == "./setup_env.sh"
            self.train(variables, planned[-1])
        elif program.startswith("make "):
            self.shell(f"make -n {program.removeprefix('make ')}")
        elif (script := SCRIPT.match(program)) is not None:
            assert (ROOT / script[1]).is_file(), command
            if script[1].startswith("examples/"):
                self.train(variables, program)
            else:
                self.shell(f"bash -n {script[1]}")
        elif program.startswith("./setup_env.sh"):
            self.shell(program if "--check" in program else "bash -n setup_env.sh")
        elif program.startswith(".venv/bin/verl-memopt knobs --measure"):
            settings, _, only = command.partition(" --only ")
            assert {knob.name for knob in knobs()} >= set(only.split()), command
            self.shell(f"{settings} {QUICK_LADDER}")
        elif program.startswith(".venv/bin/verl-memopt fit"):
            self.fit(command)
        elif program.startswith(".venv/bin/verl-memopt train") and "--cfg job" not in program:
            self._resolve("toy", program.split(" --config-name toy ")[1].split())
        else:
            assert program.startswith(".venv/bin/"), f"{command}: nothing here runs such a command"
            self.shell(command)


@pytest.fixture(scope="module")
def handed():
    return {}


@pytest.fixture
def checkout(tmp_path, toy, run_folder, handed):
    return Checkout(tmp_path, toy, run_folder, handed)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_runs(page, checkout):
    found = commands(page)
    assert len(found) >= 4
    for command in found:
        checkout.run(command)


def test_the_report_that_the_page_explains_is_what_its_command_ends_with(checkout):
    page = DOCS / "out_of_memory.md"
    command = next(line for line in commands(page) if line.endswith("memory.device_limit_gb=0.01"))
    process = checkout.ended(command)
    assert process.returncode == 1
    report = process.stderr[process.stderr.index("DeviceMemoryError") :]
    assert without_figures(report) == without_figures(next(text for text in blocks(page, "") if "DeviceMemoryError" in text))
    first = re.search(r"Most of it is \w+: set (\S+)$", report, re.MULTILINE)[1]
    assert checkout.ended(f"{command} {first}").returncode == 0


def test_what_fits_on_the_page_is_what_its_command_prints(checkout):
    command = next(line for line in commands(README) if ".venv/bin/verl-memopt fit" in line)
    shown = next(text for text in blocks(README, "") if "Verdict:" in text).replace(".venv/bin/verl-memopt", "verl-memopt")
    printed = checkout.fit(command)
    assert [line.split() for line in printed.splitlines() if line.strip()] == [
        line.split() for line in shown.splitlines() if line.strip()
    ]


def without_figures(report):
    """Return a report without the bytes and the operation, which follow the version of torch."""
    return re.sub(r"\(aten[^)]*\)|\d[\d.]* ?MiB|\d+\.\d+", "", report.strip())
