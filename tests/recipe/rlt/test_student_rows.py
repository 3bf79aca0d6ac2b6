"""The student's sequences: where an explanation ends, the parts of a row, and what happens to long ones."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.recipe.rlt import naive
from tests.recipe.rlt.naive import explanation_of, token_text
from tests.recipe.rlt.tokens import ids, with_merges
from verl_memopt.data.batch import Ragged
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer
from verl_memopt.recipes.rlt.dataset import FORMATS, STRATOS, RltPrompts
from verl_memopt.recipes.rlt.settings import RltReward
from verl_memopt.recipes.rlt.student_rows import (
    BRIDGE,
    EMPTY_THINK,
    END,
    NO_END_TAG,
    OK,
    PREFIX,
    SKIPPED,
    SOLUTION,
    THINK,
    THINK_TRUNCATED,
    StudentEncoder,
    TokenBytes,
    locate_explanations,
    needs_teacher_pass,
    retokenized_parts,
    reused_log_probs,
)

TOKENIZER = build_tokenizer()
SHORT = FORMATS["short"]
TAG = SHORT.explanation.end


def encode(*rows, rlt_format=SHORT, tokenizer=TOKENIZER, **settings):
    """Encodes (question, solution, pieces of the response)."""
    encoder = StudentEncoder(
        RltPrompts(tokenizer, rlt_format), RltReward(**settings), {tokenizer.eos_token_id, tokenizer.pad_token_id}
    )
    responses = Ragged.from_rows([ids(tokenizer, *pieces) for _, _, pieces in rows], torch.int64)
    addresses = [f"f:{place}" for place in range(1, len(rows) + 1)]
    return encoder.encode([row[0] for row in rows], [row[1] for row in rows], responses, addresses)


def text(rows, part, row=0, tokenizer=TOKENIZER):
    return tokenizer.decode(rows.part(part).rows()[row])


def test_a_row_is_its_five_parts_in_order():
    rows = encode(("1+1?", "2", ["one and one", TAG, "<|im_end|>"]))
    assert text(rows, PREFIX) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
    assert text(rows, THINK) == "one and one"
    assert text(rows, BRIDGE) == "</think>\n\n<solution>"
    assert text(rows, SOLUTION) == "2"
    assert text(rows, END) == "</solution><|im_end|>\n"
    assert TOKENIZER.decode(rows.ids.flat) == "".join(text(rows, part) for part in range(5))
    assert (rows.status.tolist(), rows.matched.tolist(), rows.has_text_after.tolist()) == ([OK], [True], [False])
    assert rows.status.dtype == torch.int8


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)


@given(st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip), st.lists(st.one_of(TEXTS, st.just(TAG)), max_size=3)), max_size=4))
def test_parts_are_those_of_the_naive_reference(samples):
    rows = encode(*samples, rlt_format=STRATOS if len(samples) % 2 else SHORT)
    rlt_format = STRATOS if len(samples) % 2 else SHORT
    for place, (question, solution, pieces) in enumerate(samples):
        response = ids(TOKENIZER, *pieces)
        sample = naive.sample_of(TOKENIZER, rlt_format, question, solution, response, {TOKENIZER.eos_token_id})
        assert rows.ids.rows()[place].tolist() == sample.student_ids
        assert rows.parts[place].tolist() == sample.lengths
        assert rows.matched[place] == sample.matched


@pytest.mark.parametrize("solution", ["\u00e9\U0001f642\u65e5", "\n\n4 2\n\n", "x<|im_end|>y"])
def test_a_solution_keeps_every_character(solution):
    rows = encode(("q", solution, ["a", TAG]))
    assert text(rows, SOLUTION) == solution
    assert TOKENIZER.eos_token_id not in rows.part(SOLUTION).flat


@pytest.mark.parametrize(
    ("pieces", "status", "think"),
    [
        (["why", TAG], OK, "why"),
        (["why"], NO_END_TAG, "why"),
        ([TAG, "x"], EMPTY_THINK, ""),
        ([], EMPTY_THINK, ""),
        (["<|im_end|>"], EMPTY_THINK, ""),
    ],
    ids=str,
)
def test_statuses_of_rows_within_the_limit(pieces, status, think):
    rows = encode(("q", "s", pieces))
    assert (rows.status.tolist(), text(rows, THINK)) == ([status], think)


def lengths(rows):
    return rows.parts[0].tolist()


@pytest.mark.parametrize(("cut", "has_tag"), [(1, True), (5, False)])
def test_only_the_end_of_an_explanation_is_cut(cut, has_tag):
    row = ("q", "solution", ["12345", *[TAG] * has_tag])
    whole = encode(row)
    total = sum(lengths(whole))
    rows = encode(row, max_student_len=total - cut)
    assert text(rows, THINK) == "12345"[: 5 - cut]
    assert [text(rows, part) for part in (PREFIX, BRIDGE, SOLUTION, END)] == [
        text(whole, part) for part in (PREFIX, BRIDGE, SOLUTION, END)
    ]
    assert sum(lengths(rows)) == total - cut
    assert (rows.status.tolist(), rows.matched.tolist()) == ([THINK_TRUNCATED], [has_tag])


def test_an_overlong_row_is_skipped_or_an_error_on_request_and_one_that_just_fits_is_not_cut():
    total = sum(lengths(encode(("q", "s", ["123", TAG]))))
    assert encode(("q", "s", ["123", TAG]), max_student_len=total).status.tolist() == [OK]
    rows = encode(("q", "s", ["123"]), ("q", "s", ["12", TAG]), max_student_len=total - 1, overlong="skip")
    assert (rows.status.tolist(), rows.parts[0].tolist()) == ([SKIPPED, OK], [0] * 5)
    with pytest.raises(
        ConfigError, match=rf"max_student_len={total - 1}: .*for f:2 has {total} tokens. Raise it to at least {total}"
    ):
        encode(("q", "s", ["12", TAG]), ("q", "s", ["123", TAG]), max_student_len=total - 1, overlong="error")


def test_a_row_without_room_for_its_solution_is_skipped_and_the_others_stay():
    long, short = ("q", "s" * 40, ["12", TAG]), ("q", "s", ["12", TAG])
    alone = encode(short)
    rows = encode(long, short, max_student_len=sum(lengths(alone)))
    assert rows.status.tolist() == [SKIPPED, OK]
    assert rows.parts[0].tolist() == [0] * 5
    assert rows.scored().tolist() == [False, True]
    assert torch.equal(rows.ids.flat, alone.ids.flat)


def test_the_forced_prefix_is_scored_on_request_only():
    plain, forced = (encode(("q", "s", ["a", TAG]), include_forced_prefix=on) for on in (False, True))
    assert (text(plain, THINK), text(forced, THINK)) == ("a", "\n\na")
    assert text(plain, PREFIX) == text(forced, PREFIX) + "\n\n"
    assert encode(("q", "s", [TAG]), include_forced_prefix=True).status.tolist() == [OK]


def test_chosen_rows_keep_all_that_belongs_to_them():
    samples = [("q", "s", ["1", TAG, "x"]), ("q", "s" * 60, []), ("r", "t", ["23"])]
    limit = sum(lengths(encode(("q", "s", ["123456"]))))
    rows = encode(*samples, max_student_len=limit)
    chosen, expected = rows.select([2, 0, 1]), encode(samples[2], samples[0], samples[1], max_student_len=limit)
    assert chosen.status.tolist() == [NO_END_TAG, OK, SKIPPED]
    for name in ("parts", "status", "matched", "has_text_after"):
        assert torch.equal(getattr(chosen, name), getattr(expected, name))
    assert torch.equal(chosen.ids.flat, expected.ids.flat)


def test_without_merges_both_alignments_agree():
    tokenizer = with_merges()
    samples = [("q", "\u00e9s", ["ab\u00e9", TAG]), ("q", "s", ["ab"]), ("<|im_end|>", "s<|im_end|>", [TAG, "x"])]
    one, other = (encode(*samples, tokenizer=tokenizer, align=each) for each in ("concat", "retokenize"))
    assert torch.equal(one.ids.flat, other.ids.flat)
    assert torch.equal(one.parts, other.parts)
    assert torch.equal(one.status, other.status)


def place_of(part, whole, last):
    """Returns where a list of tokens first or last lies in another."""
    places = [place for place in range(len(whole) - len(part) + 1) if whole[place : place + len(part)] == part]
    return places[-1 if last else 0]


def published(tokenizer, question, solution, completion):
    """Returns the student's ids and the first places of explanation and solution, by the published way: text and search."""
    tags = re.escape(SHORT.explanation.begin) + "(.*?)" + re.escape(TAG)
    completion = SHORT.forced_prefix + completion
    match = re.search(tags, completion, flags=re.DOTALL) or re.search(tags, completion + TAG, flags=re.DOTALL)
    turn = SHORT.thought.wrap(match[1]) + "\n\n" + SHORT.solution.wrap(solution)
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": turn}]
    whole, think, target = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (tokenizer.apply_chat_template(chat, tokenize=False), match[1], solution)
    )
    return whole, place_of(think, whole, last=False), place_of(target, whole, last=True)


