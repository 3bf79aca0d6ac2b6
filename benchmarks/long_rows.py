"""``python -m benchmarks.long_rows``: what an update of one very long row holds on a card, without and with blocks over tiles.

``--shapes`` shows what ``verl-memopt fit`` computes for an update of one row, beside what the update holds.
``--hybrid`` compares Qwen3.5, of which three blocks in four carry a state, with Qwen3, with checkpointing and blocks over tiles.

The real update (forward, loss, backward) of one micro-batch with one row runs on fake tensors: real shapes, all layers, no
values. A byte tracker counts what lives, the parameters and gradients included. The optimizer's state rests on the host. Kernels
are a CPU's: attention converts one head of a tile to fp32, which a GPU does not, and elementwise statements run over tiles as
large as a GPU's where their functions are not compiled. So do batches of chunks of the blocks with a state.
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
from verl_memopt.config.schema import ActorRolloutRef
from verl_memopt.data.batch import Ragged, RolloutBatch
from verl_memopt.distributed.device import training_mesh
from verl_memopt.memory.activation_offload_torch import ActivationOffload
from verl_memopt.memory.fused import NARROW_TILE_ELEMENTS, TILE_ELEMENTS
from verl_memopt.memory.residency import POLICY
from verl_memopt.memory.rollout_memory import kv_bytes_per_token
from verl_memopt.model import delta_rule
from verl_memopt.model.assembly import ModelUse, allocate, build_policy
from verl_memopt.model.sizes import PUBLISHED, ModelSize
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, ByteTracker
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.formulas import Pass
from verl_memopt.plan.held import Held
from verl_memopt.worker.policy import Policy
from verl_memopt.worker.trained_model import MicroBatch, micro_batch

PROMPT = 1024
MODEL = "actor_rollout_ref.model"
CHUNK = f"{MODEL}.logprob_chunk_tokens=2048"
"""Fewer and larger pieces of the head than the profile has: a fake run of the others takes hours."""
CASES = {"0.6B, all weights": ("Qwen/Qwen3-0.6B", 131_072), "8B, all weights": ("Qwen/Qwen3-8B", 32_768)}
"""Name -> published shape, tokens of the row."""
TILES = (None, 8192)
HYBRIDS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3.5-0.8B")
HYBRID_ROWS = ((131_072, 8192), (1_048_576, 65_536))
"""Tokens of the row, tokens of a tile."""
HYBRID_LAYERS = 2
"""Blocks that are run, one of each kind. Each further one adds its input to the activations, and gradients leave for the host."""
SHAPES = (
    *("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B"),
    *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B"),
)
SHAPE_TOKENS = 4096
ALL_ON_CARD = (
    *(f"actor_rollout_ref.actor.fsdp_config.{key}" for key in ("grad_offload=false", "split_master_weights=false")),
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
    f"{MODEL}.enable_activation_offload=false",
    f"{MODEL}.enable_gradient_checkpointing=true",
)
HEAD = (
    "model", "tokens", "tile", "activations GiB", "weights and gradients GiB", "update GiB", "KV cache of the row GiB", "seconds",
)  # fmt: skip


def roles_of(overrides: Sequence[str]) -> ActorRolloutRef:
    given = ["memory=24g", "data.train_files=none", "data.val_files=none", f"{MODEL}.path=none", *overrides]
    return load_settings("rloo_trainer", given).actor_rollout_ref


def peak(shape: ModelSize, tokens: int, overrides: Sequence[str]) -> dict[str, int]:
    """Return kind -> bytes at the peak of an update of one row."""
    roles = roles_of(overrides)

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
            offload = None
            if model.enable_activation_offload:
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
    tables = (TILE_ELEMENTS, NARROW_TILE_ELEMENTS, delta_rule.ELEMENTS)
    before = [dict(elements) for elements in tables]
    for elements in tables[:2]:
        elements["cpu"] = elements["cuda"]
    delta_rule.ELEMENTS.pop("cpu")  # a GPU has the default
    try:
        yield
    finally:
        for elements, kept in zip(tables, before, strict=True):
            elements.update(kept)


def write_config(folder: Path, size: ModelSize) -> None:
    kind = "qwen3" if size.qk_norm else "qwen2" if size.qkv_bias else "llama"
    more = {}
    if size.mixture is not None:
        kind, own = "qwen3_moe", size.mixture
        more = {"num_experts": own.experts, "moe_intermediate_size": own.width, "num_experts_per_tok": own.top_k}
        more["shared_expert_intermediate_size"] = own.shared
    if size.rule is not None:
        kind, own = "qwen3_5_text" if size.mixture is None else "qwen3_5_moe_text", size.rule
        more |= {"linear_num_key_heads": own.key_heads, "linear_num_value_heads": own.value_heads}
        more |= {"linear_key_head_dim": own.key_dim, "linear_value_head_dim": own.value_dim}
        # The last of each cycle has attention.
        every = size.layers // (size.layers - size.linear_layers)
        more["layer_types"] = [
            "full_attention" if place % every == 0 else "linear_attention" for place in range(1, size.layers + 1)
        ]
    AutoConfig.for_model(
        kind, **more, vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        tie_word_embeddings=size.tied, max_position_embeddings=2**20, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    ).save_pretrained(folder)  # fmt: skip


def shapes(names: Sequence[str]) -> str:
    heads, lines = ("model", "tokens", "computed GiB", "held GiB", "computed / held", "s"), []
    for hub_id in names:
        begun, size = time.monotonic(), PUBLISHED[hub_id]
        held = sum(peak(size, SHAPE_TOKENS, [CHUNK, *ALL_ON_CARD]).values())
        roles = roles_of([CHUNK, *ALL_ON_CARD])
        roles = replace(roles, actor=replace(roles.actor, fsdp_config=replace(roles.actor.fsdp_config, param_offload=False)))
        responses = SHAPE_TOKENS + 1 - PROMPT
        with tiles_of_a_gpu():
            policy = Held(POLICY, roles, size, 1, "cpu", trained=True)
            work = Pass(SHAPE_TOKENS, responses, 2, SHAPE_TOKENS, alone=True)
            computed = sum(policy.update(work, exact_ratio=True).values())
        figures = f"{computed / GIB:.2f}", f"{held / GIB:.2f}", f"{computed / held:.3f}", f"{time.monotonic() - begun:.0f}"
        lines.append((hub_id, f"{SHAPE_TOKENS:,}", *figures))
        print(*lines[-1], file=sys.stderr, flush=True)
    return text_table(heads, lines)


def hybrids(divide: int) -> str:
    heads = (
        "model",
        "tokens",
        "tile",
        "a block GiB",
        "inputs of all blocks GiB",
        "activations GiB",
        "KV cache and states GiB",
        "s",
    )
    lines = []
    for tokens, tile in ((tokens // divide, tile // divide) for tokens, tile in HYBRID_ROWS):
        for hub_id in HYBRIDS:
            whole, begun = PUBLISHED[hub_id], time.monotonic()
            shape = replace(whole, layers=HYBRID_LAYERS, linear_layers=min(whole.linear_layers, 1))
            overrides = (CHUNK, f"{MODEL}.block_tile_tokens={tile}", f"{MODEL}.enable_gradient_checkpointing=true")
            kinds = peak(shape, tokens, [*overrides, f"{MODEL}.enable_activation_offload=false"])
            an_input = 2 * tokens * whole.hidden
            block = sum(kinds.get(kind, 0) for kind in ("activations", "logits")) - HYBRID_LAYERS * an_input
            inputs = whole.layers * an_input
            attention = whole.layers - whole.linear_layers
            cache = tokens * kv_bytes_per_token(attention, whole.kv_heads, whole.head_dim, 2, 1)
            if whole.rule is not None:
                tails = 2 * delta_rule.TAIL * (2 * whole.rule.keys + whole.rule.values)
                cache += whole.linear_layers * (4 * whole.rule.values * whole.rule.key_dim + tails)
            gib = (f"{size / GIB:.2f}" for size in (block, inputs, block + inputs, cache))
            lines.append((hub_id, f"{tokens:,}", f"{tile:,}", *gib, f"{time.monotonic() - begun:.0f}"))
            print(*lines[-1], file=sys.stderr, flush=True)
    return text_table(heads, lines)


def faked(micro: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
    flat = (micro.old_log_probs, micro.ref_log_probs, micro.advantages)
    return MicroBatch(micro.pack.map(fake.from_tensor), *(fake.from_tensor(tensor) for tensor in flat if tensor is not None))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_rows", description=__doc__)
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="take rows of 1/N of the tokens, for a quick look")
    parser.add_argument("--hybrid", action="store_true", help="compare Qwen3.5 with Qwen3")
    parser.add_argument("--shapes", nargs="*", metavar="HUB_ID", help="compare with what fit computes (default: six shapes)")
    asked = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    if asked.shapes is not None:
        print(shapes(asked.shapes or SHAPES))
        return 0
    if asked.hybrid:
        print(hybrids(asked.divide))
        return 0
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
