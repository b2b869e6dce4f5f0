"""Tiny Megatron models: what one layout dumped trains another, with the losses of the online teacher."""

import json

import numpy as np
import pytest
import torch

from megatron_kd.cache import upkeep
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.shard import RECORD_MAGIC, decode_record
from megatron_kd.cache.storage import Storage
from tests import cache_training as caching

SAMPLES = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from tests.mcore_training import make_models

    made = make_models(tmp_path_factory.mktemp("models"))
    caching.write_tokenizer(made["teacher"])
    caching.write_tokenizer(made["gptoss"])
    return made


@pytest.fixture(scope="module")
def dumped(models, megatron_ranks, tmp_path_factory):
    """A store of top 9, built by DP=2 with micro-batches of 2, in reverse order."""
    location = str(tmp_path_factory.mktemp("stores") / "dp2")
    new, known = megatron_ranks.run(caching.dump, 2, teacher=models["teacher"], location=location, num_samples=SAMPLES, batch=2, layout={}, reverse=True, k=9, timeout_s=120)[0]
    assert new == SAMPLES - 4 and known == 0, "four samples have no row at all"
    return location


def rows_of(location):
    """{segment key: (positions, decoded rows)} of a whole store."""
    storage = Storage(location)
    manifest, found = Manifest(storage), {}
    for index in manifest.indexes.values():
        data = storage.whole(f"shards/{index.shard}")
        for entry in index.entries:
            record, _ = decode_record(data, index.shard, int(entry["offset"]))
            assert record.key not in found, "a segment is stored twice"
            found[record.key] = record.rows, upkeep.decode(record.payload, len(record.rows), index.collection)
    return found


@pytest.mark.parametrize("layout, batch", [({"tp": 2, "sequence_parallel": True}, 4), ({"pp": 2}, 3)], ids=["TP with SP", "PP"])
def test_every_layout_dumps_the_same_rows(models, megatron_ranks, dumped, tmp_path, layout, batch):
    megatron_ranks.run(caching.dump, 2, teacher=models["teacher"], location=str(tmp_path), num_samples=SAMPLES, batch=batch, layout=layout, k=9, timeout_s=120)
    check_same_rows(rows_of(str(tmp_path)), rows_of(dumped))


