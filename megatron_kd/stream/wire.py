"""The wire: what both sides must agree on, and the byte forms of requests, of rows and of the header of each part.

Version and fingerprint are read before anything else: `Agreement` at the handshake (every field, refused with both values), its
64-bit digest in each part's header. Rows are bfloat16 ("bf16"), never float16; "fp32" serves an fp32 teacher on the CPU, "fp8" is
float8_e4m3 with a float32 scale per row.

Shape letters: N rows of the micro-batch, P rows of one part, H hidden width, R bytes of one row in a slot.
"""

import json
import struct
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import xxhash

from megatron_kd.errors import FingerprintMismatch, RowsMismatch, TransferFailed, WireError, WireVersionMismatch, rule
from megatron_kd.rows import TokenBlock, token_hash
from megatron_kd.stream.channel import WIRE_VERSION
from megatron_kd.stream.route import Side
from megatron_kd.stream.sizes import row_bytes

CHECKSUMS = ("none", "xxh3", "sum64")
_PART = struct.Struct("<2sHQQQQIHHIIBH")
_PART_MAGIC = b"KP"
_FP8_MAX = 448.0
_PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What teacher and student must have in common. Compared field by field at the handshake."""

    fingerprint: str
    """Teacher fingerprint (megatron_kd.fingerprint), head included."""
    head_transform: str
    """Canonical text of soft-capping, scale and bias of the teacher's head."""
    hidden_size: int
    """H_t, elements a row."""
    wire_dtype: str = "bf16"
    """"bf16", "fp32" or "fp8"."""

    def check(self, other: "Agreement", peer: str) -> None:
        """FingerprintMismatch naming the first field in which `other`, announced by `peer`, differs, with both values."""
        for name, ours in asdict(self).items():
            theirs = getattr(other, name)
            if theirs != ours:
                raise FingerprintMismatch(rule(f"{name} of {peer}", theirs, f"must be ours, {ours!r}", "Start both sides from the same recipe and checkpoint"))

    def as_dict(self) -> dict:
        """Plain values for a message."""
        return asdict(self)

    @property
    def digest(self) -> int:
        """64 bits of all fields, carried by every part."""
        return xxhash.xxh3_64_intdigest(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """The message behind each write."""

    agreement: int
    """Agreement.digest of the sender."""
    seq: int
    """Number of the block within its mode."""
    lane: int
    """0 train, 1 eval."""
    generation: int
    """Of the slot that was granted."""
    teacher_rank: int
    num_parts: int
    """Parts that this student rank gets for the block."""
    num_rows: int
    """Rows of this part."""
    total_rows: int
    """Rows that this student rank gets for the block."""
    hash: int
    """TokenBlock.hash."""
    checksum: int
    checksum_kind: str
    runs: tuple[tuple[int, int], ...] = field(default=())
    """(first slot row, rows) of this part, in the order of the checksum."""

    def pack(self) -> bytes:
        """Bytes of the message; version and agreement first."""
        head = _PART.pack(_PART_MAGIC, WIRE_VERSION, self.agreement, self.seq, self.hash, self.checksum, self.generation, self.teacher_rank, self.num_parts,
                          self.num_rows, self.total_rows, CHECKSUMS.index(self.checksum_kind) << 1 | self.lane, len(self.runs))
        return head + np.asarray(self.runs, np.uint32).tobytes()

    @classmethod
    def unpack(cls, data: bytes, agreement: int) -> "PartHeader":
        """Errors: WireVersionMismatch, FingerprintMismatch, WireError; checked in this order, before the body is read."""
        if len(data) < _PART.size or data[:2] != _PART_MAGIC:
            raise WireError(f"a message of {len(data)} bytes is not a part header")
        _, version, theirs, seq, hash_, checksum, generation, teacher_rank, num_parts, num_rows, total_rows, flags, num_runs = _PART.unpack_from(data)
        if version != WIRE_VERSION:
            raise WireVersionMismatch(rule("wire version of a part", version, f"must be ours, {WIRE_VERSION}", "Install the same megatron_kd on both sides"))
        if theirs != agreement:
            raise FingerprintMismatch(rule("agreement of a part", f"{theirs:#x}", f"must be the handshake's, {agreement:#x}", "Another teacher wrote into this ring"))
        if len(data) != _PART.size + 8 * num_runs or flags >> 1 >= len(CHECKSUMS):
            raise WireError(f"part header of {len(data)} bytes announces {num_runs} runs")
        runs = np.frombuffer(data, np.uint32, offset=_PART.size).reshape(-1, 2)
        if int(runs[:, 1].sum()) != num_rows:
            raise RowsMismatch(rule("rows in a part's runs", int(runs[:, 1].sum()), f"must be its row count, {num_rows}", "The sender is broken"))
        return cls(agreement=theirs, seq=seq, lane=flags & 1, generation=generation, teacher_rank=teacher_rank, num_parts=num_parts, num_rows=num_rows,
                   total_rows=total_rows, hash=hash_, checksum=checksum, checksum_kind=CHECKSUMS[flags >> 1], runs=tuple((int(a), int(n)) for a, n in runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One student rank's slot, opened for one request."""

    student_rank: int
    generation: int
    descriptor: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A block for which rows are asked, with the slots that take them. Travels student -> teacher rank 0 -> all teacher ranks."""

    seq: int
    lane: int
    block: TokenBlock
    grants: tuple[Grant, ...]
    student: Side = field(default_factory=Side)
    """Layout of the student replica, for the route."""
    spread: bool = True
    """RoutePlan.spread."""
    checksum_kind: str = "xxh3"
    """What the sender puts into the part headers."""
    session: int = 0
    """Set by the teacher: which of its student connections asked."""

    def encode(self) -> dict:
        """A channel message."""
        block = self.block
        meta = {"t": "ask", "seq": self.seq, "lane": self.lane, "shape": list(block.tokens_bs.shape), "step": block.step, "micro_batch": block.micro_batch,
                "mode": block.mode, "hash": block.hash, "grants": [[g.student_rank, g.generation] for g in self.grants], "session": self.session,
                "student": self.student.as_dict(), "spread": self.spread, "checksum": self.checksum_kind,
                "positions": block.position_ids_bs is not None, "packed": block.cu_seqlens is not None}
        blobs = [_int32(block.tokens_bs, "token ids"), np.packbits((block.loss_mask_bs != 0).reshape(-1).numpy()).tobytes()]
        blobs += [_int32(block.position_ids_bs, "position ids")] if meta["positions"] else []
        blobs += [_int32(block.cu_seqlens, "cu_seqlens")] if meta["packed"] else []
        return {**meta, "blobs": blobs + [g.descriptor for g in self.grants]}

    @classmethod
    def decode(cls, message: dict) -> "Request":
        """Errors: WireError where the message is malformed; RowsMismatch where the token hash is not that of the ids."""
        try:
            b, s = message["shape"]
            blobs = list(message["blobs"])
            tokens = _long(blobs.pop(0)).reshape(b, s)
            mask = torch.from_numpy(np.unpackbits(np.frombuffer(blobs.pop(0), np.uint8), count=b * s).astype(np.float32)).reshape(b, s)
            positions = _long(blobs.pop(0)).reshape(b, s) if message["positions"] else None
            cu_seqlens = _long(blobs.pop(0)).int() if message["packed"] else None
            grants = tuple(Grant(student_rank=r, generation=g, descriptor=d) for (r, g), d in zip(message["grants"], blobs, strict=True))
            block = TokenBlock(tokens_bs=tokens, loss_mask_bs=mask, position_ids_bs=positions, cu_seqlens=cu_seqlens, step=message["step"],
                               micro_batch=message["micro_batch"], mode=message["mode"], hash=message["hash"])
            request = cls(seq=message["seq"], lane=message["lane"], block=block, grants=grants, session=message["session"], student=Side(**message["student"]),
                          spread=message["spread"], checksum_kind=message["checksum"])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as e:
            raise WireError(f"malformed request: {type(e).__name__}: {e}") from e
        found = token_hash(tokens, cu_seqlens)
        if found != block.hash:
            raise RowsMismatch(rule(f"token hash of request {block.key}", f"{found:#x}", f"must be the announced {block.hash:#x}", "The ids changed on their way"))
        return request


def encode_rows(hidden_PH: torch.Tensor, out_PR: torch.Tensor, wire_dtype: str) -> None:
    """Write rows into staging, uint8 [P, R]: plain elements, or fp8 with the row's scale = max|row| / 448 behind it."""
    hidden = hidden_PH.shape[1]
    if wire_dtype in _PLAIN:
        dtype = _PLAIN[wire_dtype]
        out_PR[:, :hidden * dtype.itemsize].view(dtype).copy_(hidden_PH)
        return
    scale_P = hidden_PH.abs().amax(dim=1).float().clamp_min(1e-12) / _FP8_MAX
    out_PR[:, :hidden].view(torch.float8_e4m3fn).copy_(hidden_PH.float() / scale_P[:, None])
    out_PR[:, hidden:hidden + 4] = scale_P[:, None].view(torch.uint8)


def decode_rows(slot_PR: torch.Tensor, hidden: int, wire_dtype: str) -> torch.Tensor:
    """[P, H]: a view of the slot for plain rows, a new bfloat16 tensor for fp8."""
    if wire_dtype in _PLAIN:
        return slot_PR.view(_PLAIN[wire_dtype])[:, :hidden]
    scale_P1 = slot_PR[:, hidden:hidden + 4].contiguous().view(torch.float32)
    return (slot_PR[:, :hidden].view(torch.float8_e4m3fn).float() * scale_P1).bfloat16()


def as_rows(buffer: torch.Tensor, num_rows: int, hidden: int, wire_dtype: str) -> torch.Tensor:
    """The first `num_rows` rows of a slot or of staging as uint8 [N, R]."""
    size = row_bytes(hidden, wire_dtype)
    return buffer[:num_rows * size].view(num_rows, size)


def checksum(rows: list[torch.Tensor], kind: str) -> int:
    """64 bits over contiguous uint8 [P, R] pieces in order. "xxh3" copies GPU rows to the host; "sum64" stays on the device.

    sum64 = sum over 8-byte words w_i of w_i * (2 i + 1), wrapping: sensitive to any change of one word and to exchanges of words.
    """
    if kind == "none":
        return 0
    if kind == "xxh3":
        digest = xxhash.xxh3_64()
        for piece in rows:
            digest.update(piece.cpu().numpy())
        return digest.intdigest()
    total, start = 0, 0
    for piece in rows:  # with i = r * W + c the sum splits into sums over columns and over rows: two readings, nothing of the rows' size written
        words_PW = piece.view(torch.int64)
        num_rows, width = words_PW.shape
        column_factors, row_numbers = (torch.arange(n, device=words_PW.device) for n in (width, num_rows))
        of_columns = (words_PW.sum(0) * (2 * column_factors + 1)).sum()
        of_rows = (words_PW.sum(1) * (2 * width * (start + row_numbers))).sum()
        total += int(of_columns + of_rows)
        start += num_rows
    return total & 0xFFFFFFFFFFFFFFFF


def verify_part(header: PartHeader, slot: torch.Tensor, agreement: Agreement, *, hash_: int, total_rows: int, source: str) -> None:
    """Check one landed part. Errors: RowsMismatch for another token hash or row count, TransferFailed for a wrong checksum; with both values."""
    if header.hash != hash_:
        raise RowsMismatch(rule(f"token hash from {source}", f"{header.hash:#x}", f"must be that of the asked block, {hash_:#x}", "Teacher and student do not see the same tokens"))
    end = max((start + n for start, n in header.runs), default=0)
    if header.total_rows != total_rows or end > total_rows:
        raise RowsMismatch(rule(f"rows from {source}", max(header.total_rows, end), f"must be the {total_rows} asked of this rank", "Teacher and student disagree on mask or layout"))
    rows_NR = as_rows(slot, total_rows, agreement.hidden_size, agreement.wire_dtype)
    found = checksum([rows_NR[start:start + n] for start, n in header.runs], header.checksum_kind)
    if found != header.checksum:
        raise TransferFailed(rule(f"checksum ({header.checksum_kind}) of rows from {source}", f"{found:#x}", f"must be the sent {header.checksum:#x}", "Rows changed between the two memories"))


def _int32(tensor: torch.Tensor, what: str) -> bytes:
    if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < 2**31:
        raise WireError(rule(what, (int(tensor.min()), int(tensor.max())), "must be in [0, 2^31)", "Check the batch"))
    return tensor.to("cpu", torch.int32).contiguous().numpy().tobytes()


def _long(blob: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(blob, np.int32).astype(np.int64))
