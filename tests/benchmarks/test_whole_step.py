import pytest

from benchmarks.toy_trl.report import VoidError
from benchmarks.whole_step import __main__ as command
from benchmarks.whole_step import ours
from benchmarks.whole_step.work import CONTESTANTS, OURS, WHOLE, Plan, Record, Seconds, Work
from recipe.real_model.prepare_arithmetic import prepare_arithmetic
from tests.benchmarks.conftest import TINY
from verl_memopt.config.loader import load_settings
from verl_memopt.model.tiny import make_tiny_model

MINE = [name for name, contestant in CONTESTANTS.items() if contestant.trainer == OURS]


def record(whole=1.0, prompts="same", tokens=64 * 24):
    steps = [{WHOLE: Seconds(9, 9), "update": Seconds(9, 9)}, {WHOLE: Seconds(whole, 2), "update": Seconds(0.25, 1)}]
    return Record(steps, [prompts] * 2, [360] * 2, [tokens] * 2, [0.5] * 2)


def test_medians_leave_out_the_warm_up_and_phases_and_rest_add_up():
    found = command.seconds([record(whole) for whole in (3.0, 1.0, 2.0)])
    assert (found[WHOLE], found["update"], found["sync"], found["rest"]) == (2.0, 0.25, 0.0, 1.75)
    assert command.seconds([record()], "wall")[WHOLE] == 2


def test_other_prompts_or_answers_of_another_length_void_the_comparison():
    command.check_same_work([record(), record(2.0)], Work())
    with pytest.raises(VoidError, match="same prompts"):
        command.check_same_work([record(), record(prompts="other")], Work())
    with pytest.raises(VoidError, match=r"\[1535, 1536\]"):
        command.check_same_work([record(), record(tokens=1535)], Work())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MINE)
def test_our_settings_are_those_of_the_work(name, dtype):
    work = Work(dtype=dtype)
    settings = load_settings("grpo_trainer", ours.overrides(Plan(CONTESTANTS[name], work, "/m", "/task", "/f", 7, 3, 8)))
    actor, rollout = settings.actor_rollout_ref.actor, settings.actor_rollout_ref.rollout
    assert settings.data.train_batch_size * rollout.n == work.rows
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs) == (settings.data.train_batch_size, 1)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff) == (True, work.kl, 0)
    assert rollout.ignore_eos
    assert rollout.response_length == settings.data.max_response_length == work.response_tokens
    assert len({actor.fsdp_config.dtype, settings.actor_rollout_ref.ref.fsdp_config.dtype, rollout.dtype}) == 1


def test_without_trl_the_benchmark_says_how_to_get_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "TRL_PYTHON", tmp_path / "python")
    assert command.main([]) == command.REFUSED
    assert "benchmarks/update_pass/setup.sh" in capsys.readouterr().err


def test_a_step_of_a_tiny_model_has_all_phases_and_the_lengths_of_the_work(tmp_path):
    work, model = Work(prompts=2, samples=2, response_tokens=3), make_tiny_model(tmp_path / "model", TINY, seed=0)
    prepare_arithmetic(tmp_path / "task")
    folders = str(model), str(tmp_path / "task"), str(tmp_path / "run")
    found = ours.run(Plan(CONTESTANTS["verl_memopt-hf"], work, *folders, 2, 1, 8))
    command.check_same_work([found], work)
    assert min(command.seconds([found])[name] for name in (WHOLE, "rollout", "reference", "update", "rest")) > 0
    limit = command.limits(work, found.prompt_tokens[-1], model, 1)
    assert limit["update"] == pytest.approx(3 * limit["reference"])
