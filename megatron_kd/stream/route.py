"""RoutePlan: which teacher rank sends which row to which student rank, and where the row lands.

Pure arithmetic on plain ints and numpy, made once from the two layouts; `parts` is then asked per micro-batch and branches on
nothing but rows. Called by the receiver (what will come), the sender (what to send) and `sizes` (how much room a slot needs).
No torch, no processes.

Student ranks are those of one data-parallel replica's last stage, numbered `cp_rank * tp + tp_rank`; teacher ranks those of one
data-parallel lane of its last stage, numbered alike. Rows are named by their global id, `sequence * s + position`.

Who owns a position under context parallelism: "zigzag" (attention: 2*cp chunks of each document, rank r has r and 2*cp-1-r) or
"contiguous" (GDN: cp chunks). With sequence parallelism a teacher rank holds the tp-th part of its cp rank's local sequence.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_kd.errors import UnsupportedLayout, rule
from megatron_kd.stream.sizes import slot_rows

CpOrder = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side's ranks. Errors: UnsupportedLayout."""

    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    cp_order: CpOrder = "zigzag"
    """How positions are dealt to context-parallel ranks."""
    sequence_parallel: bool = False
    """Last hidden states are split over tp along the sequence. On the student's side rows that are spread go to the rank that holds their position."""

    def __post_init__(self):
        if self.tp < 1 or self.cp < 1:
            raise UnsupportedLayout(rule("route side", (self.tp, self.cp), "tp and cp must be at least 1", "Give the layout of the last pipeline stage"))

    @property
    def num_ranks(self) -> int:
        """tp * cp."""
        return self.tp * self.cp

    def as_dict(self) -> dict:
        """Plain values for a handshake."""
        return {"tp": self.tp, "cp": self.cp, "cp_order": self.cp_order, "sequence_parallel": self.sequence_parallel}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows that go from one teacher rank to one student rank in one write."""

    teacher_rank: int
    student_rank: int
    index_P: np.ndarray
    """int64 [P]: positions in the micro-batch's row_ids_N, ascending."""
    slot_row_P: np.ndarray
    """int64 [P]: the row of the student's slot in which each lands, ascending."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(first row in this part, first row in the slot, rows): the fewest contiguous copies that place all rows."""
        cuts = np.flatnonzero(np.diff(self.slot_row_P) != 1) + 1
        starts = np.concatenate(([0], cuts)).astype(np.int64)
        ends = np.concatenate((cuts, [len(self.slot_row_P)])).astype(np.int64)
        return [(int(a), int(self.slot_row_P[a]), int(z - a)) for a, z in zip(starts, ends)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """The M:N map between one teacher lane and one student replica."""

    student: Side
    teacher: Side
    spread: bool = True
    """True: the rows of a student's cp rank are dealt to its tp ranks, under sequence parallelism as their positions are, otherwise in equal
    consecutive shares; False: every tp rank receives all."""

    def received(self, row_ids_N: np.ndarray, s: int, cu_seqlens: np.ndarray | None = None) -> list[np.ndarray]:
        """Per student rank: ascending positions in row_ids_N of the rows that land there, in slot order."""
        cp_of_N, tp_of_N = holders(self.student, row_ids_N, s, cu_seqlens)
        result = []
        for cp_rank in range(self.student.cp):
            mine = np.flatnonzero(cp_of_N == cp_rank)
            if not self.spread:
                result += [mine] * self.student.tp
            elif tp_of_N is None:
                result += np.array_split(mine, self.student.tp)
            else:
                result += [mine[tp_of_N[mine] == tp_rank] for tp_rank in range(self.student.tp)]
        return result

    def parts(self, row_ids_N: np.ndarray, s: int, cu_seqlens: np.ndarray | None = None) -> list[Part]:
        """Every non-empty part of one micro-batch. Each received row is in exactly one part of its student rank."""
        holder_cp_N, holder_tp_N = holders(self.teacher, row_ids_N, s, cu_seqlens)
        parts = []
        for student_rank, index_P in enumerate(self.received(row_ids_N, s, cu_seqlens)):
            for cp_rank in range(self.teacher.cp):
                of_cp = np.flatnonzero(holder_cp_N[index_P] == cp_rank)
                if holder_tp_N is None:  # every tp rank holds these rows: share the sending
                    shares = np.array_split(of_cp, self.teacher.tp)
                else:
                    shares = [of_cp[holder_tp_N[index_P[of_cp]] == tp_rank] for tp_rank in range(self.teacher.tp)]
                parts += [Part(cp_rank * self.teacher.tp + tp_rank, student_rank, index_P[rows], rows)
                          for tp_rank, rows in enumerate(shares) if len(rows)]
        return parts

    def slot_rows(self, b: int, s: int) -> int:
        """Most rows that one student rank can receive from one micro-batch of b sequences of s positions."""
        return slot_rows(b, s, tp=self.student.tp, cp=self.student.cp, spread=self.spread)


def holders(side: Side, row_ids_N: np.ndarray, s: int, cu_seqlens: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """(cp rank, tp rank) that holds each row on `side`, int64 [N] each; None for tp where every tp rank holds the rows of its cp rank."""
    cp_of_s = owners(s, side.cp, side.cp_order, cu_seqlens)
    position_N = row_ids_N % s
    if not side.sequence_parallel:
        return cp_of_s[position_N], None
    local = s // side.cp
    if local % side.tp:
        raise UnsupportedLayout(rule("local sequence", local, f"must divide by tp, {side.tp}, under sequence parallelism", "Pad the sequence"))
    tp_of_s = np.empty(s, np.int64)
    for cp_rank in range(side.cp):
        tp_of_s[cp_of_s == cp_rank] = np.arange(local) // (local // side.tp)
    return cp_of_s[position_N], tp_of_s[position_N]


def owners(s: int, cp: int, order: CpOrder, cu_seqlens: np.ndarray | None = None) -> np.ndarray:
    """int64 [s]: the context-parallel rank of each position. Local order on a rank is ascending position.

    Packed documents are dealt one by one. Errors: UnsupportedLayout where a sequence or document does not divide.
    """
    if cp == 1:
        return np.zeros(s, np.int64)
    bounds = np.array([0, s]) if cu_seqlens is None else np.asarray(cu_seqlens, np.int64)
    if bounds[0] != 0 or bounds[-1] != s or np.any(np.diff(bounds) < 0):
        raise UnsupportedLayout(rule("cu_seqlens", bounds.tolist(), f"must rise from 0 to the sequence length, {s}", "Pad the last document to the sequence length"))
    num_chunks = 2 * cp if order == "zigzag" else cp
    deal = np.concatenate((np.arange(cp), np.arange(cp)[::-1])) if order == "zigzag" else np.arange(cp)
    result = np.empty(s, np.int64)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        if (end - start) % num_chunks:
            raise UnsupportedLayout(rule("length of a sequence", end - start, f"must divide by {num_chunks} under cp={cp} ({order})", "Pad each document to a multiple of it"))
        result[start:end] = np.repeat(deal, (end - start) // num_chunks)
    return result
