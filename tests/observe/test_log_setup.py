import logging

import pytest

from verl_memopt.observe.log_setup import setup_logging


@pytest.fixture(autouse=True)
def restored():
    root, own = logging.getLogger(), logging.getLogger("verl_memopt")
    before = (list(root.handlers), root.level, own.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    logging.captureWarnings(False)


def test_the_driver_and_rank_zero_say_what_others_keep_to_themselves(capsys):
    for rank in (None, 0, 1):
        setup_logging(rank)
        logging.getLogger("verl_memopt.memory").info("said")
        logging.getLogger("verl_memopt.memory").warning("warned")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "driver INFO verl_memopt.memory: said",
        "driver WARNING verl_memopt.memory: warned",
        "rank 0 INFO verl_memopt.memory: said",
        "rank 0 WARNING verl_memopt.memory: warned",
        "rank 1 WARNING verl_memopt.memory: warned",
    ]


def test_other_packages_are_heard_from_warnings_on(capsys):
    setup_logging()
    logging.getLogger("httpx").info("noise")
    logging.getLogger("some_library").info("noise")
    logging.getLogger("httpx").error("matters")
    assert [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == ["matters"]
