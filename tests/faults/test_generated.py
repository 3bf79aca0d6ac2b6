"""Cases made of tables: each file of a run and each input of one, damaged in each way, is found, or named by one clear error.

A new kind of file in a run's folder is attacked without a change here. The slow test takes every case at several places.
"""

import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.test_sharded_state import Runs
from tests.end_to_end.runs import RECIPES, settings_of
from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Data, Model
from verl_memopt.data.dataset import build_dataset
from verl_memopt.distributed.sharded_state import StoredTensors
from verl_memopt.errors import RewardError, UserError
from verl_memopt.model.folder import load_tokenizer
from verl_memopt.model.packing_check import check_architecture
from verl_memopt.observe.charts import finish_summary
from verl_memopt.observe.own_files import MARK
from verl_memopt.observe.run_folder import RunFolder, open_run_folder
from verl_memopt.rewards.scorer import load_reward_function
from verl_memopt.run.checkpoints import CheckpointStore, check_folder

DRAWN = 50
"""Cases of each table in every run of the tests."""
PLACES = range(6)
"""Where a file is damaged in the slow test, as seeds."""


def flip(path, chance, canary):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path, chance, canary):
    os.truncate(path, chance.randrange(path.stat().st_size))


def zero(path, chance, canary):
    path.write_bytes(bytes(path.stat().st_size))


def vanish(path, chance, canary):
    path.unlink()


def replace(path, chance, canary):
    path.unlink()
    path.mkdir()


def link(path, chance, canary):
    path.unlink()
    path.symlink_to(chance.choice(["/nowhere", "/dev/null", path.name]))


def run_code(path, chance, canary):
    path.write_bytes(pickle.dumps(Runs(canary)))


DAMAGES = (flip, truncate, zero, vanish, replace, link, run_code)
WITHOUT_CONTENTS = ("proven", MARK)
"""Files whose name says everything: nothing reads what is in them."""
OF_OTHERS = ("tensorboard", "reward_logs", "console.log")
"""What another program writes, or what is for people: nobody here reads it."""


def kinds_of(run_dir):
    """Gives the files of a run by kind: their path without numbers."""
    found = {}
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir)
        if path.is_file() and path.stat().st_size and name.parts[0] not in OF_OTHERS and name.name not in WITHOUT_CONTENTS:
            found.setdefault(re.sub(r"\d+", "N", str(name)), []).append(name)
    return found


def read_run(run_dir):
    """Reads a run as commands and a resumed run do. Any error but a user's own ends the test."""
    folder, store = RunFolder(run_dir), CheckpointStore(run_dir, None)
    readers = [
        lambda: open_run_folder(run_dir),
        lambda: [StoredTensors(each.folder / "actor") for each in [store.newest()] if each],
        lambda: finish_summary(folder, {}),
        lambda: folder.begin("new: settings\n", 2),
        lambda: folder.begin("new: settings\n", None),
    ]
    for read in readers:
        with contextlib.suppress(UserError):
            read()


def attack_file(source, name, damage, seed, tmp_path):
    """Damages one file of a copy of a run. Gives what is wrong with how that was met; None for nothing."""
    copy, canary = tmp_path / "copy", tmp_path / "it ran"
    shutil.copytree(source, copy, copy_function=os.link)
    target = copy / name
    target.unlink()
    shutil.copyfile(source / name, target)
    damage(target, random.Random(f"{name} {damage.__name__} {seed}"), canary)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            try:
                code, text = check_folder(copy), said.getvalue()
            except UserError as error:
                code, text = 1, str(error)
            read_run(copy)
    except Exception as error:  # noqa: BLE001 - the finding of this test
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(copy)
    if canary.exists():
        canary.unlink()
        return "its code ran"
    return None if code and (name.name in text or "meta.json" in text) else f"check said {code}: {text[-300:]}"


