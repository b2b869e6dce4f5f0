"""ColocatedSource: the teacher on the student's own ranks, under the student's TP, PP, EP and CP.

Owns when its forward runs. At pp = 1 inside the student's micro-batch. At pp > 1 the teacher's stages would wait for each other inside the student's
1F1B schedule, so a forward-only schedule runs all micro-batches of a step before the student's first, and the last stage holds their rows:
micro-batches a step x rows x H_t x 2 bytes. The teacher is frozen, in eval mode, outside of the student's module tree: no gradient
buffers, no optimizer state, no checkpoint entry.
"""

import time
from collections.abc import Sequence

import torch

from megatron_kd.errors import UnsupportedLayout, rule
from megatron_kd.mcore import model as models
from megatron_kd.mcore.groups import layout_of
from megatron_kd.mcore.output_layer import head_transform
from megatron_kd.mcore.teacher_head import head_of_model
from megatron_kd.rows import RowBlock, TokenBlock
from megatron_kd.student.targets import SourceRequest, Targets, TeacherHead
from megatron_kd.teacher.forward import hidden_rows, hidden_rows_many


class ColocatedSource:
    """TargetSource over a frozen language model on this rank."""

    def __init__(self, lm: torch.nn.Module):
        self._lm = lm
        self._held: dict[tuple, RowBlock] = {}
        self._seconds, self._forwards = 0.0, 0

    @property
    def is_pipelined(self) -> bool:
        """Whether `run_step` must be called before the student's schedule."""
        return self._lm.pg_collection.pp.size() > 1

    def run_step(self, blocks: Sequence[TokenBlock]) -> None:
        """All micro-batches of the coming step, through all stages; every rank calls it. Middle stages read only the shapes."""
        started = time.perf_counter()
        rows = hidden_rows_many(self._lm, blocks)
        if rows is not None:
            self._held = {block.key: row_block for block, row_block in zip(blocks, rows)}
        self._count(started, len(blocks))

    def post(self, block: TokenBlock) -> None:
        """Nothing to ask: the forward runs when the rows are taken, or ran before the step."""

    def take(self, block: TokenBlock) -> RowBlock:
        """The rows of `block`, on the model's device."""
        if self.is_pipelined:
            return self._held[block.key]
        started = time.perf_counter()
        rows = hidden_rows(self._lm, block)
        self._count(started, 1)
        return rows

    def release(self, block: TokenBlock) -> None:
        """Drop what was held for `block`."""
        self._held.pop(block.key, None)

    def metrics(self) -> dict[str, float]:
        """Host seconds in the teacher's forward and forwards since the last call."""
        numbers = {"teacher/forward_s": self._seconds, "teacher/forwards": float(self._forwards)}
        self._seconds, self._forwards = 0.0, 0
        return numbers

    def close(self) -> None:
        """Let go of the model."""
        self._held.clear()
        self._lm = None

    def _count(self, started: float, forwards: int) -> None:
        self._seconds += time.perf_counter() - started
        self._forwards += forwards


def colocated_targets(request: SourceRequest) -> Targets:
    """Build the teacher on the student's layout. Errors: UnsupportedLayout, by name, where heads, experts or layers do not fit it."""
    layout = layout_of(request.student_lm.config)
    provider = models.teacher_provider(request.teacher.model, layout=layout, dtype=request.dtype, seq_length=request.seq_length)
    if layout.pp > 1 and getattr(provider, "pipeline_model_parallel_layout", None):
        raise UnsupportedLayout(rule("pipeline_model_parallel_layout", "set", "the colocated teacher uses an even split over stages", "Stream the teacher instead"))
    (chunk,) = models.build_model(provider, groups=request.student_lm.pg_collection)
    lm = models.language_model(chunk)
    head = None
    if lm.post_process:
        weight, bias = head_of_model(lm, request.vocab)
        head = TeacherHead(weight_VH=weight, bias_V=bias, transform=head_transform(lm))
    return Targets(source=ColocatedSource(lm), head=head, name="the colocated teacher")
