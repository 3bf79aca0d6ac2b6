"""Every setting: its type, its one default and its help text.

- A field whose default is ``REQUIRED`` must be set by the user.
- A field whose default is ``None`` and that :mod:`verl_memopt.config.values` lists takes the value of another key while it is
  null.
- ``Literal`` types hold the choices of a key, and ``Annotated`` types hold its range.
- The fields of a memory knob are in the knob's file in :mod:`verl_memopt.memory`, and the sections inherit them.

The loader turns Hydra's objects into these dataclasses; no other code sees a Hydra object.
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
    Distill,
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
    Teacher,
    TeacherEndpoint,
    TeacherModel,
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
"""Value of ``input_tokenizer`` that means the policy's tokenizer."""
FILES = Range("must be at least 64", lambda value: value >= 64)


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's penalty for long responses."""

    enable: bool = False
    """Lower the reward of a response that is longer than ``max_resp_len - len`` tokens. The penalty grows linearly over the last
    ``len`` tokens, up to ``penalty_factor``. Needs reward_manager=dapo."""
    len: NaturalInt = 0
    """Length of the buffer in tokens."""
    penalty_factor: NaturalFloat = 1.0
    """Penalty of a response of ``max_resp_len`` tokens."""
    log: bool = False
    """Report ``overlong_reward`` (the penalty, 0 or less) and ``overlong`` (1 = the response has a penalty) for each response."""


@dataclass(frozen=True)
class RewardKwargs:
    """Arguments of the reward manager."""

    overlong_buffer_cfg: OverlongBuffer = field(default_factory=OverlongBuffer)
    """DAPO's penalty for long responses."""
    max_resp_len: Annotated[int | None, POSITIVE] = None
    """Response length in tokens from which the whole penalty applies; follows ``data.max_response_length``."""


@dataclass(frozen=True)
class SandboxFusion:
    """A SandboxFusion service, which runs the programs of code tasks."""

    url: str | None = None
    """Address of the service's run_code, such as http://localhost:8080/run_code. The service runs the programs of rows whose data
    source is apps, codecontests, codeforces or taco. null = no service; such rows then need ``custom_reward_function.path``."""
    max_concurrent: PositiveInt = 64
    """Largest number of programs that the service runs at once, summed over all reward processes."""
    memory_limit_mb: PositiveInt = 1024
    """Memory limit of each program in MB."""


