"""Sampling settings of training and validation, and one seed per row."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from verl_memopt.config import schema
from verl_memopt.errors import ConfigError


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn."""

    temperature: float
    """Divides the logits before the draw. Has no effect if ``do_sample`` is false."""
    top_k: int
    """Draw from the k most likely tokens; -1 = off."""
    top_p: float
    """Draw from the smallest set of most likely tokens whose probabilities add up to this; 1 = off."""
    repetition_penalty: float
    """Above 1, tokens of the prompt and of the response so far become less likely; 1 = off."""
    do_sample: bool
    """False = always the most likely token."""
    max_tokens: int
    """Largest number of generated tokens."""
    ignore_eos: bool
    """Generate ``max_tokens`` tokens, and do not stop at an end-of-sequence token."""
    log_probs: bool
    """Return the log-prob of each generated token."""


def train_sampling(rollout: schema.Rollout) -> SamplingSettings:
    """Return the sampling settings of training responses.

    Raises:
        ConfigError: Sampling is on, and the temperature is not positive.
    """
    return _checked(
        "actor_rollout_ref.rollout",
        SamplingSettings(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            repetition_penalty=rollout.repetition_penalty,
            do_sample=rollout.do_sample,
            max_tokens=_cap(rollout),
            ignore_eos=rollout.ignore_eos,
            log_probs=rollout.calculate_log_probs,
        ),
    )


def validation_sampling(rollout: schema.Rollout) -> SamplingSettings:
    """Return the sampling settings of validation: ``val_kwargs``, with the length limit and repetition penalty of training.

    Raises:
        ConfigError: Sampling is on, and the temperature is not positive.
    """
    val = rollout.val_kwargs
    return _checked(
        "actor_rollout_ref.rollout.val_kwargs",
        SamplingSettings(
            temperature=val.temperature,
            top_k=val.top_k,
            top_p=val.top_p,
            repetition_penalty=rollout.repetition_penalty,
            do_sample=bool(val.do_sample),
            max_tokens=_cap(rollout),
            ignore_eos=rollout.ignore_eos,
            log_probs=False,
        ),
    )


def row_seed(seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one row, 63 bits. It depends on the four arguments alone, on every machine and in every batch."""
    packed = struct.pack("<4q", seed, step, prompt_index, sample_index)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def _cap(rollout: schema.Rollout) -> int:
    assert rollout.response_length is not None, "rollout.response_length is linked before an engine is built"
    return rollout.response_length


def _checked(key: str, sampling: SamplingSettings) -> SamplingSettings:
    if sampling.do_sample and sampling.temperature <= 0:
        raise ConfigError(
            f"{key}.temperature={sampling.temperature}: sampling needs a temperature above 0. "
            f"Raise it, or set {key}.do_sample=false to always take the most likely token."
        )
    return sampling
