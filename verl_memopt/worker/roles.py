"""Build the roles of a worker: each a sharded model, filled from its folder, with a place on the host if it may rest there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_memopt.config.schema import CriticModel, Fsdp, Model
from verl_memopt.distributed.device import is_gpu, training_mesh
from verl_memopt.memory.activation_offload_torch import BYTES_MOVED, CRITIC_BYTES_MOVED, ActivationOffload
from verl_memopt.memory.fused import compiler_works
from verl_memopt.memory.lora_torch import initialize_adapters, load_adapter
from verl_memopt.memory.quantized_frozen_torch import exact_weights
from verl_memopt.memory.residency import CRITIC, POLICY, REFERENCE, REWARD_MODEL, OffloadedParams, Residency
from verl_memopt.memory.streamed_params_torch import StreamedParams
from verl_memopt.model.assembly import (
    ModelUse,
    build_critic,
    build_policy,
    build_reward_model,
    build_trained_policy,
    materialize,
    materialize_critic,
    materialize_mapped,
)
from verl_memopt.model.families import POLICY_KEY
from verl_memopt.model.packed_model import PackedModel, PolicyModel
from verl_memopt.model.packing import pack_rows
from verl_memopt.model.packing_check import REWARD_KEY, check_packing
from verl_memopt.model.value_model import CRITIC_KEY, ValueModel, stored_head
from verl_memopt.model.weights import WeightFolder, named_weights
from verl_memopt.observe.phase import MIB
from verl_memopt.worker.critic import Critic
from verl_memopt.worker.group import Placement
from verl_memopt.worker.moving_reference import MovingReference, moving_reference
from verl_memopt.worker.plan import WorkerPlan
from verl_memopt.worker.policy import Policy, pack_log_probs, scoring_temperature
from verl_memopt.worker.trained_model import TrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenModel:
    """A model that is never trained: the reference, or a recipe's own.

    ``part`` is its name in the residency table. Errors name ``key``, the section that says how it is stored, and
    ``model_key``, the section of its model. ``compiled`` asks for compiled functions.
    """

    part: str
    key: str
    model_key: str
    model: Model
    fsdp: Fsdp
    compiled: bool
    quantization: str = "none"


@dataclass(frozen=True)
class RoleBuilder:
    """Builds the roles of one worker. All members of a group build the same roles in step.

    ``residency`` gets each part that may rest on the host. ``shared`` are the engine's weights, which the policy computes with;
    None = it has its own.
    """

    plan: WorkerPlan
    placement: Placement
    device: torch.device
    residency: Residency
    shared: Mapping[str, torch.Tensor] | None = None

    def policy(self) -> Policy:
        """Return the policy with its optimizer."""
        actor, model = self.plan.settings.actor, self.plan.settings.model
        fsdp, folder = actor.fsdp_config, Path(self.plan.folder)
        compiled = compiles_functions(actor.use_torch_compile, fsdp, self.device)
        policy_model = build_trained_policy(model, fsdp, folder, self._mesh(fsdp), self.device, compiled)
        materialize(policy_model, folder, self.device, self.shared)
        start_adapters(policy_model, model, fsdp.seed, POLICY_KEY)
        self._check_packing(policy_model, folder, POLICY_KEY)
        offload, world_size = self._offload(policy_model, model, BYTES_MOVED), self.placement.world_size
        policy = Policy(policy_model, actor, self.plan.schedule_steps, world_size, self.device, offload)
        fill_masters(policy.trained, folder)
        policy.bypass = self.plan.bypass
        if fsdp.param_offload:
            # With LoRA the reference is the policy without its adapters.
            also = (REFERENCE, *self._also) if model.lora_rank > 0 else ()
            policy.trained.home = self._home(POLICY, policy_model, also)
        return policy

    def critic(self, folder: Path) -> Critic:
        """Return the critic with its optimizer."""
        settings = self.plan.critic
        assert settings is not None
        model, fsdp = settings.model, settings.model.fsdp_config
        with self._own_seed(fsdp):
            value_model = build_critic(model, folder, self._mesh(fsdp), self.device)
        has_head = materialize_critic(value_model, folder, self.device)
        logger.info("the critic's value head %s", f"is that of {folder}" if has_head else f"starts at 0: {folder} has none")
        start_adapters(value_model, model, fsdp.seed, CRITIC_KEY)
        self._check_packing(value_model, folder, CRITIC_KEY)
        offload, world_size = self._offload(value_model, model, CRITIC_BYTES_MOVED), self.placement.world_size
        critic = Critic(value_model, settings, self.plan.critic_schedule_steps, world_size, self.device, offload)
        fill_masters(critic.trained, folder, stored_head(folder, CRITIC_KEY))
        if fsdp.param_offload:
            critic.trained.home = self._home(CRITIC, value_model)
        return critic

    def reference(self, folder: Path) -> PolicyModel:
        """Return the frozen reference."""
        settings, ref, key = self.plan.settings, self.plan.settings.ref, "actor_rollout_ref.ref"
        compiled = bool(ref.use_torch_compile)
        plan = FrozenModel(REFERENCE, key, POLICY_KEY, settings.model, ref.fsdp_config, compiled, ref.quantization)
        return self.frozen(plan, folder, self._also)

    def frozen(self, plan: FrozenModel, folder: Path, also: tuple[str, ...] = ()) -> PolicyModel:
        """Return a frozen model, filled from its folder.

        Args:
            plan: How it is built.
            folder: Folder of its model.
            also: Names of further parts that are this model, so that it is on the device in their phases.
        """
        fsdp, key = plan.fsdp, f"{plan.key}.fsdp_config"
        compiled = compiles_functions(plan.compiled, fsdp, self.device)
        use = ModelUse(fsdp_key=key, quantization=plan.quantization, compiled=compiled)
        with self._own_seed(fsdp):
            model = build_policy(plan.model, fsdp, folder, self._mesh(fsdp), self.device, use)
            model.requires_grad_(False)
            mapped = None  # the weights of a mapped model, which stays unfilled
            if self.plan.settings.model.load_mode == "mmap" and fsdp.param_offload:
                mapped = materialize_mapped(model, folder, self.device, f"{key}.model_dtype")
            else:
                materialize(model, folder, self.device)
        if plan.quantization != "none":
            self._log_quantization_error(model, folder, plan)
        if model.stream is not None:
            self._add_stream(plan.part, model.stream, also)
        elif fsdp.param_offload:
            home = self._home(plan.part, model, also, mapped)
            if mapped is not None:  # it gets its values on the device
                home.to_host()
                home.to_device()
        self._check_packing(model, folder, plan.model_key)
        return model

    def moving_reference(self, reference: PolicyModel, policy: Policy) -> MovingReference:
        """Return the reference as one that follows the policy.

        Raises:
            ConfigError: The two models differ in their weights' names or shapes.
        """
        home = self.residency.find(REFERENCE)
        # One that streams has its weights on the host at all times.
        moves = home if isinstance(home, OffloadedParams) else None
        return moving_reference(reference, moves, policy.trained, str(self.plan.reference_folder))

    def reward_model(self, folder: Path) -> ValueModel:
        """Return the frozen reward model, whose folder has a scalar head."""
        settings = self.plan.reward_model
        assert settings is not None
        fsdp = settings.fsdp_config
        with self._own_seed(fsdp):
            reward_model = build_reward_model(settings, self.plan.settings.model, folder, self._mesh(fsdp), self.device)
            reward_model.requires_grad_(False)
            has_head = materialize_critic(reward_model, folder, self.device, REWARD_KEY)
        assert has_head, f"{folder} was checked before the workers started"
        if reward_model.stream is not None:
            self._add_stream(REWARD_MODEL, reward_model.stream)
        elif fsdp.param_offload:
            self._home(REWARD_MODEL, reward_model)
        self._check_packing(reward_model, folder, REWARD_KEY)
        return reward_model

    def _mesh(self, fsdp: Fsdp) -> DeviceMesh:
        return training_mesh(self.device.type, self.placement.world_size, fsdp.fsdp_size)

    @contextmanager
    def _own_seed(self, fsdp: Fsdp) -> Iterator[None]:
        """Seed torch for a model in the body, and leave the policy's random state as it was."""
        with torch.random.fork_rng(devices=[]):
            make_deterministic(fsdp, self.placement.rank)
            yield

    def _home(
        self, part: str, model: PackedModel, also: tuple[str, ...] = (), mapped: list[torch.Tensor] | None = None
    ) -> OffloadedParams:
        """Give a model's parameters a place on the host, under its name in the residency table."""
        home = OffloadedParams(part, model.parameters(), self.device, mapped)
        self.residency.add(home, also)
        return home

    def _add_stream(self, part: str, stream: StreamedParams, also: tuple[str, ...] = ()) -> None:
        """Enter a model that streams into the residency table under its name, and log what it holds and moves."""
        stream.name = part
        self.residency.add(stream, also)
        logger.info(
            "%s: %.4g MiB rest on the host and come to the device for every micro-batch, at most %.4g MiB of them at once",
            part, stream.num_bytes / MIB, stream.most_bytes / MIB,
        )  # fmt: skip

    @property
    def _also(self) -> tuple[str, ...]:
        """Name of a recipe's model where the reference is that model."""
        role = self.plan.role
        return (REWARD_MODEL,) if role is not None and role.is_reference else ()

    def _offload(self, packed_model: PackedModel, model: Model | CriticModel, metric: str) -> ActivationOffload | None:
        if not model.enable_activation_offload:
            return None
        min_bytes, in_flight = model.activation_offload_min_bytes, model.activation_offload_in_flight
        return ActivationOffload(packed_model, self.device, min_bytes, in_flight, metric=metric)

    def _check_packing(self, packed_model: PackedModel, folder: Path, key: str) -> None:
        check_packing(packed_model, self.device, packed_model.compute, self.plan.settings.actor, str(folder), key)

    def _log_quantization_error(self, model: PolicyModel, folder: Path, plan: FrozenModel) -> None:
        mean, largest = quantization_error(model, folder, self.device, scoring_temperature(self.plan.settings.rollout))
        logger.info(
            "%s.quantization=%s: log-probs differ from the unquantised model's by %.2g nats on average, %.2g at most "
            "(256 random tokens)", plan.key, plan.quantization, mean, largest,
        )  # fmt: skip


