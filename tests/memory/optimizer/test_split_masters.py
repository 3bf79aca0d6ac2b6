"""Masters that rest as the bfloat16 weight and a remainder are the fp32 masters, bit for bit."""

import pytest
import torch
from torch import nn

from verl_memopt.memory.bucketed_adamw_torch import BucketedAdamW, BucketedSGD
from verl_memopt.memory.optimizer_state_dtype_torch import join_, split_


def bits(tensor):
    return tensor.view(torch.int32)


def halves(masters):
    weight, remainder = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int16)
    split_(masters.clone(), torch.empty_like(masters), [weight], remainder)
    return weight, remainder


def every_kind():
    """Random patterns, and of every exponent and sign: zero, the least and largest mantissa, ties, and their neighbours."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x18001, 0x7F8000, 0x7FFFFF])
    exponents = torch.arange(512)[:, None] << 23
    drawn = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    patterns = torch.cat([(exponents + low).view(-1), drawn])
    patterns = torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).int().view(torch.float32)
    return patterns[~patterns.isnan()]


def test_every_exponent_tie_denormal_infinity_and_zero_comes_back_bit_for_bit():
    masters = every_kind()
    weight, remainder = halves(masters)
    joined = torch.full_like(masters, 7.0)
    join_([weight[:1000], weight[1000:]], remainder, joined)
    assert torch.equal(bits(joined), bits(masters))
    # The weight is the cast of the master, but where that is exactly between two of bfloat16, which goes away from zero.
    cast = masters.bfloat16()
    differ = weight.view(torch.int16) != cast.view(torch.int16)
    assert differ.any()
    assert ((bits(masters)[differ] & 0xFFFF) == 0x8000).all()
    assert (weight[differ].float().abs() > masters[differ].abs()).all()


class Weights(nn.Module):
    """Tensors of several sizes, so that buckets cut across them and into them."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) * 0.02 for shape in ((40, 128), (64,), (7, 256), (3, 64))]
        self.of = nn.ParameterList(nn.Parameter(each.bfloat16().to(dtype)) for each in drawn)


# Moments that are rounded by chance draw other numbers where buckets are cut at other places, as they are on the host.
KINDS = {
    "AdamW": (BucketedAdamW, {}),
    "AdamW, int8 moments": (BucketedAdamW, {"state_dtype": "int8"}),
    "AdamW on the host": (BucketedAdamW, {"offload": True}),
    "SGD": (BucketedSGD, {}),
    "SGD with momentum": (BucketedSGD, {"momentum": 0.9}),
    "SGD with momentum on the host": (BucketedSGD, {"momentum": 0.9, "offload": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_steps_give_the_masters_of_fp32_parameters_bit_for_bit(kind):
    whole, split = Weights(torch.float32), Weights(torch.bfloat16)
    make, more = KINDS[kind]
    options = {"lr": 3e-3, "weight_decay": 0.1, "bucket_megabytes": 0.02, **more}
    plain = make(whole.of, **options)
    halved = make(split.of, split_masters=True, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        for one, other in zip(whole.of, split.of, strict=True):
            other.grad_dtype = torch.float32
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        plain.step()
        halved.step()
    for one, other in zip(whole.of, split.of, strict=True):
        assert torch.equal(bits(halved.master(other)), bits(one.detach()))
        assert torch.equal(other.view(torch.int16), halves(one.detach().view(-1))[0].view(other.shape).view(torch.int16))
        assert not torch.equal(other.float(), one)
    for mine, theirs in zip(halved.state.values(), plain.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_update_below_the_weights_spacing_moves_the_master_and_in_time_the_weight():
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = BucketedAdamW([weight], lr=1e-4, weight_decay=0.0, split_masters=True)
    for step in range(1, 41):
        weight.grad = torch.full_like(weight, 1.0)
        optimizer.step()
        torch.testing.assert_close(optimizer.master(weight), torch.full((64, 64), 1 - step * 1e-4), rtol=0, atol=1e-5)
        assert torch.equal(weight, optimizer.master(weight).bfloat16())
    assert (weight == 1 - 2**-8).all()


def test_a_part_of_a_master_is_set_by_its_place():
    weight = nn.Parameter(torch.zeros(8, 64, dtype=torch.bfloat16))
    optimizer = BucketedAdamW([weight], lr=1e-4, split_masters=True)
    values = torch.randn(8, 64)
    for row in (5, 0, 2):
        optimizer.set_master(weight, values[row : row + 1], row * 64)
    kept = torch.zeros_like(values)
    kept[[5, 0, 2]] = values[[5, 0, 2]]
    assert torch.equal(optimizer.master(weight), kept)
