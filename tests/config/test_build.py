import pytest

from verl_memopt.config.keys import leaf_types, value_at
from verl_memopt.config.schema import REQUIRED, Settings
from verl_memopt.config.values import DERIVED, LINKS, MismatchError, build, convert


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 1e-6, 1e-6),
        (float, "1e-6", 1e-6),
        (bool, False, False),
        (str, "text", "text"),
        (int | None, None, None),
        (float | None, "2", 2.0),
        (list[str], ["a", "b"], ["a", "b"]),
        (list[str], ("a",), ["a"]),
        (list[int] | None, [1, 2], [1, 2]),
        (tuple[float, float], [0.9, 1], (0.9, 1.0)),
    ],
)
def test_a_value_of_the_type_is_taken(kind, value, expected):
    taken = convert(value, kind)
    assert taken == expected
    assert type(taken) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((int, value) for value in (True, 1.0, "1", None, [1])),
        *((float, value) for value in (True, "many", None, float("nan"), float("inf"), "nan", [1.0])),
        *((bool, value) for value in (0, 1, "true", "off", None)),
        *((str, value) for value in (1, True, None, ["a"])),
        *((int | None, value) for value in ("null", False, 2.5)),
        *((list[str], value) for value in ("a", [1], None, {"a": 1})),
        *((tuple[float, float], value) for value in ([0.9], [1, 2, 3], "0.9", [0.9, "x"])),
        *((dict[str, int], value) for value in ([1], "a", None, {1: 2})),
    ],
)
def test_a_value_of_another_type_is_refused(kind, value):
    with pytest.raises(MismatchError):
        convert(value, kind)


def test_every_typed_key_refuses_a_mapping_and_names_itself():
    typed = [key for key, kind in leaf_types().items() if kind in (int, float, bool, str)]
    _, _, problems = build({key: {"a": 1} for key in typed})
    told = {found.keys: found.text for found in problems}
    assert [key for key in typed if not told[key,].startswith(f"{key}={{'a': 1}}: expected ")] == []


def test_a_wrong_type_is_told_with_key_value_and_both_types_and_a_number_for_a_text_is_told_to_be_quoted(complaint):
    told = complaint({"data.train_batch_size": "many"})
    assert told.startswith("data.train_batch_size=many: expected a whole number, got text. ")
    assert "Quote it: trainer.experiment_name='\"2024\"'" in complaint({"trainer.experiment_name": 2024})


def test_keys_not_given_keep_their_defaults_unless_they_follow_another():
    settings, _, _ = build({"data.seed": 3})
    for key in set(leaf_types()) - {"data.seed", *LINKS, *DERIVED}:
        assert value_at(settings, key) == value_at(Settings(), key)


def test_exactly_the_keys_marked_required_are_missing_from_an_empty_config():
    _, _, problems = build({})
    required = [key for key in leaf_types() if value_at(Settings(), key) == REQUIRED]
    assert [found.keys for found in problems] == [(key,) for key in required]
    assert required == ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.total_trainng_steps", "trainer.total_training_steps"),
        ("actor_rollout_ref.actor.optim.total_trainin_steps", "actor_rollout_ref.actor.optim.total_training_steps"),
        ("data.trian_files", "data.train_files"),
        ("actor_rollout_ref.actor.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("gpu_memory_utilisation", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("actor_rollout_ref.rollout.rloo_k", "actor_rollout_ref.rollout.n"),
        ("algorithm.rloo_k", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.num_ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_meant(complaint, key, meant):
    assert complaint({key: 1}) == f"{key}: no such key. Did you mean {meant}?"


def test_an_unknown_key_like_no_other_is_sent_to_the_page_and_a_value_for_a_section_to_a_key_of_it(complaint):
    assert complaint({"zzz.qqqqq": 1}) == "zzz.qqqqq: no such key. docs/configuration.md lists every key."
    assert "actor_rollout_ref.rollout.name=..." in complaint({"actor_rollout_ref.rollout": 3})


def test_all_problems_of_all_kinds_are_told_together_one_line_each(complaint):
    message = complaint(
        {
            "rloo_k": 4,
            "data.shuffle": "yes",
            "actor_rollout_ref.actor.grad_clip": 1.0,
            "actor_rollout_ref.actor.optim.clip_grad": 2.0,
            "critic.enable": False,
            "algorithm.adv_estimator": "gae",
            "data.train_batch_size": 100,
        }
    )
    lines = message.splitlines()
    assert lines[0] == "5 problems in the settings:"
    for part in ("rloo_k", "data.shuffle=yes", "grad_clip=1.0", "critic.enable=false", "data.train_batch_size=100"):
        assert sum(part in line for line in lines[1:]) == 1


def test_a_key_of_a_wrong_type_takes_part_in_no_other_complaint(complaint):
    message = complaint({"data.max_prompt_length": "long", "data.max_response_length": 100_000})
    assert message.startswith("data.max_prompt_length=long: expected")
    assert "\n" not in message
