"""What a teacher gives the loss: hidden rows with a head shard, dense logits, or top-K log-probabilities with the tail's mass.

Letters: N rows, H the teacher's hidden width, V columns of this rank's vocabulary shard, K kept tokens. Built by the target
sources and by users; read by the window passes. No gradient flows into any of it.
"""

from dataclasses import dataclass, field

import torch

from megatron_kd.errors import ConfigError, VocabMismatch, rule
from megatron_kd.kernels.spec import HeadTransform

__all__ = ["HeadTransform", "HiddenTeacher", "LogitsTeacher", "Teacher", "TopKTeacher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTeacher:
    """The teacher's last hidden states, after its final norm, and its head on the student's shard boundaries (by token id)."""

    rows_NH: torch.Tensor
    """[N, H_t], the head's dtype; columns adjacent in memory."""
    head_VH: torch.Tensor
    """[V', H_t]: row j belongs to token shard_start + j; V' is at least the shard's number of true columns."""
    bias_V: torch.Tensor | None = None
    """[V'] added to the raw logits."""
    transform: HeadTransform = field(default_factory=HeadTransform)
    """Logit scale and soft-cap of the teacher."""
    own_rows: bool = False
    """Sequence parallelism: rows_NH holds this rank's rows alone, as the student's rows do; a window's are gathered when it needs them."""

    def check(self, num_rows: int, num_true: int) -> None:
        """ConfigError or VocabMismatch unless the shapes and dtypes fit; num_rows: those of this rank alone where own_rows."""
        if self.rows_NH.dim() != 2 or self.rows_NH.shape[0] != num_rows:
            raise ConfigError(rule("teacher.rows_NH", tuple(self.rows_NH.shape), f"must be [{num_rows}, H_t]", "Give one teacher row per student row"))
        if self.head_VH.dim() != 2 or self.head_VH.shape[1] != self.rows_NH.shape[1]:
            raise ConfigError(rule("teacher.head_VH", tuple(self.head_VH.shape), f"must have the teacher rows' width, {self.rows_NH.shape[1]}",
                                   "Rows and head must come from the same teacher"))
        if self.head_VH.shape[0] < num_true:
            raise VocabMismatch(rule("teacher.head_VH", tuple(self.head_VH.shape), f"must hold this shard's {num_true} true columns",
                                     "Load the teacher's head on the student's shard boundaries (VocabSpec.teacher_rows)"))
        if self.head_VH.dtype != self.rows_NH.dtype:
            raise ConfigError(rule("teacher.head_VH.dtype", self.head_VH.dtype, f"must be the rows' dtype, {self.rows_NH.dtype}", "Cast one of them"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsTeacher:
    """Dense logits of this rank's shard, for those who have them."""

    logits_NV: torch.Tensor
    """[N, V'] raw logits, unit column stride; column j belongs to token shard_start + j; -inf leaves a token out."""
    transform: HeadTransform = field(default_factory=HeadTransform)
    """Applied to the logits; leave it out where they are final."""

    def check(self, num_rows: int, num_true: int) -> None:
        """ConfigError or VocabMismatch unless the shapes fit."""
        if self.logits_NV.dim() != 2 or self.logits_NV.shape[0] != num_rows:
            raise ConfigError(rule("teacher.logits_NV", tuple(self.logits_NV.shape), f"must be [{num_rows}, V]", "Give one teacher row per student row"))
        if self.logits_NV.shape[1] < num_true:
            raise VocabMismatch(rule("teacher.logits_NV", tuple(self.logits_NV.shape), f"must hold this shard's {num_true} true columns",
                                     "Cut the teacher's logits at the student's shard boundaries, by token id"))
        if self.logits_NV.shape[1] > 1 and self.logits_NV.stride(1) != 1:
            raise ConfigError(rule("teacher.logits_NV.stride()", self.logits_NV.stride(), "columns must be adjacent in memory", "Call .contiguous()"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKTeacher:
    """The teacher's kept tokens per row, at temperature 1; the same on every rank."""

    ids_NK: torch.Tensor
    """int64 [N, K] token ids, distinct within a row."""
    log_probs_NK: torch.Tensor
    """float [N, K] natural logarithms of probabilities; -inf counts as probability 0."""
    tail_N: torch.Tensor
    """float [N] probability mass outside the kept tokens, summed over those columns."""

    def check(self, num_rows: int, num_true: int) -> None:
        """ConfigError unless the shapes fit."""
        if self.ids_NK.dim() != 2 or self.ids_NK.shape[0] != num_rows or self.ids_NK.is_floating_point():
            raise ConfigError(rule("teacher.ids_NK", (tuple(self.ids_NK.shape), self.ids_NK.dtype), f"must be integers [{num_rows}, K]",
                                   "Give K ids per student row"))
        if self.log_probs_NK.shape != self.ids_NK.shape or self.tail_N.shape != (num_rows,):
            raise ConfigError(rule("teacher.log_probs_NK, tail_N", (tuple(self.log_probs_NK.shape), tuple(self.tail_N.shape)),
                                   f"must be {tuple(self.ids_NK.shape)} and ({num_rows},)", "Ids, log-probabilities and tail belong to the same rows"))


Teacher = HiddenTeacher | LogitsTeacher | TopKTeacher
