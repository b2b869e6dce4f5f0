"""HiddenTerm: an extra term on the final hidden states, 1 - cosine or the mean squared difference, with a learned projection.

Called by student/step and mcore, where the teacher's rows are hidden states; adds `weight * value_N` to the per-row loss. Widths
that differ are joined by a projection [H_t, H_s] of the student, a student parameter of the last stage: replicated over tensor
parallelism, saved and resumed with the student, left out of a Hugging Face export. Works over row windows in float32: nothing
of size [N, H_t] but the inputs exists. Letters: N rows, n this rank's rows, S the student's width, T the teacher's.
"""

from typing import Literal

import torch
import torch.distributed as dist

from megatron_kd.errors import ConfigError, rule
from megatron_kd.loss.reduce import gather_row_values, group_rank

WINDOW_ROWS = 2048
"""Rows that are held in float32 at once."""
COSINE_EPS = 1e-8
"""Smallest norm that divides."""


class HiddenTerm(torch.nn.Module):
    """value_N of student rows against teacher rows.

    kind "cosine": 1 - cos(P x, t); "mse": mean over the width of (P x - t)^2. P is the identity where widths agree and no projection is
    asked for. Every rank of a tensor-parallel group must hold the same projection; under sequence parallelism its gradient covers this
    rank's rows only and is to be summed over the group: the parameter carries `sequence_parallel = True`, which Megatron acts on.
    """

    def __init__(self, kind: Literal["cosine", "mse"], width_s: int, width_t: int, *, sequence_parallel: bool = False,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        if kind not in ("cosine", "mse"):
            raise ConfigError(rule("hidden_term.kind", kind, "must be 'cosine' or 'mse'", "Pick one of them"))
        self.kind = kind
        self.projection = None
        if width_s != width_t:
            # Seeded by the widths alone: equal on every rank, and no draw from the run's own random state.
            gen = torch.Generator().manual_seed(width_s * 100_003 + width_t)
            weight = torch.randn(width_t, width_s, generator=gen) * width_s**-0.5
            self.projection = torch.nn.Parameter(weight.to(device, dtype))
            self.projection.sequence_parallel = sequence_parallel

    def forward(self, student_NS: torch.Tensor, teacher_NT: torch.Tensor, *, tp_group: dist.ProcessGroup | None = None,
                rows_per_rank: tuple[int, ...] | None = None, own_teacher_rows: bool = False) -> torch.Tensor:
        """float32 value_N of all rows, equal on every rank.

        student_NS: all rows; with rows_per_rank (sequence parallelism) this rank's rows [n, S]. teacher_NT: all rows; with
        own_teacher_rows this rank's [n, T]. The gradient of student_NS is complete on every rank: it must not be summed over the group again.
        """
        num_rows = student_NS.shape[0] if rows_per_rank is None or own_teacher_rows else sum(rows_per_rank)
        if teacher_NT.shape[0] != num_rows:
            raise ConfigError(rule("teacher_NT", tuple(teacher_NT.shape), f"must have {num_rows} rows", "Give one teacher row per student row"))
        width = student_NS.shape[1] if self.projection is None else self.projection.shape[0]
        if teacher_NT.shape[1] != width:
            raise ConfigError(rule("teacher_NT", tuple(teacher_NT.shape), f"must have width {width}", "Build HiddenTerm with this teacher's width"))
        if rows_per_rank is not None and not own_teacher_rows:
            start = sum(rows_per_rank[:group_rank(tp_group)])
            teacher_NT = teacher_NT[start:start + student_NS.shape[0]]
        value = _HiddenTermFunction.apply(student_NS, teacher_NT, self.projection, self.kind)
        return value if rows_per_rank is None else _GatherValues.apply(value, tp_group, rows_per_rank)


class _GatherValues(torch.autograd.Function):
    """All rows' values from each rank's own. Every rank forms the same loss of them, so a rank's gradient is its own slice, not a sum."""

    @staticmethod
    def forward(ctx, value_n, group, rows_per_rank):
        ctx.start, ctx.num = sum(rows_per_rank[:group_rank(group)]), value_n.shape[0]
        return gather_row_values(value_n, group, rows_per_rank)

    @staticmethod
    def backward(ctx, grad_N):
        return grad_N[ctx.start:ctx.start + ctx.num], None, None


class _HiddenTermFunction(torch.autograd.Function):
    """Row values; backward works over the same windows again, with the projection's gradient summed in float32."""

    @staticmethod
    def forward(ctx, student_NS, teacher_NT, projection_TS, kind):
        ctx.save_for_backward(student_NS, teacher_NT, projection_TS)
        ctx.kind = kind
        values = [_window(x, t, projection_TS, kind)[0] for x, t in zip(student_NS.split(WINDOW_ROWS), teacher_NT.split(WINDOW_ROWS), strict=True)]
        return torch.cat(values)

    @staticmethod
    def backward(ctx, grad_N):
        student_NS, teacher_NT, projection_TS = ctx.saved_tensors
        dx = torch.empty_like(student_NS) if ctx.needs_input_grad[0] else None
        dp = torch.zeros(projection_TS.shape, dtype=grad_N.dtype, device=grad_N.device) if projection_TS is not None and ctx.needs_input_grad[2] else None
        for a in range(0, student_NS.shape[0], WINDOW_ROWS):
            rows = slice(a, a + WINDOW_ROWS)
            da = _window(student_NS[rows], teacher_NT[rows], projection_TS, ctx.kind)[1] * grad_N[rows, None]
            if dx is not None:
                dx[rows] = da if projection_TS is None else da.to(student_NS.dtype) @ projection_TS
            if dp is not None:
                dp.addmm_(da.t(), student_NS[rows].to(dp.dtype))
        return dx, None, None if dp is None else dp.to(projection_TS.dtype), None


def _window(x_RS: torch.Tensor, t_RT: torch.Tensor, projection_TS: torch.Tensor | None, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(value_R, its gradient by the projected rows [R, T]) in the accumulation dtype."""
    acc = torch.promote_types(x_RS.dtype, torch.float32)
    a = (x_RS if projection_TS is None else x_RS @ projection_TS.t()).to(acc)
    t = t_RT.to(acc)
    if kind == "mse":
        difference = a - t
        return difference.square().mean(1), difference * (2.0 / a.shape[1])
    norm_a, norm_t = a.norm(dim=1, keepdim=True).clamp_min(COSINE_EPS), t.norm(dim=1, keepdim=True).clamp_min(COSINE_EPS)
    unit_a, unit_t = a / norm_a, t / norm_t
    cosine = (unit_a * unit_t).sum(1, keepdim=True)
    return 1.0 - cosine[:, 0], (cosine * unit_a - unit_t) / norm_a
