"""The sections ``actor_rollout_ref.actor`` and ``actor_rollout_ref.ref``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from verl_memopt.algorithms.records import PolicyLoss
from verl_memopt.config.schema.training import Fsdp, Optim, TrainedFsdp
from verl_memopt.knobs.quantized_frozen import QuantizedFrozen
from verl_memopt.knobs.shared_prompt import SharedPrompt
from verl_memopt.knobs.token_budget import LogProbBudget, UpdateBudget
from verl_memopt.knobs.values import POSITIVE, NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, PositiveShare, Range

KlEstimator = Literal["kl", "abs", "mse", "low_var_kl"]
KlWithGradient = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"]
Part = Literal["model", "optimizer", "extra", "hf_model"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ABOVE_ONE = Range("must be above 1", lambda value: value > 1)


@dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint holds."""

    save_contents: list[Part] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts to save: model, optimizer, extra (scheduler and RNG), hf_model (a Hugging Face folder)."""
    load_contents: list[Part] | None = None
    """Parts to load on resume; follows ``save_contents``."""


@dataclass(frozen=True)
class Actor(UpdateBudget, SharedPrompt):
    """The update."""

    strategy: Literal["fsdp2"] = "fsdp2"
    """Sharding backend; fsdp2 is the only one."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step."""
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
    clip_ratio_c: Annotated[float, ABOVE_ONE] = 3.0
    """Dual clip: bound of the loss for negative advantages; above 1."""
    loss_agg_mode: Aggregation = "token-mean"
    """token-mean, token-sum (grows with the batch), seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm; always over
    the global mini-batch."""
    loss_scale_factor: Annotated[int | None, POSITIVE] = None
    """Divisor of seq-mean-token-sum-norm; follows ``data.max_response_length``."""
    entropy_coeff: NaturalFloat = 0.0
    """Weight of the entropy bonus."""
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
    """Where the reference comes from."""

    path: str | None = None
    """Another reference model with the same tokenizer; follows ``actor_rollout_ref.model.path``."""


@dataclass(frozen=True)
class Ref(LogProbBudget, QuantizedFrozen):
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
