"""``verl-memopt fit`` proposes nothing that a run refuses when it builds its model."""

import pytest
import torch

from tests.plan.runs import AR, DYNAMIC, FSDP, settings_of
from verl_memopt.config.keys import replaced
from verl_memopt.errors import ConfigError
from verl_memopt.model.assembly import ModelUse, _check_heads, build_trained_policy
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import load_model_config
from verl_memopt.plan.levers import levers_of
from verl_memopt.plan.model_refusals import why_refused
from verl_memopt.plan.report import whole_command
from verl_memopt.plan.search import find_out
from verl_memopt.plan.until_it_fits import CommandLine
from verl_memopt.plan.verdict import Card, judge, sizes_of_models

CPU = torch.device("cpu")
LORA = (f"{AR}.model.lora_rank=4", f"{FSDP}.model_dtype=bfloat16")
KINDS = ("qwen3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_moe", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss")
SHAPES = {
    **{kind: TinyShape(kind, num_heads=4, num_kv_heads=2, num_layers=4) for kind in KINDS},
    "gemma4_text with experts": TinyShape("gemma4_text", num_layers=4, experts_beside=True),
    "small gemma4_text": TinyShape("gemma4_text", num_layers=4, layer_inputs=8, reading_layers=2),
}
ASKED = {
    "nothing": (),
    "adapters": LORA,
    "adapters on experts": (*LORA, f"{AR}.model.target_parameters=[mlp.experts.down_proj]"),
    "4 bits": (*LORA, f"{AR}.model.quantization=nf4"),
    "tiled MLPs": (f"{AR}.model.tiled_mlp.enabled=true",),
    "tiled blocks": (f"{AR}.model.block_tile_tokens=64",),
    "rows over ranks": ("trainer.n_gpus_per_node=2", f"{FSDP}.ulysses_sequence_parallel_size=2"),
}


def why_not_built(settings, folder, mesh):
    model, fsdp = settings.actor_rollout_ref.model, settings.actor_rollout_ref.actor.fsdp_config
    try:
        if fsdp.sequence_ranks > 1:
            _check_heads(load_model_config(model, folder), fsdp.sequence_ranks, ModelUse())
        else:
            build_trained_policy(model, fsdp, folder, mesh, CPU, compiled=False)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", SHAPES)
def test_fit_refuses_of_a_family_what_its_build_refuses(kind, one_rank, tmp_path):
    folder = make_tiny_model(tmp_path / "model", SHAPES[kind])
    for asked in ASKED.values():
        given = (DYNAMIC, f"{AR}.model.path={folder}", "trainer.device=cpu", f"{AR}.rollout.name=hf", *asked)
        settings = settings_of(*given)
        expected, found = why_not_built(settings, folder, one_rank), why_refused(settings, sizes_of_models(settings))
        assert (found is None) == (expected is None), (asked, expected, found)
        # Both name the same key.
        if expected is not None:
            assert expected.split("=")[0].split(":")[0] == found.split("=")[0]


@pytest.mark.parametrize(
    ("preset", "asked", "key"),
    [
        ("gpt_oss_20b", (f"{AR}.rollout.name=vllm",), f"{AR}.rollout.name"),
        ("qwen3_30b_a3b", (f"{AR}.rollout.share_weights=true", f"{FSDP}.dtype=bfloat16", f"{FSDP}.model_dtype=bfloat16"), None),
        ("qwen3_5_0_8b", (*LORA, f"{AR}.rollout.share_weights=true", f"{FSDP}.dtype=bfloat16"), f"{AR}.rollout.share_weights"),
        (
            "qwen3_30b_a3b",
            (*LORA, "trainer.n_gpus_per_node=2", f"{AR}.model.quantization=nf4"),
            f"{AR}.model.quantization=nf4: .*several devices.*{AR}.rollout.name=hf",
        ),
    ],
)
def test_a_run_that_its_model_refuses_is_refused_by_fit_with_a_way_out(preset, asked, key):
    with pytest.raises(ConfigError, match=key or f"{AR}.rollout.share_weights") as error:
        find_out(settings_of(DYNAMIC, f"model={preset}", *asked), Card.of(80))
    assert " Set " in str(error.value)


@pytest.mark.parametrize("preset", ["qwen3_5_35b_a3b", "gpt_oss_20b", "glm4_5_air", "gemma4_26b_a4b", "gemma4_31b", "gemma4_e4b"])
def test_no_level_of_a_lever_is_refused_by_the_model(preset):
    given = ("memory=24g", f"model={preset}", "trainer.n_gpus_per_node=2", "algorithm.use_kl_in_reward=true")
    settings = settings_of(*given)
    sizes = sizes_of_models(settings)
    for level in (level for lever in levers_of(settings, sizes, host_is_bounded=True) for level in lever.levels):
        assert why_refused(replaced(settings, level.keys), sizes) is None
        assert level.keys.get(f"{AR}.model.load_mode") is None or sizes.policy.mixture is None


@pytest.mark.parametrize(("preset", "memory", "gigabytes"), [("qwen3_30b_a3b", "80g", 80), ("gemma4_e4b", "12g", 12)])
def test_the_command_for_a_new_family_is_accepted_and_fits(preset, memory, gigabytes):
    line = CommandLine("verl-memopt train", "rloo_trainer", None, (f"model={preset}", f"memory={memory}"))
    settings = settings_of(*line.overrides)
    found = find_out(settings, Card.of(gigabytes))
    assert found.fits
    assert found.changes
    loaded = settings_of(*whole_command(settings, found, line).overrides)
    assert why_refused(loaded, sizes_of_models(loaded)) is None
    assert judge(loaded, Card.of(gigabytes)).fits


def test_adapters_on_layers_that_carry_a_state_leave_vllm_its_own_copy():
    on = (DYNAMIC, "model=qwen3_5_0_8b", f"{FSDP}.model_dtype=bfloat16", f"{AR}.rollout.free_cache_engine=false")
    held = [judge(settings_of(*on, *more), Card.of(24)).peaks.phases["update_actor"] for more in ((), LORA)]
    own = held[1]["rollout weights"] - held[0]["rollout weights"]
    assert own >= 1.9 * sizes_of_models(settings_of(*on)).policy.params


def test_experts_are_not_shared_with_vllm_so_both_copies_count():
    settings = settings_of(
        DYNAMIC, "model=qwen3_30b_a3b", f"{FSDP}.model_dtype=bfloat16", f"{AR}.rollout.free_cache_engine=false"
    )
    phases = judge(settings, Card.of(141)).peaks.phases
    params = sizes_of_models(settings).policy.params
    assert phases["update_actor"]["params"] == pytest.approx(2 * params, rel=0.01)
    assert phases["update_actor"]["rollout weights"] >= 2 * params
