"""CacheWriter: encoded segments into finished shards, and recovery of what a killed writer left.

Owns the life of a shard: partial (locked by its writer, one write a record) -> shards/ (rename or upload) -> index/ (visible). Any number
of writers may work on one store. A process that dies at any byte loses at most the record it was writing: the next writer to open the
store seals whole records of partial files whose lock is free. Called by teacher/dump.py, the cached source and upkeep.
"""

import fcntl
import hashlib
import os
import tempfile
import uuid
from pathlib import Path

import numpy as np

from megatron_kd.cache.key import SegmentKey
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.segments import Segment
from megatron_kd.cache.shard import ENTRY, Index, encode_index, encode_record, entry_of, read_shard_header, scan, shard_header
from megatron_kd.cache.spec import Collection
from megatron_kd.cache.storage import INDEX_DIR, PARTIAL_DIR, SHARD_DIR, Storage
from megatron_kd.errors import CacheCorrupt

DEFAULT_SHARD_BYTES = 256 * 2**20
RECOVERY_LOCK = "recovery.lock"


class CacheWriter:
    """Appends segments of one collection. Use with `with`; one thread. Recovers the store when opened."""

    def __init__(self, storage: Storage, collection: Collection, *, shard_bytes: int = DEFAULT_SHARD_BYTES, spool_dir: str | None = None,
                 recover_first: bool = True):
        """`spool_dir`: where partial shards of an object store grow; default a folder of the system's temporary directory, the same for
        the same store, so that a restarted process finds them."""
        self._storage, self._collection, self._shard_bytes = storage, collection, shard_bytes
        self._spool = spool_path(storage, spool_dir)
        self.recovered_segments = recover(storage, spool_dir) if recover_first else 0
        self.manifest = Manifest(storage)
        self._file: _Partial | None = None
        self._open_rows: dict[SegmentKey, np.ndarray] = {}
        self.num_segments = self.num_tokens = self.num_bytes = 0

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def has(self, segment: Segment) -> bool:
        """Whether every asked row of the segment is stored, by this writer or an earlier one."""
        return any(np.isin(segment.asked, rows, assume_unique=True).all() for rows in self.stored_rows(segment.key))

    def stored_rows(self, key: SegmentKey) -> list[np.ndarray]:
        """Positions that each stored record of the segment holds; a new record for another loss mask should hold their union too."""
        open_rows = [self._open_rows[key]] if key in self._open_rows else []
        return open_rows + [self.manifest.load(location).rows for location in self.manifest.find(self._collection, key)]

    def add(self, key: SegmentKey, prefix: int, num_tokens: int, rows: np.ndarray, payload: bytes, error: float = 0.0) -> None:
        """Append one segment's encoded rows. Durable against the death of the process when this returns, visible after `seal`."""
        if self._file is None:
            self._file = _Partial(self._spool, self._collection)
        data = encode_record(key, prefix, num_tokens, rows, payload, error)
        self._file.append(data)
        self._open_rows[key] = rows
        self.num_segments, self.num_tokens, self.num_bytes = self.num_segments + 1, self.num_tokens + len(rows), self.num_bytes + len(data)
        if self._file.num_bytes >= self._shard_bytes:
            self.seal()

    def seal(self) -> None:
        """Finish the open shard and make it visible; nothing happens where none is open."""
        if self._file is None:
            return
        partial, self._file = self._file, None
        try:
            _publish(self._storage, partial.path, partial.path.name)
        finally:
            partial.close()
        self._open_rows.clear()
        self.manifest.refresh()

    def close(self) -> None:
        """Seal. Safe to call twice."""
        self.seal()


class _Partial:
    """A growing shard file under an exclusive lock that dies with its process."""

    def __init__(self, folder: Path, collection: Collection):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = folder / f"{collection.digest}-{uuid.uuid4().hex}.kds"
            self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            if _lock(self._fd) and self.path.exists():
                break
            os.close(self._fd)
        self.num_bytes = 0
        self.append(shard_header(collection))

    def append(self, data: bytes) -> None:
        """All of `data` handed to the operating system."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view):]
        self.num_bytes += len(data)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def spool_path(storage: Storage, spool_dir: str | None = None) -> Path:
    """Folder of partial shards: inside a local store, else under `spool_dir` or the temporary directory, named by the store's location."""
    if storage.is_local:
        return storage.local_path(PARTIAL_DIR)
    base = Path(spool_dir) if spool_dir else Path(tempfile.gettempdir()) / "megatron_kd_spool"
    return base / hashlib.sha256(storage.location.encode()).hexdigest()[:16]


def recover(storage: Storage, spool_dir: str | None = None) -> int:
    """Seal what dead writers left: partial shards whose lock is free, and shards that lack their index. Returns segments made visible.

    One process at a time: another that opens the store waits, so that it knows what was recovered and does not build it again.
    """
    spool = spool_path(storage, spool_dir)
    spool.mkdir(parents=True, exist_ok=True)
    with open(spool / RECOVERY_LOCK, "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return _recover_partial(storage, spool) + _recover_unindexed(storage)


def _recover_partial(storage: Storage, spool: Path) -> int:
    recovered = 0
    for path in sorted(spool.glob("*.kds")):
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            if _lock(fd) and path.exists():
                recovered += _salvage(storage, path)
        finally:
            os.close(fd)
    return recovered


def _recover_unindexed(storage: Storage) -> int:
    indexed = {shard_name(name) for name in storage.files(INDEX_DIR)}
    return sum(_write_index(storage, name, storage.whole(f"{SHARD_DIR}/{name}")) for name in storage.files(SHARD_DIR) if name not in indexed)


def index_name(shard: str) -> str:
    """Name of the index file of a shard file."""
    return shard.removesuffix(".kds") + ".kdi"


def shard_name(index: str) -> str:
    """Name of the shard file of an index file."""
    return index.removesuffix(".kdi") + ".kds"


def _salvage(storage: Storage, path: Path) -> int:
    """Cut a dead writer's partial shard after its last whole record and publish it; an empty one is removed."""
    data = path.read_bytes()
    try:
        _, start = read_shard_header(data, path.name)
    except CacheCorrupt:
        path.unlink()
        return 0
    end = max((offset + length for offset, record, length in scan(data, path.name, start) if record is not None), default=start)
    if end == start:
        path.unlink()
        return 0
    os.truncate(path, end)
    return _publish(storage, path, path.name)


def _publish(storage: Storage, path: Path, name: str) -> int:
    """Partial file -> shard -> index; returns the number of records."""
    data = path.read_bytes()
    storage.move_in(path, f"{SHARD_DIR}/{name}")
    return _write_index(storage, name, data)


def _write_index(storage: Storage, name: str, data: bytes | memoryview) -> int:
    collection, start = read_shard_header(data, name)
    lines = [entry_of(record, offset, length) for offset, record, length in scan(data, name, start) if record is not None]
    entries = np.array(lines, dtype=ENTRY)
    storage.put(f"{INDEX_DIR}/{index_name(name)}", encode_index(Index(collection, name, len(data), entries)))
    return len(lines)


def _lock(fd: int) -> bool:
    """Whether this process now holds the file's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
