"""The roles of a worker: the plan that the driver sends, and how a worker builds its models from it.

A role is a sharded model with the weights of its folder. If it may rest on the host, it has host memory reserved for that.
Frozen roles are built here. ``worker/policy.py`` builds the policy and the critic, with helpers of :class:`RoleBuilder`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl_memopt.agents.loop import AgentPlan
from verl_memopt.config import schema
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import (
    ActorRolloutRef,
    CriticModel,
    Distill,
    Fsdp,
    Memory,
    Model,
    RewardModel,
    RolloutCorrection,
    ScoringModel,
)
from verl_memopt.distributed.device import fsdp_units, is_gpu, training_mesh
from verl_memopt.distributed.file_records import Records
from verl_memopt.distributed.sharded_state import load_weights, save_weights
from verl_memopt.errors import ConfigError
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.fused import compiler_works
from verl_memopt.memory.lora_torch import adapters_off, initialize_adapters, load_adapter
from verl_memopt.memory.quantized_frozen_torch import exact_weights
from verl_memopt.memory.residency import REFERENCE, REWARD_MODEL, TEACHER, TEACHER_HEAD, OffloadedParams, Residency
from verl_memopt.model.assembly import (
    ModelUse,
    build_policy,
    build_reward_model,
    materialize,
    materialize_critic,
    materialize_mapped,
)
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.packed_model import PackedModel, PolicyModel
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.packing_check import REWARD_KEY, TEACHER_KEY, check_packing, frozen_causal_model
from verl_memopt.model.value_model import ValueModel
from verl_memopt.model.weights import WeightFolder, load_model_config, local_region, named_weights
from verl_memopt.observe.byte_tracker import HOST, scope
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.worker.group import Placement
from verl_memopt.worker.trained_model import TrainedModel, readable


class FrozenRole(Protocol):
    """A frozen model, and a recipe's methods that use it. The driver calls them through ``Worker.call_role``."""

    @property
    def model(self) -> PolicyModel: ...


class RolePlan(Protocol):
    """A further role, which each worker builds for a recipe. It is sent to the workers, so it must be picklable.

    The role computes in the phase ``reward``. Outside of that phase its model rests on the host if its settings say so.
    """

    @property
    def is_reference(self) -> bool:
        """Whether the role uses the reference's model, which must then be on the device in the phase ``reward`` too."""

    def build(self, roles: RoleBuilder, policy: PolicyModel, reference: PolicyModel | None) -> FrozenRole:
        """Build the role. ``reference`` is None if the reference has no model of its own."""


