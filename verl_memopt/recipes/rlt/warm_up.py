"""The supervised warm-up of a teacher: it learns to write explanations before RL makes them useful.

The loss is the mean negative log-prob of the explanation's tokens. It is the policy's own update with the loss
``-A * log-prob`` (``loss_mode=gpg``) and the advantage 1 for each token. So every memory knob of the update acts: packing by
tokens, chunked log-probs, activation checkpointing, offload, FSDP2. No rollout engine is built.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_memopt.config.loader import load_settings
from verl_memopt.config.plain import to_yaml
from verl_memopt.config.resume_diff import kept_settings
from verl_memopt.config.schema import Settings
from verl_memopt.data.loader import in_order, shuffled
from verl_memopt.distributed.file_records import Records
from verl_memopt.errors import CheckpointError, ConfigError, DataError
from verl_memopt.observe.console import RunConsole, memory_words
from verl_memopt.observe.loggers import LoggingPlace, build_loggers, check_loggers
from verl_memopt.observe.metrics import memory_metrics, throughput_metrics
from verl_memopt.observe.run_folder import RunFolder
from verl_memopt.observe.timing import PhaseClock
from verl_memopt.recipes.rlt.lessons import LessonSet, lesson_batch, read_lessons
from verl_memopt.trainer.checkpoints import Checkpoint, CheckpointStore
from verl_memopt.trainer.environment import Environment, resolve_environment
from verl_memopt.trainer.interrupts import Interrupts, of_process
from verl_memopt.trainer.mini_batches import MiniBatchCutter, role_updates
from verl_memopt.trainer.passes import budgets, cut_ranks
from verl_memopt.trainer.resume import checkpoint_store, compare_settings, find_checkpoint, loaded_parts, plain_shapes, with_seeds
from verl_memopt.trainer.run import build_parser
from verl_memopt.trainer.run_lock import hold
from verl_memopt.trainer.start import start_group
from verl_memopt.trainer.timed_group import TimedGroup
from verl_memopt.trainer.update import PolicyUpdate
from verl_memopt.trainer.update_guard import UpdateGuard
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.trained_model import ACTOR
from verl_memopt.workers.worker import Worker

logger = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"
LOSS, VAL_LOSS = "warm_up/loss", "warm_up/val_loss"
"""Metrics: nats per token of the explanations, of the step before its update and of the held-out rows."""
TOKENS = "warm_up/tokens"
"""Metric: tokens that a step computes, prompts included."""


def run(arguments: Sequence[str] | None, prog: str = "warm_up", config_dir: str | None = None) -> int:
    """Run the warm-up from a command line and return its exit code.

    Args:
        arguments: Of the command line; None = those of this process.
        prog: Name of the program in its help.
        config_dir: Folder of the YAML, if the command line names none.

    Raises:
        UserError: For what the user must mend.
    """
    from verl_memopt.observe.log_setup import setup_logging

    parser = build_parser(prog)
    parser.description = "Teach a model to write explanations, before RL: supervised, with the loss on their tokens alone."
    parser.set_defaults(config_name="warm_up", config_dir=config_dir)
    parsed = parser.parse_intermixed_args(arguments)
    setup_logging(level=logging.INFO)
    settings = load_settings(parsed.config_name, parsed.overrides, parsed.config_dir)
    check_warm_up(settings)
    if parsed.cfg is not None or settings.debug.mode == "dry":
        sys.stdout.write(to_yaml(settings))
        return 0
    with of_process() as interrupts:
        folder = warm_up(settings, interrupts)
    sys.stdout.write(f"{folder}\n")
    return interrupts.exit_code or 0


def check_warm_up(settings: Settings) -> None:
    """Refuse settings that would make the update something else than supervised learning.

    Raises:
        ConfigError: It names every such key.
    """
    roles, algorithm = settings.actor_rollout_ref, settings.algorithm
    actor = roles.actor
    expected = {
        f"{_ACTOR}.policy_loss.loss_mode": (actor.policy_loss.loss_mode, "gpg"),
        f"{_ACTOR}.use_kl_loss": (actor.use_kl_loss, False),
        f"{_ACTOR}.entropy_coeff": (actor.entropy_coeff, 0.0),
        f"{_ACTOR}.loss_agg_mode": (actor.loss_agg_mode, "token-mean"),
        "actor_rollout_ref.rollout.n": (roles.rollout.n, 1),
        "actor_rollout_ref.rollout.temperature": (roles.rollout.temperature, 1.0),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, False),
    }
    wrong = [f"{key}={value} (set {right})" for key, (value, right) in expected.items() if value != right]
    if wrong:
        raise ConfigError(f"a warm-up learns the explanations as they are: {', '.join(wrong)}. Or remove these keys.")


def warm_up(settings: Settings, interrupts: Interrupts) -> Path:
    """Run the warm-up and return the folder of the warmed-up model, in Hugging Face format.

    Args:
        settings: Of the run.
        interrupts: A request to stop. The warm-up then ends after the present step, with a checkpoint, and a new start goes on.

    Raises:
        UserError: For what the user must mend. Everything that was started has ended by then.
    """
    trainer, roles = settings.trainer, settings.actor_rollout_ref
    environment = resolve_environment(trainer, settings.ray_kwargs, settings.data, roles.model, roles.rollout, None, roles.actor)
    clock = PhaseClock()
    with hold(environment.run_dir):
        store = checkpoint_store(trainer, settings.data.val_files is not None, environment.run_dir)
        checkpoint = find_checkpoint(trainer, loaded_parts(roles.actor, None), store, {})
        data, _ = with_seeds(settings.data, roles.rollout, None if checkpoint is None else checkpoint.driver["seed"])
        settings = replace(settings, data=data)
        if checkpoint is not None:
            compare_settings(settings, environment, checkpoint)
        elif (aside := store.set_aside()) is not None:
            logger.info("the checkpoints of the earlier run are in %s; delete it to free its space", aside)
        tag_format = settings.reward_model.rlt.tag_format
        train = read_lessons(data.train_files, data, environment.tokenizer, "train", tag_format)
        held_out = None
        if data.val_files is not None:
            held_out = read_lessons(data.val_files, data, environment.tokenizer, "val", tag_format)
        steps = total_steps(settings, len(train))
        plan = worker_plan(settings, environment, steps)
        with start_group(plan, trainer, settings.ray_kwargs, environment.device, clock) as workers:
            return Teaching(settings, environment, workers, clock, store, train, held_out, steps, interrupts).run(checkpoint)


def total_steps(settings: Settings, num_lessons: int) -> int:
    """Return the steps of the warm-up: ``trainer.total_training_steps`` where it is set, else those of all epochs.

    Args:
        settings: Of the run.
        num_lessons: Lessons of an epoch.

    Raises:
        DataError: There are fewer lessons than one step learns.
    """
    batch = settings.data.train_batch_size
    if num_lessons < batch:
        raise DataError(f"data.train_batch_size={batch}: there are only {num_lessons} lessons. Lower it, or add data.")
    steps = settings.trainer.total_training_steps
    return settings.trainer.total_epochs * (num_lessons // batch) if steps is None else steps


def lessons_of_step(step: int, num_lessons: int, batch_size: int, seed: int | None) -> list[int]:
    """Return which lessons a step learns. Each epoch has another order; the rest of an epoch that fills no step is dropped.

    Args:
        step: Number of the step, from 1.
        num_lessons: Lessons of an epoch.
        batch_size: Lessons of a step.
        seed: Seed of the order. None = the order of the files.
    """
    epoch, place = divmod(step - 1, num_lessons // batch_size)
    order = list(in_order(num_lessons, 0, epoch) if seed is None else shuffled(num_lessons, seed, epoch))
    return order[place * batch_size : (place + 1) * batch_size]


def worker_plan(settings: Settings, environment: Environment, steps: int) -> WorkerPlan:
    """Return what each worker of a warm-up builds: the policy with its optimizer, and nothing else.

    Args:
        settings: Of the run.
        environment: Devices and folders.
        steps: Steps of the whole run.
    """
    roles = settings.actor_rollout_ref
    return WorkerPlan(
        settings=roles,
        folder=str(environment.folder),
        engine_folder=None,
        reference_folder=None,
        tokenizer_folder=str(environment.tokenizer_folder),
        eos_token_ids=environment.eos_token_ids,
        optimizer_steps=steps * role_updates(roles.actor, settings.data.train_batch_size),
        free_engine=environment.free_engine,
        track_init=environment.device == "cpu" and settings.trainer.track_memory_every_steps > 0,
        memory=settings.memory,
    )


@dataclass
class Teaching:
    """The steps of a warm-up whose workers are ready."""

    settings: Settings
    environment: Environment
    workers: TimedGroup
    clock: PhaseClock
    store: CheckpointStore
    train: LessonSet
    held_out: LessonSet | None
    steps: int
    interrupts: Interrupts

    def __post_init__(self) -> None:
        """Watch for updates that are skipped."""
        trainer, actor = self.settings.trainer, self.settings.actor_rollout_ref.actor
        updates = role_updates(actor, self.settings.data.train_batch_size)
        self.guard = UpdateGuard(trainer.max_skipped_steps, actor.optim.lr, self.store, updates)

    def run(self, checkpoint: Checkpoint | None) -> Path:
        """Take the steps that are left, and return the folder of the model after the last.

        Args:
            checkpoint: Where to continue; None = from the start.
        """
        trainer, first = self.settings.trainer, 0
        if checkpoint is not None:
            contents = list(self.settings.actor_rollout_ref.actor.checkpoint.load_contents or [])
            self.workers.all("load_checkpoint", Worker.load, str(checkpoint.folder / "actor"), contents)
            first = checkpoint.step
        record = RunFolder(self.environment.run_dir)
        resumed = None if checkpoint is None else first
        record.begin(to_yaml(self.settings), resumed)
        names = [name for name in check_loggers(trainer.logger) if name != "console"]
        place = LoggingPlace(record, RunConsole(self.steps), trainer.project_name, trainer.experiment_name, resumed)
        loggers = build_loggers(names, place)
        try:
            if checkpoint is None:
                self._track(0)
                loggers.log(0, self._validate() | memory_metrics(self.workers.take_memories()))
            self.clock.take()
            self.interrupts.begin_steps(trainer.stop_deadline_seconds, lambda moment: None)
            for step in range(first + 1, self.steps + 1):
                metrics = self._step(step)
                loggers.log(step, metrics)
                sys.stdout.write(f"step {step}/{self.steps} {_words(metrics)}\n")
                last = step == self.steps or self.interrupts.requested
                if last or self._due(step, trainer.save_freq):
                    self._save(step, metrics)
                self.guard.watch(step, metrics, sound=True)
                if last:
                    break
        finally:
            loggers.close()
        return self.store.folder(max(self.store.steps())) / "actor" / "huggingface"

    def _step(self, step: int) -> dict[str, float]:
        """Learn, validate where it is due, and return all metrics of the step."""
        self._track(step)
        with self.clock.phase("step"):
            metrics = self._learn(step)
            if self._due(step, self.settings.trainer.test_freq):
                metrics |= self._validate()
        return metrics | self._figures(metrics)

    def _learn(self, step: int) -> dict[str, float]:
        """Take the optimizer steps of one step and return their metrics."""
        data, roles = self.settings.data, self.settings.actor_rollout_ref
        rows = lessons_of_step(step, len(self.train), data.train_batch_size, data.seed if data.shuffle else None)
        batch = lesson_batch([self.train[row] for row in rows])
        budget = budgets(roles)[0]
        cutter = MiniBatchCutter(self.workers.world_size, roles.actor, 1, budget, self.settings.trainer.balance_batch)
        update = PolicyUpdate(cutter, roles.actor, self.store)
        mini_batches = update.cut(batch, [self.train.names[row] for row in rows], step)
        per_rank = self.workers.each("update_actor", Worker.update_actor, [(each,) for each in mini_batches])
        metrics = update.metrics(per_rank, step)
        tokens = sum(batch.prompts.sizes()) + sum(batch.responses.sizes())
        kept = {name: metrics[name] for name in (ACTOR.grad_norm, ACTOR.lr, ACTOR.skipped)}
        return {LOSS: metrics["actor/loss"], TOKENS: float(tokens), "training/global_step": float(step)} | kept

    def _validate(self) -> dict[str, float]:
        """Return the loss of the held-out lessons; nothing without them."""
        if self.held_out is None:
            return {}
        batch = lesson_batch(self.held_out.lessons)
        ranks, budget = self.workers.world_size, budgets(self.settings.actor_rollout_ref)[1]
        # Every rank has the same number of rows; the last ones are computed twice where they do not divide.
        rows = list(range(batch.num_rows)) + [batch.num_rows - 1] * (-batch.num_rows % ranks)
        shares = [rows[rank::ranks] for rank in range(ranks)]
        tokens = [batch.select(share).row_tokens() for share in shares]
        bins = cut_ranks(tokens, [[self.held_out.names[row] for row in share] for share in shares], budget)
        calls = [(batch.select(share), cut, False) for share, cut in zip(shares, bins, strict=True)]
        results = self.workers.each("old_log_prob", Worker.old_log_probs, calls)
        total, sizes, known = 0.0, batch.responses.sizes(), set[int]()
        for share, result in zip(shares, results, strict=True):
            for row, log_probs in zip(share, result.log_probs.split([sizes[row] for row in share]), strict=True):
                if row not in known:
                    known.add(row)
                    total -= float(log_probs.double().sum())
        return {VAL_LOSS: total / sum(sizes)}

    def _figures(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return times and memory of the phases since the last call."""
        timings = self.clock.timings()
        self.clock.take()
        figures = timings | memory_metrics(self.workers.take_memories())
        tokens = int(metrics[TOKENS])
        return figures | throughput_metrics(tokens, timings["timing_s/step"], self.environment.world_size)

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint with the model in Hugging Face format."""
        aside = self.store.begin(step)
        records: Records = {}
        try:
            contents = list(self.settings.actor_rollout_ref.actor.checkpoint.save_contents)
            for written in self.workers.all("save_checkpoint", Worker.save, str(aside / "actor"), contents):
                records |= {f"actor/{name}": record for name, record in written.items()}
        except CheckpointError as error:
            raise self.store.failed(step, str(error)) from error
        with self.clock.phase("save_checkpoint"):
            score = -metrics[VAL_LOSS] if VAL_LOSS in metrics else None
            self.store.commit(step, self._driver_state(step), self.workers.world_size, records, score)

    def _driver_state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "seed": self.settings.data.seed,
            "settings": kept_settings(self.settings),
            "weights": plain_shapes(self.environment.weights),
            "critic_weights": {},
        }

    def _track(self, step: int) -> None:
        every = self.settings.trainer.track_memory_every_steps
        self.workers.track = self.environment.device == "cpu" and every > 0 and (step <= 2 or step % every == 0)

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.steps)


def _words(metrics: dict[str, float]) -> str:
    """Return a step's losses, speed and memory as words of one line."""
    held_out = f" val_loss={metrics[VAL_LOSS]:.4f}" if VAL_LOSS in metrics else ""
    speed = f"tokens/s={metrics['perf/throughput']:,.0f} s/step={metrics['perf/time_per_step']:.2f}"
    return f"loss={metrics[LOSS]:.4f}{held_out} grad_norm={metrics[ACTOR.grad_norm]:.3f} {speed} {memory_words(metrics)}"
