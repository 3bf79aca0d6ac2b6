import pytest

from recipe.rloo.memory_study.allocator import MIB
from recipe.rloo.memory_study.fake_guard import call_in_fake_process


@pytest.fixture(scope="module")
def cases():
    return call_in_fake_process("tests.recipe.rloo.memory_study.fake_cases:all_cases")


def test_autograd_runs_on_fake_tensors_and_each_storage_is_counted_until_it_dies(cases):
    weights, forward, backward = cases["linear_backward"]
    assert weights == 2 * MIB
    assert forward == 2 * MIB + MIB + MIB // 2  # the input, which the layer keeps, and the output
    assert backward == 2 * MIB + 2 * MIB  # weight and gradient


def test_autocast_computes_in_half_precision_and_ends(cases):
    assert cases["autocast_dtypes"] == ("torch.bfloat16", "torch.float32", False)


def test_views_host_tensors_and_dropped_tensors_do_not_count(cases):
    assert cases["views_and_host_tensors"] == 4 * MIB


def test_a_tensor_that_does_not_fit_is_named(cases):
    assert cases["refused"] == (20 * MIB, 80 * MIB, "[10, 1024, 1024] bfloat16")
