"""The batch of one step: prompts, responses and the results of each pass, as ragged tensors in prompt-major order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor

from verl_memopt.config.schema import Actor
from verl_memopt.memory.shared_prompt import prompt_groups
from verl_memopt.memory.token_packing import RowTokens
from verl_memopt.model.forest import Forest, Turn, build_forest, common_length
from verl_memopt.model.prefix_layout import ranges

TOKEN_FIELDS = (
    "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "selected", "old_values", "returns", "weights", "kept",
    "sampled_log_probs", "teacher_log_probs", "teacher_weights", "teacher_ids", "teacher_top",
    "teacher_rest", "places", "routes",
)  # fmt: skip
"""Fields with one entry per response token, in the order of ``responses.flat``."""


class RolloutBatch(TensorClass):
    """Prompts with n responses each. Row = prompt_index * n + sample_index.

    B is the number of rows and R the number of response tokens of all rows.

    Attributes:
        prompts: The prompt of each row; or each prompt once, with an index from row to prompt (``algorithm.expansion=lazy``).
        group: int64 [B], the number of the prompt that each row answers.
        prompt_group: int64 [B]. Rows with the same number compute their common prompt once. None = each row computes its prompt.
        forest: The tokens of all turns, if rows are conversations. A row of ``responses`` then has the sampled tokens of all its
            turns, one turn after another. R counts only these. None = a row is its prompt and its response.
        selected: bool [R], the tokens that the losses ``clip_cov`` and ``kl_cov`` act on.
        kept: bool [R], False for tokens that the rollout correction rejects.
        old_values: fp32 [R], the critic's values when the advantages were computed.
        returns: fp32 [R], the targets of the critic.
        weights: fp32 [R], importance weights of the rollout correction.
        sampled_log_probs: fp32 [R], the engine's log-probs, if ``actor.off_policy_mask_threshold`` reads them in the update.
        teacher_log_probs: fp32 [R], log-probs under the teacher, if ``distill.divergence=sampled`` reads them.
        teacher_weights: fp32 [R], the weight of the teacher in each token's row. None = 1.
        teacher_ids: int32 [R, k], the most probable tokens of a teacher that is not in the workers.
        teacher_top: fp32 [R, k], their log-probs.
        teacher_rest: fp32 [R], the log of the mass of all other tokens. None = it follows from ``teacher_top``.
        teacher_prompts: The prompt of each row that the teacher reads. None = it reads ``prompts``.
        teacher: int64 [B], the number of each row's teacher. None = all rows have the first one.
        places: int64 [R], numbers by which the update finds the teacher's states of the tokens.
        routes: The experts of each token for router replay, uint8 or int16 [R, L, k] (L layers, k experts of a token). In the
            pass that records them they are int32 [R], the places of the tokens in the record. With a forest it has them.
        prompt_routes: The same for the prompts. Rows that compute their common prompt once have one set.

    The other optional fields are fp32 [R] too.
    """

    prompts: Ragged | SharedRows
    responses: Ragged
    group: Tensor
    prompt_group: Tensor | None = None
    forest: Forest | None = None
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    selected: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None
    sampled_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    teacher_weights: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_top: Tensor | None = None
    teacher_rest: Tensor | None = None
    places: Tensor | None = None
    teacher_prompts: Ragged | SharedRows | None = None
    teacher: Tensor | None = None
    routes: Tensor | None = None
    prompt_routes: Ragged | SharedRows | None = None

    @property
    def num_rows(self) -> int:
        return int(self.group.shape[0])

    def prompt_groups(self) -> Sequence[int]:
        """Return a number for each row. Rows with the same number compute their common prompt once."""
        return range(self.num_rows) if self.prompt_group is None else self.prompt_group.tolist()

    def row_tokens(self) -> RowTokens:
        """Return the number of tokens that a pass computes for each row. A row without a response computes no prompt."""
        if self.forest is not None:
            return self._node_tokens(self.forest)
        pairs = list(zip(self.prompts.sizes(), self.responses.sizes(), strict=True))
        return RowTokens(
            prompts=tuple(prompt if response else 0 for prompt, response in pairs),
            answers=tuple(max(response - 1, 0) for _, response in pairs),
            groups=tuple(self.prompt_groups()),
        )

    def _node_tokens(self, forest: Forest) -> RowTokens:
        sizes = self.responses.sizes()
        paths = forest.paths(sizes)
        # A row with a single turn computes its prompt, and its response without the last token.
        pairs = zip(paths, self.prompts.sizes(), sizes, strict=True)
        prompts = [
            prompt if path and sum(tokens for _, tokens in path) == prompt + size - 1 else 0 for path, prompt, size in pairs
        ]
        return RowTokens.of_paths(paths, self.prompt_groups(), prompts, forest.parent.tolist())

    def response_row(self) -> Tensor:
        # int64 [R]: the row of each response token.
        return torch.repeat_interleave(torch.arange(self.num_rows), self.responses.lengths)

    def for_teacher(self) -> RolloutBatch:
        """Return the batch that the teacher reads: the same responses, after its own prompts if it has any."""
        if self.teacher_prompts is None:
            return self
        batch = self.clone(recurse=False)
        batch.prompts, batch.forest = self.teacher_prompts, None
        return batch

    @property
    def is_routed(self) -> bool:
        return self.routes is not None or (self.forest is not None and self.forest.routes is not None)

    def unrouted(self) -> RolloutBatch:
        """Return the batch without routes, for models that choose experts themselves."""
        return self._with_routes(None) if self.is_routed else self

    def for_record(self) -> RolloutBatch:
        """Return the batch with the places of its tokens in a record, int32. See :meth:`replaying`."""
        return self._with_routes(torch.arange(self._routed_tokens, dtype=torch.int32))

    def replaying(self, parts: Sequence[tuple[Tensor, Tensor]]) -> RolloutBatch:
        """Return the batch with the experts of a record: pairs of places int64 [n] and experts [n, L, k].

        If several parts have a token, the first one counts. A token in no part has expert 0 everywhere.
        """
        experts = parts[0][1]
        record = experts.new_zeros(self._routed_tokens, *experts.shape[1:])
        for places, some in reversed(parts):
            record[places] = some
        return self._with_routes(record)

    @property
    def _routed_tokens(self) -> int:
        if self.forest is not None:
            return len(self.forest.tokens)
        return sum(self._prompts_once()[1].sizes()) + int(self.responses.lengths.sum())

    def _prompts_once(self) -> tuple[Tensor, Ragged]:
        # The number of each row's group, int64 [B], and the prompts of these groups.
        numbers, firsts = dict[int, int](), list[int]()
        for row, group in enumerate(self.prompt_groups()):
            if group not in numbers:
                numbers[group] = len(firsts)
                firsts.append(row)
        index = torch.tensor([numbers[group] for group in self.prompt_groups()], dtype=torch.int64)
        chosen = self.prompts.select(firsts)
        return index, Ragged(flat=chosen.flat, lengths=chosen.lengths, batch_size=[])

    def _with_routes(self, values: Tensor | None) -> RolloutBatch:
        batch: RolloutBatch = self.clone(recurse=False)
        if self.forest is not None:
            batch.forest = self.forest.clone(recurse=False)
            batch.forest.routes = values
            return batch
        batch.routes = batch.prompt_routes = None
        if values is not None:
            index, prompts = self._prompts_once()
            of_prompts, batch.routes = values.split([len(prompts.flat), len(values) - len(prompts.flat)])
            stored = Ragged(flat=of_prompts, lengths=prompts.lengths, batch_size=[])
            batch.prompt_routes = SharedRows(stored=stored, index=index, batch_size=[])
        return batch

    def record_places(self, rows: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Return for each run of sampled tokens the places of all tokens that the engine read in a record.

        ``rows`` has for each row the number of tokens of its runs, one for each turn. The places, int64, are of the prompt and of
        all sampled tokens of the run but the last one.
        """
        found: list[list[Tensor]] = []
        if self.forest is not None:
            ends = iter(self.forest.place.split([size for runs in rows for size in runs]))
            for runs in rows:
                own = [next(ends) for _ in runs]
                paths = [torch.from_numpy(self.forest.path(int(run[0]))) if len(run) else run for run in own]
                found.append([torch.cat(pair)[:-1] for pair in zip(paths, own, strict=True)])
            return found
        index, prompts = self._prompts_once()
        starts = prompts.lengths.cumsum(0) - prompts.lengths
        first = len(prompts.flat)
        for group, (size,) in zip(index.tolist(), rows, strict=True):
            prompt = torch.arange(int(prompts.lengths[group])) + starts[group]
            found.append([torch.cat([prompt, torch.arange(first, first + max(size - 1, 0))])])
            first += size
        return found

    def kept_sizes(self) -> list[int]:
        if self.kept is None:
            return self.responses.sizes()
        return torch.zeros_like(self.responses.lengths).index_add(0, self.response_row(), self.kept.long()).tolist()

    def select(self, rows: Sequence[int]) -> RolloutBatch:  # type: ignore[override]
        # If all rows are chosen in order, copy nothing. This is the usual case on one rank with one mini-batch.
        if list(rows) == list(range(self.num_rows)):
            return self
        tokens = token_index(self.responses.sizes(), rows)
        index = torch.as_tensor(rows, dtype=torch.int64)
        flat = {name: getattr(self, name) for name in TOKEN_FIELDS}
        return RolloutBatch(
            prompts=self.prompts.select(rows),
            responses=self.responses.select(rows),
            group=self.group[index],
            prompt_group=None if self.prompt_group is None else self.prompt_group[index],
            forest=None if self.forest is None else self.forest.select(tokens),
            teacher_prompts=None if self.teacher_prompts is None else self.teacher_prompts.select(rows),
            teacher=None if self.teacher is None else self.teacher[index],
            prompt_routes=None if self.prompt_routes is None else self.prompt_routes.select(rows),
            **{name: value[tokens] for name, value in flat.items() if value is not None},
            batch_size=[],
        )


