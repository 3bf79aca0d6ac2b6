"""Knobs over conversations, which are packed as a forest, against the same knobs over their turns, which share nothing."""

import dataclasses

import pytest
import torch

from tests.memory import activation_cases as act
from tests.memory.activation_cases import EVERY_2, FULL, LORA, SELECTIVE, TILED
from tests.model.test_captured_block import Recorder, captured
from tests.tensors import whole_of
from tests.worker.test_conversations import HEAT, batch_of, by_turn, conversations, counts_of
from verl_memopt.worker.trained_model import micro_batch

OWN = {"recompute_elementwise": True}
KNOBS = {
    "none": {"prune_last_block": False},
    "pruned": {},
    "recomputed values": OWN,
    "checkpoints": {**OWN, **FULL},
    "selective checkpoints": {**OWN, **SELECTIVE},
    "every second block": {**OWN, **EVERY_2},
    "offloaded": {**OWN, **FULL, "offload": (1, 2)},
    "offloaded activations": {"offload": (1, 2)},
    "LoRA": {**OWN, **FULL, **LORA},
    "tiled MLP": {**OWN, **FULL, **TILED},
    "tiles": {**OWN, **FULL, "block_tile_tokens": 7},
    "tiles and LoRA": {**OWN, **FULL, **LORA, "block_tile_tokens": 16},
    "eager": {"attn_implementation": "eager"},
}


@pytest.fixture(scope="module")
def talks():
    rows, group = conversations(groups=4, samples=4)
    return rows, batch_of(rows, group)


def gradients(policy, micro, batch):
    policy.accumulate([micro], counts_of(batch), HEAT)
    found = [whole_of(weight.grad).clone() for weight in policy.model.parameters() if weight.grad is not None]
    policy.trained.optimizer.zero_grad()
    return found


def assert_same_update(policy, rows, batch):
    # Old log-probs near those of the policy, so that no rounding moves a ratio over a clip.
    now = policy.compute_log_probs(batch, [range(len(rows))], HEAT, False).log_probs
    batch = dataclasses.replace(batch, old_log_probs=now + 0.05 * (batch.old_log_probs + 5.7))
    expected = gradients(policy, by_turn(rows, batch), batch)
    found = gradients(policy, micro_batch(batch, range(len(rows))), batch)
    rounding = 2**-22 * torch.stack([gradient.norm() for gradient in expected]).norm()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm() + rounding


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_a_knob_gives_conversations_the_gradients_of_their_turns(untied_folder, one_rank, talks, knobs):
    assert_same_update(act.build(untied_folder, one_rank, **knobs), *talks)


def test_blocks_as_graphs_give_conversations_the_gradients_of_their_turns(tiny_folder, one_rank, talks):
    recorder = Recorder()
    policy = captured(tiny_folder, one_rank, {}, recorder)
    for _ in range(3):
        assert_same_update(policy, *talks)
    assert recorder.replays
