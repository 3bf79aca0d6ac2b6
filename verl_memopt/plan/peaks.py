"""Predict the bytes of a run on each device in each phase, from its settings and the sizes of its models.

No weights and no device are needed. ``held.py`` has the bytes of one model; this file adds the engine and the phases of a step.
Every figure is an upper bound: all rows have the largest lengths, and micro-batches are full. On a GPU the CUDA context, CUDA
graphs and memory that torch's allocator only reserves are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

from verl_memopt.config.keys import value_at
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Actor, ActorRolloutRef, Critic, CriticModel, Fsdp, Model, Settings, TrainedFsdp
from verl_memopt.memory.chunked_logprob import Taught
from verl_memopt.memory.critic_rules import CRITIC_PHASES, PoolRole, has_critic, own_pools
from verl_memopt.memory.host_buffers import ALIGNMENT, GIB
from verl_memopt.memory.knob import (
    SequenceRole,
    devices_of,
    has_own_teacher,
    has_teacher,
    needs_reference,
    reference_teaches,
    sequence_ranks,
    teacher_is_elsewhere,
)
from verl_memopt.memory.lora import slot_rank
from verl_memopt.memory.precision import width
from verl_memopt.memory.quantized_base import experts_stay_packed
from verl_memopt.memory.quantized_frozen import QUANTIZED_AT_ONCE
from verl_memopt.memory.residency import CRITIC, NEEDS, POLICY, REFERENCE, REWARD_MODEL, TEACHER
from verl_memopt.memory.rollout_memory import AUTO, kv_bytes_per_token, sampler_bytes
from verl_memopt.memory.shared_weights import ModelTraits, why_not
from verl_memopt.memory.token_budget import Role, sizes_of
from verl_memopt.model.sizes import ModelSize
from verl_memopt.model.state_chunks import SIZES
from verl_memopt.observe.phase import MIB
from verl_memopt.plan.conversations import conversation_passes, most_turns
from verl_memopt.plan.formulas import Pass
from verl_memopt.plan.held import Held, Kinds, largest, sum_kinds

CONTEXT = round(1.3 * GIB)
"""GPU bytes of a process outside torch's allocator: CUDA context, libraries, rest of a sleeping engine (reported by others)."""
GRAPHS = round(0.7 * GIB)
"""Bytes of the engine's CUDA graphs, which stay while it sleeps (0.4 to 1 GiB, reported by others); 0 with ``enforce_eager``."""
RESERVED = 0.14
"""Bytes that torch's allocator reserves on a GPU but does not use, as a share of the live bytes.

It was simulated for a model of 0.6 billion parameters with gradient checkpointing.
"""
CPU_KV_GIB = 1.0
"""GiB of vLLM's KV cache on a CPU if ``kv_cache_memory_gb`` is null."""
OTHER = 2**17
"""Bytes of small tensors of all kinds: rotary frequencies, counters, seeds, indices of tokens."""
CHECK_TOKENS, CHECK_RESPONSES = 80, 48
"""Tokens, and response tokens among them, of the forwards that check packing when a model is built
(``model/packing_check.py``)."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's models. None means that the model has the policy's size or that the run has no such model."""

    policy: ModelSize
    reference: ModelSize | None = None
    teacher: ModelSize | None = None
    critic: ModelSize | None = None
    student: ModelSize | None = None
    """Size of the model that scores: reward model or student."""
    further: tuple[ModelSize, ...] = ()
    """Sizes of the further reward models."""
    further_teachers: tuple[ModelSize, ...] = ()


CERTAIN = ("params", "rollout weights", "grads", "optimizer")
"""Kinds of bytes that do not depend on lengths and token budgets."""


@dataclass(frozen=True)
class Peaks:
    phases: Mapping[str, Mapping[str, int]]
    """Phase -> kind -> bytes on the device at the phase's peak, in the order of a step."""
    host: Mapping[str, int]
    """Kind -> bytes that rest on the host."""
    kv_tokens: int
    """Number of tokens for which one engine's KV cache has room."""
    pool_hosts: Mapping[str, int] = field(default_factory=dict)
    """Role with a resource pool -> bytes on the host of each of its processes. The role's phases are in ``phases``."""

    @cached_property
    def totals(self) -> dict[str, int]:
        return {phase: sum(kinds.values()) for phase, kinds in self.phases.items()}

    @property
    def binding(self) -> str:
        totals = self.totals
        # If the start and a phase of the step are equal, name the phase of the step.
        return max(totals, key=lambda phase: (totals[phase], phase != "init"))

    @property
    def device_bytes(self) -> int:
        return self.totals[self.binding]

    @property
    def least(self) -> dict[str, int]:
        return {phase: sum(kinds.get(kind, 0) for kind in CERTAIN) for phase, kinds in self.phases.items()}

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


