"""Order of the prompts, across epochs and across a resume."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.schema import CustomSampler
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder, special_tokens_of
from verl_memopt.data.prompts import EXPANSIONS, PromptPrefetcher, StepLoader, check_prompts, expand, load_sampler
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import SPECIALS, build_tokenizer


def rows(count):
    return [PromptRow(i, str(i), "s", None, {}, f"a:{i + 1}") for i in range(count)]


def step_of(loader):
    """Gives the rows of the next step."""
    return [loader.dataset[index] for index in loader.next_indices()]


def take(loader, steps):
    return [[row.index for row in step_of(loader)] for _ in range(steps)]


@given(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 2**31), st.integers(0, 12), st.integers(0, 12))
def test_a_resumed_loader_goes_on_exactly_as_the_uninterrupted_one(num_rows, batch_size, shuffle, seed, before, after):
    batch_size = min(batch_size, num_rows)
    whole = take(StepLoader(rows(num_rows), batch_size, shuffle, seed), before + after)
    first = StepLoader(rows(num_rows), batch_size, shuffle, seed)
    take(first, before)
    resumed = StepLoader(rows(num_rows), batch_size, shuffle, seed=seed + 1)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, after) == whole[before:]


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 100))
def test_an_epoch_shows_no_row_twice_and_drops_only_what_fills_no_batch(num_rows, batch_size, shuffle, seed):
    batch_size = min(batch_size, num_rows)
    loader = StepLoader(rows(num_rows), batch_size, shuffle, seed)
    assert loader.steps_per_epoch == num_rows // batch_size
    for epoch in range(2):
        shown = [index for step in take(loader, loader.steps_per_epoch) for index in step]
        assert loader.epoch == epoch
        assert len(set(shown)) == len(shown) == num_rows - num_rows % batch_size


def test_the_seed_decides_the_order_and_every_epoch_has_its_own():
    first, same, other = (StepLoader(rows(50), 50, True, seed) for seed in (1, 1, 2))
    epochs = take(first, 3)
    assert take(same, 3) == epochs
    assert take(other, 3) != epochs
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffle_the_rows_come_as_they_stand_and_a_state_is_plain_integers():
    loader = StepLoader(rows(5), 2, False, 7)
    assert take(loader, 3) == [[0, 1], [2, 3], [0, 1]]
    assert loader.state_dict() == {"seed": 7, "epoch": 1, "position": 2, "num_rows": 5}


def test_a_batch_larger_than_the_dataset_and_a_state_of_another_are_refused_with_both_numbers():
    for key in ("data.train_batch_size", "data.gen_batch_size"):
        with pytest.raises(DataError, match=f"{key}=9: an epoch has only 8 rows"):
            StepLoader(rows(8), 9, True, 0, key=key)
    state = StepLoader(rows(8), 2, True, 0).state_dict()
    with pytest.raises(DataError, match="written with 8 rows, but there are 9 now"):
        StepLoader(rows(9), 2, True, 0).load_state_dict(state)


def test_a_sampler_of_the_users_own_gets_rows_seed_and_epoch(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, num_rows, seed, epoch):\n        self.order = [(i + seed + epoch) % num_rows for i in range(4)]\n"
        "    def __iter__(self):\n        return iter(self.order)\n"
    )
    sampler = load_sampler(CustomSampler(class_path=str(tmp_path / "mine.py"), class_name="Mine"))
    loader = StepLoader(rows(8), 2, True, 1, sampler)
    assert loader.steps_per_epoch == 2
    assert take(loader, 4) == [[1, 2], [3, 4], [2, 3], [4, 5]]
    assert load_sampler(CustomSampler()) is None
    (tmp_path / "verls.py").write_text("class Theirs:\n    def __init__(self, data_source, data_config): pass\n")
    with pytest.raises(DataError, match=r"Theirs: .*verl's arguments \(data_source, data_config\).*\(num_rows, seed, epoch\)"):
        load_sampler(CustomSampler(class_path=str(tmp_path / "verls.py"), class_name="Theirs"))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("def __init__(self): pass", r"__init__\(8, 0, 0\) of .*mine\.py raised TypeError: .*"),
        ("def __init__(self, *numbers): raise KeyError('seed')", r"__init__\(8, 0, 0\) .*KeyError: 'seed' in .*mine\.py:2"),
        ("def __init__(self, *numbers): pass", r"__iter__ of .*mine\.py raised TypeError: 'Mine' object is not iterable in .*"),
    ],
)
def test_a_fault_of_a_sampler_is_one_line_with_class_method_and_file(tmp_path, body, what):
    (tmp_path / "mine.py").write_text(f"class Mine:\n    {body}\n")
    sampler = load_sampler(CustomSampler(class_path=str(tmp_path / "mine.py"), class_name="Mine"))
    with pytest.raises(DataError, match=rf"^data\.sampler\.class_name=Mine: {what}\. Correct it\.$"):
        StepLoader(rows(8), 2, True, 0, sampler)


@pytest.mark.parametrize("indices", [[0, 8], [-1, 0], [0.0, 1.0], ["0", "1"]])
def test_a_sampler_that_gives_what_is_no_row_is_refused(indices):
    def sampler(num_rows, seed, epoch):
        return indices

    with pytest.raises(DataError, match=r"data\.sampler: epoch 0 has an index outside of 0\.\.7"):
        StepLoader(rows(8), 2, True, 0, sampler)


def endless(num_rows, seed, epoch):
    return (place * 3 % num_rows for place in itertools.count())


@pytest.mark.parametrize("ahead", [5, 50])
def test_an_endless_epoch_is_read_as_steps_need_it_and_goes_on_after_a_resume(monkeypatch, ahead):
    monkeypatch.setattr("verl_memopt.data.prompts.LOOKAHEAD", ahead)
    first = StepLoader(rows(8), 2, True, 0, endless)
    assert first.steps_per_epoch is None
    whole = take(first, 30)
    assert whole == [[place * 3 % 8, (place + 1) * 3 % 8] for place in range(0, 60, 2)]
    stopped, resumed = (StepLoader(rows(8), 2, True, 0, endless) for _ in range(2))
    take(stopped, 10)
    resumed.load_state_dict(stopped.state_dict())
    assert take(resumed, 20) == whole[10:]


def test_a_wrong_index_far_into_an_endless_epoch_is_refused_when_it_comes(monkeypatch):
    monkeypatch.setattr("verl_memopt.data.prompts.LOOKAHEAD", 8)
    loader = StepLoader(rows(8), 2, True, 0, lambda *numbers: itertools.chain([0] * 12, itertools.repeat(8)))
    take(loader, 6)
    with pytest.raises(DataError, match=r"data\.sampler: epoch 0 has an index outside of 0\.\.7: 8"):
        take(loader, 1)


def loader():
    rows = [
        PromptRow(index, f"{index}+{index}=" * (1 + index % 3), "toy/arithmetic", "", {}, f"f:{index}") for index in range(10)
    ]
    return StepLoader(rows, 3, shuffle=True, seed=5)


def encoder(limit=100, truncation="error"):
    return PromptEncoder(build_tokenizer(), limit, truncation)


def take_steps(prefetcher, steps):
    return [prefetcher.next().prompts for _ in range(steps)]


@pytest.fixture
def prefetcher():
    made = PromptPrefetcher(loader(), 2, "string", encoder())
    yield made
    made.close()


def test_the_prefetcher_gives_the_loaders_steps_in_order_with_the_ids_of_their_prompts(prefetcher):
    plain = loader()
    for _ in range(5):
        step = prefetcher.next()
        assert step.prompts == step_of(plain)
        assert step.prompt_ids == expand(step.prompts, range(3), 2, "token", encoder()).prompt_ids


@pytest.mark.parametrize("method", EXPANSIONS)
def test_every_expansion_gives_the_same_steps(prefetcher, method):
    other = PromptPrefetcher(loader(), 2, method, encoder())
    assert [other.next() for _ in range(5)] == [prefetcher.next() for _ in range(5)]
    assert other.state_dict() == prefetcher.state_dict()
    other.close()


def test_state_and_epoch_are_those_of_the_last_step_taken_not_of_the_one_ahead(prefetcher):
    assert prefetcher.state_dict() == loader().state_dict()
    take_steps(prefetcher, 3)
    assert prefetcher.epoch == 0
    resumed = loader()
    resumed.load_state_dict(prefetcher.state_dict())
    assert step_of(resumed) == prefetcher.next().prompts
    assert prefetcher.epoch == 1


def test_truncation_is_counted_for_the_step_that_suffered_it():
    prefetcher = PromptPrefetcher(loader(), 2, "string", encoder(6, "left"))
    for step in (prefetcher.next(), prefetcher.next()):
        lengths = [len(ids) for ids in expand(step.prompts, range(3), 1, "token", encoder()).prompt_ids]
        assert step.tokens_dropped == sum(max(0, length - 6) for length in lengths) > 0
        assert step.rows_truncated == sum(length > 6 for length in lengths)
    prefetcher.close()


def test_an_error_in_the_thread_is_the_callers():
    prefetcher = PromptPrefetcher(loader(), 2, "string", encoder(3))
    with pytest.raises(DataError, match=r"f:\d+: the prompt has"):
        prefetcher.next()
    prefetcher.close()


def test_further_prompts_of_a_step_are_given_back_with_it(prefetcher):
    take_steps(prefetcher, 1)
    before = prefetcher.state_dict()
    first, *others = prefetcher.next().prompts, prefetcher.more().prompts, prefetcher.more().prompts
    resumed = loader()
    resumed.load_state_dict(prefetcher.state_dict())
    fourth = step_of(resumed)
    prefetcher.give_back()
    assert prefetcher.state_dict() == before
    resumed.load_state_dict(prefetcher.state_dict())
    assert [step_of(resumed) for _ in range(4)] == [first, *others, fourth]


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
    return expanded.prompt_ids


@given(TEXTS, st.integers(1, 4), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]))
def test_every_method_gives_the_same_ids_and_the_same_counts(texts, n, limit, truncation):
    seen = []
    for method in EXPANSIONS:
        encoder = PromptEncoder(TOKENIZER, limit, truncation)
        rows = expand_all(prompts(texts), n, method, encoder)
        seen.append((rows, encoder.rows_truncated, encoder.tokens_dropped))
    assert all(entry == seen[0] for entry in seen)
    assert len(seen[0][0]) == len(texts) * n


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


@pytest.mark.parametrize(("method", "texts_tokenized"), [("string", 6), ("repeat_sampler", 6), ("token", 2), ("lazy", 2)])
def test_a_method_tokenizes_each_copy_or_each_prompt_in_one_call(method, texts_tokenized):
    calls = []

    def counting(texts, **settings):
        calls.append(len(texts))
        return TOKENIZER(texts, **settings)

    expand(prompts(["12", "3"]), [0, 1], 3, method, PromptEncoder(counting, 10, "error"))
    assert calls == [texts_tokenized]


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
    assert expanded.prompts == [dataset.rows[2], dataset.rows[0]]
    assert expanded.prompt_ids == [ids_of("45")] * 3 + [ids_of("12")] * 3


def test_a_data_set_that_gives_a_group_two_prompts_is_refused():
    dataset = ReadRows(prompts(["12"]), changes=True)
    with pytest.raises(DataError, match=r"^a:1: the dataset returned another prompt .* set algorithm\.expansion=token\.$"):
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
