"""Starts the processes of a run, its reward processes and its workers, and ends them with it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_memopt.config.schema import CustomReward, RayKwargs, RewardModel, SandboxFusion, Trainer
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.sandbox import check_service
from verl_memopt.trainer.build import RunContext
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.workers.group import WorkerGroup
from verl_memopt.workers.local_group import LocalGroup
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.ray_group import RayGroup, start_ray_group
from verl_memopt.workers.worker import Worker


@contextmanager
def start_rewards(custom: CustomReward, reward_model: RewardModel, run_dir: Path) -> Iterator[RewardRunner]:
    """Start the reward processes, wait until each has loaded its function, and end them with the body.

    Args:
        custom: settings of the user's reward function.
        reward_model: how many processes there are, and how rows reach the function.
        run_dir: gets a folder with what each process prints.

    Raises:
        RewardError: the function cannot be loaded, or the sandbox service does not answer.
    """
    workers, manager, concurrent = reward_model.num_workers, reward_model.reward_manager, reward_model.max_concurrent
    sandbox = _sandbox(custom, reward_model)
    with RewardRunner(custom, workers, run_dir / "reward_logs", manager, concurrent, sandbox) as runner:
        if sandbox is not None:
            check_service(sandbox)
        runner.check()
        yield runner


def _sandbox(custom: CustomReward, reward_model: RewardModel) -> SandboxFusion | None:
    """Return the settings of the service that runs programs for the rules; None where there is none, or no rule decides."""
    by_rules = custom.path is None and not reward_model.enable
    return reward_model.sandbox_fusion if by_rules and reward_model.sandbox_fusion.url is not None else None


@contextmanager
def start_workers(context: RunContext, clock: PhaseClock) -> Iterator[TimedGroup]:
    """Start the run's workers. However the body ends, none is left behind.

    Args:
        context: of the run.
        clock: times the start and every call as phases.
    """
    settings = context.settings
    with start_group(context.worker_plan, settings.trainer, settings.ray_kwargs, context.environment.device, clock) as workers:
        yield workers


@contextmanager
def start_group(plan: WorkerPlan, trainer: Trainer, ray: RayKwargs, device: str, clock: PhaseClock) -> Iterator[TimedGroup]:
    """Start the workers of a plan. However the body ends, none is left behind.

    Args:
        plan: what each worker builds.
        trainer: devices, nodes and the kind of the group.
        ray: arguments of Ray.
        device: cpu or cuda.
        clock: times the start and every call as phases.
    """
    build_worker = functools.partial(Worker, plan)
    is_local = trainer.worker_group == "local"
    group: WorkerGroup
    with clock.phase("init"):
        if is_local:
            group = LocalGroup(build_worker, device)
        else:
            group = start_ray_group(
                build_worker,
                nnodes=trainer.nnodes,
                devices_per_node=trainer.n_gpus_per_node,
                device=device,
                timeout_seconds=trainer.ray_wait_register_center_timeout,
                ray_init=ray.ray_init,
                num_threads=_threads_per_worker(trainer.n_gpus_per_node),
            )
    try:
        yield TimedGroup(group, clock, in_process=is_local)
        if ray.timeline_json_file is not None and isinstance(group, RayGroup):
            group.write_timeline(ray.timeline_json_file)
        # shutdown kills workers, which would leave the shared memory of their engines behind.
        group.all("close")
    finally:
        group.shutdown()


def _threads_per_worker(workers_per_node: int) -> int:
    """Return ``OMP_NUM_THREADS`` where it is set, else an equal share of this machine's cores."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable):
        return int(variable)
    return max(1, (os.cpu_count() or 1) // workers_per_node)
