"""Pack a micro-batch for the model: its sequences in one row of tokens (a pack), and the log-probs to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from verl_memopt.distributed.device import sent_together
from verl_memopt.memory.recompute_elementwise_torch import Rows
from verl_memopt.memory.sequence_parallel_torch import SequenceGroup, TokenSplit
from verl_memopt.memory.token_packing import skipped_if_many


@dataclass(frozen=True)
class LastBlockQueries:
    """The Q tokens whose output of the last block is used: the last token of each prompt, and the tokens after it.

    Attributes:
        layout: The layout with these tokens as queries and all tokens of the pack as keys.
        predicts: int64 [R], the pack's ``predicts`` as places among these Q tokens.
    """

    layout: PrefixLayout
    predicts: Tensor


@dataclass(frozen=True)
class Pack:
    """The packed tokens of some rows.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T].
        layout: Which of the T tokens share a prefix.
        predicts: int64 [R], for each response token the place of the token whose last hidden state predicts it.
        targets: int64 [R], the response tokens.
        row: int64 [R], the row of each response token.
        row_lengths: int64 [rows], number of response tokens of each row.
        predicts_on_host: A copy of ``predicts`` on the host, int64 [R].
        last_block: The queries of a pruned last block. None = pruning would skip too few tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PrefixLayout
    predicts: Tensor
    targets: Tensor
    row: Tensor
    row_lengths: Tensor
    predicts_on_host: np.ndarray
    last_block: LastBlockQueries | None = None

    @property
    def num_rows(self) -> int:
        return int(self.row_lengths.shape[0])

    def to(self, device: torch.device) -> Pack:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Pack:
        changed: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        last = self.last_block
        last = None if last is None else LastBlockQueries(last.layout.map(change), change(last.predicts))
        return replace(self, layout=self.layout.map(change), last_block=last, **changed)

    def with_targets(self, places: Tensor) -> Pack:
        """Return a pack with the same tokens, but only some of the targets.

        ``places`` are the places of the targets to keep, int64 on the host, ascending.
        """
        return self._with_targets(self.predicts_on_host[places.numpy()], places.to(self.targets.device, non_blocking=True))

    def _with_targets(self, predicts_on_host: np.ndarray, places: Tensor) -> Pack:
        row, last = self.row[places], self.last_block
        return replace(
            self,
            predicts=self.predicts[places],
            targets=self.targets[places],
            row=row,
            row_lengths=torch.zeros_like(self.row_lengths).index_add(0, row, torch.ones_like(row)),
            predicts_on_host=predicts_on_host,
            last_block=None if last is None else replace(last, predicts=last.predicts[places]),
        )

    def share(self, group: SequenceGroup) -> tuple[Pack, Tensor]:
        """Return this rank's share of the pack in a sequence-parallel group, and the places of its targets, int64 [r].

        The share has this rank's tokens as ``input_ids``, and the targets that these tokens predict. Its ``predicts`` are places
        among these tokens. Its ``position_ids`` have all tokens, and its layouts say how all tokens are split. Every target
        belongs to exactly one rank. Nothing here waits for the device.
        """
        tokens, device = self.input_ids.shape[1], self.input_ids.device
        if tokens < group.size:  # fewer tokens than ranks: each rank computes all of them, and only rank 0 has the targets
            own = np.arange(len(self.predicts_on_host) if group.rank == 0 else 0)
            (places,) = sent_together([_host(own)], device)
            return self._with_targets(self.predicts_on_host[own], places), places
        split = TokenSplit(group, sizes := group.shares(tokens), sizes)
        first, end = split.own.start, split.own.stop
        own = np.flatnonzero((self.predicts_on_host >= first) & (self.predicts_on_host < end))
        at = self.predicts_on_host[own]
        last = self.last_block
        found, among = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if last is not None:
            # The queries of a rank are the queries among its own tokens.
            borders = np.searchsorted(last.layout.query_places, np.cumsum([0, *sizes]))
            found = last.layout.query_places[borders[group.rank] : borders[group.rank + 1]]
            among = np.searchsorted(found, at)
        sent = sent_together([_host(array) for array in (own, at - first, found - first, among)], device)
        places, predicts, queries, among_queries = sent
        share = self._with_targets(at - first, places)
        if last is not None:
            rows = Rows(queries, found - first)
            last_split = TokenSplit(group, sizes, tuple(np.diff(borders).tolist()), rows)
            last = LastBlockQueries(replace(last.layout, split=last_split), among_queries)
        share = replace(share, input_ids=self.input_ids[:, split.own], layout=replace(self.layout, split=split), last_block=last)
        return replace(share, predicts=predicts), places


