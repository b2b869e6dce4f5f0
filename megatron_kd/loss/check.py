"""Cases with known answers: the fused loss against the dense float64 reference, in the layout that the process runs in.

Called by the self-check, tests and the benchmark's correctness gate. A Case is built from a seed, equal on every rank; `expected`
is the dense answer, `plain` what ordinary torch in the same dtype makes of it (the yardstick for rounding), `actual` the fused
loss on this rank's shard, gathered back. Letters: N rows, V padded columns, H hidden width, K kept tokens.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.reduce import group_rank, group_size
from megatron_kd.loss.reference import ce_reference, kd_reference, student_log_probs, top_k_outcomes
from megatron_kd.loss.signals import HiddenTeacher, LogitsTeacher, Teacher, TopKTeacher
from megatron_kd.vocab import VocabSpec

UPSTREAM = 0.37
"""The gradient that reaches the summed loss: not 1, so that a lost factor shows."""
ROUNDING_FACTOR, WORST_FACTOR = 2.0, 5.0
"""Largest root-mean-square error and largest single error allowed, in units of what plain torch in the same dtype commits. The worst
of a few hundred roundings scatters, so it has more room; a wrong element is far outside it."""
FLOOR_EPS = 16.0
"""Errors below this many roundings of float32 (float64 for float64 cases) pass whatever plain torch commits."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem. Padded sizes differ between the sides, and padding columns hold large garbage."""

    name: str
    objective: Objective = field(default_factory=Objective)
    num_rows: int = 29
    true_size: int = 203
    student_padded: int = 240
    teacher_padded: int = 216
    hidden_s: int = 24
    hidden_t: int = 40
    dtype: torch.dtype = torch.float32
    signal: Literal["hidden", "logits", "top_k", "labels"] = "hidden"
    top_k: int = 12
    bias: bool = False
    student_transform: HeadTransform = HeadTransform()
    teacher_transform: HeadTransform = HeadTransform()
    weights: Literal["ones", "mixed", "quarter", "zero"] = "mixed"
    seed: int = 0


@dataclass(kw_only=True)
class Result:
    """Per-row values and gradients of UPSTREAM * sum(weights * loss), over the whole vocabulary and all rows."""

    loss_N: torch.Tensor
    kd_N: torch.Tensor
    ce_N: torch.Tensor
    dx_NH: torch.Tensor
    dw_VH: torch.Tensor
    dbias_V: torch.Tensor | None = None

    def parts(self) -> dict[str, torch.Tensor]:
        """Name to tensor, for comparisons."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """scale = <got, want> / <want, want>; errors relative to the root mean square and the largest of `want`."""

    scale: float
    cosine: float
    rms_error: float
    max_error: float
    passed: bool
    """Both errors within their limits (a NaN is not)."""


def build(case: Case, device: torch.device | str = "cpu") -> dict[str, torch.Tensor | None]:
    """The case's tensors, whole and equal on every rank."""
    gen = torch.Generator().manual_seed(1000 + case.seed)

    def normal(*shape, gain=1.0):
        return (torch.randn(*shape, generator=gen, dtype=torch.float64) * gain).to(case.dtype).to(device)

    tensors = {
        "x": normal(case.num_rows, case.hidden_s), "head": normal(case.student_padded, case.hidden_s, gain=0.5),
        "t": normal(case.num_rows, case.hidden_t), "t_head": normal(case.teacher_padded, case.hidden_t, gain=0.4),
        "bias": normal(case.student_padded) if case.bias else None, "t_bias": normal(case.teacher_padded) if case.bias else None,
        "labels": torch.randint(0, case.true_size, (case.num_rows,), generator=gen).to(device),
    }
    tensors["head"][case.true_size:] *= 20
    tensors["t_head"][case.true_size:] *= 20
    if case.num_rows > 2:
        tensors["labels"][1] = -100
    mixed = torch.rand(case.num_rows, generator=gen) + 0.1
    mixed[::5] = 0.0
    weights = {"ones": torch.ones(case.num_rows), "mixed": mixed, "quarter": torch.full((case.num_rows,), 0.25), "zero": torch.zeros(case.num_rows)}
    tensors["weights"] = weights[case.weights].to(device)
    return tensors


def teacher_log_probs(case: Case, tensors: dict, temperature: float) -> torch.Tensor:
    """float64 [N, true_size]."""
    return student_log_probs(tensors["t"], tensors["t_head"], true_size=case.true_size, bias_V=tensors["t_bias"], scale=case.teacher_transform.scale,
                             softcap=case.teacher_transform.softcap, temperature=temperature)


