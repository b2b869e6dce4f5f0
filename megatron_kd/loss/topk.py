"""The window step for top-K teachers (and for cross-entropy alone, K = 0). Called by loss/passes.py; derivation in docs/loss.md.

With the K columns set to -inf, one kernel pass gives the student's tail mass as a sum over the columns outside K. The K student
logits travel with the statistics in the same all-gather: each shard sends those it holds and 0 for the others. Everything that
follows happens on [R, K + 1] outcomes; the dense gradient outside K is a per-row multiple of the tail's softmax.

Letters: R rows of the window, V columns of the shard, K kept tokens, J joined statistics.
"""

import torch

from megatron_kd.kernels import torch_twin
from megatron_kd.kernels.spec import NO_LABEL, PairSpec
from megatron_kd.loss.signals import TopKTeacher

NEG_INF = float("-inf")
NUM_SCALARS = 3
"""Statistics of a row besides its K logits: tail max, tail sum, label logit."""


class TopKStep:
    """State of one window between its statistics and its gradient."""

    def __init__(self, teacher: TopKTeacher, spec: PairSpec, mode: str, shard_start: int, kernels):
        self._teacher, self._spec, self._mode, self._start, self._kernels = teacher, spec, mode, shard_start, kernels

    @property
    def num_columns(self) -> int:
        """Statistics a row sends to the other shards."""
        return NUM_SCALARS + self._teacher.ids_NK.shape[1]

    def begin(self, u_RV: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None, out_RS: torch.Tensor) -> None:
        """This shard's statistics into out_RS; sets the K columns of u_RV to -inf."""
        spec, local = self._spec, ids_RK.long() - self._start
        self._held = (local >= 0) & (local < spec.num_true)
        self._local = local.clamp(0, max(spec.num_true - 1, 0))
        u_k = torch.where(self._held, u_RV.gather(1, self._local).to(out_RS.dtype), 0.0)
        out_RS[:, NUM_SCALARS:] = torch.where(self._held, transform(u_k, spec), 0.0)
        out_RS[:, 2] = 0.0
        if labels_R is not None:
            u_y = u_RV.gather(1, labels_R.clamp_min(0).long()[:, None])[:, 0].to(out_RS.dtype)
            out_RS[:, 2] = torch.where(labels_R >= 0, transform(u_y, spec), 0.0)
        # A row's K ids are distinct, but entries held elsewhere share the clamped column: write the smallest of (own value, -inf).
        u_RV.scatter_reduce_(1, self._local, torch.where(self._held, NEG_INF, float("inf")).to(u_RV.dtype), reduce="amin")
        self._kernels.tail_stats(u_RV, spec, tail := torch.empty_like(out_RS[:, :2], memory_format=torch.contiguous_format))
        out_RS[:, :2] = tail

    def finish(self, stats_tRS: torch.Tensor, log_p_RK: torch.Tensor, tail_R: torch.Tensor, labels_R: torch.Tensor | None) -> tuple:
        """(kd_R unscaled, ce_R, student_kept_R) from all shards' statistics; keeps what `grad` needs."""
        spec = self._spec
        top = stats_tRS[..., 0].amax(0)
        factor = torch.where(stats_tRS[..., 0] == NEG_INF, 0.0, (stats_tRS[..., 0] - top).exp())
        self._lse_tail = top + (stats_tRS[..., 1] * factor).sum(0).log()
        self._lse_tail = torch.where(top == NEG_INF, NEG_INF, self._lse_tail)
        z_RK, z_y = stats_tRS[..., NUM_SCALARS:].sum(0), stats_tRS[..., 2].sum(0)
        outcomes = torch.cat([z_RK, self._lse_tail[:, None]], 1)
        self._lse = outcomes.logsumexp(1)
        self._log_q = outcomes - self._lse[:, None]
        self._z_RK, self._z_y, self._labels = z_RK, z_y, labels_R
        ce = torch.zeros_like(z_y) if labels_R is None else torch.where(labels_R != NO_LABEL, self._lse - z_y, 0.0)
        kd = self._divergence(log_p_RK.to(z_RK.dtype), tail_R.to(z_RK.dtype))
        return kd, ce, self._log_q[:, :-1].exp().sum(1)

    def _divergence(self, log_p_RK: torch.Tensor, tail_R: torch.Tensor) -> torch.Tensor:
        """D, and the gradient pieces: by the K logits (self._g_RK), and the tail's slope phi and the slope sum."""
        spec, log_q_RK = self._spec, self._log_q[:, :-1]
        zero = torch.zeros_like(tail_R)
        if spec.kd_coef == 0.0 or log_p_RK.shape[1] == 0:
            self._g_RK, self._tail_slope, self._slope_sum = torch.zeros_like(log_q_RK), zero, zero
            return zero
        if self._mode == "renormalise":
            log_p, log_q = (log_p_RK / spec.temperature).log_softmax(1), (self._z_RK / spec.temperature).log_softmax(1)
            value, slope = torch_twin.value_and_slope(log_p, log_q, spec)
            self._g_RK = slope - log_q.exp() * slope.sum(1, keepdim=True)
            self._tail_slope, self._slope_sum = zero, zero
            return value.sum(1)
        value, slope = torch_twin.value_and_slope(log_p_RK, log_q_RK, spec)
        total, self._tail_slope = value.sum(1), zero
        self._slope_sum = slope.sum(1)
        if self._mode == "tail_bucket":
            value_b, self._tail_slope = torch_twin.value_and_slope(tail_R.clamp_min(0.0).log(), self._log_q[:, -1], spec)
            total, self._slope_sum = total + value_b, self._slope_sum + self._tail_slope
        self._g_RK = slope - log_q_RK.exp() * self._slope_sum[:, None]
        return total

    def grad(self, u_RV: torch.Tensor, weights_R: torch.Tensor) -> None:
        """Overwrite u_RV with the gradient by the raw logits: the tail by the kernel, the K columns and the label's in full precision."""
        spec, weights, active = self._spec, weights_R.to(self._lse.dtype), weights_R != 0
        log_q_RK, q_tail = self._log_q[:, :-1], self._log_q[:, -1].exp()
        ce = torch.zeros_like(self._lse)
        if self._labels is not None:
            ce = torch.where(self._labels == NO_LABEL, ce, spec.ce_coef)
        tail_coef = spec.kd_coef * self._tail_slope + (ce - spec.kd_coef * self._slope_sum) * q_tail
        g_RK = spec.kd_coef * self._g_RK + ce[:, None] * log_q_RK.exp()
        with_label = self._labels is not None and spec.ce_coef != 0.0
        if with_label:
            is_label_RK = self._held & (self._local == self._labels[:, None])
            g_RK = g_RK - torch.where(is_label_RK, ce[:, None], 0.0)
            alone = (self._labels >= 0) & ~is_label_RK.any(1)
            label_column = self._labels.clamp_min(0).long()[:, None]
            g_y = tail_coef * (self._z_y - self._lse_tail).exp() - ce
            blank = torch.where(alone, NEG_INF, float("inf")).to(u_RV.dtype)
            u_RV.scatter_reduce_(1, label_column, blank[:, None], reduce="amin")
        self._kernels.tail_grad(u_RV, self._lse_tail, torch.where(active, tail_coef * weights, 0.0), spec)
        # These columns hold 0 now, so adding sets them; entries of other shards add 0 to whatever column they were clamped to.
        g_RK = g_RK * slope_of_transform(self._z_RK, spec) * weights[:, None]
        u_RV.scatter_add_(1, self._local, torch.where(self._held & active[:, None], g_RK, 0.0).to(u_RV.dtype))
        if with_label:
            g_y = g_y * slope_of_transform(self._z_y, spec) * weights
            u_RV.scatter_add_(1, label_column, torch.where(alone & active, g_y, 0.0).to(u_RV.dtype)[:, None])


def transform(u: torch.Tensor, spec: PairSpec) -> torch.Tensor:
    """Student logits z of raw logits u."""
    z = u * spec.student.scale
    return z if spec.student.softcap is None else spec.student.softcap * torch.tanh(z / spec.student.softcap)


def slope_of_transform(z: torch.Tensor, spec: PairSpec) -> torch.Tensor | float:
    """dz/du."""
    return spec.student.scale if spec.student.softcap is None else spec.student.scale * (1.0 - (z / spec.student.softcap) ** 2)
