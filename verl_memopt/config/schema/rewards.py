"""The sections ``reward_model`` and ``custom_reward_function``: what scores a response, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl_memopt.config.schema.training import Fsdp
from verl_memopt.knobs.quantized_frozen import QuantizedFrozen
from verl_memopt.knobs.values import POSITIVE, NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, Range
from verl_memopt.recipes.registry import RECIPES, Recipe
from verl_memopt.recipes.rlt.settings import RltReward

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
class RewardModel:
    """How responses are scored."""

    enable: bool = False
    """A model scores each response. Its score is the reward, or with ``custom_reward_function.path`` the function reads it as
    ``extra_info["rm_score"]`` and returns the reward. With ``reward_manager=rlt`` a student scores explanations."""
    model: ScoringModel = field(default_factory=ScoringModel)
    """The reward model's own model; with ``reward_manager=rlt`` the student."""
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
    sandbox_fusion: SandboxFusion = field(default_factory=SandboxFusion)
    """The service that runs the programs of code tasks."""
    num_workers: PositiveInt = 1
    """Processes that run the reward function."""
    max_concurrent: PositiveInt = 64
    """Reward functions that are ``async def`` only: rows that one process has under way at a time."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that scores the responses; None where a function or a reward model does."""
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
