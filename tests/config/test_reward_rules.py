import pytest

from verl_memopt.config.keys import value_at
from verl_memopt.config.reward_limits import CASES
from verl_memopt.config.reward_limits import SANDBOX as KEY
from verl_memopt.config.reward_rules import longest_row_seconds, rows_at_a_time

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


def test_the_penalty_belongs_to_dapo(complaint):
    message = complaint({f"{PENALTY}.enable": True, f"{PENALTY}.len": 64})
    assert message.startswith(f"{PENALTY}.enable=true, {MANAGER}=naive: the penalty for long responses belongs to the manager")


@pytest.mark.parametrize("length", [0, 257])
def test_the_buffer_lies_inside_a_response(complaint, length):
    message = complaint({MANAGER: "dapo", f"{PENALTY}.enable": True, f"{PENALTY}.len": length, LONGEST: 256})
    assert message.startswith(f"{PENALTY}.len={length}, {LONGEST}=256: ")
    assert message.endswith(f"Set {PENALTY}.len between 1 and 256.")


def test_a_buffer_that_does_not_act_may_have_any_length(settled):
    assert value_at(settled({f"{PENALTY}.len": 4096, LONGEST: 256}), f"{PENALTY}.len") == 4096


@pytest.mark.parametrize(("manager", "mode"), [("naive", "raise"), ("batch", "raise"), ("dapo", "raise"), ("prime", "score")])
def test_a_row_that_fails_under_prime_takes_the_fallback_score(settled, manager, mode):
    assert settled({MANAGER: manager}).custom_reward_function.on_error == mode
    assert settled({MANAGER: manager, "custom_reward_function.on_error": "raise"}).custom_reward_function.on_error == "raise"


AR, MODEL, FSDP = "actor_rollout_ref", "reward_model.model", "reward_model.model.fsdp_config"
POOL, PER_NODE = "reward_model.enable_resource_pool", "reward_model.n_gpus_per_node"
ENABLED = {
    "reward_model.enable": True,
    f"{MODEL}.path": "judge",
    "reward_model.use_dynamic_bsz": True,
    "reward_model.forward_max_token_len_per_gpu": 4096,
}


def test_the_reward_model_of_verls_scripts_is_read_with_notices_of_what_happens_instead(settled, caplog):
    colocated = {
        "reward_model.use_reward_loop": True,
        "reward_model.rollout.name": "vllm",
        "reward_model.rollout.gpu_memory_utilization": 0.8,
        "reward_model.rollout.tensor_model_parallel_size": 1,
        f"{MODEL}.use_remove_padding": True,
        "reward_model.strategy": "fsdp",
        "reward_model.launch_reward_fn_async": False,
    }
    assert settled(ENABLED | colocated) == settled(ENABLED)
    assert sum("does nothing here" in text for text in caplog.messages) == len(colocated)


def test_the_spellings_of_august_set_the_same_reward_model(settled):
    august = {
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": "judge",
        "reward.reward_model.use_dynamic_bsz": True,
        "reward.reward_model.forward_max_token_len_per_gpu": 4096,
        "reward.reward_model.rollout.prompt_length": 512,
    }
    assert settled(august) == settled(ENABLED)


@pytest.mark.parametrize("tokenizer", ["policy", None, "org/policy"])
def test_the_tokenizer_of_the_responses_is_the_policys(settled, tokenizer):
    given = {f"{MODEL}.input_tokenizer": tokenizer, f"{AR}.model.path": "org/policy"}
    assert settled(ENABLED | given).reward_model.model.input_tokenizer == tokenizer


@pytest.mark.parametrize(
    ("given", "address", "way_out"),
    [
        ({f"{MODEL}.path": None}, f"reward_model.enable=true, {MODEL}.path=null: no reward model is named", f"Set {MODEL}.path"),
        ({f"{MODEL}.input_tokenizer": "other"}, f"{MODEL}.input_tokenizer=other: ", "Set policy, or null"),
        (
            {"reward_model.use_dynamic_bsz": False, "reward_model.micro_batch_size_per_gpu": None},
            "reward_model.micro_batch_size_per_gpu=null, reward_model.use_dynamic_bsz=false: a micro-batch of the reward model",
            "or reward_model.use_dynamic_bsz=true.",
        ),
        (
            {f"{MODEL}.input_tokenizer": None, "reward_model.forward_max_token_len_per_gpu": 1023},
            "reward_model.forward_max_token_len_per_gpu=1023: a sample may have more tokens",
            "Raise it to at least 1024",
        ),
        ({f"{FSDP}.dtype": "fp16"}, f"{FSDP}.dtype=fp16: half precision", "Set fp32 or"),
        ({f"{FSDP}.ulysses_sequence_parallel_size": 2}, f"{FSDP}.ulysses", "_size=1, or"),
        (
            {"trainer.n_gpus_per_node": 2, f"{AR}.model.block_tile_tokens": 64, f"{FSDP}.ulysses_sequence_parallel_size": 2},
            f"{FSDP}.ulysses_sequence_parallel_size=2, {AR}.model.block_tile_tokens=64: ",
            f"{FSDP}.ulysses_sequence_parallel_size=1",
        ),
        (
            {POOL: True, PER_NODE: 0},
            "reward_model.enable_resource_pool=true, reward_model.n_gpus_per_node=0: a pool needs devices",
            "Set reward_model.n_gpus_per_node to 1 or more, or reward_model.enable_resource_pool=false.",
        ),
        (
            {POOL: True, "trainer.worker_group": "local"},
            "reward_model.enable_resource_pool=true, trainer.worker_group=local: the local worker group has one device",
            "Set trainer.worker_group=ray, or reward_model.enable_resource_pool=false.",
        ),
        (
            {POOL: True, PER_NODE: 4, f"{FSDP}.fsdp_size": 3},
            f"{FSDP}.fsdp_size=3, reward_model.nnodes=1, reward_model.n_gpus_per_node=4: does not divide",
            "Set a divisor of 4, or -1.",
        ),
        (
            {POOL: True, PER_NODE: 2, f"{FSDP}.param_offload": "stream"},
            f"{FSDP}.param_offload=stream, reward_model.nnodes=1, reward_model.n_gpus_per_node=2: on several devices",
            f"Or set {FSDP}.param_offload=true.",
        ),
    ],
)
def test_what_a_reward_model_cannot_have_is_refused(complaint, given, address, way_out):
    message = complaint(ENABLED | given)
    assert message.startswith(address)
    assert way_out in message


