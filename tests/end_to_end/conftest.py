import re

import psutil
import pytest

from tests.end_to_end.runs import survivors, train_here
from verl_memopt.observe.own_files import MARK

EXIT_CODES = {"ConfigError": 2, "DataError": 2, "RewardError": 1}
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d driver (INFO|WARNING) ")


@pytest.fixture
def here(toy, tmp_path):
    """Train on the toy task in this process and return the exit code; the run folder is ``tmp_path / "run"``."""

    def run(*overrides):
        return train_here(toy, tmp_path / "run", *overrides)

    return run


@pytest.fixture
def refused(here, tmp_path, capsys):
    """Train in this process with settings that must not train, and return the one message with which that ends.

    leaves: what may be in the run folder then, beside the mark that it is ours; nothing, where the mistake shows before a worker
    starts.
    """

    def run(*overrides, kind="ConfigError", leaves=()):
        others = set(psutil.Process().children(recursive=True))
        capsys.readouterr()
        # Ray would start first, and end with each mistake.
        with_ray = any(word in override for override in overrides for word in ("ray_", "worker_group", "n_gpus_per_node"))
        code = here(*([] if with_ray else ["trainer.worker_group=local"]), *overrides)
        shown = capsys.readouterr()
        assert code == EXIT_CODES[kind], shown.err
        said, found, message = shown.err.partition(f"{kind}: ")
        assert found, shown.err
        assert all(LOG_LINE.match(line) for line in said.splitlines()), "notes may precede it, nothing else"
        assert "/verl_memopt/" not in message, "a traceback of ours is of no use to the user"
        assert sorted(path.name for path in (tmp_path / "run").glob("*")) == sorted([*leaves, MARK] if leaves else [])
        assert not survivors(set(psutil.Process().children(recursive=True)) - others)
        return message

    return run
