"""Supervised fine-tuning: the training loop with the dataset's own responses, from which RL starts."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import LOG_LINE
from tests.end_to_end.runs import LOCAL, assert_equal_runs, metrics, succeeded, train_here, wait_for_step
from tests.forked import shared_server
from verl_memopt.cli import main
from verl_memopt.config.loader import load_settings
from verl_memopt.data.toy import SHAPE
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.trainer.build import build_learner, build_run
from verl_memopt.trainer.loop import start_workers
from verl_memopt.worker.trained_model import micro_batches_of

AR = "actor_rollout_ref"
KNOBS = [
    f"{AR}.model.enable_gradient_checkpointing=true", f"{AR}.model.logprob_chunk_tokens=8", f"{AR}.model.tiled_mlp.enabled=true",
    f"{AR}.model.tiled_mlp.num_shards=2", f"{AR}.actor.ppo_max_token_len_per_gpu=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A model of the toy task's shape that knows nothing."""
    return make_tiny_model(tmp_path_factory.mktemp("raw") / "model", SHAPE, seed=5)


def told(toy, model, run_dir, *overrides):
    return [
        f"data.train_files={toy}/train.parquet", f"data.val_files={toy}/val.parquet", "data.response_key=extra_info.answer",
        "data.max_prompt_length=16", "data.max_response_length=4", "data.seed=1", f"{AR}.model.path={model}",
        f"{AR}.actor.fsdp_config.dtype=fp32", f"{AR}.actor.optim.lr=3e-3", "trainer.worker_group=local", "trainer.device=cpu",
        "trainer.logger=[console,jsonl]", f"trainer.default_local_dir={run_dir}", *overrides,
    ]  # fmt: skip


