"""Trace: when each step of a block's way through the stream happened, for `megatron-kd bench stream`. Off (None) everywhere else.

Times are CLOCK_MONOTONIC, which all processes of one machine share, so that the marks of student and teacher form one line.
"""

import time

EVENTS = ("posted", "asked", "seen", "begun", "rows", "staged", "started", "written", "noticed", "ready", "taken", "released", "freed")
"""In order. Student: posted, asked; teacher: seen (request decoded), begun (its turn), rows (forward done), staged (copied, checksummed),
started (write handed to the transport), written (complete); student: noticed, ready (verified), taken, released, freed (slot open again)."""


class Trace:
    """Marks of one process: the first time of each event by the block's number. Training blocks only; safe from several threads."""

    def __init__(self):
        self.times_s: dict[str, dict[int, float]] = {event: {} for event in EVENTS}

    def mark(self, event: str, lane: int, seq: int) -> None:
        """`event` happens now to block `seq`."""
        if lane == 0:
            self.times_s[event].setdefault(seq, time.monotonic())


def mark(trace: Trace | None, event: str, lane: int, seq: int) -> None:
    """As Trace.mark; nothing where there is no trace."""
    if trace is not None:
        trace.mark(event, lane, seq)
