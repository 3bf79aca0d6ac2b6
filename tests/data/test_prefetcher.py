import pytest

from verl_memopt.data.dataset import PromptRow
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.expansion import EXPANSIONS, expand
from verl_memopt.data.prompts import PromptPrefetcher, StepLoader
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import build_tokenizer


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
