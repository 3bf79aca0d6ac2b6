"""The peak of an update as computed from the knobs' formulas, without running it: an estimate, and labelled as one.

``verl_memopt.memory.formulas`` has what blocks hold. What else lies on the device at the candidates for the peak is added here.
"""

from __future__ import annotations

from benchmarks.gpu.reach_cases import Case
from verl_memopt.config.schema import Settings
from verl_memopt.memory.formulas import Shapes, width
from verl_memopt.observe.phase import MIB


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
