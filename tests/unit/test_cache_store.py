"""The store: found by content whatever the batch looks like, misses explained, damage detected, nothing half-written served."""

import itertools
import os
import shutil

import numpy as np
import pytest
import torch

from megatron_kd.cache import upkeep
from megatron_kd.cache.key import segment_key
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.segments import split
from megatron_kd.cache.sizes import topk_block_bytes
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter, recover
from megatron_kd.errors import CacheCorrupt, CacheError, CacheMiss, ConfigError
from tests import cache_samples as samples

MADE = samples.collection()


def filled(path, blocks, made=MADE, shard_bytes=2000) -> Storage:
    """A store of the blocks' segments in several small shards."""
    storage = Storage(str(path))
    with CacheWriter(storage, made, shard_bytes=shard_bytes) as writer:
        for asked in blocks:
            samples.store(writer, asked, made)
    return storage


def check_read(read, asked):
    """The read rows are those of the synthetic teacher."""
    want = samples.expect(asked)
    read.rows.check(asked, "cache")
    assert not read.missing and not read.missing_N.any()
    assert torch.equal(read.rows.ids_NK, want.ids_NK) and torch.equal(read.rows.tail_N, want.tail_N)
    assert (read.rows.log_probs_NK - want.log_probs_NK).abs().max() < 1e-5


def test_rows_are_found_whatever_the_batch_looks_like(tmp_path):
    """Dumped as [2, 12] batches; read shuffled, as [3, 12], with a loss mask, alone, and packed in one row of documents."""
    tokens = samples.random_tokens(6, 12)
    storage = filled(tmp_path, [samples.block(tokens[i:i + 2]) for i in (0, 2, 4)])
    shuffled = tokens[[5, 0, 3]]
    mask = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) > 0.6
    packed = torch.cat([tokens[4], tokens[1], tokens[2]])[None]
    with CacheReader(storage, MADE) as reader:
        for asked in (samples.block(shuffled), samples.block(shuffled, mask), samples.block(tokens[3:4]), samples.block(packed, cu_seqlens=[0, 12, 24, 36]),
                      samples.block(packed, cu_seqlens=[0, 12, 24, 36], positions=torch.arange(12).repeat(3)[None])):
            check_read(reader.submit(asked).result(10), asked)


def test_a_read_block_holds_the_bytes_that_the_planner_counts(tmp_path):
    asked = samples.block(samples.random_tokens(2, 12))
    with CacheReader(filled(tmp_path, [asked]), MADE) as reader:
        rows = reader.read(asked).rows
    assert sum(part.nbytes for part in (rows.ids_NK, rows.log_probs_NK, rows.tail_N, rows.row_ids_N)) == topk_block_bytes(24, samples.K)


def test_documents_packed_in_another_way_are_found(tmp_path):
    """Stored as documents of 5, 9 and 4 tokens in one row; read in another order, in two rows' worth of packing, and alone."""
    documents = [samples.random_tokens(1, n, seed=n)[0] for n in (5, 9, 4)]
    storage = filled(tmp_path, [samples.block(torch.cat(documents)[None], cu_seqlens=[0, 5, 14, 18])])
    with CacheReader(storage, MADE) as reader:
        for order in itertools.permutations(range(3)):
            bounds = np.cumsum([0] + [len(documents[i]) for i in order]).tolist()
            asked = samples.block(torch.cat([documents[i] for i in order])[None], cu_seqlens=bounds)
            check_read(reader.read(asked), asked)
        check_read(reader.read(samples.block(documents[1][None])), samples.block(documents[1][None]))


def test_padding_does_not_change_the_key():
    tokens, pad = samples.random_tokens(1, 8)[0], 3
    tokens[-1] = 5
    keys, asked_padding = [], []
    for length in (9, 10, 16):
        row = torch.full((1, length), pad)
        row[0, :8] = tokens
        keys.append(next(split(samples.block(row, (torch.arange(length) < 7)[None]))).key)
        asked_padding.append(next(split(samples.block(row))).key)
    assert len(set(keys)) == 1 and keys[0] == asked_padding[0]
    assert len(set(asked_padding)) == 3, "asked rows in the padding keep it"
    tokens[3] = 77
    assert next(split(samples.block(tokens[None]))).key != keys[0]


