"""What people do with a finished store: statistics, verification, merging, repair, measuring the reader.

Called by `megatron-kd cache stat|verify|merge|repair`. Repair and merge want no reader or writer at work on the store they change.
"""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_kd.cache.codec import decode_hidden, decode_topk
from megatron_kd.cache.key import SegmentKey
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.shard import decode_index, decode_record, read_shard_header, scan
from megatron_kd.cache.spec import Collection
from megatron_kd.cache.storage import INDEX_DIR, SHARD_DIR, Storage
from megatron_kd.cache.writer import CacheWriter, index_name, recover, shard_name, spool_path
from megatron_kd.errors import CacheCorrupt, CacheError

Progress = Callable[[int, int], None]
"""(done bytes, all bytes)."""


def stat(storage: Storage) -> dict:
    """Sums for each collection: segments, tokens (stored rows), bytes, bytes_per_token, teacher, tokenizer, payload, and shards left open.

    Errors: CacheCorrupt where an index is damaged.
    """
    manifest = Manifest(storage)
    collections = []
    for collection in manifest.collections:
        indexes = [index for index in manifest.indexes.values() if index.collection.digest == collection.digest]
        entries = np.concatenate([index.entries for index in indexes])
        keys = np.unique(entries[["high", "low"]])
        tokens, num_bytes = int(entries["rows"].sum()), int(sum(index.shard_bytes for index in indexes))
        weighted = float((entries["error"].astype(np.float64) * entries["rows"]).sum())
        collections.append({"teacher": collection.context.teacher, "tokenizer": collection.context.tokenizer, "head_transform": collection.context.head_transform,
                            "payload": collection.spec.kind, "width": collection.spec.width, "precision": collection.spec.precision,
                            "vocab_size": collection.spec.vocab_size, "shards": len(indexes),
                            "segments": len(keys), "records": len(entries), "tokens": tokens, "bytes": num_bytes,
                            "bytes_per_token": num_bytes / tokens if tokens else None, "relative_error": math.sqrt(weighted / tokens) if tokens else None,
                            "segment_tokens": [int(entries["tokens"].min()), int(entries["tokens"].max())] if len(entries) else None})
    totals = {name: sum(c[name] for c in collections) for name in ("segments", "tokens", "bytes", "shards")}
    totals["bytes_per_token"] = totals["bytes"] / totals["tokens"] if totals["tokens"] else None
    spool = spool_path(storage)
    totals["open_shards"] = len(list(spool.glob("*.kds"))) if spool.is_dir() else 0
    return {"location": storage.location, **totals, "collections": collections}


def verify(storage: Storage, progress: Progress | None = None) -> list[str]:
    """Every byte of every index and shard against its checksum, and every payload decoded; returns findings, empty where all is well."""
    findings, covered, done = [], set(), 0
    indexes, shards = storage.files(INDEX_DIR), storage.files(SHARD_DIR)
    total = sum(shards.values())
    for name in sorted(indexes):
        try:
            index = decode_index(storage.read(f"{INDEX_DIR}/{name}"), f"{INDEX_DIR}/{name}")
            if index_name(index.shard) != name:
                raise CacheCorrupt(f"{INDEX_DIR}/{name} is the index of {index.shard}: the file was renamed. Run `megatron-kd cache repair`.")
            covered.add(index.shard)
            if index.shard not in shards:
                raise CacheCorrupt(f"{SHARD_DIR}/{index.shard} is absent; its index names {len(index.entries)} records. Run `megatron-kd cache repair`.")
            findings += _verify_shard(storage, index.shard, index.collection, index.entries)
        except CacheError as e:
            findings.append(str(e))
        done += shards.get(shard_name(name), 0)
        if progress:
            progress(done, total)
    findings += [f"{SHARD_DIR}/{name} has no readable index and is not served. Run `megatron-kd cache repair`." for name in sorted(shards) if name not in covered]
    return findings


def repair(storage: Storage) -> dict:
    """Make the store whole again from what is intact: returns counts kept_segments, dropped_bytes, recovered_segments, rewritten_shards.

    Shards with damage are rewritten without it, indexes are rebuilt from shards, indexes without a shard are removed, partial
    shards of dead writers are sealed. Segments that are lost are a miss from then on: build again.
    """
    report = {"kept_segments": 0, "dropped_bytes": 0, "rewritten_shards": 0, "removed_indexes": 0, "recovered_segments": 0}
    shards = storage.files(SHARD_DIR)
    for name in sorted(storage.files(INDEX_DIR)):
        try:
            index = decode_index(storage.read(f"{INDEX_DIR}/{name}"), name)
            good = index_name(index.shard) == name and index.shard in shards
            if good and not _verify_shard(storage, index.shard, index.collection, index.entries):
                report["kept_segments"] += len(index.entries)
                continue
        except CacheError:
            pass
        storage.remove(f"{INDEX_DIR}/{name}")
        report["removed_indexes"] += 1
    intact = {shard_name(name) for name in storage.files(INDEX_DIR)}
    for name in sorted(set(shards) - intact):
        _rewrite(storage, name, report)
    report["recovered_segments"] = recover(storage)
    return report


