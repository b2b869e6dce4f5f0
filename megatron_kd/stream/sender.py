"""RowSender: one teacher rank's half of an answer: stage, checksum and write the rows that this rank holds.

Called by the serve loop on every teacher rank that holds rows, with the same request: `stage` on the thread of the forward, `write` on
the writer's. Owns the outbox and the memory that is sent from, which holds NUM_STAGED answers, so that the next one is computed and
staged while one is on its way.
"""

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from megatron_kd.errors import RowsMismatch, TransferFailed, rule
from megatron_kd.rows import RowBlock
from megatron_kd.stream import wire
from megatron_kd.stream.memory import buffer_for_peers
from megatron_kd.stream.route import Part, RoutePlan, Side
from megatron_kd.stream.sizes import NUM_STAGED, row_bytes, staged_bytes
from megatron_kd.stream.trace import Trace, mark
from megatron_kd.stream.transport import Outbox, Piece
from megatron_kd.stream.wire import Agreement, Grant, PartHeader, Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """An answer of one rank, copied into the memory that it is sent from, or on its way there on the device."""

    request: Request
    buffer: torch.Tensor
    """uint8, registered."""
    rows_PR: list[torch.Tensor]
    """uint8 [P, R] of each part, in `buffer`, one after the other."""
    parts: list[Part]
    """This rank's."""
    all_parts: list[Part]
    """Every rank's."""
    ready: torch.cuda.Event | None
    """The copies have run; None on the CPU, where they have."""
    outgrown: torch.Tensor | None
    """Memory that `buffer` takes the place of."""


