"""Builds a run from its settings: site, data, rewards, checkpoints, workers; a user's mistake shows before a worker starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from verl_memopt.config.schema import Settings
from verl_memopt.data.dataset import PromptDataset, build_dataset
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.loader import StepLoader, load_sampler
from verl_memopt.errors import ConfigError
from verl_memopt.models.build import load_model_config
from verl_memopt.models.export import export_folder
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.rewards.rules import check_sources
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.trainer.checkpoints import Checkpoint, CheckpointStore
from verl_memopt.trainer.crew import Crew
from verl_memopt.trainer.resume import checkpoint_store, compare_settings, find_checkpoint
from verl_memopt.trainer.run_lock import RunLock, hold
from verl_memopt.trainer.site import Site, survey, with_seed
from verl_memopt.workers.group import WorkerGroup
from verl_memopt.workers.local_group import start_local_group
from verl_memopt.workers.ray_group import RayGroup, start_ray_group
from verl_memopt.workers.worker import Worker, WorkerPlan

VAL_ONLY = "val_only"
"""Folder, inside the run's, of the record of ``trainer.val_only``."""


@dataclass(frozen=True)
class Job:
    """Everything a run needs but its workers.

    folder: where it writes its record. lock: the right to write there, which the user of the job releases. total_steps: of
    the whole run, from step 1.
    """

    settings: Settings
    folder: Path
    lock: RunLock
    site: Site
    loader: StepLoader
    validation: PromptDataset | None
    encoder: PromptEncoder
    store: CheckpointStore
    checkpoint: Checkpoint | None
    total_steps: int


def prepare(settings: Settings, unreadable: Mapping[int, str] = MappingProxyType({})) -> Job:
    """Return the job of a run. It holds the lock of its folder.

    Args:
        settings: of the run.
        unreadable: step -> fault of checkpoints that looked whole and could not be loaded.

    Raises:
        ConfigError, DataError, CheckpointError: for whatever the user must mend.
    """
    site = survey(settings)
    # A validation alone has a record of its own: it neither cuts back nor sets aside that of the run it looks at.
    folder = site.run_dir / VAL_ONLY if settings.trainer.val_only else site.run_dir
    lock = hold(folder)
    try:
        return _prepared(settings, site, folder, lock, unreadable)
    except BaseException:
        lock.release()
        raise


def _prepared(settings: Settings, site: Site, folder: Path, lock: RunLock, unreadable: Mapping[int, str]) -> Job:
    store = checkpoint_store(settings, site.run_dir)
    checkpoint = find_checkpoint(settings, store, unreadable)
    settings = with_seed(settings, None if checkpoint is None else checkpoint.driver["seed"])
    compare_settings(settings, site.weights, checkpoint)
    data = settings.data
    train = build_dataset(data.train_files, data, site.tokenizer, "train")
    validation = None if data.val_files is None else build_dataset(data.val_files, data, site.tokenizer, "val")
    if settings.custom_reward_function.path is None:
        check_sources((row.data_source, row.address) for split in (train, validation or ()) for row in split)
    assert data.seed is not None
    loader = StepLoader(train, data.train_batch_size, data.shuffle, data.seed, load_sampler(data.sampler))
    if checkpoint is not None:
        loader.load_state_dict(checkpoint.driver["loader"])
    return Job(
        settings=settings,
        folder=folder,
        lock=lock,
        site=site,
        loader=loader,
        validation=validation,
        encoder=PromptEncoder(site.tokenizer, data.max_prompt_length, data.truncation),
        store=store,
        checkpoint=checkpoint,
        total_steps=_total_steps(settings, loader),
    )


def _total_steps(settings: Settings, loader: StepLoader) -> int:
    given = settings.trainer.total_training_steps
    return settings.trainer.total_epochs * loader.steps_per_epoch if given is None else given


def worker_plan(job: Job) -> WorkerPlan:
    """Gives what each worker builds."""
    settings, site = job.settings, job.site
    actor = settings.actor_rollout_ref.actor
    per_step = settings.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=str(site.folder),
        engine_folder=str(_engine_folder(job)),
        reference_folder=None if site.reference_folder is None else str(site.reference_folder),
        tokenizer_folder=str(site.tokenizer_folder),
        eos_token_ids=site.eos_token_ids,
        optimizer_steps=job.total_steps * per_step,
        free_engine=site.free_engine,
        track_init=site.device == "cpu" and settings.trainer.track_memory_every_steps > 0,
        memory=settings.memory,
    )


def _engine_folder(job: Job) -> Path:
    """Gives the folder whose config the engine reads: with overrides one of its own, so that both build the same model."""
    model, site = job.settings.actor_rollout_ref.model, job.site
    if not model.override_config and model.hf_config_path is None:
        return site.folder
    if job.settings.actor_rollout_ref.rollout.load_format != "dummy":
        raise ConfigError(
            "actor_rollout_ref.rollout.load_format: with model.override_config or model.hf_config_path the engine gets its "
            "weights from the trainer alone. Leave load_format at dummy."
        )
    folder = job.folder / "engine_config"
    export_folder(folder, load_model_config(model, site.folder), site.tokenizer_folder, None, writes=True)
    return folder


@contextmanager
def workers(job: Job, clock: PhaseClock) -> Iterator[Crew]:
    """Starts the run's workers and, however the body ends, leaves none behind."""
    with clock.phase("init"):
        group = _start_group(job)
    timeline = job.settings.ray_kwargs.timeline_json_file
    try:
        yield Crew(group, clock, in_process=job.settings.trainer.worker_group == "local")
        if timeline is not None and isinstance(group, RayGroup):
            group.write_timeline(timeline)
        # Workers that are killed, as shutdown does it, would leave the shared memory of their engines behind.
        group.all("close")
    finally:
        group.shutdown()


def _start_group(job: Job) -> WorkerGroup:
    trainer, site = job.settings.trainer, job.site
    factory = functools.partial(Worker, worker_plan(job))
    if trainer.worker_group == "local":
        return start_local_group(factory, site.device)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) else max(1, (os.cpu_count() or 1) // trainer.n_gpus_per_node)
    return start_ray_group(
        factory,
        nnodes=trainer.nnodes,
        devices_per_node=trainer.n_gpus_per_node,
        device=site.device,
        timeout_seconds=trainer.ray_wait_register_center_timeout,
        ray_init=job.settings.ray_kwargs.ray_init,
        num_threads=threads,
    )


@contextmanager
def reward_processes(job: Job) -> Iterator[RewardRunner]:
    """Starts the reward processes, waits until each has its function, and ends them with the body."""
    with RewardRunner(job.settings.custom_reward_function, job.settings.reward_model.num_workers) as runner:
        runner.check()
        yield runner
