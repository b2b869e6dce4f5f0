"""Hugging Face safetensors checkpoints, read one tensor (or some rows of it) at a time.

Owns the reading side: config, index, shard headers, bytes. Opening reads headers only, and finds a missing shard, a wrong
index or a truncated file before anything is converted. Called by head, prune, text and export; writing is `writer.py`, the
MXFP4 format `mxfp4.py`. Tensors come as plain CPU tensors that own their memory, so the peak is the largest tensor read.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kd.errors import ConvertError, rule

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where a tensor lies and what it is, from its shard's header."""

    file: Path
    """The shard."""
    dtype: torch.dtype
    """Element type as stored."""
    shape: tuple[int, ...]
    """Dimensions as stored."""
    offset_bytes: int
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorSpec]:
    """The tensors of one safetensors file. Reads 8 + header bytes. Errors: ConvertError where it is not one, or is cut short."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ConvertError(rule(str(file), f"{size} bytes", "is not a whole safetensors file: its header would end beyond the file",
                                    "Download or copy this shard again"))
        try:
            header = json.loads(f.read(length))
        except ValueError as e:
            raise ConvertError(rule(str(file), str(e), "must start with a safetensors header in JSON", "Download or copy this shard again")) from e
    specs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ConvertError(rule(f"dtype of {name} in {file}", entry["dtype"], f"must be one of {sorted(DTYPES)}", "Convert this tensor first"))
        start, end = entry["data_offsets"]
        spec = TensorSpec(file=file, dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]), offset_bytes=8 + length + start)
        if spec.num_bytes != end - start:
            raise ConvertError(rule(f"{name} in {file}", f"{end - start} bytes", f"shape {spec.shape} of {entry['dtype']} needs {spec.num_bytes}",
                                    "Download or copy this shard again"))
        if 8 + length + end > size:
            raise ConvertError(rule(str(file), f"{size} bytes", f"is cut short: tensor {name} ends at byte {8 + length + end}",
                                    "Download or copy this shard again"))
        specs[name] = spec
    return specs


class Checkpoint:
    """A directory with config.json and safetensors weights. `Checkpoint.open(path)`; tensors by `read`."""

    def __init__(self, path: Path, config: dict, specs: dict[str, TensorSpec]):
        self.path, self.config, self.specs = path, config, specs
        self.num_bytes_read = 0

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Checkpoint":
        """Read config, index and every shard's header. Errors: ConvertError naming the file at fault."""
        path = Path(path)
        if not path.is_dir():
            raise ConvertError(rule("checkpoint", str(path), "must be a directory with config.json and *.safetensors",
                                    "Give a local directory; fetch a hub model with `hf download NAME --local-dir DIR`"))
        config = read_json(path / "config.json")
        index_file = path / INDEX_NAME
        if index_file.exists():
            return cls(path, config, _indexed_specs(path, read_json(index_file)))
        if (path / SINGLE_NAME).exists():
            return cls(path, config, read_header(path / SINGLE_NAME))
        found = sorted(p.name for p in path.iterdir())
        raise ConvertError(rule("checkpoint", str(path), f"must hold {INDEX_NAME} or {SINGLE_NAME}; it holds {found[:8]}",
                                "Convert other formats with transformers' save_pretrained first"))

    @property
    def text_config(self) -> dict:
        """The language model's part of the config: `text_config` of a multimodal wrapper, else the config itself."""
        return self.config.get("text_config", self.config)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def spec(self, name: str) -> TensorSpec:
        """What `name` is. Errors: ConvertError if the checkpoint has no such tensor."""
        if name not in self.specs:
            raise ConvertError(rule("tensor", name, f"is not in {self.path}", "Check that the config fits the weights"))
        return self.specs[name]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or its rows [start, end) along dimension 0; only those bytes are read."""
        spec = self.spec(name)
        shape, start_bytes = spec.shape, 0
        if rows is not None:
            start, end = rows
            if not 0 <= start <= end <= shape[0]:
                raise ConvertError(rule(f"rows of {name}", rows, f"must lie within its {shape[0]} rows", "Check the vocabulary or expert range"))
            shape = (end - start, *shape[1:])
            start_bytes = start * (spec.num_bytes // spec.shape[0])
        buffer = bytearray(math.prod(shape) * spec.dtype.itemsize)
        with open(spec.file, "rb", buffering=0) as f:
            f.seek(spec.offset_bytes + start_bytes)
            _read_into(f, memoryview(buffer), name)
        self.num_bytes_read += len(buffer)
        if not buffer:
            return torch.empty(shape, dtype=spec.dtype)
        return torch.frombuffer(buffer, dtype=spec.dtype).reshape(shape)


def read_json(path: Path) -> dict:
    """A JSON file as a dict. Errors: ConvertError naming the file where it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConvertError(rule("file", str(path), "is missing", "Download or copy it")) from e
    except ValueError as e:
        raise ConvertError(rule(str(path), str(e), "must be JSON", "Download or copy it again")) from e


def _indexed_specs(path: Path, index: dict) -> dict[str, TensorSpec]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(rule(str(path / INDEX_NAME), sorted(index), "must have a `weight_map` from tensor to shard", "Download or copy it again"))
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).exists()]
    if missing:
        raise ConvertError(rule("missing shards", missing, f"{INDEX_NAME} names {len(shards)} shards, {len(missing)} of them are not in {path}",
                                "Download or copy them, then run the same command again"))
    headers = {shard: read_header(path / shard) for shard in shards}
    specs = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            elsewhere = [s for s in shards if name in headers[s]]
            raise ConvertError(rule(f"{INDEX_NAME}: {name}", shard, f"this shard does not hold the tensor; {elsewhere or 'no shard'} does",
                                    "The index belongs to other shards: download index and shards of one revision"))
        specs[name] = headers[shard][name]
    return specs


def _read_into(f, view: memoryview, name: str) -> None:
    while len(view):
        n = f.readinto(view[: 1 << 30])
        if not n:
            raise ConvertError(rule(f.name, f"{len(view)} bytes short", f"ended while {name} was read", "The file changed while it was read: run again"))
        view = view[n:]
