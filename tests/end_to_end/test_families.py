"""Every family that our own decoder computes runs from the first step to a folder that transformers loads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.runs import (
    LOCAL,
    RECIPES,
    assert_equal_runs,
    metrics,
    settings_of,
    start,
    succeeded,
    train,
    train_here,
    wait_for_step,
)
from tests.model import mxfp4
from verl_memopt.config.loader import load_settings
from verl_memopt.data import toy as toy_task
from verl_memopt.model.families import FAMILIES
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.peaks import predict
from verl_memopt.plan.verdict import sizes_of_models

AR = "actor_rollout_ref"
FP32 = [f"{AR}.rollout.dtype=fp32", f"{AR}.actor.fsdp_config.dtype=fp32"]
SMALL = ["data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8", f"{AR}.rollout.n=4", "data.val_max_samples=8"]
PHASES = ("gen", "update_actor", "update_weights")
TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss")
"""Types beside that of the toy, whose model every other test trains."""
KINDS = {kind: TinyShape(kind, initializer_range=0.06) for kind in TYPES}
KINDS["gemma4_text with experts"] = TinyShape("gemma4_text", initializer_range=0.06, experts_beside=True)


def saved(run_dir):
    return AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(solution_str.encode()) % 3
"""
"""Tells apart the answers of a model that has learned nothing."""


LORA = [f"{AR}.model.lora_rank=4", f"{AR}.model.lora_alpha=8"]
ON_EXPERTS = [*LORA, f"{AR}.model.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]"]
MIXTURES = ("qwen3_5_moe_text", "qwen3_moe", "glm4_moe", "gpt_oss")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *(pytest.param(kind, more, id=f"{kind}-{name}") for kind in KINDS for name, more in (("whole", []), ("lora", LORA))),
        *(pytest.param(kind, ON_EXPERTS, id=f"{kind}-experts") for kind in MIXTURES),
    ],
)
def test_a_family_is_trained_and_saved(toy, tmp_path, kind, more):
    model = make_tiny_model(tmp_path / "model", KINDS[kind], seed=3)
    (tmp_path / "reward.py").write_text(REWARD)
    rewarded = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    given = [f"{AR}.model.path={model}", rewarded, "trainer.total_training_steps=2", *LOCAL, *SMALL, *FP32, *more]
    assert train_here(toy, tmp_path / "run", *given) == 0
    rows = metrics(tmp_path / "run")
    for step in (1, 2):
        # In fp32 the engine's log-probs are those of the trainer.
        assert rows[step]["training/rollout_probs_diff_mean"] < 1e-6
        assert rows[step]["actor/grad_norm"] > 0
    before, after = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), saved(tmp_path / "run")
    assert [name for name, _ in after.named_parameters()] == [name for name, _ in before.named_parameters()]
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    changed = [name for (name, one), other in pairs if not torch.equal(one, other)]
    assert changed
    weights = [name for name, _ in before.named_parameters() if ".experts." in name and name.endswith("_proj")]
    assert more is not ON_EXPERTS or set(weights) <= set(changed)


@pytest.mark.parametrize("adapters", [LORA, ON_EXPERTS], ids=["layers", "experts too"])
def test_adapters_over_experts_in_mxfp4_are_trained_and_a_saved_model_is_decoded(toy, tmp_path, adapters):
    (tmp_path / "reward.py").write_text(REWARD)
    rewarded = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    folders, rows = mxfp4.folders(tmp_path), {}
    shares = f"{AR}.rollout.share_weights"
    for case, folder, more in (
        ("shared", folders[0], []),  # auto: the engine computes with the same bytes
        ("apart", folders[0], [f"{shares}=false"]),
        ("decoded", folders[1], []),
    ):
        given = [f"{AR}.model.path={folder}", rewarded, "trainer.total_training_steps=2", *adapters, *LOCAL, *SMALL, *FP32, *more]
        assert train_here(toy, tmp_path / case, *given, "trainer.track_memory_every_steps=1") == 0
        rows[case] = metrics(tmp_path / case)
    for case in ("shared", "apart"):
        for step in (1, 2):
            assert rows[case][step]["training/rollout_probs_diff_mean"] < 1e-6
            assert rows[case][step]["actor/grad_norm"] == pytest.approx(rows["decoded"][step]["actor/grad_norm"], rel=1e-5)
    settings = load_settings("toy", [*settings_of(toy, tmp_path), *given[:-1], f"{AR}.model.path={folders[0]}"], RECIPES)
    sizes = sizes_of_models(settings)
    predicted = predict(settings, sizes, PHASES, "cpu").phases
    for phase in PHASES:
        held, beside = (rows[case][2][f"memory/{phase}/peak_allocated_gb"] * 2**30 for case in ("shared", "apart"))
        assert held <= sum(predicted[phase].values())
        # One copy of the experts, in 4 bits.
        assert held < beside - 2 * sizes.policy.expert_bytes("mxfp4")
    packed, apart, plain = (dict(saved(tmp_path / case).named_parameters()) for case in ("shared", "apart", "decoded"))
    assert packed.keys() == plain.keys()
    experts = [name for name in packed if ".experts." in name]
    if adapters is ON_EXPERTS:
        assert all(torch.allclose(packed[name], plain[name], atol=1e-5) for name in experts)
    else:
        assert all(torch.equal(packed[name], plain[name]) and torch.equal(packed[name], apart[name]) for name in experts)


