"""What the sum of row losses is divided by, as the whole-number count that Megatron adds up over micro-batches and ranks.

Called by student/step, the self-check and tests. L = sum(weight * factor * loss) / sum(count), both sums over all micro-batches
and data-parallel ranks before the division: a mean of the micro-batches' means would weigh a row by how few rows share its
micro-batch.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_kd.errors import ConfigError, rule

WEIGHT_UNITS = 1024
"""Units that a weight of 1 counts as with denominator "weights": Megatron's count is an int, so a sum of weights is rounded to 1/1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominator:
    """One micro-batch's share of the denominator."""

    count: torch.Tensor
    """int64 0-dim, to be summed over micro-batches and ranks."""
    factor: float
    """Multiplies the weighted row losses before their sum."""


def denominator_of(weights_N: torch.Tensor, kind: Literal["rows", "weights"], units: int = WEIGHT_UNITS) -> Denominator:
    """"rows": the number of weights other than 0, as Megatron counts. "weights": the sum of the weights, in 1/`units`.

    weights_N: any shape, not negative for "weights". `units` must be the same for all shares of one denominator. Errors: ConfigError
    for another kind. No sync.
    """
    if kind == "rows":
        return Denominator(count=(weights_N != 0).sum(), factor=1.0)
    if kind == "weights":
        return Denominator(count=(weights_N.double().sum() * units).round().long(), factor=float(units))
    raise ConfigError(rule("denominator", kind, "must be 'rows' or 'weights'", "Use 'rows', as Megatron does"))


def row_factors(shares: list[Denominator]) -> list[torch.Tensor]:
    """What each micro-batch's weighted losses are multiplied by: its factor over the sum of all counts (0 where that is 0)."""
    total = sum(share.count for share in shares)
    return [torch.where(total > 0, share.factor / total.double().clamp_min(1.0), 0.0) for share in shares]
