"""The names of the published RLT recipes: which of our keys each sets. They are read beside TRL's in a run of RLT.

Some mean something else than in TRL: ``train_batch_size`` counts the responses of a step, of all devices.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from verl_memopt.config.trl_names import (
    MINI_BATCH,
    PROMPTS,
    SAMPLES,
    NotConvertibleError,
    RecipeNames,
    Spelling,
    TrlSettings,
    Values,
    copied,
    effective,
    unless_none,
    words,
)
from verl_memopt.config.unused_keys import ANY, Refusal
from verl_memopt.recipes.rlt.settings import RltReward

_AR = "actor_rollout_ref"
_ROLLOUT, _STUDENT = f"{_AR}.rollout", "reward_model.model"
SAMPLES_NAME, BATCH = "num_generations", "train_batch_size"
OFFLOADED = (f"{_AR}.ref.fsdp_config.param_offload", f"{_STUDENT}.fsdp_config.param_offload")
OWN = (
    *("align", "empty_think_kl", "include_forced_prefix", "kl_teacher", "logits_chunk_tokens", "max_student_len"),
    *("max_tokens_per_micro_batch", "overlong", "tag_format"),
)
"""Fields of ``reward_model.rlt`` that the published recipes do not have."""
DUMPS, FOLDER = "trainer.rollout_data_dir", "trainer.default_local_dir"


def sequences(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the prompts of a step, all of which are in one optimizer step, from its number of responses.

    Raises:
        NotConvertibleError: The responses do not divide into groups.
    """
    responses, samples = trl[name], trl.get(SAMPLES_NAME, effective(SAMPLES, values))
    if not all(isinstance(number, int) and number > 0 for number in (responses, samples)):
        raise NotConvertibleError("expected a whole number above 0", "Correct it.")
    if responses % samples:
        raise NotConvertibleError(f"{responses} responses do not divide into groups of {samples}", f"Set {PROMPTS}, in prompts.")
    return {PROMPTS: responses // samples, MINI_BATCH: responses // samples}


def sleep_level(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return whether the engine sleeps. Which of the two levels it uses follows from what it must keep."""
    return {f"{_ROLLOUT}.free_cache_engine": trl[name] not in (0, None)}


def kl_teacher(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return whose log-probs the student's are compared with."""
    return {"reward_model.rlt.kl_teacher": "reference" if trl[name] else "policy"}


def debug_mode(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the debug mode that prints the memory of each phase, where logs for debugging are asked for."""
    return {"debug.mode": "memory"} if trl[name] else {}


def dumps(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return where training samples are written; 0 = nowhere."""
    folder = effective(FOLDER, values)
    if folder is None:
        folder = "/".join(["checkpoints", *(effective(f"trainer.{part}_name", values) for part in ("project", "experiment"))])
    return {DUMPS: f"{folder}/rollouts" if trl[name] else None}


def _same(name: str, key: str, note: str = "") -> Spelling:
    return Spelling((name,), (key,), copied(key), note)


RLT_SPELLINGS: tuple[Spelling, ...] = (
    Spelling((BATCH,), (PROMPTS, MINI_BATCH), sequences, "RLT counts responses, we count prompts"),
    _same("student_model", f"{_STUDENT}.path", "null = the reference is the student"),
    Spelling(
        ("offload_untrained_models",), OFFLOADED, copied(*OFFLOADED),
        "reference and student move once for each phase, not for each forward",
    ),
    _same("enable_prefix_caching", f"{_ROLLOUT}.enable_prefix_caching", "each weight sync clears the cache"),
    _same("enforce_eager", f"{_ROLLOUT}.enforce_eager"),
    Spelling(("vllm_max_model_len",), (f"{_ROLLOUT}.max_model_len",), unless_none(f"{_ROLLOUT}.max_model_len")),
    Spelling(("vllm_sleep_level",), (f"{_ROLLOUT}.free_cache_engine",), sleep_level, "the level follows from what must be kept"),
    Spelling(
        ("use_ray",), ("trainer.worker_group",), words("trainer.worker_group", {"true": "ray", "false": "local"}),
        "false = the worker lives in this process",
    ),
    Spelling(("use_reference_teacher_model",), ("reward_model.rlt.kl_teacher",), kl_teacher),
    *(
        _same(field.name, f"reward_model.rlt.{field.name}")
        for field in fields(RltReward)
        if field.name not in OWN
    ),
    Spelling(("activate_debugging_logs",), ("debug.mode",), debug_mode),
    Spelling(
        ("save_completions_probability",), (DUMPS,), dumps, "any number above 0 writes all rows",
    ),
)  # fmt: skip
"""In the order in which they are read, before TRL's own: TRL's numbers of steps depend on the batch."""

RLT_NO_EQUAL: dict[str, Refusal] = {
    "generation_aggregation_steps": Refusal(ANY, "a whole step is generated at once. Remove the key"),
    "use_vllm_server": Refusal((False,), f"the engine lives in the worker's process. Set {_ROLLOUT}.name=vllm alone"),
}
"""Names without an equal here -> the values that ask for nothing, why, and the way out."""

PER_FORWARD: dict[str, Refusal] = {
    name: Refusal(ANY, f"forwards are cut by tokens. Use {_AR}.actor.ppo_max_token_len_per_gpu")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
}
"""Names of TRL that say nothing more where ``train_batch_size`` gives the batch."""

NAMES = RecipeNames(RLT_SPELLINGS, RLT_NO_EQUAL, {BATCH: PER_FORWARD})
"""All names of this file, for :mod:`verl_memopt.config.trl_names`."""