POOL_PHASES: dict[str, tuple[str, ...]] = {"critic": CRITIC_PHASES, "reward_model": ("reward",), "teacher": ("teacher",)}
"""Role that can have a resource pool -> the phases that only this role has."""
SHARED_PHASES: dict[str, tuple[str, ...]] = {
    "critic": ("init", "save_checkpoint"),
    "reward_model": ("init",),
    "teacher": ("init",),
}
"""Role that can have a resource pool -> its phases that other roles have too."""


def shares_weights(roles: ActorRolloutRef, size: ModelSize, devices: int, sleeps: bool) -> bool:
    return why_not(roles, devices, sleeps, traits_of(size)) is None


def traits_of(size: ModelSize) -> ModelTraits:
    return ModelTraits(size.mixture is not None, size.linear_layers > 0, size.mxfp4)


def predict(
    settings: Settings, sizes: Sizes, phases: Collection[str], device: str = "cuda", card_bytes: int | None = None
) -> Peaks:
    """Return upper bounds of the bytes on one device in each of ``phases``.

    On a CPU only the bytes of live tensors count, as in ``memory.device_limit_gb``.

    ``card_bytes``: size of the device, of which vLLM takes a share; None = no engine needs it.
    """
    prediction = _Prediction(settings, sizes, device, card_bytes)
    if settings.actor_rollout_ref.rollout.kv_cache_memory_gb == AUTO:
        # The worker reads the free memory of a GPU when its CUDA context exists already.
        free = (card_bytes or 0) - (CONTEXT if device == "cuda" else 0)
        left = free - bytes_beside_cache(settings, sizes, phases, device)
        prediction = replace(prediction, left_for_cache=max(left, 0))
    return prediction.peaks(phases)


def on_one_machine(settings: Settings, peaks: Peaks) -> tuple[int, int]:
    """Return (number of processes, their host bytes) of one machine, if roles with a resource pool are on the same machine."""
    bytes_per_process = {"trainer": peaks.host_bytes, **peaks.pool_hosts}
    processes = {section: value_at(settings, f"{section}.n_gpus_per_node") for section in bytes_per_process}
    return sum(processes.values()), sum(number * bytes_per_process[section] for section, number in processes.items())


def bytes_beside_cache(settings: Settings, sizes: Sizes, phases: Collection[str], device: str) -> int:
    """Return the largest number of bytes beside the KV cache, over the phases in which the cache exists.

    It is for runs with ``kv_cache_memory_gb=auto``. If the engine sleeps, the cache exists only in rollout and validation.
    Arguments are as in :func:`predict`.
    """
    empty = _Prediction(settings, sizes, device, None)
    totals = empty.own_peaks(phases).totals
    return max(total for phase, total in totals.items() if not empty.sleeps or phase in ("gen", "testing"))


# The whole run: its models, its engine, and the phases of a step.