def places(rows):
    """Returns the first places of explanation and solution of the first row."""
    prefix, think, bridge = rows.parts[0, :3].tolist()
    return prefix, prefix + think + bridge


WORDS = st.text("ab7 \n\u00e9", min_size=1, max_size=6)


@given(WORDS, WORDS.filter(str.strip), WORDS, st.sampled_from(["", TAG, TAG + "x", TAG + TAG]))
def test_tokenizing_again_is_the_published_way_where_its_search_finds_one_place(question, solution, thought, rest):
    tokenizer = with_merges((b"a", b"b"), (b"7", b"7"))
    question, thought = f"Q{question}", f"T{thought}t"
    rows = encode(
        (question, f"S{solution}s", [thought + rest]), tokenizer=tokenizer, align="retokenize", include_forced_prefix=True
    )
    ids_, think_at, solution_at = published(tokenizer, question, f"S{solution}s", thought + rest)
    assert rows.ids.flat.tolist() == ids_
    assert places(rows) == (think_at, solution_at)


@pytest.mark.parametrize("merges", [(), ((b"\n", b"\n"), (b">", b"\n\n"))])
def test_the_teacher_reads_all_text_before_the_first_token_that_is_scored(merges):
    # As in Qwen's vocabulary, one token may hold the end of the tag and the blank line. It then opens both rows.
    tokenizer, settings = with_merges(*merges), RltReward(align="retokenize", include_forced_prefix=True)
    prompts = RltPrompts(tokenizer, SHORT)
    encoder = StudentEncoder(prompts, settings, {tokenizer.eos_token_id})
    rows = encoder.encode(["q"], ["s"], Ragged.from_rows([ids(tokenizer, "7a", TAG)], torch.int64), ["f:1"])
    (opening,) = encoder.teacher_prompts(["q"], ["s"]).rows()
    thought = rows.part(THINK).rows()[0]
    assert tokenizer.decode([*opening.tolist(), *thought.tolist()]) == prompts.teacher("q", "s")[0] + "7a"
    assert tokenizer.decode(thought.tolist()) == ("7a" if merges else "\n\n7a")


