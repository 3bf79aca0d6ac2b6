"""Puts a run together, from settings to workers and the step; a user's mistake shows before a worker starts."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from verl_memopt.algorithms.kl import KlController
from verl_memopt.config.schema import Data, Model, RayKwargs, Settings, Trainer
from verl_memopt.data.dataset import PromptDataset, build_dataset
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.loader import StepLoader, load_sampler
from verl_memopt.data.prefetcher import PromptPrefetcher
from verl_memopt.errors import ConfigError
from verl_memopt.knobs.conditions import needs_reference
from verl_memopt.models.build import load_model_config
from verl_memopt.models.export import export_folder
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.rewards.rules import check_sources
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.checkpoints import Checkpoint, CheckpointStore
from verl_memopt.trainer.environment import Environment, resolve_environment
from verl_memopt.trainer.experience import LogProbPass
from verl_memopt.trainer.generation import Generator
from verl_memopt.trainer.log_prob_mismatch import MismatchCheck
from verl_memopt.trainer.passes import budgets, update_gives_old_log_probs, updates_per_step
from verl_memopt.trainer.resume import checkpoint_store, compare_settings, find_checkpoint, with_seed
from verl_memopt.trainer.run_lock import RunLock, hold
from verl_memopt.trainer.step import Stepper
from verl_memopt.trainer.step_metrics import StepMetrics
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.trainer.update import PolicyUpdate
from verl_memopt.trainer.validate import Validator
from verl_memopt.workers.group import Placement, WorkerGroup
from verl_memopt.workers.local_group import start_local_group
from verl_memopt.workers.ray_group import RayGroup, start_ray_group
from verl_memopt.workers.worker import Worker, WorkerPlan

VAL_ONLY = "val_only"
"""Folder, inside the run's, of the record of ``trainer.val_only``."""


@dataclass(frozen=True)
class RunContext:
    """Everything a run needs but its workers.

    Attributes:
        settings: of the run, seeds drawn.
        folder: where the run writes its record.
        lock: the right to write there, which the user of the context releases.
        environment: what this machine has for the run.
        loader: gives the prompts of each step.
        validation: held-out rows; None without validation files.
        encoder: of the validation prompts.
        store: checkpoints of the run.
        checkpoint: that the run goes on from; None for a fresh start.
        total_steps: of the whole run, from step 1.
    """

    settings: Settings
    folder: Path
    lock: RunLock
    environment: Environment
    loader: StepLoader
    validation: PromptDataset | None
    encoder: PromptEncoder
    store: CheckpointStore
    checkpoint: Checkpoint | None
    total_steps: int

    @property
    def stop_file(self) -> Path:
        """Return the file by which workers learn that a rollout is given up."""
        return self.environment.run_dir / ".stop"

    @property
    def updates_per_step(self) -> int:
        """Return the optimizer steps of one training step."""
        actor = self.settings.actor_rollout_ref.actor
        return updates_per_step(self.settings.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs)


def build_run(settings: Settings, unreadable: Mapping[int, str] = MappingProxyType({})) -> RunContext:
    """Return the context of a run. It holds the lock of its folder.

    Args:
        settings: of the run.
        unreadable: step -> fault of checkpoints that looked whole and could not be loaded.

    Raises:
        ConfigError, DataError, CheckpointError: for whatever the user must mend.
    """
    environment = resolve_environment(settings)
    # A validation alone has a record of its own: it neither cuts back nor sets aside that of the run it looks at.
    folder = environment.run_dir / VAL_ONLY if settings.trainer.val_only else environment.run_dir
    lock = hold(folder)
    try:
        return _build_context(settings, environment, folder, lock, unreadable)
    except BaseException:
        lock.release()
        raise


def _build_context(
    settings: Settings, environment: Environment, folder: Path, lock: RunLock, unreadable: Mapping[int, str]
) -> RunContext:
    trainer, data = settings.trainer, settings.data
    store = checkpoint_store(trainer, data.val_files is not None, environment.run_dir)
    load_contents = settings.actor_rollout_ref.actor.checkpoint.load_contents
    checkpoint = find_checkpoint(trainer, load_contents, store, unreadable)
    settings = with_seed(settings, None if checkpoint is None else checkpoint.driver["seed"])
    compare_settings(settings, environment.weights, checkpoint)
    data = settings.data
    train = build_dataset(data.train_files, data, environment.tokenizer, "train")
    validation = None if data.val_files is None else build_dataset(data.val_files, data, environment.tokenizer, "val")
    if settings.custom_reward_function.path is None:
        check_sources((row.data_source, row.address) for split in (train, validation or ()) for row in split)
    loader = _build_loader(data, train, checkpoint)
    given_steps, epochs = trainer.total_training_steps, trainer.total_epochs
    return RunContext(
        settings=settings,
        folder=folder,
        lock=lock,
        environment=environment,
        loader=loader,
        validation=validation,
        encoder=PromptEncoder(environment.tokenizer, data.max_prompt_length, data.truncation, environment.embedding_rows),
        store=store,
        checkpoint=checkpoint,
        total_steps=epochs * loader.steps_per_epoch if given_steps is None else given_steps,
    )


def _build_loader(data: Data, rows: PromptDataset, checkpoint: Checkpoint | None) -> StepLoader:
    assert data.seed is not None
    loader = StepLoader(rows, data.train_batch_size, data.shuffle, data.seed, load_sampler(data.sampler))
    if checkpoint is not None:
        loader.load_state_dict(checkpoint.driver["loader"])
    return loader


