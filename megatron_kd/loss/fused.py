"""fused_linear_kd: the distillation loss from hidden states and head shards, without a [rows, vocabulary] matrix of either model.

The one public function of this package; needs no Megatron. Forms dX and dW in forward, while a window's logits exist, with the
weights that the caller's loss function will apply; backward multiplies by the one constant it brings. Owns the autograd
Function and the checks at the door; the window loop is loss/passes.py. Letters: N rows, V columns of this rank's vocabulary
shard (padding included), H the student's hidden width. Derivation, memory and FLOPs: docs/loss.md.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from megatron_kd.errors import ConfigError, GradientContractError, VocabMismatch, rule
from megatron_kd.kernels.dispatch import Backend, kernels_for
from megatron_kd.kernels.scale import scaled
from megatron_kd.kernels.spec import ELSEWHERE, NO_LABEL
from megatron_kd.kernels.torch_twin import accumulate_dtype
from megatron_kd.loss.flags import BAD_GRADIENTS, BAD_IDS, DeviceFlags, contract_message
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.passes import Wanted, run_windows
from megatron_kd.loss.reduce import group_rank, group_size
from megatron_kd.loss.scratch import HeadGradient
from megatron_kd.loss.signals import HeadTransform, HiddenTeacher, Teacher, TopKTeacher
from megatron_kd.loss.sizes import chosen_windows, default_windows
from megatron_kd.loss.steps import Outcome, Problem
from megatron_kd.loss.window import plan_windows
from megatron_kd.vocab import VocabSpec

IGNORE_LABEL = -100
"""Label of a row that has no cross-entropy."""
CONTRACT_TOLERANCE = 1e-4
"""Largest |g_t - c w_t| over |c| max|w| that still counts as one constant; g is a float32 product, so rounding stays below 1e-6."""


@dataclass(frozen=True, kw_only=True)
class KDOutput:
    """Per-row results, float32 (float64 for float64 inputs), in the order of the rows given; equal on every rank of tp_group."""

    loss_N: torch.Tensor
    """kd_weight * kd_N + ce_weight * ce_N; carries the gradient. Not weighted by weights_N."""
    kd_N: torch.Tensor
    """The divergence with its temperature factor, detached."""
    ce_N: torch.Tensor
    """Cross-entropy, detached; 0 where there is no label."""
    student_kept_N: torch.Tensor | None
    """Top-K: the student's probability on the kept tokens, detached."""
    teacher_kept_N: torch.Tensor | None
    """Top-K: the teacher's probability on the kept tokens, 1 - tail."""
    flags: DeviceFlags
    """What went wrong on the device; `flags.check()` waits and raises."""


