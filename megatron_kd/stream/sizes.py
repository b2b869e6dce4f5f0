"""Closed forms of the stream: bytes of a ring and bytes on the wire. Called by the allocation itself and by the planner.

Imports no torch. Every function counts exactly what the named code allocates or sends.
"""

ROW_ALIGN_BYTES = 16
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "fp8": 1}
WIRE_DTYPES = tuple(_ELEMENT_BYTES)
NUM_STAGED = 2
"""Answers of a teacher rank that are staged or on their way at once: one is written while the next is computed."""


def row_bytes(hidden_size: int, wire_dtype: str = "bf16") -> int:
    """Bytes of one row in a slot: H elements, for fp8 a float32 scale after them, rounded up to 16."""
    used = hidden_size * _ELEMENT_BYTES[wire_dtype] + (4 if wire_dtype == "fp8" else 0)
    return -(-used // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def slot_rows(b: int, s: int, *, tp: int, cp: int, spread: bool = True) -> int:
    """Rows of one slot on one student rank: every position of its context-parallel share, split over tp when spread."""
    rows = b * s // cp
    return -(-rows // tp) if spread else rows


def slot_bytes(b: int, s: int, hidden_size: int, *, tp: int = 1, cp: int = 1, spread: bool = True, wire_dtype: str = "bf16") -> int:
    """Bytes of one slot on one student rank."""
    return slot_rows(b, s, tp=tp, cp=cp, spread=spread) * row_bytes(hidden_size, wire_dtype)


def ring_bytes(depth: int, **slot) -> int:
    """Bytes of one ring (one mode) on one student rank: `depth` slots; `slot` as in slot_bytes."""
    return depth * slot_bytes(slot.pop("b"), slot.pop("s"), slot.pop("hidden_size"), **slot)


def staging_bytes(b: int, s: int, hidden_size: int, **share) -> int:
    """Bytes that a teacher rank sends from: NUM_STAGED answers; `share` as in staged_bytes."""
    return NUM_STAGED * staged_bytes(b, s, hidden_size, **share)


def staged_bytes(b: int, s: int, hidden_size: int, *, tp: int = 1, wire_dtype: str = "bf16", student_tp: int = 1, spread: bool = True) -> int:
    """Bytes of one registered send buffer of a teacher rank: the largest share of one micro-batch that it may have to send.

    Under sequence parallelism or shared sending a rank sends 1/tp of the rows; without spread once per student tp rank.
    """
    copies = 1 if spread else student_tp
    return (-(-b * s // tp) + student_tp) * copies * row_bytes(hidden_size, wire_dtype)


def wire_payload_bytes(num_rows: int, hidden_size: int, *, wire_dtype: str = "bf16", student_tp: int = 1, spread: bool = True) -> int:
    """Bytes of rows that cross to one student replica for `num_rows` asked rows: what the counters of both sides must show."""
    return num_rows * (1 if spread else student_tp) * row_bytes(hidden_size, wire_dtype)


def request_bytes(b: int, s: int, *, positions: bool = False) -> int:
    """Bytes of a request's body: int32 ids, one mask bit a token, optional int32 positions (frame and grants add under 2 KiB)."""
    return b * s * 4 + -(-b * s // 8) + (b * s * 4 if positions else 0)