@dataclass(frozen=True)
class WorkerPlan:
    settings: ActorRolloutRef
    folder: str
    """Folder of the policy's model."""
    engine_folder: str | None
    """Folder from which the engine reads the model's config. It differs from ``folder`` if settings such as
    ``model.override_config`` change the config. None = there is no engine."""
    reference_folder: str | None
    """Folder of the reference's model. None = the reference has no model of its own."""
    tokenizer_folder: str
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    schedule_steps: int
    """Steps of the policy's schedule in the whole run, in the unit of ``actor.optim.lr_schedule_steps``."""
    free_engine: bool
    """The engine sleeps outside of rollout and validation."""
    track_init: bool
    """On a CPU, count live bytes while the worker is built."""
    known_ids: int | None = None
    """The same as :attr:`verl_memopt.rollout.engine.EnginePlace.known_ids`."""
    critic: schema.Critic | None = None
    """The ``critic`` section of the settings. None = there is no critic."""
    critic_folder: str | None = None
    """Folder of the critic's model."""
    critic_schedule_steps: int = 0
    """Steps of the critic's schedule in the whole run, in the unit of ``critic.optim.lr_schedule_steps``."""
    memory: Memory = dataclasses.field(default_factory=Memory)
    """Limits and host buffers of the process."""
    kinds_on_gpu: bool = False
    """Count bytes by kind in tracked phases on a GPU too. Functions are then not compiled."""
    bypass: RolloutCorrection | None = None
    """The rollout correction in bypass mode. None = decoupled mode, or no correction."""
    stop_file: str | None = None
    """A rollout stops once the driver has written this file. None = rollouts are never stopped."""
    private_files: bool = False
    """Only the user who trains can read the files that the workers write."""
    sync_check: bool = False
    """Compare the engine's weights with the policy's after each sync, and look for stale cache blocks."""
    snapshot_folder: str | None = None
    """Folder for a memory snapshot after an out-of-memory error. None = no snapshot is written."""
    reward_model: ScoringModel | None = None
    """Settings of the reward model. None = no model scores responses."""
    reward_folder: str | None = None
    """Folder of the reward model."""
    further_reward_folders: tuple[str, ...] | None = None
    """Folders of further reward models, which have the same settings. None = there are none."""
    rewards: RewardModel | None = None
    """The ``reward_model`` section of the settings, for the advice after an out-of-memory error. None = no model scores
    responses."""
    role: RolePlan | None = None
    """The further role of a recipe. None = there is none."""
    teacher: schema.Teacher | None = None
    """The ``teacher`` section of the settings. None = the run does not distill, or the policy is its own teacher."""
    teacher_folders: tuple[str, ...] = ()
    """Folders of the teachers' models."""
    told: bool = False
    """The teacher is elsewhere, and the workers are told what it says."""
    vocabulary: int | None = None
    """Number of ids of the policy, for the workers of a teacher alone. None = the policy's head tells."""
    teacher_adapter: str | None = None
    """Folder of the teacher's adapters over the policy's base."""
    distill: Distill | None = None
    """The ``distill`` section of the settings. None = the run does not distill."""
    reference_teaches: bool = False
    """The reference is the teacher."""
    beside_cache_bytes: int | None = None
    """With ``rollout.kv_cache_memory_gb=auto``: bytes on the device that are not KV cache, by the planner's formulas. None = the
    settings give the size of the cache."""
    adaptive_phases: tuple[str, ...] = ()
    """Phases whose micro-batches are cut smaller after an out-of-memory error, if no ranks share a micro-batch."""
    agent: AgentPlan | None = None
    """What conversations of several turns need. None = each prompt is answered in one turn."""
    has_more: bool = False
    """``folder`` holds more than the text model that is trained, of which each saved model gets a copy, or names it otherwise."""
    has_policy: bool = True
    """False = the worker has only one other role, and its own device."""

    def alone(self, role: str) -> WorkerPlan:
        snapshots = None if self.snapshot_folder is None else f"{self.snapshot_folder}/{role}"
        # Only the policy's workers have an engine, a reference and the role of a recipe.
        absent = _absent([*ALONE, *(name for other in OWN_ROLES if other != role for name in OWN_ROLES[other])])
        distill = self.distill if role == "teacher" else None
        return dataclasses.replace(self, **absent, snapshot_folder=snapshots, distill=distill, told=False, has_policy=False)

    @property
    def teaches_itself(self) -> bool:
        # With LoRA also as the reference.
        own = self.distill is not None and not self.told and not self.teacher_folders
        return own and not (self.reference_teaches and self.reference_folder is not None)

    def without(self, roles: Collection[str]) -> WorkerPlan:
        absent = _absent([name for role in roles for name in OWN_ROLES[role]])
        return dataclasses.replace(self, **absent, told=self.told or "teacher" in roles)


ALONE = ("engine_folder", "reference_folder", "role", "teacher_adapter", "reference_teaches", "beside_cache_bytes")
"""Fields of the plan that only the policy's workers have."""

OWN_ROLES = {
    "critic": ("critic", "critic_folder"),
    "reward_model": ("reward_model", "reward_folder", "further_reward_folders", "rewards"),
    "teacher": ("teacher", "teacher_folders"),
}
"""Role that may have its own devices -> the fields of the plan for this role."""


