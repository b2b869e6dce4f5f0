"""The row kernels in Triton: same functions, arguments and meaning as torch_twin.py, for CUDA (and Triton's interpreter in tests).

Called by the loss through kernels/dispatch.py. No autograd, no collectives, no host sync. Arithmetic is float32.
Bytes moved per pair of logits in 2-byte dtypes: row_stats reads 4, row_values reads 4, row_grad reads 4 and writes 2; for top-K
tail_stats reads 2, tail_grad reads 2 and writes 2. The log-sum-exps run per lane of LANE neighbouring columns, so that no
thread waits for another one before the end of its row.

Letters as in torch_twin.py: R rows, V columns of the shard, S statistics, J joined statistics, t ranks; P lanes of a tile.
"""

import torch
import triton
import triton.language as tl

from megatron_kd.kernels import torch_twin, tuning
from megatron_kd.kernels.spec import (CE, CROSS, KD, LABEL, LSE_CE, LSE_S, LSE_T, MAX_S, MAX_T, NO_LABEL, NUM_JOINED, NUM_STATS, ONE_PASS, SLOPE,
                                      SUM_CE, SUM_S, SUM_T, PairSpec)

LANE = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
_MAX_S, _SUM_S, _SUM_CE, _MAX_T, _SUM_T, _CROSS, _LABEL, _NUM_STATS = map(tl.constexpr, (MAX_S, SUM_S, SUM_CE, MAX_T, SUM_T, CROSS, LABEL, NUM_STATS))
_LSE_S, _LSE_T, _LSE_CE, _KD, _SLOPE, _CE, _NUM_JOINED = map(tl.constexpr, (LSE_S, LSE_T, LSE_CE, KD, SLOPE, CE, NUM_JOINED))
_NO_LABEL = tl.constexpr(NO_LABEL)

accumulate_dtype = torch_twin.accumulate_dtype


@triton.jit
def _logits(u, scale, cap, TRANSFORM: tl.constexpr):
    """z of raw logits u. TRANSFORM: 0 none, 1 scale, 2 scale and soft-cap; -inf stays -inf."""
    u = u.to(tl.float32)
    if TRANSFORM == 0:
        return u
    z = u * scale
    if TRANSFORM == 2:
        z = cap - 2.0 * cap / (tl.exp2(z / cap * (2.0 * LOG2E)) + 1.0)
    return tl.where(u == NEG_INF, NEG_INF, z)


@triton.jit
def _by_raw_logits(grad, z, scale, cap, TRANSFORM: tl.constexpr):
    """grad * dz/du."""
    if TRANSFORM >= 1:
        grad *= scale
    if TRANSFORM == 2:
        grad *= 1.0 - (z / cap) * (z / cap)
    return grad


@triton.jit
def _fold(max_P, z_P8, per_tau):
    """One step of the online softmax per lane: new maximum, factor of the old sums, terms of the new ones."""
    new_P = tl.maximum(max_P, tl.max(z_P8, 1))
    safe_P = tl.where(new_P == NEG_INF, 0.0, new_P)
    return new_P, tl.exp2((max_P - safe_P) * per_tau), tl.exp2((z_P8 - safe_P[:, None]) * per_tau), safe_P


@triton.jit
def _term(e, difference):
    """e * difference, 0 where e is 0."""
    return tl.where(e == 0.0, 0.0, e * difference)


@triton.jit
def _value_and_slope(log_p, log_q, mix, DIVERGENCE: tl.constexpr):
    """f(log p, log q) and phi = df/d(log q): the one place where a divergence is written for this backend."""
    p = tl.exp2(log_p * LOG2E)
    q = tl.exp2(log_q * LOG2E)
    if DIVERGENCE == "forward_kl":
        value = _term(p, log_p - log_q)
        slope = -p
    elif DIVERGENCE == "reverse_kl":
        value = _term(q, log_q - log_p)
        slope = value + q
    elif DIVERGENCE == "jsd":
        log_m = tl.log2(mix * p + (1.0 - mix) * q) / LOG2E
        slope = (1.0 - mix) * _term(q, log_q - log_m)
        value = mix * _term(p, log_p - log_m) + slope
    elif DIVERGENCE == "skew_forward_kl":
        log_m = tl.log2(mix * p + (1.0 - mix) * q) / LOG2E
        value = _term(p, log_p - log_m)
        slope = -(1.0 - mix) * p * tl.where(q > 0.0, tl.exp2((log_q - log_m) * LOG2E), 0.0)
    elif DIVERGENCE == "skew_reverse_kl":
        log_m = tl.log2((1.0 - mix) * p + mix * q) / LOG2E
        value = _term(q, log_q - log_m)
        slope = value + q - mix * q * tl.where(q > 0.0, tl.exp2((log_q - log_m) * LOG2E), 0.0)
    else:
        tl.static_assert(DIVERGENCE == "total_variation")
        value = 0.5 * tl.abs(p - q)
        slope = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) * q
    return value, slope


