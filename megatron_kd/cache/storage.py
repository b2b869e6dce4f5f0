"""Storage: one folder or object-store prefix, reached through fsspec.

Owns every file operation of the cache: whole files appear at once or not at all. Called by writer, reader and upkeep; the only importer
of fsspec. `msc://profile/path` (multi-storage-client) and `s3://bucket/prefix` work wherever fsspec knows the protocol.
Local folders are read by memory map, others by ranged requests.
"""

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import fsspec

from megatron_kd.errors import CacheCorrupt, CacheError, ConfigError, rule

_KEPT = "Check the network and the credentials; what is built stays in the spool folder"
INDEX_DIR, SHARD_DIR, PARTIAL_DIR = "index", "shards", "partial"


class Storage:
    """Files of one cache. Safe to use from several threads and processes. Errors: ConfigError for a location that cannot be understood."""

    def __init__(self, location: str, options: dict | None = None):
        """`options` go to the fsspec file system, e.g. {"endpoint_url": ...} for S3."""
        self.location = location
        try:
            self._fs, self._root = fsspec.core.url_to_fs(location, **(options or {}))
        except (ValueError, ImportError) as e:
            raise ConfigError(rule("cache.location", location, f"cannot be opened ({e})", "Give a folder or a URL that fsspec knows, for example s3://bucket/prefix")) from e
        self.is_local = isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)
        self._root = self._root.rstrip("/")
        self._maps: dict[str, mmap.mmap] = {}

    def path(self, name: str) -> str:
        """Full path of a name such as "index/x.kdi"."""
        return f"{self._root}/{name}"

    def local_path(self, name: str) -> Path:
        """The same as a pathlib path; only where is_local."""
        return Path(self.path(name))

    def files(self, folder: str) -> dict[str, int]:
        """{name without folder: size in bytes} of finished files."""
        self._fs.invalidate_cache(self.path(folder))
        infos = self._gate(folder, "listable", "Check the location, the network and the credentials", self._ls, self.path(folder))
        return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in infos if info["type"] == "file" and not info["name"].endswith(".tmp")}

    def read(self, name: str) -> bytes:
        """A whole file. Errors: CacheError where it is absent or cannot be read."""
        return self._gate(name, "readable", "Run `megatron-kd cache verify`", self._fs.cat_file, self.path(name))

    def view(self, name: str, offset: int, length: int) -> memoryview | bytes:
        """`length` bytes from `offset`; a view of a memory map where local. Errors: CacheError; CacheCorrupt where the file is shorter."""
        if self.is_local:
            data = memoryview(self._map(name))[offset:offset + length]
        else:
            data = self._gate(name, "readable", "Run `megatron-kd cache verify`", self._fs.cat_file, self.path(name), start=offset, end=offset + length)
        if len(data) != length:
            raise CacheCorrupt(rule(f"cache file {name}", f"{len(data)} bytes at {offset}", f"must hold {length}", "Run `megatron-kd cache repair`"))
        return data

    def whole(self, name: str) -> memoryview | bytes:
        """A whole file, as a memory map where local."""
        return memoryview(self._map(name)) if self.is_local else self.read(name)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once: temporary file, fsync and rename; one PUT on an object store."""
        if not self.is_local:
            self._gate(name, "writable", _KEPT, self._fs.pipe_file, self.path(name), data)
            return
        target = self.local_path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, suffix=".tmp", delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._publish(Path(file.name), target)

    def move_in(self, local: Path, name: str) -> None:
        """Make a complete local file the store's `name`: a rename within a folder store, an upload and removal otherwise."""
        if not self.is_local:
            self._gate(name, "writable", _KEPT, self._fs.put_file, str(local), self.path(name))
            local.unlink()
            return
        target = self.local_path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "rb") as file:
            os.fsync(file.fileno())
        self._publish(local, target)

    def remove(self, name: str) -> None:
        """Delete a file; an absent one is fine."""
        self._maps.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.path(name))

    def _ls(self, path: str) -> list[dict]:
        try:
            return self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []

    def _gate(self, name: str, ability: str, way_out: str, operation, *arguments, **keywords):
        """The one place where what a file system raises becomes a CacheError; every fsspec backend has its own exceptions."""
        try:
            return operation(*arguments, **keywords)
        except Exception as e:  # noqa: BLE001
            raise CacheError(rule(f"cache file {name}", f"{type(e).__name__}: {e}", f"must be {ability} under {self.location}", way_out)) from e

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            self._maps[name] = self._gate(name, "readable", "Run `megatron-kd cache repair`", _map_file, self.local_path(name))
        return self._maps[name]

    @staticmethod
    def _publish(source: Path, target: Path) -> None:
        os.replace(source, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _map_file(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
