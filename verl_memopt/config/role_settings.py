"""The sections ``actor_rollout_ref.actor`` and ``actor_rollout_ref.ref``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.algorithms.records import PolicyLoss
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

# The sections ``optim`` and ``fsdp_config``, which say how a model is sharded and updated.

Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial",
    "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
DECAYS = Range("must each be at least 0 and below 1", lambda pair: all(0 <= decay < 1 for decay in pair))


# A section has the fields of its knobs. Fields of the last base come first, so that the page lists knobs in their order.
@dataclass(frozen=True)
class ModelKnobs(
    Lora, ActivationOffloadSettings, ActivationCheckpointing, TiledBlock, TiledMlpSettings, PruneLastBlock, RecomputeElementwise
):
    """The knobs that act in the policy's model and in the critic's."""


@dataclass(frozen=True)
class Optim(OptimizerInBackward, StochasticRounding, OptimizerStateDtype, BucketedAdamWSettings):
    lr: NaturalFloat = 1e-6
    """Peak learning rate. SGD needs one that is larger by orders of magnitude, as its update has the size of the gradient."""
    weight_decay: NaturalFloat = 0.01
    """Decoupled weight decay; with SGD it is added to the gradient, as in torch."""
    betas: Annotated[tuple[float, float], DECAYS] = (0.9, 0.999)
    """Adam's moment decays."""
    clip_grad: Annotated[float | None, POSITIVE] = 1.0
    """Global gradient-norm clip; null = no clipping, the norm is still reported."""
    lr_scheduler_type: Schedule = "constant"
    """Shape of the learning rate after the warm-up, by transformers' names. constant keeps ``lr``; the others lower it."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of transformers' schedule, such as ``power`` of polynomial or ``num_decay_steps`` of
    warmup_stable_decay."""
    min_lr_ratio: Share = 0.0
    """Floor of the schedule as a share of ``lr``."""
    num_cycles: PositiveFloat = 0.5
    """Waves of cosine over the run: 0.5 falls once from ``lr`` to the floor. cosine_with_restarts takes a whole number."""
    lr_warmup_steps: Annotated[int, MINUS_ONE_OR_MORE] = -1
    """Steps of linear warm-up, as ``lr_schedule_steps`` counts them; -1 or 0 = use ``lr_warmup_steps_ratio``."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of the schedule's length."""
    total_training_steps: CountOrMinusOne = -1
    """Length of the schedule, as ``lr_schedule_steps`` counts; -1 = the run's own number."""
    lr_schedule_steps: Literal["rollouts", "updates"] = "rollouts"
    """What the schedule counts. rollouts: as in verl, all optimizer steps of a rollout have one rate, and a warm-up begins with a
    rollout at rate 0. updates: the rate changes with each optimizer step, and a warm-up of w steps begins at 1 / (w + 1), so
    that no rollout is wasted."""

    def state_bytes(self, master_bytes: int) -> float:
        """Bytes of optimizer state per parameter, for a master copy of ``master_bytes``."""
        return self.num_moments * self.moment_bytes(master_bytes)


@dataclass(frozen=True)
class WrapPolicy:
    transformer_layer_cls_to_wrap: list[str] | None = None
    """Block classes that become shards; null = the model's own decoder blocks."""


@dataclass(frozen=True)
class Fsdp(PrecisionSettings, ShardingUnits, SequenceParallel, Resharding, NativeOffload, ParamOffload):
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    """Which modules become FSDP units."""
    forward_prefetch: bool = False
    """Gather the next block while the present one computes."""
    seed: NaturalInt = 42
    """Seed of every worker's torch generator."""
    full_determinism: bool = False
    """Deterministic kernels on every worker."""


@dataclass(frozen=True)
class TrainedFsdp(GradientSync, GradOffload, OptimizerOffload, SplitMasters, Fsdp):
    """Sharding and precision of a model that is trained."""


