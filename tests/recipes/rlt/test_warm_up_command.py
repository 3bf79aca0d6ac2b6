"""The supervised warm-up: its gradients are those of cross entropy, whatever the memory knobs, and it survives a stop."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_memopt.config.loader import load_settings, settings_from_mapping
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.recipes.rlt.dataset import FORMATS, RltPrompts
from verl_memopt.recipes.rlt.lessons import lesson_batch, lesson_loss, read_lessons
from verl_memopt.recipes.rlt.warm_up import LOSS, VAL_LOSS, check_warm_up, lessons_of_step, run, total_steps, warm_up, worker_plan
from verl_memopt.trainer.environment import resolve_environment
from verl_memopt.trainer.interrupts import Interrupts
from verl_memopt.trainer.mini_batches import MiniBatchCutter
from verl_memopt.trainer.passes import budgets
from verl_memopt.trainer.start import start_group
from verl_memopt.workers.micro_batches import micro_batches_of

AR = "actor_rollout_ref"
NO_KNOBS = {
    f"{AR}.model.enable_gradient_checkpointing": False,
    f"{AR}.model.logprob_chunk_tokens": 0,
    f"{AR}.model.recompute_elementwise": False,
    f"{AR}.actor.ppo_max_token_len_per_gpu": 4096,
}
ALL_KNOBS = {
    f"{AR}.model.enable_gradient_checkpointing": True,
    f"{AR}.model.enable_activation_offload": True,
    f"{AR}.model.logprob_chunk_tokens": 8,
    f"{AR}.actor.ppo_max_token_len_per_gpu": 140,
    f"{AR}.actor.fsdp_config.param_offload": True,
    f"{AR}.actor.fsdp_config.optimizer_offload": True,
}


@pytest.fixture(scope="session")
def warm_up_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    for name, numbers in (("train", range(12)), ("val", range(20, 25))):
        rows = [
            {"question": f"{n}+1=", "solution": str(n + 1), "reasoning_trace": f"{n} and one" + " more" * (n % 4)}
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def warming(warm_up_files, tiny_folder, tmp_path):
    """Return settings of a small warm-up with some keys changed."""
    least = {
        "data.train_files": str(warm_up_files / "train.jsonl"),
        "data.val_files": str(warm_up_files / "val.jsonl"),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 80,
        "data.max_response_length": 60,
        "data.seed": 3,
        f"{AR}.model.path": str(tiny_folder),
        f"{AR}.model.logprob_chunk_tokens": 16,
        f"{AR}.actor.ppo_mini_batch_size": 4,
        f"{AR}.actor.use_dynamic_bsz": True,
        f"{AR}.actor.ppo_max_token_len_per_gpu": 400,
        f"{AR}.actor.policy_loss.loss_mode": "gpg",
        f"{AR}.actor.optim.lr": 3e-3,
        f"{AR}.actor.fsdp_config.dtype": "fp32",
        f"{AR}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{AR}.rollout.name": "hf",
        f"{AR}.rollout.n": 1,
        "algorithm.adv_estimator": "grpo",
        "reward_model.enable": True,
        "reward_model.reward_manager": "rlt",
        "reward_model.model.path": str(tiny_folder),
        "reward_model.rlt.tag_format": "short",
        "trainer.device": "cpu",
        "trainer.worker_group": "local",
        "trainer.logger": ["jsonl"],
        "trainer.total_training_steps": 4,
        "trainer.default_local_dir": str(tmp_path / "run"),
    }

    def settle(more=None):
        return settings_from_mapping(least | (more or {}))

    return settle


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gradients(settings):
    """Return name -> gradient of one mini-batch of all lessons, its loss, and those of a naive cross entropy."""
    roles = settings.actor_rollout_ref
    environment = resolve_environment(
        settings.trainer, settings.ray_kwargs, settings.data, roles.model, roles.rollout, None, roles.actor
    )
    lessons = read_lessons(settings.data.train_files, settings.data, environment.tokenizer, "train", "short")
    batch = lesson_batch(lessons.lessons)
    cutter = MiniBatchCutter(1, roles.actor, 1, budgets(roles)[0], True)
    (mini,) = cutter.mini_batches(batch, range(batch.num_rows), lessons.names)
    plan = worker_plan(settings, environment, 1)
    with start_group(plan, settings.trainer, settings.ray_kwargs, "cpu", PhaseClock()) as workers:
        worker = workers.group._worker
        with worker.residency.phase("update_actor"):
            policy = worker.policy
            micro_batches = micro_batches_of(mini.batch, mini.micro_batches, policy.model.supports_prefix_kv)
            result = policy.accumulate(micro_batches, mini.counts, worker.temperature)
            ours = {name: p.grad.clone() for name, p in policy.model.lm.named_parameters() if p.grad is not None}
    plain = AutoModelForCausalLM.from_pretrained(environment.folder, dtype=torch.float32)
    loss = lesson_loss(plain, lessons.lessons)
    loss.backward()
    naive = {name: p.grad for name, p in plain.named_parameters()}
    return ours, float(result["actor/loss"]), naive, loss.item(), len(mini.micro_batches)


@pytest.mark.parametrize(("knobs", "several"), [(NO_KNOBS, False), ({}, True), (ALL_KNOBS, True)], ids=["none", "default", "all"])
def test_loss_and_gradients_are_those_of_cross_entropy_over_the_answers(warming, knobs, several) -> None:
    ours, loss, naive, naive_loss, num_micro_batches = gradients(
        warming({"data.train_batch_size": 12, f"{AR}.actor.ppo_mini_batch_size": 12, **knobs})
    )
    assert (num_micro_batches > 1) == several
    assert loss == pytest.approx(naive_loss, abs=1e-5)
    assert len(ours) == len(naive)
    for name, gradient in naive.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_falls_and_the_folder_has_the_loss_that_was_logged(warming, tmp_path) -> None:
    settings = warming({"trainer.total_training_steps": 30, "trainer.test_freq": 10})
    folder = warm_up(settings, Interrupts())
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if VAL_LOSS in row] == [0, 10, 20, 30]
    assert rows[-1][VAL_LOSS] < 0.6 * rows[0][VAL_LOSS]
    assert rows[-1][LOSS] < 0.6 * rows[1][LOSS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = read_lessons(settings.data.val_files, settings.data, tokenizer, "val", "short")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert lesson_loss(model, held_out.lessons).item() == pytest.approx(rows[-1][VAL_LOSS], abs=1e-5)


def test_a_stopped_warm_up_goes_on_to_the_same_weights(warming, tmp_path) -> None:
    uninterrupted = warm_up(warming({"trainer.default_local_dir": str(tmp_path / "whole")}), Interrupts())
    stopping = Interrupts()
    stopping.exit_code = 143
    first = warm_up(warming(), stopping)
    assert first.parts[-3] == "global_step_1"
    second = warm_up(warming(), Interrupts())
    assert second.parts[-3] == "global_step_4"
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    resumed = load_file(second / "model.safetensors")
    whole = load_file(uninterrupted / "model.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_the_peak_follows_the_token_budget_and_not_the_batch(warming, tmp_path) -> None:
    peaks = {}
    for rows in (4, 12):
        run_dir = tmp_path / f"rows{rows}"
        warm_up(
            warming(
                {
                    "data.train_batch_size": rows,
                    "data.val_files": None,
                    f"{AR}.actor.ppo_mini_batch_size": rows,
                    f"{AR}.actor.ppo_max_token_len_per_gpu": 140,
                    "trainer.total_training_steps": 2,
                    "trainer.default_local_dir": str(run_dir),
                }
            ),
            Interrupts(),
        )
        peaks[rows] = metrics(run_dir)[-1]["memory/update_actor/peak_allocated_gb"]
    assert peaks[12] == pytest.approx(peaks[4], rel=0.1)


def test_an_epoch_learns_each_lesson_once_and_the_next_in_another_order() -> None:
    epochs = [[row for step in steps for row in lessons_of_step(step, 12, 4, seed=1)] for steps in ((1, 2, 3), (4, 5, 6))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert lessons_of_step(2, 13, 4, seed=None) == [4, 5, 6, 7]


def test_steps_are_those_of_all_epochs_unless_they_are_set(warming) -> None:
    epochs = warming({"trainer.total_training_steps": None, "trainer.total_epochs": 5})
    assert total_steps(epochs, 13) == 15
    assert total_steps(warming(), 13) == 4
    with pytest.raises(DataError, match=r"data.train_batch_size=4: there are only 3 lessons"):
        total_steps(epochs, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{AR}.actor.policy_loss.loss_mode", "vanilla"),
        (f"{AR}.actor.use_kl_loss", True),
        (f"{AR}.actor.entropy_coeff", 0.1),
        (f"{AR}.actor.loss_agg_mode", "seq-mean-token-mean"),
        (f"{AR}.rollout.n", 2),
        (f"{AR}.rollout.temperature", 0.7),
        ("algorithm.use_kl_in_reward", True),
    ],
)
def test_what_would_be_no_supervised_learning_is_refused(warming, key, value) -> None:
    check_warm_up(warming())
    with pytest.raises(ConfigError, match=re.escape(f"{key}={value}")):
        check_warm_up(warming({key: value}))


def test_the_recipe_composes_and_a_dry_run_prints_it(warm_up_files, tiny_folder, capsys) -> None:
    overrides = [f"data.train_files={warm_up_files}/train.jsonl", f"{AR}.model.path={tiny_folder}", "memory=24g"]
    check_warm_up(load_settings("warm_up", overrides, "recipe/rlt/config"))
    assert run([*overrides, "--cfg", "job"], config_dir="recipe/rlt/config") == 0
    assert "loss_mode: gpg" in capsys.readouterr().out


def test_the_lessons_prompt_is_the_one_that_rl_gives_the_teacher(warming, tiny_folder) -> None:
    """A warmed-up teacher continues exactly the prompts that RL shows it."""
    settings, tokenizer = warming(), AutoTokenizer.from_pretrained(tiny_folder)
    lessons = read_lessons(settings.data.train_files, settings.data, tokenizer, "train", "short")
    text, _ = RltPrompts(tokenizer, FORMATS["short"]).teacher("0+1=", "1")
    assert tokenizer.decode(lessons[0].prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
