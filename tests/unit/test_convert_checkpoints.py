"""Checkpoint reading and writing: damage is named before anything is written, targets appear whole or not at all, memory stays small."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_kd.convert.hf_index import INDEX_NAME, Checkpoint
from megatron_kd.convert.writer import CheckpointWriter
from megatron_kd.errors import ConvertError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool]


def two_shards(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in two shards written by safetensors itself."""
    path.mkdir()
    tensors = {f"t.{i}": torch.randn(3 + i, 5) for i in range(4)}
    save_file({k: tensors[k] for k in ("t.0", "t.1")}, path / "a.safetensors")
    save_file({k: tensors[k] for k in ("t.2", "t.3")}, path / "b.safetensors")
    weight_map = {"t.0": "a.safetensors", "t.1": "a.safetensors", "t.2": "b.safetensors", "t.3": "b.safetensors"}
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return tensors


def listing(path: Path) -> dict[str, bytes]:
    """Every file below `path` with its contents."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_every_dtype_and_empty_tensors_survive_and_safetensors_reads_them(tmp_path):
    wanted = {f"t.{i}": torch.randint(0, 2, (4, 3)).to(dtype) for i, dtype in enumerate(DTYPES)} | {"empty": torch.empty(0, 7), "scalar": torch.tensor(2.5)}
    with CheckpointWriter(tmp_path / "out", max_shard_bytes=64) as writer:
        for name, tensor in wanted.items():
            writer.add(name, tensor)
        writer.add_json("config.json", {})
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3, "64-byte shards must split"
    official = {k: v for shard in shards for k, v in load_file(shard).items()}
    ours = Checkpoint.open(tmp_path / "out")
    for name, tensor in wanted.items():
        for got in (official[name], ours.read(name)):
            assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got.view(torch.uint8) if got.dim() else got, tensor.view(torch.uint8) if got.dim() else tensor)


def test_a_shard_with_more_names_than_its_header_holds_is_split(tmp_path):
    with CheckpointWriter(tmp_path / "out") as writer:
        for i in range(1500):
            writer.add(f"model.layers.{i}.a_rather_long_parameter_name.weight", torch.tensor([i]))
        writer.add_json("config.json", {})
    ours = Checkpoint.open(tmp_path / "out")
    assert len(ours.specs) == 1500 and int(ours.read("model.layers.1499.a_rather_long_parameter_name.weight")) == 1499


def test_reading_rows_reads_only_their_bytes(tmp_path):
    tensors = two_shards(tmp_path / "in")
    checkpoint = Checkpoint.open(tmp_path / "in")
    assert torch.equal(checkpoint.read("t.3", (2, 4)), tensors["t.3"][2:4])
    assert checkpoint.num_bytes_read == 2 * 5 * 4
    with pytest.raises(ConvertError, match="6 rows"):
        checkpoint.read("t.3", (2, 7))


def remove_shard(path):
    (path / "b.safetensors").unlink()


def index_names_wrong_shard(path):
    index = json.loads((path / INDEX_NAME).read_text())
    index["weight_map"]["t.0"] = "b.safetensors"
    (path / INDEX_NAME).write_text(json.dumps(index))


def index_names_unknown_tensor(path):
    index = json.loads((path / INDEX_NAME).read_text())
    index["weight_map"]["t.9"] = "b.safetensors"
    (path / INDEX_NAME).write_text(json.dumps(index))


def cut_shard(path):
    with open(path / "b.safetensors", "r+b") as f:
        f.truncate(os.path.getsize(path / "b.safetensors") - 4)


def cut_header(path):
    with open(path / "b.safetensors", "r+b") as f:
        f.truncate(20)


def garble_header(path):
    with open(path / "b.safetensors", "r+b") as f:
        f.seek(9)
        f.write(b"\xff\xff")


def empty_index(path):
    (path / INDEX_NAME).write_text("{}")


def index_is_not_json(path):
    (path / INDEX_NAME).write_text("{")


def no_config(path):
    (path / "config.json").unlink()


@pytest.mark.parametrize(("damage", "message"), [
    (remove_shard, r"missing shards = \['b.safetensors'\]"), (index_names_wrong_shard, "does not hold the tensor.*a.safetensors"),
    (index_names_unknown_tensor, "t.9.*no shard"), (cut_shard, "b.safetensors.*cut short"), (cut_header, "b.safetensors.*header would end"),
    (garble_header, "b.safetensors.*JSON"), (empty_index, "weight_map"), (index_is_not_json, "must be JSON"), (no_config, "config.json"),
])
def test_damage_is_named_when_the_checkpoint_is_opened(tmp_path, damage, message):
    two_shards(tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(ConvertError, match=message):
        Checkpoint.open(tmp_path / "in")


def test_an_error_in_mid_write_leaves_the_target_and_nothing_else(tmp_path):
    two_shards(tmp_path / "target")
    before = listing(tmp_path)
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path / "target", overwrite=True) as writer:
        writer.add("a", torch.ones(1000))
        1 / 0
    assert listing(tmp_path) == before


def test_an_existing_target_is_refused_and_replaced_only_when_asked(tmp_path):
    two_shards(tmp_path / "target")
    with pytest.raises(ConvertError, match="--overwrite"):
        CheckpointWriter(tmp_path / "target")
    with CheckpointWriter(tmp_path / "target", overwrite=True) as writer:
        writer.add("a", torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["target"] and [p.name for p in (tmp_path / "target").iterdir()] == ["model.safetensors"]


def test_a_disk_known_to_be_too_small_is_refused_before_writing(tmp_path):
    with pytest.raises(ConvertError, match="needs 1024.00 GiB"):
        CheckpointWriter(tmp_path / "out", expected_bytes=1 << 40)


def test_a_full_disk_is_named_and_leaves_the_target(tmp_path, small_disk):
    with small_disk(tmp_path / "disk", "2m") as disk:
        (disk / "target").mkdir()
        (disk / "target" / "mine").write_text("kept")
        before = listing(disk)
        with pytest.raises(ConvertError, match="disk is full.*as it was before"), CheckpointWriter(disk / "target", overwrite=True) as writer:
            for i in range(8):
                writer.add(f"t.{i}", torch.ones(1 << 18))
        assert listing(disk) == before


KILLED = """
import sys, time, torch
from megatron_kd.convert.writer import CheckpointWriter
with CheckpointWriter(sys.argv[1]) as writer:
    writer.add("a", torch.ones(1000))
    print("writing", flush=True)
    time.sleep(60)
"""


def test_after_kill_9_the_target_is_absent_and_the_next_run_removes_the_remains(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def peak_rss_growth(action) -> int:
    """Bytes by which the peak resident set grew over the current one during `action`."""
    Path("/proc/self/clear_refs").write_text("5")
    status = lambda key: int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)).split()[1]) * 1024  # noqa: E731
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def test_copying_a_checkpoint_needs_the_memory_of_one_tensor(tmp_path):
    tensor = torch.zeros(4 << 20)
    with CheckpointWriter(tmp_path / "in") as writer:
        for i in range(12):
            writer.add(f"t.{i}", tensor)
        writer.add_json("config.json", {})
    checkpoint = Checkpoint.open(tmp_path / "in")
    del tensor

    def copy():
        with CheckpointWriter(tmp_path / "out") as writer:
            for name in checkpoint.specs:
                writer.add(name, checkpoint.read(name))

    assert peak_rss_growth(copy) < 3 * (16 << 20), "192 MiB of tensors of 16 MiB each"
