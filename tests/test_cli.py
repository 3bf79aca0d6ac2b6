import os
import subprocess
import sys

import pytest

from verl_memopt import __version__
from verl_memopt.cli import COMMANDS, main

DRY = [
    "data.train_files=train.jsonl",
    "data.val_files=null",
    "actor_rollout_ref.model.path=folder",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "debug=dry",
]


def refused(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_the_version_is_printed(capsys):
    assert refused(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"verl-memopt {__version__}"


def test_help_names_every_command_with_what_it_does(capsys):
    assert refused(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and text in shown for name, (_, text) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_a_missing_or_unknown_command_is_refused_with_those_there_are(arguments, capsys):
    assert refused(arguments) == 2
    assert "command" in capsys.readouterr().err


def test_train_takes_overrides_as_the_training_entry_does(capsys):
    assert main(["train", *DRY]) == 0
    assert "use_dynamic_bsz: true" in capsys.readouterr().out


def test_a_users_mistake_is_its_message_alone_and_its_exit_code(tmp_path, capsys):
    assert main(["train", *DRY, "data.sead=1"]) == 2
    assert main(["report", str(tmp_path / "nothing")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("ConfigError: data.sead")
    assert lines[-1].startswith(f"UserError: {tmp_path / 'nothing'}: no such run folder")


def test_a_command_says_what_it_needs(capsys):
    assert refused(["report"]) == 2
    assert "RUN_DIR" in capsys.readouterr().err


def test_the_package_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "verl_memopt", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == f"verl-memopt {__version__}"
