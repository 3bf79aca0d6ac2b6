"""verl's named settings of ``algorithm.rollout_correction``.

A decoupled preset computes old log-probs with the trainer and corrects from the rollout engine to them. A bypass preset takes
the engine's log-probs as the old ones and skips that pass. In the names, ``is`` stands for importance weights, ``tis`` for
truncated ones, ``rs`` for rejection, ``geo`` for the geometric mean of a response's ratios, ``k3`` for the estimator k3 and
``pg`` for a loss without a clip. Source: ``RolloutCorrectionConfig`` of verl 0.8 and 0.9; "When Speed Kills Stability" (Liu et
al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from verl_memopt.errors import ConfigError

KEY = "algorithm.rollout_correction"


@dataclass(frozen=True)
class CorrectionSettings:
    """The section ``algorithm.rollout_correction``, under verl's names."""

    rollout_is: Literal["token", "sequence"] | None
    """Level of the importance weights; None = none."""
    rollout_is_threshold: float | str
    """Upper bound of the weights; ``lower_upper`` sets weights outside to 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None
    """Rejections, separated by commas; None = none."""
    rollout_rs_threshold: float | str | None
    """Bound of each rejection, separated by commas, or one for all."""
    bypass_mode: bool
    """Take the engine's log-probs as old log-probs."""
    loss_type: Literal["ppo_clip", "reinforce"]
    """Loss of bypass mode."""


_OFF = CorrectionSettings(None, 2.0, False, None, None, False, "ppo_clip")
_TOKEN, _SEQUENCE = replace(_OFF, rollout_is="token"), replace(_OFF, rollout_is="sequence")
_GEO: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP: dict[str, Any] = {"bypass_mode": True}
_PG: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, CorrectionSettings] = {
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


def preset(name: str) -> CorrectionSettings:
    """Return the settings that verl's factory of this name gives without arguments.

    Args:
        name: A key of ``PRESETS``.

    Raises:
        ConfigError: There is no such preset. The message lists all.
    """
    if name not in PRESETS:
        raise ConfigError(f"{KEY}={name}: no such preset. Choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
