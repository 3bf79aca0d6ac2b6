"""Exact divergences between the next-token distributions of a student and a frozen teacher, without the logits of all tokens.

For one token, let a and b be the log-probs of student and teacher over the vocabulary that both have, p = e^a, q = e^b,
d = b - a, and g the gradient of the loss with respect to the divergence. The gradient in the student's logits is, entry by entry,

- reverse KL, KL(p || q): g p (-d - R), where R is the divergence itself;
- forward KL, KL(q || p): g (p - q);
- JSD(beta), with m = beta q + (1 - beta) p, l = log(m / p) and K = KL(p || m): g (1 - beta) p (-l - K).

The head (:class:`~verl_memopt.memory.logit_tiles.LogitTiles`) shows the log-probs of one tile of the vocabulary after another.
A lesson computes the teacher's log-probs for the same tile, and the divergence of both. Tiles add up by the chain rule of KL:
with the shares s_i and t_i of tile i under both models, KL = sum of s_i KL_i + KL(s || t). A JSD needs the normalizers of all
tiles, so it reads its tiles twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from verl_memopt.memory.chunked_logprob import FREE_TILE, TAUGHT_COLUMNS, Taught
from verl_memopt.memory.logit_tiles import BEFORE_ANY, Head, LogitTiles, log_softmax_, slices
from verl_memopt.observe.byte_tracker import scope

FAR = 20.0
"""Beyond this difference of log-probs, e^d is not computed: it may overflow."""

VALUE, CENTER, SHIFT = 0, 1, 2
"""Columns of a record, fp32 [c, 4 or 5]: the divergence; R or K; and the log of the student's mass on the shared vocabulary."""
TOP, LOG_SUM = 3, 4
"""Columns of the record of a whole teacher: the two parts of its normalizer."""
REST = 3
"""Column of the record of the teacher's most probable entries: the log of the student's mass outside of them."""

Terms: TypeAlias = Callable[[Tensor, slice], Tensor | None]
"""Computes the gradient of the divergence in some columns of a tile's logits, fp32 [c, at most the number of columns]. Its
arguments are the student's log-probs there, unchanged, and the columns. None = these columns are not shared."""


@dataclass(frozen=True)
class Divergence:
    """A divergence between student and teacher. ``beta`` is the teacher's share of the mixture of a JSD (arXiv 2306.13649)."""

    kind: Literal["reverse_kl", "forward_kl", "jsd"]
    beta: float = 0.5

    def __post_init__(self) -> None:
        assert self.kind in ("reverse_kl", "forward_kl", "jsd"), self.kind
        assert self.kind != "jsd" or 0 < self.beta < 1, f"beta={self.beta}: the bounds 0 and 1 are other divergences, the KLs"


