"""What several files of this folder start from, made once a session."""

import functools

import pytest

from tests.observe.simulated_device import GIB, SimulatedDevice


@pytest.fixture(scope="session")
def deep_folder(tmp_path_factory):
    """The deep narrow model whose activations are measured."""
    from tests.memory.activation_cases import model_folder

    return model_folder(tmp_path_factory.mktemp("activations"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """The model whose parameters outweigh its activations."""
    from tests.memory.sharded import wide_model

    return wide_model(tmp_path_factory.mktemp("parameters"))


@pytest.fixture(scope="session")
def peak(wide):
    """Return a function that measures the device peak of the wide model's second step, once per choice."""
    from tests.memory.sharded import device_peak

    @functools.cache
    def measured(world_size, fsdp_size=-1, **fsdp):
        return device_peak(wide, fsdp, world_size, fsdp_size)

    return measured


@pytest.fixture
def device(monkeypatch):
    device = SimulatedDevice(total=32 * GIB)
    device.installed(monkeypatch)
    return device
