"""What the pages show of distillation runs as it is: only models, data and the length of a run are those of the toy."""

import json
import re
import shlex
import subprocess

import pytest

import verl_memopt
from tests.docs.pages import DOCS, blocks, commands
from tests.end_to_end.runs import LOCAL
from verl_memopt.cli import main

AR = "actor_rollout_ref"
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+1="}], "solution": str(a + 1), "answer": str(a + 1)} for a in range(4)]
SMALL = {
    "worker_group": "local", f"{AR}.rollout.name": "hf", "data.max_response_length": 4, "trainer.track_memory_every_steps": 0,
}  # fmt: skip
SHORT = [
    *LOCAL, "data.max_response_length=4", "data.max_prompt_length=64", "data.train_batch_size=4", "trainer.save_freq=-1",
    f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.actor.use_dynamic_bsz=true",
]  # fmt: skip
TAUGHT = [text for page in ("distill", "python") for text in blocks(DOCS / f"{page}.md", "python") if "teacher" in text]


@pytest.mark.parametrize("text", TAUGHT, ids=range(len(TAUGHT)))
def test_a_block_of_python_runs(text, toy, teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text.replace('"Qwen/Qwen3-0.6B"', repr(str(toy / "model"))).replace('"Qwen/Qwen3-8B"', repr(str(teacher)))
    text, calls = re.subn(rf"teacher={str(teacher)!r}\)", f"teacher={str(teacher)!r}, **SMALL)", text)
    text, configs = re.subn(r"max_steps=100", "max_steps=1, per_device_train_batch_size=4, **SMALL", text)
    assert calls + configs == 1, text
    given = {"verl_memopt": verl_memopt, "rows": ROWS, "SMALL": SMALL if configs else {**SMALL, "steps": 1}}
    exec(text.replace("range(100)", "range(1)"), given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the data that the commands name."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def run(command, folder, toy, teacher, *more):
    """Run a command of a page. Of a memory profile only a card's size is left out, and of steps all but one."""
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"):
        command = command.replace(name, str(toy / "model"))
    command = re.sub(r"(train|val)\.parquet", "rows.jsonl", command.replace("Qwen/Qwen3-8B", str(teacher)))
    program, *words = shlex.split(command)
    assert program == ".venv/bin/verl-memopt"
    given = [
        word for word in words if not word.startswith(("memory=", "trainer.total_training_steps=", "data.max_response_length="))
    ]
    assert main([*given, *SHORT, "trainer.total_training_steps=1", *more]) == 0


@pytest.mark.parametrize("command", commands(DOCS / "distill.md"))
def test_a_command_of_the_page_runs(command, folder, toy, teacher, monkeypatch):
    monkeypatch.chdir(folder)
    run(command, folder, toy, teacher, "data.val_files=null")


def test_the_responses_of_a_teacher_are_written_and_learned(folder, toy, teacher, monkeypatch):
    monkeypatch.chdir(folder)
    text = next(text for text in blocks(DOCS / "sft.md", "bash") if "taught.jsonl" in text)
    write, collect, learn = text.replace("\\\n", " ").strip().splitlines()
    run(write, folder, toy, toy / "model")
    subprocess.run(["bash", "-c", collect], cwd=folder, check=True)
    taught = [json.loads(line) for line in (folder / "taught.jsonl").read_text().splitlines()]
    assert taught
    assert all(row["finish_reason"] == "stop" for row in taught)
    # A sampled text may have other tokens than those that were sampled, and more of them.
    sizes = [
        f"data.train_batch_size={len(taught)}",
        f"{AR}.actor.ppo_mini_batch_size={len(taught)}",
        "data.max_response_length=16",
    ]
    run(learn, folder, toy, teacher, *sizes)
