"""Attention over packed rows: sequences lie one after another in one row, and none sees another.

Registered with transformers under names of our own and without a mask function, so that no [T, T] mask is ever built and
the passes give the same bytes under fake tensors as with real ones.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl_memopt.distributed.device import supports_flash
from verl_memopt.errors import ConfigError

REGISTERED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_fa2", "varlen": "packed_varlen"}


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel a model uses: its short name, the name registered with transformers, and why it was chosen."""

    name: str
    registered: str
    reason: str


def choose_attention(asked: str, device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """Gives the kernel for ``model.attn_implementation``.

    ``auto`` takes flash-attn where it is installed and supports device and dtype, else torch's own variable-length flash
    kernel under the same conditions, else SDPA. Errors: ConfigError for an unknown name or an impossible one.
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
    if supported and importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        return AttentionChoice("varlen", REGISTERED["varlen"], "flash-attn is not installed; torch has a kernel of its own")
    return AttentionChoice("sdpa", REGISTERED["sdpa"], f"no flash kernel for {device} {dtype}")


def _per_sequence(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Gives an attention function that calls ``attend`` for each sequence of the pack."""

    def packed(
        module: Any,
        query: Tensor,  # [1, heads, T, D]
        key: Tensor,  # [1, kv heads, T, D]
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        pack_lengths: tuple[int, ...] = (),
        **_: Any,
    ) -> tuple[Tensor, None]:
        parts = zip(query.split(pack_lengths, 2), key.split(pack_lengths, 2), value.split(pack_lengths, 2), strict=True)
        outputs = [attend(q, k, v, scaling, sliding_window) for q, k, v in parts]
        return torch.cat(outputs, dim=2).transpose(1, 2), None  # [1, T, heads, D]

    return packed


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    mask = band_mask(length, window, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _eager(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~band_mask(length, window, query.device), float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def band_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Gives bool [length, length]: position i sees j when i - window < j <= i."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    causal = ones.tril()
    return causal if window is None else causal & ones.triu(1 - window)


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)


def _flat(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)  # [T, heads, D]


def _varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pack_lengths: tuple[int, ...] = (),
    pack_starts: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    starts = _cumulative(pack_lengths, query.device) if pack_starts is None else pack_starts
    q, k, v = _flat(query), _flat(key), _flat(value)
    known = _parameters(varlen_attn)
    options: dict[str, Any] = {"scale": scaling}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    else:
        options["is_causal"] = True
    longest = max(pack_lengths)
    return varlen_attn(q, k, v, starts, starts, longest, longest, **options)[None], None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Gives a function's parameter names: torch 2.11 and 2.13 spell causality and grouped heads differently."""
    return frozenset(inspect.signature(function).parameters)


def _flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pack_lengths: tuple[int, ...] = (),
    pack_starts: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from flash_attn import flash_attn_varlen_func

    starts = _cumulative(pack_lengths, query.device) if pack_starts is None else pack_starts
    longest = max(pack_lengths)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    out = flash_attn_varlen_func(
        _flat(query),
        _flat(key),
        _flat(value),
        starts,
        starts,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        window_size=window,
    )
    return out[None], None


AttentionInterface.register(REGISTERED["sdpa"], _per_sequence(_sdpa))
AttentionInterface.register(REGISTERED["eager"], _per_sequence(_eager))
AttentionInterface.register(REGISTERED["varlen"], _varlen)
AttentionInterface.register(REGISTERED["flash_attention_2"], _flash)
