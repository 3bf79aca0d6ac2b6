"""Decoders of other architectures: transformers' own modules, with attention over packs registered with transformers.

The layout of a pack reaches attention through the keyword arguments of transformers' decoders. The kernels are registered without
a mask function, so no [T, T] mask is built, and fake tensors take the same bytes as real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from verl_memopt.models.attention import KERNELS, Attend, AttentionArgs
from verl_memopt.models.pack import Pack
from verl_memopt.models.prefix_layout import PrefixLayout


def states_of_pack(decoder: nn.Module, pack: Pack) -> Tensor:
    """Return the normed states [T, h] of a pack's tokens."""
    output: Any = decoder(input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, prefix_layout=pack.layout)
    return output.last_hidden_state[0]


def logits_of_row(lm: nn.Module, pack: Pack) -> Tensor:
    """Return the logits [T, V] of a pack of one row, by transformers' own forward and eager attention."""
    with own_attention(lm):
        return lm(input_ids=pack.input_ids, use_cache=False).logits[0]


def states_of_row(decoder: nn.Module, pack: Pack) -> Tensor:
    """Return the normed states [T, h] of a pack of one row, by transformers' own forward and eager attention."""
    with own_attention(decoder):
        output: Any = decoder(input_ids=pack.input_ids, use_cache=False)
    return output.last_hidden_state[0]


@contextmanager
def own_attention(lm: nn.Module) -> Iterator[None]:
    """Let a model use transformers' eager attention inside the body."""
    configs = {
        id(config): config for module in lm.modules() if isinstance(config := getattr(module, "config", None), PretrainedConfig)
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for config, attention in before:
            config._attn_implementation = attention


def _registered(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Return a kernel in the form that transformers calls."""

    def packed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        prefix_layout: PrefixLayout | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert prefix_layout is not None, "attention over a pack needs the pack's layout"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, AttentionArgs(prefix_layout, scale, sliding_window, None)), None

    return packed


def register_kernels() -> None:
    """Register the kernels with transformers under their own names. Call this before building a model with one."""
    for name, attend in KERNELS.items():
        AttentionInterface.register(name, _registered(attend))
