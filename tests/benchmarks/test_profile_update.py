"""Where the time of an update goes: kernels by their names, times of a trace, and the ratio to the device's peak."""

import json
import subprocess

import pytest
import torch

from benchmarks.gpu.profile_update import PROFILES, measured_peak, rate, stated_peak, summary
from benchmarks.gpu.traces import Launch, busy_seconds, by_group, kernel_group, launches, operation_group, profiled, span_seconds
from benchmarks.gpu_cost.__main__ import LAUNCH_SECONDS
from tests.end_to_end.runs import ROOT, script_environment

NAMES = {
    "products": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>",
        "triton_tem_fused_mm_0",
    ],
    "attention": [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    ],
    "elementwise": ["triton_poi_fused__to_copy_add_mul_silu_3"],
    "reductions": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, sum_functor>>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
    ],
    "copies H2D": ["Memcpy HtoD (Pinned -> Device)"],
    "copies D2H": ["Memcpy DtoH (Device -> Pinned)"],
    "copies D2D": [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<3>, FusedAdam>"
    ],
    "indexing": ["void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>"],
    "collectives": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    "other": ["Memset (Device)", "void some_vendor::unheard_of<float>()"],
}
"""As they stand in traces of A100s and H100s."""
OPERATIONS = {
    "aten::mm": "products", "aten::matmul": "other", "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::mul_": "elementwise", "aten::sum": "reductions", "aten::copy_": "copies D2D", "aten::_fused_adamw_": "optimizer",
    "aten::index_select": "indexing", "c10d::_allgather_base_": "collectives",
}  # fmt: skip


def test_a_kernel_and_an_operation_of_a_cpu_are_in_their_groups():
    assert {group: [name for name in names if kernel_group(name) != group] for group, names in NAMES.items()} == {
        group: [] for group in NAMES
    }
    assert {name: operation_group(name) for name in OPERATIONS} == OPERATIONS


def event(name, ts, dur, cat="kernel", **more):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **more}


TRACE = {
    "traceEvents": [
        event("nvjet_tst_128x256_64x4", 100.0, 40.0, tid=7),
        event("triton_poi_fused_add_0", 130.0, 20.0, tid=20),  # beside the product for 10 us
        event("Memcpy HtoD (Pinned -> Device)", 180.0, 20.0, cat="gpu_memcpy"),
        event("nvjet_tst_128x256_64x4", 210.0, 10.0),
        event("FSDP::pre_forward", 90.0, 500.0, cat="gpu_user_annotation"),
        event("cudaLaunchKernel", 80.0, 5.0, cat="cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_busy_time_gaps_and_launches_are_those_of_a_trace_counted_by_hand():
    found = launches(TRACE)
    assert [launch.group for launch in found] == ["products", "elementwise", "copies H2D", "products"]
    shares = by_group(found)
    assert list(shares) == ["products", "elementwise", "copies H2D"]
    assert (shares["products"].launches, shares["products"].seconds) == (2, pytest.approx(50e-6))
    # 100 to 150, 180 to 200 and 210 to 220, of 100 to 220.
    assert busy_seconds(found) == pytest.approx(80e-6)
    assert span_seconds(found) == pytest.approx(120e-6)
    said = summary(found, [3.0, 1.0, 2.0], flops=6, micro_batches=2, layers=2)
    assert said["idle_share"] == pytest.approx(40 / 120)
    assert (said["launches"], said["launches_per_micro_batch"], said["launches_per_layer"]) == (4, 2.0, 1.0)
    assert (said["seconds"], rate(said)) == (2.0, 3.0)
    # A kernel inside a longer one ends nothing.
    found = [Launch("a", "other", 10.0, 0.0), Launch("b", "other", 1.0, 2.0), Launch("c", "other", 1.0, 9.5)]
    assert busy_seconds(found) == 10.5


def test_a_cpus_operations_are_counted_with_their_own_times():
    left = torch.randn(64, 64)
    shares = by_group(profiled(lambda: (left @ left).mul(2), torch.device("cpu")))
    assert (shares["products"].launches, shares["elementwise"].launches) == (1, 1)
    assert shares["products"].seconds > 0


def test_a_device_has_the_peak_of_its_own_model():
    assert stated_peak("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert stated_peak("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert stated_peak("NVIDIA GeForce GTX 1080", "bfloat16") is None
    assert measured_peak(torch.device("cpu"), torch.float32, size=32, repeats=1) > 0


@pytest.mark.slow
def test_the_profile_script_leaves_table_json_and_what_it_ran_on(tmp_path):
    out = tmp_path / "out"
    small = {"LAYERS": "1", "SHRINK": "64", "REPEATS": "1", "COMPILE": "off", "PROMPT": "64", "RESPONSE": "32"}
    env = script_environment(**small, OUT=str(out))
    command = ["bash", "benchmarks/gpu/profile.sh", "--groups", "1", "--group", "2"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    profiles = json.loads((out / "profile.json").read_text())["profiles"]
    assert [(found["profile"], found["compile"]) for found in profiles] == [(name, "off") for name in PROFILES]
    for found in profiles:
        assert found["groups"]["products"]["launches"] > 0
        assert found["groups"]["attention"]["launches"] > 0
        assert found["flops"] > 0
    assert "% of" in (out / "profile.txt").read_text()
    assert "benchmarks.gpu.profile_update" in (out / "machine.txt").read_text()
    # Beside what was measured is what is counted without a GPU, marked as an estimate.
    counted, printed = json.loads((out / "counted.json").read_text()), (out / "counted.txt").read_text()
    (update,) = counted["updates"]
    assert counted["estimated"] is True
    assert update["launches"] == sum(cost["launches"] for cost in update["ops"].values()) > 0
    assert update["seconds"]["RTX 4090"] >= update["launches"] * LAUNCH_SECONDS
    assert "Estimated" in printed
    assert f"{update['launches']:,}" in printed
