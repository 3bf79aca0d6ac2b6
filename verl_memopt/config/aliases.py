"""verl's other names for our keys: each is read as our key, and two names of one key with different values are a problem.

A spelling is such a name, or such a word for a value. Some spellings also need their value converted, to another unit or word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from verl_memopt.algorithms.records import DISTILL
from verl_memopt.config.algorithm_rules import KEY
from verl_memopt.config.keys import Problem, flatten, problem, shown
from verl_memopt.config.role_settings import SAMPLED
from verl_memopt.config.schema import REQUIRED, Data, Model, RolloutCorrection, Trainer
from verl_memopt.config.unused_keys import NoEffect, refusal_of, refuse
from verl_memopt.memory.knob import POOL

logger = logging.getLogger(__name__)

_AR = "actor_rollout_ref"
_CHUNK = f"{_AR}.model.logprob_chunk_tokens"
_LOSS_MODE = f"{_AR}.actor.policy_loss.loss_mode"
_MODELS = {f"{_AR}.actor": f"{_AR}.model", "critic": "critic.model"}
"""Section of a trained role -> section of the role's model."""
_FSDP = {f"{_AR}.actor": f"{_AR}.actor.fsdp_config", f"{_AR}.ref": f"{_AR}.ref.fsdp_config", "critic": "critic.model.fsdp_config"}
"""Section of a role -> the ``fsdp_config`` of the role's model."""
_REWARD_FSDP = "reward_model.model.fsdp_config"
_ATTENTION = "attn_implementation"

RENAMED = {
    f"{_AR}.actor.ppo_infer_max_token_len_per_gpu": f"{_AR}.rollout.log_prob_max_token_len_per_gpu",
    f"{_AR}.actor.ppo_infer_micro_batch_size_per_gpu": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    "critic.ppo_infer_micro_batch_size_per_gpu": "critic.forward_micro_batch_size_per_gpu",
    **{
        f"{role}.{spelling}": f"{role}.optim.{key}"
        for role in _MODELS
        for spelling, key in {
            "grad_clip": "clip_grad",
            "optim.grad_clip": "clip_grad",
            "optim.warmup_style": "lr_scheduler_type",
            "optim.name": "optimizer",
        }.items()
    },
    **{f"{role}.rollout_n": f"{_AR}.rollout.n" for role in _FSDP},
    **{f"{_AR}.actor.policy_loss.{name}": f"{_AR}.actor.{name}" for name in ("tau_pos", "tau_neg")},
    f"{_AR}.actor.use_remove_padding": f"{_AR}.model.use_remove_padding",
    f"{_AR}.actor.use_fused_kernels": f"{_AR}.model.use_fused_kernels",
    **{
        spelling: key
        for role, fsdp in _FSDP.items()
        for spelling, key in {
            f"{role}.ulysses_sequence_parallel_size": f"{fsdp}.ulysses_sequence_parallel_size",
            f"{fsdp}.use_torch_compile": f"{role}.use_torch_compile",
            f"{fsdp}.strategy": f"{role}.strategy",
            f"{fsdp}.mixed_precision.param_dtype": f"{fsdp}.dtype",
        }.items()
    },
    **{
        f"{model}.{spelling}": f"{model}.{key}"
        for model in _MODELS.values()
        for spelling, key in {
            "override_config.attn_implementation": "attn_implementation",
            "lora.rank": "lora_rank",
            "lora.alpha": "lora_alpha",
            "lora.target_modules": "target_modules",
            "lora.exclude_modules": "exclude_modules",
            "lora.adapter_path": "lora_adapter_path",
        }.items()
    },
    "reward_model.ulysses_sequence_parallel_size": f"{_REWARD_FSDP}.ulysses_sequence_parallel_size",
    f"{_REWARD_FSDP}.strategy": "reward_model.strategy",
    f"{_REWARD_FSDP}.mixed_precision.param_dtype": f"{_REWARD_FSDP}.dtype",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.source": "reward_manager.source",
    "reward_manager.name": "reward_model.reward_manager",
    f"{_AR}.actor.distill_coef": "distill.coef",
}
"""Spelling -> our key, for spellings whose value needs no conversion."""