def damaged_text(text):
    """Gives the ways in which a file of text comes from elsewhere: another encoding, type or size, or made to harm."""
    return {
        "empty": b"", "zeros": bytes(4096), "UTF-16": text.encode("utf-16"), "no UTF-8": b"\xff\xfe" + text.encode(),
        "deep JSON": b"[" * 10**5, "a number": b"7", "a long line": b'{"a": "' + b"x" * 10**6, "NaN": b'{"prompt": NaN}\n',
        "a byte order mark": b"\xef\xbb\xbf" + text.encode(), "code": pickle.dumps(Runs("/nowhere/canary")),
        "a huge number": b'{"prompt": ' + b"9" * 5000 + b"}\n", "control": b"\x1b[2J\x00\r\n" + text.encode(),
        "torn": text.encode()[: len(text) // 2], "lone surrogate": b'{"prompt": "\\ud800", "data_source": "toy/arithmetic"}\n',
    }  # fmt: skip


def inputs(toy, folder):
    """Gives name -> (file, its text, what reads it), in copies below ``folder``."""
    model = shutil.copytree(toy / "model", folder / "model")
    tokenizer = load_tokenizer(toy / "model", Model(path=str(model)), False)
    row = {
        "data_source": "toy/arithmetic",
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"ground_truth": "2"},
    }
    data, rewards, config = folder / "rows.jsonl", folder / "reward.py", folder / "mine.yaml"

    def settings():
        load_settings("mine", settings_of(toy, folder / "run"), folder)

    def whole_model():
        check_architecture(Model(path=str(model)), model, 64)
        load_tokenizer(model, Model(path=str(model)), False)

    texts = {path: path.read_text(errors="replace") for path in sorted(model.iterdir()) if path.suffix != ".safetensors"}

    def reward():
        load_reward_function(str(rewards), "compute_score", {})

    weights = {next(model.glob("*.safetensors")): "weights"}
    return {
        "data": (data, json.dumps(row) + "\n", lambda: list(build_dataset(str(data), Data(), tokenizer, "train"))),
        "reward": (rewards, "def compute_score(*args, **kwargs): return 1", reward),
        "config": (config, (RECIPES / "toy.yaml").read_text(), settings),
        **{f"model's {path.name}": (path, text, whole_model) for path, text in {**texts, **weights}.items()},
    }  # fmt: skip


def attack_input(path, contents, read):
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(contents)
    try:
        read()
    except (UserError, RewardError):
        return None
    except Exception as error:  # noqa: BLE001 - the finding of this test
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    return None


def told(request, what, cases, failures):
    """Says how many cases of each row were met, and asserts that none was not."""
    counted, failed = Counter(row for row, *_ in cases), Counter(row for row, *_ in failures)
    lines = [f"{row}: {number - failed[row]} of {number} survived" for row, number in sorted(counted.items())]
    request.config.get_terminal_writer().line("\n".join([f"\n{what}: {len(cases)} cases", *lines]))
    assert not failures, "\n".join(map(str, failures))


def attack_files(run_dir, tmp_path, drawn, request):
    kinds = kinds_of(run_dir)
    cases = [(kind, damage, seed) for kind in kinds for damage in DAMAGES for seed in PLACES]
    cases = cases if drawn is None else random.Random(0).sample(cases, drawn)
    failures = []
    for kind, damage, seed in cases:
        name = random.Random(f"{kind} {seed}").choice(kinds[kind])
        if (wrong := attack_file(run_dir, name, damage, seed, tmp_path)) is not None:
            failures.append((kind, damage.__name__, seed, wrong))
    told(request, "files of a run", cases, failures)


def attack_inputs(toy, tmp_path, drawn, request):
    given = inputs(toy, tmp_path)
    cases = [(name, how, contents) for name, (_, text, _) in given.items() for how, contents in damaged_text(text).items()]
    cases = cases if drawn is None else random.Random(0).sample(cases, drawn)
    failures = []
    for name, how, contents in cases:
        path, _, read = given[name]
        if (wrong := attack_input(path, contents, read)) is not None:
            failures.append((name, how, wrong))
    told(request, "inputs", cases, failures)


@pytest.mark.parametrize("drawn", [DRAWN, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_damage_to_any_file_of_a_run_is_found_and_runs_no_code(uninterrupted, tmp_path, drawn, request):
    attack_files(Path(uninterrupted), tmp_path, drawn, request)


@pytest.mark.parametrize("drawn", [DRAWN, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_any_input_that_is_no_input_is_a_users_error_or_harmless(toy, tmp_path, drawn, request):
    attack_inputs(Path(toy), tmp_path, drawn, request)
