"""The window step for top-K teachers (and for cross-entropy alone, K = 0). Called by loss/passes.py; derivation in docs/loss.md.

With the K columns set to -inf, one kernel pass gives the student's tail mass as a sum over the columns outside K. The K student
logits travel with the statistics in the same all-gather: each shard sends those it holds and 0 for the others. Everything that
follows happens on [R, K + 1] outcomes; the dense gradient outside K is a per-row multiple of the tail's softmax. The arithmetic
is in kernels/topk_twin.py and kernels/triton_topk.py; this holds a window's state between its statistics and its gradient.

Letters: R rows of the window, V columns of the shard, K kept tokens, J joined numbers.
"""

import torch

from megatron_kd.kernels.dispatch import top_k_kernels_for
from megatron_kd.kernels.spec import PairSpec
from megatron_kd.kernels.topk_twin import CE, KD, KEPT, NUM_JOINED, NUM_SCALARS
from megatron_kd.loss.signals import TopKTeacher


class TopKStep:
    """State of one window between its statistics and its gradient; its buffers are reused by every window of the call."""

    def __init__(self, teacher: TopKTeacher, spec: PairSpec, mode: str, shard_start: int, kernels):
        self._teacher, self._spec, self._mode, self._start = teacher, spec, mode, shard_start
        self._rows, self._kernels = kernels, top_k_kernels_for(kernels)
        self._joined, self._grad = None, None

    @property
    def num_columns(self) -> int:
        """Statistics a row sends to the other shards."""
        return NUM_SCALARS + self._teacher.ids_NK.shape[1]

    def begin(self, u_RV: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None, out_RS: torch.Tensor) -> None:
        """This shard's statistics into out_RS; sets the K columns of u_RV to -inf."""
        self._ids, self._labels = ids_RK, labels_R
        self._kernels.top_k_take(u_RV, ids_RK, labels_R, self._start, self._spec, out_RS)
        self._rows.tail_stats(u_RV, self._spec, out_RS[:, :2])

    def finish(self, stats_tRS: torch.Tensor, log_p_RK: torch.Tensor, tail_R: torch.Tensor, labels_R: torch.Tensor | None) -> tuple:
        """(kd_R unscaled, ce_R, student_kept_R) from all shards' statistics; keeps what `grad` needs."""
        num_rows, num_kept = log_p_RK.shape
        if self._joined is None or len(self._joined) < num_rows:
            self._joined, self._grad = stats_tRS.new_empty(num_rows, NUM_JOINED), stats_tRS.new_empty(num_rows, num_kept)
        joined = self._joined[:num_rows]
        self._kernels.top_k_join(stats_tRS, log_p_RK, tail_R, labels_R, self._mode, self._spec, joined, self._grad[:num_rows])
        return joined[:, KD], joined[:, CE], joined[:, KEPT]

    def grad(self, u_RV: torch.Tensor, weights_R: torch.Tensor) -> None:
        """Overwrite u_RV with the gradient by the raw logits."""
        num_rows = len(u_RV)
        self._kernels.top_k_grad(u_RV, self._joined[:num_rows], self._grad[:num_rows], self._ids, self._labels, weights_R, self._start, self._spec)
