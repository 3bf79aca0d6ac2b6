"""What a test process of a mutant needs beside the tests' own conftest: fast starts, no chance, the shortest tests first.

Loaded by mutmut's fork server (`-p tests.mutants.plugin` in pyproject.toml), from which the process of each mutant is forked.
"""

import gc
import json
from pathlib import Path

import pytest

# Imported here, once: torch and transformers import them when they are first used, which costs each mutant two seconds.
import torch._dynamo
import torch._subclasses.fake_tensor
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from hypothesis import Phase, settings

# A mutant must meet the same examples each time, and a failing example needs no simpler one.
settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))


def pytest_sessionstart():
    settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    stats = Path("mutmut-stats.json")
    if stats.exists():
        seconds = json.loads(stats.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))


def pytest_sessionfinish():
    # What was imported so far is never garbage: the collections of the mutants' processes need not look at it.
    gc.freeze()
