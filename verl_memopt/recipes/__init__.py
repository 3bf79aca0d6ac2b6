"""The recipes, and what each adds to the core. ``reward_model.reward_manager`` chooses a recipe.

Each recipe has a folder of its own in this package. The core imports no such folder. It reads the table below, and loads a part
of a recipe when a run needs that part. This file imports no other module of the package, because configuration and reward
processes import it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_memopt.config.trl_names import RecipeNames
    from verl_memopt.memory.knob import Refusal
    from verl_memopt.trainer.scoring import RecipeHooks


@dataclass(frozen=True)
class Recipe:
    """What a recipe adds. Fields that end in ``_at`` hold the dotted name of an object, ``module:name``, imported on use.

    Attributes:
        title: Name of the recipe in log messages.
        rules_at: The combinations of settings that the recipe refuses.
        names_at: The setting names of the recipe's publication. A run of the recipe accepts them as well as our keys.
        hooks_at: A module with the functions of ``RecipeHooks``: dataset, worker role and scorer of the recipe.
        commands: Command -> the function that runs it, and its line in the help.
        tokens_key: The setting that limits the tokens in one forward of the scoring model.
        longest_key: The setting that limits the tokens of one scored sequence.
        equals: A published setting name -> our key, for the hint in the error of an unknown key.
    """

    title: str
    rules_at: str
    names_at: str
    hooks_at: str
    tokens_key: str
    longest_key: str
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    equals: Mapping[str, str] = field(default_factory=dict)

    def rules(self) -> tuple[Refusal, ...]:
        return pkgutil.resolve_name(self.rules_at)

    def names(self) -> RecipeNames:
        return pkgutil.resolve_name(self.names_at)

    def hooks(self) -> RecipeHooks:
        return pkgutil.resolve_name(self.hooks_at)


RECIPES: dict[str, Recipe] = {
    "rlt": Recipe(
        title="RLT",
        rules_at="verl_memopt.recipes.rlt.rules:RLT_RULES",
        names_at="verl_memopt.recipes.rlt.rules:NAMES",
        hooks_at="verl_memopt.recipes.rlt.scorer",
        tokens_key="reward_model.rlt.max_tokens_per_micro_batch",
        longest_key="reward_model.rlt.max_student_len",
        commands={
            "score": (
                "verl_memopt.recipes.rlt.score_command:run",
                "score stored explanations with the student of RLT, and rank them",
            )
        },
        equals={
            name: f"reward_model.rlt.{name}"
            for name in ("kl_penalty_reward_coeff", "answer_log_prob_coeff", "unbias_student_log_probs_temp")
        }
        | {"use_ray": "trainer.worker_group", "save_completions_probability": "trainer.rollout_data_dir"},
    )
}
"""Value of ``reward_model.reward_manager`` -> its recipe."""
