"""RowSender: one teacher rank's half of an answer: stage, checksum and write the rows that this rank holds.

Called by the serve loop on every teacher rank that holds rows, with the same request. Owns the outbox. Errors of `send`:
RowsMismatch where this rank lacks rows that the route wants from it; TransferFailed.
"""

import numpy as np
import torch

from megatron_kd.errors import RowsMismatch, TransferFailed, rule
from megatron_kd.rows import RowBlock
from megatron_kd.stream import wire
from megatron_kd.stream.route import Part, RoutePlan, Side
from megatron_kd.stream.sizes import row_bytes
from megatron_kd.stream.trace import Trace, mark
from megatron_kd.stream.transport import Outbox, Piece
from megatron_kd.stream.wire import Agreement, Grant, PartHeader, Request


class RowSender:
    """`teacher` is this teacher's layout, `teacher_rank` = cp_rank * tp + tp_rank of this process."""

    def __init__(self, outbox: Outbox, agreement: Agreement, *, teacher: Side, teacher_rank: int, write_timeout_s: float = 60.0, trace: Trace | None = None):
        self._outbox, self._agreement, self._teacher, self._trace = outbox, agreement, teacher, trace
        self._rank, self._timeout_s = teacher_rank, write_timeout_s

    @torch.no_grad()
    def send(self, request: Request, rows: RowBlock) -> int:
        """Write this rank's parts of the granted slots and wait until they have arrived; bytes of rows sent."""
        block = request.block
        mark(self._trace, "rows", request.lane, request.seq)
        plan = RoutePlan(student=request.student, teacher=self._teacher, spread=request.spread)
        row_ids_N = block.row_ids_N.numpy()
        cu_seqlens = None if block.cu_seqlens is None else block.cu_seqlens.numpy()
        parts = plan.parts(row_ids_N, block.tokens_bs.shape[1], cu_seqlens)
        grants = {grant.student_rank: grant for grant in request.grants}
        mine = [part for part in parts if part.teacher_rank == self._rank and part.student_rank in grants]
        if not mine:
            return 0
        size = row_bytes(self._agreement.hidden_size, self._agreement.wire_dtype)
        total = sum(len(part.index_P) for part in mine)
        staging = self._outbox.stage(max(1, total) * size, rows.hidden_NH.device)
        staged_NR = wire.as_rows(staging, total, self._agreement.hidden_size, self._agreement.wire_dtype)
        pieces, start = [], 0
        for part in mine:
            end = start + len(part.index_P)
            self._stage(rows, row_ids_N[part.index_P], staged_NR[start:end])
            header = self._header(request, part, parts, staged_NR[start:end], grants[part.student_rank])
            runs = tuple(((start + first) * size, slot_row * size, count * size) for first, slot_row, count in part.runs)
            pieces.append(Piece(grants[part.student_rank].descriptor, runs, header.pack()))
            start = end
        if staging.is_cuda:
            torch.cuda.current_stream(staging.device).synchronize()
        mark(self._trace, "staged", request.lane, request.seq)
        try:
            transfer = self._outbox.start(pieces)
            mark(self._trace, "started", request.lane, request.seq)
            transfer.wait(timeout_s=self._timeout_s)
        except TransferFailed:
            for piece in pieces:
                self._outbox.forget(piece.descriptor)
            raise
        mark(self._trace, "written", request.lane, request.seq)
        return total * size

    def _stage(self, rows: RowBlock, wanted_P: np.ndarray, out_PR: torch.Tensor) -> None:
        held_N = rows.row_ids_N.numpy()
        at_P = np.searchsorted(held_N, wanted_P)
        if len(held_N) == 0 or np.any(held_N[np.minimum(at_P, len(held_N) - 1)] != wanted_P):
            raise RowsMismatch(rule(f"rows held by teacher rank {self._rank}", len(held_N), f"must include the {len(wanted_P)} that the route takes from it",
                                    "The replica's announced layout is not the one that it runs"))
        contiguous = len(at_P) and at_P[-1] - at_P[0] == len(at_P) - 1
        chosen = rows.hidden_NH[at_P[0]:at_P[-1] + 1] if contiguous else rows.hidden_NH[torch.from_numpy(at_P).to(rows.hidden_NH.device)]
        wire.encode_rows(chosen, out_PR, self._agreement.wire_dtype)

    def _header(self, request: Request, part: Part, parts: list[Part], staged_PR: torch.Tensor, grant: Grant) -> PartHeader:
        to_same = [p for p in parts if p.student_rank == part.student_rank]
        kind = request.checksum_kind
        return PartHeader(agreement=self._agreement.digest, seq=request.seq, lane=request.lane, generation=grant.generation, teacher_rank=self._rank,
                          num_parts=len(to_same), num_rows=len(part.index_P), total_rows=sum(len(p.index_P) for p in to_same), hash=request.block.hash,
                          checksum=wire.checksum([staged_PR], kind), checksum_kind=kind, runs=tuple((slot_row, count) for _, slot_row, count in part.runs))

    def forget(self, descriptors: list[bytes]) -> None:
        """Drop what is cached about student ranks that left."""
        for descriptor in descriptors:
            self._outbox.forget(descriptor)

    def close(self) -> None:
        """Release the outbox."""
        self._outbox.close()
