"""The sections of the roles: ``actor_rollout_ref.actor``, ``.ref``, ``.model`` and ``.rollout``, ``critic``, and ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.algorithms.records import PolicyLoss
from verl_memopt.config.agent_settings import SINGLE_TURN, Agent, MultiTurn
from verl_memopt.memory.activation_checkpointing import ActivationCheckpointing
from verl_memopt.memory.activation_offload import ActivationOffloadSettings
from verl_memopt.memory.bucketed_adamw import BucketedAdamWSettings
from verl_memopt.memory.chunked_logprob import ChunkedLogprob
from verl_memopt.memory.grad_offload import GradOffload
from verl_memopt.memory.knob import (
    MINUS_ONE_OR_MORE,
    NOT_NEGATIVE,
    POSITIVE,
    CountOrMinusOne,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
)
from verl_memopt.memory.load_mode import LoadMode
from verl_memopt.memory.lora import Lora, LoraReference
from verl_memopt.memory.native_offload import NativeOffload
from verl_memopt.memory.optimizer_in_backward import OptimizerInBackward
from verl_memopt.memory.optimizer_offload import OptimizerOffload
from verl_memopt.memory.optimizer_state_dtype import OptimizerStateDtype
from verl_memopt.memory.param_offload import ParamOffload
from verl_memopt.memory.precision import PrecisionSettings
from verl_memopt.memory.prune_last_block import PruneLastBlock
from verl_memopt.memory.quantized_base import QuantizedBase
from verl_memopt.memory.quantized_frozen import QuantizedFrozen
from verl_memopt.memory.recompute_elementwise import RecomputeElementwise
from verl_memopt.memory.resharding import GradientSync, Resharding
from verl_memopt.memory.rollout_memory import RolloutMemory
from verl_memopt.memory.sequence_parallel import SequenceParallel
from verl_memopt.memory.sharding_units import ShardingUnits
from verl_memopt.memory.shared_prompt import SharedPrompt
from verl_memopt.memory.shared_weights import SharedWeights
from verl_memopt.memory.split_masters import SplitMasters
from verl_memopt.memory.stochastic_rounding import StochasticRounding
from verl_memopt.memory.tiled_block import TiledBlock
from verl_memopt.memory.tiled_mlp import TiledMlpSettings
from verl_memopt.memory.token_budget import CriticBudget, LogProbBudget, UpdateBudget
from verl_memopt.memory.weight_buckets import WeightBuckets

SAMPLED = "sampled"
"""The form of ``distill.divergence`` that needs only the teacher's log-probs of the sampled tokens."""
INSIDE = Range("must lie between 0 and 1, and be neither", lambda value: 0 < value < 1)

# The sections ``optim`` and ``fsdp_config``: how a model is updated and sharded.

Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
DECAYS = Range("must each be at least 0 and below 1", lambda pair: all(0 <= decay < 1 for decay in pair))


# A section inherits the fields of its knobs. Python puts the fields of the last base class first, so the bases stand in reverse
# order: the settings page then lists the knobs in their usual order.
@dataclass(frozen=True)
class ModelKnobs(
    Lora, ActivationOffloadSettings, ActivationCheckpointing, TiledBlock, TiledMlpSettings, PruneLastBlock, RecomputeElementwise
):
    """The knobs that act in the policy's model and in the critic's."""


