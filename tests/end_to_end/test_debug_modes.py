"""Every debug mode in a real run, and what the checks of ``debug=sync_check`` catch in one."""

import pytest

from tests.end_to_end.runs import LOCAL, lines_of, metrics, train_here

FEW = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"]
TWO_STEPS = [
    *LOCAL, *FEW, "trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.save_freq=-1",
    "trainer.test_freq=-1",
]  # fmt: skip
SYNCED = [
    *TWO_STEPS, "debug=sync_check", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_model_len=96",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
]  # fmt: skip
"""vLLM in this process. Its prefix cache keeps blocks of 32 tokens, so that a probe of 95 tokens fills two."""


def test_a_checked_run_learns_what_an_unchecked_one_does(here, tmp_path, toy):
    assert here(*TWO_STEPS, "debug=sync_check") == 0
    assert train_here(toy, tmp_path / "off", *TWO_STEPS) == 0
    checked, unchecked = metrics(tmp_path / "run"), metrics(tmp_path / "off")
    assert [row["actor/grad_norm"] for row in checked.values()] == [row["actor/grad_norm"] for row in unchecked.values()]


def test_a_sync_to_the_wrong_place_ends_a_checked_run(here, tmp_path, capsys, monkeypatch):
    from verl_memopt.rollout.hf_engine import HfEngine

    load = HfEngine.load_weights

    def load_and_spoil(engine, weights):
        load(engine, weights)
        dict(engine._model.named_parameters())["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1

    monkeypatch.setattr(HfEngine, "load_weights", load_and_spoil)
    assert here(*TWO_STEPS, "debug=sync_check") == 1
    said = "1 of the engine's weights differ from the policy's, such as model.layers.0.self_attn.q_proj"
    assert said in capsys.readouterr().err


@pytest.mark.slow  # tests/rollout/test_vllm_engine.py checks a sync without a reset in every run of the tests
@pytest.mark.parametrize("resets", [True, False])
def test_a_prefix_cache_that_is_not_reset_ends_a_checked_run_with_vllm(here, capsys, monkeypatch, resets):
    import vllm

    if not resets:
        monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda *args, **kwargs: True)
    assert here(*SYNCED) == (0 if resets else 1)
    shown = capsys.readouterr().err
    assert ("from its prefix cache, which older weights have computed" in shown) is not resets
    assert "64 of them are kept between two calls" in shown


def test_the_command_line_runs_each_part_of_a_step_by_itself(toy, tmp_path):
    """Three commands that differ in the mode alone, and a fourth without any data."""
    run_dir = tmp_path / "run"
    for mode in ("rollout_only", "score_only"):
        assert train_here(toy, run_dir, *LOCAL, *FEW, f"debug={mode}", "trainer.total_training_steps=1") == 0
    dump = f"actor_rollout_ref.rollout.skip_dump_dir={run_dir}/score_only/rollouts"
    assert train_here(toy, run_dir, *LOCAL, *FEW, "debug=train_only", dump) == 0
    assert train_here(toy, run_dir, *LOCAL, *FEW, "debug=forge", "data.train_files=null", "trainer.total_training_steps=1") == 0
    assert metrics(run_dir / "train_only")[1]["actor/grad_norm"] > 0
    assert metrics(run_dir / "forge")[1]["prompt_length/min"] == 16
    rows = lines_of(run_dir / "score_only" / "rollouts" / "1.jsonl")
    assert {row["score"] for row in rows} == {0.0, 1.0}
