"""Every setting, typed and frozen, with its one default.

A field without a default is required. A field whose default is ``None`` and which appears in
:mod:`verl_memopt.config.values` follows another key unless it is given. Choices are ``Literal`` types and ranges are
``Annotated`` ones. The fields of a memory knob stand in its file in :mod:`verl_memopt.memory`. Nothing past the loader sees a
Hydra object, and no other file in the project holds a default for a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.algorithms.records import CustomEstimator, CustomLoss, EstimatorSettings, PolicyLoss
from verl_memopt.config.role_settings import (
    REQUIRED,
    Actor,
    CheckpointContents,
    Critic,
    CriticModel,
    CustomClass,
    CustomSampler,
    Data,
    EngineKwargs,
    EntropyControl,
    Fsdp,
    KlEstimator,
    Model,
    ModelKnobs,
    Optim,
    Ref,
    RefModel,
    ResourcePool,
    Rollout,
    TrainedFsdp,
    ValKwargs,
    WrapPolicy,
)
from verl_memopt.memory.knob import (
    POSITIVE,
    CountOrMinusOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    Words,
)
from verl_memopt.memory.limits import MemoryLimits
from verl_memopt.memory.precision import MixedPrecision
from verl_memopt.memory.quantized_frozen import QuantizedFrozen
from verl_memopt.memory.weight_buckets import BucketEngine
from verl_memopt.recipes import RECIPES, Recipe
from verl_memopt.recipes.rlt.settings import RltReward

# The sections ``reward_model`` and ``custom_reward_function``: what scores a response, and how.

POLICY_TOKENIZER = "policy"
"""Word for the tokenizer of the policy."""
FILES = Range("must be at least 64", lambda value: value >= 64)


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's penalty for long responses."""

    enable: bool = False
    """Subtract up to ``penalty_factor`` from the reward of a response that is longer than ``max_resp_len - len`` tokens, in
    proportion to how far it reaches into the last ``len`` tokens. Only reward_manager=dapo does so."""
    len: NaturalInt = 0
    """Length of the buffer in tokens."""
    penalty_factor: NaturalFloat = 1.0
    """Penalty of a response of ``max_resp_len`` tokens."""
    log: bool = False
    """Report ``overlong_reward`` (the penalty, 0 or less) and ``overlong`` (1 = there is one) of each response."""


@dataclass(frozen=True)
class RewardKwargs:
    """Arguments of the reward manager."""

    overlong_buffer_cfg: OverlongBuffer = field(default_factory=OverlongBuffer)
    """DAPO's penalty for long responses."""
    max_resp_len: Annotated[int | None, POSITIVE] = None
    """Tokens of a response that gets the whole penalty."""


@dataclass(frozen=True)
class SandboxFusion:
    """A SandboxFusion service, which runs the programs of code tasks."""

    url: str | None = None
    """Address of the service's run_code, such as http://localhost:8080/run_code. The service runs the programs of rows whose data
    source is apps, codecontests, codeforces or taco; null = such rows need ``custom_reward_function.path``."""
    max_concurrent: PositiveInt = 64
    """Most programs that all reward processes together have under way at the service."""
    memory_limit_mb: PositiveInt = 1024
    """Memory in MB that the service gives to a program."""


