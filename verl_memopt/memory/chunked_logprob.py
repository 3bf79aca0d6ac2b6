"""Compute log-probs and entropy chunk by chunk, so that the [tokens, vocabulary] logits never exist.

Use it when: always; it is on. Lower ``logprob_chunk_tokens`` when an out-of-memory report names logits.
Saves: the logits of a pass shrink from all response tokens of a micro-batch to one chunk of them.
Costs: nothing where the loss is one of tokens or strictly on-policy. Elsewhere, and with a vocabulary tile, one more product with
    the head, because backward computes the logits again.
Works with: every pass and every other knob. A sharded head is gathered once a pass, not once a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_memopt.algorithms.records import LOSSES_OF_SEQUENCES
from verl_memopt.memory.knob import LOWER, Advice, Claim, Knob, LadderRow, NaturalInt, Need

if TYPE_CHECKING:
    from verl_memopt.config.schema import Settings
    from verl_memopt.plan.formulas import Shapes

_CHUNK = "actor_rollout_ref.model.logprob_chunk_tokens"

FREE_TILE = 16_384
"""Vocabulary entries a tile where ``logprob_vocab_tile`` is 0 and a tile costs no product."""

LEAST_CHUNK = 64
"""Smaller chunks make products slow and save next to nothing."""


@dataclass(frozen=True)
class ChunkedLogprob:
    logprob_chunk_tokens: NaturalInt = 512
    """Response tokens per chunk of LM head, log-prob and entropy; 0 = whole logits. In half precision, where a GPU compiles, a
    chunk has three times as many in the same bytes: fp32 logits are not kept."""
    logprob_vocab_tile: NaturalInt = 0
    """Vocabulary entries per tile of a chunk's logits; 0 = 16,384 where a tile costs nothing, and whole rows where it would cost
    a product with the head: in an update whose loss is one of tokens, or strictly on-policy. Set it when logits are the peak."""


def logit_bytes(shapes: Shapes, update: bool) -> int:
    """Bytes of the logits, in an update with old log-probs or in a log-prob pass, without entropy."""
    model, actor = shapes.settings.model, shapes.settings.actor
    chunk = model.logprob_chunk_tokens
    whole_rows = chunk == 0 or (update and actor.policy_loss.loss_mode not in LOSSES_OF_SEQUENCES)
    tile = model.logprob_vocab_tile or (shapes.vocab if whole_rows else FREE_TILE)
    tile = min(shapes.vocab, tile)
    narrow = 0 if shapes.compute_bytes == 4 else shapes.compute_bytes
    entry_bytes = 4 + narrow
    if narrow and shapes.compiles:
        # As ``Head.rows_at_once``: without fp32 logits a chunk has as many more tokens as take the same bytes.
        summed = 0 if tile == shapes.vocab else shapes.hidden * (4 + narrow)
        chunk, entry_bytes = chunk * ((4 + narrow) * tile + summed) // (narrow * tile + summed), narrow
    return int(min(shapes.responses, chunk or shapes.responses) * tile * entry_bytes)


def _enough_chunk(need: Need, settings: Settings) -> int | None:
    chunk, num_responses = settings.actor_rollout_ref.model.logprob_chunk_tokens, need.work.responses
    return need.part(min(chunk or num_responses, num_responses or chunk), LEAST_CHUNK)


def _saved(update: bool) -> Callable[[Shapes, Shapes], float]:
    return lambda before, after: logit_bytes(before, update) - logit_bytes(after, update)


KNOB = Knob(
    cost="nothing, mostly",
    settings={"policy_model": ChunkedLogprob},
    known_as={"use_liger_kernel": "actor_rollout_ref.model.logprob_chunk_tokens"},
    advice=(
        Advice(
            "logits",
            _CHUNK,
            LOWER,
            lambda settings: not 0 < settings.actor_rollout_ref.model.logprob_chunk_tokens <= LEAST_CHUNK,
            to=_enough_chunk,
        ),
    ),
    claims=(Claim("update_actor", "logits", _saved(True)), Claim("old_log_prob", "logits", _saved(False))),
    row=LadderRow(10, on=(f"{_CHUNK}=128",), off=(f"{_CHUNK}=0",)),
)
