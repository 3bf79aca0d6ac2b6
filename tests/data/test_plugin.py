import asyncio
import functools
import os
import pickle
import re
import signal
import sys

import pytest
import torch

from verl_memopt.data.plugin import load_from_file, users_code
from verl_memopt.errors import DataError, RewardError

KEY = "data.custom_cls.path"


@pytest.fixture
def plugin(tmp_path):

    def load(text, name="wanted", error=DataError):
        path = tmp_path / "plugin.py"
        path.write_text(text)
        return load_from_file(str(path), name, key=KEY, error=error)

    return load


def test_a_file_is_run_once_however_many_names_are_taken_from_it(plugin, tmp_path):
    first = plugin("made = []\nclass wanted:\n    pass\n")
    assert pickle.loads(pickle.dumps(first)) is first
    path = str(tmp_path / "plugin.py")
    assert load_from_file(path, "wanted", key=KEY, error=DataError) is first
    load_from_file(path, "made", key=KEY, error=DataError).append(1)
    assert load_from_file(path, "made", key=KEY, error=DataError) == [1]


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"wanted = {name!r}")
    found = [load_from_file(str(tmp_path / name / "same.py"), "wanted", key=KEY, error=DataError) for name in ("one", "two")]
    assert found == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def other():\n    pass\n_hidden = 1\n", "wanted", "the file has no 'wanted'. It defines other. Name one of these in "),
        ("", None, "the file has no None. It defines nothing"),
        ("def wanted(:\n", "wanted", "the file does not run. Correct it:\n"),
        ("raise SystemExit(3)\n", "wanted", "the file does not run. Correct it:\n"),
    ],
)
def test_a_file_that_cannot_give_it_is_refused_under_its_key(plugin, text, name, said):
    with pytest.raises(RewardError, match=re.escape(said)) as caught:
        plugin(text, name, RewardError)
    assert str(caught.value).startswith(f"{KEY}=")


def test_a_file_that_did_not_run_is_run_anew_once_mended(plugin):
    with pytest.raises(DataError, match=r"plugin\.py(.|\n)*line 3"):
        plugin("\n\n1 / 0\n")
    assert plugin("wanted = 1\n") == 1


@pytest.mark.parametrize(("name", "said"), [("missing.py", "there is no such file"), ("rows.txt", "this is not a Python file")])
def test_a_path_that_is_no_python_file_is_refused(tmp_path, name, said):
    (tmp_path / "rows.txt").write_text("wanted = 1")
    with pytest.raises(DataError, match=said):
        load_from_file(str(tmp_path / name), "wanted", key=KEY, error=DataError)


# What a user's code may do besides raising an error.


def ends(how):
    raise how


ENDS = {
    "SystemExit: 0": lambda: sys.exit(0),
    "GeneratorExit:": lambda: ends(GeneratorExit()),
    "Mine: 3": lambda: ends(type("Mine", (SystemExit,), {})(3)),
    "CancelledError:": lambda: ends(asyncio.CancelledError()),
    "os._exit(0)": lambda: os._exit(0),
}


@pytest.mark.parametrize("said", ENDS)
def test_code_that_would_end_the_process_is_one_error_with_its_place(said):
    place = rf"in {re.escape(__file__)}:\d+\. Correct it\.$"
    with pytest.raises(DataError, match=rf"^mine raised {re.escape(said)}.* {place}"), users_code("mine", DataError):
        ENDS[said]()


def interrupted(number, frame):
    raise KeyboardInterrupt


def exits_when_interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(3)


@pytest.mark.parametrize("handler", [signal.default_int_handler, interrupted, functools.partial(interrupted)])
def test_a_keyboard_interrupt_is_the_codes_own_unless_it_comes_from_a_signal(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(DataError, match="mine raised KeyboardInterrupt"), users_code("mine", DataError):
            raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), users_code("mine", DataError):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit), users_code("mine", DataError):
            exits_when_interrupted()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_the_code_forks_does_not_come_back_from_it(tmp_path):
    for leave in (lambda: None, lambda: ends(ValueError()), lambda: ends(SystemExit(3)), lambda: os._exit(4)):
        with users_code("mine", DataError):
            if (child := os.fork()) == 0:
                leave()
        if os.getpid() == HERE:
            (tmp_path / str(child)).touch()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 4)
        else:
            (tmp_path / "second").touch()
            os._exit(9)
    assert len(list(tmp_path.iterdir())) == 4


HERE = os.getpid()


def test_what_the_whole_process_shares_is_put_back_or_named_once(tmp_path, caplog):
    here, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        with users_code(f"mine({_})", DataError):
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(1)
            torch.rand(3)
            os.chdir(tmp_path)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.environ["MINE"] = str(_)
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float32
        assert torch.equal(torch.get_rng_state(), before)
        assert (os.getcwd(), signal.getsignal(signal.SIGTERM)) == (here, handler)
    assert os.environ.pop("MINE") == "1"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 6
    assert all(text.startswith("mine changed ") for text in told)


def test_draws_without_a_seed_go_on_and_change_nothing(caplog):
    drawn = []
    for _ in range(2):
        with users_code("draws", DataError):
            drawn.append(torch.rand(1))
    assert drawn[0] != drawn[1]
    assert not caplog.records


@pytest.mark.parametrize("text", ["import os\nos._exit(0)", "raise GeneratorExit"])
def test_a_file_that_ends_the_process_is_named(plugin, text):
    with pytest.raises(DataError, match=rf"^{KEY}=.*plugin.py: the file does not run"):
        plugin(text)
