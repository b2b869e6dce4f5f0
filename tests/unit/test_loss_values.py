"""The fused loss on one shard equals the dense float64 reference: values, and every gradient in size and direction.

Upstream gradient 0.37, unequal padding with garbage in it, rows with weight 0, a row without label, windows that do not divide rows
(29 rows in windows of 8, 7 of them in the last group): all of these are in every Case (loss/check.py).
"""

from dataclasses import replace

import pytest
import torch

from megatron_kd.kernels import topk_twin, torch_twin
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss import check
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import DIVERGENCES, Objective
from megatron_kd.loss.signals import HiddenTeacher, LogitsTeacher, TopKTeacher
from megatron_kd.vocab import VocabSpec

CAPPED = dict(bias=True, student_transform=HeadTransform(scale=0.9, softcap=8.0), teacher_transform=HeadTransform(scale=-1.1, softcap=6.0))


def assert_exact(case: check.Case, **options) -> None:
    """Every part within twice plain torch's own error in the case's dtype, with size and direction right."""
    tensors = check.build(case)
    results = check.compare_all(check.actual(case, tensors, **options), check.expected(case, tensors), check.plain(case, tensors), case.dtype)
    low = case.dtype == torch.bfloat16
    for name, result in results.items():
        assert result.passed, (case.name, name, result)
        assert abs(result.scale - 1) < (2e-2 if low else 1e-5), (case.name, name, result)
        assert result.cosine > (0.9995 if low else 1 - 1e-9), (case.name, name, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_equals_the_reference_with_ce(divergence, dtype):
    assert_exact(check.Case(name=divergence, objective=Objective(divergence=divergence, kd_weight=0.7, ce_weight=0.3), dtype=dtype))


@pytest.mark.parametrize("scaling", ["hinton", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_temperature_bias_scale_and_softcap_on_both_sides(divergence, scaling):
    objective = Objective(divergence=divergence, temperature=2.5, temperature_scaling=scaling, kd_weight=0.7, ce_weight=0.3)
    assert_exact(check.Case(name=divergence, objective=objective, **CAPPED))


@pytest.mark.parametrize("mode", ["tail_bucket", "renormalise", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_top_k_of_every_mode(divergence, mode):
    objective = Objective(divergence=divergence, top_k_mode=mode, kd_weight=0.7, ce_weight=0.3)
    assert_exact(check.Case(name=f"{divergence} {mode}", objective=objective, signal="top_k", **CAPPED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_k_with_labels_inside_and_outside_the_kept_tokens(dtype):
    """A label among the K shares their exact columns; one outside gets its own."""
    case = check.Case(name="labels", objective=Objective(ce_weight=0.5), signal="top_k", top_k=100, dtype=dtype)
    inside = (check.top_k_targets(case, tensors := check.build(case)).ids_NK == tensors["labels"][:, None]).any(1)
    assert 5 < inside.sum() < 24
    assert_exact(case)


def test_renormalised_top_k_takes_a_temperature():
    assert_exact(check.Case(name="t", objective=Objective(top_k_mode="renormalise", temperature=2.0), signal="top_k"))


def test_top_k_with_every_column_kept_equals_the_full_divergence():
    full = check.Case(name="all", true_size=40, student_padded=48, teacher_padded=40, objective=Objective(ce_weight=0.3))
    tensors = check.build(full)
    want = check.expected(full, tensors)
    got = check.actual(replace(full, signal="top_k", top_k=40), tensors)
    for name, part in got.parts().items():
        torch.testing.assert_close(part.double(), want.parts()[name], rtol=1e-5, atol=1e-5 * want.parts()[name].abs().max().item())


@pytest.mark.parametrize("end, name", [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_jsd_end_points_are_the_kls(end, name):
    case = check.Case(name="end", objective=Objective(divergence="jsd", beta=end))
    tensors = check.build(case)
    got = check.actual(case, tensors)
    want = check.actual(replace(case, objective=Objective(divergence=name)), tensors)
    assert torch.equal(got.loss_N, want.loss_N) and torch.equal(got.dw_VH, want.dw_VH)


@pytest.mark.parametrize("skewed, name", [("skew_forward_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")])
def test_skewed_kls_are_the_plain_ones_at_0_and_lean_there(skewed, name):
    case = check.Case(name="end", dtype=torch.float64, objective=Objective(divergence=name))
    tensors = check.build(case)
    want, end, near = (check.actual(replace(case, objective=objective), tensors) for objective in (
        case.objective, Objective(divergence=skewed, skew=0.0), Objective(divergence=skewed, skew=1e-9)))
    assert torch.equal(end.loss_N, want.loss_N) and torch.equal(end.dw_VH, want.dw_VH)
    torch.testing.assert_close(near.kd_N, want.kd_N, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta, name", [(1e-7, "forward_kl"), (1 - 1e-7, "reverse_kl")])
def test_jsd_leans_to_the_documented_side(beta, name):
    case = check.Case(name="limit", dtype=torch.float64, objective=Objective(divergence="jsd", beta=beta))
    tensors = check.build(case)
    kl = check.actual(replace(case, objective=Objective(divergence=name)), tensors).kd_N
    jsd = check.actual(case, tensors).kd_N
    torch.testing.assert_close(jsd / min(beta, 1 - beta), kl, rtol=5e-2, atol=0)


@pytest.mark.parametrize("signal", ["logits", "labels"])
def test_dense_logits_and_labels_alone(signal):
    objective = Objective(ce_weight=0.3) if signal == "logits" else Objective(kd_weight=0.0, ce_weight=0.8)
    assert_exact(check.Case(name=signal, signal=signal, objective=objective, **CAPPED))


@pytest.mark.parametrize("weights", ["ones", "quarter", "zero"])
def test_row_weights(weights):
    assert_exact(check.Case(name=weights, weights=weights, objective=Objective(ce_weight=0.3)))


@pytest.mark.parametrize("window_rows, group_windows", [(1, 1), (29, 1), (64, 3), (10, 2), (5, 100)])
def test_any_window_gives_the_same_numbers(window_rows, group_windows):
    assert_exact(check.Case(name="window", objective=Objective(ce_weight=0.3)), window_rows=window_rows, group_windows=group_windows)


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_few_rows_and_none(num_rows):
    case = check.Case(name="few", num_rows=num_rows, weights="ones", objective=Objective(ce_weight=0.3))
    if num_rows:
        assert_exact(case)
    tensors = check.build(case)
    got = check.actual(case, tensors)
    assert got.dx_NH.shape == (num_rows, case.hidden_s) and torch.isfinite(got.dw_VH).all()
    assert num_rows or not got.dw_VH.any()


def test_gradients_in_backward_take_any_upstream_gradient():
    case = check.Case(name="any", objective=Objective(ce_weight=0.3))
    assert_exact(case, gradients="in_backward")
    tensors = check.build(case)
    upstream = torch.randn(case.num_rows, generator=torch.Generator().manual_seed(2))
    want = check.expected(case, {**tensors, "weights": upstream})
    vocab = VocabSpec(true_size=case.true_size, student_padded=case.student_padded, teacher_padded=case.teacher_padded)
    x, head = tensors["x"].clone().requires_grad_(), tensors["head"].clone().requires_grad_()
    out = fused_linear_kd(x, head, check.teacher_for(case, tensors, vocab, 0), vocab=vocab, objective=case.objective, labels_N=tensors["labels"],
                          gradients="in_backward", window_rows=8)
    out.loss_N.backward(check.UPSTREAM * upstream)
    torch.testing.assert_close(x.grad.double(), want.dx_NH, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.grad.double(), want.dw_VH, rtol=1e-4, atol=1e-6)


def test_inputs_need_not_be_contiguous():
    case = check.Case(name="strided", objective=Objective(ce_weight=0.3))
    tensors = check.build(case)
    strided = {**tensors, "x": tensors["x"].t().contiguous().t(), "head": tensors["head"].repeat(1, 2)[:, :case.hidden_s],
               "t": tensors["t"].repeat_interleave(2, 0)[::2], "weights": tensors["weights"].repeat_interleave(2)[::2]}
    assert not any(strided[name].is_contiguous() for name in ("x", "head", "t", "weights"))
    got, want = check.actual(case, strided), check.expected(case, tensors)
    for name, part in got.parts().items():
        torch.testing.assert_close(part.double(), want.parts()[name], rtol=1e-4, atol=1e-5 * want.parts()[name].abs().max().item())


def test_logits_teacher_may_leave_tokens_out_with_minus_infinity():
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = float("-inf")
    x, head = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(), torch.randn(20, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    vocab = VocabSpec(true_size=20, student_padded=20, teacher_padded=20)
    out = fused_linear_kd(x, head, LogitsTeacher(logits_NV=logits), vocab=vocab, objective=Objective())
    out.loss_N.sum().backward()
    want = torch.nn.functional.kl_div((x @ head.t()).log_softmax(1), logits.softmax(1), reduction="none").sum(1)
    torch.testing.assert_close(out.loss_N, want)
    torch.testing.assert_close(x.grad, torch.autograd.grad(want.sum(), x)[0])


def test_top_k_ids_may_pass_two_to_the_31():
    """Ids are global and 64-bit; on this shard of a huge vocabulary they become small local columns."""
    start = 3_000_000_000
    ids = torch.tensor([[1, 4, 2], [0, 3, 5]])
    log_p = torch.tensor([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]).log()
    spec = Objective().pair_spec(6, HeadTransform(), HeadTransform())
    logits, tail, weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), torch.full((2,), 0.1), torch.ones(2)
    results = []
    for offset in (0, start):
        u, stats, joined, grad = logits.clone(), torch.empty(2, topk_twin.NUM_SCALARS + 3), torch.empty(2, topk_twin.NUM_JOINED), torch.empty(2, 3)
        topk_twin.top_k_take(u, ids + offset, None, offset, spec, stats)
        torch_twin.tail_stats(u, spec, stats[:, :2])
        topk_twin.top_k_join(stats[None], log_p, tail, None, "tail_bucket", spec, joined, grad)
        topk_twin.top_k_grad(u, joined, grad, ids + offset, None, weights, offset, spec)
        results.append((joined[:, topk_twin.KD], u))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert VocabSpec(true_size=2**32, student_padded=2**32, teacher_padded=2**32, tp=2**10).shard_range(1023)[1] == 2**32


def test_a_tail_below_float32s_resolution_of_1_keeps_its_loss_and_gradient():
    """The student's mass outside K is below 1e-9: 1 - sum would make it 0, its logarithm infinite and its columns' gradient 0."""
    gen = torch.Generator().manual_seed(3)
    x, head = torch.randn(5, 4, generator=gen), torch.randn(40, 4, generator=gen)
    head[:3] += 14.0 * torch.eye(4)[0]
    x[:, 0] = 2.0 + x[:, 0].abs()
    ids, log_p, tail = torch.arange(3).repeat(5, 1), torch.full((5, 3), 0.3).log(), torch.full((5,), 0.1)
    vocab, results = VocabSpec(true_size=40, student_padded=40, teacher_padded=40), []
    for dtype in (torch.float32, torch.float64):
        rows, weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, head))
        out = fused_linear_kd(rows, weight, TopKTeacher(ids_NK=ids, log_probs_NK=log_p, tail_N=tail), vocab=vocab, objective=Objective())
        out.loss_N.sum().backward()
        results.append((out.loss_N.detach().double(), weight.grad.double()))
    (loss, grad), (exact, exact_grad) = results
    outside = 1 - (x.double() @ head.double().t()).softmax(1)[:, :3].sum(1)
    assert outside.max() < 1e-9 and (out.student_kept_N > 1 - 1e-9).all()
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    assert exact_grad[3:].abs().max() > 1e-2
    torch.testing.assert_close(grad, exact_grad, rtol=1e-4, atol=1e-6)


def test_kept_masses_are_reported():
    case = check.Case(name="kept", signal="top_k")
    tensors = check.build(case)
    vocab = VocabSpec(true_size=case.true_size, student_padded=case.student_padded, teacher_padded=case.teacher_padded)
    teacher = check.top_k_targets(case, tensors)
    out = fused_linear_kd(tensors["x"], tensors["head"], teacher, vocab=vocab, objective=case.objective)
    log_q = (tensors["x"].double() @ tensors["head"].double().t())[:, :case.true_size].log_softmax(1)
    torch.testing.assert_close(out.student_kept_N.double(), log_q.gather(1, teacher.ids_NK).exp().sum(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.teacher_kept_N, teacher.log_probs_NK.exp().sum(1), rtol=1e-5, atol=1e-6)


def test_evaluation_gives_the_same_values_without_gradients():
    case = check.Case(name="eval", objective=Objective(ce_weight=0.3))
    tensors = check.build(case)
    vocab = VocabSpec(true_size=case.true_size, student_padded=case.student_padded, teacher_padded=case.teacher_padded)
    head = tensors["head"].clone().requires_grad_()
    arguments = dict(vocab=vocab, objective=case.objective, labels_N=tensors["labels"], window_rows=8)
    with torch.no_grad():
        quiet = fused_linear_kd(tensors["x"], head, check.teacher_for(case, tensors, vocab, 0), **arguments)
    loud = fused_linear_kd(tensors["x"], head, check.teacher_for(case, tensors, vocab, 0), **arguments)
    assert not quiet.loss_N.requires_grad and loud.loss_N.requires_grad
    assert torch.equal(quiet.loss_N, loud.loss_N.detach()) and not loud.kd_N.requires_grad


def test_gradient_of_hidden_rows_through_a_network_below():
    """dX continues into whatever made the rows, and the head of the teacher gets nothing."""
    gen = torch.Generator().manual_seed(4)
    below, head = torch.nn.Linear(5, 4), torch.randn(11, 4, generator=gen).requires_grad_()
    t, t_head = torch.randn(7, 3, generator=gen), torch.randn(11, 3, generator=gen).requires_grad_()
    inputs = torch.randn(7, 5, generator=gen)
    vocab = VocabSpec(true_size=11, student_padded=11, teacher_padded=11)
    fused_linear_kd(below(inputs), head, HiddenTeacher(rows_NH=t, head_VH=t_head), vocab=vocab, objective=Objective()).loss_N.sum().backward()
    got = below.weight.grad.clone()
    below.weight.grad = None
    torch.nn.functional.kl_div((below(inputs) @ head.t()).log_softmax(1), (t @ t_head.t()).softmax(1).detach(), reduction="sum").backward()
    torch.testing.assert_close(got, below.weight.grad)
    assert t_head.grad is None
