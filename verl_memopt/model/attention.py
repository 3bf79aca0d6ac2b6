"""Attention over packed sequences: how a kernel is chosen, and all kernels behind one signature."""

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
from verl_memopt.model.families import POLICY_KEY, SCORE_CAP, family_of
from verl_memopt.model.prefix_layout import PrefixLayout
from verl_memopt.model.rotary import Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Attention with explicit masks in plain autograd, which is the reference for every kernel, and attention with sliding windows.


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [1, heads, Q, D] in plain autograd. It holds the scores of all token pairs of one tree at a time.

    ``query`` [1, heads, Q, D] has the queries of the layout. ``key`` and ``value`` [1, kv heads, T, D] have all tokens. The other
    arguments are as in :class:`AttentionArgs`.
    """
    repeats = query.shape[1] // key.shape[1]
    # The reference repeats key heads in memory; fused kernels do not.
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    ends = np.cumsum(layout.trees)
    borders = [0, *np.searchsorted(layout.query_places, ends).tolist()]
    outputs, tensors = [], (query.split(np.diff(borders).tolist(), 2), *(x.split(layout.trees, 2) for x in (key, value)))
    for tree, (q, k, v) in enumerate(zip(*tensors, strict=True)):
        first, end = ends[tree] - layout.trees[tree], ends[tree]
        rows = layout.query_places[borders[tree] : borders[tree + 1]] - first
        hidden = ~visible(layout.stops[first:end] - first, window, query.device, rows)
        scores = q @ k.transpose(2, 3) * scale
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        # The softmax is in fp32, as in the eager attention of transformers. A sink has a weight, but no value.
        outputs.append(scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : k.shape[2]] @ v)
    return torch.cat(outputs, dim=2)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PrefixLayout,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute sliding-window attention [1, heads, Q, D] by torch's SDPA, one segment at a time.

    Arguments are as in :func:`eager_attention`. A segment sees the last ``window - 1`` keys of its path before it. SDPA has no
    sinks, so a sink is a key of its own there.
    """
    dtype, grouped, outputs = query.dtype, query.shape[1] != key.shape[1], []
    if layout.rounds:
        # Several segments see the keys at the end of a prefix, so that the gradients of these keys are sums.
        query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    ends = np.cumsum(layout.segments)
    firsts = layout.query_places[ends - layout.segments].tolist()
    for q, first, above in zip(query.split(layout.segments, 2), firsts, layout.above(window), strict=True):
        own = slice(first, first + q.shape[2])
        if len(above):
            index = torch.from_numpy(np.r_[above, own]).to(query.device, non_blocking=True)
            k, v = key.index_select(2, index), value.index_select(2, index)
        else:
            k, v = key[:, :, own], value[:, :, own]
        keys = k.shape[2]
        whole = keys <= window and not len(above) and sinks is None
        rows = np.arange(len(above), keys)
        mask = None if whole else visible(np.full(keys, keys), window, query.device, rows)
        size = v.shape[3]
        if mask is not None and sinks is not None:
            q, k, v, mask = _with_sink_key(q, k, v, mask, sinks / scale)
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=whole, scale=scale, enable_gqa=grouped)
        outputs.append(out[..., :size])
    return torch.cat(outputs, dim=2).to(dtype)


def _with_sink_key(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # A key behind the others is all zeros but for one further element, with which a query of head h makes the product score[h].
    element = score.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = torch.cat((query, pad(element, (0, HEAD_MULTIPLE - 1))), 3)
    sink = pad(pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0), (0, HEAD_MULTIPLE - 1))
    key = torch.cat((pad(key, (0, HEAD_MULTIPLE)), sink), 2)
    return query, key, pad(value, (0, HEAD_MULTIPLE, 0, 1)), pad(mask, (0, 1), value=True)


