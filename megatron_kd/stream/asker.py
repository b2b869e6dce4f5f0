"""Asker: the control side of one student replica, on the one rank of it that asks (tp 0, cp 0 of the last stage).

Owns the replica's listener, the sessions with teachers and with the other ranks of the replica, and the table of requests:

    open ── every rank has posted its slot ──> asked ── the teacher reports all its writes done ──> gone
      ^                                          │
      └── every rank has revoked or kept ── the replica is lost (closed, silent, too slow, wrong)

A request goes to the replica with the fewest outstanding ones. Rows never pass here: a teacher's ranks write into every student
rank's ring directly. Called by the receiver, under its lock; starts threads for the listener, the sessions and the watch.
"""

import threading
import time
from dataclasses import dataclass, field

from megatron_kd.errors import KDError, TeacherError, TeacherLost, TeacherStalled, WireError, rule
from megatron_kd.rows import TokenBlock
from megatron_kd.stream import health, rendezvous
from megatron_kd.stream.channel import Channel, Listener, PeerClosed
from megatron_kd.stream.session import Session
from megatron_kd.stream.spec import StudentSpec
from megatron_kd.stream.trace import Trace, mark
from megatron_kd.stream.wire import Agreement, Grant, Request

LOCAL_RANK = 0
QUARANTINE_OF_DEAD_S = 120.0  # longer than any rank of an ended world is left alive, and than a write may take


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One block on its way."""

    block: TokenBlock | None = None
    posted: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    """(token hash, generation, descriptor) by student rank."""
    need: set[int] = field(default_factory=set)
    """Student ranks that still need rows."""
    owner: str | None = None
    """Incarnation of the replica that was asked."""
    asked_s: float = 0.0
    awaiting: set[int] = field(default_factory=set)
    """Ranks whose answer to a revocation is outstanding."""
    withdrawn: set[int] = field(default_factory=set)
    """Ranks that have given the block up; the others will."""


@dataclass(slots=True, kw_only=True, eq=False)
class Teacher:
    """One connected replica."""

    name: str
    incarnation: str
    session: Session
    outstanding: set[tuple[int, int]] = field(default_factory=set)
    leaving: bool = False
    """It gets no new request; when it owes nothing it may go."""


class Asker:
    """`local` is the receiver of this process: it offers `lock`, `local_revoke`, `local_drop`, `local_absolve`, `replicas_are`, `fail` and `agree`."""

    def __init__(self, spec: StudentSpec, local, counters: health.Counters, trace: Trace | None = None):
        self._spec, self._local, self._counters, self._trace = spec, local, counters, trace
        self.teachers: dict[str, Teacher] = {}
        self._peers: dict[int, Session] = {}
        self._entries: tuple[dict[int, Entry], dict[int, Entry]] = ({}, {})
        self._absolve_at: list[tuple[float, str]] = []
        self.agreement: Agreement | None = None
        self.last_refusal = ""
        self._closed = False
        self._listener = Listener((spec.bind, 0), spec.token, self._serve)
        self.address = self._listener.address
        self._membership = rendezvous.register(spec.rendezvous, spec.token, spec.dp_rank, self.address, timeout_s=spec.join_deadline_s)
        threading.Thread(target=self._watch, name="kd-watch", daemon=True).start()

    # ---- called by the receiver and by sessions of other ranks, under the lock

    def posted(self, rank: int, lane: int, seq: int, hash_: int, num_rows: int, grant: tuple[int, bytes], block: TokenBlock | None = None) -> None:
        """Rank `rank` has opened its slot for block `seq`. The block itself comes from the local rank."""
        entry = self._entries[lane].setdefault(seq, Entry())
        entry.posted[rank] = (hash_, *grant)
        if block is not None:
            entry.block = block
        if num_rows:
            entry.need.add(rank)
        hashes = {r: h for r, (h, _, _) in entry.posted.items()}
        if len(set(hashes.values())) > 1:
            self._local.fail(TeacherError(rule("token hash by student rank", {r: f"{h:#x}" for r, h in hashes.items()}, f"all ranks of a replica must post the same block {seq}",
                                               "Their data iterators differ")))
            return
        if len(entry.posted) == self._spec.side.num_ranks and not entry.need and not entry.withdrawn:
            del self._entries[lane][seq]
        self._pump()

    def withdrawn(self, rank: int, lane: int, seq: int) -> None:
        """Rank `rank` has given block `seq` up."""
        entry = self._entries[lane].setdefault(seq, Entry())
        entry.withdrawn.add(rank)
        self._drop_withdrawn(lane, seq, entry)

    def _drop_withdrawn(self, lane: int, seq: int, entry: Entry) -> None:
        """Forget a block that every rank has given up, unless a replica may still write its rows."""
        if len(entry.withdrawn) < self._spec.side.num_ranks or entry.owner is not None or entry.awaiting:
            return
        del self._entries[lane][seq]
        for peer in self._peers.values():
            peer.send({"t": "drop", "lane": lane, "seq": seq})
        self._local.local_drop(lane, seq)
        self._pump()

    def _pump(self) -> None:
        for lane, entries in enumerate(self._entries):
            for seq in sorted(entries):
                entry = entries[seq]
                complete = len(entry.posted) == self._spec.side.num_ranks and entry.block is not None
                if entry.owner is None and complete and not entry.awaiting and not entry.withdrawn and seq - self._spec.ring_depth not in entries:
                    self._ask(lane, seq, entry)

    def _ask(self, lane: int, seq: int, entry: Entry) -> None:
        candidates = [teacher for teacher in self.teachers.values() if not teacher.leaving]
        if not candidates:
            return
        teacher = min(candidates, key=lambda t: (len(t.outstanding), (hash_of(t.name) + self._spec.dp_rank) % 97, t.name))
        grants = tuple(Grant(student_rank=rank, generation=entry.posted[rank][1], descriptor=entry.posted[rank][2]) for rank in sorted(entry.need))
        request = Request(seq=seq, lane=lane, block=entry.block, grants=grants, student=self._spec.side, spread=self._spec.spread, checksum_kind=self._spec.checksum)
        entry.owner, entry.asked_s = teacher.incarnation, time.monotonic()
        teacher.outstanding.add((lane, seq))
        mark(self._trace, "asked", lane, seq)
        teacher.session.send(request.encode())

    def _done(self, teacher: Teacher, message: dict) -> None:
        key = (int(message["lane"]), int(message["seq"]))
        self._counters.teacher_busy_s += float(message["busy_s"])
        self._counters.teacher_idle_s += float(message["idle_s"])
        if key in teacher.outstanding:
            teacher.outstanding.discard(key)
            self._answered(*key)

    def _answered(self, lane: int, seq: int) -> None:
        """Nothing is owed for block `seq` any more. A block that some ranks have given up stays until all have."""
        entry = self._entries[lane][seq]
        entry.owner = None
        if entry.withdrawn:
            self._drop_withdrawn(lane, seq, entry)
        else:
            del self._entries[lane][seq]
        self._pump()

    def _lose(self, teacher: Teacher, reason: str, *, dead: bool, error: type[KDError] = TeacherLost) -> None:
        """Forget a replica and take back what it owed. `dead`: its sockets closed, so its world ends; else it may be only silent."""
        if self.teachers.get(teacher.name) is not teacher:
            return
        del self.teachers[teacher.name]
        teacher.session.close()
        self._counters.replicas_lost += 1
        if dead:
            self._absolve_at.append((time.monotonic() + QUARANTINE_OF_DEAD_S, teacher.incarnation))
        if self._spec.on_loss == "fail":
            self._local.fail(error(f"teacher replica {teacher.name!r}: {reason}"))
            return
        for lane, seq in sorted(teacher.outstanding):
            entry = self._entries[lane][seq]
            entry.owner, entry.awaiting = None, set(entry.need)
            self._counters.reroutes += 1
            for rank in sorted(entry.need):
                if rank == LOCAL_RANK:
                    self.revoked(LOCAL_RANK, lane, seq, self._local.local_revoke(lane, seq, teacher.incarnation))
                else:
                    self._peers[rank].send({"t": "revoke", "lane": lane, "seq": seq, "owner": teacher.incarnation})
        self._tell_members()
        self._pump()

    def revoked(self, rank: int, lane: int, seq: int, grant: tuple[int, bytes] | None) -> None:
        """Rank `rank` answers a revocation: its new slot, or None where all its parts had landed before."""
        entry = self._entries[lane].get(seq)
        if entry is None or rank not in entry.awaiting:
            return
        entry.awaiting.discard(rank)
        if grant is None:
            entry.need.discard(rank)
        else:
            entry.posted[rank] = (entry.posted[rank][0], *grant)
        if entry.awaiting:
            return
        if not entry.need:
            self._answered(lane, seq)
        elif entry.withdrawn:
            self._drop_withdrawn(lane, seq, entry)
        else:
            self._pump()

    def describe(self) -> str:
        """Who is connected and what it owes, for error messages."""
        alive = ", ".join(f"{t.name!r} owes {len(t.outstanding)}, silent {t.session.silent_s:.1f} s" for t in self.teachers.values())
        refusal = f"; last refusal: {self.last_refusal}" if self.last_refusal else ""
        return (f"replicas connected: {alive}" if alive else "no teacher replica is connected") + refusal

    # ---- threads

    def _serve(self, channel: Channel) -> None:
        first = channel.receive(timeout_s=5.0)
        try:
            role = first["role"] if first is not None else None
            if role == "teacher":
                self._serve_teacher(channel, first)
            elif role == "peer":
                self._serve_peer(channel, int(first["rank"]))
            else:
                raise WireError(rule("role of a connection", role, "must be teacher or peer", "Use the same megatron_kd on both sides"))
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise WireError(f"malformed message from {channel.peer}: {type(e).__name__}: {e}") from e

    def _serve_teacher(self, channel: Channel, join: dict) -> None:
        try:
            agreement = self._spec.admit(join, self.agreement)
        except KDError as e:
            with self._local.lock:
                self._counters.refused_joins += 1
                self.last_refusal = str(e)
            channel.send({"t": "refused", "error": type(e).__name__, "text": str(e)})
            return
        session = Session(channel, join["name"], send_timeout_s=self._spec.heartbeat_timeout_s)
        teacher = Teacher(name=join["name"], incarnation=join["incarnation"], session=session)
        session.send({"t": "welcome", "heartbeat_s": self._spec.heartbeat_s, "heartbeat_timeout_s": self._spec.heartbeat_timeout_s})
        with self._local.lock:
            if (old := self.teachers.get(teacher.name)) is not None:
                self._lose(old, "joined again on a new connection", dead=False)
            self._absolve(teacher.incarnation)  # a replica joins only after its last write has ended
            self.agreement = agreement
            self._local.agree(agreement)
            for peer in self._peers.values():
                peer.send({"t": "agree", "agreement": agreement.as_dict()})
            self.teachers[teacher.name] = teacher
            self._tell_members()
            self._pump()
            self._local.lock.notify_all()
        self._follow_teacher(teacher)

    def _follow_teacher(self, teacher: Teacher) -> None:
        dead = False
        try:
            while True:
                message = teacher.session.channel.receive(timeout_s=self._spec.heartbeat_timeout_s)
                if message is None:
                    continue  # the watch decides how long silence is borne
                with self._local.lock:
                    if message["t"] == "done":
                        self._done(teacher, message)
                    elif message["t"] == "error":
                        self._lose(teacher, str(message["text"]), dead=False)
                        return
                    elif message["t"] == "leave":
                        teacher.leaving = True
                    elif message["t"] != "pong":
                        raise WireError(rule(f"message from {teacher.name}", message["t"], "must be done, error, leave or pong", "Use the same megatron_kd on both sides"))
                    if teacher.leaving and not teacher.outstanding:
                        self.teachers.pop(teacher.name, None)
                        self._tell_members()
                        return
        except Exception as e:  # noqa: BLE001 -- whatever ended the session, what the replica owes must be asked again
            reason, dead = f"its connection broke ({e})", isinstance(e, PeerClosed)
        finally:
            teacher.session.close()
        if not self._closed:
            with self._local.lock:
                self._lose(teacher, reason, dead=dead)

    def _serve_peer(self, channel: Channel, rank: int) -> None:
        if not 0 < rank < self._spec.side.num_ranks:
            raise WireError(rule("rank of a student rank's connection", rank, f"must be in [1, {self._spec.side.num_ranks})", "Check the student's layout"))
        session = Session(channel, f"rank{rank}", send_timeout_s=self._spec.heartbeat_timeout_s)
        with self._local.lock:
            self._peers[rank] = session
            if self.agreement is not None:
                session.send({"t": "agree", "agreement": self.agreement.as_dict()})
            self._tell_members()
        try:
            while True:
                message = channel.receive(timeout_s=3600.0)
                if message is None:
                    continue
                with self._local.lock:
                    self._on_peer(rank, message)
        except WireError as e:
            if not self._closed:
                with self._local.lock:
                    self._local.fail(TeacherError(f"student rank {rank} of replica {self._spec.dp_rank}: {e}"))

    def _on_peer(self, rank: int, message: dict) -> None:
        if message["t"] == "failed":
            raise WireError(message["text"])
        if message["t"] == "withdrawn":
            self.withdrawn(rank, int(message["lane"]), int(message["seq"]))
            return
        grant = (int(message["generation"]), message["blobs"][0]) if message["blobs"] else None
        if message["t"] == "posted":
            self.posted(rank, int(message["lane"]), int(message["seq"]), int(message["hash"]), int(message["num_rows"]), grant)
        elif message["t"] == "revoked":
            self.revoked(rank, int(message["lane"]), int(message["seq"]), grant)
        else:
            raise WireError(rule(f"message of student rank {rank}", message["t"], "must be posted, withdrawn, revoked or failed", "Use the same megatron_kd on both sides"))

    def _watch(self) -> None:
        interval_s = min(0.5, self._spec.heartbeat_s / 2)
        try:
            while not self._closed:
                began = time.monotonic()
                time.sleep(interval_s)
                # where this very process was held up (stopped, or starved by a checkpoint), signs of life may lie unread: judge next time
                self._watch_once(judge_silence=time.monotonic() - began < interval_s + 1.0)
        except Exception as e:  # noqa: BLE001 -- without the watch, no silence would ever be noticed
            with self._local.lock:
                self._local.fail(TeacherError(f"the watch over teachers failed: {type(e).__name__}: {e}"))

    def _watch_once(self, *, judge_silence: bool) -> None:
        now, spec = time.monotonic(), self._spec
        with self._local.lock:
            for teacher in list(self.teachers.values()):
                oldest = min((self._entries[lane][seq].asked_s for lane, seq in teacher.outstanding), default=now)
                if judge_silence and teacher.session.silent_s > spec.heartbeat_timeout_s:
                    self._lose(teacher, f"silent for {teacher.session.silent_s:.1f} s (limit {spec.heartbeat_timeout_s} s)", dead=False)
                elif judge_silence and now - oldest > spec.answer_deadline_s:
                    self._lose(teacher, f"a request is unanswered after {now - oldest:.1f} s (limit {spec.answer_deadline_s} s)", dead=False, error=TeacherStalled)
                else:
                    teacher.session.send({"t": "ping"})
            self._tell_members()
            for due_s, incarnation in [item for item in self._absolve_at if item[0] <= now]:
                self._absolve_at.remove((due_s, incarnation))
                self._absolve(incarnation)

    def _tell_members(self) -> None:
        """How many replicas there are, to every rank of this student replica, with what only this rank can count."""
        stats = {"t": "stats", "num_replicas": len(self.teachers), "counters": {name: getattr(self._counters, name) for name in health.REPLICA_COUNTERS}}
        for peer in self._peers.values():
            peer.send(stats)
        self._local.replicas_are(len(self.teachers))

    def _absolve(self, incarnation: str) -> None:
        self._local.local_absolve(incarnation)
        for peer in self._peers.values():
            peer.send({"t": "absolve", "owner": incarnation})

    def broadcast_failure(self, error: KDError) -> None:
        """Tell the other ranks of the replica."""
        for peer in self._peers.values():
            peer.send({"t": "fail", "error": type(error).__name__, "text": str(error)})

    @property
    def refused(self) -> int:
        """Connections that failed the preamble, the challenge or the protocol."""
        return self._listener.refused

    def close(self) -> None:
        """Say goodbye to teachers and ranks, stop listening."""
        self._closed = True
        for session in [t.session for t in self.teachers.values()] + list(self._peers.values()):
            session.send({"t": "bye"})
            session.close(flush_s=1.0)
        self._membership.close()
        self._listener.close()


def hash_of(name: str) -> int:
    """A small number that is the same in every process (unlike hash())."""
    return sum(name.encode())
