"""Training from Python: ``verl_memopt.train``, and TRL's trainers by name."""

import asyncio
import dataclasses
import datetime
import itertools
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import cloudpickle
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import verl_memopt
from verl_memopt import api, trl
from verl_memopt.config.loader import compose_mapping, load_settings
from verl_memopt.config.values_of_python import as_override
from verl_memopt.data.python_rows import held_out_files, write_rows
from verl_memopt.errors import CheckpointError, ConfigError, DataError, RewardError, UserError
from verl_memopt.model.given import write_model
from verl_memopt.rewards import python_functions
from verl_memopt.rewards.python_functions import (
    PLAIN,
    TRL,
    VERL,
    VERL_BATCH,
    NamedFunction,
    named_functions,
    reward_settings,
    save_functions,
)
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.score import RewardRow
from verl_memopt.trl.config import adapter_arguments, given_and_defaults
from verl_memopt.trl.trainer import REFUSED as REFUSED_ARGUMENTS

# The reward processes would import this module, and with it torch and transformers, for a function of three lines.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(2) for b in range(4)]
SMALL = {
    "worker_group": "local",
    "actor_rollout_ref.rollout.name": "hf",
    "num_generations": 2,
    "max_completion_length": 4,
    "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
    "trainer.track_memory_every_steps": 0,
}


# Reward functions.


def reward_row(number, text, prompt="1+1=", **columns):
    extra = {"answer": "2", **columns, "prompt": prompt, "completion_ids": [7] * number}
    return RewardRow("toy", text, "2", {**extra, "trainer_state": {"global_step": 3, "max_steps": 9}}, f"rows:{number}")


def scored(functions, rows, tmp_path, weights=None):
    """Gives the results of the reward processes that call the functions."""
    from verl_memopt.config.loader import settings_from_mapping

    values = save_functions(named_functions(functions, weights), tmp_path / "rewards.pkl")
    needed = {"data.train_files": "x", "data.val_files": None, "actor_rollout_ref.model.path": "m"}
    settings = settings_from_mapping({**needed, "actor_rollout_ref.actor.use_dynamic_bsz": True, **values})
    manager = settings.reward_model.reward_manager
    with RewardRunner(settings.custom_reward_function, 1, manager=manager) as runner:
        return runner.score(rows)


def test_each_kind_of_signature_is_told_by_its_arguments():
    kinds = {
        TRL: [lambda completions, **kw: 0, lambda prompts, completions, completion_ids, trainer_state, answer: 0],
        VERL: [lambda data_source, solution_str, ground_truth, extra_info=None: 0],
        VERL_BATCH: [lambda data_sources, solution_strs, ground_truths, extra_infos: 0],
        PLAIN: [lambda answer: 0, lambda answer, row: 0, lambda text, row, strict=True: 0],
    }
    assert all(NamedFunction.of("f", function, 1.0).kind == kind for kind, functions in kinds.items() for function in functions)


def test_closures_of_all_kinds_are_weighed_and_logged_by_name(tmp_path):
    bonus = 0.5

    def trl_like(prompts, completions, completion_ids, trainer_state, answer, log_metric, **columns):
        assert set(columns) == {"level", "log_extra"}, columns
        assert trainer_state.global_step == 3
        log_metric("tokens", sum(map(len, completion_ids)))
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [float(text == wanted) for text, wanted in zip(texts, answer, strict=True)]

    async def slow(answer, row):
        await asyncio.sleep(0)
        return None if row["level"] == 1 else bonus

    def verl_like(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(len(solution_str)), "source": data_source}

    chat = [{"role": "user", "content": "1+1="}]
    rows = [reward_row(1, "2", level=0), reward_row(2, "3", prompt=chat, level=1)]
    first, second = scored([trl_like, slow, verl_like], rows, tmp_path, weights=[2.0, 1.0, 0.1])
    assert (first.score, second.score) == (pytest.approx(2.6), pytest.approx(0.1))
    assert first.extra == {"tokens": 3, "source": "toy", "trl_like": 1.0, "slow": 0.5, "verl_like": 1.0}
    assert second.extra["slow"] is None


@pytest.mark.parametrize("function", [lambda answer, row: float(answer == row["answer"]), lambda answer: float(answer == "2")])
def test_a_function_of_a_row_needs_no_batch(function, tmp_path):
    assert [each.score for each in scored(function, [reward_row(1, "2"), reward_row(2, "x")], tmp_path)] == [1.0, 0.0]


def test_functions_of_one_name_are_numbered_and_a_dict_names_them(tmp_path):
    assert [each.name for each in named_functions([lambda answer: 0, lambda answer: 1])] == ["lambda", "lambda_2"]
    assert [each.name for each in named_functions({"right": lambda answer: 0})] == ["right"]


def wrong_length(completions, **kwargs):
    return [1.0]


def no_list(completions, **kwargs):
    return 1.0


def text(answer):
    return "good"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wrong_length, "wrong_length returned 1 scores for 2 rows"),
        (no_list, "no_list returned 1.0, not a list of scores"),
        (text, "text returned 'good' of type str, not a number"),
    ],
)
def test_a_wrong_answer_of_a_function_names_it_and_the_row(function, message, tmp_path):
    with pytest.raises(RewardError, match=rf"(?s)^rows:1: the reward function .*{message}"):
        scored(function, [reward_row(1, "2"), reward_row(2, "3")], tmp_path)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("of_batch", [False, True])
