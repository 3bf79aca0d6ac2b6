"""Attention over packs: trees of tokens lie one after another in one row, and none sees another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from verl_memopt.distributed.device import is_gpu, supports_flash
from verl_memopt.errors import ConfigError
from verl_memopt.models.architecture import window
from verl_memopt.models.attention_dense import dense_attention
from verl_memopt.models.attention_eager import eager_attention, windowed_attention
from verl_memopt.models.attention_flash import flash_attention
from verl_memopt.models.trees import Trees
from verl_memopt.ops.rotation import Rotary

REGISTERED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_fa2", "varlen": "packed_varlen"}
"""Names of our own in a model's config: transformers has no mask function for them, and builds no [T, T] mask."""

HEAD_MULTIPLE = 8
"""Sizes of heads that the kernels of GPUs take."""


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel a model uses: its short name, the name registered with transformers, and why it was chosen."""

    name: str
    registered: str
    reason: str


def choose_attention(asked: str, device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """Gives the kernel for ``model.attn_implementation``.

    ``auto`` takes flash-attn where it is installed and supports device and dtype, else torch's own flash kernels under the same
    conditions, else SDPA's other kernels. Errors: ConfigError for an unknown name or an impossible one.
    """
    key = f"actor_rollout_ref.model.attn_implementation={asked}"
    if asked not in ("auto", "flash_attention_2", "sdpa", "eager"):
        raise ConfigError(f"{key}: unknown. Use auto, flash_attention_2, sdpa or eager.")
    installed, supported = importlib.util.find_spec("flash_attn") is not None, supports_flash(device, dtype)
    if asked == "flash_attention_2":
        if not installed:
            raise ConfigError(f"{key}: the package flash-attn is not installed. Install the extra flash-attn, or use auto.")
        if not supported:
            raise ConfigError(
                f"{key}: flash kernels need a GPU of capability 8.0 and half precision, not {device} {dtype}. Use auto."
            )
        return AttentionChoice("flash_attention_2", REGISTERED["flash_attention_2"], "asked for")
    if asked != "auto":
        return AttentionChoice(asked, REGISTERED[asked], "asked for")
    if supported and installed:
        return AttentionChoice("flash_attention_2", REGISTERED["flash_attention_2"], f"installed, supports {device} {dtype}")
    if supported:
        return AttentionChoice("varlen", REGISTERED["varlen"], "flash-attn is not installed; torch has a kernel of its own")
    return AttentionChoice("sdpa", REGISTERED["sdpa"], f"no flash kernel for {device} {dtype}")


@dataclass(frozen=True)
class Over:
    """What attention is over. window: how many positions back a token sees, itself included. rotary: turns queries and keys."""

    trees: Trees
    scale: float
    window: int | None
    rotary: Rotary | None


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Over], Tensor]
"""A kernel: (query [1, heads, T, D], key and value [1, kv heads, T, D], what it is over) -> [1, T, heads, D]; T of what is read
for queries and outputs."""


def _eager(query: Tensor, key: Tensor, value: Tensor, over: Over) -> Tensor:
    query, key = _turned(query, key, over.rotary, over.trees)
    return eager_attention(query, key, value, over.trees, over.scale, over.window).transpose(1, 2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, over: Over) -> Tensor:
    _refuse_branches(over)
    if over.window is not None and max(over.trees.segments) > over.window:
        query, key = _turned(query, key, over.rotary, over.trees)
        return windowed_attention(query, key, value, over.trees, over.scale, over.window).transpose(1, 2)
    return _one_size(lambda q, k, v, rotary: dense_attention(q, k, v, over.trees, over.scale, rotary), query, key, value, over)


def _varlen(query: Tensor, key: Tensor, value: Tensor, over: Over) -> Tensor:
    _refuse_branches(over)
    given = over.trees, over.scale, over.window
    return _one_size(lambda q, k, v, rotary: flash_attention(q, k, v, *given, rotary), query, key, value, over)


def _flash(query: Tensor, key: Tensor, value: Tensor, over: Over) -> Tensor:
    if over.trees.forks:  # the package gives its log-sum-exps no gradient, nor takes merged ones in backward
        return _varlen(query, key, value, over)
    from flash_attn import flash_attn_varlen_func

    query, key = _turned(query, key, over.rotary, over.trees)
    starts, longest = over.trees.starts, max(over.trees.segments)
    return flash_attn_varlen_func(
        _flat(query),
        _flat(key),
        _flat(value),
        starts,
        starts,
        longest,
        longest,
        softmax_scale=over.scale,
        causal=True,
        window_size=(-1, -1) if over.window is None else (over.window - 1, 0),
    )[None]


def _turned(query: Tensor, key: Tensor, rotary: Rotary | None, trees: Trees) -> tuple[Tensor, Tensor]:
    """Gives query and key turned, for an attention that cannot turn them itself; it keeps them both ways."""
    if rotary is None:
        return query, key
    cos, sin = trees.at_queries(rotary.cos, rotary.sin)
    of_queries = replace(rotary, cos=cos, sin=sin)
    turned = of_queries.query(_flat(query)), rotary.key(_flat(key))
    return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]


def _one_size(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, over: Over) -> Tensor:
    """Gives [1, T, heads, D of the values] from a kernel over tokens whose heads have one size, on a GPU a multiple of eight.

    Zeros beside queries and keys add nothing to a score; what they give beside values is cut off.
    """
    size = max(query.shape[-1], value.shape[-1])
    size += -size % HEAD_MULTIPLE if is_gpu(query.device) else 0
    rotary = over.rotary
    if size != query.shape[-1]:
        (query, key), rotary = _turned(query, key, rotary, over.trees), None
    q, k, v = (x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in map(_flat, (query, key, value)))
    return attend(q, k, v, rotary)[None, ..., : value.shape[-1]]


def _flat(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)  # [T, heads, D]


def _refuse_branches(over: Over) -> None:
    if over.trees.forks and over.window is not None:
        raise ConfigError(_no_sharing(over.window))


def refuse_sliding_window(config: PretrainedConfig) -> None:
    """Errors: ConfigError for a model with layers whose sliding window would cut a prompt that answers share."""
    size = window(config)
    if size is not None:
        raise ConfigError(_no_sharing(size, f"{config.model_type} model's"))


def _no_sharing(window: int, whose: str = "model's") -> str:
    key = "actor_rollout_ref.actor.use_prefix_grouper"
    return f"{key}=true: the {whose} sliding_window={window} would cut the prompt that answers share. Set {key}=false."


KERNELS: dict[str, Attend] = {
    REGISTERED[name]: attend
    for name, attend in {"sdpa": _sdpa, "eager": _eager, "varlen": _varlen, "flash_attention_2": _flash}.items()
}
"""Kernels by the name that a model's config has for its attention."""
