"""The window loop: projects, measures, joins, forms gradients, for one call. No autograd; collectives only through loss/reduce.py.

Called by loss/fused.py with gradients off. Logits buffers are made once per call and reused; nothing in the loop waits for the
device. Windows go in groups: student rows of a group share one projection, one dX and one dW, so that these products are tall,
while the teacher's logits exist for one window at a time. Letters: N rows, R rows of a window, G rows of a group, V columns of the
shard, H the student's width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_kd.loss.reduce import PlainRows, Rows, SequenceParallelRows, group_size
from megatron_kd.loss.signals import TopKTeacher
from megatron_kd.loss.sizes import CPU_BLOCK_COLUMNS
from megatron_kd.loss.steps import Outcome, PairStep, Problem, RowTensors, SparseStep, project


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


def run_windows(problem: Problem, student_NH: torch.Tensor, wanted: Wanted) -> Outcome:
    """All windows of one call. student_NH: this rank's rows (all rows without sequence parallelism).

    Peak memory: loss/sizes.py. Collectives: per window one all-gather of statistics, one all-reduce of two columns for the
    two-pass divergences, and the sum of dX; under sequence parallelism one all-gather of rows besides.
    """
    plan, head = problem.plan, problem.head_VH
    step = (SparseStep if isinstance(problem.teacher, TopKTeacher) else PairStep)(problem, RowTensors(plan))
    rows = _row_source(problem, student_NH, wanted)
    behind = _Behind(problem, wanted, rows)
    group_windows = min(problem.group_windows, max(plan.num_windows, 1)) if wanted.any else 1
    region_rows = group_windows * plan.max_rows
    logits = student_NH.new_empty(behind.num_regions * region_rows, head.shape[0])
    packed = None if plan.rows_per_rank is None else student_NH.new_empty(behind.num_regions * region_rows, head.shape[1])
    for index, first in enumerate(range(0, plan.num_windows, group_windows)):
        group = range(first, min(first + group_windows, plan.num_windows))
        begin = index % behind.num_regions * region_rows
        x_GH = rows.student(group, None if packed is None else packed[begin:])
        u_GV = project(x_GH, head, problem.bias_V, logits[begin:begin + x_GH.shape[0]])
        for window in group:
            start, end = (row - plan.bounds(first)[0] for row in plan.bounds(window))
            u_RV = u_GV[start:end]
            step.begin(window, u_RV)
            behind.run()
            step.finish(window, u_RV, wanted.any)
            behind.add_dx(window, group, u_RV, u_GV)
        behind.add_dw(u_GV, x_GH)
    behind.run()
    rows.finish()
    behind.finish()
    outcome = step.outcome()
    outcome.dx = rows.dx
    return outcome


class _Behind:
    """The products that follow the gradient, dX and dW. With several shards they wait for the next window's statistics to be on their
    way, so that the all-gather runs under them, and dX goes window by window, so that its sum runs under what follows; the logits of two
    groups of windows are then alive. With one shard they run at once, dX for a group of windows like dW.
    """

    def __init__(self, problem: Problem, wanted: Wanted, rows: Rows):
        self._problem, self._wanted, self._rows = problem, wanted, rows
        self._late = wanted.any and group_size(problem.group) > 1
        self._waiting, self._head = [], _HeadSum(wanted)

    @property
    def num_regions(self) -> int:
        """Groups of windows whose gradients are alive together."""
        return 2 if self._late else 1

    def add_dx(self, window: int, group: range, g_RV: torch.Tensor, g_GV: torch.Tensor) -> None:
        """dX, once the gradient of `window` stands in g_RV, a part of its group's g_GV."""
        if not self._wanted.dx:
            return
        if self._late:
            self._add(lambda: self._dx(range(window, window + 1), g_RV))
        elif window == group[-1]:
            self._add(lambda: self._dx(group, g_GV))

    def add_dw(self, g_GV: torch.Tensor, x_GH: torch.Tensor) -> None:
        """dW of a group of windows, from its student rows."""
        if self._wanted.any:
            self._add(lambda: self._head.add(g_GV, x_GH))

    def run(self) -> None:
        """What waits, in order."""
        for product in self._waiting:
            product()
        self._waiting.clear()

    def finish(self) -> None:
        """Zeros for dW where there was no window."""
        self._head.finish()

    def _add(self, product: Callable[[], None]) -> None:
        self._waiting.append(product)
        if not self._late:
            self.run()

    def _dx(self, windows: range, g_RV: torch.Tensor) -> None:
        torch.mm(g_RV, self._problem.head_VH, out=self._rows.dx_target(windows))
        self._rows.send_dx(windows)


def _row_source(problem: Problem, student_NH: torch.Tensor, wanted: Wanted) -> Rows:
    if problem.plan.rows_per_rank is None:
        return PlainRows(problem.plan, student_NH, problem.group, wanted.dx, problem.reduce_dx)
    return SequenceParallelRows(problem.plan, student_NH, problem.group, wanted.dx)


class _HeadSum:
    """dW and dbias of this shard, accumulated in the accumulation dtype over groups of windows. The first group overwrites."""

    def __init__(self, wanted: Wanted):
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
