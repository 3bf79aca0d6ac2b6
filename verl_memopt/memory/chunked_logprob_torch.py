"""Compute log-probs and entropy from hidden states chunk by chunk: the whole [tokens, vocabulary] logits never exist.

Bytes of a pass: let R be the response tokens of a micro-batch, V the vocabulary, c = ``logprob_chunk_tokens`` and t =
``logprob_vocab_tile``. Logits are one buffer of

min(R, c) x min(V, t) x (4 + n) bytes,

where n is 0 in fp32, and otherwise the bytes per element of the compute dtype. Another buffer of min(R, c) x min(V, t, 4,096) x 4
bytes is needed for entropy and for statistics of estimators, and on a GPU that does not compile if t < V. A GPU that compiles in
half precision needs only the n bytes: the buffer holds the logits in the compute dtype, and then their gradient. A chunk then has
more tokens in the same bytes.

A divergence from a teacher needs its fp32 logits beside those of the student, so a chunk has fewer tokens in the same bytes: c of
half precision becomes 0.6 c.

The gradient of the head's weight is added in place. If there is a gradient already, this saves a second matrix of V x h elements,
where h is the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl_memopt.memory.chunked_logprob import FREE_TILE
from verl_memopt.memory.embedding_gradient import Tiles, added, room_for, tiles_of
from verl_memopt.memory.logit_tiles import Gradients, Head, LogitGrads, LogitTiles, Tokens, TokenStatistics
from verl_memopt.memory.teaching import VALUE, AnyTeaching
from verl_memopt.observe.byte_tracker import scope

TokenGradient = Callable[[Any, Tensor, Tensor | None], LogitGrads]
"""Computes the gradients of the loss for some tokens, before backward. Its arguments are the tokens (a slice, or places int64),
and their log-probs and entropies (or None), both without gradients. It returns the gradients of log-probs and of entropies, and
with a teacher of divergences, fp32 each."""


def head_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    token_gradient: TokenGradient | None = None,
    in_place: bool = False,
    statistics: TokenStatistics | None = None,
    teaching: AnyTeaching | None = None,
) -> tuple[Tensor, Tensor | None, *tuple[Tensor, ...]]:
    """Return the log-prob of each target, fp32 [R], and the entropy of its distribution, fp32 [R] or None if not requested.

    With ``teaching`` the third output is the divergence from the teacher, fp32 [R]. Gradients flow to hidden, weight and bias
    from all outputs.

    Args:
        head: The LM head and its chunk and tile sizes. ``vocab_tile=0`` means the whole vocabulary if there are no chunks or if
            the forward computes the gradients (``token_gradient``) or a JSD is asked for, else ``FREE_TILE``. Statistics of whole
            rows always use the whole vocabulary.
        hidden: [R, H] in the compute dtype.
        targets: int64 [R].
        token_gradient: Computes the gradients of the loss in the forward. Backward asserts that autograd gives the same
            gradients.
        in_place: Add to ``.grad`` of weight and bias without autograd (with ``token_gradient`` in the forward), if they are
            leaves without hooks. For callers that call ``backward`` once per forward, and not ``torch.autograd.grad``.
        statistics: Statistics to compute; their values are filled in. Only allowed without gradients.
        teaching: What a frozen teacher says of the R tokens.
    """
    gradient_in_forward = token_gradient is not None and torch.is_grad_enabled()
    tile = FREE_TILE if head.vocab_tile == 0 and head.chunk_tokens > 0 and not gradient_in_forward else head.vocab_tile
    asked = {} if statistics is None else statistics.asked
    if teaching is not None and teaching.taught(head).whole_rows_pay:
        tile = head.vocab_tile
    if any(statistic.rescaled is None for statistic in asked.values()):
        tile = 0
    head = replace(head, vocab_tile=tile, statistics=asked, teaching=teaching)
    if not torch.is_grad_enabled():
        tokens = _without_gradients(head, hidden, targets)
        if statistics is not None:
            statistics.values = tokens.further
        return tokens.log_probs, tokens.entropy, *_divergences(tokens)
    assert not asked, f"{', '.join(asked)}: statistics have no gradient"
    if token_gradient is None:
        outputs: tuple[Tensor, ...] = _Recomputed.apply(hidden, head.weight, head.bias, targets, head, in_place)
    else:
        # This forward also computes the gradients of hidden states, weight and bias. Its backward only returns them.
        outputs = _PrecomputedGradient.apply(hidden, head.weight, head.bias, targets, head, in_place, token_gradient)
    return outputs[0], outputs[1] if head.with_entropy else None, *outputs[2:]


def _without_gradients(head: Head, hidden: Tensor, targets: Tensor) -> Tokens:
    tokens = _room_for_tokens(head, hidden, parts=head.teaching is not None)
    with scope(kind="logits"):
        logits = LogitTiles(head, hidden)
        for rows in head.chunks(hidden.shape[0]):
            _keep(logits.statistics(hidden[rows], targets[rows], logits.lesson(rows)), tokens, rows)
    return tokens


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, in_place: bool
    ) -> tuple[Tensor, ...]:
        tokens = _without_gradients(head, hidden, targets)
        entropy = _or_nothing(tokens.entropy, hidden)
        # The weight is not saved: it is a parameter, which FSDP2 frees and gathers again into the same tensor.
        ctx.save_for_backward(hidden, targets, tokens.log_normalizer, entropy, tokens.normalizer_parts, tokens.taught)
        ctx.head, ctx.in_place = head, in_place
        return tokens.log_probs, entropy, *_divergences(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, targets, log_normalizer, entropy, parts, taught = ctx.saved_tensors
        head = ctx.head
        into, handed, tiles = _gradient_room(head, hidden, ctx.needs_input_grad, ctx.in_place)
        # The gradient does not need the log-probs of the targets. The normalizer only fills that field.
        parts = log_normalizer[:, None] if parts is None else parts
        statistics = Tokens(log_normalizer, log_normalizer, entropy, normalizer_parts=parts, taught=taught)
        with scope(kind="logits"):
            logits = LogitTiles(head, hidden)
            for rows in head.chunks(hidden.shape[0]):
                tokens, above = _rows_of(statistics, grads, head, rows)
                logits.differentiate(hidden[rows], targets[rows], tokens, above, _at(into, rows), False, logits.lesson(rows))
            if tiles is not None:
                _add_tiles(logits, tiles, hidden, targets, statistics, grads)
        _gradients_added(head, tiles)
        return into.hidden, *handed, None, None, None


class _PrecomputedGradient(torch.autograd.Function):
    """Computes gradients in the forward, while a chunk's logits exist. Backward checks that it gets the same gradient.

    This works because the loss of a token can be computed from its log-prob alone: advantage, old log-prob and weight are inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        in_place: bool,
        token_gradient: TokenGradient,
    ) -> tuple[Tensor, ...]:
        # Normalizers are only needed if logits are computed again later.
        into, ctx.handed, tiles = _gradient_room(head, hidden, ctx.needs_input_grad, in_place)
        again, precomputed = tiles is not None, _room_for_gradients(head, hidden)
        tokens = _room_for_tokens(head, hidden, normalizer=again, parts=again)
        with scope(kind="logits"):
            logits = LogitTiles(head, hidden)
            for rows in head.chunks(hidden.shape[0]):
                lesson = logits.lesson(rows)
                statistics = logits.statistics(hidden[rows], targets[rows], lesson)
                above = _gradient_of(token_gradient, rows, statistics)
                # The gradient is computed here in the forward, while the logits of the chunk are in the buffer. In backward they
                # would have to be computed again, which takes one more matrix product.
                logits.differentiate(hidden[rows], targets[rows], statistics, above, _at(into, rows), True, lesson)
                _keep(statistics, tokens, rows)
                if tokens.normalizer_parts is not None:
                    torch.stack(logits.normalizer_parts, 1, out=tokens.normalizer_parts[rows])
                for room, gradient in zip(precomputed, above, strict=True):
                    if room is not None:
                        assert gradient is not None
                        room[rows] = gradient
            if tiles is not None:
                _add_tiles(logits, tiles, hidden, targets, tokens, precomputed)
        _gradients_added(head, tiles)
        ctx.save_for_backward(into.hidden, *precomputed)
        return tokens.log_probs, _or_nothing(tokens.entropy, hidden), *_divergences(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Nothing is computed here: the forward has computed the gradients, and no logits exist any more.
        grad_hidden, *precomputed = ctx.saved_tensors
        # Removed from ctx, so that the gradients are freed as soon as autograd has added them.
        handed, ctx.handed = ctx.handed, None
        assert handed is not None, "the gradients of this forward were handed out already"
        for known, actual in zip(precomputed, grads, strict=True):
            if known is not None:
                _assert_as_precomputed(known, actual)
        return grad_hidden, *handed, None, None, None, None


def _gradient_of(token_gradient: TokenGradient, rows: slice, statistics: Tokens) -> LogitGrads:
    # These hooks keep tensors that autograd saves here from being offloaded: they are small, and freed at once.
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        return token_gradient(rows, statistics.log_probs, statistics.entropy)


def _assert_as_precomputed(precomputed: Tensor, actual: Tensor) -> None:
    if precomputed.numel():
        # Nothing here waits for the device. Values that are not finite make the gradient norm infinite or NaN, and the update is
        # skipped.
        finite = torch.isfinite(precomputed)
        bound = torch.where(finite, precomputed, 0.0).abs().amax() * 1e-5
        same = ((precomputed - actual).abs() <= bound) | ~(finite & torch.isfinite(actual))
        torch._assert_async(same.all(), "the gradient of the log-probs is not the precomputed one")


def _add_tiles(logits: LogitTiles, tiles: Tiles, hidden: Tensor, targets: Tensor, known: Tokens, grads: LogitGrads) -> None:
    head, chunks = logits.head, logits.head.chunks(hidden.shape[0])
    in_buffer = head.whole_rows and len(chunks) == 1
    # All chunks add to one tile before the next tile starts. So the logits of each chunk are computed once more for every tile.
    for tile in tiles.passing():
        for rows_of_weight, part in tile.parts:
            for start in range(rows_of_weight.start, rows_of_weight.stop, head.tile):
                # A tile of the gradient may hold several tiles of the vocabulary. The last one may be shorter.
                columns = slice(start, min(start + head.tile, rows_of_weight.stop))
                into = part[start - rows_of_weight.start : columns.stop - rows_of_weight.start]
                for rows in chunks:
                    tokens, above = _rows_of(known, grads, head, rows)
                    lesson = logits.lesson(rows)
                    logits.add_weight_gradient(hidden[rows], targets[rows], tokens, above, columns, into, in_buffer, lesson)


def _rows_of(known: Tokens, grads: LogitGrads, head: Head, rows: slice) -> tuple[Tokens, LogitGrads]:
    # Select some tokens from the statistics and from the gradients.
    parts = known.normalizer_parts
    assert parts is not None
    entropy = known.entropy[rows] if known.entropy is not None and head.with_entropy else None
    grad_entropy = grads[1][rows] if grads[1] is not None and head.with_entropy else None
    taught = None if known.taught is None else known.taught[rows]
    tokens = Tokens(known.log_probs[rows], known.log_normalizer[rows], entropy, normalizer_parts=parts[rows], taught=taught)
    grad_taught: tuple[Tensor | None, ...] = tuple(None if grad is None else grad[rows] for grad in grads[2:])
    return tokens, (grads[0][rows], grad_entropy, *grad_taught)


def _gradient_room(
    head: Head, hidden: Tensor, needs: tuple[bool, ...], in_place: bool
) -> tuple[Gradients, tuple[Tensor | None, Tensor | None], Tiles | None]:
    needs_hidden, needs_weight, needs_bias = needs[:3]
    tiles = tiles_of(head.weight) if needs_weight and in_place else None
    # With tiles, the weight's gradient is added tile by tile later, and needs no memory here.
    weight, hand_weight = room_for(head.weight, needs_weight and tiles is None, in_place)
    bias, hand_bias = room_for(head.bias, needs_bias, in_place)
    return Gradients(torch.empty_like(hidden) if needs_hidden else None, weight, bias), (hand_weight, hand_bias), tiles


def _gradients_added(head: Head, tiles: Tiles | None) -> None:
    if tiles is None:
        added(head.weight)
    added(head.bias)


def _room_for_tokens(head: Head, hidden: Tensor, normalizer: bool = True, parts: bool = False) -> Tokens:
    count = hidden.shape[0]

    def room() -> Tensor:
        return hidden.new_empty(count, dtype=torch.float32)

    log_normalizer = room() if normalizer else hidden.new_empty(0, dtype=torch.float32)
    further = {name: room() for name in head.statistics}
    normalizer_parts = hidden.new_empty(count, 2, dtype=torch.float32) if parts else None
    teaching, taught = head.teaching, None
    if teaching is not None:
        taught = hidden.new_empty(count, teaching.record_columns, dtype=torch.float32)
    return Tokens(room(), log_normalizer, room() if head.with_entropy else None, further, normalizer_parts, taught)


def _room_for_gradients(head: Head, hidden: Tensor) -> LogitGrads:
    # Room for the gradients of the outputs.
    def room() -> Tensor:
        return hidden.new_empty(hidden.shape[0], dtype=torch.float32)

    return room(), room() if head.with_entropy else None, *(() if head.teaching is None else (room(),))


def _keep(part: Tokens, whole: Tokens, rows: slice) -> None:
    whole.log_probs[rows] = part.log_probs
    if whole.log_normalizer.numel():
        whole.log_normalizer[rows] = part.log_normalizer
    if whole.entropy is not None:
        assert part.entropy is not None
        whole.entropy[rows] = part.entropy
    for name, values in part.further.items():
        whole.further[name][rows] = values
    if whole.taught is not None:
        assert part.taught is not None
        whole.taught[rows] = part.taught
        if whole.normalizer_parts is not None:
            assert part.normalizer_parts is not None
            whole.normalizer_parts[rows] = part.normalizer_parts


def _divergences(tokens: Tokens) -> tuple[Tensor, ...]:
    return () if tokens.taught is None else (tokens.taught[:, VALUE].clone(),)


def _at(into: Gradients, rows: slice) -> Gradients:
    return Gradients(None if into.hidden is None else into.hidden[rows], into.weight, into.bias)


def _or_nothing(values: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden.new_empty(0, dtype=torch.float32) if values is None else values
