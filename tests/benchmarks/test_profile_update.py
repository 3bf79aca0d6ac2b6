"""Where the time of an update goes: kernels by their names, times of a trace, and the ratio to the device's peak."""

import json
import subprocess

import pytest
import torch

from benchmarks.gpu.profile_update import measured_peak, rate, stated_peak, summary, with_flops
from benchmarks.gpu.traces import Launch, busy_seconds, by_group, kernel_group, launches, operation_group, profiled, span_seconds
from benchmarks.gpu_cost.__main__ import LAUNCH_SECONDS
from tests.end_to_end.runs import ROOT, script_environment

NAMES = {
    "products": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "triton_tem_fused_mm_0",
    ],
    "attention": [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>>>>",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>>",
        "triton_poi_fused__to_copy_add_mul_silu_3",
    ],
    "reductions": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, sum_functor>>>",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>",
        "triton_red_fused__to_copy_logsumexp_mul_1",
        "void at_cuda_detail::cub::DeviceScanKernel<DeviceScanPolicy<long>::Policy600>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
    ],
    "copies H2D": ["Memcpy HtoD (Pinned -> Device)"],
    "copies D2H": ["Memcpy DtoH (Device -> Pinned)"],
    "copies D2D": [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 3, 64, 64>",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<3>, FusedAdam>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpScalarFunctor<float>>",
    ],
    "indexing": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>",
        "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16>(long*, c10::BFloat16*, long*, long)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<DeviceRadixSortPolicy<long, long, int>::Policy900>",
    ],
    "collectives": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    "other": ["Memset (Device)", "void some_vendor::unheard_of<float>()"],
}
"""As they stand in traces of A100s and H100s."""


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_a_kernel_is_in_its_group(group, name):
    assert kernel_group(name) == group


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mm", "products"), ("aten::matmul", "other"), ("aten::addmm", "products"), ("aten::baddbmm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"), ("aten::mul_", "elementwise"),
        ("aten::_log_softmax", "reductions"), ("aten::sum", "reductions"), ("aten::copy_", "copies D2D"),
        ("aten::_fused_adamw_", "optimizer"), ("aten::index_select", "indexing"), ("aten::view", "other"),
        ("c10d::_allgather_base_", "collectives"),
    ],
)  # fmt: skip
def test_an_operation_of_a_cpu_is_in_its_group(name, group):
    assert operation_group(name) == group


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


def test_only_what_occupies_the_device_is_a_launch():
    found = launches(TRACE)
    assert [launch.group for launch in found] == ["products", "elementwise", "copies H2D", "products"]
    shares = by_group(found)
    assert list(shares) == ["products", "elementwise", "copies H2D"]
    assert (shares["products"].launches, shares["products"].seconds) == (2, pytest.approx(50e-6))


def test_kernels_that_run_at_once_are_busy_once_and_gaps_are_idle():
    found = launches(TRACE)
    # 100 to 150, 180 to 200 and 210 to 220, of 100 to 220.
    assert busy_seconds(found) == pytest.approx(80e-6)
    assert span_seconds(found) == pytest.approx(120e-6)
    assert summary(found, [2.0], 6, 1, 1)["idle_share"] == pytest.approx(40 / 120)


def test_a_kernel_inside_a_longer_one_ends_nothing():
    found = [Launch("a", "other", 10.0, 0.0), Launch("b", "other", 1.0, 2.0), Launch("c", "other", 1.0, 9.5)]
    assert busy_seconds(found) == 10.5


def test_launches_are_counted_per_micro_batch_and_layer():
    found = summary(launches(TRACE), [3.0, 1.0, 2.0], flops=6, micro_batches=2, layers=2)
    assert (found["launches"], found["launches_per_micro_batch"], found["launches_per_layer"]) == (4, 2.0, 1.0)
    assert found["seconds"] == 2.0
    assert rate(found) == 3.0


def test_a_cpus_operations_are_counted_with_their_own_times():
    left = torch.randn(64, 64)
    shares = by_group(profiled(lambda: (left @ left).mul(2), torch.device("cpu")))
    assert (shares["products"].launches, shares["elementwise"].launches) == (1, 1)
    assert shares["products"].seconds > 0


def test_a_device_has_the_peak_of_its_own_model():
    assert stated_peak("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert stated_peak("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert stated_peak("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert stated_peak("NVIDIA GeForce RTX 5090", "bfloat16") == 209.5e12
    assert stated_peak("NVIDIA GeForce GTX 1080", "bfloat16") is None
    assert measured_peak(torch.device("cpu"), torch.float32, size=32, repeats=1) > 0


def record(*profiles):
    return {
        "device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "torch": "2.11.0", "stated_flops_per_second": 989.4e12,
        "measured_flops_per_second": 700e12, "model": {"name": "m", "num_layers": 2, "hidden_size": 8, "vocab_size": 320},
        "work": {"rows": 8, "group": 8, "prompt": 4, "response": 4}, "profiles": list(profiles),
    }  # fmt: skip


def profile(compiled, flops):
    return {"profile": "default", "compile": compiled, **summary(launches(TRACE), [2.0], flops, 1, 2)}


def test_a_compiled_profile_takes_the_operations_that_were_counted_uncompiled():
    found = [profile("off", 5), profile("on", None), {"profile": "default", "compile": "on", "error": "x"}]
    with_flops(found)
    assert [one.get("flops") for one in found] == [5, 5, None]


def test_the_profile_script_leaves_table_json_and_what_it_ran_on(tmp_path):
    out = tmp_path / "out"
    small = {"LAYERS": "1", "SHRINK": "64", "REPEATS": "1", "COMPILE": "off", "PROMPT": "64", "RESPONSE": "32"}
    env = script_environment(**small, OUT=str(out))
    command = ["bash", "benchmarks/gpu/profile.sh", "--groups", "1", "--group", "2"]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    profiles = json.loads((out / "profile.json").read_text())["profiles"]
    assert [(found["profile"], found["compile"]) for found in profiles] == [("default", "off"), ("constrained", "off")]
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
