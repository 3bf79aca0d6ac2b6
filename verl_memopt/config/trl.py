"""Settings under TRL's names and a recipe's: each is read as our key, with one notice. Two spellings are a problem."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from verl_memopt.config.aliases import VALUES, our_key
from verl_memopt.config.keys import flatten
from verl_memopt.config.problems import Problem, problem, shown
from verl_memopt.config.refusals import Refusal, refuse
from verl_memopt.config.trl_spellings import ESTIMATORS, NAMES, NO_EQUAL, ONE_SETTING, SPELLINGS, Spelling
from verl_memopt.config.trl_values import ESTIMATOR, NotConvertibleError, effective
from verl_memopt.recipes.registry import RECIPES

logger = logging.getLogger(__name__)

MANAGER = "reward_model.reward_manager"
"""Its value chooses a recipe."""


@dataclass(frozen=True)
class Written:
    """The keys that a user wrote, by place. What stands in a recipe's other files is a default, and gives way."""

    command_line: Set[str]
    file: Set[str] = frozenset()
    """Keys of the config file itself."""

    def beside(self, name: str) -> set[str]:
        """Return our names of the keys that compete with a name of TRL.

        On the command line those are the other keys there. In a file they are those of the file too.
        """
        competitors = self.command_line if name in self.command_line else self.command_line | self.file
        return set(map(our_key, competitors))


@dataclass(frozen=True)
class RecipeNames:
    """The names of a recipe's published settings.

    Attributes:
        spellings: In the order in which they are read, before TRL's own.
        no_equal: Names without an equal here, and why.
        replaced: A name of the recipe -> the names of TRL that say nothing more beside it.
    """

    spellings: tuple[Spelling, ...]
    no_equal: Mapping[str, Refusal]
    replaced: Mapping[str, Mapping[str, Refusal]]


@dataclass(frozen=True)
class Table:
    """The names that a run reads, in the order in which they are read.

    Attributes:
        spellings: How each is read.
        no_equal: Names without an equal here, and why.
        names: All names.
        title: What notices call the recipe whose names come first.
        own: How many of the spellings are the recipe's.
    """

    spellings: tuple[Spelling, ...]
    no_equal: Mapping[str, Refusal]
    names: Set[str]
    title: str = "TRL"
    own: int = 0

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Table:
        """Return TRL's names, and before them those of the recipe that scores.

        Args:
            flat: Dotted key -> value, of all that is set.
        """
        recipe = RECIPES.get(str(effective(MANAGER, flat)))
        if recipe is None:
            return cls(SPELLINGS, NO_EQUAL, NAMES)
        ours, no_equal = recipe.names(), dict(NO_EQUAL)
        no_equal |= ours.no_equal
        for name, others in ours.replaced.items():
            no_equal |= others if name in flat else {}
        own = tuple(row for row in ours.spellings if no_equal.keys().isdisjoint(row.names))
        spellings = (*own, *(row for row in SPELLINGS if no_equal.keys().isdisjoint(row.names)))
        names = frozenset(name for row in spellings for name in row.names) | no_equal.keys()
        return cls(spellings, no_equal, names, recipe.title, len(own))

    def whose(self, spelling: Spelling) -> str:
        """Return whose name a spelling is."""
        return self.title if spelling in self.spellings[: self.own] else "TRL"


def translate_trl(tree: Mapping[str, Any], written: Written | None = None) -> tuple[Mapping[str, Any], list[Problem]]:
    """Return settings with our keys in the place of TRL's names, and what is wrong with those names.

    A name of TRL stands alone, outside of all sections. It is read where the estimator is one of :data:`ESTIMATORS`; with any
    other the tree is returned as it is. In a run of a recipe the names of its published settings are read too.

    Args:
        tree: Settings, nested or with dotted keys.
        written: The keys that the user wrote; None = all keys of the tree.
    """
    flat = flatten(tree, our_key)
    table = Table.of(flat)
    trl = {name: value for name, value in flat.items() if name in table.names}
    name_of_estimator = effective(ESTIMATOR, flat)
    estimator = VALUES[ESTIMATOR].get(name_of_estimator, name_of_estimator) if isinstance(name_of_estimator, str) else None
    if not trl or estimator not in ESTIMATORS:
        return tree, []
    values = {key: value for key, value in flat.items() if key not in trl}
    written = written or Written(frozenset(flat))
    problems = [each for name in trl if name in table.no_equal for each in refuse(name, trl[name], table.no_equal[name])]
    readable, unreadable = _readable(trl, estimator, table)
    for name, spelling in readable:
        competitors = [key for key in spelling.keys if key in written.beside(name)]
        if competitors:
            both = {name: trl[name]} | {key: flat.get(key, "...") for key in competitors}
            problems.append(problem(both, "two spellings of one setting", f"Keep {competitors[0]}."))
            continue
        try:
            ours = spelling.convert(name, trl, values)
        except NotConvertibleError as error:
            address = {each: trl[each] for each in error.names or (name,)}
            problems.append(problem(address, error.what, error.way_out))
            continue
        _notice(name, trl[name], ours, spelling, table.whose(spelling))
        values |= ours
    return values, problems + unreadable


def _readable(trl: Mapping[str, Any], estimator: str, table: Table) -> tuple[list[tuple[str, Spelling]], list[Problem]]:
    """Return the names that can be read with their rows, in the order of the table, and what is wrong with the others."""
    problems: list[Problem] = []
    twice: set[str] = set()
    for names in ONE_SETTING:
        both = {name: trl[name] for name in names if name in trl and name not in table.no_equal}
        if len(both) > 1 and twice.isdisjoint(both):
            twice |= both.keys()
            problems.append(problem(both, "two spellings of one setting", "Keep one."))
    readable = {name: spelling for spelling in table.spellings if estimator in spelling.estimators for name in spelling.names}
    for name in sorted(trl.keys() - readable.keys() - table.no_equal.keys()):
        problems.append(problem({name: trl[name]}, f"{estimator} has no such setting", "Remove it."))
    return [(name, spelling) for name, spelling in readable.items() if name in trl and name not in twice], problems


def _notice(name: str, value: Any, ours: Mapping[str, Any], spelling: Spelling, whose: str) -> None:
    meaning = ", ".join(f"{key}={shown(each)}" for key, each in ours.items())
    note = f" ({spelling.note})" if spelling.note else ""
    logger.warning("%s=%s is %s's spelling, read as %s%s", name, shown(value), whose, meaning or "nothing", note)
