"""The symbols of the knobs' formulas: a model, the largest micro-batch of a pass, and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.config.schema import ActorRolloutRef

ROWS_OF_BACKWARD = 2048
"""Tokens at most in a tile of a block's products in backward, on a CPU; where it is more, it is still little beside a block."""

ELEMENTWISE_BYTES = 6 * 2**16 * 4
"""Of the tiles that elementwise statements of a backward hold at once, on a CPU."""


@dataclass(frozen=True)
class Shapes:
    """What a formula of *Saves* is evaluated on: a model, the largest micro-batch of a pass, and the settings."""

    settings: ActorRolloutRef
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    params: int
    """N, a tied matrix once."""
    block_params: int
    """N_l, of one decoder block."""
    tied: bool
    tokens: int
    """T, computed in the largest micro-batch."""
    responses: int
    """R, response tokens of that micro-batch."""
    branch_tokens: int = 0
    """Those of its computed tokens that are answers sharing a prompt."""

    @property
    def compute_bytes(self) -> int:
        """b, of an element of an activation."""
        return width(self.settings.actor.fsdp_config.dtype)

    @property
    def master_bytes(self) -> int:
        """b_w, of an element of the policy's masters and gradients."""
        return width(self.settings.actor.fsdp_config.model_dtype)

    @property
    def reference_bytes(self) -> int:
        """Bytes of the reference's parameters at rest; 0 where the policy without its adapters is the reference."""
        frozen = self.settings.ref.fsdp_config.model_dtype
        return 0 if self.settings.model.lora_rank else self.params * width(frozen)

    @property
    def state_bytes(self) -> float:
        """b_o, of both moments of a parameter; without a dtype of their own they have the masters'."""
        asked, coded = self.settings.actor.optim.state_dtype, {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}
        if asked is None:
            return 2.0 * self.master_bytes
        return 2 * coded[asked] if asked in coded else 2.0 * width(asked)

    @property
    def input_bytes(self) -> int:
        """X, of a block's input."""
        return self.tokens * self.hidden * self.compute_bytes

    @property
    def activation_bytes(self) -> int:
        """What blocks keep of a micro-batch when the last one's backward comes to its peak, and what that holds beside it."""
        model, wide, given = self.settings.model, self.tokens * self.mlp * self.compute_bytes, self.input_bytes
        others = (self.layers - 1) * (given if model.enable_gradient_checkpointing else self.block_bytes)
        if model.enable_gradient_checkpointing and model.enable_activation_offload:
            others = min(self.layers - 1, model.activation_offload_in_flight) * given
        if model.recompute_elementwise:
            kept = given if model.enable_gradient_checkpointing else self.block_bytes
            read = kept + 3 * self.responses * self.hidden * self.compute_bytes
            return others + max(read + ELEMENTWISE_BYTES, self.mlp_backward_bytes, self.attention_backward_bytes)
        if not model.tiled_mlp.enabled:
            return others + self.block_bytes + 2 * wide + 2 * given
        whole = others + self.block_bytes + 6 * wide + 2 * given
        return max(whole - self.tiled_bytes, self.norm_backward_bytes)

    @property
    def recomputes_mlp(self) -> bool:
        """Whether MLPs keep their input alone and are computed again in backward, tile by tile."""
        model = self.settings.model
        again = model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "full"
        return model.recompute_elementwise and (again or model.tiled_mlp.enabled)

    @property
    def mlp_backward_bytes(self) -> int:
        """What a block of recomputed norms holds, itself included, at the backward of its MLP: at the gate's or at the norm's.

        A weight's gradient that is summed over tiles is among it; once given to its parameter it is of another kind.
        """
        model, b, given = self.settings.model, self.compute_bytes, self.input_bytes
        least = model.tiled_mlp.num_shards if model.tiled_mlp.enabled else 1
        tiles = max(-(-self.tokens // ROWS_OF_BACKWARD), least if self.recomputes_mlp else 1)
        normal, wide = (round(self.tokens / tiles) * size * b for size in (self.hidden, self.mlp))
        whole = self.hidden * self.mlp * (b if tiles == 1 else max(b, 4))
        if self.recomputes_mlp:
            at_gate, at_norm = 3 * wide + normal + whole * (1 if tiles == 1 else 3), 2 * wide + normal + 3 * whole
            return self.attention_bytes + 2 * given + max(at_gate, at_norm) + ELEMENTWISE_BYTES
        # Gradients of gate and up take their place.
        return self.block_bytes + given + max(wide + whole, given + normal + 2 * whole) + ELEMENTWISE_BYTES

    @property
    def attention_bytes(self) -> int:
        """What a block of recomputed norms keeps but for its gate and up: two inputs, queries, keys, values and their output."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.tokens * self.compute_bytes * (2 * self.hidden + 2 * query + 2 * key)

    @property
    def attention_backward_bytes(self) -> int:
        """What a block of recomputed norms holds, itself included, at the backward of its attention, key head by key head."""
        query, each = self.heads * self.head_dim, self.heads // self.kv_heads * self.head_dim
        # The place of the MLP's input is the gradient's now; the output has a gradient, and rotary tables are of two halves.
        whole = self.attention_bytes + self.tokens * self.compute_bytes * (query + 2 * self.head_dim)
        head = self.tokens * (2 * each + 3 * self.head_dim)
        call = max(self.branch_tokens, self.tokens - self.branch_tokens) * (
            3 * each + (self.head_dim if each > self.head_dim else 0)
        )
        return whole + self.compute_bytes * (head + call)

    @property
    def norm_backward_bytes(self) -> int:
        """What is held, with checkpointing, when the backward of the last block comes to the norm of its queries."""
        model, b, query, key = self.settings.model, self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim
        ahead = model.activation_offload_in_flight + 1 if model.enable_activation_offload else self.layers
        others = min(self.layers - 1, ahead) * self.input_bytes
        kept = (4 + 2 * b) * (self.hidden + query + key) + b * (query + key)
        passing = b * (self.hidden + 4 * query + 2 * key + 2 * self.head_dim)
        return others + self.tokens * (kept + passing) + b * (self.branch_tokens * query + 2 * self.responses * self.hidden)

    @property
    def tiled_bytes(self) -> int:
        """What a tiled MLP saves at its own backward, where its block is computed again."""
        n, wide = self.settings.model.tiled_mlp.num_shards, self.mlp * self.compute_bytes
        return round(6 * self.tokens * wide * (1 - 1 / n) - 2 * self.hidden * wide - self.input_bytes * (1 + 1 / n))

    @property
    def linear_params(self) -> int:
        """Parameters of the linear layers of all blocks, which are what is quantised and what LoRA adapts."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def block_bytes(self) -> int:
        """A, of what a block of Qwen3 keeps for its backward."""
        b, query, key, model = self.compute_bytes, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.settings.model
        if model.recompute_elementwise:
            return self.attention_bytes + (0 if model.tiled_mlp.enabled else 2 * self.tokens * self.mlp * b)
        norms = (4 + 2 * b) * (2 * self.hidden + query + key)  # of each input, norm and output the first is fp32
        return self.tokens * (norms + b * (query + key + (0 if model.tiled_mlp.enabled else 4 * self.mlp)))


def width(dtype: str) -> int:
    """Gives the bytes of an element by the settings' spelling of a dtype."""
    return 4 if dtype in ("fp32", "float32") else 2
