import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl_memopt.config.schema import Actor
from verl_memopt.errors import ConfigError
from verl_memopt.ladder.measure import ABLATION, ALTERNATIVES, Work, make_batch, measure_row, run_ablation
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.worker import Worker

WORK = Work(rows=4, prompt=24, response=8, group=4)
WIDE_WORK = Work(rows=8, prompt=256, response=64, group=8)
SHAPE = TinyShape(vocab_size=8192, hidden_size=128, intermediate_size=384, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32)
SMALLER = (
    "actor_rollout_ref.model.activation_offload_min_bytes=1024", "actor_rollout_ref.actor.optim.bucket_megabytes=0.25",
)  # fmt: skip
"""Sizes that suit a tiny model: tensors worth moving, and buckets of the optimizer."""
SMALL = 2**15
"""Bytes in which a formula may be off where it says that nothing is saved, or next to nothing."""


def test_a_knob_that_is_not_on_the_ladder_is_refused_by_name(tiny_folder):
    with pytest.raises(ConfigError, match=r"--only tiled: not on the ladder. It has all off, chunked_logprob"):
        list(run_ablation(str(tiny_folder), WORK, only=["tiled"]))


def test_the_batch_is_the_same_for_the_same_work():
    one, two = make_batch(WORK, Actor()), make_batch(WORK, Actor())
    assert one.num_rows == 4
    assert one.prompts.sizes() == [24] * 4
    assert all(torch.equal(prompt, one.prompts.rows()[0]) for prompt in one.prompts.rows())
    assert one.responses.sizes() == [8] * 4
    assert (one.responses.flat == two.responses.flat).all()
    assert (one.advantages == two.advantages).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("ladder") / "model", SHAPE))


@pytest.fixture(scope="module")
def rows(folder):
    return {row.knob: row for row in run_ablation(folder, WIDE_WORK, SMALLER)}


def test_a_row_reports_phases_kinds_and_bytes(rows):
    off = rows["all off"]
    assert off.phases.keys() == {"old_log_prob", "ref", "update_actor", "update_weights"}
    assert off.peak_device_bytes == max(off.phases.values()) == sum(off.kinds.values())
    assert all(row.host_bytes == 0 for row in list(rows.values())[:5])
    assert rows["optimizer_state_dtype"].host_bytes > 0


def test_exact_knobs_change_no_number(rows):
    off = rows["all off"]
    for name in (
        *ABLATION[: ABLATION.index("precision")],
        "optimizer_in_backward",
        "grad_offload",
        "native_offload",
        "load_mode",
    ):
        assert rows[name].loss == pytest.approx(off.loss, rel=1e-5), name
        assert rows[name].grad_norm == pytest.approx(off.grad_norm, rel=1e-5), name


@pytest.mark.parametrize("name", [*ABLATION, *ALTERNATIVES])
def test_every_row_saves_what_its_knobs_formula_says(rows, name):
    for saving in rows[name].savings:
        assert saving.measured_bytes == pytest.approx(saving.formula_bytes, rel=0.1, abs=SMALL), saving


def test_rows_without_a_claim_hold_no_more_than_the_row_before(rows):
    for name in ABLATION:
        if not rows[name].savings:
            before = rows[rows[name].base]
            assert rows[name].peak_device_bytes <= before.peak_device_bytes * 1.001, name


def test_all_on_holds_a_fraction_of_all_off(rows):
    assert rows[ABLATION[-1]].peak_device_bytes <= rows["all off"].peak_device_bytes / 8


def limited(num_bytes):
    """Return the settings of every row with a device limit."""
    return (*SMALLER, f"memory.device_limit_gb={num_bytes / 2**30!r}")


@pytest.fixture(scope="module")
def limit(rows):
    """A limit between the peaks of all off and of shared prompts."""
    return (rows["all off"].peak_device_bytes + rows["shared_prompt"].peak_device_bytes) // 2


