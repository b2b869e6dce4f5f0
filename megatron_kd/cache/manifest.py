"""Manifest: which segments a store holds, and where.

Owns the index files as one table in memory: lookup by key, explanation of misses, sums for `cache stat`. Called by writer, reader and
upkeep. Memory: 88 bytes a segment. `refresh` picks up what other writers finished since.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_kd.cache.key import SegmentKey
from megatron_kd.cache.segments import Segment
from megatron_kd.cache.shard import ENTRY, Index, Record, decode_index, decode_record
from megatron_kd.cache.spec import Collection
from megatron_kd.cache.storage import INDEX_DIR, SHARD_DIR, Storage
from megatron_kd.errors import CacheCorrupt, rule


class Location(NamedTuple):
    """Where one record lies."""

    shard: str
    offset: int
    num_bytes: int
    check: int
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Entries of one collection, sorted by key and then by rows, most rows first."""

    entries: np.ndarray
    """ENTRY [segments]."""
    shards: np.ndarray
    """int32 [segments]: which of `names` holds each."""
    names: tuple[str, ...]
    """Shard file names."""


class Manifest:
    """Index files of a store. Not thread-safe while `refresh` runs; lookups are."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self.indexes: dict[str, Index] = {}
        self._tables: dict[str, _Table] = {}
        self.refresh()

    def refresh(self) -> int:
        """Read index files that are new, forget those that are gone; returns how many changed.

        Errors: CacheCorrupt for a damaged index, or a shard that is absent or has another size than its index says.
        """
        names = self._storage.files(INDEX_DIR)
        new = {name: decode_index(self._storage.read(f"{INDEX_DIR}/{name}"), name) for name in sorted(names) if name not in self.indexes}
        gone = [name for name in self.indexes if name not in names]
        if not new and not gone:
            return 0
        sizes = self._storage.files(SHARD_DIR)
        for index in new.values():
            if sizes.get(index.shard) != index.shard_bytes:
                raise CacheCorrupt(rule(f"shard {index.shard}", f"{sizes.get(index.shard, 'no')} bytes", f"its index says {index.shard_bytes}",
                                        "Run `megatron-kd cache repair` and build what it drops again"))
        self.indexes = {**{name: index for name, index in self.indexes.items() if name not in gone}, **new}
        self._build()
        return len(new) + len(gone)

    @property
    def collections(self) -> list[Collection]:
        """All pairs of context and payload that the store holds."""
        return list({index.collection.digest: index.collection for index in self.indexes.values()}.values())

    def find(self, collection: Collection, key: SegmentKey) -> list[Location]:
        """Records of `key`, most rows first; empty where there is none. Cost: two binary searches."""
        table = self._tables.get(collection.digest)
        return [] if table is None else _lookup(table, key)

    def find_covering(self, collection: Collection, segment: Segment) -> Record | None:
        """A record of the segment that holds all asked rows, checked; None where there is none. Errors: CacheCorrupt."""
        for location in self.find(collection, segment.key):
            if location.num_rows < len(segment.asked):
                return None
            record = self.load(location)
            if location.num_rows == location.num_tokens or np.isin(segment.asked, record.rows, assume_unique=True).all():
                return record
        return None

    def load(self, location: Location) -> Record:
        """The record at `location`. Errors: CacheCorrupt where its bytes fail their checksum or are another record's."""
        name = f"{SHARD_DIR}/{location.shard}"
        record, _ = decode_record(self._storage.view(name, location.offset, location.num_bytes), name)
        if record.check != location.check:
            raise CacheCorrupt(rule(f"{name} at byte {location.offset}", f"{record.check:#x}", f"its index says {location.check:#x}", "Run `megatron-kd cache repair`"))
        return record

    def explain(self, collection: Collection, segment: Segment) -> str:
        """Why a segment with asked rows is not served, in one sentence: the nearest reason that the store shows."""
        own = self.find(collection, segment.key)
        if own:
            missing = min((np.setdiff1d(segment.asked, self.load(location).rows) for location in own), key=len)
            return f"stored with another loss mask: {len(missing)} of {len(segment.asked)} asked rows are absent, first at position {missing[0]}"
        for other in self.collections:
            if other.digest != collection.digest and self.find(other, segment.key):
                difference = collection.context.difference(other.context)
                return f"stored for {difference}" if difference else f"stored as {other.spec.describe()}, wanted {collection.spec.describe()}"
        if not self.indexes:
            return "the store is empty: not built yet"
        if not any(other.digest == collection.digest for other in self.collections):
            other = self.collections[0]
            difference = collection.context.difference(other.context) or f"{other.spec.describe()}, wanted {collection.spec.describe()}"
            return f"nothing is stored for this teacher and payload; the store holds {difference}"
        table = self._tables[collection.digest]
        lengths = np.unique(table.entries["tokens"][table.entries["prefix"] == segment.prefix])
        if lengths.size:
            return f"the same first tokens are stored with other lengths {lengths[:4].tolist()}: packed or cut differently (sequence length, packing, data seed)"
        return f"not built yet: none of the {len(table.entries)} stored segments begins like it"

    def _build(self) -> None:
        by_collection: dict[str, list[Index]] = {}
        for index in self.indexes.values():
            by_collection.setdefault(index.collection.digest, []).append(index)
        self._tables = {digest: _table(indexes) for digest, indexes in by_collection.items()}


def _table(indexes: list[Index]) -> _Table:
    entries = np.concatenate([index.entries for index in indexes]) if indexes else np.empty(0, ENTRY)
    shards = np.repeat(np.arange(len(indexes), dtype=np.int32), [len(index.entries) for index in indexes])
    order = np.lexsort((-entries["rows"].astype(np.int64), entries["low"], entries["high"]))
    return _Table(entries=entries[order], shards=shards[order], names=tuple(index.shard for index in indexes))


def _lookup(table: _Table, key: SegmentKey) -> list[Location]:
    high = table.entries["high"]
    first = int(np.searchsorted(high, np.uint64(key.high), "left"))
    found = []
    while first < len(high) and int(high[first]) == key.high:
        entry = table.entries[first]
        if int(entry["low"]) == key.low:
            found.append(Location(table.names[table.shards[first]], int(entry["offset"]), int(entry["bytes"]), int(entry["check"]), int(entry["tokens"]), int(entry["rows"])))
        first += 1
    return found
