"""Objects of TRL, peft, datasets and pandas themselves. Skipped where a package is missing: ``pip install -e '.[peers]'``."""

import asyncio
import importlib
import inspect
import json

import pytest

import verl_memopt
from verl_memopt import trl
from verl_memopt.config.trl_defaults import DEFAULTS
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.trl.config import given_and_defaults
from verl_memopt.trl.trainer import REFUSED

ROWS = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(4)]
SMALL = {
    "worker_group": "local",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.dtype": "fp32",
    "num_generations": 2,
    "max_completion_length": 4,
}


def right(completions, answer, **columns):
    return [float(each[0]["content"].strip() == wanted) for each, wanted in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("real") / "model", TinyShape(num_layers=2), seed=1))


@pytest.fixture
def given(model):
    """Returns a function of a config's name and its arguments that gives what our trainers read of the real one."""
    peer = pytest.importorskip("trl")

    def read(kind, **arguments):
        return given_and_defaults(getattr(peer, kind)(**{"use_cpu": True, "bf16": False, **arguments}), "args")[0]

    return read


@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_a_real_config_of_trl_gives_what_was_given_and_nothing_that_it_derives(given, kind):
    least = {"output_dir": "x", "use_cpu": True, "bf16": False}
    asked = {
        "learning_rate": 1e-5,
        "per_device_train_batch_size": 4,
        "generation_batch_size": 16,
        "lr_scheduler_type": "constant",
    }
    assert given(kind, output_dir="x") == least
    assert given(kind, output_dir="x", **asked) == least | asked
    more = {"gradient_accumulation_steps": 2, "report_to": ["tensorboard"]}
    for said in ({"steps_per_generation": 4}, {"generation_batch_size": 32}):  # of 8 rows a pass, TRL's default, the same
        passes = {"generation_batch_size": 32, "per_device_train_batch_size": 8}
        assert given(kind, output_dir="x", **said, **more) == least | passes | more


CONFIGS = ("GRPOConfig", "RLOOConfig", "DistillationConfig", "GKDConfig", "GOLDConfig", "SDFTConfig")


def real_config(kind):
    peer, ours = pytest.importorskip("trl"), getattr(trl, kind).algorithm
    if hasattr(peer, kind):
        return getattr(peer, kind)
    return getattr(importlib.import_module(f"trl.experimental.{ours}"), kind)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_defaults_of_a_real_config_are_those_that_hold_here(kind):
    import dataclasses

    real = {field.name: field.default for field in dataclasses.fields(real_config(kind)) if field.init}
    # A list is made anew for each config.
    real |= {name: [] for name in ("include_for_metrics", "callbacks") if name in real}
    assert DEFAULTS[getattr(trl, kind).algorithm] == real


def test_every_field_of_a_real_config_is_read_or_refused_with_a_reason(given):
    import dataclasses

    from verl_memopt.config.trl_names import NAMES

    fields = {field.name for kind in CONFIGS for field in dataclasses.fields(real_config(kind))}
    assert fields - NAMES == {"debug"}  # a section of ours


QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
TASKS = """
from datasets import Dataset
from trl import GRPOTrainer

dataset = Dataset.from_list(
    [
        {"prompt": "What is 2+2?", "task": "math"},
        {"prompt": "Write a function that returns the sum of two numbers.", "task": "coding"},
        {"prompt": "What is 3*4?", "task": "math"},
        {"prompt": "Write a function that returns the product of two numbers.", "task": "coding"},
    ]
)

def math_reward_func(prompts, completions, task, **kwargs):
    return [float(len(completion) % 2) if t == "math" else None for completion, t in zip(completions, task)]

def coding_reward_func(prompts, completions, task, **kwargs):
    return [1.0 if t == "coding" else None for t in task]

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[math_reward_func, coding_reward_func],
    train_dataset=dataset,
)
trainer.train()
"""
ADAPTERS = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

peft_config = LoraConfig(
    r=32,
    lora_alpha=16,
    lora_dropout=0.05,
    bias="none",
    task_type="CAUSAL_LM",
    target_modules=["q_proj", "v_proj", "k_proj", "o_proj"],
)
training_args = GRPOConfig(learning_rate=1.0e-5, reward_weights=[1.0, 0.5])

