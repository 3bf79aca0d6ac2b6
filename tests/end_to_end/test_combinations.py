"""Every two values of two memory knobs either run together, with the numbers of a plain run, or are refused by their names."""

import logging
from dataclasses import dataclass, fields, replace

import pytest

from tests.end_to_end.covering import (
    FACTORS,
    FOUR_RANKS,
    LOSSY,
    NEEDS,
    NO_FACTOR,
    REFUSED,
    REFUSED_LATER,
    all_off,
    covering_rows,
    lossless,
    pair_row,
    pairs,
    reference_of,
    runnable,
    runnable_pairs,
    settings_of,
    tried_pairs,
)
from tests.end_to_end.knob_runs import make_model, run_row, run_rows
from tests.ranks import run_ranks
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.memory.knob import knobs

pytestmark = pytest.mark.timeout(600)

EXACT, OTHERS = covering_rows()
ROWS = EXACT + OTHERS


def few(rows):
    """Gives some of the rows, which have every option that all of them have."""
    left, found = {option for row in rows for option in row.items()}, []
    while left:
        found.append(max(rows, key=lambda row: len(left & set(row.items()))))
        left -= set(found[-1].items())
    return found


ON_TWO = few(EXACT)
IN_EVERY_RUN = {1: [row for row in EXACT if row not in ON_TWO][::8] + few(OTHERS), 2: ON_TWO}
"""Ranks -> the rows that are not left to the slow proofs: each lossless option is on two ranks, each lossy one on one, and seven
of eight pairs are in one of them. The proofs have every pair on both."""


CAPTURED = NEEDS[("actor cuda_graphs", "on")] | {
    "actor cuda_graphs": "on", "lora": "off", "tiled block": "off", "actor offload_policy": "off",
}  # fmt: skip
"""What makes the blocks of a row run as graphs. On a CPU the functions behind the graphs are called, with the same buffers."""
GRAPHS = few([row | CAPTURED for row in ROWS if not any(pair <= (row | CAPTURED).items() for pair in REFUSED)])


@dataclass(frozen=True)
class Apart:
    """How far two runs are from each other, or may be.

    log_prob, ref_log_prob: most of any token in any step, in nats (the first: entropies as well). loss: most of any step.
    grad_norm: most of any step, as a share of it. weights: norm of the difference after the last step, as a share of the norm
    of what training added.
    """

    log_prob: float
    ref_log_prob: float
    loss: float
    grad_norm: float
    weights: float

    def beyond(self, most):
        """Gives what is more than ``most``."""
        found = {field.name: (getattr(self, field.name), getattr(most, field.name)) for field in fields(self)}
        return {name: values for name, values in found.items() if not values[0] <= values[1]}


SUMS = Apart(log_prob=5e-6, ref_log_prob=2e-6, loss=1e-7, grad_norm=5e-7, weights=2e-6)
"""In fp32 throughout: sums are taken in another order. A log-prob near 6 has a spacing of 4.8e-7."""

CHANCES = Apart(log_prob=2e-5, ref_log_prob=2e-6, loss=1e-6, grad_norm=1e-5, weights=1e-3)
"""With moments or engine alone in fewer bits: the same, and a few numbers fall on the other side of a rounding."""

PULLED = Apart(log_prob=5e-4, ref_log_prob=8e-3, loss=2e-6, grad_norm=5e-5, weights=5e-3)
"""The same beside a reference scored in bfloat16: its log-probs are rounded to other neighbours, by up to 2^-8, the KL passes a
part of that on to the gradient, and more of the moments fall on the other side of a rounding."""

ROUNDINGS = Apart(log_prob=8e-3, ref_log_prob=2e-6, loss=5e-4, grad_norm=2**-7, weights=6e-2)
"""With bfloat16 in compute, gradients or masters: what comes in another order is rounded to other neighbours. Log-probs change
by two spacings of a logit, 2^-8 each, and ratios beside a clip pass it; a loss is a mean over some 70 tokens, each with an old
and a new log-prob of a spacing over the root of 12, and may be off by three times its spread; a norm of bfloat16 has a spacing
of 2^-7 of it at most; an update that is less than the spacing of a weight moves it by that or not at all."""


@dataclass(frozen=True)
class Cost:
    """What one lossy option may change. log_prob, grad_norm: in the first step, before anything else can. weights: as above."""

    log_prob: float = 0.0
    ref_log_prob: float = 0.0
    grad_norm: float = 0.0
    weights: float = 0.0


