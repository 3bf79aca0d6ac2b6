"""Objects of TRL, peft, datasets and pandas themselves. Skipped where a package is missing: ``pip install -e '.[peers]'``."""

import pytest

import verl_memopt
from verl_memopt import trl
from verl_memopt.model.tiny import TinyShape, make_tiny_model

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
        return trl._given(getattr(peer, kind)(**{"use_cpu": True, "bf16": False, **arguments}), "args")

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


def test_every_field_of_a_real_config_is_read_or_refused_with_a_reason(given):
    import dataclasses

    from verl_memopt.config.trl_names import NAMES

    peer = pytest.importorskip("trl")
    fields = {field.name for kind in (peer.GRPOConfig, peer.RLOOConfig) for field in dataclasses.fields(kind)}
    assert fields - NAMES == {"debug"}  # a section of ours


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
        "args": {**trl._given(config, "args"), **SMALL},
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
