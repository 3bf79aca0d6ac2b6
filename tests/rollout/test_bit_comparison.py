"""Bits, not values: what training could not tell apart must still be seen."""

from __future__ import annotations

import pytest
import torch

from verl_memopt.rollout.weight_checks import BitComparison


def compared(*pairs: tuple[str, torch.Tensor, torch.Tensor]) -> tuple[list[str], list[str], list[str]]:
    bits = BitComparison()
    for name, own, other in pairs:
        bits.add(name, own, other)
    result = bits.result(["b", "a", "b"])
    return result.equal, result.different, result.unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bit_makes_a_difference(dtype: torch.dtype) -> None:
    own = torch.randn(4, 3, dtype=dtype)
    other = own.clone()
    assert compared(("w", own, other)) == (["w"], [], ["a", "b"])
    other[2, 1] = torch.nextafter(other[2, 1], torch.tensor(100.0, dtype=dtype))
    assert compared(("w", own, other)) == ([], ["w"], ["a", "b"])


def test_nan_equals_itself_and_zero_does_not_equal_minus_zero() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compared(("nan", nan, nan.clone()), ("zero", zero, -zero)) == (["nan"], ["zero"], ["a", "b"])


def test_the_other_side_is_cast_first() -> None:
    other = torch.randn(5)
    assert compared(("w", other.bfloat16(), other))[0] == ["w"]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_weight_is_equal_only_where_every_slice_is(wrong: int) -> None:
    slices = [("w", torch.ones(2), torch.full((2,), 2.0 if place == wrong else 1.0)) for place in range(3)]
    assert compared(*slices)[1] == ["w"]


def test_a_part_of_a_wider_tensor_can_be_compared() -> None:
    wide = torch.randn(4, 6)
    assert compared(("w", wide[:, 2:4], wide[:, 2:4].clone()))[0] == ["w"]
