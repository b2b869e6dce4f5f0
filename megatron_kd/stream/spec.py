"""Specs: what a student rank and a teacher replica bring to the stream, as frozen values, and the door check of a join."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_kd.errors import ConfigError, FingerprintMismatch, UnsupportedLayout, WireError, rule
from megatron_kd.stream.route import Side
from megatron_kd.stream.sizes import WIRE_DTYPES
from megatron_kd.stream.wire import CHECKSUMS, Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentSpec:
    """One rank of the last stage of one student replica."""

    rendezvous: tuple[str, int]
    """Where the hub listens."""
    token: bytes
    """Shared secret of the channel."""
    bind: str = "127.0.0.1"
    """Address that the asking rank's own listener binds and announces."""
    dp_rank: int = 0
    """Which student replica."""
    side: Side = field(default_factory=Side)
    """tp and cp of the last stage."""
    rank: int = 0
    """cp_rank * tp + tp_rank; rank 0 asks."""
    spread: bool = True
    """Each tp rank receives 1/tp of the rows; False: all."""
    hidden_size: int
    """H_t of the teacher that is expected."""
    head_transform: str = "none"
    """Canonical text of the expected teacher's soft-capping, scale and bias."""
    wire_dtype: str = "bf16"
    """Row format."""
    fingerprint: str | None = None
    """Expected teacher; None: the first replica that joins sets it for the run."""
    head_digest: str | None = None
    """Digest of the student's copy of the teacher's head; None: not compared."""
    sequence_length: int
    """Longest sequence that will be asked."""
    ring_depth: int = 2
    """Slots of a ring."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the rings live."""
    checksum: str = "xxh3"
    """"none", "xxh3" or "sum64"."""
    on_loss: Literal["fail", "reroute", "ce_only"] = "fail"
    """What the loss of a replica means: the end; another replica is asked, or waited for; another is asked while there is one, else `take` raises at once."""
    deadline_s: float = 120.0
    """Longest wait of `take`."""
    answer_deadline_s: float | None = None
    """A replica that leaves a request unanswered for longer is lost; None: two thirds of `deadline_s`, so that a reroute still fits."""
    join_deadline_s: float = 600.0
    """Longest wait for the rendezvous and for the first replica."""
    heartbeat_s: float = 2.0
    """Interval of pings."""
    heartbeat_timeout_s: float | None = None
    """Silence after which a peer is lost; None: three heartbeats."""

    def __post_init__(self):
        if self.answer_deadline_s is None:
            object.__setattr__(self, "answer_deadline_s", self.deadline_s * 2 / 3)
        if self.heartbeat_timeout_s is None:
            object.__setattr__(self, "heartbeat_timeout_s", 3 * self.heartbeat_s)
        if self.checksum not in CHECKSUMS or self.wire_dtype not in WIRE_DTYPES:
            raise ConfigError(rule("checksum, wire_dtype", (self.checksum, self.wire_dtype), f"must be among {CHECKSUMS} and {WIRE_DTYPES}", "Choose one of each"))
        if not 0 <= self.rank < self.side.num_ranks:
            raise UnsupportedLayout(rule("rank", self.rank, f"must be in [0, {self.side.num_ranks})", "Pass cp_rank * tp + tp_rank"))

    def admit(self, join: dict, agreed: Agreement | None) -> Agreement:
        """The agreement with a teacher that wants to join; `agreed` with the first one, if any.

        Errors: FingerprintMismatch, UnsupportedLayout, WireError; each with both values.
        """
        try:
            theirs = Agreement(**join["agreement"])
            context, head, name = int(join["context_length"]), str(join["head_digest"]), str(join["name"])
        except (KeyError, TypeError, ValueError) as e:
            raise WireError(f"malformed join: {type(e).__name__}: {e}") from e
        expected = agreed.fingerprint if agreed is not None else self.fingerprint
        ours = Agreement(fingerprint=expected or theirs.fingerprint, head_transform=self.head_transform, hidden_size=self.hidden_size, wire_dtype=self.wire_dtype)
        ours.check(theirs, f"teacher replica {name!r}")
        if self.head_digest is not None and head != self.head_digest:
            raise FingerprintMismatch(rule(f"head digest of teacher replica {name!r}", head, f"must be that of the student's copy, {self.head_digest}", "Load both from the same checkpoint"))
        if context < self.sequence_length:
            raise UnsupportedLayout(rule(f"context length of teacher replica {name!r}", context, f"must reach the student's sequence length, {self.sequence_length}",
                                         "Shorten the sequences or take a teacher with a longer context"))
        return ours


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """One teacher replica, as its rank 0 announces it."""

    rendezvous: tuple[str, int]
    """Where the student's hub listens, now or later."""
    token: bytes
    """Shared secret of the channel."""
    name: str
    """Stable name of the replica, for messages and for taking it back after a restart."""
    agreement: Agreement
    """What it serves."""
    head_digest: str = ""
    """Digest of its head."""
    context_length: int
    """Longest sequence it takes."""
    retry_s: float = 0.5
    """Pause between two looks at the rendezvous."""