@dataclass(frozen=True)
class ScoringModel(QuantizedFrozen):
    """The network of the reward model: a sequence or token classifier with one label.

    The knobs of ``actor_rollout_ref.model`` apply to it as they apply to the reference.
    """

    path: str | None = None
    """Folder in Hugging Face format, or a hub id. With ``reward_manager=rlt`` this is the student: a causal LM with the policy's
    tokenizer; null = the reference is the student."""
    input_tokenizer: str | None = POLICY_TOKENIZER
    """policy, or the path of the policy's model or tokenizer = the policy's tokenizer decodes each response, and the reward
    model's own chat template and tokenizer encode the conversation. null = the reward model has the policy's tokenizer, and reads
    the policy's token ids unchanged."""
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
    """Score each response with a model. Its score is the reward. With ``custom_reward_function.path`` the function reads the
    score as ``extra_info["rm_score"]`` and returns the reward. With ``reward_manager=rlt`` a student scores explanations."""
    model: ScoringModel = field(default_factory=ScoringModel)
    """The network of the reward model; with ``reward_manager=rlt`` the network of the student."""
    further_models: dict[str, Any] = field(default_factory=dict)
    """Further reward models: name -> folder or hub id. They have the settings of ``model`` and run one after another.
    ``custom_reward_function`` reads their scores as ``extra_info["rm_scores"]``, a dict by name."""
    residency: Literal["auto", "alias_ref", "separate", "swap"] = "auto"
    """reward_manager=rlt: where the student's weights are kept. alias_ref = the student is the reference itself, and takes no
    extra memory; separate = the student has its own weights; swap = student and reference rest on the host, and share one buffer
    on the device in turn (both models must have the same shape); auto = alias_ref if ``model.path`` is null, else separate."""
    rlt: RltReward = field(default_factory=RltReward)
    """reward_manager=rlt: how explanations are scored."""
    micro_batch_size_per_gpu: Annotated[int | None, POSITIVE] = None
    """Conversations per forward of the reward model; follows ``actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu``."""
    use_dynamic_bsz: bool | None = None
    """Fill a micro-batch of the reward model up to a number of tokens instead of conversations; follows
    ``critic.use_dynamic_bsz``."""
    forward_max_token_len_per_gpu: Annotated[int | None, POSITIVE] = None
    """Largest number of tokens per forward with ``use_dynamic_bsz``; follows ``critic.forward_max_token_len_per_gpu``."""
    adaptive_token_budget: bool | None = None
    """Learn the number of tokens per forward from measured memory peaks; follows ``critic.adaptive_token_budget``."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest conversation in tokens; a longer one loses its end. null = nothing is cut."""
    reward_manager: Literal["naive", "batch", "dapo", "prime", "rlt"] = "naive"
    """How the reward function is called. naive = once per row. batch = once per batch, with lists of all rows. prime = once per
    row, in one process per core (up to 64 of them) or more; a row that fails scores ``custom_reward_function.fallback_score``.
    dapo = as naive, with the penalty of ``reward_kwargs.overlong_buffer_cfg``. rlt = a student scores explanations, and no
    function is called; the data files have the columns question, solution and reasoning_trace, or are ``hub:`` and the id of a
    dataset."""
    reward_kwargs: RewardKwargs = field(default_factory=RewardKwargs)
    """Arguments of the reward manager."""
    tolerant_rules: bool = False
    """Score GSM8K and MATH by rules that accept more answers than verl's: ``#### x`` anywhere, also with a currency sign or a
    final dot, and ``\\boxed{}`` by its mathematical value (math-verify) instead of its text."""
    sandbox_fusion: SandboxFusion = field(default_factory=SandboxFusion)
    """The service that runs the programs of code tasks."""
    num_workers: PositiveInt = 1
    """Processes that run the reward function."""
    max_concurrent: PositiveInt = 64
    """Largest number of rows that one process scores at once, if the reward function is ``async def``."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that scores the responses; None if a function or a reward model does."""
        return RECIPES.get(self.reward_manager) if self.enable else None


@dataclass(frozen=True)
class CustomReward:
    """A reward function that the user provides."""

    path: str | None = None
    """Python file with the reward function; null = the rule that belongs to ``data_source``."""
    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs), or with reward_manager=batch
    (data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs). It may be ``async def``."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of each call, the same in every call."""
    pass_rollout: bool = False
    """Give the function more in ``extra_info``: ``prompt`` (a text or messages), ``completion_ids`` (token ids) and
    ``trainer_state`` (``global_step``, the number of finished steps, and ``max_steps``)."""
    timeout_seconds: PositiveFloat = 60.0
    """Longest time that one row may take; with reward_manager=batch, the time of the whole call."""
    cpu_seconds: Annotated[float | None, POSITIVE] = None
    """Longest processor time of one row, summed over all threads and processes that work on it; null = 32 x
    ``timeout_seconds``."""
    memory_gb: PositiveFloat = 16
    """Memory limit in GiB of each reward process, which includes the processes that it starts. There are
    ``reward_model.num_workers`` reward processes."""
    open_files: Annotated[int, FILES] = 4096
    """Largest number of files that one reward process may have open."""
    on_error: Literal["raise", "score"] | None = None
    """raise = a row that fails stops the run. score = a row that fails scores ``fallback_score``, and is counted and logged.
    null = score with reward_manager=prime, else raise."""
    fallback_score: float = 0.0
    """Score of a row that fails, with on_error=score."""


# The sections ``algorithm.rollout_correction`` and ``algorithm.pf_ppo``, under verl's names.


