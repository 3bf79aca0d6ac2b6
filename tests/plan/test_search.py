"""The search of ``verl-memopt fit``: it finds a way where there is one, names none that is not needed, and gives the command."""

import json
import shlex
from dataclasses import replace

import pytest

from benchmarks.fit_search import compare, draw
from tests.plan.test_peaks import TWO_COPIES, rloo, said
from verl_memopt.cli import main
from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import PACKAGED, load_settings
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import gigabytes
from verl_memopt.memory.profiles import profile_named
from verl_memopt.model.sizes import PUBLISHED, ModelSize
from verl_memopt.plan.levers import levers_of
from verl_memopt.plan.search import find_out
from verl_memopt.plan.verdict import Card, judge

AR = "actor_rollout_ref"
LLAMA_70B = ModelSize(8192, 28_672, 80, 64, 8, 128, 128_256, False, positions=2**17)


def overrides(found):
    return [f"{key}={str(value).lower()}" for change in found.changes for key, value in change.keys.items()]


def keys(found):
    return {key for change in found.changes for key in change.keys}


@pytest.mark.parametrize("model", ["qwen3_4b", "llama3_2_3b"])
def test_what_it_advises_makes_the_run_fit_and_nothing_of_it_can_be_left_out(model):
    settings = rloo(f"model={model}", "memory=24g", TWO_COPIES)
    found = find_out(settings, Card.of(24))
    assert not found.verdict.fits
    assert found.fits
    advised = overrides(found)
    assert judge(rloo(f"model={model}", "memory=24g", TWO_COPIES, *advised), Card.of(24)).fits
    for change in found.changes:
        others = [text for text in advised if text.partition("=")[0] not in change.keys]
        assert not judge(rloo(f"model={model}", "memory=24g", TWO_COPIES, *others), Card.of(24)).fits


def test_all_weights_of_an_8b_fit_24_gb_with_a_larger_share_for_the_engine_and_small_budgets():
    found = find_out(rloo("model=qwen3_8b", "memory=24g"), Card.of(24))
    assert not found.verdict.fits
    assert found.fits
    assert not any(change.changes_numbers for change in found.changes)
    assert judge(rloo("model=qwen3_8b", "memory=24g", *overrides(found)), Card.of(24)).fits


def test_a_base_too_large_for_a_card_is_advised_in_fewer_bits_and_fits_then():
    found = find_out(rloo("model=qwen3_8b", "memory=16g"), Card.of(16))
    assert not found.verdict.fits
    assert found.fits
    assert [change.name for change in found.changes if change.changes_numbers] == ["lora", "quantized_base"]


def test_adapters_on_four_bits_of_a_32b_fit_32_gb():
    given = ("model=qwen3_32b", "memory=32g", f"{AR}.model.lora_rank=32", f"{AR}.model.quantization=nf4")
    found = find_out(rloo(*given), Card.of(32))
    assert not found.verdict.fits
    assert judge(rloo(*given, *overrides(found)), Card.of(32)).fits


@pytest.mark.parametrize("memory", ["memory=80g", "memory=large_multi_gpu", f"{AR}.actor.use_dynamic_bsz=true"])
def test_a_70b_fits_8_cards_of_80_gb_once_several_share_an_engine(memory, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "a/70b", LLAMA_70B)
    given = (memory, f"{AR}.model.path=a/70b", "trainer.n_gpus_per_node=8")
    found = find_out(rloo(*given), Card.of(80))
    assert not found.verdict.fits
    assert f"{AR}.rollout.tensor_model_parallel_size" in keys(found)
    assert judge(rloo(*given, *overrides(found)), Card.of(80)).fits
    assert not any(change.changes_numbers for change in found.changes)


def test_one_long_row_is_shared_by_several_cards_where_one_has_no_room_for_it():
    given = ["model=qwen3_0_6b", "memory=12g", "trainer.n_gpus_per_node=2", "data.max_response_length=30000"]
    given += ["data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8"]
    tight = Card(round(4.5 * 2**30))
    found = find_out(rloo(*given), tight)
    assert judge(rloo(*given, *overrides(found)), tight).fits
    assert f"{AR}.actor.fsdp_config.ulysses_sequence_parallel_size" in keys(found)


def test_what_fits_with_the_profile_of_a_card_fits_with_the_settings_that_are_advised_without_it():
    found = find_out(rloo("model=qwen3_1_7b", "actor_rollout_ref.actor.use_dynamic_bsz=true"), Card.of(24))
    assert not found.verdict.fits
    assert found.fits
    assert not any(change.changes_numbers for change in found.changes)


def test_a_host_with_little_memory_bounds_what_is_moved_there():
    given = ("model=qwen3_1_7b", f"{AR}.actor.use_dynamic_bsz=true")
    card = replace(Card.of(24), host_bytes=2**33)
    found = find_out(rloo(*given), card)
    assert not found.verdict.fits
    assert found.after is not None
    assert found.after.fits
    assert judge(rloo(*given, *overrides(found)), card).fits


@pytest.mark.parametrize("number", [0, 1, 2])
def test_search_and_brute_force_agree(number):
    """``python -m benchmarks.fit_search`` compares a hundred."""
    assert compare(draw(number)).faults == ()


