"""Generates ``docs/memory.md`` from the knob files: ``python -m verl_memopt.memory.document > docs/memory.md``."""

from __future__ import annotations

import sys

from verl_memopt.memory.knobs import Entry, in_yaml, index

HEAD = """# Memory knobs

Generated from the files of `verl_memopt/memory/`; `verl-memopt knobs` prints the same, and
`verl-memopt knobs --measure --model FOLDER` measures each on a model of yours. Symbols: N parameters, L layers, h hidden size,
V vocabulary, T tokens of a micro-batch, R response tokens, W ranks that share a model, b_x bytes per element of x.
"""

TROUBLESHOOTING = """## Troubleshooting: the three kinds of running out of memory

**In training** (phases `old_log_prob`, `ref`, `update_actor`). The message names the phase, what was resident by kind and the
largest kind. Activations: lower `actor_rollout_ref.actor.ppo_max_token_len_per_gpu`, then use checkpointing, then activation
offload. Logits: `actor_rollout_ref.model.logprob_chunk_tokens`. Optimizer: offload it, or lower the precision of its state.
Params: `param_offload` for whatever the phase does not need.

**In rollout** (phases `gen`, `testing`, `update_weights`, or the start of the engine). Lower
`actor_rollout_ref.rollout.gpu_memory_utilization` or give `rollout.kv_cache_memory_gb`; lower `max_num_seqs` and
`max_num_batched_tokens`; `enforce_eager=true` frees the memory of CUDA graphs, which sleep does not; let the engine sleep
(`free_cache_engine`).

**On the host**. Every offload rests in host buffers; their sum is `host_buffer_bytes` of the phases. `memory.host_limit_gb`
bounds it and turns a killed process into an error that says what was asked for. Page-locked memory is bounded by
`memory.pinned_limit_gb`. Another allocator (`ALLOCATOR=tcmalloc` or `jemalloc` for the scripts) returns freed memory sooner.
"""


def page() -> str:
    """Gives the page's text."""
    return "\n".join([HEAD, *map(_section, index()), TROUBLESHOOTING])


def _section(entry: Entry) -> str:
    rows = [f"| `{key}` | `{in_yaml(entry.defaults[key])}` |" for key in entry.keys] + [
        f"| `{name}` | |" for name in entry.besides
    ]
    keys = "\n".join(rows)
    refuses = "".join(f"- Refuses `{refusal.setting}`: {refusal.reason}\n" for refusal in entry.refuses)
    return (
        f"## {entry.name}\n\n{entry.title}\n\n| key or variable | default |\n|---|---|\n{keys}\n\n"
        f"- **Saves:** {entry.saves}\n- **Costs:** {entry.costs}\n- **Pairs with:** {entry.pairs}\n{refuses}"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
