"""The rows of a supervised dataset: which text is the prompt, which the response, and how the response ends."""

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_memopt.config.schema import CustomClass, Data
from verl_memopt.data.encoder import PromptEncoder, end_of_turn
from verl_memopt.data.prompts import expand
from verl_memopt.data.responses import build_supervised_dataset
from verl_memopt.errors import DataError

CHAT = [{"role": "user", "content": "1+1="}]


def settings(**more):
    return Data(**{"train_files": None, "val_files": None, "seed": 0, "max_prompt_length": 100, **more})


def read(jsonl, tokenizer, *rows, **more):
    return build_supervised_dataset(jsonl(*rows), settings(**more), tokenizer, "train")


def text_of(tokenizer, row):
    return tokenizer.decode(row.response)


def test_a_response_ends_as_the_chat_template_ends_a_turn(jsonl, tokenizer):
    assert end_of_turn(tokenizer, {}) == f"{tokenizer.eos_token}\n"
    (row,) = read(jsonl, tokenizer, {"prompt": CHAT, "response": "two"})
    assert row.text == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text_of(tokenizer, row) == f"two{tokenizer.eos_token}"


def test_a_plain_prompt_stays_as_it_is_and_its_response_ends_with_the_end_token(jsonl, tokenizer):
    (row,) = read(jsonl, tokenizer, {"question": "1+1=", "answer": "two"}, prompt_key="question", response_key="answer")
    assert (row.text, text_of(tokenizer, row)) == ("1+1=", f"two{tokenizer.eos_token}")


def test_a_conversation_is_its_last_turn_after_the_others(jsonl, tokenizer):
    turns = [{"role": "system", "content": "Add."}, *CHAT, {"role": "assistant", "content": "two"}]
    one, other = read(jsonl, tokenizer, {"messages": turns}, {"prompt": turns[:-1], "response": "two"})
    assert (one.text, one.response) == (other.text, other.response)


def test_a_dot_leads_into_an_object(jsonl, tokenizer):
    (row,) = read(jsonl, tokenizer, {"prompt": "a", "extra_info": {"answer": "b"}}, response_key="extra_info.answer")
    assert text_of(tokenizer, row) == f"b{tokenizer.eos_token}"


@pytest.mark.parametrize(("allowed", "ends"), [(False, 1), (True, 2)])
def test_special_tokens_of_a_response_to_a_message_are_text_unless_they_are_allowed(jsonl, tokenizer, allowed, ends):
    row = {"prompt": CHAT, "response": f"b{tokenizer.eos_token}c"}
    (read_row,) = read(jsonl, tokenizer, row, allow_special_tokens=allowed)
    assert read_row.response.count(tokenizer.eos_token_id) == ends


@pytest.mark.parametrize("prompt", ["1+1=", "a ", "a\n"])
@pytest.mark.parametrize("response", ["two", " two", "\n\ntwo", "two<|im_end|>", "<|im_end|>two"])
def test_prompt_and_response_that_are_texts_are_encoded_as_one_text(jsonl, with_bos, prompt, response):
    (read_row,) = read(jsonl, with_bos, {"prompt": prompt, "response": response})
    (ids,) = expand([read_row], [0], 1, "token", PromptEncoder(with_bos, 100, "error")).prompt_ids
    end = "" if response.endswith(with_bos.eos_token) else with_bos.eos_token
    assert [*ids, *read_row.response] == with_bos(prompt + response + end)["input_ids"]


def test_a_tokenizer_with_a_space_in_front_puts_none_in_front_of_a_response(jsonl):
    pieces = ["<u>", "</s>", "\u2581", "a", "b", "\u2581b", ":"]
    made = Tokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<u>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else '</s>' }}{% endfor %}"
    for prompt in ("a:", [{"role": "user", "content": "a"}]):
        (read_row,) = read(jsonl, tokenizer, {"prompt": prompt, "response": "b"})
        assert tokenizer.convert_ids_to_tokens(read_row.response) == ["b", "</s>"]


def test_a_long_response_is_refused_left_out_or_cut(jsonl, tokenizer, caplog):
    rows = {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b" * 9}
    with pytest.raises(DataError, match=r"rows.jsonl:2: the response has \d+ tokens.*filter_overlong_prompts=true.*truncation"):
        read(jsonl, tokenizer, *rows, max_response_length=4)
    with caplog.at_level(logging.WARNING):
        assert len(read(jsonl, tokenizer, *rows, max_response_length=4, filter_overlong_prompts=True)) == 1
        cut = read(jsonl, tokenizer, *rows, max_response_length=4, truncation="left")
    assert text_of(tokenizer, cut[1]) == "bbbb"
    assert "left out 1 of 2 responses" in caplog.text
    assert "cut the end of 1 of 2 responses" in caplog.text
    with pytest.raises(DataError, match="no row is left"):
        read(jsonl, tokenizer, rows[1], max_response_length=4, filter_overlong_prompts=True)


def test_a_class_of_the_users_own_brings_its_responses(jsonl, tokenizer, tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(
        "from verl_memopt.data.dataset import PromptRow\n"
        "def Rows(files, data, tokenizer, split):\n"
        "    return [PromptRow(i, 'a', 's', '', {}, f'row {i}', response=(5,) * i) for i in (1, 0)]\n"
    )
    with pytest.raises(DataError, match=r"row 0: PromptRow.response is empty"):
        read(jsonl, tokenizer, {"prompt": "a"}, custom_cls=CustomClass(str(path), "Rows"))
