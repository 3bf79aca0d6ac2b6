"""TRL's trainers by name, beside a run: what they show before and after it, and callbacks in it."""

import pytest
import torch
from transformers import AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from tests.test_api import ROWS, SMALL, right
from tests.worker.test_reward_scores import classifier
from verl_memopt import trl
from verl_memopt.errors import ConfigError
from verl_memopt.model.given import write_model
from verl_memopt.trl.trainer import REFUSED


@pytest.fixture(scope="module")
def model(toy):
    return str(toy / "model")


# The config.


def test_a_config_has_attributes_with_trls_defaults_and_is_a_dict_of_what_was_given():
    config = trl.GRPOConfig("out", num_generations=4)
    config.learning_rate = 0.5
    assert (config.output_dir, config.num_generations, config.learning_rate) == ("out", 4, 0.5)
    assert (config.beta, config.loss_type, config.per_device_train_batch_size) == (0.0, "dapo", 8)
    assert dict(config) == {"output_dir": "out", "num_generations": 4, "learning_rate": 0.5}
    assert config.to_dict() | {"learning_rate": 0.5} == config.to_dict()
    assert config.to_dict()["max_completion_length"] == 512
    assert (trl.RLOOConfig().num_generations, trl.RLOOConfig({"beta": 0.1}).beta) == (2, 0.1)
    with pytest.raises(AttributeError, match="num_generation'"):
        _ = config.num_generation


# What a run leaves.


class Heard(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **more):
        self.events.append(("begin", state.max_steps, args.learning_rate))

    def on_step_end(self, args, state, control, **more):
        assert more["model"] is None
        assert more["processing_class"] is not None
        self.events.append(("step", state.global_step))
        control.should_save = state.global_step == 1
        return control

    def on_log(self, args, state, control, logs, **more):
        self.events.append(("log", state.global_step, "eval_easy_reward" in logs))

    def on_evaluate(self, args, state, control, metrics, **more):
        self.events.append(("evaluate", state.global_step))
        control.should_training_stop = state.global_step == 2

    def on_save(self, args, state, control, **more):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **more):
        self.events.append(("end", state.global_step))


def length(completions, **columns):
    return [0.1 * len(each) for each in completions]


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """A trainer after two of five steps, with what was there before."""
    folder = tmp_path_factory.mktemp("trl")
    scorer, _ = classifier(folder / "scorer", toy / "model")
    callback, tokenizer = Heard(), AutoTokenizer.from_pretrained(toy / "model")
    config = trl.GRPOConfig(
        str(folder / "out"), max_steps=5, eval_steps=2, eval_strategy="steps", save_steps=50, learning_rate=1e-2,
        reward_weights=[1.0, 1.0, 0.5], **SMALL, **{"reward_model.model.fsdp_config.dtype": "fp32"},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        str(toy / "model"), [right, length, str(scorer)], config, ROWS, {"easy": ROWS[:2], "hard": ROWS[2:3]}, tokenizer,
        callbacks=[callback],
    )  # fmt: skip
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    return trainer, before, callback, trainer.train()


def test_callbacks_of_transformers_hear_each_event_and_stop_the_run(trained):
    assert trained[2].events == [
        ("begin", 5, 1e-2), ("step", 1), ("log", 1, False), ("save", 1),
        ("step", 2), ("log", 2, False), ("log", 2, True), ("evaluate", 2), ("save", 2), ("log", 2, False), ("end", 2),
    ]  # fmt: skip


def test_the_log_history_has_trls_names_and_the_end_of_it_is_the_result(trained):
    trainer, _, _, output = trained
    first, _, validation, last = trainer.state.log_history
    assert {"loss", "reward", "reward_std", "grad_norm", "learning_rate", "num_tokens", "entropy", "epoch"} <= first.keys()
    rewards = [first[f"rewards/{name}/mean"] for name in ("right", "length", "scorer")]
    assert first["reward"] == pytest.approx(rewards[0] + rewards[1] + 0.5 * rewards[2], abs=1e-5)
    assert {"eval_easy_reward", "eval_hard_reward", "eval_easy_loss", "eval_hard_rewards/length/std"} <= validation.keys()
    assert last["train_loss"] == output.training_loss == output.metrics["train_loss"]
    assert output.global_step == trainer.state.global_step == 2


