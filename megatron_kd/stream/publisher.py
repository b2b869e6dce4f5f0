"""Publisher: the control side of one teacher replica, on rank 0 of its world.

Owns the connections to every student replica found at the rendezvous and the queue of their requests. The serve loop asks `next`
for a request, lets all ranks compute and write the rows, then calls `finish`. Students may come, die and come back at any time:
what a lost student had asked is dropped, and the publisher looks at the rendezvous again. It joins anew only when nothing that was
handed out is unfinished, so that a join proves that no write of this replica is under way.
"""

import threading
import time
import uuid
from collections import deque
from dataclasses import replace

from megatron_kd import errors
from megatron_kd.errors import AuthenticationFailed, KDError, TransferFailed, WireError, WireVersionMismatch, rule
from megatron_kd.stream import rendezvous
from megatron_kd.stream.channel import Channel, connect
from megatron_kd.stream.session import Session
from megatron_kd.stream.spec import TeacherSpec
from megatron_kd.stream.trace import Trace, mark
from megatron_kd.stream.wire import Request
from megatron_kd.stream.writer import Writer


class Publisher:
    """Close it, or use `with`. `next` and `finish` belong to the serve loop's thread."""

    def __init__(self, spec: TeacherSpec, trace: Trace | None = None):
        self._spec, self._trace = spec, trace
        self._incarnation = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._sessions: dict[int, Session] = {}
        self._connected: set[tuple[str, int]] = set()
        self._unfinished: dict[int, int] = {}
        self._descriptors: dict[int, set[bytes]] = {}
        self._gone: list[int] = []
        self._count = 0
        self._failure: KDError | None = None
        self._leaving = self._closed = False
        self._counted_s, self._busy_s, self._idle_s = time.monotonic(), 0.0, 0.0
        threading.Thread(target=self._look_loop, name="kd-look", daemon=True).start()

    def next(self, *, timeout_s: float) -> Request | None:
        """The oldest request, or None after `timeout_s`. Errors: what made a student refuse this replica (a wrong configuration)."""
        with self._changed:
            if not self._queue:
                self._changed.wait_for(lambda: self._queue or self._failure or self._closed, timeout_s)
            if self._failure is not None:
                raise self._failure
            if not self._queue:
                return None
            request = self._queue.popleft()
            mark(self._trace, "begun", request.lane, request.seq)
            self._count_time()
            self._unfinished[request.session] = self._unfinished.get(request.session, 0) + 1
            return request

    def finish(self, request: Request, *, error: str | None = None) -> None:
        """Report that all ranks of the replica have written their rows of `request`, or what prevented it. No rank may write any more of it.
        From any thread; requests that were handed out meanwhile may be unfinished."""
        with self._changed:
            self._count_time()
            self._unfinished[request.session] -= 1
            session = self._sessions.get(request.session)
            if session is not None:
                kind = {"t": "done"} if error is None else {"t": "error", "text": error}
                session.send({**kind, "lane": request.lane, "seq": request.seq, "busy_s": self._busy_s, "idle_s": self._idle_s})
                self._busy_s = self._idle_s = 0.0
            self._changed.notify_all()

    def _count_time(self) -> None:
        """The time since the last call was busy where a request was unfinished, else idle."""
        now = time.monotonic()
        if any(self._unfinished.values()):
            self._busy_s += now - self._counted_s
        else:
            self._idle_s += now - self._counted_s
        self._counted_s = now

    def departed(self) -> list[bytes]:
        """Descriptors of students that left since the last call and have nothing unfinished here: every rank may forget them."""
        with self._changed:
            ready = [number for number in self._gone if not self._unfinished.get(number)]
            self._gone = [number for number in self._gone if number not in ready]
            return [descriptor for number in ready for descriptor in self._descriptors.pop(number, ())]

    @property
    def num_students(self) -> int:
        """Student replicas connected."""
        with self._changed:
            return len(self._sessions)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._queue)

    def leave(self) -> None:
        """Take no new student and tell the present ones to ask for nothing more; each hangs up when nothing is owed to it."""
        with self._changed:
            if self._leaving:
                return
            self._leaving = True
            for session in self._sessions.values():
                session.send({"t": "leave"})

    def close(self) -> None:
        """Hang up. Students count that as a loss unless `leave` came before and they have hung up themselves."""
        with self._changed:
            self._leaving = self._closed = True
            sessions = list(self._sessions.values())
            self._changed.notify_all()
        for session in sessions:
            session.close(flush_s=1.0)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- threads

    def _look_loop(self) -> None:
        while not self._leaving:
            try:
                _, found = rendezvous.members(self._spec.rendezvous, self._spec.token)
            except (AuthenticationFailed, WireVersionMismatch) as e:
                self._fail(e)
                return
            except WireError:
                found = {}  # no student yet, or it is gone: look again
            for address in found.values():
                with self._changed:
                    fresh = address not in self._connected
                    if fresh:
                        self._connected.add(address)
                if fresh:
                    threading.Thread(target=self._follow_student, args=(address,), name="kd-student", daemon=True).start()
            time.sleep(self._spec.retry_s)

    def _fail(self, error: KDError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _follow_student(self, address: tuple[str, int]) -> None:
        """One connection to one student replica, from join to its end."""
        number = None
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or not any(self._unfinished.values()))
                if self._leaving:
                    return
                self._count += 1
                number = self._count
            channel = connect(address, self._spec.token)
            welcome = self._join(channel)
            if welcome is None:
                channel.close()
                return
            session = Session(channel, f"student{number}", send_timeout_s=welcome["heartbeat_timeout_s"])
            with self._changed:
                self._sessions[number] = session
                self._descriptors[number] = set()
                if self._leaving:
                    session.send({"t": "leave"})
            self._read_requests(number, session, welcome["heartbeat_timeout_s"])
        except KDError as e:
            if isinstance(e, (AuthenticationFailed, WireVersionMismatch)):
                self._fail(e)
        finally:
            self._drop(number)
            time.sleep(self._spec.retry_s)
            with self._changed:
                self._connected.discard(address)

    def _join(self, channel: Channel) -> dict | None:
        spec = self._spec
        channel.send({"t": "join", "role": "teacher", "name": spec.name, "incarnation": self._incarnation, "agreement": spec.agreement.as_dict(),
                      "head_digest": spec.head_digest, "context_length": spec.context_length})
        welcome = channel.receive(timeout_s=10.0)
        if welcome is not None and welcome["t"] == "refused":
            kind = getattr(errors, welcome["error"], WireError)
            self._fail(kind(f"refused by the student at {channel.peer}: {welcome['text']}"))
            return None
        return welcome

    def _read_requests(self, number: int, session: Session, heartbeat_timeout_s: float) -> None:
        while True:
            message = session.channel.receive(timeout_s=heartbeat_timeout_s)
            if message is None:
                raise TransferFailed(f"student {session.name} silent for {heartbeat_timeout_s} s")
            if message["t"] == "ping":
                session.send({"t": "pong"})
            elif message["t"] == "bye":
                return
            elif message["t"] == "ask":
                try:
                    request = replace(Request.decode(message), session=number)
                except KDError as e:
                    session.send({"t": "error", "lane": 0, "seq": 0, "text": str(e)})
                    session.close(flush_s=1.0)
                    raise
                with self._changed:
                    self._descriptors[number].update(grant.descriptor for grant in request.grants)
                    self._queue.append(request)
                    mark(self._trace, "seen", request.lane, request.seq)
                    self._changed.notify_all()
            else:
                raise WireError(rule("message from a student", message["t"], "must be ask, ping or bye", "Use the same megatron_kd on both sides"))

    def _drop(self, number: int | None) -> None:
        """Forget a student: its queued requests go, its descriptors follow when nothing of it is unfinished."""
        with self._changed:
            session = self._sessions.pop(number, None)
            if session is None:
                return
            self._queue = deque(request for request in self._queue if request.session != number)
            self._gone.append(number)
            self._changed.notify_all()
        session.close()


