"""The verdict of ``verl-memopt fit`` on settings and a card, with published models whose weights nobody reads."""

import json
import logging
import os

import pytest
import torch

from tests.plan.runs import AR, DYNAMIC, FSDP, TWO_COPIES, said, settings_of, verdict
from verl_memopt.cli import main
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import CARDS
from verl_memopt.observe.phase import GIB, MIB
from verl_memopt.plan.peaks import CONTEXT
from verl_memopt.plan.verdict import beside_cache, card_asked_for, judge
from verl_memopt.trainer.build import build_run

CACHE = f"{AR}.rollout.kv_cache_memory_gb"


def test_a_model_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"config\.json"):
        verdict("memory=24g", f"{AR}.model.path=no/such/folder")


def test_heads_that_do_not_divide_over_the_ranks_are_refused_by_name():
    sharing = f"{FSDP}.ulysses_sequence_parallel_size=8"
    with pytest.raises(ConfigError, match=r"28 query heads do not divide over the ranks\. Set 1 or 2 or 4"):
        verdict("model=qwen2_5_7b", "memory=24g", "trainer.n_gpus_per_node=8", sharing)


def test_the_command_says_what_fits_on_card_and_host(capsys):
    arguments = ("model=qwen3_1_7b", "memory=24g")
    code, text = said(capsys, *arguments, "--host-memory", "64")
    assert code == 0
    assert "Verdict: fits: gen" in text
    assert "1 x on a host of 64.0 GiB" in text
    assert "longest response" in text
    assert "sequences at once" in text
    settings = settings_of(*arguments)
    little = judge(settings, card_asked_for(settings, None, 8))
    assert little.too_much.keys() == {"host"}
    assert "the host needs" in little.line
    assert "of 8.0 GiB" in little.line


def test_json_has_the_figures_and_their_sums(capsys):
    code, text = said(capsys, "model=qwen3_4b", "memory=24g", TWO_COPIES, "--memory", "24", "--json")
    found = json.loads(text)
    assert (code, found["fits"], found["card_bytes"]) == (1, False, CARDS["24g"] * MIB)
    assert sum(found["phases"][found["binding_phase"]].values()) == max(sum(kinds.values()) for kinds in found["phases"].values())


