"""serve: the loop of one teacher replica, on every rank of its world.

Rank 0 talks to students (stream/publisher.py). A round: rank 0 hands out at most one request for each data-parallel lane of the
teacher (more than one lane only where experts are spread over them), every rank runs the forward, ranks of the last stage write the
rows that they hold, rank 0 learns that all are done. The second half runs on each rank's writer (stream/writer.py), under the next
round's forward. Requests are never merged into one batch, so a row does not depend on what else was asked. Rounds and reports travel
over gloo, apart from the model's own groups and from each other.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_kd.errors import WireError
from megatron_kd.mcore.groups import Groups
from megatron_kd.rows import TokenBlock
from megatron_kd.stream.channel import pack_message, unpack_message
from megatron_kd.stream.publisher import Publisher
from megatron_kd.stream.route import Side
from megatron_kd.stream.sender import RowSender, Staged
from megatron_kd.stream.spec import TeacherSpec
from megatron_kd.stream.transport import Outbox
from megatron_kd.stream.wire import Agreement, Request
from megatron_kd.stream.writer import Writer
from megatron_kd.teacher.forward import hidden_rows

IDLE_ROUND_S = 5.0
LEAVE_S = 60.0


def side_of(lm: torch.nn.Module) -> tuple[Side, int]:
    """(this teacher's layout, this rank's number in it) for the route; meaningful on the last stage."""
    groups = Groups.of(lm.pg_collection)
    side = Side(tp=groups.tp.size(), cp=groups.cp.size(), sequence_parallel=bool(lm.config.sequence_parallel))
    return side, groups.cp.rank() * side.tp + groups.tp.rank()


def serve(lm: torch.nn.Module, spec: TeacherSpec, make_outbox: Callable[[], Outbox], *, stop: Callable[[], bool], deadline_s: float = 600.0,
          say: Callable[[str], None] = print, warm_up_length: int | None = None) -> None:
    """Serve until `stop()` is true on rank 0 and what is owed is answered. Every rank of the world calls it. The model loses its output layer.

    `deadline_s`: longest that one rank waits for the others. `warm_up_length`: tokens of one forward before the first student waits for it.
    Errors: what a student refused this replica for; what the forward raised.
    """
    drop_output_layer(lm)
    if warm_up_length is not None:
        warm_up(lm, sequence_length=warm_up_length)
    Server(lm, spec.agreement, make_outbox, deadline_s=deadline_s).run(spec, stop=stop, say=say)


class Server:
    """One rank's half of the rounds."""

    def __init__(self, lm: torch.nn.Module, agreement: Agreement, make_outbox: Callable[[], Outbox], *, deadline_s: float):
        self._lm = lm
        groups = Groups.of(lm.pg_collection)
        self._lane, self._num_lanes = groups.dp.rank(), groups.dp.size()
        side, rank = side_of(lm)
        self._sender = RowSender(make_outbox(), agreement, teacher=side, teacher_rank=rank) if groups.is_last_stage else None
        self._world, self._reports = (dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s)) for _ in range(2))
        self._publisher: Publisher | None = None
        self._writer = Writer()
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def run(self, spec: TeacherSpec, *, stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Rank 0 leads, the others follow."""
        if self._rank != 0:
            with self._writer:
                while (round_ := self._receive()) is not None:
                    self._work(round_)
            return
        with Publisher(spec) as publisher, self._writer:
            self._publisher = publisher
            say(f"teacher replica {spec.name} serves {spec.agreement.fingerprint[:8]}, looking for students at {spec.rendezvous[0]}:{spec.rendezvous[1]}")
            try:
                self._lead(publisher, stop, say)
            finally:
                self._send(None)

    def _lead(self, publisher: Publisher, stop: Callable[[], bool], say: Callable[[str], None]) -> None:
        leave_by, last_round, num_students = None, time.monotonic(), 0
        while True:
            if publisher.num_students != num_students:
                num_students = publisher.num_students
                say(f"{num_students} student replica{'s' if num_students != 1 else ''} connected")
            if leave_by is None and stop():
                publisher.leave()
                leave_by = time.monotonic() + LEAVE_S
            if leave_by is not None and (publisher.num_students == 0 or time.monotonic() > leave_by):
                return
            requests = [request for request in [publisher.next(timeout_s=0.1)] if request is not None]
            while requests and len(requests) < self._num_lanes and (more := publisher.next(timeout_s=0.0)) is not None:
                requests.append(more)
            gone = publisher.departed()
            if not requests and not gone and time.monotonic() - last_round < IDLE_ROUND_S:
                continue
            last_round = time.monotonic()
            self._send({"requests": [request.encode() for request in requests], "forget": gone})
            self._round(publisher, requests, gone)

    def _round(self, publisher: Publisher, requests: list[Request], gone: list[bytes]) -> None:
        try:
            self._work((requests, gone))
        except BaseException as e:
            for request in requests:
                publisher.finish(request, error=f"{type(e).__name__}: {e}")
            raise

    def _work(self, round_: tuple[list[Request], list[bytes]]) -> None:
        """Forward of one round; its writes are left to the writer."""
        requests, gone = round_
        if self._sender is not None and gone:
            self._writer.put(lambda: self._sender.forget(gone))
        if not requests:
            return
        mine = requests[self._lane] if self._lane < len(requests) else None
        rows = hidden_rows(self._lm, (mine or requests[0]).block, gather=False)  # lanes without a request keep the experts' exchanges complete
        self._writer.reserve()
        staged = failure = None
        if mine is not None and rows is not None and self._sender is not None:
            try:
                staged = self._sender.stage(mine, rows)
            except WireError as e:
                failure = self._failure(e)
        self._writer.put(lambda: self._end(requests, staged, failure))

    def _end(self, requests: list[Request], staged: Staged | None, failure: tuple[int, str] | None) -> None:
        """On the writer's thread: this rank's writes of one round; then rank 0 hears from all and reports to the students."""
        try:
            if staged is not None:
                self._sender.write(staged)
        except WireError as e:
            failure = self._failure(e)
        gathered = [failure] if self._num_ranks == 1 else [None] * self._num_ranks if self._rank == 0 else None
        if self._num_ranks > 1:
            dist.gather_object(failure, gathered, dst=0, group=self._reports)
        if self._publisher is not None:
            failures = dict(item for item in gathered if item is not None)
            for lane, request in enumerate(requests):
                self._publisher.finish(request, error=failures.get(lane))

    def _failure(self, error: WireError) -> tuple[int, str]:
        return self._lane, f"rank {self._rank}: {error}"

    def _send(self, round_: dict | None) -> None:
        """Rank 0: hand a round to all ranks; None ends them."""
        if self._num_ranks == 1:
            return
        if round_ is None:
            data = b""
        else:
            parts = [pack_message(request) for request in round_["requests"]]
            data = pack_message({"num_requests": len(parts), "blobs": [*parts, *round_["forget"]]})
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self._world)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._world)

    def _receive(self) -> tuple[list[Request], list[bytes]] | None:
        """Other ranks: the next round, or None at the end."""
        size = torch.tensor([0])
        dist.broadcast(size, 0, group=self._world)
        if int(size) == 0:
            return None
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._world)
        message = unpack_message(data.numpy().tobytes(), "rank 0")
        count = message["num_requests"]
        return [Request.decode(unpack_message(part, "rank 0")) for part in message["blobs"][:count]], message["blobs"][count:]


def drop_output_layer(lm: torch.nn.Module) -> None:
    """The student's loss owns the head: where it is a matrix of its own, this side needs no copy, not even for the warm-up."""
    if lm.post_process and not lm.share_embeddings_and_output_weights:
        lm.output_layer.weight = None


def warm_up(lm: torch.nn.Module, *, sequence_length: int) -> None:
    """One forward of made-up tokens before the first student waits for it: kernels are chosen, communicators connected."""
    block = TokenBlock(tokens_bs=torch.zeros(1, sequence_length, dtype=torch.int64), loss_mask_bs=torch.ones(1, sequence_length), step=0, micro_batch=0)
    hidden_rows(lm, block, gather=False)