class RowSender:
    """`teacher` is this teacher's layout, `teacher_rank` = cp_rank * tp + tp_rank of this process."""

    def __init__(self, outbox: Outbox, agreement: Agreement, *, teacher: Side, teacher_rank: int, write_timeout_s: float = 60.0, trace: Trace | None = None):
        self._outbox, self._agreement, self._teacher, self._trace = outbox, agreement, teacher, trace
        self._rank, self._timeout_s = teacher_rank, write_timeout_s
        self._buffers: list[torch.Tensor | None] = [None] * NUM_STAGED
        self._count = 0
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def stage(self, request: Request, rows: RowBlock) -> Staged | None:
        """Copy this rank's parts of the granted slots to where they are sent from, without waiting for the device; None where it has none.

        The answer before the last one must be written. Errors: RowsMismatch where this rank lacks rows that the route wants from it.
        """
        block = request.block
        mark(self._trace, "rows", request.lane, request.seq)
        plan = RoutePlan(student=request.student, teacher=self._teacher, spread=request.spread)
        row_ids_N = block.row_ids_N.numpy()
        cu_seqlens = None if block.cu_seqlens is None else block.cu_seqlens.numpy()
        parts = plan.parts(row_ids_N, block.tokens_bs.shape[1], cu_seqlens)
        granted = {grant.student_rank for grant in request.grants}
        mine = [part for part in parts if part.teacher_rank == self._rank and part.student_rank in granted]
        if not mine:
            return None
        total = sum(len(part.index_P) for part in mine)
        index = self._count % NUM_STAGED
        buffer = self._buffer(self._buffers[index], request, total, rows.hidden_NH.device)
        staged_NR = wire.as_rows(buffer, total, self._agreement.hidden_size, self._agreement.wire_dtype)
        pieces = list(staged_NR.split([len(part.index_P) for part in mine]))
        for part, rows_PR in zip(mine, pieces, strict=True):
            self._copy(rows, row_ids_N[part.index_P], rows_PR)
        ready = None
        if buffer.is_cuda:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        outgrown = None if self._buffers[index] is buffer else self._buffers[index]
        self._buffers[index], self._count = buffer, self._count + 1
        return Staged(request=request, buffer=buffer, rows_PR=pieces, parts=mine, all_parts=parts, ready=ready, outgrown=outgrown)

    @torch.no_grad()
    def write(self, staged: Staged) -> int:
        """Write what was staged and wait until it has arrived; bytes of rows sent. Errors: TransferFailed."""
        request, size = staged.request, row_bytes(self._agreement.hidden_size, self._agreement.wire_dtype)
        grants = {grant.student_rank: grant for grant in request.grants}
        pieces, start = [], 0
        with self._apart(staged):
            if staged.outgrown is not None:
                self._outbox.release(staged.outgrown)
            for part, rows_PR in zip(staged.parts, staged.rows_PR, strict=True):
                grant = grants[part.student_rank]
                runs = tuple(((start + first) * size, slot_row * size, count * size) for first, slot_row, count in part.runs)
                pieces.append(Piece(grant.descriptor, runs, self._header(request, part, staged.all_parts, rows_PR, grant).pack()))
                start += len(rows_PR)
        mark(self._trace, "staged", request.lane, request.seq)
        try:
            transfer = self._outbox.start(staged.buffer, pieces)
            mark(self._trace, "started", request.lane, request.seq)
            transfer.wait(timeout_s=self._timeout_s)
        except TransferFailed:
            for piece in pieces:
                self._outbox.forget(piece.descriptor)
            raise
        mark(self._trace, "written", request.lane, request.seq)
        return start * size

    def _buffer(self, old: torch.Tensor | None, request: Request, num_rows: int, device: torch.device) -> torch.Tensor:
        """`old` where it suffices, else memory for the largest share that such a micro-batch may have here."""
        agreement = self._agreement
        needed = num_rows * row_bytes(agreement.hidden_size, agreement.wire_dtype)
        if old is not None and old.numel() >= needed and old.device == device:
            return old
        b, s = request.block.tokens_bs.shape
        largest = staged_bytes(b, s, agreement.hidden_size, tp=self._teacher.tp, wire_dtype=agreement.wire_dtype, student_tp=request.student.tp, spread=request.spread)
        return buffer_for_peers(max(needed, largest), device)

    def _apart(self, staged: Staged):
        """Inside, the device has finished the copies, and works for this thread apart from the next forward."""
        if staged.ready is None:
            return contextlib.nullcontext()
        torch.cuda.set_device(staged.buffer.device)  # for the life of the writer's thread: NIXL needs a context too
        staged.ready.synchronize()
        self._stream = self._stream or torch.cuda.Stream(staged.buffer.device)
        return torch.cuda.stream(self._stream)

    def _copy(self, rows: RowBlock, wanted_P: np.ndarray, out_PR: torch.Tensor) -> None:
        held_N = rows.row_ids_N.numpy()
        if np.array_equal(held_N, wanted_P):
            wire.encode_rows(rows.hidden_NH, out_PR, self._agreement.wire_dtype)
            return
        at_P = np.searchsorted(held_N, wanted_P)
        if len(held_N) == 0 or np.any(held_N[np.minimum(at_P, len(held_N) - 1)] != wanted_P):
            raise RowsMismatch(rule(f"rows held by teacher rank {self._rank}", len(held_N), f"must include the {len(wanted_P)} that the route takes from it",
                                    "The replica's announced layout is not the one that it runs"))
        contiguous = len(at_P) and at_P[-1] - at_P[0] == len(at_P) - 1
        if contiguous:
            chosen = rows.hidden_NH[at_P[0]:at_P[-1] + 1]
        else:
            index_P = torch.from_numpy(at_P)  # from pinned memory, or the copy would wait for the forward
            chosen = rows.hidden_NH[index_P.pin_memory().to(out_PR.device, non_blocking=True) if out_PR.is_cuda else index_P]
        wire.encode_rows(chosen, out_PR, self._agreement.wire_dtype)

    def _header(self, request: Request, part: Part, parts: list[Part], staged_PR: torch.Tensor, grant: Grant) -> PartHeader:
        to_same = [p for p in parts if p.student_rank == part.student_rank]
        kind = request.checksum_kind
        return PartHeader(agreement=self._agreement.digest, seq=request.seq, lane=request.lane, generation=grant.generation, teacher_rank=self._rank,
                          num_parts=len(to_same), num_rows=len(part.index_P), total_rows=sum(len(p.index_P) for p in to_same), hash=request.block.hash,
                          checksum=wire.checksum([staged_PR], kind), checksum_kind=kind, runs=tuple((slot_row, count) for _, slot_row, count in part.runs))

    def forget(self, descriptors: list[bytes]) -> None:
        """Drop what is cached about student ranks that left. On the writer's thread."""
        for descriptor in descriptors:
            self._outbox.forget(descriptor)

    def close(self) -> None:
        """Release the outbox. After the writer's last job."""
        self._outbox.close()