def test_a_row_for_which_every_function_returns_none_has_no_reward_and_a_warning_names_it(several, of_batch, tmp_path, caplog):
    def of_trl(completions, **columns):
        return [None if text == "3" else 1.0 for text in completions]

    def of_row(answer):
        return None if answer == "3" else 1.0

    function = of_trl if of_batch else of_row
    rows = [reward_row(1, "2"), reward_row(2, "3"), reward_row(3, "3")]
    results = scored([function, of_row] if several else function, rows, tmp_path)
    assert [results[0].score, *(math.isnan(each.score) for each in results[1:])] == [1.0 + several, True, True]
    assert not any(each.failed for each in results)
    (warning,) = [text for text in caplog.messages if "returned None" in text]
    assert warning.startswith("All reward functions returned None for the following kwargs: {'answer': '2'")
    assert "rows:2, the first of 2 of 3 rows" in warning


LOCK = threading.Lock()


# Settings and rows.


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -1.5e-6,
        "plain",
        "with space, comma and 'quotes'",
        "1e-3",
        "true",
        "a\\b",
        "c\\",
        "d\\'e",
        [1, "x y"],
        {"a": [1, None]},
        "",
        "/home/jürgen/runs",
        "답",
        "${oc.env:HOME}",
        "\\${x}",
        "x=y",
    ],
)
def test_a_value_of_python_reaches_the_settings_as_it_is(value):
    key = "custom_reward_function.reward_kwargs.k"
    given = [
        compose_mapping("grpo_trainer", [f"{key}={as_override(value)}"]),
        compose_mapping("grpo_trainer", [], values={key: value}),
    ]
    assert [tree["custom_reward_function"]["reward_kwargs"]["k"] for tree, _ in given] == [value, value]


@pytest.mark.parametrize(
    "value", ["two\nlines", "a\tb", {"ключ": "값", "a.b": ["$", "{"]}, "\x00", "~", "[", "\u2028", "a" * 9000]
)
def test_a_value_of_python_is_never_read_as_text(value):
    tree, _ = compose_mapping("sft_trainer", [], values={"custom_reward_function.reward_kwargs.k": value})
    assert tree["custom_reward_function"]["reward_kwargs"]["k"] == value


def test_a_name_beyond_ascii_needs_no_quotes_on_the_command_line():
    given = ["trainer.default_local_dir=/home/jürgen/läufe", "data.train_files=답.jsonl", "data.val_files=null"]
    more = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    loaded = load_settings("grpo_trainer", [*given, *more])
    assert (loaded.trainer.default_local_dir, loaded.data.train_files) == ("/home/jürgen/läufe", "답.jsonl")


def test_a_call_names_its_folder_its_rows_and_a_group_in_any_letters(model, tmp_path):
    run_dir, rows = tmp_path / "jürgen's = ${x}", [{"질문": "1+1="}]
    folder, loaded, inputs = api.Call(model, rows, {"debug": "dry", "prompt_key": "질문"}, run_dir=run_dir).load()
    assert loaded.trainer.default_local_dir == str(folder) == str(run_dir)
    assert (loaded.data.prompt_key, loaded.debug.mode) == ("질문", "dry")
    inputs.discard()


class Frame:
    """The two members of a DataFrame that are read."""

    columns = ("prompt",)

    def to_dict(self, kind):
        return ROWS if kind == "records" else {}


@pytest.mark.parametrize("dataset", [ROWS, iter(ROWS), Frame()])
def test_rows_of_python_are_written_for_the_run(dataset, tmp_path):
    from verl_memopt.data.sources import read_rows

    number, file = write_rows(dataset, tmp_path / "inputs" / "train.jsonl", "dataset")
    assert (number, [row for _, row in read_rows(file, "k")]) == (len(ROWS), ROWS)


def sums(start=0):
    for number in itertools.count(start):
        yield {"prompt": f"{number % 90}+1=", "answer": str(number % 90 + 1), "level": number}


@pytest.mark.parametrize("door", ["train", "sft", "trl"])
def test_rows_without_an_end_are_a_stream_that_leaves_no_file(door, tmp_path):
    for dataset, more in ((sums, {}), (sums(), {}), (ROWS, {"streaming": True}), (ROWS, {"data": {"streaming": True}})):
        call = api.Call("folder", dataset, more, "sft" if door == "sft" else "grpo", run_dir=tmp_path / "run", steps=3)
        if door == "trl":
            arguments = {"output_dir": str(tmp_path / "run"), "max_steps": 3, **more}
            call = trl.GRPOTrainer("folder", right, arguments, dataset)._call()
        _, settings, inputs = call.load()
        assert (settings.data.streaming, settings.data.train_files) == (True, "python:dataset")
        assert settings.trainer.total_training_steps == 3
        assert [row["prompt"] for _, row in itertools.islice(inputs.rows.rows(0), 3)] == ["0+1=", "1+1=", "2+1="] or more
        assert not list(inputs.aside.glob("*.jsonl"))
        inputs.discard()


def test_a_stream_needs_a_number_of_steps_and_a_few_rows_without_a_length_are_no_stream(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^data\.streaming=true, .*no known number of rows.*steps=.*max_steps.*list\(dataset\)"
    ):
        api.Call("folder", sums, {}, run_dir=tmp_path / "run").load()
    trainer = trl.GRPOTrainer("folder", right, {"output_dir": str(tmp_path / "run")}, sums())
    with pytest.raises(ConfigError, match="max_steps"):
        trainer._call().load()
    _, settings, inputs = api.Call("folder", iter(ROWS), {}, run_dir=tmp_path / "run").load()
    assert (settings.data.streaming, settings.data.train_batch_size, inputs.rows) == (False, len(ROWS), None)
    inputs.discard()
    assert not (tmp_path / "run").exists()


