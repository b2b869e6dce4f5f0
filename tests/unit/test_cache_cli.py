"""`megatron-kd cache stat|verify|merge|repair|bench` as a user calls them."""

import json

import pytest

from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.cli.main import main
from tests import cache_samples as samples


@pytest.fixture
def store(tmp_path):
    """A folder with six segments in several shards."""
    made = samples.collection()
    with CacheWriter(Storage(str(tmp_path / "store")), made, shard_bytes=1500) as writer:
        samples.store(writer, samples.block(samples.random_tokens(6, 8)), made)
    return tmp_path / "store"


def output(capsys, *argv):
    """(exit code, stdout)."""
    code = main(["cache", *map(str, argv)])
    return code, capsys.readouterr().out


def test_stat_as_text_and_as_json(store, capsys):
    code, text = output(capsys, "stat", store)
    assert code == 0 and "6 segments, 48 tokens" in text and "teacher-a" in text and "bytes a token" in text
    code, text = output(capsys, "stat", store, "--json", "--bench", "--seconds", "0.1")
    report = json.loads(text)
    assert code == 0 and report["tokens"] == 48 and report["bytes_per_token"] > 0 and report["collections"][0]["tokenizer"] == "tokenizer-a"
    assert report["bench"][0]["tokens_per_s"] > 0


def test_stat_of_a_recipe_looks_where_its_training_will(store, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: x\noutput_dir: {tmp_path}\nstudent: {{model: a/b}}\nteacher: {{model: a/b, placement: cached}}\ntrain: {{iters: 1}}\n"
                      f"data: {{kind: mock, seq_length: 8}}\ncache: {{location: {store}}}\n")
    assert "6 segments" in output(capsys, "stat", recipe)[1]


def test_verify_repair_and_verify_again(store, capsys):
    assert output(capsys, "verify", store) == (0, "every byte is as it was written\n")
    shard = sorted((store / "shards").iterdir())[0]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    code, text = output(capsys, "verify", store)
    assert code == 1 and shard.name in text and "cache repair" in text
    code, text = output(capsys, "repair", store)
    assert code == 0 and "rewritten shards 1" in text
    assert output(capsys, "verify", store)[0] == 0


def test_merge_copies_what_is_missing(store, tmp_path, capsys):
    assert output(capsys, "merge", tmp_path / "all", store) == (0, "6 segments copied, 0 were there already\n")
    assert output(capsys, "merge", tmp_path / "all", store) == (0, "0 segments copied, 6 were there already\n")
    assert "6 segments, 48 tokens" in output(capsys, "stat", tmp_path / "all")[1]


def test_bench_measures_every_payload(capsys):
    code, text = output(capsys, "bench", "--vocab", 5000, "--k", 20, "--hidden", 64, "--tokens", 256, "--segment", 64, "--threads", 1, "--seconds", 0.05, "--json")
    results = json.loads(text)
    assert code == 0 and [r["payload"].split()[0] for r in results] == ["topk", "topk", "sampled", "hidden", "hidden"]
    assert all(r["bytes_per_token"] > 0 and r["tokens_per_s"] > 0 for r in results) and 0 < results[-1]["relative_error"] < 0.05


def test_a_damaged_store_is_an_error_with_the_way_out(store, capsys):
    index = sorted((store / "index").iterdir())[0]
    index.write_bytes(index.read_bytes()[:-1])
    assert main(["cache", "stat", str(store)]) == 1
    assert "cache repair" in capsys.readouterr().err
