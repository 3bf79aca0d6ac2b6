"""What `reach` tries: shapes of published models, ways of training them, and model folders whose weights are zeros.

And the peak of an update as ``verl-memopt fit`` computes it, without running it: an estimate, and labelled as one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.model.sizes import ModelSize
from verl_memopt.model.tiny import SHAPES as TINY_SHAPES
from verl_memopt.model.tiny import TinyShape, build_tokenizer
from verl_memopt.plan.peaks import Peaks, Sizes, predict
from verl_memopt.worker.roles import WorkerPlan

_SMALLEST = TINY_SHAPES["qwen3-0.6b"]

SHAPES = {
    "0.6b": _SMALLEST,
    "1.7b": replace(_SMALLEST, hidden_size=2048, intermediate_size=6144),
    "4b": replace(_SMALLEST, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "8b": replace(_SMALLEST, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False),
}
"""Qwen3 by size, as their configs have it; smallest first."""

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"

MOST_BYTES = 2**34
"""Of a file of weights."""

WAYS = {
    "lora": ("actor_rollout_ref.model.lora_rank=16", f"{_ACTOR}.fsdp_config.model_dtype=bfloat16"),
    "full": (),
    "full_bf16": (
        f"{_ACTOR}.fsdp_config.model_dtype=bfloat16",
        f"{_REF}.fsdp_config.model_dtype=bfloat16",
        f"{_ACTOR}.optim.stochastic_rounding=true",
    ),
}
"""What each sets on top of memory=constrained. LoRA's frozen base rests in bfloat16, full fine-tuning has fp32 masters."""


@dataclass(frozen=True)
class Case:
    """One shape trained in one way: ``rows`` answers to a prompt of ``prompt`` tokens, under ``limit_gb`` GiB."""

    shape: str
    way: str
    limit_gb: float = 32.0
    prompt: int = 512
    rows: int = 2
    layers: int | None = None
    vocabulary: int | None = None
    shrink: int = 1

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.way}"

    @property
    def model(self) -> TinyShape:
        shape, n = SHAPES[self.shape], self.shrink
        heads = max(shape.num_heads // n, 1)
        return replace(
            shape, num_layers=self.layers or shape.num_layers, vocab_size=self.vocabulary or shape.vocab_size,
            hidden_size=shape.hidden_size // n, intermediate_size=shape.intermediate_size // n, num_heads=heads,
            num_kv_heads=max(min(shape.num_kv_heads // n, heads), 1), head_dim=shape.head_dim if n == 1 else 32,
        )  # fmt: skip


def case_settings(case: Case, folder: Path, response: int) -> Settings:
    row = case.prompt + response
    return load_settings(
        "grpo_trainer",
        [
            "memory=constrained", f"memory.device_limit_gb={case.limit_gb}", "data.train_files=none", "data.val_files=null",
            "data.seed=0", "data.train_batch_size=1", f"data.max_prompt_length={case.prompt}",
            f"data.max_response_length={response}", f"actor_rollout_ref.model.path={folder}", f"{_ACTOR}.ppo_mini_batch_size=1",
            f"{_ACTOR}.use_kl_loss=true", f"{_ACTOR}.ppo_max_token_len_per_gpu={max(4096, row)}",
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={max(8192, row)}",
            f"actor_rollout_ref.rollout.n={case.rows}", "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.free_cache_engine=true",
            "trainer.worker_group=local", *WAYS[case.way],
        ],
    )  # fmt: skip


def worker_plan(settings: Settings, folder: Path, with_reference: bool) -> WorkerPlan:
    text = str(folder)
    return WorkerPlan(
        settings=settings.actor_rollout_ref, folder=text, engine_folder=text, reference_folder=text if with_reference else None,
        tokenizer_folder=text, eos_token_ids=(0,), schedule_steps=1000, free_engine=True, track_init=False,
        memory=settings.memory,
    )  # fmt: skip


def make_folder(case: Case, folder: Path) -> Path:
    return make_model_folder(case.model, folder)


def make_model_folder(shape: TinyShape, folder: Path) -> Path:
    """Gives a model folder of a shape in bfloat16, in about a second and with hardly a byte on disk.

    Norms are ones; every other weight is a hole in a sparse file, which reads as zeros. Bytes do not depend on values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(min(shape.vocab_size, 320))
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_positions, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        architectures=[f"{shape.model_type.capitalize()}ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    if 2 * sum(torch.Size(each).numel() for each in shapes.values()) < MOST_BYTES:
        _write_sparse(folder / "model.safetensors", shapes)
        return folder
    # A file of its own for each tensor: Linux maps none that is larger than the machine's memory.
    files = {name: f"{name}.safetensors" for name in shapes}
    for name, shape in shapes.items():
        _write_sparse(folder / files[name], {name: shape})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file in bfloat16 whose vectors are ones and whose matrices are holes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, vectors = 0, []
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        if len(shape) == 1:
            vectors.append((start, shape[0]))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for start, length in vectors:
            file.seek(8 + len(text) + start)
            file.write(b"\x80\x3f" * length)  # 1.0 in bfloat16, little endian


def computed_peak(case: Case, settings: Settings) -> int:
    """Gives the bytes of tensors on the device at the peak of the update, at most."""
    kinds = _computed(case, settings).phases["update_actor"]
    return sum(each for kind, each in kinds.items() if kind not in ("context", "allocator", "engine"))


def computed_host_bytes(case: Case, settings: Settings) -> int:
    """Gives bytes that rest in host memory: parameters, moments and the reference, where the profile offloads them."""
    host = _computed(case, settings).host
    return host.get("params", 0) + host.get("optimizer", 0)


def _computed(case: Case, settings: Settings) -> Peaks:
    return predict(settings, Sizes(size_of(case.model)), ("update_actor",), "cuda")


def size_of(shape: TinyShape) -> ModelSize:
    return ModelSize(
        shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        shape.vocab_size, shape.tie_embeddings, qkv_bias=shape.model_type == "qwen2", qk_norm=shape.model_type == "qwen3",
    )  # fmt: skip
