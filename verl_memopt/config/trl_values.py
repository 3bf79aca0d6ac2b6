"""What values of TRL mean in our keys, where they are in another unit or follow from several settings.

TRL counts responses and optimizer steps where verl counts prompts and rollouts. With W devices, p = per_device_train_batch_size,
a = gradient_accumulation_steps, s = steps_per_generation (TRL's default: a) and n = num_generations, a rollout of TRL has p W s
responses to p W s / n prompts, and one pass over them takes s / a optimizer steps. In the older RLOO trainer
s = a x num_mini_batches. Source: ``GRPOConfig`` and ``RLOOConfig`` of TRL 1.16, ``RLOOTrainer`` of TRL 0.20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from verl_memopt.config.keys import value_at
from verl_memopt.config.schema import Settings

_AR = "actor_rollout_ref"
SAMPLES, EPOCHS = f"{_AR}.rollout.n", f"{_AR}.actor.ppo_epochs"
PROMPTS, MINI_BATCH = "data.train_batch_size", f"{_AR}.actor.ppo_mini_batch_size"
STEPS, TOTAL_EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
KL_IN_REWARD, KL_COEF = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
SYNC_EVERY, SYNC_ALPHA = f"{_AR}.ref.sync_every_steps", f"{_AR}.ref.sync_mixup_alpha"
KL_IN_LOSS, KL_LOSS_COEF = f"{_AR}.actor.use_kl_loss", f"{_AR}.actor.kl_loss_coef"
ESTIMATOR, BETAS = "algorithm.adv_estimator", f"{_AR}.actor.optim.betas"
BATCH_NAMES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "num_mini_batches",
)  # fmt: skip
"""Names of TRL that together decide how many responses a rollout has, and how many an optimizer step."""

TrlSettings = Mapping[str, Any]
"""Name of TRL -> value, of all names that the user wrote."""
Values = Mapping[str, Any]
"""Our key -> value, of what is set so far."""
Convert = Callable[[str, TrlSettings, Values], dict[str, Any]]
"""Return our keys and values for one name of TRL, from the name, all names of TRL and our values so far."""


class NotConvertibleError(Exception):
    """A value of TRL has no equal here.

    Args:
        what: Why, as a sentence without a full stop.
        way_out: What to set instead.
        names: The names of TRL that it is about; () = the one that is being read.
    """

    def __init__(self, what: str, way_out: str, names: tuple[str, ...] = ()) -> None:
        """Keep the sentences."""
        super().__init__(what)
        self.what, self.way_out, self.names = what, way_out, names


def effective(key: str, values: Values) -> Any:
    """Return the value of one of our keys: the one that is set, else its default."""
    return values.get(key, value_at(Settings(), key))


def copied(*keys: str) -> Convert:
    """Return the conversion that gives our keys the value as it is."""
    return lambda name, trl, values: dict.fromkeys(keys, trl[name])


def words(key: str, meanings: Mapping[str, Any]) -> Convert:
    """Return the conversion of a value that is one of a few.

    Args:
        key: Our key.
        meanings: Value of TRL, in lower case -> our value.
    """

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        word = str(trl[name]).lower()
        if word not in meanings:
            raise NotConvertibleError("this value has no equal", f"Set {key}.")
        return {key: meanings[word]}

    return convert


def off_at_zero(key: str, off: Any) -> Convert:
    """Return the conversion of a number that TRL switches off with 0 or null, and we with another value."""
    return lambda name, trl, values: {key: off if trl[name] in (None, 0) else trl[name]}


def unless_none(*keys: str) -> Convert:
    """Return the conversion that copies a value, and takes null as a name that is not written."""
    return lambda name, trl, values: {} if trl[name] is None else dict.fromkeys(keys, trl[name])


def kl(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the KL that TRL's coefficient asks for: in the reward for RLOO, in the loss for GRPO. 0 asks for no reference."""
    value = trl[name]
    in_loss = str(effective(ESTIMATOR, values)).startswith("grpo")
    switch, coefficient = (KL_IN_LOSS, KL_LOSS_COEF) if in_loss else (KL_IN_REWARD, KL_COEF)
    return {switch: False} if value in (0, None) else {switch: True, coefficient: value}


