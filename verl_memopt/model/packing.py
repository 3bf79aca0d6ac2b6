"""Pack a micro-batch for the model: its sequences in one row of tokens (a pack), and the log-probs to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from verl_memopt.distributed.device import sent_together
from verl_memopt.memory.recompute_elementwise_torch import Rows
from verl_memopt.memory.sequence_parallel_torch import SequenceGroup, TokenSplit
from verl_memopt.memory.token_packing import skipped_if_many
from verl_memopt.model.prefix_layout import PrefixGroup, PrefixLayout, PrefixSpan, changed, on_host, ranges, span_of
from verl_memopt.model.router_replay import Routes


@dataclass(frozen=True)
class LastBlockQueries:
    """The Q tokens whose output of the last block is used: the last token of each prompt, and the tokens after it.

    Attributes:
        layout: The layout with these tokens as queries and all tokens of the pack as keys.
        predicts: int64 [U], the pack's ``predicts`` as places among these Q tokens.
    """

    layout: PrefixLayout
    predicts: Tensor


@dataclass(frozen=True)
class Pack:
    """The packed tokens of some rows.

    The rows have R response tokens. Rows that share response tokens and everything before them share their computation, so only U
    of the R tokens are computed.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T].
        layout: Which of the T tokens share a prefix.
        predicts: int64 [U], for each computed response token the place of the token whose last hidden state predicts it.
        targets: int64 [U], these response tokens.
        row: int64 [R], the row of each response token.
        row_lengths: int64 [rows], number of response tokens of each row.
        predicts_on_host: A copy of ``predicts`` on the host, int64 [U].
        last_block: The queries of a pruned last block. None = pruning would skip too few tokens.
        entry: int64 [R], the place of each response token among the U computed ones. None = R equals U, in the same order.
        entry_on_host: A copy of ``entry`` on the host.
        sources: int64 [T] on the host, the place of each token in the tensors from which the pack was made, one after another.
            None = a placeholder, or one rank's share.
        routes: The experts of the T tokens. None = the routers of the model choose, if it has any.
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
    entry: Tensor | None = None
    entry_on_host: np.ndarray | None = None
    sources: np.ndarray | None = None
    routes: Routes | None = None

    @property
    def num_rows(self) -> int:
        return int(self.row_lengths.shape[0])

    def to(self, device: torch.device) -> Pack:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Pack:
        last = self.last_block
        last = None if last is None else LastBlockQueries(last.layout.map(change), change(last.predicts))
        routes = None if self.routes is None else self.routes.map(change)
        return replace(self, layout=self.layout.map(change), last_block=last, routes=routes, **changed(self, change))

    def routed(self, values: Tensor | None) -> Pack:
        """Return the pack with routes, made of ``values`` of the tensors from which it was made, as in :meth:`Routes.of`.

        None, or a placeholder: the routers choose.
        """
        return self if values is None or self.sources is None else replace(self, routes=Routes.of(values, self.sources))

    def of_entries(self, values: Tensor) -> Tensor:
        """Return the values of all response tokens, [R], from those of the computed ones, [U]."""
        return values if self.entry is None else values.index_select(0, self.entry)

    def with_targets(self, places: Tensor) -> Pack:
        """Return a pack with the same tokens, but only some of the targets.

        ``places`` are the places of the targets to keep among the R response tokens, int64 on the host, ascending.
        """
        device = self.targets.device
        if self.entry_on_host is None:
            own = places.numpy()
            (sent,) = sent_together([places], device)
            return self._with_targets(self.predicts_on_host[own], sent, sent)
        own, entry = np.unique(self.entry_on_host[places.numpy()], return_inverse=True)
        computed, to, sent = sent_together([on_host(own), on_host(entry), places], device)
        return replace(self._with_targets(self.predicts_on_host[own], computed, sent), entry=to, entry_on_host=entry)

    def _with_targets(self, predicts_on_host: np.ndarray, computed: Tensor, places: Tensor) -> Pack:
        # ``computed`` are places among the U targets, ``places`` among the R response tokens.
        row, last = self.row[places], self.last_block
        return replace(
            self,
            predicts=self.predicts[computed],
            targets=self.targets[computed],
            row=row,
            row_lengths=torch.zeros_like(self.row_lengths).index_add(0, row, torch.ones_like(row)),
            predicts_on_host=predicts_on_host,
            last_block=None if last is None else replace(last, predicts=last.predicts[computed]),
        )

    def share(self, group: SequenceGroup) -> tuple[Pack, Tensor]:
        """Return this rank's share of the pack in a sequence-parallel group, and the places of its response tokens, int64 [r].

        The share has this rank's tokens as ``input_ids``, and the targets that these tokens predict. Its ``predicts`` are places
        among these tokens. Its ``position_ids`` have all tokens, and its layouts say how all tokens are split. Every target
        belongs to exactly one rank. Nothing here waits for the device.
        """
        tokens, device = self.input_ids.shape[1], self.input_ids.device
        if tokens < group.size:  # fewer tokens than ranks: each rank computes all of them, and only rank 0 has the targets
            every = on_host(np.arange(len(self.row) if group.rank == 0 else 0))
            return self.with_targets(every), sent_together([every], device)[0]
        split = TokenSplit(group, sizes := group.shares(tokens), sizes)
        first, end = split.own.start, split.own.stop
        is_own = (self.predicts_on_host >= first) & (self.predicts_on_host < end)
        own, at = np.flatnonzero(is_own), self.predicts_on_host[is_own]
        last = self.last_block
        found, among = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if last is not None:
            # The queries of a rank are the queries among its own tokens.
            borders = np.searchsorted(last.layout.query_places, np.cumsum([0, *sizes]))
            found = last.layout.query_places[borders[group.rank] : borders[group.rank + 1]]
            among = np.searchsorted(found, at)
        entries, entry = own, None
        if self.entry_on_host is not None:
            entries = np.flatnonzero(is_own[self.entry_on_host])
            entry = np.searchsorted(own, self.entry_on_host[entries])
        arrays = (own, at - first, found - first, among, *(() if entry is None else (entries, entry)))
        computed, predicts, queries, among_queries, *others = sent_together([on_host(array) for array in arrays], device)
        places, to = others if others else (computed, None)
        share = replace(self._with_targets(at - first, computed, places), entry=to, entry_on_host=entry)
        if last is not None:
            rows = Rows(queries, found - first)
            last_split = TokenSplit(group, sizes, tuple(np.diff(borders).tolist()), rows)
            last = LastBlockQueries(replace(last.layout, split=last_split), among_queries)
        routes = None if self.routes is None else self.routes.part(split.own)
        share = replace(share, input_ids=self.input_ids[:, split.own], layout=replace(self.layout, split=split), last_block=last)
        share = replace(share, sources=None, routes=routes)
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
    sources = ranges(first, sizes)
    tokens = torch.cat([prompts, responses])[on_host(sources)]
    layout, predicts = PrefixLayout.of(tuple(prefix_groups)), _predicts(prompt_end - 1, suffix_start, r)
    pack = _pack(tokens, ranges(positions, sizes), layout, predicts, responses, r, sources)
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
    layout = replace(pack.layout, branches=np.array([len(prompt) - 1]))
    return replace(pack, layout=layout, targets=none, row=none, row_lengths=none)


