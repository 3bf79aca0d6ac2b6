"""Runs that replay experts: the recorded choice reaches the update, through the engine, conversations, sessions and ranks."""

import pytest

import verl_memopt
from tests.end_to_end.runs import LOCAL, assert_equal_runs, metrics, start, steps_here, succeeded, train, wait_for_step
from tests.test_api import SMALL
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model

AR = "actor_rollout_ref"
MODE = f"{AR}.actor.router_replay.mode"
DIFFERS = "actor/router_replay_differs"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(solution_str.encode()) % 3
"""
SHORT = [
    *(*LOCAL, "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1", "data.seed=7"),
    *("data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=4", f"{AR}.rollout.n=4", f"{AR}.actor.optim.lr=0.003"),
    *(f"{AR}.rollout.dtype=fp32", f"{AR}.actor.fsdp_config.dtype=fp32"),
]
"""Two optimizer steps per rollout, so that the second has ratios."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("mixture") / "model", TinyShape("qwen3_moe", initializer_range=0.06), seed=3)


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return f"custom_reward_function.path={path}"


@pytest.fixture(scope="module")
def step(toy, mixture, rewarded, tmp_path_factory):
    def run(mode, *more):
        folder = tmp_path_factory.mktemp("run") / "run"
        return steps_here(toy, folder, f"{AR}.model.path={mixture}", rewarded, *SHORT, f"{MODE}={mode}", *more)

    return run


@pytest.fixture(scope="module")
def by_pass(step):
    return step("R2")


OF_VERL = [f"{AR}.rollout.enable_rollout_routing_replay=true", f"{AR}.model.use_remove_padding=true"]
LAYOUTS = {
    "as in verl": OF_VERL,
    "rows alone": [f"{AR}.actor.use_prefix_grouper=false", f"{AR}.rollout.log_prob_use_dynamic_bsz=true"],
    "carried prompts": [f"{AR}.actor.ppo_max_token_len_per_gpu=24", f"{AR}.rollout.log_prob_max_token_len_per_gpu=24"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engines_experts_are_those_of_the_pass_if_both_compute_in_fp32(step, by_pass, layout):
    by_engine = step("R3", *LAYOUTS[layout])
    for number in (1, 2):
        assert by_engine[number]["training/rollout_probs_diff_mean"] < 1e-6
        assert by_engine[number][DIFFERS] > 0  # the second optimizer step has another router
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl"):
            assert by_engine[number][name] == pytest.approx(by_pass[number][name], rel=1e-3, abs=1e-6), name
        # A prompt that is computed several times counts as often.
        assert by_engine[number][DIFFERS] == pytest.approx(by_pass[number][DIFFERS], rel=0.3)


def test_the_first_step_without_replay_has_another_gradient(step, by_pass):
    plain = step("disabled", "trainer.total_training_steps=1")[1]
    assert DIFFERS not in plain
    assert plain["actor/grad_norm"] != pytest.approx(by_pass[1]["actor/grad_norm"], rel=1e-2)


def test_a_rollout_in_half_precision_is_nearer_to_passes_that_replay_its_experts(step):
    half = [f"{AR}.rollout.dtype=bf16", f"{AR}.rollout.max_logprob_diff=null", "trainer.total_training_steps=1"]
    plain, replayed = (step(mode, *half)[1]["rollout/logprob_diff_mean"] for mode in ("disabled", "R3"))
    assert replayed < 0.8 * plain


@pytest.mark.slow
def test_turns_of_conversations_replay_the_engines_experts(step, tmp_path):
    tools = tmp_path / "tools.py"
    tools.write_text(
        'def look(place: str) -> str:\n    """Look.\n\n    Args:\n        place: Where.\n    """\n    return place\n\n\n'
        'def calls(text):\n    return [("look", {"place": "x"})]\n'
    )
    agent = [
        *(f"{AR}.rollout.agent.tools.path={tools}", f"{AR}.rollout.agent.tools.name=[look]", f"{AR}.rollout.agent.num_workers=1"),
        *(f"{AR}.rollout.multi_turn.format={tools}:calls", f"{AR}.rollout.multi_turn.max_assistant_turns=2"),
        *(f"{AR}.rollout.stop_token_ids={list(range(20, 120))}", "data.max_response_length=60", "trainer.total_training_steps=1"),
    ]
    by_engine, by_pass = (step(mode, *agent)[1] for mode in ("R3", "R2"))
    for name in (DIFFERS, "actor/grad_norm", "actor/ppo_kl"):
        assert by_engine[name] == pytest.approx(by_pass[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_session_replays_over_several_updates(toy, mixture, tmp_path, mode):
    given = {**SMALL, MODE: mode, f"{AR}.actor.optim.lr": 0.003, f"{AR}.rollout.max_logprob_diff": None, "data.seed": 7}
    given[f"{AR}.rollout.dtype"] = "fp32"
    with verl_memopt.session(str(mixture), run_dir=tmp_path, **given) as session:
        answers = session.generate(["1+1=", "2+3="], n=4)
        found = [dict(session.update(answers, [float(row % 3) - 1 for row in range(8)])) for _ in range(2)]
        found.append(session.forward_backward(answers, [1.0] * 8))
    assert found[0][DIFFERS] == 0
    assert 0 < found[1][DIFFERS] <= 1
    assert 0 < found[2][DIFFERS] <= 1


REFUSED = {
    "a dense model": ("R2", [f"{AR}.model.path={{toy}}/model"], "models of type qwen3 have no experts to replay"),
    "vLLM on a CPU": ("R3", [f"{AR}.rollout.name=vllm"], "on a CPU vLLM does not say which experts it chose"),
    "no pass": ("R2", ["algorithm.rollout_correction.bypass_mode=true"], "which bypass mode skips"),
    "a file": ("R3", [f"{AR}.actor.router_replay.replay_file=x"], "is not written to a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_its_key(step, toy, case):
    mode, more, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"router_replay.*{reason}"):
        step(mode, *(one.format(toy=toy) for one in more))


def test_experts_that_transformers_computes_are_refused(step, tmp_path):
    folder = make_tiny_model(tmp_path / "olmoe", TinyShape("olmoe"), seed=3)
    with pytest.raises(ConfigError, match=r"mode=R2: models of type olmoe have experts that transformers computes"):
        step("R2", f"{AR}.model.path={folder}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_two_workers_learn_what_one_learns_and_a_killed_run_ends_alike(toy, mixture, rewarded, tmp_path, mode):
    given = [f"{AR}.model.path={mixture}", rewarded, *SHORT[3:], f"{AR}.rollout.name=hf", f"{MODE}={mode}"]
    given += ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.track_memory_every_steps=0"]
    whole, parts, two = (tmp_path / name for name in ("whole", "parts", "two"))
    succeeded(train(toy, whole, *given, "trainer.worker_group=local"))
    process = start(toy, parts, *given, "trainer.worker_group=local")
    wait_for_step(process, parts, 3)
    process.kill()
    process.wait()
    succeeded(train(toy, parts, *given, "trainer.worker_group=local"))
    assert_equal_runs(parts, whole)
    succeeded(train(toy, two, *given, "trainer.n_gpus_per_node=2"))
    one, other = metrics(whole), metrics(two)
    for number in (1, 2):
        for name in ("actor/grad_norm", "critic/score/mean", DIFFERS):
            assert other[number][name] == pytest.approx(one[number][name], rel=1e-2), (number, name)