def test_a_solution_that_merges_with_its_tags_is_skipped_when_tokenized_again():
    tokenizer = with_merges((b">", b"7"))
    rows = encode(("q", "7", ["a", TAG]), tokenizer=tokenizer, align="retokenize")
    assert rows.status.tolist() == [SKIPPED]
    assert encode(("q", "7", ["a", TAG]), tokenizer=tokenizer).status.tolist() == [OK]


@pytest.mark.parametrize(
    ("settings", "temperature", "needs"),
    [
        ({}, 0.7, False),
        ({"align": "retokenize"}, 0.7, True),
        ({"include_forced_prefix": True}, 0.7, True),
        ({"unbias_teacher_log_probs": False}, 0.7, True),
        ({"unbias_teacher_log_probs": False}, 1.0, False),
        ({"align": "retokenize", "include_teacher_think_entropy": False}, 0.7, False),
    ],
)
def test_the_teacher_needs_a_pass_where_its_log_probs_are_others(settings, temperature, needs):
    assert needs_teacher_pass(dataclasses.replace(RltReward(), **settings), temperature) == needs


def test_reused_log_probs_are_those_at_the_start_of_each_response():
    log_probs = Ragged.from_rows([[1.0, 2.0, 3.0], [], [4.0], [5.0, 6.0]], torch.float32)
    assert reused_log_probs(log_probs, torch.tensor([2, 0, 0, 2])).tolist() == [1.0, 2.0, 5.0, 6.0]


