"""Labels of plain gradients and optimizer state."""

import torch

from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.observe.device_ledger import gradient_kinds, optimizer_scope


def test_gradients_of_an_unsharded_module_are_labelled_as_they_accumulate():
    layer = torch.nn.Linear(10, 10, bias=False)
    inputs = torch.ones(1, 10)
    with ByteTracker() as tracker, gradient_kinds(layer.parameters()):
        tracker.mark("params", layer.parameters())
        tracker.mark("inputs", [inputs])
        layer(inputs).sum().backward()
        assert tracker.kinds() == {"params": 400, "inputs": 40, "grads": 400}


def test_the_hooks_of_gradient_kinds_are_removed():
    layer = torch.nn.Linear(10, 10, bias=False)
    with ByteTracker() as tracker:
        with gradient_kinds(layer.parameters()):
            pass
        layer(torch.ones(1, 10)).sum().backward()
        assert "grads" not in tracker.kinds()


def test_optimizer_state_is_told_apart_from_the_scratch_of_its_step():
    weight = torch.zeros(1000, requires_grad=True)
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)
    with ByteTracker() as tracker:
        tracker.mark("params", [weight])
        tracker.mark("grads", [weight.grad])
        with optimizer_scope(optimizer):
            optimizer.step()
        assert tracker.kinds() == {"params": 4000, "grads": 4000, "optimizer": 4000}
        assert tracker.peaks["device"].kinds["optimizer scratch"] >= 4000
