"""Each attention path that a GPU takes, forward and backward, in the passes that use it."""

import pytest

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.life import live, misplaced

FLASH = "aten._flash_attention_{}.default"
EFFICIENT = "aten._efficient_attention_{}.default"
PATHS = {
    ("auto", "bf16"): (FLASH.format("forward"), FLASH.format("backward")),
    ("auto", "fp32"): (EFFICIENT.format("forward"), EFFICIENT.format("backward")),
    ("sdpa", "bf16"): (EFFICIENT.format("forward"), EFFICIENT.format("backward")),
    ("sdpa", "fp32"): (EFFICIENT.format("forward"), EFFICIENT.format("backward")),
    ("eager", "bf16"): ("aten._softmax.default", "aten._softmax_backward_data.default"),
    ("eager", "fp32"): ("aten._softmax.default", "aten._softmax_backward_data.default"),
}
"""(model.attn_implementation, dtype of compute) -> operations that only this path runs."""
IN_EVERY_RUN = [("auto", "bf16", "on"), ("sdpa", "bf16", "on"), ("eager", "fp32", "off")]
"""One path for each kind of kernel; the others are run by `make proofs`."""


@pytest.mark.parametrize(
    ("attention", "dtype", "shared"),
    [
        pytest.param(*path, shared, marks=() if (*path, shared) in IN_EVERY_RUN else pytest.mark.slow)
        for path in PATHS
        for shared in ("off", "on")
    ],
)
def test_an_attention_path_runs_its_own_kernels_in_every_pass(attention, dtype, shared, on_virtual_gpu, folder):
    knobs = {"actor dtype": dtype, "ref dtype": dtype, "shared prompt": shared, "last block": "pruned", "batching": "tokens"}
    row = all_off() | knobs | {"recomputed values": "on"}
    life = on_virtual_gpu(live, row, folder, attention=attention, whole=False)
    assert misplaced(row, life) == []
    assert set(PATHS[attention, dtype]) <= life.ops
    others = {op for path in PATHS.values() for op in path if "attention" in op} - set(PATHS[attention, dtype])
    assert not others & life.ops


@pytest.mark.parametrize(
    ("attention", "dtype", "recomputed"),
    [
        ("auto", "bf16", "on"),
        pytest.param("sdpa", "fp32", "on", marks=pytest.mark.slow),
        pytest.param("eager", "bf16", "off", marks=pytest.mark.slow),
    ],
)
def test_conversations_run_the_kernels_of_their_path_and_never_wait_for_the_device(
    attention, dtype, recomputed, on_virtual_gpu, folder
):
    knobs = {"actor dtype": dtype, "ref dtype": dtype, "shared prompt": "on", "last block": "pruned", "batching": "tokens"}
    row = all_off() | knobs | {"recomputed values": recomputed}
    more = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 400}
    life = on_virtual_gpu(live, row, folder, attention=attention, whole=False, critic=True, talks=True, more=more)
    assert misplaced(row, life) == []
    assert set(PATHS[attention, dtype]) <= life.ops


def test_passes_over_parts_of_a_conversation_never_wait_for_the_device(on_virtual_gpu, folder):
    knobs = {"actor dtype": "bf16", "ref dtype": "bf16", "shared prompt": "on", "batching": "tokens", "recomputed values": "on"}
    row = all_off() | knobs
    more = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16}
    life = on_virtual_gpu(live, row, folder, attention="auto", whole=False, critic=True, talks=True, more=more)
    assert misplaced(row, life) == []
    assert set(PATHS["auto", "bf16"]) <= life.ops