@dataclass(frozen=True)
class _Prediction:
    settings: Settings
    sizes: Sizes
    device: str
    card_bytes: int | None
    left_for_cache: int = 0
    """Bytes of the KV cache with ``kv_cache_memory_gb=auto``."""
    pool: PoolRole | None = None
    """Role whose resource pool is predicted; None = the devices of the policy and of all roles without a pool."""

    def peaks(self, phases: Collection[str]) -> Peaks:
        peaks, hosts = self.own_peaks(phases), dict[str, int]()
        found = dict(peaks.phases)
        for role in own_pools(self.settings):
            own = replace(self, pool=role).own_peaks(phases)
            found |= {phase if phase in POOL_PHASES[role] else f"{phase}_{role}": kinds for phase, kinds in own.phases.items()}
            hosts[role] = own.host_bytes
        return replace(peaks, phases=found, pool_hosts=hosts)

    def own_peaks(self, phases: Collection[str]) -> Peaks:
        others = {phase for role in own_pools(self.settings) for phase in POOL_PHASES[role]}
        own = set(phases) - others if self.pool is None else {*POOL_PHASES[self.pool], *SHARED_PHASES[self.pool]} & set(phases)
        found = {phase: sum_kinds({"other": OTHER}, *make()) for phase, make in self._phases.items() if phase in own}
        on_gpu = self.device == "cuda"
        eager = self.roles.rollout.enforce_eager or self.pool is not None
        graphs = GRAPHS if on_gpu and not eager and self.roles.rollout.name == "vllm" else 0
        for phase, kinds in found.items():
            if on_gpu:
                # vLLM's share of the device includes the context, the graphs and the reserve.
                generates = phase in ("gen", "testing") or (phase == "init" and "engine" in kinds)
                in_share = generates and self.roles.rollout.name == "vllm"
                live = sum(num_bytes for kind, num_bytes in kinds.items() if kind not in ("kv", "rollout weights", "engine"))
                # Shared weights are in memory that the engine allocates once, outside of the trainer's allocator.
                in_engine = min(kinds.get("params", 0), self.shared_weights)
                kinds["allocator"] = RESERVED * (live - in_engine)
                if not in_share:
                    kinds["context"] = CONTEXT
                    kinds["engine"] = kinds.get("engine", 0) + graphs
        rounded = {phase: {kind: math.ceil(num) for kind, num in kinds.items() if num > 0} for phase, kinds in found.items()}
        host = {kind: math.ceil(num) for kind, num in self._host().items() if num > 0}
        return Peaks(rounded, host, self.kv_tokens)

    # The models.

    @cached_property
    def roles(self) -> ActorRolloutRef:
        return self.settings.actor_rollout_ref

    @cached_property
    def ranks(self) -> int:
        return devices_of(self.settings, self.pool or "actor")

    def _held(self, part: str, roles: ActorRolloutRef, size: ModelSize, **more: Any) -> Held:
        shards = roles.actor.fsdp_config.fsdp_size
        ranks = self.ranks if shards == -1 else shards
        return Held(part, roles, size, ranks, self.device, replicas=max(1, self.ranks // ranks), **more)

    @cached_property
    def policy(self) -> Held:
        whole = self.shares and self.ranks > 1
        quantization = self.roles.model.quantization
        size = self.sizes.policy
        packs = size.mxfp4 and experts_stay_packed(
            self.roles.model.lora_rank, self.roles.actor.fsdp_config, self.ranks, self.shares
        )
        return self._held(POLICY, self.roles, size, trained=True, quantization=quantization, packs_experts=packs, whole=whole)

    @cached_property
    def reference(self) -> Held | None:
        rewards, ref = self.settings.reward_model, self.roles.ref
        is_student = rewards.recipe is not None and rewards.model.path is None
        if self.roles.model.lora_rank or not (is_student or needs_reference(self.settings)):
            return None
        return self._frozen(REFERENCE, ref.fsdp_config, self.sizes.reference or self.sizes.policy, ref.quantization)

    @cached_property
    def teachers(self) -> list[Held]:
        # The teachers that are models of their own.
        teacher = self.settings.teacher
        if not has_own_teacher(self.settings):
            return []
        sizes = (self.sizes.teacher or self.sizes.policy, *self.sizes.further_teachers)
        held = (self._frozen(TEACHER, teacher.fsdp_config, size, teacher.quantization) for size in sizes)
        return [replace(model, **self._judging) for model in held]

    @property
    def _judges(self) -> list[Held]:
        # The models that judge. Empty = a server or a column does.
        if teacher_is_elsewhere(self.settings):
            return []
        return self.teachers or [(self.reference if reference_teaches(self.settings) else None) or self.policy]

    @cached_property
    def critic(self) -> Held | None:
        if not has_critic(self.settings):
            return None
        critic, size = self.settings.critic, self.sizes.critic or self.sizes.policy
        return self._held(CRITIC, _critic_roles(self.roles, critic), size, trained=True, has_logits=False)

    @cached_property
    def student(self) -> Held | None:
        rewards = self.settings.reward_model
        is_reference = rewards.recipe is not None and (
            rewards.residency == "alias_ref" or (rewards.residency == "auto" and rewards.model.path is None)
        )
        if not rewards.enable or is_reference:
            return None
        model = rewards.model
        held = self._frozen(REWARD_MODEL, model.fsdp_config, self.sizes.student or self.sizes.policy, model.quantization)
        return held if rewards.recipe is not None else replace(held, has_logits=False)

    @property
    def _further(self) -> list[Held]:
        model = self.settings.reward_model.model
        held = [self._frozen(REWARD_MODEL, model.fsdp_config, size, model.quantization) for size in self.sizes.further]
        return [replace(model_held, has_logits=False) for model_held in held]

    def _frozen(self, part: str, fsdp: Fsdp, size: ModelSize, quantization: str) -> Held:
        sharding = TrainedFsdp(**{setting.name: getattr(fsdp, setting.name) for setting in fields(fsdp)})
        model = replace(self.roles.model, enable_gradient_checkpointing=False, lora_rank=0)
        roles = replace(self.roles, model=model, actor=replace(self.roles.actor, fsdp_config=sharding))
        return self._held(part, roles, size, quantization=quantization)

    @cached_property
    def models(self) -> list[Held]:
        own: dict[PoolRole, list[Any]] = {
            "teacher": self.teachers, "critic": [self.critic], "reward_model": [self.student, *self._further],
        }  # fmt: skip
        if self.pool is not None:
            held = own[self.pool]
        else:
            apart = own_pools(self.settings)
            others = [model for role, models in own.items() if role not in apart for model in models]
            # A worker builds the models in this order.
            held = [self.policy, self.reference, *others]
        return [model for model in held if model is not None]

    # The rollout engine.

    @cached_property
    def sleeps(self) -> bool:
        setting = self.roles.rollout.free_cache_engine
        return self.device != "cpu" if setting is None else setting

    @cached_property
    def engine_weights(self) -> float:
        if self.pool is not None:
            return 0
        rollout, vllm = self.roles.rollout, self.roles.rollout.name == "vllm" and self.device == "cuda"
        weights = self.shared_weights or width(rollout.dtype) * self.sizes.policy.params / rollout.tensor_model_parallel_size
        rank, size = self.roles.model.lora_rank, self.sizes.policy
        weights += size.layers * 4 * 512 * width(rollout.dtype) if self._packed else 0  # placeholders of quantised layers
        if rank and self.shares:  # room in the engine for adapters of the shared base; in vLLM also for its embedding and head
            matrices = 2 * (size.vocab + size.hidden) if rollout.name == "vllm" else 0
            places = slot_rank(rank) if rollout.name == "vllm" else rank
            weights += width(rollout.dtype) * places * (self.policy.adapters / rank + matrices)
        # The sampler's buffers are freed and allocated together with the weights.
        return weights + (sampler_bytes(rollout.max_num_seqs, size.vocab) if vllm else 4096)

    @cached_property
    def shares(self) -> bool:
        return self.pool is None and shares_weights(self.roles, self.sizes.policy, self.ranks, self.sleeps)

    @property
    def engine_copy(self) -> float:
        return self.engine_weights - self.shared_weights

    @cached_property
    def shared_weights(self) -> float:
        whole = width(self.roles.rollout.dtype) * self.sizes.policy.params
        return (self.policy.base if self._packed or self.policy.packs_experts else whole) if self.shares else 0

    @property
    def _packed(self) -> bool:
        return self.shares and self.policy.is_quantized

    @property
    def kv_token(self) -> int:
        size, rollout = self.sizes.policy, self.roles.rollout
        element_bytes = 1 if rollout.kv_cache_dtype.startswith("fp8") else width(rollout.dtype)
        parts = rollout.tensor_model_parallel_size
        keys = sum(kv_bytes_per_token(*kind, element_bytes, parts) for kind in size.kinds_with_keys)
        # Each sequence also has a state per block without attention, whatever its length. It counts for the longest one.
        states = size.linear_layers * self.policy.at_rest.pair_bytes / parts
        return keys + math.ceil(states / self._longest)

    @property
    def _scratch(self) -> float:
        # Bytes of the activations and logits of one step of vLLM.
        size, rollout = self.sizes.policy, self.roles.rollout
        step = rollout.max_num_batched_tokens * (2 * size.hidden + 3 * size.mlp) * width(rollout.dtype)
        decode_scratch = 2 * self.policy.decode_scratch if self.shares else 0  # in vLLM gate and up are one layer
        return step + 3 * rollout.max_num_seqs * size.vocab * 4 + decode_scratch

    @property
    def _share(self) -> float:
        return self.roles.rollout.gpu_memory_utilization * (self.card_bytes or 0)

    @cached_property
    def kv_bytes(self) -> float:
        rollout = self.roles.rollout
        if rollout.name == "hf":
            return self._sequences * self._longest * self.kv_token
        if rollout.kv_cache_memory_gb == AUTO:
            return self.left_for_cache
        if rollout.kv_cache_memory_gb is not None:
            return float(rollout.kv_cache_memory_gb) * GIB
        if self.device == "cpu":
            return CPU_KV_GIB * GIB
        return max(self._share - CONTEXT - self.engine_weights - self._scratch, 0)

    @property
    def kv_tokens(self) -> int:
        return int(self.kv_bytes / self.kv_token)

    @property
    def _longest(self) -> int:
        data, rollout = self.settings.data, self.roles.rollout
        lengths = (rollout.prompt_length or data.max_prompt_length) + (rollout.response_length or data.max_response_length)
        return rollout.max_model_len or lengths

    @property
    def _sequences(self) -> int:
        # Number of sequences that transformers' generate computes at once on one device.
        data, rollout = self.settings.data, self.roles.rollout
        return min(-(-(data.gen_batch_size or data.train_batch_size) * rollout.n // self.ranks), rollout.max_num_seqs)

    def _generation(self) -> Kinds:
        rollout = self.roles.rollout
        if rollout.name == "hf":
            return {"rollout weights": self.engine_copy, "kv": self.kv_bytes, "activations": self._hf_step()}
        if self.device == "cuda" and rollout.kv_cache_memory_gb is None:
            weights, kv = self.engine_weights, self.kv_bytes
            return {"rollout weights": self.engine_copy, "kv": kv, "engine": max(self._share - weights - kv, 0)}
        extra = CONTEXT + (0 if rollout.enforce_eager else GRAPHS) if self.device == "cuda" else 0
        return {"rollout weights": self.engine_copy, "kv": self.kv_bytes, "engine": self._scratch + extra}

    def _hf_step(self) -> float:
        # Peak bytes of transformers' generate: in the forward of the prompts, or at the scores of one token.
        size, rollout, s, b = self.sizes.policy, self.roles.rollout, self._sequences, width(self.roles.rollout.dtype)
        prompt = s * min(self.settings.data.max_prompt_length, self._longest)
        query = size.heads * size.head_dim
        tokens = prompt * (12 * size.hidden + b * max(3 * size.hidden + 3 * size.mlp, 3 * size.hidden + 6 * query))
        if size.rule is not None:
            # Transformers pads prompts to whole chunks. Per value head it has 12 copies of a head, and 6 of a row of a chunk.
            padded = s * -(-(prompt // s) // SIZES[0]) * SIZES[0]
            a_head = 12 * max(size.rule.key_dim, size.rule.value_dim) + 6 * SIZES[0]
            tokens += 4 * padded * size.rule.value_heads * a_head
        masks = s * (self._longest - prompt // s + 1) * 16 + prompt * (prompt // s) * 5
        one_layer = 4 * s * self._longest * query * b
        scores = s * size.vocab * 4 * (8 + (10 if rollout.top_p < 1 else 0) + (4 if rollout.repetition_penalty != 1 else 0))
        decoded = self.policy.decode_scratch if self.shares else 0
        return max(tokens + masks, one_layer + masks) + scores + s * self._longest * 32 + decoded

    # The phases.

    @property
    def _phases(self) -> dict[str, Callable[[], list[Kinds]]]:
        critic, student, policy = self.critic, self.student, self.policy
        reference = self.reference
        found: dict[str, Callable[[], list[Kinds]]] = {
            "init": self._init,
            "gen": lambda: [self._others("gen"), self._generation()],
            "testing": lambda: [self._others("testing"), self._generation()],
        }
        if student is not None or self.settings.reward_model.enable:
            scorer = student or reference or policy
            found["reward"] = lambda: self._with(scorer, "reward", scorer.forward(self._student_pass(scorer)))
        found["old_log_prob"] = lambda: self._with(policy, "old_log_prob", self._most(policy.forward, "rollout"))
        start = {"params": 0 if reference or self.roles.ref.adapter == "base" else self._start_bytes}
        scored = reference or policy
        found["ref"] = lambda: [start, *self._with(scored, "ref", self._most(scored.forward, "ref"))]
        judges = self._judges
        if judges:
            judge = max(judges, key=lambda held: held.size.params)
            judging = replace(judge, trained=False, **self._judging)
            found["teacher"] = lambda: self._with(judge, "teacher", self._most(judging.forward, "teacher"))
        else:
            found["teacher"] = lambda: [self._others("teacher")]
        if critic is not None:
            update_critic = partial(critic.update, exact_ratio=False)
            found["values"] = lambda: self._with(critic, "values", self._most(critic.forward, "values"))
            found["update_critic"] = lambda: self._with(critic, "update_critic", self._most(update_critic, "critic"))
        update = partial(replace(policy, taught=self._lesson).update, exact_ratio=self.roles.actor.old_log_prob_pass == "always")
        found["update_actor"] = lambda: [
            *self._with(policy, "update_actor", self._most(update, "actor")),
            self._taught(self._pass("actor")),
        ]
        found["update_weights"] = self._sync
        found["save_checkpoint"] = self._save
        return found

    @property
    def _is_taught(self) -> bool:
        return has_teacher(self.settings) and self.settings.distill.divergence != SAMPLED

    @property
    def _keeps_states(self) -> bool:
        return self._is_taught and self.settings.distill.top_k is None

    @property
    def _judging(self) -> dict[str, Any]:
        # How a model in the place of the teacher differs from others that score: which part of its head its pass reads.
        return {"reads_head": not self._is_taught, "top_k": self.settings.distill.top_k if self._is_taught else None}

    @property
    def _lesson(self) -> Taught | None:
        if not self._is_taught:
            return None
        distill, own = self.settings.distill, self.policy.at_rest.compute_bytes
        held = max(self._judges or [self.policy], key=lambda held: held.size.vocab)
        theirs = held.at_rest.compute_bytes
        narrow = 0 if theirs in (own, 4) else theirs
        mixed = bool(self.settings.teacher.further_models)
        return Taught(distill.divergence, held.size.vocab, distill.top_k, narrow, mixed)

    @property
    def _kept(self) -> int:
        # Most bytes per response token that a teacher's pass leaves for the update.
        top = self.settings.distill.top_k
        if top is not None:
            return 8 * top + 4
        return max((held.size.hidden * held.at_rest.compute_bytes for held in self._judges), default=0)

    def _taught(self, work: Pass) -> Kinds:
        # What an exact divergence adds to an update: the teachers' heads, and what is kept of a micro-batch's tokens.
        if not self._is_taught:
            return {}
        kept = {"activations": work.responses * self._kept}
        return sum_kinds(kept, *map(self._head_in_update, self._judges if self._keeps_states else []))

    def _head_in_update(self, held: Held) -> Kinds:
        is_policy = held is self.policy
        size, shapes, away = held.size, held.at_rest, held.leaves or held.fsdp.streams
        matrix = size.vocab * size.hidden
        # The policy's own head is copied if it changes before the last use of it.
        actor = self.roles.actor
        steps = self.settings.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
        changes = is_policy and steps > 1 and not held.adapters
        copied = held.is_cast or (away and not is_policy) or held.fsdp.streams or changes
        moved = shapes.master_bytes if held.fsdp.param_offload is True and not is_policy and held.is_cast else 0
        return {"params": matrix * ((shapes.compute_bytes if copied else 0) + moved / held.ranks)}

    def _others(self, phase: str, but: Held | None = None) -> Kinds:
        needed = NEEDS[phase]
        parts: list[Kinds] = []
        for model in self.models:
            parts.append(self._graphs(model))
            if model is but:
                parts.append({"optimizer": model.resting["optimizer"]})
                continue
            away = model.leaves and (model.part not in needed or model.fsdp.offload_policy or model.fsdp.streams)
            parts.append(model.resting | {"params": 0 if away else model.params})
        if self.sleeps and self.shares and phase not in ("gen", "testing"):
            parts.append({"rollout weights": self.engine_copy})
        elif not self.sleeps and phase not in ("gen", "testing"):
            parts.append(self._idle_engine)
        return sum_kinds(*parts)

    def _graphs(self, model: Held) -> Kinds:
        if not model.trained or model is self.student:
            return {}
        passes = [self._pass("critic"), self._pass("values")]
        if model is not self.critic:
            passes = [self._pass("actor"), self._pass("rollout")]
        return model.graphs(max(work.tokens for work in passes))

    @property
    def _idle_engine(self) -> Kinds:
        if self.pool is not None:
            return {}
        passing = {"activations"} | (set() if self.roles.rollout.name == "vllm" else {"kv"})
        return {kind: num_bytes for kind, num_bytes in self._generation().items() if kind not in passing}

    def _most(self, peak: Callable[[Pass], Kinds], role: Role | Literal["critic"]) -> Kinds:
        return largest([peak(work) for work in self._passes(role)])

    def _with(self, model: Held, phase: str, own: Kinds) -> list[Kinds]:
        return [self._others(phase, model), own]

    def _init(self) -> list[Kinds]:
        check = Pass(CHECK_TOKENS, CHECK_RESPONSES, 4, CHECK_TOKENS * 3)
        # An engine that sleeps is built before the models, and its weights are freed.
        moments: list[Kinds] = [{"rollout weights": self.engine_weights}] if self.sleeps and not self.shares else []
        built: Kinds = {}
        engine: Kinds = {} if self.sleeps else self._idle_engine
        for model in self.models:
            whole = {"logits": 16 * 12 * model.size.vocab if model.has_logits else 0}
            compared = min(256, model.roles.model.logprob_chunk_tokens or 256)  # tokens that measure the error
            quantized = (
                {"activations": 8 * model.size.vocab * compared + 8 * model.decoded + 17 * min(model.decoded, QUANTIZED_AT_ONCE)}
                if model.is_quantized
                else {}
            )
            # A tied head is a separate tensor until it is tied to the embedding.
            tie = {"params": model.at_rest.master_bytes * model.size.vocab * model.size.hidden} if model.size.tied else {}
            moments.append(built if model.fsdp.streams else sum_kinds(built, {"params": model.params}, tie))
            # The check reads the head of every model.
            moments.append(sum_kinds(built, replace(model, reads_head=True, top_k=None).forward(check), whole, quantized))
            built = sum_kinds(built, model.resting)
            moments.append(built)
        if self.device == "cuda" and self.roles.rollout.name == "vllm" and self.pool is None:
            generation = sum_kinds(self._generation(), {"rollout weights": self.engine_weights - self.engine_copy})
            return [largest([generation, *moments])]
        return [engine, largest(moments)]

    def _sync(self) -> list[Kinds]:
        policy, rollout = self.policy, self.roles.rollout
        parts: list[Kinds] = [
            self._others("update_weights", policy),
            {"params": 0 if policy.fsdp.offload_policy else policy.params},
        ]
        if self.sleeps and not self.shares:
            parts.append({"rollout weights": self.engine_weights})
        bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB if policy.ranks > 1 and not self.shares else 0
        # With LoRA each weight is merged with its adapter in fp32, and then cast.
        merged = 14 * policy.size.hidden * max(policy.size.mlp, policy.size.heads * policy.size.head_dim)
        if self.shares:  # vLLM gets copies of the adapters, and concatenates those of its fused layers
            merged = 3 * width(rollout.dtype) * policy.adapters if rollout.name == "vllm" else 0
        merged = merged if policy.adapters else 0
        whole = width(rollout.dtype) * policy.size.params
        parts.append({"sync bucket": 2 * min(bucket, whole), "activations": max(merged, policy.whole_experts)})
        return parts

    def _save(self) -> list[Kinds]:
        # While a checkpoint is written, the engine's weights are on the device already, for the next sync.
        awake = self.engine_weights if self.sleeps and not self.shares else 0
        parts: list[Kinds] = [self._others("save_checkpoint"), {"rollout weights": awake}]
        parts.append({"activations": 0 if self.pool is not None else self.policy.whole_experts})
        if self.device == "cpu":
            # Adapters are copied to the host to write peft's file. On a CPU this copy counts as device memory.
            copied = [model.at_rest.master_bytes * model.adapters for model in self.models if model.trained]
            parts.append({"activations": max(copied, default=0)})
        return parts

    @property
    def _start_bytes(self) -> float:
        # Bytes of the initial adapters, which the host keeps as the reference.
        starts = self.roles.model.lora_adapter_path is not None and self.pool is None
        return self.policy.at_rest.compute_bytes * self.policy.adapters if starts else 0

    def _host(self) -> Kinds:
        model, parts = self.roles.model, [*(held.on_host for held in self.models), {"params": self._start_bytes}]
        # Each streamed parameter starts at a multiple of ALIGNMENT. A block has at most 32 parameters, with biases and scales.
        parts += [{"params": ALIGNMENT * 32 * (held.size.layers + 1)} for held in self.models if held.fsdp.streams]
        if self.sleeps and not self.shares and self.roles.rollout.sleep_level == 1:
            parts.append({"rollout weights": 2 * self.engine_weights})  # each segment is rounded up to a power of two
        offloading: list[tuple[Held | None, Literal["actor", "critic"], bool]] = [
            (self.policy, "actor", model.enable_activation_offload),
            (self.critic, "critic", self.settings.critic.model.enable_activation_offload),
        ]
        for held, role, on in offloading:
            if held is not None and on and held in self.models:
                parts.append({"activations": max(map(held.offloaded, self._passes(role)))})
        if self._is_taught:
            data = self.settings.data
            rows = -(-data.train_batch_size * self.roles.rollout.n // self.ranks)
            parts.append({"teacher states": rows * data.max_response_length * self._kept})
        return sum_kinds(*parts)

    # The largest micro-batch of each pass.

    def _pass(self, role: Role | Literal["critic"]) -> Pass:
        data, actor, critic, n = self.settings.data, self.roles.actor, self.settings.critic, self.roles.rollout.n
        prompt, response = data.max_prompt_length, data.max_response_length
        # In the worst case each turn of a conversation forks, and computes a response of its own. If the number of turns is not
        # known, only a token budget bounds a micro-batch.
        turns = most_turns(self.settings)
        answer = response * (turns or 1)
        per_mini = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size or actor.ppo_mini_batch_size}
        own: dict[str, SequenceRole] = {"critic": "critic", "values": "critic", "ref": "ref", "teacher": "teacher"}
        sharing = sequence_ranks(self.settings, own.get(role, "actor"))
        rows = -(-per_mini.get(role, data.train_batch_size) * n // (self.ranks // sharing))
        most_rows, by_tokens, most_tokens = sizes_of(self.settings, role)
        most_tokens = None if most_tokens is None else most_tokens * sharing
        shares = bool(actor.use_prefix_grouper)
        sharing_rows = n if shares and self.ranks == 1 else 1

        def computed(count: int, answer: int) -> int:
            # Rows of a group are neighbours, so `count` rows belong to at most this many groups.
            groups = count if sharing_rows == 1 else min(count, -(-(count - 1) // sharing_rows) + 1)
            return groups * prompt + count * (answer - 1)

        def of_all_rows(answer: int) -> int:
            return -(-rows // sharing_rows) * prompt + rows * (answer - 1) if sharing_rows > 1 else computed(rows, answer)

        # The inputs of all rows are counted as if no turn forked.
        all_tokens = of_all_rows(response) if role not in ("actor", "critic") else 0
        everything = of_all_rows(answer) if turns else max(of_all_rows(response), most_tokens or 0)
        if by_tokens:
            tokens = min(most_tokens or everything, everything)
            # Each row has at least one token.
            in_micro = min(rows, most_tokens or rows)
        else:
            in_micro = min(most_rows or rows, rows)
            tokens = min(computed(in_micro, answer), everything)
        responses = min(tokens, in_micro * answer)
        # If a group is split over micro-batches, the prompt's KV is kept for the later ones, except with sequence parallelism.
        carries = tokens < everything and shares and n > 1 and sharing == 1
        prefix = min(prompt, tokens) if carries else 0
        alone = (most_tokens or everything) >= everything if by_tokens else in_micro == rows
        # Among its share of the tokens, a rank may have more than its share of the response tokens.
        share = -(-tokens // sharing)
        # In a pass without gradients, the inputs of all micro-batches of a rank are on the device at once.
        segments, longest = min(in_micro * 2, tokens), None if turns is None else prompt + answer
        return Pass(share, min(responses, share), segments, max(all_tokens, tokens), prefix, alone, longest=longest)

    def _passes(self, role: Role | Literal["critic"]) -> list[Pass]:
        work = self._pass(role)
        return [work] if not self.roles.rollout.converses else [work, *conversation_passes(self.settings, role, work)]

    def _student_pass(self, student: Held) -> Pass:
        rewards, data = self.settings.reward_model, self.settings.data
        recipe = rewards.recipe
        longest = rewards.max_length if recipe is None else value_at(self.settings, recipe.longest_key)
        longest = longest or data.max_prompt_length + data.max_response_length
        sharing = sequence_ranks(self.settings, "reward_model")
        rows = -(-data.train_batch_size * self.roles.rollout.n // (self.ranks // sharing))
        if recipe is not None:
            tokens = max(value_at(self.settings, recipe.tokens_key) * sharing, longest)
        elif rewards.use_dynamic_bsz:
            tokens = (rewards.forward_max_token_len_per_gpu or longest) * sharing
        else:
            tokens = (rewards.micro_batch_size_per_gpu or rows) * longest
        tokens = -(-min(tokens, rows * longest) // sharing)
        return Pass(tokens, tokens, rows, rows * longest, longest=longest)


def _critic_roles(roles: ActorRolloutRef, critic: Critic) -> ActorRolloutRef:
    shared = {setting.name for setting in fields(CriticModel)} & {setting.name for setting in fields(Model)} - {"path"}
    model = replace(
        roles.model, **{name: getattr(critic.model, name) for name in shared if getattr(critic.model, name) is not None}
    )
    budgets = {
        setting.name: getattr(critic, setting.name)
        for setting in fields(Critic)
        if setting.name in {f.name for f in fields(Actor)}
    }
    given = {name: value for name, value in budgets.items() if value is not None}
    return replace(roles, model=model, actor=replace(roles.actor, **given, fsdp_config=critic.model.fsdp_config))
