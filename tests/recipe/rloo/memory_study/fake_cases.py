"""What the tests run in the process with the fake GPU."""

import torch

from recipe.rloo.memory_study.cells import MIB
from recipe.rloo.memory_study.fake_device import NoRoom, fake_device


def linear_backward():
    """Return (live bytes) of a linear layer on the fake device: after its weights, its forward, and its backward."""
    with fake_device() as allocator:
        layer = torch.nn.Linear(1024, 512, bias=False, device="cuda")
        held = [allocator.live]
        output = layer(torch.zeros(256, 1024, device="cuda"))
        held.append(allocator.live)
        output.sum().backward()
        del output
        held.append(allocator.live)
        assert layer.weight.grad.device.type == "cuda"
    return held


def autocast_dtypes():
    """Return the dtypes of a product under bf16 autocast and of its gradient."""
    from recipe.rloo.memory_study.updates import autocast

    with fake_device():
        weight = torch.zeros(8, 8, device="cuda", requires_grad=True)
        with autocast("cuda"):
            product = weight @ weight
        product.float().sum().backward()
        return str(product.dtype), str(weight.grad.dtype), torch.is_autocast_enabled("cuda")


def views_and_host_tensors():
    """Return the live bytes beside a view, a tensor on the host, and a tensor that was dropped."""
    with fake_device() as allocator:
        whole = torch.zeros(1024, 1024, device="cuda")
        view = whole[:10].t()
        host = torch.zeros(1024, 1024)
        torch.zeros(1024, 1024, device="cuda")
        assert view.shape[0] == 1024
        assert host.device.type == "cpu"
        return allocator.live


def refused():
    """Return what a tensor that does not fit is told."""
    kept = []
    try:
        with fake_device(limit_bytes=99 * MIB):
            kept.append(torch.zeros(20, 1024, 1024, device="cuda"))
            kept.append(torch.zeros(10, 1024, 1024, dtype=torch.bfloat16, device="cuda"))
    except NoRoom as error:
        return error.requested_bytes, error.held_bytes, error.shape
    return None


def legacy_runs(cases, folder):
    """Return the phases of the published update for each (k, prompt, micro-batch), at the published shapes."""
    from recipe.rloo.memory_study.cells import Arm
    from recipe.rloo.memory_study.measure import run_arm
    from recipe.rloo.memory_study.shapes import PUBLISHED
    from recipe.rloo.memory_study.updates import Options

    return {
        (k, prompt, rows): run_arm(
            Arm("legacy", "token", prompt, "legacy", k, rows), PUBLISHED, "fake", None, 0, folder, Options(rows)
        )[0]
        for k, prompt, rows in cases
    }


def without_room(arm, limit_bytes, folder):
    """Return what is told of an arm that does not fit at the small shapes."""
    from recipe.rloo.memory_study.cells import OutOfMemory
    from recipe.rloo.memory_study.measure import run_arm
    from recipe.rloo.memory_study.shapes import SMALL
    from recipe.rloo.memory_study.updates import Options

    try:
        run_arm(arm, SMALL, "fake", limit_bytes, 0, folder, Options(arm.micro_batch))
    except OutOfMemory as error:
        return error.phase, error.shape, error.requested_bytes, error.held_bytes, error.peak_bytes
    return None


def quick(cases, cell, shapes, limit_bytes, folder):
    """Return all that one process finds: the cases above by name, the published runs, an arm's records, and its refusal."""
    from recipe.rloo.memory_study.measure import measure

    of_device = {case.__name__: case() for case in (linear_backward, autocast_dtypes, views_and_host_tensors, refused)}
    return of_device, legacy_runs(cases, folder), measure(cell, shapes), without_room(cell.arm, limit_bytes, folder)