def test_held_out_rows_without_an_end_are_as_many_as_the_call_wants(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_memopt.data.python_rows.MOST_WITHOUT_LENGTH", 50)
    call = {"algorithm": "grpo", "run_dir": tmp_path / "run", "steps": 1}
    for held_out in (sums, {"easy": sums(), "hard": sums}):
        _, _, inputs = api.Call("folder", ROWS, {"val_max_samples": 5}, eval_dataset=held_out, **call).load()
        assert len((inputs.aside / "eval.jsonl").read_text().splitlines()) == 5 * (1 if held_out is sums else 2)
        inputs.discard()
        with pytest.raises(DataError, match=r"^eval_dataset.*no length and more than 50 rows.*val_max_samples"):
            api.Call("folder", ROWS, {}, eval_dataset=held_out, **call).load()


def test_numbers_of_numpy_and_dates_are_kept(tmp_path):
    row = {"prompt": "x", "n": np.int64(3), "v": np.arange(2), "d": datetime.date(2026, 1, 2)}
    write_rows([row], tmp_path / "rows.jsonl", "dataset")
    assert (tmp_path / "rows.jsonl").read_text() == '{"prompt": "x", "n": 3, "v": [0, 1], "d": "2026-01-02"}\n'


def test_datasets_by_name_become_one_file_whose_rows_say_their_set(tmp_path):
    from verl_memopt.data.sources import read_rows

    (tmp_path / "hard.jsonl").write_text('{"prompt": "h", "extra_info": {"level": 3}}\n')
    file = held_out_files({"easy": ROWS[:1], "hard": str(tmp_path / "hard.jsonl")}, tmp_path / "inputs")
    (_, easy), (_, hard) = read_rows(file, "k")
    assert easy == {**ROWS[0], "extra_info": {"validation_set": "easy"}}
    assert hard == {"prompt": "h", "extra_info": {"level": 3, "validation_set": "hard"}}


@pytest.mark.parametrize(
    ("rewards", "settings"),
    [
        ("some/folder", {"reward_model.enable": True, "reward_model.model.path": "some/folder"}),
        (["owner/scorer"], {"reward_model.enable": True, "reward_model.model.path": "owner/scorer"}),
        ("dir/mine.py:f", {"custom_reward_function.path": "dir/mine.py", "custom_reward_function.name": "f"}),
        ("mine.py", {"custom_reward_function.path": "mine.py"}),
    ],
)
def test_a_reward_that_is_a_text_is_a_model_or_a_file(rewards, settings, tmp_path):
    assert reward_settings(rewards, None, None, tmp_path) == settings


def test_of_several_reward_models_each_has_its_folder_and_its_name(tmp_path):
    given = {"first": "owner/a", "mine": lambda answer: 1.0, "second": "owner/b"}
    settings = reward_settings(given, [1.0, 2.0, 0.5], None, tmp_path)
    assert settings["reward_model.model.path"] == "owner/a"
    assert settings["reward_model.further_models"] == {"second": "owner/b"}
    read = {"rm_score": 0.25, "rm_scores": {"second": 4.0}}
    result = python_functions.score_row("toy", "2", "2", read, settings["custom_reward_function.reward_kwargs"]["functions"])
    assert result == {"first": 0.25, "mine": 1.0, "second": 4.0, "score": 0.25 + 2.0 + 2.0}


def test_a_reward_model_beside_functions_is_one_of_them_with_its_weight(tmp_path):
    settings = reward_settings([lambda answer: 1.0, "owner/scorer"], [1.0, 0.5], None, tmp_path)
    assert settings["reward_model.model.path"] == "owner/scorer"
    rows = [(*("toy", "2", None), {"rm_score": 4.0})]
    (found,) = [python_functions.score_row(*row, functions=str(tmp_path / "rewards.pkl")) for row in rows]
    assert found == {"lambda": 1.0, "scorer": 4.0, "score": 3.0}


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("openai/gsm8k:main@train", "hub:openai/gsm8k:main@train"),
        ("owner/name", "hub:owner/name"),
        ("folder/rows.parquet", "folder/rows.parquet"),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
    ],
)
def test_files_and_hub_ids_are_named_as_they_are(dataset, expected, tmp_path):
    assert write_rows(dataset, tmp_path / "rows.jsonl", "dataset") == (None, expected)


