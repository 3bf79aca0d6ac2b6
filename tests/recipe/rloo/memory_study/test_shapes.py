import dataclasses
import json

import pytest

from recipe.rloo.memory_study.arms import EXPANSIONS, FULL, TRUNCATED, Arm
from recipe.rloo.memory_study.shapes import PUBLISHED, SMALL, make_batch, prompt_text, read_documents
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def arm(expansion="token", prompt=FULL, k=4):
    return Arm("arm", expansion, prompt, "legacy", k, k)


@pytest.mark.parametrize("shapes", [PUBLISHED, SMALL], ids=lambda shapes: shapes.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_is_a_chat_turn_of_exactly_the_tokens_asked_for(shapes, seed, tokenizer):
    text = prompt_text(shapes, tokenizer, seed)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer(text)["input_ids"]) == shapes.prompt


@pytest.mark.parametrize("prompt", [FULL, TRUNCATED])
def test_every_expansion_gives_the_same_rows(prompt, tokenizer):
    batches = [make_batch(arm(expansion, prompt), SMALL, tokenizer, 0) for expansion in EXPANSIONS]
    assert len({batch.ids_sha256() for batch in batches}) == 1
    assert all(batch == batches[0] for batch in batches)


def test_truncation_keeps_the_first_tokens_and_counts_the_others(tokenizer):
    whole, cut = (make_batch(arm(prompt=prompt), SMALL, tokenizer, 0) for prompt in (FULL, TRUNCATED))
    assert [row[: SMALL.truncated] for row in whole.prompts] == list(cut.prompts)
    assert (whole.dropped, cut.dropped) == (0, 4 * (SMALL.prompt - SMALL.truncated))
    assert (whole.prompt_len, cut.prompt_len, cut.total_tokens) == (48, 16, 4 * (16 + 8))
    assert whole.ids_sha256() != cut.ids_sha256()


def test_an_advantage_is_the_reward_minus_the_mean_of_the_others(tokenizer):
    batch = make_batch(arm(k=3), SMALL, tokenizer, 0)
    a, b, c = batch.rewards
    assert batch.advantages() == pytest.approx([a - (b + c) / 2, b - (a + c) / 2, c - (a + b) / 2])
    assert len(set(batch.rewards)) > 1


def test_another_seed_gives_another_document_and_other_answers(tokenizer):
    first, second = (make_batch(arm(), SMALL, tokenizer, seed) for seed in (0, 1))
    assert first.prompts != second.prompts
    assert first.answers != second.answers


def test_documents_come_from_json_lines_and_text_files(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"id": i, "input": f"document {i}"}) for i in range(2)) + "\n")
    (tmp_path / "more.txt").write_text("one more")
    assert sorted(read_documents(tmp_path)) == ["document 0", "document 1", "one more"]


def test_a_folder_without_documents_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ConfigError, match=r"no document\. Name a \.txt file"):
        read_documents(tmp_path)


def test_a_document_of_the_user_is_cut_to_the_prompt(tmp_path, tokenizer):
    (tmp_path / "report.txt").write_text("An audit of the year. " * 400)
    shapes = dataclasses.replace(SMALL, documents=str(tmp_path))
    text = prompt_text(shapes, tokenizer, 0)
    assert text.startswith("<|im_start|>user\nAn audit")
    assert len(tokenizer(text)["input_ids"]) == SMALL.prompt


def test_a_document_that_is_too_short_is_refused(tmp_path, tokenizer):
    (tmp_path / "report.txt").write_text("")
    with pytest.raises(ConfigError, match="Name longer documents"):
        prompt_text(dataclasses.replace(PUBLISHED, documents=str(tmp_path)), tokenizer, 0)