def batch(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return prompts per rollout and per optimizer step, from all names of TRL that decide them.

    Raises:
        NotConvertibleError: They do not divide into groups.
    """
    names = tuple(each for each in BATCH_NAMES if trl.get(each) is not None)
    numbers = {each: _count(each, trl) for each in names}
    devices = math.prod(_number(key, values) for key in ("trainer.nnodes", "trainer.n_gpus_per_node"))
    samples = _number(SAMPLES, values)
    per_device, accumulated = numbers.get("per_device_train_batch_size"), numbers.get("gradient_accumulation_steps", 1)
    passes = numbers.get("steps_per_generation")
    if "num_mini_batches" in numbers:
        passes = accumulated * numbers["num_mini_batches"]
    responses = numbers.get("generation_batch_size")
    if responses is not None and passes is not None:
        raise NotConvertibleError("TRL takes one of the two", f"Keep one, or set {PROMPTS} and {MINI_BATCH}.", names)
    if per_device is not None:
        if responses is not None:
            passes = _divided(responses, per_device * devices, "generation_batch_size is no multiple of a forward's rows", names)
        passes = accumulated if passes is None else passes
        responses = per_device * devices * passes
    if responses is None and passes is None:
        what = "it says nothing without per_device_train_batch_size: passes of a step are cut by tokens here"
        raise NotConvertibleError(what, f"Set {MINI_BATCH}, the prompts of an optimizer step.")
    prompts = _number(PROMPTS, values)
    if responses is not None:
        prompts = _divided(responses, samples, f"{responses} responses do not divide into groups of {samples}", names)
    if passes is None:
        return {PROMPTS: prompts}
    what = f"{passes} passes do not divide into optimizer steps of {accumulated}"
    updates = _divided(passes, accumulated, what, names)
    what = f"{prompts} prompts do not divide over {updates} optimizer steps, and the responses to a prompt stay together here"
    mini_batch = _divided(prompts, updates, what, names)
    return {MINI_BATCH: mini_batch} if responses is None else {PROMPTS: prompts, MINI_BATCH: mini_batch}


def _divided(whole: int, part: int, what: str, names: tuple[str, ...]) -> int:
    if whole % part:
        raise NotConvertibleError(what, f"Set {PROMPTS} and {MINI_BATCH}, in prompts.", names)
    return whole // part


def _number(key: str, values: Values) -> int:
    """Return the value of one of our keys, which must be a whole number above 0 for the name of TRL to be converted."""
    value = effective(key, values)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotConvertibleError(f"{key} is no whole number above 0", f"Correct {key}.")
    return value


def _count(name: str, trl: TrlSettings) -> int:
    value = trl[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotConvertibleError("expected a whole number above 0", "Correct it.", (name,))
    return value


def updates_per_rollout(values: Values) -> int:
    """Return the optimizer steps of one training step."""
    prompts, mini_batch, epochs = (_number(key, values) for key in (PROMPTS, MINI_BATCH, EPOCHS))
    return max(prompts // mini_batch, 1) * epochs


def optimizer_steps(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the training steps that take at least so many optimizer steps. TRL's -1 asks for nothing."""
    if trl[name] in (None, -1):
        return {}
    return {STEPS: math.ceil(_count(name, trl) / updates_per_rollout(values))}


def episodes(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the training steps that sample at least so many responses."""
    if trl[name] is None:
        return {}
    return {STEPS: math.ceil(_count(name, trl) / (_number(PROMPTS, values) * _number(SAMPLES, values)))}


def passes_over_data(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the epochs of the run. A number of steps in TRL's names wins, one of a recipe does not."""
    value = trl[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    epochs = _count(name, {name: value})
    has_steps = trl.get("max_steps") not in (None, -1) or trl.get("total_episodes") is not None
    return {TOTAL_EPOCHS: epochs} if has_steps else {TOTAL_EPOCHS: epochs, STEPS: None}


def every(key: str) -> Convert:
    """Return the conversion of a distance in optimizer steps to one in training steps."""

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        updates, steps = updates_per_rollout(values), _count(name, trl)
        if steps % updates:
            what = f"a training step takes {updates} optimizer steps, and this is no multiple of them"
            raise NotConvertibleError(what, f"Set {key}, in training steps.")
        return {key: steps // updates}

    return convert


def beta(place: int) -> Convert:
    """Return the conversion of one of Adam's two decays."""

    def convert(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
        present = effective(BETAS, values)
        betas = list(present) if isinstance(present, list | tuple) and len(present) == 2 else [None, None]
        betas[place] = trl[name]
        return {BETAS: betas}

    return convert


def loggers(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the loggers: console and JSON lines, which TRL always has in its own way, and those that TRL names."""
    value = trl[name]
    asked_for = value if isinstance(value, list | tuple) else [value]
    others = [each for each in asked_for if each not in ("none", None)]
    if any(each not in ("tensorboard", "wandb") for each in others):
        raise NotConvertibleError("this logger has no equal", "Set trainer.logger: console, jsonl, tensorboard or wandb.")
    return {"trainer.logger": ["console", "jsonl", *others]}


def reward_model(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return the reward model of a path."""
    return {"reward_model.enable": True, "reward_model.model.path": trl[name]}


REF_STEPS, REF_ALPHA = 512, 0.6
"""TRL's defaults of ``ref_model_sync_steps`` and ``ref_model_mixup_alpha``."""


def reference_sync(name: str, trl: TrlSettings, values: Values) -> dict[str, Any]:
    """Return how the reference follows the policy, from the three names of TRL. Without ``sync_ref_model`` it does not."""
    if not trl.get("sync_ref_model"):
        return {SYNC_EVERY: None} if name == "sync_ref_model" else {}
    steps = {"ref_model_sync_steps": trl.get("ref_model_sync_steps") or REF_STEPS}
    alpha = trl.get("ref_model_mixup_alpha")
    try:
        return every(SYNC_EVERY)("ref_model_sync_steps", steps, values) | {SYNC_ALPHA: REF_ALPHA if alpha is None else alpha}
    except NotConvertibleError as error:
        raise NotConvertibleError(f"{steps['ref_model_sync_steps']} optimizer steps: {error.what}", error.way_out) from error
