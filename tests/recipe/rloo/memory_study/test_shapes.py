import dataclasses

import pytest

from recipe.rloo.memory_study.cells import (
    ARMS,
    EXPANSIONS,
    FIXED_ROWS,
    FULL,
    GIB,
    MIB,
    TRUNCATED,
    Arm,
    choose_device,
    coupled_arms,
    larger,
    main_arms,
    predicted_bytes,
    saving_arms,
)
from recipe.rloo.memory_study.shapes import PUBLISHED, SMALL, make_batch, prompt_text, read_documents
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def arm(expansion="token", prompt=FULL, k=4):
    return Arm("arm", expansion, prompt, "legacy", k, k)


@pytest.mark.parametrize("shapes", [PUBLISHED, SMALL], ids=lambda shapes: shapes.name)
@pytest.mark.parametrize("seed", range(2))
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
    assert (whole.prompt_len, cut.prompt_len, cut.response_len) == (48, 16, 8)
    other = make_batch(arm(), SMALL, tokenizer, 1)
    assert len({batch.ids_sha256() for batch in (whole, cut, other)}) == 3
    assert (whole.prompts == other.prompts, whole.answers == other.answers) == (False, False)


def test_a_document_of_the_user_is_cut_to_the_prompt_and_one_that_is_none_or_too_short_is_refused(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ConfigError, match=r"no document\. Name a \.txt file"):
        read_documents(tmp_path)
    (tmp_path / "report.txt").write_text("An audit of the year. " * 400)
    text = prompt_text(dataclasses.replace(SMALL, documents=str(tmp_path / "report.txt")), tokenizer, 0)
    assert text.startswith("<|im_start|>user\nAn audit")
    assert len(tokenizer(text)["input_ids"]) == SMALL.prompt
    (tmp_path / "report.txt").write_text("")
    with pytest.raises(ConfigError, match="Name longer documents"):
        prompt_text(dataclasses.replace(PUBLISHED, documents=str(tmp_path / "report.txt")), tokenizer, 0)


@pytest.mark.parametrize(
    ("rows", "prompt", "mib", "published"),
    [
        (2, 3015, 13_488, 13_615),
        (4, 3015, 26_335, 26_529),
        (8, 3015, 52_030, None),
        (2, 1024, 5_425, 5_439),
        (4, 1024, 10_208, 10_169),
        (8, 1024, 19_776, 19_627),
    ],
)
def test_the_formula_gives_the_figures_of_the_reference_within_a_hundredth_of_every_run(rows, prompt, mib, published):
    predicted = predicted_bytes(rows, prompt, 100, 151_669) / MIB
    assert round(predicted) == mib
    assert published is None or abs(predicted / published - 1) < 0.01


def test_without_a_gpu_the_published_trainer_is_simulated_and_what_saves_is_real_where_it_fits():
    assert {choose_device(arm, "auto", False, 10**15) for arm in main_arms()} == {"fake"}
    assert {choose_device(arm, "auto", False, 10**15) for arm in saving_arms()} == {"cpu"}
    assert {(arm.update, choose_device(arm, "auto", False, GIB)) for arm in saving_arms([8])} == {
        ("no_retention", "fake"),
        ("response_only", "fake"),
        ("chunked", "cpu"),
        ("shared_prompt", "cpu"),
        ("shared_prompt_checkpointing", "cpu"),
    }


def test_a_larger_group_is_tried_where_the_one_before_it_completed_and_64_by_the_default_alone():
    main, savings = main_arms([8]), saving_arms([8])
    tried = larger([*main, *savings])
    assert {arm.k for arm in tried} == {16}
    assert [arm.name for arm in tried] == [arm.name for arm in main if arm.prompt == "full"] + [arm.name for arm in savings]
    assert {arm.micro_batch for arm in tried if arm.update == "legacy"} == {FIXED_ROWS}
    assert {arm.micro_batch for arm in tried if arm.update == "shared_prompt"} == {16}
    assert {arm.k for arm in larger([*ARMS, *tried])} == {32}
    last = larger([*main_arms([32]), *saving_arms([32])])
    assert {(arm.update, arm.k) for arm in last} == {("shared_prompt", 64), ("shared_prompt_checkpointing", 64)}
    assert larger(main_arms([2, 4])) == []
    assert larger(coupled_arms()) == []
    assert larger(saving_arms([64])) == []
