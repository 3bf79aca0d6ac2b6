import pytest

PENALTY = "reward_model.reward_kwargs.overlong_buffer_cfg"
MANAGER = "reward_model.reward_manager"
LONGEST = "reward_model.reward_kwargs.max_resp_len"


def test_the_penalty_of_dapo_is_read_under_every_spelling_of_verl(settled):
    january = {MANAGER: "dapo", f"{PENALTY}.enable": True, f"{PENALTY}.len": 64, f"{PENALTY}.log": False, LONGEST: 256}
    august = {
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
        "reward.reward_kwargs.overlong_buffer_cfg.len": 64,
        "reward.reward_kwargs.overlong_buffer_cfg.log": False,
        "reward.reward_kwargs.max_resp_len": 256,
    }
    settings = settled(january)
    assert settled(august) == settings
    kwargs = settings.reward_model.reward_kwargs
    assert (kwargs.overlong_buffer_cfg.enable, kwargs.overlong_buffer_cfg.len, kwargs.max_resp_len) == (True, 64, 256)


def test_the_longest_response_is_that_of_the_data_unless_it_is_given(settled):
    given = {"data.max_response_length": 99}
    assert settled(given).reward_model.reward_kwargs.max_resp_len == 99


def test_the_penalty_belongs_to_dapo(complaint):
    message = complaint({f"{PENALTY}.enable": True, f"{PENALTY}.len": 64})
    assert message.startswith(f"{PENALTY}.enable=true, {MANAGER}=naive: the penalty for long responses belongs to the manager")


@pytest.mark.parametrize("length", [0, 257])
def test_the_buffer_lies_inside_a_response(complaint, length):
    message = complaint({MANAGER: "dapo", f"{PENALTY}.enable": True, f"{PENALTY}.len": length, LONGEST: 256})
    assert message.startswith(f"{PENALTY}.len={length}, {LONGEST}=256: ")
    assert message.endswith(f"Set {PENALTY}.len between 1 and 256.")


def test_a_buffer_that_does_not_act_may_have_any_length(settled):
    settled({f"{PENALTY}.len": 4096, LONGEST: 256})


@pytest.mark.parametrize(("manager", "mode"), [("naive", "raise"), ("batch", "raise"), ("dapo", "raise"), ("prime", "score")])
def test_a_row_that_fails_under_prime_takes_the_fallback_score(settled, manager, mode):
    assert settled({MANAGER: manager}).custom_reward_function.on_error == mode
    assert settled({MANAGER: manager, "custom_reward_function.on_error": "raise"}).custom_reward_function.on_error == "raise"