def pack_suffixes(prompt_size: int, responses: Tensor, response_sizes: Sequence[int]) -> Pack:
    """Pack the answers to a prompt whose keys and values are given as prefix KV.

    In ``predicts`` place 0 is the prompt's last token, and place 1 is the first token of the pack. Everything else is as in
    :func:`pack_groups`.
    """
    r = np.asarray(response_sizes, dtype=np.int64)
    # The pack has all tokens of an answer except the last one.
    own = np.maximum(r - 1, 0)
    start = np.cumsum(own) - own
    sources = ranges(np.cumsum(r) - r, own)
    tokens = responses[on_host(sources)]
    layout = PrefixLayout.of(((0, tuple(own[own > 0].tolist())),), (prompt_size,))
    predicts = _predicts(np.zeros_like(r), 1 + start, r)
    return _pack(tokens, ranges(np.full_like(own, prompt_size), own), layout, predicts, responses, r, sources)


def pack_forest(
    tokens: Tensor,
    sizes: Tensor,
    parent: Tensor,
    place: Tensor,
    row_lengths: Sequence[int],
    carried: int = 0,
    states: np.ndarray | None = None,
) -> Pack:
    """Pack rows whose response tokens lie anywhere in a forest. Tokens that rows share are computed once.

    A node of the forest is a run of tokens, and its context is the path from the root to it. The pack leaves out tokens after
    the last one that predicts a response token. If nothing is left, it has one placeholder token, as in :func:`pack_groups`.

    Args:
        tokens: int64 [T], the tokens of all nodes, node after node.
        sizes: int64 [N] on the host, number of tokens of each node, at least 1.
        parent: int64 [N] on the host, the number of each node's parent, which is below its own. -1 = a root.
        place: int64 [R] on the host, the places in ``tokens`` of the response tokens of all rows, row after row. No root begins
            with one of them.
        row_lengths: Number of response tokens of each row.
        carried: The first so many nodes are one path whose keys and values are given as prefix KV. They are not in the pack.
        states: int64, the tokens of that path whose states are given too, ascending. In ``predicts`` these states come first, and
            the tokens of the pack follow.
    """
    size, above, at = (tensor.numpy() for tensor in (sizes, parent, place))
    r = np.asarray(row_lengths, dtype=np.int64)
    assert len(at) == r.sum(), (len(at), r)
    if not len(at) and not carried:
        return _nothing(tokens[:0], len(r))
    # Each place once, in the order in which the rows come to it.
    learned, first, entry = np.unique(at, return_index=True, return_inverse=True)
    order = np.argsort(first)
    learned, entry = learned[order], np.argsort(order)[entry]
    starts = np.cumsum(size) - size
    node = np.searchsorted(starts, learned, side="right") - 1
    trees = _Trees(size, above, node, learned - starts[node], carried)
    nodes, predicts = trees.order, trees.predicts
    computed, positions = (ranges(first[nodes], trees.need[nodes]) for first in (starts, trees.before))
    sources: np.ndarray | None = computed
    if states is None:
        layout = trees.layout()
    else:
        path = int(size[:carried].sum())
        predicts = np.where(predicts < path, np.searchsorted(states, predicts), len(states) + predicts - path)
        sources = computed[path:] if len(computed) > path else None
        computed, positions, layout = _behind(path, computed, positions, trees)
    pack = _pack(tokens[on_host(computed)], positions, layout, predicts, tokens[on_host(learned)], r, sources)
    if len(learned) < len(at):
        pack = replace(pack, entry=on_host(entry), entry_on_host=entry)
    # With prefix KV no block is pruned.
    queries = trees.queries() if states is None else computed
    if not skipped_if_many(len(computed) - len(queries), len(computed)):
        return pack
    return replace(pack, last_block=LastBlockQueries(trees.layout(queries), on_host(np.searchsorted(queries, predicts))))


