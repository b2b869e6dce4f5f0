"""Objective: what is minimised, L_t = kd_weight * KD_t + ce_weight * CE_t per row. Imports no torch.

Called by the fused loss, the dense reference, the configuration and the self-check. Says nothing about layouts or memory.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_kd.errors import ConfigError, rule
from megatron_kd.kernels.spec import Divergence, HeadTransform, PairSpec

DIVERGENCES: tuple[str, ...] = get_args(Divergence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """p is the teacher's distribution, q the student's, both at `temperature`; CE is at temperature 1. Derivation: docs/loss.md.

    Errors: ConfigError where a number is outside its range or a combination is undefined.
    """

    divergence: Divergence = "forward_kl"
    """forward_kl KL(p||q); reverse_kl KL(q||p); jsd beta KL(p||m) + (1 - beta) KL(q||m) with m = beta p + (1 - beta) q;
    skew_forward_kl KL(p || skew p + (1 - skew) q); skew_reverse_kl KL(q || skew q + (1 - skew) p); total_variation sum|p - q| / 2."""
    beta: float = 0.5
    """jsd only, in [0, 1]. The end points are defined as the KLs: 0 is forward KL, 1 is reverse KL (as in TRL and Liger)."""
    skew: float = 0.1
    """skewed KLs only, in [0, 1); 0 is the plain KL."""
    temperature: float = 1.0
    """Divides both sides' logits in KD."""
    temperature_scaling: Literal["hinton", "none"] = "hinton"
    """hinton: KD times temperature^2, so that its gradient keeps its size; none: the bare divergence."""
    kd_weight: float = 1.0
    """Factor of KD. 0 skips the teacher altogether."""
    ce_weight: float = 0.0
    """Factor of the cross-entropy with the labels."""
    top_k_mode: Literal["tail_bucket", "renormalise", "none"] = "tail_bucket"
    """Top-K targets. tail_bucket: the divergence on K + 1 outcomes, the last being everything else; renormalise: both sides
    restricted to the K and scaled to sum 1; none: the sum over the K alone (biased; can be negative)."""

    def __post_init__(self):
        if self.divergence not in DIVERGENCES:
            raise ConfigError(rule("divergence", self.divergence, f"must be one of {', '.join(DIVERGENCES)}", "Pick one of them"))
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(rule("beta", self.beta, "must be in [0, 1]", "0 is forward KL, 1 is reverse KL"))
        if not 0.0 <= self.skew < 1.0:
            raise ConfigError(rule("skew", self.skew, "must be in [0, 1)", "At 1 the divergence is 0 everywhere; usual values are near 0.1"))
        if not self.temperature > 0.0:
            raise ConfigError(rule("temperature", self.temperature, "must be positive", "Use 1.0 for the models' own distributions"))
        if self.temperature_scaling not in ("hinton", "none"):
            raise ConfigError(rule("temperature_scaling", self.temperature_scaling, "must be 'hinton' or 'none'", "Use 'hinton'"))
        if self.top_k_mode not in ("tail_bucket", "renormalise", "none"):
            raise ConfigError(rule("top_k_mode", self.top_k_mode, "must be 'tail_bucket', 'renormalise' or 'none'", "Use 'tail_bucket'"))
        if self.kd_weight < 0 or self.ce_weight < 0:
            raise ConfigError(rule("kd_weight, ce_weight", (self.kd_weight, self.ce_weight), "must not be negative",
                                   "Set a term's weight to 0 to leave it out"))

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
