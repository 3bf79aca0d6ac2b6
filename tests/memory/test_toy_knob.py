"""A knob in one new file, whose settings join a section, is found by everything that lists knobs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import verl_memopt

ROOT = Path(__file__).parents[2]
KEY = "actor_rollout_ref.model.toy_tiles"
TOY = '''"""Cut something into tiles.

Use it when: a test asks for it.
Saves: one byte a tile.
Costs: nothing at all.
Works with: every knob but a chunk of 7.
"""

from dataclasses import dataclass

from verl_memopt.memory.knob import LOWER, Advice, Claim, Knob, LadderRow, PositiveInt, Refusal, UnusedKey

KEY, CHUNK = "actor_rollout_ref.model.toy_tiles", "actor_rollout_ref.model.logprob_chunk_tokens"


@dataclass(frozen=True)
class Toy:
    """Settings of the toy."""

    toy_tiles: PositiveInt = 4
    """Tiles of the toy. Raise it for the toy's sake."""


KNOB = Knob(
    cost="a toy's worth",
    settings={"model": Toy},
    unused_keys=(UnusedKey(KEY, lambda settings: settings.actor_rollout_ref.model.toy_tiles == 5, "five is right out"),),
    refuses=(
        Refusal(
            (KEY, CHUNK),
            lambda settings: settings.actor_rollout_ref.model.logprob_chunk_tokens == 7,
            "seven does not tile",
            "Set 8.",
        ),
    ),
    advice=(Advice("toys", KEY, LOWER),),
    claims=(Claim("update_actor", "toys", lambda before, after: 1),),
    row=LadderRow(15, on=(f"{KEY}=8",), off=(f"{KEY}=1",)),
)
'''
ASK = """
import io, json, logging, sys
from rich.console import Console
from tools.settings_page import page as configuration
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError
from verl_memopt.plan.list_knobs import print_knobs
from tools.knobs_page import page
from verl_memopt.ladder.measure import ABLATION
from verl_memopt.memory.knob import Need
from verl_memopt.plan.advice import RunParts, advice

LEAST = ["data.train_files=none", "data.val_files=null", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=hf"]
LEAST += ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.n=2"]
KEY, CHUNK = "actor_rollout_ref.model.toy_tiles", "actor_rollout_ref.model.logprob_chunk_tokens"

def refusal(*overrides):
    try:
        load_settings("rloo_trainer", [*LEAST, *overrides])
    except ConfigError as error:
        return str(error)

logged = io.StringIO()
logging.basicConfig(stream=logged)
settings = load_settings("rloo_trainer", [*LEAST, KEY + "=5"])
table = io.StringIO()
print_knobs(Console(file=table, width=200))
print(json.dumps({
    "value": settings.actor_rollout_ref.model.toy_tiles,
    "warning": logged.getvalue(),
    "out of range": refusal(KEY + "=0"),
    "refused": refusal(CHUNK + "=7"),
    "table": table.getvalue(),
    "page": page(),
    "configuration": configuration(),
    "ladder": ABLATION[:2],
    "advice": [
        way.text for way in advice("update_actor", ["toys"], RunParts(settings.actor_rollout_ref), lambda kind: Need(0.5, 0, 0))
    ],
}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Returns what the project says with one more file among its knobs."""
    folder = tmp_path_factory.mktemp("toy_knob")
    shutil.copytree(Path(verl_memopt.__file__).parent, folder / "verl_memopt", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "verl_memopt/memory/toy.py").write_text(TOY)
    index = folder / "verl_memopt/memory/knob.py"
    index.write_text(index.read_text().replace("KNOBS = (", 'KNOBS = (\n    "toy",', 1))
    schema = folder / "verl_memopt/config/role_settings.py"
    imported = "from verl_memopt.memory.toy import Toy\n"
    in_base = schema.read_text().replace("class Model(", "class Model(Toy, ")
    schema.write_text(in_base.replace("from verl_memopt.memory", imported + "from verl_memopt.memory", 1))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    ended = subprocess.run([sys.executable, "-c", ASK], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_its_setting_is_read_and_its_rules_hold(told):
    assert told["value"] == 5
    assert told["out of range"].startswith(f"{KEY}=0: must be above 0.")
    chunk = "actor_rollout_ref.model.logprob_chunk_tokens"
    assert told["refused"] == f"{KEY}=4, {chunk}=7: seven does not tile. Set 8."
    assert f"{KEY}=5 has no effect here: five is right out." in told["warning"]
    assert told["advice"] == [f"lower {KEY} to 2.5 (now 5)"]


def test_the_command_line_and_the_pages_list_it(told):
    (line,) = [line for line in told["table"].splitlines() if line.strip().startswith("toy ")]
    assert line.split()[1:3] == ["model.toy_tiles", "4"]
    assert "## toy\n\nCut something into tiles.\n" in told["page"]
    assert "| `toy_tiles` | int | `4` | Tiles of the toy. Raise it for the toy's sake. |" in told["configuration"]


def test_the_ladder_measures_it(told):
    assert told["ladder"] == ["chunked_logprob", "toy"]