@dataclass(frozen=True)
class Optim(OptimizerInBackward, StochasticRounding, OptimizerStateDtype, BucketedAdamWSettings):
    lr: NaturalFloat = 1e-6
    """Peak learning rate. SGD needs a rate that is larger by orders of magnitude, because its update is proportional to the
    gradient."""
    weight_decay: NaturalFloat = 0.01
    """Weight decay, decoupled as in AdamW; with SGD it is added to the gradient, as in torch."""
    betas: Annotated[tuple[float, float], DECAYS] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    clip_grad: Annotated[float | None, POSITIVE] = 1.0
    """Largest global norm of the gradient; a larger gradient is scaled down to it. null = no clipping, but the norm is still
    reported."""
    lr_scheduler_type: Schedule = "constant"
    """Learning-rate schedule after the warm-up, by transformers' names. constant keeps ``lr``; the others lower it."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of transformers' schedule, such as ``power`` of polynomial or ``num_decay_steps`` of
    warmup_stable_decay."""
    min_lr_ratio: Share = 0.0
    """Lowest learning rate of the schedule, as a share of ``lr``."""
    num_cycles: PositiveFloat = 0.5
    """Number of cosine waves over the run. 0.5 is half a wave, which falls once from ``lr`` to the lowest rate.
    cosine_with_restarts takes a whole number."""
    lr_warmup_steps: Annotated[int, MINUS_ONE_OR_MORE] = -1
    """Steps of linear warm-up, in the unit of ``lr_schedule_steps``; -1 or 0 = use ``lr_warmup_steps_ratio``."""
    lr_warmup_steps_ratio: Share = 0.0
    """Steps of linear warm-up, as a share of the schedule's length."""
    total_training_steps: CountOrMinusOne = -1
    """Length of the schedule, in the unit of ``lr_schedule_steps``; -1 = the length of the run."""
    lr_schedule_steps: Literal["rollouts", "updates"] = "rollouts"
    """What the schedule counts. rollouts = training steps, as in verl: all optimizer steps of a rollout have the same rate, and
    the first rollout of a warm-up has rate 0. updates = optimizer steps: the rate changes after each, and a warm-up of w steps
    starts at 1 / (w + 1) of ``lr``, so that the first rollout already trains."""

    def state_bytes(self, master_bytes: int) -> float:
        """Bytes of optimizer state per parameter. ``master_bytes``: bytes per parameter of the master weights."""
        return self.num_moments * self.moment_bytes(master_bytes)


@dataclass(frozen=True)
class WrapPolicy:
    transformer_layer_cls_to_wrap: list[str] | None = None
    """Names of module classes that FSDP shards as units; null = the decoder blocks of the model."""


@dataclass(frozen=True)
class Fsdp(PrecisionSettings, ShardingUnits, SequenceParallel, Resharding, NativeOffload, ParamOffload):
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    """Which modules FSDP shards as units."""
    forward_prefetch: bool = False
    """Gather the weights of the next block while the current block computes."""
    seed: NaturalInt = 42
    """Seed of torch's random generator on every worker."""
    full_determinism: bool = False
    """Use deterministic kernels on every worker."""


@dataclass(frozen=True)
class TrainedFsdp(GradientSync, GradOffload, OptimizerOffload, SplitMasters, Fsdp):
    """Sharding and precision of a model that is trained."""

    cuda_graphs: bool = False
    """Run the blocks as CUDA graphs, all but their attention, so that the host launches a few graphs instead of 200 kernels. For
    one device and full-parameter training with activation checkpointing; other blocks run as without it, with a warning. It
    holds the weights and gradients of one block, and the activations that a block computes, also between passes."""


