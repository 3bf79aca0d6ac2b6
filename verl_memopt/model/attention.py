"""Attention over packed sequences: the choice of a kernel, and the kernels under one signature."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from verl_memopt.distributed.device import is_gpu, supports_flash
from verl_memopt.errors import ConfigError
from verl_memopt.model.attention_dense import dense_attention
from verl_memopt.model.attention_fused import flash_attention
from verl_memopt.model.families import POLICY_KEY, SCORE_CAP
from verl_memopt.model.packing import PrefixGroup, PrefixLayout
from verl_memopt.model.rotary import Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Attention written out with explicit masks, in plain autograd: the reference for every kernel; and sliding windows.


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    """Attention [1, heads, Q, D] by plain autograd; the scores of all token pairs of one group exist at a time.

    ``query`` [1, heads, Q, D] has the layout's queries, ``key`` and ``value`` [1, kv heads, T, D] all tokens. Other arguments are
    as in :class:`AttentionArgs`.
    """
    repeats = query.shape[1] // key.shape[1]
    # The reference repeats key heads in memory; fused kernels do not.
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    queries = [prefix + sum(suffixes) for prefix, suffixes in layout.groups]
    outputs, tensors = [], (query.split(queries, 2), *(x.split(layout.tokens, 2) for x in (key, value)))
    for (prefix, suffixes), skipped, q, k, v in zip(layout.groups, layout.skipped, *tensors, strict=True):
        # Skipped tokens come first in a prefix, so the mask's first rows fall away.
        hidden = ~group_mask((skipped + prefix, suffixes), window, query.device)[skipped:]
        scores = q @ k.transpose(2, 3) * scale
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        scores = scores.masked_fill(hidden, float("-inf"))
        # The softmax is in fp32 as in transformers' own eager attention, which this is the reference for.
        outputs.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ v)
    return torch.cat(outputs, dim=2)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, scale: float, window: int) -> Tensor:
    """Sliding-window attention [1, heads, T, D] by torch's SDPA, one sequence at a time.

    Arguments are as in :func:`eager_attention`. The sequences of ``layout`` share no prefix.
    """
    assert not layout.prefix_spans, layout.groups
    grouped, outputs = query.shape[1] != key.shape[1], []
    for q, k, v in zip(*(x.split(layout.segments, 2) for x in (query, key, value)), strict=True):
        whole = q.shape[2] <= window
        mask = None if whole else group_mask((q.shape[2], ()), window, query.device)
        outputs.append(scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


def group_mask(group: PrefixGroup, window: int | None, device: torch.device) -> Tensor:
    """Return bool [tokens, tokens] of one group: which token (row) sees which (column).

    A token at position p sees positions p - window + 1 to p; with ``window=None`` all up to p.
    """
    prefix, suffixes = group
    sizes, first_places = [prefix, *suffixes], [0] + [prefix] * len(suffixes)
    # Built on the host by numpy and sent without waiting: this runs between the micro-batches of a step.
    segment, place = (
        torch.from_numpy(values).to(device, non_blocking=True)
        for values in (
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([start + np.arange(size) for start, size in zip(first_places, sizes, strict=True)]),
        )
    )
    # Positions of a suffix go on from the prefix, so one difference tells causality and window.
    distance = place[:, None] - place
    # Segment 0 is the prefix, which every suffix of the group sees.
    visible = ((segment[:, None] == segment) | (segment == 0)) & (distance >= 0)
    return visible if window is None else visible & (distance < window)


REGISTERED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_fa2", "varlen": "packed_varlen"}
"""Names of our own in a model's config. Transformers has no mask function for them, so it builds no [T, T] mask."""

HEAD_MULTIPLE = 8
"""GPU kernels take head sizes that are multiples of this."""


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, section: str = POLICY_KEY, cap: float | None = None
) -> str:
    """Choose the kernel for ``model.attn_implementation``, and return its registered name.

    ``auto`` takes flash-attn where it is installed and supports device and dtype, else torch's own flash kernels under the same
    conditions, else SDPA's other kernels. A model that caps its scores gets eager attention: fused kernels cannot cap them.
    ``cap`` is that bound, and ``section`` the settings section that errors name.

    Raises:
        ConfigError: For an unknown name, or for a kernel that cannot run here or for this model.
    """
    key = f"{section}.attn_implementation={name}"
    if name not in ("auto", "flash_attention_2", "sdpa", "eager"):
        raise ConfigError(f"{key}: unknown. Use auto, flash_attention_2, sdpa or eager.")
    if cap is not None and name in ("flash_attention_2", "sdpa"):
        raise ConfigError(f"{key}: this kernel cannot cap the scores of attention ({SCORE_CAP}={cap:g}). Use auto or eager.")
    if cap is not None:
        return REGISTERED["eager"]
    supported = supports_flash(device, dtype)
    problem = flash_attn_problem() if supported or name == "flash_attention_2" else None
    if name == "flash_attention_2":
        if problem is not None:
            raise ConfigError(f"{key}: flash-attn {problem}. Install it ({FLASH_ATTN_INSTALL}), or use auto.")
        if not supported:
            raise ConfigError(
                f"{key}: flash kernels need a GPU of capability 8.0 and half precision, not {device} {dtype}. Use auto."
            )
    # Without flash support no flash kernel is tried; with it the package comes before torch's own.
    if name == "auto":
        name = "sdpa" if not supported else "flash_attention_2" if problem is None else "varlen"
    return REGISTERED[name]


