"""StreamedSource: teacher rows that come from replicas in worlds of their own, behind the interface of student/targets.py.

Owns the joining of the stream to Megatron's ranks: global rank 0 hosts the rendezvous, ranks of the last stage receive, the degraded mode
is agreed by all ranks of the last stage. Each tensor-parallel rank receives a share of the rows: under sequence parallelism those of its own
positions, which the loss gathers window by window; without it equal shares, joined here in one all-gather.
"""

import logging
import socket
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_kd.config.schema import StreamConfig
from megatron_kd.errors import TeacherError, TeacherLost, TeacherStalled
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.mcore.groups import Groups
from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.stream import health
from megatron_kd.stream.channel import load_token, parse_address
from megatron_kd.stream.receiver import Receiver
from megatron_kd.stream.rendezvous import Hub
from megatron_kd.stream.route import Side
from megatron_kd.stream.spec import StudentSpec
from megatron_kd.student.targets import SourceRequest, Targets, TeacherHead, head_from_checkpoint
from megatron_kd.teacher.identity import Identity, identify

logger = logging.getLogger(__name__)


class StreamedSource:
    """TargetSource over a Receiver; on ranks of other stages it only keeps the rendezvous alive, if it is theirs."""

    def __init__(self, *, receiver: Receiver | None, hub: Hub | None, groups: Groups, sequence_parallel: bool, degrade: bool):
        self._receiver, self._hub, self._groups, self._degrade = receiver, hub, groups, degrade
        self._without = 0
        self._shares, self._joins = groups.tp.size() > 1 and sequence_parallel, groups.tp.size() > 1 and not sequence_parallel

    def post(self, block: TokenBlock) -> None:
        """Ask for the rows of `block`."""
        self._receiver.post(block)

    def take(self, block: TokenBlock) -> RowBlock | None:
        """This context-parallel rank's rows, ascending in row id; under sequence parallelism this rank's share of them. None only in the
        degraded mode: no rank has them, train on CE alone.

        Collective over tp without sequence parallelism, over the last stage in the degraded mode. Errors: TeacherStalled, TeacherLost,
        and those of the stream.
        """
        rows, missing = None, None
        try:
            rows = self._receiver.take(block)
        except (TeacherStalled, TeacherLost) as e:
            if not self._degrade:
                raise
            missing = e
        if self._degrade and not self._all_have(missing is None):
            self._note(block, missing)
            self._receiver.give_up(block)
            return None
        self._without = 0
        return self._join(block, rows) if self._joins else replace(rows, is_share=self._shares)

    def release(self, block: TokenBlock) -> None:
        """The rows of `block` are used up."""
        self._receiver.release(block)

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call; the asking rank also logs the one-line verdict."""
        if self._receiver is None:
            return {}
        numbers = self._receiver.metrics()
        if self._receiver.asks:
            logger.info("stream: %s", health.verdict(numbers))
        return numbers

    def close(self) -> None:
        """Leave the stream."""
        if self._receiver is not None:
            self._receiver.close()
        if self._hub is not None:
            self._hub.close()

    def _note(self, block: TokenBlock, missing: TeacherError | None) -> None:
        """Say it once where blocks without a teacher begin, on the ranks that miss rows; the metrics count them all."""
        self._without += 1
        if self._without == 1 and missing is not None:
            logger.warning("micro-batches train without their teacher from %s on: %s", block.key, missing)

    def _all_have(self, mine: bool) -> bool:
        have = torch.tensor([int(mine)], dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(have, dist.ReduceOp.MIN, group=self._groups.tp)
        dist.all_reduce(have, dist.ReduceOp.MIN, group=self._groups.dp_cp)
        return bool(have.item())

    def _join(self, block: TokenBlock, rows: RowBlock) -> RowBlock:
        """All rows of this context-parallel rank from the parts of its tp ranks, which are consecutive."""
        group = self._groups.tp
        own = rows.hidden_NH
        ids = self._receiver.shares(block)
        longest = max(len(share) for share in ids)
        padded = own.new_zeros(longest, own.shape[1])
        padded[:own.shape[0]] = own
        joined = own.new_empty(longest * len(ids), own.shape[1])
        dist.all_gather_into_tensor(joined, padded, group=group)
        if any(len(share) != longest for share in ids):
            joined = torch.cat([joined[i * longest:i * longest + len(share)] for i, share in enumerate(ids)])
        return RowBlock(hidden_NH=joined, row_ids_N=torch.cat(ids), hash=rows.hash)


def streamed_targets(request: SourceRequest) -> Targets:
    """Host or find the rendezvous, wait for the replicas, read this rank's shard of the head. Every rank of the student calls it."""
    stream, groups = request.stream, request.groups
    token, address = load_token(stream.token_file), parse_address(stream.rendezvous)
    hub = Hub(address, token, run_id=f"{socket.gethostname()}-{address[1]}") if dist.get_rank() == 0 else None
    receiver = head = None
    if groups.is_last_stage:
        from megatron_kd.stream.nixl import NixlInbox

        identity = identify(request.teacher.model, compute_fingerprint=False)
        head = head_from_checkpoint(request.teacher.model, request.vocab, groups.tp.rank(), dtype=request.dtype, device=request.device)
        assert head_text(head) == identity.head_transform
        receiver = Receiver(student_spec(request, identity, token, address), NixlInbox())
        receiver.wait_for_teachers(stream.replicas)
    source = StreamedSource(receiver=receiver, hub=hub, groups=groups, sequence_parallel=is_sequence_parallel(request), degrade=stream.on_teacher_loss == "ce_only")
    return Targets(source=source, head=head, name="the streamed teacher", ahead=stream.ring_depth - 1)


def is_sequence_parallel(request: SourceRequest) -> bool:
    """Whether the student's tensor-parallel ranks each hold a part of the sequence."""
    return bool(request.student_lm.config.sequence_parallel)


def student_spec(request: SourceRequest, identity: Identity, token: bytes, address: tuple[str, int]) -> StudentSpec:
    """What this rank of the last stage brings to the stream."""
    stream, groups = request.stream, request.groups
    side = Side(tp=groups.tp.size(), cp=groups.cp.size(), sequence_parallel=is_sequence_parallel(request))
    return StudentSpec(rendezvous=address, token=token, bind=stream.bind, dp_rank=groups.dp.rank(), side=side, rank=groups.cp.rank() * side.tp + groups.tp.rank(),
                       spread=side.tp > 1, hidden_size=identity.hidden_size, head_transform=identity.head_transform, wire_dtype=stream.rows,
                       fingerprint=identity.fingerprint, head_digest=identity.head_digest, sequence_length=request.seq_length, ring_depth=stream.ring_depth,
                       device=request.device, checksum=checksum_of(stream, request.device), on_loss=stream.on_teacher_loss,
                       deadline_s=stream.deadline_s, join_deadline_s=stream.join_deadline_s, heartbeat_s=stream.heartbeat_s)


def checksum_of(stream: StreamConfig, device: torch.device) -> str:
    """xxh3 for host memory, sum64 (which stays on the device) for GPU memory where asked for; "none" else."""
    if stream.checksum == "off" or (stream.checksum == "auto" and device.type == "cuda"):
        return "none"
    return "sum64" if device.type == "cuda" else "xxh3"


def head_text(head: TeacherHead) -> str:
    """The head's transform in the words of teacher/identity.py."""
    transform: HeadTransform = head.transform
    return f"scale={transform.scale:g} softcap={transform.softcap or 0:g} bias={'yes' if head.bias_V is not None else 'no'}"
