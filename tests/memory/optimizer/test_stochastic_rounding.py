import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.optimizers import bucketed, parameters, same, weights_after
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW, BucketedSGD
from verl_memopt.memory.optimizer_state_dtype_torch import round_to_bfloat16_

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def rounded(values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return round_to_bfloat16_(values.clone(), torch.empty_like(values), generator)


@given(st.lists(FLOATS.filter(lambda value: abs(value) < 1e38), min_size=1, max_size=20), st.integers(0, 2**31))
def test_a_number_becomes_one_of_its_two_neighbours(values, seed):
    values = torch.tensor(values, dtype=torch.float32)
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = (down.view(torch.int32) + 65536).view(torch.float32)
    found = rounded(values, seed)
    assert ((found == down) | (found == up)).all()
    assert torch.equal(found, found.bfloat16().float())


def test_the_mean_is_the_number():
    samples = 200_000
    for share in (0.01, 0.25, 0.5, 0.9):
        low, high = 1.0, 1.0 + 2**-7
        value = low + share * (high - low)
        mean = rounded(torch.full((samples,), value)).double().mean().item()
        deviation = (high - low) * (share * (1 - share) / samples) ** 0.5
        assert abs(mean - value) <= 4 * deviation + 2**-24


def test_what_is_bfloat16_stays():
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf")])
    assert torch.equal(rounded(values), values)
    assert rounded(torch.tensor([float("nan")])).isnan().all()


def small_steps(make, **options):
    """Gives how far bfloat16 ones move in 100 steps of 1e-4, each a fortieth of the spacing below 1."""
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = make([parameter], lr=1e-4, weight_decay=0.0, state_dtype="fp32", **options)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return 1 - parameter.detach().float().mean().item()


@pytest.mark.parametrize("make", [BucketedAdamW, BucketedSGD])
def test_updates_below_the_spacing_are_kept_on_average(make):
    assert small_steps(make) == 0
    # 4,096 weights take 100 steps; the deviation of their mean is below 0.0039 x sqrt(100 x 0.025 / 4096) = 1e-4.
    assert abs(small_steps(make, stochastic_rounding=True) - 100 * 1e-4) < 4e-4


def test_rounding_follows_from_seed_step_and_place():
    def after(seed):
        return weights_after(bucketed(stochastic_rounding=True, state_dtype="bfloat16", seed=seed), dtype=torch.bfloat16)

    assert same(after(1), after(1))
    assert not same(after(1), after(2))
    assert not same(after(1), parameters(torch.bfloat16))


def test_the_update_is_that_of_fp32_up_to_one_spacing():
    exact = [parameter.detach().bfloat16().float() for parameter in parameters()]
    once = weights_after(bucketed(stochastic_rounding=True, state_dtype="fp32"), steps=1, dtype=torch.bfloat16)
    for start, found in zip(exact, once, strict=True):
        # A first step moves each weight by the learning rate and its decay.
        moved = (found.float() - start).abs()
        assert (moved <= 1e-2 * (1 + 0.01 * start.abs()) * 1.02 + 2**-7 * (start.abs() + 0.02)).all()