def test_the_key_depends_on_ids_and_on_shifted_positions_only():
    ids = np.arange(10)
    assert segment_key(ids) == segment_key(ids.astype(np.int32)) == segment_key(ids, np.arange(10))
    changed = [segment_key(ids[:-1]), segment_key(ids[::-1]), segment_key(ids, np.arange(10) + 1), segment_key(np.append(ids, 0))]
    assert len({segment_key(ids), *changed}) == 5


def test_identical_segments_are_stored_once(tmp_path):
    tokens = samples.random_tokens(1, 10)
    storage = filled(tmp_path, [samples.block(tokens.expand(3, -1)), samples.block(tokens)])
    filled(tmp_path, [samples.block(tokens)])
    report = upkeep.stat(storage)
    assert (report["segments"], report["tokens"]) == (1, 10) and report["collections"][0]["records"] == 1


def test_rows_are_added_for_another_mask_and_the_union_is_served(tmp_path):
    tokens = samples.random_tokens(1, 10)
    first, second = torch.arange(10)[None] < 5, torch.arange(10)[None] >= 7
    storage = filled(tmp_path, [samples.block(tokens, first)])
    with CacheReader(storage, MADE) as reader:
        assert len(reader.read(samples.block(tokens, first | second)).missing) == 1
    filled(tmp_path, [samples.block(tokens, second)])
    with CacheReader(storage, MADE) as reader:
        check_read(reader.read(samples.block(tokens, first | second)), samples.block(tokens, first | second))
        assert len(reader.read(samples.block(tokens)).missing) == 1


def miss(reader, asked) -> str:
    read = reader.read(asked)
    with pytest.raises(CacheMiss) as error:
        raise reader.miss_error(read.missing, asked, "megatron-kd cache build recipe.yaml")
    assert "megatron-kd cache build recipe.yaml" in str(error.value) and read.missing[0].key.hex()[:12] in str(error.value)
    return str(error.value)


def test_a_miss_names_its_nearest_explanation(tmp_path):
    tokens = samples.random_tokens(4, 24)
    asked = samples.block(tokens[:1])
    storage = filled(tmp_path / "a", [samples.block(tokens[:2], torch.arange(24).expand(2, -1) > 2)])
    with CacheReader(storage, MADE) as reader:
        assert "another loss mask: 3 of 24 asked rows are absent, first at position 0" in miss(reader, asked)
        assert "same first tokens are stored with other lengths [24]" in miss(reader, samples.block(tokens[:1, :20]))
        assert "not built yet: none of the 2 stored segments" in miss(reader, samples.block(tokens[3:]))
        read = reader.read(samples.block(tokens[2:]))
        assert read.missing_N.all() and torch.equal(read.rows.log_probs_NK.exp().sum(1) + read.rows.tail_N, torch.zeros(48))
    for wanted, text in ((samples.collection(teacher="teacher-b"), "another teacher (teacher-a, wanted teacher-b)"), (samples.collection(tokenizer="tokenizer-b"), "another tokenizer"),
                         (samples.collection(transform="softcap 30"), "another head transform"), (samples.collection(width=5), "stored as topk K=6 fp32, wanted topk K=5 fp32")):
        with CacheReader(storage, wanted) as reader:
            assert text in miss(reader, asked)
    with CacheReader(storage, samples.collection(teacher="teacher-b")) as reader:
        assert "nothing is stored for this teacher and payload" in miss(reader, samples.block(tokens[3:]))
    with CacheReader(Storage(str(tmp_path / "empty")), MADE) as reader:
        assert "the store is empty" in miss(reader, asked)


def test_a_reader_sees_what_is_built_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_kd.cache.reader.REFRESH_INTERVAL_S", 0.0)
    asked = samples.block(samples.random_tokens(1, 8))
    with CacheReader(Storage(str(tmp_path)), MADE) as reader:
        assert reader.read(asked).missing
        filled(tmp_path, [asked])
        check_read(reader.read(asked), asked)