KlEstimator = Literal["kl", "abs", "mse", "low_var_kl"]
KlWithGradient = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"]
Part = Literal["model", "optimizer", "extra", "hf_model"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ABOVE_ONE = Range("must be above 1", lambda value: value > 1)


@dataclass(frozen=True)
class CheckpointContents:
    save_contents: list[Part] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to save: model, optimizer, extra (schedule and random state), hf_model (a folder in Hugging Face format)."""
    load_contents: list[Part] | None = None
    """Parts to load on resume; follows ``save_contents``."""


@dataclass(frozen=True)
class EntropyControl:
    target: Annotated[float | None, POSITIVE] = None
    """Target of the mean entropy per token, in nats. If a step's entropy is at or below the target, the weight of the bonus
    grows, and the next step applies the bonus. If it is above, the weight shrinks, and the next step applies no bonus. null = the
    weight is fixed."""
    delta: NaturalFloat = 0.005
    """Change of the weight per optimizer step."""
    min: NaturalFloat = 0.0
    """Smallest weight of the bonus."""
    max: NaturalFloat = 1.0
    """Largest weight of the bonus."""


@dataclass(frozen=True)
class RouterReplay:
    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """Which experts of a mixture compute a token in the update. Rounding and optimizer steps change the router's choice, so that
    the ratio of a token compares two functions, not two policies. disabled = the router chooses in each pass. R2 = the experts
    that the pass for old log-probs chose, which then always runs. R3 = those that the engine chose, in that pass too. Use R3 if
    ``rollout/logprob_diff_mean`` is large, and R2 with several optimizer steps in a step. Only the choice is replayed: weights
    are computed from the router, which keeps its gradient. The reference chooses for itself, as in verl. It costs a byte for each
    layer and each expert of a token, two with more than 256 experts: 384 bytes with 48 layers and 8 experts. Only for models with
    experts whose blocks our decoder computes. R3 needs ``rollout.name=hf``, or vLLM on a GPU."""


@dataclass(frozen=True)
class Actor(UpdateBudget, SharedPrompt):
    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step. null = all prompts of ``data.train_batch_size``."""
    old_log_prob_pass: Literal["always", "auto"] = "auto"
    """When a separate pass computes the old log-probs. always = in every step. auto = only if it is needed: with one optimizer
    step per rollout, the forward of the update gives the same log-probs. Even then the pass is needed by settings that read
    log-probs or entropies before the update, such as ``algorithm.use_kl_in_reward``, ``algorithm.rollout_correction``,
    ``algorithm.use_pf_ppo``, ``algorithm.top_entropy_quantile``, ``calculate_entropy``, and the losses clip_cov and kl_cov."""
    clip_ratio: PositiveFloat = 0.2
    """The ratio of new to old probability is clipped to the range from 1 - clip_ratio to 1 + clip_ratio."""
    clip_ratio_low: Annotated[float | None, POSITIVE] = None
    """Distance of the lower clip from 1; follows ``clip_ratio``."""
    clip_ratio_high: Annotated[float | None, POSITIVE] = None
    """Distance of the upper clip from 1; follows ``clip_ratio``."""
    clip_ratio_c: Annotated[float | None, ABOVE_ONE] = 3.0
    """Dual clip: upper bound of the ratio at tokens with a negative advantage; above 1. null = no dual clip."""
    loss_agg_mode: Aggregation = "token-mean"
    """How the loss is averaged over the global mini-batch: token-mean, token-sum (which grows with the batch),
    seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of the token sums in seq-mean-token-sum-norm; follows ``data.max_response_length``."""
    off_policy_mask_threshold: Annotated[float | None, POSITIVE] = None
    """Leave a response with a negative advantage out of the policy's loss if the mean over its tokens of log-prob under the
    engine minus log-prob under the policy is above this threshold: the policy has moved too far away from it (DeepSeek-V3.2,
    arXiv 2512.02556). Without the engine's log-probs, the old log-probs are used. null = off."""
    entropy_coeff: NaturalFloat = 0.0
    """Weight of the entropy bonus; with ``entropy_ctrl.target`` its first value."""
    entropy_ctrl: EntropyControl = field(default_factory=EntropyControl)
    """Adapts the weight of the entropy bonus to the entropy."""
    entropy_agg_mode: Aggregation | None = None
    """How the entropy bonus is averaged; null = as ``loss_agg_mode``."""
    calculate_entropy: bool = False
    """Report the entropy even if the weight of its bonus is 0."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities over the vocabulary at each token, in the pass for old log-probs. The optimal
    token baselines need it."""
    use_kl_loss: bool = False
    """Add a KL term against the reference to the loss."""
    kl_loss_coef: NaturalFloat = 0.001
    """Weight of the KL term."""
    kl_loss_type: KlWithGradient = "low_var_kl"
    """Estimator of the KL term: kl (k1), abs, mse (k2), low_var_kl (k3). With a trailing + the term has the gradient of k2."""
    kl_loss_by_ratio: bool = False
    """Multiply the KL term of each token by the ratio of new to old probability, and differentiate the ratio too. With low_var_kl
    this gives the gradient of the KL itself (DeepSeek-V3.2, arXiv 2512.02556). With gspo the ratio is that of the response."""
    use_torch_compile: bool = True
    """Compile the log-prob head, and the norms, rotary embeddings and activation functions of all models, or run them as this
    project's own GPU kernels. GPU only. It is off under full_determinism, and, with one warning, if there is no C compiler."""
    ppo_epochs: PositiveInt = 1
    """Number of passes of the update over the rollout batch."""
    shuffle: bool = False
    """Shuffle the groups before they are split into mini-batches."""
    data_loader_seed: NaturalInt = 42
    """Seed of this shuffle, and of the tokens that the loss clip_cov draws."""
    tau_pos: PositiveFloat = 1.0
    """sapo: steepness of the gate at tokens with a positive advantage."""
    tau_neg: PositiveFloat = 1.05
    """sapo: steepness of the gate at all other tokens. If it is above ``tau_pos``, their gradient falls faster as the ratio moves
    away from 1."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The policy loss."""
    router_replay: RouterReplay = field(default_factory=RouterReplay)
    """Replays the experts of an earlier pass in the update."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer and schedule."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the policy."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """What a checkpoint holds."""


@dataclass(frozen=True)
class ResourcePool:
    """Separate devices for one role."""

    enable_resource_pool: bool = False
    """Give the model ``nnodes`` x ``n_gpus_per_node`` separate devices, so that it can compute at the same time as the policy.
    Needs ``trainer.worker_group=ray``."""
    nnodes: NaturalInt = 1
    """Number of machines in the pool. They may be the policy's machines, if these have enough devices for both."""
    n_gpus_per_node: NaturalInt = 1
    """Devices per machine in the pool; on a CPU, worker processes per machine."""


@dataclass(frozen=True)
class TeacherModel:
    path: str | None = None
    """Folder in Hugging Face format, or a hub id, of a causal LM with the policy's tokenizer (see ``distill.align``). It may have
    another size. null = the policy is its own teacher, and ``distill.teacher_prompt`` tells the teacher more than the policy
    knows."""
    lora_adapter_path: str | None = None
    """Adapters of the teacher, in the peft format. Without ``path`` they are computed over the policy's own frozen base, so the
    teacher needs no second model. The policy then has adapters too, on at least the same layers. null = none."""
    tokenizer_path: str | None = None
    """``distill.align=text``: folder or hub id of the teacher's tokenizer; null = that of ``path``."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Module imported before the model is built; follows the policy's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""


@dataclass(frozen=True)
class TeacherEndpoint:
    """A server that returns the log-probs of the tokens of a prompt. The teacher then needs no memory here."""

    url: str | None = None
    """Address of its completions, such as ``http://host:8000/v1/completions``. The server must have the policy's tokenizer. It
    gets the token ids of prompts and responses. null = the teacher is a model of this run."""
    model: str | None = None
    """Name of the model, as the server calls it."""
    api: Literal["vllm", "openai"] = "vllm"
    """vllm = vLLM's field ``prompt_logprobs``, which also serves ``distill.top_k``; openai = the fields ``echo`` and
    ``logprobs`` of OpenAI's completions, which other servers have too."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of the server. The key itself is in no file of the run."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest time of one request. It is sent up to four times, in at most three times as long."""
    requests_at_once: PositiveInt = 16
    """Largest number of requests that the server gets at the same time."""


@dataclass(frozen=True)
class Teacher(LogProbBudget, QuantizedFrozen, ResourcePool):
    """A frozen model that judges the policy's responses token by token; built only if a run distills."""

    model: TeacherModel = field(default_factory=TeacherModel)
    """Where the teacher comes from. The knobs of ``actor_rollout_ref.model`` apply to it as they apply to the reference."""
    fsdp_config: Fsdp = field(default_factory=Fsdp)
    """Sharding and precision of the teacher."""
    further_models: dict[str, Any] = field(default_factory=dict)
    """Further teachers: name -> folder or hub id. They have the settings of ``model``, and may have other sizes."""
    key: str = "teacher"
    """Column that names the teacher of a row, one of ``further_models``. Rows that name none learn from ``model.path``."""
    weights: Literal["policy", "reference"] = "policy"
    """Without ``model.path``: whose weights the teacher has. policy = the policy's present ones; reference = the reference's.
    Those are the weights that training started from, or with ``actor_rollout_ref.ref.sync_every_steps`` a copy that follows the
    policy."""
    endpoint: TeacherEndpoint = field(default_factory=TeacherEndpoint)
    """A teacher that runs elsewhere."""
    log_probs_key: str | None = None
    """Supervised fine-tuning: column with what a teacher said of the response, so that the run needs no teacher. It has one entry
    for each token of the response and of the turn's end: a list of at least ``distill.top_k`` pairs [token id, log-prob], the
    teacher's most probable tokens. null = the rows have no such column."""


@dataclass(frozen=True)
class Distill:
    """What the policy learns from a teacher. A run distills with ``algorithm.adv_estimator=distill`` or ``distill.coef``."""

    coef: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of the teacher beside the rewards. 0 = no teacher; null = 1 with ``algorithm.adv_estimator=distill``, else 0."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled"] = "reverse_kl"
    """What is made small at each token of a response. reverse_kl = KL(policy to teacher); forward_kl = KL(teacher to policy);
    jsd = the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649). These three are exact: they read the whole
    vocabulary of both models, tile by tile, in the loss. sampled = the estimate of reverse_kl from the sampled token alone,
    which is subtracted from the token's advantage; it needs only the teacher's log-probs, and is far noisier."""
    beta: Annotated[float, INSIDE] = 0.5
    """jsd: share of the teacher in the mixture to which both are compared."""
    top_k: Annotated[int | None, POSITIVE] = None
    """reverse_kl and forward_kl: compare the teacher's k most probable tokens, and all other tokens as one. The update then needs
    no head of the teacher. A k of 64 suits forward_kl; for reverse_kl the teacher should give the k more than 0.9. null = compare
    the whole vocabulary."""
    discount: Share = 0.0
    """sampled: weight of the estimates of later tokens in a token's advantage. 0 = each token answers for itself; 1 = the
    gradient of the divergence between whole responses, which also rewards ending early."""
    weight_key: str | None = None
    """Column with the weight of the teacher in a row, a number of at least 0, which multiplies ``coef``. null = 1 in each row."""
    align: Literal["tokens", "text"] = "tokens"
    """tokens = the teacher has the policy's tokenizer, and reads the sampled tokens. text = it has another tokenizer, and reads
    their text in its own tokens, after the prompt in its own chat template. This needs ``divergence=sampled``. Tokens that only
    as a run stand for tokens of the teacher answer for the run together."""
    teacher_prompt: str | None = None
    """What the teacher reads in place of the last message of the prompt: a text in which ``{prompt}`` is that message, and other
    names in braces are columns of the row, as in ``{prompt} The solution is {solution}.`` null = the policy's prompt."""