# Where the explanation ends, in token space.


END_TAG = "</explanation>"
MERGED = with_merges((b"!", b"<"), (b"\xa9", b"<"), (b">", b"\n"), (b"o", b"n"), (b"on", b">"))
MERGED_BYTES = TokenBytes(MERGED)
STOP = {MERGED.eos_token_id, MERGED.pad_token_id}


def locate(*rows):
    return locate_explanations(Ragged.from_rows([ids(MERGED, *row) for row in rows], torch.int64), MERGED_BYTES, END_TAG, STOP)


def one(*row):
    """Returns K as text, whether there is an end tag, and whether text follows it."""
    located = locate(row)
    kept = ids(MERGED, *row)[: int(located.lengths[0])]
    spelled = b"".join(token_text(MERGED, token) for token in kept)
    return spelled, bool(located.matched[0]), bool(located.has_text_after[0])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["why", END_TAG, "<|im_end|>"], (b"why", True, False)),
        (["why", END_TAG, "\n \n<|im_end|>"], (b"why", True, False)),
        (["why", END_TAG, " more ", END_TAG, "<|im_end|>"], (b"why", True, True)),
        (["why", "<|endoftext|>", "<|endoftext|>"], (b"why", False, False)),
        ([END_TAG, "<|im_end|>"], (b"", True, False)),
        ([], (b"", False, False)),
        (["<explanation><explanation>", END_TAG, END_TAG], (b"<explanation><explanation>", True, True)),
        (["why<|im_end|>", END_TAG], (b"why", False, False)),
        (["why<|im_start|>x", END_TAG], (b"why<|im_start|>x", True, False)),
    ],
    ids=str,
)
def test_the_first_end_tag_before_the_end_of_the_response_decides(row, expected):
    assert one(*row) == expected


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (["why", b"!<", "/explanation>"], b"why"),
        (["why", "</explanati", b"on>", "x"], b"why"),
        (["why", "</explanation", b">\n", "x"], b"why"),
    ],
    ids=str,
)
def test_a_token_that_reaches_into_the_tag_is_not_part_of_the_explanation(row, kept):
    assert one(*row)[:2] == (kept, True)


PIECES = st.one_of(
    st.text(max_size=3),
    st.sampled_from([END_TAG, "</explan", "ation>", "<|im_end|>", "<explanation>", b"!<", b"\xa9<", b"on>", b"\xc3"]),
)


@given(st.lists(st.lists(PIECES, max_size=6), max_size=4))
def test_the_naive_reference_agrees_token_by_token(rows):
    located = locate(*rows)
    for row, length, matched in zip(rows, located.lengths.tolist(), located.matched.tolist(), strict=True):
        tokens = ids(MERGED, *row)
        assert (tokens[:length], matched) == explanation_of(MERGED, tokens, END_TAG, STOP)


# One text tokenized again, cut at the borders of its parts.


