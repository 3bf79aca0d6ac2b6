"""What the rollout engine holds: its weights, its KV cache and the scratch of a step, and when it gives them back.

Bytes saved: by key. Let k = 2 * L * max(kv_heads / TP, 1) * head_dim * b_kv be the bytes of one token in the KV cache
(:func:`kv_bytes_per_token`), N parameters, b_r bytes per element of ``rollout.dtype``, V the vocabulary.
``gpu_memory_utilization`` u: the engine takes u * device bytes; what N * b_r / TP and a step's scratch leave is KV cache.
``kv_cache_memory_gb``: exactly that many GiB of KV cache, so that many * 2^30 / k tokens. ``kv_cache_dtype`` fp8: b_kv = 1 in
place of 2 (4 for an fp32 engine), so twice the tokens or half the bytes. ``max_model_len``: no bytes of the cache, but at least
max_model_len * k must fit; the start says so otherwise. ``max_num_seqs`` s: logits and their sorted copies, a few times s * V * 4
bytes; with name=hf it is the number of rows generated at once, and s * (P + R) * k bytes of cache. ``max_num_batched_tokens`` t:
activations of a prefill, about t * (2 * h + 3 * I / TP) * b_r bytes. ``enforce_eager``: no CUDA graphs, 0.5 to 2 GiB that
sleeping does not free (reported). ``free_cache_engine``: N * b_r / TP and the whole cache, while the trainer computes.
"""

from __future__ import annotations

from verl_memopt.config.schema import Rollout

_ROLLOUT = "actor_rollout_ref.rollout"
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Sleep levels, as vLLM numbers them."""


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, tensor_parallel_size: int = 1
) -> int:
    """Return the bytes of one token in the KV cache of one rank: a key and a value of each KV head in each layer.

    Heads are divided over tensor-parallel ranks. With fewer heads than ranks, each rank holds one whole head.
    """
    heads = max(num_kv_heads // tensor_parallel_size, 1)
    return 2 * num_layers * heads * head_dim * element_bytes


def sleep_level(rollout: Rollout) -> int:
    """Return the level at which the engine sleeps: the setting, else 2, since the next sync brings every weight."""
    return DROP_WEIGHTS if rollout.sleep_level is None else rollout.sleep_level