@dataclass(frozen=True)
class RefModel:
    path: str | None = None
    """Folder or hub id of the reference model, which must have the policy's tokenizer; follows
    ``actor_rollout_ref.model.path``."""


@dataclass(frozen=True)
class Ref(LogProbBudget, QuantizedFrozen, LoraReference):
    """The reference model; built only if a KL is used."""

    model: RefModel = field(default_factory=RefModel)
    """Where the reference comes from."""
    use_torch_compile: bool | None = None
    """Compile the reference's log-prob head; follows ``actor.use_torch_compile``."""
    sync_every_steps: Annotated[int | None, POSITIVE] = None
    """Steps between two updates of the reference, which move it towards the policy. Steps that do not update the policy are not
    counted. Checkpoints then hold the reference too. null = the reference keeps its weights."""
    sync_mixup_alpha: PositiveShare = 0.9
    """alpha in the update of the reference: new reference = alpha x policy + (1 - alpha) x reference."""
    fsdp_config: Fsdp = field(default_factory=Fsdp)
    """Sharding and precision of the reference."""


# The section ``critic``: the value model that ``algorithm.adv_estimator=gae`` trains beside the policy.


@dataclass(frozen=True)
class CriticModel(ModelKnobs):
    path: str | None = None
    """Folder in Hugging Face format, or a hub id. The critic starts from its decoder, and from its value head if it has one; a
    missing value head starts at 0. Follows ``actor_rollout_ref.model.path``."""
    hf_config_path: str | None = None
    """Read config.json from this folder instead of ``path``."""
    tokenizer_path: str | None = None
    """Read the critic's tokenizer from this folder instead of ``path``. It must equal the policy's tokenizer."""
    trust_remote_code: bool | None = None
    """Let transformers run code from the model's folder; follows ``actor_rollout_ref.model.trust_remote_code``."""
    external_lib: str | None = None
    """Python module that is imported before the model is built; follows ``actor_rollout_ref.model.external_lib``."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json. A name that the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] | None = None
    """auto, flash_attention_2, sdpa, eager; follows ``actor_rollout_ref.model.attn_implementation``."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the critic."""


