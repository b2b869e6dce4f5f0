"""The top-K kernels in plain torch: the CPU backend, and the meaning that the Triton kernels are tested against.

One window of one vocabulary shard: no autograd, no collectives, no host sync. Called by loss/steps.py through kernels/dispatch.py.
The student's tail is everything outside the K kept columns; its distribution over those columns is softmax(z) without them, so
the dense gradient there is one number a row times that softmax, and only K + 1 outcomes are left to reason about.

* top_k_take   reads the K logits and the label's, and sets the K columns to -inf; tail_stats (torch_twin.py) then sums the tail.
* top_k_join   merges the shards' statistics (gathered by the loss): D, CE, kept mass, and the gradient's pieces.
* top_k_grad   overwrites the raw logits with the gradient.

Letters: R rows, V columns of the shard, K kept tokens, S = 3 + K statistics of a shard, J joined numbers, t ranks.
"""

import torch

from megatron_kd.kernels import torch_twin
from megatron_kd.kernels.spec import NO_LABEL, PairSpec

NEG_INF = float("-inf")
# Columns of stats_RS; tail maximum and sum first, the K logits last. Shards that do not hold a token send 0 for its logit.
TAIL_MAX, TAIL_SUM, LABEL, NUM_SCALARS = 0, 1, 2, 3
# Columns of joined_RJ. LABEL_CE: the label's share of the cross-entropy's gradient; LABEL_GRAD: the label's gradient where it is in the tail.
KD, CE, KEPT, LSE_TAIL, TAIL_COEF, LABEL_CE, LABEL_GRAD, NUM_JOINED = 0, 1, 2, 3, 4, 5, 6, 7


def top_k_take(u_RV: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None, start: int, spec: PairSpec, out_RS: torch.Tensor) -> None:
    """z of the K tokens and of the label that this shard holds into out_RS[:, LABEL:] (0 for the others); sets those K columns of u_RV to -inf.

    ids_RK: global ids, distinct in a row, of any size; column j of the shard is token start + j. labels_R: local, as in row_stats.
    """
    held, local = _held(ids_RK, start, spec)
    z_RK = torch_twin._logits(u_RV.gather(1, local), spec.student, local.shape[1])
    out_RS[:, NUM_SCALARS:] = torch.where(held, z_RK, 0.0)
    out_RS[:, LABEL] = 0.0
    if labels_R is not None:
        z_R = torch_twin._logits(u_RV.gather(1, labels_R.clamp_min(0).long()[:, None]), spec.student, 1)[:, 0]
        out_RS[:, LABEL] = torch.where(labels_R >= 0, z_R, 0.0)
    # Entries held elsewhere share the clamped column with one that may be held here: take the smallest of (own value, -inf).
    u_RV.scatter_reduce_(1, local, torch.where(held, NEG_INF, float("inf")).to(u_RV.dtype), reduce="amin")


def top_k_join(stats_tRS: torch.Tensor, log_p_RK: torch.Tensor, tail_R: torch.Tensor, labels_R: torch.Tensor | None, mode: str, spec: PairSpec,
               out_RJ: torch.Tensor, grad_RK: torch.Tensor) -> None:
    """D (unscaled), CE, the student's kept mass and the gradient's pieces, the same on every rank.

    mode: "tail_bucket" compares K + 1 outcomes, "none" the K alone, "renormalise" the K scaled to sum 1 on both sides, at the
    temperature (the other modes are at temperature 1). grad_RK: gradient by the K raw logits, without the label's share and without
    weights. A row without a tail column has LSE_TAIL -inf.
    """
    top = stats_tRS[..., TAIL_MAX].amax(0)
    factor = torch.where(stats_tRS[..., TAIL_MAX] == NEG_INF, 0.0, (stats_tRS[..., TAIL_MAX] - top).exp())
    lse_tail = torch.where(top == NEG_INF, NEG_INF, top + (stats_tRS[..., TAIL_SUM] * factor).sum(0).log())
    z_RK, z_y = stats_tRS[..., NUM_SCALARS:].sum(0), stats_tRS[..., LABEL].sum(0)
    outcomes = torch.cat([z_RK, lse_tail[:, None]], 1)
    lse = outcomes.logsumexp(1)
    log_q, log_q_tail = z_RK - lse[:, None], lse_tail - lse
    with_label = torch.zeros_like(lse, dtype=torch.bool) if labels_R is None else labels_R != NO_LABEL
    kd, slope_RK, tail_slope, slope_sum = _divergence(log_p_RK.to(z_RK.dtype), tail_R.to(z_RK.dtype), z_RK, log_q, log_q_tail, mode, spec)
    ce_coef = torch.where(with_label, spec.ce_coef, 0.0)
    tail_coef = spec.kd_coef * tail_slope + (ce_coef - spec.kd_coef * slope_sum) * log_q_tail.exp()
    label_slope = torch_twin._slope_of_transform(z_y, spec.student)
    out_RJ[:, KD], out_RJ[:, CE] = kd, torch.where(with_label, lse - z_y, 0.0)
    out_RJ[:, KEPT], out_RJ[:, LSE_TAIL], out_RJ[:, TAIL_COEF] = log_q.exp().sum(1), lse_tail, tail_coef
    out_RJ[:, LABEL_CE] = ce_coef * label_slope
    out_RJ[:, LABEL_GRAD] = (tail_coef * (z_y - lse_tail).exp() - ce_coef) * label_slope
    grad_RK.copy_((spec.kd_coef * slope_RK + ce_coef[:, None] * log_q.exp()) * torch_twin._slope_of_transform(z_RK, spec.student))