def test_the_model_is_the_starting_one_and_then_the_trained_one(trained):
    trainer, before, _, _ = trained
    stored = type(trainer.model).from_pretrained(trainer.run.model_path, dtype=torch.float32)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, stored.get_parameter(name))
        assert not torch.equal(weight, before[name]), name


def test_evaluate_answers_rows_with_the_trained_model_and_keeps_the_run(trained):
    trainer = trained[0]
    metrics = trainer.evaluate(ROWS[:2], metric_key_prefix="test")
    assert {"test_reward", "test_loss", "test_rewards/right/mean", "test_runtime", "epoch"} <= metrics.keys()
    assert [path.name for path in sorted((trainer.run.path / "evaluations").iterdir())] == ["1"]
    assert [row["step"] for row in trainer.run.metrics] == [1, 2]


def test_a_saved_model_lies_where_transformers_looks_for_it(trained, tmp_path):
    trainer = trained[0]
    trainer.save_model(tmp_path / "model")
    trainer.save_model()
    for folder in (tmp_path / "model", trainer.run.path):
        assert type(trainer.model).from_pretrained(folder).config.vocab_size == trainer.model.config.vocab_size


def test_what_the_hub_does_not_take_is_said_with_the_place_of_the_model(trained, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"(?s)^push_to_hub: the hub did not accept the model .*token .*model"):
        trained[0].push_to_hub()


def test_early_stopping_of_transformers_ends_a_run_whose_validation_gets_no_better(model, tmp_path):
    config = trl.RLOOConfig(
        str(tmp_path), max_steps=6, eval_steps=1, eval_strategy="steps", save_steps=50, beta=0.0,
        metric_for_best_model="eval_rewards/nothing/mean", greater_is_better=True, **SMALL,
    )  # fmt: skip

    def nothing(completions, **columns):
        return [0.0] * len(completions)

    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = trl.RLOOTrainer(model, nothing, config, ROWS, ROWS[:1], callbacks=[stopping])
    assert trainer.train().global_step == 3
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.0, 1)


# Models and tokenizers as objects.


def test_a_tokenizer_beside_the_path_of_a_model_is_used(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }} ="
    settings = write_model(model, tokenizer, tmp_path)
    assert settings.keys() == {"actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path"}
    written = AutoTokenizer.from_pretrained(settings["actor_rollout_ref.model.tokenizer_path"])
    assert written.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1 ="
    with pytest.raises(ConfigError, match=r"^tokenizer: int is no tokenizer"):
        write_model(model, 3, tmp_path)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_argument_without_an_equal_is_a_value_error_as_in_trl(name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        trl.GRPOTrainer("m", right, train_dataset=ROWS, **{name: object()})


def test_tokenizers_of_rewards_are_as_many_as_rewards_and_a_callback_is_one():
    with pytest.raises(ValueError, match=r"^reward_processing_classes: there are 1 entries for 2 rewards"):
        trl.GRPOTrainer("m", [right, "scorer"], train_dataset=ROWS, reward_processing_classes=object())
    with pytest.raises(ConfigError, match=r"^callbacks: int is no TrainerCallback"):
        trl.GRPOTrainer("m", right, train_dataset=ROWS, callbacks=[3])


class Interrupts(TrainerCallback):
    def __init__(self):
        raise KeyboardInterrupt


def test_a_callback_that_cannot_be_made_is_one_error():
    with pytest.raises(ConfigError, match=r"^callbacks raised KeyboardInterrupt: *in .*test_trainer\.py:\d+"):
        trl.GRPOTrainer("m", right, train_dataset=ROWS, callbacks=[Interrupts])
