"""What happens to one window between its projection and its gradient, for each kind of teacher. No autograd.

Called by the window loop (loss/passes.py). A step has `begin` (statistics of this shard, their all-gather on its way) and `finish`
(join, gradient over the logits), so that the loop can work on another window while the gather runs; `outcome` makes the loss rows
of all windows. Letters: N rows, R rows of a window, V columns of the shard, H widths, K kept tokens.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_kd.kernels import topk_twin
from megatron_kd.kernels.dispatch import top_k_kernels_for
from megatron_kd.kernels.spec import CE, KD, LSE_T, NUM_JOINED, NUM_STATS, ONE_PASS, ROW_ALIGNMENT, SLOPE, PairSpec
from megatron_kd.kernels.torch_twin import accumulate_dtype
from megatron_kd.loss.flags import NONFINITE_ROWS, DeviceFlags
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.reduce import GatheredRows, StatsGather, sum_over_shards
from megatron_kd.loss.signals import HiddenTeacher, LogitsTeacher, TopKTeacher
from megatron_kd.loss.window import WindowPlan


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything about one call that does not change between its windows. Row tensors are in the given row order."""

    plan: WindowPlan
    group_windows: int
    """Windows whose student rows share one projection, one dX and one dW; each costs a logits buffer."""
    spec: PairSpec
    objective: Objective
    kernels: ModuleType
    teacher: HiddenTeacher | LogitsTeacher | TopKTeacher
    head_VH: torch.Tensor
    bias_V: torch.Tensor | None
    labels_N: torch.Tensor | None
    """int32, local: column, ELSEWHERE or NO_LABEL."""
    weights_N: torch.Tensor
    shard_start: int
    group: dist.ProcessGroup | None
    reduce_dx: bool
    drop_rows: bool
    flags: DeviceFlags


@dataclass(kw_only=True)
class Outcome:
    """Per-row results in the given row order; dx of the student rows that were passed in."""

    kd_N: torch.Tensor
    """With its temperature factor."""
    ce_N: torch.Tensor
    dx: torch.Tensor | None = None
    student_kept_N: torch.Tensor | None = None
    """Top-K: the student's probability on the kept tokens."""


