"""Three steps of a whole worker on the GPU against the same on a CPU, for every knob alone and for rows that cover all pairs.

Only a GPU has the kernels, streams and generators that these steps run on.
"""

from dataclasses import fields, replace

import pytest

from tests.end_to_end.covering import NEEDS, all_off, reference_of, runnable
from tests.end_to_end.knob_runs import make_model, run_row
from tests.end_to_end.test_combinations import EXACT, OTHERS, ROUNDINGS, SUMS, Apart, apart, key, tolerance
from tests.gpu import machine
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.errors import ConfigError
from verl_memopt.model.assembly import SHARDS_BYTES, TORCH

AR = "actor_rollout_ref"
UNCOMPILED = {f"{AR}.actor.use_torch_compile": False, f"{AR}.ref.use_torch_compile": False}
"""Compiled functions have a test of their own."""

ACROSS = 8.0
"""How much farther apart two kinds of device may be than two orders of sums on one: every exponential, sine and product rounds by
itself there. The bound of a log-prob is then 4e-5 nats, of a gradient's norm 4e-6 of it."""

QUICK = {("activation offload", "on"), ("state", "int8")}
"""Knobs that the CPU tries out with every test run, as a rehearsal of these tests."""


def alone():
    """Gives (knob, value, row) of every value of every knob, with what it needs and nothing else."""
    for factor, levels in runnable().items():
        for level in list(levels)[1:]:
            yield factor, level, all_off() | NEEDS.get((factor, level), {}) | {factor: level}


def by_chance(row):
    """Says whether a row rounds at random: a GPU's generator draws other numbers than a CPU's."""
    return row["masters"] == "rounded" or row["state"] in ("int8", "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("knobs"))


@pytest.fixture(scope="module")
def outcome(folder):
    """Gives the outcome of a row on a kind of device; each is run once."""
    found = {}

    def run(row, kind):
        if (key(row), kind) not in found:
            leave_process_group()
            found[key(row), kind] = run_row(row, folder, device=kind, more=UNCOMPILED)
        return found[key(row), kind]

    return run


def bound(row, factor):
    """Gives how far apart the outcomes of a row may be."""
    most = tolerance(row)
    return replace(most, **{field.name: factor * getattr(most, field.name) for field in fields(Apart)})


def check(row, outcome):
    # What is drawn at random is compared on the same device, where only knobs that change no number differ.
    kind = machine.kind() if by_chance(row) else "cpu"
    try:
        found = outcome(row, machine.kind())
    except ConfigError as error:
        assert TORCH < SHARDS_BYTES
        pytest.skip(str(error))
    expected = outcome(reference_of(row), kind)
    assert not apart(found, expected).beyond(bound(row, machine.size(ACROSS, 1)))
    exact = row["actor dtype"] == row["engine dtype"] == "fp32" and (row["lora"] == "off" or row["masters"] == "fp32")
    most = SUMS.log_prob * machine.size(ACROSS, 1) if exact else ROUNDINGS.log_prob
    assert found.engine_gap <= most


def marked(rows, quick):
    for *name, row in rows:
        marks = [pytest.mark.rehearsed] if quick(*name) else []
        yield pytest.param(row, id="-".join(map(str, name)), marks=marks)


@pytest.mark.parametrize("row", marked(alone(), lambda *option: option in QUICK))
def test_a_knob_alone_gives_what_a_cpu_gives_in_fp32(outcome, row):
    check(row, outcome)


COVERING = [("exact", number, row) for number, row in enumerate(EXACT)] + [("lossy", n, row) for n, row in enumerate(OTHERS)]


@pytest.mark.parametrize("row", marked(COVERING, lambda *name: name == ("lossy", 0)))
def test_knobs_together_give_what_a_cpu_gives_in_fp32(outcome, row):
    check(row, outcome)


def test_with_every_knob_off_a_gpu_gives_what_a_cpu_gives_in_fp32(outcome):
    check(all_off(), outcome)
