"""``python -m benchmarks.long_rows``: what an update of one very long row holds on a card, without and with blocks over tiles.

The real update (forward, loss, backward) of one micro-batch with one row runs on fake tensors: real shapes, all layers, no
values. A byte tracker counts what lives, the parameters and gradients included. The optimizer's state rests on the host. Kernels
are a CPU's: attention converts one head of a tile to fp32, which a GPU does not, and elementwise statements run over tiles as
large as a GPU's where their functions are not compiled.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from benchmarks.common import CPU, fake_process_group, text_table
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.config.loader import load_settings
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.fused import NARROW_TILE_ELEMENTS, TILE_ELEMENTS
from verl_memopt.memory.rollout_memory import kv_bytes_per_token
from verl_memopt.model.assembly import ModelUse, allocate, build_policy
from verl_memopt.model.sizes import PUBLISHED, ModelSize
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import GIB
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MicroBatch, micro_batch

PROMPT = 1024
MODEL = "actor_rollout_ref.model"
CHUNK = f"{MODEL}.logprob_chunk_tokens=2048"
"""Fewer and larger pieces of the head than the profile has: a fake run of the others takes hours."""
CASES = {"0.6B, all weights": ("Qwen/Qwen3-0.6B", 131_072), "8B, all weights": ("Qwen/Qwen3-8B", 32_768)}
"""Name -> published shape, tokens of the row."""
TILES = (None, 8192)
HEAD = (
    "model", "tokens", "tile", "activations GiB", "weights and gradients GiB", "update GiB", "KV cache of the row GiB", "seconds",
)  # fmt: skip


def peak(shape: ModelSize, tokens: int, overrides: Sequence[str]) -> dict[str, int]:
    """Return kind -> bytes at the peak of an update of one row."""
    settings = load_settings(
        "rloo_trainer", ["memory=24g", "data.train_files=none", "data.val_files=none", f"{MODEL}.path=none", *overrides]
    )
    roles = settings.actor_rollout_ref

    def ragged(length: int) -> Ragged:
        return Ragged(flat=torch.zeros(length, dtype=torch.int64), lengths=torch.tensor([length]), batch_size=[])

    count = tokens + 1 - PROMPT  # a row's last token is not computed
    batch = RolloutBatch(
        prompts=ragged(PROMPT), responses=ragged(count), group=torch.zeros(1, dtype=torch.int64),
        old_log_probs=torch.zeros(count), ref_log_probs=torch.zeros(count), advantages=torch.zeros(count), batch_size=[],
    )  # fmt: skip
    row = micro_batch(batch, [0])
    with tempfile.TemporaryDirectory() as name, fake_process_group(), tiles_of_a_gpu():
        folder, mesh = Path(name), training_mesh("cpu", 1, -1)
        write_config(folder, shape)
        model, fsdp = replace(roles.model, path=name), replace(roles.actor.fsdp_config, param_offload=False)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            trained = build_policy(model, fsdp, folder, mesh, CPU, ModelUse(recompute=True, trained=True))
            # A plain model's fake parameters cannot be moved in place.
            allocate(trained, CPU, {name: torch.empty_like(each, device=CPU) for name, each in named_weights(trained)})
            offload = ActivationOffload(trained, CPU, model.activation_offload_min_bytes, model.activation_offload_in_flight)
            policy = Policy(trained, roles.actor, 10, 1, CPU, offload)
            with ByteTracker() as tracker:
                tracker.mark("params", trained.parameters())
                tracker.enter("update")
                policy.accumulate([faked(row, fake)], GlobalCounts(float(count), 1.0), 1.0)
                return dict(tracker.peaks[DEVICE].kinds)


@contextmanager
def tiles_of_a_gpu() -> Iterator[None]:
    """Cut elementwise statements into tiles as large as on a GPU. Those of a CPU are small, and their operations many."""
    before = [dict(elements) for elements in (TILE_ELEMENTS, NARROW_TILE_ELEMENTS)]
    for elements in (TILE_ELEMENTS, NARROW_TILE_ELEMENTS):
        elements["cpu"] = elements["cuda"]
    try:
        yield
    finally:
        for elements, kept in zip((TILE_ELEMENTS, NARROW_TILE_ELEMENTS), before, strict=True):
            elements.update(kept)


def write_config(folder: Path, size: ModelSize) -> None:
    kind = "qwen3" if size.qk_norm else "qwen2" if size.qkv_bias else "llama"
    AutoConfig.for_model(
        kind, vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        tie_word_embeddings=size.tied, max_position_embeddings=40_960, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    ).save_pretrained(folder)  # fmt: skip


def faked(micro: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
    flat = (micro.old_log_probs, micro.ref_log_probs, micro.advantages)
    return MicroBatch(micro.pack.map(fake.from_tensor), *(fake.from_tensor(tensor) for tensor in flat if tensor is not None))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_rows", description=__doc__)
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="take rows of 1/N of the tokens, for a quick look")
    asked = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    lines = []
    for name, (hub_id, whole) in CASES.items():
        shape, tokens = PUBLISHED[hub_id], whole // asked.divide
        cache = tokens * kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, 2, 1)
        for tile in TILES:
            begun = time.monotonic()
            kinds = peak(shape, tokens, [CHUNK, f"{MODEL}.block_tile_tokens={tile or 'null'}"])
            activations = sum(kinds.get(kind, 0) for kind in ("activations", "logits"))
            sizes = (activations, sum(kinds.values()) - activations, sum(kinds.values()), cache)
            gib = (f"{size / GIB:.2f}" for size in sizes)
            lines.append((name, f"{tokens:,}", str(tile or "none"), *gib, f"{time.monotonic() - begun:.0f}"))
            print(*lines[-1], file=sys.stderr, flush=True)
    print(text_table(HEAD, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
