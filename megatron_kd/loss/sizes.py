"""Closed forms of what the loss allocates, in bytes, and the default window sizes. Imports no torch; the planner asks here.

The fused loss takes its window sizes from here, and tests hold the sums against tracked allocations. Letters: N rows of the
call, R rows of a window, D windows per dW GEMM, V columns of this rank's shard, H_s and H_t hidden widths, K kept tokens.
"""

from dataclasses import dataclass

from megatron_kd.kernels.spec import NUM_JOINED, NUM_STATS
from megatron_kd.loss.window import WindowPlan, plan_windows

CPU_LOGITS = 1 << 22
"""Logits of one window on the CPU: what still fits caches."""


def default_window_rows(num_columns: int, device_type: str) -> int:
    """Rows of a window where the caller names none."""
    if device_type == "cpu":
        return max(32, min(1024, CPU_LOGITS // max(1, num_columns)))
    return 2048


def default_dw_windows(num_columns: int, device_type: str) -> int:
    """Windows whose dW is formed by one GEMM where the caller names none."""
    return 1 if device_type == "cpu" else 2
