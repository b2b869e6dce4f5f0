"""The dense loss in float64 with plain autograd: what the fused loss must equal. Shares no helper with it.

Called by tests, the self-check and the benchmark's correctness gate; needs [N, vocabulary] matrices, so small sizes only.
Letters: N rows, V all padded columns of the student, W those of the teacher, H hidden widths, K kept tokens.
"""

import torch


def student_log_probs(hidden_NH, head_VH, *, true_size: int, bias_V=None, scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0):
    """float64 log softmax(z / temperature) over the first true_size columns, z = softcap tanh(scale (x head.T + bias) / softcap)."""
    u = hidden_NH.double() @ head_VH.double().t()
    if bias_V is not None:
        u = u + bias_V.double()
    z = scale * u
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return torch.log_softmax(z[:, :true_size] / temperature, dim=1)


def divergence_reference(log_p, log_q, name: str, *, beta: float = 0.5, skew: float = 0.1):
    """D(p, q) by row from full log-probabilities: p teacher, q student."""
    p, q = log_p.exp(), log_q.exp()

    def kl(a, b):
        return torch.where(a > 0, a * (a.log() - b.log()), torch.zeros_like(a)).sum(1)

    if name == "forward_kl" or (name == "jsd" and beta == 0) or (name == "skew_forward_kl" and skew == 0):
        return (p * (log_p - log_q)).sum(1)
    if name == "reverse_kl" or (name == "jsd" and beta == 1) or (name == "skew_reverse_kl" and skew == 0):
        return (q * (log_q - log_p)).sum(1)
    if name == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    if name == "skew_forward_kl":
        return kl(p, skew * p + (1 - skew) * q)
    if name == "skew_reverse_kl":
        return kl(q, skew * q + (1 - skew) * p)
    assert name == "total_variation", name
    return 0.5 * (p - q).abs().sum(1)


def top_k_outcomes(log_q_NV, ids_NK, log_probs_NK, tail_N, mode: str):
    """(log_p, log_q) on the outcomes that `mode` compares: K + 1, K renormalised, or the K as they are."""
    log_p, log_q = log_probs_NK.to(log_q_NV.dtype), log_q_NV.gather(1, ids_NK)
    if mode == "renormalise":
        return log_p - log_p.logsumexp(1, keepdim=True), log_q - log_q.logsumexp(1, keepdim=True)
    if mode == "none":
        return log_p, log_q
    outside = torch.ones_like(log_q_NV, dtype=torch.bool).scatter(1, ids_NK, False)
    tail_q = (log_q_NV.exp() * outside).sum(1, keepdim=True)
    return torch.cat([log_p, tail_N.to(log_q.dtype)[:, None].log()], 1), torch.cat([log_q, tail_q.log()], 1)


def kd_reference(log_p, log_q, objective):
    """KD by row, temperature factor included. log_p, log_q: full log-probabilities at the objective's temperature."""
    value = divergence_reference(log_p, log_q, objective.divergence, beta=objective.beta, skew=objective.skew)
    return value * (objective.temperature**2 if objective.temperature_scaling == "hinton" else 1.0)


def ce_reference(log_q1_NV, labels_N):
    """Cross-entropy by row at temperature 1; 0 where the label is -100."""
    picked = log_q1_NV.gather(1, labels_N.clamp_min(0)[:, None])[:, 0]
    return torch.where(labels_N == -100, torch.zeros_like(picked), -picked)
