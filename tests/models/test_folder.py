import pytest

from verl_memopt.config.schema import Model
from verl_memopt.errors import ConfigError
from verl_memopt.models.folder import end_tokens, load_tokenizer, resolve_folder

KEY = "actor_rollout_ref.model.path"


def test_a_local_folder_is_itself(tiny_folder):
    assert resolve_folder(str(tiny_folder), KEY) == tiny_folder.resolve()


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=rf"{KEY}={tmp_path}: the folder has no config\.json"):
        resolve_folder(str(tmp_path), KEY)


def test_a_path_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_folder("/nowhere/at/all", KEY)


def test_a_hub_id_that_cannot_be_had_is_refused_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="the hub could not give it"):
        resolve_folder("nobody/nothing", KEY)


def test_the_end_of_a_response_is_the_tokenizers_and_the_generation_configs(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder)))
    assert tokenizer.eos_token_id in end_tokens(tiny_folder, tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="it has no tokenizer"):
        load_tokenizer(tmp_path, Model(path=str(tmp_path)))


def test_a_chat_template_of_the_users_replaces_the_folders(tiny_folder):
    template = "{{ messages[0].content }}!"
    tokenizer = load_tokenizer(tiny_folder, Model(path=str(tiny_folder), custom_chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