def rollout_batch(
    prompts: Ragged | SharedRows,
    responses: Ragged,
    group: Tensor,
    actor: Actor,
    rollout_log_probs: Tensor | None = None,
    forest: Forest | None = None,
) -> RolloutBatch:
    """Build the batch of a step. The settings decide which rows compute their common prompt once.

    Args:
        prompts: Prompt ids of each row.
        responses: Response ids of each row.
        group: int64 [B], the number of the prompt that each row answers.
        actor: The ``actor`` section of the settings.
        rollout_log_probs: The engine's log-probs, fp32 [R].
        forest: The turns of conversations. None = each row has one turn.
    """
    if forest is None and shares_prompts(actor):
        forest = common_beginnings(prompts, responses, group)
    return RolloutBatch(
        prompts=prompts,
        responses=responses,
        group=group,
        prompt_group=torch.tensor(prompt_groups(group.tolist(), actor), dtype=torch.int64),
        rollout_log_probs=rollout_log_probs,
        forest=forest,
        batch_size=[],
    )


SHORTEST_BEGINNING = 64
"""So many tokens must be common to two prompts for both to compute them once."""

SAVED_SHARE = 0.1
"""Least share of a step's tokens for which prompts that begin alike are worth a forest."""


def common_beginnings(prompts: Ragged | SharedRows, responses: Ragged, group: Tensor) -> Forest | None:
    """Return a forest in which different prompts share the tokens with which they begin, such as a long system prompt.

    Returns None if that would save too few tokens. The arguments are as in :func:`rollout_batch`.
    """
    firsts = {number: row for row, number in reversed(list(enumerate(group.tolist())))}
    different = prompts.select(list(firsts.values()))
    by_group = {number: ids.numpy() for number, ids in zip(firsts, different.flat.split(different.sizes()), strict=True)}
    # Sorted prompts share the most with their neighbours, and what they share is what a forest of all of them saves.
    ordered = sorted(by_group.values(), key=lambda ids: ids.astype(">i8").tobytes())
    shared = [common_length(*pair) for pair in pairwise(ordered)]
    computed = sum(different.sizes()) + int((responses.lengths - 1).clamp(min=0).sum())
    least = SAVED_SHARE * computed
    if not shared or sum(tokens for tokens in shared if tokens >= SHORTEST_BEGINNING) < least:
        return None
    pairs = zip(group.tolist(), responses.rows(), strict=True)
    forest = build_forest([[Turn(by_group[number], output.numpy())] for number, output in pairs])
    rows = RowTokens.of_paths(forest.paths(responses.sizes()), group.tolist())
    return forest if computed - rows.cost(range(len(rows))) >= least else None


