"""Copies beside the computation, with kernels or copies made slow on purpose: whoever reads a buffer too early reads stale bytes.

Only a GPU has streams. Each run is three whole steps, and its numbers are those of the run that copies nothing.
"""

import pytest
import torch

from tests.end_to_end.covering import REF, all_off
from tests.end_to_end.knob_runs import make_model, run_row
from tests.end_to_end.test_combinations import apart
from tests.gpu import machine
from tests.gpu.test_knobs import ACROSS, UNCOMPILED, bound
from tests.memory.activations.test_activation_offload import Chain, gradients
from verl_memopt.distributed.device import current_stream, leave_process_group, mark_done
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.optimizer_offload_torch import StateLanes
from verl_memopt.memory.residency import OffloadedParams

OFFLOADS = {
    "activations": {"activation offload": "on"},
    "activations one by one, recomputed": {"activation offload": "one in flight", "checkpointing": "full"},
    "moments": {"actor optimizer_offload": "on", "bucket": "small"},
    "moments in int8": {"actor optimizer_offload": "on", "bucket": "small", "state": "int8"},
    "moments in backward": {"actor optimizer_offload": "on", "bucket": "small", "in backward": "on", "clip": "none"},
    "parameters": {"actor param_offload": "on", "ref param_offload": "on"},
    "a streamed reference": {"shared prompt": "on", "batching": "tokens"},
    "parameters by FSDP": {"actor offload_policy": "on", "ref offload_policy": "on"},
    "engine": {"engine": "level 1", "sync": "one"},
    "prefix kv": {"recomputed values": "on", "shared prompt": "on", "batching": "tokens", "activation offload": "on"},
    "all": {
        "activation offload": "one in flight", "checkpointing": "full", "recomputed values": "on", "last block": "pruned",
        "actor optimizer_offload": "on", "bucket": "small", "actor param_offload": "on", "ref param_offload": "on",
        "engine": "level 1", "sync": "one", "shared prompt": "on", "batching": "tokens",
    },
}  # fmt: skip
"""What rests on the host -> the knobs that put it there."""
MORE = {"a streamed reference": {f"{REF}.fsdp_config.param_offload": "stream"}}
"""What puts it there beside its knobs."""
PLAIN = {
    # Its buckets decide which element draws which random number: this is the same run at full speed.
    "moments in int8": OFFLOADS["moments in int8"],
    "moments in backward": {"clip": "none"},
}
"""What the run that is compared with keeps of the knobs, where they change numbers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def plain(folder):
    """Gives the outcome of a run without offload, at full speed."""
    found = {}

    def run(name):
        if name not in found:
            leave_process_group()
            found[name] = run_row(all_off() | PLAIN.get(name, {}), folder, device=machine.kind(), more=UNCOMPILED)
        return found[name]

    return run


def offloaded(name, folder, slow):
    row = all_off() | OFFLOADS[name]
    with machine.Slowed(slow) as slowed:
        return row, run_row(row, folder, device=machine.kind(), more=UNCOMPILED | MORE.get(name, {})), slowed


CASES = [
    pytest.param(name, slow, marks=[pytest.mark.rehearsed] if (name, slow) == ("all", "both") else [])
    for name in OFFLOADS
    for slow in machine.SLOW
]


@pytest.mark.parametrize(("name", "slow"), CASES)
def test_what_rests_on_the_host_changes_no_number_however_slow_copies_and_kernels_are(folder, plain, name, slow):
    row, found, slowed = offloaded(name, folder, slow)
    assert slowed.waits.total() >= 10, slowed.waits
    # Sums of a GPU come in more orders than one.
    assert not apart(found, plain(name)).beyond(bound(row, machine.size(ACROSS, 1)))


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("slow", [pytest.param("both", marks=pytest.mark.rehearsed), "copies", "computation"])
def test_activations_come_back_to_the_bit_over_several_steps(device, slow, in_flight):
    width = machine.size(1024, 16)
    model, x = Chain(8, width).to(device), torch.randn(machine.size(4096, 8), width, device=device)
    expected, offload = (
        gradients(model, x),
        ActivationOffload(model, device, 256, in_flight, chunk_bytes=machine.size(2**24, 4096)),
    )
    for _ in range(3):
        with machine.Slowed(slow) as slowed:
            found = gradients(model, x, offload)
        assert slowed.waits.total() >= 8
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert offload.take_bytes_moved() > 0


def at_rest(device):
    """Gives a chain of layers whose parameters rest on the host, its input, and its place there."""
    width = machine.size(1024, 16)
    model, x = Chain(8, width).to(device), torch.randn(machine.size(4096, 8), width, device=device)
    return model, x, OffloadedParams("chain", model.parameters(), device, units=[model, *model.layers])


@pytest.mark.parametrize("slow", [pytest.param("both", marks=pytest.mark.rehearsed), "copies", "computation"])
def test_a_model_that_comes_back_layer_by_layer_computes_to_the_bit_what_it_did(device, slow):
    model, x, home = at_rest(device)
    with torch.no_grad():
        for _ in range(3):
            expected = model(x)
            with machine.Slowed(slow) as slowed:
                home.copy_to_host()
                read = model(x)
                home.to_host()
                # Takes the memory that the parameters have left.
                torch.full((home.num_bytes,), 255, dtype=torch.uint8, device=device)
                home.to_device()
                found = model(x)
            assert slowed.waits.total() >= 8
            assert torch.equal(read, expected)
            assert torch.equal(found, expected)
            home.changed()
            for parameter in model.parameters():
                parameter.add_(0.01)


@pytest.mark.rehearsed
def test_the_first_layer_has_computed_while_the_last_is_on_its_way(device):
    """Only a GPU shows it: on a CPU a copy is done when it returns."""
    model, x, home = at_rest(device)
    home.to_host()
    machine.synchronize()
    with torch.no_grad(), machine.Slowed("copies", 50 * machine.SLOW_CYCLES):
        home.to_device()
        model.layers[0](x)
        done, last = mark_done(current_stream(device)), home._coming[len(model.layers)]
    if machine.on_gpu():
        done.synchronize()
        assert not last.query()


@pytest.mark.rehearsed
@pytest.mark.parametrize("slow", ["copies", "both"])
def test_state_that_passes_over_the_device_is_written_back_whole(device, slow):
    count, buckets = machine.size(2**22, 2**10), 7
    resting = host_buffer(4 * count * buckets, device, "optimizer").view(torch.float32)
    resting.copy_(torch.arange(count * buckets) % 1000)
    expected = resting.clone()
    ranges = [{"exp_avg": slice(at * count, (at + 1) * count)} for at in range(buckets)]
    lanes = StateLanes(device)
    for _ in range(3):
        with machine.Slowed(slow) as slowed:
            for part in lanes.passing({"exp_avg": resting}, ranges):
                part["exp_avg"].mul_(2).add_(1)
        assert slowed.waits.total() >= buckets
        expected = expected * 2 + 1
    machine.synchronize()
    assert torch.equal(resting, expected)
    assert machine.is_page_locked(resting)
