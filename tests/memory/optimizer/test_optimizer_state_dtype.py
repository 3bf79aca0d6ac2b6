import pytest
import torch

from tests.memory.optimizers import bucketed, parameters, weights_after
from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW
from verl_memopt.memory.optimizer_state_dtype_torch import (
    LEVELS,
    MOMENTS,
    BucketScratch,
    _pack,
    _unpack,
    block_size,
    moment_format,
)

QUANTISED = ("int8", "int4")


def encoded(state_dtype, moments, seed=0):
    """Gives both moments as they are after one encoding, and the planes they rest in."""
    elements = moments["exp_avg"].numel()
    kind = moment_format(state_dtype, 256)
    planes = {plane.name: torch.zeros(elements // plane.per_entry, dtype=plane.dtype) for plane in kind.planes}
    scratch = tuple(torch.empty(elements) for _ in range(2))
    work = BucketScratch((moments["exp_avg"].clone(), moments["exp_avg_sq"].clone()), scratch)
    kind.encode(planes, work, torch.Generator().manual_seed(seed))
    return dict(zip(MOMENTS, (moment.clone() for moment in kind.decode(planes, work)), strict=True)), planes


def moments(elements=256 * 64, seed=1):
    """Gives moments that span six orders of magnitude inside a block."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-6, 0, 256).repeat(elements // 256)
    gradient = torch.randn(elements, generator=generator) * size
    return {"exp_avg": 0.1 * gradient, "exp_avg_sq": 0.001 * gradient.square()}


@pytest.mark.parametrize(("row", "most", "expected"), [
    (1024, 256, 256), (896, 256, 224), (64, 256, 64), (4864, 128, 128), (96, 128, 96), (1, 256, None), (514, 256, None),
])  # fmt: skip
def test_a_block_is_the_largest_even_divisor_of_a_row(row, most, expected):
    assert block_size(row, most) == expected


def spacing(state_dtype, moment, values):
    """Gives the distance between the two codes around each value."""
    if state_dtype == "bfloat16":
        return 2**-7 * values.abs()
    levels, blocks = LEVELS[state_dtype, moment], values.view(-1, 256 if state_dtype == "int8" else 128).abs()
    scale = blocks.amax(1, keepdim=True)
    code = (blocks / scale).sqrt() * levels
    return ((2 * code + 1) / levels**2 * scale).view(-1)


@pytest.mark.parametrize("state_dtype", ["bfloat16", *QUANTISED])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_encoding_is_off_by_less_than_the_distance_of_two_codes(state_dtype, moment):
    start = moments()
    found, _ = encoded(state_dtype, start)
    assert ((found[moment] - start[moment]).abs() <= spacing(state_dtype, moment, start[moment]) * 1.001).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", *QUANTISED])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_mean_of_encodings_is_the_moment(state_dtype, moment):
    start, draws = moments(256 * 2), 400
    mean = sum(encoded(state_dtype, start, seed)[0][moment] for seed in range(draws)) / draws
    # Below its smallest code a second moment is that code; everywhere else five deviations of a coin's mean.
    values, distance = start[moment], spacing(state_dtype, moment, start[moment])
    bound = distance * (5 * 0.5 / draws**0.5 + 5 / draws)
    smallest = 0 if moment == "exp_avg" or state_dtype == "bfloat16" else values.max() / LEVELS[state_dtype, moment] ** 2
    assert ((mean - values).abs() <= bound)[values.abs() >= smallest].all()


@pytest.mark.parametrize("state_dtype", QUANTISED)
def test_no_second_moment_becomes_zero_and_an_empty_block_stays_zero(state_dtype):
    start = moments()
    start["exp_avg_sq"][1:256] = 1e-30
    start["exp_avg_sq"][256:512] = 0
    found, _ = encoded(state_dtype, start)
    assert (found["exp_avg_sq"][:256] > 0).all()
    assert (found["exp_avg_sq"][256:512] == 0).all()


def test_half_bytes_come_back():
    codes = torch.arange(16, dtype=torch.float32).repeat(16).view(2, 8, 16).permute(2, 1, 0).reshape(-1).contiguous()
    stored, back = torch.empty(codes.numel() // 2, dtype=torch.uint8), torch.empty_like(codes)
    _pack(codes.clone(), torch.empty_like(codes), stored)
    _unpack(stored, back)
    assert torch.equal(codes, back)


def test_a_bfloat16_second_moment_decays():
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = BucketedAdamW([parameter], lr=0.0, state_dtype="bfloat16")
    state = optimizer.state[parameter]["exp_avg_sq"]
    state.fill_(1.0)
    for _ in range(300):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert state.dtype == torch.bfloat16
    assert state.float().mean().item() == pytest.approx(0.999**300, rel=0.01)
    assert (torch.tensor(1.0).bfloat16() * 0.999).bfloat16() == 1  # which is where rounding to nearest would leave it


def regression(make, steps=300):
    """Gives the mean loss of the last 100 steps of a small noisy regression whose features differ in size by 300."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((128, 32), (128, 128), (16, 128))
    weights, target = ([torch.randn(s, generator=generator) / s[1] ** 0.5 for s in shapes] for _ in range(2))
    size = torch.logspace(-2, 0.5, 32)
    weights = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = make(weights)
    losses = []

    def forward(layers, x):
        for layer in layers[:-1]:
            x = torch.tanh(x @ layer.T)
        return x @ layers[-1].T

    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator) * size
        loss = (forward(weights, x) - forward(target, x) - 0.1 * torch.randn(64, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-100:]) / 100


def test_training_converges_as_with_fp32_state():
    exact = regression(lambda weights: torch.optim.AdamW(weights, lr=3e-3, fused=True))
    for state_dtype, bound in (("bfloat16", 0.005), ("int8", 0.01), ("int4", 0.03)):
        found = regression(lambda weights, kind=state_dtype: BucketedAdamW(weights, lr=3e-3, state_dtype=kind))
        assert abs(found / exact - 1) <= bound, (state_dtype, found / exact - 1)


@pytest.mark.parametrize(("state_dtype", "bound"), [("bfloat16", 0.003), ("int8", 0.02), ("int4", 0.25)])
def test_weights_after_four_steps_are_near_those_of_fp32(state_dtype, bound):
    start, exact = parameters(), weights_after(bucketed())
    for first, one, other in zip(start, exact, weights_after(bucketed(state_dtype=state_dtype)), strict=True):
        assert (one - other).norm() <= bound * (one - first).norm()


def test_what_keeps_fp32_moments_is_told_and_more_loudly_when_it_is_most(caplog):
    caplog.set_level("INFO")
    narrow, wide = torch.nn.Parameter(torch.zeros(100, 16)), torch.nn.Parameter(torch.zeros(100, 64))
    BucketedAdamW([narrow, wide], lr=1e-2, state_dtype="int8")
    BucketedAdamW([narrow], lr=1e-2, state_dtype="int8")
    BucketedAdamW([wide], lr=1e-2, state_dtype="int8")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "1600 of 8000 elements keep fp32 moments" in caplog.messages[0]
