import dataclasses
import shutil
from pathlib import Path

import pytest

from benchmarks.gpu.reach_cases import size_of
from benchmarks.gpu_cost.update import MODELS, Case
from tests.forked import call_on_fake_gpu
from tests.virtual_gpu.compiled_peaks import RUNS, bare, settings_of
from verl_memopt.plan.peaks import Sizes, predict

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")

COUNTED = {
    "ppo": {
        "old_log_prob": 13_908_947_968,
        "values": 13_384_204_800,
        "update_critic": 15_331_007_488,
        "update_actor": 16_460_662_272,
    },
    "rlt": {"old_log_prob": 12_340_724_736, "ref": 12_340_724_736, "reward": 12_022_754_816, "update_actor": 14_892_440_064},
    "grpo": {"old_log_prob": 10_364_592_640, "ref": 10_364_592_640, "update_actor": 12_916_307_968},
    "distill": {"teacher": 9_698_352_640, "old_log_prob": 9_956_524_032, "update_actor": 12_780_508_672},
    "top_k": {"teacher": 7_575_564_800, "old_log_prob": 7_980_395_008, "update_actor": 10_532_110_336},
    "graphs": {"old_log_prob": 10_943_416_320, "ref": 10_974_878_208, "update_actor": 13_237_408_768},
    "lora": {"old_log_prob": 1_798_430_720, "ref": 1_798_430_720, "update_actor": 3_217_374_848},
}
"""Run -> pass -> its peak in bytes at the shapes of Qwen3-0.6B and Qwen2.5-0.5B (docs/evidence/2026-11-26-launch-mends)."""
STEP = Case(MODELS["0.6b"], 1024, 896, groups=2)
BOUND = 0.03


@pytest.mark.parametrize("run", RUNS)
def test_the_peak_of_a_compiled_step_is_what_the_formulas_say_and_no_pass_holds_more(run):
    other, folder = size_of(MODELS["0.5b"]), Path("none")
    sizes = Sizes(size_of(STEP.shape), critic=other, student=other, teacher=other)
    foreseen = bare(predict(settings_of(run, STEP, folder, folder), sizes, tuple(COUNTED[run]), "cuda").phases)
    assert max(COUNTED[run].values()) <= max(foreseen.values()) <= (1 + BOUND) * max(COUNTED[run].values())
    assert {phase: (size, foreseen[phase]) for phase, size in COUNTED[run].items() if size > foreseen[phase]} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("run", "dtype"), [*((run, "bfloat16") for run in RUNS), ("grpo", "fp32")])
def test_a_compiled_step_of_two_blocks_holds_what_the_formulas_say(run, dtype):
    dtypes = (*STEP.overrides, f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}")
    case = dataclasses.replace(STEP, shape=dataclasses.replace(STEP.shape, num_layers=2), overrides=dtypes)
    found = call_on_fake_gpu(
        "tests.virtual_gpu.compiled_peaks:count", run, case, dataclasses.replace(MODELS["0.5b"], num_layers=2)
    )
    counted, foreseen = found["counted"], found["foreseen"]
    assert max(counted.values()) <= max(foreseen.values()) <= (1 + BOUND) * max(counted.values())
