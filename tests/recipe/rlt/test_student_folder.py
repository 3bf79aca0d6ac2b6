"""What a student's folder must hold, and when a student fits into the module of the reference."""

import json
import shutil

import pytest

from tests.config.conftest import LEAST
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import ScoringModel
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, build_tokenizer, make_tiny_model
from verl_memopt.recipes.rlt.student import check_same_shape, find_student, student_model

AR = "actor_rollout_ref"


@pytest.fixture
def roles(tiny_folder):
    return settings_from_mapping(LEAST | {f"{AR}.model.path": str(tiny_folder)}).actor_rollout_ref


def find(path, roles, tokenizer=None):
    return find_student(ScoringModel(path=str(path)), roles.model, tokenizer or build_tokenizer(), 64, roles.actor)


def test_a_student_has_the_policys_knobs_and_nothing_that_trains(tiny_folder):
    more = {f"{AR}.model.lora_rank": 4, f"{AR}.model.tiled_mlp.enabled": True, f"{AR}.model.hf_config_path": "elsewhere"}
    policy = settings_from_mapping(LEAST | more).actor_rollout_ref.model
    model = student_model(ScoringModel(path="student", override_config={"rope_theta": 5.0}), policy)
    assert (model.path, model.lora_rank, model.hf_config_path) == ("student", 0, None)
    assert model.override_config == {"rope_theta": 5.0}
    assert model.tiled_mlp.enabled
    assert not model.enable_gradient_checkpointing


def test_a_folder_of_a_causal_lm_is_taken_and_a_missing_one_named_by_its_key(roles, tiny_folder, tmp_path):
    assert find(tiny_folder, roles) == tiny_folder
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*: no such folder"):
        find(tmp_path / "nothing", roles)


def test_an_embedding_smaller_than_the_tokenizer_is_refused(roles, tmp_path):
    small = make_tiny_model(tmp_path / "small", TinyShape(vocab_size=300))
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path=.*: .*(embedding|tokenizer)"):
        find(small, roles)


def test_a_student_whose_config_is_of_other_weights_is_named_by_its_key(roles, tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"^reward_model\.model\.path=.*: weights and config disagree"):
        find(changed(tiny_folder, tmp_path / "other", vocab_size=100), roles)


def changed(folder, target, **entries):
    """Returns a copy of a model folder with other entries in its config."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | entries))
    return target


def test_models_of_one_shape_take_turns_and_overrides_count(roles, tiny_folder, tmp_path):
    student = changed(tiny_folder, tmp_path / "student", max_position_embeddings=77, eos_token_id=5)
    check_same_shape(ScoringModel(path=str(student)), student, roles.model, tiny_folder)
    student = ScoringModel(path=str(tiny_folder), override_config={"rms_norm_eps": 0.5})
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        check_same_shape(student, tiny_folder, roles.model, tiny_folder)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"intermediate_size": 64}, r"intermediate_size \(64 and 128\)"),
        ({"rms_norm_eps": 1e-3}, r"rms_norm_eps \(0\.001 and"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings \(False and True\)"),
    ],
)
def test_models_that_differ_are_refused_with_what_differs(roles, tiny_folder, tmp_path, entries, text):
    student = changed(tiny_folder, tmp_path / "student", **entries)
    with pytest.raises(ConfigError, match=rf"reward_model\.residency=swap: .*{text}.*residency=separate"):
        check_same_shape(ScoringModel(path=str(student)), student, roles.model, tiny_folder)