KlEstimator = Literal["kl", "abs", "mse", "low_var_kl"]
KlWithGradient = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"]
Part = Literal["model", "optimizer", "extra", "hf_model"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ABOVE_ONE = Range("must be above 1", lambda value: value > 1)


@dataclass(frozen=True)
class CheckpointContents:
    save_contents: list[Part] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to save: model, optimizer, extra (scheduler and RNG), hf_model (a Hugging Face folder)."""
    load_contents: list[Part] | None = None
    """Parts to load on resume; follows ``save_contents``."""


@dataclass(frozen=True)
class EntropyControl:
    target: Annotated[float | None, POSITIVE] = None
    """Mean entropy of a token, in nats, below which the policy is pushed to explore. After a step with at most this much the
    weight grows, and the next step has the bonus; after one with more it shrinks, and the next step has none. null = the weight
    stays as it is."""
    delta: NaturalFloat = 0.005
    """How far the weight moves for each optimizer step."""
    min: NaturalFloat = 0.0
    """Smallest weight."""
    max: NaturalFloat = 1.0
    """Largest weight."""


@dataclass(frozen=True)
class Actor(UpdateBudget, SharedPrompt):
    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step. Null = all of ``data.train_batch_size``."""
    old_log_prob_pass: Literal["always", "auto"] = "auto"
    """always, or auto: left out where the update's own forward gives the same log-probs, which is with one optimizer step a
    rollout and neither ``algorithm.use_kl_in_reward`` nor ``calculate_entropy`` nor the losses clip_cov and kl_cov, which select
    tokens before the update."""
    clip_ratio: PositiveFloat = 0.2
    """Clip of the ratio on both sides."""
    clip_ratio_low: Annotated[float | None, POSITIVE] = None
    """Lower clip; follows ``clip_ratio``."""
    clip_ratio_high: Annotated[float | None, POSITIVE] = None
    """Upper clip; follows ``clip_ratio``."""
    clip_ratio_c: Annotated[float | None, ABOVE_ONE] = 3.0
    """Dual clip: bound of the loss for negative advantages; above 1. null = none."""
    loss_agg_mode: Aggregation = "token-mean"
    """token-mean, token-sum (grows with the batch), seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm; always over
    the global mini-batch."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of seq-mean-token-sum-norm; follows ``data.max_response_length``."""
    off_policy_mask_threshold: Annotated[float | None, POSITIVE] = None
    """Leave a response with a negative advantage out of the policy's loss where the mean of log engine - log policy over its
    tokens is above this: it has become too unlikely to be learned from (DeepSeek-V3.2, arXiv 2512.02556). Without the engine's
    log-probs the old ones take their place. null = off."""
    entropy_coeff: NaturalFloat = 0.0
    """Weight of the entropy bonus; with ``entropy_ctrl.target`` the first one."""
    entropy_ctrl: EntropyControl = field(default_factory=EntropyControl)
    """Adapt that weight to the entropy."""
    entropy_agg_mode: Aggregation | None = None
    """How the bonus is averaged; null = as ``loss_agg_mode`` says."""
    calculate_entropy: bool = False
    """Report the entropy even when its weight is 0."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities over the vocabulary at each token, in the pass for old log-probs. The optimal
    token baselines read it."""
    use_kl_loss: bool = False
    """Add a KL term against the reference to the loss."""
    kl_loss_coef: NaturalFloat = 0.001
    """Weight of that term."""
    kl_loss_type: KlWithGradient = "low_var_kl"
    """kl (k1), abs, mse (k2), low_var_kl (k3); a trailing + takes k2's gradient."""
    kl_loss_by_ratio: bool = False
    """Multiply that term at each token by the ratio of new to old, with its gradient, which makes the gradient of low_var_kl that
    of the KL (DeepSeek-V3.2, arXiv 2512.02556). With gspo it is the ratio of the response."""
    use_torch_compile: bool = True
    """Compile the log-prob head, and norms, rotations and activations of all models. GPU only; off under full_determinism, and
    with one warning where there is no C compiler."""
    ppo_epochs: PositiveInt = 1
    """Passes over the rollout batch."""
    shuffle: bool = False
    """Shuffle groups before they are cut into mini-batches."""
    data_loader_seed: NaturalInt = 42
    """Seed of that shuffle, and of the tokens that the loss clip_cov draws."""
    tau_pos: PositiveFloat = 1.0
    """sapo: steepness of the gate for positive advantages."""
    tau_neg: PositiveFloat = 1.05
    """sapo: steepness for the others; above ``tau_pos``, their gradient falls faster as the ratio leaves 1."""
    policy_loss: PolicyLoss = field(default_factory=PolicyLoss)
    """The loss of the policy."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer and schedule."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the policy."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """What a checkpoint holds."""


@dataclass(frozen=True)
class RefModel:
    path: str | None = None
    """Another reference model with the same tokenizer; follows ``actor_rollout_ref.model.path``."""


@dataclass(frozen=True)
class Ref(LogProbBudget, QuantizedFrozen, LoraReference):
    """The reference; built only when a KL is asked for."""

    model: RefModel = field(default_factory=RefModel)
    """Where the reference comes from."""
    use_torch_compile: bool | None = None
    """Compile the reference's log-prob head; follows ``actor.use_torch_compile``."""
    sync_every_steps: Annotated[int | None, POSITIVE] = None
    """Steps between two moves of the reference towards the policy; steps that do not update the policy do not count. The
    reference is then part of every checkpoint. null = the reference keeps its weights."""
    sync_mixup_alpha: PositiveShare = 0.9
    """Weight of the policy in such a move: reference = alpha x policy + (1 - alpha) x reference."""
    fsdp_config: Fsdp = field(default_factory=Fsdp)
    """Sharding and precision of the reference."""


# The section ``critic``: the value model that ``algorithm.adv_estimator=gae`` trains beside the policy.


@dataclass(frozen=True)
class CriticModel(ModelKnobs):
    path: str | None = None
    """Folder in Hugging Face format, or a hub id. Its decoder computes the values; its value head is read where it has one, and
    starts at 0 where not. Follows ``actor_rollout_ref.model.path``."""
    hf_config_path: str | None = None
    """Read config.json from this folder in place of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer that is compared with the policy's from this folder in place of ``path``."""
    trust_remote_code: bool | None = None
    """Let transformers run code from the model's folder; follows the policy's."""
    external_lib: str | None = None
    """Module imported before the model is built; follows the policy's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] | None = None
    """auto, flash_attention_2, sdpa, eager; follows the policy's."""
    fsdp_config: TrainedFsdp = field(default_factory=TrainedFsdp)
    """Sharding and precision of the critic."""


@dataclass(frozen=True)
class ResourcePool:
    """Devices of a role's own, beside those of the policy."""

    enable_resource_pool: bool = False
    """Give the model ``nnodes`` x ``n_gpus_per_node`` devices of its own, on which it computes while the policy does on its own.
    Needs ``trainer.worker_group=ray``."""
    nnodes: NaturalInt = 1
    """Machines of the pool. They may be those of the policy, where they have devices enough for both."""
    n_gpus_per_node: NaturalInt = 1
    """Devices of the pool per machine; on a CPU, worker processes."""


@dataclass(frozen=True)
class Critic(CriticBudget, ResourcePool):
    """The critic: built with ``algorithm.adv_estimator=gae`` alone, which is what reads its values."""

    enable: bool | None = None
    """null = the estimator decides: gae has a critic, the others have none. true and false only repeat that."""
    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    model: CriticModel = field(default_factory=CriticModel)
    """The critic's model."""
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-5))
    """Optimizer and schedule."""
    checkpoint: CheckpointContents = field(default_factory=CheckpointContents)
    """What a checkpoint holds of the critic."""
    ppo_mini_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per optimizer step; follows the actor's."""
    ppo_epochs: Annotated[int | None, POSITIVE] = None
    """Passes over the rollout batch; follows the actor's."""
    shuffle: bool | None = None
    """Shuffle groups before they are cut into mini-batches; follows the actor's."""
    data_loader_seed: NaturalInt = 42
    """Seed of that shuffle."""
    cliprange_value: PositiveFloat = 0.5
    """Values move at most this far from the old ones before the loss is clipped."""
    loss_agg_mode: Aggregation | None = None
    """How the value loss is averaged over the global mini-batch; follows the actor's."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of seq-mean-token-sum-norm; follows the actor's."""


