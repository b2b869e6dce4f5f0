"""Shard files and their index files: bytes on disk, each of them under a checksum.

Owns both formats. A shard is a header and records one after another; a record describes itself (key, lengths, checksum), so a shard
can be read up to its last whole record after any crash. An index file lists the records of one finished shard; it is written after
the shard is complete and is what makes the shard visible: an index without a shard, or a shard without an index, is never served.
Called by writer, reader and upkeep. Knows no file system: it works on bytes.

    shard   = MAGIC  u32 length  JSON collection  u64 xxh3(all before)  record*
    record  = "KDR1" u64 body length, u64 key high, u64 key low, u64 prefix hash, u32 tokens, u32 rows, u32 bitmap length, f32 error,
              u64 xxh3(head before it and body)  body = bitmap of stored rows (absent where all are) + payload
    index   = MAGIC  u32 length  JSON {collection, shard, bytes, ...}  entries  16 bytes xxh3-128(all before)
"""

import json
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from megatron_kd.cache.key import SegmentKey
from megatron_kd.cache.spec import Collection
from megatron_kd.errors import CacheCorrupt, rule

SHARD_MAGIC = b"KDSHARD1"
INDEX_MAGIC = b"KDINDEX1"
RECORD_MAGIC = b"KDR1"
_RECORD = struct.Struct("<4sQQQQIIIf")
_CHECK = struct.Struct("<Q")
RECORD_HEAD_BYTES = _RECORD.size + _CHECK.size
ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("prefix", "<u8"), ("offset", "<u8"), ("bytes", "<u8"), ("check", "<u8"), ("tokens", "<u4"), ("rows", "<u4"),
                  ("error", "<f4")])
"""One record in an index: key, where it lies, its checksum, tokens of the segment, rows stored."""


class Record(NamedTuple):
    """One segment's stored rows; `payload` is still encoded."""

    key: SegmentKey
    prefix: int
    num_tokens: int
    rows: np.ndarray
    """int64, ascending: positions within the segment that are stored."""
    payload: memoryview
    check: int
    error: float
    """Squared error over squared norm of hidden rows that lost precision; 0 where nothing was lost."""


class Index(NamedTuple):
    """What an index file says."""

    collection: Collection
    shard: str
    """File name of the shard."""
    shard_bytes: int
    entries: np.ndarray
    """ENTRY [records], in the order of the file."""


def shard_header(collection: Collection) -> bytes:
    """First bytes of a shard."""
    text = collection.to_json().encode()
    head = SHARD_MAGIC + struct.pack("<I", len(text)) + text
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def read_shard_header(data: memoryview | bytes, name: str) -> tuple[Collection, int]:
    """(collection, header length). Errors: CacheCorrupt."""
    data = memoryview(data)
    if bytes(data[:8]) != SHARD_MAGIC or len(data) < 12:
        raise _corrupt(name, "header", bytes(data[:8]), f"must begin with {SHARD_MAGIC!r}")
    end = 12 + struct.unpack("<I", data[8:12])[0]
    if len(data) < end + 8 or _CHECK.unpack(data[end:end + 8])[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise _corrupt(name, "header", f"{len(data)} bytes", "its checksum does not match")
    return Collection.from_json(bytes(data[12:end]).decode()), end + 8


def encode_record(key: SegmentKey, prefix: int, num_tokens: int, rows: np.ndarray, payload: bytes, error: float = 0.0) -> bytes:
    """Bytes of one record."""
    bitmap = b""
    if len(rows) != num_tokens:
        stored = np.zeros(num_tokens, dtype=bool)
        stored[rows] = True
        bitmap = np.packbits(stored, bitorder="little").tobytes()
    head = _RECORD.pack(RECORD_MAGIC, len(bitmap) + len(payload), key.high, key.low, prefix, num_tokens, len(rows), len(bitmap), error)
    digest = xxhash.xxh3_64(head)
    digest.update(bitmap)
    digest.update(payload)
    return b"".join((head, _CHECK.pack(digest.intdigest()), bitmap, payload))


def decode_record(data: memoryview | bytes, name: str, offset: int = 0) -> tuple[Record, int]:
    """(record at `offset`, its length in bytes). Errors: CacheCorrupt where it is cut short or a byte differs. Cost: xxh3, 10 GB/s."""
    data = memoryview(data)[offset:]
    if len(data) < RECORD_HEAD_BYTES:
        raise _corrupt(name, f"record at byte {offset}", f"{len(data)} bytes", "is cut short")
    magic, body, high, low, prefix, num_tokens, num_rows, bitmap_bytes, error = _RECORD.unpack(data[:_RECORD.size])
    end = RECORD_HEAD_BYTES + body
    if magic != RECORD_MAGIC or end > len(data) or bitmap_bytes > body:
        raise _corrupt(name, f"record at byte {offset}", bytes(magic), "is not a whole record")
    check = _CHECK.unpack(data[_RECORD.size:RECORD_HEAD_BYTES])[0]
    digest = xxhash.xxh3_64(data[:_RECORD.size])
    digest.update(data[RECORD_HEAD_BYTES:end])
    if digest.intdigest() != check:
        raise _corrupt(name, f"record at byte {offset}", f"{digest.intdigest():#x}", f"must have checksum {check:#x}")
    bitmap = data[RECORD_HEAD_BYTES:RECORD_HEAD_BYTES + bitmap_bytes]
    rows = np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=num_tokens, bitorder="little")) if bitmap_bytes else np.arange(num_rows)
    return Record(SegmentKey(high, low), prefix, num_tokens, rows, data[RECORD_HEAD_BYTES + bitmap_bytes:end], check, error), end


