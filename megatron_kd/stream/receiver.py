"""Receiver: one student rank's end of the stream, and the source that the training loop sees.

`post(block)` opens a slot (or queues the block until one is free), `take(block)` waits for its rows, `release(block)` gives the
slot back; blocks of one mode are taken in the order posted. Every rank of a replica posts the same blocks, so slots and numbers
agree without a collective; rank 0 asks (asker.py), the others report to it. A thread collects what teachers have written.

Owns the rings (one a mode, made at its first block) and the one lock of this process's stream.
"""

import threading
import time
from dataclasses import dataclass

import torch

from megatron_kd.errors import KDError, TeacherError, TeacherLost, TeacherStalled, WireError, rule
from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.stream import health, sizes, wire
from megatron_kd.stream.asker import LOCAL_RANK, Asker
from megatron_kd.stream.peer import PeerLink
from megatron_kd.stream.ring import Ring, Slot, State
from megatron_kd.stream.route import RoutePlan, Side
from megatron_kd.stream.spec import StudentSpec
from megatron_kd.stream.trace import Trace, mark
from megatron_kd.stream.transport import Inbox
from megatron_kd.stream.wire import Agreement, PartHeader

LAST_PARTS_S = 0.05
"""How long parts that the last replica wrote before it went may still be unread here."""
_LANES = {"train": 0, "eval": 1}


@dataclass(slots=True, kw_only=True, eq=False)
class _Posted:
    block: TokenBlock
    row_ids_N: torch.Tensor
    """Row ids that land on this rank."""
    shares: list[torch.Tensor]
    """Row ids that land on each rank of the replica."""
    opened: bool = False
    given_up: bool = False
    """Nobody waits for the rows any more."""


class _Lane:
    """Blocks of one mode, by number; the ring comes with the first."""

    def __init__(self):
        self.ring: Ring | None = None
        self.blocks: dict[int, _Posted] = {}
        self.seq_of: dict[tuple, int] = {}
        self.next_seq = 0
        self.capacity_rows = 0


