"""verl's named settings of ``algorithm.rollout_correction``.

A decoupled preset computes old log-probs with the trainer and corrects from the rollout engine to them. A bypass preset takes
the engine's log-probs as the old ones and skips that pass. In the names, ``is`` stands for importance weights, ``tis`` for
truncated ones, ``rs`` for rejection, ``geo`` for the geometric mean of a response's ratios, ``k3`` for the estimator k3 and
``pg`` for a loss without a clip. Source: ``RolloutCorrectionConfig`` of verl 0.8 and 0.9; "When Speed Kills Stability" (Liu et
al., 2025).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from verl_memopt.config.correction_bounds import KEY
from verl_memopt.config.problems import Problem, problem, shown
from verl_memopt.config.schema.corrections import RolloutCorrection

logger = logging.getLogger(__name__)

PRESET = f"{KEY}.preset"
"""The key that names a preset. The name may also be the value of the section itself."""

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
"""Name of each factory of verl's section -> its values."""


def with_preset(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the given settings with a preset's values in the place of its name, and what is wrong with the name.

    Keys of the section that are given beside the name keep their own values. Null is no preset.

    Args:
        written: dotted key -> value, as the user wrote them.
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