def _absent(names: Iterable[str]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(WorkerPlan)}
    return {name: None if defaults[name] is dataclasses.MISSING else defaults[name] for name in names}


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenModel:
    part: str
    """Name in the residency table."""
    key: str
    """The section of the settings that says how it is stored."""
    model_key: str
    """The section of the settings that names its model."""
    model: Model
    fsdp: Fsdp
    compiled: bool
    """Whether the settings request compiled functions."""
    quantization: str = "none"
    head_part: str | None = None
    """Name of its head in the residency table, if phases need the head alone. None = the head belongs to ``part``."""
    head_also: tuple[str, ...] = ()
    """Further names of the head."""


@dataclass(frozen=True)
class RoleBuilder:
    """Builds the frozen roles of one worker, and helps :class:`Policy` and :class:`TrainedCritic` to build themselves.

    All members of a group build the same roles in the same order.

    Args:
        plan: What to build.
        placement: The place of this worker in its group.
        device: The device of the worker.
        residency: Each part that may rest on the host is added to it.
        shared: The engine's weights if the policy computes with them. None = the policy has its own weights.
    """

    plan: WorkerPlan
    placement: Placement
    device: torch.device
    residency: Residency
    shared: Mapping[str, torch.Tensor] | None = None

    def reference(self, folder: Path) -> PolicyModel:
        settings, ref, key = self.plan.settings, self.plan.settings.ref, "actor_rollout_ref.ref"
        compiled = bool(ref.use_torch_compile)
        plan = FrozenModel(REFERENCE, key, POLICY_KEY, settings.model, ref.fsdp_config, compiled, ref.quantization)
        if not self.plan.reference_teaches:
            return self.frozen(plan, folder, self.also)
        return self.frozen(self.with_head(plan, folder, REFERENCE), folder, (*self.also, TEACHER))

    def frozen(self, plan: FrozenModel, folder: Path, also: tuple[str, ...] = ()) -> PolicyModel:
        fsdp, key = plan.fsdp, f"{plan.key}.fsdp_config"
        compiled = compiles_functions(plan.compiled, fsdp, self.device)
        use = ModelUse(fsdp_key=key, quantization=plan.quantization, compiled=compiled)
        with self.own_seed(fsdp):
            model = build_policy(plan.model, fsdp, folder, self.mesh(fsdp), self.device, use)
            model.requires_grad_(False)
            mapped = None  # the weights in the mapped file; the model's own storage then has no values yet
            if self.plan.settings.model.load_mode == "mmap" and fsdp.param_offload:
                mapped = materialize_mapped(model, folder, self.device, f"{key}.model_dtype")
            else:
                materialize(model, folder, self.device)
            if plan.model.lora_adapter_path is not None and plan.model.lora_rank > 0:
                load_adapter(Path(plan.model.lora_adapter_path).expanduser(), model, plan.model_key)
        if plan.quantization != "none":
            with adapters_off(model):
                self.log_quantization_error(model, folder, plan.key, plan.quantization)
        head = None if plan.head_part is None else (plan.head_part, plan.head_also)
        self.home_of(plan.part, model, fsdp, also, mapped, head)
        self.check_packing(model, folder, plan.model_key)
        return model

    def teacher(self, folder: Path) -> PolicyModel:
        settings, teacher, distill = self.plan.settings, self.plan.teacher, self.plan.distill
        assert teacher is not None
        assert distill is not None
        compiled = bool(settings.actor.use_torch_compile)
        model = frozen_causal_model(teacher.model, settings.model)
        frozen = FrozenModel(
            TEACHER, TEACHER_KEY, f"{TEACHER_KEY}.model", model, teacher.fsdp_config, compiled, teacher.quantization
        )
        return self.frozen(self.with_head(frozen, folder), folder)

    def with_head(self, plan: FrozenModel, folder: Path, *also: str) -> FrozenModel:
        """Return the plan of a teacher's model, in which the head is a part of its own if the update reads it.

        ``also`` are further parts with which the head comes to the device.
        """
        distill = self.plan.distill
        if distill is None or distill.divergence == SAMPLED or distill.top_k is not None:
            return plan
        # The teacher's own pass reads the head only if it is also the embedding.
        tied = bool(load_model_config(plan.model, folder, plan.model_key).get_text_config().tie_word_embeddings)
        return dataclasses.replace(plan, head_part=TEACHER_HEAD, head_also=(*also, TEACHER) if tied else also)

    def moving_reference(self, reference: PolicyModel, policy: TrainedModel) -> MovingReference:
        """Wrap the reference, so that it can follow the policy.

        Raises:
            ConfigError: The weights of the two models differ in names or shapes.
        """
        shapes = [{name: tuple(weight.shape) for name, weight in named_weights(model)} for model in (reference, policy.model)]
        if shapes[0] != shapes[1]:
            name = min(name for name, _ in shapes[0].items() ^ shapes[1].items())
            raise ConfigError(
                f"actor_rollout_ref.ref.model.path={self.plan.reference_folder}: {name} is {shapes[0].get(name, 'missing')} "
                f"there and {shapes[1].get(name, 'missing')} in the policy, and a reference that follows the policy needs the "
                "same weights. Remove the key, or set actor_rollout_ref.ref.sync_every_steps=null."
            )
        found = (self.residency.find(REFERENCE), self.residency.find(TEACHER_HEAD) if self.plan.reference_teaches else None)
        # A streamed model has no such home: its weights are on the host at all times.
        return MovingReference(reference, tuple(home for home in found if isinstance(home, OffloadedParams)), policy)

    def reward_model(self, folder: Path) -> ValueModel:
        settings = self.plan.reward_model
        assert settings is not None
        fsdp = settings.fsdp_config
        with self.own_seed(fsdp):
            reward_model = build_reward_model(settings, self.plan.settings.model, folder, self.mesh(fsdp), self.device)
            reward_model.requires_grad_(False)
            has_head = materialize_critic(reward_model, folder, self.device, REWARD_KEY)
        assert has_head, f"{folder} was checked before the workers started"
        self.home_of(REWARD_MODEL, reward_model, fsdp)
        self.check_packing(reward_model, folder, REWARD_KEY)
        return reward_model

    def mesh(self, fsdp: Fsdp) -> DeviceMesh:
        return training_mesh(self.device.type, self.placement.world_size, fsdp.fsdp_size)

    @contextmanager
    def own_seed(self, fsdp: Fsdp) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            # The policy's random state must not depend on which other roles the run has.
            make_deterministic(fsdp, self.placement.rank)
            yield

    def home_of(
        self,
        part: str,
        model: PackedModel,
        fsdp: Fsdp,
        also: tuple[str, ...] = (),
        mapped: list[torch.Tensor] | None = None,
        head: tuple[str, tuple[str, ...]] | None = None,
    ) -> OffloadedParams | None:
        stream, home = model.stream, None
        if stream is not None:
            stream.name = part
            self.residency.add(stream, also)
            logger.info(
                "%s: %.4g MiB rest on the host and come to the device for every micro-batch, at most %.4g MiB of them at once",
                part, stream.num_bytes / MIB, stream.most_bytes / MIB,
            )  # fmt: skip
        elif fsdp.param_offload:
            pairs = list(zip(model.parameters(), mapped or repeat(None), strict=False))
            if head is not None:
                in_head = {id(parameter) for parameter in model.head.parameters()}
                own = [pair for pair in pairs if id(pair[0]) in in_head]
                pairs = [pair for pair in pairs if id(pair[0]) not in in_head]
                self._rest(head[0], own, (), head[1])
            home = self._rest(part, pairs, arriving_units(model, fsdp), also)
        return home

    def _rest(
        self, name: str, pairs: Sequence[tuple[Tensor, Tensor | None]], units: tuple[Any, ...], also: tuple[str, ...]
    ) -> OffloadedParams:
        # Each parameter with its values in the mapped file, or None.
        values = [value for _, value in pairs if value is not None]
        home = OffloadedParams(name, [parameter for parameter, _ in pairs], self.device, values or None, *units)
        if values:
            # Moving to the host and back copies the values from the mapped file to the device.
            home.to_host()
            home.to_device()
        self.residency.add(home, also)
        return home

    @property
    def also(self) -> tuple[str, ...]:
        role = self.plan.role
        # The role then uses the reference, so the reference must also be on the device in the reward model's phase.
        return (REWARD_MODEL,) if role is not None and role.is_reference else ()

    def activation_offload(self, packed_model: PackedModel, model: Model | CriticModel, metric: str) -> ActivationOffload | None:
        if not model.enable_activation_offload:
            return None
        min_bytes, in_flight = model.activation_offload_min_bytes, model.activation_offload_in_flight
        stay_bytes = round(model.activation_offload_device_gb * GIB)
        return ActivationOffload(packed_model, self.device, min_bytes, in_flight, metric=metric, stay_bytes=stay_bytes)

    def check_packing(self, packed_model: PackedModel, folder: Path, key: str) -> None:
        check_packing(packed_model, self.device, packed_model.compute, self.plan.settings.actor, str(folder), key)

    def log_quantization_error(self, model: PolicyModel, folder: Path, key: str, quantization: str) -> None:
        mean, largest = quantization_error(model, folder, self.device, self.plan.settings.rollout.scoring_temperature)
        logger.info(
            "%s.quantization=%s: log-probs differ from the unquantised model's by %.2g nats on average, %.2g at most "
            "(256 random tokens)", key, quantization, mean, largest,
        )  # fmt: skip


