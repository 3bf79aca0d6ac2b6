"""Count the tokens that rows compute, and cut rows into micro-batches, where the rows of a group compute their prompt once.

The caller says which rows form a group. A row alone in its group computes its prompt by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_memopt.memory.batching.token_budget import BUDGET_KEY, pack

SKIPPED_SHARE = 1 / 8
"""Least share of a pack's tokens that is worth skipping. Below it, copies of the other tokens cost more bytes than it saves."""


def skipped_if_many(skipped: int, tokens: int) -> int:
    """Return ``skipped`` where skipping so many of a pack's tokens in the last block pays, else 0."""
    return skipped if skipped and skipped >= tokens * SKIPPED_SHARE else 0


@dataclass(frozen=True)
class RowTokens:
    """The tokens that a pass computes for some rows, one entry a row.

    Attributes:
        prompts: Tokens of the prompt. This and ``answers`` are 0 for a row with an empty response, which is not computed.
        answers: Tokens of the response without its last, which predicts nothing.
        groups: Rows with the same number compute their prompt once, together.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def alone(cls, tokens: Sequence[int]) -> RowTokens:
        """Return rows that each compute their own prompt."""
        return cls(tuple(tokens), (0,) * len(tokens), tuple(range(len(tokens))))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> RowTokens:
        """Return the chosen rows, in the order of the choice."""
        parts = (self.prompts, self.answers, self.groups)
        return RowTokens(*(tuple(part[row] for row in rows) for part in parts))

    def cost(self, rows: Sequence[int]) -> int:
        """Return the tokens computed for some rows together: each group's prompt once, and every answer."""
        prompts = {self.groups[row]: self.prompts[row] for row in rows if self.prompts[row]}
        return sum(prompts.values()) + sum(self.answers[row] for row in rows)

    def skipped(self, rows: Iterable[int]) -> int:
        """Return how many computed tokens of some rows the last block skips: all of a prompt but its last; 0 if few."""
        prompts = {self.groups[row]: self.prompts[row] for row in rows if self.prompts[row]}
        return skipped_if_many(sum(prompts.values()) - len(prompts), self.cost(list(rows)))

    def suffixes(self, rows: Sequence[int]) -> int:
        """Return the answer tokens of those rows that compute their prompt together with another of ``rows``."""
        group_sizes = Counter(self.groups[row] for row in rows)
        return sum(self.answers[row] for row in rows if group_sizes[self.groups[row]] > 1)

    def each(self) -> list[int]:
        """Return the tokens of each row computed by itself."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def families(self) -> list[list[int]]:
        """Return the rows of each group. Groups are in the order of their first row."""
        members: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups):
            members.setdefault(group, []).append(row)
        return list(members.values())


def pack_groups_under(tokens: RowTokens, budget: int, names: Sequence[str], key: str = BUDGET_KEY) -> list[list[int]]:
    """Return micro-batches, as lists of rows, that compute at most ``budget`` tokens each.

    A group stays whole where it fits. Otherwise it is cut into as few parts as its answers allow, each with the prompt.

    Args:
        tokens: Tokens of the rows.
        budget: Largest number of tokens in a micro-batch.
        names: Names of the rows, for errors.
        key: The setting to name in errors.

    Raises:
        ConfigError: One row alone exceeds the budget. The message names ``key`` and the row.
    """
    units: list[list[int]] = []
    chained: list[list[int]] = []
    for family in tokens.families():
        parts = _parts(tokens, family, budget, names, key)
        # Parts that reuse one prefix KV stay neighbours, and share no micro-batch with others.
        (chained if len(parts) > 1 and chains(parts, tokens) == [parts] else units).extend(parts)
    costs = [tokens.cost(unit) for unit in units]
    bins = pack(costs, budget, 0 if chained else 1, names=[names[unit[0]] for unit in units], key=key)
    return [sorted(row for unit in chosen for row in units[unit]) for chosen in bins] + chained


def chains(micro_batches: Sequence[Sequence[int]], tokens: RowTokens) -> list[list[Sequence[int]]]:
    """Return micro-batches in order, with those together that reuse one prefix KV.

    A chain consists of neighbours of one group whose answers are no longer than the prompt, so that each would compute more
    prompt than answers.

    Args:
        micro_batches: Rows of each micro-batch.
        tokens: Tokens of the rows.
    """

    def prompt_of(rows: Sequence[int]) -> int | None:
        groups = {tokens.groups[row] for row in rows}
        answers = sum(tokens.answers[row] for row in rows)
        return groups.pop() if len(groups) == 1 and 0 < answers <= max(tokens.prompts[row] for row in rows) else None

    chained: list[list[Sequence[int]]] = []
    before: int | None = None
    for rows in micro_batches:
        group = prompt_of(rows)
        if chained and group is not None and group == before:
            chained[-1].append(rows)
        else:
            chained.append([rows])
        before = group
    return chained


def _parts(tokens: RowTokens, family: list[int], budget: int, names: Sequence[str], key: str) -> list[list[int]]:
    if len(family) == 1 or tokens.cost(family) <= budget:
        return [family]
    alone = tokens.each()
    # Packed only for its check: a row that does not fit by itself is refused here, by its name.
    pack([alone[row] for row in family], budget, names=[names[row] for row in family], key=key)
    prompt = max(tokens.prompts[row] for row in family)
    answers = [tokens.answers[row] for row in family]
    # Answers of one token compute nothing beyond the prompt, so there is nothing to divide.
    if not any(answers):
        return [family]
    return [[family[place] for place in places] for places in pack(answers, budget - prompt, key=key)]
