"""Objective: what is minimised, L_t = kd_weight * KD_t + ce_weight * CE_t per row. Imports no torch.

Its fields are those of LossTerms. Called by the fused loss, the dense reference and the self-check. Says nothing about layouts or memory.
"""

from dataclasses import dataclass
from typing import get_args

from megatron_kd.kernels.spec import HeadTransform, PairSpec
from megatron_kd.objective import Divergence, LossTerms

DIVERGENCES: tuple[str, ...] = get_args(Divergence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(LossTerms):
    """The terms, and what follows from them for the kernels."""

    @property
    def kd_scale(self) -> float:
        """What KD carries besides kd_weight: temperature^2 or 1."""
        return self.temperature**2 if self.temperature_scaling == "hinton" else 1.0

    def resolved(self) -> tuple[Divergence, float]:
        """(divergence, mix) with the end points of jsd and the skewed KLs replaced by the plain KLs."""
        if self.divergence == "jsd" and self.beta in (0.0, 1.0):
            return ("reverse_kl" if self.beta else "forward_kl"), 0.0
        if self.divergence in ("skew_forward_kl", "skew_reverse_kl") and self.skew == 0.0:
            return ("forward_kl" if self.divergence == "skew_forward_kl" else "reverse_kl"), 0.0
        mix = {"jsd": self.beta, "skew_forward_kl": self.skew, "skew_reverse_kl": self.skew}.get(self.divergence, 0.0)
        return self.divergence, mix

    def pair_spec(self, num_true: int, student: HeadTransform, teacher: HeadTransform) -> PairSpec:
        """The constants that the row kernels need on a shard with `num_true` real columns."""
        divergence, mix = self.resolved()
        return PairSpec(divergence=divergence, mix=mix, temperature=self.temperature, kd_coef=self.kd_weight * self.kd_scale / self.temperature,
                        ce_coef=self.ce_weight, num_true=num_true, student=student, teacher=teacher)
