"""The reward of RLT: a frozen student scores how well an explanation leads it to a known solution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from verl_memopt.memory.knob import POSITIVE, NaturalFloat, PositiveFloat, PositiveInt, Range

Reduction = Literal["mean", "sum", "min", "max", "median", "first_quartile", "last_quartile"]
"""How the values of a span of tokens become one number."""
Transform = Literal["none", "exp", "exp_norm"]
"""What is done to each value before the clip: nothing, exp(x), or 1 - exp(-x)."""
NOT_POSITIVE = Range("must not be above 0", lambda value: value <= 0)


@dataclass(frozen=True)
class RltReward:
    """How an explanation is scored.

    The reward is ``r_ss - r_kl + match``. ``r_ss`` weighs the student's log-probs of the solution. ``r_kl`` weighs how much more
    likely the teacher finds the explanation than the student does. ``match`` is a penalty for an explanation without an end tag.
    """

    answer_log_prob_coeff: list[float] = field(default_factory=lambda: [1.0, 0.01])
    """Weight of each of ``reduction_log_prob_fn``."""
    kl_penalty_reward_coeff: list[float] = field(default_factory=lambda: [3.0, 0.03])
    """Weight of each of ``reduction_kl_fn``."""
    reduction_log_prob_fn: list[Reduction] = field(default_factory=lambda: ["mean", "min"])
    """Reductions over the solution's log-probs: mean, sum, min, max, median (the lower one), first_quartile, last_quartile."""
    reduction_kl_fn: list[Reduction] = field(default_factory=lambda: ["mean", "max"])
    """Reductions over the explanation's log-prob differences; the same names."""
    normalize_log_prob_fn: Transform = "none"
    """Transform of each log-prob of the solution: none, exp = exp(x), exp_norm = 1 - exp(-x)."""
    normalize_kl_fn: Transform = "none"
    """Transform of each difference on the explanation; the same names."""
    clip_log_prob: PositiveFloat = 100_000.0
    """Each transformed log-prob is at least minus this."""
    clip_kl: PositiveFloat = 100_000.0
    """Each transformed difference is at most this."""
    use_schulman_kl_estimation: bool = False
    """Estimate the KL as d - 1 + exp(-d), which is never negative, instead of as d = teacher - student log-prob."""
    include_teacher_think_entropy: bool = True
    """Subtract the student's log-probs from the teacher's. false = the negative log-probs of the student alone, without the
    estimate of ``use_schulman_kl_estimation``."""
    not_matched_penalty: Annotated[float, NOT_POSITIVE] = -1.0
    """Added to the reward of an explanation without an end tag."""
    empty_think_kl: NaturalFloat = 1.0
    """Value of every reduction of ``reduction_kl_fn`` if the explanation is empty."""
    unbias_student_log_probs_temp: Annotated[float | None, POSITIVE] = None
    """Temperature of the student's log-probs; null = the temperature of the rollouts."""
    unbias_teacher_log_probs: bool = True
    """Take the teacher's log-probs at the temperature of the rollouts. false = at temperature 1; the teacher then needs a pass of
    its own."""
    kl_teacher: Literal["policy", "reference"] = "policy"
    """Whose log-probs the student's are compared with."""
    overlong: Literal["truncate_think", "error", "skip"] = "truncate_think"
    """What happens to a student sequence over ``max_student_len``. truncate_think = the end of the explanation is cut, never the
    solution; skip = the row leaves its group and gets advantage 0; error = the run stops."""
    max_student_len: Annotated[int | None, POSITIVE] = None
    """Largest number of tokens of a student sequence; null = no limit."""
    include_forced_prefix: bool = False
    """Score the blank line after the begin tag as a part of the explanation. The teacher then needs a pass of its own."""
    align: Literal["concat", "retokenize"] = "concat"
    """How the student's input is built. concat = from the teacher's own tokens; retokenize = the text is tokenized again, as in
    the published implementation, for comparisons. The teacher then needs a pass of its own."""
    tag_format: Literal["stratos", "r1", "short"] = "stratos"
    """Tags and system prompts. stratos = ``<|begin_of_thought|>`` and so on, as in Bespoke-Stratos; r1 = ``<think>`` and so on;
    short = those of r1 without system prompts, for tiny models."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Hard cap of tokens per forward of the student. A longer row goes alone."""
    logits_chunk_tokens: PositiveInt = 512
    """Tokens whose logits exist at a time in the scoring pass."""
