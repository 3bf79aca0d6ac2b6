"""A run on code tasks: the programs of the responses run in a service on this machine, and decide the rewards."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.end_to_end.runs import LOCAL, lines_of, metrics
from tests.rewards.sandbox_service import sandbox_service
from tests.rewards.test_judge import fails
from verl_memopt.cli import main

PROGRAMS = {f"```python\nprint({number})\n```": number for number in range(8)}
"""Programs that are one token each, by what they print."""
RAISES = "```python\nraise SystemExit(1)\n```"
WORDS = ["<|pad|>", "<|end|>", *map(str, range(8)), RAISES, *PROGRAMS]
URL = "reward_model.sandbox_fusion.url"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a model whose tokens are whole programs, and tasks: print this number; print anything."""
    folder = tmp_path_factory.mktemp("code")
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(WORDS), num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    rows = []
    for number in range(8):
        cases = {"inputs": ["", ""], "outputs": [f"{number}\n", None]}
        prompt = [{"role": "user", "content": str(number)}]
        rows.append({"data_source": "apps", "prompt": prompt, "reward_model": {"ground_truth": json.dumps(cases)}})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(task, folder, *more):
    files = [f"data.{split}_files={task}/rows.jsonl" for split in ("train", "val")]
    return main(
        [
            "train", "--config-name", "rloo_trainer", *LOCAL, *files, f"actor_rollout_ref.model.path={task}/model",
            f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts", "trainer.logger=[jsonl]",
            "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1", "data.seed=1",
            "data.max_prompt_length=4", "data.max_response_length=3", "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64", "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
            "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.dtype=fp32", *more,
        ]
    )  # fmt: skip


def address(service):
    """The service's address without the query, which a command line would have to quote."""
    return service.url.partition("?")[0]


def expected_score(sample):
    """The share of the two cases that the last program of a response passes."""
    programs = sorted((sample["output"].rfind(program), program) for program in (RAISES, *PROGRAMS))
    place, program = programs[-1]
    if place < 0 or program == RAISES:
        return 0.0
    return 1.0 if PROGRAMS[program] == int(sample["input"]) else 0.5


def test_the_rewards_of_a_run_are_the_shares_of_cases_that_its_programs_pass(task, tmp_path):
    with sandbox_service() as service:
        assert run(task, tmp_path, f"{URL}={address(service)}", "reward_model.reward_manager=prime") == 0
    rows = metrics(tmp_path)
    scores = []
    for step in (1, 2):
        samples = lines_of(tmp_path / "rollouts" / f"{step}.jsonl")
        assert [sample["score"] for sample in samples] == list(map(expected_score, samples))
        assert rows[step]["critic/score/mean"] == pytest.approx(sum(map(expected_score, samples)) / 16)
        assert rows[step]["reward/failed_rows"] == 0
        scores += map(expected_score, samples)
    assert len(set(scores)) > 1
    assert rows[1]["actor/grad_norm"] > 0
    assert "val-core/apps/reward/mean@1" in rows[2]


def test_a_run_whose_service_is_no_sandbox_ends_before_its_workers_start(task, tmp_path, capsys):
    with sandbox_service() as service:
        service.behaviours = [fails(404, b"no such page")]
        url = address(service)
        assert run(task, tmp_path, f"{URL}={url}") == 1
    assert f"RewardError: {URL}={url}: the sandbox service at {url} refused the request" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()
