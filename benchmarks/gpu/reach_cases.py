"""What `reach` tries: shapes of published models, ways of training them, and model folders whose weights are zeros.

And the peak of an update as computed from the knobs' formulas, without running it: an estimate, and labelled as one.
``verl_memopt.memory.formulas`` has what blocks hold. What else lies on the device at the candidates for the peak is added here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verl_memopt.config.loader import load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.memory.formulas import Shapes, width
from verl_memopt.model.tiny import SHAPES as TINY_SHAPES
from verl_memopt.model.tiny import TinyShape, build_tokenizer
from verl_memopt.observe.phase import MIB
from verl_memopt.worker.plan import WorkerPlan

_SMALLEST = TINY_SHAPES["qwen3-0.6b"]

SHAPES = {
    "0.6b": _SMALLEST,
    "1.7b": replace(_SMALLEST, hidden_size=2048, intermediate_size=6144),
    "4b": replace(_SMALLEST, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "8b": replace(_SMALLEST, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False),
}
"""Qwen3 by size, as their configs have it; smallest first."""

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"

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
        """The shape, made small where a rehearsal asks for it."""
        shape, n = SHAPES[self.shape], self.shrink
        heads = max(shape.num_heads // n, 1)
        return replace(
            shape,
            num_layers=self.layers or shape.num_layers,
            vocab_size=self.vocabulary or shape.vocab_size,
            hidden_size=shape.hidden_size // n,
            intermediate_size=shape.intermediate_size // n,
            num_heads=heads,
            num_kv_heads=max(min(shape.num_kv_heads // n, heads), 1),
            head_dim=shape.head_dim if n == 1 else 32,
        )


def case_settings(case: Case, folder: Path, response: int) -> Settings:
    """Gives the settings of one probe. A row must fit into a micro-batch, so the profile's budgets rise with long rows."""
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
    """Gives the plan of a worker whose roles all read one folder."""
    text = str(folder)
    return WorkerPlan(
        settings=settings.actor_rollout_ref,
        folder=text,
        engine_folder=text,
        reference_folder=text if with_reference else None,
        tokenizer_folder=text,
        eos_token_ids=(0,),
        optimizer_steps=1000,
        free_engine=True,
        track_init=False,
        memory=settings.memory,
    )


def make_folder(case: Case, folder: Path) -> Path:
    """Gives a model folder of the case's shape in bfloat16, in about a second and with hardly a byte on disk.

    Norms are ones; every other weight is a hole in a sparse file, which reads as zeros. Bytes do not depend on values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, tokenizer = case.model, build_tokenizer(min(case.model.vocab_size, 320))
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_positions, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _write_sparse(folder / "model.safetensors", {name: tuple(one.shape) for name, one in model.named_parameters()})
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


def computed_peak(case: Case, settings: Settings, tokens: int, responses: int) -> int:
    """Gives bytes on the device at the peak of the update.

    tokens: computed in the largest micro-batch. responses: its answer tokens. The largest of four moments counts: the head,
    the backward of the last block, that of the first, and the optimizer's step.
    """
    shapes = case_shapes(case, settings, tokens, responses)
    actor, model = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.model
    compute, masters = shapes.compute_bytes, shapes.master_bytes
    adapters = adapter_params(case, model.lora_rank)
    trained = adapters if model.lora_rank else shapes.params
    matrix = shapes.vocab * shapes.hidden
    # Mixed precision gathers the root's parameters once a pass: a tied head stays, in the compute dtype.
    cast = 0 if compute == masters else compute
    held = shapes.params * masters + adapters * masters + cast * matrix * (1 if shapes.tied else 2)
    head_gradient = 0 if model.lora_rank else matrix * compute
    kept = shapes.layers * shapes.input_bytes
    if model.enable_activation_offload:
        kept = min(kept, model.activation_offload_in_flight * shapes.input_bytes)
    logits = min(responses, model.logprob_chunk_tokens) * shapes.vocab * (4 + (0 if compute == 4 else compute))
    block = cast * 2 * shapes.block_params  # the unit in use and its gradient, in the compute dtype
    gradients = trained * masters
    step = min(3 * actor.optim.bucket_megabytes * MIB, 3 * trained * 4)  # three buckets of the moments at once
    first = gradients + (matrix * 4 if not model.lora_rank and cast else 0) + shapes.input_bytes + shapes.backward_bytes
    return round(
        held
        + max(
            kept + logits + head_gradient,
            shapes.activation_bytes + head_gradient + block,
            first + block,
            gradients + step,
        )
    )


def case_shapes(case: Case, settings: Settings, tokens: int, responses: int) -> Shapes:
    """Gives the symbols of the knobs' formulas for a case."""
    shape = case.model
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key) + 2 * shape.head_dim
    block = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    matrix = shape.vocab_size * shape.hidden_size
    return Shapes(
        settings=settings.actor_rollout_ref,
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        mlp=shape.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab_size,
        params=shape.num_layers * block + matrix * (1 if shape.tie_embeddings else 2) + shape.hidden_size,
        block_params=block,
        tied=shape.tie_embeddings,
        tokens=tokens,
        responses=responses,
        device="cuda",
    )


def adapter_params(case: Case, rank: int) -> int:
    """Gives the parameters of all adapters: rank x (in + out) a linear layer."""
    shape = case.model
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, mlp = shape.hidden_size, shape.intermediate_size
    ends = 2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + mlp)
    return shape.num_layers * rank * ends


def computed_host_bytes(case: Case, settings: Settings) -> int:
    """Gives bytes that rest in host memory: parameters, moments and the reference, where the profile offloads them."""
    shapes = case_shapes(case, settings, 1, 1)
    lora, masters = settings.actor_rollout_ref.model.lora_rank, shapes.master_bytes
    trained = adapter_params(case, lora) if lora else shapes.params
    reference = 0 if lora else shapes.params * width(settings.actor_rollout_ref.ref.fsdp_config.model_dtype)
    return round(shapes.params * masters + trained * shapes.state_bytes + reference)
