"""PairSpec: what the row kernels must know about the objective, the two heads and the shard. Imports no torch.

Built by the loss (loss/objective.py), read by every kernel backend. The column layout of the statistics that travel between
kernels, collectives and the loss is defined here, once.
"""

from dataclasses import dataclass, field

from megatron_kd.objective import Divergence

ONE_PASS: tuple[str, ...] = ("forward_kl", "reverse_kl")
"""Divergences whose value is additive over shards given only maxima and sums; the others need `row_values` after the join."""

# Columns of stats_RS: one shard's statistics, additive over shards after rescaling by exp((max - joint max) / temperature).
MAX_S, SUM_S, SUM_CE, MAX_T, SUM_T, CROSS, LABEL, NUM_STATS = 0, 1, 2, 3, 4, 5, 6, 7
# Columns of joined_RJ: equal on every rank of the group.
LSE_S, LSE_T, LSE_CE, KD, SLOPE, CE, NUM_JOINED = 0, 1, 2, 3, 4, 5, 6

TWIN_BLOCK_ELEMENTS = 1 << 20
"""Numbers in one temporary of the torch backend, which works on row blocks of that size."""

ROW_ALIGNMENT = 16
"""Columns that a logits buffer's row stride should be a multiple of, so that every row starts on a 16-byte boundary in any dtype."""
ELSEWHERE, NO_LABEL = -1, -2
"""Local labels: another shard's column, and a row without cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """logits z = softcap * tanh(scale * u / softcap) of u = hidden @ head.T + bias; without softcap z = scale * u."""

    scale: float = 1.0
    """Logit scale (muP output multiplier, Cohere's logit_scale); not 0."""
    softcap: float | None = None
    """Bound on |z| (Gemma 2's final_logit_softcapping); None: no cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """One loss call's constants, for kernels. Plain numbers, so that a backend can specialise on them."""

    divergence: Divergence
    """Which D(teacher, student)."""
    mix: float = 0.0
    """beta of jsd, skew of the skewed KLs; unused otherwise."""
    temperature: float = 1.0
    """tau: both sides' logits are divided by it in the divergence, not in the cross-entropy."""
    kd_coef: float
    """Factor of dD/d(z_s / tau) in the gradient by z_s: kd_weight * (tau^2 or 1) / tau."""
    ce_coef: float
    """Factor of the cross-entropy's gradient: ce_weight."""
    num_true: int
    """The first `num_true` columns of the shard are real; the others take no part and get gradient 0. May be 0."""
    student: HeadTransform = field(default_factory=HeadTransform)
    """Transform of the student's raw logits."""
    teacher: HeadTransform = field(default_factory=HeadTransform)
    """Transform of the teacher's raw logits."""
