"""Compute the prompt of a group once for all its answers, in every pass.

Use it when: always; it is on. It pays most where prompts are long beside answers and groups are large.
Saves: all copies of the prompt but one, in compute and, where a group fits in one micro-batch, in activations.
Costs: nothing in the result: log-probs and gradients differ only in the order of sums. A budget that splits
    a group costs the bytes of the prompt's keys and values, which are kept for the later parts. Where answers are longer than
    the prompt, or devices share a sequence, each part computes the prompt again.
Works with: every knob; a token budget of at least one prompt and all its answers keeps groups whole. With sliding-window
    attention auto switches it off, and true is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from verl_memopt.memory.knob import Claim, Knob, LadderRow, Range, activation_saving

CHOICE = Range("must be true, false or auto", lambda value: value in (True, False, "auto"))
_KEY = "actor_rollout_ref.actor.use_prefix_grouper"


@dataclass(frozen=True)
class SharedPrompt:
    use_prefix_grouper: Annotated[bool | str, CHOICE] = "auto"
    """Compute the prompt of a group once for all its answers, in every pass; false = once for each answer. auto = true, unless
    attention slides over a window, which would cut the shared prompt."""


KNOB = Knob(
    cost="nothing",
    settings={"actor": SharedPrompt},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(20, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)


def prompt_groups(groups: Sequence[int], actor: SharedPrompt) -> Sequence[int]:
    """Return a group number for each row. Rows of one group compute their prompt once, together.

    Rows with the same prompt have the same number in ``groups``. If k answers to one prompt of P tokens are one micro-batch,
    activations fall by (k - 1) x P x (L x A / T + 2 x (I + h) x b) bytes: A / T is what a block keeps of one token, and
    the second term is what the backward of an MLP holds. Exact for causal attention over the whole sequence.
    """
    return groups if actor.use_prefix_grouper else range(len(groups))
