"""Inputs for the tests of the row kernels, and the comparison of a backend with the torch twin. Used by tests/unit and tests/gpu."""

import torch

from megatron_kd.kernels import topk_twin, torch_twin
from megatron_kd.kernels.spec import ELSEWHERE, NO_LABEL, NUM_JOINED, NUM_STATS, ONE_PASS, HeadTransform, PairSpec

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
PLAIN = HeadTransform()


def make_spec(divergence: str, num_true: int, *, temperature=1.0, student=PLAIN, teacher=PLAIN, ce_coef=0.7) -> PairSpec:
    """A spec with factors that are neither 0 nor 1."""
    return PairSpec(divergence=divergence, mix=0.3, temperature=temperature, kd_coef=0.9, ce_coef=ce_coef, num_true=num_true,
                    student=student, teacher=teacher)


def make_window(num_rows: int, num_columns: int, num_true: int, *, dtype, device="cpu", seed=0, teacher_columns=None):
    """Raw logits whose padding is NaN, cut out of wider buffers; labels of every kind; weights with a 0 and a fraction."""
    generator = torch.Generator().manual_seed(seed)

    def logits(columns):
        wide = torch.full((num_rows, columns + 16), float("nan"), dtype=dtype, device=device)
        wide[:, :num_true] = (3.0 * torch.randn(num_rows, num_true, generator=generator)).to(device, dtype)
        return wide[:, :columns]

    student_RV, teacher_RV = logits(num_columns), logits(teacher_columns or num_columns)
    labels_R = torch.full((num_rows,), ELSEWHERE, dtype=torch.int32)
    if num_true:
        labels_R = torch.randint(num_true, (num_rows,), generator=generator, dtype=torch.int32)
    labels_R[1], labels_R[2] = ELSEWHERE, NO_LABEL
    weights_R = torch.rand(num_rows, generator=generator) + 0.25
    weights_R[0], weights_R[3] = 0.25, 0.0
    return student_RV, teacher_RV, labels_R.to(device), weights_R.to(device)


def chain(kernels, student_RV, teacher_RV, labels_R, weights_R, spec: PairSpec, joined_with=None):
    """All kernels of one window in their order, on copies: statistics, joined statistics, values and the gradient.

    `joined_with`: the joined statistics that the gradient uses, so that backends are compared on equal inputs.
    """
    dtype = torch_twin.accumulate_dtype(student_RV.dtype)
    device, num_rows = student_RV.device, len(student_RV)
    stats_RS, joined_RJ, values_R2 = (torch.full((num_rows, n), float("nan"), dtype=dtype, device=device) for n in (NUM_STATS, NUM_JOINED, 2))
    kernels.row_stats(student_RV, teacher_RV, labels_R, spec, stats_RS)
    shards_tRS = torch.stack([stats_RS, other_shard(stats_RS)])
    kernels.join_stats(shards_tRS, labels_R, spec, joined_RJ)
    if spec.divergence in ONE_PASS:
        values_R2.zero_()
    else:
        kernels.row_values(student_RV, teacher_RV, joined_RJ, spec, values_R2)
    joined = joined_RJ if joined_with is None else joined_with.to(dtype)
    grad_RV = student_RV.clone()
    kernels.row_grad(grad_RV, teacher_RV, joined, weights_R, labels_R, spec)
    return {"stats": stats_RS, "joined": joined_RJ, "values": values_R2, "grad": grad_RV}


def other_shard(stats_RS: torch.Tensor) -> torch.Tensor:
    """Statistics of an imagined second shard: other maxima, other sums, no label."""
    other_RS = torch.full_like(stats_RS, 0.5)
    other_RS[:, 0], other_RS[:, 3], other_RS[:, 6] = 1.5, 2.5, 0.0
    return other_RS


def tail_chain(kernels, student_RV, weights_R, spec: PairSpec, kept=7):
    """tail_stats and tail_grad with some columns at -inf."""
    dtype = torch_twin.accumulate_dtype(student_RV.dtype)
    student_RV = student_RV.clone()
    if spec.num_true:
        student_RV[:, 0:min(spec.num_true, kept * 3):3] = float("-inf")
    stats_R2 = torch.full((len(student_RV), 2), float("nan"), dtype=dtype, device=student_RV.device)
    kernels.tail_stats(student_RV, spec, stats_R2)
    lse_R = torch.linspace(3.0, 6.0, len(student_RV), dtype=dtype, device=student_RV.device)
    kernels.tail_grad(student_RV, lse_R, weights_R.to(dtype), spec)
    return {"tail stats": stats_R2, "tail grad": student_RV}