def test_the_answer_is_a_command_that_fits(capsys):
    code, text = said(capsys, "model=qwen3_8b", "memory=24g")
    assert code == 1
    (command,) = (line for line in text.replace(" \\\n", " ").splitlines() if line.strip().startswith("verl-memopt train"))
    program, entry, *arguments = shlex.split(command)
    assert (program, entry, arguments[:2]) == ("verl-memopt", "train", ["--config-name", "rloo_trainer"])
    assert judge(
        load_settings("rloo_trainer", ["data.train_files=none", "data.val_files=null", *arguments[2:]]), Card.of(24)
    ).fits
    _, text = said(capsys, "model=qwen3_8b", "memory=24g", "--json")
    assert shlex.split(json.loads(text)["command"]) == [program, entry, *arguments]


def test_it_estimates_the_seconds_of_a_step_for_the_cards_of_a_size_or_for_the_machine_that_was_measured(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("model=qwen3_0_6b", "memory=24g")
    _, text = said(capsys, *arguments)
    assert "RTX 4090" in text
    named = json.loads(said(capsys, *arguments, "--json")[1])["estimated_seconds"]
    assert named["RTX 4090"]["update_actor"] < named["RTX 3090"]["update_actor"]
    assert named["RTX 4090"].keys() >= {"gen", "old_log_prob", "update_actor"}
    on_cpu = (*arguments, "trainer.device=cpu", f"{AR}.rollout.name=hf", "memory.device_limit_gb=24")
    assert "verl-memopt calibrate" in said(capsys, *on_cpu)[1]
    assert main(["calibrate", "--seconds", "0.2", "--device", "cpu"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert "measured rates" in said(capsys, *on_cpu)[1]
    assert "RTX 4090" in said(capsys, *arguments)[1]


def test_heads_that_do_not_divide_over_the_ranks_are_refused_by_name():
    given = ("model=qwen2_5_7b", "memory=24g", "trainer.n_gpus_per_node=8")
    sharing = f"{AR}.actor.fsdp_config.ulysses_sequence_parallel_size=8"
    with pytest.raises(ConfigError, match=r"28 query heads do not divide over the ranks\. Set 1 or 2 or 4"):
        judge(rloo(*given, sharing), Card.of(24))


def test_no_lever_goes_back_from_what_holds_less_already():
    lora = [f"{AR}.model.lora_rank=8", f"{AR}.actor.fsdp_config.model_dtype=bfloat16", f"{AR}.model.quantization=nf4"]
    files = ["data.train_files=none", "data.val_files=null", "model=qwen3_8b", "memory=24g"]
    for given, key, now in (([], f"{AR}.ref.fsdp_config.param_offload", "stream"), (lora, f"{AR}.model.quantization", "nf4")):
        settings = load_settings("grpo_trainer", [*files, *given])
        assert value_at(settings, key) == now
        levers = levers_of(settings, PUBLISHED["Qwen/Qwen3-8B"], host_is_bounded=False)
        assert not [level for lever in levers for level in lever.levels if key in level.keys]


@pytest.mark.parametrize("size", ["32", "32g", "32GB", "32gb", "32GiB", "32 GB", "'32g'"])
def test_a_card_is_named_by_its_size_however_it_is_written(size, capsys):
    assert rloo("model=qwen3_0_6b", f"memory={size}") == rloo("model=qwen3_0_6b", "memory=32g")
    _, text = said(capsys, "model=qwen3_0_6b", "memory=24g", "--memory", size.strip("'"), "--json")
    assert json.loads(text)["card_bytes"] == Card.of(32).num_bytes


@pytest.mark.parametrize(
    ("name", "size"),
    [("RTX 4090", "24g"), ("4090", "24g"), ("nvidia-geforce-rtx-5090", "32g"), ("a100 80GB", "80g"), ("L40S", "48g")],
)
def test_a_card_is_named_by_its_name(name, size):
    assert profile_named(name) == size
    assert gigabytes(name) == gigabytes(size)


def test_a_card_of_several_sizes_is_not_chosen_for_the_user():
    with pytest.raises(ConfigError, match=r"memory=A100: A100 is made with 40GB and 80GB. Write which"):
        rloo("model=qwen3_0_6b", "memory=A100")


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        (
            "model=qwen3_8",
            r"^model=qwen3_8: there is no such preset. Did you mean model=qwen3_8b\? There are .*, tiny. For a folder",
        ),
        ("model=Qwen/Qwen3-8B", r"mean model=qwen3_8b\? .* hub id write actor_rollout_ref.model.path=Qwen/Qwen3-8B.$"),
        ("memory=gtx1080", r"^memory=gtx1080: there is no such preset. There are .* For another card write its GB"),
        ("memory=24576", r"^memory=24576: no card has 24576 GB. If these are MB, write 24.$"),
        ("recipe/rloo/gsm8k.yaml", r"For this file give --config-dir recipe/rloo --config-name gsm8k.$"),
        ("debug=dri", r"Did you mean debug=dry\?"),
    ],
)
def test_a_preset_that_there_is_not_is_refused_with_the_nearest(preset, said, monkeypatch):
    monkeypatch.chdir(PACKAGED.parents[2])
    with pytest.raises(ConfigError, match=said):
        rloo("model=qwen3_0_6b", preset)


def test_a_size_without_a_profile_is_refused_with_the_next_smaller_one():
    with pytest.raises(ConfigError, match=r"memory=20: no profile .* memory=16g memory.card_gb=20"):
        rloo("model=qwen3_0_6b", "memory=20")
