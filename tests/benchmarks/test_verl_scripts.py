import json
from pathlib import PurePath

import pytest

from benchmarks.verl_scripts.__main__ import COMPOSES, NOT_COUNTED, REFUSED, main, outside, record, refusals

AR = "actor_rollout_ref"
LEAST = (
    f"data.train_files=$HOME/train.parquet data.val_files=$HOME/test.parquet {AR}.model.path=a/model {AR}.rollout.name=vllm "
    f"{AR}.rollout.n=4 {AR}.actor.use_dynamic_bsz=True algorithm.adv_estimator=grpo"
)
HEAD = "#!/usr/bin/env bash\nset -xeuo pipefail\n"


@pytest.fixture
def script(tmp_path):

    def write(text, name="run.sh"):
        file = tmp_path / "examples" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD + text)
        return file

    return write


def test_every_argument_of_a_call_is_recorded_word_for_word(script):
    text = 'python3 -m verl.trainer.main_ppo \\\n  a.b=\'["x","y z"]\' empty= "home=$HOME" "$@" 2>&1 | tee log.txt\n'
    assert record(script(text)) == [['a.b=["x","y z"]', "empty=", "home=/home"]]


@pytest.mark.parametrize(
    "start",
    [
        "python verl/trainer/main_ppo.py",
        "ray job submit --address=here -- python3 -m verl.trainer.main_ppo",
        "uv run --extra vllm python3 -m verl.trainer.main_ppo",
        "env A=1 python3 -m verl.trainer.main_ppo",
    ],
)
def test_a_call_is_found_behind_each_launcher(script, start):
    assert record(script(f"{start} a=1\n")) == [["a=1"]]


def test_a_script_that_composes_with_a_model_that_is_refused_later_is_counted_apart(script, capsys, tmp_path):
    for name, model in (("a.sh", "Qwen/Qwen3-Next-80B-A3B"), ("b.sh", "Qwen/Qwen3-8B"), ("c.sh", "Nobody/Knows-1B")):
        script(f"python3 -m verl.trainer.main_ppo {LEAST} {AR}.model.path={model}\n", name)
    assert main([str(tmp_path / "examples")]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 scripts compose, 1 of them" in said
    assert "Qwen/Qwen3-Next-80B-A3B: models of type qwen3_next have layers of type" in said
    assert "Nobody/Knows-1B: not among the models" in said


def test_only_calls_of_the_trainer_count_and_all_of_them_on_a_machine_without_an_npu(script):
    text = "python3 -c 'import main_ppo'\npython3 make_data.py\nfor n in 1 2; do python3 -m verl.trainer.main_ppo n=$n; done\n"
    text += 'if python3 -c "import torch_npu" &>/dev/null; then D=npu; else D=cuda; fi\n'
    assert record(script(text + "python3 -m verl.trainer.main_ppo_sync n=3\npython3 -m verl.trainer.main_ppo d=$D\n")) == [
        *(["n=1"], ["n=2"], ["d=cuda"])
    ]


def test_what_a_machine_lacks_ends_no_script(script, tmp_path):
    missing = tmp_path / "outside"
    text = f"source /no/such/set_env.sh\nulimit -n 99999999\nconda activate x\nmkdir -p logs {missing}\nnvidia-smi\n"
    text += "python3 -m verl.trainer.main_ppo a=1 > logs/out.txt\n"
    assert record(script(text)) == [["a=1"]]
    assert not missing.exists()


@pytest.mark.parametrize(
    ("name", "argument", "reason"),
    [
        ("a.sh", f"{AR}.actor.strategy=megatron", "backend megatron"),
        ("a.sh", "--config-name=ppo_megatron_trainer.yaml", "backend megatron"),
        ("a.sh", "model_engine=veomni", "backend veomni"),
        ("a.sh", f"{AR}.rollout.name=trtllm", "engine trtllm"),
        ("a.sh", f"+{AR}.rollout.engine_kwargs.sglang.attention_backend=fa3", "settings of sglang's own"),
        ("a.sh", f"+{AR}.rollout.multi_turn.enable=True", "several turns"),
        ("a.sh", "data.image_key=images", "images or video"),
        ("ascend/a.sh", "a=1", "an NPU"),
        ("a.sh", f"{AR}.actor.strategy=fsdp2", ""),
    ],
)
def test_what_is_not_counted_is_told_from_the_arguments(name, argument, reason):
    assert outside(PurePath(name), ["data.train_batch_size=8", argument]) == reason


def test_a_call_composes_or_every_key_that_stops_it_is_named():
    least = LEAST.split()
    assert refusals([*least, "--config-path=config", "--config-name=ppo_trainer"]) == []
    stopped = refusals([*least, "no.such_key=1", f"{AR}.rollout.mode=sync"])
    assert [reason.partition(": ")[0] for reason in stopped] == ["no.such_key", f"{AR}.rollout.mode=sync"]
    assert len(refusals([*least, "--nonsense"])) == 1


def test_a_folder_becomes_a_table(script, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no script that calls main_ppo" in capsys.readouterr().err
    call = "python3 -m verl.trainer.main_ppo"
    script(f"{call} {LEAST}\n", "a/fits.sh")
    script(f"{call} {LEAST} algorithm.adv_estimator=$ESTIMATOR\n", "a/refused.sh")
    script(f"{call} {LEAST} {AR}.rollout.name=trtllm\n", "b/engine.sh")
    script(f"if [ -e /no/such/file ]; then {call}; fi\n", "b/no_call.sh")
    script("echo nothing\n", "b/another.sh")
    table, rows = tmp_path / "table.txt", tmp_path / "rows.json"
    argv = [str(tmp_path / "examples"), "--set", "ESTIMATOR=no_such", "--source", "a made-up verl"]
    assert main([*argv, "--text", str(table), "--json", str(rows)]) == 0
    assert [(row["script"], row["verdict"]) for row in json.loads(rows.read_text())] == [
        ("a/fits.sh", COMPOSES),
        ("a/refused.sh", REFUSED),
        ("b/engine.sh", NOT_COUNTED),
        ("b/no_call.sh", NOT_COUNTED),
    ]
    text = table.read_text()
    assert capsys.readouterr().out == text
    assert text.startswith("a made-up verl: 1 of 2 scripts compose, 0 of them with models that are not refused\n")
    assert f"{1:8}{1:7}  algorithm.adv_estimator=no_such: " in text
    assert str(tmp_path) not in text