def _behind(path: int, computed: np.ndarray, positions: np.ndarray, trees: _Trees) -> tuple[np.ndarray, np.ndarray, PrefixLayout]:
    # The tokens behind a path of so many tokens, their positions, and the layout with them as queries.
    if len(computed) > path:
        return computed[path:], positions[path:], trees.layout(np.arange(path, len(computed)))
    # A pack without tokens would skip collectives in which other ranks wait, so take a placeholder.
    return computed[-1:], np.full(1, path), PrefixLayout.of(((0, (1,)),), (path,))


def pack_path(tokens: Tensor, before: int, states: np.ndarray, ends: np.ndarray) -> Pack:
    """Pack a run of tokens, int64 [n], to compute its keys, its values, and some of its states. The pack has no targets.

    ``before`` is the number of tokens before it, whose keys and values are given as prefix KV. ``states``, int64, are the tokens
    of the run whose states are kept. ``ends``, int64, are those after which other tokens may follow in a later pack.
    """
    layout = PrefixLayout.of(((0, (len(tokens),)),), (before,)) if before else PrefixLayout.of(((len(tokens), ()),))
    none = np.zeros(0, dtype=np.int64)
    layout = replace(layout, branches=before + ends)
    return _pack(tokens, np.arange(before, before + len(tokens)), layout, states, tokens[:0], none, np.arange(len(tokens)))


