"""Cases of (door, input, timing): Python, each command, user code, the pipe of rewards and the records of a run.

A door takes every input at every timing. It must work, or refuse with one clear error of ours; nothing of the user's may change,
and nothing of the process. A new command is attacked without a change here.
"""

import contextlib
import inspect
import io
import itertools
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verl_memopt
from verl_memopt import api
from verl_memopt.cli import COMMANDS, main
from verl_memopt.data.encoder import end_of_turn
from verl_memopt.data.plugin import load_from_file, users_code
from verl_memopt.errors import DataError, UserError
from verl_memopt.model.export import whole_folder, write_record
from verl_memopt.model.folder import files_of_index, resolve_folder
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.observe.files import read_rows
from verl_memopt.observe.own_files import model_files, others_in_model
from verl_memopt.observe.run_folder import RunFolder, read_timeline, refuse_what_is_not_ours
from verl_memopt.observe.samples import refuse_other_files
from verl_memopt.rewards.score import InvalidMessageError, MessageReader, as_message, read_outcomes
from verl_memopt.run.checkpoints import CheckpointStore, ManifestError, check_folder, read_manifest
from verl_memopt.run.export_model import held_checkpoint
from verl_memopt.run.run_lock import LOCK, hold

DRAWN = 100
SLOW = 3000
ROWS = [{"prompt": "1+1=", "answer": "2"}]


VALUES = {
    "nothing": None, "empty": "", "letters": "jürgen/답", "quotes": "a'b\"c", "sign": "a=b", "interpolation": "${oc.env:HOME}",
    "lines": "a\nb", "nul": "a\x00b", "surrogate": "\ud800", "long": "x" * 300, "longer": "7" * 5000, "dots": "../" * 30,
    "flag": "--x", "true": True, "zero": 0, "negative": -1, "huge": 10**400, "nan": float("nan"), "bytes": b"\xff", "list": [],
    "nested": [[[{}]]], "dict": {"a": {1: None}}, "set": {1}, "object": object(), "function": len,
    "class": int, "module": os,
    "tensor": torch.zeros(2), "folder": "/proc", "device": "/dev/full", "itself": __file__,
}  # fmt: skip
"""What may be given where something else is expected."""
TEXTS = {name: value if isinstance(value, str) else repr(value) for name, value in VALUES.items()}


# Timings: what lies in the folder that a door is given.


def absent(folder):
    return


