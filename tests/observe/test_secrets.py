import cloudpickle
import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.loader import to_yaml
from verl_memopt.config.schema import Settings
from verl_memopt.observe.secrets import (
    HIDDEN,
    argument_without_secrets,
    hide_shapes,
    secrets_in,
    without_secrets,
    without_secrets_of,
)
from verl_memopt.run.resume import kept_settings

KWARGS = "custom_reward_function.reward_kwargs"
NAMES = [
    *("api_keys", "tokens", "key", "auth", "pwd", "passphrase", "cookie", "bearer", "private_key", "password", "OPENAI_API_KEY"),
    *(
        "apiKey",
        "X-Auth-Token",
        "hf_token",
        "client_secret",
        "db.password",
        "credentials",
        "Authorization",
        "aws_secret_access_key",
    ),
]
SHAPES = {
    "https://me:{}@example.com/v1": "pa55word",
    "https://{}@github.com/x": "abcdefgh12345678",
    "postgres://db:{}@host:5432/x": "a4b7",
    "https://host/v1?api_key={}&n=1": "abcd1234",
    "{}": "hf_AbCdEfGhIjKlMnOpQr",
    "the key is {}.": "sk-proj-abc123def456ghi789",
    "x={}": "ghp_abcdefghij0123456789abcdef",
    "id {}": "AKIAIOSFODNN7EXAMPLE",
    "Authorization: Bearer {}": "abcdef.123456-xyz",
    "[{}]": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl",
    "slack {}": "xoxb-123456789012-abc",
}
NO_SECRETS = (
    *(
        "/runs/sk-learn-1234567890-long-name",
        "hub:openai/gsm8k:main@train",
        "https://example.com/a?n=1",
        "token",
        "a:b@c",
        "s3://b/k",
    ),
    *("hf_home", "user@host:/data", "actor_rollout_ref.model.path=/models/eyJ.x", "ghp_", "Bearer of news"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("secret", ["s3cr", ["s3cr", "s3cr2"], {"a": ["s3cr"]}])
def test_the_name_of_an_entry_tells_a_secret_whatever_its_form(name, secret):
    hidden = without_secrets({"judge": [{name: secret}]})
    assert "s3cr" not in str(hidden)
    assert HIDDEN in str(hidden)
    assert "s3cr" not in str(without_secrets_of(f"{KWARGS}.{name}", secret))


def test_a_password_is_one_of_any_type_and_a_number_of_tokens_is_none():
    assert "1234" not in str(without_secrets({"password": 1234, "auth": {"pin": 1234}}))
    counts = {"tokens": 7, "max_tokens": 9, "bos_token": "<s>", "key": 3, "prompt_key": "question", "temperature": 0.5}
    assert without_secrets(counts) == counts


@pytest.mark.parametrize("text", SHAPES)
def test_the_shape_of_a_text_tells_a_secret_under_any_key(text):
    secret = SHAPES[text]
    assert secret not in hide_shapes(text.format(secret))
    assert HIDDEN in hide_shapes(text.format(secret))
    assert hide_shapes(text.format(secret)).endswith(text.partition("{}")[2])
    settings = replaced(Settings(), {"trainer.project_name": text.format(secret)})
    assert secret not in to_yaml(settings, secrets=False) + str(kept_settings(settings))
    assert secret in to_yaml(settings)
    assert secret not in argument_without_secrets(f"trainer.project_name={text.format(secret)}")


@pytest.mark.parametrize("text", NO_SECRETS)
def test_what_only_resembles_a_secret_stays(text):
    assert hide_shapes(text) == text


@pytest.mark.parametrize(
    "value", ["s3cr", "[s3cr,s3cr2]", "'s3cr,t'", "{a:s3cr}", "{x:{api_key:s3cr},n:1}", "{api_keys:[s3cr,b]}"]
)
def test_a_command_line_shows_no_secret(value):
    name = KWARGS if value.startswith("{x") or "api_keys" in value else f"{KWARGS}.password"
    assert "s3cr" not in argument_without_secrets(f"{name}={value}")


def keeps(answer, api_key="sk-1"):
    return 0.0


def captured(token, address):
    return lambda answer: float(answer == (token, address))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (captured("abc", "http://judge"), ["token"]),
        (captured(3, "http://me:pa55@judge"), ["address"]),
        (captured(3, "http://judge"), []),
        (keeps, ["api_key"]),
        (lambda answer: answer == "hf_AbCdEfGhIjKlMnOpQr", ["a text in it"]),
    ],
)
def test_a_function_that_brings_a_secret_is_named(function, names):
    assert secrets_in(function, cloudpickle.dumps(function)) == names