CROSSING = with_merges((b"a", b"b"), (b"ab", b"a"), (b"b", b"b"), (b"\xa9", b"a"))
CROSSING_BYTES = TokenBytes(CROSSING)
NO_SPANS = ((), (), (), (), ())
TEXT = st.text("ab\u00e9", max_size=5)


def spelled(tokenizer, ids):
    return b"".join(token_text(tokenizer, token) for token in ids)


@given(st.tuples(TEXT, TEXT, TEXT, TEXT, TEXT))
def test_sections_hold_the_tokens_that_lie_wholly_in_them(texts):
    parts = retokenized_parts(CROSSING, CROSSING_BYTES, texts, NO_SPANS)
    ids = [token for part in parts for token in part]
    assert ids == CROSSING("".join(texts), add_special_tokens=False)["input_ids"]
    borders = [len("".join(texts[:place]).encode()) for place in range(6)]
    end, expected = 0, [[], []]
    for token in ids:
        start, end = end, end + len(token_text(CROSSING, token))
        for section, (first, last) in zip(expected, (borders[1:3], borders[3:5]), strict=True):
            if first <= start and end <= last:
                section.append(token)
    assert [parts[1], parts[3]] == expected


def test_special_tokens_are_text_where_the_spans_say_so():
    name = "<|im_end|>"
    parts = retokenized_parts(CROSSING, CROSSING_BYTES, (name, "a", name, name, name), ((), (), (), ((0, len(name)),), ()))
    end = CROSSING.eos_token_id
    assert [part.count(end) for part in parts] == [1, 0, 1, 0, 1]
    assert spelled(CROSSING, parts[3]) == name.encode()


def test_borders_follow_the_normal_form_of_the_tokenizer():
    tokenizer = with_merges()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    parts = retokenized_parts(tokenizer, TokenBytes(tokenizer), ("x", "e\u0301", "y", "e\u0301s", "z"), NO_SPANS)
    assert [spelled(tokenizer, part).decode() for part in parts] == ["x", "\u00e9", "y", "\u00e9s", "z"]


# The bytes of tokens against decoding and against the text itself.


BYTES = TokenBytes(TOKENIZER)


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, " the answer"])), max_size=6).map("".join))
def test_a_text_is_the_bytes_of_its_tokens(text):
    ids = torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    assert BYTES.spell(ids) == text.encode()


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=12))
def test_any_tokens_are_spelled_one_by_one_and_end_where_their_bytes_end(ids):
    texts = [token_text(TOKENIZER, token) for token in ids]
    assert BYTES.spell(np.array(ids, dtype=np.int64)) == b"".join(texts)
    assert BYTES.ends(np.array(ids, dtype=np.int64)).tolist() == [len(b"".join(texts[: n + 1])) for n in range(len(ids))]


def test_ids_that_the_tokenizer_lacks_have_no_bytes():
    a, missing = TOKENIZER.convert_tokens_to_ids("a"), len(TOKENIZER)
    ids = torch.tensor([a, missing, missing + 1000, -2, a])
    assert BYTES.spell(ids) == b"aa"
    assert BYTES.ends(ids).tolist() == [1, 1, 1, 1, 2]


def test_added_tokens_that_are_not_special_are_spelled_as_they_are():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["</think>", "\u00e9\u00e9"])
    ids = torch.tensor(tokenizer("x</think>\u00e9\u00e9", add_special_tokens=False)["input_ids"])
    assert len(ids) == 3
    assert TokenBytes(tokenizer).spell(ids) == "x</think>\u00e9\u00e9".encode()


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    word_level = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    sentencepiece = Tokenizer(models.BPE({"\u2581": 0, "a": 1}, []))
    sentencepiece.decoder = decoders.Metaspace()
    lossy = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    lossy.decoder = decoders.ByteLevel()
    for tokenizer in (word_level, sentencepiece, lossy):
        with pytest.raises(ConfigError, match=r"the tokenizer \(\w+\) is not byte-level"):
            TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
