import shutil

import pytest
from transformers import AutoTokenizer

from tests.worker.test_reward_scores import classifier
from verl_memopt.config.schema import Actor, Model, ScoringModel
from verl_memopt.errors import ConfigError
from verl_memopt.model.packing_check import REWARD_KEY, find_reward_model, frozen_value_model
from verl_memopt.model.tiny import build_tokenizer

POLICY = Model(path="policy", lora_rank=4, lora_adapter_path="adapters", prune_last_block=False)


def found(folder, tokenizer, longest=64, **settings):
    return find_reward_model(ScoringModel(path=str(folder), **settings), POLICY, tokenizer, longest, Actor())


@pytest.fixture
def policys(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return classifier(tmp_path / "rm", tiny_folder)[0]


def test_a_folder_with_a_head_is_found_with_its_own_tokenizer(folder, policys):
    reward = found(folder, policys)
    assert reward.folder == folder
    assert reward.tokenizer.get_vocab() == policys.get_vocab()


def test_a_model_that_shares_the_ids_has_no_tokenizer_of_its_own(folder, policys):
    assert found(folder, policys, input_tokenizer=None).tokenizer is None
    for path in folder.glob("*token*"):
        path.unlink()
    assert found(folder, policys, input_tokenizer=None).tokenizer is None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder, tiny: shutil.copytree(tiny, folder, dirs_exist_ok=True),
            "is not of a reward model: it has no score.weight",
        ),
        (lambda folder, tiny: classifier(folder, tiny, labels=2), "its head score.weight has 2 outputs"),
        (lambda folder, tiny: (folder / "config.json").unlink(), "the folder has no config.json"),
        (lambda folder, tiny: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder, tiny: [path.unlink() for path in folder.glob("*token*")], "it has no tokenizer .*input_tokenizer=null"),
    ],
)
def test_a_wrong_folder_is_one_error_that_names_the_key(folder, tiny_folder, policys, spoil, message):
    spoil(folder, tiny_folder)
    with pytest.raises(ConfigError, match=rf"^reward_model\.model\.path={folder}: .*{message}"):
        found(folder, policys)


def test_ids_of_another_tokenizer_are_not_shared(folder, policys):
    with pytest.raises(ConfigError, match=rf"{REWARD_KEY}.input_tokenizer=null.* its tokenizer is not the policy's"):
        found(folder, build_tokenizer(280), input_tokenizer=None)
    policys.add_tokens([f"<{number}>" for number in range(200)])
    with pytest.raises(ConfigError, match=rf"^{REWARD_KEY}.path=.*its embedding has 320 rows"):
        found(folder, policys, input_tokenizer=None)


def test_the_policys_knobs_act_and_nothing_trains():
    settings = frozen_value_model(ScoringModel(path="rm", override_config={"a": 1}), POLICY)
    assert (settings.path, settings.override_config, settings.prune_last_block) == ("rm", {"a": 1}, False)
    assert (settings.lora_rank, settings.lora_adapter_path, settings.enable_gradient_checkpointing) == (0, None, False)
