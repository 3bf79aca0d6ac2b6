import pytest
import torch

from recipe.rloo.memory_study.meters import Phase, TrackerMeter, merged, requested_bytes
from recipe.rloo.memory_study.records import OutOfMemory
from verl_memopt.observe.byte_tracker import ByteTracker


def test_a_phase_has_entry_peak_and_exit():
    with ByteTracker() as tracker:
        meter = TrackerMeter(tracker)
        first = torch.zeros(100)
        with meter.phase("forward", 3):
            second = torch.zeros(200)
            del second
            third = torch.zeros(50)
    (phase,) = meter.phases
    assert (phase.update, phase.name, phase.enter, phase.peak, phase.exit) == (3, "forward", 400, 1200, 600)
    assert phase.reserved_peak is None
    assert first.numel() + third.numel() == 150


def test_the_weights_of_a_model_count_once_the_meter_knows_them():
    model = torch.nn.Linear(10, 10, bias=False)
    with ByteTracker() as tracker:
        meter = TrackerMeter(tracker)
        meter.count_model(model)
        with meter.phase("rollout"):
            pass
    assert meter.phases[0].enter == 400


def test_running_out_of_memory_names_the_phase_and_the_bytes():
    def backward(meter):
        kept = torch.zeros(100)
        with meter.phase("backward"):
            return kept, torch.zeros(200)

    with ByteTracker(limit_bytes=1000) as tracker, pytest.raises(OutOfMemory) as error:
        backward(TrackerMeter(tracker))
    assert (error.value.phase, error.value.requested_bytes, error.value.held_bytes) == ("backward", 800, 400)


def test_phases_of_one_update_and_name_become_one():
    first = Phase(0, "forward", 1, 10, 2, 20, 0.5, ((0.1, 5, 20),))
    other = Phase(0, "backward", 2, 11, 3, 21, 0.5)
    second = Phase(0, "forward", 3, 30, 4, 15, 0.25, ((0.2, 6, 15),))
    together, left = merged([first, other, second])
    assert together == Phase(0, "forward", 1, 30, 4, 20, 0.75, ((0.1, 5, 20), (0.7, 6, 15)))
    assert left is other


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 14.07 GiB. GPU 0 has", int(14.07 * 2**30)),
        ("CUDA out of memory. Tried to allocate 512.00 MiB. GPU", 512 * 2**20),
        ("CUDA out of memory. Tried to allocate 20 bytes", 20),
        ("CUDA error: out of memory", 0),
    ],
)
def test_the_size_is_read_from_the_message_of_the_gpu(message, size):
    assert requested_bytes(message) == size