@triton.jit
def _load(row_ptr, columns, num_true, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(row_ptr + columns, mask=columns < num_true, other=NEG_INF)
    return tl.load(row_ptr + columns)


@triton.jit
def _load_block(row_ptr, start, limit, other, BLOCK: tl.constexpr):
    """BLOCK columns from `start`, `other` from column `limit` on. A whole block needs no mask: then 16-byte loads at any vocabulary size."""
    columns = start + tl.arange(0, BLOCK)
    if start + BLOCK <= limit:
        block = tl.load(row_ptr + columns)
    else:
        block = tl.load(row_ptr + columns, mask=columns < limit, other=other)
    return block


@triton.jit
def _store_block(row_ptr, start, limit, block, BLOCK: tl.constexpr):
    """BLOCK columns from `start`, as far as `limit`."""
    columns = start + tl.arange(0, BLOCK)
    block = block.to(row_ptr.dtype.element_ty)
    if start + BLOCK <= limit:
        tl.store(row_ptr + columns, block)
    else:
        tl.store(row_ptr + columns, block, mask=columns < limit)


@triton.jit
def _stats_step(max_s, sum_s, sum_ce, max_t, sum_t, cross, u_s, u_t, scale_s, cap_s, scale_t, cap_t, per_tau,
                TRANSFORM_S: tl.constexpr, TRANSFORM_T: tl.constexpr, TAU_ONE: tl.constexpr, CROSS_OF: tl.constexpr):
    z_s, z_t = _logits(u_s, scale_s, cap_s, TRANSFORM_S), _logits(u_t, scale_t, cap_t, TRANSFORM_T)
    new_s, keep_s, e_s, safe_s = _fold(max_s, z_s, per_tau)
    new_t, keep_t, e_t, safe_t = _fold(max_t, z_t, per_tau)
    sum_s = sum_s * keep_s + tl.sum(e_s, 1)
    sum_t = sum_t * keep_t + tl.sum(e_t, 1)
    if not TAU_ONE:
        sum_ce = sum_ce * tl.exp2((max_s - safe_s) * LOG2E) + tl.sum(tl.exp2((z_s - safe_s[:, None]) * LOG2E), 1)
    if CROSS_OF == "forward_kl":
        cross = cross * keep_t + tl.sum(_term(e_t, z_t - z_s), 1)
    elif CROSS_OF == "reverse_kl":
        cross = cross * keep_s + tl.sum(_term(e_s, z_s - z_t), 1)
    return new_s, sum_s, sum_ce, new_t, sum_t, cross


@triton.jit
def row_stats_kernel(student, teacher, labels, out, stride_s, stride_t, stride_out, num_true, tau, scale_s, cap_s, scale_t, cap_t,
                     HAS_LABELS: tl.constexpr, TRANSFORM_S: tl.constexpr, TRANSFORM_T: tl.constexpr, TAU_ONE: tl.constexpr, CROSS_OF: tl.constexpr,
                     BLOCK: tl.constexpr):
    """One program a row: both logits once, online, per lane; lanes joined at the end."""
    P: tl.constexpr = BLOCK // LANE
    row = tl.program_id(0).to(tl.int64)
    row_s, row_t = student + row * stride_s, teacher + row * stride_t
    per_tau = LOG2E / tau
    columns = tl.arange(0, P)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    zero = tl.zeros([P], tl.float32)
    max_s, sum_s, sum_ce, max_t, sum_t, cross = zero + NEG_INF, zero, zero, zero + NEG_INF, zero, zero
    whole = num_true // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        max_s, sum_s, sum_ce, max_t, sum_t, cross = _stats_step(
            max_s, sum_s, sum_ce, max_t, sum_t, cross, _load(row_s, start + columns, num_true, False), _load(row_t, start + columns, num_true, False),
            scale_s, cap_s, scale_t, cap_t, per_tau, TRANSFORM_S, TRANSFORM_T, TAU_ONE, CROSS_OF)
    if whole < num_true:
        max_s, sum_s, sum_ce, max_t, sum_t, cross = _stats_step(
            max_s, sum_s, sum_ce, max_t, sum_t, cross, _load(row_s, whole + columns, num_true, True), _load(row_t, whole + columns, num_true, True),
            scale_s, cap_s, scale_t, cap_t, per_tau, TRANSFORM_S, TRANSFORM_T, TAU_ONE, CROSS_OF)
    top_s, top_t = tl.max(max_s, 0), tl.max(max_t, 0)
    safe_s, safe_t = tl.where(top_s == NEG_INF, 0.0, top_s), tl.where(top_t == NEG_INF, 0.0, top_t)
    factor_s, factor_t = tl.exp2((max_s - safe_s) * per_tau), tl.exp2((max_t - safe_t) * per_tau)
    total_s = tl.sum(sum_s * factor_s, 0)
    total_ce = total_s
    if not TAU_ONE:
        total_ce = tl.sum(sum_ce * tl.exp2((max_s - safe_s) * LOG2E), 0)
    total_cross = 0.0
    if CROSS_OF == "forward_kl":
        total_cross = tl.sum(cross * factor_t, 0) / tau
    elif CROSS_OF == "reverse_kl":
        total_cross = tl.sum(cross * factor_s, 0) / tau
    picked = 0.0
    if HAS_LABELS:
        label = tl.load(labels + row)
        u = tl.load(row_s + label, mask=label >= 0, other=0.0)
        picked = tl.where(label >= 0, _logits(u, scale_s, cap_s, TRANSFORM_S), 0.0)
    out += row * stride_out
    tl.store(out + _MAX_S, top_s)
    tl.store(out + _SUM_S, total_s)
    tl.store(out + _SUM_CE, total_ce)
    tl.store(out + _MAX_T, top_t)
    tl.store(out + _SUM_T, tl.sum(sum_t * factor_t, 0))
    tl.store(out + _CROSS, total_cross)
    tl.store(out + _LABEL, picked)


