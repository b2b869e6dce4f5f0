"""Rendezvous: the one address that everybody is told, and what is learned there.

The student's global rank 0 hosts a Hub at `host:port`. The asking rank of each student replica registers the address of its own
listener and stays connected; teachers and the other student ranks look members up. The hub holds no other state, so a restarted
student is a new hub at the same address, and whoever looks again finds it.
"""

import threading
import time

from megatron_kd.errors import TeacherStalled, TransferFailed, WireError, rule
from megatron_kd.stream.channel import Channel, Listener, connect

Address = tuple[str, int]


class Hub:
    """Serves `{dp rank: address}` of the registered student replicas. Errors: ConfigError where the address is taken."""

    def __init__(self, bind: Address, token: bytes, run_id: str):
        self.run_id = run_id
        self._members: dict[int, Address] = {}
        self._lock = threading.Lock()
        self._listener = Listener(bind, token, self._serve)
        self.address = self._listener.address

    @property
    def refused(self) -> int:
        """Connections that failed the preamble, the challenge or the protocol."""
        return self._listener.refused

    def _serve(self, channel: Channel) -> None:
        registered = None
        try:
            while True:
                message = channel.receive(timeout_s=3600.0)
                if message is None:
                    return
                if message.get("t") == "members":
                    with self._lock:
                        members = [[dp_rank, *address] for dp_rank, address in sorted(self._members.items())]
                    channel.send({"t": "members", "run_id": self.run_id, "members": members})
                elif message.get("t") == "register":
                    registered = int(message["dp_rank"]), (str(message["host"]), int(message["port"]))
                    with self._lock:
                        self._members[registered[0]] = registered[1]
                    channel.send({"t": "registered", "run_id": self.run_id})
                else:
                    raise WireError(rule("message to the rendezvous", message.get("t"), "must be members or register", "Use the same megatron_kd on both sides"))
        except (KeyError, TypeError, ValueError) as e:
            raise WireError(f"malformed message to the rendezvous: {e}") from e
        except TransferFailed:
            return
        finally:
            with self._lock:
                if registered is not None and self._members.get(registered[0]) == registered[1]:
                    del self._members[registered[0]]

    def close(self) -> None:
        """Stop serving."""
        self._listener.close()


def register(hub: Address, token: bytes, dp_rank: int, address: Address, *, timeout_s: float) -> Channel:
    """Announce a student replica; it stays a member while the returned channel is open. Errors: as `members`."""
    def attempt() -> Channel:
        channel = connect(hub, token, timeout_s=5.0)
        channel.send({"t": "register", "dp_rank": dp_rank, "host": address[0], "port": address[1]})
        _answer(channel, "registered")
        return channel

    return _until(attempt, timeout_s, f"rendezvous {hub[0]}:{hub[1]}")


def members(hub: Address, token: bytes) -> tuple[str, dict[int, Address]]:
    """(run id, {dp rank: address}) now. Errors: TransferFailed where nobody listens, AuthenticationFailed, WireVersionMismatch."""
    with connect(hub, token, timeout_s=5.0) as channel:
        channel.send({"t": "members"})
        answer = _answer(channel, "members")
        return answer["run_id"], {dp_rank: (host, port) for dp_rank, host, port in answer["members"]}


def find(hub: Address, token: bytes, dp_rank: int, *, timeout_s: float) -> Address:
    """The address of one student replica, waiting until it has registered. Errors: TeacherStalled at the deadline."""
    def attempt() -> Address:
        found = members(hub, token)[1]
        if dp_rank not in found:
            raise TransferFailed(f"student replica {dp_rank} has not registered")
        return found[dp_rank]

    return _until(attempt, timeout_s, f"student replica {dp_rank} at rendezvous {hub[0]}:{hub[1]}")


def _answer(channel: Channel, kind: str) -> dict:
    answer = channel.receive(timeout_s=5.0)
    if answer is None or answer.get("t") != kind:
        raise TransferFailed(f"the rendezvous did not answer {kind!r}")
    return answer


def _until(attempt, timeout_s: float, what: str):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except TransferFailed as e:
            if time.monotonic() > deadline:
                raise TeacherStalled(f"waited {timeout_s} s for {what}: {e}") from e
            time.sleep(0.1)
