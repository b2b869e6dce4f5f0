"""Every collective of the loss. No autograd, no arithmetic on logits.

Called by the window passes (loss/passes.py, loss/steps.py). `group=None` means one vocabulary shard: then nothing is sent.
All functions run the same collectives in the same order on every rank of the group, whatever rows it holds: what is sent
follows from the WindowPlan alone. Letters: R rows of a window, H hidden width, t ranks of the group.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_kd.loss.window import WindowPlan


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of vocabulary shards."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's shard index."""
    return 0 if group is None else dist.get_rank(group)


class StatsGather:
    """All-gather of one window's per-shard statistics [R, S] into [t, R, S]; `start`, then `result`."""

    def __init__(self, group: dist.ProcessGroup | None, max_rows: int, num_columns: int, like: torch.Tensor, dtype: torch.dtype):
        self._group, self._size = group, group_size(group)
        self._local = torch.empty(max_rows * num_columns, dtype=dtype, device=like.device)
        self._all = self._local if self._size == 1 else torch.empty(self._size * max_rows * num_columns, dtype=dtype, device=like.device)
        self._num_columns, self._num_rows, self._work = num_columns, 0, None

    def local(self, num_rows: int) -> torch.Tensor:
        """The [num_rows, S] tensor to write this shard's statistics into."""
        self._num_rows = num_rows
        return self._local[:num_rows * self._num_columns].view(num_rows, self._num_columns)

    def start(self) -> None:
        """Send what `local` gave."""
        if self._size > 1:
            count = self._num_rows * self._num_columns
            self._work = dist.all_gather_into_tensor(self._all[:self._size * count], self._local[:count], group=self._group, async_op=True)

    def result(self) -> torch.Tensor:
        """[t, num_rows, S], complete on the current stream."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._all[:self._size * self._num_rows * self._num_columns].view(self._size, self._num_rows, self._num_columns)


def sum_over_shards(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """In-place sum of a contiguous tensor over the vocabulary shards."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_row_values(value_n: torch.Tensor, group: dist.ProcessGroup, rows_per_rank: tuple[int, ...]) -> torch.Tensor:
    """[N] values of all ranks' rows, in rank order, from each rank's own [n]."""
    most, size = max(rows_per_rank), len(rows_per_rank)
    own, all_ranks = value_n.new_zeros(most), value_n.new_empty(size * most)
    own[:value_n.shape[0]] = value_n
    dist.all_gather_into_tensor(all_ranks, own, group=group)
    return torch.cat([all_ranks[rank * most:rank * most + num] for rank, num in enumerate(rows_per_rank)])


class Rows(Protocol):
    """Where a window's student rows come from and where its dX goes."""

    dx: torch.Tensor | None
    """The finished gradient of the student rows that this rank passed in; None where none is wanted."""

    def student(self, windows: range, out_GH: torch.Tensor | None) -> torch.Tensor:
        """[G, H] rows of a group of windows; written to out_GH where they have to be assembled."""

    def dx_target(self, windows: range) -> torch.Tensor:
        """[G, H] tensor for this shard's partial dX of `windows`."""

    def send_dx(self, windows: range) -> None:
        """Start summing that dX over the shards."""

    def finish(self) -> None:
        """Wait for everything sent."""


class PlainRows:
    """Every rank holds all rows. dX is summed by all-reduce while the next window computes, or left partial (dx_reduce "none")."""

    def __init__(self, plan: WindowPlan, student_NH: torch.Tensor, group: dist.ProcessGroup | None, want_dx: bool, reduce_dx: bool):
        self._plan, self._student, self._group = plan, student_NH, group
        self._reduce = reduce_dx and group_size(group) > 1
        self.dx = torch.empty_like(student_NH, memory_format=torch.contiguous_format) if want_dx else None
        self._works = []

    def student(self, windows: range, out_GH: torch.Tensor | None) -> torch.Tensor:
        """A view."""
        return self._of(self._student, windows)

    def dx_target(self, windows: range) -> torch.Tensor:
        """A view of dx."""
        return self._of(self.dx, windows)

    def send_dx(self, windows: range) -> None:
        """All-reduce in place."""
        if self._reduce:
            self._works.append(dist.all_reduce(self.dx_target(windows), group=self._group, async_op=True))

    def _of(self, tensor_NH: torch.Tensor, windows: range) -> torch.Tensor:
        return tensor_NH[self._plan.bounds(windows[0])[0]:self._plan.bounds(windows[-1])[1]]

    def finish(self) -> None:
        """Wait for the all-reduces."""
        for work in self._works:
            work.wait()
        self._works.clear()


