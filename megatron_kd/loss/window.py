"""WindowPlan: which rows are projected together. Plain integers, made once per call, equal on every tensor-parallel rank.

Called by the fused loss, the size functions and the planner; imports no torch. A window is `window_rows` rows or fewer; its
logits are the only ones that exist. Under sequence parallelism every window takes the same share of every rank's rows, so
that the all-gather of a window moves equal chunks whatever the loss mask looks like.

"Window order" is the order in which the windows visit rows; without sequence parallelism it is the given order.
"""

from dataclasses import dataclass

from megatron_kd.errors import ConfigError, rule

ROW_TILE = 128
"""Window sizes are rounded up to this many rows where they are larger: full GEMM tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Windows over `num_rows` rows. Build with `plan_windows`."""

    num_rows: int
    """Rows of the call, over all sequence-parallel ranks."""
    num_windows: int
    """0 where there is no row: then no rank runs any collective."""
    step_rows: int
    """Rows of every window but the last (without sequence parallelism)."""
    rows_per_rank: tuple[int, ...] | None
    """Sequence parallelism: rows that each tensor-parallel rank holds, in rank order; None without it."""

    def bounds(self, window: int) -> tuple[int, int]:
        """[start, end) in window order."""
        if self.rows_per_rank is None:
            return window * self.step_rows, min(self.num_rows, (window + 1) * self.step_rows)
        return self._sp_start(window), self._sp_start(window + 1)

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """[start, end) slices of the given row order that make up the window, in window order; one without sequence parallelism."""
        if self.rows_per_rank is None:
            return [self.bounds(window)]
        offsets = [sum(self.rows_per_rank[:rank]) for rank in range(len(self.rows_per_rank))]
        return [(offset + a, offset + b) for offset, (a, b) in zip(offsets, self.local_pieces(window), strict=True)]

    def local_pieces(self, window: int) -> list[tuple[int, int]]:
        """[start, end) within each rank's own rows, by rank (sequence parallelism)."""
        return [(n * window // self.num_windows, n * (window + 1) // self.num_windows) for n in self.rows_per_rank]

    @property
    def max_rows(self) -> int:
        """Rows of the largest window: the height of the logits buffers."""
        return max((b - a for a, b in map(self.bounds, range(self.num_windows))), default=0)

    @property
    def chunk_rows(self) -> int:
        """Sequence parallelism: rows that each rank contributes to a window's all-gather, unused ones included."""
        return max((-(-n // self.num_windows) for n in self.rows_per_rank), default=0) if self.num_windows else 0

    def _sp_start(self, window: int) -> int:
        return sum(n * window // self.num_windows for n in self.rows_per_rank)


def plan_windows(num_rows: int, window_rows: int, rows_per_rank: tuple[int, ...] | None = None) -> WindowPlan:
    """Balanced windows of at most `window_rows` rows (at most `window_rows` + ranks - 1 under sequence parallelism).

    Errors: ConfigError where window_rows < 1 or rows_per_rank does not add up to num_rows.
    """
    if window_rows < 1:
        raise ConfigError(rule("window_rows", window_rows, "must be at least 1", "Leave it out to have it chosen"))
    if rows_per_rank is not None and sum(rows_per_rank) != num_rows:
        raise ConfigError(rule("rows_per_rank", rows_per_rank, f"must add up to the number of rows, {num_rows}",
                               "Count the rows of the full mask on every rank"))
    num_windows = -(-num_rows // window_rows)
    step = -(-num_rows // num_windows) if num_windows else 0
    if window_rows >= ROW_TILE:
        step = min(window_rows, -(-step // ROW_TILE) * ROW_TILE)
    if rows_per_rank is None and step:
        num_windows = -(-num_rows // step)
    return WindowPlan(num_rows=num_rows, num_windows=num_windows, step_rows=step, rows_per_rank=rows_per_rank)
