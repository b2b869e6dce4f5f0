"""The top-K kernels in Triton: same functions, arguments and meaning as topk_twin.py.

Called by loss/steps.py through kernels/dispatch.py. One program a row; a row's K kept tokens fit in registers (K up to a few
thousand). Besides tail_stats and tail_grad, which read and write the whole window, these touch R x K numbers only.
"""

import torch
import triton
import triton.language as tl

from megatron_kd.kernels import triton_rows, tuning
from megatron_kd.kernels.spec import NO_LABEL, PairSpec
from megatron_kd.kernels.topk_twin import (CE, KD, KEPT, LABEL, LABEL_CE, LABEL_GRAD, LSE_TAIL, NUM_SCALARS, TAIL_COEF, TAIL_MAX,
                                           TAIL_SUM)
from megatron_kd.kernels.triton_rows import LOG2E, NEG_INF, _by_raw_logits, _logits, _value_and_slope

_TAIL_MAX, _TAIL_SUM, _LABEL, _NUM_SCALARS = map(tl.constexpr, (TAIL_MAX, TAIL_SUM, LABEL, NUM_SCALARS))
_KD, _CE, _KEPT, _LSE_TAIL, _TAIL_COEF, _LABEL_CE, _LABEL_GRAD = map(tl.constexpr, (KD, CE, KEPT, LSE_TAIL, TAIL_COEF, LABEL_CE, LABEL_GRAD))
_NO_LABEL = tl.constexpr(NO_LABEL)


@triton.jit
def top_k_take_kernel(student, ids, labels, out, stride_s, stride_ids, stride_out, num_kept, shard_start, num_true, scale_s, cap_s,
                      HAS_LABELS: tl.constexpr, TRANSFORM_S: tl.constexpr, BLOCK_K: tl.constexpr):
    """Logits of the kept tokens and of the label; -inf into the kept columns."""
    row = tl.program_id(0).to(tl.int64)
    kept = tl.arange(0, BLOCK_K)
    in_k = kept < num_kept
    local = tl.load(ids + row * stride_ids + kept, mask=in_k, other=-1).to(tl.int64) - shard_start
    held = in_k & (local >= 0) & (local < num_true)
    row_s = student + row * stride_s
    z = _logits(tl.load(row_s + local, mask=held, other=0.0), scale_s, cap_s, TRANSFORM_S)
    picked = 0.0
    if HAS_LABELS:
        label = tl.load(labels + row)
        picked = tl.where(label >= 0, _logits(tl.load(row_s + label, mask=label >= 0, other=0.0), scale_s, cap_s, TRANSFORM_S), 0.0)
    out += row * stride_out
    tl.store(out + _LABEL, picked)
    tl.store(out + _NUM_SCALARS + kept, tl.where(held, z, 0.0), mask=in_k)
    tl.debug_barrier()
    tl.store(row_s + local, tl.full([BLOCK_K], NEG_INF, tl.float32).to(student.dtype.element_ty), mask=held)