class GatheredRows:
    """Windows of rows of which each rank holds its own: all-gathered one window ahead, so that it runs while another window computes.

    One chunk is held, [chunk_rows, H] sent and [t * chunk_rows, H] received. own_nH: this rank's rows, by the plan's rows_per_rank.
    """

    def __init__(self, plan: WindowPlan, own_nH: torch.Tensor, group: dist.ProcessGroup):
        self._plan, self._rows, self._group, self._rank = plan, own_nH, group, group_rank(group)
        self._own = own_nH.new_zeros(plan.chunk_rows, own_nH.shape[1])
        self._received = own_nH.new_empty(group_size(group) * plan.chunk_rows, own_nH.shape[1])
        self._work = None
        if plan.num_windows:
            self._start(0)

    def take(self, window: int, out_RH: torch.Tensor) -> torch.Tensor:
        """Packs the rows of `window` into out_RH, in window order, then starts the next window's all-gather."""
        self._work.wait()
        torch.cat([piece for _, piece in split_chunks(self._plan, self._received, window)], out=out_RH)
        if window + 1 < self._plan.num_windows:
            self._start(window + 1)
        return out_RH

    def _start(self, window: int) -> None:
        start, end = self._plan.local_pieces(window)[self._rank]
        self._own[:end - start] = self._rows[start:end]
        self._work = dist.all_gather_into_tensor(self._received, self._own, group=self._group, async_op=True)


class SequenceParallelRows:
    """Each rank holds its own rows: a window's are gathered ahead of time (GatheredRows), its dX is reduce-scattered behind.

    Both run while a neighbouring window computes. Two chunks of dX are held as well, [t * chunk_rows, H] sent.
    """

    def __init__(self, plan: WindowPlan, student_NH: torch.Tensor, group: dist.ProcessGroup, want_dx: bool):
        self._plan, self._group, self._rank = plan, group, group_rank(group)
        self._gathered = GatheredRows(plan, student_NH, group)
        width = student_NH.shape[1]
        self.dx = torch.empty_like(student_NH, memory_format=torch.contiguous_format) if want_dx else None
        if want_dx:
            self._partial = student_NH.new_empty(max(plan.max_rows, 1), width)
            self._sent = [student_NH.new_zeros(group_size(group) * plan.chunk_rows, width) for _ in range(2)]
            self._summed = [student_NH.new_empty(plan.chunk_rows, width) for _ in range(2)]
            self._scatters = [None, None]

    def student(self, windows: range, out_GH: torch.Tensor | None) -> torch.Tensor:
        """Packed into out_GH."""
        begin = self._plan.bounds(windows[0])[0]
        for window in windows:
            start, end = self._plan.bounds(window)
            self._gathered.take(window, out_GH[start - begin:end - begin])
        return out_GH[:end - begin]

    def dx_target(self, windows: range) -> torch.Tensor:
        """A buffer for one window, unpacked by send_dx."""
        start, end = self._plan.bounds(windows[-1])
        return self._partial[:end - start]

    def send_dx(self, windows: range) -> None:
        """Reduce-scatter of one window's; the result lands in dx when the slot is needed again or at finish."""
        (window,) = windows
        slot = window % 2
        self._land(slot)
        start = 0
        for rows, piece in split_chunks(self._plan, self._sent[slot], window):
            piece.copy_(self._partial[start:start + rows])
            start += rows
        work = dist.reduce_scatter_tensor(self._summed[slot], self._sent[slot], group=self._group, async_op=True)
        self._scatters[slot] = (work, window)

    def finish(self) -> None:
        """Wait for and place what is still on its way."""
        if self.dx is not None:
            self._land(0)
            self._land(1)

    def _land(self, slot: int) -> None:
        if self._scatters[slot] is not None:
            work, window = self._scatters[slot]
            work.wait()
            start, end = self._plan.local_pieces(window)[self._rank]
            self.dx[start:end] = self._summed[slot][:end - start]
            self._scatters[slot] = None


def split_chunks(plan: WindowPlan, chunks: torch.Tensor, window: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(rows, their view) of each rank's chunk in [t * chunk_rows, H], in rank order, without the unused rows."""
    for rank, (start, end) in enumerate(plan.local_pieces(window)):
        yield end - start, chunks[rank * plan.chunk_rows:rank * plan.chunk_rows + end - start]
