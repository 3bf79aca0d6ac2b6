"""The prompt of a group is computed once for all its answers, in every pass.

This file decides which rows compute their prompt together. The batch of a step carries that to whatever counts tokens
(``row_tokens.py``), packs rows (``models/pack.py``) or computes a prompt ahead of its answers (``workers/micro_batches.py``).

Bytes saved: let k answers of R_i tokens follow one prompt of P tokens. Apart from each other they compute k x P + sum(R_i - 1)
tokens. Together they compute (k - 1) x P fewer. If the group is one micro-batch, activations fall by
(k - 1) x P x (L x A / T + 2 x (I + h) x b) bytes. A / T is what a block keeps of one token. The second term is what the backward
of an MLP holds. Under a token budget the peak stays the same, and there are fewer micro-batches.

Exact for causal attention over the whole sequence. A model with a sliding window is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_memopt.config.schema import Actor


def prompt_groups(groups: Sequence[int], actor: Actor) -> Sequence[int]:
    """Return a number for each row. Rows with the same number compute their prompt once, together.

    Args:
        groups: A number for each row. Rows with the same number have the same prompt.
        actor: The ``actor`` section of the settings.
    """
    return groups if actor.use_prefix_grouper else range(len(groups))
