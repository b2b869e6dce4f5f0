"""What the fused loss refuses, what it promises to backward, and what happens to rows that are not finite."""

import pytest
import torch

from megatron_kd.errors import ConfigError, GradientContractError, NonFiniteTeacher, VocabMismatch
from megatron_kd.loss import check
from megatron_kd.loss.denominator import WEIGHT_UNITS, denominator_of, row_factors
from megatron_kd.loss.flags import DeviceFlags
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.scratch import HeadGradient
from megatron_kd.loss.signals import HiddenTeacher, TopKTeacher
from megatron_kd.vocab import VocabSpec

CASE = check.Case(name="contract", objective=Objective(ce_weight=0.3))
VOCAB = VocabSpec(true_size=CASE.true_size, student_padded=CASE.student_padded, teacher_padded=CASE.teacher_padded)


def call(**changes):
    """The case's call with single arguments replaced; returns (output, student rows, head)."""
    tensors = check.build(CASE)
    x, head = changes.pop("x", tensors["x"]).clone().requires_grad_(), changes.pop("head", tensors["head"]).clone().requires_grad_()
    arguments = dict(vocab=VOCAB, objective=CASE.objective, labels_N=tensors["labels"], weights_N=tensors["weights"], window_rows=8) | changes
    teacher = arguments.pop("teacher", check.teacher_for(CASE, tensors, VOCAB, 0))
    return fused_linear_kd(x, head, teacher, **arguments), x, head


def test_backward_takes_any_constant_times_the_weights():
    out, x, _ = call()
    weights = check.build(CASE)["weights"]
    out.loss_N.backward(-3.5e-6 * weights)
    small = x.grad.clone()
    out, x, _ = call()
    out.loss_N.backward(2.0 * weights)
    torch.testing.assert_close(small / -3.5e-6, x.grad / 2.0)


@pytest.mark.parametrize("wrong", ["mean", "one row", "masked row"])
def test_backward_refuses_other_gradients(wrong):
    out, *_ = call()
    weights = check.build(CASE)["weights"]
    upstream = {"mean": torch.full_like(weights, 1.0 / len(weights)), "one row": weights.clone(), "masked row": weights.clone()}[wrong]
    if wrong == "one row":
        upstream[1] *= 1.01
    if wrong == "masked row":
        assert weights[5] == 0
        upstream[5] = 1e-2
    with pytest.raises(GradientContractError, match="in_backward"):
        out.loss_N.backward(upstream)


def test_a_gradient_of_zero_is_a_constant():
    out, x, head = call()
    out.loss_N.backward(torch.zeros(CASE.num_rows))
    assert not x.grad.any() and not head.grad.any()


def test_second_backward_is_refused():
    out, *_ = call()
    weights = check.build(CASE)["weights"]
    out.loss_N.backward(weights, retain_graph=True)
    with pytest.raises(GradientContractError, match="second backward"):
        out.loss_N.backward(weights)


def test_head_gradient_is_delivered_once_with_its_constant_and_the_buffer_reused():
    main_grad, dummies = torch.zeros_like(check.build(CASE)["head"]), []

    def deliver(dw_VH, c):
        main_grad.addcmul_(dw_VH, c.expand_as(dw_VH))
        dummies.append(torch.zeros_like(main_grad))
        return dummies[-1]

    keeper, weights = HeadGradient(deliver), check.build(CASE)["weights"]
    for c in (0.37, 0.5):
        out, _, head = call(dw=keeper)
        out.loss_N.backward(c * weights)
        assert torch.equal(head.grad, torch.zeros_like(head))
    want = check.expected(CASE, check.build(CASE)).dw_VH * (0.87 / check.UPSTREAM)
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-4, atol=1e-5)
    assert keeper.num_buffers == 1


def test_two_forwards_before_their_backwards_do_not_share_a_buffer():
    keeper, weights = HeadGradient(), check.build(CASE)["weights"]
    outs = [call(dw=keeper), call(dw=keeper)]
    assert keeper.num_buffers == 2
    for out, _, _ in outs:
        out.loss_N.backward(check.UPSTREAM * weights)
    want = check.expected(CASE, check.build(CASE)).dw_VH
    for _, _, head in outs:
        torch.testing.assert_close(head.grad.double(), want, rtol=1e-4, atol=1e-5)