@pytest.mark.parametrize(
    ("model", "message"), [(3, "int is no model"), (type("M", (), {"save_pretrained": 1})(), "needs its tokenizer")]
)
def test_what_is_no_model_is_refused(model, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^model: .*{message}"):
        write_model(model, None, tmp_path)


# Whole runs.


def right(completions, answer, **columns):
    return [float(each.strip() == wanted) for each, wanted in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def model(toy):
    return str(toy / "model")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return verl_memopt.train(
        model,
        ROWS,
        [right, lambda answer, row: -0.1 * len(answer)],
        steps=2,
        run_dir=tmp_path_factory.mktemp("runs") / "run",
        eval_dataset=ROWS[:2],
        save_freq=1,
        **SMALL | {"trainer.track_memory_every_steps": 10},
    )


def test_a_run_from_python_leaves_metrics_charts_and_its_command(run):
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert {"reward/right/mean", "reward/lambda/mean"} <= run.metrics[-1].keys()
    assert run.summary["steps"] == 2
    assert [path.name for path in run.charts] == ["memory_timeline.png", "peak_memory_by_phase.png", "reward_and_validation.png"]
    assert run._repr_html_().count("<img") == 3
    assert run.command.startswith("verl-memopt train --config-name grpo_trainer ")
    assert {path for path in (run.path, *run.path.rglob("*")) if path.stat().st_mode & 0o077} == set()
    assert "3 rows of metrics" in repr(run)
    chat = [{"role": "user", "content": "1+1="}]
    assert [isinstance(each, str) for each in run.generate(["1+2=", chat], max_tokens=3)] == [True, True]
    assert run.generate("1+2=", max_tokens=3) == run.generate(["1+2="], max_tokens=3)[0]


def open_files():
    return Counter(str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_a_second_call_that_resumes_goes_on_and_holds_no_more_files(run, model):
    files, again = open_files(), {"steps": 3, "run_dir": run.path, "save_freq": 1, **SMALL}
    resumed = verl_memopt.train(model, ROWS, [right, lambda answer, row: -0.1 * len(answer)], resume=True, **again)
    assert [row["step"] for row in resumed.metrics] == [0, 1, 2, 3]
    assert not open_files() - files


def test_a_run_without_a_folder_gets_a_new_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "m-grpo-1").mkdir(parents=True)
    assert api._run_folder(None, "some/m", "grpo", resume=False) == tmp_path / "runs" / "m-grpo-2"
    with pytest.raises(ConfigError, match="which run"):
        api._run_folder(None, "m", "grpo", resume=True)


def test_the_command_of_a_run_keeps_no_secret(model, tmp_path):
    secret = {"custom_reward_function.reward_kwargs": {"api_key": "sk-4,2"}}
    folder, loaded, inputs = api.Call(model, ROWS, {**SMALL, **secret}, run_dir=tmp_path / "run", rewards="reward.py:f").load()
    assert loaded.custom_reward_function.reward_kwargs == {"api_key": "sk-4,2"}
    with inputs.written():
        assert "sk-4" not in (folder / "inputs" / "command.txt.pending").read_text()


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({}, {"lora_rnak": 3}),
        ({}, {"actor_rollout_ref.actor.fsdp_config.dtype": "fp8"}),
        ({"rewards": [lambda answer, lock=LOCK: 0]}, {}),
        ({"dataset": [*ROWS, {"prompt": object()}]}, {}),
        ({"dataset": [{"question": "1+1="}]}, {}),
        ({"model": "no/such/folder"}, {}),
        ({"eval_dataset": 3}, {}),
        ({"resume": True}, {}),
        ({"rewards": "nowhere.py:f"}, {}),
        ({}, {"trainer.logger": ["console", "wandb"]}),
    ],
    ids=["name", "value", "function", "row", "column", "model", "eval", "resume", "file", "logger"],
)
@pytest.mark.parametrize("run_dir", [None, "mine/run"])
def test_a_refused_call_leaves_no_folder(change, settings, run_dir, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    call = {"model": model, "dataset": ROWS, "rewards": right, "run_dir": run_dir, **change}
    with pytest.raises(UserError):
        verl_memopt.train(**call, steps=1, **{**SMALL, **settings})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_loss_that_was_edited_is_read_again_by_the_next_call(model, tmp_path):
    file, loss = tmp_path / "loss.py", "actor_rollout_ref.actor.policy_loss"
    settings = {f"{loss}.loss_mode": "custom", f"{loss}.custom.path": str(file), **SMALL}
    for text, message in (("return -advantages.mean()", "returned float32"), ("return -advantages", "has no gradient")):
        file.write_text(f"def compute_loss(log_prob, advantages):\n    {text}\n")
        with pytest.raises(UserError, match=message):
            verl_memopt.train(model, ROWS, right, steps=1, run_dir=tmp_path / "run", **settings)
    assert list(tmp_path.glob("run/*")) == []


def test_a_refused_call_changes_no_file_of_a_run_that_is_there_or_going_on(run, model):
    def files():
        return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "run.lock"}

    before, call = files(), {"model": model, "dataset": ROWS[:3], "rewards": lambda answer: -7.0, "run_dir": run.path}
    with pytest.raises(ConfigError, match="fp8"):
        verl_memopt.train(**call, **SMALL | {"actor_rollout_ref.actor.fsdp_config.dtype": "fp8"})
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another run writes here"):
            verl_memopt.train(**call, **SMALL)
        other.communicate()
    assert files() == before


HOLD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from verl_memopt.run.run_lock import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_resuming_what_left_no_checkpoint_is_an_error_with_the_way_out(model, tmp_path):
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"^resume=True, run_dir='{folder}': .*model='{folder}/model', .*save_freq"):
        verl_memopt.train(model, ROWS, right, run_dir=folder, resume=True, **SMALL)
    for door in (verl_memopt.train, lambda *args, **kwargs: verl_memopt.session(*args, **kwargs).__enter__()):
        with pytest.raises(ConfigError, match=r"^resume=True, .*no checkpoint .* Leave resume"):
            door(model, ROWS, run_dir=tmp_path / "none", resume=True, **SMALL)
    trainer = trl.GRPOTrainer(model, right, {"output_dir": str(tmp_path / "out"), **SMALL}, ROWS)
    with pytest.raises(ConfigError, match=r"no checkpoint .* Leave resume \(resume_from_checkpoint\) out"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "out").exists()


def test_a_call_that_says_nothing_of_checkpoints_goes_on_from_its_last_step_or_is_a_new_run(model, tmp_path):
    call = {"rewards": right, "run_dir": tmp_path / "run", **SMALL}
    verl_memopt.train(model, iter(ROWS), steps=1, **call)
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    run = verl_memopt.train(model, iter(ROWS), steps=2, resume=True, **call)
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert sorted(path.name for path in run.path.glob("global_step_*")) == ["global_step_1", "global_step_2"]
    assert not list(run.path.glob("previous/*")), "a model that is continued stays in its place"
    anew = verl_memopt.train(model, ROWS[:4], steps=1, save_freq=-1, **call)
    assert [row["step"] for row in anew.metrics] == [1]
    assert len(verl_memopt.Run(anew.path / "previous" / "1").metrics) == 2
    assert (anew.path / "previous" / "1" / "model" / "model.safetensors").is_file()
    assert not list(anew.path.glob("global_step_*"))
    assert (anew.path / "model" / "model.safetensors").read_bytes() != weights
    assert (anew.path / "console.log").read_text().count("step 1/1") == 1