@dataclass(frozen=True)
class RolloutCorrection:
    """Corrects the update if the probabilities of the rollout engine differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights: multiply each token's loss by its probability under the trainer, divided by its probability under the
    engine. sequence = use the probabilities of the token's whole response instead; null = no weights."""
    rollout_is_threshold: str | float = 2.0
    """Upper bound of the weights; a larger weight is set to the bound. With two bounds, written ``lower_upper`` as in 0.5_5.0, a
    weight outside of them is set to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch. In bypass mode the mean is over the mini-batch, which costs one more
    log-prob pass per mini-batch."""
    rollout_rs: str | None = None
    """Rejection: leave tokens or responses out of the update if trainer and engine give them too different probabilities. Give
    names such as token_k1, seq_sum_k1, seq_mean_k3 or seq_max_k2, separated by commas; null = no rejection."""
    rollout_rs_threshold: str | float | None = None
    """Thresholds of the rejections, separated by commas, or one threshold for all. k1 takes two bounds of the ratio, written
    ``lower_upper`` as in 0.5_2.0, or one upper bound of at least 1, whose reciprocal is the lower bound. k2 and k3 take one upper
    bound."""
    bypass_mode: bool = False
    """Use the engine's log-probs as old log-probs, and skip the pass that computes these."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of bypass mode, used instead of ``actor.policy_loss.loss_mode``. ppo_clip = the PPO loss with the ratio of policy to
    engine, which corrects the difference; reinforce = log-prob times advantage times importance weight."""


@dataclass(frozen=True)
class PfPpo:
    """How PF-PPO weights the rows that it draws."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Weight with which a row is drawn. pow = the absolute score to the power ``weight_pow``; max_min = only rows with the best
    or the worst score of the batch are drawn; max_random = 0.4 for the rows with the best score, 0.1 for the others."""
    weight_pow: NaturalFloat = 2.0
    """Exponent of reweight_method=pow."""


# The sections of the whole run: algorithm, trainer, Ray, memory, debug.

BOUNDS = Range("must be two numbers, the lower one first", lambda value: len(value) == 2 and value[0] < value[1])
LOGGERS = Words(("console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow", "trackio"))


@dataclass(frozen=True)
class KlControl:
    """Coefficient of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed or adaptive."""
    kl_coef: NaturalFloat = 0.001
    """Coefficient of the KL; with type=adaptive its first value."""
    horizon: PositiveInt = 10000
    """With type=adaptive: the coefficient changes by at most about 20 % over this number of samples."""
    target_kl: PositiveFloat = 0.1
    """With type=adaptive: the KL that the coefficient is steered towards."""


@dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO): a step learns only from groups whose responses have different scores."""

    enable: bool = False
    """Drop the groups whose responses all have the same score, and generate for further prompts until the step has
    ``data.train_batch_size`` groups. Surplus groups are dropped too. A step then reads more prompts than
    ``data.train_batch_size``, but ``total_epochs`` is converted to steps as without the filter."""
    metric: str | None = None
    """The number that must differ within a group: score (seq_reward and seq_final_reward mean the same), or the name of another
    number that the reward function returns; null = score."""
    max_num_gen_batches: NaturalInt = 0
    """Largest number of generation rounds per step. If the step still has too few groups then, the run stops. 0 = no limit."""


@dataclass(frozen=True)
class Algorithm(EstimatorSettings):
    """Advantages and the KL in the reward."""

    mask_truncated_responses: bool = False
    """Leave responses out of the losses that reach the length limit before they end. Their rewards still count in the baselines
    of their groups, and the responses still count as sequences in ``seq-mean`` averages."""
    top_entropy_quantile: Share = 1.0
    """Learn only from this share of a step's tokens: those with the highest entropy. The other tokens get advantage 0 (arXiv
    2506.01939). 1 = learn from all tokens; 0 = learn from the token with the highest entropy only."""
    reward_clip_range: Annotated[list[float] | None, BOUNDS] = None
    """Lowest and highest score: a score outside is set to the nearer bound, before a KL is subtracted. The metrics show the score
    before clipping. null = no clipping."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward."""
    kl_penalty: KlEstimator = "kl"
    """Estimator of the KL in the reward: kl, abs, mse, low_var_kl."""
    kl_ctrl: KlControl = field(default_factory=KlControl)
    """Coefficient of the KL in the reward."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """Importance weights and rejection, which correct differences between engine and trainer."""
    use_pf_ppo: bool = False
    """Draw the rows of the update from the batch with replacement, with weights that depend on their scores (PF-PPO)."""
    pf_ppo: PfPpo = field(default_factory=PfPpo)
    """How PF-PPO weights the rows."""
    expansion: Literal["token", "lazy", "repeat_sampler", "string"] = "string"
    """How a prompt becomes ``rollout.n`` rows; all four give the same token ids. token = repeat its ids; lazy = store its ids
    once, and repeat them only within a micro-batch; repeat_sampler = repeat its row index, so that each copy is read and
    tokenized again; string = repeat its text, so that each copy is tokenized again."""


@dataclass(frozen=True)
class RayKwargs:
    """Arguments of Ray."""

    ray_init: dict[str, Any] = field(default_factory=dict)
    """Arguments of ray.init (num_cpus, address, ...)."""
    timeline_json_file: str | None = None
    """File to which Ray's timeline is written when the run ends; null = no file."""


