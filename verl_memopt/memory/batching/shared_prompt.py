"""The prompt of a group is computed once for all its answers, in every pass.

Bytes saved: of the tokens of a group of k answers to a prompt of P tokens, (k - 1) x P of the k x P + sum(R_i - 1) that a pass
    computes, and what each of them holds where the group is one micro-batch: (k - 1) x P x (L x A / T + 2 x (I + h) x b) bytes
    of activations, A / T being what a block keeps of one token and the rest what the backward of an MLP holds. Under a token
    budget the peak stays, and there are fewer micro-batches.

Exact for causal attention over the whole sequence; a model whose window slides is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_memopt.memory.batching.token_budget import BUDGET_KEY, pack

UNREAD_SHARE = 1 / 8
"""Of a pack's tokens, from which on leaving them out of the last block costs fewer bytes than the copies of the others."""


def unread_if_many(unread: int, tokens: int) -> int:
    """Gives how many tokens of a pack the last block may leave out: the unread ones, or none."""
    return unread if unread and unread >= tokens * UNREAD_SHARE else 0


@dataclass(frozen=True)
class RowTokens:
    """The tokens that rows make a pass compute, one entry a row.

    prompts: of the prompt. answers: of the response but for its last token, which predicts nothing. Both are 0 for a row with
    an empty response, which is not computed. groups: rows with the same number share their prompt.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def alone(cls, tokens: Sequence[int]) -> RowTokens:
        """Gives rows that share nothing."""
        return cls(tuple(tokens), (0,) * len(tokens), tuple(range(len(tokens))))

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> RowTokens:
        """Gives the chosen rows, in the order chosen."""
        parts = (self.prompts, self.answers, self.groups)
        return RowTokens(*(tuple(part[row] for row in rows) for part in parts))

    def cost(self, rows: Sequence[int]) -> int:
        """Gives the tokens computed for some rows together: each group's prompt once, and every answer."""
        prompts = {self.groups[row]: self.prompts[row] for row in rows if self.prompts[row]}
        return sum(prompts.values()) + sum(self.answers[row] for row in rows)

    def unread(self, rows: Iterable[int]) -> int:
        """Gives the computed tokens of some rows that predict nothing, prompts but for the last; 0 where they are few."""
        prompts = {self.groups[row]: self.prompts[row] for row in rows if self.prompts[row]}
        return unread_if_many(sum(prompts.values()) - len(prompts), self.cost(list(rows)))

    def each(self) -> list[int]:
        """Gives the tokens of each row computed by itself."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def families(self) -> list[list[int]]:
        """Gives the rows of each group, groups in the order of their first row."""
        found: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups):
            found.setdefault(group, []).append(row)
        return list(found.values())


def pack_groups_under(tokens: RowTokens, budget: int, names: Sequence[str], key: str = BUDGET_KEY) -> list[list[int]]:
    """Gives micro-batches as lists of rows, none of which computes more than ``budget`` tokens.

    A group stays whole where it fits; one that does not is cut into as few parts as its answers allow, each with the prompt.
    Errors: ConfigError naming ``key`` and the row that alone exceeds the cap.
    """
    units: list[list[int]] = []
    carried: list[list[int]] = []
    for family in tokens.families():
        parts = _parts(tokens, family, budget, names, key)
        # Parts that one prompt can be carried to stay neighbours, and alone.
        (carried if len(parts) > 1 and chains(parts, tokens) == [parts] else units).extend(parts)
    costs = [tokens.cost(unit) for unit in units]
    bins = pack(costs, budget, 0 if carried else 1, names=[names[unit[0]] for unit in units], key=key)
    return [sorted(row for unit in chosen for row in units[unit]) for chosen in bins] + carried


def chains(micro_batches: Sequence[Sequence[int]], tokens: RowTokens) -> list[list[Sequence[int]]]:
    """Gives micro-batches (rows) one after another, those together whose prompt is to be computed once and carried.

    They are neighbours of one group and no longer than its prompt, each of which would compute more prompt than answers.
    """

    def prompt_of(rows: Sequence[int]) -> int | None:
        groups = {tokens.groups[row] for row in rows}
        answers = sum(tokens.answers[row] for row in rows)
        return groups.pop() if len(groups) == 1 and 0 < answers <= max(tokens.prompts[row] for row in rows) else None

    found: list[list[Sequence[int]]] = []
    before: int | None = None
    for rows in micro_batches:
        group = prompt_of(rows)
        if found and group is not None and group == before:
            found[-1].append(rows)
        else:
            found.append([rows])
        before = group
    return found


def _parts(tokens: RowTokens, family: list[int], budget: int, names: Sequence[str], key: str) -> list[list[int]]:
    if len(family) == 1 or tokens.cost(family) <= budget:
        return [family]
    alone = tokens.each()
    pack([alone[row] for row in family], budget, names=[names[row] for row in family], key=key)
    prompt = max(tokens.prompts[row] for row in family)
    answers = [tokens.answers[row] for row in family]
    if not any(answers):
        return [family]
    return [[family[place] for place in places] for places in pack(answers, budget - prompt, key=key)]