@dataclass(frozen=True)
class ScoringModel(QuantizedFrozen):
    """The reward model's own model: a sequence or token classifier with one label.

    The knobs of ``actor_rollout_ref.model`` act in it as they do in the reference.
    """

    path: str | None = None
    """Folder in Hugging Face format, or a hub id. With ``reward_manager=rlt`` it is the student's, a causal LM with the policy's
    tokenizer; null = the reference is the student."""
    input_tokenizer: str | None = POLICY_TOKENIZER
    """policy, or the path of the policy's model or tokenizer = responses are decoded, and each conversation is rendered with the
    reward model's own chat template and tokenizer; null = it shares the policy's tokenizer, and reads the ids as they are."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Module imported before the model is built; follows the policy's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    fsdp_config: Fsdp = field(default_factory=Fsdp)
    """Sharding and precision of the reward model."""


@dataclass(frozen=True)
class RewardModel(ResourcePool):
    """How responses are scored."""

    enable: bool = False
    """A model scores each response. Its score is the reward, or with ``custom_reward_function.path`` the function reads it as
    ``extra_info["rm_score"]`` and returns the reward. With ``reward_manager=rlt`` a student scores explanations."""
    model: ScoringModel = field(default_factory=ScoringModel)
    """The reward model's own model; with ``reward_manager=rlt`` the student."""
    further_models: dict[str, Any] = field(default_factory=dict)
    """Further reward models: name -> folder or hub id. Each is stored and computed as ``model`` says, one after another, and
    ``custom_reward_function`` reads their scores as ``extra_info["rm_scores"]``, by name."""
    residency: Literal["auto", "alias_ref", "separate", "swap"] = "auto"
    """reward_manager=rlt: where the student's weights lie. alias_ref = the reference is the student and takes no memory of its
    own; separate = a model of its own; swap = student and reference rest on the host and take turns in one place on the device,
    for models of one shape; auto = alias_ref where ``model.path`` is null, else separate."""
    rlt: RltReward = field(default_factory=RltReward)
    """reward_manager=rlt: how explanations are scored."""
    micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Conversations per forward of the reward model; follows the policy's pass for old log-probs."""
    use_dynamic_bsz: bool | None = None
    """Pack its micro-batches by tokens instead of by conversations; follows the critic's."""
    forward_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Hard cap of tokens per forward with ``use_dynamic_bsz``; follows the critic's values pass."""
    adaptive_token_budget: bool | None = None
    """Learn the tokens of a forward from measured peaks; follows the critic's."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Tokens of a conversation beyond which its end is cut off; null = none is cut."""
    reward_manager: Literal["naive", "batch", "dapo", "prime", "rlt"] = "naive"
    """How the reward function is called. naive = with one row; batch = once, with the lists of all rows; prime = with one row, in
    one process per core at least (at most 64), and a row that fails scores ``custom_reward_function.fallback_score``; dapo =
    naive, and ``reward_kwargs.overlong_buffer_cfg`` acts; rlt = a student scores explanations, no function is called, and the
    data files have the columns question, solution and reasoning_trace, or are ``hub:`` and the id of a dataset."""
    reward_kwargs: RewardKwargs = field(default_factory=RewardKwargs)
    """Arguments of the reward manager."""
    tolerant_rules: bool = False
    """Score GSM8K and MATH by rules that forgive more than verl's: any place and form of ``#### x``, with a currency sign or a
    final dot, and ``\\boxed{}`` by its value (math-verify) instead of its text."""
    sandbox_fusion: SandboxFusion = field(default_factory=SandboxFusion)
    """The service that runs the programs of code tasks."""
    num_workers: PositiveInt = 1
    """Processes that run the reward function."""
    max_concurrent: PositiveInt = 64
    """Reward functions that are ``async def`` only: rows that one process has under way at a time."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that scores the responses; None if a function or a reward model does."""
        return RECIPES.get(self.reward_manager) if self.enable else None


