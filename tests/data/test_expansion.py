from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder, special_tokens_of
from verl_memopt.data.prompts import EXPANSIONS, Expanded, check_prompts, expand
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer

TOKENIZER = build_tokenizer()
PIECES = st.one_of(st.text(min_size=1, max_size=8), st.sampled_from(SPECIALS))
TEXTS = st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), max_size=5)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def bytes_of(text):
    """The token of each byte, none merged."""
    return [ids_of(letter)[0] for letter in text]


def prompts(texts):
    return [PromptRow(i, text, "s", None, {}, f"a:{i + 1}") for i, text in enumerate(texts)]


def prompts_of_ids(*ids):
    return [PromptRow(i, TOKENIZER.decode(each), "s", None, {}, f"a:{i + 1}", ids=tuple(each)) for i, each in enumerate(ids)]


def expand_all(rows, n, method, encoder):
    expanded = expand(rows, range(len(rows)), n, method, encoder)
    assert expanded.prompts == rows
    return expanded.ids


@given(TEXTS, st.integers(1, 4), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]))
def test_every_method_gives_the_same_ids_and_the_same_counts(texts, n, limit, truncation):
    seen = []
    for method in EXPANSIONS:
        encoder = PromptEncoder(TOKENIZER, limit, truncation)
        rows = expand_all(prompts(texts), n, method, encoder)
        seen.append((rows, encoder.rows_truncated, encoder.tokens_dropped))
    assert all(entry == seen[0] for entry in seen)
    assert len(seen[0][0]) == len(texts) * n


def test_no_method_cuts_a_prompt_of_3015_tokens_that_the_limit_allows():
    text = "1" * 3015
    assert len(ids_of(text)) == 3015
    for method in EXPANSIONS:
        encoder = PromptEncoder(TOKENIZER, 3015, "right")
        assert [len(ids) for ids in expand_all(prompts([text]), 2, method, encoder)] == [3015, 3015]
        assert encoder.tokens_dropped == 0


@pytest.mark.parametrize("method", EXPANSIONS)
def test_the_copies_of_a_prompt_stand_together_and_keep_its_special_tokens(method):
    texts = ["<|im_start|>1<|im_end|>", "<|im_start|>234<|im_end|>"]
    rows = expand_all(prompts(texts), 3, method, PromptEncoder(TOKENIZER, 10, "error"))
    assert [TOKENIZER.decode(ids) for ids in rows] == [texts[0]] * 3 + [texts[1]] * 3


@given(TEXTS, st.lists(st.booleans(), min_size=5, max_size=5))
def test_every_method_gives_the_same_ids_where_special_tokens_are_text(texts, are_text):
    special = special_tokens_of(TOKENIZER)
    rows = [
        replace(row, plain=special.find(row.text) if plain else ()) for row, plain in zip(prompts(texts), are_text, strict=False)
    ]
    first, *others = [expand_all(rows, 2, method, PromptEncoder(TOKENIZER, 100, "left")) for method in EXPANSIONS]
    assert others == [first] * 3
    for row, ids in zip(rows, first[::2], strict=True):
        assert ids == TOKENIZER(row.text, add_special_tokens=False, split_special_tokens=bool(row.plain))["input_ids"]


@pytest.mark.parametrize("method", [method for method in EXPANSIONS if method != "lazy"])
@pytest.mark.parametrize("rows", [prompts(["12"]), prompts_of_ids([2, 19])], ids=["text", "ids"])
def test_each_row_has_its_own_list(method, rows):
    first, second = expand_all(rows, 2, method, PromptEncoder(TOKENIZER, 10, "error"))
    first.append(0)
    assert len(second) == 2


def test_lazy_keeps_the_ids_of_a_prompt_once():
    rows = expand_all(prompts(["12", "3", "3"]), 3, "lazy", PromptEncoder(TOKENIZER, 10, "error"))
    assert [id(row) for row in rows] == [id(rows[place]) for place in (0, 0, 0, 3, 3, 3, 6, 6, 6)]
    assert len({id(row) for row in rows}) == 3


class CountingTokenizer:
    def __init__(self):
        self.calls = []

    def __call__(self, texts, **settings):
        self.calls.append(len(texts))
        return TOKENIZER(texts, **settings)