def visible(stops: np.ndarray, window: int | None, device: torch.device, rows: np.ndarray | None = None) -> Tensor:
    """Return the mask of tokens, bool [rows, T]. It is True if the token of the row sees the token of the column.

    A token at position p of its path sees positions p - window + 1 to p of the path, and with ``window=None`` all up to p.

    Args:
        stops: int64 [T], as in :class:`PrefixLayout`.
        window: Number of positions that a token sees, with its own position. None = all.
        device: The device of the mask.
        rows: int64, the tokens that have a row. None = all tokens.
    """
    # Build the indices on the host by numpy and send them without waiting, so that the GPU's queue does not run empty.
    places = np.arange(len(stops))
    arrays = places, stops, places if rows is None else rows
    place, stop, row = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    seen = (row[:, None] >= place) & (row[:, None] < stop)
    if window is None:
        return seen
    # The position of a token is the number of tokens that it sees besides itself.
    position = ((place[:, None] >= place) & (place[:, None] < stop)).sum(1)
    return seen & (position[row][:, None] - position < window)


REGISTERED = {"sdpa": "packed_sdpa", "eager": "packed_eager", "flash_attention_2": "packed_fa2", "varlen": "packed_varlen"}
"""Kernel -> its name in a model's config. Transformers has no mask function for these names, so it builds no [T, T] mask."""

HEAD_MULTIPLE = 8
"""GPU kernels take head sizes that are multiples of this."""

LARGEST_FLASH_HEAD = 256
"""Flash kernels take heads up to this size. Wider ones, as in the global layers of Gemma 4, take the kernel for fp32."""


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, section: str = POLICY_KEY, cap: float | None = None
) -> str:
    """Choose the kernel for ``model.attn_implementation``, and return its registered name.

    If flash kernels support device and dtype, ``auto`` takes the flash-attn package if it is installed, and otherwise torch's own
    flash kernels. If they do not, it takes the other kernels of SDPA. A model that caps its attention scores gets eager
    attention, because fused kernels cannot cap scores. ``cap`` is the bound of the scores. ``section`` is the section of the
    settings, for error messages.

    Raises:
        ConfigError: The name is unknown, or the kernel cannot run on this device or for this model.
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
    # With flash support the package is preferred to torch's own flash kernels.
    if name == "auto":
        name = "sdpa" if not supported else "flash_attention_2" if problem is None else "varlen"
    return REGISTERED[name]


def plain_attention(config: PretrainedConfig) -> str:
    # SDPA silently ignores the cap of scores, and transformers has none with sinks.
    capped = getattr(config, SCORE_CAP, None) is not None
    return "eager" if capped or family_of(config.model_type).sinks else "sdpa"


FLASH_ATTN_INSTALL = ".venv/bin/pip install --no-build-isolation 'flash-attn==2.8.3.post1'"
"""Without build isolation it is compiled for the torch of this environment. A build for another torch fails at import."""


@cache
def flash_attn_problem() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed"
    try:
        # Import it, because a build for another torch or CUDA fails only at import.
        importlib.import_module("flash_attn")
    # A broken binary may raise anything: a missing symbol, a missing library, an error of the package itself.
    except Exception as error:  # noqa: BLE001
        return f"cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of a kernel besides query, key and value.

    Attributes:
        layout: Which tokens share a prefix.
        scale: Factor of the products of queries and keys.
        window: Number of positions that a token sees, with its own position. None = all positions before it.
        rotary: Rotates queries and keys. None = they are rotated already.
        cap: Bound of the scores. None = no bound. Only eager attention can cap scores.
        sinks: [heads], the score of one more key of each head, whose value is zero. None = there is none.
    """

    layout: PrefixLayout
    scale: float
    window: int | None
    rotary: Rotary | None
    cap: float | None = None
    sinks: Tensor | None = None


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionArgs], Tensor]
"""A kernel: (query [Q, heads, D], key and value [T, kv heads, D], arguments) -> [Q, heads, D of the values]."""