def test_reused_scratch_full_of_nan_does_not_leak_into_the_gradient():
    keeper = HeadGradient()
    head = check.build(CASE)["head"]
    buffer = keeper.acquire(head)
    buffer.fill_(float("nan"))
    keeper.release(buffer)
    out, _, head = call(dw=keeper)
    out.loss_N.backward(check.UPSTREAM * check.build(CASE)["weights"])
    assert torch.isfinite(head.grad).all()


@pytest.mark.parametrize("frozen", ["head", "rows"])
def test_a_frozen_side_gets_no_gradient_and_no_buffer(frozen):
    tensors, keeper = check.build(CASE), HeadGradient()
    x, head = tensors["x"].clone().requires_grad_(frozen != "rows"), tensors["head"].clone().requires_grad_(frozen != "head")
    out = fused_linear_kd(x, head, check.teacher_for(CASE, tensors, VOCAB, 0), vocab=VOCAB, objective=CASE.objective, labels_N=tensors["labels"],
                          weights_N=tensors["weights"], dw=keeper, window_rows=8)
    out.loss_N.backward(check.UPSTREAM * tensors["weights"])
    want = check.expected(CASE, tensors)
    kept, left = (x, head) if frozen == "head" else (head, x)
    torch.testing.assert_close(kept.grad.double(), want.dx_NH if frozen == "head" else want.dw_VH, rtol=1e-4, atol=1e-5)
    assert left.grad is None and keeper.num_buffers == 0


def test_teacher_rows_may_be_overwritten_after_forward():
    """The teacher's slot is free once forward returns: nothing of it is read in backward."""
    tensors = check.build(CASE)
    teacher = check.teacher_for(CASE, tensors, VOCAB, 0)
    out, x, _ = call(teacher=teacher)
    teacher.rows_NH.fill_(float("nan"))
    out.loss_N.backward(check.UPSTREAM * tensors["weights"])
    torch.testing.assert_close(x.grad.double(), check.expected(CASE, check.build(CASE)).dx_NH, rtol=1e-4, atol=1e-6)


def spoiled_teacher(kind: str, value: float):
    """The case's teacher with rows 3 and 20 not finite."""
    tensors = check.build(CASE)
    if kind == "hidden":
        tensors["t"][[3, 20], 5] = value
        return check.teacher_for(CASE, tensors, VOCAB, 0)
    top = check.top_k_targets(CASE, tensors)
    top.log_probs_NK[[3, 20], 2] = value
    return TopKTeacher(ids_NK=top.ids_NK, log_probs_NK=top.log_probs_NK, tail_N=top.tail_N)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["hidden", "top_k"])
def test_rows_that_are_not_finite_stop_by_default_with_their_count(kind, value):
    with pytest.raises(NonFiniteTeacher, match="= 2: must be 0"):
        call(teacher=spoiled_teacher(kind, value))


@pytest.mark.parametrize("kind", ["hidden", "top_k"])
def test_rows_that_are_not_finite_can_be_dropped_and_are_counted(kind):
    flags, weights = DeviceFlags(torch.device("cpu")), check.build(CASE)["weights"]
    out, x, head = call(teacher=spoiled_teacher(kind, float("nan")), on_nonfinite="drop_rows", flags=flags)
    out.loss_N.backward(weights)
    without = weights.clone()
    without[[3, 20]] = 0.0
    clean = check.build(CASE)
    teacher = check.top_k_targets(CASE, clean) if kind == "top_k" else check.teacher_for(CASE, clean, VOCAB, 0)
    want, x_want, head_want = call(teacher=teacher, weights_N=without)
    want.loss_N.backward(without)
    assert not out.loss_N[[3, 20]].any() and torch.equal(x.grad, x_want.grad) and torch.equal(head.grad, head_want.grad)
    assert flags.counts.tolist() == [2, 0, 0]
    with pytest.raises(NonFiniteTeacher, match="replica 3.*step 7"):
        flags.check(source="replica 3", where="step 7")
    flags.check()


def test_device_flags_raise_what_they_counted():
    flags = DeviceFlags(torch.device("cpu"))
    flags.add(1, torch.tensor(4))
    with pytest.raises(VocabMismatch, match="= 4"):
        flags.check()
    flags.add(2, torch.tensor(True))
    with pytest.raises(GradientContractError):
        flags.check()


