"""Whatever is called, nothing of a user's changes: command lines and Python calls that go well, are refused, are killed or meet
another at the same folder, drawn at random and given the user's own files and folders as places to write to.
"""

import hashlib
import random
import shutil
import time
from collections import Counter

import psutil
import pytest

from tests.end_to_end.runs import LOCAL
from tests.faults.conftest import SHORT

DRAWN = 3
SLOW = 500
PLACES = ("mine", "kept", "base", "data", "notes.md", "link", "run", "run/model", "run/inputs", "run/global_step_4", "empty", ".")
"""Folders and files of the user, and of a run that the user has added to."""
NEW = ("new", "newer", "new/model", "mine/deeper/run", "jürgen/답")
FILES = (
    "data/train.parquet",
    "notes.md",
    "rewards.py",
    "kept/out.jsonl",
    "run/notes.md",
    "run/model/notes.md",
    "link/config.json",
)
TEXTS = (
    "notes.md", "mine/metrics.jsonl", "mine/model/config.json", "mine/model/model.safetensors", "mine/inputs/train.jsonl",
    "mine/previous/1/config.yaml", "mine/global_step_1/meta.json", "mine/model_best/x", "kept/1.jsonl", "kept/out.jsonl",
    "kept/summary.json", "run/notes.md", "run/model/notes.md", "run/global_step_4/notes.md",
)  # fmt: skip
REWARDS = "def score(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
CALL = """
import sys
sys.path.insert(0, {root!r})
import verl_memopt, rewards
rows = [{{"prompt": "1+1=", "answer": "2"}}] * 4
run = verl_memopt.train({model!r}, rows, rewards.score, run_dir={place!r}, steps={steps}, worker_group="local",
    num_generations=2, max_completion_length=8, **{{"actor_rollout_ref.rollout.name": "hf", "data.max_prompt_length": 16,
    "data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}}, {more})
"""
TRAINER = """
import sys
sys.path.insert(0, {root!r})
import rewards

from verl_memopt.trl import GRPOConfig, GRPOTrainer
rows = [{{"prompt": "1+1="}}] * 4
settings = GRPOConfig(output_dir={place!r}, max_steps={steps}, per_device_train_batch_size=4, num_generations=2, use_cpu=True,
    max_completion_length=8, {more})
trainer = GRPOTrainer(model={model!r}, reward_funcs=rewards.score, args=settings, train_dataset=rows)
trainer.train()
trainer.save_model({other!r})
"""
ENTRY = ["-m", "verl_memopt"]
RL = ["train", "--config-dir", "recipe/rloo", "--config-name", "toy", *SHORT]
SFT = [
    "sft", "--config-dir", "recipe/sft", "--config-name", "toy", *LOCAL[:1], "data.prompt_key=prompt",
    "data.response_key=extra_info.answer", "data.train_batch_size=32", "trainer.save_freq=1",
    "data.max_prompt_length=16", "data.max_response_length=4",
]  # fmt: skip


@pytest.fixture
def world(healthy, toy, uninterrupted, tmp_path):
    """A folder with all that a user has: a model, data, code, notes, and a run with files of the user's own in it."""
    root = tmp_path / "world"
    shutil.copytree(toy, root / "data")
    shutil.move(root / "data" / "model", root / "base")
    shutil.copytree(uninterrupted, root / "run")
    (root / "empty").mkdir()
    for name in TEXTS:
        write(root / name, f"mine: {name}")
    write(root / "rewards.py", REWARDS)
    (root / "link").symlink_to("base")
    (root / "data" / "link.jsonl").symlink_to("../notes.md")
    return root


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def owned_by_the_user(root):
    """Gives mode, time and contents of every file of the user, and where links lead."""
    return {str(path.relative_to(root)): state(path) for path in sorted(root.rglob("*")) if is_users(path.relative_to(root))}


def is_users(path):
    return path.parts[0] not in ("run", "empty") or "notes" in path.name


def state(path):
    if path.is_symlink():
        return f"to {path.readlink()}"
    if not path.exists():
        return "gone"
    if path.is_dir():
        return "folder"
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode, path.stat().st_mtime_ns


def changed(root, before):
    return {name: (found, state(root / name)) for name, found in before.items() if found != state(root / name)}


def place_of(chance, root, *more):
    return str(root / chance.choice([*PLACES, *NEW, *more]))