# The section ``data``.

REQUIRED: Any = "???"
"""Marks a key that has no default; the loader reports every one that is still missing."""


@dataclass(frozen=True)
class CustomClass:
    """A dataset class of the user's own."""

    path: str | None = None
    """Python file that holds the class; null = the built-in one."""
    name: str | None = None
    """Class name inside ``path``."""


@dataclass(frozen=True)
class CustomSampler:
    """A sampler class of the user's own."""

    class_path: str | None = None
    """Python file that holds a sampler class; it is called with (num_rows, seed, epoch) and yields row indices."""
    class_name: str | None = None
    """Class name inside ``class_path``."""


@dataclass(frozen=True)
class Data:
    """Rows, their prompts and how they are drawn."""

    train_files: Any = REQUIRED
    """A path or a list of paths (.parquet, .json, .jsonl), or a dataset of the hub: hub:owner/name, with :config and @split where
    it has several. ``reward_model.reward_manager`` says what else a recipe reads."""
    val_files: Any = REQUIRED
    """As ``train_files``; null switches validation off."""
    train_max_samples: CountOrMinusOne = -1
    """Cap on training rows: a seeded random subset with ``shuffle``, else the first rows, as always of a stream; -1 = all."""
    val_max_samples: CountOrMinusOne = -1
    """Cap on validation rows; -1 = all."""
    max_prompt_length: PositiveInt = 512
    """Hard cap of a prompt in tokens; what happens beyond it is ``truncation``."""
    max_response_length: PositiveInt = 512
    """Hard cap of a response in tokens."""
    train_batch_size: PositiveInt = 1024
    """Prompts per step (each is answered ``rollout.n`` times)."""
    gen_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts of one round of generation under ``algorithm.filter_groups``; follows ``train_batch_size``."""
    val_batch_size: Annotated[int | None, POSITIVE] = None
    """Prompts per validation call; null = the whole validation set at once."""
    shuffle: bool = True
    """Draw a new order of the training rows each epoch."""
    streaming: bool = False
    """Read the training rows as steps need them, and not whole at the start: for files that are too large, and for rows without
    an end. The number of rows is unknown then, so ``trainer.total_training_steps`` says how long the run is. A class of
    ``custom_cls`` needs ``__iter__``. Held-out rows are read whole. From Python, a dataset without a length is read so by
    itself if it has ``shuffle_buffer_size`` rows or more."""
    shuffle_buffer_size: PositiveInt = 1000
    """Rows of a stream that are held, with ``shuffle``: each step draws its rows from these, and further ones take their
    place. The first step waits until so many are read."""
    validation_shuffle: bool = False
    """Shuffle the validation rows once."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of the data order; null = drawn once, logged, saved in the checkpoint."""
    filter_overlong_prompts: bool = False
    """Drop prompts over ``max_prompt_length`` when the dataset is read; the number dropped is logged. Supervised fine-tuning also
    drops responses over ``max_response_length``."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt over the cap: error, left, right, middle. Tokens lost are counted and logged. Supervised
    fine-tuning then cuts the end of a response over its cap, too."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of {role, content}; or a text, which is encoded as the tokenizer encodes any text,
    with BOS where it adds one; or a list of token ids that is used as it is."""
    response_key: str = "response"
    """Supervised fine-tuning: column that holds the response, a text. A dot leads into an object: ``extra_info.answer``."""
    messages_key: str = "messages"
    """Supervised fine-tuning, in rows without ``response_key``: column that holds a whole conversation, a list of
    {role, content}. Its last turn is the assistant's and is the response. The turns before it are the prompt."""
    tools_key: str | None = "tools"
    """Column that holds the tools of a row, a list of JSON schemas, for the chat template. null = the column is left out."""
    enable_thinking_key: str | None = "enable_thinking"
    """Column that says whether a row's prompt asks for a thought, the argument ``enable_thinking`` of the chat template. null =
    the column is left out."""
    allow_special_tokens: bool = False
    """Let the tokenizer read special tokens such as ``<|im_end|>`` inside messages as tokens. false = they are plain text, and
    only those of the chat template are tokens. In a prompt that is a text, special tokens are always tokens."""
    answer_key: str = "answer"
    """Column that holds the reference answer, in rows without verl's ``reward_model``."""
    reward_fn_key: str = "data_source"
    """Column that chooses the default reward and groups validation metrics."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's chat template."""
    custom_cls: CustomClass = field(default_factory=CustomClass)
    """A dataset class of the user's own."""
    sampler: CustomSampler = field(default_factory=CustomSampler)
    """A sampler of the user's own."""


