"""How many bytes a run needs on one card, phase by phase, by arithmetic from a model's shapes and the settings."""

from dataclasses import dataclass

from verl_memopt.config.schema import Settings
from verl_memopt.memory.chunked_logprob import logit_bytes
from verl_memopt.memory.formulas import Shapes, width
from verl_memopt.memory.lora import adapter_params
from verl_memopt.memory.rollout_memory import sampler_bytes
from verl_memopt.rollout.engine import kv_bytes_per_token

MIB, GIB = 2**20, 2**30
CARDS = {"12g": 12_282, "16g": 15_360, "24g": 23_028, "32g": 32_607, "48g": 46_068, "80g": 81_559, "141g": 143_771}
"""Profile -> MiB that nvidia-smi reports for a card of that size; where cards differ, one of the smaller ones (an A10 at 24g)."""
OUTSIDE = 1.3 * GIB
"""Of a process beside torch's allocator: the CUDA context, libraries and what a sleeping engine keeps (reported by others)."""
GRAPHS = 0.7 * GIB
"""CUDA graphs of the engine, which do not sleep (0.4 to 1 GiB, reported by others); none with ``enforce_eager``."""
RESERVED = 1.14
"""What torch's allocator reserves for a byte that lives (simulated for a model of 0.6 billion parameters, checkpointed)."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a hub model's config.json.

    Attributes:
        params: as its model card says, to check the others.
        qkv_bias: projections of queries, keys and values have a bias (Qwen2).
        qk_norm: queries and keys of a head are normalised (Qwen3).
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    params: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def block_params(self):
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + key) + self.qkv_bias * (query + 2 * key) + self.qk_norm * 2 * self.head_dim
        return attention + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def counted_params(self):
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * self.block_params + self.hidden


MODELS = {
    "qwen2_5_0_5b": ModelShape(896, 4864, 24, 14, 2, 64, 151_936, True, 494_032_768, qkv_bias=True),
    "qwen2_5_1_5b": ModelShape(1536, 8960, 28, 12, 2, 128, 151_936, True, 1_543_714_304, qkv_bias=True),
    "qwen2_5_3b": ModelShape(2048, 11_008, 36, 16, 2, 128, 151_936, True, 3_085_938_688, qkv_bias=True),
    "qwen2_5_7b": ModelShape(3584, 18_944, 28, 28, 4, 128, 152_064, False, 7_615_616_512, qkv_bias=True),
    "qwen3_0_6b": ModelShape(1024, 3072, 28, 16, 8, 128, 151_936, True, 596_049_920, qk_norm=True),
    "qwen3_1_7b": ModelShape(2048, 6144, 28, 16, 8, 128, 151_936, True, 1_720_574_976, qk_norm=True),
    "qwen3_4b": ModelShape(2560, 9728, 36, 32, 8, 128, 151_936, True, 4_022_468_096, qk_norm=True),
    "qwen3_8b": ModelShape(4096, 12_288, 36, 32, 8, 128, 151_936, False, 8_190_735_360, qk_norm=True),
    "llama3_2_1b": ModelShape(2048, 8192, 16, 32, 8, 64, 128_256, True, 1_235_814_400),
    "llama3_2_3b": ModelShape(3072, 8192, 28, 24, 8, 128, 128_256, True, 3_212_749_824),
}
"""Preset -> shape. The tiny model is none of them: it fits everywhere."""


def shapes_of(model, settings):
    """Return the sizes that the knobs' formulas read, with a micro-batch that fills the whole token budget.

    A quarter of its tokens are responses that share prompts, as in a step that reads long prompts. Only ``prune_last_block`` and
    the attention of shared prompts look at that.
    """
    tokens = settings.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return Shapes(
        settings=settings.actor_rollout_ref,
        layers=model.layers, hidden=model.hidden, mlp=model.mlp, heads=model.heads, kv_heads=model.kv_heads,
        head_dim=model.head_dim, vocab=model.vocab, params=model.counted_params, block_params=model.block_params,
        tied=model.tied, tokens=tokens, responses=tokens, suffix_tokens=0, skipped=0,
        device="cuda",
    )  # fmt: skip


@dataclass(frozen=True)
class CardMemory:
    """The bytes of a run on one of ``ranks`` cards that share the model. Each method returns the bytes of one phase at its peak.

    The update and the log-prob passes return bytes that live in torch's allocator, :meth:`phases` adds what others hold.
    """

    shapes: Shapes
    settings: Settings
    card_bytes: int
    ranks: int = 1

    @property
    def trained(self):
        """Parameters that have a gradient and moments."""
        return adapter_params(self.shapes) if self.shapes.settings.model.lora_rank else self.shapes.params

    @property
    def masters(self):
        adapters = adapter_params(self.shapes) if self.shapes.settings.model.lora_rank else 0
        return self.shapes.master_bytes * (self.shapes.params + adapters) / self.ranks

    @property
    def moments(self):
        """Bytes of the optimizer's moments on one card, wherever they rest."""
        return self.shapes.state_bytes * self.trained / self.ranks

    @property
    def engine_weights(self):
        """Bytes of the engine's weights on one card, and of its sampler, which sleeps and wakes with them."""
        rollout = self.shapes.settings.rollout
        weights = width(rollout.dtype) * self.shapes.params / rollout.tensor_model_parallel_size
        return weights + sampler_bytes(rollout.max_num_seqs, self.shapes.vocab)

    @property
    def kv_token(self):
        s, rollout = self.shapes, self.shapes.settings.rollout
        return kv_bytes_per_token(s.layers, s.kv_heads, s.head_dim, width(rollout.dtype), rollout.tensor_model_parallel_size)

    @property
    def resident(self):
        """Bytes of masters and moments that stay on the card in every phase."""
        fsdp = self.shapes.settings.actor.fsdp_config
        return (0 if fsdp.param_offload else self.masters) + self.resident_moments

    @property
    def resident_moments(self):
        """Bytes of moments that stay on the card in every phase."""
        return 0 if self.shapes.settings.actor.fsdp_config.optimizer_offload else self.moments

    def update(self):
        """Masters, all gradients, and the largest of four moments: head, a block, the vocabulary's reduction, optimizer."""
        s, optim, cast = self.shapes, self.shapes.settings.actor.optim, self._is_cast
        vocabulary, low, reduced = s.vocab * s.hidden, s.compute_bytes, 4
        grads = s.master_bytes * self.trained / self.ranks
        has_frozen_matrices = s.settings.model.lora_rank > 0
        kept = s.input_bytes * (s.layers if not s.settings.model.enable_activation_offload else 2)
        head = logit_bytes(s, update=True) + kept + (2 * low * vocabulary if cast else 0)
        block = s.activation_bytes + (2 * 2 * low * s.block_params if cast else 0)
        reduction = 0.0
        if not has_frozen_matrices:
            head += low * vocabulary if cast else 0
            block += (low + 2 * reduced) * s.block_params if cast else 0
            reduction = (low + 2 * reduced) * vocabulary if cast else 0
        return self.masters + grads + self.resident_moments + max(head, block, reduction, 3 * optim.bucket_megabytes * MIB)

    def critic_update(self):
        """The update of a critic with the policy's shapes, which rests on the host otherwise, beside what stays of the policy.

        A critic has no logits, so this is a bound.
        """
        return self.update() + self.resident

    @property
    def _is_cast(self):
        """FSDP2 casts each unit while it computes: on several cards, and where masters and compute have other dtypes."""
        return self.ranks > 1 or self.shapes.master_bytes != self.shapes.compute_bytes

    def log_probs(self, adapters=True):
        """Masters and the widest moment of a block, or a chunk of logits, of a pass without gradients."""
        s, tokens = self.shapes, self.shapes.settings.rollout.log_prob_max_token_len_per_gpu
        # Gate, up and their product; with adapters also what an adapter adds, and the sum.
        wide = 5 if adapters and s.settings.model.lora_rank else 3
        widest = tokens * s.compute_bytes * (3 * s.hidden + wide * max(s.mlp, s.heads * s.head_dim))
        vocabulary = 2 * s.compute_bytes * s.vocab * s.hidden if self._is_cast else 0
        blocks = 2 * 2 * s.compute_bytes * s.block_params if self._is_cast else 0
        moment = max(logit_bytes(s, update=False) + vocabulary, widest + blocks)
        return self.masters + self.resident_moments + moment

    def reference(self):
        """The log-prob pass of a reference that has the policy's shapes, with what stays of the policy.

        With LoRA the policy itself is the reference, without its adapters.
        """
        if self.shapes.settings.model.lora_rank:
            return self.log_probs(adapters=False)
        return self.log_probs() - self.masters - self.resident_moments + self.shapes.reference_bytes / self.ranks + self.resident

    def weight_sync(self):
        """Masters, and the engine's weights outside of torch's allocator; one bucket on several cards."""
        bucket = self.shapes.settings.rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB if self.ranks > 1 else 0
        # With LoRA the gate and up matrices of a block are merged with their adapters, in fp32, and cast.
        merged = 14 * self.shapes.hidden * self.shapes.mlp if self.shapes.settings.model.lora_rank else 0
        return self.masters + self.resident_moments + 2 * bucket + merged

    def phases(self):
        rollout, outside = self.shapes.settings.rollout, self._outside
        return {
            "gen": self.resident * RESERVED + rollout.gpu_memory_utilization * self.card_bytes,
            "old_log_prob": self.log_probs() * RESERVED + outside,
            "ref": self.reference() * RESERVED + outside,
            "update_actor": self.update() * RESERVED + outside,
            "update_weights": self.weight_sync() * RESERVED + self.engine_weights + outside,
        }

    @property
    def _outside(self):
        return OUTSIDE + (0 if self.shapes.settings.rollout.enforce_eager else GRAPHS)

    @property
    def kv_tokens(self):
        """Tokens that the KV cache holds: of the engine's share, what weights and a step's scratch leave."""
        s, rollout = self.shapes, self.shapes.settings.rollout
        scratch = rollout.max_num_batched_tokens * (2 * s.hidden + 3 * s.mlp) * s.compute_bytes
        scratch += 3 * rollout.max_num_seqs * s.vocab * 4
        share = rollout.gpu_memory_utilization * self.card_bytes
        return int((share - OUTSIDE - self.engine_weights - scratch) / self.kv_token)

    def host_bytes(self, with_reference=False):
        """Host bytes of what rests there: parameters, moments, the reference, and what blocks keep."""
        model, fsdp = self.shapes.settings.model, self.shapes.settings.actor.fsdp_config
        rests = self.masters * fsdp.param_offload + self.moments * fsdp.optimizer_offload
        rests += self.shapes.reference_bytes / self.ranks * with_reference
        if self.shapes.settings.rollout.sleep_level == 1:
            rests += 2 * self.engine_weights  # at most: each segment is rounded up to a power of two
        return rests + model.enable_activation_offload * self.shapes.input_bytes * self.shapes.layers

    def fits(self, least_tokens):
        """Return whether every phase fits the card, a critic's update too, and the KV cache holds ``least_tokens``."""
        critic = self.critic_update() * RESERVED + self._outside
        return max(critic, *self.phases().values()) <= self.card_bytes and self.kv_tokens >= least_tokens
