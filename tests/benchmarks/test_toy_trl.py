import dataclasses

import pytest

from benchmarks.toy_trl import __main__ as command
from benchmarks.toy_trl import ours
from benchmarks.toy_trl.report import Spread, VoidError, check_same_prompts, own_peak, parts, ratios, row_of, spread
from benchmarks.toy_trl.work import (
    CONTESTANTS,
    OURS,
    TRL,
    WARM_UP,
    WORK,
    Contestant,
    Peak,
    Plan,
    Record,
    hash_of,
    peak_of,
    store,
    stored,
)
from verl_memopt.config.loader import load_settings

HF, TRL_HF = Contestant(OURS, "hf", 1), Contestant(TRL, "hf", 1)
MIB = 2**20


def record(step=0.1, timed=5, update=0.025, peaks=None, prompts="same"):
    """A run of the warm-up, ``timed`` steps and the last one; the warm-up takes ten times as long."""
    lengths = [10 * step] * WARM_UP + [step] * (timed + 1)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    phases = [{"rollout": 0.02, "update": update} for _ in lengths]
    found = (
        {"update": Peak(8 * MIB, MIB), "log_prob": Peak(4 * MIB, MIB), "rollout": Peak(2 * MIB, MIB)} if peaks is None else peaks
    )
    return Record(starts, phases, [768] * len(lengths), 0.75, found, prompts)


def row(contestant=HF, **options):
    return row_of(contestant, [record(**options)], [record()])


def test_warm_up_and_last_step_are_left_out_of_the_times():
    found = row(timed=3)
    assert found.steps == 3
    assert found.seconds_per_step == Spread(*[pytest.approx(0.1)] * 4)


def test_a_spread_holds_the_least_step_the_median_run_and_the_extreme_runs():
    assert spread([[1.0, 4.0, 5.0], [2.0, 2.0, 9.0], [3.0, 3.0, 3.0]]) == Spread(1.0, 3.0, 2.0, 4.0)


def test_phases_and_rest_add_up_to_the_step():
    found = row()
    assert sum(part.median for part in found.seconds.values()) == pytest.approx(0.1)
    assert found.seconds["rest"].median == pytest.approx(0.1 - 0.02 - 0.025)
    assert found.seconds["sync"].median == 0


def test_the_least_step_is_one_step_and_its_parts_are_its_phases():
    found = row_of(HF, [record(step=step) for step in (0.3, 0.1, 0.2)], [record()])
    assert sum(found.least_step.values()) == pytest.approx(found.seconds_per_step.least) == pytest.approx(0.1)
    assert parts(found) == {"rollout": 0.02, "log_prob": 0, "update": 0.025, "rest": pytest.approx(0.055)}


def test_different_bytes_in_two_runs_of_one_seed_void_the_row():
    other = record(peaks={**record().peaks, "update": Peak(8 * MIB + 1, MIB)})
    with pytest.raises(VoidError, match=r"verl_memopt-hf-1.*different bytes"):
        row_of(HF, [record()], [record(), other])


@pytest.mark.parametrize("prompts", ["other", ""])
def test_other_prompts_or_none_void_the_comparison(prompts):
    check_same_prompts([record(), record()])
    with pytest.raises(VoidError, match="same prompts"):
        check_same_prompts([record(), record(prompts=prompts)])


def test_only_weights_and_cache_of_an_engine_count_as_its_own():
    kinds = {"params": 3, "rollout weights": 5, "kv": 7, "activations": 11}
    assert peak_of(26, kinds) == Peak(26, 12)


def test_the_hash_of_prompts_tells_order_and_steps_apart():
    assert hash_of([[[1, 2], [3]]]) == hash_of([[[1, 2], [3]]])
    assert len({hash_of(ids) for ids in ([[[1, 2], [3]]], [[[3], [1, 2]]], [[[1, 2]], [[3]]])}) == 3


def test_shares_leave_out_the_bytes_of_an_engine():
    own, other = row(), dataclasses.replace(row(TRL_HF), engine_bytes=0, peak_bytes={"update": 14 * MIB})
    assert own_peak(own) == 7 * MIB
    assert ratios([other, own]) == [
        "1 micro-batch: verl_memopt (hf) / TRL (hf): CPU time 1.00, of medians 1.00; update peak 0.50"
    ]


def test_plans_and_records_survive_their_files(tmp_path):
    plan = Plan(Contestant(TRL, "hf", 8, trimmed=True), "/task", "/folder", 5, 1, True)
    for value in (plan, record()):
        store(value, tmp_path / "file")
        assert stored(tmp_path / "file") == value


@pytest.mark.parametrize("contestant", [one for one in CONTESTANTS if one.trainer == OURS], ids=lambda one: one.slug)
def test_our_settings_are_those_of_the_work(contestant):
    plan = Plan(contestant, "/task", "/folder", steps=7, seed=3, track=False)
    settings = load_settings("rloo_trainer", ours.overrides(plan))
    actor, rollout = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout
    assert settings.data.train_batch_size * rollout.n == WORK.rows
    assert actor.ppo_mini_batch_size == settings.data.train_batch_size
    assert actor.ppo_micro_batch_size_per_gpu == rollout.log_prob_micro_batch_size_per_gpu == contestant.rows_per_micro_batch
    assert not actor.use_dynamic_bsz
    assert not actor.use_kl_loss
    assert not settings.algorithm.use_kl_in_reward
    assert settings.algorithm.adv_estimator == "rloo"
    assert actor.policy_loss.loss_mode == "sequence"
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (WORK.clip_ratio, WORK.clip_ratio)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.clip_grad) == (2e-4, 0.01, 1.0)
    assert (actor.fsdp_config.dtype, rollout.dtype, rollout.temperature) == ("fp32", "fp32", 1.0)
    assert not settings.actor_rollout_ref.model.enable_gradient_checkpointing
    assert not rollout.val_kwargs.do_sample
    assert settings.trainer.track_memory_every_steps == 0
    assert settings.trainer.total_training_steps == 7


def test_without_trl_the_benchmark_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "TRL_PYTHON", tmp_path / "python")
    assert command.main([]) == command.REFUSED
    assert "benchmarks/update_pass/setup.sh" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not command.TRL_PYTHON.exists(), reason="TRL's environment is missing: run benchmarks/update_pass/setup.sh")
def test_both_trainers_get_the_same_prompts(tmp_path):
    found = command.Contest(tmp_path)
    found.prepare()
    plans = [Plan(one, str(found.task), str(tmp_path / one.slug), steps=3, seed=1, track=True) for one in (TRL_HF, HF)]
    check_same_prompts([command.run(plan) for plan in plans])
