"""Estimated seconds of a step: they follow from counted FLOPs and bytes, and from nothing else."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.reach_cases import SHAPES
from benchmarks.gpu.reach_cases import size_of as shape_size
from benchmarks.update_pass.flops import floor
from benchmarks.update_pass.work import Batch
from tests.plan.runs import AR, DYNAMIC, settings_of
from verl_memopt.memory.cards import DATASHEETS
from verl_memopt.plan.calibrate import lines, measure, rates_of_machine, store
from verl_memopt.plan.seconds import Rates, rates_of, seconds_of

FREE = 1e30
"""Bytes a second of a memory that costs no time."""
ONLY_PRODUCTS = Rates(
    "products alone", half_flops=1e12, fp32_flops=5e11, memory_bytes=FREE, bus_bytes=FREE, sampled=FREE, call_seconds=0
)
SIZE = shape_size(SHAPES["0.6b"])
STEP = ("gen", "old_log_prob", "teacher", "update_actor", "update_weights")


def seconds(*more, rates=ONLY_PRODUCTS, kv_tokens=10_000):
    batch = ("data.train_batch_size=2", f"{AR}.actor.ppo_mini_batch_size=2", f"{AR}.rollout.n=3", DYNAMIC)
    lengths = ("data.max_prompt_length=20", "data.max_response_length=8")
    return seconds_of(settings_of("model=qwen3_0_6b", *batch, *lengths, *more), SIZE, STEP, rates, kv_tokens)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_takes_the_products_that_are_counted_and_no_others(checkpointing):
    batch = Batch([[0] * 20] * 2, [[0] * 8] * 6, [0.0] * 6)
    counted = floor(SHAPES["0.6b"], batch, checkpointing)
    estimated = seconds(f"{AR}.model.enable_gradient_checkpointing={str(checkpointing).lower()}")["update_actor"]
    assert estimated == pytest.approx(counted / 1e12, rel=1e-9)


def test_fp32_takes_the_rate_of_fp32():
    half, whole = (seconds(f"{AR}.actor.fsdp_config.dtype={dtype}")["update_actor"] for dtype in ("bfloat16", "fp32"))
    assert whole == pytest.approx(2 * half)


def test_moments_on_the_host_cross_the_bus_both_ways_once_a_mini_batch():
    bus = replace(ONLY_PRODUCTS, bus_bytes=1e9)
    off, on = (
        seconds(f"{AR}.actor.fsdp_config.optimizer_offload={each}", rates=bus)["update_actor"] for each in ("false", "true")
    )
    assert on - off == pytest.approx(2 * 8 * SIZE.params / 1e9)


def test_the_head_of_a_teacher_is_multiplied_with_once_in_its_pass_or_in_the_update():
    head = 2 * SIZE.hidden * SIZE.vocab * 6 * 8 / ONLY_PRODUCTS.half_flops
    taught = ("distill.coef=1", "teacher.model.path=none")
    plain, exact, top = seconds(), seconds(*taught), seconds(*taught, "distill.top_k=64")
    assert exact["update_actor"] - plain["update_actor"] == pytest.approx(head)
    assert top["teacher"] - exact["teacher"] == pytest.approx(head)
    assert top["teacher"] == pytest.approx(top["old_log_prob"])
    assert top["update_actor"] == plain["update_actor"]


def test_a_cache_without_room_for_all_sequences_decodes_in_waves():
    slow = replace(ONLY_PRODUCTS, memory_bytes=1e9, half_flops=FREE)
    together, waves = (seconds(rates=slow, kv_tokens=tokens)["gen"] for tokens in (6 * 28, 2 * 28))
    weights = 3 * 8 * 2 * SIZE.params / 1e9
    assert together < weights < waves
    assert waves == pytest.approx(weights, rel=0.01)


def test_small_micro_batches_cost_launches():
    calls = replace(ONLY_PRODUCTS, half_flops=FREE, call_seconds=1e-5)
    key = f"{AR}.actor.ppo_max_token_len_per_gpu"
    large, small = (seconds(f"{key}={tokens}", rates=calls)["update_actor"] for tokens in (10_000, 28))
    assert small > 2 * large


def test_every_faster_card_takes_less_time():
    order = ("RTX 4090", "RTX 5090", "H100", "H200", "B200")
    of = {card.name: rates_of(card) for cards in DATASHEETS.values() for card in cards}
    totals = [sum(seconds(rates=of[name]).values()) for name in order]
    assert totals == sorted(totals, reverse=True)
    assert not any(rates.is_measured for rates in of.values())


def test_what_was_measured_of_a_machine_is_read_again_for_its_own_device_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_of_machine("cpu") is None
    rates = measure(torch.device("cpu"), seconds=0.2)
    assert rates.is_measured
    assert min(rates.half_flops, rates.fp32_flops, rates.memory_bytes, rates.bus_bytes, rates.call_seconds) > 0
    file = store(rates, "cpu")
    assert rates_of_machine("cpu") == rates
    assert rates_of_machine("cuda") is None
    assert "GB/s" in lines(rates)
    file.write_text("{")
    assert rates_of_machine("cpu") is None