class RowTensors:
    """Per-row tensors in the order of the windows: views where a window is one piece, copies where it is several."""

    def __init__(self, plan: WindowPlan):
        self._plan = plan

    def take(self, tensor: torch.Tensor | None, window: int) -> torch.Tensor | None:
        """[R, ...] rows of `window` in window order."""
        if tensor is None:
            return None
        pieces = [tensor[a:b] for a, b in self._plan.pieces(window)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def in_given_order(self, values_N: torch.Tensor) -> torch.Tensor:
        """[N, ...] in window order, brought back to the given row order: itself, or one copy under sequence parallelism."""
        if self._plan.rows_per_rank is None or not self._plan.num_windows:
            return values_N
        pieces = [piece for window in range(self._plan.num_windows) for piece in self._plan.pieces(window)]
        parts = values_N.split([b - a for a, b in pieces])
        return torch.cat([part for _, part in sorted(zip(pieces, parts, strict=True), key=lambda item: item[0])])


class PairStep:
    """One window against a teacher that has a value in every column."""

    def __init__(self, problem: Problem, rows: RowTensors):
        self._p, self._rows = problem, rows
        head, acc, max_rows = problem.head_VH, accumulate_dtype(problem.head_VH.dtype), problem.plan.max_rows
        self._gather = StatsGather(problem.group, max_rows, NUM_STATS, head, acc)
        self._joined_NJ = torch.empty(problem.plan.num_rows, NUM_JOINED, dtype=acc, device=head.device)
        self._two_pass = problem.spec.divergence not in ONE_PASS
        self._values = torch.empty(max_rows if self._two_pass else 0, 2, dtype=acc, device=head.device)
        if isinstance(problem.teacher, HiddenTeacher):
            columns = problem.teacher.head_VH.shape[0]
            self._teacher_RV = problem.teacher.rows_NH.new_empty(max_rows, -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT)[:, :columns]
            if problem.teacher.own_rows:
                self._gathered = GatheredRows(problem.plan, problem.teacher.rows_NH, problem.group)
                self._packed_RH = problem.teacher.rows_NH.new_empty(max_rows, problem.teacher.rows_NH.shape[1])

    def begin(self, window: int, u_RV: torch.Tensor) -> None:
        """Teacher's projection, statistics, all-gather on its way."""
        teacher, num_rows = self._p.teacher, u_RV.shape[0]
        if isinstance(teacher, HiddenTeacher):
            rows_RH = self._gathered.take(window, self._packed_RH[:num_rows]) if teacher.own_rows else self._rows.take(teacher.rows_NH, window)
            self._t_RV = project(rows_RH, teacher.head_VH, teacher.bias_V, self._teacher_RV[:num_rows])
        else:
            self._t_RV = self._rows.take(teacher.logits_NV, window)
        self._labels = self._rows.take(self._p.labels_N, window)
        self._p.kernels.row_stats(u_RV, self._t_RV, self._labels, self._p.spec, self._gather.local(num_rows))
        self._gather.start()

    def finish(self, window: int, u_RV: torch.Tensor, want_grad: bool) -> None:
        """Joined statistics; the gradient over u_RV where wanted."""
        p, kernels, joined = self._p, self._p.kernels, self._joined_NJ[slice(*self._p.plan.bounds(window))]
        kernels.join_stats(self._gather.result(), self._labels, p.spec, joined)
        if self._two_pass:
            values = self._values[:u_RV.shape[0]]
            kernels.row_values(u_RV, self._t_RV, joined, p.spec, values)
            joined[:, KD:SLOPE + 1] = sum_over_shards(values, p.group)
        if want_grad:
            weights = self._rows.take(p.weights_N, window)
            if p.drop_rows:
                weights = torch.where(torch.isfinite(joined[:, LSE_T]), weights, 0.0)
            kernels.row_grad(u_RV, self._t_RV, joined, weights, self._labels, p.spec)

    def outcome(self) -> Outcome:
        """Of all rows, once: a window's few small kernels would be felt beside its products."""
        joined = self._rows.in_given_order(self._joined_NJ)
        return outcome_of(self._p, joined[:, KD], joined[:, CE], ~torch.isfinite(joined[:, LSE_T]))


class SparseStep:
    """One window against a top-K teacher, or against labels alone (K = 0)."""

    def __init__(self, problem: Problem, rows: RowTensors):
        self._p, self._rows, self._kernels = problem, rows, top_k_kernels_for(problem.kernels)
        head, max_rows, num_kept = problem.head_VH, problem.plan.max_rows, problem.teacher.ids_NK.shape[1]
        acc = accumulate_dtype(head.dtype)
        self._gather = StatsGather(problem.group, max_rows, topk_twin.NUM_SCALARS + num_kept, head, acc)
        self._tail = torch.empty(max_rows, 2, dtype=acc, device=head.device)
        self._joined_NJ = torch.empty(problem.plan.num_rows, topk_twin.NUM_JOINED, dtype=acc, device=head.device)
        self._bad_N = torch.empty(problem.plan.num_rows, dtype=torch.bool, device=head.device)
        self._grad = torch.empty(max_rows, num_kept, dtype=acc, device=head.device)

    def begin(self, window: int, u_RV: torch.Tensor) -> None:
        """Statistics with the K logits, all-gather on its way. Sets the K columns of u_RV to -inf."""
        p, num_rows = self._p, u_RV.shape[0]
        self._labels, self._ids = self._rows.take(p.labels_N, window), self._rows.take(p.teacher.ids_NK, window)
        stats = self._gather.local(num_rows)
        self._kernels.top_k_take(u_RV, self._ids, self._labels, p.shard_start, p.spec, stats)
        p.kernels.tail_stats(u_RV, p.spec, self._tail[:num_rows])
        stats[:, :2] = self._tail[:num_rows]
        self._gather.start()

    def finish(self, window: int, u_RV: torch.Tensor, want_grad: bool) -> None:
        """Joined statistics; the gradient over u_RV where wanted."""
        p, here, grad_RK = self._p, slice(*self._p.plan.bounds(window)), self._grad[:u_RV.shape[0]]
        joined, log_p, tail = self._joined_NJ[here], self._rows.take(p.teacher.log_probs_NK, window), self._rows.take(p.teacher.tail_N, window)
        self._kernels.top_k_join(self._gather.result(), log_p, tail, self._labels, p.objective.top_k_mode, p.spec, joined, grad_RK)
        bad = torch.logical_or((torch.isnan(log_p) | (log_p == float("inf"))).any(1), ~torch.isfinite(tail), out=self._bad_N[here])
        if want_grad:
            weights = self._rows.take(p.weights_N, window)
            if p.drop_rows:
                weights = torch.where(bad, 0.0, weights)
            self._kernels.top_k_grad(u_RV, joined, grad_RK, self._ids, self._labels, weights, p.shard_start, p.spec)

    def outcome(self) -> Outcome:
        """Of all rows."""
        joined, bad = (self._rows.in_given_order(values_N) for values_N in (self._joined_NJ, self._bad_N))
        outcome = outcome_of(self._p, joined[:, topk_twin.KD], joined[:, topk_twin.CE], bad)
        outcome.student_kept_N = joined[:, topk_twin.KEPT].clone()
        return outcome


def outcome_of(problem: Problem, kd_N: torch.Tensor, ce_N: torch.Tensor, bad_N: torch.Tensor) -> Outcome:
    """KD with its temperature factor, CE; counts bad teacher rows, which lose both where they are dropped."""
    problem.flags.add(NONFINITE_ROWS, bad_N.sum())
    kd_N, ce_N = kd_N * problem.objective.kd_scale, ce_N.clone()
    if problem.drop_rows:
        kd_N, ce_N = (torch.where(bad_N, 0.0, values_N) for values_N in (kd_N, ce_N))
    return Outcome(kd_N=kd_N, ce_N=ce_N)


def project(x_RH: torch.Tensor, head_VH: torch.Tensor, bias_V: torch.Tensor | None, out_RV: torch.Tensor) -> torch.Tensor:
    """Raw logits x @ head.T + bias into out_RV."""
    if bias_V is None:
        return torch.mm(x_RH, head_VH.t(), out=out_RV)
    return torch.addmm(bias_V.to(out_RV.dtype), x_RH, head_VH.t(), out=out_RV)