def merge(sources: Iterable[Storage], target: Storage, *, shard_bytes: int, progress: Progress | None = None) -> dict:
    """Copy records of `sources` that `target` does not cover yet, most complete first; identical segments are stored once.

    Returns {"copied", "skipped"}. Errors: CacheCorrupt where a source is damaged; what was copied before stays.
    """
    manifests = [Manifest(source) for source in sources]
    total = sum(index.shard_bytes for manifest in manifests for index in manifest.indexes.values())
    counts, done = {"copied": 0, "skipped": 0}, 0
    for collection in {c.digest: c for manifest in manifests for c in manifest.collections}.values():
        found = [(manifest, *pair) for manifest in manifests for pair in _largest_first(manifest, collection)]
        with CacheWriter(target, collection, shard_bytes=shard_bytes) as writer:
            for manifest, location, key in sorted(found, key=lambda item: -item[1].num_rows):
                record = manifest.load(location)
                if any(np.isin(record.rows, rows, assume_unique=True).all() for rows in writer.stored_rows(key)):
                    counts["skipped"] += 1
                else:
                    writer.add(record.key, record.prefix, record.num_tokens, record.rows, bytes(record.payload), record.error)
                    counts["copied"] += 1
                done += location.num_bytes
                if progress:
                    progress(done, total)
    return counts


def bench(storage: Storage, collection: Collection, *, min_s: float = 3.0, num_threads: int = 1) -> dict:
    """Reader throughput: records decoded in random order on `num_threads` threads for at least `min_s` seconds."""
    manifest = Manifest(storage)
    locations = [location for location, _ in _largest_first(manifest, collection)]
    order = np.random.default_rng(0).permutation(len(locations))

    def work(thread: int) -> tuple[int, int]:
        tokens = num_bytes = 0
        deadline, step = time.perf_counter() + min_s, thread
        while time.perf_counter() < deadline:
            location = locations[order[step % len(order)]]
            record = manifest.load(location)
            decode(record.payload, len(record.rows), collection)
            tokens, num_bytes, step = tokens + len(record.rows), num_bytes + location.num_bytes, step + num_threads
        return tokens, num_bytes

    started = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        sums = [sum(column) for column in zip(*pool.map(work, range(num_threads)))]
    elapsed_s = time.perf_counter() - started
    return {"threads": num_threads, "seconds": elapsed_s, "tokens_per_s": sums[0] / elapsed_s, "bytes_per_s": sums[1] / elapsed_s,
            "microseconds_per_token_and_thread": 1e6 * elapsed_s * num_threads / sums[0]}


def decode(payload: memoryview, num_rows: int, collection: Collection) -> object:
    """TopKRows or hidden rows of a payload. Errors: CacheCorrupt."""
    if collection.spec.kind == "hidden":
        return decode_hidden(payload, num_rows, collection.spec)
    return decode_topk(payload, num_rows, collection.spec)


def _largest_first(manifest: Manifest, collection: Collection) -> list[tuple]:
    """(location, key) of all records of a collection, most rows first."""
    keys = {SegmentKey(int(e["high"]), int(e["low"])) for index in manifest.indexes.values() if index.collection.digest == collection.digest for e in index.entries}
    found = [(location, key) for key in sorted(keys) for location in manifest.find(collection, key)]
    return sorted(found, key=lambda pair: -pair[0].num_rows)


def _verify_shard(storage: Storage, shard: str, collection: Collection, entries: np.ndarray) -> list[str]:
    """Findings of one shard: its header and records must fill it without a gap, as its index says."""
    name, findings = f"{SHARD_DIR}/{shard}", []
    data = storage.whole(name)
    own, offset = read_shard_header(data, name)
    if own.digest != collection.digest:
        findings.append(f"{name} holds {own.spec.describe()}, its index says {collection.spec.describe()}. Run `megatron-kd cache repair`.")
    for entry in np.sort(entries, order="offset"):
        if int(entry["offset"]) != offset:
            findings.append(f"{name} has {int(entry['offset']) - offset} bytes at {offset} that no record accounts for. Run `megatron-kd cache repair`.")
        try:
            record, length = decode_record(data, name, int(entry["offset"]))
            if record.check != int(entry["check"]) or length != int(entry["bytes"]):
                raise CacheCorrupt(f"{name} at byte {int(entry['offset'])} holds another record than its index says. Run `megatron-kd cache repair`.")
            decode(record.payload, len(record.rows), own)
        except CacheError as e:
            findings.append(str(e))
        offset = int(entry["offset"]) + int(entry["bytes"])
    if offset != len(data):
        findings.append(f"{name} has {len(data)} bytes, its index accounts for {offset}. Run `megatron-kd cache repair`.")
    return findings


def _rewrite(storage: Storage, name: str, report: dict) -> None:
    """Copy the intact records of a shard into a new one and remove it."""
    data = storage.whole(f"{SHARD_DIR}/{name}")
    try:
        collection, start = read_shard_header(data, name)
    except CacheCorrupt:
        collection, start = _collection_of_siblings(storage, name), 0
    if collection is None:
        report["dropped_bytes"] += len(data)
    else:
        with CacheWriter(storage, collection, shard_bytes=2**63, recover_first=False) as writer:
            for _, record, length in scan(data, name, start):
                if record is None:
                    report["dropped_bytes"] += length
                    continue
                try:
                    decode(record.payload, len(record.rows), collection)
                except CacheError:
                    report["dropped_bytes"] += length
                    continue
                writer.add(record.key, record.prefix, record.num_tokens, record.rows, bytes(record.payload), record.error)
                report["kept_segments"] += 1
    report["rewritten_shards"] += 1
    storage.remove(f"{SHARD_DIR}/{name}")


def _collection_of_siblings(storage: Storage, name: str) -> Collection | None:
    """The collection that the shard's name begins with, from any other shard's header."""
    digest = name.split("-")[0]
    for other in storage.files(SHARD_DIR):
        if other != name and other.startswith(digest):
            try:
                return read_shard_header(storage.whole(f"{SHARD_DIR}/{other}"), other)[0]
            except CacheCorrupt:
                continue
    return None