def _predicts(prompt_end: np.ndarray, suffix_start: np.ndarray, r: np.ndarray) -> np.ndarray:
    # For each response token, the place of the token that predicts it.
    present = r > 0
    # The prompt's last token predicts the first token of a response. The response's own tokens predict the others.
    predictors = np.stack([prompt_end[present], suffix_start[present]], axis=1).reshape(-1)
    predicted = np.stack([np.ones_like(r[present]), r[present] - 1], axis=1).reshape(-1)
    return ranges(predictors, predicted)


def _pack(
    tokens: Tensor,
    positions: np.ndarray,
    layout: PrefixLayout,
    predicts: np.ndarray,
    targets: Tensor,
    r: np.ndarray,
    sources: np.ndarray | None = None,
) -> Pack:
    # numpy builds all index tensors on the host, so nothing here waits for a device.
    rows = np.repeat(np.arange(len(r)), r)
    on_device = (tokens[None], on_host(positions)[None], layout, on_host(predicts), targets, on_host(rows), on_host(r))
    return Pack(*on_device, predicts, sources=sources)


def _last_block(groups: Sequence[PrefixGroup], skipped: Sequence[int], predicts: np.ndarray) -> LastBlockQueries:
    before, queries = np.asarray(skipped), np.array([prefix + sum(suffixes) for prefix, suffixes in groups])
    places = ranges(np.cumsum(before + queries) - queries, queries)
    return LastBlockQueries(PrefixLayout.of(tuple(groups), tuple(skipped)), on_host(np.searchsorted(places, predicts)))


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
    return _pack(on_host(zero), zero, PrefixLayout.of(((1, ()),)), none, responses, np.zeros(num_rows, dtype=np.int64))


# The trees of a forest in a pack.

MOST_SPANS = 4
"""Most spans over the same first keys of a chain. If there are more, those over the second half of the keys share a span over the
first half. So the keys of a chain with n forks are read log2 n times, not n times."""

JOINED_GAP = 16
"""So many tokens between two queries of a pruned last block are computed too, because a further segment costs more."""


