"""A synthetic teacher and student for tests of the stream: rows are a fixed function of the tokens, so that every row can be checked."""

import threading
from dataclasses import replace

import torch

from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.stream.channel import connect  # noqa: F401 -- re-exported for hostile peers
from megatron_kd.stream.loopback import Fabric, LoopbackInbox, LoopbackOutbox
from megatron_kd.stream.publisher import Publisher, serve_single
from megatron_kd.stream.receiver import Receiver
from megatron_kd.stream.rendezvous import Hub
from megatron_kd.stream.route import Side
from megatron_kd.stream.sender import RowSender
from megatron_kd.stream.spec import StudentSpec, TeacherSpec
from megatron_kd.stream.wire import Agreement

TOKEN = b"0123456789abcdef-test"
HIDDEN = 24
AGREED = Agreement(fingerprint="ab" * 16, head_transform="none", hidden_size=HIDDEN)


def rows_of(block: TokenBlock, hidden: int = HIDDEN) -> RowBlock:
    """bfloat16 rows that depend on token, position and sequence; the whole micro-batch's."""
    b, s = block.tokens_bs.shape
    ids = block.row_ids_N
    token = block.tokens_bs.reshape(-1)[ids].float()
    base = torch.sin(token * 0.37 + ids.float() * 0.011)[:, None]
    return RowBlock(hidden_NH=(base * torch.arange(1, hidden + 1)[None]).bfloat16(), row_ids_N=ids, hash=block.hash)


def block(step: int, micro_batch: int = 0, *, b: int = 2, s: int = 16, mode: str = "train", density: float = 0.7) -> TokenBlock:
    """A micro-batch that is the same wherever it is made."""
    generator = torch.Generator().manual_seed(step * 1009 + micro_batch * 31 + (mode == "eval"))
    tokens = torch.randint(0, 1000, (b, s), generator=generator)
    mask = (torch.rand(b, s, generator=generator) < density).float()
    return TokenBlock(tokens_bs=tokens, loss_mask_bs=mask, step=step, micro_batch=micro_batch, mode=mode)


def student_spec(hub, **changes) -> StudentSpec:
    """Short deadlines; one rank."""
    values = dict(rendezvous=hub, token=TOKEN, hidden_size=HIDDEN, fingerprint=AGREED.fingerprint, sequence_length=16, deadline_s=10.0, join_deadline_s=10.0,
                  heartbeat_s=0.3, ring_depth=3)
    return StudentSpec(**values | changes)


def teacher_spec(hub, name="A", **changes) -> TeacherSpec:
    """Joins `hub`."""
    values = dict(rendezvous=hub, token=TOKEN, name=name, agreement=AGREED, context_length=16, retry_s=0.05)
    return TeacherSpec(**values | changes)


class ThreadTeacher:
    """A replica on a thread: publisher, sender and serve loop over a Fabric. `rows` may raise, delay or lie."""

    def __init__(self, hub, fabric: Fabric, name="A", *, rows=rows_of, teacher: Side = Side(), **changes):
        self.publisher = Publisher(teacher_spec(hub, name, **changes))
        agreement = self.publisher._spec.agreement
        self.senders = [RowSender(LoopbackOutbox(fabric), agreement, teacher=teacher, teacher_rank=rank) for rank in range(teacher.num_ranks)]
        self.error, self._stop = None, threading.Event()
        self._rows = rows
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stage(self, request, rows):
        """Every rank's part; each rank holds all rows here."""
        return [(sender, sender.stage(request, rows)) for sender in self.senders]

    def write(self, staged):
        """Every rank's part, one after the other."""
        for sender, answer in staged:
            if answer is not None:
                sender.write(answer)

    def forget(self, descriptors):
        """As RowSender."""
        for sender in self.senders:
            sender.forget(descriptors)

    def _run(self):
        try:
            serve_single(self.publisher, self, lambda b: self._rows(b), stop=self._stop.is_set)
        except BaseException as e:  # noqa: BLE001 -- looked at by the test
            self.error = e

    def close(self):
        """End politely."""
        self._stop.set()
        self.thread.join(10)
        self.publisher.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Stage:
    """Hub, fabric and the ranks of one student replica, on threads of this process."""

    def __init__(self, *, side: Side = Side(), fabric: Fabric | None = None, **changes):
        self.fabric = fabric or Fabric()
        self.hub = Hub(("127.0.0.1", 0), TOKEN, "run-1")
        self.ranks = []
        base = student_spec(self.hub.address, side=side, **changes)
        for rank in range(side.num_ranks):
            self.ranks.append(Receiver(replace(base, rank=rank), LoopbackInbox(self.fabric)))

    def teacher(self, name="A", **changes) -> ThreadTeacher:
        """A replica of this stage."""
        return ThreadTeacher(self.hub.address, self.fabric, name, **changes)

    def close(self):
        """Close ranks and hub."""
        for receiver in self.ranks:
            receiver.close()
        self.hub.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def check_rows(got: RowBlock, want_block: TokenBlock, hidden: int = HIDDEN) -> None:
    """The rows are those of the block, bit for bit, in order, for the row ids that they claim."""
    full = rows_of(want_block, hidden)
    at = torch.searchsorted(full.row_ids_N, got.row_ids_N)
    assert torch.equal(full.row_ids_N[at], got.row_ids_N)
    assert torch.equal(got.hidden_NH, full.hidden_NH[at]) and got.hash == want_block.hash
