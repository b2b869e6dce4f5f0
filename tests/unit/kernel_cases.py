"""Inputs for the tests of the row kernels, and the comparison of a backend with the torch twin. Used by tests/unit and tests/gpu."""

import torch

from megatron_kd.kernels import torch_twin
from megatron_kd.kernels.spec import ELSEWHERE, NO_LABEL, NUM_JOINED, NUM_STATS, ONE_PASS, HeadTransform, PairSpec

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
PLAIN = HeadTransform()


def make_spec(divergence: str, num_true: int, *, temperature=1.0, student=PLAIN, teacher=PLAIN, ce_coef=0.7) -> PairSpec:
    """A spec with factors that are neither 0 nor 1."""
    return PairSpec(divergence=divergence, mix=0.3, temperature=temperature, kd_coef=0.9, ce_coef=ce_coef, num_true=num_true, student=student, teacher=teacher)


def make_window(num_rows: int, num_columns: int, num_true: int, *, dtype, device="cpu", seed=0, teacher_columns=None):
    """Raw logits whose padding is NaN, cut out of wider buffers; labels of every kind; weights with a 0 and a fraction."""
    generator = torch.Generator().manual_seed(seed)

    def logits(columns):
        wide = torch.full((num_rows, columns + 16), float("nan"), dtype=dtype, device=device)
        wide[:, :num_true] = (3.0 * torch.randn(num_rows, num_true, generator=generator)).to(device, dtype)
        return wide[:, :columns]

    student_RV, teacher_RV = logits(num_columns), logits(teacher_columns or num_columns)
    labels_R = torch.randint(max(num_true, 1), (num_rows,), generator=generator, dtype=torch.int32) if num_true else torch.full((num_rows,), ELSEWHERE, dtype=torch.int32)
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


def worst_error(got: dict, twin: dict, exact: dict) -> str | None:
    """None, or the first output that is further from the float64 twin than twice the float32 twin's own error (plus a few ulps)."""
    for name, value in got.items():
        mine, theirs = (value.double() - exact[name]).abs(), (twin[name].double() - exact[name]).abs()
        same = (value.double() == exact[name]) | (torch.isnan(value) & torch.isnan(exact[name]))
        ulp = torch.finfo(value.dtype).eps
        allowed = 2.0 * theirs.nan_to_num(0.0, 0.0, 0.0).amax() + 16 * ulp * exact[name].abs().nan_to_num(0.0, 0.0, 0.0).clamp_min(1e-3 if name.endswith("grad") else 1.0)
        bad = ~same & ~(mine <= allowed)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            return f"{name}{list(at)}: {value[at].item()} where float64 has {exact[name][at].item()} and the float32 twin {twin[name][at].item()}; {bad.sum().item()} of {bad.numel()}"
    return None