class _Trees:
    """The nodes of a forest as they lie in a pack: depth first, and of the children the one with the most tokens first.

    A node, its first child, the first child of that, and so on are a chain, which is one segment. The trees of other children see
    the keys of the chain up to where they begin. Each of them has at most half the tokens of the tree in which it lies. So the
    rounds of T tokens are at most log2 T, or some more if a chain has many forks.

    Attributes:
        need: int64 [N], number of tokens of each node that are computed.
        before: int64 [N], number of tokens on the path above each node.
        order: int64, the nodes that have computed tokens, as they lie in the pack.
        start: int64 [N], the first token of each node.
        stop: int64 [N], the end of its tree.
        chains: int64, the first token of each chain.
        predicts: int64 [U], the place of the token that predicts each learned token.
    """

    def __init__(self, sizes: np.ndarray, parents: np.ndarray, node: np.ndarray, offset: np.ndarray, carried: int = 0) -> None:
        """``node`` and ``offset``, int64 [U], say which tokens are learned: the node of each, and its place in the node.

        The first ``carried`` nodes are a path that comes first, whatever the sizes of trees.
        """
        assert np.all((parents[node] >= 0) | (offset > 0)), "the first token of a root has no token that predicts it"
        need = np.zeros_like(sizes)
        # The last learned token of a leaf predicts nothing.
        np.maximum.at(need, node, offset)
        need[:carried] = sizes[:carried]
        self._nodes(need.tolist(), sizes.tolist(), parents.tolist(), {*node.tolist(), *range(carried)}, carried)
        end = self.start + self.need
        self.predicts = np.where(offset > 0, self.start[node] + offset, end[parents[node]]) - 1

    def _nodes(self, need: list[int], sizes: list[int], parents: list[int], used: set[int], carried: int) -> None:
        total, children = [0] * len(need), [list[int]() for _ in range(len(need) + 1)]  # the last list has the roots
        for node in range(len(need) - 1, -1, -1):
            total[node] += need[node]
            if node in used and parents[node] >= 0:
                used.add(parents[node])
                # The last token of a node predicts the first token of each child.
                need[parents[node]] = sizes[parents[node]]
                total[parents[node]] += total[node]
            if total[node]:
                children[parents[node]].append(node)
        for some in children:
            some.sort(key=lambda node: (node >= carried, -total[node], node))
        order, start, before, chain = list[int](), [0] * len(need), [0] * len(need), [*range(len(need))]
        waiting, token = children[-1][::-1], 0
        self.forks: dict[int, list[tuple[int, int, int]]] = {}  # chain -> (end of the keys, first query, end of the queries)
        while waiting:
            node = waiting.pop()
            order.append(node)
            start[node], token = token, token + need[node]
            own = children[node]
            for child in own:
                before[child] = before[node] + need[node]
            if own:
                chain[own[0]] = chain[node]
            if len(own) > 1:
                fork = token, token + total[own[0]], start[node] + total[node]
                self.forks.setdefault(start[chain[node]], []).append(fork)
            waiting += own[::-1]
        self.need, self.before, self.start, self.order = (np.array(some, dtype=np.int64) for some in (need, before, start, order))
        self.stop = self.start + np.array(total, dtype=np.int64)
        self.trees = [total[root] for root in children[-1]]
        self.chains = np.array([start[node] for node in order if chain[node] == node], dtype=np.int64)

    def queries(self) -> np.ndarray:
        """Return the places of the tokens that predict a learned token, and of the tokens in short gaps between them."""
        places = np.unique(self.predicts)
        chain = np.searchsorted(self.chains, places, side="right")
        is_joined = (np.diff(places) <= JOINED_GAP + 1) & (np.diff(chain) == 0)
        first, last = places[np.r_[True, ~is_joined]], places[np.r_[~is_joined, True]]
        return ranges(first, last - first + 1)

    def layout(self, queries: np.ndarray | None = None) -> PrefixLayout:
        """Return the layout with some tokens as queries. None = all tokens."""
        stops = np.repeat(self.stop[self.order], self.need[self.order])
        places = np.arange(len(stops)) if queries is None else queries
        spans: list[PrefixSpan] = []
        for chain, forks in self.forks.items():
            borders = np.searchsorted(places, [fork[1:] for fork in forks])
            spans += _over_chain(chain, [(end, *border) for (end, *_), border in zip(forks, borders.tolist(), strict=True)])
        # A segment is a run of neighbouring queries within a chain. It sees the keys of its chain before the run.
        chains = self.chains[np.searchsorted(self.chains, places, side="right") - 1]
        first = np.flatnonzero(np.r_[True, (np.diff(places) > 1) | (np.diff(chains) > 0)])
        ends = np.r_[first[1:], len(places)]
        runs = np.stack([chains[first], places[first], first, ends], axis=1).tolist()
        for own, same in groupby(runs, key=itemgetter(0)):
            spans += _over_chain(own, [(key, query, end) for _, key, query, end in same])
        return PrefixLayout.with_spans((ends - first).tolist(), spans, self.trees, stops, places)


def _over_chain(first_key: int, parts: Sequence[tuple[int, int, int]]) -> list[PrefixSpan]:
    # ``parts`` are the end of the keys that some queries see, the first of these queries, and their end. The ends of keys ascend.
    parts = [(end, query, last) for end, query, last in parts if query < last]
    if len(parts) <= MOST_SPANS:
        return [span for end, query, last in parts for span in span_of(query, last, first_key, end)]
    half = len(parts) // 2
    upper, lower = parts[:half], parts[half:]
    queries = min(query for _, query, _ in lower), max(last for *_, last in lower)
    return [*_over_chain(first_key, upper), *span_of(*queries, first_key, upper[-1][0]), *_over_chain(upper[-1][0], lower)]
