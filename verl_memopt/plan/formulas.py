"""The inputs of the knobs' byte formulas, and the bytes of one decoder block.

A docstring that begins with a symbol, such as ``b``, says which symbol of the formulas the value is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.memory.fused import NARROW_TILE_ELEMENTS, TILE_ELEMENTS
from verl_memopt.memory.lora import adapter_params, expert_adapter_params
from verl_memopt.memory.precision import width
from verl_memopt.memory.quantized_frozen import row_bytes
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS, SUM_ELEMENTS
from verl_memopt.memory.sequence_parallel import key_copies
from verl_memopt.model.attention import HEAD_MULTIPLE, LARGEST_FLASH_HEAD
from verl_memopt.model.attention_dense import ATTENTION_ELEMENTS, MASKED_PRODUCTS, key_heads_at_once
from verl_memopt.model.delta_rule import DeltaShape
from verl_memopt.model.sizes import LocalHeads, MixtureSize, ModelSize
from verl_memopt.model.state_chunks import LARGER, SIZES, TAIL


@dataclass(frozen=True)
class ForestWork:
    """What a pass over a forest holds, besides its number of tokens. Of a pair, the first number is queries, the second keys."""

    skipped: int
    """Tokens that the last block leaves out (``prune_last_block``)."""
    run: int
    """Most tokens of neighbouring segments of one length, which are one attention call on a CPU."""
    span: tuple[int, int]
    """The largest span, which is a call of its own on a CPU."""
    round: tuple[int, int]
    """The largest round, which is one call on a GPU."""
    sums_many: bool = False
    """Attention sums in fp32, because a token is in more than two calls."""
    read: int = 0
    """Tokens of the open path before those of the pass: each block reads their keys."""
    copied: int = 0
    """Tokens whose keys a block copies at once, because the open path has several parts: the sum over its copies."""
    held: int = 0
    """Tokens whose keys and values of all blocks are kept."""
    summed: int = 0
    """Tokens among ``held`` for which sums of gradients exist when the pass begins."""
    states: int = 0
    """Tokens among ``held`` whose state is kept too, because it predicts a token of a later pass."""
    closes: bool = False
    """The tokens are those of open nodes, of which the keys and values start the backward. No log-prob is computed."""
    opens: bool = False
    """The tokens are those of nodes that are opened, without a graph."""


@dataclass(frozen=True)
class Pass:
    """The largest micro-batch of a pass on one rank."""

    tokens: int
    responses: int
    """Response tokens among ``tokens``."""
    rows: int
    """Prompts and answers that attention treats as separate sequences."""
    all_tokens: int
    """Tokens of all micro-batches of the pass."""
    prefix: int = 0
    """Tokens of a prompt whose answers may be in several micro-batches; the later ones read its prefix KV. 0 = none."""
    alone: bool = False
    """It is the only micro-batch of its optimizer step, so no gradients exist when it begins."""
    forest: ForestWork | None = None
    """The shape of the pass, if it is known. None = rows of any lengths, so the worst case counts."""
    longest: int | None = None
    """Tokens of the longest row. None = unknown."""


@dataclass(frozen=True)
class Shapes:
    """The inputs of a knob's formula: sizes of a model, sizes of the largest micro-batch of a pass, and the settings."""

    settings: ActorRolloutRef
    """``Settings.actor_rollout_ref``."""
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    params: int
    """N, the parameters of the model; a tied matrix counts once."""
    block_params: int
    """N_l, the parameters of one decoder block."""
    tied: bool
    tokens: int
    """T, the tokens that a device computes of the largest micro-batch; with sequence parallelism its share of them."""
    responses: int
    """R, the response tokens among T."""
    suffix_tokens: int = 0
    """The tokens among T that belong to answers which share a prompt."""
    skipped: int = 0
    """U, the tokens among T that ``prune_last_block`` leaves out of the last block."""
    slides: bool = False
    """A sliding window cuts rows that may share a prompt, so a layer copies keys: at most twice as many as the pack has."""
    window: int | None = None
    """W, the positions that a token sees in some blocks, if some row is longer. None = no row is cut."""
    window_layers: int = 0
    """How many of ``layers`` have the window."""
    longest: int = 0
    """L, the tokens of the longest row."""
    sinks: bool = False
    """Attention has sinks."""
    post_norms: bool = False
    """The outputs of attention and MLP have norms too, and all norms multiply by 1 + w in fp32."""
    segments: int = 1
    """n, the prompts and answers that attention treats as separate sequences."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    forest: ForestWork | None = None
    """The shape of a pass over a forest. None = prompts and their answers."""
    gated: bool = False
    """Attention's heads have gates."""
    rule: DeltaShape | None = None
    """Heads of the blocks that carry a state. They have Hk heads of keys of size Dk, Hv heads of values of size Dv, and
    n = 2 x Hk x Dk + Hv x Dv channels."""
    linear_layers: int = 0
    """How many of ``layers`` carry a state."""
    ends_linear: bool = False
    """Whether the last block carries a state."""
    is_linear: bool = False
    """Figures of one block are those of a block with a state. See :attr:`of_linear`."""
    mixture: MixtureSize | None = None
    """The experts of a block. None = it has an MLP."""
    v_norm: bool = False
    """Values have a norm."""
    local: LocalHeads | None = None
    """Heads of the blocks with a window, if the others have wider ones. The last block is one of the others."""
    keys_are_values: bool = False
    """Blocks have no projection of values."""
    layer_inputs: int = 0
    """n, the width of the inputs that each token has for each block. 0 = none."""
    reading: tuple[int, int] = (0, 0)
    """How many blocks read the keys of an earlier one: of those beside ``local``, and of those of ``local``."""
    own_mlp: int = 0
    """Width of the MLP of the other blocks."""

    @classmethod
    def of(cls, size: ModelSize, roles: ActorRolloutRef, work: Pass, device: str) -> Shapes:
        forest, known = work.forest, dict[str, Any]()
        if forest is not None:
            queries, _ = forest.span if device == "cpu" else forest.round
            known = {"forest": forest, "skipped": forest.skipped, "suffix_tokens": queries}
        shares = roles.actor.use_prefix_grouper or forest is not None
        fits = size.window is None or (work.longest is not None and work.longest <= size.window)
        return cls(
            settings=roles, layers=size.layers, hidden=size.hidden, mlp=size.mlp, heads=size.heads, kv_heads=size.kv_heads,
            head_dim=size.head_dim, vocab=size.vocab, params=size.params, block_params=size.block_params, tied=size.tied,
            tokens=work.tokens, responses=work.responses, segments=work.rows, device=device, post_norms=size.post_norms,
            slides=bool(shares) and not fits, window=None if fits else size.window, window_layers=size.window_layers,
            longest=min(work.longest or work.tokens, work.tokens), sinks=size.sinks, gated=size.gated,
            rule=size.rule, linear_layers=size.linear_layers,
            ends_linear=not size.prunes, mixture=size.mixture, v_norm=size.v_norm, local=size.local,
            keys_are_values=size.keys_are_values, layer_inputs=size.layer_inputs, reading=size.reading,
            own_mlp=size.own_mlp or size.mlp, **known,
        )  # fmt: skip

    @property
    def compiles(self) -> bool:
        actor = self.settings.actor
        return self.device == "cuda" and actor.use_torch_compile and not actor.fsdp_config.full_determinism

    @property
    def sequence_ranks(self) -> int:
        """S, the number of devices that share the tokens of a micro-batch. Attention has S x T tokens and 1/S of the heads."""
        return self.settings.actor.fsdp_config.sequence_ranks

    @property
    def key_copies(self) -> int:
        return key_copies(self.heads, self.kv_heads, self.sequence_ranks)

    @property
    def exchanged_bytes(self) -> int:
        if self.sequence_ranks == 1:
            return 0
        # A second copy of the attention's output, and keys and values that are repeated for further devices.
        return self.tokens * self.compute_bytes * self.head_dim * (self.heads + 2 * (self.key_copies - 1) * self.kv_heads)

    @property
    def _tables_of_others(self) -> int:
        # Bytes of rotary tables for the tokens of the other devices: each device rotates all S x T tokens.
        return (self.sequence_ranks - 1) * self.tokens * 2 * self.head_dim * self.compute_bytes

    @cached_property
    def compute_bytes(self) -> int:
        """b, the bytes per element of activations."""
        return width(self.settings.actor.fsdp_config.dtype)

    @property
    def master_bytes(self) -> int:
        """b_w, the bytes per element of the policy's stored parameters."""
        fsdp = self.settings.actor.fsdp_config
        return width(fsdp.dtype if fsdp.split_master_weights or fsdp.streams else fsdp.model_dtype)

    @property
    def gradient_bytes(self) -> int:
        """b_g, the bytes per element of the policy's gradients."""
        fsdp = self.settings.actor.fsdp_config
        return width(fsdp.mixed_precision.reduce_dtype if fsdp.split_master_weights else fsdp.model_dtype)

    @property
    def reference_bytes(self) -> int:
        frozen = self.settings.ref.fsdp_config.model_dtype
        return 0 if self.settings.model.lora_rank else self.params * width(frozen)

    @property
    def state_bytes(self) -> float:
        """b_o, the bytes per parameter of the optimizer's moments, and of the remainder of split fp32 master weights."""
        actor = self.settings.actor
        return actor.optim.state_bytes(width(actor.fsdp_config.model_dtype)) + self.remainder_bytes

    @property
    def remainder_bytes(self) -> int:
        return 2 if self.settings.actor.fsdp_config.split_master_weights else 0

    @property
    def input_bytes(self) -> int:
        """X, the bytes of a block's input."""
        return self.tokens * self.hidden * self.compute_bytes

    @property
    def of_linear(self) -> Shapes:
        """The same pass, seen from the last block with a state. Blocks behind it have freed what they kept."""
        behind = int(not self.ends_linear)
        return replace(self, is_linear=True, layers=self.layers - behind, skipped=0)

    @property
    def is_reading(self) -> bool:
        """Whether figures of one block are those of a block that reads the keys of an earlier one."""
        return self.reading[0] > 0

    @property
    def kinds(self) -> list[tuple[int, Shapes]]:
        """(Number of blocks, the same pass with figures of one of them) for blocks of different sizes, that of the last first."""
        assert self.local is not None
        (far_read, near_read), near = self.reading, self.local.layers
        counts = far_read, self.layers - near - far_read, near_read, near - near_read
        reading, own = replace(self, local=None, reading=(1, 0)), replace(self, local=None, reading=(0, 0), mlp=self.own_mlp)
        size = self.local.kv_heads, self.local.head_dim
        narrow = (replace(each, kv_heads=size[0], head_dim=size[1], keys_are_values=False) for each in (reading, own))
        return [pair for pair in zip(counts, (reading, own, *narrow), strict=True) if pair[0]]

    @property
    def _other_head_dim(self) -> int:
        # Size of the heads of the other blocks, which have rotary tables of their own.
        return 0 if self.local is None else self.local.head_dim

    @property
    def activation_bytes(self) -> int:
        if self.linear_layers and not self.is_linear:
            return max(replace(self, is_linear=False)._activation_bytes, self.of_linear._activation_bytes)
        return self._activation_bytes

    @property
    def _inputs_bytes(self) -> int:
        # Bytes of the inputs of all blocks, and of what their norm keeps: its input and its output before the weight, in fp32.
        return self.tokens * self.layers * self.layer_inputs * (self.compute_bytes + 2 * max(self.compute_bytes, 4))

    @property
    def _activation_bytes(self) -> int:
        # Beside others that keep the same, the last block has no window, or all blocks have one.
        is_own = self._inputs_alone or self.window_layers == self.layers
        return self._blocks_bytes + self._inputs_bytes + is_own * self._window_kept_bytes

    @property
    def _blocks_bytes(self) -> int:
        model, others = self.settings.model, self._other_blocks(self.layers - 1)
        if model.block_tile_tokens is not None:
            # Blocks with a window are computed without tiles.
            whole = self.backward_bytes if self.window is not None else 0
            return others + max(self.final_norm_bytes, self.tiled_block_bytes(model.block_tile_tokens), whole)
        if model.left_out(self.skipped):
            before = self._other_blocks(self.layers - 2) + self.backward_bytes if self.layers > 1 else 0
            return max(before, others + self.pruned_backward_bytes)
        if not model.recompute_elementwise:
            plain = max(self.backward_bytes, self.plain_flash_backward_bytes if self.flash else 0)
            return max(others + plain, 0 if model.mlp_tiles is None else self.norm_backward_bytes)
        return others + max(self.final_norm_bytes, self.backward_bytes)

    def _other_blocks(self, blocks: int) -> int:
        return self.kept_on_device(blocks) if self._inputs_alone else self.kept_of(blocks)

    def kept_on_device(self, blocks: int, beside: int = 0) -> int:
        model, whole = self.settings.model, self.kept_of(blocks)
        if model.in_flight is None:
            return whole
        return min(whole, (model.in_flight + beside) * self.kept_bytes + round(model.activation_offload_device_gb * 2**30))

    def kept_of(self, blocks: int) -> int:
        """Return the bytes that the last ``blocks`` blocks keep, without the block whose figures these are."""
        windows = 0 if self._inputs_alone else min(self.window_layers, blocks) * self._window_kept_bytes
        return windows + self._kept_of(blocks)

    def _kept_of(self, blocks: int) -> int:
        if self.local is not None:
            (count, last), *others = self.kinds
            before = sum(each * shapes.kept_bytes for each, shapes in others)
            return before + max(count - (self.layers - blocks), 0) * last.kept_bytes
        linear = max(min(self.linear_layers - self.is_linear, blocks), 0)
        if not linear or self._inputs_alone:
            return blocks * self.kept_bytes
        kinds = replace(self, is_linear=False), replace(self, is_linear=True)
        return (blocks - linear) * kinds[0].kept_bytes + linear * kinds[1].kept_bytes

    @property
    def kept_bytes(self) -> int:
        return self.input_bytes + self._recorded_bytes if self._inputs_alone else self.block_bytes

    @property
    def _recorded_bytes(self) -> int:
        # Bytes of a block's keys and values, or its states, from which the backward of open nodes starts.
        closes = self.forest is not None and self.forest.closes
        if self.is_linear:
            return self.segments * self.pair_bytes if closes else 0
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.compute_bytes if closes else 0

    @property
    def pair_bytes(self) -> int:
        """Bytes of a state and of the last inputs of the convolution, as answers read them in a block with a state."""
        if self.rule is None:
            return 0
        channels = 2 * self.rule.keys + self.rule.values
        return max(self.compute_bytes, 4) * self.rule.values * self.rule.key_dim + self.compute_bytes * TAIL * channels

    @property
    def keys(self) -> int:
        """K, the tokens whose keys attention reads: T, and those of the open path before them."""
        return self.tokens + (0 if self.forest is None else self.forest.read)

    def read_bytes(self, copies: int) -> int:
        """Return the bytes of ``copies`` tokens of keys, values and rotary tables, as a block copies them behind an open path."""
        return copies * 2 * (self.kv_heads + 1) * self.head_dim * self.compute_bytes

    @property
    def _inputs_alone(self) -> bool:
        model = self.settings.model
        return model.checkpointing is not None or model.block_tile_tokens is not None

    @property
    def states_bytes(self) -> int:
        """Bytes of the last block's output and of three states of the response tokens, which exist at the end of a forward."""
        output = self.input_bytes
        if self.forest is not None:
            # Only tokens that are read have an output, and a recomputed norm keeps a copy of its rows in place of it.
            kept = 0 if self.settings.model.recompute_elementwise else self.tokens - self.skipped
            output = kept * self.hidden * self.compute_bytes
        return output + 3 * self.responses * self.hidden * self.compute_bytes

    @property
    def unread_bytes(self) -> int:
        """Bytes that the last block of a known forest does not keep, because ``prune_last_block`` leaves tokens out of it."""
        if self.forest is None or self._inputs_alone or not self.settings.model.left_out(self.skipped):
            return 0
        queries = replace(self, tokens=self.tokens - self.skipped)
        extra = self.skipped * (self.hidden + 2 * self.kv_heads * self.head_dim) * self.compute_bytes
        return self.block_bytes - queries.block_bytes - extra

    @property
    def saved_bytes(self) -> int:
        tables = self.sequence_ranks * 2 * (self.head_dim + self._other_head_dim) * self.compute_bytes
        return self.kept_of(self.layers) + self.states_bytes + self.tokens * (tables + 8)

    @property
    def final_norm_bytes(self) -> int:
        # The final norm has response tokens only. The last block's kept tensors exist beside it.
        return self.kept_bytes + 3 * self.responses * self.hidden * self.compute_bytes + self._at_norm(self.responses)

    @property
    def backward_bytes(self) -> int:
        model, wide, inputs = self.settings.model, self.tokens * self.mlp * self.compute_bytes, self.input_bytes
        if model.recompute_elementwise:
            return max(self.mlp_bytes(self.tokens), self.attention_backward_bytes)
        at_experts = 0 if self.mixture is None else self.block_bytes + self._experts_backward_bytes(self.mixture)
        if self.is_linear and self.rule is not None:
            channels = 2 * self.rule.keys + self.rule.values
            gradients = self.tokens * self.compute_bytes * (2 * self.hidden + channels + 2 * self.rule.values)
            at_rule = self.block_bytes - self.tokens * self._kept_gates + gradients + self.rule_bytes
            at_mlp = self.block_bytes + (2 if model.mlp_tiles is None else 6) * wide + 2 * inputs
            return max(at_rule, at_experts or at_mlp)
        if self.mixture is not None and not self._is_beside:
            return at_experts
        if model.mlp_tiles is None:
            return max(at_experts, self.block_bytes + 2 * wide + 2 * inputs + self._tables_of_others)
        at_mlp = self.block_bytes + self._tables_of_others + 6 * wide + 2 * inputs - self.tiled_bytes(model.mlp_tiles)
        return max(at_experts, at_mlp)

    @property
    def _is_beside(self) -> bool:
        # Whether blocks have experts beside an MLP.
        return self.mixture is not None and self.mixture.beside

    @property
    def _keeps_gates(self) -> bool:
        # Whether experts keep the outputs of gate and up. In a checkpointed block they compute them again.
        model = self.settings.model
        return model.mlp_tiles is None and not (model.recompute_elementwise and model.checkpointing == "full")

    @property
    def pruned_backward_bytes(self) -> int:
        """Peak bytes at the last block and the final norm, if this block computes only keys and values for U tokens."""
        b, query, key, model = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.settings.model
        left = self.tokens - self.skipped
        queries = replace(self, tokens=left, skipped=0, suffix_tokens=min(self.suffix_tokens, left), forest=None)
        if not model.recompute_elementwise:
            # The block's norm has all tokens, and the rows that queries read are copied. Norms of queries and keys keep nothing.
            norm = self._norm_width * self.skipped * self.hidden + b * queries.tokens * self.hidden
            return queries.backward_bytes + norm + 2 * b * self.skipped * key - (4 + b) * queries.tokens * (query + key)
        extra = b * self.skipped * (self.hidden + 2 * key)  # inputs, keys and values of the U tokens
        normal = self.final_norm_bytes if model.checkpointing is not None else extra + queries.final_norm_bytes
        # For one key head: rotated keys, and gradients of keys and values, over all tokens instead of those with queries.
        head = b * self.head_dim * (3 * self.skipped + 4 * queries.tokens)
        call = b * (3 * self.heads // self.kv_heads * self.head_dim) * max(self.skipped - queries.tokens, 0)
        # Flash kernels compute all heads at once, and gradients of keys and values for all tokens.
        flash = queries.flash_backward_bytes(self.tokens) + 2 * b * self.skipped * key if self.flash else 0
        attention = flash or queries.attention_backward_bytes + head + call
        if self._is_masked(queries.tokens, self.tokens):
            attention = queries._at_attention + self._masked_backward_bytes(queries.tokens, self.tokens)
        mlp = queries.mlp_bytes(self.tokens if self.recomputes_mlp else queries.tokens)
        mlp += queries.input_bytes if self.recomputes_mlp else 0  # the MLP keeps a copy of the rows that it reads
        # At the backward of the key and value projections: the block's input and its gradient, the gradients of keys and values,
        # rotary tables, and one tile of the norm.
        tile = -(-self.tokens // -(-self.tokens // PRODUCT_ROWS[self.device]))
        last = b * (self.tokens * 2 * (self.hidden + key + self.head_dim) + (tile + 2 * queries.tokens) * self.hidden)
        return max(normal, extra + max(mlp, attention), last + self._at_norm(tile))

    def tiled_block_bytes(self, tile: int) -> int:
        """Return the peak bytes of a block's backward that runs over tiles of ``tile`` tokens.

        These tensors have all tokens: the block's input, the gradient of its output, rotary tables, keys and values, and their
        gradients in fp32. All weights have a gradient sum. All other tensors have one tile, at the MLP or at the attention.
        """
        if self.is_linear:
            return self._tiled_linear_bytes(tile)
        b, wide = self.compute_bytes, max(self.compute_bytes, 4)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        left_out = self.settings.model.left_out(self.skipped)
        tokens, queries = self.tokens, self.tokens - left_out
        # In a pruned block the gradient of the input needs a separate buffer.
        whole = tokens * (b * (self.hidden + 2 * self.head_dim) + 2 * key * (b + wide))
        whole += b * self.hidden * (queries + (tokens if left_out else 0))
        rows = min(tile, queries)
        part = min(rows, -(-queries // (self.settings.model.mlp_tiles or 1)))
        sums = self._summed_params * (b if rows == queries else wide)
        product = 0 if rows == queries else self._added_bytes(self.mlp)
        gates = 2 * query if self.gated else 0  # the gates, and the gated output
        extra = rows * (2 * self.hidden + 3 * query + gates)
        at_mlp = b * (extra + part * (self.hidden + 3 * self.mlp)) + self._at_gate(part) + product
        at_attention = b * rows * (self.hidden + 5 * query + 6 * query // self.kv_heads + gates)
        rounded = self._rounded_bytes(query) if rows < queries else 0
        return whole + sums + self.adapters_cast + max(at_mlp, at_attention, rounded)

    def _tiled_linear_bytes(self, tile: int) -> int:
        """As :meth:`tiled_block_bytes`, for a block with a state.

        The block's input, the gradient of its output and rotary tables have all tokens. What a tile hands on is a state in fp32
        and the last inputs of the convolution, and both have a gradient in fp32.
        """
        assert self.rule is not None
        b, wide, rule, rows = self.compute_bytes, max(self.compute_bytes, 4), self.rule, min(tile, self.tokens)
        channels, several = 2 * rule.keys + rule.values, rows < self.tokens
        # One path crosses a border. Its prompt's state is handed on too if other answers follow.
        handed = (-(-self.tokens // tile) - 1) * (1 if self.segments <= 2 else 2)
        pair = 2 * wide * rule.values * rule.key_dim + (b + wide) * TAIL * channels
        whole = b * self.tokens * 2 * (self.hidden + self.head_dim) + handed * pair
        part = min(rows, -(-self.tokens // (self.settings.model.mlp_tiles or 1)))
        sums = self._summed_params * (wide if several else b)
        product = self._added_bytes(self.mlp) if several else 0
        one = replace(self, tokens=rows)
        kept = b * rows * (self.hidden + channels + 2 * rule.values + 2 * rule.value_heads) + one.border_bytes
        at_mlp = b * (rows * (self.hidden + rule.values) + part * (self.hidden + 3 * self.mlp)) + self._at_gate(part) + product
        at_rule = b * rows * (channels + 2 * rule.value_heads) + one.rule_bytes
        rounded = self._rounded_bytes(channels) if several else 0
        return whole + sums + self.adapters_cast + max(kept + max(at_mlp, at_rule), rounded)

    @property
    def border_bytes(self) -> int:
        """Bytes of the states before each batch of chunks, in fp32 or wider."""
        assert self.rule is not None
        most = 0
        for size, _ in self._chunks:
            # A state is kept if chunks follow. Each round has a chunk per row, and a batch has whole rounds if one has room.
            rows, followed = self._rows(size), self.tokens // size + self._rows(size)
            rounds = max(self._most_chunks(size) // rows, 1)
            most = max(most, min(-(-followed // (rounds * rows)) * rows, followed) + 1)
        return max(self.compute_bytes, 4) * self.rule.values * self.rule.key_dim * most

    @property
    def rule_bytes(self) -> int:
        """Temporary bytes of the backward of the rule: tensors of one batch of chunks, and gradients of the last inputs."""
        assert self.rule is not None
        channels = 2 * self.rule.keys + self.rule.values
        most = max(
            min(chunks, self._most_chunks(size)) * self.rule.chunk_elements(size)
            + (self.tokens // size + self._rows(size)) * TAIL * channels
            + 2 * self._rows(size) * self.rule.values * self.rule.key_dim
            for size, chunks in self._chunks
        )
        return max(self.compute_bytes, 4) * most

    def _rows(self, size: int) -> int:
        # Rows that have a further chunk at once. A prompt's answers begin when its own last chunk is done.
        rows = self.segments // 2 if self.forest is None else self.segments
        return max(min(rows, self.tokens // size), 1)

    @property
    def _chunks(self) -> list[tuple[int, int]]:
        # (tokens of a full chunk, most chunks) for each size that may be taken. Long segments have large chunks.
        large, small = SIZES
        num_small, num_large = (-(-self.tokens // size) + self.segments - 1 for size in (small, large))
        if self.tokens >= 5 * large * self.segments:
            return [(large, num_large)]
        # The larger one is not taken if it pads much more.
        return [(small, num_small), (large, min(num_large, math.ceil(LARGER * small / large * num_small)))]

    def _most_chunks(self, size: int) -> int:
        assert self.rule is not None
        return self.rule.most_chunks(size, torch.device(self.device))

    @property
    def recomputes_mlp(self) -> bool:
        model = self.settings.model
        if self._is_beside:
            return False
        return model.recompute_elementwise and (model.checkpointing == "full" or model.mlp_tiles is not None)

    def mlp_bytes(self, cut: int) -> int:
        """Return the bytes of a block with recomputed norms at the backward of its MLP.

        They include the weight gradient that is summed over tiles. When it becomes the gradient of its parameter, it counts as
        another kind of bytes.

        ``cut``: the number of tokens from which the number of tiles follows.
        """
        if self.mixture is not None:
            kept = self.attention_bytes if self.recomputes_mlp else self.block_bytes
            # An MLP beside the experts has less in its backward, which has no gradient of so many weights. Its gradient and that
            # of the sum that both read wait meanwhile.
            return kept + self._experts_backward_bytes(self.mixture) + 2 * self.input_bytes * self._is_beside
        b, inputs, least = self.compute_bytes, self.input_bytes, self.settings.model.mlp_tiles or 1
        tiles = max(-(-cut // PRODUCT_ROWS[self.device]), least if self.recomputes_mlp else 1)
        rows = round(self.tokens / tiles)
        normal, wide = (rows * size * b for size in (self.hidden, self.mlp))
        gate, norm = self._at_gate(rows), self._at_norm(rows)
        whole = self.hidden * self.mlp * (b if tiles == 1 else max(b, 4))
        if self.recomputes_mlp:
            at_gate, at_norm = 3 * wide + normal + whole * (1 if tiles == 1 else 3), 2 * wide + normal + 3 * whole
            # With norms of outputs also attention's output before its norm, and the output of a tile of the MLP.
            beside, at_gate = (inputs, at_gate + normal) if self.post_norms else (0, at_gate)
            added = 0 if tiles == 1 else self._added_bytes(self.mlp)
            return self.attention_bytes + beside + 2 * inputs + max(at_gate + max(gate, added), at_norm + norm)
        # The gradients of gate and up overwrite gate and up.
        return self.block_bytes + inputs + max(wide + whole + gate, inputs + normal + 2 * whole + norm)

    def _experts_backward_bytes(self, mixture: MixtureSize) -> int:
        """Return the bytes of a mixture's backward beside what its block keeps, for tokens that are spread evenly.

        They include the gradients of the experts' weights, until these become the gradients of their parameters. Beside adapters
        experts are frozen. A shared one has adapters, and others have if the settings say so.
        """
        rank = self.settings.model.lora_rank
        b, h, width, wide = self.compute_bytes, self.hidden, mixture.width, max(self.compute_bytes, 4)
        tile = self._expert_rows(mixture)
        # The gradient of the output, the normed input and the sum of its gradient; probabilities; which row is where.
        tokens = self.tokens * (h * (2 * b + wide) + 4 * mixture.experts + 32 * mixture.top_k)
        both = 0 if self._keeps_gates else 2 * width * b
        # The value before down and its gradient, and their product in fp32.
        at_weights = tile * (2 * h * b + both + width * (2 * b + (4 if b == wide else 8)))
        at_input = tile * (h * (2 * b + (0 if b == wide else wide)) + both)
        # At the shared expert, of which gate and up are computed again, and then its value: at its output and a product with that
        # in fp32, or at the gradients of gate and up. Sums of the gradients of weights are in fp32.
        part, shared = self._shared_rows, mixture.shared
        at_output = part * h * (b + (4 if b == wide else 8))
        sums = 3 * wide * (rank * (h + shared) if rank else h * shared)
        at_shared = 3 * shared * part * b + sums + max(at_output, self._at_gate_of(part * shared))
        if not rank:
            return tokens + 3 * mixture.experts * width * h * b + max(at_weights, at_input, at_shared if shared else 0)
        # Gradients of adapters of experts, which one tile alone adds behind the first moment. Then there is a thin product too.
        of_experts = self._expert_adapter_sums(mixture)
        at_weights += of_experts if tile < self.tokens * mixture.top_k else 0
        at_down = tile * (2 * h * b + both + 2 * width * b + rank * b) + of_experts
        rest = max(at_input, at_shared if shared else 0) + of_experts
        return tokens + self.adapters_cast + max(at_weights, at_down if of_experts else 0, rest)

    @property
    def adapters_cast(self) -> int:
        """Bytes of copies of a block's adapters of experts in the dtype of compute, if they rest in another."""
        of_block = -(-expert_adapter_params(self) // self.layers)
        return of_block * self.compute_bytes if self.master_bytes != self.compute_bytes else 0

    def _expert_adapter_sums(self, mixture: MixtureSize) -> int:
        # Bytes of the gradients of a block's adapters of experts. A kernel for all experts of a tile gives one beside its sum.
        of_block, b = -(-expert_adapter_params(self) // self.layers), self.compute_bytes
        widest = mixture.experts * self.settings.model.lora_rank * max(self.hidden, 2 * mixture.width)
        found = b * widest if of_block and self.device == "cuda" and b == 2 else 0
        return of_block * max(self.master_bytes, b) + found

    @property
    def linear_forward_bytes(self) -> int:
        """Bytes of a block with a state at its rule, in a pass without gradients, with its input and rotary tables."""
        assert self.rule is not None
        channels = 2 * self.rule.keys + self.rule.values
        own = self.hidden + channels + 2 * (self.rule.values + self.rule.value_heads + self.head_dim)
        return self.compute_bytes * self.tokens * own + self.rule_bytes

    def mixture_forward_bytes(self, mixture: MixtureSize) -> int:
        """As :attr:`linear_forward_bytes`, at the experts of a block, if each expert gets as many tokens."""
        b, h, tokens = self.compute_bytes, self.hidden, self.tokens
        tile = self._expert_rows(mixture)
        routes = tokens * (4 * mixture.experts + 32 * mixture.top_k)
        own = tokens * (b * (4 * h + 2 * self.head_dim) + 4 * h)

        def at_gate(rows: int, width: int) -> int:
            return rows * (b * (2 * h + 3 * width) + 4 * h) + self._at_gate_of(rows * width)

        at_shared = at_gate(self._shared_rows, mixture.shared) if mixture.shared else 0
        return own + routes + self.adapters_cast + max(at_gate(tile, mixture.width), at_shared)

    def _expert_rows(self, mixture: MixtureSize) -> int:
        # Rows of a tile of experts.
        rows, least = self.tokens * mixture.top_k, self.settings.model.mlp_tiles or 1
        limit = min(-(-rows // least), PRODUCT_ROWS[self.device])
        return min(max(limit, -(-rows // mixture.experts)), rows)

    @property
    def _shared_rows(self) -> int:
        # Rows of a tile of the shared expert.
        return -(-self.tokens // max(-(-self.tokens // PRODUCT_ROWS[self.device]), self.settings.model.mlp_tiles or 1))

    @property
    def forward_bytes(self) -> int:
        """Bytes of a block with recomputed norms in a pass over a forest without gradients, with its input and its output.

        The highest moment is at the MLP, at attention, or where keys are copied behind those of an open path.
        """
        assert self.forest is not None
        b, query, key, tokens = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.tokens
        query_elements, tables = self.heads // self.kv_heads * self.head_dim, 2 * self.head_dim
        rows = -(-tokens // max(-(-tokens // PRODUCT_ROWS[self.device]), self.settings.model.mlp_tiles or 1))
        wide = (4 if self.settings.model.lora_rank else 2) * self.mlp
        tile = 4 * min(rows * self.mlp, TILE_ELEMENTS["cpu"]) if self.device == "cpu" else self._at_gate(rows)
        narrow = (2 if self.post_norms else 1) * self.hidden
        at_mlp = b * (tokens * (3 * self.hidden + tables) + rows * (narrow + wide)) + tile
        at_once = query + key if self.flash else query_elements + self.head_dim
        own = tokens * (self.hidden + query * (3 if self.gated else 1) + 2 * key + tables)
        read = self.read_bytes(self.keys) if self.forest.read else 0
        call = max(self.forest.run, self.forest.span[0]) * query_elements
        if self.device == "cuda":
            # Both sides of a round are gathered.
            queries, keys = self.forest.round
            call = max(2 * queries * query + 2 * keys * key, 4 * self.keys * key * self.slides)
        sums = max(b, 4) if self.forest.sums_many else b
        at_attention = b * (own + tokens * at_once + self.forest.read * self.head_dim) + sums * (tokens * query + call) + read
        linear = self.linear_forward_bytes if self.linear_layers else 0
        return max(at_mlp, at_attention, b * own + self.read_bytes(self.forest.copied), linear)

    @property
    def graph_bytes(self) -> int:
        """Bytes of blocks that run as CUDA graphs over T tokens, which stay: ``model/captured_block.py``.

        They are the weights and gradients of a block, the tensors between graphs and attention, and on a GPU the memory of the
        graphs: the most that one of the pieces of a block allocates.
        """
        b, h, wide = self.compute_bytes, self.hidden, self.mlp
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        columns = query + 2 * key
        fixed = b * (2 * self.block_params + self.tokens * (2 * h + columns + query))
        if self.device == "cpu":
            return fixed
        tiles = max(-(-self.tokens // PRODUCT_ROWS[self.device]), self.settings.model.mlp_tiles or 1)
        rows = -(-self.tokens // tiles)
        project = b * self.tokens * (h + columns)
        finish = b * (self.tokens * 2 * h + rows * (h + 2 * wide))
        # Sums over tiles are in fp32 or wider, and a product is added to one of them.
        sums, added = (b, 0) if tiles == 1 else (max(b, 4) * 3, self._added_bytes(wide))
        at_gate = b * (self.tokens * 2 * h + rows * (h + 3 * wide)) + sums * h * wide + added + self._at_gate(rows)
        gradients = b * h * (3 * wide + query) + (0 if tiles == 1 else max(b, 4) * 3 * h * wide)
        at_output = b * self.tokens * (2 * h + query) + gradients
        return fixed + max(project, finish + self._at_norm(rows), at_gate, at_output)

    def _rounded_bytes(self, columns: int) -> int:
        # Bytes of a gradient beside all fp32 sums, which are rounded one by one. Gate and up of all experts have one sum.
        widest = self.mlp if self.mixture is None else 2 * self.mixture.experts * self.mixture.width
        return 0 if self.compute_bytes >= 4 else self.compute_bytes * self.hidden * max(widest, columns)

    def _added_bytes(self, columns: int) -> int:
        # Bytes of a product in half precision, which is added to the fp32 sum of a weight's gradient.
        return 0 if self.compute_bytes >= 4 else self.compute_bytes * min(self.hidden * columns, SUM_ELEMENTS)

    def _at_gate(self, rows: int) -> int:
        # Temporary bytes at the gradients of `rows` rows of gate and up: an activation and a product of one tile.
        return self._at_gate_of(rows * self.mlp)

    def _at_gate_of(self, elements: int) -> int:
        return self._elementwise_bytes(elements, NARROW_TILE_ELEMENTS, 2 * self.compute_bytes)

    def _at_norm(self, rows: int) -> int:
        # Temporary fp32 bytes at the gradient of a norm over `rows` rows: two tensors of one tile, in half precision three.
        return self._elementwise_bytes(rows * self.hidden, TILE_ELEMENTS, 4 * (2 if self.compute_bytes == 4 else 3))

    def _elementwise_bytes(self, elements: int, tile: dict[str, int], per_element: int, on_cpu: int = 3) -> int:
        # ``on_cpu``: number of fp32 tensors of a tile on a CPU.
        if self.device == "cpu":
            return on_cpu * 4 * min(elements, TILE_ELEMENTS["cpu"])
        return 0 if self.compiles else min(elements, tile[self.device]) * per_element

    @property
    def attention_bytes(self) -> int:
        if self.is_linear:
            return self._linear_bytes
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # The inputs of attention and MLP, queries, keys, values, and the attention's output. The norms are recomputed.
        gates = query if self.gated else 0
        pairs = (3 if self.v_norm else 2) * key  # the norm of values keeps them too
        kept = 3 * query if self.is_reading else 2 * query + pairs  # rotated queries beside the others, but no keys
        kept += 2 * self.hidden + gates + (2 * self.hidden + 3 * self.layer_inputs if self.layer_inputs else 0)
        own = self.tokens * self.compute_bytes * kept + self.exchanged_bytes
        return own + (self.read_bytes(self.keys) if self.keys > self.tokens else 0)

    @property
    def _linear_bytes(self) -> int:
        # The inputs of the rule's norm and of the MLP, the rule's inputs and outputs, the gates z, and states.
        assert self.rule is not None
        channels = 2 * self.rule.keys + self.rule.values
        own = 2 * self.hidden + channels + 2 * self.rule.values + 2 * self.rule.value_heads
        return self.tokens * self.compute_bytes * own + self.border_bytes

    @property
    def _linear_backward_bytes(self) -> int:
        """Bytes of a block with a state at the highest moment of the backward before its MLP.

        - At the gated norm, whose gradients overwrite its inputs: a tile of its output, and the gradient of ``out_proj``.
        - At the rule: gradients of its inputs, and temporary tensors.
        - At the block's norm: gradients of all four projections and of the input, a tile of the norm, and gradients of weights.
        """
        assert self.rule is not None
        b, rule, tokens = self.compute_bytes, self.rule, self.tokens
        channels, values = 2 * rule.keys + rule.values, rule.values
        tiles = -(-tokens // PRODUCT_ROWS[self.device])
        rows, sums = -(-tokens // tiles), b if tiles == 1 else max(b, 4)
        tables = b * tokens * 2 * self.head_dim
        gated = self._elementwise_bytes(rows * values, TILE_ELEMENTS, 4 * (6 if b == 4 else 8), 8)
        added = 0 if tiles == 1 else self._added_bytes(max(values, channels))
        at_norm_of_heads = self.attention_bytes + b * rows * values + sums * self.hidden * values + max(gated, added)
        at_rule = self.attention_bytes + b * tokens * (channels + 2 * rule.value_heads) + self.rule_bytes
        last = b * (tokens * (3 * self.hidden + channels + values + 2 * rule.value_heads) + rows * self.hidden)
        last += sums * self.hidden * (channels + values) + max(self._at_norm(rows), added)
        return tables + max(at_norm_of_heads, at_rule, last)

    @property
    def attention_backward_bytes(self) -> int:
        """Bytes of a block with recomputed norms at the backward of its attention, with all that the block keeps.

        Flash kernels compute all heads at once. On a GPU the memory-efficient kernel computes as many key heads as fit in a tile.
        On a CPU the kernel computes one key head at a time, or few tokens of all heads in one call with a mask.
        """
        if self.is_linear:
            return self._linear_backward_bytes
        if self.flash:
            return self.flash_backward_bytes(self.keys)
        query, query_elements = self.heads * self.head_dim, self.heads // (self.kv_heads * self.key_copies) * self.head_dim
        head = self.tokens * 2 * query_elements + self.keys * 3 * self.head_dim
        summed = self.head_dim if query_elements > self.head_dim else 0
        if self.forest is None:
            call = max(self.suffix_tokens, self.tokens - self.suffix_tokens) * (3 * query_elements + summed)
        else:
            queries, keys = self.forest.span
            call = max(
                self.forest.run * (3 * query_elements + summed), queries * query_elements + keys * (2 * query_elements + summed)
            )
        held = self.compute_bytes * self.sequence_ranks * (head + call) + self._float_bytes(query_elements, summed)
        held = max(held, self._window_gradient_bytes)
        if self.device == "cuda":
            held = self._efficient_backward_bytes(query_elements)
        elif self._is_masked(self.tokens, self.keys):
            held = self._masked_backward_bytes(self.tokens, self.keys)
        # With sequence parallelism these key heads have the tokens of all devices. Two buffers exchange the gradient's heads
        # before.
        exchange = 0 if self.sequence_ranks == 1 else 2 * self.tokens * query
        return self._at_attention + max(held, self.compute_bytes * exchange)

    @property
    def _slides_by_torch(self) -> bool:
        # Whether torch's SDPA computes blocks with a window on a CPU, and autograd keeps its tensors.
        return self.window is not None and self.device == "cpu" and not self.is_linear

    @property
    def _window_kept_bytes(self) -> int:
        """Bytes that autograd keeps of a block with a window on a CPU, beside :attr:`attention_bytes`.

        Rotated queries and keys; for each pair of a token and a token of its longest row an element of the mask; outputs, and
        log-sum-exps. Answers that share a prompt also have copies of its last W - 1 keys and values, and fp32 copies of the three
        inputs in half precision. A sink is a key of its own, and heads have :data:`HEAD_MULTIPLE` more elements for it.
        """
        if not self._slides_by_torch:
            return 0
        assert self.window is not None
        b, query, key, tokens = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.tokens
        wide, more = max(b, 4) if self.slides else b, HEAD_MULTIPLE if self.sinks else 0
        wide_query, wide_key = query + self.heads * more, key + self.kv_heads * more
        # With sinks there are no norms of queries and keys, which would keep them before they are rotated too.
        rotated = 0 if self.sinks else b * tokens * (query + key)
        kept = rotated + wide * tokens * (self.longest + 1 + wide_query) + 4 * tokens * self.heads
        if wide > b:
            kept += wide * tokens * (query + 2 * key)
        if self.sinks:
            kept += wide * tokens * wide_query
        if self.sinks or self.slides:
            answers = self.segments if self.forest is not None else -(-self.segments // 2)
            copied = answers * (self.window - 1) if self.slides else 0
            kept += 2 * wide * (tokens + copied + self.segments) * wide_key
        return kept

    @property
    def window_forward_bytes(self) -> int:
        """Bytes of such a block's attention in a pass without gradients: copies of its inputs, outputs, and one row's mask."""
        if not self._slides_by_torch:
            return 0
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = max(self.compute_bytes, 4) if self.slides else self.compute_bytes
        copies = query + 2 * key if wide > self.compute_bytes else 0
        # Positions are int64, and the mask has two bool parts.
        return wide * self.tokens * (2 * query + copies) + (16 + wide) * self.longest**2

    @property
    def _window_gradient_bytes(self) -> int:
        # Gradients of such a block: of keys and values, each added to those of later rows; of the longest row; and in half
        # precision of the fp32 output.
        if not self._slides_by_torch:
            return 0
        b, query, key = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.slides:
            return max(b, 4) * 4 * self.tokens * key + (4 * self.tokens * query if b < 4 else 0)
        return b * (3 * self.tokens * key + self.longest * (query + 2 * key))

    def _float_bytes(self, query_elements: int, summed: int) -> int:
        # In half precision a CPU computes parts that are merged in fp32: copies of the gradient, the queries, the output, keys
        # and values, and gradients that are twice as wide as those in the compute dtype.
        if self.device != "cpu" or self.compute_bytes >= 4 or not (self.suffix_tokens or self.forest):
            return 0
        per_query, per_key = 4 * query_elements, 2 * query_elements + summed
        queries = keys = max(self.suffix_tokens, self.tokens - self.suffix_tokens)
        if self.forest is not None:
            queries, keys = max(self.forest.run, self.forest.span[0]), max(self.forest.run, self.forest.span[1])
        wider = (4 - self.compute_bytes) * (queries * query_elements + keys * per_key)
        return self.sequence_ranks * (wider + 4 * (queries * (per_query - query_elements) + keys * 2 * self.head_dim))

    def _is_masked(self, queries: int, keys: int) -> bool:
        ranks, several = self.sequence_ranks, self.kv_heads * self.key_copies > self.sequence_ranks or self.segments > 1
        return several and ranks * queries * keys * self.heads * self.head_dim <= MASKED_PRODUCTS[self.device]

    def _masked_backward_bytes(self, queries: int, keys: int) -> int:
        """Return the bytes that the backward of attention in one call with a mask allocates, in fp32 or wider.

        Queries, rotated; keys and values, which are repeated for query heads; the gradients of all three, and of keys summed over
        query heads; in half precision also wide copies of the output and of its gradient, and otherwise the rotated keys, which
        are in one tensor with the queries. The mask has an element per pair.
        """
        wide, ranks, kv_heads = max(self.compute_bytes, 4), self.sequence_ranks, self.kv_heads * self.key_copies
        query, key = self.heads * self.head_dim, kv_heads * self.head_dim
        per_key = 4 * query + key if self.heads > kv_heads else 3 * query
        beside = key if self.heads > kv_heads and queries == keys else 0
        copies = beside if self.compute_bytes == wide else 2 * query
        return wide * (queries * (2 * query + copies) + keys * per_key + (ranks * queries) * (ranks * keys))

    def efficient_heads(self) -> int:
        kv_heads, ranks = self.kv_heads * self.key_copies, self.sequence_ranks
        query_elements = self.heads // kv_heads * self.head_dim
        return key_heads_at_once(ranks * self.tokens * query_elements, kv_heads // ranks, ATTENTION_ELEMENTS["cuda"])

    def _efficient_backward_bytes(self, query_elements: int) -> int:
        """Return the bytes that the backward of memory-efficient attention allocates for the key heads of one call.

        - For all tokens: rotated queries and keys, and gradients, unless one call computes all gradients.
        - Per call: keys and values that are repeated for the query heads, if the call has several key heads; columns of the
          output and of its gradient, if the call does not have all key heads; gradients of the queries, and of keys and values
          for each query head; a workspace with the gradient of the queries in fp32, in which each sequence is as long as the
          longest.

        Answers that share a prompt have a separate call. Source: ``_efficient_attention_backward`` in
        ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``.

        ``query_elements``: elements per token of the query heads that share one key head.
        """
        b, tokens, key = self.compute_bytes, self.sequence_ranks * self.tokens, self.head_dim
        heads, answers, tile = self.efficient_heads(), self.sequence_ranks * self.suffix_tokens, ATTENTION_ELEMENTS["cuda"]
        repeated = 2 * query_elements if heads > 1 and query_elements > key else 0
        columns = 2 * query_elements if heads * self.sequence_ranks < self.kv_heads * self.key_copies else 0
        read = tokens - answers if self.forest is None else self.sequence_ranks * self.forest.round[1]
        prompts, keys, call_width = read, self.sequence_ranks * self.keys, repeated + columns + 3 * query_elements

        def workspace(rows: int) -> int:
            exact = rows * heads * query_elements
            return 4 * max(exact, min(self.segments * exact, tile))

        gradients = tokens * query_elements + keys * 2 * key
        rows = max(answers, prompts) if answers else min(tokens, tile // (heads * query_elements))
        first = max(tokens * call_width, gradients + rows * call_width if self.segments > 1 else 0)
        second = gradients + prompts * (repeated + 2 * query_elements) + answers * 4 * query_elements if answers else 0
        turned = tokens * query_elements + keys * key
        return max(b * heads * (turned + first) + workspace(tokens), b * heads * (turned + second) + workspace(answers))

    @property
    def _at_attention(self) -> int:
        # Bytes of a block with recomputed norms when the backward of its attention begins.
        query, tables = self.heads * self.head_dim, 2 * self.head_dim
        # A gradient has replaced the MLP's input. The attention's output has a gradient too, and rotary tables have two halves.
        # With sequence parallelism the input of the output projection is freed already.
        gone = 0 if self.sequence_ranks == 1 else query
        return self.attention_bytes + self.tokens * self.compute_bytes * (query + tables - gone) + self._tables_of_others

    @property
    def flash(self) -> bool:
        named = self.settings.model.attn_implementation in ("auto", "flash_attention_2")
        named = named and self.head_dim <= LARGEST_FLASH_HEAD
        return named and self.device == "cuda" and self.compute_bytes == 2

    def flash_backward_bytes(self, keys: int) -> int:
        """Return the bytes of a block with recomputed norms at the backward of flash attention over ``keys`` tokens.

        In addition to what the block keeps, there are rotated queries and keys, the gradients of queries, keys and values, and
        the kernel's buffers. Answers that share a prompt attend to it in a second call, with gathered inputs. Source:
        ``mha_varlen_bwd`` in ``csrc/flash_attn/flash_api.cpp`` of flash-attn 2.8; torch has it as
        ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``. It allocates ``dq_accum`` [T + 128 n, H, D rounded up
        to 32, or to 64 above 128] and ``softmax_d`` [H, T + 128 n], fp32 both, and with fewer key heads ``dk_expanded`` and
        ``dv_expanded`` [T, H, D].
        """
        query, key, b = self.heads * self.head_dim, self.kv_heads * self.key_copies * self.head_dim, self.compute_bytes
        return self._at_attention + b * (self.tokens * query + keys * key) + self._flash_calls(keys)

    @property
    def plain_flash_backward_bytes(self) -> int:
        b, mlp = self.compute_bytes, 4 * self.mlp if self.settings.model.mlp_tiles is None else 0
        freed = b * mlp + self._norm_width * self.hidden  # what the MLP and its norm kept
        gradients = b * (self.hidden + self.heads * self.head_dim)  # of the state between attention and MLP, and of the output
        # What the block keeps without its MLP, these gradients, and the kernel's buffers.
        return self.block_bytes + self.tokens * (gradients - freed) + self._flash_calls(self.tokens)

    def _flash_calls(self, keys: int) -> int:
        # Bytes of the larger of the two calls of flash attention's backward, with gradients that exist already.
        query, key, b = self.heads * self.head_dim, self.kv_heads * self.key_copies * self.head_dim, self.compute_bytes
        round_to = 32 if self.head_dim <= 128 else 64
        rounded = -(-self.head_dim // round_to) * round_to

        def kernel(at_queries: int, at_keys: int) -> int:
            made = b * (at_queries * query + 2 * at_keys * key)
            expanded = 2 * b * at_keys * query if self.heads > self.kv_heads else 0
            return made + expanded + 4 * (at_queries + 128 * self.segments) * self.heads * (rounded + 1)

        answers, prompts, wide = self.suffix_tokens, keys - self.suffix_tokens, b
        if self.forest is not None:
            (answers, prompts), wide = self.forest.round, max(b, 4) if self.forest.sums_many else b
        gradients = wide * (self.tokens * query + 2 * self.keys * key)
        shared = gradients + b * (3 * answers * query + 2 * prompts * key) + kernel(answers, prompts) if answers else 0
        slid = 0
        if self.slides:
            copied = 2 * self.keys
            made = b * (self.tokens * query + 2 * copied * key) + 4 * copied * key  # gradients, and those of keys again in fp32
            slid = 8 * self.keys * key + max(b * 2 * copied * key + kernel(self.tokens, copied), made)
        return max(kernel(self.tokens, self.tokens), shared, slid)

    @property
    def _norm_width(self) -> int:
        # Bytes that a norm keeps of an element without recompute_elementwise: its input in fp32, the input divided by its root
        # mean square, which norms by 1 + w keep in fp32, and its output, which the next product keeps.
        return 4 + max(self.compute_bytes, 4) * self.post_norms + self.compute_bytes * (1 if self.post_norms else 2)

    @property
    def _post_norm_width(self) -> int:
        # Of a norm of an output, which is added to the residual: nothing keeps what it returns.
        return (4 + max(self.compute_bytes, 4)) * self.post_norms

    @property
    def norm_backward_bytes(self) -> int:
        """Bytes of checkpointed blocks at the moment when the last block's backward reaches the norm of its queries."""
        b, query, key = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim
        others = self.kept_on_device(self.layers - 1, 1)
        kept = self._norm_width * (self.hidden + query + key) + b * (query + key)
        kept += self._post_norm_width * self.hidden
        passing = b * (self.hidden + 4 * query + 2 * key + 2 * self.head_dim)
        return others + self.tokens * (kept + passing) + b * (self.suffix_tokens * query + 2 * self.responses * self.hidden)

    def tiled_bytes(self, n: int) -> int:
        """Bytes that an MLP in ``n`` tiles saves at its backward, if its block is recomputed."""
        wide = self.mlp * self.compute_bytes
        return round(6 * self.tokens * wide * (1 - 1 / n) - 2 * self.hidden * wide - self.input_bytes * (1 + 1 / n))

    @property
    def _summed_params(self) -> int:
        # Parameters of a block whose gradients are sums over tiles: those in matrices, of a mixture those of all experts, and
        # beside a frozen base those of adapters.
        mixture = self.mixture
        if self.settings.model.lora_rank:
            return -(-adapter_params(self) // self.layers)
        idle = 0 if mixture is None else (mixture.experts - mixture.top_k * (not mixture.beside)) * mixture.width
        return self.matrix_params + 3 * idle * self.hidden

    @property
    def _kept_gates(self) -> int:
        # Bytes per token that a block keeps of its MLP if norms and activations are not recomputed, without the MLP's input.
        if self.settings.model.mlp_tiles is not None or (self._is_beside and not self._keeps_gates):
            return 0
        # Routed experts keep the outputs of gate and up alone. An MLP also keeps the activation and the product.
        experts = 0 if self.mixture is None else 2 * self.mixture.top_k * self.mixture.width
        own = 0 if self.mixture is not None and not self._is_beside else 4 * self.mlp
        return self.compute_bytes * (own // (2 if self.settings.model.recompute_elementwise else 1) + experts)

    @property
    def matrix_params(self) -> int:
        """Parameters of a block in matrices that a token is multiplied with."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        columns = 2 * (query + (0 if self.is_reading else key)) + (query if self.gated else 0) - self.keys_are_values * key
        if self.is_linear and self.rule is not None:
            columns = 2 * (self.rule.keys + self.rule.value_heads) + 3 * self.rule.values
        return self.hidden * (columns + 3 * self.mlp)

    @property
    def linear_params(self) -> int:
        if self.local is not None:
            return sum(count * shapes.matrix_params for count, shapes in self.kinds)
        linear = replace(self, is_linear=True).matrix_params if self.linear_layers else 0
        return (self.layers - self.linear_layers) * self.matrix_params + self.linear_layers * linear

    @property
    def _quantizes_experts(self) -> bool:
        # Those of our own decoder, whose last block is pruned or carries a state.
        return self.mixture is not None and (self.linear_layers > 0 or not self.ends_linear)

    @property
    def quantized_params(self) -> int:
        """Parameters of the blocks that are quantised: in linear layers but small gates, and in all experts."""
        return self._quantized(lambda width: width)

    def packed_bytes(self, kind: str) -> int:
        """Return the bytes of :attr:`quantized_params` in a format."""
        return self._quantized(lambda width: row_bytes(kind, width))

    def _quantized(self, row: Callable[[int], int]) -> int:
        # Sum over all rows of quantised matrices. ``row`` gives what a row of some width counts.
        if self.local is not None:
            return sum(count * shapes._quantized_block(row) for count, shapes in self.kinds)
        linear = replace(self, is_linear=True)._quantized_block(row) if self.linear_layers else 0
        dense, width = (0, 0) if self.mixture is None else self.mixture.dense
        others = dense * (self._mlp_rows(row, width) - self._quantized_mlp(row)) if dense else 0
        return (self.layers - self.linear_layers) * self._quantized_block(row) + self.linear_layers * linear + others

    def _quantized_block(self, row: Callable[[int], int]) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        pairs = 0 if self.is_reading else 1 if self.keys_are_values else 2
        columns, values = query * (2 if self.gated else 1) + pairs * key, query
        if self.is_linear and self.rule is not None:
            columns, values = 2 * (self.rule.keys + self.rule.values), self.rule.values
        return columns * row(self.hidden) + self.hidden * row(values) + self._quantized_mlp(row)

    def _quantized_mlp(self, row: Callable[[int], int]) -> int:
        mixture = self.mixture
        if mixture is None:
            return self._mlp_rows(row, self.mlp)
        experts = mixture.experts * self._mlp_rows(row, mixture.width) if self._quantizes_experts else 0
        shared = self.mlp if mixture.beside else mixture.shared
        return experts + (self._mlp_rows(row, shared) if shared else 0)

    def _mlp_rows(self, row: Callable[[int], int], width: int) -> int:
        return 2 * width * row(self.hidden) + self.hidden * row(width)

    @property
    def block_bytes(self) -> int:
        """A, the bytes that a Qwen3 block keeps for its backward."""
        b, query, key, model = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.settings.model
        if model.recompute_elementwise:
            # A norm of an output keeps this output, unless a tile computes it again.
            outputs = self.post_norms * self.input_bytes * (2 if model.mlp_tiles is None else 1)
            if self._is_beside:  # also the experts' output, and the sum of both; over tiles the MLP's output and its input too
                outputs += self.input_bytes * (2 if self._keeps_gates else 3 if model.mlp_tiles is None else 4)
            outputs += self.tokens * (0 if self.mixture is None else self.mixture.top_k)  # a byte for each expert of a token
            return self.attention_bytes + outputs + self.tokens * self._kept_gates
        if self.is_linear and self.rule is not None:
            # The gated norm keeps four tensors in fp32: its input, the norm, the gate and the gate's activation. In half
            # precision it keeps casts of the first and the third too.
            values, channels, casts = self.rule.values, 2 * self.rule.keys + self.rule.values, 2 if b < 4 else 0
            kept = (4 + 2 * b) * 2 * self.hidden + b * (channels + 2 * self.rule.value_heads) + (16 + (2 + casts) * b) * values
            return self.tokens * (kept + self._kept_gates) + self.border_bytes
        key = 0 if self.is_reading else key
        normed = 2 * self.hidden + query + (2 if self.v_norm else 1) * key
        norms = self._norm_width * normed + (4 if self._is_beside else 2) * self._post_norm_width * self.hidden
        gates = 3 * query if self.gated else 0  # the gates, their activation, and the gated output
        kept = norms + b * (query + key + gates + 3 * self.layer_inputs) + self._kept_gates
        kept += (self.hidden * (b + self._post_norm_width)) if self.layer_inputs else 0
        return self.tokens * kept + self.exchanged_bytes