def top_k_targets(case: Case, tensors: dict) -> TopKTeacher:
    """The teacher's own top K of the case, with its exact tail."""
    log_p = teacher_log_probs(case, tensors, 1.0)
    kept = log_p.topk(case.top_k, 1)
    tail = (log_p.exp() * torch.ones_like(log_p).scatter(1, kept.indices, 0.0)).sum(1)
    dtype = torch.promote_types(case.dtype, torch.float32)
    return TopKTeacher(ids_NK=kept.indices, log_probs_NK=kept.values.to(dtype), tail_N=tail.to(dtype))


def expected(case: Case, tensors: dict) -> Result:
    """The dense answer in float64."""
    leaves = [None if tensors[name] is None else tensors[name].double().clone().requires_grad_() for name in ("x", "head", "bias")]
    x, head, bias = leaves
    options = dict(true_size=case.true_size, bias_V=bias, scale=case.student_transform.scale, softcap=case.student_transform.softcap)
    objective = case.objective
    log_q1 = student_log_probs(x, head, **options)
    log_q = student_log_probs(x, head, temperature=objective.temperature, **options)
    if case.signal == "top_k":
        top = top_k_targets(case, tensors)
        log_p, log_q = top_k_outcomes(log_q, top.ids_NK, top.log_probs_NK.double() / objective.temperature, top.tail_N, objective.top_k_mode)
    elif case.signal != "labels":
        log_p = teacher_log_probs(case, tensors, objective.temperature)
    kd = torch.zeros_like(log_q[:, 0]) if case.signal == "labels" else kd_reference(log_p, log_q, objective)
    ce = ce_reference(log_q1, tensors["labels"])
    loss = objective.kd_weight * kd + objective.ce_weight * ce
    (UPSTREAM * tensors["weights"].double() * loss).sum().backward()
    return Result(loss_N=loss.detach(), kd_N=kd.detach(), ce_N=ce.detach(), dx_NH=x.grad, dw_VH=head.grad, dbias_V=None if bias is None else bias.grad)


def plain(case: Case, tensors: dict, num_shards: int = 1) -> Result:
    """Ordinary dense torch in the case's dtype: logits in that dtype, losses in float32, dX summed over `num_shards` in the dtype."""
    dtype, acc = case.dtype, torch.promote_types(case.dtype, torch.float32)
    u = tensors["x"] @ tensors["head"].t()
    u = (u if tensors["bias"] is None else u + tensors["bias"]).requires_grad_()
    t = tensors["t"] @ tensors["t_head"].t()
    t = t if tensors["t_bias"] is None else t + tensors["t_bias"]
    log_q1, log_q, log_p = (_plain_log_probs(z, transform, case.true_size, tau, acc) for z, transform, tau in (
        (u, case.student_transform, 1.0), (u, case.student_transform, case.objective.temperature), (t, case.teacher_transform, case.objective.temperature)))
    if case.signal == "top_k":
        top = top_k_targets(case, tensors)
        log_p, log_q = top_k_outcomes(log_q, top.ids_NK, top.log_probs_NK / case.objective.temperature, top.tail_N, case.objective.top_k_mode)
    kd = torch.zeros_like(log_q[:, 0]) if case.signal == "labels" else kd_reference(log_p, log_q, case.objective)
    ce = ce_reference(log_q1, tensors["labels"])
    loss = case.objective.kd_weight * kd + case.objective.ce_weight * ce
    (UPSTREAM * tensors["weights"].to(acc) * loss).sum().backward()
    g = u.grad
    dx = sum((part @ head) for part, head in zip(g.chunk(num_shards, 1), tensors["head"].chunk(num_shards, 0), strict=True))
    return Result(loss_N=loss.detach(), kd_N=kd.detach(), ce_N=ce.detach(), dx_NH=dx, dw_VH=(g.t() @ tensors["x"]).to(dtype),
                  dbias_V=None if tensors["bias"] is None else g.sum(0))


def _plain_log_probs(u, transform: HeadTransform, true_size: int, temperature: float, acc: torch.dtype):
    z = u.to(acc) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return torch.log_softmax(z[:, :true_size] / temperature, 1)


def shard_of_teacher(tensor: torch.Tensor | None, vocab: VocabSpec, rank: int) -> torch.Tensor | None:
    """Rows of the teacher's head (or bias) for this rank's token ids, filled up to the shard's size with large garbage."""
    if tensor is None:
        return None
    start, end = vocab.teacher_rows(rank)
    out = tensor.new_full((vocab.shard_size, *tensor.shape[1:]), 3.0)
    out[:end - start] = tensor[start:end]
    return out