# The section ``actor_rollout_ref.model``.


@dataclass(frozen=True)
class Model(LoadMode, QuantizedBase, ChunkedLogprob, ModelKnobs):
    path: str = REQUIRED
    """Folder in Hugging Face format, or a hub id; ``verl-memopt toy`` makes a tiny one."""
    hf_config_path: str | None = None
    """Read config.json from this folder in place of ``path``."""
    tokenizer_path: str | None = None
    """Read the tokenizer from this folder in place of ``path``."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    external_lib: str | None = None
    """Module imported before the model is built (it may register architectures)."""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Merged into the model's config.json; a name the config does not have is an error."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """auto, flash_attention_2, sdpa, eager. auto = flash kernels where device and dtype support them, else sdpa."""


# The section ``actor_rollout_ref.rollout``.

FILLED = Range("must each have a character", all)
NATS = Range("must be a number above 0, or auto", lambda value: value == "auto" or (isinstance(value, float) and value > 0))


LEAST_TEMPERATURE = 1e-4
"""Logits that are divided by less overflow in fp32."""
WARM = Range(f"must be at least {LEAST_TEMPERATURE}", lambda value: value >= LEAST_TEMPERATURE)
OFF_OR_WARM = Range(f"must be 0, or at least {LEAST_TEMPERATURE}", lambda value: value == 0 or value >= LEAST_TEMPERATURE)


@dataclass(frozen=True)
class ValKwargs:
    n: PositiveInt = 1
    """Samples per validation prompt."""
    do_sample: bool | None = None
    """false = greedy; null = samples if the temperature is above 0, as verl does."""
    temperature: Annotated[float, OFF_OR_WARM] = 0.0
    """Temperature when sampling; 0 = greedy."""
    top_p: PositiveShare = 1.0
    """Nucleus when sampling."""
    top_k: CountOrMinusOne = -1
    """Top-k when sampling; -1 = off."""
    min_p: Share = 0.0
    """As ``rollout.min_p``, when sampling."""


@dataclass(frozen=True)
class EngineKwargs:
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM last; a name that a rollout key already sets is an error."""