def _eager(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    query, key = _apply_rotary(query, key, args.rotary, args.layout)
    q, k, v = (_heads_first(x) for x in (query, key, value))
    return _tokens_first(eager_attention(q, k, v, args.layout, args.scale, args.window, args.cap, args.sinks))


def _window(args: AttentionArgs) -> int | None:
    # A window that holds the longest path cuts nothing, and whole prefixes need no copies of keys.
    return None if args.window is None or args.layout.longest_path <= args.window else args.window


def _sdpa(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    if (window := _window(args)) is not None:
        query, key = _apply_rotary(query, key, args.rotary, args.layout)
        q, k, v = (_heads_first(x) for x in (query, key, value))
        return _tokens_first(windowed_attention(q, k, v, args.layout, args.scale, window, args.sinks))
    options = args.layout, args.scale
    return _one_size(lambda q, k, v, rotary: dense_attention(q, k, v, *options, rotary, args.sinks), query, key, value, args)


def _varlen(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    if query.shape[-1] > LARGEST_FLASH_HEAD:
        return _sdpa(query, key, value, args)
    options = args.layout, args.scale, _window(args)
    return _one_size(lambda q, k, v, rotary: flash_attention(q, k, v, *options, rotary, args.sinks), query, key, value, args)


def _flash(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    # The package's backward does not accept merged log-sum-exps.
    if args.layout.rounds or args.sinks is not None or query.shape[-1] > LARGEST_FLASH_HEAD:
        return _varlen(query, key, value, args)
    # Imported here, because the package is optional.
    from flash_attn import flash_attn_varlen_func

    query, key = _apply_rotary(query, key, args.rotary, args.layout)
    cu_seqlens, longest = args.layout.cu_seqlens, max(args.layout.segments)
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        softmax_scale=args.scale,
        causal=True,
        # The kernel does not count the token's own position. The setting counts it.
        window_size=(-1, -1) if args.window is None else (args.window - 1, 0),
    )


def _apply_rotary(query: Tensor, key: Tensor, rotary: Rotary | None, layout: PrefixLayout) -> tuple[Tensor, Tensor]:
    # Rotate query and key for a kernel that cannot rotate. Autograd then keeps them before and after the rotation.
    if rotary is None:
        return query, key
    # In a pruned last block only some tokens are queries, so select their rows of the tables.
    cos, sin = layout.at_queries(rotary.cos, rotary.sin)
    return replace(rotary, cos=cos, sin=sin).query(query), rotary.key(key)


def _one_size(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
    """Run a kernel that needs one size for all heads, on a GPU a multiple of eight. Return [Q, heads, D of the values].

    Queries and keys are padded with zeros, which do not change the scores. Values are padded too, and the padding is cut off the
    output.
    """
    rotary, width, size = args.rotary, value.shape[-1], max(query.shape[-1], value.shape[-1])
    size += -size % HEAD_MULTIPLE if is_gpu(query.device) else 0
    if size == query.shape[-1] == width:
        return attend(query, key, value, rotary)
    if size != query.shape[-1]:
        # The rotation combines the two halves of a head, and padding would move the middle. So rotate first.
        (query, key), rotary = _apply_rotary(query, key, rotary, args.layout), None
    q, k, v = (x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
    return attend(q, k, v, rotary)[..., :width]


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]  # [1, heads, T, D]


def _tokens_first(tensor: Tensor) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1).contiguous()  # squeeze and not [0], as in DecoderBlock.compute


def _over_ranks(attend: Attend) -> Attend:
    # Wrap a kernel for ranks that share the tokens of a pack: they exchange heads before and after it.
    def attended(query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        split = args.layout.split
        if split is None:
            return attend(query, key, value, args)
        if args.sinks is not None:
            args = replace(args, sinks=args.sinks.chunk(split.group.size)[split.group.rank])
        return split.over_heads(attend, query, key, value, args)

    return attended


KERNELS: dict[str, Attend] = {
    REGISTERED[name]: _over_ranks(attend)
    for name, attend in {"sdpa": _sdpa, "eager": _eager, "varlen": _varlen, "flash_attention_2": _flash}.items()
}
"""Name of the attention in a model's config -> the kernel."""
