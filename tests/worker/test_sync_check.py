import logging

import pytest
import torch

from tests.rollout.tools import engine_at, model_of, weights_of
from verl_memopt.errors import RolloutError
from verl_memopt.rollout.engine import Generation
from verl_memopt.rollout.engine_weights import LONGEST_PROBE, SyncCheck

BLOCK = 16


class CachingEngine:
    """Answers with token 1, and keeps whole blocks of each prompt in a cache. With ``resets`` a load clears the cache."""

    def __init__(self, folder, resets):
        self.weights = engine_at("hf", folder)
        self.resets = resets
        self.cache = set()

    def load_weights(self, weights):
        self.weights.load_weights(weights)
        if self.resets:
            self.cache.clear()

    def compare_weights(self, weights):
        return self.weights.compare_weights(weights)

    def generate(self, prompt_ids, seeds, sampling):
        cached = 0
        for prompt in prompt_ids:
            # The last token is always computed, to predict the next.
            blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
            cached += BLOCK * sum(block in self.cache for block in blocks)
            self.cache.update(blocks)
        return Generation([[1]] * len(prompt_ids), None, ["length"] * len(prompt_ids), cached)


@pytest.fixture
def model(tiny_folder):
    return model_of(tiny_folder)


def synced(check, engine, model):
    engine.load_weights(weights_of(model))
    check.check_weights(engine, weights_of(model))
    check.check_cache(engine)


def test_a_cache_that_is_reset_with_every_sync_passes_and_may_serve_between_two(tiny_folder, model):
    check, engine = SyncCheck(100), CachingEngine(tiny_folder, resets=True)
    for _ in range(3):
        synced(check, engine, model)
        assert engine.cache, "the probe fills it again, so the next sync has something to reset"
    check, engine = SyncCheck(100), CachingEngine(tiny_folder, resets=True)
    synced(check, engine, model)
    check.check_cache(engine)


def test_a_cache_that_is_not_reset_is_caught_at_the_second_sync(tiny_folder, model):
    check, engine = SyncCheck(100), CachingEngine(tiny_folder, resets=False)
    synced(check, engine, model)
    with pytest.raises(RolloutError, match="took 96 tokens of a prompt from its prefix cache, which older weights have computed"):
        synced(check, engine, model)


def test_a_weight_that_differs_is_named(tiny_folder, model):
    check, engine = SyncCheck(100), engine_at("hf", tiny_folder)
    engine.load_weights(weights_of(model))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 2] += 1e-3
    with pytest.raises(RolloutError, match=r"1 of the engine's weights differ .* such as model\.layers\.0\.mlp\.up_proj\.weight"):
        check.check_weights(engine, weights_of(model))


@pytest.mark.parametrize(("longest", "probe"), [(20, 19), (LONGEST_PROBE + 500, LONGEST_PROBE)])
def test_the_probe_leaves_room_for_its_answer_and_is_not_longer_than_needed(longest, probe):
    assert len(SyncCheck(longest).probe) == probe


def test_a_cache_that_keeps_nothing_is_told_once(tiny_folder, model, caplog):
    caplog.set_level(logging.INFO)
    check, engine = SyncCheck(BLOCK), CachingEngine(tiny_folder, resets=True)
    synced(check, engine, model)
    synced(check, engine, model)
    (told,) = (message for message in caplog.messages if "prefix cache" in message)
    assert told.endswith("has 15 tokens, and 0 of them are kept between two calls, so nothing can go stale")