COSTS = {
    # Log-probs and gradients: half as much again as the file of the knob says of another tiny model.
    ("actor dtype", "bf16"): Cost(log_prob=0.0051, grad_norm=0.0141, weights=0.02),
    ("masters", "bf16"): Cost(log_prob=0.0029, grad_norm=0.0077, weights=0.1),
    ("masters", "rounded"): Cost(log_prob=0.0029, grad_norm=0.0077, weights=0.17),
    ("actor mixed_precision.reduce_dtype", "bf16"): Cost(grad_norm=2**-8, weights=0.01),
    # A reference that is off pulls at the policy from the first step on, by the KL. The worker logs what its quantised one is
    # off by on random tokens: 0.005 and 0.08 nats at most for this model.
    ("ref dtype", "bf16"): Cost(ref_log_prob=0.0051, grad_norm=0.001),
    ("ref model_dtype", "bf16"): Cost(ref_log_prob=0.0029, grad_norm=0.0005),
    ("quantization", "int8"): Cost(ref_log_prob=0.008, grad_norm=0.001, weights=0.005),
    ("quantization", "nf4"): Cost(ref_log_prob=0.12, grad_norm=0.01, weights=0.005),
    # Two roundings of the largest of a block, 2^-8, 2 / 127 and 2 / 7 at most, with mean 0.
    ("state", "bf16"): Cost(weights=0.005),
    ("state", "int8"): Cost(weights=0.01),
    ("state", "int4"): Cost(weights=0.13),
    ("engine dtype", "bf16"): Cost(weights=0.005),
}


def cost(row):
    """Gives what a row's lossy options may change together: the sum of each.

    Log-probs from masters and compute in bfloat16 are no further off than from compute alone, says the knob's file. With LoRA
    the reference is the policy's own base.
    """
    own = {option: each for option, each in COSTS.items() if option in row.items()}
    total = {field.name: sum(getattr(each, field.name) for each in own.values()) for field in fields(Cost)}
    total["log_prob"] = max((each.log_prob for each in own.values()), default=0.0)
    if row["lora"] != "off":
        total["ref_log_prob"] = total["log_prob"]
    # Sums in another order on top; where each is rounded to bfloat16, Adam carries a flipped sign of a small gradient into the
    # weights at full size, as between two runs that differ by the order alone.
    total["weights"] += tolerance(row).weights
    return {name: value + getattr(SUMS, name) for name, value in total.items()}


def tolerance(row):
    """Gives how far a row may be from the same with its lossless knobs off."""
    if any(row[factor] != all_off()[factor] for factor in ("actor dtype", "actor mixed_precision.reduce_dtype", "masters")):
        most = ROUNDINGS
    else:
        most = SUMS if row["state"] == "follows" and row["engine dtype"] == "fp32" else CHANCES
    scored_in = row["ref dtype" if row["lora"] == "off" else "actor dtype"]
    if scored_in == "fp32":
        return most
    return replace(PULLED if most is CHANCES else most, ref_log_prob=ROUNDINGS.log_prob)


def apart(one, other):
    """Measures two outcomes of one rank."""
    return Apart(
        log_prob=most(one.log_probs, other.log_probs),
        ref_log_prob=most(one.ref_log_probs, other.ref_log_probs),
        loss=max(abs(a - b) for a, b in zip(one.loss, other.loss, strict=True)),
        grad_norm=max(abs(a - b) / b for a, b in zip(one.grad_norm, other.grad_norm, strict=True)),
        weights=moved(one, other),
    )


def moved(one, other):
    return float((one.weights - other.weights).norm() / (other.weights - other.start).norm())