def test_a_stream_that_is_resumed_ends_as_one_that_was_not_stopped(model, tmp_path):
    def weights(run):
        return (run.path / "model" / "model.safetensors").read_bytes()

    call = {"train_batch_size": 4, "shuffle_buffer_size": 6, "seed": 3, **SMALL}

    def varied(answer):
        return sum(map(ord, answer)) % 5 / 4

    whole = verl_memopt.train(model, sums, varied, steps=2, run_dir=tmp_path / "whole", **call)
    first = verl_memopt.train(model, sums, varied, steps=1, run_dir=tmp_path / "stopped", **call)
    assert weights(first) != weights(whole)
    assert weights(verl_memopt.train(model, sums(), varied, steps=2, run_dir=first.path, resume=True, **call)) == weights(whole)
    assert not [path for path in first.path.rglob("*.jsonl") if "train" in path.name]
    assert first.evaluate(ROWS[:2]), "which needs no training row"


# TRL's trainers.


@dataclasses.dataclass
class ConfigOfTrl:
    """A config as TRL's are: a dataclass with defaults."""

    output_dir: str | None = None
    learning_rate: float = 1e-6
    num_generations: int = 8
    bf16: bool = True


def test_a_config_of_trl_gives_what_differs_from_its_defaults():
    assert given_and_defaults(ConfigOfTrl("runs/x", num_generations=4), "args") == (
        {"output_dir": "runs/x", "num_generations": 4},
        {"learning_rate": 1e-6, "num_generations": 8, "bf16": True},
    )


@dataclasses.dataclass
class ConfigOfPeft:
    """A config as peft's is: fields that ask for nothing have defaults that are not empty."""

    r: int = 8
    target_modules: set | None = None
    megatron_core: str = "megatron.core"
    use_dora: bool = False


def test_an_object_of_peft_says_what_differs_from_its_defaults():
    at = "actor_rollout_ref.model."
    found = adapter_arguments(ConfigOfPeft(r=4, target_modules={"v_proj"}))
    assert found == {f"{at}lora_rank": 4, f"{at}lora_alpha": 8, f"{at}target_modules": ["v_proj"]}
    with pytest.raises(ConfigError, match=r"^peft_config: use_dora=True: .*DoRA"):
        adapter_arguments(ConfigOfPeft(use_dora=True))


def test_a_config_of_peft_becomes_lora_settings():
    config = {"r": 4, "lora_alpha": 16, "target_modules": {"v_proj", "q_proj"}, "task_type": "CAUSAL_LM", "lora_dropout": 0.0}
    at = "actor_rollout_ref.model."
    assert adapter_arguments(config) == {f"{at}lora_rank": 4, f"{at}lora_alpha": 16, f"{at}target_modules": ["q_proj", "v_proj"]}
    assert adapter_arguments({"r": 4, "use_rslora": True})[f"{at}use_rslora"] is True


@pytest.mark.parametrize("modules", [None, ["q_proj"]])
def test_with_target_parameters_a_config_of_peft_adapts_no_layers_but_those_that_it_names(modules):
    at, experts = "actor_rollout_ref.model.", ["mlp.experts.down_proj"]
    found = adapter_arguments({"r": 4, "target_parameters": experts, "target_modules": modules})
    assert (found[f"{at}target_parameters"], found[f"{at}target_modules"]) == (experts, modules or [])