@dataclass(frozen=True)
class Critic(CriticBudget, ResourcePool):
    """The critic; built only with ``algorithm.adv_estimator=gae``, the one estimator that reads values."""

    enable: bool | None = None
    """null = the estimator decides: gae has a critic, the others have none. Another value cannot change that."""
    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    model: CriticModel = field(default_factory=CriticModel)
    """The critic's model."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-5))
    """Optimizer and schedule."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """Which parts of the critic a checkpoint holds."""
    ppo_mini_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per optimizer step; follows the key of the actor."""
    ppo_epochs: Annotated[int | None, POSITIVE] = None
    """Number of passes of the update over the rollout batch; follows the key of the actor."""
    shuffle: bool | None = None
    """Shuffle the groups before they are split into mini-batches; follows the key of the actor."""
    data_loader_seed: NaturalInt = 42
    """Seed of this shuffle."""
    cliprange_value: PositiveFloat = 0.5
    """Largest distance between new and old value at which the value loss is not clipped."""
    loss_agg_mode: Aggregation | None = None
    """How the value loss is averaged over the global mini-batch; follows the key of the actor."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of the token sums in seq-mean-token-sum-norm; follows the key of the actor."""


# The section ``data``.

REQUIRED: Any = "???"
"""Default of a key that the user must set; the loader reports every such key that is still missing."""


