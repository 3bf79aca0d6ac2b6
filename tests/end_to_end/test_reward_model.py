"""A run on the toy task whose rewards come from a reward model, alone or read by a function, and from an async function."""

import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from tests.end_to_end.runs import LOCAL, lines_of, steps_here, train_here
from tests.worker.test_reward_scores import classifier

MODEL = "reward_model.model"
SHORT = [
    *LOCAL, "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.track_memory_every_steps=10",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4", "data.val_max_samples=5",
    "actor_rollout_ref.rollout.temperature=1.5",
]  # fmt: skip


def scoring(folder, *more):
    asked = ["reward_model.enable=true", f"{MODEL}.path={folder}", f"{MODEL}.fsdp_config.dtype=fp32"]
    asked += ["reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=64"]
    return [*asked, *more]


@pytest.fixture(scope="module")
def reward_model(toy, tmp_path_factory):
    """A sequence classifier on the decoder and with the tokenizer of the toy policy."""
    return classifier(tmp_path_factory.mktemp("rm") / "model", toy / "model")


def logit(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


def test_the_rewards_of_a_run_are_the_classifiers_logits(toy, tmp_path, reward_model):
    folder, model = reward_model
    more = scoring(folder, f"{MODEL}.input_tokenizer=null", f"{MODEL}.fsdp_config.param_offload=true")
    rows = steps_here(toy, tmp_path, *SHORT, *more, f"trainer.rollout_data_dir={tmp_path}/rollouts")
    for step in (1, 2):
        samples = lines_of(tmp_path / "rollouts" / f"{step}.jsonl")
        assert len(samples) == 32
        for sample in samples:
            expected = logit(model, sample["prompt_ids"] + sample["response_ids"])
            assert sample["score"] == pytest.approx(expected, abs=1e-5)
        scores = [sample["score"] for sample in samples]
        assert rows[step]["critic/score/mean"] == pytest.approx(sum(scores) / 32)
        assert len(set(scores)) > 8
        assert rows[step]["actor/grad_norm"] > 0
        assert rows[step]["timing_s/reward"] > 0
        assert rows[step]["memory/reward/peak_allocated_gb"] > 0
    assert "val-core/toy/arithmetic/reward/mean@1" in rows[2]


TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def with_template(toy, folder, template):
    """Return how a tokenizer with this template renders the prompts of the toy task, by how the policy's renders them."""
    (folder / "chat_template.jinja").write_text(template)
    policys, own = AutoTokenizer.from_pretrained(toy / "model"), AutoTokenizer.from_pretrained(folder)
    prompts = pyarrow.parquet.read_table(toy / "train.parquet")["prompt"].to_pylist()

    def ids(prompt, answer):
        text = own.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], tokenize=False)
        return own(text, add_special_tokens=False)["input_ids"]

    rendered = [policys.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    known = dict(zip(rendered, prompts, strict=True))
    return lambda sample: ids(known[sample["input"]], sample["output"])


def test_a_function_combines_a_rule_with_the_score_of_a_model_that_has_a_template_of_its_own(toy, tmp_path, reward_model):
    folder, model = reward_model
    ids = with_template(toy, folder, TEMPLATE)
    (tmp_path / "mixed.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str.strip() == str(ground_truth)\n"
        "    return {'score': right + extra_info['rm_score'], 'right': right}\n"
    )
    more = [f"custom_reward_function.path={tmp_path}/mixed.py", f"trainer.rollout_data_dir={tmp_path}/rollouts"]
    rows, samples = steps_here(toy, tmp_path, *SHORT, *scoring(folder), *more), lines_of(tmp_path / "rollouts" / "1.jsonl")
    for sample in samples:
        assert sample["rm_score"] == pytest.approx(logit(model, ids(sample)), abs=1e-5)
        assert sample["score"] == pytest.approx(sample["rm_score"] + sample["right"])
    mean = sum(sample["right"] for sample in samples) / 32
    assert rows[1]["reward/right/mean"] == pytest.approx(mean)
    assert rows[1]["reward/rm_score/mean"] == pytest.approx(rows[1]["critic/score/mean"] - mean)
    assert "val-aux/toy/arithmetic/rm_score/mean@1" in rows[2]


def test_a_folder_without_a_head_ends_the_run_before_a_worker_starts(toy, tmp_path, capfd):
    assert train_here(toy, tmp_path, *SHORT, *scoring(toy / "model")) != 0
    assert f"{MODEL}.path={toy}/model: the folder is not of a reward model" in capfd.readouterr().err
