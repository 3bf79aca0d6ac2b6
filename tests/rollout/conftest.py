import pytest

from tests.rollout.tools import engine_at, model_of, place_at, rollout_settings, tiny_folder, weights_of
from verl_memopt.rollout.vllm_engine import VllmEngine


@pytest.fixture(scope="package")
def tied_folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="package")
def other_folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "other", tied=True, seed=1)


@pytest.fixture(scope="package")
def untied_folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "untied", tied=False)


class SharedVllm:
    """One engine for most tests, because a start takes seconds. Started again after a test has shut it down."""

    def __init__(self, folder):
        self._folder = folder
        self._engine = None

    def get(self):
        if self._engine is None:
            self._engine = VllmEngine(rollout_settings("vllm"), place_at(self._folder))
        return self._engine

    def close(self):
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None


@pytest.fixture(scope="package")
def shared_vllm(tied_folder):
    shared = SharedVllm(tied_folder)
    yield shared
    shared.close()


@pytest.fixture
def no_shared_engine(shared_vllm):
    """End the shared engine: two engines of a process share their groups, and an engine does not outlive the default group."""
    shared_vllm.close()


@pytest.fixture
def one_rank(no_shared_engine, one_rank):
    return one_rank


@pytest.fixture
def vllm_engine(shared_vllm, tied_folder):
    engine = shared_vllm.get()
    engine.load_weights(weights_of(model_of(tied_folder)))
    return engine


@pytest.fixture
def hf_engine(tied_folder):
    engine = engine_at("hf", tied_folder, load_format="auto")
    yield engine
    engine.shutdown()


@pytest.fixture(params=["hf", "vllm"])
def engine(request):
    return request.getfixturevalue(f"{request.param}_engine")