async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    args=training_args,
    train_dataset=dataset,
    reward_funcs=[think_format_reward, async_reward_func],
    peft_config=peft_config,
)
trainer.train()
"""
"""From TRL's pages: the quick start of both trainers, two tasks without a reward of one for the other, and the page of PEFT."""


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("script", [QUICK_START, TASKS, ADAPTERS], ids=["quick_start", "tasks", "adapters"])
def test_a_documented_script_trains_with_the_import_of_the_trainer_model_and_rows_replaced(
    script, kind, model, tmp_path, monkeypatch
):
    """What the scripts of TRL leave to its defaults is made small; rewards, datasets and adapters are those of the packages."""
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    rows = tmp_path / "rows.jsonl"
    solved = [{"prompt": row["prompt"], "solution": f"${row['answer']}$", "difficulty": 5.5} for row in ROWS]
    rows.write_text("".join(json.dumps(row) + "\n" for row in solved))
    monkeypatch.chdir(tmp_path)
    for old, new in {
        "GRPO": kind,
        "from trl import": "from verl_memopt.trl import",
        '"Qwen/Qwen2.5-0.5B-Instruct"': "MODEL",
        '"trl-lib/DeepMath-103K"': '"json", data_files=FILE, cache_dir=CACHE',
        "train_dataset=dataset": "train_dataset=dataset" if "args=" in script else "train_dataset=dataset, args=SMALL",
        "reward_weights=": "**SMALL, reward_weights=",
    }.items():
        script = script.replace(old, new)
    given = {"MODEL": model, "FILE": str(rows), "CACHE": str(tmp_path), "SMALL": {"max_steps": 1, **SMALL}, "asyncio": asyncio}
    exec(script, given)
    (metrics,) = given["trainer"].run.metrics
    assert metrics["actor/skipped_updates"] == 0


@pytest.mark.parametrize("kind", [name.removesuffix("Config") for name in CONFIGS])
def test_every_argument_of_a_real_trainer_is_read_or_refused_with_a_reason(kind):
    peer, ours = pytest.importorskip("trl"), getattr(trl, f"{kind}Trainer")
    if not hasattr(peer, f"{kind}Trainer"):
        peer = importlib.import_module(f"trl.experimental.{kind.lower()}")
    theirs = list(inspect.signature(getattr(peer, f"{kind}Trainer")).parameters)
    own = list(inspect.signature(ours).parameters)
    assert set(theirs) - set(own) <= set(REFUSED)
    if kind not in ("GRPO", "RLOO"):  # given by place
        assert own[: len(theirs)] == theirs


DISTILLATION = """
from datasets import load_dataset
from trl import DistillationTrainer

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = DistillationTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    teacher_model="Qwen/Qwen2.5-1.5B-Instruct",
    train_dataset=dataset,
)
trainer.train()
"""
GKD = """
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_DUMMY_SAMPLES = 100

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
# The model to optimise
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
# The teacher model to calculate the KL divergence against
teacher_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B-Instruct")

train_dataset = Dataset.from_dict(
    {
        "messages": [
            [
                {"role": "user", "content": "Hi, how are you?"},
                {"role": "assistant", "content": "I'm great thanks"},
            ]
        ]
        * NUM_DUMMY_SAMPLES
    }
)
eval_dataset = Dataset.from_dict(
    {
        "messages": [
            [
                {"role": "user", "content": "What colour is the sky?"},
                {"role": "assistant", "content": "The sky is blue"},
            ]
        ]
        * NUM_DUMMY_SAMPLES
    }
)

training_args = GKDConfig(output_dir="gkd-model", per_device_train_batch_size=1)
trainer = GKDTrainer(
    model=model,
    teacher_model=teacher_model,
    args=training_args,
    processing_class=tokenizer,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
)
trainer.train()
"""
"""From TRL's pages of distillation."""