def most(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def key(row):
    return tuple(row.items())


def both_ranks(rank, rows, folder, stores):
    logging.disable(logging.WARNING)
    return run_rows(rank, 2, rows, folder, stores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("combinations"))


@pytest.fixture(scope="module")
def alone():
    """This process without a process group, and with errors alone in its log."""
    leave_process_group()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    leave_process_group()


def with_references(rows):
    """Gives rows, what each is compared with, and the run without knobs, each once."""
    return list({key(row): row for row in (all_off(), *rows, *map(reference_of, rows))}.values())


TOGETHER = (IN_EVERY_RUN[2], [row for row in EXACT if row not in IN_EVERY_RUN[2]], OTHERS)
"""Rows that are run on two ranks when the first of them is asked for."""


class Outcomes(dict):
    """(Number of ranks, row) -> its outcome on each rank; a row is run when it is first asked for."""

    def __init__(self, folder, tmp_path_factory):
        super().__init__()
        self._folder = folder
        self._tmp_path_factory = tmp_path_factory

    def __missing__(self, wanted):
        ranks, row = wanted
        if ranks == 1:
            self[wanted] = [run_row(dict(row), self._folder)]
        else:
            together = next(rows for rows in map(with_references, TOGETHER) if row in map(key, rows))
            rows = [row for row in together if (2, key(row)) not in self]
            stores = self._tmp_path_factory.mktemp("stores")
            found = run_ranks(both_ranks, 2, rows, self._folder, stores, timeout=280)
            self.update({(2, key(row)): both for row, *both in zip(rows, *found, strict=True)})
        return self[wanted]


@pytest.fixture(scope="module")
def outcomes(folder, alone, tmp_path_factory):
    return Outcomes(folder, tmp_path_factory)


def every_row(rows):
    """Runs a test for every row on one rank and on two; `make proofs` runs all that are not in every run of the tests."""
    cases = [
        pytest.param(
            *(ranks, row),
            id=f"{ranks}-{'exact' if row in EXACT else 'lossy'}-{ROWS.index(row)}",
            marks=() if row in IN_EVERY_RUN[ranks] else pytest.mark.slow,
        )
        for ranks in (1, 2)
        for row in rows
    ]
    return pytest.mark.parametrize(("ranks", "row"), cases)


def test_every_key_of_every_knob_is_turned_or_said_not_to_be():
    turned = {key for levels in FACTORS.values() for options in levels.values() for key in options}
    # Those of the critic are turned in tests/model/test_value_model.py and tests/virtual_gpu/test_knobs.py, those of the
    # reward model in tests/worker/test_reward_scores.py, those of the teacher in tests/end_to_end/test_distill.py.
    others = ("critic.", "reward_model.", "teacher.")
    keys = {key for knob in knobs() for key in knob.keys if not key.startswith(others)}
    assert keys - turned == NO_FACTOR.keys()


FAST = [
    pair for number, pair in enumerate(pairs()) if number % 40 == 0 or pair in REFUSED or (pair & FOUR_RANKS and number % 4 == 0)
]
"""Pairs that are not left to the slow proofs: all that are refused, and some of the others."""


@pytest.mark.parametrize("tried", [FAST, pytest.param(pairs(), marks=pytest.mark.slow)], ids=["some", "every"])
def test_a_pair_loads_or_is_refused_by_both_names(tried):
    wrong = {}
    for pair in tried:
        try:
            settings_of(pair_row(pair), "/model", 4)
            said = ""
        except ConfigError as error:
            said = str(error)
        names = REFUSED.get(pair, ())
        if bool(said) != bool(names) or not all(name in said for name in names):
            wrong[tuple(sorted(pair))] = said
    assert not wrong


@pytest.mark.parametrize("pair", REFUSED_LATER, ids=lambda pair: " and ".join(" ".join(option) for option in sorted(pair)))
def test_what_loads_and_does_not_stand_together_is_refused_by_both_names_when_it_runs(folder, alone, pair):
    with pytest.raises(ConfigError) as refused:
        run_row(pair_row(pair), folder)
    assert all(name in str(refused.value) for name in REFUSED_LATER[pair])


def test_rows_try_out_every_pair_that_is_not_refused():
    assert runnable_pairs(lossless()) <= set().union(*map(tried_pairs, EXACT))
    assert runnable_pairs(runnable()) <= set().union(*map(tried_pairs, ROWS))


def test_a_lossless_row_is_lossless():
    assert all(row[factor] == all_off()[factor] for row in EXACT for factor in LOSSY if factor != "clip")


@every_row(ROWS)
def test_lossless_knobs_change_nothing(outcomes, ranks, row):
    found, expected = outcomes[ranks, key(row)], outcomes[ranks, key(reference_of(row))]
    for own, other in zip(found, expected, strict=True):
        assert not apart(own, other).beyond(tolerance(row))


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if n < 3 else pytest.mark.slow) for n, row in enumerate(GRAPHS)])
def test_graphs_change_nothing_beside_other_knobs(outcomes, row):
    (found,), (expected,) = (outcomes[1, key(row | {"actor cuda_graphs": level})] for level in ("on", "off"))
    assert not apart(found, expected).beyond(tolerance(row))


@every_row(ROWS)
def test_ranks_have_one_engine_and_one_gradient(outcomes, ranks, row):
    first, *others = outcomes[ranks, key(row)]
    assert all((other.weights == first.weights).all() and other.grad_norm == first.grad_norm for other in others)


@every_row(OTHERS)
def test_lossy_knobs_change_no_more_than_they_say(outcomes, ranks, row):
    plain = all_off() | {"clip": row["clip"]}
    for own, other in zip(outcomes[ranks, key(row)], outcomes[ranks, key(plain)], strict=True):
        found = {
            "log_prob": most(own.log_probs[:1], other.log_probs[:1]),
            "ref_log_prob": most(own.ref_log_probs, other.ref_log_probs),
        }
        if row["lora"] == "off":  # adapters are other parameters, with other gradients
            found["grad_norm"] = abs(own.grad_norm[0] - other.grad_norm[0]) / other.grad_norm[0]
            found["weights"] = moved(own, other)
        allowed = cost(row)
        assert not {name: (value, allowed[name]) for name, value in found.items() if value > allowed[name]}


@every_row(ROWS)
def test_the_engine_has_the_weights_of_the_policy(outcomes, ranks, row):
    # In fp32 the two differ by sums. Otherwise one of them rounds logits, or adapters when they are merged into bfloat16.
    exact = row["actor dtype"] == row["engine dtype"] == "fp32" and (row["lora"] == "off" or row["masters"] == "fp32")
    most = SUMS.log_prob if exact else ROUNDINGS.log_prob
    assert all(outcome.engine_gap <= most for outcome in outcomes[ranks, key(row)])


def test_two_ranks_compute_what_one_does(outcomes):
    (alone,), both = outcomes[1, key(all_off())], outcomes[2, key(all_off())]
    for step in range(len(alone.loss)):
        assert sum(own.loss[step] for own in both) == pytest.approx(alone.loss[step], abs=SUMS.loss)
        assert both[0].grad_norm[step] == pytest.approx(alone.grad_norm[step], rel=SUMS.grad_norm)
    assert moved(both[0], alone) <= SUMS.weights
