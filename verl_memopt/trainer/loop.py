"""The training loop: resume, validate, step and save, until the last step or until a stop is requested."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl_memopt.algorithms.records import DISTILL
from verl_memopt.config.reward_rules import FURTHER
from verl_memopt.config.schema import CheckpointContents, CustomReward, RewardModel, Settings
from verl_memopt.data.plugin import EndsProcessError, contained, raised
from verl_memopt.distributed.device import limited_threads
from verl_memopt.distributed.file_records import Records
from verl_memopt.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Stopped,
    StreamEndedError,
    TrainingError,
    UnreadableCheckpointError,
)
from verl_memopt.memory.critic_rules import own_pools
from verl_memopt.model.export import dtype_name, saved_dtype, whole_folder, write_record
from verl_memopt.observe.metrics import checkpoint_score
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.observe.run_folder import BEST_MODEL, FINAL_MODEL
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.rewards.sandbox import check_service
from verl_memopt.run.checkpoints import Checkpoint, read_checkpoint
from verl_memopt.run.export_model import StoredModel, export_model
from verl_memopt.run.interrupts import Interrupts, StopFile
from verl_memopt.run.resume import kept_settings, plain_shapes
from verl_memopt.trainer.build import STOP_FILE, RunContext, build_learner, build_validator
from verl_memopt.trainer.listener import Listener, Moment, Progress
from verl_memopt.trainer.micro_batching import role_updates
from verl_memopt.trainer.replay import mode_of
from verl_memopt.trainer.reporter import Reporter
from verl_memopt.trainer.step import STEPS, StepResult, TrainingStep
from verl_memopt.trainer.update_guard import Health, UpdateGuard, Updates
from verl_memopt.trainer.validate import Validation
from verl_memopt.worker.group import LocalGroup, Pending, PoolGroup, TimedGroup, WorkerGroup
from verl_memopt.worker.ray_group import RayGroup, group_of
from verl_memopt.worker.roles import WorkerPlan
from verl_memopt.worker.trained_model import ACTOR, CRITIC
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)

Returned = TypeVar("Returned")

REFERENCE = "ref"
"""Folder in a checkpoint that holds a moving reference."""

ALWAYS_TRACKED = 2
"""Number of first steps that are always tracked on a CPU. The second step is the first that begins with optimizer state."""


@dataclass(frozen=True)
class SavedRole:
    folder: str
    save: Callable[[Worker, str, Sequence[str]], Records]
    load: Callable[[Worker, str, Sequence[str]], None]
    settings: CheckpointContents


@dataclass(frozen=True)
class RunState:
    """Saves and loads a checkpoint: the trained roles in the workers, and the state of the driver.

    Attributes:
        further: Name -> another part of the driver that has a state.
    """

    context: RunContext
    workers: TimedGroup
    learner: TrainingStep
    further: dict[str, Any] = field(default_factory=dict)

    def save(self, step: int, score: float | None = None) -> Path:
        """Write the checkpoint of a step, and return its folder. Earlier checkpoints stay until this one is complete.

        ``score``: validation score of the step; None = the step was not validated.

        Raises:
            CheckpointError: A file cannot be written.
        """
        store = self.context.store
        aside = store.begin(step)
        records: Records = {}
        try:
            # Begin with roles that have their own devices, so that they write at the same time as the others.
            parts = sorted(self.parts(), key=lambda part: not self.workers.of(part.folder).is_apart)
            begun = [
                (part.folder, self.call(part, "save_checkpoint", part.save, aside, part.settings.save_contents)) for part in parts
            ]
            for folder, writing in begun:
                records |= {f"{folder}/{name}": record for written in writing.result() for name, record in written.items()}
        except CheckpointError as error:
            raise store.failed(step, str(error)) from error
        with self.workers.clock.phase("save_checkpoint"):
            return store.commit(step, self.driver_state(step), self.workers.world_size, records, score)

    def load(self, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
        """Load a checkpoint, except the position in the data. ``say`` is called with messages for the user.

        Raises:
            UnreadableCheckpointError: The checkpoint cannot be loaded.
        """
        try:
            for part in self.parts():
                if part.folder == REFERENCE and not (checkpoint.folder / part.folder).is_dir():
                    say(f"{checkpoint.folder} has no reference, so the reference starts from its model's folder")
                    continue
                self.call(part, "load_checkpoint", part.load, checkpoint.folder, part.settings.load_contents or []).result()
        except CheckpointError as error:
            text = f"{checkpoint.folder}: looks whole and cannot be loaded: {error} Name another step, or use resume_mode=auto."
            raise UnreadableCheckpointError(text, checkpoint.step, str(error)) from error
        # This run may have other parts than the run that saved the checkpoint. Load those that both have.
        saved = checkpoint.driver
        for parts, states in ((self.stateful(), saved), (self.learner.learned_budgets(), saved["token_budgets"])):
            for name in parts.keys() & states.keys():
                parts[name].load_state_dict(states[name])

    def call(
        self, part: SavedRole, phase: str, method: Callable[..., Returned], folder: Path, contents: Sequence[str]
    ) -> Pending[list[Returned]]:
        workers = self.workers.of(part.folder)
        return workers.begin(phase, method, [(str(folder / part.folder), list(contents))] * workers.world_size)

    def parts(self) -> list[SavedRole]:
        # The roles whose weights change. Each has a folder in every checkpoint.
        critic = self.context.worker_plan.critic
        parts = [SavedRole("actor", Worker.save, Worker.load, self.context.settings.actor_rollout_ref.actor.checkpoint)]
        if critic is not None:
            parts.append(SavedRole("critic", Worker.save_critic, Worker.load_critic, critic.checkpoint))
        if self.learner.reference_sync is not None:
            parts.append(SavedRole(REFERENCE, Worker.save_reference, Worker.load_reference, CheckpointContents()))
        return parts

    def stateful(self) -> dict[str, Any]:
        sync = self.learner.reference_sync  # None = the reference keeps its weights
        parts = {"kl_control": self.learner.kl_control, **self.further}
        entropy = self.learner.policy.policy_update.entropy  # None = the weight of the entropy bonus is constant
        optional = {"reference_sync": sync, "entropy_control": entropy}
        return parts | {name: part for name, part in optional.items() if part is not None}

    def driver_state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "seed": self.context.settings.data.seed,
            "loader": self.learner.rollouts.prompts.state_dict(),
            "token_budgets": {phase: budget.state_dict() for phase, budget in self.learner.learned_budgets().items()},
            **{name: part.state_dict() for name, part in self.stateful().items()},
            "settings": kept_settings(self.context.settings),
            "contents": dict(self.context.contents),
            "dtypes": self.dtypes(),
            "weights": plain_shapes(self.context.environment.weights),
            "critic_weights": plain_shapes(self.context.environment.critic_weights),
            "has_more": self.context.environment.has_more,
        }

    def dtypes(self) -> dict[str, str]:
        # The dtype of each starting model. An export has the same dtype.
        environment, critic = self.context.environment, self.context.worker_plan.critic
        actor = saved_dtype(environment.folder, self.context.settings.actor_rollout_ref.actor.fsdp_config)
        if critic is None or environment.critic_folder is None:
            return {"actor": dtype_name(actor)}
        critic_dtype = saved_dtype(environment.critic_folder, critic.model.fsdp_config)
        return {"actor": dtype_name(actor), "critic": dtype_name(critic_dtype)}


class TrainingLoop:
    def __init__(
        self,
        context: RunContext,
        workers: TimedGroup,
        runner: RewardRunner | None,
        reporter: Reporter,
        interrupts: Interrupts,
        listener: Listener | None = None,
    ) -> None:
        self.context = context
        self.settings = context.settings.trainer
        self.workers = workers
        self.runner = runner
        self.reporter = reporter
        self.interrupts = interrupts
        self.listener = listener
        self.ended = False
        """A listener has requested the end of the run, or the stream of training rows has ended."""
        self.mode = mode_of(context.settings)
        self.train_step = STEPS.get(context.settings.debug.mode, TrainingStep.train_step)
        self.learner = build_learner(context, workers, runner)
        self.validator = build_validator(context, self.learner.rollouts.generator, self.learner.scorer)
        self.learner.before_update = self.begin_update
        if runner is not None:
            # While answers are scored, the runner calls this to ask whether the step should be abandoned.
            runner.stopped = lambda: not self.weights_changed and interrupts.out_of_time()
        self.stop_file = StopFile(context.environment.run_dir / STOP_FILE)
        actor, critic = context.settings.actor_rollout_ref.actor, context.worker_plan.critic
        size = context.settings.data.train_batch_size
        critic_updates = None if critic is None else Updates(CRITIC, critic.optim.lr, role_updates(critic, size))
        actor_updates = Updates(ACTOR, actor.optim.lr, role_updates(actor, size))
        self.guard = UpdateGuard(self.settings.max_skipped_steps, context.store, actor_updates, critic_updates)
        validates = self.validator is not None and self.settings.test_freq > 0
        self.health = Health(validates, context.settings.algorithm.adv_estimator != DISTILL)
        self.state = RunState(context, workers, self.learner, {"guard": self.guard, "health": self.health})
        self.step = 0
        self.saved_step = 0
        self.score: float | None = None
        """Validation score of the current step; None = the step was not validated."""
        self.weights_changed = False
        """The current step has begun its update, so it can no longer be abandoned."""
        self.update_began = 0.0
        self.update_seconds = 0.0
        self.validation_seconds = 0.0

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.stop_file.remove()
            self.learner.close()

    def _run(self) -> None:
        self.resume()
        self.note_saved()
        self.track(0)
        self.learner.sync_weights()
        self.tell("begin")
        validates_first = self.settings.val_only or (self.settings.val_before_train and self.step == 0)
        if validates_first and self.validator is not None:
            validation = self.validator.validate(self.step)
            metrics = self.reporter.first_validation(self.step, validation, self.workers.take_memories())
            self.tell("validated", metrics, validation=validation)
            self.judge_validation(validation)
            self.score_of(validation)
        self.reporter.started(self.step, self.workers.take_memories())
        if not self.settings.val_only:
            self._train()
        self.tell("end")

    def _train(self) -> None:
        self.reporter.is_complete = self.saved_step > 0 and self.step >= self.context.total_steps
        self.stop_file.remove()
        self.interrupts.begin_steps(self.settings.stop_deadline_seconds, self.write_stop_file)
        while self.step < self.context.total_steps and not self.interrupts.requested and not self.ended:
            try:
                self.one_step(self.step + 1)
            except Stopped:
                self.learner.rollouts.prompts.give_back()
                self.reporter.say(f"step {self.step + 1} was abandoned for lack of time; the next start runs it again")
            except StreamEndedError as end:
                self.reporter.say(f"{end} The run ends after step {self.step} of {self.context.total_steps}.")
                self.ended = True
            except DataError:
                # A wrong row of a stream is found only when it is read. Save what was learned before it.
                if self.settings.save_freq > 0 and self.saved_step < self.step and self.mode.is_whole:
                    self.save()
                raise
        ends_early = self.interrupts.requested or (self.ended and self.settings.save_freq > 0)
        if ends_early and self.saved_step < self.step and self.mode.is_whole:
            self.save()
        if not self.interrupts.requested and self.mode.is_whole and self.settings.save_final_model:
            self.save_models()

    def one_step(self, step: int) -> None:
        self.track(step)
        self.weights_changed = False
        self.tell("step_begin", step=step)
        began = time.monotonic()
        with self.workers.clock.phase("step"):
            result = self.train_step(self.learner, step)
            self.update_seconds = time.monotonic() - self.update_began
            requests = self.tell("step", result.metrics, result=result, step=step)
            validation = self.validation(step, requests.validate)
        self.workers.note_idle(time.monotonic() - began)
        self.step = step
        self.score = None if validation is None else self.score_of(validation)
        metrics = self.reporter.step(step, self.learner.rollouts.prompts.epoch, result, validation, self.workers.take_memories())
        saves = requests.save | self.tell("logged", metrics).save
        if validation is not None:
            saves |= self.tell("validated", metrics, validation=validation).save
        if self.mode.updates:
            self.judge(result, validation)
        is_best = self.settings.keep_best_checkpoint is not None and self.context.store.is_better(self.score)
        if saves or self.due(self.settings.save_freq, step) or is_best:
            # Log first, then save. A run that is killed in between resumes before this step, and removes the step's log rows.
            try:
                self.save()
            except CheckpointError as error:
                if step < self.context.total_steps or not (self.settings.save_final_model and self.mode.is_whole):
                    raise
                self.save_models()  # a model is smaller than a checkpoint, so there may be room for it
                raise CheckpointError(f"{error} The trained model is saved: {self.context.store.root / FINAL_MODEL}.") from error

    def tell(
        self,
        moment: Moment,
        metrics: Mapping[str, float] | None = None,
        result: StepResult | None = None,
        validation: Validation | None = None,
        step: int | None = None,
    ) -> Progress:
        # Call the listener at a moment of the run, and return its requests. ``step``: None = the last finished step.
        done = self.step if step is None else step
        progress = Progress(moment, done, self.context.total_steps, metrics or {}, result, validation)
        if self.listener is not None:
            try:
                with contained("on_step, or a callback,"):
                    self.listener(progress)
            except EndsProcessError as problem:
                raise TrainingError(
                    f"on_step, or a callback: {raised(problem)}. To end a run, set progress.stop = True or raise an exception."
                ) from problem
        self.ended |= progress.stop
        return progress

    def begin_update(self) -> None:
        """Abandon the step if a stop was requested and the update would leave no time to save.

        Raises:
            Stopped: The step is abandoned.
        """
        # If this step validates, the validation must fit in as well. Expect it to take as long as the last one.
        validation = self.validation_seconds if self.due(self.settings.test_freq, self.step + 1) else 0.0
        if self.interrupts.too_late_for(self.update_seconds + validation):
            raise Stopped
        self.weights_changed = True
        self.update_began = time.monotonic()

    def write_stop_file(self, moment: float) -> None:
        # `moment` is in seconds since the epoch, because workers on other machines read it.
        try:
            self.stop_file.write(moment)
        except OSError as error:
            logger.warning("a rollout cannot be abandoned, because the stop file cannot be written: %s", error)

    def note_saved(self) -> None:
        if self.saved_step:
            self.interrupts.last_saved = f"The last complete checkpoint is of step {self.saved_step}; a new start resumes there"

    def due(self, every: int, step: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.context.total_steps)

    def judge(self, result: StepResult, validation: Validation | None) -> None:
        """Warn about problems in a finished step. Each kind of problem is reported once per run.

        Raises:
            TrainingError: Too many steps in a row applied no update.
        """
        samples = self.context.settings.actor_rollout_ref.rollout.n
        scores = [answer.score for answer in result.results]
        self.reporter.warn(self.step, self.health.step(self.step, scores, samples, result.metrics))
        if validation is not None:
            self.judge_validation(validation)
        self.guard.watch(self.step, result.metrics, sound=not self.health.collapsed)

    def judge_validation(self, validation: Validation) -> None:
        samples = self.context.settings.actor_rollout_ref.rollout.val_kwargs.n
        scores = [answer.score for _, results in validation.answers for answer in results]
        self.reporter.warn(self.step, self.health.validation(self.step, scores, samples))

    def validation(self, step: int, wanted: bool = False) -> Validation | None:
        """Validate and return the result, if a validation is ``wanted`` or due after this step.

        Raises:
            ConfigError: A validation is wanted, but there are no held-out rows.
        """
        if wanted and self.validator is None:
            raise ConfigError("validate: the run has no held-out rows. Set data.val_files (eval_dataset from Python).")
        if self.validator is None or not (wanted or self.due(self.settings.test_freq, step)):
            return None
        began = time.monotonic()
        validation = self.validator.validate(step)
        self.validation_seconds = time.monotonic() - began
        return validation

    def track(self, step: int) -> None:
        # Only a CPU is tracked: a GPU's allocator counts every step anyway.
        if self.runner is not None:
            self.runner.trainer_state = {"global_step": max(step - 1, 0), "max_steps": self.context.total_steps}
        every = self.settings.track_memory_every_steps
        first = ALWAYS_TRACKED + (0 if self.context.checkpoint is None else self.context.checkpoint.step)
        tracks = self.context.environment.device == "cpu" and every > 0 and (step <= first or step % every == 0)
        for workers in (self.workers, *self.workers.pools):
            workers.track = tracks

    def resume(self) -> None:
        """Load the checkpoint from which the run continues.

        Raises:
            UnreadableCheckpointError: The checkpoint cannot be loaded.
        """
        checkpoint = self.context.checkpoint
        if checkpoint is None:
            return
        for fault in checkpoint.passed_over:
            self.reporter.say(f"passed over {fault}")
        self.state.load(checkpoint, self.reporter.say)
        self.step = self.saved_step = checkpoint.step
        self.reporter.say(f"resumed from {checkpoint.folder} (step {checkpoint.step} of {self.context.total_steps})")

    def save(self) -> None:
        step, began = self.step, time.monotonic()
        self.state.save(step, self.score)
        self.saved_step = step
        self.reporter.saved(step, self.workers.take_memories())
        self.interrupts.save_seconds = time.monotonic() - began
        self.note_saved()
        self.tell("saved")

    def score_of(self, validation: Validation) -> float | None:
        """Return the validation score that ranks checkpoints.

        Raises:
            ConfigError: The validation does not have the metric that ``trainer.keep_best_checkpoint`` names.
        """
        metric = self.settings.keep_best_checkpoint
        if metric is None:
            return checkpoint_score(validation.metrics)
        name = metric.removeprefix("min:").removeprefix("max:")
        if name not in validation.metrics:
            raise ConfigError(
                f"trainer.keep_best_checkpoint={metric}: the validation has no such metric. It has "
                f"{', '.join(validation.metrics) or 'none'}."
            )
        return validation.metrics[name]

    def save_models(self) -> None:
        """Write the policy to ``model/``, and the policy of the best checkpoint to ``model_best/``, for other programs to load.

        Raises:
            CheckpointError: A file cannot be written. The checkpoints are intact.
        """
        try:
            self._save_models()
        except CheckpointError as error:
            saved = self.saved_step == self.step
            way_out = "start the same command again: it only writes the model" if saved else "set trainer.save_freq the next time"
            raise CheckpointError(f"{error} All steps are done. Free some space, and {way_out}.") from error

    def _save_models(self) -> None:
        store, roles, folder = self.context.store, self.context.settings.actor_rollout_ref, self.context.environment.folder
        final, best = store.root / FINAL_MODEL, store.best() if self.settings.keep_best_checkpoint is not None else None
        with whole_folder(final) as aside:
            self.workers.all("save_checkpoint", Worker.save_model, str(aside))
            dtype = saved_dtype(folder, roles.actor.fsdp_config)
            write_record(aside, self.step, "actor", roles.model.path, dtype)
        models = {final: f"The model of step {self.step}"}
        if best is not None:
            with self.workers.clock.phase("save_checkpoint"):
                export_model(StoredModel(read_checkpoint(store.folder(best), key="")), store.root / BEST_MODEL)
            models[store.root / BEST_MODEL] = f"The best model, of step {best}"
        self.reporter.saved(self.step, self.workers.take_memories())
        self.reporter.models = models


# Start the reward processes and the workers of a run, and end them with the run.


@contextmanager
def start_rewards(custom: CustomReward, reward_model: RewardModel, run_dir: Path) -> Iterator[RewardRunner]:
    """Start the reward processes, wait until each has loaded its function, and end them with the ``with`` block.

    Raises:
        RewardError: The function cannot be loaded, or the sandbox service does not answer.
    """
    workers, manager, concurrent = reward_model.num_workers, reward_model.reward_manager, reward_model.max_concurrent
    sandbox = None  # the service that runs programs for the built-in reward rules
    if custom.path is None and not reward_model.enable and reward_model.sandbox_fusion.url is not None:
        sandbox = reward_model.sandbox_fusion
    options = manager, concurrent, sandbox, reward_model.tolerant_rules
    with RewardRunner(custom, workers, run_dir / "reward_logs", *options) as runner:
        if sandbox is not None:
            check_service(sandbox)
        runner.check()
        yield runner


@contextmanager
def start_workers(context: RunContext, clock: PhaseClock, begun: RayGroup | None = None) -> Iterator[TimedGroup]:
    """Start the run's workers. ``clock`` measures the seconds of the start and of every call, each as a phase of its own.

    No worker is left when the ``with`` block ends, even if it ends with an error. ``begun``: a Ray group that has started, but
    has no workers yet; None = start one if the settings ask for Ray.
    """
    with limited_threads(context.environment.num_devices), _started(context, clock, begun) as workers:
        yield workers


@contextmanager
def _started(context: RunContext, clock: PhaseClock, begun: RayGroup | None) -> Iterator[TimedGroup]:
    timeline, device, plan = context.settings.ray_kwargs.timeline_json_file, context.environment.device, context.worker_plan
    roles = [role for role in own_pools(context.settings) if getattr(plan, role) is not None]
    build_worker = functools.partial(Worker, plan.without(roles))
    is_local = context.settings.trainer.worker_group == "local"
    group: WorkerGroup
    pools: Mapping[str, PoolGroup] = {}
    with clock.phase("init"):
        engine = "" if plan.engine_folder is None else f" and {context.settings.actor_rollout_ref.rollout.name}"
        logger.info("starting the %s%s", "model" if is_local else "model in Ray's workers", engine)
        if is_local:
            group = LocalGroup(build_worker, device)
        else:
            begun = begun or group_of(context.settings, device, pools=roles)
            begun.check_nodes(_read_by_workers(context.settings, plan), context.environment.run_dir)
            group = begun.build(build_worker, {role: functools.partial(Worker, plan.alone(role)) for role in roles})
            pools = begun.pools
    try:
        yield TimedGroup(group, clock, is_local, pools)
        if timeline is not None and isinstance(group, RayGroup):
            group.write_timeline(timeline)
        # Close the workers before shutdown kills them, because a killed engine leaves its shared memory behind.
        for workers in (group, *pools.values()):
            workers.all("close")
    finally:
        group.shutdown()


def _read_by_workers(settings: Settings, plan: WorkerPlan) -> dict[str, str]:
    roles = "actor_rollout_ref"
    paths = {
        f"{roles}.model.path": plan.folder,
        f"{roles}.model.tokenizer_path": plan.tokenizer_folder,
        f"{roles}.ref.model.path": plan.reference_folder,
        "critic.model.path": plan.critic_folder,
        "reward_model.model.path": plan.reward_folder or settings.reward_model.model.path,
        f"{roles}.actor.policy_loss.custom.path": settings.actor_rollout_ref.actor.policy_loss.custom.path,
    }
    further = dict(zip(settings.reward_model.further_models, plan.further_reward_folders or (), strict=False))
    paths |= {f"{FURTHER}.{name}": folder for name, folder in further.items()}
    names = ("teacher.model.path", *(f"teacher.further_models.{name}" for name in settings.teacher.further_models))
    paths |= dict(zip(names, plan.teacher_folders, strict=False))
    return {key: path for key, path in paths.items() if path is not None}
