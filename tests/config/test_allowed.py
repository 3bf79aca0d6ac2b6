import pytest

from verl_memopt.config.allowed import CHOICES, RANGES, WHY_NOT, check_values
from verl_memopt.config.keys import leaf_keys, replaced
from verl_memopt.config.schema import Settings

AR = "actor_rollout_ref"


def complaints(**values):
    """Gives the texts of what is wrong with settings that differ from the defaults in the given keys."""
    settings = replaced(Settings(), {key.replace("__", "."): value for key, value in values.items()})
    return [found.text for found in check_values(settings) if set(found.keys) <= {key.replace("__", ".") for key in values}]


def test_choices_and_ranges_are_of_keys_that_exist_and_never_of_the_same():
    assert not CHOICES.keys() & RANGES.keys()
    assert CHOICES.keys() | RANGES.keys() <= set(leaf_keys())


def test_a_reason_is_of_a_word_that_is_no_choice():
    assert all(word not in CHOICES[key] for key, word in WHY_NOT)


def test_a_word_of_another_project_is_refused_with_its_reason():
    (text,) = complaints(algorithm__adv_estimator="remax")
    assert text == "algorithm.adv_estimator=remax: only RLOO and GRPO are available. Set rloo or grpo."


def test_an_unknown_word_is_no_choice():
    (text,) = complaints(data__truncation="rigth")
    assert text == "data.truncation=rigth: rigth is no choice. Set error or left or right or middle."


def test_of_a_list_each_item_is_looked_at():
    assert complaints(trainer__logger=["console", "jsonl"]) == []
    (text,) = complaints(trainer__logger=["console", "mlflow"])
    assert "mlflow is no choice" in text


def test_null_is_left_to_the_keys_type():
    assert complaints(data__val_batch_size=None) == []


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("data__train_batch_size", [1], [0, -1]),
        ("data__train_max_samples", [-1, 1], [0, -2]),
        ("data__seed", [0], [-1]),
        ("trainer__save_freq", [-1, 5], [0, -2]),
        ("actor_rollout_ref__actor__clip_ratio_c", [1.1], [1.0, 0.5]),
        ("actor_rollout_ref__rollout__top_p", [0.1, 1.0], [0.0, 1.1]),
        ("actor_rollout_ref__actor__optim__betas", [(0.0, 0.999)], [(0.9, 1.0), (-0.1, 0.9)]),
    ],
)
def test_a_number_at_the_edge_of_its_range_is_told_from_one_beyond(key, good, bad):
    assert [complaints(**{key: value}) for value in good] == [[]] * len(good)
    assert [len(complaints(**{key: value})) for value in bad] == [1] * len(bad)