@triton.jit
def top_k_join_kernel(stats, log_p, tail, labels, out, grad, stride_rank, stride_row, stride_p, stride_out, stride_grad, num_ranks, num_kept,
                      tau, mix, kd_coef, ce_coef, scale_s, cap_s, HAS_LABELS: tl.constexpr, TRANSFORM_S: tl.constexpr, MODE: tl.constexpr,
                      DIVERGENCE: tl.constexpr, BLOCK_K: tl.constexpr):
    """All ranks' statistics of a row; its K + 1 outcomes."""
    row = tl.program_id(0).to(tl.int64)
    kept = tl.arange(0, BLOCK_K)
    in_k = kept < num_kept
    stats += row * stride_row
    top = NEG_INF
    z = tl.zeros([BLOCK_K], tl.float32)
    picked = 0.0
    for rank in range(num_ranks):
        top = tl.maximum(top, tl.load(stats + rank * stride_rank + _TAIL_MAX))
        z += tl.load(stats + rank * stride_rank + _NUM_SCALARS + kept, mask=in_k, other=0.0)
        picked += tl.load(stats + rank * stride_rank + _LABEL)
    safe = tl.where(top == NEG_INF, 0.0, top)
    tail_sum = 0.0
    for rank in range(num_ranks):
        tail_sum += tl.load(stats + rank * stride_rank + _TAIL_SUM) * tl.exp2((tl.load(stats + rank * stride_rank + _TAIL_MAX) - safe) * LOG2E)
    lse_tail = tl.where(top == NEG_INF, NEG_INF, safe + tl.log(tail_sum))
    peak = tl.maximum(tl.max(tl.where(in_k, z, NEG_INF), 0), lse_tail)
    lse = peak + tl.log(tl.sum(tl.where(in_k, tl.exp2((z - peak) * LOG2E), 0.0), 0) + tl.exp2((lse_tail - peak) * LOG2E))
    log_q, log_q_tail = z - lse, lse_tail - lse
    q = tl.where(in_k, tl.exp2(log_q * LOG2E), 0.0)
    kd = 0.0
    tail_slope = 0.0
    slope_sum = 0.0
    by_k = tl.zeros([BLOCK_K], tl.float32)
    if MODE == "renormalise":
        log_p_k = _log_softmax(tl.load(log_p + row * stride_p + kept, mask=in_k, other=0.0).to(tl.float32) / tau, in_k)
        log_r = _log_softmax(z / tau, in_k)
        value, slope = _value_and_slope(log_p_k, log_r, mix, DIVERGENCE)
        slope = tl.where(in_k, slope, 0.0)
        kd = tl.sum(tl.where(in_k, value, 0.0), 0)
        by_k = slope - tl.exp2(log_r * LOG2E) * tl.sum(slope, 0)
    elif MODE != "labels only":
        value, slope = _value_and_slope(tl.load(log_p + row * stride_p + kept, mask=in_k, other=0.0).to(tl.float32), log_q, mix, DIVERGENCE)
        slope = tl.where(in_k, slope, 0.0)
        kd = tl.sum(tl.where(in_k, value, 0.0), 0)
        slope_sum = tl.sum(slope, 0)
        if MODE == "tail_bucket":
            log_p_tail = tl.log(tl.maximum(tl.load(tail + row).to(tl.float32), 0.0))
            tail_value, tail_slope = _value_and_slope(log_p_tail, log_q_tail, mix, DIVERGENCE)
            kd += tail_value
            slope_sum += tail_slope
        by_k = slope - q * slope_sum
    ce = 0.0
    ce_of_row = 0.0
    if HAS_LABELS:
        with_label = tl.load(labels + row) != _NO_LABEL
        ce = tl.where(with_label, lse - picked, 0.0)
        ce_of_row = tl.where(with_label, ce_coef, 0.0)
    tail_coef = kd_coef * tail_slope + (ce_of_row - kd_coef * slope_sum) * tl.exp2(log_q_tail * LOG2E)
    out += row * stride_out
    tl.store(out + _KD, kd)
    tl.store(out + _CE, ce)
    tl.store(out + _KEPT, tl.sum(q, 0))
    tl.store(out + _LSE_TAIL, lse_tail)
    tl.store(out + _TAIL_COEF, tail_coef)
    tl.store(out + _LABEL_CE, _by_raw_logits(ce_of_row, picked, scale_s, cap_s, TRANSFORM_S))
    tl.store(out + _LABEL_GRAD, _by_raw_logits(tail_coef * tl.exp2((picked - lse_tail) * LOG2E) - ce_of_row, picked, scale_s, cap_s, TRANSFORM_S))
    by_raw = _by_raw_logits(kd_coef * by_k + ce_of_row * q, z, scale_s, cap_s, TRANSFORM_S)
    tl.store(grad + row * stride_grad + kept, by_raw, mask=in_k)


@triton.jit
def _log_softmax(x, in_k):
    x = tl.where(in_k, x, NEG_INF)
    x -= tl.max(x, 0)
    return x - tl.log(tl.sum(tl.exp2(x * LOG2E), 0))


