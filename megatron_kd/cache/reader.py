"""CacheReader: the stored rows of a micro-batch, decoded ahead of time by threads.

Owns assembly: segments of a TokenBlock -> records -> a TopKBlock or RowBlock in row order. Called by student/cached.py and
by `cache coverage`. Decompression and checksums release the interpreter lock, so threads scale. Shape letters: N rows, K kept tokens.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from megatron_kd.cache.codec import decode_hidden, decode_topk
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.segments import Segment, split
from megatron_kd.cache.shard import Record
from megatron_kd.cache.spec import Collection
from megatron_kd.cache.storage import Storage
from megatron_kd.errors import CacheMiss, rule
from megatron_kd.rows import RowBlock, TokenBlock, TopKBlock

REFRESH_INTERVAL_S = 2.0
NO_MASS = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRead:
    """What the store holds of one micro-batch."""

    rows: TopKBlock | RowBlock
    """All asked rows; those of missing segments carry no mass (probability 0 on K distinct ids, tail 0), or zeros in a RowBlock."""
    missing: tuple[Segment, ...]
    """Segments that are not stored with all asked rows."""
    missing_N: torch.Tensor
    """bool [N]: rows of those segments."""


class CacheReader:
    """Reads one collection of a store. Thread-safe. Close it, or use `with`."""

    def __init__(self, storage: Storage, collection: Collection, *, num_threads: int = 2):
        self.collection, self._storage = collection, storage
        self.manifest = Manifest(storage)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kd-cache")
        self._lock = threading.Lock()
        self._refreshed_at = time.monotonic()
        self.num_bytes_read = self.num_rows_read = 0
        self.read_s = 0.0

    def __enter__(self) -> "CacheReader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def submit(self, block: TokenBlock) -> Future:
        """Start reading on a thread; the future's result is a BlockRead."""
        return self._pool.submit(self.read, block)

    def read(self, block: TokenBlock) -> BlockRead:
        """All asked rows of `block`. A miss is not an error here: see `miss_error`. Errors: CacheCorrupt."""
        started = time.perf_counter()
        segments = list(split(block))
        records = self._find(segments)
        counts = [len(segment.asked) for segment in segments]
        rows = self._assemble(block, segments, records)
        missing_N = np.repeat([record is None for record in records], counts) if segments else np.zeros(0, bool)
        with self._lock:
            self.num_rows_read += int(sum(counts))
            self.num_bytes_read += sum(len(record.payload) for record in records if record is not None)
            self.read_s += time.perf_counter() - started
        return BlockRead(rows=rows, missing=tuple(s for s, record in zip(segments, records, strict=True) if record is None),
                         missing_N=torch.from_numpy(missing_N.astype(bool)))

    def missing(self, block: TokenBlock) -> list[Segment]:
        """Segments that `read` would miss; looks the rows up without decoding them."""
        segments = list(split(block))
        return [segment for segment, record in zip(segments, self._find(segments), strict=True) if record is None]

    def miss_error(self, missing: tuple[Segment, ...], block: TokenBlock, build_command: str) -> CacheMiss:
        """A CacheMiss that names the first missing segment, the nearest explanation, and what to run."""
        first = missing[0]
        return CacheMiss(rule(f"segment {first.describe()} of micro-batch {block.key}", f"{len(missing)} segment(s) not in {self._storage.location}",
                              self.manifest.explain(self.collection, first), f"Run `{build_command}`, or set cache.on_miss=ce_only"))

    def close(self) -> None:
        """End the threads; what they had not started is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _find(self, segments: list[Segment]) -> list[Record | None]:
        records = [self.manifest.find_covering(self.collection, segment) for segment in segments]
        if None in records and self._refresh():
            records = [record or self.manifest.find_covering(self.collection, segment) for segment, record in zip(segments, records, strict=True)]
        return records

    def _refresh(self) -> bool:
        """Look for shards finished since the last look, at most every REFRESH_INTERVAL_S; whether there were any."""
        with self._lock:
            if time.monotonic() - self._refreshed_at < REFRESH_INTERVAL_S:
                return False
            self._refreshed_at = time.monotonic()
            return self.manifest.refresh() > 0

    def _assemble(self, block: TokenBlock, segments: list[Segment], records: list[Record | None]) -> TopKBlock | RowBlock:
        spec = self.collection.spec
        row_ids_N = block.row_ids_N
        num_rows, ends = len(row_ids_N), np.cumsum([len(segment.asked) for segment in segments]).tolist()
        parts = [(slice(end - len(s.asked), end), s, record) for s, end, record in zip(segments, ends, records, strict=True) if record is not None]
        if spec.kind == "hidden":
            hidden_NH = torch.zeros(num_rows, spec.width, dtype=torch.float32 if spec.precision == "fp32" else torch.bfloat16)
            for where, segment, record in parts:
                _fill(hidden_NH[where], decode_hidden(record.payload, len(record.rows), spec), segment, record)
            return RowBlock(hidden_NH=hidden_NH, row_ids_N=row_ids_N, hash=block.hash)
        ids_NK = torch.empty(num_rows, spec.width, dtype=torch.int64)
        log_probs_NK, tail_N = torch.empty(num_rows, spec.width), torch.empty(num_rows)
        for where, segment, record in parts:
            decoded = decode_topk(record.payload, len(record.rows), spec)
            for target, source in zip((ids_NK, log_probs_NK, tail_N), decoded, strict=True):
                _fill(target[where], source, segment, record)
        for segment, end, record in zip(segments, ends, records, strict=True):
            if record is None:
                where = slice(end - len(segment.asked), end)
                ids_NK[where], log_probs_NK[where], tail_N[where] = torch.arange(spec.width), NO_MASS, 0.0
        return TopKBlock(ids_NK=ids_NK, log_probs_NK=log_probs_NK, tail_N=tail_N, row_ids_N=row_ids_N, hash=block.hash)


def _fill(target: torch.Tensor, stored: torch.Tensor, segment: Segment, record: Record) -> None:
    """Copy the asked rows out of the stored ones."""
    if len(segment.asked) == len(record.rows):
        target.copy_(stored)
    else:
        torch.index_select(stored, 0, torch.from_numpy(np.searchsorted(record.rows, segment.asked)), out=target)