def check_same_rows(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, (positions, kept) in ours.items():
        other_positions, other = theirs[key]
        assert np.array_equal(positions, other_positions) and torch.equal(kept.ids_NK, other.ids_NK)
        assert (kept.log_probs_NK - other.log_probs_NK).abs().max() < 1e-4 and (kept.tail_N - other.tail_N).abs().max() < 1e-5


def test_experts_spread_over_lanes_dump_what_one_rank_dumps(models, megatron_ranks, tmp_path):
    """EP=2: both data-parallel lanes run every round together, also the last one, which only the first lane needs."""
    stores = [str(tmp_path / "ep2"), str(tmp_path / "alone")]
    for world, batch, layout, location in ((2, 4, {"ep": 2, "etp": 1}, stores[0]), (1, 3, {}, stores[1])):
        megatron_ranks.run(caching.dump, world, teacher=models["gptoss"], location=location, num_samples=12, batch=batch, layout=layout, k=9, timeout_s=120)
    check_same_rows(*map(rows_of, stores))


def test_a_dump_at_dp2_trains_tp2_with_the_losses_of_the_online_teacher(models, megatron_ranks, dumped, tmp_path):
    """Micro-batches of 2 in reverse order stored; TP=2 and micro-batches of 4 trained. Top 9 against an online top 9 (an empty store that
    builds on each miss); all tokens against the colocated teacher's dense loss."""
    from tests.mcore_training import Run

    run = Run(student=models["llama"], teacher=models["teacher"], tp=2, micro_batch=4)
    whole = caching.cache_config(str(tmp_path / "whole"), k=caching.TRUE_VOCAB, on_miss="build")
    online = caching.cache_config(str(tmp_path / "online"), k=9, on_miss="build")
    plans = [dict(run=run, cache=caching.cache_config(dumped, k=9)), dict(run=run, cache=online), dict(run=run, cache=whole), dict(run=run, cache=whole, placement="colocated")]
    by_rank = megatron_ranks.run(caching.trainings, 2, plans=plans, timeout_s=200)
    for cached, built, dense_from_cache, dense in by_rank:
        check_equal(cached, built, 2e-6)
        check_equal(dense_from_cache, dense, 2e-6)
        assert cached[2]["cache/missing_rows"] == 0 and built[2]["cache/missing_rows"] == built[2]["cache/rows"] > 0
        kept = cached[0][-1][0]
        assert 0 < kept["student mass kept"] < 1 and 0 < kept["teacher mass kept"] < 1
        assert dense_from_cache[0][-1][0]["teacher mass kept"] == pytest.approx(1.0, abs=1e-6)
    second = [dict(run=run, cache=caching.cache_config(str(tmp_path / "online"), k=9))]
    for (again,), (_, built, *_) in zip(megatron_ranks.run(caching.trainings, 2, plans=second, timeout_s=120), by_rank):
        check_equal(again, built, 2e-6)


def check_equal(ours, theirs, tolerance):
    """Losses, gradient norms and parameters of two trainings that learned something."""
    for (numbers, norm), (other, other_norm) in zip(ours[0], theirs[0], strict=True):
        assert norm == pytest.approx(other_norm, rel=1e-4) and norm > 1e-3
        for name in ("total loss", "kd loss", "ce loss", "kd tokens"):
            assert numbers[name] == pytest.approx(other[name], rel=1e-5), name
    for name, value in theirs[1].items():
        assert np.abs(ours[1][name] - value).max() < tolerance, name


def test_misses_fail_with_the_reason_or_train_on_cross_entropy(models, megatron_ranks, dumped, tmp_path):
    """Half of the samples are stored: `fail` names the segment; `ce_only` counts the rows and gives stored rows their KD."""
    from tests.mcore_training import Run

    half = str(tmp_path / "half")
    megatron_ranks.run(caching.dump, 2, teacher=models["teacher"], location=half, num_samples=8, batch=4, layout={}, k=9, timeout_s=120)
    run = Run(student=models["llama"], teacher=models["teacher"], tp=2, micro_batch=4, iters=2)
    for text in megatron_ranks.run(caching.failing, 2, run=run, cache=caching.cache_config(half, k=9), timeout_s=120):
        assert "not built yet" in text and "cache build" in text and "micro-batch ('train', 1, 0)" in text
    for text in megatron_ranks.run(caching.failing, 2, run=run, cache=caching.cache_config(dumped, k=8), timeout_s=120):
        assert "stored as topk K=9 fp32, wanted topk K=8 fp32" in text
    loss = caching.CE_WEIGHT
    plans = [dict(run=run, cache=caching.cache_config(half, k=9, on_miss="ce_only"), loss=loss), dict(run=run, cache=caching.cache_config(dumped, k=9), loss=loss),
             dict(run=run, cache=caching.cache_config(half, k=9, on_miss="ce_only"), loss={**loss, "divergence": "reverse_kl"})]
    for degraded, whole, generic in megatron_ranks.run(caching.trainings, 2, plans=plans, timeout_s=200):
        assert degraded[0][0][0] == pytest.approx(whole[0][0][0], rel=1e-6), "the first step is stored"
        assert degraded[0][1][0]["kd loss"] == generic[0][1][0]["kd loss"] == 0.0 < whole[0][1][0]["kd loss"]
        assert degraded[0][1][0]["ce loss"] == pytest.approx(whole[0][1][0]["ce loss"], rel=1e-5)
        assert degraded[2]["cache/missing_rows"] > 0 and whole[2]["cache/missing_rows"] == 0


def command(rank, world, *, argv):
    """(exit code, stdout) of `megatron-kd cache ...` on this rank."""
    import contextlib
    import io

    from megatron_kd.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(["cache", *argv])
    return code, output.getvalue()


def die_while_writing(store):
    """Leave one shard as a writer that was killed would have: partial, with the beginning of a record more."""
    name = sorted(store.files("shards"))[0]
    content = store.read(f"shards/{name}")
    store.remove(f"index/{name.replace('.kds', '.kdi')}")
    store.remove(f"shards/{name}")
    store.local_path(f"partial/{name}").write_bytes(content + RECORD_MAGIC + content[-60:-20])


def test_the_commands_build_continue_measure_and_verify(megatron_ranks, tmp_path):
    """The small twin of a cached recipe: a build in two parts on DP=2, then coverage and a comparison with the teacher, and with another one."""
    from megatron_kd.convert.shrink import shrink

    shrunk, store = shrink("recipes/llama_8b_3b_8k_cached.yaml", tmp_path, iters=4), Storage(str(tmp_path / "cache"))
    recipe = [str(shrunk.path), "train.global_batch=4", "train.micro_batch=2", "data.max_documents=4"]

    def cache(world, *argv):
        results = megatron_ranks.run(command, world, argv=[*argv], timeout_s=150)
        assert len({code for code, _ in results}) == 1
        return results[0]

    assert cache(2, "build", *recipe, "cache.max_sequences=6")[0] == 0
    assert upkeep.stat(store)["segments"] == 6
    die_while_writing(store)
    assert upkeep.stat(store)["segments"] < 6 and upkeep.stat(store)["open_shards"] == 1
    lost = 6 - upkeep.stat(store)["segments"]
    code, text = cache(1, "coverage", *recipe)
    assert code == 0 and f"{6 - lost} of 141 segments" in text and "first miss" in text and "not built yet" in text
    code, text = cache(2, "build", *recipe, "--json")
    built = json.loads(text.splitlines()[-1])
    assert code == 0 and (built["new_segments"], built["known_segments"], built["recovered_segments"]) == (135, 6, lost)
    code, text = cache(1, "coverage", *recipe, "--json")
    assert code == 0 and json.loads(text.splitlines()[-1])["hit_rate"] == 1.0 and json.loads(text.splitlines()[-1])["first_miss"] is None
    report = upkeep.stat(store)
    assert report["segments"] == report["collections"][0]["records"] == 141 and not upkeep.verify(store)
    code, text = cache(1, "verify", str(tmp_path / "cache"), "--against", *recipe)
    assert code == 0 and "same_ids 1" in text
    changed = [*recipe, f"teacher.model={tmp_path / 'student'}"]
    assert cache(1, "coverage", *changed)[1].count("another teacher") == 1
    assert cache(1, "verify", str(tmp_path / "cache"), "--against", *changed)[0] == 1