def arriving_units(model: PackedModel, fsdp: Fsdp) -> tuple[list[nn.Module], int]:
    """Return the modules that can start before later parameters have arrived from the host, and how many units each reads ahead.

    FSDP2 gathers all parameters of a unit at once. It may gather the next unit while a unit computes.
    """
    if model.casts is not None:
        # Each unit is cast whole before it computes. What is in no unit, such as a head, is cast at the start of the model.
        return [model, *model.casts.modules], 0
    sharded: list[Any] = fsdp_units(model)
    return (sharded, int(fsdp.forward_prefetch)) if sharded else ([model, *model.blocks(), model.head], 0)


def fill_masters(trained: TrainedModel, folder: Path, renamed: Mapping[str, str | None] | None = None) -> None:
    """Set split fp32 master weights to the values in the model's folder.

    The parameters have these values already, but rounded to a shorter dtype. ``renamed`` maps a parameter's name to its name in
    the folder, or to None if the folder lacks it.
    """
    if trained.masters is None:
        return
    weights = WeightFolder(folder)
    for name, parameter in named_weights(trained.model):
        if not isinstance(parameter, nn.Parameter):
            continue
        stored = (renamed or {}).get(name, name)
        values = None if stored is None else weights.read(stored, local_region(parameter))
        if values is not None and values.dtype != parameter.dtype:
            trained.masters.set_master(parameter, values)


