"""Storage: one folder or object-store prefix, reached through fsspec.

Owns every file operation of the cache: whole files appear at once or not at all. Called by writer, reader and upkeep; the only importer
of fsspec. `msc://profile/path` (multi-storage-client) and `s3://bucket/prefix` work wherever fsspec knows the protocol.
Local folders are read by memory map, others by ranged requests.
"""

import mmap
import os
import tempfile
from pathlib import Path

import fsspec

from megatron_kd.errors import CacheCorrupt, CacheError, ConfigError, rule

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

    def list(self, folder: str) -> dict[str, int]:
        """{name without folder: size in bytes} of finished files."""
        try:
            self._fs.invalidate_cache(self.path(folder))
            infos = self._fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in infos if info["type"] == "file" and not info["name"].endswith(".tmp")}

    def read(self, name: str) -> bytes:
        """A whole file. Errors: CacheError where it is absent or cannot be read."""
        try:
            return self._fs.cat_file(self.path(name))
        except OSError as e:
            raise CacheError(rule(f"cache file {name}", str(e), f"must be readable under {self.location}", "Run `megatron-kd cache verify`")) from e

    def view(self, name: str, offset: int, length: int) -> memoryview | bytes:
        """`length` bytes from `offset`; a view of a memory map where local. Errors: CacheError; CacheCorrupt where the file is shorter."""
        try:
            data = memoryview(self._map(name))[offset:offset + length] if self.is_local else self._fs.cat_file(self.path(name), start=offset, end=offset + length)
        except OSError as e:
            raise CacheError(rule(f"cache file {name}", str(e), f"must be readable under {self.location}", "Run `megatron-kd cache repair`")) from e
        if len(data) != length:
            raise CacheCorrupt(rule(f"cache file {name}", f"{len(data)} bytes at {offset}", f"must hold {length}", "Run `megatron-kd cache repair`"))
        return data

    def whole(self, name: str) -> memoryview | bytes:
        """A whole file, as a memory map where local."""
        return memoryview(self._map(name)) if self.is_local else self.read(name)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once: temporary file, fsync and rename; one PUT on an object store."""
        if not self.is_local:
            self._fs.pipe_file(self.path(name), data)
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
            self._fs.put_file(str(local), self.path(name))
            local.unlink()
            return
        target = self.local_path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "rb") as file:
            os.fsync(file.fileno())
        self._publish(local, target)

    def remove(self, name: str) -> None:
        """Delete a file; an absent one is fine."""
        held = self._maps.pop(name, None)
        del held
        try:
            self._fs.rm_file(self.path(name))
        except FileNotFoundError:
            pass

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with open(self.local_path(name), "rb") as file:
                try:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except ValueError as e:
                    raise CacheCorrupt(rule(f"cache file {name}", "0 bytes", "must not be empty", "Run `megatron-kd cache repair`")) from e
        return self._maps[name]

    @staticmethod
    def _publish(source: Path, target: Path) -> None:
        os.replace(source, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
