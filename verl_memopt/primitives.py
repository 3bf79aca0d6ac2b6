"""The primitives of a training step, for a training loop of your own: :func:`session`.

A session has the same settings and the same code as a run. Residency, offload, packing, shared prompts and sharding work as in a
run. A loop that calls the primitives in the order of a run therefore computes the same numbers.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_memopt.algorithms.custom import check_custom
from verl_memopt.algorithms.records import CUSTOM, DISTILL, LOSSES, SFT, WITH_GREEDY_RESPONSES
from verl_memopt.api import NO_ROWS, Call
from verl_memopt.config.aliases import is_count
from verl_memopt.config.checks import check
from verl_memopt.config.keys import leaf_values, raise_together, replaced
from verl_memopt.config.loader import to_yaml
from verl_memopt.config.role_settings import LEAST_TEMPERATURE
from verl_memopt.config.schema import Rollout, Settings
from verl_memopt.data.batch import scatter_tokens
from verl_memopt.data.dataset import build_dataset
from verl_memopt.data.prompts import PromptPrefetcher, StepPrompts, expand
from verl_memopt.data.python_rows import PythonRows, write_rows
from verl_memopt.errors import ConfigError, RewardError
from verl_memopt.model.export import saved_dtype, whole_folder, write_record
from verl_memopt.observe.own_files import others_in_model, private_files
from verl_memopt.observe.phase import PhaseClock
from verl_memopt.observe.run_folder import INPUTS, RunFolder
from verl_memopt.records import usable_path
from verl_memopt.rewards.python_functions import say_secrets
from verl_memopt.rewards.score import RewardResult
from verl_memopt.run.checkpoints import check_driver, read_checkpoint
from verl_memopt.run.resume import compare_settings
from verl_memopt.run.run_lock import only_run
from verl_memopt.trainer.build import RunContext, build_learner, build_run, teacher_columns
from verl_memopt.trainer.loop import RunState, start_workers
from verl_memopt.trainer.micro_batching import global_metrics, with_replayed_share
from verl_memopt.trainer.rollouts import StepBatch
from verl_memopt.trainer.step import PolicyTraining, TrainingStep
from verl_memopt.worker.trained_model import ACTOR
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)


class Answers:
    """Answers to prompts, in the row order of the whole package: row = prompt * n + sample."""

    def __init__(self, batch: StepBatch, temperature: float | None = None) -> None:
        self._batch = batch
        self._temperature = temperature  # None = the temperature of the session

    def __len__(self) -> int:
        return self._batch.rows.num_rows

    @property
    def texts(self) -> list[str]:
        """The text of each answer, without special tokens."""
        return self._batch.answers.texts

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset row of each answer, in the form of ``row`` in a reward function ``f(answer, row)``, with the ``prompt``."""
        return [
            {**row.extra_info, "data_source": row.data_source, "ground_truth": row.ground_truth}
            | {"prompt": row.messages or row.text}
            for row in self._batch.answers.rows
        ]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of each answer's prompt."""
        return self._batch.answers.prompt_ids

    @property
    def response_ids(self) -> list[list[int]]:
        """Token ids of each answer."""
        return self._batch.answers.generation.response_ids

    @property
    def messages(self) -> list[list[dict[str, Any]]] | None:
        """All messages of each conversation, with calls and results of tools. None = the session has no tools."""
        conversations = self._batch.answers.conversations
        return None if conversations is None else [each.messages for each in conversations]

    @property
    def environment_rewards(self) -> list[float | None] | None:
        """The reward of each conversation's environment. None in the list = it gave none. None = the session has no tools."""
        conversations = self._batch.answers.conversations
        return None if conversations is None else [each.reward for each in conversations]

    @property
    def ended(self) -> list[str] | None:
        """Why each conversation ended, with the reason if its environment failed. None = the session has no tools."""
        conversations = self._batch.answers.conversations
        return None if conversations is None else [each.record()["ended"] for each in conversations]

    @property
    def finish_reasons(self) -> list[str]:
        """Why each answer ended: ``stop`` = by itself, ``length`` = at the length limit."""
        return list(self._batch.answers.generation.finish_reasons)

    @property
    def engine_log_probs(self) -> list[list[float]] | None:
        """The engine's log-probs of the tokens of each answer. None = the engine was not asked for log-probs."""
        return self._batch.answers.generation.log_probs


