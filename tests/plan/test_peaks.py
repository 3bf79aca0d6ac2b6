"""``verl-memopt fit``: what it predicts holds for the runs themselves, and what it advises makes a run fit."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fit import SCORE, draw, run
from benchmarks.gpu.reach_cases import SHAPES
from benchmarks.gpu.reach_cases import size_of as shape_size
from benchmarks.gpu_cost.one_copy import settings_of
from benchmarks.gpu_cost.update import Case
from tests.forked import call_on_fake_gpu
from verl_memopt.cli import main
from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import load_settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import CARDS
from verl_memopt.memory.lora import adapter_params
from verl_memopt.model.sizes import size_of
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.plan.formulas import Pass, Shapes
from verl_memopt.plan.peaks import CONTEXT, Sizes, predict
from verl_memopt.plan.search import find_out
from verl_memopt.plan.verdict import Card, beside_cache, judge, known_card
from verl_memopt.trainer.build import build_run
from verl_memopt.trainer.main_ppo import train

QUICK = (3, 6, 7, 8, 13, 15, 28, 34, 36, 39)
"""Draws of RLOO, GRPO with a KL, PPO and LoRA with random knobs that take the least time."""
FILES = ["data.train_files=none", "data.val_files=null"]
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def rloo(*overrides):
    return load_settings("rloo_trainer", [*FILES, *overrides])


def said(capsys, *arguments):
    """Gives the exit code of the command and what it prints."""
    code = main(["fit", "--config-name", "rloo_trainer", *arguments])
    return code, capsys.readouterr().out


ONE_COPY = [
    *("debug.mode=off", "actor_rollout_ref.rollout.share_weights=true", "actor_rollout_ref.rollout.dtype=bfloat16"),
    *(f"actor_rollout_ref.actor.fsdp_config.{key}=true" for key in ("split_master_weights", "grad_offload")),
    "actor_rollout_ref.actor.fsdp_config.param_offload=false",
    *(f"actor_rollout_ref.actor.fsdp_config.{key}" for key in ("dtype=bfloat16", "model_dtype=fp32")),
]
STREAMS = [
    *("debug.mode=forge", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=0"),
    "actor_rollout_ref.ref.fsdp_config.param_offload=stream",
]
QLORA = [
    *("debug.mode=forge", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.dtype=fp32"),
    *(f"actor_rollout_ref.actor.fsdp_config.{key}=false" for key in ("split_master_weights", "grad_offload", "param_offload")),
    "actor_rollout_ref.actor.fsdp_config.offload_policy=false",
    *(f"actor_rollout_ref.actor.fsdp_config.{key}=fp32" for key in ("dtype", "model_dtype")),
]
VLLM = ["debug.mode=off", *(f"actor_rollout_ref.rollout.{each}" for each in ("name=vllm", "enforce_eager=true"))]
SGD = [f"{optim}.optimizer=SGD" for optim in ("actor_rollout_ref.actor.optim", "critic.optim")]


def sgd(momentum):
    return [*SGD, *(setting.replace("optimizer=SGD", f"momentum={momentum}") for setting in SGD)]


@pytest.mark.parametrize(
    ("number", "more", "phases"),
    [
        *((number, [], {"init", "update_actor"}) for number in QUICK),
        (113, ["debug.mode=off", "trainer.save_freq=1"], {"save_checkpoint"}),  # adapters, whose moments are in buckets
        *((number, [], {"update_actor"}) for number in (24, 58)),  # activations on the host: of adapters, and of SFT
        (214, [], {"update_critic"}),  # bfloat16 masters, whose last gradient is cast beside the reduction's buffers
        *((number, ONE_COPY, {"gen", "update_actor", "update_weights", "save_checkpoint"}) for number in (6, 15)),
        *((number, sgd(momentum), {"update_actor"}) for number, momentum in ((6, 0.9), (13, 0.0))),
        *((n, [*STREAMS, f"actor_rollout_ref.ref.quantization={kind}"], {"ref"}) for n, kind in ((6, "none"), (15, "int8"))),
        *(
            (n, [*QLORA, *engine, f"actor_rollout_ref.model.quantization={kind}"], {"update_actor", "update_weights"})
            for n, kind, engine in ((6, "nf4", []), (15, "int8", []), (15, "nf4", VLLM))
        ),
    ],
)
def test_no_phase_of_a_run_holds_more_than_was_predicted(number, more, phases, tmp_path):
    kept = [setting for setting in draw(number).settings if "state_dtype" not in setting or not {*SGD} <= {*more}]
    outcome, _, _ = run(replace(draw(number), settings=(*kept, *more)), tmp_path / "draw", limited=False)
    assert outcome.ran, outcome.error
    assert outcome.measured.keys() >= phases
    both = {phase: (held, outcome.predicted[phase]) for phase, held in outcome.measured.items() if phase in outcome.predicted}
    assert {phase: pair for phase, pair in both.items() if pair[0] > pair[1]} == {}
    assert "ref" not in phases or "ref" in both
    assert outcome.host[1] <= outcome.host[0]


def test_a_run_that_fits_runs_and_one_far_above_the_limit_is_refused_and_runs_out_of_memory(tmp_path):
    inside, _, _ = run(replace(draw(15), share=1.0), tmp_path / "inside")
    beyond, _, _ = run(replace(draw(15), share=0.25), tmp_path / "beyond")
    assert (inside.verdict, inside.ran) == (True, True)
    assert (beyond.verdict, beyond.ran) == (False, False)


def test_a_config_alone_gives_the_sizes_of_a_model(tmp_path):
    whole = make_tiny_model(tmp_path / "whole", TinyShape(num_layers=3, num_heads=4, num_kv_heads=2))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((whole / "config.json").read_text())
    size = size_of(rloo("memory=24g", f"actor_rollout_ref.model.path={tmp_path / 'alone'}").actor_rollout_ref.model, "k")
    assert (size.layers, size.heads, size.kv_heads, size.head_dim, size.tied) == (3, 4, 2, 32, True)
    assert size.params == replace(size, counted=None, qk_norm=True).params


TWO_COPIES = "actor_rollout_ref.actor.fsdp_config.param_offload=true"
"""A key of the user's own, with which a profile of a card holds a copy of the weights for trainer and engine each."""