@dataclass(frozen=True)
class CustomReward:
    """A reward function of the user's own."""

    path: str | None = None
    """Python file with the reward function; null = the rule that belongs to ``data_source``."""
    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs), or with reward_manager=batch
    (data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs). It may be ``async def``."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed arguments of the function."""
    pass_rollout: bool = False
    """``extra_info`` also holds ``prompt`` (a text or messages), ``completion_ids`` (token ids) and ``trainer_state``
    (``global_step``, the steps that are done, and ``max_steps``)."""
    timeout_seconds: PositiveFloat = 60.0
    """Longest time one row may take; with reward_manager=batch, the one call."""
    cpu_seconds: Annotated[float | None, POSITIVE] = None
    """Most processor time of one row, summed over all threads and processes that work on it; null = 32 x ``timeout_seconds``."""
    memory_gb: PositiveFloat = 16
    """Most GiB of memory that one reward process, with all that it starts, may hold. Each of ``reward_model.num_workers`` has
    this limit for itself."""
    open_files: Annotated[int, FILES] = 4096
    """Most files that one reward process may have open."""
    on_error: Literal["raise", "score"] | None = None
    """raise = a row that fails stops the run; score = it takes ``fallback_score``, is counted and logged; null = score with
    reward_manager=prime, else raise."""
    fallback_score: float = 0.0
    """Score of a failed row with on_error=score."""


# The sections ``algorithm.rollout_correction`` and ``algorithm.pf_ppo``, under verl's names.


@dataclass(frozen=True)
class RolloutCorrection:
    """Corrects the update for a rollout engine whose probabilities differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token's loss by probability under the trainer over probability under the engine: of the token, or of its whole
    response; null = no weights."""
    rollout_is_threshold: str | float = 2.0
    """Upper bound of the weights. ``lower_upper``, as 0.5_5.0, sets weights outside to 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch. In bypass mode over the mini-batch, which takes one more log-prob pass
    per mini-batch."""
    rollout_rs: str | None = None
    """Rejections: tokens or responses that trainer and engine see too differently are left out of the update. Names such as
    token_k1, seq_sum_k1, seq_mean_k3 or seq_max_k2, separated by commas; null = none."""
    rollout_rs_threshold: str | float | None = None
    """Bound of each rejection, separated by commas, or one for all. k1 reads ``lower_upper`` as bounds of the ratio, as 0.5_2.0,
    or one number of at least 1; k2 and k3 read one number."""
    bypass_mode: bool = False
    """Take the engine's log-probs as the old ones, and leave their pass out."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of bypass mode, in the place of ``actor.policy_loss.loss_mode``. ppo_clip = PPO's, whose ratio to the engine is the
    correction; reinforce = log-prob times advantage times importance weight."""


