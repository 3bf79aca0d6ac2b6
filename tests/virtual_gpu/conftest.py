"""The process in which there is a virtual GPU: torch must not be imported in it before the guard is loaded."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.end_to_end.knob_runs import make_model
from tests.virtual_gpu.guard import load_guard


@pytest.fixture(scope="session")
def on_virtual_gpu():
    """Call a function of a module of this folder where autograd takes fake ``cuda`` tensors; errors come back."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=load_guard) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result(timeout=240)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model that all rows of knobs train."""
    return make_model(tmp_path_factory.mktemp("virtual_gpu"))
