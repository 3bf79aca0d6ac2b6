import itertools
import math

import pytest
import torch

from tests.rollout.tools import sampling
from verl_memopt.config import schema
from verl_memopt.errors import ConfigError
from verl_memopt.rollout.engine import row_seed, train_sampling, validation_sampling
from verl_memopt.rollout.hf_engine import RowSampler, at_least, filtered, penalized
from verl_memopt.rollout.vllm_process import restrict_sampler


def test_row_seed_is_the_same_number_on_every_machine():
    assert row_seed(1, 2, 3, 4) == 7597657864365363701


def test_row_seeds_of_neighbouring_rows_steps_and_runs_differ_and_have_63_bits():
    numbers = itertools.product(range(5), range(5), range(20), range(8))
    seeds = {row_seed(*four) for four in numbers}
    assert len(seeds) == 5 * 5 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62


def test_every_sampling_key_of_the_settings_arrives():
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
        min_p=0.2,
        stop=["x"],
        stop_token_ids=[5],
    )
    train = train_sampling(rollout)
    assert (train.min_p, train.stop, train.stop_token_ids) == (0.2, ("x",), (5,))
    assert (train.temperature, train.top_k, train.top_p, train.repetition_penalty) == (0.6, 7, 0.8, 1.1)
    assert (train.do_sample, train.max_tokens, train.ignore_eos, train.log_probs) == (False, 33, True, False)


def test_validation_samples_by_its_own_keys_with_the_cap_and_penalty_of_training():
    val = schema.ValKwargs(do_sample=True, temperature=0.3, top_p=0.5, top_k=4, min_p=0.1)
    rollout = schema.Rollout(name="hf", temperature=0.6, repetition_penalty=1.1, response_length=33, val_kwargs=val)
    settings = validation_sampling(rollout)
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.3, 0.5, 4)
    assert settings.min_p == 0.1
    assert (settings.repetition_penalty, settings.max_tokens, settings.log_probs) == (1.1, 33, False)


def test_sampling_at_temperature_zero_is_refused_with_the_key():
    assert train_sampling(schema.Rollout(name="hf", temperature=1e-6, response_length=4)).temperature == 1e-6
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0.*do_sample=false"):
        train_sampling(schema.Rollout(name="hf", temperature=0.0, response_length=4))
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs\.temperature=0"):
        validation_sampling(schema.Rollout(name="hf", response_length=4, val_kwargs=schema.ValKwargs(do_sample=True)))


INF = math.inf


def test_top_k_keeps_the_k_largest_and_ties_with_the_last():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert filtered(logits, 2, 1.0).tolist() == [[3.0, -INF, 2.0, 2.0, -INF]]
    assert filtered(logits, 1, 1.0).tolist() == [[3.0, -INF, -INF, -INF, -INF]]


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_at_least_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [
        [index for index, value in enumerate(filtered(logits, -1, p)[0].tolist()) if value > -INF] for p in (0.01, 0.7, 0.9, 1.0)
    ]
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_top_p_counts_only_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (filtered(logits, 2, 0.5)[0] > -INF).tolist() == [True, False, False, False]


def test_min_p_keeps_the_tokens_that_are_not_much_less_likely_than_the_first():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]).log()
    assert (at_least(logits, 0.29) > -INF).tolist() == [[True, True, True, False], [True, False, False, False]]
    assert torch.equal(at_least(logits, 0.0), logits)
    assert (at_least(logits, 1.0) > -INF).sum() == 2


def test_repetition_penalty_lowers_positive_and_negative_logits_of_seen_tokens_only():
    logits = torch.tensor([[2.0, -2.0, 2.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalized(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0]]


def test_left_padding_counts_as_no_seen_token():
    ids = torch.tensor([[0, 0, 1, 2]])
    sampler = RowSampler(sampling(do_sample=False, repetition_penalty=2.0), [0], torch.tensor([[0, 0, 1]]), processed=True)
    assert sampler(ids, torch.full((1, 4), 2.0)).tolist() == [[2.0, 1.0, 1.0, 2.0]]


def test_draws_follow_the_softmax():
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    rows = 4000
    sampler = RowSampler(sampling(), list(range(rows)), torch.ones(rows, 1, dtype=torch.long), processed=True)
    drawn = sampler(torch.zeros(rows, 1, dtype=torch.long), probabilities.log().expand(rows, 3)).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / rows
    three_deviations = 3 * (probabilities * (1 - probabilities) / rows).sqrt()
    assert ((shares - probabilities).abs() <= three_deviations).all()


@pytest.mark.parametrize(("processed", "expected"), [(True, 0.5**2 / (0.5**2 + 0.3**2 + 0.2**2)), (False, 0.5)])
def test_log_probs_are_of_the_whole_distribution_which_filters_leave_tokens_out_of(processed, expected):
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    sampler = RowSampler(sampling(top_k=1, temperature=0.5), [0], torch.ones(1, 1, dtype=torch.long), processed)
    sampler(torch.zeros(1, 1, dtype=torch.long), logits)
    assert sampler.log_probs[0].exp().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("do_sample", [True, False])
def test_an_id_that_the_tokenizer_does_not_know_is_never_drawn(do_sample):
    rows = 200
    logits = torch.tensor([0.1, 0.1, 0.8]).log().expand(rows, 3)
    sampler = RowSampler(
        sampling(do_sample=do_sample), list(range(rows)), torch.ones(rows, 1, dtype=torch.long), True, known_ids=2
    )
    assert sampler(torch.zeros(rows, 1, dtype=torch.long), logits).argmax(-1).max() < 2
    assert sampler.log_probs[0].exp().mean().item() == pytest.approx(0.1, abs=1e-6)  # of all ids, as the trainer's


class SecondSampler:
    """What the sampler of vLLM's second model runner, which needs a GPU, does with logits: temperature, filters, a draw."""

    class States:
        def apply_min_p(self, logits):
            logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - 1, -INF)

    def __init__(self):
        self.sampling_states = self.States()

    def apply_sampling_params(self, logits, temperature, skip_top_k_top_p=False):
        logits = logits / temperature if temperature != 1 else logits
        self.sampling_states.apply_min_p(logits)
        return logits

    def sample(self, logits, temperature, return_logprobs=False):
        processed = self.apply_sampling_params(logits.clone(), temperature)
        return processed.argmax(-1), processed


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_vllms_second_sampler_returns_the_logits_before_filters_and_draws_no_unknown_id(temperature):
    sampler, logits = SecondSampler(), torch.tensor([[1.0, 2.5, 0.0, 4.0]])
    restrict_sampler(sampler, 3, schema.Rollout(name="vllm", top_p=0.9))
    drawn, found = sampler.sample(logits.clone(), temperature, return_logprobs=True)
    assert drawn.tolist() == [1]
    assert torch.equal(found, logits / temperature)
    assert sampler.sampling_states.apply_min_p.__func__ is SecondSampler.States.apply_min_p
    assert sampler.sample(logits.clone(), temperature)[0].tolist() == [1]