@dataclass(frozen=True)
class PfPpo:
    """How PF-PPO weighs the rows that it draws."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """pow = size of the score, to the power ``weight_pow``; max_min = the best and the worst scores of the batch alone;
    max_random = 0.4 for the best scores, 0.1 for the others."""
    weight_pow: NaturalFloat = 2.0
    """Power of pow."""


# The sections that are not of one model: algorithm, trainer, Ray, memory, debug.

BOUNDS = Range("must be two numbers, the lower one first", lambda value: len(value) == 2 and value[0] < value[1])
LOGGERS = Words(("console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow", "trackio"))


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
    top_entropy_quantile: Share = 1.0
    """Learn only from this share of a step's tokens, those with the highest entropy: the others get advantage 0 (arXiv
    2506.01939). 1 = from all; 0 = from the one with the highest."""
    reward_clip_range: Annotated[list[float] | None, BOUNDS] = None
    """Lowest and highest score, before a KL comes off it: one beyond counts as the bound. The metrics show the score as it was.
    null = none is clipped."""
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
    """console, tensorboard, wandb, swanlab, mlflow, trackio. The record in the run folder, jsonl, is always written."""
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
    """With resume_mode=resume_path: a global_step_N folder, or the folder of a run for its newest one."""
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
    keep_best_checkpoint: str | None = None
    """The validation metric that says which checkpoint is best, such as ``val-core/openai/gsm8k/reward/mean@1``; more is better
    unless it begins with ``min:``. A validation that is better than all before then saves at once, whatever ``save_freq`` is,
    and the run leaves that policy in ``model_best/`` too. null = the mean of the core metrics, of the checkpoints that are
    saved anyway."""
    save_final_model: bool = True
    """When the run ends, write the policy to ``model/`` in the run folder, as transformers and vLLM load it: adapters merged, in
    the dtype of the model that it started from."""
    private_files: bool = True
    """Let nobody but the user who trains read what the run writes: folders of mode 0700, files of mode 0600. false = the umask
    decides, for a folder that others read too."""
    max_skipped_steps: PositiveInt = 3
    """Steps in a row without any update, because no gradient norm was finite, after which the run stops and names the last good
    checkpoint. One such step may be a bad batch; three in a row mean that the weights or the settings are at fault."""
    critic_warmup: NaturalInt = 0
    """The step from which the policy is trained too, as in verl: 3 trains the critic alone in steps 1 and 2; 0 and 1 do not."""
    balance_batch: bool = True
    """Even out tokens over ranks."""
    ray_wait_register_center_timeout: PositiveInt = 300
    """Seconds for placement and worker start."""
    stop_deadline_seconds: PositiveFloat = 25.0
    """Seconds from a stop signal to the end of the run: it finishes or gives up the step, saves and exits. Slurm and Kubernetes
    kill 30 seconds after SIGTERM unless told otherwise."""


@dataclass(frozen=True)
class Memory(MemoryLimits):
    """Limits of each worker process."""


@dataclass(frozen=True)
class Debug:
    """Run a part of a training run, or run it with extra checks."""

    mode: Literal["off", "dry", "rollout_only", "score_only", "train_only", "forge", "memory", "deterministic", "sync_check"] = (
        "off"
    )
    """off = a training run; dry = resolve the settings, print them, exit; rollout_only = generate, write a dump, exit;
    score_only = score a dump and compute its log-probs, without an update; train_only = train on the rows and scores of a dump,
    without an engine; forge = train on synthetic rows of the largest lengths, which needs no data; memory = print each phase's
    memory after every step, and write a snapshot when memory runs out; deterministic = deterministic kernels and a fixed seed;
    sync_check = compare the engine's weights with the policy's after every sync, and look for stale cache blocks."""


__all__ = [
    "REQUIRED", "Actor", "ActorRolloutRef", "Algorithm", "BucketEngine", "CheckpointContents", "Critic", "CriticModel",
    "CustomClass", "CustomEstimator", "CustomLoss", "CustomReward", "CustomSampler", "Data", "Debug", "EngineKwargs",
    "EntropyControl",
    "FilterGroups", "Fsdp", "KlControl", "Memory", "MixedPrecision", "Model", "ModelKnobs", "Optim", "OverlongBuffer", "PfPpo",
    "PolicyLoss", "RayKwargs", "Ref", "RefModel", "ResourcePool", "RewardKwargs", "RewardModel", "Rollout",
    "RolloutCorrection", "SandboxFusion", "ScoringModel", "Settings", "TrainedFsdp", "Trainer", "ValKwargs",
    "WrapPolicy",
]  # fmt: skip


@dataclass(frozen=True)
class ActorRolloutRef:
    """The policy, its reference and its engine."""

    hybrid_engine: bool = True
    """Trainer and engine share devices; only true exists."""
    nccl_timeout: PositiveInt = 600
    """Seconds for which workers wait for one that does not come to a collective, or that a signal has stopped."""
    model: Model = field(default_factory=Model)
    """The policy's model."""
    actor: Actor = field(default_factory=Actor)
    """The update."""
    ref: Ref = field(default_factory=Ref)
    """The reference; built only when a KL is asked for."""
    rollout: Rollout = field(default_factory=Rollout)
    """Generation."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: Critic = field(default_factory=Critic)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward_model: RewardModel = field(default_factory=RewardModel)
    custom_reward_function: CustomReward = field(default_factory=CustomReward)
    trainer: Trainer = field(default_factory=Trainer)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    memory: Memory = field(default_factory=Memory)
    """Limits of each worker process. As a group, ``memory=constrained`` names a profile."""
    debug: Debug = field(default_factory=Debug)