@dataclass(frozen=True)
class CustomClass:
    """A dataset class that the user provides."""

    path: str | None = None
    """Python file that holds the class; null = the built-in class."""
    name: str | None = None
    """Name of the class in this file."""


@dataclass(frozen=True)
class CustomSampler:
    """A sampler class that the user provides."""

    class_path: str | None = None
    """Python file that holds the sampler class. It is called with (num_rows, seed, epoch), and iterating over it gives row
    indices. null = the built-in sampler."""
    class_name: str | None = None
    """Name of the class in this file."""


@dataclass(frozen=True)
class Data:
    """The rows of training and validation, how prompts are made from them, and in which order they are drawn."""

    train_files: Any = REQUIRED
    """A path or a list of paths (.parquet, .json, .jsonl), or a dataset of the hub: hub:owner/name, with :config and @split if it
    has several. For the files of a recipe see ``reward_model.reward_manager``."""
    val_files: Any = REQUIRED
    """Validation rows, given as in ``train_files``; null = no validation."""
    train_max_samples: CountOrMinusOne = -1
    """Largest number of training rows that are used. With ``shuffle`` they are a seeded random subset, else the first rows. With
    ``streaming`` they are always the first rows. -1 = all rows."""
    val_max_samples: CountOrMinusOne = -1
    """Largest number of validation rows that are used; -1 = all rows."""
    max_prompt_length: PositiveInt = 512
    """Largest length of a prompt in tokens; ``truncation`` decides what happens to a longer one."""
    max_response_length: PositiveInt = 512
    """Largest length of a response in tokens."""
    train_batch_size: PositiveInt = 1024
    """Prompts per training step. Each prompt gets ``rollout.n`` responses."""
    gen_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per round of generation with ``algorithm.filter_groups``; follows ``train_batch_size``."""
    val_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per call to the engine in validation; null = all prompts in one call."""
    shuffle: bool = True
    """Draw a new order of the training rows for each epoch."""
    streaming: bool = False
    """Read training rows when a step needs them, instead of all rows at the start. Use it for files that do not fit in memory,
    and for endless data. The number of rows is then unknown, so set ``trainer.total_training_steps``. A ``custom_cls`` needs
    ``__iter__``. Validation rows are always read at the start. From Python, a dataset that has no length and at least
    ``shuffle_buffer_size`` rows is streamed without this key."""
    shuffle_buffer_size: PositiveInt = 1000
    """With ``streaming`` and ``shuffle``: number of rows in the shuffle buffer. Each step draws its rows from the buffer, and
    newly read rows replace them. The first step waits until the buffer is full."""
    validation_shuffle: bool = False
    """Shuffle the validation rows once, when they are read."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of the order of the rows; null = draw a seed at the start, log it, and save it in checkpoints."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than ``max_prompt_length`` when the dataset is read, and log their number. Supervised
    fine-tuning also drops rows whose response is longer than ``max_response_length``."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt that is too long. error = stop the run; left, right, middle = remove tokens at this place, and log
    how many. Supervised fine-tuning then also cuts the end of a response that is too long."""
    prompt_key: str = "prompt"
    """Column of the prompt. It holds a list of {role, content}; or a text, which the tokenizer encodes as any other text, with
    BOS if the tokenizer adds it; or a list of token ids, which is used unchanged."""
    response_key: str = "response"
    """Supervised fine-tuning: column of the response, a text. A dot names a field of an object: ``extra_info.answer``."""
    messages_key: str = "messages"
    """Supervised fine-tuning, for rows without ``response_key``: column of a whole conversation, a list of {role, content}. Its
    last turn must be the assistant's; this turn is the response, and the turns before it are the prompt."""
    tools_key: str | None = "tools"
    """Column of the tools of a row, a list of JSON schemas, which the chat template renders. null = tools are not read."""
    enable_thinking_key: str | None = "enable_thinking"
    """Column with the value of ``enable_thinking`` for a row, an argument of the chat template. null = the column is not read."""
    allow_special_tokens: bool = False
    """Encode special tokens such as ``<|im_end|>`` within messages as special tokens. false = they are encoded as plain text, and
    only the chat template gives special tokens. A prompt that is a text, and not a list of messages, is always encoded with
    special tokens."""
    answer_key: str = "answer"
    """Column of the reference answer, for rows that have no ``reward_model`` column as in verl."""
    reward_fn_key: str = "data_source"
    """Column that chooses the default reward, and by which validation metrics are grouped."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's chat template."""
    custom_cls: CustomClass = field(default_factory=CustomClass)
    """A dataset class that you provide."""
    sampler: CustomSampler = field(default_factory=CustomSampler)
    """A sampler class that you provide."""


