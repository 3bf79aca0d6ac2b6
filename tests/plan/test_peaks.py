"""What ``verl-memopt fit`` predicts holds for the runs themselves: on a CPU, with vLLM and on fake GPUs."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fit import SCORE, draw, run
from benchmarks.gpu.reach_cases import SHAPES
from benchmarks.gpu.reach_cases import size_of as shape_size
from benchmarks.gpu_cost.one_copy import settings_of as settings_of_case
from benchmarks.gpu_cost.update import Case
from tests.forked import call_on_fake_gpu
from tests.plan.runs import AR, FSDP, settings_of
from verl_memopt.config.loader import load_settings
from verl_memopt.memory.lora import adapter_params
from verl_memopt.model.sizes import size_of
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.plan.peaks import Sizes, predict
from verl_memopt.plan.verdict import beside_cache, judge, known_card
from verl_memopt.trainer.main_ppo import train

SLOW = pytest.mark.slow
QUICK, FURTHER = (3, 7, 28, 36), (6, 8, 13, 15, 34, 39)
"""Draws with random knobs: LoRA, PPO, supervised fine-tuning and GRPO with a KL in little time, and others like them."""
START = {"init", "update_actor"}
ONE_COPY = [
    *("debug.mode=off", f"{AR}.rollout.share_weights=true", f"{AR}.rollout.dtype=bfloat16", f"{FSDP}.param_offload=false"),
    *(f"{FSDP}.{key}" for key in ("split_master_weights=true", "grad_offload=true", "dtype=bfloat16", "model_dtype=fp32")),
]
STREAMS = [
    *("debug.mode=forge", f"{AR}.actor.use_kl_loss=true", f"{AR}.model.lora_rank=0"),
    f"{AR}.ref.fsdp_config.param_offload=stream",
]
QLORA = [
    *(
        "debug.mode=forge",
        f"{AR}.model.lora_rank=4",
        f"{AR}.rollout.dtype=fp32",
        f"{FSDP}.dtype=fp32",
        f"{FSDP}.model_dtype=fp32",
    ),
    *(f"{FSDP}.{key}=false" for key in ("split_master_weights", "grad_offload", "param_offload", "offload_policy")),
]
VLLM = ["debug.mode=off", f"{AR}.rollout.name=vllm", f"{AR}.rollout.enforce_eager=true"]
TEACHER = replace(draw(0).shape, model_type="qwen3", hidden_size=192, num_layers=3)
TEACHER_FSDP = "teacher.fsdp_config"
STREAMED = [f"{TEACHER_FSDP}.param_offload=stream", f"{TEACHER_FSDP}.model_dtype=bfloat16"]
OPTIMS = (f"{AR}.actor.optim", "critic.optim")
MIXTURES = ("qwen3_moe", "qwen3_5_moe_text", "glm4_moe", "gemma4_text", "gpt_oss")
SGD, MOMENTUM = ([f"{optim}.{key}" for optim in OPTIMS for key in ("optimizer=SGD", f"momentum={rate}")] for rate in (0.0, 0.9))


@pytest.mark.parametrize(
    ("number", "more", "phases"),
    [
        *((number, [], START) for number in QUICK),
        *(pytest.param(number, [], START, marks=SLOW) for number in FURTHER),
        (113, ["debug.mode=off", "trainer.save_freq=1"], {"save_checkpoint"}),  # adapters, whose moments are in buckets
        *((number, [], {"update_actor"}) for number in (24, 58)),  # activations on the host: of adapters, and of SFT
        pytest.param(
            214, [], {"update_critic"}, marks=SLOW
        ),  # bfloat16 masters: a gradient is cast beside the reduction's buffers
        *(
            pytest.param(n, ONE_COPY, {"gen", "update_actor", "update_weights", "save_checkpoint"}, marks=marks)
            for n, marks in ((15, []), (6, SLOW))
        ),
        *((number, optim, {"update_actor"}) for number, optim in ((6, MOMENTUM), (13, SGD))),
        *((n, [*STREAMS, f"{AR}.ref.quantization={kind}"], {"ref"}) for n, kind in ((6, "none"), (15, "int8"))),
        *(
            pytest.param(n, [*QLORA, *engine, f"{AR}.model.quantization={kind}"], {"update_actor", "update_weights"}, marks=marks)
            for n, kind, engine, marks in ((15, "int8", [], []), (15, "nf4", VLLM, []), (6, "nf4", [], SLOW))
        ),
    ],
)
def test_no_phase_of_a_run_holds_more_than_was_predicted(number, more, phases, tmp_path):
    kept = [setting for setting in draw(number).settings if "state_dtype" not in setting or more not in (SGD, MOMENTUM)]
    outcome, _, _ = run(replace(draw(number), settings=(*kept, *more)), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    assert outcome.measured.keys() >= phases
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert "ref" not in phases or "ref" in both
    assert outcome.host[1] <= outcome.host[0]


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (15, ["distill.divergence=reverse_kl"]),  # the head is cast in the update, and logits are of all tokens at once
        (31, ["distill.divergence=jsd", f"{TEACHER_FSDP}.param_offload=true"]),
        (46, [*STREAMED, "teacher.quantization=int8"]),
        (5, ["distill.top_k=8"]),  # the head is cast in the teacher's pass
        (13, [*STREAMED, "distill.top_k=64", "distill.divergence=forward_kl"]),
        pytest.param(36, ["distill.divergence=sampled", f"{TEACHER_FSDP}.dtype=bfloat16"], marks=SLOW),
    ],
)  # fmt: skip
def test_no_phase_of_a_run_with_a_teacher_holds_more_than_was_predicted(number, more, tmp_path):
    drawn = draw(number)
    teacher = replace(TEACHER, model_type=drawn.shape.model_type, vocab_size=drawn.shape.vocab_size)
    settings = (*drawn.settings, "debug.mode=forge", f"{AR}.rollout.top_p=1", "distill.coef=1", *more)
    outcome, _, _ = run(replace(drawn, settings=settings, teacher=teacher), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (outcome.measured[phase], outcome.predicted[phase]) for phase in ("init", "teacher", "update_actor")}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert 0 < outcome.host[1] <= outcome.host[0]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("qwen3_5_text", number) for number in (7, 36)),
        *(pytest.param("qwen3_5_text", n, marks=SLOW) for n in (6, 8, 13, 21, 44)),
        *(pytest.param("qwen3_5_moe_text", n, marks=SLOW) for n in (8, 44)),
        *((kind, 7) for kind in MIXTURES), *(pytest.param(kind, n, marks=SLOW) for kind in MIXTURES for n in (6, 13, 15)),
    ],
)  # fmt: skip
def test_no_phase_of_a_run_with_states_or_experts_holds_more_than_was_predicted(kind, number, tmp_path):
    drawn = draw(number)
    shape = replace(drawn.shape, model_type=kind, num_layers=max(drawn.shape.num_layers, 2), experts_beside=kind == "gemma4_text")
    drawn = replace(drawn, shape=shape)
    outcome, _, _ = run(drawn, tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert both.keys() >= START


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(k, marks=SLOW) for k in ("qwen3_5_text", *MIXTURES[1:]))])
def test_no_phase_of_a_run_with_quantised_experts_or_states_holds_more_than_was_predicted(kind, share, tmp_path):
    drawn, base = draw(15), [*QLORA, f"{AR}.model.quantization=nf4", f"{AR}.rollout.share_weights={str(share).lower()}"]
    beside = kind == "gemma4_text"
    shape = replace(drawn.shape, model_type=kind, num_layers=4, num_experts=16, expert_size=128, experts_beside=beside)
    settings = (*drawn.settings, *base, "debug.mode=off", "trainer.save_freq=1")
    outcome, _, _ = run(replace(drawn, shape=shape, settings=settings), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert both.keys() >= {"init", "gen", "update_actor", "update_weights", "save_checkpoint"}


@pytest.mark.parametrize(("kind", "number"), [("qwen3_moe", 15), *(pytest.param(kind, 6, marks=SLOW) for kind in MIXTURES)])
def test_a_reference_with_quantised_experts_holds_no_more_than_was_predicted(kind, number, tmp_path):
    drawn, more = draw(number), [*STREAMS, f"{AR}.ref.quantization=int8"]
    beside = kind == "gemma4_text"
    shape = replace(drawn.shape, model_type=kind, num_layers=2, num_experts=16, expert_size=128, experts_beside=beside)
    outcome, _, _ = run(replace(drawn, shape=shape, settings=(*drawn.settings, *more)), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert "ref" in both
    assert outcome.host[1] <= outcome.host[0]


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=SLOW)])
def test_experts_beside_adapters_have_no_gradients_in_the_prediction(kind, tmp_path):
    drawn, cast = draw(15), [f"{FSDP}.model_dtype=bfloat16", f"{FSDP}.dtype=fp32"]
    shape = replace(drawn.shape, model_type=kind, num_layers=2, num_experts=16, expert_size=128)
    settings = (*drawn.settings, f"{AR}.model.lora_rank=4", "debug.mode=forge", *cast)
    outcome, peaks, _ = run(replace(drawn, shape=shape, settings=settings), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    held, predicted = outcome.measured["update_actor"], outcome.predicted["update_actor"]
    assert held <= predicted < 1.25 * held
    assert peaks.phases["update_actor"]["whole gradients"] < 0.01 * peaks.phases["update_actor"]["params"]


ON_EXPERTS = f"{AR}.model.target_parameters=[gate_up_proj,down_proj]"
ALONE = [f"{AR}.model.target_modules=[]"]


@pytest.mark.parametrize(
    ("kind", "number", "rank", "more"),
    [
        ("qwen3_moe", 113, 32, []),
        ("gpt_oss", 15, 4, ALONE),  # moments in blocks
        *(
            pytest.param(kind, number, rank, more, marks=SLOW)
            for kind in MIXTURES
            for number in (6, 7, 15)
            for rank, more in ((4, []), (32, ALONE))
        ),
    ],
)
def test_no_phase_of_a_run_with_adapters_on_experts_holds_more_than_was_predicted(kind, number, rank, more, tmp_path):
    drawn = draw(number)
    beside = kind == "gemma4_text"
    shape = replace(drawn.shape, model_type=kind, num_layers=2, num_experts=16, expert_size=128, experts_beside=beside)
    settings = (*drawn.settings, f"{AR}.model.lora_rank={rank}", ON_EXPERTS, "debug.mode=forge", *more)
    outcome, _, _ = run(replace(drawn, shape=shape, settings=settings), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert both.keys() >= {*START, "update_weights"}
    # Beside a base that is all experts, the bound is near.
    held, predicted = both["update_weights"]
    assert predicted <= 1.15 * held


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt_oss", [f"{FSDP}.dtype=bfloat16"]),
        pytest.param("gpt_oss", [f"{FSDP}.dtype=fp32"], marks=SLOW),
        pytest.param("gpt_oss", [f"{AR}.actor.use_prefix_grouper=false"], marks=SLOW),
        pytest.param("gpt_oss", [f"{AR}.model.block_tile_tokens=32"], marks=SLOW),
        pytest.param("gpt_oss", [f"{AR}.model.enable_gradient_checkpointing=true"], marks=SLOW),
        pytest.param("gpt_oss", [f"{AR}.model.recompute_elementwise=false"], marks=SLOW),
    ],
)
def test_windows_that_cut_rows_hold_no_more_than_was_predicted(kind, more, tmp_path):
    drawn = draw(6)
    longer = ("debug.mode=forge", "data.max_prompt_length=400", "data.max_response_length=16", f"{AR}.model.lora_rank=4")
    on_device = f"{AR}.model.enable_activation_offload=false"
    drawn = replace(drawn, shape=replace(drawn.shape, model_type=kind), settings=(*drawn.settings, *longer, on_device, *more))
    outcome, _, _ = run(drawn, tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}


def test_a_run_that_fits_runs_and_one_far_above_the_limit_is_refused_and_runs_out_of_memory(tmp_path):
    inside, _, _ = run(replace(draw(15), share=1.0), tmp_path / "inside")
    beyond, _, _ = run(replace(draw(15), share=0.25), tmp_path / "beyond")
    assert (inside.verdict, inside.ran) == (True, True)
    assert (beyond.verdict, beyond.ran) == (False, False)


def test_a_config_alone_gives_the_sizes_of_a_model(tmp_path):
    whole = make_tiny_model(tmp_path / "whole", TinyShape(num_layers=3, num_heads=4, num_kv_heads=2))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((whole / "config.json").read_text())
    size = size_of(settings_of("memory=24g", f"{AR}.model.path={tmp_path / 'alone'}").actor_rollout_ref.model, "k")
    assert (size.layers, size.heads, size.kv_heads, size.head_dim, size.tied) == (3, 4, 2, 32, True)
    assert size.params == replace(size, counted=None, qk_norm=True).params


@pytest.mark.slow
@pytest.mark.parametrize(
    "models",
    [
        [f"{AR}.rollout.share_weights=true"],
        [f"{AR}.rollout.share_weights=false", f"{AR}.actor.use_kl_loss=true"],
        ["algorithm.adv_estimator=gae", f"{AR}.actor.use_kl_loss=true", f"{AR}.rollout.n=1"],
    ],
    ids=["one copy", "two copies and a reference", "critic and reference"],
)
def test_a_run_whose_cache_takes_the_rest_stays_below_its_limit_in_every_phase(models, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "7" * 30, "answer": "1", "data_source": "toy"}) + "\n")
    (tmp_path / "score.py").write_text(SCORE)
    model, limit = make_tiny_model(tmp_path / "model", TinyShape(num_layers=2)), 64 * 2**20
    settings = load_settings(
        "ppo_trainer",
        [
            *(f"{AR}.model.path={model}", f"critic.model.path={model}", f"memory.device_limit_gb={limit / 2**30}"),
            *(
                f"data.train_files={tmp_path}/rows.jsonl",
                f"custom_reward_function.path={tmp_path}/score.py",
                "data.val_files=null",
            ),
            *("data.train_batch_size=1", "data.max_prompt_length=32", "data.max_response_length=8", f"{FSDP}.dtype=fp32"),
            *(f"{AR}.actor.{key}" for key in ("ppo_mini_batch_size=1", "ppo_micro_batch_size_per_gpu=4")),
            *("critic.ppo_micro_batch_size_per_gpu=4", f"{AR}.rollout.log_prob_micro_batch_size_per_gpu=4"),
            *(f"{AR}.rollout.{key}" for key in ("name=vllm", "max_num_seqs=16", "max_num_batched_tokens=512", "dtype=fp32")),
            *(f"{AR}.rollout.{key}" for key in ("enforce_eager=true", "n=4", "kv_cache_memory_gb=auto")),
            *("algorithm.adv_estimator=rloo", "trainer.device=cpu", "trainer.worker_group=local", "trainer.logger=[jsonl]"),
            *("trainer.total_training_steps=2", "trainer.track_memory_every_steps=1", "trainer.save_freq=2"),
            *("trainer.save_final_model=false", "trainer.val_before_train=false", f"trainer.default_local_dir={tmp_path}/run"),
            *models,
        ],
    )
    with caplog.at_level(logging.INFO, "verl_memopt"):
        train(settings)
    phases = json.loads(next((tmp_path / "run").rglob("summary.json")).read_text())["phases"]
    (tokens,) = [record.args[0] for record in caplog.records if record.msg.startswith("the KV cache holds")]
    predicted = judge(settings, known_card(settings)).peaks
    assert tokens == pytest.approx(predicted.kv_tokens, rel=0.01)  # vLLM takes whole blocks
    assert phases["gen"]["kinds"]["kv"] == pytest.approx(limit - beside_cache(settings), rel=0.01)
    peaks = [phase["peak_allocated_bytes"] for phase in phases.values() if phase["peak_allocated_bytes"]]
    assert 0.95 * limit < max(peaks) <= limit


SHARED = [f"{AR}.rollout.share_weights=true", f"{AR}.rollout.dtype=bfloat16"]
SPLIT = [*SHARED, f"{FSDP}.split_master_weights=true"]
ADAPTERS = [*SHARED, f"{AR}.model.lora_rank=16"]
GRADIENTS_OFF = [f"{FSDP}.{key}=true" for key in ("grad_offload", "optimizer_offload")]


@pytest.mark.parametrize(
    "more",
    [
        SPLIT, pytest.param([*SPLIT, *GRADIENTS_OFF], marks=SLOW),
        [*SPLIT, *GRADIENTS_OFF, f"{AR}.actor.optim.bucket_megabytes=4"],  # the vocabulary's gradients are in tiles
        pytest.param(ADAPTERS, marks=SLOW), [*ADAPTERS, f"{FSDP}.gradient_sync=last"],
        pytest.param([*ADAPTERS, *GRADIENTS_OFF, f"{AR}.model.quantization=nf4"], marks=SLOW),
    ],
)  # fmt: skip
def test_ranks_that_share_weights_with_their_engines_hold_no_more_than_was_predicted(more):
    """No gathered copy, and no bucket in the sync."""
    shape, settings, step, of_tensors = first_of_eight(more)
    assert step.keys() >= {"old_log_prob", "update_actor", "update_weights"}
    assert more_than(of_tensors, step) == {}
    assert "gathered" not in step["update_actor"]["bus"]
    shapes = Shapes.of(shape_size(shape), settings.actor_rollout_ref, Pass(1, 1, 1, 1), "cuda")
    updated = 4 * adapter_params(shapes) if more[: len(ADAPTERS)] == ADAPTERS else 2 * shapes.params
    assert step["update_weights"]["bus"]["gathered"] == pytest.approx(updated * 7 / 8, rel=1e-3)
    assert step["update_weights"]["peak"] == pytest.approx(of_tensors["update_weights"], rel=0.02)


@pytest.mark.parametrize(
    ("sync", "more"),
    [
        ("every", []), ("last", [f"{AR}.model.lora_rank=16"]),
        pytest.param("last", [], marks=SLOW), pytest.param("every", [f"{AR}.model.lora_rank=16"], marks=SLOW),
    ],
)  # fmt: skip
def test_ranks_that_each_have_a_whole_model_of_fsdp2_hold_no_more_than_was_predicted(sync, more):
    whole = (f"{FSDP}.{key}" for key in ("fsdp_size=1", "dtype=bfloat16", "model_dtype=fp32", f"gradient_sync={sync}"))
    _, _, step, of_tensors = first_of_eight([*whole, f"{AR}.rollout.share_weights=false", *more])
    assert more_than(of_tensors, step) == {}


def more_than(most, step):
    return {phase: (step[phase]["peak"], predicted) for phase, predicted in most.items() if step[phase]["peak"] > predicted}


def first_of_eight(more):
    """Return shape and settings, the phases of a real step of the first of eight ranks on fake tensors, and those predicted."""
    shape = replace(SHAPES["0.6b"], num_layers=2, vocab_size=8192)
    base = [f"{AR}.actor.use_dynamic_bsz=true", f"{AR}.actor.old_log_prob_pass=always"]
    base += [f"{AR}.{key}_max_token_len_per_gpu=1024" for key in ("actor.ppo", "rollout.log_prob")]
    case = Case(shape, 128, 128, 4, groups=2, overrides=(*base, *more))
    step = call_on_fake_gpu("benchmarks.gpu_cost.one_copy:phases", case, False, 8)["phases"]
    settings = settings_of_case(case, Path("none"), 8)
    of_tensors = {
        phase: sum(num_bytes for kind, num_bytes in kinds.items() if kind not in ("context", "allocator", "engine"))
        for phase, kinds in predict(settings, Sizes(shape_size(shape)), step.keys(), "cuda").phases.items()
    }
    return shape, settings, step, of_tensors
