"""The rows of the ladder: their order, the settings of each, and the work that all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from verl_memopt.algorithms.records import WITH_CRITIC
from verl_memopt.config.keys import leaf_types
from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.knobs.critic_rules import twin
from verl_memopt.knobs.knob import knobs

ALL_OFF = "all off"
"""Name of the first row."""

ROWS = sorted((knob.row.place, knob.name, knob.row) for knob in knobs() if knob.row is not None)

ABLATION = tuple(name for _, name, row in ROWS if not row.on_top_of)
"""Knobs in the order in which the rows switch them on. Those that change no number come first, precision last."""

ALTERNATIVES = {name: row.on_top_of for _, name, row in ROWS if row.on_top_of}
"""Knob -> the row to which it is added. Each conflicts with a knob of a later row, so it has a row beside the ablation."""


@dataclass(frozen=True)
class Work:
    """The update that every row runs.

    Attributes:
        rows: rollouts.
        prompt: Tokens of each prompt.
        response: Tokens of each response.
        group: Rollouts of one prompt.
        seed: Seed of the tokens, the advantages and the run.
    """

    rows: int = 8
    prompt: int = 1024
    response: int = 256
    group: int = 8
    seed: int = 0

    @property
    def row_tokens(self) -> int:
        """Return the tokens of one rollout, prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class RowPlan:
    """A row to measure.

    Attributes:
        knob: That the row switches on.
        overrides: All settings of the row, as ``key=value``.
        base: Knob of the row that it is compared with; empty for the first.
    """

    knob: str
    overrides: tuple[str, ...]
    base: str = ""


def row_settings(folder: str, work: Work, overrides: Sequence[str]) -> Settings:
    """Return the settings of a row: one optimizer step over all rollouts, in this process, with transformers' generation.

    With ``algorithm.adv_estimator=gae`` the row has a critic, whose own knobs stand as the policy's do.

    Args:
        folder: Folder of the model.
        work: Sizes and seed of the update.
        overrides: ``key=value``; they win over the settings that all rows share.

    Raises:
        ConfigError: A setting is unknown or invalid.
    """
    shared = {
        "data.train_files": "none", "data.val_files": None, "data.seed": work.seed,
        "data.train_batch_size": work.rows // work.group,
        "data.max_prompt_length": work.prompt, "data.max_response_length": work.response,
        "actor_rollout_ref.model.path": folder, "actor_rollout_ref.actor.ppo_mini_batch_size": work.rows // work.group,
        "actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.use_torch_compile": False, "actor_rollout_ref.actor.optim.clip_grad": None,
        "actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.n": work.group,
        "algorithm.adv_estimator": "rloo",
        "actor_rollout_ref.rollout.dtype": "fp32",
        "actor_rollout_ref.actor.fsdp_config.dtype": "fp32", "actor_rollout_ref.ref.fsdp_config.dtype": "fp32",
        "trainer.worker_group": "local",
    }  # fmt: skip
    texts = dict(override.lstrip("+").split("=", 1) for override in overrides)
    if texts.get("algorithm.adv_estimator") in WITH_CRITIC:
        shared["critic.optim.clip_grad"] = shared["actor_rollout_ref.actor.optim.clip_grad"]
        shared["critic.model.fsdp_config.dtype"] = shared["actor_rollout_ref.actor.fsdp_config.dtype"]
        texts = {twin(key): text for key, text in texts.items() if twin(key) in leaf_types()} | texts
    return settings_from_mapping({**shared, **{key: yaml.safe_load(text) for key, text in texts.items()}})


def plan_rows(work: Work) -> list[RowPlan]:
    """Return every row: all knobs off, then one more on in each row until all are on, then the alternatives."""
    rows = {name: row for _, name, row in ROWS}
    state = {key: text for row in rows.values() for key, text in _pairs(row.off, work)}
    plans = [RowPlan(ALL_OFF, _overrides(state))]
    states: dict[str, dict[str, str]] = {}
    for name in ABLATION:
        state = states[name] = state | dict(_pairs(rows[name].on, work))
        plans.append(RowPlan(name, _overrides(state), base=plans[-1].knob))
    for name, base in ALTERNATIVES.items():
        plans.append(RowPlan(name, _overrides(states[base] | dict(_pairs(rows[name].on, work))), base))
    return plans


def choose_rows(work: Work, only: Sequence[str] = ()) -> list[RowPlan]:
    """Return the rows to measure, in order: all, or those of the knobs in ``only`` and the rows they are compared with.

    Raises:
        ConfigError: ``only`` names a knob that the ladder does not have.
    """
    plans = plan_rows(work)
    unknown = set(only) - {plan.knob for plan in plans}
    if unknown:
        raise ConfigError(f"--only {' '.join(sorted(unknown))}: not on the ladder. It has {', '.join(p.knob for p in plans)}.")
    wanted = {plan.knob for plan in plans if not only or plan.knob in only}
    wanted |= {plan.base for plan in plans if plan.knob in wanted}
    return [plan for plan in plans if plan.knob in wanted]


def _pairs(overrides: Sequence[str], work: Work) -> Iterator[tuple[str, str]]:
    """Yield key and value of each override, with the numbers of tokens that its placeholders stand for."""
    sizes = {"{pair}": 2 * work.row_tokens, "{all}": work.rows * work.row_tokens}
    for override in overrides:
        key, text = override.split("=", 1)
        yield key, str(sizes.get(text, text))


def _overrides(state: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={text}" for key, text in state.items())
