"""What supervised fine-tuning (``algorithm.adv_estimator=sft``) refuses, and the keys that have no effect in it."""

from __future__ import annotations

from collections.abc import Iterator

from verl_memopt.algorithms.records import SFT
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.problems import shown
from verl_memopt.config.reward_rules import ENABLE, MANAGER
from verl_memopt.knobs.knob import Idle, Refusal
from verl_memopt.recipes.registry import RECIPES

_AR, _ESTIMATOR = "actor_rollout_ref", "algorithm.adv_estimator"
_ACTOR, _ROLLOUT, _CORRECTION = f"{_AR}.actor", f"{_AR}.rollout", "algorithm.rollout_correction"

OTHER_LOSS, NO_ROLLOUT = "the loss would not be the mean negative log-prob of the responses", "there is no rollout, and no reward"
WANTED = {
    **dict.fromkeys((f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"), (False, OTHER_LOSS)),
    f"{_ACTOR}.policy_loss.loss_mode": ("gpg", OTHER_LOSS),
    f"{_ACTOR}.loss_agg_mode": ("token-mean", OTHER_LOSS),
    f"{_ACTOR}.entropy_coeff": (0.0, OTHER_LOSS),
    f"{_ROLLOUT}.temperature": (1.0, OTHER_LOSS),
    f"{_ROLLOUT}.n": (1, "the dataset has one response to a prompt"),
    f"{_ROLLOUT}.skip_rollout": (False, NO_ROLLOUT),
    f"{_CORRECTION}.bypass_mode": (False, NO_ROLLOUT),
    **dict.fromkeys(
        (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs", "custom_reward_function.path"), (None, NO_ROLLOUT)
    ),
    **dict.fromkeys(("algorithm.filter_groups.enable", "algorithm.use_pf_ppo", ENABLE), (False, NO_ROLLOUT)),
    "algorithm.mask_truncated_responses": (False, NO_ROLLOUT),
}
"""Key -> the one value that makes sense, and why."""
_MODES = ("rollout_only", "score_only", "train_only", "sync_check")


def _rules() -> Iterator[Refusal]:
    """Yield what cannot be combined with supervised fine-tuning. The recipe of ``reward_manager`` brings the dataset."""
    for key, (wanted, why) in WANTED.items():
        yield Refusal(
            (key, _ESTIMATOR),
            lambda value, name, manager, key=key, wanted=wanted: (
                name == SFT and value != wanted and not (key == ENABLE and manager in RECIPES)
            ),
            why,
            f"Set {key}={shown(wanted)}, or remove it.",
            about=(MANAGER,),
        )
    yield Refusal(
        ("debug.mode", _ESTIMATOR),
        lambda mode, name: name == SFT and mode in _MODES,
        "this mode looks at rollouts",
        "Set debug.mode=off, dry, forge, memory or deterministic.",
    )


def _idle() -> Iterator[Idle]:
    """Yield the keys of the engine and of its sampling, which nothing reads without one."""
    read = (*(each.rpartition(".")[2] for each in WANTED if each.startswith(_ROLLOUT)), "name", "mode", "seed", "do_sample")
    for key in (key for key in leaf_types() if key.startswith(f"{_ROLLOUT}.")):
        if key.removeprefix(f"{_ROLLOUT}.") not in read and ".log_prob_" not in key:
            yield Idle(key, (_ESTIMATOR,), lambda name: name == SFT, f"{_ESTIMATOR} is {SFT}, which has no engine")


SUPERVISED_RULES: tuple[Refusal, ...] = tuple(_rules())
"""All rules of this file, for :mod:`verl_memopt.config.checks`."""

WITHOUT_ENGINE = {idle.key: idle for idle in _idle()}
"""Key -> why it has no effect in a supervised run."""
