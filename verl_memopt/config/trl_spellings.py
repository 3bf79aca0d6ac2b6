"""The names of TRL's RLOO and GRPO trainers, old and new: which of our keys each sets, and which have no equal here."""

from __future__ import annotations

from dataclasses import dataclass

from verl_memopt.config.refusals import ANY, EITHER, Refusal
from verl_memopt.config.trl_values import (
    BETAS,
    EPOCHS,
    KL_COEF,
    KL_IN_LOSS,
    KL_IN_REWARD,
    KL_LOSS_COEF,
    MINI_BATCH,
    PROMPTS,
    SAMPLES,
    STEPS,
    SYNC_ALPHA,
    SYNC_EVERY,
    TOTAL_EPOCHS,
    Convert,
    batch,
    beta,
    copied,
    episodes,
    every,
    kl,
    loggers,
    off_at_zero,
    optimizer_steps,
    passes_over_data,
    reference_sync,
    reward_model,
    unless_none,
    words,
)

_AR = "actor_rollout_ref"
_ACTOR, _OPTIM, _ROLLOUT = f"{_AR}.actor", f"{_AR}.actor.optim", f"{_AR}.rollout"
RLOO, GRPO = ("rloo",), ("grpo",)
ESTIMATORS = (*RLOO, *GRPO)
"""Values of ``algorithm.adv_estimator`` under which the names are read: the algorithms of ``recipe/rloo``."""


@dataclass(frozen=True)
class Spelling:
    """One setting of TRL."""

    names: tuple[str, ...]
    """Its names, the newest first. Two of them at once are refused."""
    keys: tuple[str, ...]
    """The keys of ours that it can set. One of them beside it is refused."""
    convert: Convert
    """Return keys and values of ours."""
    note: str = ""
    """What is not the same, as a sentence without a full stop."""
    estimators: tuple[str, ...] = ESTIMATORS
    """Estimators under which it means something."""


def _same(name: str, key: str, *older: str, note: str = "") -> Spelling:
    return Spelling((name, *older), (key,), copied(key), note)


_NORMALIZE = "algorithm.normalize_advantages"
_GROUPS = "the samples of a prompt stay together in one optimizer step"
_BY_STEPS = "TRL counts optimizer steps; a training step here is a rollout with all its optimizer steps"

