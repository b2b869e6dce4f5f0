"""The cache on an object store: a real S3 server in its own process, reached over HTTP through fsspec."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from megatron_kd.cache import upkeep
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.errors import CacheCorrupt, CacheError
from tests import cache_samples as samples

pytest.importorskip("moto")
MADE = samples.collection()


@pytest.fixture(scope="module")
def server():
    """URL of an S3 server that ends with the module."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.2)
    yield url
    process.kill()
    process.wait()


def options(url):
    return {"endpoint_url": url, "key": "test", "secret": "test", "client_kwargs": {"region_name": "us-east-1"}, "use_listings_cache": False}


def opened(url, bucket) -> Storage:
    """The store s3://bucket/kd; its bucket is made where it is absent."""
    urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=10).close()
    return Storage(f"s3://{bucket}/kd", options(url))


def check(storage, asked):
    with CacheReader(storage, MADE) as reader:
        reads = [reader.submit(one) for one in asked]
        for one, future in zip(asked, reads):
            read, want = future.result(60), samples.expect(one)
            assert not read.missing and torch.equal(read.rows.ids_NK, want.ids_NK) and torch.equal(read.rows.tail_N, want.tail_N)


def test_built_read_verified_and_merged_over_http(server, tmp_path):
    storage, tokens = opened(server, "whole"), samples.random_tokens(12, 6)
    asked = [samples.block(tokens[i:i + 2]) for i in range(0, 12, 2)]
    with CacheWriter(storage, MADE, shard_bytes=2000, spool_dir=str(tmp_path)) as writer:
        for one in asked:
            samples.store(writer, one, MADE)
    assert len(storage.files("shards")) >= 3 and not list(tmp_path.rglob("*.kds"))
    again = opened(server, "whole")
    assert not upkeep.verify(again) and upkeep.stat(again)["segments"] == 12
    check(again, asked[::-1])
    local = Storage(str(tmp_path / "local"))
    upkeep.merge([again], local, shard_bytes=10**6)
    check(local, asked)


def test_a_writer_that_died_or_lost_the_network_is_continued_from_its_spool(server, tmp_path):
    """The upload of the second shard fails; the shard stays in the spool and the next writer uploads it."""
    storage, tokens = opened(server, "killed"), samples.random_tokens(8, 6)
    asked = samples.block(tokens)
    writer = CacheWriter(storage, MADE, shard_bytes=10**6, spool_dir=str(tmp_path))
    samples.store(writer, samples.block(tokens[:3]), MADE)
    writer.seal()
    samples.store(writer, samples.block(tokens[3:6]), MADE)
    broken = Storage("s3://killed/kd", {**options("http://127.0.0.1:9"), "config_kwargs": {"retries": {"max_attempts": 0}}})
    writer._storage = broken
    with pytest.raises(CacheError, match="shards/.*stays in the spool"):
        writer.seal()
    with CacheReader(storage, MADE) as reader:
        assert len(reader.read(asked).missing) == 5
    with CacheWriter(storage, MADE, spool_dir=str(tmp_path)) as second:
        assert second.recovered_segments == 3 and samples.store(second, asked, MADE) == 2
    check(storage, [asked])
    assert upkeep.stat(storage)["collections"][0]["records"] == 8 and not upkeep.verify(storage)


def test_damage_and_loss_on_the_server_are_found(server, tmp_path):
    storage, tokens = opened(server, "damaged"), samples.random_tokens(6, 6)
    asked = samples.block(tokens)
    with CacheWriter(storage, MADE, shard_bytes=1200, spool_dir=str(tmp_path)) as writer:
        samples.store(writer, asked, MADE)
    name = sorted(storage.files("shards"))[0]
    content = bytearray(storage.read(f"shards/{name}"))
    content[-5] ^= 4
    storage.put(f"shards/{name}", bytes(content))
    assert any(name in finding for finding in upkeep.verify(storage))
    with CacheReader(storage, MADE) as reader, pytest.raises(CacheCorrupt, match=name):
        reader.read(asked)
    assert upkeep.repair(storage)["dropped_bytes"] > 0 and not upkeep.verify(storage)
    with CacheWriter(storage, MADE, spool_dir=str(tmp_path)) as writer:
        assert samples.store(writer, asked, MADE) >= 1
    check(storage, [asked])


def test_multi_storage_client_locations_work_as_they_are(server, tmp_path, monkeypatch):
    """msc://PROFILE/path, the way in which Megatron-Bridge names object stores, on the same S3 server."""
    pytest.importorskip("multistorageclient")
    opened(server, "profiled")
    config = {"profiles": {"kd": {"storage_provider": {"type": "s3", "options": {"base_path": "profiled", "endpoint_url": server, "region_name": "us-east-1"}},
                                  "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}}}}}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    asked = samples.block(samples.random_tokens(6, 6))
    with CacheWriter(Storage("msc://kd/store"), MADE, shard_bytes=1200, spool_dir=str(tmp_path)) as writer:
        samples.store(writer, asked, MADE)
    check(Storage("msc://kd/store"), [asked])
    check(Storage("s3://profiled/store", options(server)), [asked])
    assert not upkeep.verify(Storage("msc://kd/store"))