@dataclass(frozen=True)
class Trainer:
    """The run: its length, machines, logs and checkpoints."""

    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt = 1
    """Devices per machine; on a CPU, worker processes per machine."""
    device: str = "auto"
    """auto, cuda, cpu. auto = cuda if there is a GPU, else cpu."""
    worker_group: Literal["ray", "local"] = "ray"
    """ray = Ray starts one worker process per device; local = the worker runs in the driver's own process, on one device."""
    total_epochs: PositiveInt = 30
    """Number of passes over the training rows."""
    total_training_steps: Annotated[int | None, POSITIVE] = None
    """Number of training steps; wins over ``total_epochs``. null = ``total_epochs`` sets the number."""
    logger: Annotated[Any, LOGGERS] = field(default_factory=lambda: ["console", "jsonl"])
    """Where metrics go: console, tensorboard, wandb, swanlab, mlflow, trackio. The JSON lines file in the run folder, jsonl, is
    always written."""
    table_every_steps: PositiveInt = 10
    """Steps between two tables of recent steps on the console."""
    track_memory_every_steps: NaturalInt = 10
    """On a CPU: count the bytes of live tensors in steps 1 and 2, and then once every this many steps; 0 = never. A GPU reports
    its memory in every step."""
    log_val_generations: NaturalInt = 0
    """Number of validation samples that are logged as a table."""
    rollout_data_dir: str | None = None
    """Write every training sample to {dir}/{step}.jsonl."""
    validation_data_dir: str | None = None
    """Write every validation sample to {dir}/{step}.jsonl."""
    save_freq: CountOrMinusOne = -1
    """Steps between two checkpoints. Above 0 the last step is saved too; -1 = no checkpoints."""
    test_freq: CountOrMinusOne = -1
    """Steps between two validations. Above 0 the last step is validated too; -1 = no validation during the run."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and exit."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto = resume at the newest complete checkpoint in ``default_local_dir``, if there is one; disable = start at step 1;
    resume_path = resume at ``resume_from_path``."""
    resume_from_path: str | None = None
    """With resume_mode=resume_path: a global_step_N folder, or a run folder, whose newest checkpoint is loaded."""
    project_name: str = "verl_examples"
    """Name of the project in loggers and in ``default_local_dir``."""
    experiment_name: str = "gsm8k"
    """Name of the run in loggers and in ``default_local_dir``."""
    default_local_dir: str | None = None
    """The run folder; null = checkpoints/{project_name}/{experiment_name}."""
    max_actor_ckpt_to_keep: Annotated[int | None, POSITIVE] = None
    """Number of newest checkpoints that are kept; null = all. The newest checkpoint whose weights gave finite gradients is kept
    in addition."""
    max_critic_ckpt_to_keep: Annotated[int | None, POSITIVE] = None
    """Follows ``max_actor_ckpt_to_keep`` and must equal it, because a checkpoint holds policy and critic and is removed as a
    whole."""
    keep_best: bool | None = None
    """Also keep the checkpoint with the best validation score; null = true if the run validates (``test_freq`` > 0)."""
    keep_best_checkpoint: str | None = None
    """Validation metric that decides which checkpoint is best, such as ``val-core/openai/gsm8k/reward/mean@1``. Higher is better,
    or lower with the prefix ``min:``. After a validation with a new best value, the run saves at once, whatever ``save_freq`` is,
    and also exports the policy to ``model_best/``. null = compare the mean of the core metrics, and only between checkpoints that
    ``save_freq`` saves."""
    save_final_model: bool = True
    """When the run ends, write the policy to ``model/`` in the run folder in the format of transformers and vLLM: with adapters
    merged, and in the dtype of the model that training started from."""
    private_files: bool = True
    """Only the user who trains can read what the run writes: folders get mode 0700, files get mode 0600. false = the umask
    decides, for a folder that other users read too."""
    max_skipped_steps: PositiveInt = 3
    """Number of consecutive steps without an update, because no gradient norm was finite, after which the run stops. The error
    names the last good checkpoint. One such step may be a bad batch; three in a row mean that the weights or the settings are
    wrong."""
    critic_warmup: NaturalInt = 0
    """First step in which the policy is trained too, as in verl: with 3, steps 1 and 2 train only the critic. With 0 or 1 there
    is no warm-up."""
    balance_batch: bool = True
    """Distribute the rows of a step so that all ranks have about the same number of tokens."""
    ray_wait_register_center_timeout: PositiveInt = 300
    """Longest time in seconds that Ray may take to place and start the workers."""
    stop_deadline_seconds: PositiveFloat = 25.0
    """Longest time in seconds from a stop signal to the end of the run. Within it the run finishes or abandons the step, saves
    and exits. By default, Slurm and Kubernetes kill a job 30 seconds after SIGTERM."""


