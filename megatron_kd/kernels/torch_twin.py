"""The row kernels in plain torch: the CPU backend, and the meaning that the Triton kernels are tested against.

Every function works on one window of one vocabulary shard: no autograd, no collectives, no host sync. Called by the loss
through kernels/dispatch.py. Letters: R rows of the window, V columns of the shard (padding included), S statistics of a
shard, J joined statistics, t ranks of the tensor-parallel group.

Raw logits u (hidden @ head.T + bias) come in; z = transform(u) as HeadTransform says is computed on the fly. With
s = z_student / tau, t = z_teacher / tau, q = softmax(s), p = softmax(t), D = sum_v f(log p_v, log q_v):

* row_stats   reads both windows once (online softmax): maxima, sums, the cross sum of the KLs, the label's logit.
* join_stats  merges the shards' statistics (gathered by the loss) into log-sum-exps and, for the one-pass divergences, D and CE.
* row_values  second read for the other divergences: sum of f and of its slope phi_v = df/d(log q_v), additive over shards.
* row_grad    overwrites the student's raw logits with the gradient by them:
              w * [kd_coef * (phi_j - q_j * sum_v phi_v) + ce_coef * (softmax(z)_j - 1[j = label])] * dz_j/du_j.
* tail_stats, tail_grad  the same for top-K targets, whose K columns the loss has set to -inf.

Sums are formed in float32 (float64 for float64 inputs). Memory: a few temporaries of TWIN_BLOCK_ELEMENTS numbers (loss/sizes.py),
whatever the window's size: rows are worked on in blocks.
"""

import torch

from megatron_kd.kernels.spec import (CE, CROSS, KD, LABEL, LSE_CE, LSE_S, LSE_T, MAX_S, MAX_T, NO_LABEL, ONE_PASS, SLOPE, SUM_CE, SUM_S,
                                      SUM_T, TWIN_BLOCK_ELEMENTS, HeadTransform, PairSpec)

NEG_INF = float("-inf")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of statistics and losses: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def row_stats(student_RV: torch.Tensor, teacher_RV: torch.Tensor, labels_R: torch.Tensor | None, spec: PairSpec, out_RS: torch.Tensor) -> None:
    """Statistics of one shard into out_RS (columns MAX_S.. of spec.py).

    student_RV, teacher_RV: raw logits, unit column stride; the teacher's window may be wider or narrower than V, both have
    at least num_true columns. labels_R int32: column in this shard, ELSEWHERE or NO_LABEL; None: no row has a label.
    SUM_S = sum exp((z_s - MAX_S)/tau), SUM_CE the same at tau = 1, SUM_T for the teacher. CROSS = sum e_t * (t - s) for
    forward KL, sum e_s * (s - t) for reverse KL (e: the terms of the sums; a term with e = 0 is 0), else 0. LABEL = z_s[label]
    where this shard holds it, else 0. A shard without a true column writes maxima -inf and sums 0.
    """
    if spec.num_true == 0:
        out_RS.zero_()
        out_RS[:, [MAX_S, MAX_T]] = NEG_INF
        return
    for rows in _blocks(student_RV):
        _row_stats_block(student_RV[rows], teacher_RV[rows], None if labels_R is None else labels_R[rows], spec, out_RS[rows])


def _row_stats_block(u_s: torch.Tensor, u_t: torch.Tensor, labels: torch.Tensor | None, spec: PairSpec, out: torch.Tensor) -> None:
    tau = spec.temperature
    z_s, z_t = _logits(u_s, spec.student, spec.num_true), _logits(u_t, spec.teacher, spec.num_true)
    max_s, max_t = z_s.amax(1), z_t.amax(1)
    e_s, e_t = ((z_s - max_s[:, None]) / tau).exp_(), ((z_t - max_t[:, None]) / tau).exp_()
    out[:, MAX_S], out[:, SUM_S], out[:, MAX_T], out[:, SUM_T] = max_s, e_s.sum(1), max_t, e_t.sum(1)
    out[:, SUM_CE] = out[:, SUM_S] if tau == 1.0 else (z_s - max_s[:, None]).exp_().sum(1)
    out[:, CROSS] = _cross(z_s, z_t, e_s, e_t, spec)
    out[:, LABEL] = 0.0
    if labels is not None:
        out[:, LABEL] = torch.where(labels >= 0, z_s.gather(1, labels.clamp_min(0).long()[:, None])[:, 0], 0.0)


