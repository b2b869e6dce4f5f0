"""Rows to bytes and back.

Owns the byte form of top-K rows and hidden rows. Called by writer and reader; knows neither files nor keys. Integers are little-endian.

Top-K: ids are sorted within a row and replaced by their gaps, which are small; gaps and log-probabilities are cut into byte planes, each a
zstandard frame, so that the planes that hardly vary cost next to nothing and the noisy ones are entropy-coded or left alone.
For uniformly random ids the gaps cannot take less than log2(C(V, K)) bits, 159 bytes at K = 100 and V = 248,320.
Hidden: bfloat16 in two byte planes (exponents compress, mantissas do not), fp32 in four, fp8 e4m3 with one fp32 scale a row.
Shape letters: N rows, K kept tokens, H hidden width.
"""

from typing import NamedTuple

import numpy as np
import torch
import zstandard

from megatron_kd.cache.spec import PayloadSpec
from megatron_kd.errors import CacheCorrupt, NonFiniteTeacher, VocabMismatch, rule

LEVEL = 1
FP8_MAX = 448.0


class TopKRows(NamedTuple):
    """Kept tokens of N rows; ids ascend within a row after decoding."""

    ids_NK: torch.Tensor
    """int64."""
    log_probs_NK: torch.Tensor
    """float32."""
    tail_N: torch.Tensor
    """float32, mass outside."""


def encode_topk(rows: TopKRows, spec: PayloadSpec) -> bytes:
    """Bytes of `rows`. Errors: VocabMismatch for ids outside the vocabulary or repeated in a row, NonFiniteTeacher."""
    ids_NK, order_NK = rows.ids_NK.detach().cpu().sort(dim=1)
    log_probs_NK = rows.log_probs_NK.detach().cpu().float().gather(1, order_NK)
    tail_N = rows.tail_N.detach().cpu().float()
    _check_topk(ids_NK, log_probs_NK, tail_N, spec)
    gaps = torch.diff(ids_NK, dim=1, prepend=torch.full_like(ids_NK[:, :1], -1)).sub_(1).numpy().astype("<u4")
    return _pack(_planes(gaps) + _planes(_float_bits(log_probs_NK, spec.precision)) + [tail_N.numpy().astype("<f4").tobytes()])


def decode_topk(buffer: bytes | memoryview, num_rows: int, spec: PayloadSpec, *, rescale: bool = True) -> TopKRows:
    """Rows as stored. `rescale`: shift each row of a `topk` payload so that its kept mass is 1 - tail, which undoes the rounding's drift.

    Errors: CacheCorrupt where sizes do not fit. Cost: about 1 microsecond a token and thread at K = 100.
    """
    width = 2 if spec.precision == "bf16" else 4
    planes = _unpack(buffer, 4 + width + 1)
    size = num_rows * spec.width
    gaps = _join(planes[:4], size, "<u4").reshape(num_rows, spec.width)
    ids = np.cumsum(gaps, axis=1, dtype=np.int64)
    ids += np.arange(spec.width, dtype=np.int64)
    log_probs_NK = _float_from_bits(planes[4:4 + width], size, spec.precision).view(num_rows, spec.width)
    tail_N = torch.from_numpy(_exact(planes[-1], "<f4", num_rows).copy())
    if rescale and spec.kind == "topk":
        log_probs, tail = log_probs_NK.numpy(), tail_N.numpy()  # numpy: no pool of threads beside the reader's own
        log_probs += (np.log1p(-tail) - np.log(np.exp(log_probs).sum(axis=1)))[:, None]
    return TopKRows(torch.from_numpy(ids), log_probs_NK, tail_N)