def fused_linear_kd(student_NH: torch.Tensor, student_head_VH: torch.Tensor, teacher: Teacher | None, *, vocab: VocabSpec, objective: Objective,
                    labels_N: torch.Tensor | None = None, weights_N: torch.Tensor | None = None,
                    tp_group: dist.ProcessGroup | None = None, rows_per_rank: tuple[int, ...] | None = None,
                    dx_reduce: Literal["all_reduce", "none"] = "all_reduce", head_bias_V: torch.Tensor | None = None,
                    student_transform: HeadTransform = HeadTransform(), dw: HeadGradient | None = None,
                    gradients: Literal["in_forward", "in_backward"] = "in_forward", on_nonfinite: Literal["stop", "drop_rows"] = "stop",
                    flags: DeviceFlags | None = None, window_rows: int | None = None, group_windows: int | None = None,
                    backend: Backend = "auto") -> KDOutput:
    """L_t = kd_weight KD_t + ce_weight CE_t for N rows, with gradients for student_NH, student_head_VH and head_bias_V.

    student_NH       [N, H] all rows, equal on every rank; with `rows_per_rank` (sequence parallelism) this rank's rows only.
    student_head_VH  [V, H] this rank's rows of the output layer, V = vocab.shard_size, student_NH's dtype.
    teacher          HiddenTeacher, LogitsTeacher or TopKTeacher with rows for all N (HiddenTeacher.own_rows: for this rank's rows);
                     None: cross-entropy alone (kd_weight 0).
    labels_N         int [N] global token ids; IGNORE_LABEL (-100): no cross-entropy for the row. Needed where ce_weight > 0.
    weights_N        [N] the factor that your loss function applies to each row, up to one constant; None: 1. A row with weight 0
                     costs as much as any other and gets gradient 0: leave such rows out instead.
    tp_group         ranks that hold the vocabulary shards, in shard order; None: one shard (vocab.tp == 1).
    rows_per_rank    sequence parallelism: rows that each rank passes; the N rows are rank 0's, then rank 1's, and so on. dX is then
                     reduce-scattered.
    dx_reduce        "all_reduce" sums dX over the shards; "none" leaves this shard's part, for a caller that reduces it.
    head_bias_V      [V] added to the student's raw logits.
    dw               takes the head's gradient (loss/scratch.py); None: autograd gets it.
    gradients        "in_forward": backward must bring c * weights_N with one constant c, checked. "in_backward": any gradient, at the
                     price of the two projections again.
    on_nonfinite     teacher rows with NaN or infinity: "stop" raises (on CUDA when `flags.check()` is called), "drop_rows" gives
                     them loss 0 and gradient 0 and counts them in `flags`.
    flags            your own counters over many calls; None: fresh ones.
    window_rows      rows whose teacher logits exist at once; None: loss/sizes.py.
    group_windows    windows whose student logits exist at once: one projection, one dX and one dW for all of them; None: loss/sizes.py.

    Errors: ConfigError, VocabMismatch at the door; NonFiniteTeacher; GradientContractError in backward (on CUDA the gradients
    become NaN and `flags.check()` raises). Cost: 2 V (H_t + 3 H) FLOPs a row, without gradients 2 V (H_t + H).
    """
    group_tp, rank = group_size(tp_group), group_rank(tp_group)
    num_rows = student_NH.shape[0] if rows_per_rank is None else sum(rows_per_rank)
    num_true = vocab.num_true(rank)
    _check_door(student_NH, student_head_VH, head_bias_V, vocab, group_tp, rank, rows_per_rank)
    teacher, objective = _check_teacher(teacher, objective, num_rows, num_true, student_NH, rows_per_rank)
    if dx_reduce not in ("all_reduce", "none"):
        raise ConfigError(rule("dx_reduce", dx_reduce, "must be 'all_reduce' or 'none'", "Use 'all_reduce' unless you reduce dX yourself"))
    device = student_NH.device
    flags = flags or DeviceFlags(device)
    acc = accumulate_dtype(student_NH.dtype)
    labels = _local_labels(labels_N, objective, num_rows, vocab, rank, flags)
    if isinstance(teacher, TopKTeacher):
        _flag_ids((teacher.ids_NK < 0) | (teacher.ids_NK >= vocab.true_size), teacher.ids_NK, vocab, flags, "teacher.ids_NK")
    if weights_N is not None and weights_N.shape != (num_rows,):
        raise ConfigError(rule("weights_N", tuple(weights_N.shape), f"must be [{num_rows}]", "Give one weight per row"))
    weights = torch.ones(num_rows, dtype=acc, device=device) if weights_N is None else weights_N.detach().to(device, acc)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (student_NH, student_head_VH, head_bias_V))
    rows_of_window, windows_of_group = chosen_windows(window_rows, group_windows, default_windows(
        student_head_VH.shape[0], device.type, teacher_logits=isinstance(teacher, HiddenTeacher), tp=group_tp, train=train))
    teacher_transform = getattr(teacher, "transform", HeadTransform())
    problem = Problem(
        plan=plan_windows(num_rows, rows_of_window, rows_per_rank), group_windows=windows_of_group,
        spec=objective.pair_spec(num_true, student_transform, teacher_transform), objective=objective,
        kernels=kernels_for(device, student_NH.dtype, backend), teacher=teacher, head_VH=student_head_VH.detach(),
        bias_V=None if head_bias_V is None else head_bias_V.detach(), labels_N=labels, weights_N=weights, shard_start=vocab.shard_range(rank)[0],
        group=tp_group, reduce_dx=dx_reduce == "all_reduce", drop_rows=on_nonfinite == "drop_rows", flags=flags)
    loss, kd, ce, kept = _FusedLinearKD.apply(student_NH, student_head_VH, head_bias_V, problem, dw or HeadGradient(),
                                              gradients == "in_forward", torch.is_grad_enabled())
    if device.type == "cpu" and not problem.drop_rows:
        _raise_nonfinite(flags)
    sparse = isinstance(teacher, TopKTeacher) and teacher.ids_NK.shape[1] > 0
    return KDOutput(loss_N=loss, kd_N=kd, ce_N=ce, flags=flags, student_kept_N=kept if sparse else None,
                    teacher_kept_N=1.0 - teacher.tail_N.to(acc) if sparse else None)


