import pytest
import torch

from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.worker import roles
from verl_memopt.worker.roles import move_towards


def tensors(dtype=torch.float32, seed=0, shape=(7, 5)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("alpha", [0.9, 0.5, 1.0, 0.01])
def test_an_fp32_target_is_the_formula_to_the_last_bit(alpha):
    target, source = tensors(), tensors(seed=1)
    expected = target * (1 - alpha) + source * alpha
    trl = target.clone().mul_(1.0 - alpha).add_(source, alpha=alpha)
    move_towards([(target, source)], alpha, on_host=False)
    assert torch.equal(target, trl)
    torch.testing.assert_close(target, expected, rtol=0, atol=3e-7)


def test_a_bfloat16_target_is_rounded_once_from_the_sum_in_fp32():
    target, source = tensors(torch.bfloat16), tensors(seed=1)
    expected = (target.float().mul_(1 - 0.9).add_(source, alpha=0.9)).to(torch.bfloat16)
    twice = target.clone().mul_(1 - 0.9).add_(source.to(torch.bfloat16), alpha=0.9)
    move_towards([(target, source)], 0.9, on_host=False)
    assert torch.equal(target, expected)
    assert not torch.equal(target, twice)


@pytest.mark.parametrize("piece", [1, 4, 35, 100])
def test_pieces_change_no_bit(monkeypatch, piece):
    target, source = tensors(torch.bfloat16), tensors(seed=1)
    whole = target.clone()
    move_towards([(whole, source)], 0.9, on_host=False)
    monkeypatch.setattr(roles, "PIECE", piece)
    move_towards([(target, source)], 0.9, on_host=False)
    assert torch.equal(target, whole)


def test_the_source_keeps_its_values_and_a_target_its_storage():
    target, source = tensors(), tensors(seed=1)
    before, place = source.clone(), target.data_ptr()
    move_towards([(target, source)], 0.9, on_host=False)
    assert torch.equal(source, before)
    assert target.data_ptr() == place


@pytest.mark.parametrize(("dtype", "pieces"), [(torch.float32, 0), (torch.bfloat16, 2)])
def test_no_more_than_two_pieces_are_held_beside_the_models(monkeypatch, dtype, pieces):
    monkeypatch.setattr(roles, "PIECE", 100)
    pairs = [(tensors(dtype, seed, (300, 10)), tensors(dtype, seed + 9, (300, 10))) for seed in range(3)]
    models = sum(tensor.nbytes for pair in pairs for tensor in pair)
    with ByteTracker() as tracker:
        tracker.mark("params", [tensor for pair in pairs for tensor in pair])
        tracker.enter("sync")
        move_towards(pairs, 0.9, on_host=False)
    assert tracker.peaks[DEVICE].bytes <= models + pieces * 100 * 4
