"""Builds everything that a run needs from its settings. Mistakes of the user are reported before a worker starts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from verl_memopt.agents.environments import EnvironmentKind
from verl_memopt.agents.loop import AgentPlan, check_agents, environment_of, unknown_environment
from verl_memopt.algorithms.custom import check_custom, statistics_of
from verl_memopt.algorithms.kl import EntropyController, KlController
from verl_memopt.algorithms.records import DISTILL, WITH_GREEDY_RESPONSES, WITHOUT_BASELINE
from verl_memopt.algorithms.rollout_correction import reads_entropy, update_gives_old_log_probs
from verl_memopt.config.agent_settings import Agent
from verl_memopt.config.keys import replaced
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import Critic, Data, Model, ResourcePool, Settings, Trainer
from verl_memopt.data.dataset import CustomRows, PromptDataset, PromptRow, PromptRows, TeacherColumns, build_dataset
from verl_memopt.data.encoder import PromptEncoder
from verl_memopt.data.prompts import LOOKAHEAD, PromptPrefetcher, StepLoader, check_prompts, load_sampler
from verl_memopt.data.python_rows import Item, PythonRows
from verl_memopt.data.responses import build_supervised_dataset, stream_reader
from verl_memopt.data.streaming import StreamLoader, open_stream
from verl_memopt.data.text_alignment import Retold
from verl_memopt.errors import ConfigError, DataError
from verl_memopt.memory.critic_rules import has_critic, own_pools
from verl_memopt.memory.knob import has_teacher, needs_reference, reference_teaches, teacher_is_elsewhere, uses_kl
from verl_memopt.model.export import export_folder
from verl_memopt.model.packing_check import find_reward_model
from verl_memopt.model.text_part import is_part
from verl_memopt.model.weights import load_model_config
from verl_memopt.observe.run_folder import RunFolder, refuse_what_is_not_ours
from verl_memopt.observe.samples import refuse_other_files
from verl_memopt.plan.search import refuse_what_cannot_fit
from verl_memopt.plan.verdict import beside_cache
from verl_memopt.rewards.rules import check_rows
from verl_memopt.rewards.runner import RewardRunner
from verl_memopt.run.checkpoints import Checkpoint, CheckpointStore, check_driver
from verl_memopt.run.environment import Environment, resolve_environment
from verl_memopt.run.resume import (
    check_own_files,
    checkpoint_store,
    compare_settings,
    contents_of,
    find_checkpoint,
    loaded_parts,
    with_seeds,
)
from verl_memopt.run.run_lock import RunLock, hold
from verl_memopt.trainer.correct_rollouts import BypassUpdate, MismatchCheck
from verl_memopt.trainer.group_filter import GroupFilter
from verl_memopt.trainer.micro_batching import (
    MiniBatchCutter,
    PolicyUpdate,
    adaptive_phases,
    budgets,
    critic_budgets,
    role_updates,
    teacher_budget,
)
from verl_memopt.trainer.replay import NoPrompts, mode_of, record_folder, replay_of, replayed_steps, written_dump
from verl_memopt.trainer.rollouts import Generator, LogProbPass
from verl_memopt.trainer.scoring import (
    Conversations,
    ModelScores,
    PreparedRecipe,
    Rewarder,
    Scorer,
    ScoringFollower,
    reward_budget,
)
from verl_memopt.trainer.step import (
    CriticTraining,
    OnPolicy,
    PolicyTraining,
    ReferenceSync,
    Rollouts,
    SeparatePass,
    StepMetrics,
    Supervised,
    TrainingStep,
)
from verl_memopt.trainer.teacher_pass import Endpoint, TeacherPass, teacher_elsewhere
from verl_memopt.trainer.validate import LossValidator, Validator
from verl_memopt.worker.group import TimedGroup
from verl_memopt.worker.roles import RolePlan, WorkerPlan
from verl_memopt.worker.worker import Worker

logger = logging.getLogger(__name__)

AGENT_LOGS = "agents"
"""Folder in the run folder for what tools and environments print."""
STOP_FILE = ".stop"
"""File in the run folder that tells the workers when to abandon a rollout."""


@dataclass(frozen=True)
class RunContext:
    """Everything a run needs except its workers.

    Attributes:
        folder: Folder in which the run writes its record.
        lock: Lock of that folder. The user of the context must release it.
        loader: Loads the prompts of each step; None = the prompts come with the rows of a dump, or are synthetic.
        validation: Held-out rows; None = there are no validation files.
        encoder: Encodes the validation prompts.
        checkpoint: The checkpoint from which the run continues; None = a fresh start.
        contents: Key -> checksum of the file that the setting names.
        conversations: Turns answers into the input of the reward model; None = there is no reward model.
        further_conversations: Name of each further reward model -> the same for that model.
        recipe: The recipe that scores the answers; None = a function or a reward model scores them.
        environments: The environments of conversations by name (None = the only one).
        unscored: The answers get no scores, because a teacher alone is learned from and no rule fits the rows.
    """

    settings: Settings
    folder: Path
    lock: RunLock
    environment: Environment
    loader: StepLoader | StreamLoader | None
    validation: PromptRows | None
    encoder: PromptEncoder
    store: CheckpointStore
    checkpoint: Checkpoint | None
    total_steps: int
    worker_plan: WorkerPlan
    contents: Mapping[str, str]
    conversations: Conversations | None = None
    further_conversations: Mapping[str, Conversations] = field(default_factory=dict)
    recipe: PreparedRecipe | None = None
    environments: Mapping[str | None, EnvironmentKind] = field(default_factory=dict)
    unscored: bool = False

    @property
    def continued_step(self) -> int | None:
        # A run that starts from the checkpoint of another folder begins a new record.
        return self.checkpoint.step if self.checkpoint is not None and is_of(self.checkpoint, self.folder) else None


def is_of(checkpoint: Checkpoint | None, folder: Path) -> bool:
    return checkpoint is not None and checkpoint.folder.resolve().parent == folder.resolve()


def build_run(
    settings: Settings, unreadable: Mapping[int, str] = MappingProxyType({}), rows: PythonRows | None = None
) -> RunContext:
    """Build the context of a run. It holds the lock of the run's folder.

    ``unreadable``: step -> fault, for checkpoints that passed their checks but could not be loaded. ``rows``: the training rows,
    if this process streams them.

    Raises:
        ConfigError, DataError, CheckpointError: The user must correct something.
    """
    trainer, mode = settings.trainer, mode_of(settings)
    check_custom(settings)
    refuse_what_cannot_fit(settings)
    beside_cache_bytes = beside_cache(settings)
    critic = settings.critic if mode.updates and has_critic(settings) else None
    # Find the devices and the model folders for the roles that the run needs.
    roles, with_reference = settings.actor_rollout_ref, mode.computes_log_probs and needs_reference(settings)
    with_reference = with_reference or (mode.updates and reference_teaches(settings))
    reference = str(roles.ref.model.path) if with_reference and roles.model.lora_rank == 0 else None
    pools: dict[str, ResourcePool] = {"critic": settings.critic} if critic is not None else {}
    pools |= {"reward_model": settings.reward_model} if _scores_with_model(settings) else {}
    distills = has_teacher(settings) and mode.updates
    pools |= {"teacher": settings.teacher} if distills else {}
    own: dict[str, ResourcePool] = {role: pools[role] for role in own_pools(settings) if role in pools}
    environment = resolve_environment(settings, reference, critic, own, distills)
    server = teacher_elsewhere(settings, environment.embedding_rows) if distills else None
    if isinstance(server, Endpoint):
        server.check(environment.teacher_tokenizer or environment.tokenizer)
    folder = record_folder(settings, environment.run_dir)
    with ExitStack() as released_on_error:
        lock = released_on_error.enter_context(hold(folder))
        refuse_what_is_not_ours(folder)
        for key, dumped in (("rollout", written_dump(settings, folder)), ("validation", trainer.validation_data_dir)):
            if dumped is not None:
                refuse_other_files(Path(dumped), f"trainer.{key}_data_dir")
        RunFolder(folder).mend()
        contents = contents_of(settings, environment)
        settings, store, checkpoint = _resumed(settings, environment, critic, unreadable, contents)
        check_own_files(settings, environment, folder, is_of(checkpoint, folder))
        data = settings.data
        agent, environments = _agents(settings, environment, folder)
        by_rules, unscored = _by_rules(settings, environments), False
        # A teacher needs no rewards, so rows that no rule can score are no mistake then.
        optional = by_rules and settings.algorithm.adv_estimator == DISTILL
        by_rules = by_rules and not optional
        train, validation = _datasets(settings, environment, by_rules) if mode.reads_data else (None, None)
        if optional:
            unscored = _has_no_rule(settings, (train, validation))
        _check_environments(environments, settings.actor_rollout_ref.rollout.agent, (train, validation))
        recipe = settings.reward_model.recipe if _scores_with_model(settings) else None
        prepared = None if recipe is None else recipe.hooks().prepare(settings, environment, (train, validation))
        scoring = _reward_models(settings, environment, (train, validation))
        loader: StepLoader | StreamLoader | None = None
        if mode.reads_data:
            size, key = _batch_size(data)
            if train is None:
                loader = _stream_loader(settings, environment, rows, [texts for _, texts in scoring.values()], by_rules)
            else:
                loader = StepLoader(train, size, data.shuffle, _seed(data), load_sampler(data.sampler), key)
            if checkpoint is not None:
                loader.load_state_dict(checkpoint.driver["loader"])
            total_steps = _total_steps(trainer, loader)
        else:
            total_steps = replayed_steps(settings, environment, 0 if checkpoint is None else checkpoint.step)
        (reward_folder, conversations), further = scoring.pop("", (None, None)), scoring
        role = None if prepared is None else prepared.role
        plan = _worker_plan(settings, environment, folder, total_steps, critic, reward_folder, role)
        folders = tuple(str(folder) for folder, _ in further.values()) or None
        plan = replace(plan, beside_cache_bytes=beside_cache_bytes, further_reward_folders=folders, agent=agent)
        released_on_error.pop_all()
    encoder = PromptEncoder(environment.tokenizer, data.max_prompt_length, data.truncation, environment.embedding_rows)
    return RunContext(
        settings=settings, folder=folder, lock=lock, environment=environment, loader=loader, validation=validation,
        encoder=encoder, store=store, checkpoint=checkpoint, total_steps=total_steps,
        worker_plan=plan, contents=contents,
        conversations=conversations, further_conversations={name: texts for name, (_, texts) in further.items()},
        recipe=prepared, environments=environments, unscored=unscored,
    )  # fmt: skip


def _resumed(
    settings: Settings,
    environment: Environment,
    critic: Critic | None,
    unreadable: Mapping[int, str],
    contents: Mapping[str, str],
) -> tuple[Settings, CheckpointStore, Checkpoint | None]:
    # Returns the settings with concrete seeds, the checkpoints of the run, and the checkpoint from which it continues.
    trainer, data, roles = settings.trainer, settings.data, settings.actor_rollout_ref
    store = checkpoint_store(trainer, data.val_files is not None, environment.run_dir)
    checkpoint = find_checkpoint(trainer, loaded_parts(roles.actor, critic), store, unreadable)
    if checkpoint is not None:
        check_driver(checkpoint)
    data, rollout = with_seeds(data, roles.rollout, None if checkpoint is None else checkpoint.driver["seed"])
    if rollout is not roles.rollout:
        settings = replace(settings, data=data, actor_rollout_ref=replace(roles, rollout=rollout))
    if checkpoint is not None:
        compare_settings(settings, environment, checkpoint, contents)
    return settings, store, checkpoint


def _worker_plan(
    settings: Settings,
    environment: Environment,
    folder: Path,
    total_steps: int,
    critic: Critic | None,
    reward_folder: Path | None,
    role: RolePlan | None,
) -> WorkerPlan:
    roles, trainer, batch_size = settings.actor_rollout_ref, settings.trainer, settings.data.train_batch_size
    # The first steps may train only the critic. A schedule by rollouts counts these steps, as in verl. A schedule by optimizer
    # steps does not.
    updating_steps = total_steps if critic is None else max(total_steps - max(trainer.critic_warmup - 1, 0), 1)
    by_rollouts = roles.actor.optim.lr_schedule_steps == "rollouts"
    schedule_steps = total_steps if by_rollouts else updating_steps * role_updates(roles.actor, batch_size)
    critic_schedule_steps = 0
    if critic is not None:
        by_rollouts = critic.optim.lr_schedule_steps == "rollouts"
        critic_schedule_steps = total_steps * (1 if by_rollouts else role_updates(critic, batch_size))
    engine_folder = None
    if mode_of(settings).has_engine:
        engine_folder = str(_engine_folder(roles.model, roles.rollout.load_format, environment, folder))
    correction, loss = settings.algorithm.rollout_correction, roles.actor.policy_loss.custom.path
    if loss is not None:  # its path must not depend on a worker's working directory
        roles = replaced(roles, {"actor.policy_loss.custom.path": str(Path(loss).expanduser().resolve())})
    return WorkerPlan(
        settings=roles,
        folder=str(environment.folder),
        engine_folder=engine_folder,
        reference_folder=None if environment.reference_folder is None else str(environment.reference_folder),
        tokenizer_folder=str(environment.tokenizer_folder),
        eos_token_ids=environment.eos_token_ids,
        known_ids=environment.known_ids,
        has_more=environment.has_more,
        schedule_steps=schedule_steps,
        critic=critic,
        critic_folder=None if environment.critic_folder is None else str(environment.critic_folder),
        critic_schedule_steps=critic_schedule_steps,
        free_engine=environment.free_engine,
        track_init=environment.device == "cpu" and trainer.track_memory_every_steps > 0,
        memory=settings.memory,
        bypass=correction if correction.bypass_mode else None,
        stop_file=str(environment.run_dir / STOP_FILE),
        snapshot_folder=str(folder) if settings.debug.mode == "memory" else None,
        private_files=trainer.private_files,
        sync_check=settings.debug.mode == "sync_check",
        reward_model=None if reward_folder is None else settings.reward_model.model,
        reward_folder=None if reward_folder is None else str(reward_folder),
        adaptive_phases=adaptive_phases(settings),
        rewards=settings.reward_model if settings.reward_model.enable else None,
        role=role,
        teacher=settings.teacher if environment.teacher_folders else None,
        told=teacher_is_elsewhere(settings),
        vocabulary=environment.embedding_rows,
        teacher_folders=tuple(str(folder) for folder in environment.teacher_folders),
        distill=settings.distill if has_teacher(settings) and mode_of(settings).updates else None,
        reference_teaches=reference_teaches(settings),
        teacher_adapter=None if environment.teacher_folders else settings.teacher.model.lora_adapter_path,
    )


def _agents(
    settings: Settings, environment: Environment, folder: Path
) -> tuple[AgentPlan | None, Mapping[str | None, EnvironmentKind]]:
    """Return what workers need for conversations, and the environments, after a trial of both. None = no conversations."""
    rollout, data = settings.actor_rollout_ref.rollout, settings.data
    if not rollout.converses:
        return None, {}
    logs = str(folder / AGENT_LOGS)
    plan = AgentPlan(data.apply_chat_template_kwargs, data.allow_special_tokens, data.trust_remote_code, logs)
    if not mode_of(settings).has_engine:
        return plan, {}
    return plan, check_agents(rollout, plan, environment.tokenizer, environment.eos_token_ids)


def _check_environments(kinds: Mapping[str | None, EnvironmentKind], agent: Agent, datasets: Sequence[PromptRows | None]) -> None:
    if not kinds:
        return
    for row in (rows[index] for rows in datasets if rows is not None for index in range(len(rows))):
        name = environment_of(row.environment, row.extra_info, agent, kinds)
        if name not in kinds:
            raise DataError(f"{row.address}: {unknown_environment(name, kinds)}")


def _datasets(settings: Settings, environment: Environment, by_rules: bool) -> tuple[PromptRows | None, PromptRows | None]:
    # Returns the training rows (None = they are a stream) and the held-out rows (None = there are none).
    data, rewards, mode = settings.data, settings.reward_model, mode_of(settings)
    if rewards.recipe is not None:
        return rewards.recipe.hooks().datasets(settings, environment.tokenizer)
    converses = settings.actor_rollout_ref.rollout.converses
    read: Callable[..., list[PromptRow] | CustomRows] = build_supervised_dataset
    if not mode.supervised:
        read = partial(build_dataset, by_rules=by_rules, converses=converses)
    # Only training rows have a teacher.
    teachers = teacher_columns(settings, environment)
    train = None if data.streaming else read(data.train_files, data, environment.tokenizer, "train", teachers=teachers)
    validation = None if data.val_files is None else read(data.val_files, data, environment.tokenizer, "val")
    for split in (train, validation):
        if isinstance(split, PromptDataset):  # rows of another class are checked when they are read
            check_prompts(split, settings.algorithm.expansion, environment.tokenizer)
    if by_rules:
        _check_rows(settings, (row for split in (train or (), validation or ()) for row in split))
    return train, validation


def teacher_columns(settings: Settings, environment: Environment) -> TeacherColumns | None:
    """Return which columns of the rows are about their teachers, and how they are read. None = the run has no teacher."""
    if not has_teacher(settings):
        return None
    teacher, distill = settings.teacher, settings.distill
    return TeacherColumns(
        prompt=distill.teacher_prompt,
        key=teacher.key,
        names=tuple(teacher.further_models),
        weight=distill.weight_key,
        said=teacher.log_probs_key,
        top=distill.top_k or 0,
        tokenizer=environment.teacher_tokenizer,
    )


def _by_rules(settings: Settings, environments: Mapping[str | None, EnvironmentKind]) -> bool:
    others = settings.custom_reward_function.path is not None or settings.reward_model.enable
    return mode_of(settings).scores and not others and not any(kind.has_reward for kind in environments.values())


def _check_rows(settings: Settings, rows: Iterable[PromptRow]) -> None:
    rewards = settings.reward_model
    scored = ((row.data_source, row.address, row.ground_truth, row.text) for row in rows)
    check_rows(scored, rewards.sandbox_fusion.url is not None, rewards.tolerant_rules)


def _has_no_rule(settings: Settings, datasets: Sequence[PromptRows | None]) -> bool:
    # Whether no built-in rule can score these rows. The rows of a stream are not known yet.
    train, _ = datasets
    try:
        if train is None:
            raise DataError("data.streaming=true: the rows are not known before the run.")
        _check_rows(settings, (rows[index] for rows in datasets if rows is not None for index in range(len(rows))))
    except DataError as problem:
        logger.info("the responses get no scores, and only the teacher is learned from. %s", problem)
        return True
    return False


def _reward_models(
    settings: Settings, environment: Environment, datasets: Sequence[PromptRows | None]
) -> dict[str, tuple[Path, Conversations]]:
    # Returns name ("" for the first reward model) -> the model's folder, and the object that makes its input from answers.
    reward_model, data, roles = settings.reward_model, settings.data, settings.actor_rollout_ref
    if not reward_model.enable or reward_model.recipe or not _scores_with_model(settings):
        return {}
    longest = reward_model.max_length or data.max_prompt_length + data.max_response_length
    found = {}
    for name, path in {"": reward_model.model.path, **reward_model.further_models}.items():
        model = replace(reward_model.model, path=path) if name else reward_model.model
        scorer = find_reward_model(model, roles.model, environment.tokenizer, longest)
        conversations = Conversations(scorer.tokenizer, reward_model.max_length)
        for dataset in datasets:
            conversations.check(dataset or [])
        found[name] = scorer.folder, conversations
    return found


def _scores_with_model(settings: Settings) -> bool:
    # In the mode forge, the reward model scores the synthetic rows too, so that its memory is measured.
    mode = mode_of(settings)
    return mode.scores or (settings.debug.mode == "forge" and not mode.supervised)


def _total_steps(trainer: Trainer, loader: StepLoader | StreamLoader) -> int:
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if isinstance(loader, StreamLoader):
        assert trainer.val_only, "the rules ask for a number of steps"
        return 1
    if loader.steps_per_epoch is None:
        raise DataError(
            f"data.sampler: an epoch has more than {LOOKAHEAD:,} indices, so trainer.total_epochs={trainer.total_epochs} gives "
            "no number of steps. Set trainer.total_training_steps, or end the sampler's __iter__ after an epoch."
        )
    return trainer.total_epochs * loader.steps_per_epoch


def _batch_size(data: Data) -> tuple[int, str]:
    prompts = data.gen_batch_size or data.train_batch_size
    return prompts, "data.train_batch_size" if prompts == data.train_batch_size else "data.gen_batch_size"


def _stream_loader(
    settings: Settings,
    environment: Environment,
    rows: PythonRows | None,
    conversations: Sequence[Conversations],
    by_rules: bool,
) -> StreamLoader:
    data, tokenizer, converses = settings.data, environment.tokenizer, settings.actor_rollout_ref.rollout.converses
    supervised, teachers = mode_of(settings).supervised, teacher_columns(settings, environment)
    reader = stream_reader(data, tokenizer, supervised, by_rules, converses, teachers)

    def read(items: Sequence[Item]) -> list[PromptRow]:
        read = reader(items)
        if by_rules:
            _check_rows(settings, read)
        for texts in conversations:
            texts.check(read)
        return read

    size, key = _batch_size(data)
    buffer_size = data.shuffle_buffer_size if data.shuffle else 0
    trains = not settings.trainer.val_only
    source = open_stream(data, tokenizer, rows, trains)
    loader = StreamLoader(source, read, size, _seed(data), buffer_size, data.train_max_samples, key)
    # Report a mistake in all rows before a worker starts.
    if trains:
        loader.check_first()
    return loader


def _seed(data: Data) -> int:
    assert data.seed is not None, "drawn before"
    return data.seed


def _engine_folder(model: Model, load_format: str, environment: Environment, run_folder: Path) -> Path:
    # If the settings change the model's config, or only the text part of the model is trained, the engine reads a new folder in
    # the run folder, so that engine and trainer build the same model.
    config = load_model_config(model, environment.folder)
    if not model.override_config and model.hf_config_path is None and not is_part(config):
        return environment.folder
    if load_format != "dummy":
        raise ConfigError(
            f"actor_rollout_ref.rollout.load_format={load_format}: with model.override_config or model.hf_config_path, and for a "
            "model that reads more than text, the engine gets its weights from the trainer alone. Leave load_format at dummy."
        )
    folder = run_folder / "engine_config"
    export_folder(folder, config, environment.tokenizer_folder, None, writes=True)
    return folder


def scorer_of(context: RunContext, workers: TimedGroup, runner: RewardRunner | None) -> Scorer:
    if context.recipe is not None:
        return context.recipe.scorer(workers)
    settings, rewards, model = context.settings, context.settings.reward_model, None
    if context.conversations is not None:
        actor, balance = settings.actor_rollout_ref.actor, settings.trainer.balance_batch
        first = workers.of("reward_model"), context.conversations, reward_budget(rewards), actor, balance
        model = ModelScores(*first, context.further_conversations)
    dapo = rewards.reward_kwargs if rewards.reward_manager == "dapo" else None
    is_function, agent = settings.custom_reward_function.path is not None, settings.actor_rollout_ref.rollout.agent
    alone = not is_function and model is None and any(kind.has_reward for kind in context.environments.values())
    return Rewarder(
        runner, dapo, model, not is_function, workers.clock, failed_reward=agent.failed_reward, environment_alone=alone,
        unscored=context.unscored,
    )  # fmt: skip


def build_validator(context: RunContext, generator: Generator, scorer: Scorer) -> Validator | LossValidator | None:
    if context.validation is None:
        return None
    settings = context.settings
    batch_size, expansion = settings.data.val_batch_size, settings.algorithm.expansion
    if mode_of(settings).supervised:
        roles, balance = settings.actor_rollout_ref, settings.trainer.balance_batch
        budget = replace(budgets(roles)[1], learned=None)
        log_probs = LogProbPass(generator.workers, "testing", Worker.old_log_probs, budget, balance, (False,))
        return LossValidator(context.validation, batch_size, context.encoder, log_probs, roles.actor)
    return Validator(context.validation, batch_size, expansion, context.encoder, generator, scorer)


def _build_prefetcher(
    data: Data, loader: StepLoader | StreamLoader | None, environment: Environment, n: int, expansion: str
) -> PromptPrefetcher | NoPrompts:
    if loader is None:
        return NoPrompts()
    # The prefetcher runs in a thread, so it needs its own tokenizer.
    tokenizer = copy.deepcopy(environment.tokenizer)
    encoder = PromptEncoder(tokenizer, data.max_prompt_length, data.truncation, environment.embedding_rows)
    return PromptPrefetcher(loader, n, expansion, encoder)


def _build_critic_training(context: RunContext, workers: TimedGroup, old_pass: LogProbPass) -> CriticTraining | None:
    critic, trainer = context.worker_plan.critic, context.settings.trainer
    if critic is None:
        return None
    update_budget, values_budget = critic_budgets(critic)
    workers = workers.of("critic")
    samples = context.settings.actor_rollout_ref.rollout.n
    cutter = MiniBatchCutter(workers.world_size, critic, samples, update_budget, trainer.balance_batch)
    return CriticTraining(workers, critic, cutter, values_budget, trainer.critic_warmup, old_pass, context.store)


def build_learner(context: RunContext, workers: TimedGroup, runner: RewardRunner | None) -> TrainingStep:
    # Each part gets only the settings that it reads.
    settings, environment = context.settings, context.environment
    roles, data, algorithm = settings.actor_rollout_ref, settings.data, settings.algorithm
    if roles.rollout.n == 1 and algorithm.adv_estimator in WITHOUT_BASELINE:
        logger.warning(
            "actor_rollout_ref.rollout.n=1, algorithm.adv_estimator=%s: a single response has no baseline, so the reward itself "
            "is its advantage, as in verl. Set n to 2 or more for a baseline.", algorithm.adv_estimator,
        )  # fmt: skip
    actor, rollout, balance = roles.actor, roles.rollout, settings.trainer.balance_batch
    update_budget, old_budget, ref_budget = budgets(roles)
    correction, filters = algorithm.rollout_correction, algorithm.filter_groups
    scorer = scorer_of(context, workers, runner)
    mode, replay = mode_of(settings), replay_of(settings, environment)
    frees_engine = environment.free_engine and mode.has_engine
    follower = None
    if algorithm.adv_estimator not in WITH_GREEDY_RESPONSES:  # these generate twice before they score anything
        follower = ScoringFollower.of(scorer, environment.tokenizer, environment.run_dir)
    group_filter = GroupFilter(data.train_batch_size, rollout.n, filters.metric, filters.max_num_gen_batches)
    bypasses = correction.bypass_mode and mode.updates and not mode.supervised
    teacher = None
    if context.worker_plan.distill is not None:
        tokenizer = None if settings.distill.teacher_prompt is None else environment.tokenizer
        retells = None
        if environment.teacher_tokenizer is not None:
            tokenizer = environment.teacher_tokenizer
            retells = partial(Retold, environment.tokenizer, tokenizer, environment.eos_token_ids)
        elsewhere = teacher_elsewhere(settings, environment.embedding_rows)
        teacher = TeacherPass(workers, teacher_budget(settings), balance, settings.distill, tokenizer, elsewhere, retells)
    # A scorer that reads log-probs runs before the update, so the update cannot compute them.
    on_policy = mode.updates and not scorer.reads and update_gives_old_log_probs(settings)
    options = reads_entropy(actor, algorithm), statistics_of(algorithm)
    old_pass = LogProbPass(workers, "old_log_prob", Worker.old_log_probs, old_budget, balance, options, routed=True)
    cutter = MiniBatchCutter(workers.world_size, actor, rollout.n, update_budget, balance)
    adapts_entropy = actor.entropy_ctrl.target is not None
    entropy = EntropyController(actor.entropy_ctrl, actor.entropy_coeff) if adapts_entropy else None
    states = None if teacher is None or settings.distill.divergence == SAMPLED else teacher.states
    policy_update = PolicyUpdate(cutter, actor, context.store, entropy, states)
    # The engine's log-probs in a dump may come from other weights, so a difference is not a fault.
    compared = rollout if replay is None else replace(rollout, max_logprob_diff=None)
    mismatch = MismatchCheck(compared, actor.fsdp_config, environment.features if replay is None else ())
    ref_pass = LogProbPass(workers, "ref", Worker.ref_log_probs, ref_budget, balance)
    with_reference = uses_kl(settings)
    every = None if context.worker_plan.reference_folder is None else roles.ref.sync_every_steps
    policy: PolicyTraining | BypassUpdate
    if bypasses:
        policy = BypassUpdate(workers, policy_update, mismatch, correction)
    else:
        training = Supervised if mode.supervised else OnPolicy if on_policy else SeparatePass
        policy = training(workers, old_pass, policy_update, mismatch)
    return TrainingStep(
        workers=workers,
        rollouts=Rollouts(
            prompts=_build_prefetcher(data, context.loader, environment, rollout.n, algorithm.expansion),
            generator=Generator(
                rollout, environment.tokenizer, workers, frees_engine, mode.has_engine, follower, actor.router_replay.mode == "R3"
            ),
            scorer=scorer,
            actor=actor,
            greedy_baseline=algorithm.adv_estimator in WITH_GREEDY_RESPONSES,
            group_filter=group_filter if filters.enable else None,
            replay=replay,
            learns_dataset=mode.supervised,
        ),
        scorer=scorer,
        policy=policy,
        ref_pass=ref_pass if with_reference else None,
        critic=_build_critic_training(context, workers, old_pass),
        algorithm=algorithm,
        kl_control=KlController(algorithm.kl_ctrl),
        teacher=teacher,
        distill=context.worker_plan.distill,
        step_metrics=StepMetrics(
            data.max_prompt_length, data.max_response_length, data.truncation != "error", not mode.supervised
        ),
        reference_sync=None if every is None else ReferenceSync(workers, every, role_updates(actor, data.train_batch_size)),
    )
