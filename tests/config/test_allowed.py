import pytest

from verl_memopt.config.keys import leaf_types, leaf_values
from verl_memopt.config.schema import Settings
from verl_memopt.config.values import WHY_NOT, check_values, choices, ranges, with_links
from verl_memopt.memory.critic_rules import twin

AR = "actor_rollout_ref"


def complaints(**values):
    """Gives the texts of what is wrong with settings that differ from the defaults in the given keys."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    problems = check_values(with_links(leaf_values(Settings()) | given))
    return [problem.text for problem in problems if set(problem.keys) <= set(given)]


def test_choices_and_ranges_are_of_keys_that_exist_and_never_of_the_same():
    assert not choices().keys() & ranges().keys()
    assert choices().keys() | ranges().keys() <= set(leaf_types())


def test_a_reason_is_of_a_word_that_is_no_choice():
    assert all(word not in choices()[key] for key, word in WHY_NOT)


def test_each_item_of_a_list_is_looked_at_and_null_is_left_to_the_keys_type():
    assert complaints(trainer__logger=["console", "jsonl"]) == complaints(data__val_batch_size=None) == []
    (text,) = complaints(trainer__logger=["console", "comet"])
    assert "comet is no choice" in text


STEP = 1e-9
"""How far beyond a bound a number with a fraction is tried; a whole number is tried one beyond."""


EDGES = {
    "data.max_prompt_length": ([1], [0, -1]),
    f"{AR}.actor.clip_ratio": ([STEP], [0, -STEP]),
    "critic.cliprange_value": ([STEP], [0]),
    "data.seed": ([0, 1], [-1]),
    f"{AR}.actor.optim.lr": ([0, STEP], [-STEP]),
    f"{AR}.actor.fsdp_config.fsdp_size": ([1, -1], [0, -2]),
    f"{AR}.rollout.top_k": ([1, -1], [0, -2]),
    "algorithm.gamma": ([0, 1], [-STEP, 1 + STEP]),
    f"{AR}.rollout.top_p": ([STEP, 1], [0, 1 + STEP]),
    f"{AR}.actor.optim.lr_warmup_steps": ([-1, 0], [-2]),
    f"{AR}.actor.clip_ratio_c": ([1 + STEP], [1, 1 - STEP]),
    f"{AR}.actor.optim.betas": ([(0, 0), (1 - STEP, 1 - STEP)], [(-STEP, 0.9), (0.9, -STEP), (1, 0.9), (0.9, 1)]),
    f"{AR}.actor.optim.momentum": ([0, 1 - STEP], [-STEP, 1]),
    "custom_reward_function.open_files": ([64], [63]),
    "distill.beta": ([STEP, 1 - STEP], [0, 1]),
    "algorithm.reward_clip_range": ([[-1.0, 1.0]], [[1.0, 1.0], [2.0, 1.0]]),
    f"{AR}.rollout.stop": ([[], ["x"]], [["x", ""]]),
    "reward_model.rlt.not_matched_penalty": ([0, -STEP], [STEP]),
    f"{AR}.rollout.temperature": ([1e-4], [1e-5, 0, -1]),
    f"{AR}.rollout.val_kwargs.temperature": ([0, 1e-4], [1e-5, -1]),
    f"{AR}.actor.entropy_ctrl.target": ([STEP], [0, -STEP]),
    f"{AR}.rollout.kv_cache_memory_gb": ([STEP, "auto"], [0, -STEP]),
    f"{AR}.rollout.max_logprob_diff": ([STEP, "auto"], [0.0, -STEP]),
    f"{AR}.rollout.agent.environment.name": (["Game", {"a": "Game"}], [["Game"], 1]),
    f"{AR}.rollout.agent.tools.name": (["add", ["add", "subtract"]], [{"add": "add"}, [1], 1]),
    f"{AR}.rollout.sleep_level": ([1, 2], [0, 3]),
    f"{AR}.rollout.share_weights": ([False, "auto"], ["always", "true"]),
    f"{AR}.actor.use_prefix_grouper": ([False, True, "auto"], ["always", "true"]),
    f"{AR}.actor.fsdp_config.param_offload": ([True, False], ["streamed", "true"]),
    f"{AR}.ref.fsdp_config.param_offload": ([True, False, "stream"], ["streamed", "true"]),
}
"""Keys of every kind of range -> values at the bounds, and values just beyond them."""


def test_every_kind_of_range_has_its_edges_here():
    assert {ranges()[key] for key in EDGES} == set(ranges().values())


def test_a_key_of_the_critic_has_the_range_of_its_twin():
    keys = [key for key in ranges() if twin(key) != key and twin(key) in leaf_types()]
    assert [key for key in keys if ranges()[twin(key)] is not ranges()[key]] == []


@pytest.mark.parametrize("key", EDGES)
def test_a_number_at_the_edge_of_its_range_is_told_from_one_beyond(key):
    inside, beyond = EDGES[key]
    name = key.replace(".", "__")
    assert [len(complaints(**{name: value})) for value in inside] == [0] * len(inside)
    for value in beyond:
        (text,) = complaints(**{name: value})
        assert text.startswith(f"{key}=")
        assert ranges()[key].text in text


@pytest.mark.parametrize("key", ["data.seed", f"{AR}.actor.fsdp_config.seed", "data.train_batch_size"])
def test_a_whole_number_that_needs_more_than_63_bits_is_refused(key):
    name = key.replace(".", "__")
    assert complaints(**{name: 2**63 - 1}) == []
    assert complaints(**{name: 2**63})[0].startswith(f"{key}=9223372036854775808: must be at most 9223372036854775807.")
