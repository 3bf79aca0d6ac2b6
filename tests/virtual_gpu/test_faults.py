"""Faults that only a GPU shows are found where there is none."""

import pytest

from tests.virtual_gpu import faults
from tests.virtual_gpu.clocks import RaceError


def test_device_values_written_into_a_host_tensor_are_an_error(on_virtual_gpu, folder):
    with pytest.raises(RuntimeError, match=r"Mismatching aten\.index_put_\.default device"):
        on_virtual_gpu(faults.host_and_device_mixed, folder)


def test_a_value_read_between_micro_batches_is_an_error(on_virtual_gpu, folder):
    with pytest.raises(AssertionError, match=r"between micro-batches: aten\._local_scalar_dense"):
        on_virtual_gpu(faults.read_back_between_micro_batches, folder)


def test_a_copy_that_nobody_waits_for_is_an_error(on_virtual_gpu, folder):
    with pytest.raises(RaceError, match="has not waited for it"):
        on_virtual_gpu(faults.copy_not_waited_for, folder)


def test_a_block_that_comes_into_memory_still_in_use_is_an_error(on_virtual_gpu, folder):
    with pytest.raises(RaceError, match="copy_"):
        on_virtual_gpu(faults.block_overwritten_in_use, folder)


def test_parameters_that_stay_on_the_device_are_told(on_virtual_gpu, folder):
    found = on_virtual_gpu(faults.parameters_that_never_leave, folder)
    assert any(line.startswith("policy after released") for line in found), found
