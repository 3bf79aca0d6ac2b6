"""The sections that are not of one model: algorithm, trainer, Ray, memory, debug."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.algorithms.records import EstimatorSettings
from verl_memopt.config.schema.actor import KlEstimator
from verl_memopt.config.schema.corrections import PfPpo, RolloutCorrection
from verl_memopt.knobs.limits import Limits
from verl_memopt.knobs.values import (
    POSITIVE,
    CountOrMinusOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Words,
)

LOGGERS = Words(("console", "jsonl", "tensorboard", "wandb"))


@dataclass(frozen=True)
class KlControl:
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed or adaptive."""
    kl_coef: NaturalFloat = 0.001
    """Coefficient, or its first value."""
    horizon: PositiveInt = 10000
    """Adaptive only: samples over which the coefficient moves."""
    target_kl: PositiveFloat = 0.1
    """Adaptive only."""


@dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO): a step learns from groups with a signal only."""

    enable: bool = False
    """Leave out the groups whose responses all score the same, and answer more prompts until ``data.train_batch_size`` groups
    differ. Groups beyond that are dropped. A step then reads more prompts than ``data.train_batch_size``; ``total_epochs`` still
    counts steps."""
    metric: str | None = None
    """What must differ inside a group: score (seq_reward and seq_final_reward mean the same), or the name of another number that
    the reward function returns; null = score."""
    max_num_gen_batches: NaturalInt = 0
    """Rounds of generation after which a step that is not full stops the run; 0 = no limit."""


@dataclass(frozen=True)
class Algorithm(EstimatorSettings):
    """Advantages and the KL in the reward."""

    mask_truncated_responses: bool = False
    """Leave a response that reaches its limit without an end out of the losses. Its reward still counts for the baseline of its
    group, and the response for the mean over sequences."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward."""
    kl_penalty: KlEstimator = "kl"
    """Estimator of that KL: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControl = field(default_factory=KlControl)
    """Its coefficient."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """Importance weights and rejection against the rollout engine."""
    use_pf_ppo: bool = False
    """Draw the rows of the update from the batch by their score, with replacement (PF-PPO)."""
    pf_ppo: PfPpo = field(default_factory=PfPpo)
    """How PF-PPO weighs the rows."""
    expansion: Literal["token", "lazy", "repeat_sampler", "string"] = "string"
    """How a prompt becomes ``rollout.n`` rows; all four give the same ids. token = its ids are repeated; lazy = its ids are kept
    once, and repeated in a micro-batch only; repeat_sampler = its index in the data set is repeated, and each copy is read and
    tokenized; string = its text is repeated, and each copy is tokenized."""


@dataclass(frozen=True)
class RayKwargs:
    """Arguments of Ray."""

    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init (num_cpus, address, ...)."""
    timeline_json_file: str | None = None
    """Write Ray's timeline here at the end."""


@dataclass(frozen=True)
class Trainer:
    """The run: its length, machines, logs and checkpoints."""

    nnodes: PositiveInt = 1
    """Machines."""
    n_gpus_per_node: PositiveInt = 1
    """Devices per machine; on a CPU, worker processes."""
    device: str = "auto"
    """auto, cuda, cpu."""
    worker_group: Literal["ray", "local"] = "ray"
    """ray = one process per device; local = the worker lives in this process (one device)."""
    total_epochs: PositiveInt = 30
    """Passes over the training rows."""
    total_training_steps: Annotated[int | None, POSITIVE] = None
    """Steps; wins over ``total_epochs``."""
    logger: Annotated[Any, LOGGERS] = field(default_factory=lambda: ["console", "jsonl"])
    """console, jsonl, tensorboard, wandb."""
    table_every_steps: PositiveInt = 10
    """Print the table of recent steps every so many steps."""
    track_memory_every_steps: NaturalInt = 10
    """CPU only: count live tensor bytes in steps 1, 2 and every so many (a GPU reads its allocator every step);
    0 = never."""
    log_val_generations: NaturalInt = 0
    """Validation samples logged as a table."""
    rollout_data_dir: str | None = None
    """Write every training sample to {dir}/{step}.jsonl."""
    validation_data_dir: str | None = None
    """Write every validation sample to {dir}/{step}.jsonl."""
    save_freq: CountOrMinusOne = -1
    """Steps between checkpoints; > 0 also saves the last step."""
    test_freq: CountOrMinusOne = -1
    """Steps between validations; > 0 also validates the last step."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and exit."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto = newest whole checkpoint in ``default_local_dir``; disable; resume_path."""
    resume_from_path: str | None = None
    """A global_step_N folder, with resume_mode=resume_path."""
    project_name: str = "verl_examples"
    """Names the run in loggers and in ``default_local_dir``."""
    experiment_name: str = "gsm8k"
    """As ``project_name``."""
    default_local_dir: str | None = None
    """The run folder; null = checkpoints/{project_name}/{experiment_name}."""
    max_actor_ckpt_to_keep: Annotated[int | None, POSITIVE] = None
    """Checkpoints kept; null = all. The newest whose weights are known to be good (they gave finite gradients) stays besides."""
    max_critic_ckpt_to_keep: Annotated[int | None, POSITIVE] = None
    """Follows ``max_actor_ckpt_to_keep`` and can be no other number: policy and critic of a step are kept or removed together."""
    keep_best: bool | None = None
    """Keep the checkpoint with the best validation score besides; null = true where the run validates (``test_freq`` > 0)."""
    max_skipped_steps: PositiveInt = 3
    """Steps in a row without any update, because no gradient norm was finite, after which the run stops and names the last good
    checkpoint. One such step may be a bad batch; three in a row mean that the weights or the settings are at fault."""
    critic_warmup: NaturalInt = 0
    """Steps at the start that train only the critic; the policy stays as it is."""
    balance_batch: bool = True
    """Even out tokens over ranks."""
    ray_wait_register_center_timeout: PositiveInt = 300
    """Seconds for placement and worker start."""
    stop_deadline_seconds: PositiveFloat = 25.0
    """Seconds from a stop signal to the end of the run: it finishes or gives up the step, saves and exits. Slurm and Kubernetes
    kill 30 seconds after SIGTERM unless told otherwise."""


@dataclass(frozen=True)
class Memory(Limits):
    """Limits of each worker process."""


@dataclass(frozen=True)
class Debug:
    """Run a part of a training run, or run it under watch."""

    mode: Literal[
        "off",
        "dry",
        "rollout_only",
        "score_only",
        "train_only",
        "forge",
        "memory",
        "deterministic",
        "sync_check",
    ] = "off"
    """off = a training run; dry = resolve the settings, print them, exit; rollout_only = generate, write a dump, exit;
    score_only = score a dump and compute its log-probs, without an update; train_only = train on the rows and scores of a dump,
    without an engine; forge = train on synthetic rows of the largest lengths, which needs no data; memory = print each phase's
    memory after every step, and write a snapshot when memory runs out; deterministic = deterministic kernels and a fixed seed;
    sync_check = compare the engine's weights with the policy's after every sync, and look for stale cache blocks."""