@triton.jit
def join_stats_kernel(stats, labels, out, num_rows, stride_rank, stride_row, stride_out, num_ranks, tau, HAS_LABELS: tl.constexpr,
                      DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK rows a program, all ranks' statistics of each."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    stats += rows * stride_row
    per_tau = LOG2E / tau
    max_s = tl.full([BLOCK], NEG_INF, tl.float32)
    max_t = tl.full([BLOCK], NEG_INF, tl.float32)
    for rank in range(num_ranks):
        max_s = tl.maximum(max_s, tl.load(stats + rank * stride_rank + _MAX_S, mask=mask, other=0.0))
        max_t = tl.maximum(max_t, tl.load(stats + rank * stride_rank + _MAX_T, mask=mask, other=0.0))
    zero = tl.zeros([BLOCK], tl.float32)
    sum_s, sum_t, sum_ce, cross, picked = zero, zero, zero, zero, zero
    for rank in range(num_ranks):
        part = stats + rank * stride_rank
        shift_s = tl.load(part + _MAX_S, mask=mask, other=0.0) - max_s
        scale_s = tl.exp2(shift_s * per_tau)
        scale_t = tl.exp2((tl.load(part + _MAX_T, mask=mask, other=0.0) - max_t) * per_tau)
        sum_s += tl.load(part + _SUM_S, mask=mask, other=1.0) * scale_s
        sum_t += tl.load(part + _SUM_T, mask=mask, other=1.0) * scale_t
        sum_ce += tl.load(part + _SUM_CE, mask=mask, other=1.0) * tl.exp2(shift_s * LOG2E)
        cross += tl.load(part + _CROSS, mask=mask, other=0.0) * (scale_s if DIVERGENCE == "reverse_kl" else scale_t)
        picked += tl.load(part + _LABEL, mask=mask, other=0.0)
    lse_s, lse_t, lse_ce = max_s / tau + tl.log(sum_s), max_t / tau + tl.log(sum_t), max_s + tl.log(sum_ce)
    kd, slope, ce = zero, zero, zero
    if DIVERGENCE == "forward_kl":
        kd = cross / sum_t - lse_t + lse_s
        slope = zero - 1.0
    elif DIVERGENCE == "reverse_kl":
        kd = cross / sum_s - lse_s + lse_t
        slope = kd + 1.0
    if HAS_LABELS:
        ce = tl.where(tl.load(labels + rows, mask=mask, other=_NO_LABEL) != _NO_LABEL, lse_ce - picked, 0.0)
    out += rows * stride_out
    tl.store(out + _LSE_S, lse_s, mask=mask)
    tl.store(out + _LSE_T, lse_t, mask=mask)
    tl.store(out + _LSE_CE, lse_ce, mask=mask)
    tl.store(out + _KD, kd, mask=mask)
    tl.store(out + _SLOPE, slope, mask=mask)
    tl.store(out + _CE, ce, mask=mask)


@triton.jit
def row_values_kernel(student, teacher, joined, out, stride_s, stride_t, stride_joined, stride_out, num_true, tau, mix,
                      scale_s, cap_s, scale_t, cap_t,
                      TRANSFORM_S: tl.constexpr, TRANSFORM_T: tl.constexpr, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: sums of the value and of the slope."""
    row = tl.program_id(0).to(tl.int64)
    row_s, row_t = student + row * stride_s, teacher + row * stride_t
    lse_s, lse_t = tl.load(joined + row * stride_joined + _LSE_S), tl.load(joined + row * stride_joined + _LSE_T)
    per_tau = 1.0 / tau
    values, slopes = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_true, BLOCK):
        z_s = _logits(_load_block(row_s, start, num_true, NEG_INF, BLOCK), scale_s, cap_s, TRANSFORM_S)
        z_t = _logits(_load_block(row_t, start, num_true, NEG_INF, BLOCK), scale_t, cap_t, TRANSFORM_T)
        value, slope = _value_and_slope(z_t * per_tau - lse_t, z_s * per_tau - lse_s, mix, DIVERGENCE)
        values += value
        slopes += slope
    tl.store(out + row * stride_out, tl.sum(values, 0))
    tl.store(out + row * stride_out + 1, tl.sum(slopes, 0))


@triton.jit
def row_grad_kernel(student, teacher, joined, weights, labels, stride_s, stride_t, stride_joined, num_columns, num_true, tau, mix, kd_coef, ce_coef,
                    scale_s, cap_s, scale_t, cap_t, HAS_CE: tl.constexpr, TRANSFORM_S: tl.constexpr, TRANSFORM_T: tl.constexpr,
                    TAU_ONE: tl.constexpr, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns: the gradient over the student's raw logits."""
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    row_s, row_t = student + row * stride_s, teacher + row * stride_t
    weight = tl.load(weights + row).to(tl.float32)
    joined += row * stride_joined
    lse_s, lse_t, lse_ce, total_slope = tl.load(joined + _LSE_S), tl.load(joined + _LSE_T), tl.load(joined + _LSE_CE), tl.load(joined + _SLOPE)
    limit = tl.where(weight == 0.0, 0, num_true)
    z_s = _logits(_load_block(row_s, start, limit, 0.0, BLOCK), scale_s, cap_s, TRANSFORM_S)
    z_t = _logits(_load_block(row_t, start, limit, 0.0, BLOCK), scale_t, cap_t, TRANSFORM_T)
    per_tau = 1.0 / tau
    log_q, log_p = z_s * per_tau - lse_s, z_t * per_tau - lse_t
    q = tl.exp2(log_q * LOG2E)
    if DIVERGENCE == "forward_kl":
        slope = -tl.exp2(log_p * LOG2E)
    else:
        _, slope = _value_and_slope(log_p, log_q, mix, DIVERGENCE)
    grad = kd_coef * (slope - q * total_slope)
    if HAS_CE:
        label = tl.load(labels + row)
        softmax = q if TAU_ONE else tl.exp2((z_s - lse_ce) * LOG2E)
        grad += tl.where(label != _NO_LABEL, ce_coef, 0.0) * softmax - tl.where(columns == label, ce_coef, 0.0)
    grad = _by_raw_logits(grad * weight, z_s, scale_s, cap_s, TRANSFORM_S)
    _store_block(row_s, start, num_columns, tl.where(columns < limit, grad, 0.0), BLOCK)


@triton.jit
def tail_stats_kernel(student, out, stride_s, stride_out, num_true, scale_s, cap_s, TRANSFORM_S: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: maximum and sum of exponentials at tau = 1."""
    P: tl.constexpr = BLOCK // LANE
    row = tl.program_id(0).to(tl.int64)
    row_s = student + row * stride_s
    columns = tl.arange(0, P)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    max_P, sum_P = tl.full([P], NEG_INF, tl.float32), tl.zeros([P], tl.float32)
    whole = num_true // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        max_P, keep, terms, _ = _fold(max_P, _logits(_load(row_s, start + columns, num_true, False), scale_s, cap_s, TRANSFORM_S), LOG2E)
        sum_P = sum_P * keep + tl.sum(terms, 1)
    if whole < num_true:
        max_P, keep, terms, _ = _fold(max_P, _logits(_load(row_s, whole + columns, num_true, True), scale_s, cap_s, TRANSFORM_S), LOG2E)
        sum_P = sum_P * keep + tl.sum(terms, 1)
    top = tl.max(max_P, 0)
    safe = tl.where(top == NEG_INF, 0.0, top)
    tl.store(out + row * stride_out, top)
    tl.store(out + row * stride_out + 1, tl.sum(sum_P * tl.exp2((max_P - safe) * LOG2E), 0))


@triton.jit
def tail_grad_kernel(student, lse, coef, weights, stride_s, stride_lse, stride_coef, num_columns, num_true, scale_s, cap_s,
                     TRANSFORM_S: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns: weight * coef * exp(z - lse) * dz/du over the raw logits."""
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BLOCK
    row_s = student + row * stride_s
    weight = 1.0 if weights is None else tl.load(weights + row).to(tl.float32)
    factor = tl.where(weight == 0.0, 0.0, tl.load(coef + row * stride_coef) * weight)
    z = _logits(_load_block(row_s, start, tl.where(factor == 0.0, 0, num_true), NEG_INF, BLOCK), scale_s, cap_s, TRANSFORM_S)
    grad = _by_raw_logits(factor * tl.exp2((z - tl.load(lse + row * stride_lse)) * LOG2E), z, scale_s, cap_s, TRANSFORM_S)
    _store_block(row_s, start, num_columns, tl.where(z == NEG_INF, 0.0, grad), BLOCK)


def _transforms(spec: PairSpec, *sides: str) -> dict:
    """Kernel arguments of the head transforms."""
    arguments = {}
    for side in sides:
        transform, letter = getattr(spec, side), side[0]
        arguments[f"scale_{letter}"] = transform.scale
        arguments[f"cap_{letter}"] = transform.softcap or 1.0
        arguments[f"TRANSFORM_{letter.upper()}"] = 2 if transform.softcap is not None else int(transform.scale != 1.0)
    return arguments


def _check(*windows_RV: torch.Tensor) -> None:
    for window in windows_RV:
        assert window.stride(-1) == 1, f"a window of logits needs unit column stride, got {window.stride()}"
        assert window.dtype != torch.float64, "the Triton kernels compute in float32; float64 belongs to the torch backend"


def row_stats(student_RV: torch.Tensor, teacher_RV: torch.Tensor, labels_R: torch.Tensor | None, spec: PairSpec, out_RS: torch.Tensor) -> None:
    """See torch_twin.row_stats."""
    _check(student_RV, teacher_RV)
    row_stats_kernel[(len(student_RV),)](
        student_RV, teacher_RV, labels_R, out_RS, student_RV.stride(0), teacher_RV.stride(0), out_RS.stride(0), spec.num_true, spec.temperature,
        **_transforms(spec, "student", "teacher"), HAS_LABELS=labels_R is not None, TAU_ONE=spec.temperature == 1.0,
        CROSS_OF=spec.divergence if spec.divergence in ONE_PASS else None, **tuning.STATS)


def join_stats(stats_tRS: torch.Tensor, labels_R: torch.Tensor | None, spec: PairSpec, out_RJ: torch.Tensor) -> None:
    """See torch_twin.join_stats."""
    num_ranks, num_rows, _ = stats_tRS.shape
    join_stats_kernel[(triton.cdiv(num_rows, tuning.JOIN["BLOCK"]),)](
        stats_tRS, labels_R, out_RJ, num_rows, stats_tRS.stride(0), stats_tRS.stride(1), out_RJ.stride(0), num_ranks, spec.temperature,
        HAS_LABELS=labels_R is not None, DIVERGENCE=spec.divergence, **tuning.JOIN)


def row_values(student_RV: torch.Tensor, teacher_RV: torch.Tensor, joined_RJ: torch.Tensor, spec: PairSpec, out_R2: torch.Tensor) -> None:
    """See torch_twin.row_values."""
    _check(student_RV, teacher_RV)
    assert spec.divergence not in ONE_PASS
    row_values_kernel[(len(student_RV),)](
        student_RV, teacher_RV, joined_RJ, out_R2, student_RV.stride(0), teacher_RV.stride(0), joined_RJ.stride(0), out_R2.stride(0), spec.num_true,
        spec.temperature, spec.mix, **_transforms(spec, "student", "teacher"), DIVERGENCE=spec.divergence, **tuning.VALUES)


def row_grad(student_RV: torch.Tensor, teacher_RV: torch.Tensor, joined_RJ: torch.Tensor, weights_R: torch.Tensor, labels_R: torch.Tensor | None,
             spec: PairSpec) -> None:
    """See torch_twin.row_grad."""
    _check(student_RV, teacher_RV)
    num_rows, num_columns = student_RV.shape
    row_grad_kernel[(triton.cdiv(num_columns, tuning.GRAD["BLOCK"]), num_rows)](
        student_RV, teacher_RV, joined_RJ, weights_R, labels_R, student_RV.stride(0), teacher_RV.stride(0), joined_RJ.stride(0), num_columns,
        spec.num_true, spec.temperature, spec.mix, spec.kd_coef, spec.ce_coef, **_transforms(spec, "student", "teacher"),
        HAS_CE=labels_R is not None and spec.ce_coef != 0.0, TAU_ONE=spec.temperature == 1.0, DIVERGENCE=spec.divergence, **tuning.GRAD)


def tail_stats(student_RV: torch.Tensor, spec: PairSpec, out_R2: torch.Tensor) -> None:
    """See torch_twin.tail_stats."""
    _check(student_RV)
    tail_stats_kernel[(len(student_RV),)](
        student_RV, out_R2, student_RV.stride(0), out_R2.stride(0), spec.num_true, **_transforms(spec, "student"), **tuning.STATS)


def tail_grad(student_RV: torch.Tensor, lse_R: torch.Tensor, coef_R: torch.Tensor, spec: PairSpec) -> None:
    """See torch_twin.tail_grad."""
    scaled_tail_grad(student_RV, lse_R, coef_R, None, spec)


def scaled_tail_grad(student_RV: torch.Tensor, lse_R: torch.Tensor, coef_R: torch.Tensor, weights_R: torch.Tensor | None, spec: PairSpec) -> None:
    """tail_grad with coef_R * weights_R, 0 where the weight is 0; lse_R and coef_R may be columns of a matrix."""
    _check(student_RV)
    num_rows, num_columns = student_RV.shape
    tail_grad_kernel[(triton.cdiv(num_columns, tuning.GRAD["BLOCK"]), num_rows)](
        student_RV, lse_R, coef_R, weights_R, student_RV.stride(0), lse_R.stride(0), coef_R.stride(0), num_columns, spec.num_true,
        **_transforms(spec, "student"), **tuning.GRAD)
