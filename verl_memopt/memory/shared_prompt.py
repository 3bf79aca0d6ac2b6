"""Compute a prompt once for all its answers (a group), in every pass.

Use it when: always; it is on by default. It saves most if prompts are long compared with answers, and groups are large.
Saves: all copies of the prompt but one: in compute, and in activations where a whole group fits in one micro-batch. Different
    prompts that begin with the same 64 tokens or more, such as a long system prompt, also compute these once in each micro-batch,
    if that saves a tenth of the tokens of a step.
Costs: nothing in the result: log-probs and gradients differ only in the order of sums. If a token budget splits a group over
    several micro-batches, the prompt's keys and values are kept until the last of them. If answers are longer than the prompt, or
    devices share the tokens of a sequence, each of these micro-batches computes the prompt again.
Works with: every knob. A token budget of at least one prompt and all its answers keeps groups whole. In a layer with
    sliding-window attention each answer reads a copy of the last keys of its prompt, while that layer computes.
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
    """Compute a prompt once for all its answers (a group), in every pass. false = once for each answer. auto = true."""


KNOB = Knob(
    cost="nothing",
    settings={"actor": SharedPrompt},
    claims=(Claim("update_actor", "activations", activation_saving),),
    row=LadderRow(20, on=(f"{_KEY}=true",), off=(f"{_KEY}=false",)),
)


def prompt_groups(groups: Sequence[int], actor: SharedPrompt) -> Sequence[int]:
    """Return a group number for each row. The rows of one group compute their prompt once, together.

    Rows with the same prompt have the same number in ``groups``. If k answers to one prompt of P tokens are one micro-batch,
    activations fall by

    (k - 1) x P x (L x A / T + 2 x (I + h) x b) bytes,

    where L counts the blocks, A / T is what a block keeps per token, and the second term is what the backward of an MLP holds: I
    is its width, h the hidden size, and b the bytes per element.
    """
    return groups if actor.use_prefix_grouper else range(len(groups))
