"""Estimate the seconds of each phase of a step, from counted FLOPs and bytes and the rates of a machine.

All rows have the largest lengths, as in ``peaks.py``. In a pass of the trainer, the times of matrix products and of memory
traffic are added; in a decoding step the longer of the two counts. Copies to the host and back are added to the time of a phase,
or overlap with its computation if the phase hides them. Reward functions, checkpoints and communication between devices are not
counted. The rates of a named card are those of its datasheet, multiplied by the shares that programs usually reach.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Actor, Critic, CriticModel, Fsdp, Model, Ref, Rollout, Settings, Teacher, TrainedFsdp
from verl_memopt.memory.cards import Datasheet
from verl_memopt.memory.knob import data_ranks, has_teacher, num_devices, teacher_fsdp
from verl_memopt.memory.lora import adapter_params
from verl_memopt.memory.param_offload import STREAM
from verl_memopt.memory.precision import width
from verl_memopt.memory.rollout_memory import kv_bytes_per_token
from verl_memopt.model.sizes import ModelSize
from verl_memopt.model.state_chunks import SIZES
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.plan.peaks import shares_weights

REACHED_PRODUCTS, REACHED_MEMORY, REACHED_BUS = 0.5, 0.8, 0.8
"""Shares of a datasheet's rates that large matrix products, elementwise kernels and copies from pinned memory usually reach."""
SAMPLED_BYTES = 40
"""Bytes read and written per vocabulary entry when a token is sampled, in fp32."""
LOGIT_BYTES = 8
"""Bytes read and written per fp32 logit, each time that a pass goes over a chunk of logits."""
LAUNCH_SECONDS = 1e-5
"""Seconds of a small operation on a GPU that Python launches."""


@dataclass(frozen=True)
class Rates:
    """The rates of a device. All but ``narrow`` and ``call_seconds`` are per second."""

    name: str
    half_flops: float
    """FLOPs of matrix products in bfloat16. A multiplication and an addition are two FLOPs."""
    fp32_flops: float
    memory_bytes: float
    """Bytes read plus bytes written in the device's memory."""
    bus_bytes: float
    """Bytes copied between host and device in one direction."""
    sampled: float
    """Vocabulary entries whose scores become probabilities when tokens are sampled."""
    narrow: float = 1.0
    """Share of the FLOPs that a narrow product reaches: one token per sequence, with weights in the processor's cache."""
    call_seconds: float = LAUNCH_SECONDS
    """Seconds per small operation."""
    is_measured: bool = False
    """``verl-memopt calibrate`` measured the rates; false = they come from a datasheet."""

    def products(self, dtype: str) -> float:
        return self.fp32_flops if width(dtype) == 4 else self.half_flops


def rates_of(card: Datasheet) -> Rates:
    half, fp32 = (teraflops * 1e12 * REACHED_PRODUCTS for teraflops in (card.half, card.fp32))
    read = card.memory * 1e9 * REACHED_MEMORY
    return Rates(card.name, half, fp32, read, card.bus * 1e9 * REACHED_BUS, read / SAMPLED_BYTES)


FORWARD_CALLS, BACKWARD_CALLS, DECODE_CALLS, STEP_CALLS = 60, 120, 76, 300
"""Numbers of small operations: per block in a forward, per block in a backward, per block when transformers decodes one token,
and outside of the blocks when it decodes one token.

The last two were measured on a CPU, in calls of a small linear layer that take as long."""
COPIED_CACHE = 5
"""How often the KV cache is read or written when transformers decodes a token: it is copied to a larger one, and attention reads
it."""
EAGER_CALLS, GRAPH_CALLS = 15, 1
"""Numbers of small operations per block when vLLM decodes a token: with eager kernels, which are fused, and with CUDA graphs."""
OPTIMIZER_BYTES = 28
"""Bytes read and written per parameter in a step of AdamW: weight, gradient and two moments in fp32."""


@dataclass(frozen=True)
class Lengths:
    """Sizes of a step on one device. All rows have the largest lengths."""

    rows: float
    prompt: int
    response: int
    groups: float
    """Number of prompts that are computed. A shared prompt is computed once for all its answers."""

    @property
    def tokens(self) -> float:
        # The last token of an answer is not computed, because it predicts nothing.
        return self.groups * self.prompt + self.rows * (self.response - 1)

    @property
    def pairs(self) -> float:
        own = (self.response - 1) * (self.response / 2 + self.prompt)
        return self.groups * self.prompt * (self.prompt + 1) / 2 + self.rows * own


def seconds_of(
    settings: Settings,
    size: ModelSize,
    phases: Collection[str],
    rates: Rates,
    kv_tokens: int,
    device: str = "cuda",
    teacher: ModelSize | None = None,
) -> dict[str, float]:
    """Return phase -> estimated seconds per step.

    Args:
        settings: Of the run.
        size: Of the policy.
        phases: Of a step. Those that are not estimated are left out.
        rates: Of the device.
        kv_tokens: Tokens for which one engine's KV cache has room.
        device: ``cpu`` or ``cuda``.
        teacher: Size of the teacher. None = it has the policy's size, or there is none.
    """
    step = _Step(settings, size, rates, kv_tokens, device, teacher or size)
    made = {
        "gen": step.generation,
        "old_log_prob": lambda: step.scoring("actor"),
        "ref": lambda: step.scoring("ref"),
        "teacher": lambda: replace(step, size=step.teacher).scoring("teacher"),
        "values": lambda: step.scoring("critic"),
        "update_critic": lambda: step.update("critic"),
        "update_actor": lambda: step.update("actor"),
        "update_weights": step.sync,
    }
    return {phase: make() for phase, make in made.items() if phase in phases}