def of_the_user(folder):
    for name in ("model/config.json", "metrics.jsonl", "config.yaml", "previous/1.partial/x", "inputs/train.jsonl", "1.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / LOCK).write_text("mine")


def of_a_run(folder):
    RunFolder(folder).begin("trainer: {}\n", None)
    store = CheckpointStore(folder, None)
    (store.begin(3) / "shard").write_bytes(b"x" * 9)
    store.commit(3, {"step": 3, "seed": 1}, 1)
    (folder / "metrics.jsonl").write_text('{"step": 1, "run_id": "a"}\n')
    with whole_folder(folder / "model") as aside:
        (aside / "config.json").write_text("{}")
        write_record(aside, 3, "actor", "base", torch.float32)
    (folder / "model" / "notes.md").write_text("mine")


def locked(folder):
    of_a_run(folder)
    pid = os.fork()
    if pid == 0:
        hold(folder)
        signal.pause()
    while not (folder / LOCK).exists() or not (folder / LOCK).read_bytes():
        pass
    return lambda: (os.kill(pid, signal.SIGKILL), os.waitpid(pid, 0))


def a_file(folder):
    folder.write_text("mine")


TIMINGS = {each.__name__: each for each in (absent, of_the_user, of_a_run, locked, a_file)}


# Doors: each takes the name of an input, the folder and a source of chance.

ARGUMENTS = [name for name, each in inspect.signature(verl_memopt.train).parameters.items() if each.kind is not each.VAR_KEYWORD]
SETTINGS = (
    "lora_rank",
    "trainer.logger",
    "actor_rollout_ref.model.override_config",
    "debug",
    "custom_reward_function.reward_kwargs",
    "actor_rollout_ref",
    "trainer",
    "trainer.rollout_data_dir",
    "actor_rollout_ref.model.lora_adapter_path",
)


def python(name, folder, chance):
    """A call with one argument or setting of the wrong kind."""
    what = chance.choice([*(each for each in ARGUMENTS if each not in ("run_dir", "on_step")), *SETTINGS])
    given = {
        "model": str(folder.parent / "no model"),
        "dataset": ROWS,
        "rewards": len,
        "steps": 1,
        "run_dir": folder,
        what: {"actor": {"optim": {"lr": VALUES[name]}}} if what == "actor_rollout_ref" else VALUES[name],
    }
    own = {key: given.pop(key) for key in SETTINGS if key in given}
    call = api.Call(settings={"worker_group": "local", **own}, **given)
    *_, inputs = call.load()
    inputs.discard()


def train(name, folder, chance):
    """A whole call, which is refused: there is no such model."""
    verl_memopt.train(
        str(folder.parent / "no model"), ROWS, len, run_dir=folder, project_name=VALUES[name], worker_group="local", steps=1
    )


QUICK = sorted(COMMANDS.keys() - {"until-it-fits", "calibrate", "toy", "rlt-score", "rlt-train", "rlt"})


def command(name, folder, chance):
    """A command line with one odd argument."""
    words = [str(folder), str(folder.parent / "out"), TEXTS[name], f"trainer.default_local_dir={folder}", f"{TEXTS[name]}=1"]
    arguments = [chance.choice(QUICK), *chance.sample(words, chance.randint(1, 3))]
    if arguments[0] in ("train", "sft", "fit"):
        arguments.append("actor_rollout_ref.model.path=/no/model")
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse
        code = error.code
    assert code in (0, 1, 2, 3), code
    said = sys.stderr.getvalue()
    assert "Traceback" not in said.split("raised:")[0], said


def ways_out(value):
    def end():
        raise value

    return [
        end, lambda: os._exit(0), lambda: sys.exit(value), lambda: os.chdir("/"), lambda: torch.set_grad_enabled(False),
        lambda: torch.set_default_dtype(torch.float64), lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: os.fork() or end(), lambda: torch.manual_seed(3), lambda: os._exit(os.fork()),
    ]  # fmt: skip


def user_code(name, folder, chance):
    """A user's function that does what it should not."""
    raises = chance.choice(
        [
            *(SystemExit(VALUES[name]), type("Mine", (SystemExit,), {})(VALUES[name]), KeyboardInterrupt(VALUES[name])),
            *(GeneratorExit(), StopIteration(), RecursionError(), Exception(VALUES[name])),
        ]
    )
    with users_code("the function", DataError):
        chance.choice(ways_out(raises))()


def user_file(name, folder, chance):
    """A user's file that is none."""
    path = folder.parent / "plugin.py"
    texts = (
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def wanted(): pass",
        "\x00",
        "(" * 500,
        TEXTS[name],
    )
    path.write_text(chance.choice(texts), errors="replace")
    load_from_file(chance.choice([str(path), TEXTS[name]]), chance.choice(["wanted", TEXTS[name]]), key="key", error=DataError)


def pipe(name, folder, chance):
    """Bytes on the connection of a reward process, in pieces."""
    outcomes = [[chance.choice([0, 1, 7, VALUES["nan"], "0", None]), chance.choice([1.0, float("inf"), "1", None]), {}, None]]
    data = bytearray(
        as_message(chance.randrange(3), chance.choice([outcomes, outcomes * 2, TEXTS[name], None, 1, [[]], [[1, 2]]]))
    )
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    data = bytes(data[: chance.randrange(1, len(data) + 1)]) + chance.choice([b"", os.urandom(40), b"vmr1"])
    reader, cut = MessageReader(), chance.randrange(len(data))
    for part in (data[:cut], data[cut:]):
        for _, value in reader.feed(part):
            for _, score, extra, _ in read_outcomes(value, {0, 1}):
                assert not abs(score) > 1e13
                assert type(extra) is dict


def record(name, folder, chance):
    """A record of a run with other contents."""
    texts = [
        "",
        "{",
        "[]",
        "null",
        '{"files": 3}',
        '{"files": {"a": 1}}',
        "{" * 9999,
        "9" * 5000,
        '{"step": {}}\n',
        "a,b\n1,2\n",
        TEXTS[name],
    ]
    files = [path for path in folder.rglob("*") if path.is_file() and "notes" not in path.name] if folder.is_dir() else []
    if not files or (folder / "1.jsonl").exists():
        return
    path = chance.choice(sorted(files))
    if chance.randrange(4):
        path.write_text(chance.choice([*texts, TEXTS[name]]), errors="replace")
    else:
        path.unlink()
        chance.choice([os.mkfifo, os.mkdir, lambda pipe: os.symlink("/dev/zero", pipe)])(path)
    readers = [
        lambda: check_folder(folder), lambda: RunFolder(folder).faults(), lambda: read_rows(folder / "metrics.jsonl"),
        lambda: read_timeline(path), lambda: model_files(folder / "model"), lambda: others_in_model(folder / "model"),
        lambda: read_manifest(folder / "global_step_3"), lambda: refuse_what_is_not_ours(folder), lambda: api.Run(folder).summary,
        lambda: refuse_other_files(folder, "key"), lambda: contextlib.ExitStack().enter_context(held_checkpoint(folder, None)),
        lambda: hold(folder).release(), lambda: files_of_index(path), lambda: resolve_folder(str(folder / "model"), "key"),
    ]  # fmt: skip
    chance.choice(readers)()


TEMPLATES = ("{{ 'x' * 10**12 }}", "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "{% for", "{{ a.b.c }}")


def template(name, folder, chance):
    """A chat template that takes all memory, or is none."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chance.choice([*TEMPLATES, TEXTS[name]])
    end_of_turn(tokenizer, {})


def model_folder(name, folder, chance):
    """A model's folder in which something is no file."""
    model = folder.parent / "model"
    model.mkdir()
    for each in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / each).write_text(TEXTS[name], errors="replace")
    odd = model / chance.choice(["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
    odd.unlink(missing_ok=True)
    chance.choice([os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: None])(odd)
    arguments = chance.choice([["chat", str(model)], ["fit", f"actor_rollout_ref.model.path={model}"], ["export", str(model)]])
    code = 2
    with contextlib.suppress(SystemExit):  # argparse
        code = main(arguments)
    assert code in (0, 1, 2, 3)


DOORS = {each.__name__: each for each in (python, train, command, user_code, user_file, pipe, record, template, model_folder)}
OURS = (UserError, InvalidMessageError, ManifestError)


def shared():
    """Gives what the whole process has."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    umask = os.umask(0o022)
    os.umask(umask)
    return os.getcwd(), umask, torch.is_grad_enabled(), torch.get_default_dtype(), handlers, torch.initial_seed()


def owned(folder):
    """Gives the files of the user in a folder."""
    files = [folder] if folder.is_file() else folder.rglob("*")
    return {path: path.read_bytes() for path in files if path.is_file() and path.read_bytes() == b"mine"}


def attacked(door, name, timing, folder, seed):
    """Tries one case. Gives what is wrong, or None."""
    ended = TIMINGS[timing](folder)
    before, of_user = shared(), owned(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            DOORS[door](name, folder, random.Random(seed))
    except OURS as error:
        if not str(error) or len(str(error)) > 20_000:
            return f"an error of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001 - whatever it is, a user would see a traceback
        return f"{type(error).__name__}: {error!s:.200}"
    finally:
        if ended:
            ended()
    if shared() != before:
        return f"the process is another: {shared()}, {before}"
    gone = [path for path, data in of_user.items() if not path.is_file() or path.read_bytes() != data]
    return f"of the user: {gone}" if gone else None


CASES = [SimpleNamespace(door=door, name=name, timing=timing) for door, name, timing in itertools.product(DOORS, VALUES, TIMINGS)]


def wrong_of(cases, parent):
    wrong, here = {}, os.getpid()
    for number, case in enumerate(cases):
        folder = Path(parent) / f"{number}" / "run"
        folder.parent.mkdir()
        found = attacked(case.door, case.name, case.timing, folder, number)
        if os.getpid() != here:  # a child of the case
            os._exit(0)
        if found is not None:
            wrong[number, case.door, case.name, case.timing] = found
    return wrong


def test_every_door_takes_or_refuses_what_it_is_given(tmp_path):
    assert wrong_of(random.Random(0).sample(CASES, DRAWN), tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_thousand_cases_of_every_door(tmp_path, request):
    cases = random.Random(1).choices(CASES, k=SLOW)
    wrong = wrong_of(cases, tmp_path)
    tried, failed = Counter(case.door for case in cases), Counter(door for _, door, *_ in wrong)
    lines = [f"{door}: {number} tried, {number - failed[door]} survived, {failed[door]} failed" for door, number in tried.items()]
    request.config.get_terminal_writer().line("\n" + "\n".join(lines))
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