def plain_attention(config: PretrainedConfig) -> str:
    # SDPA silently drops the cap of scores.
    return "sdpa" if getattr(config, SCORE_CAP, None) is None else "eager"


FLASH_ATTN_INSTALL = ".venv/bin/pip install --no-build-isolation 'flash-attn==2.8.3.post1'"
"""Without build isolation it is compiled against the torch of this environment; a build for another torch fails at import."""


@cache
def flash_attn_problem() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed"
    try:
        # Imported, because a build for another torch or CUDA is found and fails only then.
        importlib.import_module("flash_attn")
    # Whatever a broken binary raises: a missing symbol, a missing library, a check of the package's own.
    except Exception as error:  # noqa: BLE001
        return f"cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None


@dataclass(frozen=True)
class AttentionArgs:
    """What a kernel gets beside query, key and value.

    Attributes:
        layout: Which tokens share a prefix.
        scale: Factor of the products of queries and keys.
        window: Positions that a token sees back, itself included; None = all.
        rotary: Rotates queries and keys; None = they are rotated already.
        cap: Bound of the scores; None = no cap. Only eager attention can cap them.
    """

    layout: PrefixLayout
    scale: float
    window: int | None
    rotary: Rotary | None
    cap: float | None = None


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionArgs], Tensor]
"""A kernel: (query [1, heads, Q, D], key and value [1, kv heads, T, D], arguments) -> [1, Q, heads, D]."""


def _eager(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    query, key = _apply_rotary(query, key, args.rotary, args.layout)
    return eager_attention(query, key, value, args.layout, args.scale, args.window, args.cap).transpose(1, 2).contiguous()


def _sdpa(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    _refuse_shared_prefix(args)
    if args.window is not None and max(args.layout.segments) > args.window:
        query, key = _apply_rotary(query, key, args.rotary, args.layout)
        return windowed_attention(query, key, value, args.layout, args.scale, args.window).transpose(1, 2).contiguous()
    return _one_size(lambda q, k, v, rotary: dense_attention(q, k, v, args.layout, args.scale, rotary), query, key, value, args)


def _varlen(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    _refuse_shared_prefix(args)
    options = args.layout, args.scale, args.window
    return _one_size(lambda q, k, v, rotary: flash_attention(q, k, v, *options, rotary), query, key, value, args)


def _flash(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    if args.layout.prefix_spans:  # the package's backward cannot take merged log-sum-exps
        return _varlen(query, key, value, args)
    # Imported here, because the package is optional.
    from flash_attn import flash_attn_varlen_func

    query, key = _apply_rotary(query, key, args.rotary, args.layout)
    cu_seqlens, longest = args.layout.cu_seqlens, max(args.layout.segments)
    return flash_attn_varlen_func(
        _flat(query),
        _flat(key),
        _flat(value),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        softmax_scale=args.scale,
        causal=True,
        # The kernel counts positions besides the token's own. The setting counts the token itself too.
        window_size=(-1, -1) if args.window is None else (args.window - 1, 0),
    )[None]


def _apply_rotary(query: Tensor, key: Tensor, rotary: Rotary | None, layout: PrefixLayout) -> tuple[Tensor, Tensor]:
    # Rotate query and key for a kernel that cannot do it itself. Both versions are then kept for backward.
    if rotary is None:
        return query, key
    # Only some tokens may be queries (a pruned last block), so they need their own rows of the tables.
    cos, sin = layout.at_queries(rotary.cos, rotary.sin)
    at_queries = replace(rotary, cos=cos, sin=sin)
    rotated = at_queries.query(_flat(query)), rotary.key(_flat(key))
    return rotated[0].transpose(0, 1)[None], rotated[1].transpose(0, 1)[None]


def _one_size(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    """Run a kernel whose heads must all have one size (on a GPU a multiple of eight), and return [1, Q, heads, D of the values].

    Queries and keys are padded with zeros, which add nothing to a score. The padding of values is cut off the output.
    """
    size = max(query.shape[-1], value.shape[-1])
    size += -size % HEAD_MULTIPLE if is_gpu(query.device) else 0
    rotary = args.rotary
    if size != query.shape[-1]:
        # The rotation joins the halves of a head, so it must come before the zeros that change where the halves lie.
        (query, key), rotary = _apply_rotary(query, key, rotary, args.layout), None
    q, k, v = (x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in map(_flat, (query, key, value)))
    return attend(q, k, v, rotary)[None, ..., : value.shape[-1]]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1)  # [T, heads, D]; squeeze as in DecoderBlock.compute


class WindowOverPrefixError(NotImplementedError):
    def __init__(self, window: int) -> None:
        super().__init__(f"a sliding window of {window} tokens would cut the prefix that sequences share")
        self.window = window


def _refuse_shared_prefix(args: AttentionArgs) -> None:
    if args.layout.prefix_spans and args.window is not None:
        raise WindowOverPrefixError(args.window)


def _over_ranks(attend: Attend) -> Attend:
    # Wrap a kernel so that ranks that share a pack's tokens exchange heads around it.
    def attended(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        split = args.layout.split
        return attend(query, key, value, args) if split is None else split.over_heads(attend, query, key, value, args)

    return attended


KERNELS: dict[str, Attend] = {
    REGISTERED[name]: _over_ranks(attend)
    for name, attend in {"sdpa": _sdpa, "eager": _eager, "varlen": _varlen, "flash_attention_2": _flash}.items()
}
"""Kernels by the name of the attention in a model's config."""