@dataclass(frozen=True)
class _Step:
    settings: Settings
    size: ModelSize
    rates: Rates
    kv_tokens: int
    device: str
    teacher: ModelSize

    @property
    def _keeps_states(self) -> bool:
        # The update then multiplies with the teacher's head, and the teacher's pass does not.
        distill = self.settings.distill
        return has_teacher(self.settings) and distill.divergence != SAMPLED and distill.top_k is None

    def _lengths(self, role: str) -> Lengths:
        data, roles = self.settings.data, self.settings.actor_rollout_ref
        sharing = data_ranks(self.settings, "critic" if role == "critic" else "actor")
        rows = math.ceil(data.train_batch_size * roles.rollout.n / sharing)  # on the device with the most rows
        groups = rows / roles.rollout.n if roles.actor.use_prefix_grouper else rows
        return Lengths(rows, data.max_prompt_length, data.max_response_length, groups)

    def _flops(self, work: Lengths) -> tuple[float, float]:
        size = self.size
        attention = sum(4 * layers * size.heads * head_dim for layers, _, head_dim in size.kinds) * work.pairs
        return self._linear_flops * work.tokens + attention, 2 * size.hidden * size.vocab * work.rows * work.response

    @property
    def _linear_flops(self) -> float:
        # FLOPs per token in blocks, without attention: products with weights, and the rule of blocks with a state.
        flops = 2.0 * Shapes.of(self.size, self.settings.actor_rollout_ref, Pass(1, 1, 1, 1), self.device).linear_params
        rule = self.size.rule
        if rule is None:
            return flops
        a_head = SIZES[0] * (5 * rule.key_dim + 3 * rule.value_dim) + 6 * rule.key_dim * rule.value_dim
        return flops + self.size.linear_layers * rule.value_heads * a_head

    def _touched(self, work: Lengths, dtype: str) -> float:
        # Bytes that the elementwise kernels of all blocks read and write in a forward.
        size = self.size
        key = (size.heads + size.kv_heads) * size.head_dim
        return work.tokens * width(dtype) * size.layers * (12 * size.hidden + 4 * key + 4 * size.mlp)

    def _micro_batches(self, work: Lengths, cap: int | None, rows: int | None) -> float:
        # Number of micro-batches: from a limit of tokens, or else from a number of rows.
        if self.settings.actor_rollout_ref.actor.use_dynamic_bsz:
            rows, cap = None, cap or self.settings.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        else:
            cap = None
        return max(1.0, work.rows / rows if rows else work.tokens / cap if cap else 1.0)

    def scoring(self, role: str) -> float:
        roles = self.settings.actor_rollout_ref
        critic = role == "critic"
        section: Rollout | Ref | Teacher = roles.rollout
        fsdp: Fsdp = roles.actor.fsdp_config
        if role == "ref":
            section, fsdp = roles.ref, roles.ref.fsdp_config
        elif role == "teacher":
            section, fsdp = self.settings.teacher, teacher_fsdp(self.settings)
        elif critic:
            fsdp = self.settings.critic.model.fsdp_config
        headless = critic or (role == "teacher" and self._keeps_states)
        work, dtype = self._lengths(role), fsdp.dtype
        blocks, head = self._flops(work)
        micro = self._micro_batches(work, section.log_prob_max_token_len_per_gpu, section.log_prob_micro_batch_size_per_gpu)
        compute = (blocks + (0 if headless else head)) / self.rates.products(dtype)
        logits = 0 if headless else 2 * LOGIT_BYTES * self.size.vocab * work.rows * work.response
        touched = (self._touched(work, dtype) + micro * self._weights(dtype) + logits) / self.rates.memory_bytes
        calls = micro * self.size.layers * FORWARD_CALLS * self.rates.call_seconds
        once = self._weights(dtype) / self.rates.bus_bytes
        streams, moves = fsdp.param_offload == STREAM, fsdp.param_offload is True
        return max(compute + touched, calls, micro * once if streams else 0) + (once if moves else 0)

    def update(self, role: str) -> float:
        roles, critic = self.settings.actor_rollout_ref, self.settings.critic
        own: Actor | Critic = critic if role == "critic" else roles.actor
        model: Model | CriticModel = critic.model if role == "critic" else roles.model
        fsdp = critic.model.fsdp_config if role == "critic" else roles.actor.fsdp_config
        work, dtype = self._lengths(role), fsdp.dtype
        blocks, head = self._flops(work)
        again = bool(model.enable_gradient_checkpointing)
        # A pass over the blocks costs as much as a forward. A backward costs two, or one with LoRA, because frozen weights get no
        # gradient. Recomputation costs one more, without the last product of each block, whose output nothing reads.
        passes = (2 if roles.model.lora_rank else 3) + again
        again_less = again * 2 * self.size.layers * self.size.hidden * self.size.mlp * work.tokens
        micro = self._micro_batches(work, own.ppo_max_token_len_per_gpu, own.ppo_micro_batch_size_per_gpu)
        heads = 0 if role == "critic" else 3 * head
        if role == "actor" and self._keeps_states:
            heads += head * self.teacher.hidden / self.size.hidden
        compute = (passes * blocks - again_less + heads) / self.rates.products(dtype)
        logits = 0 if role == "critic" else 4 * LOGIT_BYTES * self.size.vocab * work.rows * work.response
        touched = (passes * (self._touched(work, dtype) + micro * self._weights(dtype)) + logits) / self.rates.memory_bytes
        calls = micro * self.size.layers * (FORWARD_CALLS * (1 + again) + BACKWARD_CALLS) * self.rates.call_seconds
        kept = work.tokens * self.size.hidden * width(dtype) * self.size.layers
        offload = 2 * kept if model.enable_activation_offload else 0
        moved = 2 * micro * self._gradients if fsdp.grad_offload else 0
        busy = max(compute + touched, calls, (offload + moved) / self.rates.bus_bytes)
        return (own.ppo_epochs or roles.actor.ppo_epochs) * (busy + self._optimizer(fsdp))

    def _optimizer(self, fsdp: TrainedFsdp) -> float:
        data, actor = self.settings.data, self.settings.actor_rollout_ref.actor
        steps = max(1, data.train_batch_size // actor.ppo_mini_batch_size)
        learning = self._learning / num_devices(self.settings)
        state = actor.optim.state_bytes(width(fsdp.model_dtype)) if fsdp.optimizer_offload or fsdp.offload_policy else 0
        masters = width(fsdp.model_dtype) if fsdp.param_offload or fsdp.offload_policy else 0
        return steps * learning * (OPTIMIZER_BYTES / self.rates.memory_bytes + 2 * (state + masters) / self.rates.bus_bytes)

    def sync(self) -> float:
        roles, devices = self.settings.actor_rollout_ref, num_devices(self.settings)
        weights = self._weights(roles.rollout.dtype) / roles.rollout.tensor_model_parallel_size
        read = 0 if shares_weights(roles, self.size, devices, sleeps=True) else 2 * weights / self.rates.memory_bytes
        return read + (weights / self.rates.bus_bytes if roles.actor.fsdp_config.param_offload else 0)

    def generation(self) -> float:
        # All prompts are computed once. Then each forward decodes one token per sequence. Sequences run in waves of as many as
        # have room in the cache.
        data, rollout, size = self.settings.data, self.settings.actor_rollout_ref.rollout, self.size
        parts, vllm = rollout.tensor_model_parallel_size, rollout.name == "vllm"
        engines = num_devices(self.settings) / parts
        rows, longest = data.train_batch_size * rollout.n / engines, data.max_prompt_length + data.max_response_length
        room = max(self.kv_tokens // longest, 1) if vllm else rows
        at_once = max(min(rows, rollout.max_num_seqs, room), 1)
        weights, products = self._weights(rollout.dtype) / parts, self.rates.products(rollout.dtype) * parts
        token_bytes = sum(kv_bytes_per_token(*kind, width(rollout.dtype), parts) for kind in size.kinds_with_keys)
        cache = at_once * token_bytes * (data.max_prompt_length + data.max_response_length / 2)
        if size.rule is not None:  # states in fp32 are read and written
            cache += at_once * size.linear_layers * 8 * size.rule.values * size.rule.key_dim / parts
        read = weights + (1 if vllm else COPIED_CACHE) * cache
        compute = 2 * size.active_params * at_once / (products * self.rates.narrow)
        drawn = at_once * size.vocab / self.rates.sampled
        a_token = max(compute, read / self.rates.memory_bytes) + drawn + self._decode_calls * self.rates.call_seconds
        prompts = rows / rollout.n if vllm and rollout.enable_prefix_caching else rows
        prefill = self._linear_flops * prompts * data.max_prompt_length / products
        return prefill + -(-rows // at_once) * data.max_response_length * a_token

    @property
    def _decode_calls(self) -> int:
        rollout = self.settings.actor_rollout_ref.rollout
        calls = DECODE_CALLS if rollout.name == "hf" else EAGER_CALLS if rollout.enforce_eager else GRAPH_CALLS
        return self.size.layers * calls + STEP_CALLS

    def _weights(self, dtype: str) -> float:
        return width(dtype) * self.size.params

    @property
    def _learning(self) -> float:
        roles = self.settings.actor_rollout_ref
        if not roles.model.lora_rank:
            return self.size.params
        return adapter_params(Shapes.of(self.size, roles, Pass(1, 1, 1, 1), self.device))

    @property
    def _gradients(self) -> float:
        return self._learning * width(self.settings.actor_rollout_ref.actor.fsdp_config.model_dtype) / num_devices(self.settings)


def total(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())