# The section ``actor_rollout_ref.model``.


@dataclass(frozen=True)
class Model(LoadMode, QuantizedBase, ChunkedLogprob, ModelKnobs):
    path: str = REQUIRED
    """Folder in Hugging Face format, or a hub id; ``verl-memopt toy`` makes a tiny model."""
    hf_config_path: str | None = None
    """Read config.json from this folder instead of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer from this folder instead of ``path``."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Python module that is imported before the model is built, such as one that registers an architecture."""
    custom_chat_template: str | None = None
    """Jinja template that replaces the tokenizer's chat template."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json. A name that the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """auto, flash_attention_2, sdpa, eager. auto = flash attention if device and dtype support it, else sdpa. With eager, linear
    layers (Qwen3.5) use no kernels of flash-linear-attention."""


# The section ``actor_rollout_ref.rollout``.

FILLED = Range("must each have a character", all)
NATS = Range("must be a number above 0, or auto", lambda value: value == "auto" or (isinstance(value, float) and value > 0))


LEAST_TEMPERATURE = 1e-4
"""Dividing logits by a smaller temperature overflows fp32."""
WARM = Range(f"must be at least {LEAST_TEMPERATURE}", lambda value: value >= LEAST_TEMPERATURE)
OFF_OR_WARM = Range(f"must be 0, or at least {LEAST_TEMPERATURE}", lambda value: value == 0 or value >= LEAST_TEMPERATURE)


@dataclass(frozen=True)
class ValKwargs:
    n: PositiveInt = 1
    """Responses per validation prompt."""
    do_sample: bool | None = None
    """true = sample; false = greedy decoding; null = sample if ``temperature`` is above 0, as in verl."""
    temperature: Annotated[float, OFF_OR_WARM] = 0.0
    """Sampling temperature; 0 = greedy decoding."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens that together have this probability; 1 = off."""
    top_k: CountOrMinusOne = -1
    """Sample from this number of most likely tokens; -1 = off."""
    min_p: Share = 0.0
    """As ``rollout.min_p``; 0 = off."""


