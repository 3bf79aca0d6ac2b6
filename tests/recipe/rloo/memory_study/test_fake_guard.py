import sys

import pytest

from recipe.rloo.memory_study.fake_guard import NoCompilerError, call_in_fake_process, compiled_guard

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
