import pytest

from benchmarks.toy_trl import __main__ as command
from benchmarks.toy_trl import ours
from benchmarks.toy_trl.report import Spread, VoidError, check_same_prompts, parts, row_of, spread
from benchmarks.toy_trl.work import CONTESTANTS, OURS, TRL, WARM_UP, WORK, Contestant, Peak, Plan, Record, hash_of
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


def test_times_leave_out_warm_up_and_last_step_and_phases_and_rest_add_up():
    found = row(timed=3)
    assert found.steps == 3
    assert found.seconds_per_step == Spread(*[pytest.approx(0.1)] * 4)
    assert sum(part.median for part in found.seconds.values()) == pytest.approx(0.1)
    assert found.seconds["rest"].median == pytest.approx(0.1 - 0.02 - 0.025)
    assert found.seconds["sync"].median == 0
    found = row_of(HF, [record(step=step) for step in (0.3, 0.1, 0.2)], [record()])
    assert sum(found.least_step.values()) == pytest.approx(found.seconds_per_step.least) == pytest.approx(0.1)
    assert parts(found) == {"rollout": 0.02, "log_prob": 0, "update": 0.025, "rest": pytest.approx(0.055)}
    assert spread([[1.0, 4.0, 5.0], [2.0, 2.0, 9.0], [3.0, 3.0, 3.0]]) == Spread(1.0, 3.0, 2.0, 4.0)


def test_different_bytes_in_two_runs_of_one_seed_void_the_row():
    other = record(peaks={**record().peaks, "update": Peak(8 * MIB + 1, MIB)})
    with pytest.raises(VoidError, match=r"verl_memopt-hf-1.*different bytes"):
        row_of(HF, [record()], [record(), other])


@pytest.mark.parametrize("prompts", ["other", ""])
def test_other_prompts_or_none_void_the_comparison(prompts):
    assert len({hash_of(ids) for ids in ([[[1, 2], [3]]], [[[3], [1, 2]]], [[[1, 2]], [[3]]])}) == 3
    check_same_prompts([record(), record()])
    with pytest.raises(VoidError, match="same prompts"):
        check_same_prompts([record(), record(prompts=prompts)])


@pytest.mark.parametrize("contestant", [one for one in CONTESTANTS if one.trainer == OURS][:2], ids=lambda one: one.slug)
def test_our_settings_are_those_of_the_work(contestant):
    plan = Plan(contestant, "/task", "/folder", steps=7, seed=3, track=False)
    settings = load_settings("rloo_trainer", ours.overrides(plan))
    actor, rollout = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout
    assert settings.data.train_batch_size * rollout.n == WORK.rows
    assert actor.ppo_mini_batch_size == settings.data.train_batch_size
    assert actor.ppo_micro_batch_size_per_gpu == rollout.log_prob_micro_batch_size_per_gpu == contestant.rows_per_micro_batch
    assert (actor.use_dynamic_bsz, actor.use_kl_loss, settings.algorithm.use_kl_in_reward) == (False, False, False)
    assert (settings.algorithm.adv_estimator, actor.policy_loss.loss_mode) == ("rloo", "sequence")
    assert actor.clip_ratio_low == actor.clip_ratio_high == WORK.clip_ratio
    assert (settings.trainer.track_memory_every_steps, settings.trainer.total_training_steps) == (0, 7)


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
