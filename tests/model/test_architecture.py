import re

import pytest
from transformers import Phi3Config, Qwen3Config

from tests.model.architectures import tiny_config
from verl_memopt.errors import ConfigError
from verl_memopt.model.families import (
    FAMILIES,
    NEAREST,
    check_lengths,
    layer_types,
    logit_shape,
    refused,
    unsupported,
    window,
    working_types,
)
from verl_memopt.model.text_part import text_config


@pytest.mark.parametrize("model_type", working_types())
def test_a_tested_type_is_supported(model_type):
    assert unsupported(text_config(tiny_config(model_type))) is None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "have layers of type linear_attention;"),
        ("bamba", "have layers of type linear_attention;"),
        ("falcon_h1", "have layers of type hybrid;"),
        ("mamba", "have layers of type linear_attention;"),
        ("recurrent_gemma", "have layers of type recurrent;"),
        ("llama4_text", "have layers of type chunked_attention"),
        ("qwen2_5_vl", "take more than text;"),
        ("granitemoe", r"are mixtures of experts"),
        ("mixtral", r"are mixtures of experts with other names.* computed here$"),
        ("deepseek_v3", r"are mixtures of experts with latent attention"),
        ("t5", "have an encoder;"),
    ],
)
def test_what_a_config_tells_is_refused_with_its_reason(model_type, reason):
    assert re.match(reason, str(unsupported(tiny_config(model_type))))


def test_an_error_names_the_folder_the_type_and_the_types_that_are_tested():
    message = str(refused(Qwen3Config(), "some/folder", "are too green"))
    assert message.startswith("actor_rollout_ref.model.path=some/folder: models of type qwen3 are too green. The nearest type")
    assert "Types that are tested: arcee, " in message


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [("recurrent_gemma", "gemma2"), ("qwen2_5_vl", "qwen3_vl"), ("mixtral", "qwen3_moe"), ("qwen3_next", "qwen3_5_moe_text")],
)
def test_an_error_names_the_nearest_type_that_works(model_type, nearest):
    config = tiny_config(model_type)
    assert f" works is {nearest}." in str(refused(config, "some/folder", str(unsupported(config))))


def test_a_type_that_is_named_as_the_nearest_works():
    assert {family.nearest for family in FAMILIES if family.nearest is not None} <= set(working_types())
    assert set(NEAREST.values()) <= set(working_types())


@pytest.mark.parametrize("field", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_logits_are_changed_only_in_a_type_of_which_it_is_known(field):
    config = tiny_config("llama")
    setattr(config, field, 30.0)
    assert f"change the logits after the head ({field})" in unsupported(config)
    assert logit_shape(config) == (1.0, None)


def test_one_type_divides_its_logits_by_the_field_that_multiplies_those_of_another():
    assert logit_shape(tiny_config("granite", logits_scaling=8.0)) == (1 / 8, None)
    assert logit_shape(tiny_config("hyperclovax", logits_scaling=8.0)) == (8.0, None)
    assert logit_shape(tiny_config("gemma2", final_logit_softcapping=30.0)) == (1.0, 30.0)


def test_layers_are_what_the_config_lists():
    assert layer_types(Qwen3Config(num_hidden_layers=2)) == ["full_attention"] * 2
    assert layer_types(tiny_config("gpt2")) == []


def test_a_window_counts_where_a_layer_slides():
    assert window(Qwen3Config(num_hidden_layers=2, sliding_window=8)) is None
    sliding = Qwen3Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert window(sliding) == 8


def longrope():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 10000.0}
    return Phi3Config(original_max_position_embeddings=64, max_position_embeddings=128, rope_parameters=rope)


def test_rows_up_to_the_trained_length_are_accepted_and_one_token_more_is_refused():
    check_lengths(longrope(), 64)
    with pytest.raises(ConfigError, match=r"length = 65: the rotary embedding of phi3 \(longrope\) changes beyond 64"):
        check_lengths(longrope(), 65)
    check_lengths(Qwen3Config(max_position_embeddings=64), 65)
