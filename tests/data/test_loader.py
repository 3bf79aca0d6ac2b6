"""Order of the prompts, across epochs and across a resume."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_memopt.config.schema import CustomSampler
from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import EXPANSIONS, PromptPrefetcher, StepLoader, expand, load_sampler
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import build_tokenizer


def rows(count):
    return [PromptRow(i, str(i), "s", None, {}, f"a:{i + 1}") for i in range(count)]


def take(loader, steps):
    return [[row.index for row in loader.next_step()] for _ in range(steps)]


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


def test_without_shuffle_the_rows_come_as_they_stand():
    assert take(StepLoader(rows(5), 2, False, 0), 3) == [[0, 1], [2, 3], [0, 1]]


def test_a_batch_larger_than_the_dataset_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"data\.train_batch_size=9: an epoch has only 8 rows"):
        StepLoader(rows(8), 9, True, 0)
    with pytest.raises(DataError, match=r"data\.gen_batch_size=9: an epoch has only 8 rows"):
        StepLoader(rows(8), 9, True, 0, key="data.gen_batch_size")


def test_a_state_of_another_dataset_is_refused_with_both_numbers():
    state = StepLoader(rows(8), 2, True, 0).state_dict()
    with pytest.raises(DataError, match="written with 8 rows, but there are 9 now"):
        StepLoader(rows(9), 2, True, 0).load_state_dict(state)


def test_a_state_is_plain_integers():
    loader = StepLoader(rows(8), 3, True, 5)
    take(loader, 3)
    assert loader.state_dict() == {"seed": 5, "epoch": 1, "position": 3, "num_rows": 8}


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


def test_the_prefetcher_gives_the_loaders_steps_in_order(prefetcher):
    plain = loader()
    assert take_steps(prefetcher, 5) == [plain.next_step() for _ in range(5)]


def test_ids_belong_to_their_prompts(prefetcher):
    step = prefetcher.next()
    assert step.prompt_ids == expand(step.prompts, range(3), 2, "token", encoder()).ids


@pytest.mark.parametrize("method", EXPANSIONS)
def test_every_expansion_gives_the_same_steps(prefetcher, method):
    other = PromptPrefetcher(loader(), 2, method, encoder())
    assert [other.next() for _ in range(5)] == [prefetcher.next() for _ in range(5)]
    assert other.state_dict() == prefetcher.state_dict()
    other.close()


def test_the_state_is_that_of_the_last_step_taken_not_of_the_one_ahead(prefetcher):
    take_steps(prefetcher, 2)
    resumed = loader()
    resumed.load_state_dict(prefetcher.state_dict())
    assert resumed.next_step() == prefetcher.next().prompts


def test_before_the_first_step_the_state_is_the_loaders(prefetcher):
    assert prefetcher.state_dict() == loader().state_dict()


def test_the_epoch_is_that_of_the_step_taken(prefetcher):
    take_steps(prefetcher, 3)
    assert prefetcher.epoch == 0
    take_steps(prefetcher, 1)
    assert prefetcher.epoch == 1


def test_truncation_is_counted_for_the_step_that_suffered_it():
    prefetcher = PromptPrefetcher(loader(), 2, "string", encoder(6, "left"))
    for step in (prefetcher.next(), prefetcher.next()):
        lengths = [len(ids) for ids in expand(step.prompts, range(3), 1, "token", encoder()).ids]
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
    fourth = resumed.next_step()
    prefetcher.give_back()
    assert prefetcher.state_dict() == before
    resumed.load_state_dict(prefetcher.state_dict())
    assert [resumed.next_step() for _ in range(4)] == [first, *others, fourth]


def test_a_step_that_is_given_back_is_the_next_one_of_whoever_goes_on(prefetcher):
    take_steps(prefetcher, 2)
    before, epoch = prefetcher.state_dict(), prefetcher.epoch
    (given_up,) = take_steps(prefetcher, 1)
    prefetcher.give_back()
    assert (prefetcher.state_dict(), prefetcher.epoch) == (before, epoch)
    resumed = loader()
    resumed.load_state_dict(prefetcher.state_dict())
    assert resumed.next_step() == given_up