def make_top_k(num_rows: int, num_true: int, num_kept: int, *, device="cpu", seed=0):
    """Global ids of which about half lie in the shard [start, start + num_true), log-probabilities and tails; start beyond 2^31."""
    generator = torch.Generator().manual_seed(seed)
    start = 3_000_000_000
    ids_RK = torch.stack([torch.randperm(2 * num_true + num_kept, generator=generator)[:num_kept] for _ in range(num_rows)]) + start - num_true // 2
    tail_R = 0.05 + 0.2 * torch.rand(num_rows, generator=generator)
    log_p_RK = torch.randn(num_rows, num_kept, generator=generator).log_softmax(1) + torch.log1p(-tail_R)[:, None]
    return ids_RK.to(device), log_p_RK.to(device), tail_R.to(device), start


def top_k_chain(kernels, student_RV, labels_R, weights_R, ids_RK, log_p_RK, tail_R, start, mode, spec: PairSpec, joined_with=None):
    """The top-K kernels of one window in their order, on a copy, with an imagined second shard that holds the other ids.

    Row 0's label is among its kept tokens where the shard holds one. `joined_with`: (joined, gradient pieces) that the gradient
    uses, so that backends are compared on equal inputs.
    """
    from megatron_kd.kernels.dispatch import top_k_kernels_for

    top_k, dtype = top_k_kernels_for(kernels), torch_twin.accumulate_dtype(student_RV.dtype)
    num_rows, num_kept = ids_RK.shape
    held_RK = (ids_RK >= start) & (ids_RK < start + spec.num_true)
    if labels_R is not None and held_RK[0].any():
        labels_R = labels_R.clone()
        labels_R[0] = (ids_RK[0][held_RK[0]][0] - start).to(labels_R.dtype)
    u_RV = student_RV.clone()
    stats_RS, joined_RJ, grad_RK = (torch.full((num_rows, n), float("nan"), dtype=dtype, device=u_RV.device)
                                    for n in (topk_twin.NUM_SCALARS + num_kept, topk_twin.NUM_JOINED, num_kept))
    top_k.top_k_take(u_RV, ids_RK, labels_R, start, spec, stats_RS)
    kernels.tail_stats(u_RV, spec, stats_RS[:, :2])
    other_RS = torch.full_like(stats_RS, 0.5)
    other_RS[:, topk_twin.LABEL] = 0.0
    other_RS[:, topk_twin.NUM_SCALARS:] = torch.where(held_RK, 0.0, 0.7)
    top_k.top_k_join(torch.stack([stats_RS, other_RS]), log_p_RK, tail_R, labels_R, mode, spec, joined_RJ, grad_RK)
    joined, grad = (joined_RJ, grad_RK) if joined_with is None else (x.to(dtype) for x in joined_with)
    top_k.top_k_grad(u_RV, joined, grad, ids_RK, labels_R, weights_R, start, spec)
    joined_RJ = joined_RJ.clone()
    in_k = held_RK & (ids_RK - start == (-5 if labels_R is None else labels_R[:, None]))
    joined_RJ[in_k.any(1), topk_twin.LABEL_GRAD] = 0.0  # has no meaning where the label is among the kept
    return {"stats": stats_RS, "joined": joined_RJ, "pieces": grad_RK, "grad": u_RV}


def top_k_error(kernels, window, targets, mode, spec: PairSpec) -> str | None:
    """`worst_error` of the top-K chain of a backend."""
    student_RV, _, labels_R, weights_R = window
    ids_RK, log_p_RK, tail_R, start = targets
    exact_args = (student_RV.double(), labels_R, weights_R.double(), ids_RK, log_p_RK.double(), tail_R.double(), start, mode, spec)
    args = (student_RV, labels_R, weights_R, ids_RK, log_p_RK, tail_R, start, mode, spec)
    exact = top_k_chain(torch_twin, *exact_args)
    twin, got = (top_k_chain(k, *args, joined_with=(exact["joined"], exact["pieces"])) for k in (torch_twin, kernels))
    exact = top_k_chain(torch_twin, *exact_args, joined_with=(exact["joined"], exact["pieces"]))
    assert (got["grad"][:, spec.num_true:] == 0).all() and (got["grad"][3] == 0).all(), "padding and rows of weight 0 get gradient 0"
    return worst_error(got, twin, exact)


def worst_error(got: dict, twin: dict, exact: dict) -> str | None:
    """None, or the first output that is further from the float64 twin than twice the float32 twin's own error (plus a few ulps)."""
    for name, value in ((name, value) for name, value in got.items() if value.numel()):
        mine, theirs = (value.double() - exact[name]).abs(), (twin[name].double() - exact[name]).abs()
        same = (value.double() == exact[name]) | (torch.isnan(value) & torch.isnan(exact[name]))
        ulp = torch.finfo(value.dtype).eps
        size = exact[name].abs().nan_to_num(0.0, 0.0, 0.0).clamp_min(1e-3 if name.endswith("grad") else 1.0)
        allowed = 2.0 * theirs.nan_to_num(0.0, 0.0, 0.0).amax() + 16 * ulp * size
        bad = ~same & ~(mine <= allowed)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            return (f"{name}{list(at)}: {value[at].item()} where float64 has {exact[name][at].item()} "
                    f"and the float32 twin {twin[name][at].item()}; {bad.sum().item()} of {bad.numel()}")
    return None