class Lesson(Protocol):
    """What a teacher says of a chunk of tokens. It reads the student's log-probs, one tile of the vocabulary after another."""

    reads_again: bool
    """Whether the divergence needs another reading, after the normalizers of all tiles are known."""
    compiles: bool
    """Whether its statements are compiled where those of the student are, so that they need no temporary tensors."""

    def read(self, log_p: Tensor, columns: slice) -> tuple[Tensor, ...] | None:
        """Return what is known from a tile, given log-probs fp32 [c, tile] whose exponentials sum to 1 over the tile.

        None = the tile has no shared entry.
        """

    def merged(
        self, one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None, log_shares: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Combine two sets of columns. ``log_shares`` are the logs of their shares of the student's mass, fp32 [c] each."""

    def record(self, known: tuple[Tensor, ...] | None) -> Tensor:
        """Return the record of the chunk, fp32 [c, 4 or 5]."""

    def read_again(self, log_p: Tensor, columns: slice, record: Tensor) -> None:
        """Add to the record what a tile says, given log-probs over the whole vocabulary."""

    def terms(self, columns: slice, record: Tensor, grad: Tensor, still: bool) -> Terms:
        """Return a function that computes the gradient of the divergences in a tile's logits.

        Args:
            columns: The columns of the tile.
            record: Of :meth:`record`.
            grad: The gradient of the divergences, divided by the temperature, fp32 [c].
            still: The last call was :meth:`read` of this tile.
        """


class Teaching:
    """What a frozen teacher says of the tokens of one pass, by its head.

    Not a dataclass, because FSDP2 copies dataclasses among the inputs of a forward.
    """

    record_columns = 5

    def __init__(self, divergence: Divergence, head: Head, states: Tensor) -> None:
        """Keep what a teacher says.

        Args:
            divergence: What is computed.
            head: The teacher's LM head, with the temperature of the student. Its chunk and tile sizes are not read.
            states: [R, h], the teacher's normed states that predict the R tokens, in the dtype of its head.
        """
        self.divergence, self.head, self.states = divergence, head, states

    def at(self, index: Any) -> Teaching:
        return Teaching(self.divergence, self.head, self.states[index])

    def taught(self, student: Head) -> Taught:
        own, theirs = student.weight.dtype, self.head.weight.dtype
        narrow = 0 if theirs in (own, torch.float32) else theirs.itemsize
        return Taught(self.divergence.kind, self.head.vocabulary, narrow=narrow)

    def lessons(self, student: Head, narrow: Tensor | None, run: Callable[..., Any]) -> Callable[[slice], Lesson]:
        """Return a function that makes the lesson of some tokens.

        ``narrow`` is a buffer for products in the compute dtype. ``run`` calls a statement, compiled or not.
        """
        shared = min(student.vocabulary, self.head.vocabulary)
        bias = None if self.head.bias is None else self.head.bias[:shared]
        # The teacher's logits are computed for as many tokens and columns as the student's.
        weight, rows, tile = self.head.weight[:shared].detach(), student.rows_at_once, min(student.tile, shared)
        head = replace(self.head, weight=weight, bias=bias, chunk_tokens=rows, vocab_tile=tile, compiled=False)
        tiles = LogitTiles(head, self.states, narrow)
        return lambda rows: _HeadLesson(self.divergence, student, tiles, self.states[rows], run)


class TopTeaching:
    """The k most probable tokens of a frozen teacher, and all other tokens as one outcome. No head of the teacher is needed."""

    record_columns = 4

    def __init__(
        self,
        kind: Literal["reverse_kl", "forward_kl"],
        ids: Tensor,
        log_probs: Tensor,
        log_rest: Tensor,
        vocabulary: int | None = None,
    ) -> None:
        """Keep what a teacher says, as :func:`top_log_probs` returns it.

        Args:
            kind: What is computed.
            ids: int [R, k], different ids in each row.
            log_probs: fp32 [R, k], the teacher's log-probs of ``ids``.
            log_rest: fp32 [R], the log of the teacher's mass on all other ids below ``vocabulary``. It is finite.
            vocabulary: The ids below this number are the outcomes of both models. None = the student's whole vocabulary, of
                which this is a part. A teacher with more entries must be asked about that number of them.
        """
        assert kind in ("reverse_kl", "forward_kl"), kind
        self.kind, self.ids, self.log_probs, self.log_rest, self.vocabulary = kind, ids, log_probs, log_rest, vocabulary

    def at(self, index: Any) -> TopTeaching:
        return TopTeaching(self.kind, self.ids[index], self.log_probs[index], self.log_rest[index], self.vocabulary)

    def taught(self, student: Head) -> Taught:
        return Taught(self.kind, student.vocabulary, self.ids.shape[1])

    def lessons(self, student: Head, narrow: Tensor | None, run: Callable[..., Any]) -> Callable[[slice], Lesson]:
        return lambda rows: _TopLesson(self.at(rows), student)


class MixedTeaching:
    """What several teachers say, each of some of the tokens."""

    def __init__(self, parts: Sequence[Teaching | TopTeaching], number: Tensor) -> None:
        """Keep what the teachers say.

        Args:
            parts: What each teacher says of its own tokens, in the order of these among all R tokens. All compute the same
                divergence.
            number: int64 [R], the position in ``parts`` of each token's teacher, on any device.
        """
        self.parts, self.number = parts, number.cpu()
        self.record_columns = parts[0].record_columns

    def at(self, index: Any) -> MixedTeaching:
        # The places in its own part of each token, then of the chosen tokens.
        places, number = torch.zeros_like(self.number), self.number
        for place in range(len(self.parts)):
            places[number == place] = torch.arange(int((number == place).sum()))
        if isinstance(index, Tensor):
            index = index.cpu()
        number, places = number[index], places[index]
        return MixedTeaching([part.at(places[number == place]) for place, part in enumerate(self.parts)], number)

    def taught(self, student: Head) -> Taught:
        largest = max((part.taught(student) for part in self.parts), key=lambda each: each.vocabulary * (4 + each.narrow))
        return replace(largest, mixed=True)

    def lessons(self, student: Head, narrow: Tensor | None, run: Callable[..., Any]) -> Callable[[slice], Lesson]:
        makers = [part.lessons(student, narrow, run) for part in self.parts]

        def lesson(rows: slice) -> Lesson:
            chosen, own = self.number[rows], []
            for place, maker in enumerate(makers):
                index = (chosen == place).nonzero()[:, 0]
                first = int((self.number[: rows.start] == place).sum())
                if len(index):
                    own.append((index, maker(slice(first, first + len(index)))))
            return own[0][1] if len(own) == 1 else _MixedLesson(own, self.record_columns)

        return lesson


AnyTeaching: TypeAlias = Teaching | TopTeaching | MixedTeaching


# What a teacher says, in a pass of its own.


@torch.no_grad()
def top_log_probs(head: Head, states: Tensor, top: int, vocabulary: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``top`` most probable ids of each token, their log-probs, and the log of the mass of all other ids.

    Args:
        head: The LM head. ``vocab_tile=0`` means ``FREE_TILE``.
        states: [R, h], normed states.
        top: k.
        vocabulary: Only ids below this number exist. None = all.

    Returns:
        int32 [R, k], in the order of their log-probs, fp32 [R, k], and fp32 [R].

    Raises:
        ValueError: There are not more than k ids.
    """
    head = _first_columns(head, vocabulary)
    if not 0 < top < head.vocabulary:
        raise ValueError(f"top={top}: choose at least 1 and fewer than the {head.vocabulary} entries of the vocabulary")
    ids = states.new_empty(states.shape[0], top, dtype=torch.int32)
    log_probs = states.new_empty(states.shape[0], top, dtype=torch.float32)
    log_rest = states.new_empty(states.shape[0], dtype=torch.float32)
    with scope(kind="logits"):
        tiles = LogitTiles(head, states)
        for rows in head.chunks(states.shape[0]):
            ids[rows], log_probs[rows], log_rest[rows] = _top_of_chunk(tiles, states[rows], top)
    return ids, log_probs, log_rest


def _top_of_chunk(tiles: LogitTiles, states: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    found = states.new_full((states.shape[0], top), BEFORE_ANY, dtype=torch.float32)
    ids, rest = torch.zeros_like(found, dtype=torch.int64), (found[:, 0], torch.zeros_like(found[:, 0]))
    for columns in tiles.head.tiles():
        logits = tiles.logits(states, columns)
        own, places = logits.topk(min(top, logits.shape[1]), -1)
        candidates, their_ids = torch.cat([found, own], 1), torch.cat([ids, places + columns.start], 1)
        found, chosen = candidates.topk(top, -1)
        ids = their_ids.gather(-1, chosen)
        # The rest is added up and never a difference, which would lose its digits: what is left of the tile, and of the best.
        left = log_sum_exp(logits, places), log_sum_exp(candidates, chosen)
        rest = reduce(_joined, left, rest)
    largest, log_sum = _joined(rest, log_sum_exp(found))
    return ids, found - largest[:, None] - log_sum[:, None], rest[0] - largest + rest[1] - log_sum


@torch.no_grad()
def _first_columns(head: Head, vocabulary: int | None) -> Head:
    # The head of the ids below a number, whose fp32 logits are computed tile by tile.
    count = min(vocabulary or head.vocabulary, head.vocabulary)
    bias = None if head.bias is None else head.bias[:count]
    return replace(head, weight=head.weight[:count], bias=bias, vocab_tile=head.vocab_tile or FREE_TILE, compiled=False)


# The lessons.


class _HeadLesson:
    def __init__(self, divergence: Divergence, student: Head, tiles: LogitTiles, states: Tensor, run: Callable[..., Any]) -> None:
        self._divergence, self._tiles, self._states, self._run = divergence, tiles, states, run
        self._shared = tiles.head.vocabulary
        self._all = self._shared == student.vocabulary
        self.reads_again = divergence.kind == "jsd" and not student.whole_rows
        self._held: Tensor | None = None
        self.compiles = True

    def read(self, log_p: Tensor, columns: slice) -> tuple[Tensor, ...] | None:
        shared = _below(columns, self._shared)
        if shared.stop <= shared.start:
            return None
        log_q = self._held = self._tiles.logits(self._states, shared)
        top, log_sum, _ = self._run(log_softmax_, log_q, None, False)
        own, shift = log_p[:, : log_q.shape[1]], None
        if own.shape[1] < log_p.shape[1]:
            shift = _log_of(log_sum_exp(own))
        none = torch.zeros_like(top)
        value, center = none, none
        if not self.reads_again:
            value, center = self._run(divergence_sums, own, log_q, shift, self._divergence)
        return none if shift is None else shift, top, log_sum, value, center

    def merged(
        self, one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None, log_shares: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...] | None:
        if one is None or other is None:
            known, log_share = (other, log_shares[1]) if one is None else (one, log_shares[0])
            return None if known is None else (known[0] + log_share, *known[1:])
        masses, shift = log_shares, one[0]
        if not self._all:
            masses = one[0] + log_shares[0], other[0] + log_shares[1]
            shift = torch.logaddexp(*masses)
        top, log_sum = _joined(one[1:3], other[1:3])
        if self.reads_again:
            return shift, top, log_sum, one[3], one[4]
        value = torch.zeros_like(shift)
        for mass, known in zip(masses, (one, other), strict=True):
            log_s, log_t = mass if self._all else mass - shift, (known[1] - top) + known[2] - log_sum
            if self._divergence.kind == "forward_kl":
                log_s, log_t = log_t, log_s
            value = value + log_s.exp() * known[3] + kl_terms(log_s, log_t, log_t - log_s)
        return shift, top, log_sum, value, value

    def record(self, known: tuple[Tensor, ...] | None) -> Tensor:
        assert known is not None
        shift, top, log_sum, value, center = known
        return torch.stack([value, center, shift, top, log_sum], 1)

    def read_again(self, log_p: Tensor, columns: slice, record: Tensor) -> None:
        log_q = self._log_q(columns, record)
        if log_q is not None:
            own, shift = log_p[:, : log_q.shape[1]], self._shift(record)
            value, center = self._run(divergence_sums, own, log_q, shift, self._divergence)
            record[:, VALUE] += value
            record[:, CENTER] += center

    def terms(self, columns: slice, record: Tensor, grad: Tensor, still: bool) -> Terms:
        log_q, shift, center = self._held if still else self._log_q(columns, record), self._shift(record), record[:, CENTER]

        def of_columns(part: Tensor, columns: slice) -> Tensor | None:
            own = None if log_q is None else log_q[:, columns]
            if own is None or own.shape[1] == 0:
                return None
            self._run(divergence_gradient_, part[:, : own.shape[1]], own, shift, center, grad, self._divergence)
            return own

        return of_columns

    def _log_q(self, columns: slice, record: Tensor) -> Tensor | None:
        shared = _below(columns, self._shared)
        if shared.stop <= shared.start:
            return None
        logits = self._tiles.logits(self._states, shared)
        return logits.sub_(record[:, TOP, None]).sub_(record[:, LOG_SUM, None])

    def _shift(self, record: Tensor) -> Tensor | None:
        return None if self._all else record[:, SHIFT]


class _TopLesson:
    reads_again = compiles = False

    def __init__(self, teaching: TopTeaching, student: Head) -> None:
        self._kind, self._ids = teaching.kind, teaching.ids.long()
        self._log_q, self._log_rest = teaching.log_probs, teaching.log_rest
        self._shared = teaching.vocabulary or student.vocabulary
        assert self._shared <= student.vocabulary, (self._shared, student.vocabulary)
        self._all = self._shared == student.vocabulary
        assert self._ids.shape[1] < self._shared, f"{self._ids.shape[1]} of {self._shared} entries leave no rest"

    def read(self, log_p: Tensor, columns: slice) -> tuple[Tensor, ...] | None:
        shared = _below(columns, self._shared)
        if shared.stop <= shared.start:
            return None
        own, places = log_p[:, : shared.stop - shared.start], self._ids - columns.start
        inside = (places >= 0) & (places < own.shape[1])
        picked = own.gather(-1, places.clamp(0, own.shape[1] - 1)).where(inside, BEFORE_ANY)
        return picked, _log_of(log_sum_exp(own, places))

    def merged(
        self, one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None, log_shares: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...] | None:
        pairs = zip((one, other), log_shares, strict=True)
        known = [(part[0] + share[:, None], part[1] + share) for part, share in pairs if part is not None]
        if len(known) < 2:
            return known[0] if known else None
        # Each id is in one set of columns. In the other it is as good as impossible.
        return torch.maximum(known[0][0], known[1][0]), torch.logaddexp(known[0][1], known[1][1])

    def record(self, known: tuple[Tensor, ...] | None) -> Tensor:
        assert known is not None
        picked, rest = known
        shift = torch.zeros_like(rest)
        if not self._all:
            shift = torch.logaddexp(rest, picked.logsumexp(-1))
        log_p = torch.cat([picked, rest[:, None]], 1) - shift[:, None]
        log_q = torch.cat([self._log_q, self._log_rest[:, None]], 1)
        if self._kind == "reverse_kl":
            value = kl_terms(log_p, log_q, log_q - log_p).sum(1)
        else:
            value = kl_terms(log_q, log_p, log_p - log_q).sum(1)
        return torch.stack([value, value, shift, rest - shift], 1)

    def read_again(self, log_p: Tensor, columns: slice, record: Tensor) -> None:
        raise AssertionError("one reading is enough")

    def terms(self, columns: slice, record: Tensor, grad: Tensor, still: bool) -> Terms:
        # d of the rest: the log of the ratio of both masses.
        ratio, divergence = (self._log_rest - record[:, REST])[:, None], record[:, VALUE, None]
        width, start = _below(columns, self._shared).stop - columns.start, columns.start

        def gradient(log_p: Tensor, log_q: Tensor | None, out: Tensor | None = None) -> Tensor:
            # Of some entries; None = entries of the rest, in which q / p is the ratio of the masses.
            if self._kind == "reverse_kl":
                d = ratio if log_q is None else log_q - log_p
                found = torch.exp(log_p, out=out).mul_(-d - divergence)
            else:
                # Not p (1 - ratio): the ratio of the masses may overflow.
                found = torch.exp(log_p, out=out).sub_((log_p + ratio if log_q is None else log_q).exp())
            return found.mul_(grad[:, None])

        def of_columns(part: Tensor, columns: slice) -> Tensor | None:
            count = min(columns.stop, width) - columns.start
            if count <= 0:
                return None
            log_p = part[:, :count] if self._all else part[:, :count] - record[:, SHIFT, None]
            places = self._ids - (start + columns.start)
            own = log_p.gather(-1, places.clamp(0, count - 1))
            # Entries of other columns go to a column more, which nobody reads.
            found = part.new_empty(part.shape[0], count + 1)
            gradient(log_p, None, found[:, :count])
            found.scatter_(-1, _places_inside(places, count), gradient(own, self._log_q))
            return found[:, :count]

        return of_columns


class _MixedLesson:
    # The lessons of several teachers, each with the places of its tokens in the chunk.

    compiles = False

    def __init__(self, lessons: Sequence[tuple[Tensor, Lesson]], columns: int) -> None:
        self._lessons, self._columns = lessons, columns
        self.reads_again = any(lesson.reads_again for _, lesson in lessons)

    def read(self, log_p: Tensor, columns: slice) -> tuple[Any, ...] | None:
        return tuple(lesson.read(log_p[self._on(log_p, index)], columns) for index, lesson in self._lessons)

    def merged(
        self, one: tuple[Any, ...] | None, other: tuple[Any, ...] | None, log_shares: tuple[Tensor, Tensor]
    ) -> tuple[Any, ...] | None:
        assert one is not None
        assert other is not None
        found = []
        for (index, lesson), first, second in zip(self._lessons, one, other, strict=True):
            own = self._on(log_shares[0], index)
            found.append(lesson.merged(first, second, (log_shares[0][own], log_shares[1][own])))
        return tuple(found)

    def record(self, known: tuple[Any, ...] | None) -> Tensor:
        assert known is not None
        records = [lesson.record(own) for (_, lesson), own in zip(self._lessons, known, strict=True)]
        whole = records[0].new_empty(sum(map(len, records)), self._columns)
        for (index, _), own in zip(self._lessons, records, strict=True):
            whole[self._on(whole, index)] = own
        return whole

    def read_again(self, log_p: Tensor, columns: slice, record: Tensor) -> None:
        for index, lesson in self._lessons:
            places = self._on(log_p, index)
            own = record[places]
            lesson.read_again(log_p[places], columns, own)
            record[places] = own

    def terms(self, columns: slice, record: Tensor, grad: Tensor, still: bool) -> Terms:
        places = [self._on(record, index) for index, _ in self._lessons]
        found = [
            lesson.terms(columns, record[own], grad[own], still) for own, (_, lesson) in zip(places, self._lessons, strict=True)
        ]

        def of_columns(part: Tensor, columns: slice) -> Tensor | None:
            whole = torch.zeros_like(part)
            for own, terms in zip(places, found, strict=True):
                gradient = terms(part[own], columns)
                if gradient is not None:
                    whole[own, : gradient.shape[1]] = gradient
            return whole

        return of_columns

    @staticmethod
    def _on(tensor: Tensor, index: Tensor) -> Tensor:
        return index.to(tensor.device)


def _below(columns: slice, end: int) -> slice:
    return slice(columns.start, min(columns.stop, end))


def _places_inside(places: Tensor, count: int) -> Tensor:
    return places.where((places >= 0) & (places < count), count)


# Elementwise statements. Compiled they run over all columns, and otherwise over some columns at a time.


def kl_terms(log_p: Tensor, log_q: Tensor, d: Tensor) -> Tensor:
    """Return p (e^d - 1 - d), where d = log_q - log_p: terms that sum to KL(p || q) if p and q sum to 1, and none is negative.

    The sum of p (log_p - log_q) would lose the digits of a small KL.
    """
    p = log_p.exp()
    near = torch.expm1(d).sub_(d).mul_(p)
    # Where it is not taken it may be any number, and where it is, the other one is infinite.
    far = log_q.exp().sub_(p.mul_(d + 1))
    return torch.where(d > FAR, far, near)


def log_ratio_of_mixture(d: Tensor, beta: float) -> Tensor:
    """Return log(m / p) for m = beta q + (1 - beta) p and d = log(q / p), exactly 0 where d is 0."""
    return d.clamp(min=0) + torch.log1p(torch.where(d > 0, 1 - beta, beta) * torch.expm1(-d.abs()))


def divergence_sums(log_p: Tensor, log_q: Tensor, shift: Tensor | None, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Sum the divergence over columns of log-probs, fp32 [c, v] each, which stay unchanged.

    ``shift`` fp32 [c] is subtracted from ``log_p``. Returns the divergence, and K of a JSD, fp32 [c] each.
    """
    value = center = torch.zeros_like(log_p[:, 0])
    for columns in _parts(log_p):
        a, b = log_p[:, columns], log_q[:, columns]
        if shift is not None:
            a = a - shift[:, None]
        if divergence.kind == "reverse_kl":
            value = value + kl_terms(a, b, b - a).sum(-1)
        elif divergence.kind == "forward_kl":
            value = value + kl_terms(b, a, a - b).sum(-1)
        else:
            ratio = log_ratio_of_mixture(b - a, divergence.beta)
            log_m = a + ratio
            own = kl_terms(a, log_m, ratio).sum(-1)
            center = center + own
            value = value + divergence.beta * kl_terms(b, log_m, log_m - b).sum(-1) + (1 - divergence.beta) * own
    return value, center if divergence.kind == "jsd" else value


def divergence_gradient_(
    log_p: Tensor, log_q: Tensor, shift: Tensor | None, center: Tensor, grad: Tensor, divergence: Divergence
) -> None:
    """Turn the teacher's log-probs into the gradient of the divergence in the student's logits, in place.

    Args:
        log_p: fp32 [c, v], the student's log-probs, unchanged. ``shift`` fp32 [c] is subtracted from them.
        log_q: fp32 [c, v], the teacher's, overwritten.
        shift: None = 0.
        center: fp32 [c], R or K.
        grad: fp32 [c], the gradient of the divergences.
        divergence: Which one.
    """
    a = log_p if shift is None else log_p - shift[:, None]
    if divergence.kind == "forward_kl":
        log_q.exp_().neg_().add_(a.exp())
    else:
        d = log_q.sub_(a)
        if divergence.kind == "jsd":
            d, grad = d.copy_(log_ratio_of_mixture(d, divergence.beta)), grad * (1 - divergence.beta)
        d.add_(center[:, None]).neg_().mul_(a.exp())
    log_q.mul_(grad[:, None])


def log_sum_exp(values: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest of fp32 [c, v] and the log of the sum of exponentials relative to it, fp32 [c] each.

    A few columns are read at a time. ``without`` int64 [c, k] are columns to leave out; they may be outside of 0 to v - 1.
    """
    total = values.new_full(values.shape[:1], BEFORE_ANY), values.new_zeros(values.shape[:1])
    for columns in slices(values.shape[1], TAUGHT_COLUMNS):
        part = values[:, columns]
        if without is not None:
            count = part.shape[1]
            room = part.new_full((part.shape[0], count + 1), BEFORE_ANY)
            room[:, :count] = part
            part = room.scatter_(-1, _places_inside(without - columns.start, count), BEFORE_ANY)
        top = part.amax(-1)
        total = _joined(total, (top, (part - top[:, None]).exp_().sum(-1).log_()))
    return total


def _joined(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # Add sums of exponentials. Each is (its largest exponent, the log of the sum relative to it).
    top = torch.maximum(one[0], other[0])
    return top, torch.logaddexp(one[0] - top + one[1], other[0] - top + other[1])


def _log_of(total: tuple[Tensor, Tensor]) -> Tensor:
    return total[0] + total[1]


def _parts(values: Tensor) -> Iterator[slice]:
    if torch.compiler.is_compiling():
        return iter([slice(0, values.shape[1])])
    return slices(values.shape[1], TAUGHT_COLUMNS)