def naive_loss(folder, toy, name="val.parquet", rows=None):
    """Return the cross entropy of the answers of a file, each row alone, as transformers computes it; a scalar with gradients."""
    import pyarrow.parquet

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = torch.tensor(0.0, dtype=torch.float64), 0
    table = pyarrow.parquet.read_table(toy / name).to_pylist()
    for row in table if rows is None else [table[index] for index in rows]:
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["extra_info"]["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total, count = total + cross_entropy(logits.double(), torch.tensor(answer), reduction="sum"), count + len(answer)
    return total / count, model


@pytest.fixture(scope="module")
def tuned(toy, tmp_path_factory):
    """A run on the toy task's careless model, two optimizer steps a batch, as the command line makes it, and its output."""
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    steps = ["trainer.total_training_steps=30", "trainer.test_freq=15", "trainer.log_val_generations=2"]
    minis = [f"{AR}.actor.ppo_mini_batch_size=16", f"{AR}.actor.optim.lr=1e-3"]
    command = ["-m", "verl_memopt", "sft", *told(toy, toy / "model", run_dir, *steps, *minis)]
    return succeeded(shared_server().fork(command, apart=True).wait(240)), run_dir


def test_the_loss_falls_and_the_last_line_is_a_model_with_the_loss_that_was_logged(tuned, toy):
    process, run_dir = tuned
    rows = metrics(run_dir)
    assert [step for step, row in rows.items() if "val/loss" in row] == [0, 15, 30]
    assert rows[30]["val/loss"] < 0.3 * rows[0]["val/loss"]
    assert rows[30]["train/loss"] < 0.5 * rows[1]["train/loss"]
    *_, folder, model = process.stdout.rstrip().splitlines()
    assert (folder, model) == (str(run_dir), str(run_dir / "global_step_30" / "actor" / "huggingface"))
    assert naive_loss(model, toy)[0].item() == pytest.approx(rows[30]["val/loss"], abs=1e-5)


def test_it_reports_losses_phases_and_memory_and_nothing_of_rollouts(tuned):
    process, run_dir = tuned
    row = metrics(run_dir)[30]
    assert {"actor/grad_norm", "actor/lr", "response_length/mean", "perf/throughput", "timing_s/update_actor"} <= row.keys()
    assert {"memory/update_actor/peak_allocated_gb", "timing_s/testing"} <= row.keys()
    assert not [name for name in row if name.startswith(("critic/", "reward/", "rollout/")) or "ppo_kl" in name]
    assert not [name for name in row if "old_log_prob" in name or name.endswith("/gen") or "update_weights" in name]
    assert re.search(r"step 15/30 loss=\d", process.stdout)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["validation_after"] < summary["validation_before"]
    sample = json.loads((run_dir / "generations.jsonl").read_text().splitlines()[0])
    assert sample["output"] == sample["gts"]
    assert sample["score"] < 0


def test_rl_starts_from_the_folder_and_higher_than_from_the_model_before(tuned, toy, tmp_path):
    model, scores = tuned[1] / "global_step_30" / "actor" / "huggingface", {}
    for name, folder in (("before", toy / "model"), ("tuned", model)):
        rl = [f"{AR}.model.path={folder}", *LOCAL, "trainer.total_training_steps=1", "trainer.save_freq=-1"]
        rl += ["trainer.test_freq=-1", "data.train_batch_size=4", f"{AR}.actor.ppo_mini_batch_size=4"]
        assert train_here(toy, tmp_path / name, *rl) == 0
        scores[name] = json.loads((tmp_path / name / "summary.json").read_text())["validation_before"]
    assert scores["tuned"] > scores["before"] + 0.3
    assert list(metrics(tmp_path / "tuned")) == [0, 1]


def test_after_kill_9_the_rerun_ends_as_an_uninterrupted_run(toy, raw, tmp_path):
    short = ["trainer.total_training_steps=10", "trainer.save_freq=2", "trainer.test_freq=5", "data.train_batch_size=8"]
    short += ["data.val_max_samples=8", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.actor.shuffle=true"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["sft", *told(toy, raw, whole, *short)]) == 0
    process = shared_server().fork(["-m", "verl_memopt", "sft", *told(toy, raw, killed, *short)])
    wait_for_step(process, killed, 3)
    process.kill()
    process.wait()
    assert max(metrics(killed)) < 10
    assert main(["sft", *told(toy, raw, killed, *short)]) == 0
    assert_equal_runs(killed, whole)
    last = Path("global_step_10") / "actor" / "huggingface" / "model.safetensors"
    resumed, other = load_file(killed / last), load_file(whole / last)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in other.items())


def test_lora_leaves_merged_weights_that_have_the_loss_that_was_logged(toy, raw, tmp_path):
    lora = [f"{AR}.model.lora_rank=8", f"{AR}.model.lora_alpha=16", f"{AR}.actor.optim.lr=1e-2"]
    lora.append("trainer.total_training_steps=20")
    assert main(["sft", *told(toy, raw, tmp_path / "run", *lora)]) == 0
    rows = metrics(tmp_path / "run")
    assert rows[20]["val/loss"] < 0.8 * rows[0]["val/loss"]
    merged = tmp_path / "run" / "global_step_20" / "actor" / "huggingface"
    assert naive_loss(merged, toy)[0].item() == pytest.approx(rows[20]["val/loss"], abs=1e-4)


@pytest.mark.parametrize("knobs", [[], KNOBS], ids=["default", "knobs"])
def test_the_gradient_of_an_update_is_that_of_a_naive_cross_entropy(toy, raw, tmp_path, knobs):
    steps = ["data.shuffle=false", "data.train_batch_size=12", "trainer.total_training_steps=1"]
    context = build_run(load_settings("sft_trainer", told(toy, raw, tmp_path / "run", *steps, *knobs)))
    with context.lock, start_workers(context, PhaseClock()) as workers:
        learner = build_learner(context, workers, None)
        batch = learner.advantages(learner.scored(1))
        learner.close()
        ((mini,),) = learner.policy.policy_update.cut(*batch.for_update(), 1)
        worker = workers.group._worker
        with worker.residency.phase("update_actor"):
            policy = worker.policy
            micro_batches = micro_batches_of(mini.batch, mini.micro_batches, policy.model.supports_prefix_kv)
            result = policy.accumulate(micro_batches, mini.counts, worker.temperature)
            ours = {name: p.grad.clone() for name, p in policy.model.lm.named_parameters() if p.grad is not None}
    assert (len(mini.micro_batches) > 1) == bool(knobs)
    loss, plain = naive_loss(raw, toy, "train.parquet", range(12))
    loss.backward()
    assert float(result["actor/loss"]) == pytest.approx(loss.item(), rel=2e-6)
    naive = {name: p.grad for name, p in plain.named_parameters()}
    assert ours.keys() == naive.keys()
    for name, gradient in naive.items():
        assert (ours[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.slow
def test_two_ranks_learn_and_validate_as_one(toy, tmp_path):
    """Held-out rows that two ranks cannot share evenly count once."""
    found = {}
    for ranks in (1, 2):
        run_dir = tmp_path / str(ranks)
        more = ["trainer.worker_group=ray", f"trainer.n_gpus_per_node={ranks}", "trainer.total_training_steps=2"]
        more += ["data.val_max_samples=7", "trainer.test_freq=1", "data.val_batch_size=4", f"{AR}.actor.optim.lr=1e-3"]
        command = ["-m", "verl_memopt", "sft", *told(toy, toy / "model", run_dir, *more)]
        succeeded(shared_server().fork(command, apart=True).wait(240))
        found[ranks] = [row[name] for row in metrics(run_dir).values() for name in ("val/loss", "train/loss") if name in row]
    assert len(found[1]) == 5
    assert found[1] == pytest.approx(found[2], rel=1e-5)


@pytest.fixture
def refused(raw, toy, tmp_path, capsys):
    """Gives what is said where settings or data are refused."""

    def run(*overrides):
        capsys.readouterr()
        assert main(["sft", *told(toy, raw, tmp_path / "run", *overrides)]) == 2
        return "\n".join(line for line in capsys.readouterr().err.splitlines() if not LOG_LINE.match(line))

    return run


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1="}, "data.response_key=response: the response must be a text, but there is none"),
        ({"prompt": "1+1=", "response": " "}, "data.response_key=response: the response must be a text, but it is empty"),
        ({"prompt": "1+1=", "response": 2}, "data.response_key=response: the response must be a text, but it is 2"),
        ({"response": "2"}, "there is no column 'prompt'.*data.prompt_key"),
        ({"messages": [{"role": "user", "content": "1+1="}]}, "data.messages_key=messages: a conversation is"),
        ({"prompt": "1+1=", "response": "2" * 40}, "response has 41 tokens.*data.max_response_length"),
    ],
)
def test_a_row_without_a_response_is_refused_by_file_row_and_key(refused, tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "response": "4"}) + "\n" + json.dumps(row) + "\n")
    files = [f"data.train_files={path}", "data.val_files=null", "data.response_key=response"]
    line = refused(*files)
    assert "\n" not in line
    assert re.search(f"{re.escape(str(path))}:2: .*{words}", line)


@pytest.mark.parametrize(
    "override",
    [
        f"{AR}.actor.policy_loss.loss_mode=vanilla", f"{AR}.actor.use_kl_loss=true", f"{AR}.actor.entropy_coeff=0.1",
        f"{AR}.actor.loss_agg_mode=seq-mean-token-mean", f"{AR}.rollout.n=2", f"{AR}.rollout.temperature=0.7",
        "algorithm.use_kl_in_reward=true", "reward_model.enable=true", "algorithm.adv_estimator=grpo", "debug.mode=sync_check",
        "custom_reward_function.path=reward.py",
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_with_the_way_out(refused, override):
    message = refused(override)
    assert override in message
    assert "Set " in message


def test_a_key_of_the_engine_earns_a_warning(raw, toy, tmp_path, caplog):
    load_settings("sft_trainer", told(toy, raw, tmp_path, f"{AR}.rollout.gpu_memory_utilization=0.3"))
    (message,) = [text for text in caplog.messages if "has no effect" in text]
    assert f"{AR}.rollout.gpu_memory_utilization=0.3" in message
    assert "algorithm.adv_estimator is sft" in message