@pytest.mark.parametrize("script", [DISTILLATION, GKD], ids=["distillation", "gkd"])
def test_a_documented_script_of_distillation_trains(script, model, tmp_path, monkeypatch):
    """Only the import, the models and the rows are others, and TRL's defaults are made small. GKD also gets ``lmbda=1`` and
    ``temperature=1``, without which it is refused."""
    for name in ("trl", "datasets"):
        pytest.importorskip(name)
    teacher = make_tiny_model(tmp_path / "teacher", TinyShape(hidden_size=96, num_layers=3), seed=2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 2))
    monkeypatch.chdir(tmp_path)
    for old, new in {
        "from trl.experimental.gkd import": "from verl_memopt.trl import",
        "from trl import": "from verl_memopt.trl import",
        '"Qwen/Qwen2.5-0.5B-Instruct"': "MODEL",
        '"Qwen/Qwen2.5-1.5B-Instruct"': "TEACHER",
        '"trl-lib/DeepMath-103K"': '"json", data_files=FILE, cache_dir=CACHE',
        "train_dataset=dataset": "train_dataset=dataset, args={**SMALL, 'max_completion_length': 4}",
        "per_device_train_batch_size=1": "per_device_train_batch_size=1, lmbda=1.0, temperature=1.0, max_new_tokens=4, **SMALL",
    }.items():
        script = script.replace(old, new)
    small = {"max_steps": 2, "worker_group": "local", "actor_rollout_ref.rollout.name": "hf"}
    given = {"MODEL": model, "TEACHER": str(teacher), "FILE": str(rows), "CACHE": str(tmp_path), "SMALL": small}
    exec(script, given)
    metrics = given["trainer"].run.metrics
    assert len(metrics) == 2
    assert all(row["actor/distill_loss"] > 0 for row in metrics)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vllm_mode", {"use_vllm": True, "vllm_mode": "server"}),
        ("use_transformers_continuous_batching", {"use_transformers_continuous_batching": True}),
        ("debug", {"debug": "underflow_overflow"}),
    ],
)
def test_a_documented_setting_without_an_equal_is_refused_by_its_name(name, settings, given, model, tmp_path):
    trainer = trl.GRPOTrainer(model, right, given("GRPOConfig", output_dir=str(tmp_path), **settings) | SMALL, ROWS)
    with pytest.raises(ConfigError, match=name):
        trainer.train()


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_script_with_real_objects_trains_and_resumes_at_a_checkpoint(kind, model, tmp_path):
    """A ``Dataset``, a ``LoraConfig``, TRL's own config and a model object with its tokenizer."""
    peer, peft, datasets = (pytest.importorskip(name) for name in ("trl", "peft", "datasets"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = getattr(peer, f"{kind}Config")(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, max_steps=1, save_steps=1, num_generations=2,
        per_device_train_batch_size=8, max_completion_length=4, beta=0.0, report_to="none",
    )  # fmt: skip
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(model),
        "processing_class": AutoTokenizer.from_pretrained(model),
        "reward_funcs": [right],
        "args": {**given_and_defaults(config, "args")[0], **SMALL},
        "train_dataset": datasets.Dataset.from_list(ROWS),
        "peft_config": peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    trainer = getattr(trl, f"{kind}Trainer")(**arguments)
    assert trainer.train().global_step == 1
    again = getattr(trl, f"{kind}Trainer")(**(arguments | {"args": {**arguments["args"], "max_steps": 2}}))
    assert again.train(resume_from_checkpoint=str(tmp_path / "out" / "global_step_1")).global_step == 2


def test_a_frame_and_a_reward_model_by_its_folder_train(model, tmp_path):
    pandas, transformers = pytest.importorskip("pandas"), pytest.importorskip("transformers")
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    scorer.save_pretrained(tmp_path / "scorer")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "scorer")
    frame = pandas.DataFrame([{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS])
    trainer = trl.GRPOTrainer(model, reward_funcs=str(tmp_path / "scorer"), train_dataset=frame, args={"max_steps": 1, **SMALL})
    assert trainer.train().global_step == 1
    run = verl_memopt.train(model, frame, right, steps=1, run_dir=tmp_path / "run", **SMALL)
    assert len(pandas.DataFrame(run.metrics)) == 1