def test_a_model_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"config\.json"):
        judge(rloo("memory=24g", "actor_rollout_ref.model.path=no/such/folder"), Card.of(24))


def test_the_command_says_what_fits_on_card_and_host(capsys):
    arguments = ("model=qwen3_1_7b", "memory=24g")
    code, text = said(capsys, *arguments, "--host-memory", "64")
    assert code == 0
    assert "Verdict: fits: gen" in text
    assert "longest response" in text
    assert "sequences at once" in text
    code, text = said(capsys, *arguments, "--host-memory", "8")
    assert code == 1
    assert "on a host of 8.0" in text


def test_json_has_the_figures_and_their_sums(capsys):
    code, text = said(capsys, "model=qwen3_4b", "memory=24g", TWO_COPIES, "--memory", "24", "--json")
    found = json.loads(text)
    assert code == 1
    assert not found["fits"]
    assert found["card_bytes"] == CARDS["24g"] * 2**20
    assert sum(found["phases"][found["binding_phase"]].values()) == max(sum(kinds.values()) for kinds in found["phases"].values())


def test_the_longest_response_fits_and_one_a_tenth_longer_does_not():
    found = find_out(rloo("model=qwen3_1_7b", "memory=24g"), Card.of(24))
    assert found.response > 512

    def fits(response):
        return judge(rloo("model=qwen3_1_7b", "memory=24g", f"data.max_response_length={response}"), Card.of(24)).fits

    assert fits(found.response)
    assert not fits(found.response * 11 // 10)

    # Without gradients the tokens of all sequences of a step are on the device at once.
    settings, step = rloo("model=qwen3_1_7b", "memory=24g"), found.step
    prompts, mini, samples = (value_at(settings, key) for key in ("data.train_batch_size", MINI, "actor_rollout_ref.rollout.n"))

    def judged(sequences):
        more = [f"data.train_batch_size={sequences // samples}", f"{MINI}={mini}"]
        return judge(rloo("model=qwen3_1_7b", "memory=24g", *more), Card.of(24))

    assert step.sequences > prompts * samples
    assert judged(step.sequences).fits
    assert not step.is_all
    assert not judged(step.sequences * 11 // 10 // (prompts * samples) * prompts * samples + prompts * samples).fits
    few, more = (judged(times * prompts * samples).peaks.totals[step.phase] for times in (2, 3))
    assert step.sequence_bytes == pytest.approx((more - few) / (prompts * samples), rel=1e-3)
    assert step.sequence_bytes > 8 * 512, "each token is an int64 at least"


CACHE = "actor_rollout_ref.rollout.kv_cache_memory_gb"
ON_CPU = ["trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm"]
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=true"


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_a_cache_that_takes_the_rest_fills_the_card_and_no_more(shares, sleeps):
    keys = (f"actor_rollout_ref.rollout.share_weights={shares}", f"actor_rollout_ref.rollout.free_cache_engine={sleeps}".lower())
    half = ("actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16")
    given = [*(key.lower() for key in keys), *half]

    def verdict(cache):
        return judge(
            rloo("model=qwen3_0_6b", "memory=24g", TWO_COPIES.replace("true", "false"), *given, f"{CACHE}={cache}"), Card.of(24)
        )

    rest, card = verdict("auto"), CARDS["24g"] * 2**20
    assert rest.fits
    assert rest.peaks.device_bytes == card - CONTEXT
    assert f"{rest.peaks.kv_tokens} tokens" in rest.line
    # Everything beside it is what it is with a cache of any other size, in every phase.
    fixed, cache = verdict(0.5), rest.peaks.phases["gen"]["kv"]
    bare = {phase: {**kinds, "kv": 0} for phase, kinds in rest.peaks.phases.items()}
    assert bare == {phase: {**kinds, "kv": 0} for phase, kinds in fixed.peaks.phases.items()}
    in_update = rest.peaks.phases["update_actor"].get("kv", 0)
    assert in_update == (0 if sleeps else cache)


def test_a_card_without_room_for_a_cache_is_no_fit():
    verdict = judge(rloo("model=qwen3_4b", "memory=24g", TWO_COPIES, f"{CACHE}=auto"), Card.of(10))
    assert verdict.peaks.kv_tokens == 0
    assert "KV cache" in verdict.too_much


def test_a_cpu_without_a_limit_has_nothing_of_which_a_cache_could_take_the_rest(tmp_path):
    settings = rloo(*ON_CPU, DYNAMIC, "model=qwen3_0_6b", f"{CACHE}=auto", f"trainer.default_local_dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=rf"{CACHE}=auto, memory\.device_limit_gb=null.*give {CACHE} a size"):
        build_run(settings)
    assert not (tmp_path / "run").exists()


def test_only_an_engine_of_vllm_that_generates_has_a_cache_that_takes_the_rest():
    keys = (DYNAMIC, "model=qwen3_0_6b", "trainer.device=cpu", "memory.device_limit_gb=8")
    assert beside_cache(rloo(*keys)) is None
    assert beside_cache(rloo(*keys, f"{CACHE}=auto", "actor_rollout_ref.rollout.name=hf")) is None
    assert beside_cache(rloo(*keys, f"{CACHE}=auto", "actor_rollout_ref.rollout.name=vllm")) > 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    "models",
    [
        ["actor_rollout_ref.rollout.share_weights=true"],
        ["actor_rollout_ref.rollout.share_weights=false", "actor_rollout_ref.actor.use_kl_loss=true"],
        ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.n=1"],
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
            *(f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}", f"memory.device_limit_gb={limit / 2**30}"),
            *(f"data.train_files={tmp_path}/rows.jsonl", f"custom_reward_function.path={tmp_path}/score.py", *ON_CPU),
            *("data.val_files=null", "data.train_batch_size=1", "data.max_prompt_length=32", "data.max_response_length=8"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"),
            *("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"),
            *("actor_rollout_ref.rollout.max_num_seqs=16", "actor_rollout_ref.rollout.max_num_batched_tokens=512"),
            *("actor_rollout_ref.rollout.enforce_eager=true", "actor_rollout_ref.rollout.dtype=fp32"),
            *("actor_rollout_ref.actor.fsdp_config.dtype=fp32", "actor_rollout_ref.rollout.n=4", f"{CACHE}=auto"),
            *("algorithm.adv_estimator=rloo", "trainer.total_training_steps=2", "trainer.track_memory_every_steps=1"),
            *("trainer.save_freq=2", "trainer.save_final_model=false", "trainer.val_before_train=false"),
            "trainer.logger=[jsonl]",
            *("trainer.worker_group=local", f"trainer.default_local_dir={tmp_path}/run", *models),
        ],
    )
    with caplog.at_level(logging.INFO, "verl_memopt"):
        train(settings)
    phases = json.loads(next((tmp_path / "run").rglob("summary.json")).read_text())["phases"]
    cache = limit - beside_cache(settings)
    (tokens,) = [record.args[0] for record in caplog.records if record.msg.startswith("the KV cache holds")]
    each = judge(settings, known_card(settings)).peaks
    assert tokens == pytest.approx(each.kv_tokens, rel=0.01)  # vLLM takes whole blocks
    assert phases["gen"]["kinds"]["kv"] == pytest.approx(cache, rel=0.01)
    peaks = [phase["peak_allocated_bytes"] for phase in phases.values() if phase["peak_allocated_bytes"]]
    assert 0.95 * limit < max(peaks) <= limit


def test_the_size_of_a_machines_own_card_is_asked_of_nvidia_smi_without_touching_the_card(tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 32607\necho 24564\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _, shown = said(capsys, "model=qwen3_0_6b", "--json")
    assert json.loads(shown)["card_bytes"] == 24564 * 2**20
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(["fit", "--config-name", "rloo_trainer", "model=qwen3_0_6b"]) == ConfigError.exit_code
    assert "--memory: the size of the card is not known" in capsys.readouterr().err


def test_an_engine_that_shares_its_weights_takes_its_share_of_the_card_and_no_more():
    card = Card.of(24)
    generating = judge(rloo("model=qwen3_1_7b", "memory=24g"), card).peaks.totals["gen"]
    assert generating == pytest.approx(0.7 * card.num_bytes, rel=1e-4)


def test_more_cards_share_a_model(capsys):
    arguments = ("model=qwen3_8b", "memory=large_multi_gpu", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert said(capsys, *arguments, "--memory", "80", "--gpus", "2")[0] == 0
    assert said(capsys, *arguments, "--memory", "24", "--gpus", "2")[0] == 1


SHARED = ["actor_rollout_ref.rollout.share_weights=true", "actor_rollout_ref.rollout.dtype=bfloat16"]
SPLIT = [*SHARED, "actor_rollout_ref.actor.fsdp_config.split_master_weights=true"]
ADAPTERS = [*SHARED, "actor_rollout_ref.model.lora_rank=16"]
GRADIENTS_OFF = [f"actor_rollout_ref.actor.fsdp_config.{key}=true" for key in ("grad_offload", "optimizer_offload")]
IN_TILES = "actor_rollout_ref.actor.optim.bucket_megabytes=4"


@pytest.mark.parametrize(
    "more",
    [
        SPLIT, [*SPLIT, *GRADIENTS_OFF], [*SPLIT, *GRADIENTS_OFF, IN_TILES],
        ADAPTERS, [*ADAPTERS, "actor_rollout_ref.actor.fsdp_config.gradient_sync=last"],
        [*ADAPTERS, *GRADIENTS_OFF, "actor_rollout_ref.model.quantization=nf4"],
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


@pytest.mark.parametrize("more", [[], ["actor_rollout_ref.model.lora_rank=16"]])
@pytest.mark.parametrize("sync", ["every", "last"])
def test_ranks_that_each_have_a_whole_model_of_fsdp2_hold_no_more_than_was_predicted(more, sync):
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    whole = [f"{fsdp}.fsdp_size=1", f"{fsdp}.dtype=bfloat16", f"{fsdp}.model_dtype=fp32", f"{fsdp}.gradient_sync={sync}"]
    _, _, step, of_tensors = first_of_eight([*whole, "actor_rollout_ref.rollout.share_weights=false", *more])
    assert more_than(of_tensors, step) == {}


def more_than(most, step):
    return {phase: (step[phase]["peak"], each) for phase, each in most.items() if step[phase]["peak"] > each}


def first_of_eight(more):
    """Return shape and settings, the phases of a real step of the first of eight ranks on fake tensors, and those predicted."""
    shape = replace(SHAPES["0.6b"], num_layers=2, vocab_size=8192)
    base = ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.old_log_prob_pass=always"]
    base += [f"actor_rollout_ref.{key}_max_token_len_per_gpu=1024" for key in ("actor.ppo", "rollout.log_prob")]
    case = Case(shape, 128, 128, 4, groups=2, overrides=(*base, *more))
    step = call_on_fake_gpu("benchmarks.gpu_cost.one_copy:phases", case, False, 8)["phases"]
    settings = settings_of(case, Path("none"), 8)
    peaks = predict(settings, Sizes(shape_size(shape)), step.keys(), "cuda").phases
    of_tensors = {
        phase: sum(each for kind, each in kinds.items() if kind not in ("context", "allocator", "engine"))
        for phase, kinds in peaks.items()
    }
    return shape, settings, step, of_tensors


@pytest.mark.parametrize("sharing", [1, 2])
def test_each_of_several_cards_keeps_a_prompt_whose_group_is_cut_unless_they_share_a_sequence(sharing):
    def activations(shared):
        more = (
            f"actor_rollout_ref.actor.use_prefix_grouper={shared}",
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sharing}",
        )
        settings = rloo("model=qwen3_0_6b", "memory=24g", "trainer.n_gpus_per_node=2", *more)
        return judge(settings, Card.of(24)).peaks.phases["update_actor"]["activations"]

    assert (activations("true") > activations("false")) is (sharing == 1)


def test_a_reward_model_counts_in_the_run_that_has_it_also_after_one_that_only_names_it():
    named = ["model=qwen3_0_6b", "memory=24g", "reward_model.model.path=Qwen/Qwen3-1.7B"]
    without, counted = (judge(rloo(*named, f"reward_model.enable={on}"), Card.of(24)) for on in ("false", "true"))
    own = judge(rloo(*named[:2], "reward_model.enable=true", "reward_model.model.path=Qwen/Qwen3-0.6B"), Card.of(24))
    assert "reward" not in without.peaks.phases
    assert counted.peaks.totals["reward"] > own.peaks.totals["reward"]


def test_roles_on_devices_of_their_own_weigh_nothing_on_the_policys_and_have_rows_of_their_own():
    ppo = ["model=qwen3_0_6b", "algorithm.adv_estimator=gae", "reward_model.enable=true", "trainer.save_freq=1"]
    ppo += ["actor_rollout_ref.actor.use_dynamic_bsz=true"]
    ppo += ["reward_model.model.path=Qwen/Qwen3-1.7B", "critic.model.fsdp_config.optimizer_offload=false"]
    ppo += [f"{role}.fsdp_config.param_offload=false" for role in ("critic.model", "reward_model.model")]
    apart = [f"{role}.enable_resource_pool=true" for role in ("critic", "reward_model")]
    shared, own = (judge(rloo(*ppo, *more), Card.of(80)) for more in ([], apart))
    before, after = shared.peaks.phases, own.peaks.phases
    # In any phase of the policy that model rests on its devices no more.
    resting = {"optimizer": after["values"]["optimizer"], "params": after["values"]["params"] + after["reward"]["params"]}
    for kind, num_bytes in resting.items():
        assert before["update_actor"][kind] - after["update_actor"].get(kind, 0) == num_bytes, kind
    assert "rollout weights" not in after["values"]
    assert {"init_critic", "save_checkpoint_critic", "init_reward_model"} == after.keys() - before.keys()
    assert (shared.processes, own.processes) == (1, 3)
    offload = [*ppo, "critic.model.fsdp_config.param_offload=true", "critic.model.fsdp_config.optimizer_offload=true"]
    hosts = [judge(rloo(*offload, *more), Card.of(80)).host_bytes for more in ([], apart)]
    assert hosts[0] == hosts[1] > own.host_bytes


def test_a_profile_refuses_a_model_that_cannot_fit_before_anything_starts(tmp_path):
    settings = rloo("model=qwen3_8b", "memory=16g", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.worker_group=local")
    with pytest.raises(ConfigError, match=r"memory\.card_gb=16.*Qwen/Qwen3-8B.*memory\.card_gb=null"):
        build_run(settings)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_the_verdict_in_one_line(caplog, capsys):
    with caplog.at_level(logging.INFO):
        assert main(["train", "--config-name", "rloo_trainer", *FILES, "model=qwen3_1_7b", "memory=24g", "debug=dry"]) == 0
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("fit: ")]
    assert len(lines) == 1
    assert "fits: gen" in lines[0]
    assert "memory:" in capsys.readouterr().out
