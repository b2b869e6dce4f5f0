"""Loopback: the transport inside one process. For tests, and the reference for what the interface means.

A Fabric joins the inboxes and outboxes made with it. `Fabric.on_write` is a hook called before the bytes of a piece move, with
which a test delays, corrupts or fails a write.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable

import torch

from megatron_kd.errors import TransferFailed
from megatron_kd.stream.transport import Piece


class Fabric:
    """The shared memory of one process: which descriptors are writable, and by whom they are owned."""

    def __init__(self, on_write: Callable[[Piece, torch.Tensor], None] | None = None):
        self.on_write = on_write
        self.lock = threading.Lock()
        self.regions: dict[bytes, tuple["LoopbackInbox", torch.Tensor]] = {}
        self.count = itertools.count()


class LoopbackInbox:
    """Inbox over a Fabric."""

    def __init__(self, fabric: Fabric):
        self._fabric, self._messages, self._mine = fabric, deque(), set()

    def register(self, buffer: torch.Tensor) -> bytes:
        descriptor = b"loopback:%d" % next(self._fabric.count)
        with self._fabric.lock:
            self._fabric.regions[descriptor] = (self, buffer)
            self._mine.add(descriptor)
        return descriptor

    def revoke(self, descriptor: bytes) -> None:
        with self._fabric.lock:
            self._fabric.regions.pop(descriptor, None)
            self._mine.discard(descriptor)

    def poll(self) -> list[bytes]:
        with self._fabric.lock:
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def close(self) -> None:
        for descriptor in list(self._mine):
            self.revoke(descriptor)


class Arrived:
    """Transfer that is over when it starts."""

    def wait(self, *, timeout_s: float) -> None:
        pass


class LoopbackOutbox:
    """Outbox over a Fabric."""

    def __init__(self, fabric: Fabric):
        self._fabric = fabric

    def start(self, staging: torch.Tensor, pieces: list[Piece]) -> "Arrived":
        for piece in pieces:
            if self._fabric.on_write is not None:
                self._fabric.on_write(piece, staging)
            with self._fabric.lock:
                if piece.descriptor not in self._fabric.regions:
                    raise TransferFailed(f"write to {piece.descriptor!r}: revoked or unknown")
                owner, buffer = self._fabric.regions[piece.descriptor]
                for source, target, size in piece.runs:
                    if target + size > buffer.numel():
                        raise TransferFailed(f"write of [{target}, {target + size}) into {buffer.numel()} bytes")
                    buffer[target:target + size] = staging[source:source + size]
                owner._messages.append(piece.message)
        return Arrived()

    def forget(self, descriptor: bytes) -> None:
        pass

    def release(self, staging: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        pass
