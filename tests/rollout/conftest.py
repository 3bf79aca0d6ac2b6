from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.tools import engine_at, model_of, tiny_folder, weights_of
from verl_memopt.rollout.engine import RolloutEngine


@pytest.fixture(scope="package")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="package")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "other", tied=True, seed=1)


@pytest.fixture(scope="package")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="package")
def started_vllm(tied_folder: Path) -> Iterator[RolloutEngine]:
    """One engine for most tests: a start costs seconds."""
    engine = engine_at("vllm", tied_folder, engine_kwargs=_small_blocks())
    yield engine
    engine.shutdown()


@pytest.fixture
def vllm_engine(started_vllm: RolloutEngine, tied_folder: Path) -> RolloutEngine:
    started_vllm.load_weights(weights_of(model_of(tied_folder)))
    return started_vllm


@pytest.fixture
def hf_engine(tied_folder: Path) -> Iterator[RolloutEngine]:
    engine = engine_at("hf", tied_folder, load_format="auto")
    yield engine
    engine.shutdown()


@pytest.fixture(params=["hf", "vllm"])
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    return request.getfixturevalue(f"{request.param}_engine")


def _small_blocks() -> object:
    from verl_memopt.config import schema

    return schema.EngineKwargs(vllm={"block_size": 32})