@dataclass(frozen=True)
class Rollout(LogProbBudget, RolloutMemory, SharedWeights, WeightBuckets):
    name: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf (transformers generate)."""
    mode: Literal["async"] = "async"
    """Accepted for compatibility; the engine lives in the worker's process."""
    n: PositiveInt = 1
    """Samples per prompt (the group size)."""
    temperature: Annotated[float, WARM] = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    top_k: CountOrMinusOne = -1
    """-1 = off."""
    top_p: PositiveShare = 1.0
    """1 = off."""
    min_p: Share = 0.0
    """Leave out tokens whose probability is below this share of the most likely one's, before top_k and top_p; 0 = off."""
    repetition_penalty: PositiveFloat = 1.0
    """1 = off."""
    stop: Annotated[list[str], FILLED] = field(default_factory=list)
    """Texts at which a response ends, besides the end-of-sequence tokens; in validation too. The token that completes one is the
    last of the response."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens at which a response ends, besides the end-of-sequence tokens; in validation too."""
    do_sample: bool = True
    """false = greedy."""
    prompt_length: Annotated[int | None, POSITIVE] = None
    """Follows ``data.max_prompt_length``."""
    response_length: Annotated[int | None, POSITIVE] = None
    """Exact cap of generated tokens; follows ``data.max_response_length``."""
    ignore_eos: bool = False
    """Generate exactly ``response_length`` tokens, for measurements."""
    seed: Annotated[int | None, NOT_NEGATIVE] = None
    """Seed of sampling, mixed with step, prompt and sample; follows ``data.seed``."""
    dtype: Literal["bfloat16", "fp16", "fp32"] = "bfloat16"
    """dtype of the engine's weights and KV cache."""
    load_format: Literal["dummy", "auto"] = "dummy"
    """dummy = weights come from the trainer at the first sync; auto = read from the model folder as well."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one engine."""
    enable_chunked_prefill: bool = True
    """Split long prefills."""
    cudagraph_capture_sizes: list[int] | None = None
    """Passed to vLLM."""
    calculate_log_probs: bool = True
    """Return the engine's log-probs and log how far they are from the trainer's."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """processed_logprobs (after repetition penalty and temperature) or raw_logprobs (before them). Both are of the whole
    distribution, before top_k and top_p leave tokens out of it, as the trainer's are."""
    max_logprob_diff: Annotated[float | str | None, NATS] = "auto"
    """Stop the run when ``rollout/logprob_diff_mean`` passes this (nats). auto = by the dtypes of engine and trainer: 0.001 where
    both compute in fp32, 0.2 where one of them rounds to 16 bits, 1 with an fp8 KV cache. null = never."""
    skip_rollout: bool | None = None
    """Read the responses of each step from a dump instead of generating them; null = true in ``debug.mode`` score_only and
    train_only."""
    skip_dump_dir: str | None = None
    """Folder of that dump, with one {step}.jsonl per step; follows ``trainer.rollout_data_dir``, and is
    {default_local_dir}/rollouts where that is null."""
    disable_log_stats: bool = True
    """Passed to vLLM."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Passed to vLLM: fcfs or priority."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    """Further engine arguments."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Sampling in validation."""

    @property
    def scoring_temperature(self) -> float:
        """What log-probs divide the logits by: the temperature of the rollouts, or 1 if they are greedy."""
        # Greedy rollouts have no distribution that they sample from, and a temperature of 0 would divide by 0.
        return self.temperature if self.do_sample else 1.0