RENAMED_SECTIONS = {
    "critic.fsdp.": "critic.model.fsdp_config.",
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_model.": "reward_model.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
}
"""Other name of a section -> our name, as prefixes of keys."""

GLOBAL_MICRO_BATCHES = {
    f"{_AR}.actor.ppo_micro_batch_size": f"{_AR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_AR}.rollout.log_prob_micro_batch_size": f"{_AR}.rollout.log_prob_micro_batch_size_per_gpu",
    f"{_AR}.ref.log_prob_micro_batch_size": f"{_AR}.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
}
"""verl's key that counts sequences over all devices -> our key, which counts sequences per device."""

MET_BY_CHUNKING = frozenset(
    f"{_AR}.{key}"
    for key in (
        "model.use_fused_kernels",
        *(
            f"{role}.{below}{name}"
            for role in ("actor", "ref")
            for below in ("", "fsdp_config.")
            for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
        ),
        "actor.sum_pi_squared_checkpointing",
    )
)
"""Switches of verl whose effect ``model.logprob_chunk_tokens`` has here."""

REMOVE_PREVIOUS = "trainer.remove_previous_ckpt_in_save"
PROMPTS, MINI_BATCH = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
"""Keys of the prompts per training step and of the prompts per optimizer step. Null for the second means all prompts of the
step."""

_KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_PRECISIONS = {"bf16": "bfloat16", "float32": "fp32"}
VALUES = {
    **{f"{role}.strategy": {"fsdp": "fsdp2"} for role in _MODELS},
    f"{_AR}.rollout.name": {"sglang": "vllm"},
    "trainer.logger": {"file": "jsonl", "tracking": "wandb"},
    "algorithm.adv_estimator": {"rloo_vectorized": "rloo", "grpo_vectorized": "grpo"},
    "reward_model.reward_manager": {"gdpo": "naive"},
    "algorithm.kl_penalty": _KL_TYPES,
    f"{_AR}.actor.kl_loss_type": _KL_TYPES | {f"{short}+": f"{name}+" for short, name in _KL_TYPES.items()},
    **{f"{role}.optim.optimizer": {"adamw": "AdamW", "sgd": "SGD"} for role in _MODELS},
    **{f"{role}.optim.state_dtype": _PRECISIONS | {"8bit": "int8", "4bit": "int4"} for role in _MODELS},
    f"{_AR}.rollout.load_format": {"safetensors": "auto"},
    f"{_AR}.rollout.dtype": _PRECISIONS | {"float16": "fp16", "half": "fp16"},
    **{
        f"{fsdp}.{key}": _PRECISIONS
        for fsdp in (*_FSDP.values(), _REWARD_FSDP)
        for key in ("model_dtype", "dtype", "mixed_precision.reduce_dtype")
    },
}
"""Our key -> {spelling of a value: our value}."""


