"""Blocks that run as CUDA graphs, on a virtual GPU whose graphs keep the memory that they need and repeat their accesses."""

import pytest

from tests.end_to_end.covering import all_off
from tests.virtual_gpu.life import live, misplaced

GRAPHS = {f"{section}.fsdp_config.cuda_graphs": True for section in ("actor_rollout_ref.actor", "critic.model")}
ROW = all_off() | {
    "actor dtype": "bf16", "ref dtype": "bf16", "recomputed values": "on", "checkpointing": "full", "batching": "tokens",
    "last block": "pruned",
}  # fmt: skip
OFFLOADS = {
    "actor optimizer_offload": "on", "actor grad_offload": "on", "actor param_offload": "on", "activation offload": "on",
}  # fmt: skip


@pytest.mark.parametrize(
    "more", [{}, {"shared prompt": "on"}, OFFLOADS | {"shared prompt": "on"}], ids=["rows", "groups", "offloads"]
)
def test_a_worker_lives_its_whole_life_with_graphs(more, on_virtual_gpu, folder):
    row = ROW | more
    life = on_virtual_gpu(live, row, folder, attention="auto", critic=True, more=GRAPHS)
    assert "cuda graph" in life.ops
    # What the graphs need is no part of a model or an optimizer.
    assert [line for line in misplaced(row, life) if "no part of anything" not in line] == []
    assert [op for op in life.waits if "synchronize" not in op and op != "torch.cuda.graph"] == []
