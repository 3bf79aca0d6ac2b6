"""The default way, Ray and vLLM: engine and trainer agree, and the first step is one step however it is spread and cut."""

import os
import signal

import pytest

from tests.end_to_end.runs import family, metrics, start, succeeded, survivors, train, train_here, wait_for_step

AR = "actor_rollout_ref"
QUIET = ["trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
TWO = "trainer.n_gpus_per_node=2"


@pytest.fixture(scope="module")
def alone(toy, tmp_path_factory):
    """Twenty steps of the default run: one worker with an engine of its own, under Ray."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    succeeded(train(toy, run_dir, "trainer.total_training_steps=20", "trainer.test_freq=20", "trainer.save_freq=-1"))
    return run_dir


@pytest.fixture(scope="module")
def interrupted(toy, tmp_path_factory):
    """Two workers with an engine each, stopped by Ctrl-C after five steps: exit code, output, processes left, run folder."""
    run_dir = tmp_path_factory.mktemp("apart") / "run"
    process = start(toy, run_dir, TWO, "trainer.total_training_steps=100000", *QUIET)
    wait_for_step(process, run_dir, 4)
    relatives = family(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, survivors(relatives), run_dir


@pytest.fixture(scope="module")
def apart(interrupted):
    return interrupted[3]


@pytest.fixture(scope="module")
def shared(toy, tmp_path_factory):
    """Two workers that share one engine."""
    run_dir = tmp_path_factory.mktemp("shared") / "run"
    succeeded(train(toy, run_dir, TWO, f"{AR}.rollout.tensor_model_parallel_size=2", "trainer.total_training_steps=5", *QUIET))
    return run_dir


@pytest.fixture(scope="module")
def without_ray(toy, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("local") / "run"
    succeeded(train(toy, run_dir, "trainer.worker_group=local", "trainer.total_training_steps=1", *QUIET))
    return run_dir


def test_twenty_steps_teach_the_toy_task(alone):
    score = "val-core/toy/arithmetic/reward/mean@1"
    assert metrics(alone)[0][score] <= 0.5
    assert metrics(alone)[20][score] >= 0.9


@pytest.mark.parametrize(("runs", "steps"), [("alone", 20), pytest.param("apart", 5, marks=pytest.mark.slow), ("shared", 5)])
def test_vllm_and_the_trainer_agree_in_every_step(runs, steps, request):
    rows = metrics(request.getfixturevalue(runs))
    differences = [row["rollout/logprob_diff_max"] for step, row in rows.items() if step > 0]
    assert len(differences) >= steps
    assert max(differences) <= 1e-4


@pytest.mark.parametrize("runs", [pytest.param("apart", marks=pytest.mark.slow), "shared", "without_ray"])
def test_the_first_step_is_the_same_wherever_its_workers_live_and_whatever_they_share(alone, runs, request):
    one, other = (metrics(run_dir)[1] for run_dir in (alone, request.getfixturevalue(runs)))
    for name in ("critic/score/mean", "actor/grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow  # test_stops does the like, to all processes, in every run of the tests
def test_ctrl_c_on_ray_finishes_the_step_saves_and_leaves_no_process(interrupted):
    code, output, left, run_dir = interrupted
    assert code == 130, output[-3000:]
    assert not left
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(max(metrics(run_dir)))
    assert output.rstrip().splitlines()[-1] == str(run_dir)
    assert "Traceback" not in output


@pytest.mark.slow  # test_stops does the like, to all processes, in every run of the tests
def test_sigterm_on_ray_is_as_gentle(toy, tmp_path):
    process = start(toy, tmp_path / "run", f"{AR}.rollout.name=hf", "trainer.total_training_steps=100000", *QUIET)
    wait_for_step(process, tmp_path / "run", 0)
    relatives = family(process)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output[-3000:]
    assert not survivors(relatives)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == str(max(metrics(tmp_path / "run")))


UNEVEN = [
    *(f"{AR}.rollout.name=hf", f"{AR}.rollout.temperature=2", f"{AR}.actor.policy_loss.loss_mode=vanilla"),
    *(f"{AR}.actor.entropy_coeff=0.01", "trainer.total_training_steps=1", *QUIET),
]
"""One step whose loss is no zero: answers of several lengths, a ratio per token, an entropy bonus."""
BUDGET = f"{AR}.actor.ppo_max_token_len_per_gpu"


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """The first step in one piece, in this process."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train_here(toy, run_dir, *UNEVEN, "trainer.worker_group=local", f"{BUDGET}=8192") == 0
    return metrics(run_dir)[1]


def assert_same_step(row, other):
    assert abs(row["actor/loss"]) > 1e-3
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm"):
        assert other[name] == pytest.approx(row[name], rel=1e-4), name


@pytest.mark.parametrize(
    "setting",
    [f"{BUDGET}=560", f"{AR}.model.enable_gradient_checkpointing=true", f"{AR}.model.attn_implementation=eager"],
)
def test_the_first_step_is_the_same_however_it_is_computed(toy, tmp_path, whole, setting):
    assert train_here(toy, tmp_path / "run", *UNEVEN, "trainer.worker_group=local", f"{BUDGET}=8192", setting) == 0
    assert_same_step(whole, metrics(tmp_path / "run")[1])


def test_those_budgets_cut_the_first_step_into_one_and_into_eight(whole):
    computed = whole["perf/total_num_tokens"] - 32 * 8  # the last token of a row predicts nothing
    assert computed <= 8192
    assert 7 * 560 < computed <= 8 * 560


@pytest.mark.slow  # test_combinations does the like on two ranks without Ray, and `apart` cuts a step under Ray
def test_the_first_step_is_the_same_on_two_workers_under_ray(toy, tmp_path, whole):
    succeeded(train(toy, tmp_path / "run", *UNEVEN, TWO))
    assert_same_step(whole, metrics(tmp_path / "run")[1])
