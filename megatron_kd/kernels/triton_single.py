"""Statistics and gradient of a window in one kernel, for one vocabulary shard and the one-pass divergences.

Called by the loss through kernels/dispatch.py where no other rank has to be asked between the two. A row is cut into parts of
CHUNK columns; the parts of a row run at the same time, publish their statistics, wait for each other, and then write their part of
the gradient from logits that are still in the L2 cache: 6 bytes of device memory per pair of 2-byte logits instead of 10.

Waiting is safe because programs are started in order: the parts of the oldest unfinished row all hold a multiprocessor before
any part of a younger row does. Arithmetic and results are those of row_stats, join_stats and row_grad.
"""

import torch
import triton
import triton.language as tl

from megatron_kd.kernels import triton_rows, tuning
from megatron_kd.kernels.spec import CE, KD, LSE_CE, LSE_S, LSE_T, NO_LABEL, ONE_PASS, SLOPE, PairSpec
from megatron_kd.kernels.triton_rows import LANE, LOG2E, NEG_INF, _by_raw_logits, _logits, _stats_step, _value_and_slope

_LSE_S, _LSE_T, _LSE_CE, _KD, _SLOPE, _CE = map(tl.constexpr, (LSE_S, LSE_T, LSE_CE, KD, SLOPE, CE))
_NO_LABEL = tl.constexpr(NO_LABEL)
PART = tl.constexpr(8)
"""Floats of one part's statistics: maxima, sums, cross sum, and room to stay aligned."""


@triton.jit
def _publish(partials, max_s, sum_s, sum_ce, max_t, sum_t, cross, per_tau, TAU_ONE: tl.constexpr, DIVERGENCE: tl.constexpr):
    """Lanes joined, six numbers stored."""
    top_s, top_t = tl.max(max_s, 0), tl.max(max_t, 0)
    safe_s, safe_t = tl.where(top_s == NEG_INF, 0.0, top_s), tl.where(top_t == NEG_INF, 0.0, top_t)
    factor_s, factor_t = tl.exp2((max_s - safe_s) * per_tau), tl.exp2((max_t - safe_t) * per_tau)
    tl.store(partials, top_s)
    tl.store(partials + 1, tl.sum(sum_s * factor_s, 0))
    tl.store(partials + 2, top_t)
    tl.store(partials + 3, tl.sum(sum_t * factor_t, 0))
    tl.store(partials + 4, tl.sum(cross * (factor_s if DIVERGENCE == "reverse_kl" else factor_t), 0))
    if not TAU_ONE:
        tl.store(partials + 5, tl.sum(sum_ce * tl.exp2((max_s - safe_s) * LOG2E), 0))


