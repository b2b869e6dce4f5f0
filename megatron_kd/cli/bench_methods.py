"""The KD loss as others compute it: comparison methods for `megatron-kd bench loss`.

Each method is a function of a Case that returns the scalar loss, with autograd to the case's student rows and student head.
dense, forward_chunked, checkpointed (each online and top-K) and published (top-K) are of our own writing, after the published descriptions;
the peers are called through their public API and only where they import. Called by cli/bench.py. None of them knows tensor parallelism.

Shape letters: N rows, V vocabulary, H hidden width, K kept tokens, C rows of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_kd.loss.objective import Objective
from megatron_kd.loss.reference import kd_reference

CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs of one measurement, all on one device."""

    student_NH: torch.Tensor
    """Leaf with gradient, bf16 or fp32."""
    head_VH: torch.Tensor
    """Student head, leaf with gradient, same dtype."""
    teacher_NH: torch.Tensor
    """Teacher rows, [N, H_t]."""
    teacher_head_VH: torch.Tensor
    """[V, H_t]."""
    labels_N: torch.Tensor
    """int64 next tokens, for the cross-entropy term."""
    ids_NK: torch.Tensor
    """int64 kept token ids of the teacher, distinct in a row."""
    log_probs_NK: torch.Tensor
    """fp32 log-probabilities of the kept tokens, the full vocabulary's."""
    tail_N: torch.Tensor
    """fp32 mass outside the kept tokens."""
    kd_weight: float = 1.0
    """Factor of the divergence."""
    ce_weight: float = 1.0
    """Factor of the cross-entropy with labels; 0 for the methods that have none."""
    tail_bucket: bool = True
    """Top-K: one more bucket for the mass outside the kept tokens; False: the kept tokens alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of the benchmark's table."""

    name: str
    """As shown and as asked for by --methods."""
    loss: Callable[[Case], torch.Tensor]
    """Scalar loss: the mean over rows."""
    target: Literal["online", "top_k", "evaluation"] = "online"
    """online: teacher rows and head; top_k: kept tokens; evaluation: online without gradient."""
    has_ce: bool = True
    """False: the method has no cross-entropy term, and runs with ce_weight 0."""
    tail_bucket: bool = True
    """False: the method's top-K loss has no tail bucket."""
    kind: str = "forward_kl"
    """Divergence that it computes."""
    ours: bool = False
    """The loss of this package; failing the gate ends the benchmark."""
    alone: bool = False
    """Ours under torchrun, each process by itself."""
    peer: bool = False
    """A package of others; held to the wide gate, shown with its error."""
    note: str = ""
    """One line for the table."""
    needs: tuple[str, ...] = ()
    """Modules that must import."""


def _log_softmax(logits_CV: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float(), -1)