def teacher_for(case: Case, tensors: dict, vocab: VocabSpec, rank: int) -> Teacher | None:
    """The case's teacher signal on one rank."""
    if case.signal == "labels":
        return None
    if case.signal == "top_k":
        return top_k_targets(case, tensors)
    head, bias = shard_of_teacher(tensors["t_head"], vocab, rank), shard_of_teacher(tensors["t_bias"], vocab, rank)
    if case.signal == "hidden":
        return HiddenTeacher(rows_NH=tensors["t"], head_VH=head, bias_V=bias, transform=case.teacher_transform)
    logits = tensors["t"] @ head.t()
    return LogitsTeacher(logits_NV=logits if bias is None else logits + bias, transform=case.teacher_transform)


def actual(case: Case, tensors: dict, *, group: dist.ProcessGroup | None = None, rows_per_rank: tuple[int, ...] | None = None,
           own_teacher_rows: bool = False, window_rows: int = 8, group_windows: int = 2, **options) -> Result:
    """The fused loss on this rank's shard, gradients gathered to the whole. rows_per_rank switches sequence parallelism on, own_teacher_rows
    leaves each rank with its own rows of a hidden teacher too."""
    tp, rank = group_size(group), group_rank(group)
    vocab = VocabSpec(true_size=case.true_size, student_padded=case.student_padded, teacher_padded=case.teacher_padded, tp=tp)
    shard = slice(*vocab.shard_range(rank))
    own = slice(0, case.num_rows) if rows_per_rank is None else slice(sum(rows_per_rank[:rank]), sum(rows_per_rank[:rank + 1]))
    x, head = tensors["x"][own].clone().requires_grad_(), tensors["head"][shard].clone().requires_grad_()
    bias = None if tensors["bias"] is None else tensors["bias"][shard].clone().requires_grad_()
    teacher = teacher_for(case, tensors, vocab, rank)
    if own_teacher_rows:
        teacher = replace(teacher, rows_NH=teacher.rows_NH[own].clone(), own_rows=True)
    out = fused_linear_kd(x, head, teacher, vocab=vocab, objective=case.objective, labels_N=tensors["labels"],
                          weights_N=tensors["weights"], tp_group=group, rows_per_rank=rows_per_rank, head_bias_V=bias,
                          student_transform=case.student_transform, window_rows=window_rows, group_windows=group_windows, **options)
    (UPSTREAM * tensors["weights"].to(out.loss_N.dtype) * out.loss_N).sum().backward()
    out.flags.check()
    dx = x.grad if rows_per_rank is None else _gather(x.grad, group, max(rows_per_rank), rows_per_rank)
    sizes = (vocab.shard_size,) * tp
    return Result(loss_N=out.loss_N.detach(), kd_N=out.kd_N, ce_N=out.ce_N, dx_NH=dx, dw_VH=_gather(head.grad, group, vocab.shard_size, sizes),
                  dbias_V=None if bias is None else _gather(bias.grad, group, vocab.shard_size, sizes))


def _gather(local: torch.Tensor, group: dist.ProcessGroup | None, max_rows: int, rows: tuple[int, ...]) -> torch.Tensor:
    if len(rows) == 1:
        return local
    padded = local.new_zeros(max_rows, *local.shape[1:])
    padded[:local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def compare(got: torch.Tensor, want: torch.Tensor, yardstick: torch.Tensor, dtype: torch.dtype) -> Comparison:
    """got against want (float64); the limits are multiples of the yardstick's own errors, and at least FLOOR_EPS roundings."""
    got, own = got.double(), yardstick.double()
    size = want.abs().max().item() if want.numel() else 0.0
    if size == 0.0:
        worst = got.abs().max().item() if got.numel() else 0.0
        return Comparison(scale=1.0, cosine=1.0, rms_error=worst, max_error=worst, passed=worst == 0.0)
    norm, dot = want.norm(), (got * want).sum()
    floor = FLOOR_EPS * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    rms, worst = ((got - want).norm() / norm).item(), (got - want).abs().max().item() / size
    rms_limit = max(ROUNDING_FACTOR * ((own - want).norm() / norm).item(), floor)
    worst_limit = max(WORST_FACTOR * (own - want).abs().max().item() / size, floor)
    return Comparison(scale=(dot / norm**2).item(), cosine=(dot / (norm * got.norm().clamp_min(1e-300))).item(), rms_error=rms, max_error=worst,
                      passed=rms <= rms_limit and worst <= worst_limit)


def compare_all(got: Result, want: Result, yardstick: Result, dtype: torch.dtype) -> dict[str, Comparison]:
    """Every part by name."""
    marks, wants = yardstick.parts(), want.parts()
    return {name: compare(part, wants[name], marks[name], dtype) for name, part in got.parts().items()}
