"""The symbols of the knobs' formulas: a model, the largest micro-batch of a pass, and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.config.schema import ActorRolloutRef


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
        """What blocks keep of a micro-batch when the backward of the last one's MLP runs, and what that holds beside it."""
        model = self.settings.model
        others = (self.layers - 1) * (self.input_bytes if model.enable_gradient_checkpointing else self.block_bytes)
        if model.enable_gradient_checkpointing and model.enable_activation_offload:
            others = min(self.layers - 1, model.activation_offload_in_flight) * self.input_bytes
        passing = 2 * self.tokens * self.mlp * self.compute_bytes + 2 * self.input_bytes
        whole = others + self.block_bytes + passing
        return max(whole - self.tiled_bytes, self.attention_bytes) if model.tiled_mlp.enabled else whole

    @property
    def attention_bytes(self) -> int:
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
        """A, of what a block of Qwen3 keeps for its backward; the first term is what its norms keep in fp32."""
        width_of_norms = 2 * self.hidden + (self.heads + self.kv_heads) * self.head_dim
        b, kept = self.compute_bytes, (self.kv_heads + self.heads) * self.head_dim + 4 * self.mlp
        return self.tokens * ((4 + 2 * b) * width_of_norms + b * kept)


def width(dtype: str) -> int:
    """Gives the bytes of an element by the settings' spelling of a dtype."""
    return 4 if dtype in ("fp32", "float32") else 2