@pytest.fixture(scope="module")
def under_a_limit(folder, limit):
    only = ["all off", "shared_prompt", "bucketed_adamw"]
    return {row.knob: row for row in run_ablation(folder, WIDE_WORK, limited(limit), only)}


def test_a_row_that_does_not_fit_is_a_result_and_the_ladder_goes_on(under_a_limit):
    statuses = {name: row.status for name, row in under_a_limit.items()}
    assert statuses == {
        "all off": "out of memory", "chunked_logprob": "out of memory", "shared_prompt": "ok", "bucketed_adamw": "ok",
    }  # fmt: skip
    assert under_a_limit["all off"].peak_device_bytes is None
    assert under_a_limit["all off"].seconds is None


def test_a_row_that_does_not_fit_says_where_it_ran_out_and_what_it_asked_for(under_a_limit, limit):
    ran_out = under_a_limit["all off"].out_of_memory
    assert ran_out.phase == "update_actor"
    assert ran_out.limit_bytes == pytest.approx(limit, abs=1)
    assert ran_out.held_bytes <= ran_out.limit_bytes < ran_out.held_bytes + ran_out.asked_bytes


def test_the_phases_that_ended_before_it_ran_out_keep_their_peaks(under_a_limit, rows):
    whole = rows["all off"].phases
    assert under_a_limit["all off"].phases == {name: whole[name] for name in ("old_log_prob", "ref")}


def test_a_row_after_one_that_ran_out_is_measured_as_if_the_ladder_began_with_it(under_a_limit, rows):
    for name in ("shared_prompt", "bucketed_adamw"):
        assert under_a_limit[name].phases == rows[name].phases
        assert under_a_limit[name].kinds == rows[name].kinds
        assert under_a_limit[name].loss == rows[name].loss


def test_no_saving_is_given_on_a_row_that_ran_out(under_a_limit, rows):
    assert [saving.measured_bytes for saving in under_a_limit["shared_prompt"].savings] == [None]
    assert under_a_limit["shared_prompt"].savings[0].formula_bytes == rows["shared_prompt"].savings[0].formula_bytes
    assert under_a_limit["bucketed_adamw"].savings == rows["bucketed_adamw"].savings


def live_tensor_bytes():
    return sum(
        thing.untyped_storage().nbytes() for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    )


@pytest.mark.parametrize("knob", [pytest.param("all off", marks=pytest.mark.slow), "optimizer_state_dtype"])
def test_a_row_that_ran_out_leaves_nothing_behind(folder, rows, knob, monkeypatch):
    """The least limit under which each fails late: activations, the graph and host buffers exist by then."""
    workers = weakref.WeakSet()
    build = Worker.__init__
    monkeypatch.setattr(Worker, "__init__", lambda self, *arguments: (workers.add(self), build(self, *arguments))[1])
    gc.collect()
    held, on_host, variables = live_tensor_bytes(), host_allocator().held_bytes, dict(os.environ)
    overrides = rows[knob].overrides
    ran_out = measure_row(Path(folder), WIDE_WORK, knob, overrides, limited(rows[knob].peak_device_bytes - 1))
    assert ran_out.status == "out of memory"
    assert not workers
    assert live_tensor_bytes() <= held + SMALL
    assert host_allocator().held_bytes == on_host
    assert host_allocator().limit_bytes is None
    assert not dist.is_initialized()
    assert dict(os.environ) == variables


@pytest.mark.parametrize("knob", ["optimizer_state_dtype", "native_offload"])
def test_a_critic_that_rests_on_the_host_adds_nothing_to_the_peak_of_the_step(folder, rows, knob):
    without = rows[knob]
    with_critic = measure_row(Path(folder), WIDE_WORK, knob, without.overrides, [*SMALLER, "algorithm.adv_estimator=gae"])
    assert with_critic.phases.keys() - without.phases.keys() == {"values", "update_critic"}
    assert with_critic.peak_device_bytes <= 1.05 * without.peak_device_bytes
    for phase, num_bytes in without.phases.items():
        assert abs(with_critic.phases[phase] - num_bytes) <= SMALL, phase
