"""The Triton kernels and the fused loss on a real GPU, at real vocabulary sizes."""

import pytest
import torch

from megatron_kd.cli.bench_measure import Shape, gradients, in_double, make_case
from megatron_kd.cli.bench_methods import dense_divergence, dense_top_k
from megatron_kd.kernels import torch_twin
from megatron_kd.kernels.scale import scaled
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.signals import HiddenTeacher, TopKTeacher
from megatron_kd.vocab import VocabSpec
from tests.unit import kernel_cases as cases

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divergence", cases.DIVERGENCES)
@pytest.mark.parametrize("num_columns, num_true", [(128_256, 128_256), (5003, 4999), (64, 0)], ids=["Llama", "odd with padding", "no true column"])
def test_kernels_equal_their_twin(divergence, dtype, num_columns, num_true):
    check_kernels(cases.make_spec(divergence, num_true), num_columns, dtype)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_kernels_equal_their_twin_with_temperature_scale_and_softcap(divergence):
    spec = cases.make_spec(divergence, 9001, temperature=2.5, student=HeadTransform(scale=0.5, softcap=4.0), teacher=HeadTransform(scale=-1.3))
    check_kernels(spec, 9024, torch.bfloat16)


def check_kernels(spec, num_columns, dtype):
    from megatron_kd.kernels import triton_rows

    window = cases.make_window(37, num_columns, spec.num_true, dtype=dtype, device=CUDA)
    exact_window = [x.double() if x.is_floating_point() else x for x in window]
    exact = cases.chain(torch_twin, *exact_window, spec)
    twin, got = (cases.chain(kernels, *window, spec, joined_with=exact["joined"]) for kernels in (torch_twin, triton_rows))
    assert cases.worst_error(got, twin, exact) is None
    assert (got["grad"][:, spec.num_true:] == 0).all() and (got["grad"][3] == 0).all()
    tails = [cases.tail_chain(kernels, w[0], w[3], spec) for kernels, w in ((torch_twin, exact_window), (torch_twin, window), (triton_rows, window))]
    assert cases.worst_error(tails[2], tails[1], tails[0]) is None


@pytest.mark.parametrize("mode", ["tail_bucket", "renormalise", "none"])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_top_k_kernels_equal_their_twin_at_a_llama_vocabulary(divergence, mode):
    from megatron_kd.kernels import triton_rows

    spec = cases.make_spec(divergence, 128_200, temperature=2.5 if mode == "renormalise" else 1.0)
    window = cases.make_window(37, 128_256, spec.num_true, dtype=torch.bfloat16, device=CUDA)
    assert cases.top_k_error(triton_rows, window, cases.make_top_k(37, spec.num_true, 100, device=CUDA), mode, spec) is None


@pytest.mark.parametrize("source, target", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_scaled_gradients_are_rounded_once(source, target):
    x, c = torch.randn(1001, 4097, device=CUDA).to(source), torch.tensor(0.37, device=CUDA)
    assert torch.equal(scaled(x, c, torch.full_like(x, float("nan"), dtype=target)), (x.float() * c).to(target))


def ours(case, *, divergence=None, weights_N=None, **options):
    size = case.head_VH.shape[0]
    teacher = HiddenTeacher(rows_NH=case.teacher_NH, head_VH=case.teacher_head_VH)
    if divergence is None:
        teacher = TopKTeacher(ids_NK=case.ids_NK, log_probs_NK=case.log_probs_NK, tail_N=case.tail_N)
    return fused_linear_kd(case.student_NH, case.head_VH, teacher, labels_N=case.labels_N, weights_N=weights_N,
                           objective=Objective(divergence=divergence or "forward_kl", ce_weight=1.0),
                           vocab=VocabSpec(true_size=size, student_padded=size, teacher_padded=size), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divergence", [*cases.DIVERGENCES, None])
def test_loss_and_gradients_are_at_most_twice_as_far_from_float64_as_dense_torch(divergence, dtype):
    case = make_case(Shape(vocab=32_003, student_width=520, teacher_width=264), 700, top_k=50, device=CUDA, dtype=dtype)

    def dense(c):
        return dense_top_k(c) if divergence is None else dense_divergence(c, divergence)

    exact = gradients(dense, in_double(case))
    plain = gradients(dense, case).error(exact)
    got = gradients(lambda c: ours(c, divergence=divergence, window_rows=256, group_windows=2).loss_N.mean(), case).error(exact)
    assert got <= 2.0 * plain + 1e-6, f"{got:.2e} against {plain:.2e} of dense torch"


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd", None])
def test_nothing_in_forward_or_backward_waits_for_the_device(divergence):
    case = make_case(Shape(vocab=4096, student_width=64, teacher_width=64), 600, top_k=20, device=CUDA, dtype=torch.bfloat16)
    weights_N = torch.full((600,), 0.25, device=CUDA)
    ours(case, divergence=divergence, weights_N=weights_N, window_rows=256).loss_N.mean().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ours(case, divergence=divergence, weights_N=weights_N, window_rows=256)
        (out.loss_N * weights_N).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out.flags.check()


@pytest.mark.parametrize("divergence", ["forward_kl", None])
def test_peak_over_dx_does_not_grow_with_the_rows(divergence):
    def peak(num_rows):
        case = make_case(Shape(vocab=50_000, student_width=256, teacher_width=256), num_rows, top_k=20, device=CUDA, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours(case, divergence=divergence, window_rows=2048).loss_N.mean().backward()
        return torch.cuda.max_memory_allocated() - base - case.student_NH.numel() * 2

    assert peak(65_536) - peak(16_384) < 0.05 * 2**30 * 48 / 224, "must stay below 0.05 GiB from 32K to 256K rows"
