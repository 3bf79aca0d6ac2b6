"""The search of ``verl-memopt fit``: it finds a way where there is one, names none that is not needed, and gives the command."""

import json
import shlex
from dataclasses import replace

import pytest

from benchmarks.fit_search import compare, draw
from tests.plan.runs import AR, DYNAMIC, FSDP, TWO_COPIES, said, settings_of, verdict
from verl_memopt.cli import main
from verl_memopt.config.keys import value_at
from verl_memopt.config.loader import PACKAGED
from verl_memopt.errors import ConfigError
from verl_memopt.memory.cards import gigabytes
from verl_memopt.memory.profiles import profile_named
from verl_memopt.model.sizes import PUBLISHED, ModelSize
from verl_memopt.observe.phase import GIB
from verl_memopt.plan.levers import levers_of
from verl_memopt.plan.search import Search, find_out
from verl_memopt.plan.verdict import Card, sizes_of_models

TEACHER = "teacher.fsdp_config"
LLAMA_70B = ModelSize(8192, 28_672, 80, 64, 8, 128, 128_256, False, positions=2**17)


def advised(*given, card):
    """Gives what makes a run fit that does not; that it fits then is asserted."""
    card = card if isinstance(card, Card) else Card.of(card)
    found = find_out(settings_of(*given), card)
    assert not found.verdict.fits
    assert found.fits
    assert verdict(*given, *overrides(found), card=card).fits
    return found


def overrides(found):
    return [f"{key}={str(value).lower()}" for key, value in found.keys.items()]


def lossy(found):
    return [change.name for change in found.changes if change.changes_numbers]


@pytest.mark.parametrize("model", ["qwen3_4b", "llama3_2_3b"])
def test_nothing_that_it_advises_can_be_left_out(model):
    given = (f"model={model}", "memory=24g", TWO_COPIES)
    found = advised(*given, card=24)
    for change in found.changes:
        others = [override for override in overrides(found) if override.partition("=")[0] not in change.keys]
        assert not verdict(*given, *others).fits


@pytest.mark.parametrize(
    ("given", "card", "changing_numbers"),
    [
        (("model=qwen3_8b", "memory=24g"), 24, []),  # by a larger share for the engine, and small budgets
        (("model=qwen3_8b", "memory=16g"), 16, ["lora", "quantized_base"]),
        (("model=qwen3_32b", "memory=32g", f"{AR}.model.lora_rank=32", f"{AR}.model.quantization=nf4"), 32, []),
        (("model=qwen3_1_7b", DYNAMIC), 24, []),  # as with the profile of the card
    ],
)
def test_numbers_change_only_where_nothing_else_makes_a_run_fit(given, card, changing_numbers):
    assert lossy(advised(*given, card=card)) == changing_numbers


TAUGHT = ("model=qwen3_0_6b", "algorithm.adv_estimator=distill", "teacher.model.path=Qwen/Qwen3-32B", DYNAMIC)
SMALL_HOST = replace(Card.of(24), host_bytes=64 * GIB)


@pytest.mark.parametrize(
    ("card", "changing_numbers"),
    [(Card.of(24), []), pytest.param(SMALL_HOST, ["quantized_frozen"], marks=pytest.mark.slow)],  # of 55,000 choices
    ids=["large host", "small host"],
)
def test_a_teacher_that_does_not_fit_streams_and_is_quantised_only_for_a_small_host(card, changing_numbers):
    found = advised(*TAUGHT, card=card)
    assert lossy(found) == changing_numbers
    assert found.keys[f"{TEACHER}.param_offload"] == "stream"


def test_of_a_teachers_own_levers_a_small_host_needs_that_it_is_quantised():
    def is_own(lever):
        return not lever.is_choice or any(key.startswith("teacher.") for level in lever.levels for key in level.keys)

    settings = settings_of(*TAUGHT)
    own = [lever for lever in Search(settings, SMALL_HOST).levers if is_own(lever)]
    changes, after = Search(settings, SMALL_HOST, own).changes()
    assert after.fits
    assert [change.name for change in changes if change.changes_numbers] == ["quantized_frozen"]
    assert {key: value for change in changes for key, value in change.keys.items()}[f"{TEACHER}.param_offload"] == "stream"


@pytest.mark.parametrize("memory", ["memory=large_multi_gpu", DYNAMIC])
def test_a_70b_fits_8_cards_of_80_gb_once_several_share_an_engine(memory, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "a/70b", LLAMA_70B)
    found = advised(memory, f"{AR}.model.path=a/70b", "trainer.n_gpus_per_node=8", card=80)
    assert f"{AR}.rollout.tensor_model_parallel_size" in found.keys
    assert lossy(found) == []


def test_one_long_row_is_shared_by_several_cards_where_one_has_no_room_for_it():
    lengths = ("data.max_response_length=30000", "data.train_batch_size=8", f"{AR}.actor.ppo_mini_batch_size=8")
    settings = settings_of("model=qwen3_0_6b", "memory=12g", "trainer.n_gpus_per_node=2", *lengths)
    few = ("sequence_parallel", "rollout_memory", "token_budget", "grad_offload")  # all levers take five seconds
    levers = levers_of(settings, sizes_of_models(settings), host_is_bounded=False)
    search = Search(settings, Card(round(4.5 * GIB)), [lever for lever in levers if lever.levels[-1].knob in few])
    changes, after = search.changes()
    assert not search.verdict(search.as_it_is).fits
    assert after.fits
    assert f"{FSDP}.ulysses_sequence_parallel_size" in {key for change in changes for key in change.keys}