def fill_masters(trained: TrainedModel, folder: Path, renamed: Mapping[str, str | None] | None = None) -> None:
    """Give split masters the values of the model's folder where the parameters, which have them already, have fewer digits.

    ``renamed`` has the names in the folder of parameters with another name there. None = the folder lacks it.
    """
    if trained.masters is None:
        return
    weights = WeightFolder(folder)
    for name, parameter in named_weights(trained.model):
        stored = (renamed or {}).get(name, name)
        values = None if stored is None else weights.read(stored, ())
        if values is not None and values.dtype != parameter.dtype:
            trained.masters.set_master(parameter, values)


def start_adapters(packed_model: PackedModel, model: Model | CriticModel, seed: int, key: str) -> None:
    """Give the adapters of a model, if it has any, their first values: those of a folder, or a random A and a B of zeros.

    ``seed`` is that of the random values.
    """
    if model.lora_adapter_path is not None:
        load_adapter(Path(model.lora_adapter_path), packed_model, key)
    else:
        initialize_adapters(packed_model, seed)


def compiles_functions(requested: bool, fsdp: Fsdp, device: torch.device) -> bool:
    """Return whether small functions are compiled: on a GPU with a working compiler, without full determinism.

    ``requested`` is the role's ``use_torch_compile``.
    """
    return requested and is_gpu(device) and not fsdp.full_determinism and compiler_works(device)


