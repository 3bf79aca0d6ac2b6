import torch

from verl_memopt.memory.recompute_elementwise_torch import select_rows
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker

ROWS = torch.tensor([1, 2, 4])


def test_the_gradient_of_the_rows_is_added_to_that_of_the_whole():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    whole, some = select_rows(x, ROWS)
    (whole.square().sum() + (some * 7).sum()).backward()
    expected = 2 * x.detach()
    expected[ROWS] += 7
    assert torch.equal(x.grad, expected)
    assert torch.equal(some, x[ROWS])


def test_all_rows_are_the_tensor_itself():
    x = torch.randn(5, 3)
    assert all(one is x for one in select_rows(x, None))


def test_no_second_gradient_of_the_whole_is_made():
    x = torch.randn(1000, 8).requires_grad_()
    with ByteTracker() as tracker:
        whole, some = select_rows(x * 1, ROWS)
        held = tracker.total()
        torch.autograd.grad((whole, some), x, (torch.ones(1000, 8), torch.ones(3, 8)))
        # The two gradients that were given, and the product's own.
        assert tracker.peaks[DEVICE].bytes <= held + 2 * 1000 * 8 * 4 + 3 * 8 * 4