def scan(data: memoryview | bytes, name: str, start: int) -> Iterator[tuple[int, Record, int] | tuple[int, None, int]]:
    """(offset, record, length) of every whole record from `start`; (offset, None, length) for each damaged stretch between them."""
    data = memoryview(data)
    offset, damaged = start, None
    while offset < len(data):
        try:
            record, length = decode_record(data, name, offset)
        except CacheCorrupt:
            damaged = offset if damaged is None else damaged
            offset = _next_magic(data, offset + 1)
            continue
        if damaged is not None:
            yield damaged, None, offset - damaged
            damaged = None
        yield offset, record, length
        offset += length
    if damaged is not None:
        yield damaged, None, len(data) - damaged


def entry_of(record: Record, offset: int, length: int) -> tuple:
    """The record's line in an index, in the order of ENTRY."""
    return record.key.high, record.key.low, record.prefix, offset, length, record.check, record.num_tokens, len(record.rows), record.error


def encode_index(index: Index) -> bytes:
    """Bytes of an index file."""
    meta = {"collection": index.collection.to_json(), "shard": index.shard, "shard_bytes": index.shard_bytes, "records": len(index.entries)}
    text = json.dumps(meta, sort_keys=True).encode()
    body = INDEX_MAGIC + struct.pack("<I", len(text)) + text + index.entries.astype(ENTRY).tobytes()
    return body + xxhash.xxh3_128_digest(body)


def decode_index(data: bytes, name: str) -> Index:
    """Errors: CacheCorrupt where a byte differs."""
    if len(data) < 28 or data[:8] != INDEX_MAGIC or xxhash.xxh3_128_digest(data[:-16]) != data[-16:]:
        raise _corrupt(name, "index", f"{len(data)} bytes", "its checksum does not match")
    end = 12 + struct.unpack("<I", data[8:12])[0]
    meta = json.loads(data[12:end])
    entries = np.frombuffer(data[end:-16], dtype=ENTRY)
    return Index(Collection.from_json(meta["collection"]), meta["shard"], meta["shard_bytes"], entries)


def _next_magic(data: memoryview, start: int, block: int = 1 << 20) -> int:
    """Offset of the next RECORD_MAGIC at or after `start`, or the end."""
    while start < len(data):
        found = bytes(data[start:start + block + len(RECORD_MAGIC) - 1]).find(RECORD_MAGIC)
        if found >= 0:
            return start + found
        start += block
    return len(data)


def _corrupt(name: str, part: str, got: object, what: str) -> CacheCorrupt:
    return CacheCorrupt(rule(f"{name}: {part}", got, what, "Run `megatron-kd cache repair` and build what it drops again"))
