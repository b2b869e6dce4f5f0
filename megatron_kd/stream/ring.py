"""Ring: the slots of one student rank for one mode, and the only place where their states change.

    FREE -> POSTED -> READY -> HELD -> FREE

FREE     nobody may write. POSTED  granted to a request; parts land. READY  all parts are here and checked. HELD  the training
thread reads the rows in place. Blocks take slots in order: block n of a mode lives in slot n mod depth, on every rank.

A slot that was granted to a lost replica gets fresh memory and a new generation; the old memory is revoked and quarantined: kept
allocated, out of use, until that replica is known to write no more. So a late one-sided write cannot land in a reused slot, on
any transport. Called by the receiver under its lock; knows nothing of networks or requests.
"""

from dataclasses import dataclass, field
from enum import Enum

import torch

from megatron_kd.errors import TeacherLost, rule
from megatron_kd.stream.memory import buffer_for_peers
from megatron_kd.stream.transport import Inbox


class State(Enum):
    """State of a slot."""

    FREE = "free"
    POSTED = "posted"
    READY = "ready"
    HELD = "held"


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One buffer and what it is for. `generation` counts its memories: a message about an older one is late."""

    index: int
    buffer: torch.Tensor
    descriptor: bytes
    generation: int = 0
    state: State = State.FREE
    seq: int | None = None
    landed_rows: dict[int, int] = field(default_factory=dict)
    """Rows by teacher rank, of the parts that are here."""


class Ring:
    """`depth` slots of `slot_bytes` on `device`, registered once. Errors: see each method."""

    def __init__(self, inbox: Inbox, *, depth: int, slot_bytes: int, device: torch.device, max_quarantined: int | None = None):
        self._inbox, self._slot_bytes, self._device = inbox, slot_bytes, device
        self.slots = [Slot(index=i, **self._memory()) for i in range(depth)]
        self._quarantine: list[tuple[str, torch.Tensor]] = []
        self._max_quarantined = 2 * depth if max_quarantined is None else max_quarantined

    def _memory(self) -> dict:
        buffer = buffer_for_peers(self._slot_bytes, self._device)
        return {"buffer": buffer, "descriptor": self._inbox.register(buffer)}

    def slot_of(self, seq: int) -> Slot:
        """The slot in which block `seq` lives, lived or will live."""
        return self.slots[seq % len(self.slots)]

    def post(self, seq: int) -> Slot | None:
        """FREE -> POSTED for block `seq`; None while its slot is still in use."""
        slot = self.slot_of(seq)
        if slot.state is not State.FREE:
            return None
        slot.state, slot.seq = State.POSTED, seq
        slot.landed_rows.clear()
        return slot

    def land(self, seq: int, teacher_rank: int, num_rows: int, num_parts: int) -> bool:
        """A checked part is in the slot of `seq`; True when it was the last one (POSTED -> READY). The caller has asked `is_current`."""
        slot = self.slot_of(seq)
        slot.landed_rows[teacher_rank] = num_rows
        if len(slot.landed_rows) < num_parts:
            return False
        slot.state = State.READY
        return True

    def is_current(self, seq: int, generation: int) -> bool:
        """Whether parts of (seq, generation) may still land: False for late writes to a revoked or finished slot."""
        slot = self.slot_of(seq)
        return slot.seq == seq and slot.generation == generation and slot.state is State.POSTED

    def ready(self, seq: int) -> None:
        """POSTED -> READY for a block of which this rank receives no row."""
        self._move(seq, State.POSTED, State.READY)

    def hold(self, seq: int) -> Slot:
        """READY -> HELD."""
        return self._move(seq, State.READY, State.HELD)

    def release(self, seq: int) -> None:
        """HELD -> FREE: the rows are not read any more."""
        self._move(seq, State.HELD, State.FREE).seq = None

    def drop(self, seq: int) -> None:
        """POSTED or READY -> FREE for a block that nobody wants; the caller knows that nobody writes to its slot."""
        slot = self.slot_of(seq)
        assert slot.seq == seq and slot.state in (State.POSTED, State.READY), f"block {seq}: slot {slot.index} is {slot.state.value} for block {slot.seq}"
        slot.state, slot.seq = State.FREE, None

    def _move(self, seq: int, before: State, after: State) -> Slot:
        slot = self.slot_of(seq)
        assert slot.seq == seq and slot.state is before, f"block {seq}: slot {slot.index} is {slot.state.value} for block {slot.seq}, expected {before.value}"
        slot.state = after
        return slot

    def revoke(self, seq: int, owner: str) -> bool:
        """Take the slot of `seq` back from `owner`, a lost replica. True: it has fresh memory and a new generation and needs another
        answer. False: all its parts had landed, nothing is owed and nothing can come late.

        Errors: TeacherLost where more memory is in quarantine than allowed.
        """
        slot = self.slot_of(seq)
        if slot.seq != seq or slot.state is not State.POSTED:
            return False
        if len(self._quarantine) >= self._max_quarantined:
            raise TeacherLost(rule("quarantined slots", len(self._quarantine), f"at most {self._max_quarantined} may wait for replicas that went silent without dying: "
                                   f"{sorted({name for name, _ in self._quarantine})}", "Stop those processes, or let them rejoin, then resume"))
        self._inbox.revoke(slot.descriptor)
        self._quarantine.append((owner, slot.buffer))
        slot.landed_rows.clear()
        slot.generation += 1
        for name, value in self._memory().items():
            setattr(slot, name, value)
        return True

    def absolve(self, owner: str) -> int:
        """Free the memory quarantined because of `owner`, which is known to write no more; the number of buffers."""
        kept = [(name, buffer) for name, buffer in self._quarantine if name != owner]
        num_freed = len(self._quarantine) - len(kept)
        self._quarantine = kept
        return num_freed

    def count(self, state: State) -> int:
        """Slots in `state`."""
        return sum(slot.state is state for slot in self.slots)

    @property
    def num_quarantined(self) -> int:
        """Buffers out of use because a lost replica might still write into them."""
        return len(self._quarantine)

    @property
    def allocated_bytes(self) -> int:
        """Memory of slots and quarantine."""
        return (len(self.slots) + len(self._quarantine)) * self._slot_bytes

    def close(self) -> None:
        """Revoke every slot."""
        for slot in self.slots:
            self._inbox.revoke(slot.descriptor)