def test_every_family_of_our_own_decoder_is_among_them():
    own = {family.classes for family in FAMILIES if family.classes is not None}
    tested = {next(family.classes for family in FAMILIES if family.model_type == kind) for kind in TYPES}
    # The layers of Gemma 4 12B are those of Gemma 4 under other names.
    assert own - tested == {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma4UnifiedText"}


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    """The toy task with a model of a family that was warmed up on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_task, "SHAPE", KINDS[request.param])
        return toy_task.make_toy(tmp_path_factory.mktemp("family") / "toy")


LIFE = ["trainer.total_training_steps=20", "trainer.test_freq=20", *FP32, "data.seed=7"]


@pytest.mark.slow
def test_a_life_of_twenty_steps_learns(family, tmp_path):
    run_dir = tmp_path / "run"
    succeeded(train(family, run_dir, *LOCAL, *LIFE))
    rows = metrics(run_dir)
    assert max(rows[step]["training/rollout_probs_diff_max"] for step in range(1, 21)) < 1e-5
    score = next(name for name in rows[20] if name.startswith("val-core/"))
    assert rows[20][score] >= rows[0][score] + 0.2


QLORA = [
    *(f"{AR}.model.{each}" for each in ("lora_rank=8", "lora_alpha=16", "quantization=nf4")),
    *(f"{AR}.actor.optim.lr=0.01", f"{AR}.rollout.share_weights=true", f"{AR}.actor.fsdp_config.param_offload=false"),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe"], indirect=True)
def test_adapters_on_a_quantised_base_learn_and_are_taken_up_after_kill_9(family, tmp_path):
    given, whole, parts = [*LOCAL, *LIFE, *QLORA, "trainer.save_freq=5"], tmp_path / "whole", tmp_path / "parts"
    succeeded(train(family, whole, *given))
    rows = metrics(whole)
    assert max(rows[step]["training/rollout_probs_diff_max"] for step in range(1, 21)) < 1e-5
    score = next(name for name in rows[20] if name.startswith("val-core/"))
    assert rows[20][score] >= rows[0][score] + 0.1
    process = start(family, parts, *given)
    wait_for_step(process, parts, 7)
    process.kill()
    process.wait()
    succeeded(train(family, parts, *given))
    assert_equal_runs(parts, whole)
    before = dict(AutoModelForCausalLM.from_pretrained(family / "model", dtype=torch.float32).named_parameters())
    after, again = (dict(saved(run).named_parameters()) for run in (whole, parts))
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert all(torch.equal(after[name], before[name]) for name in before if ".experts." in name or "norm" in name)
    assert any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_on_experts_alone_learn(tmp_path, kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_task, "SHAPE", TinyShape(kind, initializer_range=0.06))
        toy = toy_task.make_toy(tmp_path / "toy")
    alone = [*ON_EXPERTS, f"{AR}.model.lora_rank=16", f"{AR}.model.target_modules=[]", f"{AR}.actor.optim.lr=3e-3"]
    succeeded(train(toy, tmp_path / "run", *LOCAL, *LIFE, *alone))
    rows = metrics(tmp_path / "run")
    assert max(rows[step]["training/rollout_probs_diff_max"] for step in range(1, 21)) < 1e-5
    score = next(name for name in rows[20] if name.startswith("val-core/"))
    assert rows[20][score] >= rows[0][score] + 0.2


@pytest.mark.slow
def test_after_kill_9_the_rerun_ends_as_an_uninterrupted_run(family, tmp_path):
    given = [*LOCAL, *SMALL, *FP32, "trainer.total_training_steps=6", "trainer.save_freq=2", "data.seed=7"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeeded(train(family, whole, *given))
    process = start(family, parts, *given)
    wait_for_step(process, parts, 3)
    process.kill()
    process.wait()
    succeeded(train(family, parts, *given))
    assert_equal_runs(parts, whole)
    for one, other in zip(saved(whole).parameters(), saved(parts).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(family, tmp_path):
    given = [*SMALL, *FP32, f"{AR}.rollout.name=hf", "trainer.total_training_steps=3", "trainer.save_freq=-1", "data.seed=7"]
    found = []
    for workers in (1, 2):
        run_dir = tmp_path / str(workers)
        group = ["trainer.worker_group=local"] if workers == 1 else ["trainer.n_gpus_per_node=2"]
        succeeded(train(family, run_dir, *given, *group))
        found.append(metrics(run_dir))
    for step in (1, 2, 3):
        for name in ("actor/grad_norm", "critic/score/mean", "response_length/mean"):
            assert found[1][step][name] == pytest.approx(found[0][step][name], rel=1e-3), (step, name)
