"""The estimators and losses of the package, without the place for a user's own."""

from verl_memopt.algorithms import records

LOSSES = {name: record for name, record in records.LOSSES.items() if name != records.CUSTOM}
TOKEN_LOCAL = frozenset(name for name, record in LOSSES.items() if record.token_local)
SELECTING = [name for name, record in LOSSES.items() if record.selects]
OF_REWARDS = {
    name: records.load(record.function)
    for name, record in records.ESTIMATORS.items()
    if set(record.inputs) == {"rewards", "group", "valid"}
}
"""Name -> function of the estimators that read a reward a row, and no more."""
