"""vLLM on the GPU: sleep and wake, weight sync, and one engine over two devices.

On a CPU its CPU build runs the same, and never sleeps.
"""

import dataclasses
import os

import pytest

from tests.gpu import machine
from tests.gpu.test_life import SHAPE, engine_on, joined_by
from tests.ranks import run_ranks
from tests.rollout.tools import (
    largest_difference,
    model_of,
    naive_log_probs,
    place_at,
    prompts,
    rollout_settings,
    sampling,
    weights_of,
)
from verl_memopt.model.tiny import make_tiny_model
from verl_memopt.rollout.engine import build_engine

ASLEEP = 0.1
"""Most of the engine's memory that may stay while it sleeps, as a share: contexts of libraries, and captured graphs."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape."""
    parent = tmp_path_factory.mktemp("vllm")
    return [make_tiny_model(parent / str(seed), SHAPE, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(folders):
    if not machine.has("vllm"):
        pytest.skip("sleep, wake and weight sync with vLLM: it is not installed")
    engine = engine_on(machine.kind(), folders[0], "vllm")
    yield engine
    engine.shutdown()


def log_probs(engine, folder):
    """Gives the engine's log-probs, and those of one forward of transformers on a CPU."""
    found = engine.generate(prompts(4), [5] * 4, sampling())
    rows = zip(prompts(4), found.response_ids, strict=True)
    return found.log_probs, [naive_log_probs(model_of(folder), prompt, response, 1.0) for prompt, response in rows]


def test_synced_weights_are_the_ones_that_generate(engine, folders):
    for folder in (folders[1], folders[0]):
        engine.load_weights(weights_of(model_of(folder)))
        assert largest_difference(*log_probs(engine, folder)) <= machine.size(1e-3, 1e-5)


def test_asleep_the_engine_gives_its_memory_back_and_answers_the_same_after_it(engine, folders):
    if not machine.on_gpu():
        pytest.skip("a sleeping engine: vLLM's CPU build does not sleep")
    engine.load_weights(weights_of(model_of(folders[0])))
    before, awake = engine.generate(prompts(4), [5] * 4, sampling()), machine.used_bytes()
    for _ in range(3):
        engine.sleep()
        assert machine.used_bytes() < awake
        engine.wake_up("weights")
        engine.load_weights(weights_of(model_of(folders[0])))
        engine.wake_up("kv_cache")
        assert engine.generate(prompts(4), [5] * 4, sampling()) == before
        assert machine.used_bytes() <= awake * (1 + ASLEEP)


def test_one_engine_over_two_devices_answers_as_one_over_one(folders, tmp_path):
    if not machine.has("vllm"):
        pytest.skip("tensor parallel engines: vLLM is not installed")
    if machine.num_devices() < 2:
        pytest.skip("tensor parallel engines: there is one device")
    answers = run_ranks(_answers, 2, machine.kind(), str(folders[0]), tmp_path / "store", timeout=280)
    assert answers[0] == answers[1]
    naive = [
        naive_log_probs(model_of(folders[0]), prompt, row, 1.0) for prompt, row in zip(prompts(4), answers[0][0], strict=True)
    ]
    assert largest_difference(answers[0][1], naive) <= machine.size(1e-3, 1e-5)


def _answers(rank, kind, folder, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    where = joined_by(rank, 2, kind, store)
    place = dataclasses.replace(place_at(folder, rank=rank, world_size=2, tensor_parallel_size=2), device=where)
    engine = build_engine(rollout_settings("vllm", load_format="auto"), place)
    found = engine.generate(prompts(4), [5] * 4, sampling())
    engine.shutdown()
    return found.response_ids, found.log_probs
