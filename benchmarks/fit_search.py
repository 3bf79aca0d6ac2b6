"""The search of ``verl-memopt fit`` against brute force: random runs on random cards, of which it may set a few random levers.

Brute force judges every combination of the levers' levels. The search must find a way where there is one, must not name one that
brute force does not accept, and none of its changes may be left out.

    python -m benchmarks.fit_search --cases 100
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from verl_memopt.config.loader import changed, load_settings
from verl_memopt.config.schema import Settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import CARDS
from verl_memopt.model.sizes import PUBLISHED
from verl_memopt.observe.log_setup import silent
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.levers import Lever, levers_of
from verl_memopt.plan.model_refusals import why_refused
from verl_memopt.plan.search import Search, State
from verl_memopt.plan.verdict import Card, judge, sizes_of_models

MOST_STATES = 3000
"""Combinations of a case at most."""
PROFILES = ("none", "constrained", "balanced", "large_multi_gpu", *CARDS)
ESTIMATORS = ("rloo", "grpo", "gae")


@dataclass(frozen=True)
class Case:
    """A run, a card, and what may be set."""

    words: str
    settings: Settings
    card: Card
    levers: tuple[Lever, ...]


@dataclass(frozen=True)
class Outcome:
    """What search and brute force said of a case."""

    case: Case
    states: int
    ways: int
    """Combinations that fit and are accepted."""
    found: bool
    faults: tuple[str, ...]
    seconds: float
    """Of the search alone."""


def draw(number: int) -> Case:
    """Gives the case of a number: always the same one."""
    reader = random.Random(number)
    while True:
        try:
            with silent():
                return _drawn(reader)
        except ConfigError:
            continue


def _drawn(reader: random.Random) -> Case:
    model, memory, gpus = reader.choice([*PUBLISHED]), reader.choice(PROFILES), reader.choice((1, 1, 1, 2, 8))
    role = "actor_rollout_ref"
    overrides = [
        *("data.train_files=none", "data.val_files=null", f"memory={memory}", f"{role}.model.path={model}"),
        *(f"trainer.n_gpus_per_node={gpus}", f"algorithm.adv_estimator={reader.choice(ESTIMATORS)}"),
        *(f"{role}.actor.use_dynamic_bsz=true", f"{role}.actor.use_kl_loss={str(reader.random() < 0.3).lower()}"),
        *(f"data.max_response_length={reader.choice((512, 2048, 8192))}", f"{role}.rollout.n={reader.choice((2, 8))}"),
        *([f"{role}.model.lora_rank=32"] if reader.random() < 0.3 else []),
    ]
    settings = load_settings("rloo_trainer", overrides)
    sizes = sizes_of_models(settings)
    if (reason := why_refused(settings, sizes)) is not None:
        raise ConfigError(reason)
    host = None if reader.random() < 0.6 else round(reader.choice((32, 64, 128, 256)) * GIB)
    everything = levers_of(settings, sizes, host is not None)
    # The run begins somewhere, so that half of what saves is on already.
    for lever in everything:
        if reader.random() < 0.35:
            try:
                settings = changed(settings, reader.choice(lever.levels).keys)
            except ConfigError:
                continue
    levers = [*levers_of(settings, sizes, host is not None)]
    reader.shuffle(levers)
    taken: list[Lever] = []
    for lever in levers:
        if prod(len(each.levels) for each in (*taken, lever)) <= MOST_STATES:
            taken.append(lever)
    order = levers_of(settings, sizes, host is not None)
    kept = tuple(lever for lever in order if lever in taken)
    # A card between what the run needs and the least that some combinations of the levers need: the answer is not plain.
    search = Search(settings, Card(round(80 * GIB), host), kept)
    some = [tuple(reader.randrange(len(lever.levels)) for lever in kept) for _ in range(40)]
    needs = [search.verdict(state).peaks.device_bytes for state in (search.as_it_is, *some)]
    card = Card(round(reader.uniform(0.9 * min(needs), needs[0])), host)
    if judge(settings, card).fits:
        raise ConfigError("it fits as it is")
    words = f"{model.split('/')[1]} {memory} x{gpus} {settings.algorithm.adv_estimator} on {card.num_bytes / GIB:.1f} GiB"
    return Case(words, settings, card, kept)


def ways(search: Search) -> Iterator[State]:
    """Yields every combination that fits and is accepted."""
    for state in product(*(range(len(lever.levels)) for lever in search.levers)):
        if search.verdict(state).fits and search.accepts(state):
            yield state


def compare(case: Case) -> Outcome:
    """Gives what the search and brute force say of a case."""
    began = time.process_time()
    search = Search(case.settings, case.card, case.levers)
    changes, after = search.changes()
    seconds = time.process_time() - began
    brute = Search(case.settings, case.card, case.levers)
    there = next(ways(brute), None)
    faults = []
    if there is not None and not after.fits:
        faults.append(f"cannot, but {brute.keys(there)} fits")
    if after.fits:
        keys = {key: value for change in changes for key, value in change.keys.items()}
        if not judge(changed_silently(case.settings, keys), case.card).fits:
            faults.append(f"{keys} does not fit")
        if there is None:
            faults.append(f"{keys} is no combination of the levers")
        for change in changes:
            others = {key: value for each in changes if each is not change for key, value in each.keys.items()}
            verdict = Search(case.settings, case.card, ()).judged(others)
            if verdict is not None and verdict.fits:
                faults.append(f"{change.keys} is not needed")
    states = prod(len(lever.levels) for lever in case.levers)
    return Outcome(case, states, int(there is not None), after.fits, tuple(faults), seconds)


def changed_silently(settings: Settings, keys: dict[str, object]) -> Settings:
    """Gives settings with other values of some keys, as a run would have them."""
    with silent():
        return changed(settings, keys)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares cases, and gives 1 where search and brute force disagree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_search", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    asked = parser.parse_args(argv)
    outcomes = []
    for number in range(asked.first, asked.first + asked.cases):
        outcome = compare(draw(number))
        outcomes.append(outcome)
        said = "fits" if outcome.found else "cannot"
        print(f"{number:4} {outcome.case.words}: {said}, {outcome.states} combinations, {outcome.seconds:.1f} s", flush=True)
        for fault in outcome.faults:
            print(f"     FAULT: {fault}", flush=True)
    wrong = [each for each in outcomes if each.faults]
    fits, seconds = sum(each.found for each in outcomes), sorted(each.seconds for each in outcomes)
    print(f"{len(outcomes)} cases: none fits as it is, {fits} fit with changes, {len(outcomes) - fits} cannot; "
          f"{len(wrong)} disagree with brute force; the search took {seconds[len(seconds) // 2]:.2f} s, "
          f"{seconds[-1]:.1f} s at most")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