def make_deterministic(fsdp: Fsdp, rank: int) -> None:
    """Seed torch's generators for this rank. With ``full_determinism`` also use deterministic kernels alone."""
    torch.manual_seed(fsdp.seed + rank)
    if fsdp.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# Measure what quantising a frozen model changes in its log-probs.


def exact_weights_of(policy: PolicyModel, folder: Path, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which a quantised model computes with its unquantised weights, read from the folder when needed."""
    weights = WeightFolder(folder)
    return exact_weights(policy, lambda name: weights.read(name, ()).to(device))


def quantization_error(policy: PolicyModel, folder: Path, device: torch.device, temperature: float) -> tuple[float, float]:
    """Return the (mean, largest) difference in nats between the log-probs of a quantised model and of its unquantised weights.

    Measured on 4 x 64 random tokens. The unquantised weights are read from the folder, one layer at a time.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(policy.lm.config.vocab_size)
    tokens = torch.randint(vocabulary, (4 * 65,), generator=generator)
    pack = pack_rows(tokens[:4], [1] * 4, tokens[4:], [64] * 4).to(device)
    quantized, _ = pack_log_probs(policy, pack, temperature, False)
    with exact_weights_of(policy, folder, device):
        exact, _ = pack_log_probs(policy, pack, temperature, False)
    policy.end_pass()
    difference = (quantized - exact).abs()
    return float(difference.mean()), float(difference.max())
