import pytest
import torch
from hypothesis import given
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.attention_cases import HEADS, SIZES, norm_error, random_inputs, with_gradients
from verl_memopt.errors import ConfigError
from verl_memopt.models.attention import REGISTERED, choose_attention
from verl_memopt.models.trees import Trees

CPU = torch.device("cpu")


def attend(name, query, key, value, trees, window=None):
    function = ALL_ATTENTION_FUNCTIONS[REGISTERED[name]]
    return function(None, query, key, value, None, scaling=0.3, sliding_window=window, pack_trees=trees)[0]


@given(SIZES, HEADS)
def test_the_fused_kernel_and_written_out_attention_agree_in_output_and_gradients(sizes, heads):
    trees = Trees.of(sizes)
    inputs = random_inputs(trees, *heads)
    found, expected = (with_gradients(lambda *x, name=name: attend(name, *x, trees), inputs) for name in ("sdpa", "eager"))
    assert all(norm_error(one, other) < 1e-6 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("window", [None, 3, 50])
def test_kernels_agree_on_rows_with_and_without_a_window(window):
    trees = Trees.of(((5, ()), (1, ()), (7, ())))
    inputs = random_inputs(trees, 4, 2)
    torch.testing.assert_close(attend("sdpa", *inputs, trees, window), attend("eager", *inputs, trees, window), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash_attention_2"])
def test_a_shared_prompt_under_a_sliding_window_is_refused_with_the_way_out(name):
    trees = Trees.of(((3, (3, 2)),))  # each segment is within the window, a branch's tokens behind the prompt are not
    with pytest.raises(ConfigError, match=r"use_prefix_grouper=true.*sliding_window=3.*use_prefix_grouper=false"):
        attend(name, *random_inputs(trees, 2, 1), trees, window=3)


def test_values_may_have_heads_of_another_size():
    trees = Trees.of(((4, (3, 2)), (5, ())))
    query, key, value = random_inputs(trees, 4, 2)
    for narrow in ((query, key, value[..., :5]), (query[..., :5], key[..., :5], value)):
        torch.testing.assert_close(attend("sdpa", *narrow, trees), attend("eager", *narrow, trees), rtol=0, atol=2e-6)


def test_auto_is_sdpa_on_a_cpu_and_says_why():
    choice = choose_attention("auto", CPU, torch.float32)
    assert choice.name == "sdpa"
    assert "cpu" in choice.reason


def test_an_unknown_kernel_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"attn_implementation=flashy.*Use auto"):
        choose_attention("flashy", CPU, torch.float32)


def test_flash_attention_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"attn_implementation=flash_attention_2.*auto"):
        choose_attention("flash_attention_2", CPU, torch.float32)


def test_no_registered_name_makes_transformers_fetch_a_kernel():
    assert not any("flash" in name for name in REGISTERED.values())
