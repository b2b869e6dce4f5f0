"""Peak memory of the fused loss beside a dense one, measured in this process at the shapes of the run.

Called by `train` at the end of a CPU run. The dense loss is what vocabulary-parallel training does without this package: both
models' logits of all rows, softmax over the shards, autograd. Both compute the same number, which is checked.
Letters: N rows, V vocabulary columns of this rank, H student width, T teacher width.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_kd.cli.allocations import TrackedAllocations
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.signals import HiddenTeacher
from megatron_kd.vocab import VocabSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """Of one forward and backward on this rank; what was there before (rows, heads) is not counted."""

    fused_peak_bytes: int
    """The fused loss."""
    dense_peak_bytes: int
    """The dense loss."""
    relative_difference: float
    """|fused - dense| / dense of the summed loss."""


class _SumOverRanks(torch.autograd.Function):
    """Sum over the vocabulary shards of a number that every rank then uses alike: the gradient passes through once."""

    @staticmethod
    def forward(ctx, x_N, group):
        x_N = x_N.clone()
        if group is not None:
            dist.all_reduce(x_N, group=group)
        return x_N

    @staticmethod
    def backward(ctx, grad_N):
        return grad_N, None


def dense_kd(student_NH, head_VH, teacher_NT, teacher_head_VT, labels_N, *, vocab: VocabSpec, rank: int, group, objective: Objective) -> torch.Tensor:
    """Summed forward KL and cross-entropy with logits of all rows. dX is this shard's part."""
    num_true = vocab.num_true(rank)
    student_NV = (student_NH @ head_VH[:num_true].t()).float()
    teacher_NV = (teacher_NT @ teacher_head_VT[:num_true].t()).float()

    def log_softmax(logits_NV):
        largest_N = logits_NV.detach().amax(-1)
        if group is not None:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        total_N = _SumOverRanks.apply((logits_NV - largest_N[:, None]).exp().sum(-1), group)
        return logits_NV - (largest_N + total_N.log())[:, None]

    log_q_NV, log_p_NV = log_softmax(student_NV), log_softmax(teacher_NV)
    kd_N = _SumOverRanks.apply((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1), group)
    local_N = labels_N - vocab.shard_range(rank)[0]
    mine_N = (local_N >= 0) & (local_N < num_true)
    picked_N = log_q_NV.gather(1, local_N.clamp(0, num_true - 1)[:, None]).squeeze(1)
    ce_N = -_SumOverRanks.apply(torch.where(mine_N, picked_N, torch.zeros_like(picked_N)), group)
    return (objective.kd_weight * kd_N + objective.ce_weight * ce_N).sum()


def measure(
    *,
    num_rows: int,
    student_width: int,
    teacher_width: int,
    vocab: VocabSpec,
    dtype: torch.dtype,
    kd_weight: float,
    ce_weight: float,
    window_rows: int | None,
    group: dist.ProcessGroup | None,
    seed: int = 0,
) -> LossMemory:
    """Both losses on random rows and heads of these shapes (forward KL, temperature 1). Every rank of `group` calls it."""
    rank = dist.get_rank(group) if group is not None else 0
    shared = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(num_rows, width, generator=shared).to(dtype) for width in (student_width, teacher_width))
    labels = torch.randint(vocab.true_size, (num_rows,), generator=shared)
    own = torch.Generator().manual_seed(seed + 1 + rank)
    head, teacher_head = (torch.randn(vocab.shard_size, width, generator=own).mul_(width**-0.5).to(dtype) for width in (student_width, teacher_width))
    objective = Objective(kd_weight=kd_weight, ce_weight=ce_weight)
    student.requires_grad_(), head.requires_grad_()

    def fused():
        output = fused_linear_kd(
            student,
            head,
            HiddenTeacher(rows_NH=teacher, head_VH=teacher_head),
            vocab=vocab,
            objective=objective,
            labels_N=labels,
            tp_group=group,
            window_rows=window_rows,
        )
        loss = output.loss_N.sum()
        loss.backward()
        return float(loss.detach())

    def dense():
        loss = dense_kd(student, head, teacher, teacher_head, labels, vocab=vocab, rank=rank, group=group, objective=objective)
        loss.backward()
        return float(loss.detach())

    peaks, values = [], []
    for compute in (fused, dense):
        student.grad = head.grad = None
        with TrackedAllocations() as seen:
            values.append(compute())
        peaks.append(seen.peak_bytes)
    return LossMemory(fused_peak_bytes=peaks[0], dense_peak_bytes=peaks[1], relative_difference=abs(values[0] - values[1]) / abs(values[1]))
