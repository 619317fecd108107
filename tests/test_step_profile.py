"""`sgt-ds bench step --profile`: no moment is lost or counted twice, and each kernel has its part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from torch._C._autograd import DeviceType

from sgt_ds.cli.bench_step_profile import print_profiles
from sgt_ds.config import ModelConfig
from sgt_ds.errors import UserError
from sgt_ds.model import loss
from sgt_ds.training import PARTS, Row, Setting, StepProfile
from sgt_ds.training.bench import WARM_UP_STEPS, bench_step
from sgt_ds.training.kernel_parts import Work, own_times, part_of
from sgt_ds.training.step_profile import ReadSteps, work_of

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA

# As an H200 names them.
KERNELS = {
    "products": (
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_cgasize1x1x1_stage4_warpspecialized",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(cutlass_80::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>()",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float>()",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>()",
        "triton_tem_fused_mm_3",
        "aten::linear",
        "aten::addmm_",
        "mkl::_mkl_linear",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>()",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>()",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x128_1x1x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>()",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "triton_tem_fused_flex_attention_backward_1",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "compiled": (
        "triton_red_fused__to_copy_add_mul_pow_mean_rsqrt_4",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_backward_slice_backward_7",
        "triton_per_fused_embedding_dense_backward_index_put_0",
        "triton_poi_fused_mm_silu_mul_2",
        "## Call CompiledFxGraph fdnu3xguc7d5gkbecmtyr7adva2xnzftqjiurfq52rbev4nw7zho ##",
    ),
    "eager": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>>()",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>()",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>()",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::SoftMaxForwardEpilogue>()",
        "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>()",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long, long>>()",
        "aten::lerp_",
    ),
    "loss": (
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_0",
        "triton_red_fused__to_copy_logsumexp_sub_exp_1",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>()",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>()",
        "_liger_cross_entropy_kernel",
        "aten::_log_softmax_backward_data",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>()",
        "aten::_fused_adamw_",
    ),
    "collectives": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float",
        "c10d::allreduce_",
    ),
    "copies": (
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>()",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>()",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>()",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 3, 128, 1, 16, 8>()",
        "aten::view",
    ),
    "other": ("void some_library::unheard_of<float>()", "aten::unheard_of"),
}


@pytest.mark.parametrize(("part", "name"), [(p, name) for p in KERNELS for name in KERNELS[p]])
def test_a_kernel_lands_in_another_part(part: str, name: str) -> None:
    assert part_of(Work(name, 0, 1)) == part


def test_the_pointwise_work_of_loss_and_optimizer_counts_as_any_other() -> None:
    within_loss = ("Torch-Compiled Region: 3/0", "_ChunkedLoss")
    assert part_of(Work("triton_red_fused_exp_sub_0", 0, 1, within_loss)) == "loss"
    assert part_of(Work("nvjet_tst_128x256_64x4_1x2_h_bz_NNT", 0, 1, within_loss)) == "products"
    assert part_of(Work("aten::mul", 0, 1, ("Optimizer.step#AdamW.step",))) == "optimizer"


def test_a_moment_counts_twice_where_kernels_overlap() -> None:
    work = [
        Work("nvjet_tst_a", 0, 10),
        Work("triton_poi_b", 4, 14),  # a second stream: 4 to 10 are the first one's
        Work("ncclDevKernel_c", 2, 20),  # hidden until 14
        Work("Memset (Device)", 5, 6),  # hidden wholly
        Work("nvjet_tst_d", 30, 31),
        Work("nvjet_tst_e", 31, 32),
    ]
    assert own_times(work) == [10, 4, 6, 0, 1, 1]
    microseconds = 1e-6
    read = ReadSteps()
    read.add(40 * microseconds, work)
    found = read.mean("compiled", "vanilla")
    times = {part.part: part.seconds / microseconds for part in found.parts}
    expected = {"products": 12, "compiled": 4, "collectives": 6, "copies": 0, "idle": 18}
    assert times == pytest.approx({part: expected.get(part, 0) for part in PARTS})
    assert found.hidden_seconds == pytest.approx((6 + 12 + 1) * microseconds)
    assert {part.part: part.kernels for part in found.parts}["copies"] == 1


class Interval(NamedTuple):
    start: float = 0.0
    end: float = 1.0


@dataclass
class Event:
    """What torch's profiler tells of one kernel, launch or operation."""

    name: str
    device_type: DeviceType
    id: int
    cpu_parent: Event | None = None
    is_user_annotation: bool = False
    is_async: bool = False
    time_range: Interval = field(default_factory=Interval)