def encode_hidden(hidden_NH: torch.Tensor, spec: PayloadSpec) -> tuple[bytes, float]:
    """(bytes, squared error over squared norm of what was lost: 0 unless fp8 or a narrower type than the input's).

    Errors: NonFiniteTeacher; VocabMismatch never.
    """
    hidden_NH = hidden_NH.detach().cpu()
    if not torch.isfinite(hidden_NH).all():
        raise NonFiniteTeacher(rule("hidden rows", "NaN or infinity", "only finite rows are stored", "Check the teacher's checkpoint and precision"))
    if spec.precision != "fp8":
        stored_NH = hidden_NH.to(torch.bfloat16 if spec.precision == "bf16" else torch.float32)
        return _pack(_planes(_float_bits(stored_NH, spec.precision))), _relative_error(stored_NH, hidden_NH)
    wide_NH = hidden_NH.float()
    scale_N = (wide_NH.abs().amax(dim=1) / FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    fp8_NH = (wide_NH / scale_N.unsqueeze(1)).to(torch.float8_e4m3fn)
    error = _relative_error(fp8_NH.float() * scale_N.unsqueeze(1), wide_NH)
    return _pack([fp8_NH.view(torch.uint8).numpy().tobytes(), scale_N.numpy().astype("<f4").tobytes()]), error


def decode_hidden(buffer: bytes | memoryview, num_rows: int, spec: PayloadSpec) -> torch.Tensor:
    """[N, H]: float32 where stored as fp32, else bfloat16. Errors: CacheCorrupt where sizes do not fit."""
    size = num_rows * spec.width
    if spec.precision == "fp8":
        planes = _unpack(buffer, 2)
        fp8_NH = torch.from_numpy(_exact(planes[0], "u1", size).copy()).view(torch.float8_e4m3fn).view(num_rows, spec.width)
        scale_N = torch.from_numpy(_exact(planes[1], "<f4", num_rows).copy())
        return (fp8_NH.float() * scale_N.unsqueeze(1)).to(torch.bfloat16)
    planes = _unpack(buffer, 2 if spec.precision == "bf16" else 4)
    values = _float_from_bits(planes, size, spec.precision, widen=False)
    return values.view(num_rows, spec.width)


def _check_topk(ids_NK: torch.Tensor, log_probs_NK: torch.Tensor, tail_N: torch.Tensor, spec: PayloadSpec) -> None:
    if ids_NK.shape != log_probs_NK.shape or ids_NK.shape[1] != spec.width or tail_N.shape != ids_NK.shape[:1]:
        raise VocabMismatch(rule("top-K rows", f"ids {tuple(ids_NK.shape)}, log_probs {tuple(log_probs_NK.shape)}, tail {tuple(tail_N.shape)}",
                                 f"must be [N, {spec.width}], the same, [N]", "Extract with the cache's K"))
    if not ids_NK.numel():
        return
    if int(ids_NK[:, 0].min()) < 0 or int(ids_NK[:, -1].max()) >= spec.vocab_size:
        raise VocabMismatch(rule("token id", [int(ids_NK[:, 0].min()), int(ids_NK[:, -1].max())], f"must be in [0, {spec.vocab_size})",
                                 "Leave padding columns out of the top-K"))
    if bool((ids_NK[:, 1:] == ids_NK[:, :-1]).any()):
        raise VocabMismatch(rule("token ids", "a repeated id", "must be distinct within a row", "Merge the shards' candidates by token id"))
    if not (torch.isfinite(log_probs_NK).all() and torch.isfinite(tail_N).all()):
        raise NonFiniteTeacher(rule("teacher log-probabilities", "NaN or infinity", "only finite rows are stored", "Check the teacher's checkpoint and precision"))
    if bool((tail_N < 0).any() | (tail_N >= 1).any()):
        raise VocabMismatch(rule("tail mass", [float(tail_N.min()), float(tail_N.max())], "must be in [0, 1)", "Sum the probabilities outside the kept tokens"))


def _float_bits(values: torch.Tensor, precision: str) -> np.ndarray:
    """Little-endian bits of `values` rounded to `precision`."""
    if precision == "bf16":
        return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view("<u2")
    return values.float().contiguous().numpy().view("<u4")


def _float_from_bits(planes: list[bytes], size: int, precision: str, widen: bool = True) -> torch.Tensor:
    if precision == "fp32":
        return torch.from_numpy(_join(planes, size, "<u4").view(np.float32))
    if not widen:
        return torch.from_numpy(_join(planes, size, "<u2").view(np.int16)).view(torch.bfloat16)
    wide = np.zeros((size, 4), dtype=np.uint8)
    for index, plane in enumerate(planes):
        wide[:, 2 + index] = _exact(plane, "u1", size)
    return torch.from_numpy(wide.view(np.float32).reshape(size))


def _planes(values: np.ndarray) -> list[bytes]:
    """Bytes of significance 0, 1, ... of all values, one plane each."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, values.itemsize)
    return [flat[:, index].tobytes() for index in range(values.itemsize)]


def _join(planes: list[bytes], size: int, dtype: str) -> np.ndarray:
    """Inverse of _planes, flat."""
    joined = np.empty((size, len(planes)), dtype=np.uint8)
    for index, plane in enumerate(planes):
        joined[:, index] = _exact(plane, "u1", size)
    return joined.reshape(-1).view(dtype)


def _pack(planes: list[bytes]) -> bytes:
    """Lengths (u64 each), then one zstandard frame a plane."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    frames = [compressor.compress(plane) for plane in planes]
    return np.array([len(frame) for frame in frames], dtype="<u8").tobytes() + b"".join(frames)


def _unpack(buffer: bytes | memoryview, num_planes: int) -> list[bytes]:
    view = memoryview(buffer)
    head = 8 * num_planes
    if len(view) < head:
        raise CacheCorrupt(rule("payload", f"{len(view)} bytes", f"must hold {num_planes} frames", "Run `megatron-kd cache verify`"))
    lengths = np.frombuffer(view[:head], dtype="<u8").tolist()
    if head + sum(lengths) != len(view):
        raise CacheCorrupt(rule("payload", f"{len(view)} bytes", f"frames take {head + sum(lengths)}", "Run `megatron-kd cache verify`"))
    decompressor = zstandard.ZstdDecompressor()
    planes, offset = [], head
    for length in lengths:
        try:
            planes.append(decompressor.decompress(view[offset:offset + length]))
        except zstandard.ZstdError as e:
            raise CacheCorrupt(rule("payload frame", str(e), "must be a zstandard frame", "Run `megatron-kd cache verify`")) from e
        offset += length
    return planes


def _exact(plane: bytes, dtype: str, size: int) -> np.ndarray:
    values = np.frombuffer(plane, dtype=dtype) if len(plane) % np.dtype(dtype).itemsize == 0 else np.empty(0)
    if len(values) != size:
        raise CacheCorrupt(rule("payload plane", f"{len(plane)} bytes", f"must hold {size} values", "The record belongs to another payload format"))
    return values


def _relative_error(stored: torch.Tensor, exact: torch.Tensor) -> float:
    """Sum of squared differences over sum of squares."""
    if stored.dtype == exact.dtype and stored is exact:
        return 0.0
    difference = (stored.double() - exact.double()).square().sum()
    norm = exact.double().square().sum()
    return float(difference / norm) if norm > 0 else 0.0
