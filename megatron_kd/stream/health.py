"""Health of a stream: counters of one student rank and the one-line verdict of a log interval. Pure; no torch, no threads."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals of one receiver. Seconds, bytes, rows, and numbers of events."""

    wait_s: float = 0.0
    """Time that the training thread spent in `take` waiting for rows."""
    blocks_taken: int = 0
    rows_asked: int = 0
    rows_received: int = 0
    bytes_received: int = 0
    late_parts: int = 0
    """Parts about revoked memory; dropped."""
    reroutes: int = 0
    """Requests asked again after their replica was lost."""
    replicas_lost: int = 0
    refused_joins: int = 0
    degraded_blocks: int = 0
    teacher_busy_s: float = 0.0
    teacher_idle_s: float = 0.0
    """Sums over replicas, as they report with each answer."""
    ready_slot_sum: int = 0
    """Sum over takes of READY slots found: divided by takes and depth it is the occupancy."""


REPLICA_COUNTERS = ("reroutes", "replicas_lost", "refused_joins", "teacher_busy_s", "teacher_idle_s")
"""What only the asking rank can count; it tells the other ranks of its replica, because any of them may be the one that writes the log."""


@dataclass(slots=True)
class Interval:
    """Differences of Counters between two reports, with the time between."""

    counters: Counters
    _last: dict = field(default_factory=dict)
    _last_s: float | None = None

    def report(self, now_s: float, *, depth: int, replicas_alive: int, quarantined_slots: int) -> dict[str, float]:
        """Metrics since the last call, by name; gauges as they stand."""
        now = {name: getattr(self.counters, name) for name in Counters.__slots__}
        delta = {name: value - self._last.get(name, 0) for name, value in now.items()}
        elapsed_s = max(1e-9, now_s - self._last_s) if self._last_s is not None else math.nan
        self._last, self._last_s = now, now_s
        worked_s = delta["teacher_busy_s"] + delta["teacher_idle_s"]
        return {
            "stream/wait_share": delta["wait_s"] / elapsed_s,
            "stream/wait_s": delta["wait_s"],
            "stream/occupancy": delta["ready_slot_sum"] / max(1, delta["blocks_taken"]) / depth,
            "stream/gb_per_s": delta["bytes_received"] / elapsed_s / 1e9,
            "stream/bytes": float(now["bytes_received"]),
            "stream/rows_received": float(now["rows_received"]),
            "stream/rows_asked": float(now["rows_asked"]),
            "stream/teacher_idle_share": delta["teacher_idle_s"] / worked_s if worked_s > 0 else math.nan,
            "stream/replicas_alive": float(replicas_alive),
            "stream/replicas_lost": float(now["replicas_lost"]),
            "stream/reroutes": float(now["reroutes"]),
            "stream/late_parts": float(now["late_parts"]),
            "stream/quarantined_slots": float(quarantined_slots),
            "stream/degraded_blocks": float(now["degraded_blocks"]),
        }


def verdict(metrics: dict[str, float]) -> str:
    """One line for the log: who waits for whom, and how many replicas would do.

    With r replicas and a wait share w the student needs the rows of one interval in (1 - w) of it, so r / (1 - w) replicas keep up;
    with an idle share i, r * (1 - i) replicas would be busy all the time.
    """
    wait, idle, alive = metrics["stream/wait_share"], metrics["stream/teacher_idle_share"], int(metrics["stream/replicas_alive"])
    plural = "replica" if alive == 1 else "replicas"
    if alive == 0:
        return "no teacher replica is connected"
    if math.isnan(wait):
        return f"first interval with {alive} {plural}"
    if wait >= 0.02:
        needed = math.ceil(alive / max(1e-3, 1 - wait) - 1e-9)
        return f"student waited {wait:.0%} of the interval for {alive} {plural}: {max(needed, alive + 1)} would do"
    enough = max(1, math.ceil(alive * (1 - idle))) if not math.isnan(idle) else alive
    spare = f"; {enough} would do" if enough < alive else ""
    return f"student waited {wait:.1%}; {alive} {plural} idle {0.0 if math.isnan(idle) else idle:.0%} of the time{spare}"
