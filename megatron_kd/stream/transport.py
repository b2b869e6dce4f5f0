"""Transport: one-sided writes into memory that the receiver owns. The interface; `nixl.py` and `loopback.py` implement it.

An Inbox belongs to one student rank: it makes buffers writable and collects the messages that writers leave behind them. An
Outbox belongs to one teacher rank: it writes pieces of that rank's memory. A descriptor is an opaque byte string,
made by an Inbox, carried by the control channel, understood by the Outbox of the same kind.

Order that every implementation keeps: when a message is polled, all bytes of its piece are in the buffer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """One write: runs of the staging buffer into one remote buffer, then a message to its owner."""

    descriptor: bytes
    """Of the remote buffer, from Inbox.register."""
    runs: tuple[tuple[int, int, int], ...]
    """(offset in staging, offset in the remote buffer, bytes) each."""
    message: bytes
    """Delivered after the bytes."""


class Inbox(Protocol):
    """Receiving end. Not thread-safe: the receiver calls it under its lock."""

    def register(self, buffer: torch.Tensor) -> bytes:
        """Make a contiguous uint8 buffer writable; its descriptor."""

    def revoke(self, descriptor: bytes) -> None:
        """Take the permission back. Not every transport can stop a write that has begun, so the memory must not be reused at once."""

    def poll(self) -> list[bytes]:
        """Messages of completed pieces since the last call, never blocking."""

    def close(self) -> None:
        """Revoke everything."""


class Transfer(Protocol):
    """Pieces on their way."""

    def wait(self, *, timeout_s: float) -> None:
        """Return when all have arrived. Errors: TransferFailed where one fails or the deadline passes. Call it once, whatever happens."""


class Outbox(Protocol):
    """Sending end; belongs to one thread."""

    def start(self, staging: torch.Tensor, pieces: list[Piece]) -> Transfer:
        """Begin to write all pieces, out of `staging`, a uint8 buffer that is registered when first seen. Errors: TransferFailed; then none is
        under way."""

    def release(self, staging: torch.Tensor) -> None:
        """Nothing will be written out of `staging` any more."""

    def forget(self, descriptor: bytes) -> None:
        """Drop what is cached about the descriptor's owner: it left or died."""

    def close(self) -> None:
        """Release everything."""
