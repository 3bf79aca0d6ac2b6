"""The names of TRL: which of our keys each name sets, and how its value is converted.

:mod:`verl_memopt.config.names` reads these tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_memopt.config.aliases import MINI_BATCH, PROMPTS, is_count
from verl_memopt.config.schema import LOGGERS
from verl_memopt.config.spelling import (
    DISTILL,
    ESTIMATOR,
    GRPO,
    RLOO,
    Convert,
    NotConvertibleError,
    Spelling,
    TrlSettings,
    Values,
    copied,
    effective,
    off_at_null,
    off_at_zero,
    same,
    unless_none,
    words,
)
from verl_memopt.config.trl_distillation import teacher_names
from verl_memopt.config.trl_objective import DRAWING, KL_IN_LOSS, OBJECTIVE, WEIGHING
from verl_memopt.config.unused_keys import NO_EQUAL, NoEffect

MANAGER = "reward_model.reward_manager"
"""The key whose value selects a recipe."""


@dataclass(frozen=True)
class RecipeNames:
    """The names of a recipe's published settings.

    Attributes:
        spellings: Records of the names that are read. They are read in this order, before TRL's names.
        no_equal: The names that have no equal here.
        replaced: Name of the recipe -> the names of TRL that have no effect if this name is given.
    """

    spellings: tuple[Spelling, ...]
    no_equal: Mapping[str, NoEffect]
    replaced: Mapping[str, Mapping[str, NoEffect]]


# Conversions of values that have another unit in TRL, or that depend on several settings.
#
# TRL counts responses and optimizer steps; verl counts prompts and rollouts. Let
#   W = number of devices, p = per_device_train_batch_size, a = gradient_accumulation_steps, n = num_generations,
#   s = steps_per_generation (TRL's default is a; in the older RLOO trainer s = a x num_mini_batches).
# In TRL, a rollout has
#   p W s responses to p W s / n prompts, and one pass over them takes s / a optimizer steps.
# Source: ``GRPOConfig`` and ``RLOOConfig`` of TRL 1.16, ``RLOOTrainer`` of TRL 0.20.

_AR = "actor_rollout_ref"
_ACTOR, _OPTIM, _ROLLOUT = f"{_AR}.actor", f"{_AR}.actor.optim", f"{_AR}.rollout"
SAMPLES, ENGINE, EPOCHS = f"{_AR}.rollout.n", f"{_AR}.rollout.name", f"{_AR}.actor.ppo_epochs"
STEPS, TOTAL_EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
KL_IN_REWARD, KL_COEF = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
SYNC_EVERY, SYNC_ALPHA = f"{_AR}.ref.sync_every_steps", f"{_AR}.ref.sync_mixup_alpha"
KL_LOSS_COEF = f"{_AR}.actor.kl_loss_coef"
BETAS, SCHEDULE_STEPS = f"{_AR}.actor.optim.betas", f"{_AR}.actor.optim.lr_schedule_steps"
BATCH_NAMES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "num_mini_batches",
)  # fmt: skip
"""Names of TRL that together decide how many responses a rollout has, and how many of them an optimizer step uses."""


def kl(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Convert TRL's coefficient of the KL, which RLOO has in the reward and GRPO in the loss. 0 switches the KL off.
    value = trl[name]
    in_loss = str(effective(ESTIMATOR, values)).startswith("grpo")
    switch, coefficient = (KL_IN_LOSS, KL_LOSS_COEF) if in_loss else (KL_IN_REWARD, KL_COEF)
    return {switch: False} if value in (0, None) else {switch: True, coefficient: value}


def batch(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    names = tuple(option for option in BATCH_NAMES if trl.get(option) is not None)
    numbers = {option: _count(option, trl) for option in names}
    devices = math.prod(_number(key, values) for key in ("trainer.nnodes", "trainer.n_gpus_per_node"))
    samples = _number(SAMPLES, values)
    per_device, accumulated = numbers.get("per_device_train_batch_size"), numbers.get("gradient_accumulation_steps", 1)
    passes = numbers.get("steps_per_generation")
    if "num_mini_batches" in numbers:
        passes = accumulated * numbers["num_mini_batches"]
    responses = numbers.get("generation_batch_size")
    if responses is not None and passes is not None:
        raise NotConvertibleError("TRL takes one of the two only", f"Keep one, or set {PROMPTS} and {MINI_BATCH}.", names)
    if per_device is not None:
        if responses is not None:
            what = f"generation_batch_size is no multiple of {per_device * devices}, the responses per forward on all devices"
            passes = _divided(responses, per_device * devices, what, names)
        passes = accumulated if passes is None else passes
        responses = per_device * devices * passes
    if responses is None and passes is None:
        what = "it says nothing without per_device_train_batch_size, because micro-batches are cut by tokens here"
        raise NotConvertibleError(what, f"Set {MINI_BATCH}, the prompts per optimizer step.")
    prompts = _number(PROMPTS, values)
    if responses is not None:
        prompts = _divided(responses, samples, f"{responses} responses do not divide into groups of {samples} responses", names)
    if passes is None:
        return {PROMPTS: prompts}
    what = f"{passes} passes do not divide into optimizer steps of {accumulated}"
    updates = _divided(passes, accumulated, what, names)
    what = f"{prompts} prompts do not divide over {updates} optimizer steps, and a step needs all responses to its prompts here"
    mini_batch = _divided(prompts, updates, what, names)
    return {MINI_BATCH: mini_batch} if responses is None else {PROMPTS: prompts, MINI_BATCH: mini_batch}


def _divided(whole: int, part: int, what: str, names: tuple[str, ...]) -> int:
    if whole % part:
        raise NotConvertibleError(what, f"Set {PROMPTS} and {MINI_BATCH}, in prompts.", names)
    return whole // part


def _number(key: str, values: Values) -> int:
    # Return the value of one of our keys, which must be a whole number above 0 for TRL's name to be converted.
    value: int = effective(key, values)
    if value is None and key == MINI_BATCH:
        return _number(PROMPTS, values)
    if not is_count(value):
        raise NotConvertibleError(f"{key} is no whole number above 0", f"Correct {key}.")
    return value


def _count(name: str, trl: TrlSettings) -> int:
    value: int = trl[name]
    if not is_count(value):
        raise NotConvertibleError("expected a whole number above 0", "Correct it.", (name,))
    return value


def updates_per_rollout(values: Values) -> int:
    prompts, mini_batch, epochs = (_number(key, values) for key in (PROMPTS, MINI_BATCH, EPOCHS))
    return max(prompts // mini_batch, 1) * epochs


def optimizer_steps(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Convert optimizer steps to training steps, rounded up. With TRL's -1, the epochs set the length of the run.
    if trl[name] in (None, -1):
        return {}
    return {STEPS: math.ceil(_count(name, trl) / updates_per_rollout(values))}


def episodes(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    if trl[name] is None:
        return {}
    return {STEPS: math.ceil(_count(name, trl) / (_number(PROMPTS, values) * _number(SAMPLES, values)))}


def passes_over_data(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Set the epochs of the run. The number of steps of a recipe is removed, because it would win over them. A number of steps in
    # TRL's names stays, and wins as in TRL.
    value = trl[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    epochs = _count(name, {name: value})
    has_steps = trl.get("max_steps") not in (None, -1) or trl.get("total_episodes") is not None
    return {TOTAL_EPOCHS: epochs} if has_steps else {TOTAL_EPOCHS: epochs, STEPS: None}


def every(key: str) -> Convert:
    """Return a conversion of an interval in optimizer steps to training steps, rounded up."""
    return lambda name, trl, values: {key: math.ceil(_count(name, trl) / updates_per_rollout(values))}


def by_steps(key: str, *distances: str) -> Convert:
    """Return a conversion of TRL's strategy "no" or "steps" to the interval ``key``.

    ``distances``: names of TRL for the interval in optimizer steps. The first name that the user wrote is used. Without any, the
    value of ``key`` stays.
    """

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        word = trl[name]
        if word == "no":
            return {key: -1}
        if word != "steps":
            raise NotConvertibleError("here the interval is a number of steps", f"Set it to steps or no, or set {key}.")
        written = [option for option in distances if trl.get(option) is not None]
        return every(key)(written[0], trl, values) if written else {}

    return convert


def warm_up(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # A number below 1 is a share of the run, as in transformers.
    steps = trl[name]
    is_share = isinstance(steps, float) and 0 < steps < 1
    if isinstance(steps, float) and steps.is_integer():
        steps = int(steps)
    return {f"{_OPTIM}.lr_warmup_steps_ratio" if is_share else f"{_OPTIM}.lr_warmup_steps": steps, SCHEDULE_STEPS: "updates"}


def beta(place: int) -> Convert:
    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        present = effective(BETAS, values)
        betas = list(present) if isinstance(present, list | tuple) and len(present) == 2 else [None, None]
        betas[place] = trl[name]
        return {BETAS: betas}

    return convert


def dtype(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    keys = _DTYPES if effective(ESTIMATOR, values) in DISTILL else _DTYPES[:-1]
    return {} if trl[name] is None else dict.fromkeys(keys, "bfloat16" if trl[name] else "fp32")


def epsilon(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    key = f"{_OPTIM}.override_optimizer_config"
    return {key: {**(effective(key, values) or {}), "eps": trl[name]}}


def loggers(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Console and JSON lines are always written, in addition to the loggers that TRL's value names.
    asked_for = trl[name] if isinstance(trl[name], list | tuple) else [trl[name]]
    others = [logger_name for logger_name in asked_for if logger_name not in ("none", None)]
    if any(logger_name not in LOGGERS.words for logger_name in others):
        raise NotConvertibleError("this logger has no equal here", f"Choose from {', '.join(LOGGERS.words)}, or remove it.")
    return {"trainer.logger": ["console", "jsonl", *others]}


def reward_model(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return {"reward_model.enable": True, "reward_model.model.path": trl[name]}


def resumed(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    word = str(trl[name]).lower()
    if trl[name] is None or word in ("", "false", "true"):
        return {"trainer.resume_mode": "auto"} if word == "true" else {}
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(trl[name])}


def head_in_fp32(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # If the whole model computes in fp32, so does the head. In half precision the head cannot compute in fp32.
    if trl[name] and effective(_DTYPES[0], values) not in ("fp32", "float32"):
        what = "in half precision the head computes its logits in half precision too; only the log-probs are computed in fp32"
        raise NotConvertibleError(what, f"Set {_DTYPES[0]}=fp32, or remove it.")
    return {}


_LOADS_ANYWAY = ("device_map", "low_cpu_mem_usage", "use_cache", "use_safetensors", "cache_dir", "token", "local_files_only")
"""Arguments of ``from_pretrained`` that have no effect here. They say where weights are loaded, and how."""
_KERNELS = ("flash_attention_2", "sdpa", "eager")
_PRECISIONS = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def model_arguments(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return loading_arguments(trl[name] or {}, _MODEL_KEYS)


def loading_arguments(given: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Convert arguments of ``from_pretrained``. ``keys``: what they say -> our key; what is missing is refused."""
    ours: dict[str, Any] = {}
    for argument, value in given.items():
        if value is None or value == "auto" or argument in _LOADS_ANYWAY or (argument, value) == ("revision", "main"):
            continue
        if argument in ("dtype", "torch_dtype"):
            rests = _PRECISIONS.get(str(value).removeprefix("torch."))
            if rests is None:
                raise NotConvertibleError(f"{argument}={value} is neither float32 nor bfloat16", f"Set {keys['dtype']}.")
            ours[keys["dtype"]] = rests
        elif argument == "attn_implementation" and value in _KERNELS and "attention" in keys:
            ours[keys["attention"]] = value
        elif argument == "quantization_config" and isinstance(value, Mapping):
            ours |= _quantized(value, keys["quantization"])
        elif argument == "trust_remote_code":
            ours[keys["trust"]] = value
        else:
            way_out = f"Remove it, or use {keys['override']} for a field of config.json."
            raise NotConvertibleError(f"{argument}={value!r:.100} has no equal", way_out)
    return ours