@pytest.mark.parametrize(("method", "texts_tokenized"), [("string", 6), ("repeat_sampler", 6), ("token", 2), ("lazy", 2)])
def test_a_method_tokenizes_each_copy_or_each_prompt_in_one_call(method, texts_tokenized):
    counting = CountingTokenizer()
    expand(prompts(["12", "3"]), [0, 1], 3, method, PromptEncoder(counting, 10, "error"))
    assert counting.calls == [texts_tokenized]


class ReadRows:
    """A data set that notes which rows are read, and whose last row can differ at each reading."""

    def __init__(self, rows, changes=False):
        self.rows, self.changes, self.read = rows, changes, list[int]()

    def __getitem__(self, index):
        self.read.append(index)
        row = self.rows[index]
        return replace(row, text=f"{row.text}{len(self.read)}") if self.changes else row


@pytest.mark.parametrize(
    ("method", "read"), [("repeat_sampler", [2, 2, 2, 0, 0, 0]), ("token", [2, 0]), ("lazy", [2, 0]), ("string", [2, 0])]
)
def test_only_the_repeat_sampler_repeats_the_index(method, read):
    dataset = ReadRows(prompts(["12", "3", "45"]))
    expanded = expand(dataset, [2, 0], 3, method, PromptEncoder(TOKENIZER, 10, "error"))
    assert dataset.read == read
    assert expanded == Expanded([dataset.rows[2], dataset.rows[0]], [ids_of("45")] * 3 + [ids_of("12")] * 3)


def test_a_data_set_that_gives_a_group_two_prompts_is_refused():
    dataset = ReadRows(prompts(["12"]), changes=True)
    with pytest.raises(DataError, match=r"^a:1: the data set returned another prompt .* set algorithm\.expansion=token\.$"):
        expand(dataset, [0], 2, "repeat_sampler", PromptEncoder(TOKENIZER, 10, "error"))


IDS = ids_of("<|im_start|>user\nThe sum is<|im_end|>")


@pytest.mark.parametrize("method", EXPANSIONS)
def test_a_prompt_of_ids_keeps_them_beside_a_prompt_of_text(method):
    (text,), (of_ids,) = prompts(["12"]), prompts_of_ids(IDS)
    encoder = PromptEncoder(TOKENIZER, len(IDS) - 2, "left")
    rows = expand_all([text, of_ids, text], 2, method, encoder)
    assert rows == [ids_of("12")] * 2 + [IDS[2:]] * 2 + [ids_of("12")] * 2
    assert (encoder.rows_truncated, encoder.tokens_dropped) == (1, 2)


HALF = ids_of("\u00e9")[:1]
"""The first of the two bytes of a character."""


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [*ids_of("1"), *bytes_of("user")],
            r"^a:2: position 1: the prompt has the token id \d+, and its text gives the token id ",
        ),
        ([*ids_of("12"), *HALF], rf"^a:2: position 2: the prompt has the token id {HALF[0]}, and its text gives the token id "),
        ([*ids_of("1"), 9999], "^a:2: position 1: the prompt has the token id 9999, and its text gives its end. "),
    ],
    ids=["merged letters", "half a character", "no such token"],
)
def test_string_refuses_ids_that_do_not_come_back_and_the_others_take_them(ids, message):
    rows = prompts_of_ids(IDS, ids)
    way_out = r".* Set algorithm\.expansion=token, or give the prompt as text\.$"
    with pytest.raises(DataError, match=message + way_out):
        expand(rows, [0, 1], 2, "string", PromptEncoder(TOKENIZER, 100, "error"))
    with pytest.raises(DataError, match=message + way_out):
        check_prompts(rows, "string", TOKENIZER)
    for method in ("token", "lazy", "repeat_sampler"):
        assert expand_all(rows, 2, method, PromptEncoder(TOKENIZER, 100, "error")) == [IDS, IDS, ids, ids]
        check_prompts(rows, method, TOKENIZER)


def test_ids_are_compared_before_a_prompt_is_cut():
    rows = prompts_of_ids([*bytes_of("user"), *ids_of("1")])
    with pytest.raises(DataError, match="position 0"):
        expand(rows, [0], 1, "string", PromptEncoder(TOKENIZER, 1, "left"))


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"algorithm\.expansion=magic: .*token, lazy, repeat_sampler, string"):
        expand([], [], 1, "magic", PromptEncoder(TOKENIZER, 10, "error"))
