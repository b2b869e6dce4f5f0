"""What names a stored segment: its token ids, and the teacher that answered.

Owns the two halves of a cache key. A `SegmentKey` hashes the ids that attention can see from each other, and nothing else: not
the batch, the packing, the step, the loss mask or any parallel degree. A `CacheContext` names teacher, tokenizer and head
transform. A stored answer is found by both. Kept apart, so that a miss can say that the segment is there for another teacher.
Called by writer, reader and the commands. Leaves out the payload's format: that is `PayloadSpec` in spec.py.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from megatron_kd.errors import ConfigError, rule

FORMAT = b"megatron_kd.segment.1"
PREFIX_TOKENS = 16


class SegmentKey(NamedTuple):
    """128-bit xxh3 of a segment, as two unsigned 64-bit halves."""

    high: int
    low: int

    def hex(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"


def segment_key(ids_s: np.ndarray, position_ids_s: np.ndarray | None = None) -> SegmentKey:
    """Key of token ids, integers [s]. Positions count only where they are not 0..s-1, so that the usual case never depends on them.

    Cost: about 10 GB/s. Two different segments share a key with probability n^2 / 2^129 for n segments stored.
    """
    ids = np.ascontiguousarray(ids_s, dtype="<i8")
    digest = xxhash.xxh3_128(FORMAT)
    digest.update(ids.tobytes())
    if position_ids_s is not None and not np.array_equal(position_ids_s, np.arange(len(ids))):
        digest.update(b"positions" + np.ascontiguousarray(position_ids_s, dtype="<i8").tobytes())
    value = digest.intdigest()
    return SegmentKey(value >> 64, value & (2**64 - 1))


def prefix_hash(ids_s: np.ndarray) -> int:
    """64-bit hash of the first PREFIX_TOKENS ids: equal for two cuts of one text that start at the same token. Only explains misses."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_s[:PREFIX_TOKENS], dtype="<i8").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContext:
    """Who answered. Two contexts that differ in any field never share a stored row."""

    teacher: str
    """Teacher fingerprint: hash of configuration, tokenizer and weights (megatron_kd/fingerprint.py)."""
    tokenizer: str
    """Hash of the files that map text to ids, hexadecimal."""
    head_transform: str
    """Canonical text of what follows the head's projection: soft-cap, logit scale, bias; "none" where nothing does."""

    def __post_init__(self):
        for name in ("teacher", "tokenizer", "head_transform"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(rule(f"CacheContext.{name}", getattr(self, name), "must be a text that is not empty", "Pass the hash or description"))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over all fields; part of a shard's name."""
        text = json.dumps([self.teacher, self.tokenizer, self.head_transform])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, other: "CacheContext") -> str:
        """Which fields differ, in words; empty where none does."""
        names = {"teacher": "another teacher", "tokenizer": "another tokenizer", "head_transform": "another head transform"}
        return ", ".join(f"{text} ({getattr(other, name)[:16]}, wanted {getattr(self, name)[:16]})" for name, text in names.items()
                         if getattr(self, name) != getattr(other, name))