def start_adapters(packed_model: PackedModel, model: Model | CriticModel, seed: int, key: str) -> None:
    if model.lora_adapter_path is not None:
        load_adapter(Path(model.lora_adapter_path), packed_model, key)
    else:
        initialize_adapters(packed_model, seed)


def compiles_functions(requested: bool, fsdp: Fsdp, device: torch.device) -> bool:
    return requested and is_gpu(device) and not fsdp.full_determinism and compiler_works(device)


def make_deterministic(fsdp: Fsdp, rank: int) -> None:
    torch.manual_seed(fsdp.seed + rank)
    if fsdp.full_determinism:
        # cuBLAS needs a workspace of fixed size for this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# Measure what quantising a frozen model changes in its log-probs.


def exact_weights_of(policy: PolicyModel, folder: Path, device: torch.device) -> AbstractContextManager[None]:
    weights = WeightFolder(folder)
    return exact_weights(policy, lambda name, region: weights.read(name, region).to(device))


def quantization_error(policy: PolicyModel, folder: Path, device: torch.device, temperature: float) -> tuple[float, float]:
    """Return the (mean, largest) difference in nats between log-probs of the quantised and of the unquantised weights.

    Measured on 4 x 64 random tokens. The unquantised weights are read from the folder, one layer or expert at a time.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(policy.lm.config.vocab_size)
    tokens = torch.randint(vocabulary, (4 * 65,), generator=generator)
    pack = pack_rows(tokens[:4], [1] * 4, tokens[4:], [64] * 4).to(device)
    with torch.no_grad():
        quantized, _ = policy(pack, temperature)
        with exact_weights_of(policy, folder, device):
            exact, _ = policy(pack, temperature)
    policy.end_pass()
    difference = (quantized - exact).abs()
    return float(difference.mean()), float(difference.max())


# The reference that follows the policy: its moving average, and its part of a checkpoint.


@dataclass(frozen=True)
class MovingReference:
    """A reference whose weights are a moving average of the policy's weights. They are read and written where they rest.

    ``homes`` move the weights between host and device. Empty = they never move. Saving and loading raise CheckpointError with the
    name of the folder.
    """

    model: PolicyModel
    homes: tuple[OffloadedParams, ...]
    policy: TrainedModel

    def follow(self, alpha: float) -> None:
        on_host = self.model.stays_on_host or any(not home.on_device for home in self.homes)
        with self._readable(), readable(self.policy.home):
            move_towards(self._pairs(), alpha, on_host)
        self._changed()

    def save(self, folder: Path) -> Records:
        with self._readable():
            return save_weights(folder, self.model)

    def load(self, folder: Path) -> None:
        with self._readable():
            load_weights(folder, self.model)
        self._changed()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        with ExitStack() as stack:
            for home in self.homes:
                stack.enter_context(home.readable())
            yield

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        policy = dict(named_weights(self.policy.model))
        for name, reference in named_weights(self.model):
            yield reference, self.policy.master(policy[name])

    def _changed(self) -> None:
        # On the device the host's copy is now old. On the host that copy itself was changed.
        for home in self.homes:
            if home.on_device:
                home.changed()


# Move the weights of one model towards those of another, shard by shard, where they rest.
#
# It needs no bytes on the device if the target rests on the host, or if both models are on the device in fp32. Otherwise it needs
# two pieces of at most ``PIECE`` elements. It never copies a whole model.


PIECE = 2**22
"""Number of elements that are copied or converted at once: 16 MiB in fp32."""


def move_towards(pairs: Iterable[tuple[Tensor, Tensor]], alpha: float, on_host: bool) -> None:
    """Set each target to ``alpha * source + (1 - alpha) * target``, in place.

    The sum is computed in fp32 and rounded once, to the dtype of the target. ``pairs`` are (target, source) of each parameter.
    Both have the same shape and, on several ranks, the same shards, but may be on different devices. ``on_host`` says that the
    targets are on the host. The sum is then computed there.
    """
    with torch.no_grad(), scope("moving average", HOST if on_host else None):
        for target, source in pairs:
            pieces = zip(_flat_shard(target).split(PIECE), _flat_shard(source).split(PIECE), strict=True)
            # Piece by piece, so that no whole parameter is copied or converted.
            for into, piece in pieces:
                mixed = into if into.dtype == torch.float32 else into.float()
                mixed.mul_(1 - alpha).add_(piece.to(into.device).float(), alpha=alpha)
                if mixed is not into:
                    into.copy_(mixed)


def _flat_shard(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return local.view(-1)
