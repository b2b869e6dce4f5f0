"""The writing side: a checkpoint directory that appears whole or not at all, streamed tensor by tensor.

Shards go into a hidden sibling of the target; the finished directory is renamed into place, so a failure at any byte leaves
the target as it was. A shard's header is reserved up front and filled in at its end (safetensors allows trailing blanks), so
no tensor waits in memory. Called by head, prune, text and export on one process.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_kd.convert.hf_index import DTYPES, INDEX_NAME
from megatron_kd.errors import ConvertError, rule

HEADER_BYTES = 1 << 16
"""Reserved for a shard's JSON header, its 8-byte length included; a shard whose names need more is closed and the next begun."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int | None, str], None]
"""Called with the bytes written so far, all bytes to come (None: not known), and the name of the tensor just finished."""


class CheckpointWriter:
    """`with CheckpointWriter(target) as w: w.add(name, tensor); w.add_text("config.json", text)`.

    Errors: ConvertError where the target exists (without `overwrite`), the disk is full, or a name comes twice.
    """

    def __init__(self, target: str | os.PathLike, *, stem: str = "model", max_shard_bytes: int = 5 << 30, expected_bytes: int | None = None,
                 overwrite: bool = False, progress: Progress | None = None):
        self.target = Path(target).absolute()
        self._stem, self._max_shard_bytes, self._overwrite = stem, max_shard_bytes, overwrite
        self._progress, self._expected_bytes = progress, expected_bytes
        self.num_bytes = 0
        check_target(self.target, overwrite)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        check_room(self.target.parent, expected_bytes or 0)
        self._whole = contextlib.ExitStack()
        self._dir: Path | None = None
        self._file = None
        self._entries: dict[str, dict] = {}
        self._entry_bytes = 0
        self._shards: list[dict[str, dict]] = []
        self._seen: set[str] = set()

    def __enter__(self) -> "CheckpointWriter":
        self._dir = self._whole.enter_context(whole_directory(self.target, overwrite=self._overwrite))
        return self

    def __exit__(self, kind, error, traceback) -> None:
        with self._whole:  # moves the directory into place, or removes it
            try:
                if error is not None:
                    raise error
                self.close_shards()
            finally:
                if self._file is not None:
                    with contextlib.suppress(OSError):  # closing flushes, and a full disk fails once more
                        self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor; its bytes are on their way to disk when this returns."""
        if name in self._seen:
            raise ConvertError(rule("tensor", name, "was already written", "This is a fault of the converter: report it with the command"))
        self._seen.add(name)
        tensor = tensor.detach().cpu().contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        entry_bytes = len(json.dumps({name: entry})) + 64
        full = self._file is not None and self._file.tell() - HEADER_BYTES + num_bytes > self._max_shard_bytes and self._entries
        if full or 8 + self._entry_bytes + entry_bytes > HEADER_BYTES:
            self._end_shard()
        if self._file is None:
            self._file = open(self._dir / f"shard-{len(self._shards):05d}", "wb")
            self._file.seek(HEADER_BYTES)
        start = self._file.tell() - HEADER_BYTES
        if num_bytes:
            self._file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        entry["data_offsets"] = [start, start + num_bytes]
        self._entries[name] = entry
        self._entry_bytes += entry_bytes
        self.num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self.num_bytes, self._expected_bytes, name)

    def add_text(self, name: str, text: str) -> None:
        """Write a small file beside the weights."""
        (self._dir / name).write_text(text, encoding="utf-8")

    def add_json(self, name: str, value: dict) -> None:
        """Write a small JSON file beside the weights."""
        self.add_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def copy_companions(self, source: Path) -> None:
        """Copy what a checkpoint has beside weights, index and config: tokenizer, chat template, generation config, licence, code."""
        for file in sorted(Path(source).iterdir()):
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
            if file.is_file() and not weights and file.name != "config.json" and not (self._dir / file.name).exists():
                shutil.copyfile(file, self._dir / file.name)

    def close_shards(self) -> Path:
        """End the weights: shards and index get their final names in the hidden directory, which is returned for checks before it moves."""
        self._end_shard()
        count = len(self._shards)
        names = [f"{self._stem}.safetensors"] if count == 1 else [f"{self._stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            if (self._dir / f"shard-{i:05d}").exists():
                os.rename(self._dir / f"shard-{i:05d}", self._dir / name)
        if count > 1:
            weight_map = {tensor: names[i] for i, entries in enumerate(self._shards) for tensor in entries}
            total = sum(entries[t]["data_offsets"][1] - entries[t]["data_offsets"][0] for entries in self._shards for t in entries)
            self.add_json(INDEX_NAME.replace("model", self._stem, 1), {"metadata": {"total_size": total}, "weight_map": weight_map})
        return self._dir

    def _end_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        assert len(header) <= HEADER_BYTES - 8, "the reserve for a shard's header was miscounted"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", HEADER_BYTES - 8) + header.ljust(HEADER_BYTES - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._shards.append(self._entries)
        self._entries, self._entry_bytes = {}, 0


@contextlib.contextmanager
def whole_directory(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `target` to write into; it becomes `target` when the block ends, and is removed where the block raises.

    Errors: ConvertError for whatever the file system refuses, in the block too; the target is then as it was.
    """
    target = Path(target).absolute()
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, prefix)
        partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
        yield partial
        _move_into_place(partial, target, overwrite)
    except OSError as e:
        why = "the disk is full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else str(e)
        raise ConvertError(rule("target", str(target), f"could not be written: {why}; the target is as it was before",
                                "Free space or choose another target, then run the same command again")) from e
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, target: Path, overwrite: bool) -> None:
    os.chmod(partial, 0o755)
    aside = None
    if target.exists() and overwrite:
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent)) / "old"
        os.rename(target, aside)
    try:
        os.rename(partial, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    if aside is not None:
        shutil.rmtree(aside.parent)


def check_target(target: str | os.PathLike, overwrite: bool) -> None:
    """ConvertError where `target` exists with something in it and may not be replaced."""
    target = Path(target)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise ConvertError(rule("target", str(target), "exists and is not an empty directory", "Choose another, remove it, or pass --overwrite"))


def check_room(directory: Path, num_bytes: int) -> None:
    """ConvertError where `directory`'s file system has less than `num_bytes` free."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise ConvertError(rule("disk space", f"{free / 2**30:.2f} GiB free in {directory}", f"needs {num_bytes / 2**30:.2f} GiB",
                                "Free space or choose another target; nothing was written"))


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Partial directories of dead processes of this host."""
    for partial in parent.glob(f"{prefix}*"):
        pid = partial.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(partial, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