def shares_prompts(actor: Actor) -> bool:
    # Try it with two rows of one group.
    return len(set(prompt_groups((0, 0), actor))) == 1


def scatter_tokens(parts: Sequence[tuple[Sequence[int] | Tensor, Tensor]], lengths: Sequence[int]) -> Tensor:
    """Join parts that have the values of some rows into one tensor in batch order, fp32 [R] on the host.

    Args:
        parts: Pairs (rows, values [tokens of these rows]), all on one device. Each row of the batch is in exactly one part. A
            part may also have the values of some tokens of a row. A tensor, int64, then names these tokens instead of rows.
        lengths: Response lengths of all rows.
    """
    if not parts:
        return torch.empty(0, dtype=torch.float32)
    index = torch.cat([rows if isinstance(rows, Tensor) else token_index(lengths, rows) for rows, _ in parts])
    # Concatenate on the device first, so that all values reach the host in one copy.
    values = torch.cat([values.detach() for _, values in parts]).cpu()
    out = torch.empty(sum(lengths), dtype=torch.float32)
    out[index] = values
    return out


# Rows of unequal length in one flat tensor. Nothing is padded, neither on the driver nor in transfers.


class Ragged(TensorClass):
    """Rows of unequal length.

    ``flat`` is [total, ...], the rows one after another. ``lengths`` is int64 [rows].
    """

    flat: Tensor
    lengths: Tensor

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int] | Sequence[float] | Tensor], dtype: torch.dtype) -> Ragged:
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if rows and isinstance(rows[0], Tensor):
            return Ragged(flat=torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows]), lengths=lengths, batch_size=[])
        return Ragged(flat=torch.tensor(list(chain.from_iterable(rows)), dtype=dtype), lengths=lengths, batch_size=[])

    @property
    def num_rows(self) -> int:
        return int(self.lengths.shape[0])

    def sizes(self) -> list[int]:
        return self.lengths.tolist()

    def rows(self) -> tuple[Tensor, ...]:
        return self.flat.split(self.sizes())

    def select(self, indices: Sequence[int]) -> Ragged:  # type: ignore[override]
        index = torch.as_tensor(indices, dtype=torch.int64)
        return Ragged(flat=self.flat[token_index(self.sizes(), indices)], lengths=self.lengths[index], batch_size=[])


