"""The per-row objective L_t = kd_weight x KD_t + ce_weight x CE_t, stated once: Divergence and LossTerms. Torch-free.

The recipe's LossConfig (config/schema.py) and the fused loss's Objective (loss/objective.py) are both LossTerms with what each needs besides.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_kd.errors import ConfigError, rule

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]
TopKMode = Literal["tail_bucket", "renormalise", "none"]
TemperatureScaling = Literal["hinton", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """p is the teacher's distribution, q the student's, both at `temperature`; CE is at temperature 1. Derivation: docs/loss.md.

    Errors: ConfigError where a value is outside its range.
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
    temperature_scaling: TemperatureScaling = "hinton"
    """hinton: KD times temperature^2, so that its gradient keeps its size; none: the bare divergence."""
    kd_weight: float = 1.0
    """Factor of KD (in a recipe that schedules it, at the start). 0 skips the teacher altogether."""
    ce_weight: float = 0.0
    """Factor of the cross-entropy with the labels (in a recipe that schedules it, at the start)."""
    top_k_mode: TopKMode = "tail_bucket"
    """Top-K targets. tail_bucket: the divergence on K + 1 outcomes, the last being everything else; renormalise: both sides
    restricted to the K and scaled to sum 1; none: the sum over the K alone (biased; can be negative)."""

    def __post_init__(self):
        for name, choices in (("divergence", Divergence), ("temperature_scaling", TemperatureScaling), ("top_k_mode", TopKMode)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(rule(f"loss.{name}", getattr(self, name), f"must be one of {', '.join(get_args(choices))}", "Pick one of them"))
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(rule("loss.beta", self.beta, "must be between 0 and 1", "0 is forward KL, 1 is reverse KL"))
        if not 0.0 <= self.skew < 1.0:
            raise ConfigError(rule("loss.skew", self.skew, "must be at least 0 and below 1, where the divergence is 0 everywhere", "Usual values are near 0.1"))
        if not self.temperature > 0.0:
            raise ConfigError(rule("loss.temperature", self.temperature, "must be above 0", "Use 1.0 for the models' own distributions"))
        for name in ("kd_weight", "ce_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(rule(f"loss.{name}", getattr(self, name), "must not be negative", "Set a term's weight to 0 to leave it out"))