@triton.jit
def row_single_kernel(student, teacher, labels, weights, joined, partials, arrived, stride_s, stride_t, stride_joined, num_columns, num_true, num_parts,
                      tau, kd_coef, ce_coef, scale_s, cap_s, scale_t, cap_t, HAS_LABELS: tl.constexpr, HAS_CE: tl.constexpr, TRANSFORM_S: tl.constexpr,
                      TRANSFORM_T: tl.constexpr, TAU_ONE: tl.constexpr, DIVERGENCE: tl.constexpr, DROP: tl.constexpr, PARTS: tl.constexpr,
                      CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and part; PARTS is num_parts rounded up to a power of two."""
    P: tl.constexpr = BLOCK // LANE
    row = (tl.program_id(0) // num_parts).to(tl.int64)
    part = tl.program_id(0) % num_parts
    row_s, row_t = student + row * stride_s, teacher + row * stride_t
    begin = part * CHUNK
    end = tl.minimum(begin + CHUNK, num_true)
    per_tau = LOG2E / tau
    lanes = tl.arange(0, P)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    zero = tl.zeros([P], tl.float32)
    max_s, sum_s, sum_ce, max_t, sum_t, cross = zero + NEG_INF, zero, zero, zero + NEG_INF, zero, zero
    for start in range(begin, end, BLOCK):
        columns = start + lanes
        u_s = tl.load(row_s + columns, mask=columns < end, other=NEG_INF)
        u_t = tl.load(row_t + columns, mask=columns < end, other=NEG_INF)
        max_s, sum_s, sum_ce, max_t, sum_t, cross = _stats_step(max_s, sum_s, sum_ce, max_t, sum_t, cross, u_s, u_t, scale_s, cap_s, scale_t, cap_t,
                                                                per_tau, TRANSFORM_S, TRANSFORM_T, TAU_ONE, DIVERGENCE)
    label = _NO_LABEL
    picked = 0.0
    if HAS_LABELS:
        label = tl.load(labels + row)
        picked = tl.where(label >= 0, _logits(tl.load(row_s + label, mask=label >= 0, other=0.0), scale_s, cap_s, TRANSFORM_S), 0.0)
    row_partials = partials + row * num_parts * PART
    _publish(row_partials + part * PART, max_s, sum_s, sum_ce, max_t, sum_t, cross, per_tau, TAU_ONE, DIVERGENCE)
    tl.debug_barrier()
    here = tl.atomic_add(arrived + row, 1, sem="acq_rel") + 1
    while here < num_parts:
        here = tl.atomic_add(arrived + row, 0, sem="acquire")
    parts = tl.arange(0, PARTS)
    known = parts < num_parts
    part_ptr = row_partials + parts * PART
    tops_s = tl.load(part_ptr, mask=known, other=NEG_INF, cache_modifier=".cg")
    tops_t = tl.load(part_ptr + 2, mask=known, other=NEG_INF, cache_modifier=".cg")
    top_s, top_t = tl.max(tops_s, 0), tl.max(tops_t, 0)
    scale_of_s, scale_of_t = tl.exp2((tops_s - top_s) * per_tau), tl.exp2((tops_t - top_t) * per_tau)
    total_s = tl.sum(tl.load(part_ptr + 1, mask=known, other=0.0, cache_modifier=".cg") * scale_of_s, 0)
    total_t = tl.sum(tl.load(part_ptr + 3, mask=known, other=0.0, cache_modifier=".cg") * scale_of_t, 0)
    crosses = tl.load(part_ptr + 4, mask=known, other=0.0, cache_modifier=".cg")
    lse_s, lse_t = top_s / tau + tl.log(total_s), top_t / tau + tl.log(total_t)
    lse_ce = lse_s
    if not TAU_ONE:
        sums_ce = tl.load(part_ptr + 5, mask=known, other=0.0, cache_modifier=".cg")
        lse_ce = top_s + tl.log(tl.sum(sums_ce * tl.exp2((tops_s - top_s) * LOG2E), 0))
    if DIVERGENCE == "forward_kl":
        kd = tl.sum(crosses * scale_of_t, 0) / tau / total_t - lse_t + lse_s
        total_slope = -1.0
    else:
        kd = tl.sum(crosses * scale_of_s, 0) / tau / total_s - lse_s + lse_t
        total_slope = kd + 1.0
    if part == 0:
        joined += row * stride_joined
        tl.store(joined + _LSE_S, lse_s)
        tl.store(joined + _LSE_T, lse_t)
        tl.store(joined + _LSE_CE, lse_ce)
        tl.store(joined + _KD, kd)
        tl.store(joined + _SLOPE, total_slope)
        tl.store(joined + _CE, tl.where(label != _NO_LABEL, lse_ce - picked, 0.0))
    weight = tl.load(weights + row).to(tl.float32)
    if DROP:
        weight = tl.where((lse_t - lse_t) == 0.0, weight, 0.0)
    flat = tl.arange(0, BLOCK)
    stop = tl.minimum(begin + CHUNK, num_columns)
    num_blocks = tl.cdiv(stop - begin, BLOCK)
    inv_tau = 1.0 / tau
    for i in range(0, num_blocks):
        columns = begin + (num_blocks - 1 - i) * BLOCK + flat
        real = columns < tl.where(weight == 0.0, 0, end)
        z_s = _logits(tl.load(row_s + columns, mask=real, other=0.0), scale_s, cap_s, TRANSFORM_S)
        z_t = _logits(tl.load(row_t + columns, mask=real, other=0.0), scale_t, cap_t, TRANSFORM_T)
        log_q, log_p = z_s * inv_tau - lse_s, z_t * inv_tau - lse_t
        q = tl.exp2(log_q * LOG2E)
        if DIVERGENCE == "forward_kl":
            slope = -tl.exp2(log_p * LOG2E)
        else:
            _, slope = _value_and_slope(log_p, log_q, 0.0, DIVERGENCE)
        grad = kd_coef * (slope - q * total_slope)
        if HAS_CE:
            softmax = q if TAU_ONE else tl.exp2((z_s - lse_ce) * LOG2E)
            grad += tl.where(label != _NO_LABEL, ce_coef, 0.0) * softmax - tl.where(columns == label, ce_coef, 0.0)
        grad = tl.where(real, _by_raw_logits(grad * weight, z_s, scale_s, cap_s, TRANSFORM_S), 0.0)
        tl.store(row_s + columns, grad.to(student.dtype.element_ty), mask=columns < stop)


def row_single(student_RV: torch.Tensor, teacher_RV: torch.Tensor, labels_R: torch.Tensor | None, weights_R: torch.Tensor, drop_rows: bool,
               spec: PairSpec, out_RJ: torch.Tensor) -> None:
    """row_stats, join_stats over one shard, and row_grad; `drop_rows` gives rows whose teacher is not finite gradient 0.

    num_true must not be 0. Memory: 32 bytes per row and part.
    """
    triton_rows._check(student_RV, teacher_RV)
    assert spec.divergence in ONE_PASS and spec.num_true > 0
    num_rows, num_columns = student_RV.shape
    num_parts = triton.cdiv(num_columns, tuning.SINGLE["CHUNK"])
    partials = torch.empty(num_rows * num_parts * PART.value, dtype=torch.float32, device=student_RV.device)
    arrived = torch.zeros(num_rows, dtype=torch.int32, device=student_RV.device)
    row_single_kernel[(num_rows * num_parts,)](
        student_RV, teacher_RV, labels_R, weights_R, out_RJ, partials, arrived, student_RV.stride(0), teacher_RV.stride(0), out_RJ.stride(0),
        num_columns, spec.num_true, num_parts, spec.temperature, spec.kd_coef, spec.ce_coef,
        **triton_rows._transforms(spec, "student", "teacher"), HAS_LABELS=labels_R is not None,
        HAS_CE=labels_R is not None and spec.ce_coef != 0.0, TAU_ONE=spec.temperature == 1.0, DIVERGENCE=spec.divergence, DROP=drop_rows,
        PARTS=triton.next_power_of_2(num_parts), **tuning.SINGLE)