def join_stats(stats_tRS: torch.Tensor, labels_R: torch.Tensor | None, spec: PairSpec, out_RJ: torch.Tensor) -> None:
    """Merge the shards' statistics [t, R, S] into out_RJ (columns LSE_S.. of spec.py), the same on every rank.

    LSE_S and LSE_T are log-sum-exps of z / tau, LSE_CE of the student's z. KD is D for the one-pass divergences and SLOPE its
    slope sum (-1 for forward KL; D + 1 for reverse KL); both 0 otherwise, until row_values. CE is 0 for rows with NO_LABEL.
    A teacher row with NaN or infinity has a LSE_T that is not finite.
    """
    tau = spec.temperature
    max_s, max_t = stats_tRS[..., MAX_S].amax(0), stats_tRS[..., MAX_T].amax(0)
    shift_s, shift_t = stats_tRS[..., MAX_S] - max_s, stats_tRS[..., MAX_T] - max_t
    scale_s, scale_t = (shift_s / tau).exp(), (shift_t / tau).exp()
    sum_s, sum_t = (stats_tRS[..., SUM_S] * scale_s).sum(0), (stats_tRS[..., SUM_T] * scale_t).sum(0)
    lse_s, lse_t = max_s / tau + sum_s.log(), max_t / tau + sum_t.log()
    lse_ce = max_s + (stats_tRS[..., SUM_CE] * shift_s.exp()).sum(0).log()
    kd, slope = torch.zeros_like(lse_s), torch.zeros_like(lse_s)
    if spec.divergence == "forward_kl":
        kd = (stats_tRS[..., CROSS] * scale_t).sum(0) / sum_t - lse_t + lse_s
        slope = torch.full_like(kd, -1.0)
    elif spec.divergence == "reverse_kl":
        kd = (stats_tRS[..., CROSS] * scale_s).sum(0) / sum_s - lse_s + lse_t
        slope = kd + 1.0
    ce = torch.zeros_like(lse_s) if labels_R is None else torch.where(labels_R != NO_LABEL, lse_ce - stats_tRS[..., LABEL].sum(0), 0.0)
    for column, value in ((LSE_S, lse_s), (LSE_T, lse_t), (LSE_CE, lse_ce), (KD, kd), (SLOPE, slope), (CE, ce)):
        out_RJ[:, column] = value


def row_values(student_RV: torch.Tensor, teacher_RV: torch.Tensor, joined_RJ: torch.Tensor, spec: PairSpec, out_R2: torch.Tensor) -> None:
    """This shard's sum of f and of its slope phi into out_R2, for divergences outside ONE_PASS; additive over shards."""
    assert spec.divergence not in ONE_PASS
    for rows in _blocks(student_RV):
        value_slope = value_and_slope(*_log_probs(student_RV[rows], teacher_RV[rows], joined_RJ[rows], spec), spec)
        out_R2[rows, 0], out_R2[rows, 1] = (part.sum(1) for part in value_slope)
        del value_slope


def row_grad(student_RV: torch.Tensor, teacher_RV: torch.Tensor, joined_RJ: torch.Tensor, weights_R: torch.Tensor, labels_R: torch.Tensor | None,
             spec: PairSpec) -> None:
    """Overwrite student_RV with the gradient by the raw logits (module docstring), rounded to its dtype.

    joined_RJ holds LSE_S, LSE_T, LSE_CE and SLOPE. Padding columns and rows with weight 0 get exactly 0, whatever the logits
    hold (NaN included).
    """
    student_RV[:, spec.num_true:] = 0.0
    if spec.num_true == 0:
        return
    for rows in _blocks(student_RV):
        labels = None if labels_R is None else labels_R[rows, None]
        weights = weights_R[rows, None].to(joined_RJ.dtype)
        grad = _row_grad_block(student_RV[rows], teacher_RV[rows], joined_RJ[rows], weights, labels, spec)
        student_RV[rows, :spec.num_true] = grad.to(student_RV.dtype)
        del grad


def _row_grad_block(u_s: torch.Tensor, u_t: torch.Tensor, joined: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor | None,
                    spec: PairSpec) -> torch.Tensor:
    log_p, log_q = _log_probs(u_s, u_t, joined, spec)
    slope = log_p.exp_().neg_() if spec.divergence == "forward_kl" else value_and_slope(log_p, log_q, spec)[1]
    del log_p
    grad = slope.sub_(log_q.exp_().mul_(joined[:, SLOPE, None])).mul_(spec.kd_coef)
    del log_q
    z_s = _logits(u_s, spec.student, spec.num_true)
    if labels is not None and spec.ce_coef != 0.0:
        has_label = (labels != NO_LABEL).to(grad.dtype) * spec.ce_coef
        grad.add_((z_s - joined[:, LSE_CE, None]).exp_().mul_(has_label))
        grad.scatter_add_(1, labels.clamp_min(0).long(), (labels >= 0).to(grad.dtype) * -spec.ce_coef)
    grad.mul_(_slope_of_transform(z_s, spec.student)).mul_(weights)
    return grad.masked_fill_(weights == 0, 0.0)


def tail_stats(student_RV: torch.Tensor, spec: PairSpec, out_R2: torch.Tensor) -> None:
    """Max and sum exp(z - max) at tau = 1 over this shard's true columns whose raw logit is not -inf, into out_R2 ((-inf, 0) where none)."""
    out_R2[:, 0], out_R2[:, 1] = NEG_INF, 0.0
    for rows in _blocks(student_RV) if spec.num_true else ():
        z_s = _logits(student_RV[rows], spec.student, spec.num_true)
        top = z_s.amax(1)
        out_R2[rows, 0], out_R2[rows, 1] = top, torch.where(top == NEG_INF, 0.0, (z_s - top[:, None]).exp_().sum(1))