class Receiver:
    """Errors of the constructor: ConfigError, MissingDependency, TeacherStalled (no rendezvous). Close it, or use `with`."""

    def __init__(self, spec: StudentSpec, inbox: Inbox, trace: Trace | None = None):
        self._spec, self._inbox, self._trace = spec, inbox, trace
        self._plan = RoutePlan(student=spec.side, teacher=Side(), spread=spec.spread)
        self.lock = threading.Condition(threading.RLock())
        self.counters = health.Counters()
        self._interval = health.Interval(self.counters)
        self._lanes = (_Lane(), _Lane())
        self._releasing: list[tuple[int, int, torch.cuda.Event | None]] = []
        self._num_replicas, self._alone_since_s = 0, None
        self._is_waiting = False  # the training thread, for rows: they are looked for more often then
        self._failure: KDError | None = None
        self.agreement: Agreement | None = None
        self._closed = False
        self._asker: Asker | None = None
        self._link: PeerLink | None = None
        if spec.rank == 0:
            self._asker = Asker(spec, self, self.counters, trace)
        else:
            self._link = PeerLink(spec, self)
        self._poller = threading.Thread(target=self._poll_loop, name="kd-poll", daemon=True)
        self._poller.start()

    # ---- what the training loop calls

    def post(self, block: TokenBlock) -> None:
        """Announce a block; never waits. Its slot opens at once or as soon as the block `ring_depth` before it is released."""
        b, s = block.tokens_bs.shape
        row_ids_N = block.row_ids_N
        cu_seqlens = None if block.cu_seqlens is None else block.cu_seqlens.cpu().numpy()
        shares = [row_ids_N[torch.from_numpy(index)] for index in self._plan.received(row_ids_N.numpy(), s, cu_seqlens)]
        mine = shares[self._spec.rank]
        with self.lock:
            self._raise_failure()
            lane = self._lanes[_LANES[block.mode]]
            if lane.ring is None:
                lane.capacity_rows = self._plan.slot_rows(b, s)
                lane.ring = Ring(self._inbox, depth=self._spec.ring_depth, device=self._spec.device,
                                 slot_bytes=max(1, lane.capacity_rows) * sizes.row_bytes(self._spec.hidden_size, self._spec.wire_dtype))
            if len(mine) > lane.capacity_rows:
                raise WireError(rule("rows of a block", len(mine), f"must fit the slot of {lane.capacity_rows} rows, sized by the first {block.mode} block",
                                     "Keep the micro-batch size constant"))
            lane.blocks[lane.next_seq] = _Posted(block=block, row_ids_N=mine, shares=shares)
            lane.seq_of[block.key] = lane.next_seq
            mark(self._trace, "posted", _LANES[block.mode], lane.next_seq)
            lane.next_seq += 1
            self._open_slots(_LANES[block.mode])

    def take(self, block: TokenBlock) -> RowBlock:
        """The rows of a posted block that belong to this rank, ascending in row id, as a view of the slot (valid until `release`).

        Errors: TeacherStalled at the deadline, naming who was waited for; TeacherLost and others that the stream met; with on_loss
        "ce_only" TeacherLost as soon as no replica is left.
        """
        deadline = time.monotonic() + self._spec.deadline_s
        began = time.monotonic()
        with self.lock:
            lane, seq, posted = self._find(block)
            slot = lane.ring.slot_of(seq)
            self.counters.ready_slot_sum += lane.ring.count(State.READY)
            self._wait_for_rows(block, seq, slot, deadline)
            lane.ring.hold(seq)
            mark(self._trace, "taken", _LANES[block.mode], seq)
            self.counters.wait_s += time.monotonic() - began
            self.counters.blocks_taken += 1
            num_rows = posted.row_ids_N.numel()
            rows_PR = wire.as_rows(slot.buffer, num_rows, self._spec.hidden_size, self._spec.wire_dtype)
            return RowBlock(hidden_NH=wire.decode_rows(rows_PR, self._spec.hidden_size, self._spec.wire_dtype), row_ids_N=posted.row_ids_N, hash=block.hash)

    def release(self, block: TokenBlock) -> None:
        """Give a taken block's slot back: at once on the CPU; on a GPU when the kernels queued so far on the current stream, which may
        still read the rows, have run."""
        event = None
        if self._spec.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._spec.device))
        with self.lock:
            lane, seq, _ = self._find(block)
            del lane.blocks[seq], lane.seq_of[block.key]
            mark(self._trace, "released", _LANES[block.mode], seq)
            self._releasing.append((_LANES[block.mode], seq, event))
            self._finish_releases()

    def give_up(self, block: TokenBlock) -> None:
        """Do without the rows of a posted block, whether they are here or not; every rank of the replica does. Its slot is free again at once
        where no replica was asked, else when the rows have come or are revoked."""
        with self.lock:
            lane, seq, posted = self._find(block)
            posted.given_up = True
            del lane.seq_of[block.key]
            self.counters.degraded_blocks += 1
            self._free_given_up(_LANES[block.mode])
            if self._asker is not None:
                self._asker.withdrawn(LOCAL_RANK, _LANES[block.mode], seq)
            else:
                self._link.withdrawn(_LANES[block.mode], seq)

    def shares(self, block: TokenBlock) -> list[torch.Tensor]:
        """Row ids of a posted block on each tp rank of this context-parallel rank."""
        with self.lock:
            posted = self._find(block)[2]
        first = self._spec.rank // self._spec.side.tp * self._spec.side.tp
        return posted.shares[first:first + self._spec.side.tp]

    @property
    def asks(self) -> bool:
        """Whether this is the rank that talks to teachers."""
        return self._asker is not None

    def metrics(self) -> dict[str, float]:
        """Values since the last call; see health.Interval.report."""
        with self.lock:
            quarantined = sum(lane.ring.num_quarantined for lane in self._lanes if lane.ring is not None)
            return self._interval.report(time.monotonic(), depth=self._spec.ring_depth, replicas_alive=self._num_replicas, quarantined_slots=quarantined)

    def close(self) -> None:
        """Leave the stream: teachers drop what they have of ours and wait for the next student."""
        if self._closed:
            return
        self._closed = True
        self._poller.join(5)
        if self._asker is not None:
            self._asker.close()
        if self._link is not None:
            self._link.close()
        with self.lock:
            for lane in self._lanes:
                if lane.ring is not None:
                    lane.ring.close()
            self._inbox.close()
            self.lock.notify_all()

    def wait_for_teachers(self, num_replicas: int = 1) -> None:
        """Block until so many replicas have joined (rank 0; others return at once). Errors: TeacherStalled at the join deadline."""
        if self._asker is None:
            return
        deadline = time.monotonic() + self._spec.join_deadline_s
        with self.lock:
            while len(self._asker.teachers) < num_replicas:
                self._raise_failure()
                if not self.lock.wait(min(1.0, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    raise TeacherStalled(f"{len(self._asker.teachers)} of {num_replicas} teacher replicas joined within {self._spec.join_deadline_s} s; {self._asker.describe()}")

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def allocated_bytes(self) -> int:
        """Memory of all rings, quarantine included."""
        return sum(lane.ring.allocated_bytes for lane in self._lanes if lane.ring is not None)

    @property
    def refused(self) -> int:
        """Connections and joins that were refused on this rank's listener."""
        return 0 if self._asker is None else self._asker.refused + self.counters.refused_joins

    # ---- what the asker, or the link to it, calls under the lock

    def replicas_are(self, num_replicas: int) -> None:
        """So many replicas are connected. None at all counts as a loss once there has been one: before, they are still awaited."""
        self._num_replicas = num_replicas
        if num_replicas > 0:
            self._alone_since_s = None
        elif self._alone_since_s is None and self.agreement is not None:
            self._alone_since_s = time.monotonic()
        self.lock.notify_all()

    def agree(self, agreement: Agreement) -> None:
        """What the replica's first teacher and the student agreed on."""
        self.agreement = agreement

    def fail(self, error: KDError) -> None:
        """End the stream with an error that `take` and `post` will raise, here and on the replica's other ranks."""
        if self._failure is None:
            self._failure = error
            if self._asker is not None:
                self._asker.broadcast_failure(error)
            self.lock.notify_all()

    def local_revoke(self, lane_index: int, seq: int, owner: str) -> tuple[int, bytes] | None:
        """Revoke the slot of `seq`; its new (generation, descriptor), or None where nothing is owed."""
        ring = self._lanes[lane_index].ring
        try:
            if not ring.revoke(seq, owner):
                return None
        except TeacherLost as e:
            self.fail(e)
            return None
        slot = ring.slot_of(seq)
        return slot.generation, slot.descriptor

    def local_drop(self, lane_index: int, seq: int) -> None:
        """Every rank has given block `seq` up, and nobody writes to its slots."""
        lane = self._lanes[lane_index]
        posted = lane.blocks.pop(seq, None)
        if posted is not None and posted.opened:
            lane.ring.drop(seq)
        self._open_slots(lane_index)

    def local_absolve(self, owner: str) -> None:
        """Free what is quarantined because of `owner`."""
        for lane in self._lanes:
            if lane.ring is not None:
                lane.ring.absolve(owner)

    # ---- inside

    def _wait_for_rows(self, block: TokenBlock, seq: int, slot: Slot, deadline: float) -> None:
        """Until the slot of `seq` is READY. Errors: see take."""
        self._is_waiting = True
        try:
            while not (slot.seq == seq and slot.state is State.READY):
                self._raise_failure()
                alone_s = 0.0 if self._alone_since_s is None else time.monotonic() - self._alone_since_s
                if self._spec.on_loss == "ce_only" and alone_s > LAST_PARTS_S:
                    raise TeacherLost(f"micro-batch {block.key}: {self._describe(seq, slot)}")
                longest_s = LAST_PARTS_S if self._alone_since_s is not None else 1.0
                if not self.lock.wait(min(longest_s, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    raise TeacherStalled(f"micro-batch {block.key}: no rows after {self._spec.deadline_s} s; {self._describe(seq, slot)}")
        finally:
            self._is_waiting = False

    def _free_given_up(self, lane_index: int) -> None:
        """Free the slots of given-up blocks whose rows have come."""
        lane = self._lanes[lane_index]
        for seq in [seq for seq, posted in lane.blocks.items() if posted.given_up and posted.opened]:
            state = lane.ring.slot_of(seq).state
            if state is State.READY:
                lane.ring.hold(seq)
            if state in (State.READY, State.HELD):
                lane.ring.release(seq)
                del lane.blocks[seq]
        self._open_slots(lane_index)

    def _finish_releases(self) -> None:
        """Free the slots whose readers have run, in order."""
        while self._releasing and (self._releasing[0][2] is None or self._releasing[0][2].query()):
            lane_index, seq, _ = self._releasing.pop(0)
            self._lanes[lane_index].ring.release(seq)
            mark(self._trace, "freed", lane_index, seq)
            self._open_slots(lane_index)

    def _find(self, block: TokenBlock) -> tuple[_Lane, int, _Posted]:
        lane = self._lanes[_LANES[block.mode]]
        seq = lane.seq_of.get(block.key)
        if seq is None:
            raise WireError(rule("block", block.key, "was not posted, or is released", "Post every block before taking it"))
        return lane, seq, lane.blocks[seq]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise TeacherError("the stream is closed")

    def _open_slots(self, lane_index: int) -> None:
        """Open slots for queued blocks, in order, as far as they are free. A block of which no row comes here is ready at once."""
        lane = self._lanes[lane_index]
        for seq in sorted(lane.blocks):
            posted = lane.blocks[seq]
            if posted.opened or posted.given_up:
                continue
            slot = lane.ring.post(seq)
            if slot is None:
                return
            posted.opened = True
            num_rows = posted.row_ids_N.numel()
            self.counters.rows_asked += num_rows
            if num_rows == 0:
                lane.ring.ready(seq)
                self.lock.notify_all()
            grant = slot.generation, slot.descriptor
            if self._asker is not None:
                self._asker.posted(LOCAL_RANK, lane_index, seq, posted.block.hash, num_rows, grant, posted.block)
            else:
                self._link.posted(lane_index, seq, posted.block.hash, num_rows, grant)

    def _poll_loop(self) -> None:
        if self._spec.device.type != "cuda":
            return self._poll()
        torch.cuda.set_device(self._spec.device)  # for the life of the thread: going back to device 0 would make a context there
        with torch.cuda.stream(torch.cuda.Stream(self._spec.device)):  # checksums must not wait for the student's kernels
            return self._poll()

    def _poll(self) -> None:
        pause_s, early = 0.0, []
        while not self._closed:
            messages = self._inbox.poll()
            if self.agreement is None:
                early += messages  # rows may overtake the asking rank's word about their teacher
            else:
                for message in early + messages:
                    self._land(message)
                early = []
            if self._releasing:
                with self.lock:
                    self._finish_releases()
            longest_s = 0.0001 if self._is_waiting else 0.001
            pause_s = 0.0 if messages else min(longest_s, pause_s + 0.00005)
            time.sleep(pause_s)

    def _land(self, message: bytes) -> None:
        """Check one part that a teacher has written and put it into the books; what is wrong ends the stream."""
        try:
            with self.lock:
                assert self.agreement is not None
                header = PartHeader.unpack(message, self.agreement.digest)
                lane = self._lanes[header.lane]
                if lane.ring is None or not lane.ring.is_current(header.seq, header.generation):
                    self.counters.late_parts += 1
                    return
                posted, slot = lane.blocks[header.seq], lane.ring.slot_of(header.seq)
                mark(self._trace, "noticed", header.lane, header.seq)
                buffer = slot.buffer
            wire.verify_part(header, buffer, self.agreement, hash_=posted.block.hash, total_rows=posted.row_ids_N.numel(), source=f"teacher rank {header.teacher_rank}")
            with self.lock:
                if not lane.ring.is_current(header.seq, header.generation):
                    self.counters.late_parts += 1
                    return
                self.counters.rows_received += header.num_rows
                self.counters.bytes_received += header.num_rows * sizes.row_bytes(self._spec.hidden_size, self._spec.wire_dtype)
                if lane.ring.land(header.seq, header.teacher_rank, header.num_rows, header.num_parts):
                    mark(self._trace, "ready", header.lane, header.seq)
                    self._free_given_up(header.lane)
                    self.lock.notify_all()
        except Exception as e:  # noqa: BLE001 -- whatever it is, the training thread must hear of it and not wait for this thread
            with self.lock:
                self.fail(e if isinstance(e, KDError) else TeacherError(f"the receiving thread failed: {type(e).__name__}: {e}"))
                if self._link is not None:
                    self._link.failed(f"{type(e).__name__}: {e}")

    def _describe(self, seq: int, slot: Slot) -> str:
        here = f"block {seq} is {slot.state.value if slot.seq == seq else 'waiting for a slot'}, {sum(slot.landed_rows.values()) if slot.seq == seq else 0} rows are here"
        return f"{here}; {self._asker.describe()}" if self._asker is not None else f"{here}; this rank does not ask, see the replica's rank 0"