@dataclass(frozen=True)
class Memory(MemoryLimits):
    """Limits of each worker process."""


@dataclass(frozen=True)
class Debug:
    """Run a part of a training run, or run it with extra checks."""

    mode: Literal["off", "dry", "rollout_only", "score_only", "train_only", "forge", "memory", "deterministic", "sync_check"] = (
        "off"
    )
    """off = a training run; dry = resolve the settings, print them, exit; rollout_only = generate responses, write them to a
    dump, exit; score_only = score the responses of a dump and compute their log-probs, without an update; train_only = train on
    the responses and scores of a dump, without an engine; forge = train on synthetic rows of the largest lengths, without data
    files; memory = a training run that prints the memory of each phase after every step, and writes a snapshot when memory runs
    out; deterministic = a training run with deterministic kernels and a fixed seed; sync_check = a training run that compares the
    engine's weights with the policy's after every sync, and looks for stale cache blocks."""


__all__ = [
    "REQUIRED", "Actor", "ActorRolloutRef", "Algorithm", "BucketEngine", "CheckpointContents", "Critic", "CriticModel",
    "CustomClass", "CustomEstimator", "CustomLoss", "CustomReward", "CustomSampler", "Data", "Debug", "Distill", "EngineKwargs",
    "EntropyControl",
    "FilterGroups", "Fsdp", "KlControl", "Memory", "MixedPrecision", "Model", "ModelKnobs", "Optim", "OverlongBuffer", "PfPpo",
    "PolicyLoss", "RayKwargs", "Ref", "RefModel", "ResourcePool", "RewardKwargs", "RewardModel", "Rollout",
    "RolloutCorrection", "SandboxFusion", "ScoringModel", "Settings", "Teacher", "TeacherEndpoint", "TeacherModel",
    "TrainedFsdp", "Trainer", "ValKwargs", "WrapPolicy",
]  # fmt: skip


@dataclass(frozen=True)
class ActorRolloutRef:
    """The policy, its reference and its engine."""

    hybrid_engine: bool = True
    """Trainer and engine share their devices. true is the only choice."""
    nccl_timeout: PositiveInt = 600
    """Longest time in seconds that workers wait for another worker in a collective operation. It also limits the wait for a
    worker that a signal has stopped."""
    model: Model = field(default_factory=Model)
    """The policy's model."""
    actor: Actor = field(default_factory=Actor)
    """The update of the policy."""
    ref: Ref = field(default_factory=Ref)
    """The reference model; built only if a KL is used."""
    rollout: Rollout = field(default_factory=Rollout)
    """Generation of the responses."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: Critic = field(default_factory=Critic)
    algorithm: Algorithm = field(default_factory=Algorithm)
    teacher: Teacher = field(default_factory=Teacher)
    distill: Distill = field(default_factory=Distill)
    reward_model: RewardModel = field(default_factory=RewardModel)
    custom_reward_function: CustomReward = field(default_factory=CustomReward)
    trainer: Trainer = field(default_factory=Trainer)
    ray_kwargs: RayKwargs = field(default_factory=RayKwargs)
    memory: Memory = field(default_factory=Memory)
    """Limits of each worker process. As a group, ``memory=constrained`` names a profile."""
    debug: Debug = field(default_factory=Debug)
