"""What the rollout engine holds: its weights, its KV cache and the scratch of a step, and when it gives them back.

Let k = 2 x L x max(kv_heads / TP, 1) x head_dim x b_kv be the bytes of one token in the KV cache (:func:`kv_bytes_per_token`), N
the parameters, b_r the bytes of an element of ``rollout.dtype``, and V the vocabulary. By key:

* ``gpu_memory_utilization=u``: the engine takes the share u of the device. What weights (N x b_r / TP) and the scratch of a step
  leave of it is KV cache.
* ``kv_cache_memory_gb``: exactly that many GiB of KV cache.
* ``kv_cache_dtype=fp8``: b_kv is 1 instead of 2 (4 in an fp32 engine), so twice the tokens or half the bytes.
* ``max_model_len``: does not shrink the cache, but max_model_len x k bytes must fit. If they do not, the start says so.
* ``max_num_seqs=s``: logits and their sorted copies take a few times s x V x 4 bytes. With name=hf it is the number of rows
  generated at once, with s x (P + R) x k bytes of cache.
* ``max_num_batched_tokens=t``: activations of a prefill take about t x (2 x h + 3 x I / TP) x b_r bytes.
* ``enforce_eager``: no CUDA graphs, which hold 0.5 to 2 GiB that sleeping does not free (as others report).
* ``free_cache_engine``: frees N x b_r / TP bytes and the whole cache while the trainer computes.
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
