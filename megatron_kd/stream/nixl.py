"""NIXL: the transport between processes and nodes (UCX inside): RDMA, NVLink, shared memory or TCP, GPU or host memory.

The only importer of nixl. Metadata travels inside our descriptors over the authenticated control channel; NIXL's own listener,
which authenticates nobody, stays off. UCX opens a data port of its own: see docs/streaming.md for that trust boundary. UCX reads
its environment (UCX_TLS, UCX_NET_DEVICES) when an agent is made, never at import of this package.

Measured behaviour relied upon: a message arrives after its bytes; a writer may load metadata again when memory was added; over
host transports a write to deregistered memory still lands (nothing checks a key there), which is why the ring keeps revoked
memory out of use instead of trusting deregistration.
"""

import json
import logging
import os
import struct
import threading
import time
import uuid

import torch

from megatron_kd.errors import MissingDependency, TransferFailed
from megatron_kd.stream.transport import Piece


def _make_agent(role: str):
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as e:
        raise MissingDependency("streaming needs NIXL: pip install nixl") from e
    logging.getLogger("nixl").setLevel(logging.WARNING)
    # No progress thread: it spins on a core of its own, and the receiver polls every millisecond anyway, which is what drives UCX.
    config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    return nixl_agent(f"{role}-{uuid.uuid4().hex}", config)


def _memory(buffer: torch.Tensor) -> tuple[str, int]:
    return ("VRAM", buffer.device.index or 0) if buffer.is_cuda else ("DRAM", 0)


def _pack(agent: str, buffer: torch.Tensor, metadata: bytes) -> bytes:
    kind, device = _memory(buffer)
    head = json.dumps({"agent": agent, "address": buffer.data_ptr(), "bytes": buffer.numel(), "kind": kind, "device": device}).encode()
    return struct.pack("<I", len(head)) + head + metadata


def _unpack(descriptor: bytes) -> tuple[dict, bytes]:
    (size,) = struct.unpack_from("<I", descriptor)
    return json.loads(descriptor[4:4 + size]), descriptor[4 + size:]


class NixlInbox:
    """Inbox over NIXL. Errors: MissingDependency where nixl is absent."""

    def __init__(self):
        self._agent = _make_agent("student")
        self._lock = threading.Lock()
        self._registered: dict[bytes, object] = {}

    def register(self, buffer: torch.Tensor) -> bytes:
        with self._lock:
            registration = self._agent.register_memory(buffer)
            descriptor = _pack(self._agent.name, buffer, self._agent.get_partial_agent_metadata(registration, True, ["UCX"]))
            self._registered[descriptor] = registration
            return descriptor

    def revoke(self, descriptor: bytes) -> None:
        with self._lock:
            registration = self._registered.pop(descriptor, None)
            if registration is not None:
                self._agent.deregister_memory(registration)

    def poll(self) -> list[bytes]:
        with self._lock:
            return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        for descriptor in list(self._registered):
            self.revoke(descriptor)


class NixlTransfer:
    """Transfer over NIXL: one handle a piece."""

    def __init__(self, agent):
        self._agent = agent
        self.handles: list[tuple] = []
        """(NIXL's handle, its state, name of the agent written to)."""

    def wait(self, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            for handle, state, agent in self.handles:
                spins = 0
                while state == "PROC":
                    if time.monotonic() > deadline:
                        raise TransferFailed(f"write to {agent} not complete after {timeout_s} s")
                    time.sleep(0.00002 if spins < 50 else 0.0002)  # never 0: a spinning thread would take Python's lock from the next forward
                    spins += 1
                    state = self._agent.check_xfer_state(handle)
                if state != "DONE":
                    raise TransferFailed(f"write to {agent} ended as {state}")
        except TransferFailed:
            raise
        except Exception as e:
            raise TransferFailed(f"write failed: {type(e).__name__}: {e}") from e
        finally:
            self.release()

    def release(self) -> None:
        """Give the handles back."""
        for handle, _, _ in self.handles:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as e:  # an active transfer that cannot be cancelled: NIXL keeps it until the agent ends
                logging.getLogger(__name__).warning("NIXL could not release a transfer: %s", e)


class NixlOutbox:
    """Outbox over NIXL. Errors: MissingDependency where nixl is absent."""

    def __init__(self):
        self._agent = _make_agent("teacher")
        self._registered: dict[int, object] = {}
        self._loaded: set[bytes] = set()

    def start(self, staging: torch.Tensor, pieces: list[Piece]) -> "NixlTransfer":
        transfer = NixlTransfer(self._agent)
        try:
            if staging.data_ptr() not in self._registered:
                self._registered[staging.data_ptr()] = self._agent.register_memory(staging)
            for piece in pieces:
                transfer.handles.append(self._post(staging, piece))
        except Exception as e:  # NIXL's own exception types, translated at this gate and that of `wait`
            transfer.release()
            raise e if isinstance(e, TransferFailed) else TransferFailed(f"write failed: {type(e).__name__}: {e}") from e
        return transfer

    def _post(self, staging: torch.Tensor, piece: Piece) -> tuple:
        remote, metadata = _unpack(piece.descriptor)
        if piece.descriptor not in self._loaded:
            self._agent.add_remote_agent(metadata)
            self._loaded.add(piece.descriptor)
        if any(target + size > remote["bytes"] for _, target, size in piece.runs):
            raise TransferFailed(f"a run of {piece.runs} ends beyond the slot of {remote['bytes']} bytes")
        kind, device = _memory(staging)
        base = staging.data_ptr()
        local = self._agent.get_xfer_descs([(base + source, size, device) for source, _, size in piece.runs], mem_type=kind)
        there = self._agent.get_xfer_descs([(remote["address"] + target, size, remote["device"]) for _, target, size in piece.runs], mem_type=remote["kind"])
        handle = self._agent.initialize_xfer("WRITE", local, there, remote["agent"], piece.message)
        return handle, self._agent.transfer(handle), remote["agent"]

    def forget(self, descriptor: bytes) -> None:
        agent = _unpack(descriptor)[0]["agent"]
        mine = {d for d in self._loaded if _unpack(d)[0]["agent"] == agent}
        if mine:
            self._loaded -= mine
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as e:  # already gone on NIXL's side: nothing is left to drop
                logging.getLogger(__name__).info("NIXL had dropped %s: %s", agent, e)

    def release(self, staging: torch.Tensor) -> None:
        registration = self._registered.pop(staging.data_ptr(), None)
        if registration is not None:
            self._agent.deregister_memory(registration)

    def close(self) -> None:
        for registration in self._registered.values():
            self._agent.deregister_memory(registration)
        self._registered.clear()
