import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_memopt.errors import ConfigError
from verl_memopt.models.attention import REGISTERED, band_mask, choose_attention

CPU = torch.device("cpu")


def packed(name, lengths, window=None, heads=4, kv_heads=2, size=8):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, heads, total, size, generator=generator)
    key, value = (torch.randn(1, kv_heads, total, size, generator=generator) for _ in range(2))
    attend = ALL_ATTENTION_FUNCTIONS[REGISTERED[name]]
    out, _ = attend(None, query, key, value, None, scaling=0.3, sliding_window=window, pack_lengths=tuple(lengths))
    return out, query, key, value


def naive(query, key, value, lengths, window):
    """One [T, T] mask in which a token sees its own sequence's past only."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    seen = (owner[:, None] == owner) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_no_sequence_of_a_pack_sees_another(name, window):
    lengths = [5, 1, 7]
    out, *tensors = packed(name, lengths, window)
    torch.testing.assert_close(out, naive(*tensors, lengths, window), rtol=1e-6, atol=1e-6)


def test_a_band_mask_shows_the_last_positions_of_the_window():
    assert band_mask(4, 2, CPU).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


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
