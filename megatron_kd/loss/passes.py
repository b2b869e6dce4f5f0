"""The window loop: projects, measures, joins, forms gradients, for one call. No autograd; collectives only through loss/reduce.py.

Called by loss/fused.py with gradients off. Logits buffers are made once per call and reused by every window; nothing in the
loop waits for the device. Letters: N rows, R rows of a window, V columns of the shard, H the student's width, D windows whose
dW is formed by one GEMM.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_kd.kernels.spec import CE, KD, LSE_T, NUM_JOINED, NUM_STATS, ONE_PASS, SLOPE, PairSpec
from megatron_kd.kernels.torch_twin import accumulate_dtype
from megatron_kd.loss.flags import NONFINITE_ROWS, DeviceFlags
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.reduce import PlainRows, Rows, SequenceParallelRows, StatsGather, group_size, sum_over_shards
from megatron_kd.loss.signals import HiddenTeacher, LogitsTeacher, TopKTeacher
from megatron_kd.loss.sizes import CPU_BLOCK_COLUMNS
from megatron_kd.loss.topk import TopKStep
from megatron_kd.loss.window import WindowPlan


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything about one call that does not change between its windows. Row tensors are in the given row order."""

    plan: WindowPlan
    dw_windows: int
    """Windows whose gradients are kept for one dW GEMM; each costs a logits buffer."""
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
class Wanted:
    """Which gradients to form, and into what."""

    dx: bool = False
    dw_VH: torch.Tensor | None = None
    """fp32 buffer with undefined contents, overwritten."""
    dbias_V: torch.Tensor | None = None
    """fp32, overwritten."""

    @property
    def any(self) -> bool:
        """Whether the gradient half runs at all."""
        return self.dx or self.dw_VH is not None or self.dbias_V is not None


@dataclass(kw_only=True)
class Outcome:
    """Per-row results in the given row order; dx of the student rows that were passed in."""

    kd_N: torch.Tensor
    ce_N: torch.Tensor
    dx: torch.Tensor | None = None
    student_kept_N: torch.Tensor | None = None
    """Top-K: the student's probability on the kept tokens."""