def test_a_limit_of_length_bounds_what_a_micro_batch_must_hold(settled):
    sizes = {"reward_model.forward_max_token_len_per_gpu": 600, "reward_model.max_length": 600}
    settings = settled(ENABLED | sizes | {f"{MODEL}.input_tokenizer": None})
    assert {key: value_at(settings, key) for key in sizes} == sizes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{MODEL}.path", "judge"),
        (f"{FSDP}.param_offload", True),
        ("reward_model.max_length", 600),
        ("reward_model.micro_batch_size_per_gpu", 3),
        ("reward_model.forward_max_token_len_per_gpu", 300),
    ],
)
def test_keys_of_a_reward_model_that_is_not_there_are_warned_of(settled, caplog, key, value):
    settled({key: value})
    assert [text for text in caplog.messages if text.startswith(f"{key}=")] == [caplog.messages[0]]
    assert "reward_model.enable is false" in caplog.messages[0]


URL = {f"{KEY}.url": "http://localhost:8080/run_code"}
LIMIT = "custom_reward_function.timeout_seconds"


def test_the_service_is_set_under_every_spelling_of_verl(settled):
    january = URL | {f"{KEY}.max_concurrent": 128, f"{KEY}.memory_limit_mb": 512}
    settings = settled(january)
    for section in ("reward.sandbox_fusion", "sandbox_fusion"):
        assert settled({key.replace(KEY, section): value for key, value in january.items()}) == settings
    sandbox = settings.reward_model.sandbox_fusion
    assert (sandbox.url, sandbox.max_concurrent, sandbox.memory_limit_mb) == (*URL.values(), 128, 512)


@pytest.mark.parametrize("address", ["", "localhost:8080", "ftp://h/x", "http:///run_code", "http://h:port/", "http://[x"])
def test_what_is_no_http_address_is_refused(complaint, settled, address):
    for right in ("https://h.example/run_code", "http://[::1]:80/"):
        assert value_at(settled({f"{KEY}.url": right}), f"{KEY}.url") == right
    message = complaint({f"{KEY}.url": address})
    assert message.startswith(f"{KEY}.url=")
    assert message.endswith("it is no http or https address. Set it to that of the service's run_code, "
                            "such as http://localhost:8080/run_code.")  # fmt: skip


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({LIMIT: 44.0}, f"Set {LIMIT} to at least 45."),
        ({f"{KEY}.max_concurrent": 1}, f"Set {LIMIT} to at least 150, or {KEY}.max_concurrent to at least 3."),
        ({f"{KEY}.max_concurrent": 2, LIMIT: 50.0}, f"Set {LIMIT} to at least 75, or {KEY}.max_concurrent to at least 4."),
    ],
)
def test_a_row_of_endless_programs_fits_into_its_time_limit(settled, complaint, given, way_out):
    message = complaint(URL | given)
    assert message.startswith(f"{LIMIT}=")
    assert message.endswith(way_out)
    for elsewhere in ({}, URL | {"custom_reward_function.path": "mine.py"}):
        settled(elsewhere | given)


def test_the_longest_row_waits_for_every_round_of_the_cases_that_are_under_way():
    for most in (*range(1, 40), 64, 100, 128, 1000):
        rounds = -(-CASES * rows_at_a_time(most) // most)
        assert longest_row_seconds(most) >= 15 * rounds, most


def test_the_address_has_no_effect_where_no_rule_decides(settled, caplog):
    settled(URL)
    assert not caplog.messages
    settled(URL | {"custom_reward_function.path": "mine.py"})
    assert any(text.startswith(f"{KEY}.url=") and "no default rule is used" in text for text in caplog.messages)
