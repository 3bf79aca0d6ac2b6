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

from verl_memopt.algorithms.records import LOSSES_OF_SEQUENCES
from verl_memopt.memory.formulas import Shapes
from verl_memopt.memory.knob import Advice, Claim, Factor, Knob, LadderRow, switch
from verl_memopt.memory.ranges import NaturalInt

_CHUNK, _TILE = "actor_rollout_ref.model.logprob_chunk_tokens", "actor_rollout_ref.model.logprob_vocab_tile"

FREE_TILE = 16_384
"""Vocabulary entries a tile where ``logprob_vocab_tile`` is 0 and a tile costs no product."""

ADVISED_CHUNK = 256


@dataclass(frozen=True)
class ChunkedLogprob:
    """Settings of the log-prob head."""

    logprob_chunk_tokens: NaturalInt = 512
    """Response tokens per chunk of LM head, log-prob and entropy; 0 = whole logits."""
    logprob_vocab_tile: NaturalInt = 0
    """Vocabulary entries per tile of a chunk's logits; 0 = 16,384 where a tile costs nothing, and whole rows where it would cost
    a product with the head: in an update whose loss is one of tokens, or strictly on-policy. Set it when logits are the peak."""


def logit_bytes(shapes: Shapes, update: bool) -> int:
    """Return the bytes of the logits of an update with old log-probs, or of a log-prob pass, without entropy."""
    model, actor = shapes.settings.model, shapes.settings.actor
    chunk = model.logprob_chunk_tokens
    whole_rows = chunk == 0 or (update and actor.policy_loss.loss_mode not in LOSSES_OF_SEQUENCES)
    tile = model.logprob_vocab_tile or (shapes.vocab if whole_rows else FREE_TILE)
    narrow = 0 if shapes.compute_bytes == 4 else shapes.compute_bytes
    return int(min(shapes.responses, chunk or shapes.responses) * min(shapes.vocab, tile) * (4 + narrow))


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
            ADVISED_CHUNK,
            lambda settings: not 0 < settings.actor_rollout_ref.model.logprob_chunk_tokens <= ADVISED_CHUNK,
        ),
    ),
    claims=(Claim("update_actor", "logits", _saved(True)), Claim("old_log_prob", "logits", _saved(False))),
    row=LadderRow(10, on=(f"{_CHUNK}=512",), off=(f"{_CHUNK}=0",)),
    factors=(Factor("chunk", {"whole": {_CHUNK: 0}, "5": {_CHUNK: 5}}), switch("vocabulary tile", _TILE, auto=0, of_96=96)),
)