def test_a_real_config_of_peft_names_experts():
    peft = pytest.importorskip("peft")
    found = adapter_arguments(peft.LoraConfig(r=4, target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM"))
    assert found["actor_rollout_ref.model.target_parameters"] == ["mlp.experts.down_proj"]
    assert found["actor_rollout_ref.model.target_modules"] == []


@pytest.mark.parametrize(
    ("name", "value"), [("modules_to_save", ["lm_head"]), ("trainable_token_indices", [5]), ("init_lora_weights", "pissa")]
)
def test_what_peft_trains_beside_adapters_is_refused_with_its_reason(name, value):
    with pytest.raises(ConfigError, match=rf"^peft_config: {name}=.*: .* (beside|base)"):
        adapter_arguments({"r": 4, name: value})


REFUSED = [
    *(({name: object()}, name) for name in REFUSED_ARGUMENTS),
    ({"nonsense": 1}, "nonsense"),
    ({"train_dataset": None}, "train_dataset"),
    ({"args": 3}, "args"),
    ({"peft_config": 3}, "peft_config"),
    ({"peft_config": {"use_dora": True}}, "peft_config"),
    ({"reward_funcs": None}, "reward_funcs"),
]


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
@pytest.mark.parametrize(("arguments", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_an_argument_of_trl_without_an_equal_is_refused_by_name(trainer, arguments, name):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        trainer("m", **{"reward_funcs": right, "train_dataset": ROWS, **arguments})


def test_all_that_is_wrong_with_the_arguments_of_a_trainer_is_one_error_with_the_words_of_trl():
    with pytest.raises(ValueError, match="`train_dataset` is required") as caught:
        trl.GRPOTrainer("m", tols=[right], callback=[], rollout_func=right)
    names = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert names == ["tols", "callback", "rollout_func", "train_dataset", "reward_funcs"]
    assert "No reward source provided" in str(caught.value)


@pytest.mark.parametrize(
    ("resume", "run_dir", "expected"),
    [
        ("old", None, ("old", "resume_path", "old")),
        (Path("old"), "new", ("new", "resume_path", "old")),
        ("old/global_step_3", None, ("old", "resume_path", "old/global_step_3")),
        (False, "new", ("new", "disable", None)),
    ],
)
def test_a_run_goes_on_from_a_folder_where_it_is_unless_it_gets_another(resume, run_dir, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {} if resume is False else {"resume_from_checkpoint": resume}
    for given in ({"resume": resume}, {"settings": more}):
        call = api.Call("m", ROWS, given.get("settings", {}), rewards=right, run_dir=run_dir, resume=given.get("resume", False))
        folder, loaded, inputs = call.load()
        inputs.discard()
        path = loaded.trainer.resume_from_path
        found = folder, loaded.trainer.resume_mode, path and Path(path)
        assert found == (tmp_path / expected[0], expected[1], expected[2] and tmp_path / expected[2])


def test_the_config_of_a_trainer_says_where_it_goes_on_unless_train_does():
    trainer = trl.GRPOTrainer("m", right, {"output_dir": "out", "resume_from_checkpoint": "old", "lr": 0.5}, ROWS)
    assert [trainer._call().resume, trainer._call(resume=True).resume] == ["old", True]
    assert "resume_from_checkpoint" not in trainer._call().settings


def test_a_script_of_trl_trains(model, tmp_path):
    config = trl.RLOOConfig(output_dir=str(tmp_path / "out"), max_steps=1, beta=0.0, reward_weights=[0.5], logging_steps=1)
    config |= SMALL | {"per_device_train_batch_size": 8}
    trainer = trl.RLOOTrainer(model, reward_funcs=[right], args=config, train_dataset=ROWS, peft_config={"r": 2})
    with pytest.raises(ConfigError, match="nothing was trained yet"):
        trainer.save_model(tmp_path / "model")
    output = trainer.train()
    assert (output.global_step, trainer.state.global_step) == (1, 1)
    assert trainer.state.log_history[-1]["step"] == 1
    assert trainer.run.path == tmp_path / "out"
    for _ in range(2):
        trainer.save_model(tmp_path / "model")
    # peft looks for adapters in the folder itself.
    for name in ("model.safetensors", "adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "model" / name).is_file()
    assert trainer.train(resume_from_checkpoint=True).global_step == 1


def agent_arguments(folder):
    """Arguments of a step in which each turn calls ``look``."""
    (folder / "parser.py").write_text("def calls(text):\n    return [('look', {'place': text[:1]})]\n")
    return {
        "max_steps": 1, "output_dir": str(folder / "out"), "max_tool_calling_iterations": 1, **SMALL,
        "trainer.rollout_data_dir": str(folder / "rows"), "max_completion_length": 40, "max_prompt_length": 40,
        "actor_rollout_ref.rollout.multi_turn.format": f"{folder / 'parser.py'}:calls",
        "actor_rollout_ref.rollout.agent.num_workers": 1, "actor_rollout_ref.rollout.stop_token_ids": list(range(20, 120)),
    }  # fmt: skip


def test_an_environment_makes_the_tasks_and_a_reward_function_sees_only_those_that_did_not_fail(model, tmp_path):
    class Room:
        def reset(self, seed, **row):
            if seed % 2:
                raise ConnectionError("no server")
            self.seen = []
            return "Look."

        def look(self, place: str) -> str:
            """Look at a place.

            Args:
                place: Where to look.
            """
            self.seen.append(place)
            return "dark"

    def seen(environments, **columns):
        return [float(len(environment.seen)) for environment in environments]

    args = {**agent_arguments(tmp_path), "per_device_train_batch_size": 16}
    del args["max_prompt_length"]
    trainer = trl.GRPOTrainer(model, seen, args, environment_factory=Room)
    trainer.train()
    assert "max_prompt_length: 2008\n" in (trainer.run.path / "config.yaml").read_text()  # the toy's context, less 40
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    scores = {row["ended"].partition(":")[0]: row["score"] for row in rows}
    assert scores == {"failed": pytest.approx(math.nan, nan_ok=True), "max_assistant_turns": 1.0}
    assert {row["conversation"][0]["content"] for row in rows} == {"", "Look."}
    with pytest.raises(ConfigError, match=r"dataset: there are no rows.*Set steps \(max_steps\)"):
        trl.GRPOTrainer(model, seen, {**args, "max_steps": -1}, environment_factory=Room).train()
    with pytest.raises(ConfigError, match="several environments need rows with a column `environment`"):
        trl.GRPOTrainer(model, seen, args, environment_factory={"room": Room}).train()


def test_a_script_of_trl_with_an_environment_trains_on_what_its_tools_returned(model, tmp_path):
    places = []  # a class that uses it is sent to other processes with its value

    class Room:
        """An environment that is defined inside a function."""

        def reset(self, **row):
            self.seen, self.level = [*places], row["level"]
            return " Look."

        def look(self, place: str) -> str:
            """Look at a place.

            Args:
                place: Where to look.
            """
            self.seen.append(place)
            return "dark"

        def get_reward(self) -> float:
            return 0.5 * len(self.seen)

    def seen(environments, completions, **columns):
        assert [environment.level for environment in environments] == columns["level"]
        assert all([turn["role"] for turn in turns] == ["assistant", "tool", "assistant"] for turns in completions)
        return [1.0 * len(environment.seen) for environment in environments]

    args = agent_arguments(tmp_path)
    trainer = trl.GRPOTrainer(model, seen, args, ROWS[:4], environment_factory=Room)
    trainer.train()
    trainer.end()
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert {(row["ended"], row["score"], row["environment_reward"]) for row in rows} == {("max_assistant_turns", 1.5, 0.5)}
    assert all(len(row["turns"]) == 2 and row["conversation"][0]["content"].endswith(" Look.") for row in rows)


def test_the_reference_of_a_trainer_is_the_starting_model_and_after_training_what_it_moved_to(model, tmp_path):
    args = {"output_dir": str(tmp_path / "out"), "max_steps": 1, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    trainer = trl.GRPOTrainer(model, right, {**args, "learning_rate": 0.1, **SMALL}, ROWS[:4])
    start = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    before = trainer.ref_model.state_dict()
    assert before.keys() == start.keys()
    assert all(torch.equal(before[name], start[name]) for name in start)
    trainer.train()
    trained, moved = trainer.model.state_dict(), trainer.ref_model.state_dict()
    assert any(not torch.equal(trained[name], start[name]) for name in start)
    for name, weight in start.items():
        torch.testing.assert_close(moved[name].float(), 0.6 * trained[name].float() + 0.4 * weight.float(), atol=1e-2, rtol=1e-2)


def test_several_reward_models_of_a_trainer_are_those_of_transformers_each_with_its_name_and_weight(model, tmp_path):
    tokenizer, scorers = AutoTokenizer.from_pretrained(model), {}
    for seed, name in enumerate(("kind", "brief")):
        torch.manual_seed(seed)
        scorers[name] = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        torch.nn.init.normal_(scorers[name].score.weight, std=0.5)
        scorers[name].config.pad_token_id = tokenizer.pad_token_id
        scorers[name].config._name_or_path = name
    scorers["kind"].save_pretrained(tmp_path / "kind")
    tokenizer.save_pretrained(tmp_path / "kind")
    args = {"max_steps": 1, "reward_weights": [1.0, 2.0, 0.5], "output_dir": str(tmp_path / "out"), **SMALL}
    args |= {"trainer.rollout_data_dir": str(tmp_path / "rows"), "reward_model.model.fsdp_config.dtype": "fp32"}
    rewards = [str(tmp_path / "kind"), right, scorers["brief"]]
    trainer = trl.GRPOTrainer(model, rewards, args, ROWS[:4], reward_processing_classes=[None, None, tokenizer])
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        ids = torch.tensor([tokenizer(row["input"] + row["output"]).input_ids])
        for name, scorer in scorers.items():
            with torch.no_grad():
                assert row[name] == pytest.approx(float(scorer.eval()(ids).logits), abs=1e-4)
        assert row["score"] == pytest.approx(row["kind"] + 2.0 * row["right"] + 0.5 * row["brief"], abs=1e-4)
    assert {f"rewards/{name}/mean" for name in ("kind", "right", "brief")} <= trainer.state.log_history[0].keys()


@pytest.mark.parametrize(
    "more", [{}, {"beta": 0.0}, {"beta": 0.1, "lora_rank": 2}, {"beta": 0.1, "peft_config": {"r": 2}}], ids=str
)
def test_there_is_no_reference_without_a_kl_or_with_adapters(more):
    peft = {name: more[name] for name in more if name == "peft_config"}
    args = {name: more[name] for name in more if name != "peft_config"}
    assert trl.GRPOTrainer("m", right, args, ROWS, **peft).ref_model is None


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_of_trl_is_named_by_its_path_with_or_without_an_output_folder(kind, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args in ({}, {"output_dir": str(tmp_path / "out")}):
        trainer = trl.GRPOTrainer(model, right, {"max_steps": 1, **SMALL, **args}, ROWS)
        with pytest.raises(CheckpointError, match=r"resume_from_path=.*global_step_3: not a checkpoint"):
            trainer.train(resume_from_checkpoint=kind(tmp_path / "global_step_3"))


SCRIPTS = {
    "quick_start": """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

def format_reward_func(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>$", content) else 0.0 for content in contents]

trainer = GRPOTrainer(
    model=MODEL,
    args=GRPOConfig(reward_weights=[1.0, 0.5], max_steps=1, **SMALL),
    reward_funcs=[accuracy_reward, format_reward_func],
    train_dataset=[{"prompt": [{"role": "user", "content": "1+1="}], "solution": "$2$"}] * 4,
)
trainer.train()
""",
    "many_tasks_with_adapters": """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def math_reward_func(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for prompt, completion, t in zip(prompts, completions, task)]

async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    log_extra("golden_answer", list(ground_truth))
    log_metric("accuracy", 0.25)
    return [float(completion == truth) for completion, truth in zip(completions, ground_truth)]

trainer = GRPOTrainer(
    model=MODEL,
    args=GRPOConfig(max_steps=1, **SMALL),
    reward_funcs=[math_reward_func, async_reward_func, reward_func],
    train_dataset=[{"prompt": f"{n}+1=", "ground_truth": "2", "task": ["math", "code"][n % 2]} for n in range(4)],
    peft_config=LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"),
)
trainer.train()
""",
}
LOGGED = {
    "quick_start": {"rewards/accuracy_reward/mean", "rewards/format_reward_func/mean"},
    "many_tasks_with_adapters": {"rewards/math_reward_func/mean", "rewards/async_reward_func/mean", "accuracy"},
}


@pytest.mark.parametrize(("script", "kind"), [("quick_start", "GRPO"), ("many_tasks_with_adapters", "RLOO")])
def test_a_documented_script_of_trl_runs_with_another_import(script, kind, model, tmp_path, monkeypatch):
    """From TRL's pages of both trainers: its own rewards, several rewards with weights, chats, None, async, logs, adapters."""
    monkeypatch.chdir(tmp_path)
    text = SCRIPTS[script].replace("GRPO", kind).replace("from trl.rewards import", "from verl_memopt.trl import")
    text = text.replace("from trl import", "from verl_memopt.trl import").replace("from peft import LoraConfig\n", "")
    space = {"MODEL": model, "SMALL": SMALL, "re": re, "asyncio": asyncio, "LoraConfig": dict}
    exec(text, space)
    assert all(LOGGED[script] <= metrics.keys() for metrics in space["trainer"].state.log_history)
    (metrics,) = space["trainer"].run.metrics
    assert metrics["actor/skipped_updates"] == 0


def test_the_accuracy_of_trl_reads_latex_and_leaves_out_what_has_no_answer():
    answers = [r"so \boxed{\frac{1}{2}}", [{"role": "assistant", "content": r"\boxed{3}"}], "2", "2"]
    assert trl.accuracy_reward(answers, ["$0.5$", "$4$", "$2$", ""]) == [1.0, 0.0, 0.0, None]


def raises(answer):
    raise KeyError("no such column")


def hangs(answer):
    time.sleep(60)


CHAT = {"role": "user", "content": "1+1="}
WRONG_DATASETS = [
    (3, "^dataset: int is no dataset"),
    ([], "^dataset: there are no rows"),
    ({"train": ROWS}, "^dataset: this is a dict with train"),
    (["a", 1], "^dataset: row 1 is 'a', which is not a dict"),
    ([{"prompt": "x", "image": object()}], "^dataset: row 1: the column 'image' cannot be kept"),
    ([{"question": "x"}], "there is no column 'prompt'"),
    ([{"prompt": None}], r"train-\w+\.jsonl:1"),
    ([{"prompt": [{"role": "user"}]}], r"train-\w+\.jsonl:1"),
    ([{"prompt": "x" * 600}], r"train-\w+\.jsonl:1.*max_prompt_length"),
    ([{"prompt": []}], r"train-\w+\.jsonl:1"),
    ("no_such_file.parquet", "no_such_file"),
]
WRONG_REWARDS = [
    ([], "^rewards: the list is empty"),
    ([3], "^rewards: 3 is not a function"),
    ("right", "custom_reward_function.path=right"),
    ("/no/file.py:f", "/no/file.py"),
    (lambda: 0, r"(?s)^rewards: .*is of no known kind. Define lambda"),
    (lambda a, b, c: 0, r"(?s)^rewards: .*is of no known kind"),
    ((lambda lock: lambda answer: lock)(LOCK), r"(?s)^rewards: lambda .*cannot be sent to the reward processes.*cannot pickle"),
    (lambda answer: float("inf"), r"train-\w+\.jsonl:\d+: "),
    (raises, r"(?s)train-\w+\.jsonl:\d+: .*no such column"),
]
CYCLE = []
CYCLE.append(CYCLE)
WRONG_ARGUMENTS = [
    ({"learning_rte": 1}, "learning_rte: no such key. Did you mean learning_rate"),
    ({"model": "/no/such/folder"}, "/no/such/folder"),
    ({"algorithm": "nonsense", "num_generations": None, "max_completion_length": None}, "algorithm.adv_estimator"),
    ({"memory": "7g"}, "7g"),
    ({"steps": 0}, "trainer.total_training_steps=0"),
    ({"steps": "many"}, "trainer.total_training_steps=many"),
    ({"reward_weights": [1.0, 2.0]}, "reward_weights: there are 2 weights for 1 functions"),
    *(
        ({name: text}, rf"^{name}=.*this is no path of a file: ")
        for name in ("model", "tokenizer", "run_dir", "resume", "dataset", "eval_dataset")
        for text in ("a\0b", "x" * 300, "\ud800")
    ),
    *(
        ({key: "x" * 300}, rf"{key}=.*this is no path of a file: its longest name has 300 bytes")
        for key in ("actor_rollout_ref.model.lora_adapter_path", "trainer.rollout_data_dir", "data.custom_cls.path")
    ),
    ({"reward_weights": 3}, "reward_weights=3: expected a list of numbers, and got a int"),
    ({"resume": 1.5}, "resume=1.5: expected True, False, or the folder"),
    ({"resume_from_checkpoint": torch.zeros(2)}, r"resume_from_checkpoint=tensor\(.*: expected True, False, or the folder"),
    ({"lora_rank": object()}, r"^actor_rollout_ref\.model\.lora_rank=<object.*>: expected a whole number, got object"),
    (
        {"actor_rollout_ref": {"actor": {"optim": {"lr": len}}}},
        r"^actor_rollout_ref\.actor\.optim\.lr=<built-in function len>: expected a number, got",
    ),
    ({"learning_rate": len}, r"^actor_rollout_ref\.actor\.optim\.lr=.*: expected a number, got"),
    ({"config": {"trainer": {"logger": len}}}, r"^config\.trainer\.logger: no such key. Did you mean trainer\.logger\?"),
    ({"trainer.logger": ["console", len]}, r"^trainer\.logger\[1\]=.*: expected a number, a text, a list or a dict, got"),
    ({"data.apply_chat_template_kwargs": {"a": CYCLE}}, r"^data\.apply_chat_template_kwargs=.*: it is too deep"),
    ({"memory.device_limit_gb": 0.0005, "trainer.track_memory_every_steps": 1}, "(?s)init: .*Together these make room: "),
    ({"rewards": hangs, "custom_reward_function.timeout_seconds": 0.5}, "took longer than .*timeout_seconds=0.5"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "kind"),
    [
        *(({"dataset": dataset}, error, DataError) for dataset, error in WRONG_DATASETS),
        *(({"rewards": rewards}, error, RewardError) for rewards, error in WRONG_REWARDS),
        *((*each, UserError) for each in WRONG_ARGUMENTS),
    ],
)
def test_a_wrong_call_is_one_error_of_the_package(arguments, error, kind, model, tmp_path):
    call = {"model": model, "dataset": ROWS, "rewards": right, "steps": 1, "run_dir": tmp_path, **SMALL, **arguments}
    with pytest.raises(kind, match=error):
        verl_memopt.train(**{name: value for name, value in call.items() if value is not None})


class Adapted:
    """A model as peft wraps one, as far as a run asks it."""

    peft_config: ClassVar = {"default": SimpleNamespace(peft_type="LORA")}

    def __init__(self, base):
        self.base = base

    def get_base_model(self):
        return self.base

    def save_pretrained(self, folder):
        folder.mkdir()
        config = {"r": 3, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj"], "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(config))


def test_a_model_with_adapters_is_trained_on_with_their_rank_and_scale(tiny_folder, tmp_path):
    model = Adapted(AutoModelForCausalLM.from_pretrained(tiny_folder))
    _, settings, inputs = api.Call(model, [{"prompt": "1+1="}], {}, run_dir=tmp_path / "run").load()
    inputs.discard()
    lora = settings.actor_rollout_ref.model
    assert (lora.lora_rank, lora.lora_alpha, lora.use_rslora, list(lora.target_modules)) == (3, 6, True, ["q_proj"])