@pytest.mark.parametrize("changes, error, text", [
    (dict(x=torch.zeros(29, 25)), ConfigError, "one width"),
    (dict(head=torch.zeros(241, 24)), VocabMismatch, "240 columns"),
    (dict(head=torch.zeros(240, 24, dtype=torch.bfloat16)), ConfigError, "torch.bfloat16"),
    (dict(teacher=None), ConfigError, "kd_weight"),
    (dict(labels_N=None), ConfigError, "ce_weight"),
    (dict(labels_N=torch.full((29,), 203)), VocabMismatch, "below the true vocabulary, 203"),
    (dict(labels_N=torch.full((29,), -1)), VocabMismatch, r"\[-1"),
    (dict(labels_N=torch.zeros(28, dtype=torch.long)), ConfigError, "28"),
    (dict(weights_N=torch.ones(28)), ConfigError, "one weight per row"),
    (dict(rows_per_rank=(28,)), ConfigError, "29 rows for rank 0"),
    (dict(dx_reduce="sum"), ConfigError, "all_reduce"),
    (dict(window_rows=-1), ConfigError, "window_rows"),
    (dict(backend="cuda"), ConfigError, "'auto', 'torch' or 'triton'"),
    (dict(vocab=VocabSpec(true_size=203, student_padded=240, teacher_padded=216, tp=2)), VocabMismatch, "tp_group"),
    (dict(head_bias_V=torch.zeros(239)), ConfigError, "240"),
    (dict(teacher=HiddenTeacher(rows_NH=torch.zeros(28, 40), head_VH=torch.zeros(203, 40))), ConfigError, "one teacher row per student row"),
    (dict(teacher=HiddenTeacher(rows_NH=torch.zeros(29, 40), head_VH=torch.zeros(203, 41))), ConfigError, "same teacher"),
    (dict(teacher=HiddenTeacher(rows_NH=torch.zeros(29, 40), head_VH=torch.zeros(202, 40))), VocabMismatch, "203 true columns"),
    (dict(teacher=TopKTeacher(ids_NK=torch.full((29, 2), 203), log_probs_NK=torch.zeros(29, 2), tail_N=torch.zeros(29))), VocabMismatch, "ids_NK"),
    (dict(teacher=TopKTeacher(ids_NK=torch.zeros(29, 2).long(), log_probs_NK=torch.zeros(29, 3), tail_N=torch.zeros(29))), ConfigError, "same rows"),
    (dict(teacher=TopKTeacher(ids_NK=torch.zeros(29, 2).long(), log_probs_NK=torch.zeros(29, 2), tail_N=torch.zeros(29)), objective=Objective(temperature=2.0)), ConfigError, "renormalise"),
])
def test_bad_input_is_refused_at_the_door(changes, error, text):
    with pytest.raises(error, match=text):
        call(**changes)


@pytest.mark.parametrize("numbers", [dict(divergence="kl"), dict(beta=1.5), dict(skew=1.0), dict(temperature=0.0), dict(kd_weight=-1.0), dict(top_k_mode="tail"),
                                     dict(temperature_scaling="t2")])
def test_objective_refuses_what_is_undefined(numbers):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        Objective(**numbers)


def test_denominators_count_rows_or_weights():
    weights = torch.tensor([[0.25, 0.0, 0.5], [0.0, 0.25, 0.25]])
    rows, total = denominator_of(weights, "rows"), denominator_of(weights, "weights")
    assert (rows.count.item(), rows.factor) == (4, 1.0) and not rows.count.is_floating_point()
    assert (total.count.item(), total.factor) == (int(1.25 * WEIGHT_UNITS), WEIGHT_UNITS)
    with pytest.raises(ConfigError):
        denominator_of(weights, "tokens")


@pytest.mark.parametrize("kind", ["rows", "weights"])
def test_one_denominator_over_unequal_micro_batches_is_not_a_mean_of_means(kind):
    weights, losses = [torch.full((1,), 0.25), torch.full((7,), 0.5)], [torch.tensor([8.0]), torch.arange(7.0)]
    factors = row_factors([denominator_of(w, kind) for w in weights])
    got = sum(f * (w * loss).sum() for f, w, loss in zip(factors, weights, losses, strict=True))
    together = (torch.cat(weights) * torch.cat(losses)).sum() / (8 if kind == "rows" else torch.cat(weights).sum())
    assert got.item() == pytest.approx(together.item(), rel=1e-6)
    means = sum((w * loss).sum() / (len(w) if kind == "rows" else w.sum()) for w, loss in zip(weights, losses, strict=True)) / 2
    assert abs(means - together) > 0.1 * together


def test_denominator_of_nothing_is_zero_and_divides_nothing():
    assert [f.item() for f in row_factors([denominator_of(torch.zeros(4), "rows")] * 2)] == [0.0, 0.0]


def test_triton_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        call(backend="triton")
