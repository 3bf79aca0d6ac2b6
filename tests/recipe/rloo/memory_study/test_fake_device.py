import sys

import pytest

from recipe.rloo.memory_study.allocator import MIB
from recipe.rloo.memory_study.fake_guard import NoCompilerError, call_in_fake_process, compiled_guard


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


CASES = "tests.recipe.rloo.memory_study.fake_cases"


def test_the_function_runs_in_another_process_which_has_the_guard():
    assert call_in_fake_process("builtins:abs", -3) == 3
    assert call_in_fake_process("os:getpid") != __import__("os").getpid()


def test_an_error_comes_back_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)failed on the fake device.*ValueError: no values here"):
        call_in_fake_process(f"{CASES}:raises", "no values here")


def test_the_guard_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = compiled_guard()
    written = library.stat().st_mtime_ns
    assert library.is_relative_to(tmp_path)
    assert compiled_guard() == library
    assert library.stat().st_mtime_ns == written
    assert list(library.parent.iterdir()) == [library]


def test_a_machine_without_a_compiler_is_told_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match=r"install g\+\+, or name yours in CXX"):
        compiled_guard()


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(NoCompilerError, match="does not compile"):
        compiled_guard()