def test_hidden_rows_are_stored_exactly(tmp_path):
    made = samples.collection(kind="hidden", width=16, precision="bf16")
    tokens = samples.random_tokens(2, 9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) > 0.4
    storage = filled(tmp_path, [samples.block(tokens, mask)], made)
    with CacheReader(storage, made) as reader:
        read = reader.read(samples.block(tokens.flip(0), mask.flip(0)))
    want = torch.cat([samples.hidden_answer(tokens[i].numpy(), 16)[mask[i]] for i in (1, 0)])
    read.rows.check(samples.block(tokens.flip(0), mask.flip(0)), "cache")
    assert torch.equal(read.rows.hidden_NH, want)


def test_boundaries_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="ascend from 0"):
        list(split(samples.block(samples.random_tokens(1, 8), cu_seqlens=[0, 5, 12])))


def files_of(storage):
    return sorted(storage.path(f"{folder}/{name}") for folder in ("index", "shards") for name in storage.files(folder))


def test_a_flipped_byte_anywhere_is_found(tmp_path):
    """Every byte of every file: `verify` finds it, and a reader either refuses or still returns the right rows."""
    tokens = samples.random_tokens(3, 4)
    asked = samples.block(tokens, torch.tensor([[1, 1, 0, 1]] * 3))
    storage = filled(tmp_path, [asked], shard_bytes=10**6)
    files = files_of(storage)
    assert len(files) == 2 and not upkeep.verify(storage)
    refused = 0
    for path in files:
        content = bytearray(open(path, "rb").read())
        for position in range(len(content)):
            content[position] ^= 1 << position % 8
            with open(path, "r+b") as file:
                file.write(content)
            assert upkeep.verify(Storage(str(tmp_path))), f"{path} byte {position}"
            try:
                with CacheReader(Storage(str(tmp_path)), MADE) as reader:
                    check_read(reader.read(asked), asked)
            except CacheError:
                refused += 1
            content[position] ^= 1 << position % 8
        with open(path, "wb") as file:
            file.write(content)
    assert refused > 0.5 * sum(os.path.getsize(path) for path in files)
    assert not upkeep.verify(Storage(str(tmp_path)))


def test_missing_and_truncated_files_are_found_and_repaired(tmp_path):
    tokens = samples.random_tokens(8, 10)
    blocks = [samples.block(tokens[i:i + 1]) for i in range(8)]
    storage = filled(tmp_path / "good", blocks, shard_bytes=1500)
    shards = sorted(storage.files("shards"))
    assert len(shards) >= 3
    for name, harm in {"index gone": lambda s: os.remove(s.path("index/" + shards[0].replace(".kds", ".kdi"))), "shard gone": lambda s: os.remove(s.path("shards/" + shards[0])),
                       "shard cut": lambda s: os.truncate(s.path("shards/" + shards[0]), 700), "index cut": lambda s: os.truncate(s.path("index/" + shards[0].replace(".kds", ".kdi")), 100),
                       "header broken": lambda s: flip(s.path("shards/" + shards[0]), 20), "record broken": lambda s: flip(s.path("shards/" + shards[0]), 900),
                       "index renamed": lambda s: os.rename(s.path("index/" + shards[0].replace(".kds", ".kdi")), s.path("index/other.kdi"))}.items():
        target = tmp_path / name
        shutil.copytree(tmp_path / "good", target)
        damaged = Storage(str(target))
        harm(damaged)
        assert upkeep.verify(damaged), name
        report = upkeep.repair(Storage(str(target)))
        mended = Storage(str(target))
        assert upkeep.verify(mended) == [], name
        with CacheReader(mended, MADE) as reader:
            present = [asked for asked in blocks if not reader.missing(asked)]
            for asked in present:
                check_read(reader.read(asked), asked)
        lost = {"shard gone": 8, "shard cut": 8, "record broken": 8}.get(name, 0)
        assert len(present) == 8 or (lost and 4 <= len(present) < 8), (name, len(present), report)


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_a_writer_that_dies_at_any_byte_loses_only_the_record_it_was_writing(tmp_path):
    """Lengths all over the partial shard and around each record's end: whole records are served, the rest is built again, nothing twice and
    nothing missing."""
    tokens = samples.random_tokens(4, 3)
    asked = samples.block(tokens)
    whole = filled(tmp_path / "whole", [asked], shard_bytes=10**6)
    name, = whole.files("shards")
    content = whole.read(f"shards/{name}")
    ends = [int(entry["offset"] + entry["bytes"]) for entry in next(iter(Manifest(whole).indexes.values())).entries]
    for length in sorted({*range(0, len(content) + 1, 13), *(end + d for end in [0, *ends] for d in (-1, 0, 1))} & set(range(len(content) + 1))):
        root = tmp_path / f"cut{length}"
        (root / "partial").mkdir(parents=True)
        (root / "partial" / name).write_bytes(content[:length])
        storage = Storage(str(root))
        with CacheReader(storage, MADE) as reader:
            assert len(reader.read(asked).missing) == 4, "a partial shard is never served"
        with CacheWriter(storage, MADE, shard_bytes=10**6) as writer:
            assert writer.recovered_segments == sum(end <= length for end in ends)
            assert samples.store(writer, asked, MADE) == 4 - writer.recovered_segments
        assert upkeep.stat(storage)["collections"][0]["records"] == 4 and upkeep.stat(storage)["open_shards"] == 0 and not upkeep.verify(storage)
        with CacheReader(storage, MADE) as reader:
            check_read(reader.read(asked), asked)
        shutil.rmtree(root)