def rows_forward_kl(case: Case, logits_CV: torch.Tensor, teacher_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    """Sum over the chunk of kd_weight * KL(teacher || student) + ce_weight * CE, fp32 from logits of any dtype."""
    log_q_CV, log_p_CV = _log_softmax(logits_CV), _log_softmax(teacher_CV)
    loss = case.kd_weight * F.kl_div(log_q_CV, log_p_CV, reduction="sum", log_target=True)
    return loss + case.ce_weight * F.nll_loss(log_q_CV, labels_C, reduction="sum") if case.ce_weight else loss


def rows_top_k(case: Case, logits_CV: torch.Tensor, rows: slice) -> torch.Tensor:
    """Sum over the chunk of the top-K KL and CE; the student's tail mass is summed over the columns outside K."""
    ids_CK, log_p_CK, tail_C = case.ids_NK[rows], case.log_probs_NK[rows], case.tail_N[rows]
    log_q_CV = _log_softmax(logits_CV)
    loss = case.kd_weight * (log_p_CK.exp() * (log_p_CK - log_q_CV.gather(1, ids_CK))).sum()
    if case.tail_bucket:
        log_tail_q_C = log_q_CV.scatter(1, ids_CK, float("-inf")).logsumexp(-1)
        loss = loss + case.kd_weight * (tail_C * (tail_C.log() - log_tail_q_C)).sum()
    return loss + case.ce_weight * F.nll_loss(log_q_CV, case.labels_N[rows], reduction="sum") if case.ce_weight else loss


def dense_divergence(case: Case, divergence: str) -> torch.Tensor:
    """The gate's reference (on a float64 case) and yardstick (on the case itself): any divergence on dense logits."""
    with torch.no_grad():
        log_p_NV = _log_softmax(case.teacher_NH @ case.teacher_head_VH.t())
    log_q_NV = _log_softmax(case.student_NH @ case.head_VH.t())
    kd = kd_reference(log_p_NV, log_q_NV, Objective(divergence=divergence)).mean()
    return case.kd_weight * kd + case.ce_weight * F.nll_loss(log_q_NV, case.labels_N)


def chunks(num_rows: int) -> list[slice]:
    """Row slices of CHUNK_ROWS."""
    return [slice(i, min(i + CHUNK_ROWS, num_rows)) for i in range(0, num_rows, CHUNK_ROWS)]


def dense(case: Case) -> torch.Tensor:
    """Both logit matrices at once, and fp32 softmaxes over them."""
    with torch.no_grad():
        teacher_NV = case.teacher_NH @ case.teacher_head_VH.t()
    return rows_forward_kl(case, case.student_NH @ case.head_VH.t(), teacher_NV, case.labels_N) / case.labels_N.numel()


def forward_chunked(case: Case) -> torch.Tensor:
    """Both logit matrices at once, the softmaxes chunk by chunk and recomputed in backward."""
    with torch.no_grad():
        teacher_NV = case.teacher_NH @ case.teacher_head_VH.t()
    logits_NV = case.student_NH @ case.head_VH.t()
    parts = [checkpoint(rows_forward_kl, case, logits_NV[c], teacher_NV[c], case.labels_N[c], use_reentrant=False) for c in chunks(len(logits_NV))]
    return torch.stack(parts).sum() / case.labels_N.numel()


def _project_forward_kl(case: Case, head_VH: torch.Tensor, student_CH: torch.Tensor, rows: slice) -> torch.Tensor:
    with torch.no_grad():
        teacher_CV = case.teacher_NH[rows] @ case.teacher_head_VH.t()
    return rows_forward_kl(case, student_CH @ head_VH.t(), teacher_CV, case.labels_N[rows])


def checkpointed(case: Case) -> torch.Tensor:
    """Projection and softmaxes chunk by chunk under torch.utils.checkpoint: one recomputed projection of each model."""
    parts = [checkpoint(_project_forward_kl, case, case.head_VH, case.student_NH[c], c, use_reentrant=False) for c in chunks(len(case.student_NH))]
    return torch.stack(parts).sum() / case.labels_N.numel()


def dense_top_k(case: Case) -> torch.Tensor:
    """The student's logit matrix at once, fp32 softmax, kept tokens gathered."""
    return rows_top_k(case, case.student_NH @ case.head_VH.t(), slice(None)) / case.labels_N.numel()


def forward_chunked_top_k(case: Case) -> torch.Tensor:
    """The student's logit matrix at once, the softmax chunk by chunk and recomputed in backward."""
    logits_NV = case.student_NH @ case.head_VH.t()
    parts = [checkpoint(rows_top_k, case, logits_NV[c], c, use_reentrant=False) for c in chunks(len(logits_NV))]
    return torch.stack(parts).sum() / case.labels_N.numel()


def _project_top_k(case: Case, head_VH: torch.Tensor, student_CH: torch.Tensor, rows: slice) -> torch.Tensor:
    return rows_top_k(case, student_CH @ head_VH.t(), rows)


def checkpointed_top_k(case: Case) -> torch.Tensor:
    """Projection and softmax chunk by chunk under torch.utils.checkpoint."""
    parts = [checkpoint(_project_top_k, case, case.head_VH, case.student_NH[c], c, use_reentrant=False) for c in chunks(len(case.student_NH))]
    return torch.stack(parts).sum() / case.labels_N.numel()


class PublishedFunction(torch.autograd.Function):
    """The published fused scheme: chunks projected once for the normaliser, once for the loss, and once more in backward.

    Offline, on the kept tokens' mass M without a tail bucket: loss = sum p log p - sum p z + M log Z, gradient M q - p.
    """

    @staticmethod
    def forward(ctx, student_NH, head_VH, case):
        lse_N = torch.empty(len(student_NH), device=student_NH.device)
        for c in chunks(len(student_NH)):
            lse_N[c] = (student_NH[c] @ head_VH.t()).float().logsumexp(-1)
        loss = torch.zeros((), device=student_NH.device)
        for c in chunks(len(student_NH)):
            logits_CV = (student_NH[c] @ head_VH.t()).float()
            p_CK, log_p_CK = case.log_probs_NK[c].exp(), case.log_probs_NK[c]
            loss += case.kd_weight * ((p_CK * (log_p_CK - logits_CV.gather(1, case.ids_NK[c]))).sum() + (p_CK.sum(-1) * lse_N[c]).sum())
            if case.ce_weight:
                loss += case.ce_weight * (lse_N[c] - logits_CV.gather(1, case.labels_N[c, None])[:, 0]).sum()
        ctx.save_for_backward(student_NH, head_VH, lse_N)
        ctx.case = case
        return loss / len(student_NH)

    @staticmethod
    def backward(ctx, grad):
        student_NH, head_VH, lse_N = ctx.saved_tensors
        case, scale = ctx.case, grad / len(student_NH)
        dx_NH, dw_VH = torch.empty_like(student_NH), torch.zeros(head_VH.shape, device=head_VH.device)
        for c in chunks(len(student_NH)):
            p_CK = case.log_probs_NK[c].exp() * case.kd_weight
            g_CV = ((student_NH[c] @ head_VH.t()).float() - lse_N[c, None]).exp_().mul_(p_CK.sum(-1, keepdim=True) + case.ce_weight)
            g_CV.scatter_add_(1, case.ids_NK[c], -p_CK)
            if case.ce_weight:
                g_CV.scatter_add_(1, case.labels_N[c, None], torch.full_like(lse_N[c, None], -case.ce_weight))
            g_CV = g_CV.mul_(scale).to(head_VH.dtype)
            dx_NH[c] = g_CV @ head_VH
            dw_VH += g_CV.t() @ student_NH[c]
        return dx_NH, dw_VH.to(head_VH.dtype), None


def published_top_k(case: Case) -> torch.Tensor:
    """Two student projections in forward, one in backward."""
    return PublishedFunction.apply(case.student_NH, case.head_VH, case)


def liger_fused(case: Case) -> torch.Tensor:
    """liger-kernel's fused linear JSD at beta 0 (forward KL)."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.0)(case.student_NH, case.head_VH, case.teacher_NH, case.teacher_head_VH, None)


def liger_chunked(case: Case) -> torch.Tensor:
    """liger-kernel's chunked, compiled JSD loss at beta 0."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=True, chunk_size=CHUNK_ROWS)
    return loss(case.student_NH, case.head_VH, case.teacher_NH, case.teacher_head_VH, case.labels_N)


def modelopt_logits_kl(case: Case) -> torch.Tensor:
    """ModelOpt's LogitsKLLoss over both dense logit matrices."""
    from types import SimpleNamespace

    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

    loss = LogitsKLLoss(SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False))
    with torch.no_grad():
        teacher_NV = case.teacher_NH @ case.teacher_head_VH.t()
    per_row = loss((case.student_NH @ case.head_VH.t())[:, None], teacher_NV[:, None])
    return (per_row[0] if isinstance(per_row, tuple) else per_row).mean()


METHODS = [
    Method(name="dense", loss=dense, note="both logit matrices"),
    Method(name="forward-chunked", loss=forward_chunked, note="logits dense, loss in chunks"),
    Method(name="checkpointed", loss=checkpointed, note="chunks recomputed in backward"),
    Method(name="dense top-k", loss=dense_top_k, target="top_k"),
    Method(name="forward-chunked top-k", loss=forward_chunked_top_k, target="top_k"),
    Method(name="checkpointed top-k", loss=checkpointed_top_k, target="top_k"),
    Method(name="published top-k", loss=published_top_k, target="top_k", tail_bucket=False,
           note="two student projections forward, one backward; no tail"),
    Method(name="liger fused JSD", loss=liger_fused, has_ce=False, peer=True, note="no CE", needs=("liger_kernel",)),
    Method(name="liger chunked JSD", loss=liger_chunked, has_ce=False, peer=True, note="no CE", needs=("liger_kernel",)),
    Method(name="modelopt LogitsKL", loss=modelopt_logits_kl, has_ce=False, peer=True, note="no CE",
           needs=("modelopt.torch.distill.plugins.megatron",)),
]