def top_k_grad(u_RV: torch.Tensor, joined_RJ: torch.Tensor, grad_RK: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None,
               weights_R: torch.Tensor, start: int, spec: PairSpec) -> None:
    """Overwrite u_RV with the gradient by the raw logits: the tail from its softmax, the K columns and the label's in full precision.

    Padding columns and rows with weight 0 get exactly 0.
    """
    held, local = _held(ids_RK, start, spec)
    weights, active = weights_R.to(joined_RJ.dtype), weights_R != 0
    torch_twin.tail_grad(u_RV, joined_RJ[:, LSE_TAIL], torch.where(active, joined_RJ[:, TAIL_COEF] * weights, 0.0), spec)
    if labels_R is not None and spec.ce_coef != 0.0 and spec.num_true:
        is_label_RK = held & (local == labels_R[:, None])
        grad_RK = grad_RK - torch.where(is_label_RK, joined_RJ[:, LABEL_CE, None], 0.0)
        alone = (labels_R >= 0) & ~is_label_RK.any(1)
        column = labels_R.clamp_min(0).long()[:, None]
        grad_y = torch.where(active, joined_RJ[:, LABEL_GRAD] * weights, 0.0).to(u_RV.dtype)[:, None]
        u_RV.scatter_(1, column, torch.where(alone[:, None], grad_y, u_RV.gather(1, column)))
    # The kept columns hold 0 now, so adding sets them; entries of other shards add 0 to whatever column they were clamped to.
    u_RV.scatter_add_(1, local, torch.where(held & active[:, None], grad_RK * weights[:, None], 0.0).to(u_RV.dtype))


def _held(ids_RK: torch.Tensor, start: int, spec: PairSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids this shard holds, and their columns (some column for the others)."""
    local = ids_RK.long() - start
    return (local >= 0) & (local < spec.num_true), local.clamp(0, max(spec.num_true - 1, 0))


def _divergence(log_p_RK, tail_R, z_RK, log_q_RK, log_q_tail, mode: str, spec: PairSpec) -> tuple[torch.Tensor, ...]:
    """D, slope by the K log-probabilities after the slope sum's share, the tail's slope and the slope sum."""
    zero = torch.zeros_like(tail_R)
    if spec.kd_coef == 0.0 or log_p_RK.shape[1] == 0:
        return zero, torch.zeros_like(log_q_RK), zero, zero
    if mode == "renormalise":
        log_p, log_q = (log_p_RK / spec.temperature).log_softmax(1), (z_RK / spec.temperature).log_softmax(1)
        value, slope = torch_twin.value_and_slope(log_p, log_q, spec)
        return value.sum(1), slope - log_q.exp() * slope.sum(1, keepdim=True), zero, zero
    value, slope = torch_twin.value_and_slope(log_p_RK, log_q_RK, spec)
    total, slope_sum, tail_slope = value.sum(1), slope.sum(1), zero
    if mode == "tail_bucket":
        tail_value, tail_slope = torch_twin.value_and_slope(tail_R.clamp_min(0.0).log(), log_q_tail, spec)
        total, slope_sum = total + tail_value, slope_sum + tail_slope
    return total, slope - log_q_RK.exp() * slope_sum[:, None], tail_slope, slope_sum
