"""The default way, Ray and vLLM: engine and trainer agree, and the first step is one step however it is spread and cut."""

import pytest

from tests.end_to_end.runs import metrics, succeeded, train, train_here

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
def apart(toy, tmp_path_factory):
    """Two workers with an engine each."""
    run_dir = tmp_path_factory.mktemp("apart") / "run"
    succeeded(train(toy, run_dir, TWO, "trainer.total_training_steps=5", *QUIET))
    return run_dir


@pytest.fixture(scope="module")
def shared(toy, tmp_path_factory):
    """Two workers that share one engine."""
    run_dir = tmp_path_factory.mktemp("shared") / "run"
    succeeded(train(toy, run_dir, TWO, f"{AR}.rollout.tensor_model_parallel_size=2", "trainer.total_training_steps=3", *QUIET))
    return run_dir


@pytest.fixture(scope="module")
def without_ray(toy, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("local") / "run"
    assert train_here(toy, run_dir, "trainer.worker_group=local", "trainer.total_training_steps=1", *QUIET) == 0
    return run_dir


def test_twenty_steps_teach_the_toy_task(alone):
    score = "val-core/toy/arithmetic/reward/mean@1"
    assert metrics(alone)[0][score] <= 0.5
    assert metrics(alone)[20][score] >= 0.9


@pytest.mark.parametrize(("runs", "steps"), [("alone", 20), pytest.param("apart", 5, marks=pytest.mark.slow), ("shared", 3)])
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


UNEVEN = [
    *(f"{AR}.rollout.name=hf", f"{AR}.rollout.temperature=2", f"{AR}.actor.policy_loss.loss_mode=vanilla"),
    *(f"{AR}.actor.entropy_coeff=0.01", "trainer.total_training_steps=1", *QUIET),
]
"""One step whose loss is no zero: answers of several lengths, a ratio per token, an entropy bonus."""
BUDGET = f"{AR}.actor.ppo_max_token_len_per_gpu"


def test_the_first_step_is_the_same_however_it_is_computed(toy, tmp_path):
    """Eager attention, recomputation and eight micro-batches together, against one step in one piece."""
    rows = []
    for name, more in (
        ("whole", [f"{BUDGET}=8192"]),
        (
            "otherwise",
            [f"{BUDGET}=560", f"{AR}.model.enable_gradient_checkpointing=true", f"{AR}.model.attn_implementation=eager"],
        ),
    ):
        assert train_here(toy, tmp_path / name, *UNEVEN, "trainer.worker_group=local", *more) == 0
        rows.append(metrics(tmp_path / name)[1])
    whole, otherwise = rows
    assert abs(whole["actor/loss"]) > 1e-3
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm"):
        assert otherwise[name] == pytest.approx(whole[name], rel=1e-4), name
    computed = whole["perf/total_num_tokens"] - 32 * 8  # the last token of a row predicts nothing
    assert 7 * 560 < computed <= 8 * 560