@dataclass(frozen=True)
class EngineKwargs:
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine. An argument that a key of ``rollout`` already sets is an error."""


@dataclass(frozen=True)
class Rollout(LogProbBudget, RolloutMemory, SharedWeights, WeightBuckets):
    name: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf (generation with transformers)."""
    mode: Literal["async"] = "async"
    """Accepted for compatibility with verl. The engine always runs in the worker's process."""
    n: PositiveInt = 1
    """Responses per prompt (the group size)."""
    temperature: Annotated[float, WARM] = 1.0
    """Sampling temperature. The trainer's log-probs use the same temperature."""
    top_k: CountOrMinusOne = -1
    """Sample from this number of most likely tokens; -1 = off."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens that together have this probability; 1 = off."""
    min_p: Share = 0.0
    """Remove the tokens whose probability is below this share of the largest probability, before top_k and top_p; 0 = off."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, tokens that already occurred in the prompt or the response become less likely; 1 = off."""
    stop: Annotated[list[str], FILLED] = field(default_factory=list)
    """Texts that end a response, besides the end-of-sequence tokens, also in validation. The token that completes such a text is
    the last token of the response."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides the end-of-sequence tokens, also in validation."""
    do_sample: bool = True
    """true = sample; false = greedy decoding."""
    prompt_length: Annotated[int | None, POSITIVE] = None
    """Longest prompt in tokens that the engine takes; follows ``data.max_prompt_length``."""
    response_length: Annotated[int | None, POSITIVE] = None
    """Largest number of tokens that the engine generates for a response; follows ``data.max_response_length``."""
    ignore_eos: bool = False
    """Generate exactly ``response_length`` tokens for each prompt, for measurements."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of sampling. Each response gets its own seed from this one, the step, the prompt and its place in the group. Follows
    ``data.seed``."""
    dtype: Literal["bfloat16", "fp16", "fp32"] = "bfloat16"
    """dtype of the engine's weights and KV cache."""
    load_format: Literal["dummy", "auto"] = "dummy"
    """dummy = the engine starts without weights, and gets them from the trainer at the first sync; auto = the engine also loads
    weights from the model folder when it starts."""
    tensor_model_parallel_size: PositiveInt = 1
    """Number of ranks that share one engine."""
    enable_chunked_prefill: bool = True
    """Let vLLM split the prefill of a long prompt over several forwards."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes for which vLLM captures CUDA graphs; null = vLLM decides."""
    calculate_log_probs: bool = True
    """Return the engine's log-probs, and log how far they are from the trainer's."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """processed_logprobs = log-probs after repetition penalty and temperature; raw_logprobs = before them. Both are over the
    whole vocabulary, before top_k and top_p remove tokens, as the trainer's log-probs are."""
    max_logprob_diff: Annotated[float | str | None, NATS] = "auto"
    """Stop the run if ``rollout/logprob_diff_mean`` is above this limit, in nats. auto = a limit that depends on the dtypes:
    0.001 if engine and trainer compute in fp32, 0.2 if one of them rounds to 16 bits, 1 with an fp8 KV cache. null = no limit."""
    skip_rollout: bool | None = None
    """Read the responses of each step from a dump instead of generating them; null = true with ``debug.mode`` score_only or
    train_only, else false."""
    skip_dump_dir: str | None = None
    """Folder of the dump for ``skip_rollout``, with one {step}.jsonl per step; follows ``trainer.rollout_data_dir``. If both are
    null, it is {default_local_dir}/rollouts."""
    disable_log_stats: bool = True
    """Do not let vLLM log its statistics."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order in which vLLM schedules requests: fcfs (first come, first served) or priority."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    """Further arguments of the engine."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling in validation."""
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    """Conversations of several turns."""
    agent: Agent = field(default_factory=Agent)
    """Tools, environments and agent loops."""

    @property
    def converses(self) -> bool:
        """Prompts are answered by conversations of several turns."""
        agent, multi_turn = self.agent, self.multi_turn
        files = (
            multi_turn.tool_config_path, multi_turn.function_tool_path, multi_turn.interaction_config_path,
            agent.environment.path, agent.tools.path, agent.agent_loop_config_path,
        )  # fmt: skip
        given = any(path is not None for path in files) or self.agent.default_agent_loop != SINGLE_TURN
        return given if self.multi_turn.enable is None else self.multi_turn.enable

    @property
    def scoring_temperature(self) -> float:
        """The temperature of log-probs: ``temperature``, or 1 if decoding is greedy."""
        # Greedy decoding samples from no distribution, so no temperature belongs to it.
        return self.temperature if self.do_sample else 1.0