def test_a_gpu_kernel_is_lost_or_a_region_taken_for_one() -> None:
    loss_of = Event("_ChunkedLoss", CPU, 7)
    graph = Event("## Call CompiledFxGraph f ##", CPU, 8, loss_of, is_user_annotation=True)
    # Compiled code tells the profiler each kernel by its own name, on the host.
    told = Event("triton_red_fused_exp_sub_0", CPU, 9, graph)
    launch = Event("cuLaunchKernelEx", CPU, 21, told)
    events = [
        *(loss_of, graph, told, launch),
        Event("aten::mm", CPU, 22),  # an operation with the number of another kernel
        Event("triton_red_fused_exp_sub_0", CUDA, 21),
        Event("nvjet_tst_128x256_64x4_1x2_h_bz_NNT", CUDA, 22),
        replace(graph, device_type=CUDA),
    ]
    work = work_of(events, torch.device("cuda"))
    assert [each.name for each in work] == [
        "triton_red_fused_exp_sub_0",
        "nvjet_tst_128x256_64x4_1x2_h_bz_NNT",
    ]
    assert [part_of(each) for each in work] == ["loss", "products"]
    with pytest.raises(UserError, match="KINETO_LOG_LEVEL"):
        work_of(events[:5], torch.device("cuda"))


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    small = ("--preset", "tiny", "--seq-len", "32", "--micro-batch-size", "1", "--rounds", "1")
    command = [sys.executable, "-m", "sgt_ds", "bench", "step", *small, "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_parts_and_idle_are_not_the_step_or_loops_do_not_show() -> None:
    done = bench(
        *("--mode", "eager", "--micro-batches", "2", "--variants", "sgt:2", "--profile", "2"),
        "--json",
    )
    profile = json.loads(done.stdout)["profile"]
    assert (profile["steps"], profile["warm_up_steps"]) == (2, 1)
    cases = {case["case"]: case for case in profile["cases"]}
    assert list(cases) == ["vanilla", "sgt:2"]
    counts = {}
    for name, case in cases.items():
        assert [part["part"] for part in case["parts"]] == list(PARTS)
        assert sum(part["seconds"] for part in case["parts"]) == pytest.approx(case["step_seconds"])
        assert sum(part["step_ratio"] for part in case["parts"]) == pytest.approx(1)
        assert all(part["seconds"] >= 0 for part in case["parts"])
        for part in case["parts"]:
            assert sum(part["seconds_by_step"]) / 2 == pytest.approx(part["seconds"])
        largest = [kernel["seconds"] for kernel in case["kernels"]]
        assert len(largest) == 10
        assert largest == sorted(largest, reverse=True)
        assert case["unmatched"] == [], "an operation of the model that the table lacks"
        counts[name] = {part["part"]: part["kernels"] for part in case["parts"]}
    # Six layers; a pass has attention, two passes of few heads six products, each two gradients.
    passes, micro_batches = 3 * 2, 2
    assert counts["vanilla"]["attention"] == micro_batches * 6 * 2
    assert counts["sgt:2"]["attention"] == micro_batches * (6 + passes) * 2
    more = counts["sgt:2"]["products"] - counts["vanilla"]["products"]
    assert more == micro_batches * 3 * 6 * 3
    assert counts["sgt:2"]["optimizer"] == counts["vanilla"]["optimizer"] > 0
    steps = [case["step_seconds"] for case in cases.values()]
    added = [part["added"] for part in cases["sgt:2"]["parts"]]
    assert sum(part["seconds"] for part in added) == pytest.approx(steps[1] - steps[0])
    assert sum(part["step_ratio"] for part in added) == pytest.approx(steps[1] / steps[0] - 1)
    assert all(part["added"]["seconds"] == 0 for part in cases["vanilla"]["parts"])
    assert "profiler_start" not in done.stderr


def test_the_command_prints_no_table() -> None:
    printed = bench("--mode", "eager", "--variants", "sgt:1", "--profile", "1").stdout
    assert "sgt:1" in printed.partition("one step under the profiler")[2]


SHAPE = ModelConfig(
    hidden_size=512, intermediate_size=1536, num_layers=2, num_heads=4, vocab_size=1000
)


def measured(
    mode: str, *variants: str, steps: int = 1
) -> tuple[Sequence[Row], Sequence[StepProfile]]:
    """A bench of a shape whose products outweigh all else."""
    setting = Setting(
        model=SHAPE,
        variants=variants,
        layers=2,
        heads=2,
        entering=(),
        micro_batch_size=2,
        micro_batches=1,
        sequence_length=128,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rounds=1,
        modes=(mode,),
        profiled_steps=steps,
    )
    return bench_step(setting)


def test_a_profiler_that_sees_nothing_discards_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []

    def step(self: object, mode: str, *_: object) -> tuple[float, float]:
        steps.append(mode)
        return 0.5, 1.0

    monkeypatch.setattr("sgt_ds.training.bench._Stepper.step", step)
    monkeypatch.setattr("torch.profiler.profile.events", lambda self: None)
    with pytest.raises(UserError, match="the profiler saw nothing run on cpu"):
        measured("eager", "sgt:1")
    assert len(steps) == WARM_UP_STEPS + 1


def undisturbed(profile: StepProfile) -> dict[str, float]:
    """Seconds of each part in the step in which it took the least: other work may stop a step."""
    return {part.part: min(part.seconds_by_step) for part in profile.parts}


def test_products_are_not_the_most_or_the_table_lacks_a_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, profiles = measured("eager", "attention_loop:4", steps=3)
    vanilla, looping = map(undisturbed, profiles)
    busy = {part: seconds for part, seconds in vanilla.items() if part != "idle"}
    assert max(busy, key=lambda part: busy[part]) == "products"
    # 4 × 4·d² more of 4·d² + 3·d·f with f = 3·d: 2.2 times the products of the blocks.
    assert looping["products"] > 1.3 * vanilla["products"]
    assert looping["attention"] > 2 * vanilla["attention"]

    capsys.readouterr()
    print_profiles(rows, profiles)
    printed = capsys.readouterr().out
    labels = [label for label in PARTS.values() if f"\n{label} " in printed]
    unseen = {"compiled", "collectives", "other"}
    assert labels == [label for part, label in PARTS.items() if part not in unseen]
    for part in profiles[1].parts:
        if part.seconds:
            line = next(each for each in printed.splitlines() if each.startswith(PARTS[part.part]))
            assert f"{1000 * part.seconds:.3f}" in line
    assert "added ms" in printed
    assert "points: the same in percentage points of vanilla's step" in printed
    told = next(line for line in printed.splitlines() if line.startswith("nothing in: "))
    assert told == f"nothing in: {'; '.join(PARTS[part] for part in PARTS if part in unseen)}"
    print_profiles(rows, profiles[:1])
    alone = capsys.readouterr().out
    assert "matrix products" in alone
    assert "added ms" not in alone
    assert "points" not in alone


def test_compiled_code_on_a_cpu_is_lost_or_holds_the_products() -> None:
    vanilla = undisturbed(measured("compiled", steps=3)[1][0])
    assert vanilla["products"] > vanilla["compiled"] > 0
    assert vanilla["attention"] > 0


def test_the_chunked_loss_is_not_told_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 1 << 16)
    parts = {part.part: part for part in measured("eager")[1][0].parts}
    products = 3 * 5 * SHAPE.num_layers  # without the output matrix; each has two gradients
    chunks = loss.chunks_for(2 * 128, SHAPE.padded_vocab_size)
    assert chunks > 1
    assert parts["products"].kernels == products + 3 * chunks
    assert parts["loss"].kernels > 5 * chunks