SPELLINGS: tuple[Spelling, ...] = (
    _same("num_generations", SAMPLES, "rloo_k"),
    Spelling(("num_generations_eval",), (f"{_ROLLOUT}.val_kwargs.n",), unless_none(f"{_ROLLOUT}.val_kwargs.n")),
    _same("num_iterations", EPOCHS, "num_ppo_epochs"),
    Spelling(
        ("per_device_train_batch_size",), (PROMPTS, MINI_BATCH), batch,
        "TRL counts responses of a forward on one device, and derives the batch from them; micro-batches are cut by tokens here "
        f"({_ACTOR}.ppo_max_token_len_per_gpu)",
    ),
    Spelling(("gradient_accumulation_steps",), (MINI_BATCH,), batch, "passes follow from the prompts of an optimizer step"),
    Spelling(("generation_batch_size",), (PROMPTS,), batch, "TRL counts responses, we count prompts"),
    Spelling(
        ("steps_per_generation", "num_mini_batches"), (MINI_BATCH,), batch,
        f"TRL counts the passes of a rollout, or its mini-batches; we count the prompts of an optimizer step, and {_GROUPS}",
    ),
    Spelling(("max_steps",), (STEPS,), optimizer_steps, _BY_STEPS),
    Spelling(("total_episodes",), (STEPS,), episodes, "TRL counts responses; the last step is a whole one"),
    Spelling(("num_train_epochs",), (TOTAL_EPOCHS, STEPS), passes_over_data, f"{STEPS} of a recipe no longer counts"),
    Spelling(("save_steps",), ("trainer.save_freq",), every("trainer.save_freq"), _BY_STEPS),
    Spelling(("eval_steps",), ("trainer.test_freq",), every("trainer.test_freq"), _BY_STEPS),
    _same("logging_steps", "trainer.table_every_steps", note="every step is logged; the console prints a table of the last ones"),
    _same("max_completion_length", "data.max_response_length"),
    _same(
        "response_length", "data.max_response_length",
        note=f"the older trainer generated past the end of a response; set {_ROLLOUT}.ignore_eos=true for that",
    ),
    _same(
        "max_prompt_length", "data.max_prompt_length",
        note="TRL cuts longer prompts; here data.truncation decides, and error is its default",
    ),
    Spelling(("epsilon", "cliprange"), (f"{_ACTOR}.clip_ratio",), copied(f"{_ACTOR}.clip_ratio")),
    Spelling(("epsilon_high",), (f"{_ACTOR}.clip_ratio_high",), unless_none(f"{_ACTOR}.clip_ratio_high")),
    Spelling(
        ("beta", "kl_coef"), (KL_IN_REWARD, KL_COEF), kl,
        "the KL comes off the reward, with the estimator algorithm.kl_penalty; 0 builds no reference", RLOO,
    ),
    Spelling(
        ("beta",), (KL_IN_LOSS, KL_LOSS_COEF), kl,
        f"the KL is part of the loss, with the estimator {_ACTOR}.kl_loss_type; 0 builds no reference", GRPO,
    ),
    *(
        Spelling((name,), (SYNC_EVERY, SYNC_ALPHA), reference_sync, note)
        for name, note in (
            ("sync_ref_model", f"TRL's defaults apply to the other two names; {_BY_STEPS}"),
            ("ref_model_sync_steps", f"it counts with sync_ref_model=true; {_BY_STEPS}"),
            ("ref_model_mixup_alpha", "it counts with sync_ref_model=true"),
        )
    ),
    Spelling(
        ("normalize_advantages", "normalize_advantage"), (_NORMALIZE,), copied(_NORMALIZE),
        "over the rows of the whole step", RLOO,
    ),
    Spelling(
        ("normalize_reward",), (_NORMALIZE,), copied(_NORMALIZE),
        "the older trainer normalised and clamped the scores; here, as in the newer one, the advantages are normalised", RLOO,
    ),
    Spelling(
        ("scale_rewards",), ("algorithm.norm_adv_by_std_in_grpo",),
        words("algorithm.norm_adv_by_std_in_grpo", {"true": True, "group": True, "false": False, "none": False}),
        "the deviation is the group's; there is none over the batch", GRPO,
    ),
    Spelling(
        ("loss_type",), (f"{_ACTOR}.loss_agg_mode",),
        words(
            f"{_ACTOR}.loss_agg_mode",
            {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"},
        ),
        "", GRPO,
    ),
    Spelling(
        ("mask_truncated_completions",), ("algorithm.mask_truncated_responses",), copied("algorithm.mask_truncated_responses"),
    ),
    _same("temperature", f"{_ROLLOUT}.temperature"),
    _same("top_p", f"{_ROLLOUT}.top_p"),
    Spelling(("top_k",), (f"{_ROLLOUT}.top_k",), off_at_zero(f"{_ROLLOUT}.top_k", -1), "-1 is off"),
    _same("repetition_penalty", f"{_ROLLOUT}.repetition_penalty"),
    _same("learning_rate", f"{_OPTIM}.lr"),
    _same("weight_decay", f"{_OPTIM}.weight_decay"),
    Spelling(("adam_beta1",), (BETAS,), beta(0)),
    Spelling(("adam_beta2",), (BETAS,), beta(1)),
    Spelling(("max_grad_norm",), (f"{_OPTIM}.clip_grad",), off_at_zero(f"{_OPTIM}.clip_grad", None), "null is off"),
    _same("lr_scheduler_type", f"{_OPTIM}.lr_scheduler_type"),
    _same("warmup_steps", f"{_OPTIM}.lr_warmup_steps"),
    _same("warmup_ratio", f"{_OPTIM}.lr_warmup_steps_ratio"),
    _same("gradient_checkpointing", f"{_AR}.model.enable_gradient_checkpointing"),
    Spelling(("use_vllm",), (f"{_ROLLOUT}.name",), words(f"{_ROLLOUT}.name", {"true": "vllm", "false": "hf"})),
    _same("vllm_gpu_memory_utilization", f"{_ROLLOUT}.gpu_memory_utilization"),
    _same("vllm_tensor_parallel_size", f"{_ROLLOUT}.tensor_model_parallel_size"),
    Spelling(("vllm_max_model_length",), (f"{_ROLLOUT}.max_model_len",), unless_none(f"{_ROLLOUT}.max_model_len")),
    _same("vllm_enable_sleep_mode", f"{_ROLLOUT}.free_cache_engine"),
    _same("shuffle_dataset", "data.shuffle"),
    _same("seed", "data.seed", note="the initial weights come from the model's folder"),
    _same("model_name_or_path", f"{_AR}.model.path", "sft_model_path"),
    Spelling(("reward_model_path",), ("reward_model.enable", "reward_model.model.path"), reward_model),
    _same("output_dir", "trainer.default_local_dir"),
    _same("run_name", "trainer.experiment_name", "exp_name"),
    Spelling(("report_to",), ("trainer.logger",), loggers, "console and jsonl are always there"),
)  # fmt: skip
"""In the order in which they are read: a conversion sees what those before it have set."""

ONE_SETTING: tuple[tuple[str, ...], ...] = (
    ("max_completion_length", "response_length"),
    ("max_steps", "total_episodes"),
    ("normalize_advantages", "normalize_advantage", "normalize_reward"),
    *(spelling.names for spelling in SPELLINGS),
)
"""Names for one setting, of which a user can give one."""

_REWARD_FUNCTION = "Use custom_reward_function.path: it belongs in the reward function"

NO_EQUAL: dict[str, Refusal] = {
    "missing_eos_penalty": Refusal((), f"a score has no further penalty. {_REWARD_FUNCTION}"),
    "reward_clip_range": Refusal((), f"scores are not clipped. {_REWARD_FUNCTION}"),
    "reward_weights": Refusal((), f"there is one reward. {_REWARD_FUNCTION}"),
    "reward_funcs": Refusal((), "a reward function is named by its file. Use custom_reward_function.path"),
    "whiten_rewards": Refusal((False,), "rewards are not whitened. Use algorithm.normalize_advantages"),
    "token_level_kl": Refusal((False,), "RLOO takes the KL of a whole response off its reward. Set false, or remove the key"),
    "min_p": Refusal((0, 0.0), f"samples are cut by {_ROLLOUT}.top_p and top_k alone. Use one of them"),
    "vllm_mode": Refusal(("colocate",), f"the engine always lives in the worker's process. Set {_ROLLOUT}.name=vllm alone"),
    "disable_dropout": Refusal(EITHER, "models are computed in evaluation mode, whatever this key says"),
    "local_rollout_forward_batch_size": Refusal(
        ANY, f"passes without gradients are cut by tokens. Use {_ROLLOUT}.log_prob_max_token_len_per_gpu"
    ),
    "per_device_eval_batch_size": Refusal(ANY, "a validation is one call. Use data.val_batch_size to cut it"),
    "bf16": Refusal((), f"the dtype is set by model. Use {_ACTOR}.fsdp_config.dtype and {_ROLLOUT}.dtype"),
    "stop_token": Refusal(("eos",), "a response ends at the end-of-sequence tokens of the model's folder. Remove the key"),
    "dataset_name": Refusal((), "rows come from files. Use data.train_files and data.val_files"),
    "log_completions": Refusal(EITHER, "samples are written to the run folder. Use trainer.log_val_generations for a table"),
    "remove_unused_columns": Refusal(EITHER, "a reward function gets the columns of verl's schema. Remove the key"),
    "ds3_gather_for_generation": Refusal(EITHER, "the engine has its own copy of the weights. Remove the key"),
}
"""Name of TRL without an equal here -> the values that ask for nothing, why, and the way out."""

NAMES = frozenset(name for spelling in SPELLINGS for name in spelling.names) | NO_EQUAL.keys()
"""All names of TRL that are known here."""