BNB_4BIT = "fp4"
"""The 4-bit type that bitsandbytes uses by default."""


def _quantized(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    if config.get("load_in_8bit"):
        return {key: "int8"}
    if not config.get("load_in_4bit"):
        return {}
    if (kind := config.get("bnb_4bit_quant_type", BNB_4BIT)) != "nf4":
        default = "" if "bnb_4bit_quant_type" in config else ", the default of bitsandbytes"
        what = f"bnb_4bit_quant_type={kind}{default}: the only 4-bit type here is nf4"
        raise NotConvertibleError(what, f"Set bnb_4bit_quant_type=nf4, or {key}=nf4 or int8.")
    return {key: "nf4"}


REF_STEPS, REF_ALPHA = 512, 0.6
"""TRL's defaults of ``ref_model_sync_steps`` and ``ref_model_mixup_alpha``."""


def reference_sync(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    # Combine TRL's three names. Without `sync_ref_model` the reference keeps its weights, whatever the other two names say.
    if not trl.get("sync_ref_model"):
        return {SYNC_EVERY: None} if name == "sync_ref_model" else {}
    steps = {"ref_model_sync_steps": trl.get("ref_model_sync_steps") or REF_STEPS}
    alpha = trl.get("ref_model_mixup_alpha")
    distance, updates = _count("ref_model_sync_steps", steps), updates_per_rollout(values)
    if distance % updates:
        what = f"{distance} optimizer steps: a training step takes {updates} of them, and {distance} is not a multiple"
        raise NotConvertibleError(what, f"Set {SYNC_EVERY}, in training steps.")
    return {SYNC_EVERY: distance // updates, SYNC_ALPHA: REF_ALPHA if alpha is None else alpha}


# The names of TRL's RLOO and GRPO trainers, old and new, with our keys.

_REST, _ATTENTION, _QUANTIZATION = (
    f"{_ACTOR}.fsdp_config.model_dtype",
    f"{_AR}.model.attn_implementation",
    f"{_AR}.model.quantization",
)
_MODEL_KEYS = {
    "dtype": _REST, "attention": _ATTENTION, "quantization": _QUANTIZATION, "trust": f"{_AR}.model.trust_remote_code",
    "override": f"{_AR}.model.override_config",
}  # fmt: skip
"""What an argument of ``from_pretrained`` says -> our key."""
_DTYPES = tuple(f"{section}.fsdp_config.dtype" for section in (_ACTOR, f"{_AR}.ref", "teacher"))
_SCHEDULE = "the schedule then counts optimizer steps, as in TRL; a warm-up starts one step above TRL's rate of 0"


def scheduled(name: str, key: str) -> Spelling:
    keys = (key, SCHEDULE_STEPS)
    return Spelling((name,), keys, lambda name, trl, values: {key: trl[name], SCHEDULE_STEPS: "updates"}, _SCHEDULE)


_TURNS = f"{_ROLLOUT}.multi_turn.max_assistant_turns"


def turns(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    return {_TURNS: None if trl[name] is None else _count(name, trl) + 1}


_NORMALIZE = "algorithm.normalize_advantages"
_GROUPS = "all responses to a prompt are in the same optimizer step"
SAVE, TEST = "trainer.save_freq", "trainer.test_freq"
_BY_STEPS = "TRL counts optimizer steps; a training step here is a rollout with all its optimizer steps"

TEACHING = teacher_names(loading_arguments)

SPELLINGS: tuple[Spelling, ...] = (
    same("num_generations", SAMPLES, "rloo_k"),
    Spelling(("num_generations_eval",), (f"{_ROLLOUT}.val_kwargs.n",), unless_none(f"{_ROLLOUT}.val_kwargs.n")),
    same("num_iterations", EPOCHS, "num_ppo_epochs"),
    Spelling(
        ("per_device_train_batch_size",), (PROMPTS, MINI_BATCH), batch,
        "TRL counts the responses per forward on one device, and derives the batch from them; here tokens limit a forward "
        f"({_ACTOR}.ppo_max_token_len_per_gpu)",
    ),
    Spelling(
        ("gradient_accumulation_steps",), (MINI_BATCH,), batch,
        "TRL counts the forwards per optimizer step, we count the prompts per optimizer step",
    ),
    Spelling(("generation_batch_size",), (PROMPTS,), batch, "TRL counts responses, we count prompts"),
    Spelling(
        ("steps_per_generation", "num_mini_batches"), (MINI_BATCH,), batch,
        f"TRL counts the forwards or the mini-batches per rollout; we count the prompts per optimizer step, and {_GROUPS}",
    ),
    Spelling(("max_steps",), (STEPS,), optimizer_steps, _BY_STEPS),
    Spelling(("total_episodes",), (STEPS,), episodes, "TRL counts responses; the number of steps is rounded up"),
    Spelling(("num_train_epochs",), (TOTAL_EPOCHS, STEPS), passes_over_data, f"a recipe's value of {STEPS} no longer applies"),
    Spelling(("save_steps",), (SAVE,), every(SAVE), f"rounded up: {_BY_STEPS}"),
    Spelling(("eval_steps",), (TEST,), every(TEST), f"rounded up: {_BY_STEPS}"),
    Spelling(("save_strategy",), (SAVE,), by_steps(SAVE, "save_steps"), "no also wins over save_steps"),
    Spelling(
        ("eval_strategy",), (TEST,), by_steps(TEST, "eval_steps", "logging_steps"),
        "no also wins over eval_steps; steps without eval_steps uses logging_steps",
    ),
    same("logging_steps", "trainer.table_every_steps", note="every step is logged; this is the interval of the console's table"),
    same("max_completion_length", "data.max_response_length"),
    Spelling(("max_tool_calling_iterations",), (_TURNS,), turns, "TRL counts the turns whose calls are run"),
    same(
        "response_length", "data.max_response_length",
        note=f"the older trainer generated on after the end of a response; set {_ROLLOUT}.ignore_eos=true for that",
    ),
    Spelling(("max_new_tokens",), ("data.max_response_length",), copied("data.max_response_length"), "", DISTILL),
    Spelling(
        ("max_length",), ("data.max_prompt_length",), unless_none("data.max_prompt_length"),
        "TRL cuts longer prompts; here data.truncation decides, and by default a longer prompt is an error", DISTILL,
    ),
    same(
        "max_prompt_length", "data.max_prompt_length",
        note="TRL cuts longer prompts; here data.truncation decides, and by default a longer prompt is an error",
    ),
    Spelling(
        ("beta", "kl_coef"), (KL_IN_REWARD, KL_COEF), kl,
        "the KL is subtracted from the reward; algorithm.kl_penalty is its estimator; 0 = no reference model", RLOO,
    ),
    Spelling(
        ("beta",), (KL_IN_LOSS, KL_LOSS_COEF), kl,
        f"the KL is a term of the loss; {_ACTOR}.kl_loss_type is its estimator; 0 = no reference model", GRPO,
    ),
    *(
        Spelling((name,), (SYNC_EVERY, SYNC_ALPHA), reference_sync, note)
        for name, note in (
            ("sync_ref_model", f"the other two names have TRL's defaults; {_BY_STEPS}"),
            ("ref_model_sync_steps", f"it needs sync_ref_model=true; {_BY_STEPS}"),
            ("ref_model_mixup_alpha", "it needs sync_ref_model=true"),
        )
    ),
    Spelling(
        ("normalize_advantages", "normalize_advantage"), (_NORMALIZE,), copied(_NORMALIZE),
        "advantages are normalised over all rows of the step", RLOO,
    ),
    Spelling(
        ("normalize_reward",), (_NORMALIZE,), copied(_NORMALIZE),
        "the older trainer normalised and clipped the scores; here, as in the newer trainer, the advantages are normalised", RLOO,
    ),
    *OBJECTIVE,
    Spelling(
        ("mask_truncated_completions",), ("algorithm.mask_truncated_responses",), copied("algorithm.mask_truncated_responses"),
    ),
    same("temperature", f"{_ROLLOUT}.temperature"),
    Spelling(("top_p",), (f"{_ROLLOUT}.top_p",), off_at_null(f"{_ROLLOUT}.top_p", 1.0), "null is 1"),
    Spelling(("top_k",), (f"{_ROLLOUT}.top_k",), off_at_zero(f"{_ROLLOUT}.top_k", -1), "-1 is off"),
    same("repetition_penalty", f"{_ROLLOUT}.repetition_penalty"),
    *DRAWING,
    same("learning_rate", f"{_OPTIM}.lr"),
    same("weight_decay", f"{_OPTIM}.weight_decay"),
    Spelling(("adam_beta1",), (BETAS,), beta(0)),
    Spelling(("adam_beta2",), (BETAS,), beta(1)),
    Spelling(("max_grad_norm",), (f"{_OPTIM}.clip_grad",), off_at_zero(f"{_OPTIM}.clip_grad", None), "null is off"),
    scheduled("lr_scheduler_type", f"{_OPTIM}.lr_scheduler_type"),
    Spelling(
        ("warmup_steps",), (f"{_OPTIM}.lr_warmup_steps", f"{_OPTIM}.lr_warmup_steps_ratio", SCHEDULE_STEPS), warm_up,
        f"a number below 1 is a share of all steps; {_SCHEDULE}",
    ),
    scheduled("warmup_ratio", f"{_OPTIM}.lr_warmup_steps_ratio"),
    same("lr_scheduler_kwargs", f"{_OPTIM}.lr_scheduler_kwargs"),
    Spelling(("bf16",), _DTYPES, dtype, "it is the dtype of computation; the dtypes of stored weights and of the engine stay"),
    Spelling(("cast_lm_head_to_fp32",), (), head_in_fp32, "with bf16=false the whole model is in fp32", GRPO),
    Spelling(("use_cpu",), ("trainer.device",), words("trainer.device", {"true": "cpu", "false": "auto"})),
    Spelling(("adam_epsilon",), (f"{_OPTIM}.override_optimizer_config",), epsilon, "it needs torch's AdamW"),
    Spelling(("save_total_limit",), ("trainer.max_actor_ckpt_to_keep",), unless_none("trainer.max_actor_ckpt_to_keep")),
    same("eval_on_start", "trainer.val_before_train"),
    same("gradient_checkpointing", f"{_AR}.model.enable_gradient_checkpointing"),
    Spelling(("use_vllm",), (ENGINE,), words(ENGINE, {"true": "vllm", "false": "hf"})),
    *WEIGHING,
    same("vllm_gpu_memory_utilization", f"{_ROLLOUT}.gpu_memory_utilization"),
    same("vllm_tensor_parallel_size", f"{_ROLLOUT}.tensor_model_parallel_size"),
    Spelling(("vllm_max_model_length",), (f"{_ROLLOUT}.max_model_len",), unless_none(f"{_ROLLOUT}.max_model_len")),
    same("vllm_enable_sleep_mode", f"{_ROLLOUT}.free_cache_engine"),
    same("shuffle_dataset", "data.shuffle"),
    same("dataset_streaming", "data.streaming"),
    same("seed", "data.seed", note="the initial weights come from the model's folder"),
    same("chat_template_kwargs", "data.apply_chat_template_kwargs"),
    same("trust_remote_code", f"{_AR}.model.trust_remote_code"),
    same("model_name_or_path", f"{_AR}.model.path", "sft_model_path"),
    Spelling(("reward_model_path",), ("reward_model.enable", "reward_model.model.path"), reward_model),
    Spelling(
        ("model_init_kwargs",), (_REST, _ATTENTION, _QUANTIZATION), model_arguments,
        "dtype is the dtype of the stored weights; quantization_config quantises the frozen base of LoRA adapters",
    ),
    same("output_dir", "trainer.default_local_dir"),
    Spelling(
        ("resume_from_checkpoint",), ("trainer.resume_mode", "trainer.resume_from_path"), resumed,
        "true resumes at the newest checkpoint; a path is a global_step_N folder, or a run folder for its newest checkpoint",
    ),
    same("run_name", "trainer.experiment_name", "exp_name"),
    Spelling(("report_to",), ("trainer.logger",), loggers, "console and jsonl are always written"),
    *TEACHING,
)  # fmt: skip
"""The records, in the order in which they are read. A conversion sees the values that earlier conversions have set."""

ONE_SETTING: tuple[tuple[str, ...], ...] = (
    ("max_completion_length", "response_length", "max_new_tokens"),
    ("max_prompt_length", "max_length"),
    ("max_steps", "total_episodes"),
    ("normalize_advantages", "normalize_advantage", "normalize_reward"),
    *(spelling.names for spelling in SPELLINGS),
)
"""Groups of names that mean the same setting. A user can give only one name of each group."""

NAMES = frozenset(name for spelling in SPELLINGS for name in spelling.names) | NO_EQUAL.keys()
"""All known names of TRL, which includes those without an equal here."""
