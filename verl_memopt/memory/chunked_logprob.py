"""Compute log-probs and entropy chunk by chunk, so that the whole [tokens, vocabulary] matrix of logits never exists.

Use it when: always; it is on by default. Lower ``logprob_chunk_tokens`` when an out-of-memory report names logits.
Saves: most of the logits. At any time only the logits of one chunk of tokens exist, not those of all response tokens of a
    micro-batch.
Costs: nothing if the loss is computed per token, or if training is strictly on-policy. With any other loss, or with a vocabulary
    tile, one more matrix product with the LM head, because backward computes the logits again.
Works with: every pass and every other knob. A sharded LM head is gathered once per pass, not once per chunk.
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
"""Vocabulary entries per tile where ``logprob_vocab_tile`` is 0 and tiles cost no extra product."""

TAUGHT_COLUMNS = 1024
"""Columns that statements with a teacher compute at a time where they are not compiled. They need several temporary tensors."""

LEAST_CHUNK = 64
"""Smaller chunks make matrix products slow and save almost nothing."""


@dataclass(frozen=True)
class ChunkedLogprob:
    logprob_chunk_tokens: NaturalInt = 512
    """Response tokens for which the LM head, log-probs and entropy are computed at once (a chunk); 0 = all tokens at once. On a
    GPU that compiles in half precision, a chunk holds three times as many tokens in the same bytes, because fp32 logits are not
    kept."""
    logprob_vocab_tile: NaturalInt = 0
    """Vocabulary entries per tile of a chunk's logits; 0 = 16,384 where tiles cost nothing, and the whole vocabulary where tiles
    would cost one more matrix product with the LM head. That is in an update whose loss is computed per token, or is strictly
    on-policy. Set it when logits set the memory peak."""


@dataclass(frozen=True)
class Taught:
    """A divergence from a teacher, as far as the bytes of a head depend on it."""

    divergence: str
    """reverse_kl, forward_kl or jsd."""
    vocabulary: int
    """Number of entries of the teacher's head."""
    top_k: int | None = None
    """Number of the teacher's most probable tokens that are known in place of its head."""
    narrow: int = 0
    """Bytes per element of the teacher's products, if it computes in half precision and the student does not."""
    mixed: bool = False
    """Several teachers say something of a chunk, so each reads a copy of the student's rows."""

    @property
    def whole_rows_pay(self) -> bool:
        """Over tiles a JSD takes one sweep more than other divergences."""
        return self.divergence == "jsd"

    def row_bytes(self, tile: int, compiles: bool) -> int:
        """Return the bytes per token beside the student's logits: fp32 logits of the teacher, and temporary tensors.

        ``tile``: columns of the student's logits. ``compiles``: statements are compiled, and those of a whole teacher need no
        temporary tensors then.
        """
        columns, copies = min(tile, TAUGHT_COLUMNS), 8 * tile * self.mixed
        if self.top_k is not None:
            return copies + 4 * 3 * columns + 64 * self.top_k
        temporaries = 0 if compiles else 7 if self.divergence == "jsd" else 5
        return copies + (4 + self.narrow) * min(tile, self.vocabulary) + 4 * temporaries * columns


def logit_bytes(shapes: Shapes, update: bool, taught: Taught | None = None) -> int:
    """Bytes of the logits in an update (``update``) or in a log-prob pass, without those for entropy."""
    model, actor = shapes.settings.model, shapes.settings.actor
    chunk = model.logprob_chunk_tokens
    whole_rows = chunk == 0 or (update and actor.policy_loss.loss_mode not in LOSSES_OF_SEQUENCES)
    whole_rows |= taught is not None and taught.whole_rows_pay
    tile = model.logprob_vocab_tile or (shapes.vocab if whole_rows else FREE_TILE)
    tile = min(shapes.vocab, tile)
    narrow = 0 if shapes.compute_bytes == 4 else shapes.compute_bytes
    entry_bytes = 4 + narrow
    if taught is not None:
        # As in ``Head.rows_at_once``: beside the logits of a teacher, fewer tokens fit in the bytes of a chunk.
        summed = 0 if tile == shapes.vocab else shapes.hidden * (4 + shapes.compute_bytes)
        alone, beside = entry_bytes * tile + summed, taught.row_bytes(tile, shapes.compiles)
        rows = max(chunk * alone // (alone + beside), 1) if chunk else shapes.responses
        return min(shapes.responses, rows) * (alone + beside)
    if narrow and shapes.compiles:
        # As in ``Head.rows_at_once``: without fp32 logits a chunk has more tokens in the same bytes.
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
