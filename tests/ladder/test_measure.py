import gc
import json
import os
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl_memopt.config.schema import Actor
from verl_memopt.errors import ConfigError, OutOfMemory
from verl_memopt.ladder.measure import (
    ABLATION,
    ALTERNATIVES,
    Row,
    UpdateSize,
    as_json,
    choose_rows,
    make_batch,
    measure_row,
    plan_rows,
    row_settings,
    run_ablation,
    shapes,
    split,
    with_savings,
)
from verl_memopt.memory.host_buffers import host_allocator
from verl_memopt.memory.knob import knob_named, knobs
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.worker import Worker

WORK = UpdateSize(rows=4, prompt=24, response=8, group=4)
WIDE_WORK = UpdateSize(rows=8, prompt=256, response=64, group=8)
SHAPE = TinyShape(vocab_size=8192, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
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


SOME = (
    "chunked_logprob", "shared_prompt", "bucketed_adamw", "activation_checkpointing", "optimizer_offload", "param_offload",
    "optimizer_state_dtype", "grad_offload", "shared_weights", "native_offload", "load_mode", "lora",
)  # fmt: skip
"""Knobs of every kind: their rows and those that they are compared with. All rows are measured as a proof."""


@pytest.fixture(scope="module", params=[SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def rows(folder, request):
    return {row.knob: row for row in run_ablation(folder, WIDE_WORK, SMALLER, request.param)}


def test_a_row_reports_phases_kinds_and_bytes(rows):
    off = rows["all off"]
    assert off.phases.keys() == {"old_log_prob", "ref", "update_actor", "update_weights"}
    assert off.peak_device_bytes == max(off.phases.values()) == sum(off.kinds.values())
    assert all(row.host_bytes == 0 for row in list(rows.values())[:5])
    assert rows["optimizer_state_dtype"].host_bytes > 0


def test_exact_knobs_change_no_number(rows):
    off = rows["all off"]
    exact = {*ABLATION[: ABLATION.index("precision")], "optimizer_in_backward", "native_offload", "load_mode"}
    for name in exact & rows.keys():
        assert rows[name].loss == pytest.approx(off.loss, rel=1e-5), name
        assert rows[name].grad_norm == pytest.approx(off.grad_norm, rel=1e-5), name
    # Gradients on the host change where buckets begin, and so the draws of stochastic rounding.
    before = rows[rows["shared_weights"].base]
    assert (rows["shared_weights"].loss, rows["shared_weights"].grad_norm) == (before.loss, before.grad_norm)


def test_every_row_saves_what_its_knobs_formula_says_and_without_a_claim_holds_no_more_than_the_row_before(rows):
    compared = [row for row in rows.values() if row.base in rows]
    assert len(compared) >= len(SOME)
    for row in compared:
        for saving in row.savings:
            assert saving.measured_bytes == pytest.approx(saving.formula_bytes, rel=0.1, abs=SMALL), (row.knob, saving)
        if not row.savings and row.knob in ABLATION:
            assert row.peak_device_bytes <= rows[row.base].peak_device_bytes * 1.001, row.knob


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


def test_a_row_that_does_not_fit_is_a_result_that_says_where_it_ran_out_and_the_ladder_goes_on(under_a_limit, limit, rows):
    assert {name: row.status for name, row in under_a_limit.items()} == {
        "all off": "out of memory", "chunked_logprob": "out of memory", "shared_prompt": "ok", "bucketed_adamw": "ok",
    }  # fmt: skip
    failed = under_a_limit["all off"]
    assert failed.peak_device_bytes is failed.seconds is None
    ran_out = failed.out_of_memory
    assert ran_out.phase == "update_actor"
    assert ran_out.limit_bytes == pytest.approx(limit, abs=1)
    assert ran_out.held_bytes <= ran_out.limit_bytes < ran_out.held_bytes + ran_out.asked_bytes
    # The phases that ended before keep their peaks.
    assert failed.phases == {name: rows["all off"].phases[name] for name in ("old_log_prob", "ref")}


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


@pytest.mark.parametrize("knob", ["optimizer_state_dtype", pytest.param("native_offload", marks=pytest.mark.slow)])
def test_a_critic_that_rests_on_the_host_adds_nothing_to_the_peak_of_the_step(folder, rows, knob):
    without = rows[knob]
    with_critic = measure_row(Path(folder), WIDE_WORK, knob, without.overrides, [*SMALLER, "algorithm.adv_estimator=gae"])
    assert with_critic.phases.keys() - without.phases.keys() == {"values", "update_critic"}
    assert with_critic.peak_device_bytes <= 1.05 * without.peak_device_bytes
    for phase, num_bytes in without.phases.items():
        assert abs(with_critic.phases[phase] - num_bytes) <= SMALL, phase


# The rows: their order and settings, and what is recorded of one.


def test_the_ladder_goes_from_all_off_to_all_on_one_knob_at_a_time():
    ablation = [plan for plan in plan_rows(WORK) if plan.knob not in ALTERNATIVES]
    assert [plan.knob for plan in ablation] == ["all off", *ABLATION]
    assert [plan.base for plan in ablation] == ["", "all off", *ABLATION[:-1]]
    for before, plan in pairwise(ablation):
        changed = {override.split("=")[0] for override in set(plan.overrides) - set(before.overrides)}
        assert changed <= {override.split("=")[0] for override in knob_named(plan.knob).row.on}


def test_an_alternative_adds_its_knob_to_the_row_it_names():
    plans = {plan.knob: plan for plan in plan_rows(WORK)}
    for name, base in ALTERNATIVES.items():
        assert set(plans[name].overrides) - set(plans[base].overrides) <= set(knob_named(name).row.on)


def test_every_knob_that_an_update_can_show_has_a_row():
    shown = {*ABLATION, *ALTERNATIVES}
    # The ladder runs on one device, where no tokens are shared.
    assert {knob.name for knob in knobs()} - shown == {"limits", "profiles", "sequence_parallel", "tiled_block"}
    assert all(knob.row.on and knob.row.off for knob in knobs() if knob.name in shown)


def test_every_row_is_a_valid_configuration_in_which_no_knob_is_on_and_off(tiny_folder):
    for plan in plan_rows(WORK):
        keys = [override.split("=")[0] for override in plan.overrides]
        assert len(keys) == len(set(keys))
        assert row_settings(str(tiny_folder), WORK, plan.overrides).trainer.worker_group == "local"


def test_chosen_rows_are_those_asked_for_and_the_ones_they_are_compared_with():
    assert [plan.knob for plan in choose_rows(WORK, ["lora", "token_budget"])] == [
        *("bucketed_adamw", "token_budget", "rollout_memory", "lora")
    ]
    assert [plan.knob for plan in choose_rows(WORK, ["quantized_base"])] == ["lora", "quantized_base"]


def test_the_ladder_keeps_its_order():
    """Committed ladders are compared row by row."""
    assert ABLATION[:3] == ("chunked_logprob", "shared_prompt", "bucketed_adamw")
    assert ABLATION[-4:] == ("stochastic_rounding", "optimizer_state_dtype", "grad_offload", "shared_weights")
    assert ALTERNATIVES["load_mode"] == "param_offload"


def test_with_a_critic_its_own_knobs_stand_as_the_policys_do(tiny_folder):
    (plan,) = [plan for plan in plan_rows(WORK) if plan.knob == "grad_offload"]
    settings = row_settings(str(tiny_folder), WORK, [*plan.overrides, "algorithm.adv_estimator=gae"])
    actor, critic = settings.actor_rollout_ref.actor, settings.critic
    assert critic.model.fsdp_config == actor.fsdp_config
    assert critic.model.enable_activation_offload is settings.actor_rollout_ref.model.enable_activation_offload is True
    assert critic.ppo_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu
    assert critic.optim.state_dtype == actor.optim.state_dtype
    own = "critic.model.fsdp_config.param_offload=false"
    settings = row_settings(str(tiny_folder), WORK, [*plan.overrides, "algorithm.adv_estimator=gae", own])
    assert settings.actor_rollout_ref.actor.fsdp_config.param_offload is True
    assert settings.critic.model.fsdp_config.param_offload is False


RAN_OUT = OutOfMemory("update_actor", asked_bytes=5, held_bytes=8, limit_bytes=10)


def fitting(knob, logits):
    """Return a row that fits, with so many bytes of logits."""
    phase_kinds = {phase: {"logits": logits} for phase in ("update_actor", "old_log_prob")}
    return Row(knob, (), {"update_actor": 100}, {"logits": logits}, 100, 0, 1.5, 0.1, 0.2, phase_kinds)


@pytest.mark.parametrize("failed", ["row", "base"])
def test_a_saving_is_not_measured_where_either_side_ran_out(failed, shapes_pair):
    base, compared_row = fitting("all off", 40), fitting("chunked_logprob", 10)
    assert {saving.measured_bytes for saving in with_savings(compared_row, base, *shapes_pair).savings} == {30}
    if failed == "row":
        compared_row = Row("chunked_logprob", (), {}, out_of_memory=RAN_OUT)
    else:
        base = Row("all off", (), {}, out_of_memory=RAN_OUT)
    compared = with_savings(compared_row, base, *shapes_pair)
    assert {saving.measured_bytes for saving in compared.savings} == {None}
    assert compared.base == "all off"
    assert all(isinstance(saving.formula_bytes, int) for saving in compared.savings)


@pytest.fixture
def shapes_pair(tiny_folder):
    """Return the sizes that the formulas read, without and with chunked log-probs."""
    first, second = plan_rows(WORK)[:2]
    return shapes(tiny_folder, WORK, first.overrides), shapes(tiny_folder, WORK, second.overrides)


def test_sizes_that_cannot_be_read_are_told_by_the_key_that_the_user_gave(tiny_folder):
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.model\.override_config\.colour"):
        shapes(tiny_folder, WORK, ["actor_rollout_ref.model.override_config={colour: 1}"])


def test_alternatives_are_apart_from_the_ablation():
    ablation, alternatives = split([fitting("all off", 1), fitting("lora", 1), fitting("chunked_logprob", 1)])
    assert [one.knob for one in ablation] == ["all off", "chunked_logprob"]
    assert [one.knob for one in alternatives] == ["lora"]


def test_plain_values_say_model_work_status_and_where_a_row_ran_out():
    failed = Row("all off", ("a=1",), {"ref": 7}, out_of_memory=RAN_OUT)
    plain = json.loads(json.dumps(as_json([failed, fitting("chunked_logprob", 10), fitting("lora", 1)], WORK, "m")))
    assert (plain["schema"], plain["model"], plain["work"]["prompt"]) == (3, "m", 24)
    first, second = plain["rungs"]
    assert (first["knob"], first["status"], first["peak_device_bytes"]) == ("all off", "out of memory", None)
    assert first["out_of_memory"] == {"phase": "update_actor", "asked_bytes": 5, "held_bytes": 8, "limit_bytes": 10}
    assert (second["status"], second["out_of_memory"], second["peak_device_bytes"]) == ("ok", None, 100)
    assert [one["knob"] for one in plain["branches"]] == ["lora"]
