"""The default way, Ray and vLLM: engine and trainer agree, and the first step is one step however it is spread and cut."""

import pytest

from tests.end_to_end.runs import assert_nine_of_ten_seeds_learn, metrics, steps_here, succeeded, train
from verl_memopt.model.tiny import TinyShape, make_tiny_model

AR = "actor_rollout_ref"
QUIET = ["trainer.test_freq=-1", "trainer.val_before_train=false"]
TWO = "trainer.n_gpus_per_node=2"


STEPS = 15
RUNS = {
    "one worker": [],
    "two workers with an engine each": [TWO],
    "two workers that share one engine": [TWO, f"{AR}.rollout.tensor_model_parallel_size=2"],
}
SHARED = list(RUNS)[-1]
"""The run that has most in it, and takes fewer steps. The others are slow: each takes longer to start than all its steps take."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == SHARED else pytest.mark.slow, id=name) for name in RUNS]
)
def rows(request, toy, tmp_path_factory):
    """What a run of the default way has logged."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    steps = 4 if request.param == SHARED else STEPS
    length = [f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}", "trainer.save_freq=-1"]
    succeeded(train(toy, run_dir, *RUNS[request.param], *length))
    return metrics(run_dir)


def test_steps_teach_the_toy_task_and_vllm_and_the_trainer_agree_in_each(rows):
    score, steps = "val-core/toy/arithmetic/reward/mean@1", max(rows)
    assert rows[0][score] <= 0.5
    assert rows[steps][score] >= (0.9 if steps == STEPS else rows[0][score] + 0.1)
    differences = [row["rollout/logprob_diff_max"] for step, row in rows.items() if step > 0]
    assert len(differences) == steps
    assert max(differences) <= 1e-4


def test_the_first_step_is_the_same_wherever_its_workers_live_and_whatever_they_share(toy, tmp_path, rows):
    without_ray = steps_here(toy, tmp_path / "run", "trainer.total_training_steps=1", *QUIET)
    for name in ("critic/score/mean", "actor/grad_norm"):
        assert rows[1][name] == pytest.approx(without_ray[1][name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nine_of_ten_seeds_learn_in_a_shortened_run(tmp_path):
    assert_nine_of_ten_seeds_learn(tmp_path, lambda toy, run_dir, *overrides: succeeded(train(toy, run_dir, *overrides)))


UNEVEN = [
    *(f"{AR}.rollout.name=hf", f"{AR}.rollout.temperature=2", f"{AR}.actor.policy_loss.loss_mode=vanilla"),
    *(f"{AR}.actor.entropy_coeff=0.01", "trainer.total_training_steps=1", *QUIET),
]
"""One step whose loss is no zero: answers of several lengths, a ratio per token, an entropy bonus."""
BUDGET = f"{AR}.actor.ppo_max_token_len_per_gpu"


def test_the_first_step_is_the_same_however_it_is_computed(toy, tmp_path):
    """Eager attention, recomputation and eight micro-batches together, against one step in one piece."""
    pieces = [f"{BUDGET}=560", f"{AR}.model.enable_gradient_checkpointing=true", f"{AR}.model.attn_implementation=eager"]
    whole, otherwise = (
        steps_here(toy, tmp_path / name, *UNEVEN, *more)[1]
        for name, more in (("whole", [f"{BUDGET}=8192"]), ("otherwise", pieces))
    )
    assert abs(whole["actor/loss"]) > 1e-3
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm"):
        assert otherwise[name] == pytest.approx(whole[name], rel=1e-4), name
    computed = whole["perf/total_num_tokens"] - 32 * 8  # the last token of a row predicts nothing
    assert 7 * 560 < computed <= 8 * 560


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_mixture_of_experts_agrees_with_its_engine_after_each_update(toy, tmp_path, engine):
    folder = make_tiny_model(tmp_path / "model", TinyShape(model_type="qwen3_moe", initializer_range=0.06))
    settings = [
        *(f"{AR}.model.path={folder}", f"{AR}.rollout.name={engine}", f"{AR}.actor.policy_loss.loss_mode=vanilla"),
        *(f"{AR}.actor.entropy_coeff=0.1", f"{AR}.actor.optim.lr=0.01", "trainer.total_training_steps=3"),
    ]
    rows = steps_here(toy, tmp_path / "run", *settings, *QUIET)
    assert list(rows) == [1, 2, 3]
    assert min(row["actor/grad_norm"] for row in rows.values()) > 0
    assert max(row["rollout/logprob_diff_max"] for row in rows.values()) <= 1e-4
    assert rows[3]["actor/entropy"] > rows[1]["actor/entropy"]
