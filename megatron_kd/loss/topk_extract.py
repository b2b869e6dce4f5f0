"""Kept tokens of a teacher: exact top-K, or K importance draws, from hidden rows and a vocabulary-sharded head, window by window.

The teacher's [tokens, vocabulary] matrix never exists: a window's logits are reduced to candidates before the next window is projected.
Called by teacher/dump.py and by the cached source when it builds. Forward only; no Megatron.

Top-K: every shard sends its own K best with their logits, its log-sum-exp statistics and its mass outside those K in one all-gather; the
joint K best are among the candidates, and the tail is the sum of what no shard sent and of the candidates that lost: never 1 - sum.
Draws (Sparse Logit Sampling, arXiv 2503.16870): D draws with replacement from the teacher's own distribution; weight count / D. The
expected weight of each token is its probability, so the expected gradient is that of the full distribution.
Letters: N rows, R rows of a window, V columns of the shard, H width, K kept tokens, D draws, t shards.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_kd.errors import VocabMismatch, rule
from megatron_kd.kernels.spec import HeadTransform

NEG_INF = float("-inf")
NO_WEIGHT = -10_000.0
"""Log-weight of a slot that fewer distinct draws left empty: exp() of it is exactly 0 in fp32, and it is finite."""


class HeadShard(NamedTuple):
    """The teacher's head on this rank."""

    weight_VH: torch.Tensor
    """[V, H]; rows from `num_true` on are padding."""
    start: int
    """Token id of row 0."""
    num_true: int
    """Real rows; may be 0."""
    bias_V: torch.Tensor | None = None
    """[V] or None."""
    transform: HeadTransform = HeadTransform()
    """Logit scale and soft-cap."""


class KeptTokens(NamedTuple):
    """Equal on every shard."""

    ids_NK: torch.Tensor
    """int64."""
    log_probs_NK: torch.Tensor
    """float32, descending (top-K), or log-weights (draws)."""
    tail_N: torch.Tensor
    """float32 mass outside; 0 for draws."""


def topk_extract(rows_NH: torch.Tensor, head: HeadShard, *, k: int, group: dist.ProcessGroup | None = None,
                 window_rows: int = 512) -> KeptTokens:
    """The K largest log-probabilities of every row over the whole vocabulary, and the exact mass outside.

    Among logits equal to the K-th, the lower id of those that the shards sent is kept. Cost: one projection (2 V H FLOP a row) and one
    all-gather of 8 K + 12 bytes a row and shard. Memory: two [window_rows, V] fp32 matrices. Errors: VocabMismatch where K exceeds the vocabulary.
    """
    _check_k(k, head, group)
    parts = [_topk_window(_logits(rows_NH[i:i + window_rows], head), head, k, group) for i in range(0, len(rows_NH), window_rows)]
    return _concat(parts, k, rows_NH.device)


def draw_extract(rows_NH: torch.Tensor, head: HeadShard, uniforms_ND: torch.Tensor, *, group: dist.ProcessGroup | None = None,
                 window_rows: int = 128) -> KeptTokens:
    """D draws of every row by inverse transform of `uniforms_ND` (float64 in [0, 1), equal on every shard), as distinct ids with log(count / D).

    Slots that repeated draws leave empty hold other ids with weight 0. Deterministic in the uniforms. Memory: about 20 bytes x window_rows x V.
    Errors: VocabMismatch where D exceeds the vocabulary.
    """
    _check_k(uniforms_ND.shape[1], head, group)
    vocab_size = _total(head.num_true, group, rows_NH.device)
    parts = []
    for i in range(0, len(rows_NH), window_rows):
        draws_RD = _draw_window(_logits(rows_NH[i:i + window_rows], head), head, uniforms_ND[i:i + window_rows].to(rows_NH.device), group)
        parts.append(_distinct(draws_RD, vocab_size))
    return _concat(parts, uniforms_ND.shape[1], rows_NH.device)