class RowTensors:
    """Per-row tensors cut into windows: views where a window is one piece, copies where it is several."""

    def __init__(self, plan: WindowPlan):
        self._plan = plan

    def take(self, tensor: torch.Tensor | None, window: int) -> torch.Tensor | None:
        """[R, ...] rows of `window` in window order."""
        if tensor is None:
            return None
        pieces = [tensor[a:b] for a, b in self._plan.pieces(window)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put(self, tensor: torch.Tensor, window: int, values_R: torch.Tensor) -> None:
        """Writes a window's values to their rows."""
        start = 0
        for a, b in self._plan.pieces(window):
            tensor[a:b] = values_R[start:start + b - a]
            start += b - a


class PairStep:
    """One window against a teacher that has a value in every column."""

    def __init__(self, problem: Problem, rows: RowTensors, outcome: Outcome):
        self._p, self._rows, self._outcome = problem, rows, outcome
        head, acc, max_rows = problem.head_VH, accumulate_dtype(problem.head_VH.dtype), problem.plan.max_rows
        self._gather = StatsGather(problem.group, max_rows, NUM_STATS, head, acc)
        self._joined = torch.empty(max_rows, NUM_JOINED, dtype=acc, device=head.device)
        self._two_pass = problem.spec.divergence not in ONE_PASS
        self._values = torch.empty(max_rows if self._two_pass else 0, 2, dtype=acc, device=head.device)
        if isinstance(problem.teacher, HiddenTeacher):
            self._teacher_RV = problem.teacher.rows_NH.new_empty(max_rows, problem.teacher.head_VH.shape[0])

    def begin(self, window: int, u_RV: torch.Tensor) -> None:
        """Teacher's projection, statistics, all-gather on its way."""
        teacher, num_rows = self._p.teacher, u_RV.shape[0]
        if isinstance(teacher, HiddenTeacher):
            self._t_RV = project(self._rows.take(teacher.rows_NH, window), teacher.head_VH, teacher.bias_V, self._teacher_RV[:num_rows])
        else:
            self._t_RV = self._rows.take(teacher.logits_NV, window)
        self._labels = self._rows.take(self._p.labels_N, window)
        self._p.kernels.row_stats(u_RV, self._t_RV, self._labels, self._p.spec, self._gather.local(num_rows))
        self._gather.start()

    def finish(self, window: int, u_RV: torch.Tensor, want_grad: bool) -> None:
        """Loss rows; the gradient over u_RV where wanted."""
        p, kernels, joined = self._p, self._p.kernels, self._joined[:u_RV.shape[0]]
        kernels.join_stats(self._gather.result(), self._labels, p.spec, joined)
        if self._two_pass:
            values = self._values[:u_RV.shape[0]]
            kernels.row_values(u_RV, self._t_RV, joined, p.spec, values)
            joined[:, KD:SLOPE + 1] = sum_over_shards(values, p.group)
        weights = self._rows.take(p.weights_N, window)
        bad = ~torch.isfinite(joined[:, LSE_T])
        p.flags.add(NONFINITE_ROWS, bad.sum())
        kd, ce = joined[:, KD] * p.objective.kd_scale, joined[:, CE]
        if p.drop_rows:
            kd, ce, weights = torch.where(bad, 0.0, kd), torch.where(bad, 0.0, ce), torch.where(bad, 0.0, weights)
        self._rows.put(self._outcome.kd_N, window, kd)
        self._rows.put(self._outcome.ce_N, window, ce)
        if want_grad:
            kernels.row_grad(u_RV, self._t_RV, joined, weights, self._labels, p.spec)


class SparseStep:
    """One window against a top-K teacher, or against labels alone (K = 0)."""

    def __init__(self, problem: Problem, rows: RowTensors, outcome: Outcome):
        self._p, self._rows, self._outcome = problem, rows, outcome
        self._step = TopKStep(problem.teacher, problem.spec, problem.objective.top_k_mode, problem.shard_start, problem.kernels)
        acc = accumulate_dtype(problem.head_VH.dtype)
        self._gather = StatsGather(problem.group, problem.plan.max_rows, self._step.num_columns, problem.head_VH, acc)

    def begin(self, window: int, u_RV: torch.Tensor) -> None:
        """Statistics with the K logits, all-gather on its way."""
        self._labels = self._rows.take(self._p.labels_N, window)
        self._step.begin(u_RV, self._rows.take(self._p.teacher.ids_NK, window), self._labels, self._gather.local(u_RV.shape[0]))
        self._gather.start()

    def finish(self, window: int, u_RV: torch.Tensor, want_grad: bool) -> None:
        """Loss rows; the gradient over u_RV where wanted."""
        p = self._p
        log_p, tail = self._rows.take(p.teacher.log_probs_NK, window), self._rows.take(p.teacher.tail_N, window)
        kd, ce, kept = self._step.finish(self._gather.result(), log_p, tail, self._labels)
        weights = self._rows.take(p.weights_N, window)
        bad = (torch.isnan(log_p) | (log_p == float("inf"))).any(1) | ~torch.isfinite(tail)
        p.flags.add(NONFINITE_ROWS, bad.sum())
        kd = kd * p.objective.kd_scale
        if p.drop_rows:
            kd, ce, weights = torch.where(bad, 0.0, kd), torch.where(bad, 0.0, ce), torch.where(bad, 0.0, weights)
        for target, values in ((self._outcome.kd_N, kd), (self._outcome.ce_N, ce), (self._outcome.student_kept_N, kept)):
            self._rows.put(target, window, values)
        if want_grad:
            self._step.grad(u_RV, weights)


def run_windows(problem: Problem, student_NH: torch.Tensor, wanted: Wanted) -> Outcome:
    """All windows of one call. student_NH: this rank's rows (all rows without sequence parallelism).

    Peak memory: loss/sizes.py. Collectives: per window one all-gather of statistics, one all-reduce of two columns for the
    two-pass divergences, and the sum of dX; under sequence parallelism one all-gather of rows besides.
    """
    plan, head = problem.plan, problem.head_VH
    acc = accumulate_dtype(head.dtype)
    sparse = isinstance(problem.teacher, TopKTeacher)
    outcome = Outcome(kd_N=head.new_zeros(plan.num_rows, dtype=acc), ce_N=head.new_zeros(plan.num_rows, dtype=acc),
                      student_kept_N=head.new_zeros(plan.num_rows, dtype=acc) if sparse else None)
    row_tensors = RowTensors(plan)
    step = (SparseStep if sparse else PairStep)(problem, row_tensors, outcome)
    rows = _row_source(problem, student_NH, wanted)
    group_windows = min(problem.dw_windows, max(plan.num_windows, 1)) if wanted.any else 1
    logits = student_NH.new_empty(group_windows * plan.max_rows, head.shape[0])
    packed = student_NH.new_empty(group_windows * plan.max_rows, head.shape[1]) if plan.rows_per_rank is not None else None
    hide_gather = wanted.dx and group_windows > 1 and group_size(problem.group) > 1
    dw = _HeadSum(problem, wanted)
    for first in range(0, plan.num_windows, group_windows):
        group = range(first, min(first + group_windows, plan.num_windows))
        start, pending, x_first = 0, None, None
        for window in group:
            end = start + plan.bounds(window)[1] - plan.bounds(window)[0]
            x_RH = rows.student(window, None if packed is None else packed[start:end])
            u_RV = project(x_RH, head, problem.bias_V, logits[start:end])
            step.begin(window, u_RV)
            if pending is not None:
                _back_project(rows, problem, *pending)
            step.finish(window, u_RV, wanted.any)
            pending = (window, u_RV) if wanted.dx else None
            if pending is not None and not hide_gather:
                _back_project(rows, problem, *pending)
                pending = None
            start = end
        if pending is not None:
            _back_project(rows, problem, *pending)
        if wanted.any:
            x = packed[:start] if packed is not None else student_NH[plan.bounds(group[0])[0]:plan.bounds(group[-1])[1]]
            dw.add(logits[:start], x)
    rows.finish()
    dw.finish()
    outcome.dx = rows.dx
    return outcome


def project(x_RH: torch.Tensor, head_VH: torch.Tensor, bias_V: torch.Tensor | None, out_RV: torch.Tensor) -> torch.Tensor:
    """Raw logits x @ head.T + bias into out_RV."""
    if bias_V is None:
        return torch.mm(x_RH, head_VH.t(), out=out_RV)
    return torch.addmm(bias_V.to(out_RV.dtype), x_RH, head_VH.t(), out=out_RV)


def _row_source(problem: Problem, student_NH: torch.Tensor, wanted: Wanted) -> Rows:
    if problem.plan.rows_per_rank is None:
        return PlainRows(problem.plan, student_NH, problem.group, wanted.dx, problem.reduce_dx)
    return SequenceParallelRows(problem.plan, student_NH, problem.group, wanted.dx)


def _back_project(rows: Rows, problem: Problem, window: int, g_RV: torch.Tensor) -> None:
    torch.mm(g_RV, problem.head_VH, out=rows.dx_target(window))
    rows.send_dx(window)


class _HeadSum:
    """dW and dbias of this shard, accumulated in the accumulation dtype over groups of windows. The first group overwrites."""

    def __init__(self, problem: Problem, wanted: Wanted):
        self._dw, self._dbias, self._first = wanted.dw_VH, wanted.dbias_V, True

    def add(self, g_RV: torch.Tensor, x_RH: torch.Tensor) -> None:
        """dW += g.T @ x, dbias += column sums of g."""
        beta = 0.0 if self._first else 1.0
        if self._dw is not None and g_RV.dtype == self._dw.dtype:
            torch.addmm(self._dw, g_RV.t(), x_RH, beta=beta, out=self._dw)
        elif self._dw is not None and g_RV.is_cuda:
            torch.ops.aten.addmm.dtype_out(self._dw, g_RV.t(), x_RH, self._dw.dtype, beta=beta, out=self._dw)
        elif self._dw is not None:
            x = x_RH.to(self._dw.dtype)
            for a in range(0, g_RV.shape[1], CPU_BLOCK_COLUMNS):
                block = self._dw[a:a + CPU_BLOCK_COLUMNS]
                torch.addmm(block, g_RV[:, a:a + CPU_BLOCK_COLUMNS].t().to(x.dtype), x, beta=beta, out=block)
        if self._dbias is not None:
            total = g_RV.sum(0, dtype=self._dbias.dtype)
            self._dbias.copy_(total) if self._first else self._dbias.add_(total)
        self._first = False

    def finish(self) -> None:
        """Zeros where there was no window."""
        for tensor in (self._dw, self._dbias):
            if self._first and tensor is not None:
                tensor.zero_()