def test_an_open_shard_of_a_living_writer_is_left_alone(tmp_path):
    asked = samples.block(samples.random_tokens(2, 6))
    storage = Storage(str(tmp_path))
    with CacheWriter(storage, MADE) as alive:
        samples.store(alive, asked, MADE)
        with CacheWriter(storage, MADE) as other:
            assert other.recovered_segments == 0 and upkeep.stat(storage)["open_shards"] == 1
            assert recover(storage) == 0
    with CacheReader(storage, MADE) as reader:
        check_read(reader.read(asked), asked)


def test_merge_keeps_each_segment_once_and_prefers_the_fuller_record(tmp_path):
    tokens = samples.random_tokens(5, 8)
    half = torch.arange(8).expand(3, -1) < 4
    one = filled(tmp_path / "one", [samples.block(tokens[:3], half)])
    two = filled(tmp_path / "two", [samples.block(tokens[1:4])])
    other = samples.collection(teacher="teacher-b")
    three = filled(tmp_path / "three", [samples.block(tokens[4:])], other)
    target = Storage(str(tmp_path / "merged"))
    counts = upkeep.merge([one, two, three], target, shard_bytes=1500)
    assert counts == {"copied": 5, "skipped": 2} and not upkeep.verify(target)
    with CacheReader(target, MADE) as reader:
        check_read(reader.read(samples.block(tokens[1:4])), samples.block(tokens[1:4]))
        check_read(reader.read(samples.block(tokens[:3], half)), samples.block(tokens[:3], half))
    with CacheReader(target, other) as reader:
        check_read(reader.read(samples.block(tokens[4:])), samples.block(tokens[4:]))
    assert upkeep.merge([one, two, three], target, shard_bytes=1500) == {"copied": 0, "skipped": 7}


def test_stat_and_bench_count_what_is_there(tmp_path):
    blocks = [samples.block(samples.random_tokens(2, 10, seed=i)) for i in range(3)]
    storage = filled(tmp_path, blocks)
    report = upkeep.stat(storage)
    size = sum(os.path.getsize(path) for path in files_of(storage) if path.endswith(".kds"))
    assert report["tokens"] == 60 and report["segments"] == 6 and report["bytes"] == size and report["bytes_per_token"] == pytest.approx(size / 60)
    described = report["collections"][0]
    assert (described["teacher"], described["tokenizer"], described["payload"], described["width"], described["vocab_size"]) == ("teacher-a", "tokenizer-a", "topk", 6, 997)
    measured = upkeep.bench(storage, MADE, min_s=0.05, num_threads=2)
    assert measured["tokens_per_s"] > 0 and measured["threads"] == 2


def test_a_shard_that_vanished_is_named_when_the_store_is_opened(tmp_path):
    storage = filled(tmp_path, [samples.block(samples.random_tokens(2, 10))])
    name = sorted(storage.files("shards"))[0]
    os.remove(storage.path(f"shards/{name}"))
    with pytest.raises(CacheCorrupt, match=f"{name} = 'no bytes'.*cache repair"):
        Manifest(Storage(str(tmp_path)))
