import pytest

from verl_memopt.config.checks import RULES
from verl_memopt.config.keys import value_at
from verl_memopt.config.reward_limits import CASES
from verl_memopt.config.reward_limits import SANDBOX as KEY
from verl_memopt.config.reward_rules import SANDBOX_RULES, SANDBOX_UNUSED, longest_row_seconds, rows_at_a_time
from verl_memopt.config.unused_keys import UNUSED_KEYS

URL = {f"{KEY}.url": "http://localhost:8080/run_code"}
LIMIT = "custom_reward_function.timeout_seconds"


def test_every_rule_of_this_file_is_among_all_rules():
    assert set(SANDBOX_RULES) <= set(RULES)
    assert {unused.key: unused for unused in SANDBOX_UNUSED}.items() <= UNUSED_KEYS.items()


def test_the_service_is_set_under_every_spelling_of_verl(settled):
    january = URL | {f"{KEY}.max_concurrent": 128, f"{KEY}.memory_limit_mb": 512}
    settings = settled(january)
    for section in ("reward.sandbox_fusion", "sandbox_fusion"):
        assert settled({key.replace(KEY, section): value for key, value in january.items()}) == settings
    sandbox = settings.reward_model.sandbox_fusion
    assert (sandbox.url, sandbox.max_concurrent, sandbox.memory_limit_mb) == (*URL.values(), 128, 512)


@pytest.mark.parametrize(
    "address", ["http://h", "https://h.example/run_code", "http://127.0.0.1:8080/run_code", "http://[::1]:80/"]
)
def test_an_http_address_is_accepted(settled, address):
    assert value_at(settled({f"{KEY}.url": address}), f"{KEY}.url") == address


@pytest.mark.parametrize(
    "address", ["", "localhost:8080", "ftp://h/x", "http://", "http:///run_code", "http://h:port/", "http://[x"]
)
def test_what_is_no_http_address_is_refused(complaint, address):
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


@pytest.mark.parametrize("most", [*range(1, 40), 64, 100, 128, 1000])
def test_the_longest_row_waits_for_every_round_of_the_cases_that_are_under_way(most):
    rounds = -(-CASES * rows_at_a_time(most) // most)
    assert longest_row_seconds(most) >= 15 * rounds


def test_the_address_has_no_effect_where_no_rule_decides(settled, caplog):
    settled(URL)
    assert not caplog.messages
    settled(URL | {"custom_reward_function.path": "mine.py"})
    assert any(text.startswith(f"{KEY}.url=") and "no rule does" in text for text in caplog.messages)