def token_index(lengths: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Return the positions of the tokens of ``rows`` in the flat tensor of all rows, int64 [sum of the chosen lengths]."""
    sizes = np.asarray(lengths, dtype=np.int64)
    chosen = np.asarray(rows, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    return torch.from_numpy(ranges(starts[chosen], sizes[chosen]))


# Rows with duplicates: each different row is stored once, with an index from row to stored row.


class SharedRows(TensorClass):
    """Rows that share their storage. The interface is that of :class:`Ragged`, but ``flat`` is computed each time it is read.

    ``stored`` has the different rows, and ``index``, int64 [rows], the number of the stored row of each row. If each of b rows of
    P tokens appears k times, the bytes saved compared with :class:`Ragged` are::

        b * ((k - 1) * P * 8 - 8)

    The ids are stored once instead of k times, and b lengths plus an index of b * k replace b * k lengths.
    """

    stored: Ragged
    index: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.index.shape[0])

    @property
    def lengths(self) -> Tensor:
        return self.stored.lengths[self.index]

    @property
    def flat(self) -> Tensor:
        """The rows one after another, as a new tensor. Read it for a micro-batch, not for a whole batch."""
        return self.stored.flat[token_index(self.stored.sizes(), self.index.tolist())]

    def sizes(self) -> list[int]:
        return self.lengths.tolist()

    def select(self, indices: Sequence[int]) -> SharedRows:  # type: ignore[override]
        # Stored rows that no chosen row uses are dropped, so the others get new numbers in the index.
        kept, index = torch.unique(self.index[torch.as_tensor(indices, dtype=torch.int64)], return_inverse=True)
        return SharedRows(stored=self.stored.select(kept.tolist()), index=index, batch_size=[])


def prompt_rows(rows: Sequence[list[int]]) -> Ragged | SharedRows:
    """Store prompt ids as tensors. Rows that are the same list object are stored once.

    The expansion ``lazy`` gives all rows of a prompt the same list, and other expansions give each row its own list. If no list
    appears twice, the result is a plain :class:`Ragged`.
    """
    stored = {id(row): row for row in rows}
    different = Ragged.from_rows(list(stored.values()), torch.int64)
    if len(stored) == len(rows):
        return different
    places = {identity: place for place, identity in enumerate(stored)}
    index = torch.tensor([places[id(row)] for row in rows], dtype=torch.int64)
    return SharedRows(stored=different, index=index, batch_size=[])