@triton.jit
def top_k_put_kernel(student, joined, grad, ids, labels, weights, stride_s, stride_joined, stride_grad, stride_ids, num_kept, shard_start, num_true,
                     WITH_LABEL: tl.constexpr, BLOCK_K: tl.constexpr):
    """The kept columns' gradient and the label's over what tail_grad wrote."""
    row = tl.program_id(0).to(tl.int64)
    kept = tl.arange(0, BLOCK_K)
    in_k = kept < num_kept
    local = tl.load(ids + row * stride_ids + kept, mask=in_k, other=-1).to(tl.int64) - shard_start
    held = in_k & (local >= 0) & (local < num_true)
    row_s = student + row * stride_s
    weight = tl.load(weights + row).to(tl.float32)
    by_raw = tl.load(grad + row * stride_grad + kept, mask=held, other=0.0)
    if WITH_LABEL:
        label = tl.load(labels + row)
        is_label = held & (local == label)
        by_raw -= tl.where(is_label, tl.load(joined + row * stride_joined + _LABEL_CE), 0.0)
        alone = tl.where(tl.max(is_label.to(tl.int32), 0) == 0, label, -1)
        by_label = tl.load(joined + row * stride_joined + _LABEL_GRAD) * weight
        tl.store(row_s + alone, tl.where(weight == 0.0, 0.0, by_label).to(student.dtype.element_ty), mask=alone >= 0)
    tl.store(row_s + local, tl.where(weight == 0.0, 0.0, by_raw * weight).to(student.dtype.element_ty), mask=held)


def _kept(ids_RK: torch.Tensor) -> dict[str, int]:
    return {"num_kept": ids_RK.shape[1], "BLOCK_K": max(16, triton.next_power_of_2(ids_RK.shape[1])), **tuning.TOP_K}


def top_k_take(u_RV: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None, start: int, spec: PairSpec, out_RS: torch.Tensor) -> None:
    """See topk_twin.top_k_take."""
    triton_rows._check(u_RV, ids_RK)
    top_k_take_kernel[(len(u_RV),)](
        u_RV, ids_RK, labels_R, out_RS, u_RV.stride(0), ids_RK.stride(0), out_RS.stride(0), shard_start=start, num_true=spec.num_true,
        **triton_rows._transforms(spec, "student"), HAS_LABELS=labels_R is not None, **_kept(ids_RK))


def top_k_join(stats_tRS: torch.Tensor, log_p_RK: torch.Tensor, tail_R: torch.Tensor, labels_R: torch.Tensor | None, mode: str, spec: PairSpec,
               out_RJ: torch.Tensor, grad_RK: torch.Tensor) -> None:
    """See topk_twin.top_k_join."""
    triton_rows._check(log_p_RK)
    top_k_join_kernel[(stats_tRS.shape[1],)](
        stats_tRS, log_p_RK, tail_R, labels_R, out_RJ, grad_RK, stats_tRS.stride(0), stats_tRS.stride(1), log_p_RK.stride(0), out_RJ.stride(0),
        grad_RK.stride(0), stats_tRS.shape[0], tau=spec.temperature, mix=spec.mix, kd_coef=spec.kd_coef, ce_coef=spec.ce_coef,
        **triton_rows._transforms(spec, "student"), HAS_LABELS=labels_R is not None, DIVERGENCE=spec.divergence,
        MODE=mode if spec.kd_coef != 0.0 and log_p_RK.shape[1] else "labels only", **_kept(log_p_RK))


def top_k_grad(u_RV: torch.Tensor, joined_RJ: torch.Tensor, grad_RK: torch.Tensor, ids_RK: torch.Tensor, labels_R: torch.Tensor | None,
               weights_R: torch.Tensor, start: int, spec: PairSpec) -> None:
    """See topk_twin.top_k_grad."""
    triton_rows.scaled_tail_grad(u_RV, joined_RJ[:, LSE_TAIL], joined_RJ[:, TAIL_COEF], weights_R, spec)
    top_k_put_kernel[(len(u_RV),)](
        u_RV, joined_RJ, grad_RK, ids_RK, labels_R, weights_R, u_RV.stride(0), joined_RJ.stride(0), grad_RK.stride(0), ids_RK.stride(0),
        shard_start=start, num_true=spec.num_true, WITH_LABEL=labels_R is not None and spec.ce_coef != 0.0, **_kept(ids_RK))
