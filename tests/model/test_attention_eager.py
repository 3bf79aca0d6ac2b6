import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.attention_cases import random_inputs
from verl_memopt.model.attention import eager_attention, group_mask, windowed_attention
from verl_memopt.model.packing import PrefixLayout

CPU = torch.device("cpu")


def test_a_suffix_sees_the_prefix_and_itself():
    assert group_mask((2, (2, 1)), None, CPU).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_window_shows_the_last_positions():
    assert group_mask((4, ()), 2, CPU).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_windows_positions_go_on_from_prefix_to_suffix():
    assert group_mask((2, (2, 1)), 2, CPU).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 1, 0, 0, 1],
    ]


def softmax_over_what_is_seen(query, key, value, seen, scale):
    """Token by token and head by head."""
    out, repeats = torch.empty(query.shape), query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for token, places in enumerate(seen):
            keys, values = key[0, head // repeats, places], value[0, head // repeats, places]
            out[0, head, token] = (keys @ query[0, head, token] * scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_written_out_attention_is_a_softmax_over_what_a_token_sees(heads):
    layout = PrefixLayout.of(((2, (2, 1)), (3, ())))
    inputs = random_inputs(layout, *heads)
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5], [5, 6], [5, 6, 7]]
    found = eager_attention(*inputs, layout, 0.3, None)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_skipped_tokens_are_seen(heads):
    layout = PrefixLayout.of(((1, (2, 1)), (2, ())), skipped=(2, 1))
    inputs = random_inputs(layout, *heads)
    # Places of keys: a prefix of three, suffixes 3, 4 and 5, and a group of three.
    seen = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5], [6, 7], [6, 7, 8]]
    found = eager_attention(*inputs, layout, 0.3, None)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", [eager_attention, windowed_attention])
def test_a_window_holds_in_every_sequence(attention):
    layout = PrefixLayout.of(((4, ()), (1, ()), (2, ())))
    inputs = random_inputs(layout, 4, 2)
    seen = [[0], [0, 1], [1, 2], [2, 3], [4], [5], [5, 6]]
    found = attention(*inputs, layout, 0.3, 2)
    torch.testing.assert_close(found, softmax_over_what_is_seen(*inputs, seen, 0.3), rtol=0, atol=1e-6)


def test_sequences_under_a_window_share_nothing():
    layout = PrefixLayout.of(((4, (1, 2)),))
    with pytest.raises(AssertionError):
        windowed_attention(*random_inputs(layout, 1, 1), layout, 0.3, 2)


class RefusesWaiting(TorchDispatchMode):
    """Fails at a copy to another device for which a GPU's host would wait: every one that is not told not to."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and out.device != args[0].device:
            assert kwargs.get("non_blocking"), func
        return out


def test_a_mask_reaches_its_device_without_a_wait_of_the_host():
    with RefusesWaiting():
        assert group_mask((2, (2, 1)), 2, torch.device("meta")).device.type == "meta"