def command_line(chance, root):
    """Gives the arguments of a command, with places of the user among them."""
    place, other = place_of(chance, root), place_of(chance, root, *FILES)
    train = [
        *ENTRY, *chance.choice([RL, RL, RL, SFT]), f"trainer.total_training_steps={chance.choice([1, 2, 6])}",
        f"data.train_files={root}/data/train.parquet", f"data.val_files={root}/data/val.parquet",
        f"actor_rollout_ref.model.path={root}/base", f"trainer.default_local_dir={place}",
    ]  # fmt: skip
    odd = [
        f"trainer.rollout_data_dir={other}", f"trainer.validation_data_dir={other}", f"trainer.timeline_json_file={other}",
        f"actor_rollout_ref.model.path={other}", f"data.train_files={other}", f"custom_reward_function.path={other}",
        f"trainer.resume_from_path={other}", "trainer.resume_mode=disable", "trainer.resume_mode=resume_path", "no.such=1",
        f"hydra.run.dir={other}", "actor_rollout_ref.rollout.n=-1", "trainer.save_freq=1", "trainer.logger=[jsonl,tensorboard]",
        "actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        "trainer.test_freq=1", "trainer.seed=3", f"data.val_files={other}", "trainer.max_actor_ckpt_to_keep=1",
    ]  # fmt: skip
    run = chance.choice([str(root / "run"), place])
    return chance.choice([
        lambda: [*train, *chance.sample(odd, chance.randrange(3))],
        lambda: [*train, *chance.sample(odd, chance.randrange(1, 4))],
        lambda: [*ENTRY, "export", run, other, *chance.choice([[], ["--step", "3"], ["--dtype", "float16"], ["--critic"]])],
        lambda: [*ENTRY, "report", run, *chance.choice([[], ["--out", other]])],
        lambda: [*ENTRY, "check", run],
        lambda: [*ENTRY, "toy", other],
        lambda: [*ENTRY, "chat", chance.choice([run, other]), "--prompt", "1+1=", "--max-tokens", "2"],
        lambda: [*ENTRY, "fit", "--memory", "24", f"actor_rollout_ref.model.path={other}", f"trainer.default_local_dir={place}"],
        lambda: [*ENTRY, "score", f"{root}/data/train.parquet", "--student", f"{root}/base", "--out", other, "--best", place],
        lambda: [*ENTRY, "knobs", "--json", other, "--measure", "--model", f"{root}/base", "--png", place],
    ])()  # fmt: skip


def python_call(chance, root):
    """Gives the arguments of an interpreter that calls Python's door, or TRL's objects."""
    more = ["", "resume=True, ", "seed=3, ", "save_freq=1, ", "no_such=1, ", f"rollout_data_dir={place_of(chance, root)!r}, "]
    names = {
        "root": str(root), "model": str(root / chance.choice(["base", "base", "base", "link", "run/model", "data"])),
        "place": place_of(chance, root), "other": place_of(chance, root, *FILES), "steps": chance.choice([1, 1, 3]),
    }  # fmt: skip
    if chance.random() < 0.2:  # these take Ray's time
        more = ["", "save_steps=1, ", "save_total_limit=1, ", "no_such=1, ", "overwrite_output_dir=True, ", "use_peft=True, "]
        return ["-c", TRAINER.format(more=chance.choice(more), **names)]
    return ["-c", CALL.format(more=chance.choice(more), **names)]


def end(processes, seconds, chance):
    """Lets processes end, or kills each with what it started after a while."""
    for process in processes:
        if seconds is None:
            process.wait(600)
            continue
        time.sleep(chance.uniform(0, seconds))
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait(60)
            psutil.wait_procs(children, 30)


def call_at_random(machine, root, calls, seed):
    """Makes calls, one after another, and gives what each kind did, and what changed of the user's."""
    before, chance, told, wrong = owned_by_the_user(root), random.Random(seed), Counter(), {}
    for number in range(calls):
        how = chance.choice(["alone", "alone", "killed", "beside another"])
        asked = [chance.choice([command_line, python_call])(chance, root)]
        if how == "beside another":
            asked.append(chance.choice([asked[0], command_line(chance, root), python_call(chance, root)]))
        processes = [machine.fork(arguments) for arguments in asked]
        end(processes, 4 if how == "killed" else None, chance)
        for arguments, process in zip(asked, processes, strict=True):
            door = arguments[2] if arguments[0] == "-m" else "TRL" if "Trainer" in arguments[1] else "Python"
            told[door, how, "well" if process.returncode == 0 else "killed" if process.returncode < 0 else "refused"] += 1
            if "Traceback" in process.stdout.split("raised:")[0] and arguments[0] == "-m" and process.returncode >= 0:
                wrong[number, "traceback"] = arguments, process.stdout[-1500:]
        found = changed(root, before)
        if found:
            wrong[number, how] = asked, found
            before.update({name: now for name, (_, now) in found.items()})
    return told, wrong


def test_nothing_of_the_users_changes_in_calls_drawn_at_random(healthy, world):
    told, wrong = call_at_random(healthy, world, DRAWN, 6)  # Python left alone and killed, and a training command
    assert wrong == {}
    assert sum(told.values()) >= DRAWN


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_of_the_users_changes_in_five_hundred_calls(healthy, world, request):
    told, wrong = call_at_random(healthy, world, SLOW, 1)
    lines = [f"{' '.join(case)}: {number}" for case, number in sorted(told.items())]
    request.config.get_terminal_writer().line("\n" + "\n".join(lines))
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
