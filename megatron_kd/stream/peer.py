"""PeerLink: the line of a student rank that does not ask to the rank of its replica that does (asker.py).

Owns the connection and what its messages mean here: the agreement with the teachers, revocations, blocks given up by all, how many
replicas are left, the end of the stream. Made by the receiver, which it calls under the receiver's lock.
"""

import threading

from megatron_kd import errors
from megatron_kd.errors import TeacherError, WireError
from megatron_kd.stream import rendezvous
from megatron_kd.stream.channel import connect
from megatron_kd.stream.session import Session
from megatron_kd.stream.spec import StudentSpec
from megatron_kd.stream.wire import Agreement


class PeerLink:
    """`local` is the receiver of this process. Errors of the constructor: TeacherStalled where the asking rank does not show up, WireError."""

    def __init__(self, spec: StudentSpec, local):
        self._spec, self._local, self._closed = spec, local, False
        address = rendezvous.find(spec.rendezvous, spec.token, spec.dp_rank, timeout_s=spec.join_deadline_s)
        channel = connect(address, spec.token)
        channel.send({"t": "join", "role": "peer", "rank": spec.rank})
        self._session = Session(channel, "asker", send_timeout_s=30.0)
        threading.Thread(target=self._follow, name="kd-follow", daemon=True).start()

    def posted(self, lane: int, seq: int, hash_: int, num_rows: int, grant: tuple[int, bytes]) -> None:
        """This rank has opened its slot for block `seq`."""
        self._session.send({"t": "posted", "lane": lane, "seq": seq, "hash": hash_, "num_rows": num_rows, "generation": grant[0], "blobs": [grant[1]]})

    def withdrawn(self, lane: int, seq: int) -> None:
        """Nobody waits for block `seq` here any more."""
        self._session.send({"t": "withdrawn", "lane": lane, "seq": seq})

    def failed(self, text: str) -> None:
        """This rank cannot go on."""
        self._session.send({"t": "failed", "text": text})

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        self._session.close(flush_s=1.0)

    def _follow(self) -> None:
        try:
            while True:
                message = self._session.channel.receive(timeout_s=3600.0)
                if message is None:
                    continue
                with self._local.lock:
                    self._on(message)
        except WireError as e:
            with self._local.lock:
                if not self._closed:
                    self._local.fail(TeacherError(f"the asking rank of student replica {self._spec.dp_rank} is gone: {e}"))

    def _on(self, message: dict) -> None:
        local, kind = self._local, message["t"]
        if kind == "agree":
            local.agree(Agreement(**message["agreement"]))
        elif kind == "revoke":
            grant = local.local_revoke(message["lane"], message["seq"], message["owner"])
            answer = {"t": "revoked", "lane": message["lane"], "seq": message["seq"], "generation": grant[0] if grant else 0}
            self._session.send({**answer, "blobs": [grant[1]] if grant else []})
        elif kind == "drop":
            local.local_drop(message["lane"], message["seq"])
        elif kind == "absolve":
            local.local_absolve(message["owner"])
        elif kind == "stats":
            for name, value in message["counters"].items():
                setattr(local.counters, name, value)
            local.replicas_are(message["num_replicas"])
        elif kind == "fail":
            local.fail(getattr(errors, message["error"], TeacherError)(message["text"]))