class Session:
    """A policy, its rollout engine, and the primitives of a training step. :func:`session` makes one."""

    def __init__(self, context: RunContext, learner: TrainingStep, folder: Path, has_dataset: bool) -> None:
        self._context, self._parts, self.folder, self._has_dataset = context, learner, folder, has_dataset
        self.closed = False
        """Whether the ``with`` block has ended."""
        self._state = RunState(context, learner.workers, learner)
        own = context.settings.actor_rollout_ref.actor.policy_loss
        self._own_loss = {"loss_mode": own.loss_mode, "custom.path": own.custom.path, "custom.name": own.custom.name}
        self._losses: list[Callable[..., Any]] = []
        self._num_gradients = 0
        self.step = 0
        """Step number of the last :meth:`generate`."""
        if context.checkpoint is None:
            RunFolder(context.folder).set_aside(to_yaml(context.settings, secrets=False))  # the files of an earlier session
        else:
            self._state.load(context.checkpoint, logger.info)
            self.step = context.checkpoint.step
        RunFolder(context.folder).accept()
        learner.sync_weights()

    def generate(self, prompts: Sequence[Any] | None = None, n: int | None = None, temperature: float | None = None) -> Answers:
        """Answer prompts. The engine releases its memory afterwards.

        Args:
            prompts: Strings, lists of ``{role, content}``, or rows with a column ``prompt``. None = the dataset's next prompts.
            n: Number of answers per prompt. None = ``actor_rollout_ref.rollout.n``.
            temperature: Temperature of these answers only; 0 = always the most likely token. :meth:`update` refuses answers of
                another temperature than the session's, because the policy's log-probs are computed at the session's temperature.
                None = ``actor_rollout_ref.rollout.temperature``.

        Raises:
            UserError: A prompt or a temperature is wrong, or there is no dataset.
        """
        if prompts is None and not self._has_dataset:
            raise ConfigError("generate: there are no prompts. Give some, or give the session a dataset.")
        rollouts, rollout = self._learner.rollouts, self._learner.rollouts.generator.rollout
        samples = rollout.n if n is None else n
        if not is_count(samples):
            raise ConfigError(f"generate(n={n!r}): give a whole number of answers, at least 1.")
        if isinstance(prompts, str):
            raise ConfigError(f"generate: {prompts!r:.100} is one text. Give a list of prompts.")
        if temperature is not None:
            rollout = _at_temperature(rollout, temperature)
            rollouts = replace(rollouts, generator=replace(rollouts.generator, rollout=rollout))
        if prompts is None:
            if n not in (None, rollout.n):
                raise ConfigError(
                    f"generate(n={n}): the dataset's prompts are prepared for rollout.n={rollout.n}. Give prompts too."
                )
            assert isinstance(rollouts.prompts, PromptPrefetcher)
            self.step += 1
            return Answers(rollouts.generate(rollouts.prompts.next(), self.step), temperature)
        here, encoded = replace(rollout, n=samples), self._encoded(prompts, samples)
        self.step += 1
        rollouts = replace(rollouts, generator=replace(rollouts.generator, rollout=here))
        return Answers(rollouts.generate(encoded, self.step), temperature)

    def log_probs(self, answers: Answers, reference: bool = False) -> list[Tensor]:
        """Return the log-prob of each token by the policy, or with ``reference`` by the reference: fp32 [tokens] per answer.

        Raises:
            ConfigError: The session has no reference.
        """
        learner, batch = self._learner, answers._batch
        if not reference:
            log_probs = self._policy.old_pass.compute(batch.rows, batch.names).log_probs
        elif learner.ref_pass is None:
            raise ConfigError("log_probs(reference=True): the session has no reference. Set actor.use_kl_loss=true.")
        else:
            log_probs = batch.rows.ref_log_probs = learner.ref_pass.compute(batch.rows, batch.names).log_probs
        return list(log_probs.split(batch.rows.responses.sizes()))

    def teacher_log_probs(self, answers: Answers) -> list[Tensor]:
        """Return the teacher's log-prob of each token: fp32 [tokens] per answer.

        The teacher reads its own prompts, if ``distill.teacher_prompt`` is set.

        Raises:
            ConfigError: The session has no teacher, or one with another tokenizer.
            TeacherError: A server that runs the teacher gives no log-probs.
        """
        learner, batch = self._learner, answers._batch
        if learner.teacher is None:
            raise ConfigError("teacher_log_probs: the session has no teacher. Give session(..., teacher=...).")
        return list(learner.teacher.judge(batch).split(batch.rows.responses.sizes()))

    def advantages(self, answers: Answers, scores: Sequence[float]) -> list[Tensor]:
        """Compute the advantage of each token by the session's algorithm: fp32 [tokens] per answer.

        ``scores`` has one reward per answer. :meth:`update` uses these advantages if it is given no others. With
        ``distill.divergence=sampled`` they contain what the teacher says.

        Raises:
            RewardError: The number of scores is wrong, or one is not a number.
        """
        if len(scores) != len(answers):
            raise RewardError(f"advantages: there are {len(scores)} scores for {len(answers)} answers. Give one for each.")
        learner, batch = self._learner, answers._batch
        results = [_result(number, score) for number, score in enumerate(scores)]
        self._complete(batch)
        batch.results = results
        learner.advantages(batch)
        assert batch.rows.advantages is not None
        return list(batch.rows.advantages.split(batch.rows.responses.sizes()))

    def update(
        self, answers: Answers, advantages: Sequence[Any] | None = None, loss: str | Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Train the policy on answers, with one optimizer step per mini-batch, and return the metrics.

        Args:
            answers: Answers from :meth:`generate`.
            advantages: One number per answer, or per answer one number per token. None = the result of :meth:`advantages`, or,
                with ``algorithm=distill``, what is learned from the teacher alone.
            loss: The loss of this call: a name as in ``policy_loss.loss_mode``, or a function of ``log_prob``, ``old_log_prob``,
                ``advantages``, ``response_mask`` and ``config``, as in ``policy_loss.custom``. None = the loss in the settings.

        Raises:
            ConfigError: Advantages are missing, or their number does not match the answers or tokens. Or the loss is unknown, or
                conflicts with another setting.
        """
        learner, batch = self._learner, answers._batch
        self._prepare("update", answers, advantages, loss)
        if self._num_gradients:
            raise ConfigError("update: a gradient of forward_backward() has no step yet. Call optim_step() first.")
        # The number of prompts and of answers per prompt may differ from the settings.
        rows, names = batch.for_update()
        policy, critic, samples = self._policy, learner.critic, batch.rows.num_rows // batch.rows.group.unique().numel()
        cutter = replace(policy.policy_update.cutter, samples=samples)
        minis = cutter.mini_batch_rows(rows, batch.step)
        if critic is not None:
            critic = replace(critic, cutter=replace(critic.cutter, samples=samples))
            critic_update = critic.begin_update(rows, names, batch.step)
        policy = replace(policy, policy_update=replace(policy.policy_update, cutter=cutter))
        if len(minis) == 1:
            policy.update(batch)
        else:  # the first step changes the policy, so compute the old log-probs before it
            if rows.old_log_probs is None:
                policy.add_old_log_probs(batch)
            batch.metrics |= policy.take_steps(batch)
        if learner.reference_sync is not None:
            batch.metrics |= learner.reference_sync.after_update(batch.metrics)
        if critic is not None:
            batch.metrics |= critic_update.result()
        if batch.advantages is not None:
            learner.metrics(batch)
        return batch.metrics

    def forward_backward(
        self, answers: Answers, advantages: Sequence[Any] | None = None, loss: str | Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Add the gradient of answers to the gradient of earlier calls, and return the metrics. Then call :meth:`optim_step`.

        All answers form one mini-batch: the loss is averaged over its tokens or rows. Arguments and errors are as in
        :meth:`update`.
        """
        learner, batch = self._learner, answers._batch
        if learner.critic is not None:
            raise ConfigError("forward_backward: this session has a critic, which update() trains. Use update().")
        if self._context.settings.actor_rollout_ref.actor.optim.in_backward:
            raise ConfigError(
                "actor_rollout_ref.actor.optim.in_backward=true: the backward would take the optimizer step, but "
                "forward_backward() takes none. Set it to false, or use update()."
            )
        self._prepare("forward_backward", answers, advantages, loss)
        rows, names = batch.for_update()
        update = self._policy.policy_update
        minis = update.cut_whole(rows, names, batch.step)
        parts = learner.workers.each("update_actor", Worker.add_gradient, [(mini,) for mini in minis])
        self._num_gradients += 1
        if rows.old_log_probs is None:
            shares = update.cutter.shares(rows, range(rows.num_rows))
            log_probs = [(share, part.log_probs) for share, part in zip(shares, parts, strict=True)]
            batch.keep_log_probs(scatter_tokens(log_probs, rows.responses.sizes()))
            self._policy.compare_log_probs(batch)
        return with_replayed_share({name: sum(part.metrics[name] for part in parts) for name in parts[0].metrics})

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Take one optimizer step with the gradient of :meth:`forward_backward`; return gradient norm and learning rate.

        ``learning_rate`` applies to this step alone. None = the rate of the session's schedule. The schedule advances in both
        cases.

        Raises:
            ConfigError: There is no gradient, or the learning rate is negative or not a number.
        """
        if learning_rate is not None and not (isinstance(learning_rate, int | float) and 0 <= learning_rate < math.inf):
            raise ConfigError(f"optim_step: learning_rate={learning_rate!r:.100}: give a number of at least 0.")
        if not self._num_gradients:
            raise ConfigError("optim_step: there is no gradient. Call forward_backward(answers, advantages) first.")
        metrics = self._learner.workers.all("update_actor", Worker.take_step, learning_rate)
        self._num_gradients = 0
        return global_metrics(metrics, ACTOR)

    def sample(self, prompts: Sequence[Any] | None = None, num_samples: int | None = None) -> Answers:
        """Another name for :meth:`generate`, with ``num_samples`` answers per prompt."""
        return self.generate(prompts, num_samples)

    def save_state(self) -> Path:
        """Save a checkpoint: weights, optimizer state, learning-rate schedule and position in the data. Return its folder.

        The checkpoint is ``global_step_N`` in the session's folder. :meth:`load_state` loads it, and a run loads it with
        ``trainer.resume_from_path``. ``trainer.max_actor_ckpt_to_keep`` limits the number of checkpoints that are kept.

        Raises:
            CheckpointError: A file cannot be written.
        """
        self._check_open()
        return self._state.save(self.step)

    def load_state(self, path: str | Path) -> None:
        """Load a checkpoint of :meth:`save_state` or of a run, and continue after its step. The engine gets its weights too.

        Raises:
            CheckpointError: There is no intact checkpoint.
            UserError: The checkpoint belongs to another model or dataset.
        """
        context, rollouts = self._context, self._learner.rollouts
        checkpoint = read_checkpoint(usable_path(path, "load_state(path)"), key="load_state: ")
        check_driver(checkpoint)
        own, seed = context.settings, checkpoint.driver["seed"]
        seeds = {"data.seed": seed}
        if own.actor_rollout_ref.rollout.seed == own.data.seed:  # the rollout's seed is set to the seed of the data by default
            seeds["actor_rollout_ref.rollout.seed"] = seed
        settings = replaced(own, seeds)
        compare_settings(settings, context.environment, checkpoint)
        if self._has_dataset:
            assert isinstance(rollouts.prompts, PromptPrefetcher)
            rollouts.prompts.load_state_dict(checkpoint.driver["loader"])
        self._state.load(checkpoint, logger.info)
        context.store.resumed(checkpoint)
        generator = replace(rollouts.generator, rollout=settings.actor_rollout_ref.rollout)
        self._parts.rollouts = replace(rollouts, generator=generator)
        self._context = replace(context, settings=settings)
        self._state = replace(self._state, context=self._context)
        self.step, self._num_gradients = checkpoint.step, 0
        self.sync()

    def sync(self) -> None:
        """Copy the policy's weights to the engine."""
        self._learner.sync_weights()

    def save(self, path: str | Path) -> Path:
        """Save the policy in the form that transformers and vLLM load, and return the folder. An earlier saved model is replaced.

        Raises:
            ConfigError: The folder contains a file that does not belong to a saved model.
        """
        target = usable_path(path, "save(path)", ConfigError).expanduser().absolute()
        if others := others_in_model(target):
            raise ConfigError(
                f"save: {target} is not the folder of a saved model: {others[0]} does not belong to one. Give another folder, or "
                "remove it."
            )
        context = self._context
        dtype = saved_dtype(context.environment.folder, context.settings.actor_rollout_ref.actor.fsdp_config)
        with whole_folder(target) as aside:
            self._learner.workers.all("save_checkpoint", Worker.save_model, str(aside))
            write_record(aside, self.step, "actor", context.settings.actor_rollout_ref.model.path, dtype)
        return target

    @property
    def _learner(self) -> TrainingStep:
        self._check_open()
        return self._parts

    def _check_open(self) -> None:
        if self.closed:
            raise ConfigError(
                "the session is closed: its processes ended with the `with` block. Use it inside the block, or open another "
                "session with resume=True, which continues from the last save_state()."
            )

    def _encoded(self, prompts: Sequence[Any], samples: int) -> StepPrompts:
        context = self._context
        rows = [prompt if isinstance(prompt, dict) else {context.settings.data.prompt_key: prompt} for prompt in prompts]
        _, file = write_rows(rows, self.folder / INPUTS / "prompts.jsonl", "prompts")
        converses = context.settings.actor_rollout_ref.rollout.converses
        teachers = teacher_columns(context.settings, context.environment)
        dataset = build_dataset(file, context.settings.data, context.environment.tokenizer, "train", False, converses, teachers)
        return expand(dataset, range(len(dataset)), samples, context.settings.algorithm.expansion, context.encoder)

    @property
    def _policy(self) -> PolicyTraining:
        assert isinstance(self._learner.policy, PolicyTraining), "there is no bypass in a session"
        return self._learner.policy

    def _prepare(
        self, name: str, answers: Answers, advantages: Sequence[Any] | None, loss: str | Callable[..., Any] | None
    ) -> None:
        batch, rows = answers._batch, answers._batch.rows
        own = self._learner.rollouts.generator.rollout.temperature
        if answers._temperature not in (None, own):
            raise ConfigError(
                f"{name}: these answers were sampled with temperature={answers._temperature}, but the session computes log-probs "
                f"at temperature {own}. Use answers of generate() without a temperature, or set "
                "actor_rollout_ref.rollout.temperature."
            )
        if advantages is not None:
            rows.advantages = _per_token(name, advantages, rows.responses.sizes())
        if rows.advantages is None and self._context.settings.algorithm.adv_estimator != DISTILL:
            raise ConfigError(f"{name}: there are no advantages. Give them, or call advantages(answers, scores) first.")
        self._use_loss(loss)
        self._complete(batch)
        if rows.advantages is None:
            self._learner.advantages(batch)  # a teacher alone needs no scores
        self._learner.correct(batch)
        actor = self._policy.policy_update.actor
        read_before = LOSSES[actor.policy_loss.loss_mode].selects is not None or actor.router_replay.mode == "R2"
        if rows.old_log_probs is None and read_before:
            self._policy.add_old_log_probs(batch)

    def _use_loss(self, loss: str | Callable[..., Any] | None) -> None:
        key, policy = "actor_rollout_ref.actor.policy_loss", self._policy
        chosen = self._own_loss if loss is None else self._written(loss) if callable(loss) else {"loss_mode": loss}
        now = policy.policy_update.actor.policy_loss
        if chosen.items() <= {"loss_mode": now.loss_mode, "custom.path": now.custom.path, "custom.name": now.custom.name}.items():
            return
        name = chosen["loss_mode"]
        if name not in LOSSES:
            nearest = difflib.get_close_matches(str(name), LOSSES, 1)
            way_out = f"Is it {nearest[0]}?" if nearest else f"Use one of {', '.join(LOSSES)}, or a function."
            raise ConfigError(f"loss={name!r}: there is no such loss. {way_out}")
        settings = replaced(self._context.settings, {f"{key}.{part}": value for part, value in chosen.items()})
        raise_together(check(settings, leaf_values(settings), frozenset(), set()))
        check_custom(settings)
        self._learner.workers.all(
            "update_actor", Worker.use_loss, {f"policy_loss.{part}": value for part, value in chosen.items()}
        )
        update = replace(policy.policy_update, actor=settings.actor_rollout_ref.actor)
        self._parts.policy = replace(policy, policy_update=update)

    def _written(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Pickle a loss function into a file that every worker reads, and return the settings that name the file.

        A function that was written before is not written again.
        """
        import cloudpickle

        if function not in self._losses:
            self._losses.append(function)
            file = (self.folder / INPUTS / f"loss_{len(self._losses)}.py").absolute()
            try:
                pickled = cloudpickle.dumps(function)
            except Exception as problem:  # an object may define its own pickling, which may raise anything
                raise ConfigError(
                    f"loss: the function cannot be sent to the workers, because something that it uses cannot be pickled "
                    f"({type(problem).__name__}: {problem}). Create it inside the function."
                ) from problem
            say_secrets("loss", function, pickled, file.with_suffix(".pkl"))
            file.with_suffix(".pkl").write_bytes(pickled)
            file.write_text(_LOSS_FILE)
        number = self._losses.index(function) + 1
        file = (self.folder / INPUTS / f"loss_{number}.py").absolute()
        return {"loss_mode": CUSTOM, "custom.path": str(file), "custom.name": "loss"}

    def _complete(self, batch: StepBatch) -> None:
        """Compute what the batch still lacks: log-probs of policy, reference and teacher, and values."""
        learner, rows = self._learner, batch.rows
        if learner.critic is not None and rows.old_values is None and learner.critic.workers.is_apart:
            batch.values = learner.critic.begin_values(rows, batch.names)
        if rows.old_log_probs is None:
            learner.policy.old_log_probs(batch, update_follows=True)
        if learner.ref_pass is not None and rows.ref_log_probs is None:
            rows.ref_log_probs = learner.ref_pass.compute(rows, batch.names).log_probs
        if learner.teacher is not None and rows.teacher_log_probs is None and rows.teacher_ids is None:
            learner.ask_teacher(batch)
        if learner.critic is not None and rows.old_values is None:
            rows.old_values = learner.critic.values(batch)


_LOSS_FILE = """import pickle
from pathlib import Path

loss = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
"""


def _at_temperature(rollout: Rollout, temperature: Any) -> Rollout:
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
        raise ConfigError(f"generate(temperature={temperature!r:.100}): give 0, or a number of at least {LEAST_TEMPERATURE}.")
    return replace(rollout, temperature=float(temperature) or 1.0, do_sample=rollout.do_sample and temperature > 0)


def _result(number: int, score: Any) -> RewardResult:
    try:
        return RewardResult(float(score))
    except (TypeError, ValueError) as problem:
        raise RewardError(f"advantages: the score of answer {number} is {score!r:.100}. Give a number.") from problem


def _per_token(name: str, advantages: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    """Expand advantages to one fp32 value per token."""
    if len(advantages) != len(sizes):
        raise ConfigError(f"{name}: there are {len(advantages)} advantages for {len(sizes)} answers. Give one for each.")
    parts = []
    for number, (value, size) in enumerate(zip(advantages, sizes, strict=True)):
        try:
            part = torch.as_tensor(value, dtype=torch.float32).flatten()
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ConfigError(
                f"{name}: the advantage of answer {number} is {value!r:.100}. Give one number, or one per token."
            ) from problem
        if part.numel() not in (1, size):
            raise ConfigError(f"{name}: answer {number} has {size} tokens, but {part.numel()} advantages. Give 1 or {size}.")
        if not part.isfinite().all():
            wrong = part[~part.isfinite()][0].item()
            raise ConfigError(f"{name}: the advantage of answer {number} is {wrong}. Give finite numbers.")
        parts.append(part.expand(size) if part.numel() == 1 else part)
    return torch.cat(parts)


@contextlib.contextmanager
def session(
    model: Any,
    dataset: Any = None,
    *,
    algorithm: str | None = None,
    teacher: Any = None,
    memory: str | float | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool | str | Path = False,
    tokenizer: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
    **settings: Any,
) -> Iterator[Session]:
    """Yield a :class:`Session`, which has the primitives of a training step. Its processes end with the ``with`` block.

    Args:
        model: As in :func:`verl_memopt.train`.
        dataset: Rows as in :func:`verl_memopt.train`. None = each call of :meth:`Session.generate` gives its prompts.
        algorithm: As in :func:`verl_memopt.train`. None = ``distill`` with a teacher, else ``grpo``.
        teacher: As in :func:`verl_memopt.train`. The updates of the session learn from it with the weight ``distill.coef`` (1).
        memory: As in :func:`verl_memopt.train`.
        steps: Length of the learning-rate schedule in steps.
        run_dir: As in :func:`verl_memopt.train`.
        resume: As in :func:`verl_memopt.train`. Continue from the last :meth:`Session.save_state`, or from a run's checkpoint.
        tokenizer: As in :func:`verl_memopt.train`.
        tools: As in :func:`verl_memopt.train`.
        environment_factory: As in :func:`verl_memopt.train`. :attr:`Answers.environment_rewards` are the environments' rewards.
        settings: As in :func:`verl_memopt.train`.

    Raises:
        UserError: For what the user must correct.
    """
    from verl_memopt.observe.log_setup import setup_logging

    setup_logging()
    rows = NO_ROWS if dataset is None else dataset
    # A reward function spares the rows the columns that the built-in reward rules require.
    call = Call(
        model, rows, settings, algorithm or ("grpo" if teacher is None else DISTILL), memory, run_dir, tokenizer,
        rewards=_no_reward, steps=steps, resume=resume, tools=tools, environment_factory=environment_factory, teacher=teacher,
    )  # fmt: skip
    with only_run("session"):
        folder, loaded, inputs = call.load()
        with (
            private_files(loaded.trainer.private_files),
            inputs.written(),
            _opened(loaded, folder, dataset is not None, inputs.rows) as opened,
        ):
            yield opened


@contextlib.contextmanager
def _opened(loaded: Settings, folder: Path, has_dataset: bool, rows: PythonRows | None) -> Iterator[Session]:
    if loaded.algorithm.rollout_correction.bypass_mode:
        raise ConfigError("algorithm.rollout_correction.bypass_mode=true: a session does not support this mode. Leave it out.")
    if (name := loaded.algorithm.adv_estimator) in (SFT, *WITH_GREEDY_RESPONSES):
        raise ConfigError(f"algorithm={name!r}: a session has no step of this kind. Use verl_memopt.train, or another algorithm.")
    context = build_run(loaded, rows=rows)
    with context.lock, start_workers(context, PhaseClock()) as workers:
        learner = build_learner(context, workers, runner=None)
        try:
            opened = Session(context, learner, folder, has_dataset)
            try:
                yield opened
            finally:
                opened.closed = True
        finally:
            learner.close()


def _no_reward(answer: str) -> float:
    # The caller scores the answers and passes them to advantages().
    raise RewardError("a session scores nothing by itself")