def translate(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Rename the given keys to our keys and convert their values; return them with the problems that were found.

    A key of verl that has no effect here is dropped with a warning, or is a problem (see :func:`refuse`).
    """
    flat = {key: value for key, value in flatten(tree, our_key).items() if value != REQUIRED}
    for overrides in (f"{model}.override_config" for model in _MODELS.values()):
        flat |= _without_attention(overrides, flat.get(overrides))
    flat, problems = with_preset(flat)
    flat, found = with_distillation(flat)
    problems += found
    spellings: dict[str, dict[str, Any]] = {}  # our key -> {spelling of it: our value}
    for key, value in flat.items():
        name, meant = our_key(key), value
        if name in _MEANINGS:
            name, meant, faults = _MEANINGS[name](key, value, flat)
            problems += faults
            if meant is None:
                continue
        elif name in VALUES or name == _LOSS_MODE:
            meant = _our_words(name, value)
        if refusal_of(name) is None and (name != key or meant != value):
            logger.info("%s=%s is read as %s=%s", key, shown(value), name, shown(meant))
        spellings.setdefault(name, {})[key] = meant

    values: dict[str, Any] = {}
    refused: dict[str, tuple[Any, NoEffect]] = {}
    for name, meanings in spellings.items():
        meant, *others = meanings.values()
        if any(other != meant for other in others):
            written = {key: flat[key] for key in meanings}
            problems.append(problem(written, "spellings of one key with different values", f"Keep {name} only."))
        refusal = refusal_of(name)
        if refusal is None:
            values[name] = meant
        else:
            refused[next(iter(meanings))] = meant, refusal
    return values, problems + refuse(refused)


def our_key(key: str) -> str:
    if key in RENAMED:
        return RENAMED[key]
    for section, ours in RENAMED_SECTIONS.items():
        if key.startswith(section):
            # The new section may itself have been renamed, so the key is looked up again.
            return our_key(ours + key.removeprefix(section))
    return key


def _without_attention(key: str, overrides: Any) -> dict[str, Any]:
    # In verl the attention implementation is an entry of ``override_config``. Here it is a separate key.
    if not isinstance(overrides, Mapping) or _ATTENTION not in overrides:
        return {}
    others = {name: value for name, value in overrides.items() if name != _ATTENTION}
    return {key: others, f"{key}.{_ATTENTION}": overrides[_ATTENTION]}


def _our_words(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_our_words(key, item) for item in value]
    if not isinstance(value, str):
        return value
    return value.replace("-", "_") if key == _LOSS_MODE else VALUES[key].get(value, value)


_Meaning = tuple[str, Any, list[Problem]]
"""(our key, our value or None if nothing is set, problems of the given value)."""


def _met_by_chunking(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    if value not in (None, True, False):
        return _CHUNK, None, [problem({key: value}, "expected true or false", f"Remove it: {_CHUNK} decides.")]
    chunk = flat.get(_CHUNK, Model.logprob_chunk_tokens)
    if value and chunk == 0:
        what = "the first key switches chunking on, the second switches it off"
        return _CHUNK, None, [problem({key: value, _CHUNK: chunk}, what, "Remove one of the two.")]
    if value is not None:
        logger.info("%s=%s has no effect: %s=%s decides how log-probs and entropy are chunked", key, shown(value), _CHUNK, chunk)
    return _CHUNK, None, []


def _per_device(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    ours = GLOBAL_MICRO_BATCHES[key]
    if value is None:
        return ours, None, []
    devices = _devices_of(key.partition(".")[0], flat)
    if devices is None or not is_count(value):
        what = "expected a whole number of sequences over all devices"
        return ours, None, [problem({key: value}, what, f"Set {ours} instead.")]
    if value % devices:
        return ours, None, [problem({key: value}, f"not divisible by the {devices} devices", f"Set {ours} instead.")]
    return ours, value // devices, []


def _devices_of(section: str, flat: Mapping[str, Any]) -> int | None:
    where = section if flat.get(f"{section}.enable_resource_pool") is True else "trainer"
    counts = [flat.get(f"{where}.{count}", getattr(Trainer, count)) for count in POOL]
    # The type check reports a count that has a wrong type.
    return counts[0] * counts[1] if all(map(is_count, counts)) else None


def _at_most_all(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    # A shard group larger than the number of devices means one group of all devices, as in verl.
    name = our_key(key)
    devices = _devices_of(name.partition(".")[0], flat)
    return name, -1 if devices is not None and is_count(value) and value > devices else value, []


def is_count(value: Any) -> bool:
    # In Python, True is an int. It is not a count.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _whole_batch(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    return key, flat.get(PROMPTS, Data.train_batch_size) if value is None else value, []


def _never(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    # Read false as -1: verl only checks whether the number is above 0.
    return key, -1 if value is False else value, []


def _unless_null(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    # The caller drops a value of None, so null counts as not set.
    return our_key(key), value, []


def _threshold(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    # Without importance weights null counts as not set.
    if value is None and flat.get(f"{KEY}.rollout_is") is not None:
        what = "importance weights need a threshold"
        return key, None, [problem({key: value}, what, "Give one number, or two as lower_upper.")]
    return key, value, []


def _lora_number(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    # 0 and null count as not set if there are no adapters, or if the folder of trained adapters gives the number.
    name = our_key(key)
    model = name.rpartition(".")[0]
    given = {our_key(spelling): number for spelling, number in flat.items() if our_key(spelling).startswith(f"{model}.lora_")}
    has_folder, rank = given.get(f"{model}.lora_adapter_path") is not None, given.get(f"{model}.lora_rank")
    is_open = has_folder and not rank if name.endswith("rank") else not rank
    if value not in (0, None) or isinstance(value, bool) or not is_open:
        return name, value, []
    why = "the folder of the adapters decides" if has_folder else "there are no adapters"
    logger.info("%s=%s has no effect: %s", key, shown(value), why)
    return name, None, []


def _keep_one(key: str, value: Any, flat: Mapping[str, Any]) -> _Meaning:
    ours = "trainer.max_actor_ckpt_to_keep"
    if value not in (None, True, False):
        return ours, None, [problem({key: value}, "expected true or false", f"Set {ours} instead.")]
    return ours, 1 if value else None, []


_MEANINGS: dict[str, Callable[[str, Any, Mapping[str, Any]], _Meaning]] = {
    **dict.fromkeys(MET_BY_CHUNKING, _met_by_chunking),
    **dict.fromkeys(GLOBAL_MICRO_BATCHES, _per_device),
    REMOVE_PREVIOUS: _keep_one,
    MINI_BATCH: _whole_batch,
    **{f"{fsdp}.fsdp_size": _at_most_all for fsdp in (*_FSDP.values(), _REWARD_FSDP)},
    **dict.fromkeys(("trainer.test_freq", "trainer.save_freq"), _never),
    "custom_reward_function.name": _unless_null,
    f"{KEY}.rollout_is_threshold": _threshold,
    **{f"{model}.{name}": _lora_number for model in _MODELS.values() for name in ("lora_rank", "lora_alpha")},
}
"""Key whose value needs a conversion -> the function that converts it, from the key, its value and all given keys."""


# verl's presets of ``algorithm.rollout_correction``.
#
# A ``decoupled`` preset computes old log-probs with the trainer, and corrects the difference between them and the engine's
# log-probs. A ``bypass`` preset uses the engine's log-probs as old log-probs, and skips the pass that computes these. In the
# names, ``is`` means importance weights, ``tis`` truncated importance weights, ``rs`` rejection, ``geo`` the geometric mean of a
# response's ratios, ``k3`` the estimator k3, and ``pg`` a loss without a clip. Source: ``RolloutCorrectionConfig`` of verl 0.8
# and 0.9; "When Speed Kills Stability" (Liu et al., 2025).


PRESET = f"{KEY}.preset"
"""The key that selects a preset. The preset's name may also be given as the value of the section itself."""

_OFF = RolloutCorrection()
_TOKEN, _SEQUENCE = replace(_OFF, rollout_is="token"), replace(_OFF, rollout_is="sequence")
_GEO: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP: dict[str, Any] = {"bypass_mode": True}
_PG: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, RolloutCorrection] = {
    "disabled": _OFF,
    "decoupled_token_is": _TOKEN,
    "decoupled_token_icepop": replace(_TOKEN, rollout_is_threshold="0.5_5.0"),
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_seq_is_rs": replace(_SEQUENCE, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": replace(_OFF, **_GEO),
    "decoupled_geo_rs_seq_tis": replace(_SEQUENCE, **_GEO),
    "decoupled_geo_rs_token_tis": replace(_TOKEN, **_GEO),
    "decoupled_k3_rs": replace(_OFF, **_K3),
    "decoupled_k3_rs_seq_tis": replace(_SEQUENCE, **_K3),
    "decoupled_k3_rs_token_tis": replace(_TOKEN, **_K3),
    "bypass_ppo_clip": replace(_OFF, **_CLIP),
    "bypass_ppo_clip_geo_rs": replace(_OFF, **_CLIP, **_GEO),
    "bypass_ppo_clip_k3_rs": replace(_OFF, **_CLIP, **_K3),
    "bypass_pg_is": replace(_SEQUENCE, **_PG),
    "bypass_pg_token_icepop": replace(_TOKEN, **_PG, rollout_is_threshold="0.5_5.0"),
    "bypass_pg_geo_rs": replace(_OFF, **_PG, **_GEO),
    "bypass_pg_geo_rs_seq_tis": replace(_SEQUENCE, **_PG, **_GEO),
    "bypass_pg_geo_rs_token_tis": replace(_TOKEN, **_PG, **_GEO),
}
"""Name of a preset (a factory method of verl's config class) -> its values."""


