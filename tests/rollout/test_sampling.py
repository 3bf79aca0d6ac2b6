from __future__ import annotations

import itertools

import pytest

from verl_memopt.config import schema
from verl_memopt.errors import ConfigError
from verl_memopt.rollout.engine import row_seed, train_sampling, validation_sampling


def test_row_seed_is_the_same_number_on_every_machine() -> None:
    assert row_seed(1, 2, 3, 4) == 7597657864365363701


def test_row_seeds_of_neighbouring_rows_steps_and_runs_differ_and_have_63_bits() -> None:
    numbers = itertools.product(range(5), range(5), range(20), range(8))
    seeds = {row_seed(*four) for four in numbers}
    assert len(seeds) == 5 * 5 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_every_sampling_key_of_the_settings_arrives() -> None:
    rollout = schema.Rollout(
        name="hf",
        temperature=0.6,
        top_k=7,
        top_p=0.8,
        repetition_penalty=1.1,
        do_sample=False,
        response_length=33,
        ignore_eos=True,
        calculate_log_probs=False,
    )
    train = train_sampling(rollout)
    assert (train.temperature, train.top_k, train.top_p, train.repetition_penalty) == (0.6, 7, 0.8, 1.1)
    assert (train.do_sample, train.max_tokens, train.ignore_eos, train.log_probs) == (False, 33, True, False)


def test_validation_samples_by_its_own_keys_with_the_cap_and_penalty_of_training() -> None:
    val = schema.ValKwargs(do_sample=True, temperature=0.3, top_p=0.5, top_k=4)
    rollout = schema.Rollout(name="hf", temperature=0.6, repetition_penalty=1.1, response_length=33, val_kwargs=val)
    settings = validation_sampling(rollout)
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.3, 0.5, 4)
    assert (settings.repetition_penalty, settings.max_tokens, settings.log_probs) == (1.1, 33, False)


def test_sampling_at_temperature_zero_is_refused_with_the_key() -> None:
    assert train_sampling(schema.Rollout(name="hf", temperature=1e-6, response_length=4)).temperature == 1e-6
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0.*do_sample=false"):
        train_sampling(schema.Rollout(name="hf", temperature=0.0, response_length=4))
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs\.temperature=0"):
        validation_sampling(schema.Rollout(name="hf", response_length=4, val_kwargs=schema.ValKwargs(do_sample=True)))