def pack_rows(prompts: Tensor, prompt_sizes: Sequence[int], responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    return pack_groups(prompts, prompt_sizes, responses, response_sizes, range(len(response_sizes)))


def pack_groups(
    prompts: Tensor, prompt_sizes: Sequence[int], responses: Tensor, response_sizes: Sequence[int], groups: Sequence[int]
) -> Pack:
    """Pack rows so that the rows of one group share their prompt.

    ``predicts``, ``targets`` and ``row`` keep the order of the rows. The pack leaves out the last token of a response, which
    predicts nothing, rows with an empty response, and prompts of groups whose responses are all empty. If nothing is left, the
    pack has one placeholder token, so that this rank still runs the same collectives as other ranks. No shape depends on the
    values of tokens, so fake tensors work.

    Args:
        prompts: int64, the prompts of all rows, one after another. The prompt of a group's first row is packed.
        prompt_sizes: Number of tokens of each prompt.
        responses: int64, the responses of all rows, one after another.
        response_sizes: Number of tokens of each response.
        groups: The group of each row. Rows of one group need not be neighbours.
    """
    p, r = np.asarray(prompt_sizes, dtype=np.int64), np.asarray(response_sizes, dtype=np.int64)
    assert len(p) == len(r) == len(groups), (len(p), len(r), len(groups))
    members = _members(groups, r)
    if not members:
        return _nothing(responses, len(r))
    # A group consists of one piece of ``prompts``, then one piece of ``responses`` per row. Start places count in both tensors,
    # concatenated.
    prompt_start, response_start = np.cumsum(p) - p, len(prompts) + np.cumsum(r) - r
    pieces: list[tuple[int, int, int]] = []  # (start place, number of tokens, position of the first token)
    prefix_groups: list[PrefixGroup] = []
    last_block_groups: list[PrefixGroup] = []
    skipped: list[int] = []
    prompt_end, suffix_start = np.zeros_like(p), np.zeros_like(p)
    token = 0
    for rows in members:
        prefix = int(p[rows[0]])
        assert all(p[row] == prefix for row in rows), f"rows {rows} share a prompt, and their prompts have {p[rows]} tokens"
        suffixes = [int(r[row]) - 1 for row in rows]
        prefix_groups.append(_prefix_group(prefix, suffixes))
        last_block_groups.append(_prefix_group(1, suffixes))
        skipped.append(prefix - 1)
        pieces.append((prompt_start[rows[0]], prefix, 0))
        token += prefix
        # The place after the prompt's last token, which predicts the first token of each answer.
        prompt_end[rows] = token
        for row in rows:
            pieces.append((response_start[row], r[row] - 1, prefix))
            suffix_start[row] = token
            # The last token of an answer is not in the pack, because it predicts nothing.
            token += int(r[row]) - 1
    first, sizes, positions = np.array(pieces, dtype=np.int64).T
    # Gather all tokens of the pack at once.
    tokens = torch.cat([prompts, responses])[_host(ranges(first, sizes))]
    layout, predicts = PrefixLayout.of(tuple(prefix_groups)), _predicts(prompt_end - 1, suffix_start, r)
    pack = _pack(tokens, ranges(positions, sizes), layout, predicts, responses, r)
    # Pruning copies the remaining rows. If few rows are skipped, this costs more than it saves.
    if not skipped_if_many(sum(skipped), token):
        return pack
    # The whole layout stays in the pack, because all other blocks use it.
    return replace(pack, last_block=_last_block(last_block_groups, skipped, predicts))


def pack_prompt(prompt: Tensor) -> Pack:
    """Pack only a prompt, int64 [P], to compute its prefix KV and the state of its last token. The pack has no targets."""
    none = prompt.new_zeros(0)
    # pack_rows leaves out a prompt without a response. With a response of one token it keeps the prompt and adds no token.
    pack = pack_rows(prompt, [len(prompt)], prompt[:1], [1])
    return replace(pack, targets=none, row=none, row_lengths=none)


def pack_suffixes(prompt_size: int, responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    """Pack the answers to a prompt whose keys and values are given as prefix KV.

    In ``predicts`` place 0 is the prompt's last token, and place 1 is the first token of the pack. Everything else is as in
    :func:`pack_groups`.
    """
    r = np.asarray(response_sizes, dtype=np.int64)
    # The pack has all tokens of an answer except the last one.
    own = np.maximum(r - 1, 0)
    start = np.cumsum(own) - own
    tokens = responses[_host(ranges(np.cumsum(r) - r, own))]
    layout = PrefixLayout.of(((0, tuple(own[own > 0].tolist())),), (prompt_size,))
    predicts = _predicts(np.zeros_like(r), 1 + start, r)
    return _pack(tokens, ranges(np.full_like(own, prompt_size), own), layout, predicts, responses, r)


def _predicts(prompt_end: np.ndarray, suffix_start: np.ndarray, r: np.ndarray) -> np.ndarray:
    # For each response token, the place of the token that predicts it.
    present = r > 0
    # The prompt's last token predicts the first token of a response. The response's own tokens predict the others.
    predictors = np.stack([prompt_end[present], suffix_start[present]], axis=1).reshape(-1)
    predicted = np.stack([np.ones_like(r[present]), r[present] - 1], axis=1).reshape(-1)
    return ranges(predictors, predicted)


def _pack(
    tokens: Tensor, positions: np.ndarray, layout: PrefixLayout, predicts: np.ndarray, targets: Tensor, r: np.ndarray
) -> Pack:
    # numpy builds all index tensors on the host, so nothing here waits for a device.
    rows = np.repeat(np.arange(len(r)), r)
    return Pack(tokens[None], _host(positions)[None], layout, _host(predicts), targets, _host(rows), _host(r), predicts)


def _last_block(groups: Sequence[PrefixGroup], skipped: Sequence[int], predicts: np.ndarray) -> LastBlockQueries:
    before, queries = np.asarray(skipped), np.array([prefix + sum(suffixes) for prefix, suffixes in groups])
    places = ranges(np.cumsum(before + queries) - queries, queries)
    return LastBlockQueries(PrefixLayout.of(tuple(groups), tuple(skipped)), _host(np.searchsorted(places, predicts)))


def _members(groups: Sequence[int], response_sizes: np.ndarray) -> list[list[int]]:
    # For each group the rows with a response. Groups are in the order of their first such row.
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if response_sizes[row] > 0:
            members.setdefault(int(group), []).append(row)
    return list(members.values())


def _prefix_group(prefix: int, suffixes: list[int]) -> PrefixGroup:
    if len(suffixes) == 1:  # nothing is shared, so use one segment, which needs one kernel call instead of three
        return prefix + suffixes[0], ()
    return prefix, tuple(length for length in suffixes if length > 0)


def _nothing(responses: Tensor, num_rows: int) -> Pack:
    zero, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # A pack without tokens would skip collectives in which other ranks wait.
    return _pack(_host(zero), zero, PrefixLayout.of(((1, ()),)), none, responses, np.zeros(num_rows, dtype=np.int64))


def _host(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from ``start`` to ``start + size - 1``, int64 [sum of sizes]."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())


# Which tokens of packed sequences share a prefix, and the index tensors that attention over them needs.
#
# A pack is one row of tokens. It consists of groups, one after another. A group is a prefix followed by its suffixes. The prefix
# is one segment, and so is each suffix. A token sees itself and the tokens before it in its own segment. A token of a suffix also
# sees the whole prefix of its group. A group may skip queries: the outputs of the first tokens of its prefix are then not
# computed, and these tokens are only keys.

PrefixGroup: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of tokens of the prefix, and number of tokens of each suffix, in the order of the tokens."""


@dataclass(frozen=True)
class SegmentRun:
    start: int
    count: int
    length: int


@dataclass(frozen=True)
class PrefixSpan:
    """One part of the prefix pass: neighbouring queries that all see the same neighbouring keys.

    ``keys`` are places among all tokens, ``queries`` places among the queries. They differ if tokens are skipped.
    """

    keys: SegmentRun
    queries: SegmentRun


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """The groups of a pack on the host, and the index tensors of its attention kernels on the device.

    Attributes:
        groups: Number of queries in the prefix and in each suffix of each group. A prefix has 0 queries if all its tokens are
            skipped.
        skipped: For each group, the number of prefix tokens before its first query. They are only keys.
        cu_seqlens: int32 [segments + 1], the first query of each segment, then the number of queries.
        prefix_index_q: int64, the queries of all prefix spans, in order.
        prefix_index_k: int64, the keys of all prefix spans, in order.
        prefix_cu_seqlens_q: int32 [spans + 1], where the queries of each span begin in ``prefix_index_q``.
        prefix_cu_seqlens_k: int32 [spans + 1], where the keys of each span begin in ``prefix_index_k``.
        query_index: int64, the places of the queries among the keys. None = every key is also a query.
        split: How the ranks of a sequence-parallel group share the tokens. None = this rank computes all of them.
    """

    groups: tuple[PrefixGroup, ...]
    skipped: tuple[int, ...]
    cu_seqlens: Tensor
    prefix_index_q: Tensor
    prefix_index_k: Tensor
    prefix_cu_seqlens_q: Tensor
    prefix_cu_seqlens_k: Tensor
    query_index: Tensor | None
    split: TokenSplit | None = None

    @classmethod
    def of(cls, groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...] | None = None) -> PrefixLayout:
        """Build the layout of some groups, on the CPU. ``skipped`` is as in the class. None = no token is skipped."""
        num_skipped = (0,) * len(groups) if skipped is None else skipped
        spans = tuple(prefix_spans(groups, num_skipped))
        keys = [span.keys for span in spans]
        queries = [span.queries for span in spans]
        return cls(
            groups,
            num_skipped,
            # Build all tensors on the host, so that the whole pack is sent to the device at once.
            cu_seqlens=_cumulative(segments(groups)),
            prefix_index_q=_host(_places(queries)),
            prefix_index_k=_host(_places(keys)),
            prefix_cu_seqlens_q=_cumulative(run.length for run in queries),
            prefix_cu_seqlens_k=_cumulative(run.length for run in keys),
            query_index=_host(_places(_query_runs(groups, num_skipped))) if any(num_skipped) else None,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> PrefixLayout:
        changed: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def at_queries(self, *tensors: Any) -> tuple[Any, ...]:
        if self.query_index is None:
            return tensors
        return tuple(None if tensor is None else tensor[self.query_index] for tensor in tensors)

    def at_keys(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Scatter a tensor of the queries [Q, ...] to the places of all keys, with zeros for skipped tokens.

        The result has the shape and dtype of ``like``, [T, ...].
        """
        if self.query_index is None:
            return tensor
        return torch.zeros_like(like).index_copy_(0, self.query_index, tensor)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        return tuple(segments(self.groups))

    @cached_property
    def runs(self) -> tuple[SegmentRun, ...]:
        # Neighbouring segments of equal length form one run, for kernels that need equal lengths.
        runs: list[SegmentRun] = []
        start = 0
        for length, same in groupby(self.segments):
            runs.append(SegmentRun(start, sum(1 for _ in same), length))
            start += runs[-1].count * length
        return tuple(runs)

    @cached_property
    def prefix_spans(self) -> tuple[PrefixSpan, ...]:
        return tuple(prefix_spans(self.groups, self.skipped))

    @cached_property
    def prefix_slices(self) -> tuple[slice, slice] | None:
        if len(self.prefix_spans) != 1:
            return None
        (span,) = self.prefix_spans
        places = (slice(run.start, run.start + run.length) for run in (span.queries, span.keys))
        return next(places), next(places)

    @cached_property
    def plans(self) -> dict[int, Any]:
        return {}

    @property
    def own_queries(self) -> Rows | None:
        if self.split is not None:
            return self.split.rows
        return None if self.query_index is None else Rows(self.query_index, self.query_places)

    @cached_property
    def query_places(self) -> np.ndarray:
        """Places of the queries among the keys, int64 [Q] on the host."""
        return _places(_query_runs(self.groups, self.skipped))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        pairs = zip(self.skipped, self.groups, strict=True)
        return tuple(skipped + prefix + sum(suffixes) for skipped, (prefix, suffixes) in pairs)


def segments(groups: tuple[PrefixGroup, ...]) -> Iterator[int]:
    for prefix, suffixes in groups:
        if prefix:
            yield prefix
        yield from suffixes


def prefix_spans(groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...]) -> Iterator[PrefixSpan]:
    """Yield the parts of the prefix pass, in order.

    For each group these are the queries of its prefix over its skipped tokens, if it has both, and the queries of all its
    suffixes over its whole prefix.
    """
    query = key = 0
    for before, (prefix, suffixes) in zip(skipped, groups, strict=True):
        if before and prefix:
            yield PrefixSpan(keys=SegmentRun(key, 1, before), queries=SegmentRun(query, 1, prefix))
        if suffixes:
            yield PrefixSpan(keys=SegmentRun(key, 1, before + prefix), queries=SegmentRun(query + prefix, 1, sum(suffixes)))
        query += prefix + sum(suffixes)
        key += before + prefix + sum(suffixes)


def _query_runs(groups: tuple[PrefixGroup, ...], skipped: tuple[int, ...]) -> Iterator[SegmentRun]:
    key = 0
    for before, (prefix, suffixes) in zip(skipped, groups, strict=True):
        yield SegmentRun(key + before, 1, prefix + sum(suffixes))
        key += before + prefix + sum(suffixes)


def _cumulative(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _places(runs: Iterable[SegmentRun]) -> np.ndarray:
    places = [np.arange(run.start, run.start + run.length) for run in runs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *places])
