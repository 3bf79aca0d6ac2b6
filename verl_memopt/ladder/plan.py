"""What the ladder climbs: its rungs in order, what each sets, and the work that all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from verl_memopt.config.loader import settings_from_mapping
from verl_memopt.config.schema import Settings
from verl_memopt.knobs.index import knobs

ALL_OFF = "all off"

ROWS = sorted((knob.row.place, knob.name, knob.row) for knob in knobs() if knob.row is not None)

CLIMB = tuple(name for _, name, row in ROWS if not row.on_top_of)
"""The knobs in the order in which the ladder switches them on."""

BRANCHES = {name: row.on_top_of for _, name, row in ROWS if row.on_top_of}
"""Knobs that another knob of the ladder excludes, and the knob on whose row each is measured in place of what follows there."""


@dataclass(frozen=True)
class Work:
    """What every rung computes: ``rows`` rollouts of ``prompt`` + ``response`` tokens, in groups of ``group``."""

    rows: int = 8
    prompt: int = 1024
    response: int = 256
    group: int = 8
    seed: int = 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that a pass computes, and one: the budget in which it fits by the data's limits."""
        return self.prompt + self.response


def ladder_settings(folder: str, work: Work, overrides: Sequence[str]) -> Settings:
    """Gives the settings of a rung: one optimizer step over all rows, no engine but transformers', ``overrides`` on top."""
    base = {
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
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    return settings_from_mapping({**base, **{key: yaml.safe_load(text) for key, text in given.items()}})


@dataclass(frozen=True)
class Step:
    """A rung to measure: its knob, its settings, and the knob of the rung below."""

    knob: str
    overrides: tuple[str, ...]
    base: str = ""


def steps(work: Work) -> list[Step]:
    """Gives the rungs: first every knob off, then one more on at each until all are on, then the branches."""
    rows = {name: row for _, name, row in ROWS}
    state = {key: text for row in rows.values() for key, text in _pairs(row.off, work)}
    found = {ALL_OFF: Step(ALL_OFF, _overrides(state))}
    states, below = {ALL_OFF: state}, ALL_OFF
    for name in CLIMB:
        state = states[name] = state | dict(_pairs(rows[name].on, work))
        found[name], below = Step(name, _overrides(state), below), name
    for name, base in BRANCHES.items():
        found[name] = Step(name, _overrides(states[base] | dict(_pairs(rows[name].on, work))), base)
    return list(found.values())


def _pairs(overrides: Sequence[str], work: Work) -> Iterator[tuple[str, str]]:
    sizes = {"{pair}": 2 * work.row_tokens, "{all}": work.rows * work.row_tokens}
    for override in overrides:
        key, text = override.split("=", 1)
        yield key, str(sizes.get(text, text))


def _overrides(state: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={text}" for key, text in state.items())