def test_a_host_with_little_memory_bounds_what_is_moved_there():
    found = advised("model=qwen3_0_6b", "memory=24g", card=replace(Card.of(24), host_bytes=3 * GIB))
    assert found.verdict.too_much.keys() == {"host"}
    assert found.after.host_bytes <= 3 * GIB


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_search_and_brute_force_agree(number):
    """``python -m benchmarks.fit_search`` compares a hundred."""
    assert compare(draw(number)).faults == ()


def test_the_longest_response_and_the_largest_step_fit_and_those_a_tenth_larger_do_not():
    given, mini = ("model=qwen3_1_7b", "memory=24g"), f"{AR}.actor.ppo_mini_batch_size"
    settings = settings_of(*given)
    found = find_out(settings, Card.of(24))
    for response, fits in ((found.response, True), (found.response * 11 // 10, False)):
        assert verdict(*given, f"data.max_response_length={response}").fits is fits

    # Without gradients the tokens of all sequences of a step are on the device at once.
    step, prompts = found.step, settings.data.train_batch_size
    rows = prompts * settings.actor_rollout_ref.rollout.n

    def having(steps):
        return verdict(*given, f"data.train_batch_size={steps * prompts}", f"{mini}={value_at(settings, mini)}")

    times = step.sequences // rows
    assert times > 1
    assert not step.is_all
    assert having(times).fits
    assert not having(times * 11 // 10 + 1).fits
    few, more = (having(steps).peaks.totals[step.phase] for steps in (2, 3))
    assert step.sequence_bytes == pytest.approx((more - few) / rows, rel=1e-3)
    assert step.sequence_bytes > 8 * 512, "each token is an int64 at least"


def test_the_answer_is_a_command_that_fits(capsys):
    code, text = said(capsys, "model=qwen3_8b", "memory=24g")
    assert code == 1
    (command,) = (line for line in text.replace(" \\\n", " ").splitlines() if line.strip().startswith("verl-memopt train"))
    program, entry, *arguments = shlex.split(command)
    assert (program, entry, arguments[:2]) == ("verl-memopt", "train", ["--config-name", "rloo_trainer"])
    assert verdict(*arguments[2:]).fits
    _, text = said(capsys, "model=qwen3_8b", "memory=24g", "--json")
    assert shlex.split(json.loads(text)["command"]) == [program, entry, *arguments]


def test_it_estimates_the_seconds_of_a_step_for_the_cards_of_a_size_or_for_the_machine_that_was_measured(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("model=qwen3_0_6b", "memory=24g")
    named = json.loads(said(capsys, *arguments, "--json")[1])["estimated_seconds"]
    assert named["RTX 4090"]["update_actor"] < named["RTX 3090"]["update_actor"]
    assert named["RTX 4090"].keys() >= {"gen", "old_log_prob", "update_actor"}
    on_cpu = (*arguments, "trainer.device=cpu", f"{AR}.rollout.name=hf", "memory.device_limit_gb=24")
    assert "verl-memopt calibrate" in said(capsys, *on_cpu)[1]
    assert main(["calibrate", "--seconds", "0.2", "--device", "cpu"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert "measured rates" in said(capsys, *on_cpu)[1]
    assert "RTX 4090" in said(capsys, *arguments)[1]


def test_no_lever_goes_back_from_what_holds_less_already():
    lora = [f"{AR}.model.lora_rank=8", f"{FSDP}.model_dtype=bfloat16", f"{AR}.model.quantization=nf4"]
    for given, key, now in (([], f"{AR}.ref.fsdp_config.param_offload", "stream"), (lora, f"{AR}.model.quantization", "nf4")):
        settings = settings_of("model=qwen3_8b", "memory=24g", *given, config="grpo_trainer")
        assert value_at(settings, key) == now
        levers = levers_of(settings, sizes_of_models(settings), host_is_bounded=False)
        assert not [level for lever in levers for level in lever.levels if key in level.keys]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((size, "32g") for size in ("32", "32g", "32GB", "32gb", "32GiB", "32 GB")),
        *(("RTX 4090", "24g"), ("4090", "24g"), ("nvidia-geforce-rtx-5090", "32g"), ("a100 80GB", "80g"), ("L40S", "48g")),
    ],
)
def test_a_card_is_named_by_its_size_however_it_is_written_or_by_its_name(name, size):
    assert profile_named(name) == size
    assert gigabytes(name) == gigabytes(size)


def test_a_profile_and_the_card_of_the_command_are_named_alike(capsys):
    assert settings_of("model=qwen3_0_6b", "memory='32 GB'") == settings_of("model=qwen3_0_6b", "memory=32g")
    _, text = said(capsys, "model=qwen3_0_6b", "memory=24g", "--memory", "RTX 5090", "--json")
    assert json.loads(text)["card_bytes"] == Card.of(32).num_bytes


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
        ("memory=A100", r"memory=A100: A100 is made with 40GB and 80GB. Write which"),
        ("memory=20", r"memory=20: no profile .* memory=16g memory.card_gb=20"),
        ("recipe/rloo/gsm8k.yaml", r"For this file give --config-dir recipe/rloo --config-name gsm8k.$"),
        ("debug=dri", r"Did you mean debug=dry\?"),
    ],
)
def test_a_preset_that_there_is_not_is_refused_with_the_nearest(preset, said, monkeypatch):
    monkeypatch.chdir(PACKAGED.parents[2])
    with pytest.raises(ConfigError, match=said):
        settings_of("model=qwen3_0_6b", preset)