def test_the_size_of_a_machines_own_card_is_asked_of_nvidia_smi_without_touching_the_card(tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 32607\necho 24564\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert card_asked_for(settings_of("model=qwen3_0_6b", DYNAMIC), None).num_bytes == 24564 * MIB
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(["fit", "--config-name", "rloo_trainer", "model=qwen3_0_6b"]) == ConfigError.exit_code
    assert "--memory: the size of the card is not known" in capsys.readouterr().err


@pytest.mark.parametrize("sleeps", ["true", "false"])
@pytest.mark.parametrize("shares", ["true", "false"])
def test_a_cache_that_takes_the_rest_fills_the_card_and_no_more(shares, sleeps):
    half = (f"{FSDP}.model_dtype=bfloat16", f"{AR}.rollout.dtype=bfloat16", f"{FSDP}.param_offload=false")
    given = (*half, f"{AR}.rollout.share_weights={shares}", f"{AR}.rollout.free_cache_engine={sleeps}")
    rest, fixed = (verdict("model=qwen3_0_6b", "memory=24g", *given, f"{CACHE}={cache}") for cache in ("auto", 0.5))
    assert rest.fits
    assert rest.peaks.device_bytes == CARDS["24g"] * MIB - CONTEXT
    assert f"{rest.peaks.kv_tokens} tokens" in rest.line
    # Everything beside it is what it is with a cache of any other size, in every phase.
    bare, of_fixed = ({phase: {**kinds, "kv": 0} for phase, kinds in each.peaks.phases.items()} for each in (rest, fixed))
    assert bare == of_fixed
    assert rest.peaks.phases["update_actor"].get("kv", 0) == (0 if sleeps == "true" else rest.peaks.phases["gen"]["kv"])


def test_a_card_without_room_for_a_cache_is_no_fit():
    found = verdict("model=qwen3_4b", "memory=24g", TWO_COPIES, f"{CACHE}=auto", card=10)
    assert found.peaks.kv_tokens == 0
    assert "KV cache" in found.too_much


def test_only_an_engine_of_vllm_that_generates_on_a_device_of_known_size_has_a_cache_that_takes_the_rest(tmp_path):
    keys = (DYNAMIC, "model=qwen3_0_6b", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path / 'run'}")
    auto, limit = f"{CACHE}=auto", "memory.device_limit_gb=8"
    vllm = f"{AR}.rollout.name=vllm"
    assert beside_cache(settings_of(*keys, limit)) is None
    assert beside_cache(settings_of(*keys, limit, auto, f"{AR}.rollout.name=hf")) is None
    assert beside_cache(settings_of(*keys, limit, auto, vllm)) > GIB
    with pytest.raises(ConfigError, match=rf"{CACHE}=auto, memory\.device_limit_gb=null.*give {CACHE} a size"):
        build_run(settings_of(*keys, auto, vllm))
    assert not (tmp_path / "run").exists()


def test_an_engine_that_shares_its_weights_takes_its_share_of_the_card_and_no_more():
    generating = verdict("model=qwen3_1_7b", "memory=24g").peaks.totals["gen"]
    assert generating == pytest.approx(0.7 * CARDS["24g"] * MIB, rel=1e-4)


def test_more_cards_share_a_model(capsys):
    arguments = ("model=qwen3_8b", "memory=large_multi_gpu", f"{AR}.rollout.tensor_model_parallel_size=2")
    assert said(capsys, *arguments, "--memory", "80", "--gpus", "2")[0] == 0
    assert not verdict(*arguments, "trainer.n_gpus_per_node=2").fits


@pytest.mark.parametrize("sharing", [1, 2])
def test_each_of_several_cards_keeps_a_prompt_whose_group_is_cut_unless_they_share_a_sequence(sharing):
    given = ("model=qwen3_0_6b", "memory=24g", "trainer.n_gpus_per_node=2", f"{FSDP}.ulysses_sequence_parallel_size={sharing}")
    shared, own = (
        verdict(*given, f"{AR}.actor.use_prefix_grouper={on}").peaks.phases["update_actor"]["activations"]
        for on in ("true", "false")
    )
    assert (shared > own) is (sharing == 1)


def test_a_reward_model_counts_in_the_run_that_has_it_also_after_one_that_only_names_it():
    given = ("model=qwen3_0_6b", "memory=24g")
    large, small = (f"reward_model.model.path=Qwen/Qwen3-{size}B" for size in ("1.7", "0.6"))
    without = verdict(*given, large, "reward_model.enable=false").peaks
    counted, own = (verdict(*given, path, "reward_model.enable=true").peaks for path in (large, small))
    assert "reward" not in without.phases
    assert counted.totals["reward"] > own.totals["reward"]


def test_roles_on_devices_of_their_own_weigh_nothing_on_the_policys_and_have_rows_of_their_own():
    roles = ("critic.model", "reward_model.model")
    ppo = ["model=qwen3_0_6b", "algorithm.adv_estimator=gae", "reward_model.enable=true", "trainer.save_freq=1", DYNAMIC]
    ppo += ["reward_model.model.path=Qwen/Qwen3-1.7B", "critic.model.fsdp_config.optimizer_offload=false"]
    ppo += [f"{role}.fsdp_config.param_offload=false" for role in roles]
    apart = [f"{role}.enable_resource_pool=true" for role in ("critic", "reward_model")]
    shared, own = (verdict(*ppo, *more, card=80) for more in ([], apart))
    before, after = shared.peaks.phases, own.peaks.phases
    # In any phase of the policy that model rests on its devices no more.
    resting = {"optimizer": after["values"]["optimizer"], "params": after["values"]["params"] + after["reward"]["params"]}
    for kind, num_bytes in resting.items():
        assert before["update_actor"][kind] - after["update_actor"].get(kind, 0) == num_bytes, kind
    assert "rollout weights" not in after["values"]
    assert {"init_critic", "save_checkpoint_critic", "init_reward_model"} == after.keys() - before.keys()
    assert (shared.processes, own.processes) == (1, 3)
    offload = [*ppo, "critic.model.fsdp_config.param_offload=true", "critic.model.fsdp_config.optimizer_offload=true"]
    hosts = [verdict(*offload, *more, card=80).host_bytes for more in ([], apart)]
    assert hosts[0] == hosts[1] > own.host_bytes


def test_a_profile_refuses_a_model_that_cannot_fit_before_anything_starts(tmp_path):
    run = (f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.worker_group=local")
    with pytest.raises(ConfigError, match=r"memory\.card_gb=16.*Qwen/Qwen3-8B.*memory\.card_gb=null"):
        build_run(settings_of("model=qwen3_8b", "memory=16g", *run))
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_the_verdict_in_one_line(caplog, capsys):
    files = ("data.train_files=none", "data.val_files=null")
    with caplog.at_level(logging.INFO):
        assert main(["train", "--config-name", "rloo_trainer", *files, "model=qwen3_1_7b", "memory=24g", "debug=dry"]) == 0
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("fit: ")]
    assert "fits: gen" in line
    assert "memory:" in capsys.readouterr().out