@contextmanager
def start_rewards(context: RunContext) -> Iterator[RewardRunner]:
    """Start the reward processes, wait until each has its function, and end them with the body."""
    settings, logs = context.settings, context.environment.run_dir / "reward_logs"
    with RewardRunner(settings.custom_reward_function, settings.reward_model.num_workers, logs) as runner:
        runner.check()
        yield runner


@contextmanager
def start_workers(context: RunContext, clock: PhaseClock) -> Iterator[TimedGroup]:
    """Start the run's workers and, however the body ends, leave none behind."""
    trainer, ray = context.settings.trainer, context.settings.ray_kwargs
    with clock.phase("init"):
        build_worker = functools.partial(Worker, worker_plan(context))
        group = _start_group(build_worker, trainer, ray, context.environment.device)
    timeline = ray.timeline_json_file
    try:
        yield TimedGroup(group, clock, in_process=trainer.worker_group == "local")
        if timeline is not None and isinstance(group, RayGroup):
            group.write_timeline(timeline)
        # Workers that are killed, as shutdown does it, would leave the shared memory of their engines behind.
        group.all("close")
    finally:
        group.shutdown()


def _start_group(build_worker: Callable[[Placement], Worker], trainer: Trainer, ray: RayKwargs, device: str) -> WorkerGroup:
    if trainer.worker_group == "local":
        return start_local_group(build_worker, device)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) else max(1, (os.cpu_count() or 1) // trainer.n_gpus_per_node)
    return start_ray_group(
        build_worker,
        nnodes=trainer.nnodes,
        devices_per_node=trainer.n_gpus_per_node,
        device=device,
        timeout_seconds=trainer.ray_wait_register_center_timeout,
        ray_init=ray.ray_init,
        num_threads=threads,
    )


def worker_plan(context: RunContext) -> WorkerPlan:
    """Return what each worker builds."""
    settings, environment = context.settings, context.environment
    roles, reference = settings.actor_rollout_ref, environment.reference_folder
    return WorkerPlan(
        settings=roles,
        folder=str(environment.folder),
        engine_folder=str(_engine_folder(roles.model, roles.rollout.load_format, environment, context.folder)),
        reference_folder=None if reference is None else str(reference),
        tokenizer_folder=str(environment.tokenizer_folder),
        eos_token_ids=environment.eos_token_ids,
        optimizer_steps=context.total_steps * context.updates_per_step,
        free_engine=environment.free_engine,
        track_init=environment.device == "cpu" and settings.trainer.track_memory_every_steps > 0,
        memory=settings.memory,
        stop_file=str(context.stop_file),
    )


def _engine_folder(model: Model, load_format: str, environment: Environment, run_folder: Path) -> Path:
    """Return the folder whose config the engine reads: with overrides one of its own, so that both build the same model."""
    if not model.override_config and model.hf_config_path is None:
        return environment.folder
    if load_format != "dummy":
        raise ConfigError(
            "actor_rollout_ref.rollout.load_format: with model.override_config or model.hf_config_path the engine gets its "
            "weights from the trainer alone. Leave load_format at dummy."
        )
    folder = run_folder / "engine_config"
    export_folder(folder, load_model_config(model, environment.folder), environment.tokenizer_folder, None, writes=True)
    return folder


def build_validator(context: RunContext, generator: Generator, rewards: RewardRunner) -> Validator | None:
    """Return what validates; None without validation files."""
    if context.validation is None:
        return None
    batch_size, expansion = context.settings.data.val_batch_size, context.settings.algorithm.expansion
    return Validator(context.validation, batch_size, expansion, context.encoder, generator, rewards)


def _build_prefetcher(data: Data, loader: StepLoader, environment: Environment, n: int, expansion: str) -> PromptPrefetcher:
    # The prefetcher works in a thread of its own, and so needs a tokenizer of its own.
    tokenizer = copy.deepcopy(environment.tokenizer)
    encoder = PromptEncoder(tokenizer, data.max_prompt_length, data.truncation, environment.embedding_rows)
    return PromptPrefetcher(loader, n, expansion, encoder)


def build_stepper(context: RunContext, workers: TimedGroup, rewards: RewardRunner) -> Stepper:
    """Return the training step, each part with the settings that it reads."""
    settings, environment = context.settings, context.environment
    roles, data, algorithm = settings.actor_rollout_ref, settings.data, settings.algorithm
    actor, rollout, balance = roles.actor, roles.rollout, settings.trainer.balance_batch
    update_budget, old_budget, ref_budget = budgets(roles)
    on_policy = update_gives_old_log_probs(actor, data.train_batch_size, algorithm.use_kl_in_reward)
    old_pass = LogProbPass(workers, "old_log_prob", "old_log_probs", old_budget, balance, (actor.calculate_entropy,))
    ref_pass = LogProbPass(workers, "ref", "ref_log_probs", ref_budget, balance)
    return Stepper(
        workers=workers,
        prompts=_build_prefetcher(data, context.loader, environment, rollout.n, algorithm.expansion),
        generator=Generator(rollout, environment.tokenizer, workers, environment.free_engine),
        rewards=rewards,
        old_pass=None if on_policy else old_pass,
        ref_pass=ref_pass if needs_reference(settings) else None,
        mismatch=MismatchCheck(rollout, actor.fsdp_config),
        algorithm=algorithm,
        kl_control=KlController(algorithm.kl_ctrl),
        policy_update=PolicyUpdate(workers, actor, rollout.n, update_budget, balance, on_policy, context.store),
        step_metrics=StepMetrics(data.max_prompt_length, data.max_response_length, truncates=data.truncation != "error"),
    )
