"""Real processes: writers killed with SIGKILL at random moments, several writers at once."""

import multiprocessing as mp
import os
import random
import signal
import time

import torch

from megatron_kd.cache import upkeep
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.segments import split
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter, recover
from tests import cache_samples as samples

MADE = samples.collection()
NUM_SEGMENTS, LENGTH, SHARD_BYTES = 160, 3, 1500
KILLS = 20


def blocks():
    tokens = samples.random_tokens(NUM_SEGMENTS, LENGTH, seed=7)
    return [samples.block(tokens[i:i + 4]) for i in range(0, NUM_SEGMENTS, 4)]


def build(root: str, part: int, parts: int) -> None:
    """What one writer of `parts` does: its share of the segments by key, sealing a shard every few segments."""
    torch.set_num_threads(1)
    with CacheWriter(Storage(root), MADE, shard_bytes=SHARD_BYTES) as writer:
        for asked in blocks():
            for segment in split(asked):
                if segment.key.low % parts == part:
                    samples.store_segment(writer, segment, MADE)


def start(context, *args):
    process = context.Process(target=build, args=args)
    process.start()
    return process


def context():
    """Processes forked from a server that has imported torch and nothing else running: they start in milliseconds."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["tests.distributed.test_cache_kill"])
    return made


def check_complete(root):
    """Every segment once, every byte accounted for, every row right."""
    storage = Storage(str(root))
    recover(storage)
    report = upkeep.stat(storage)
    assert report["segments"] == report["collections"][0]["records"] == NUM_SEGMENTS and report["open_shards"] == 0
    assert not upkeep.verify(storage)
    with CacheReader(storage, MADE) as reader:
        for asked in blocks():
            read, want = reader.read(asked), samples.expect(asked)
            assert not read.missing and torch.equal(read.rows.ids_NK, want.ids_NK) and torch.equal(read.rows.tail_N, want.tail_N)


def check_served_rows(root):
    """Whatever is visible right after a kill is whole and right; returns how many segments that is."""
    served = 0
    with CacheReader(Storage(str(root)), MADE) as reader:
        for asked in blocks():
            read, want = reader.read(asked), samples.expect(asked)
            present = ~read.missing_N
            assert torch.equal(read.rows.ids_NK[present], want.ids_NK[present]) and torch.equal(read.rows.tail_N[present], want.tail_N[present])
            served += int(present.sum()) // LENGTH
    return served


def bytes_written(root) -> int:
    """Bytes of shards, open ones included; files come and go while it looks."""
    total = 0
    for folder in ("partial", "shards"):
        for entry in os.scandir(root / folder) if (root / folder).is_dir() else ():
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
    return total


def test_twenty_kills_leave_no_gap_and_no_duplicate(tmp_path):
    """Two writers share the work; one of them at random, or both, are killed when a random number of bytes has been written."""
    made, generator = context(), random.Random(0)
    start(made, str(tmp_path / "whole"), 0, 1).join(60)
    check_complete(tmp_path / "whole")
    whole_bytes = bytes_written(tmp_path / "whole")
    root, kills, served = tmp_path / "killed", 0, []
    deadline = time.monotonic() + 90
    while kills < KILLS and time.monotonic() < deadline:
        before = bytes_written(root)
        target = before + generator.random() * 0.4 * whole_bytes
        processes = [start(made, str(root), part, 2) for part in range(2)]
        victims = generator.choice([processes[:1], processes[1:], processes])
        while bytes_written(root) < target and all(victim.is_alive() for victim in victims):
            time.sleep(0.0005)
        for victim in victims:
            if victim.is_alive():
                os.kill(victim.pid, signal.SIGKILL)
                kills += 1
        for process in processes:
            process.join(60)
        served.append(check_served_rows(root))
        if served[-1] == NUM_SEGMENTS:
            check_complete(root)
            root = tmp_path / f"killed{kills}"
    assert kills >= KILLS and any(0 < count < NUM_SEGMENTS for count in served)
    for part in range(2):
        start(made, str(root), part, 2).join(60)
    check_complete(root)


def test_writers_at_once_do_not_disturb_each_other(tmp_path):
    """Three writers of disjoint shares and a fourth of everything, at the same time."""
    made = context()
    processes = [start(made, str(tmp_path), part, 3) for part in range(3)] + [start(made, str(tmp_path), 0, 1)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    storage = Storage(str(tmp_path))
    report = upkeep.stat(storage)
    assert report["segments"] == NUM_SEGMENTS and report["open_shards"] == 0 and not upkeep.verify(storage)
    merged = Storage(str(tmp_path / "merged"))
    assert upkeep.merge([storage], merged, shard_bytes=10**6)["copied"] == NUM_SEGMENTS
    check_complete(tmp_path / "merged")
