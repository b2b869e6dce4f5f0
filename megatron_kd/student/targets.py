"""TargetSource: the one interface behind which a teacher is colocated, streamed or cached, and the function that picks one.

Owns the interface and the choice. The sources themselves are colocated.py, streamed.py and cached.py. Called by student/engine.py.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_kd.config.schema import CacheConfig, LossConfig, StreamConfig, TeacherConfig
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.mcore.groups import Groups
from megatron_kd.rows import RowBlock, TokenBlock, TopKBlock
from megatron_kd.vocab import VocabSpec


class TargetSource(Protocol):
    """Targets by micro-batch. The student posts in the order in which it will take, and takes each block that it posted once."""

    def post(self, block: TokenBlock) -> None:
        """Ask for `block`'s rows, some micro-batches early. Returns at once unless no slot is free."""

    def take(self, block: TokenBlock) -> RowBlock | TopKBlock | None:
        """The rows, waiting to a deadline. Errors: TeacherError, CacheError, RowsMismatch.

        None only in a degraded mode that was asked for, and then on every rank of the last stage: there is nothing to release, and the
        micro-batch trains on cross-entropy alone.
        """

    def release(self, block: TokenBlock) -> None:
        """The rows of `block` are used up."""

    def metrics(self) -> dict[str, float]:
        """Numbers since the last call, for the training log."""

    def close(self) -> None:
        """Free everything; harmless twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """This rank's shard of the teacher's output head."""

    weight_VH: torch.Tensor
    """[V', H_t]: row j belongs to token shard_start + j."""
    bias_V: torch.Tensor | None = None
    """[V'], or None."""
    transform: HeadTransform = field(default_factory=HeadTransform)
    """Logit scale and soft-cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Everything that a source may need to know about the student. Built by the engine when the student's model exists."""

    teacher: TeacherConfig
    """Which teacher, and where."""
    loss: LossConfig
    """The objective (temperature, top-K mode)."""
    stream: StreamConfig
    """placement: streamed."""
    cache: CacheConfig
    """placement: cached."""
    cfg: Any
    """Bridge's ConfigContainer of the student."""
    student_lm: torch.nn.Module
    """The student's language model chunk on this rank that comes last; owns the output layer on the last stage."""
    groups: Groups
    """The student's process groups."""
    vocab: VocabSpec
    """Vocabulary; its teacher_padded is what the teacher's configuration says."""
    device: torch.device
    """Where rows are used."""
    dtype: torch.dtype
    """The teacher's precision."""
    seq_length: int
    """Longest sequence."""
    micro_batch: int
    """Sequences of a micro-batch."""
    output_dir: str | None = None
    """The run's folder, where a source may put files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a source gives the engine."""

    source: TargetSource
    """Where rows come from."""
    head: TeacherHead | None
    """The teacher's head on the last stage; None for top-K targets and on other stages."""
    name: str
    """Names the source in errors, e.g. `the colocated teacher`."""
    ahead: int = 0
    """Micro-batches to post beyond the current one."""


def make_targets(request: SourceRequest) -> Targets:
    """The source that `request.teacher.placement` names. Every rank of the student calls it, once, when its model exists."""
    if request.teacher.placement == "streamed":
        from megatron_kd.student.streamed import streamed_targets

        return streamed_targets(request)
    if request.teacher.placement == "cached":
        from megatron_kd.student.cached import cached_targets

        return cached_targets(request)
    from megatron_kd.student.colocated import colocated_targets

    return colocated_targets(request)


def head_from_checkpoint(path: str, vocab: VocabSpec, tp_rank: int, *, dtype: torch.dtype, device: torch.device) -> TeacherHead:
    """A Hugging Face checkpoint's head for this rank; only its own rows are read. Errors: ConvertError, VocabMismatch."""
    from megatron_kd.convert.head import find_head
    from megatron_kd.convert.hf_index import Checkpoint

    checkpoint = Checkpoint.open(path)
    head = find_head(checkpoint)
    rows = vocab.teacher_rows(tp_rank)
    weight = checkpoint.read(head.name, rows).to(device, dtype)
    bias = None if head.bias is None else checkpoint.read(head.bias, rows).to(device, dtype)
    return TeacherHead(weight_VH=weight, bias_V=bias, transform=HeadTransform(scale=head.logit_scale, softcap=head.soft_cap))