def with_preset(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace the name of a preset by the preset's values; return the settings with the problems that were found.

    Other keys of the section that the user gave win over the preset's values. Null means no preset.
    """
    settings = {key: value for key, value in written.items() if key not in (KEY, PRESET)}
    names = {key: written[key] for key in (KEY, PRESET) if written.get(key) is not None}
    if not names:
        return settings, []
    if len(names) == 2:
        return settings, [problem(names, "two names of a preset", f"Keep {PRESET}.")]
    ((key, name),) = names.items()
    if not isinstance(name, str) or name not in PRESETS:
        return settings, [problem({key: name}, "no such preset", f"Set one of {', '.join(PRESETS)}.")]
    values = {f"{KEY}.{field}": value for field, value in asdict(PRESETS[name]).items()}
    logger.info("%s=%s sets %s", key, name, ", ".join(f"{own}={shown(value)}" for own, value in values.items()))
    return values | settings, []


# verl's section ``distillation``. Its loss is a term of its own with its own clip. In the first optimizer step of a rollout its
# gradient is that of the advantages here. Source: ``verl/trainer/distillation/losses.py`` of verl 0.9.


_ESTIMATOR = "algorithm.adv_estimator"
_SECTION = "distillation."
_LOSS, _TEACHERS = f"{_SECTION}distillation_loss", f"{_SECTION}teacher_models"
_MODE, _BY_GRADIENT, _REWARDS = (f"{_LOSS}.{name}" for name in ("loss_mode", "use_policy_gradient", "use_task_rewards"))
_LOSS_DEFAULTS: dict[str, Any] = {
    f"{_SECTION}enabled": False, _MODE: "k3", _BY_GRADIENT: False, _REWARDS: True, f"{_LOSS}.distillation_loss_coef": 1.0,
}  # fmt: skip
_NO_POOL = "the teacher takes turns with the policy on its devices, and needs no engine"
_OF_TOP_K = "it belongs to the top-k losses"
_IDLE = {
    **dict.fromkeys((f"{_SECTION}{name}" for name in ("n_gpus_per_node", "nnodes", "enable_resource_pool")), _NO_POOL),
    **dict.fromkeys((f"{_LOSS}.topk", f"{_LOSS}.log_prob_min_clamp"), _OF_TOP_K),
    **dict.fromkeys((f"{_LOSS}.clip_ratio{end}" for end in ("", "_low", "_high")), f"{_AR}.actor.clip_ratio decides"),
}
"""Key of the section without an effect -> why."""
_ONLY: dict[str, tuple[Any, str]] = {
    f"{_LOSS}.loss_max_clamp": (None, "the estimate is not bounded, because a bound removes the lesson where it is largest"),
    f"{_LOSS}.policy_loss_mode": ("vanilla", f"the loss is that of {_LOSS_MODE}"),
    f"{_LOSS}.task_loss_coef": (1.0, "the loss of the rewards has the weight 1, and distill.coef is that of the teacher"),
}
"""Key of the section -> the only value that is read, and why."""


def with_distillation(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace verl's section ``distillation`` by our keys; return the settings with the problems that were found."""
    settings = {key: value for key, value in written.items() if not key.startswith(_SECTION)}
    given = {key: value for key, value in written.items() if key.startswith(_SECTION)}
    if not given:
        return settings, []
    values = _LOSS_DEFAULTS | given
    problems = [
        problem({key: values[key]}, "expected true or false", "Correct it.")
        for key in (f"{_SECTION}enabled", _BY_GRADIENT, _REWARDS)
        if not isinstance(values[key], bool)
    ]
    if not values[f"{_SECTION}enabled"]:
        logger.info("the section distillation has no effect, because distillation.enabled is false")
        return settings, problems
    for key, value in given.items():
        problems += _problems_of(key, value)
    if problem_of_loss := _problem_of_loss(values):
        problems.append(problem_of_loss)
    teachers = {key: path for key, path in given.items() if key.endswith(".model_path") and path is not None}
    if len(teachers) > 1:
        way_out = "Keep one, and give the others as teacher.further_models with the column teacher.key."
        problems.append(problem(teachers, "rows choose among several teachers by another key here", way_out))
    ours: dict[str, Any] = {"distill.divergence": SAMPLED}
    if teachers:
        ours["teacher.model.path"] = next(iter(teachers.values()))
    if values[_REWARDS]:
        ours["distill.coef"] = values[f"{_LOSS}.distillation_loss_coef"]
    else:
        ours[_ESTIMATOR] = DISTILL
        settings.pop(_ESTIMATOR, None)  # verl learns nothing from the advantages then, whatever their estimator
    for key in ours.keys() & settings.keys():
        problems.append(problem({key: settings[key], **given}, "two spellings of one setting", f"Keep {key}."))
    read = ", ".join(f"{key}={shown(value)}" for key, value in ours.items())
    logger.info("verl's section distillation is read as %s", read)
    return settings | ours, problems


def _problems_of(key: str, value: Any) -> list[Problem]:
    if key in _LOSS_DEFAULTS or key.endswith(".model_path"):
        return []
    if key in _ONLY and value not in (None, _ONLY[key][0]):
        only, why = _ONLY[key]
        return [problem({key: value}, why, f"Set it to {shown(only)}.")]
    if key not in _ONLY and key not in _IDLE and not key.startswith(f"{_TEACHERS}."):
        return [problem({key: value}, "this key has no equal here", "Remove it, or use the keys of docs/distill.md.")]
    if value is not None and key not in _ONLY:
        logger.warning("%s=%s does nothing here: %s.", key, shown(value), _IDLE.get(key, _NO_POOL))
    return []


def _problem_of_loss(values: Mapping[str, Any]) -> Problem | None:
    mode = values[_MODE]
    address = {key: values[key] for key in (_MODE, _BY_GRADIENT)}
    if mode in ("k1", "kl"):
        if values[_BY_GRADIENT]:
            return None
        what, way_out = "as a loss this estimate has no gradient on average", f"Set {_BY_GRADIENT}=true."
        return problem(address, what, way_out)
    if str(mode).endswith("_topk"):
        what = "verl leaves the tokens outside the top k out, so that their probability is free; here they count as one"
        way_out = "Remove the section, and set distill.divergence=forward_kl (or reverse_kl) and distill.top_k."
        return problem(address, what, way_out)
    way_out = f"Set k1 with {_BY_GRADIENT}=true, or remove the section for distill.divergence=reverse_kl, which is exact."
    return problem(address, "of the estimates from one token only k1 is here", way_out)