def _logits(rows_RH: torch.Tensor, head: HeadShard) -> torch.Tensor:
    """fp32 [R, num_true] final logits."""
    weight_VH = head.weight_VH[:head.num_true]
    if rows_RH.is_cuda and rows_RH.dtype != torch.float32:
        logits = torch.mm(rows_RH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(rows_RH, weight_VH.t()).float()
    if head.bias_V is not None:
        logits += head.bias_V[:head.num_true]
    if head.transform.scale != 1.0:
        logits *= head.transform.scale
    if head.transform.softcap is not None:
        logits = logits.div_(head.transform.softcap).tanh_().mul_(head.transform.softcap)
    return logits


def _topk_window(logits_RV: torch.Tensor, head: HeadShard, k: int, group: dist.ProcessGroup | None) -> KeptTokens:
    num_rows, local_k = len(logits_RV), min(k, head.num_true)
    sent = torch.empty(num_rows, 2 * k + 3, dtype=torch.int32, device=logits_RV.device)
    values, ids, scalars = sent[:, :k].view(torch.float32), sent[:, k:2 * k], sent[:, 2 * k:].view(torch.float32)
    values.fill_(NEG_INF)
    ids.fill_(-1)
    scalars[:, 0], scalars[:, 1:] = NEG_INF, 0.0
    if local_k:
        best, columns = logits_RV.topk(local_k, dim=1)
        values[:, :local_k] = best
        ids[:, :local_k] = _as_int32(columns + head.start)
        peak = best[:, :1]
        rest = logits_RV.scatter_(1, columns, NEG_INF).sub_(peak).exp_().sum(1)
        scalars[:, 0], scalars[:, 1], scalars[:, 2] = peak[:, 0], rest + (best - peak).exp().sum(1), rest
    return _merge(_all_gather(sent, group), k)


def _merge(sent_tRC: torch.Tensor, k: int) -> KeptTokens:
    """Joint top-K of all shards' candidates."""
    values = sent_tRC[..., :k].view(torch.float32).transpose(0, 1).flatten(1)
    ids = _as_int64(sent_tRC[..., k:2 * k]).transpose(0, 1).flatten(1)
    peak_tR, mass_tR, rest_tR = sent_tRC[..., 2 * k:].view(torch.float32).unbind(-1)
    top_R = peak_tR.amax(0)
    scale_tR = torch.where(peak_tR == NEG_INF, 0.0, (peak_tR - top_R).exp())
    log_norm_R = (mass_tR * scale_tR).sum(0).log()
    by_id = ids.argsort(dim=1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    order = values.argsort(dim=1, descending=True, stable=True)
    kept, lost = order[:, :k], order[:, k:]
    tail_R = (rest_tR * scale_tR).sum(0) + (values.gather(1, lost) - top_R[:, None]).exp().sum(1)
    log_probs = values.gather(1, kept) - top_R[:, None] - log_norm_R[:, None]
    return KeptTokens(ids.gather(1, kept), log_probs, tail_R * (-log_norm_R).exp())


def _draw_window(logits_RV: torch.Tensor, head: HeadShard, uniforms_RD: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """int64 [R, D] token ids by inverse transform over the shards in rank order."""
    num_rows = len(logits_RV)
    peak_R = logits_RV.amax(1) if head.num_true else logits_RV.new_full((num_rows,), NEG_INF)
    peaks_tR = _all_gather(peak_R[:, None].contiguous(), group)[..., 0]
    sums_RV = logits_RV.sub_(peaks_tR.amax(0)[:, None]).exp_().double().cumsum_(1)
    mass_R = sums_RV[:, -1] if head.num_true else sums_RV.new_zeros(num_rows)
    ends_tR = _all_gather(mass_R[:, None].contiguous(), group)[..., 0].cumsum(0)
    targets_RD = uniforms_RD * ends_tR[-1][:, None]
    owner_RD = (targets_RD[None] >= ends_tR[:-1, :, None]).sum(0)
    rank = 0 if group is None else dist.get_rank(group)
    before_R = ends_tR[rank - 1] if rank else torch.zeros_like(mass_R)
    ids_RD = torch.zeros_like(targets_RD, dtype=torch.int64)
    if head.num_true:
        found = torch.searchsorted(sums_RV, (targets_RD - before_R[:, None]).contiguous(), right=True).clamp_(max=head.num_true - 1)
        ids_RD = torch.where(owner_RD == rank, found + head.start, 0)
    if group is not None:
        dist.all_reduce(ids_RD, group=group)
    return ids_RD


def _distinct(draws_RD: torch.Tensor, vocab_size: int) -> KeptTokens:
    """Distinct ids with log(count / D), first; then unused ids with weight 0."""
    num_rows, num_draws = draws_RD.shape
    draws_RD = draws_RD.sort(dim=1).values
    first = torch.ones_like(draws_RD, dtype=torch.bool)
    first[:, 1:] = draws_RD[:, 1:] != draws_RD[:, :-1]
    slot = first.long().cumsum(1) - 1
    counts = torch.zeros(num_rows, num_draws, device=draws_RD.device).scatter_add_(1, slot, torch.ones_like(slot, dtype=torch.float32))
    pool = min(2 * num_draws, vocab_size)
    taken = torch.zeros(num_rows, pool + 1, dtype=torch.uint8, device=draws_RD.device).scatter_(1, draws_RD.clamp(max=pool), 1)
    unused = taken[:, :pool].argsort(dim=1, stable=True)[:, :num_draws]
    empty = counts == 0
    ids = torch.zeros_like(draws_RD).scatter_(1, slot, draws_RD)
    nth_empty = (empty.long().cumsum(1) - 1).clamp_(min=0)
    ids = torch.where(empty, unused.gather(1, nth_empty), ids)
    weights = torch.where(empty, NO_WEIGHT, (counts / num_draws).clamp_(min=1e-30).log())
    return KeptTokens(ids, weights, torch.zeros(num_rows, device=draws_RD.device))


def _all_gather(sent: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[t, R, ...] of every shard's [R, ...]."""
    if group is None:
        return sent[None]
    size = dist.get_world_size(group)
    gathered = sent.new_empty(size * len(sent), sent.shape[1])
    dist.all_gather_into_tensor(gathered, sent, group=group)
    return gathered.view(size, *sent.shape)


def _total(value: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def _check_k(k: int, head: HeadShard, group: dist.ProcessGroup | None) -> None:
    total = _total(head.num_true, group, head.weight_VH.device)
    if not 1 <= k <= total:
        raise VocabMismatch(rule("k", k, f"must be at least 1 and at most the vocabulary, {total}", "Lower cache.k"))


def _as_int32(ids: torch.Tensor) -> torch.Tensor:
    """int64 below 2^32 as the int32 with the same bits."""
    return torch.where(ids >= 2**31, ids - 2**32, ids).to(torch.int32)


def _as_int64(ids: torch.Tensor) -> torch.Tensor:
    """Inverse of _as_int32."""
    return ids.long() & 0xFFFFFFFF


def _concat(parts: list[KeptTokens], k: int, device: torch.device) -> KeptTokens:
    if not parts:
        empty = torch.empty(0, k, device=device)
        return KeptTokens(empty.long(), empty, torch.empty(0, device=device))
    return KeptTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