class _FusedLinearKD(torch.autograd.Function):
    """(loss_N, kd_N, ce_N, kept_N) of a Problem; only loss_N is differentiable, by student rows, head and bias."""

    @staticmethod
    def forward(ctx, student_NH, head_VH, bias_V, problem: Problem, dw: HeadGradient, in_forward: bool, grad_enabled: bool):
        needs = [grad_enabled and tensor is not None and tensor.requires_grad for tensor in (student_NH, head_VH, bias_V)]
        student = student_NH.detach()
        wanted = _wanted(problem, dw, needs) if in_forward else Wanted()
        outcome = run_windows(problem, student, wanted)
        ctx.dw, ctx.needs, ctx.dtypes = dw, needs, (head_VH.dtype, None if bias_V is None else bias_V.dtype)
        ctx.weights_N, ctx.flags = problem.weights_N, problem.flags
        # What was formed in forward needs nothing of the teacher any more: its rows may be overwritten before backward.
        ctx.formed = (outcome.dx, wanted.dw_VH, wanted.dbias_V) if in_forward else None
        ctx.again = None if in_forward else (problem, student)
        kept = outcome.kd_N.new_zeros(0) if outcome.student_kept_N is None else outcome.student_kept_N
        ctx.mark_non_differentiable(outcome.kd_N, outcome.ce_N, kept)
        ctx.set_materialize_grads(False)
        return _total(problem.objective, outcome), outcome.kd_N, outcome.ce_N, kept

    @staticmethod
    def backward(ctx, grad_N, *_):
        nothing = (None,) * 7
        if grad_N is None or not any(ctx.needs):
            return nothing
        if ctx.formed == ():
            raise GradientContractError("fused_linear_kd: a second backward through one forward; the gradients are formed once and handed over. "
                                        "Call fused_linear_kd again, or use gradients='in_backward'")
        if ctx.formed is None:
            problem, student = ctx.again
            wanted = _wanted(problem, ctx.dw, ctx.needs)
            outcome = run_windows(replace(problem, weights_N=grad_N.contiguous()), student, wanted)
            dx, dw_VH, dbias, c = outcome.dx, wanted.dw_VH, wanted.dbias_V, grad_N.new_ones(())
        else:
            dx, dw_VH, dbias = ctx.formed
            ctx.formed = ()
            c = _constant(grad_N, ctx.weights_N, ctx.flags)
            dx = None if dx is None else scaled(dx, c, dx)
        head_grad = None if dw_VH is None else ctx.dw.deliver(dw_VH, c, ctx.dtypes[0])
        bias_grad = None if dbias is None else (dbias * c).to(ctx.dtypes[1])
        return (dx, head_grad, bias_grad, *nothing[3:])


def _wanted(problem: Problem, dw: HeadGradient, needs: list[bool]) -> Wanted:
    head = problem.head_VH
    dbias = torch.empty(head.shape[0], dtype=accumulate_dtype(head.dtype), device=head.device) if needs[2] else None
    return Wanted(dx=needs[0], dw_VH=dw.acquire(head) if needs[1] else None, dbias_V=dbias)


def _total(objective: Objective, outcome: Outcome) -> torch.Tensor:
    if objective.ce_weight == 0.0:
        return outcome.kd_N * objective.kd_weight
    if objective.kd_weight == 0.0:
        return outcome.ce_N * objective.ce_weight
    return outcome.kd_N * objective.kd_weight + outcome.ce_N * objective.ce_weight


def _constant(grad_N: torch.Tensor, weights_N: torch.Tensor, flags: DeviceFlags) -> torch.Tensor:
    """The c of grad = c * weights, 0-dim on the device. Where no c fits: raises on the CPU, else counts it and returns NaN."""
    grad = grad_N.to(weights_N.dtype)
    square = weights_N.square().sum()
    c = torch.where(square > 0, (grad * weights_N).sum() / square.clamp_min(torch.finfo(square.dtype).tiny), 0.0)
    if not grad.numel():
        return c
    off = (grad - c * weights_N).abs().amax()
    broken = ~(off <= CONTRACT_TOLERANCE * (c * weights_N).abs().amax())
    if grad.device.type == "cpu" and bool(broken):
        raise GradientContractError(contract_message(f"off by {off.item():.3g} with c = {c.item():.6g}"))
    flags.add(BAD_GRADIENTS, broken)
    return torch.where(broken, float("nan"), c)