def serve_single(publisher: Publisher, sender, rows_of, *, stop, leave_s: float = 30.0) -> None:
    """The serve loop of a replica of one process: `rows_of(block) -> RowBlock`, until `stop()`. Larger worlds: megatron_kd.teacher.serve.

    After `stop()` what is owed is still answered, for at most `leave_s`. An exception of `rows_of` is reported to the student, then
    raised; rows that the route does not find, and a failed write, are reported and survived.
    """
    deadline = None

    def write(request: Request, staged) -> None:
        try:
            if staged is not None:
                sender.write(staged)
        except WireError as e:
            publisher.finish(request, error=str(e))
        else:
            publisher.finish(request)

    with Writer() as writer:
        while True:
            if stop() and deadline is None:
                publisher.leave()
                deadline = time.monotonic() + leave_s
            if deadline is not None and (publisher.num_students == 0 or time.monotonic() > deadline):
                return
            if gone := publisher.departed():
                writer.put(lambda gone=gone: sender.forget(gone))
            request = publisher.next(timeout_s=0.1)
            if request is None:
                continue
            try:
                rows = rows_of(request.block)
                writer.reserve()
                staged = sender.stage(request, rows)
            except WireError as e:
                publisher.finish(request, error=str(e))
            except BaseException as e:
                publisher.finish(request, error=f"{type(e).__name__}: {e}")
                raise
            else:
                writer.put(lambda request=request, staged=staged: write(request, staged))