def tail_grad(student_RV: torch.Tensor, lse_R: torch.Tensor, coef_R: torch.Tensor, spec: PairSpec) -> None:
    """Overwrite student_RV with coef * exp(z - lse) * dz/du; 0 in padding, where the raw logit is -inf, and where coef is 0."""
    student_RV[:, spec.num_true:] = 0.0
    for rows in _blocks(student_RV) if spec.num_true else ():
        z_s = _logits(student_RV[rows], spec.student, spec.num_true)
        grad = (z_s - lse_R[rows, None]).exp_().mul_(coef_R[rows, None]).mul_(_slope_of_transform(z_s, spec.student))
        student_RV[rows, :spec.num_true] = torch.where((z_s == NEG_INF) | (coef_R[rows, None] == 0), 0.0, grad).to(student_RV.dtype)


def value_and_slope(log_p: torch.Tensor, log_q: torch.Tensor, spec: PairSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """f(log p, log q) and phi = df/d(log q), element-wise: the one place where a divergence is written for this backend.

    p teacher, q student, m the mixture. Terms with a factor 0 are 0, also where a logarithm is -inf.
    """
    p, q, mix = log_p.exp(), log_q.exp(), spec.mix
    if spec.divergence == "forward_kl":
        return _xlog(p, log_p - log_q), -p
    if spec.divergence == "reverse_kl":
        value = _xlog(q, log_q - log_p)
        return value, value + q
    if spec.divergence == "jsd":
        log_m = _log_mixture(p, q, mix)
        slope = (1.0 - mix) * _xlog(q, log_q - log_m)
        return mix * _xlog(p, log_p - log_m) + slope, slope
    if spec.divergence == "skew_forward_kl":
        log_m = _log_mixture(p, q, mix)
        return _xlog(p, log_p - log_m), -(1.0 - mix) * p * torch.where(q > 0, (log_q - log_m).exp(), 0.0)
    if spec.divergence == "skew_reverse_kl":
        log_m = _log_mixture(p, q, 1.0 - mix)
        value = _xlog(q, log_q - log_m)
        return value, value + q - mix * q * torch.where(q > 0, (log_q - log_m).exp(), 0.0)
    assert spec.divergence == "total_variation", spec.divergence
    return 0.5 * (p - q).abs(), 0.5 * torch.sign(q - p) * q


def _log_mixture(p: torch.Tensor, q: torch.Tensor, weight_p: float) -> torch.Tensor:
    return (weight_p * p + (1.0 - weight_p) * q).log_()


def _xlog(x: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, 0.0, x * log_ratio)


def _blocks(window_RV: torch.Tensor):
    step = max(1, TWIN_BLOCK_ELEMENTS // max(1, window_RV.shape[1]))
    return (slice(i, min(i + step, window_RV.shape[0])) for i in range(0, window_RV.shape[0], step))


def _logits(u_RV: torch.Tensor, transform: HeadTransform, num_true: int) -> torch.Tensor:
    """z in the accumulation dtype, always a fresh tensor; -inf stays -inf."""
    u = u_RV[:, :num_true].to(accumulate_dtype(u_RV.dtype), copy=True)
    z = u if transform.scale == 1.0 else u * transform.scale
    if transform.softcap is None:
        return z if transform.scale > 0 else torch.where(u == NEG_INF, NEG_INF, z)
    return torch.where(u == NEG_INF, NEG_INF, (z / transform.softcap).tanh_().mul_(transform.softcap))


def _slope_of_transform(z: torch.Tensor, transform: HeadTransform) -> torch.Tensor | float:
    """dz/du."""
    if transform.softcap is None:
        return transform.scale
    return transform.scale * (1.0 - (z / transform.softcap).square_())


def _cross(z_s: torch.Tensor, z_t: torch.Tensor, e_s: torch.Tensor, e_t: torch.Tensor, spec: PairSpec) -> torch.Tensor | float:
    if spec.divergence == "forward_kl":
        return _xlog(e_t, z_t - z_s).sum(1) / spec.temperature
    if spec.divergence == "reverse_kl":
        return _xlog(e_s, z_s - z_t).sum(1) / spec.temperature
    return 0.0


def _log_probs(student_RV: torch.Tensor, teacher_RV: torch.Tensor, joined_RJ: torch.Tensor, spec: PairSpec) -> tuple[torch.Tensor, torch.Tensor]:
    log_q = _logits(student_RV, spec.student, spec.num_true).div_(spec.temperature).sub_(joined_RJ[:, LSE_S, None])
    log_p = _logits(teacher_RV, spec.teacher, spec.num_true).div_(spec.temperature).sub_(joined_RJ[:, LSE_T, None])
    return log_p, log_q