def _check_door(student_NH, head_VH, bias_V, vocab: VocabSpec, tp: int, rank: int, rows_per_rank) -> None:
    if vocab.tp != tp:
        raise VocabMismatch(rule("vocab.tp", vocab.tp, f"must be the size of tp_group, {tp}", "Pass the group that holds the vocabulary shards"))
    if student_NH.dim() != 2 or head_VH.dim() != 2 or head_VH.shape[1] != student_NH.shape[1]:
        raise ConfigError(rule("student_NH, student_head_VH", (tuple(student_NH.shape), tuple(head_VH.shape)), "must be [N, H] and [V, H]",
                               "Flatten the rows; hidden states and head must have one width"))
    if head_VH.shape[0] != vocab.shard_size:
        raise VocabMismatch(rule("student_head_VH", tuple(head_VH.shape), f"must hold the shard's {vocab.shard_size} columns",
                                 "VocabSpec.student_padded is the output layer's size over all ranks"))
    if head_VH.dtype != student_NH.dtype or not student_NH.is_floating_point():
        raise ConfigError(rule("student_head_VH.dtype", head_VH.dtype, f"must be the hidden states' dtype, {student_NH.dtype}", "Cast one of them"))
    if bias_V is not None and bias_V.shape != (head_VH.shape[0],):
        raise ConfigError(rule("head_bias_V", tuple(bias_V.shape), f"must be [{head_VH.shape[0]}]", "Give this shard's part of the bias"))
    if rows_per_rank is not None and (len(rows_per_rank) != tp or rows_per_rank[rank] != student_NH.shape[0]):
        raise ConfigError(rule("rows_per_rank", rows_per_rank, f"must name {tp} ranks, and {student_NH.shape[0]} rows for rank {rank}",
                               "Count the rows of the full loss mask in each rank's part of the sequence"))


def _check_teacher(teacher: Teacher | None, objective: Objective, num_rows: int, num_true: int, student_NH: torch.Tensor,
                   rows_per_rank: tuple[int, ...] | None) -> tuple[Teacher, Objective]:
    if objective.kd_weight == 0.0 or teacher is None:
        if objective.kd_weight != 0.0:
            raise ConfigError(rule("teacher", None, "is needed where kd_weight is not 0", "Pass a teacher, or Objective(kd_weight=0, ce_weight=1)"))
        empty = student_NH.new_empty(num_rows, 0, dtype=torch.float32)
        return TopKTeacher(ids_NK=empty.long(), log_probs_NK=empty, tail_N=empty.new_zeros(num_rows)), objective
    own_rows = isinstance(teacher, HiddenTeacher) and teacher.own_rows
    if own_rows and rows_per_rank is None:
        raise ConfigError(rule("teacher.own_rows", True, "needs rows_per_rank, which says which rows each rank holds", "Pass all teacher rows, or rows_per_rank"))
    teacher.check(student_NH.shape[0] if own_rows else num_rows, num_true)
    if isinstance(teacher, TopKTeacher) and objective.temperature != 1.0 and objective.top_k_mode != "renormalise":
        raise ConfigError(rule("temperature", objective.temperature, f"must be 1 with top-K targets and top_k_mode = {objective.top_k_mode!r}",
                               "The tail's mass at another temperature is not known: use 1.0, top_k_mode='renormalise', or hidden states"))
    return teacher, objective


def _local_labels(labels_N, objective: Objective, num_rows: int, vocab: VocabSpec, rank: int, flags: DeviceFlags) -> torch.Tensor | None:
    """int32 columns of this shard, ELSEWHERE or NO_LABEL; None where no row has a cross-entropy."""
    if labels_N is None:
        if objective.ce_weight != 0.0:
            raise ConfigError(rule("labels_N", None, "is needed where ce_weight is not 0", "Pass labels, or Objective(ce_weight=0)"))
        return None
    if labels_N.shape != (num_rows,):
        raise ConfigError(rule("labels_N", tuple(labels_N.shape), f"must be [{num_rows}]", "Give one label per row"))
    ignored = labels_N == IGNORE_LABEL
    _flag_ids(~ignored & ((labels_N < 0) | (labels_N >= vocab.true_size)), labels_N, vocab, flags, "labels_N")
    start, _ = vocab.shard_range(rank)
    local = labels_N.long() - start
    local = torch.where((local >= 0) & (local < vocab.num_true(rank)), local, ELSEWHERE)
    return torch.where(ignored, NO_LABEL, local).to(torch.int32)


def _flag_ids(bad: torch.Tensor, ids: torch.Tensor, vocab: VocabSpec, flags: DeviceFlags, name: str) -> None:
    if bad.device.type == "cpu" and bool(bad.any()):
        raise VocabMismatch(rule(name, ids[bad].flatten()[:5].tolist(), f"must be below the true vocabulary, {vocab.true_size}",
                                 "Padding columns are no tokens: check the tokenizer and VocabSpec.true_size"))
    if bad.device.type != "cpu":
        flags.add(BAD_IDS, bad.sum())


def _raise_nonfinite(flags: DeviceFlags) -> None:
    if int(flags.counts[0]):
        flags.check()
