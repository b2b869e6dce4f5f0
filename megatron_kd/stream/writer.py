"""Writer: the thread on which a teacher rank ends its answers, so that the next forward runs while rows are on their way.

Owns the thread, the order and the bound. What a job does is the serve loop's business: wait for the device, write, report.
"""

import threading
from collections import deque
from collections.abc import Callable

from megatron_kd.errors import TeacherStalled
from megatron_kd.stream.sizes import NUM_STAGED

CLOSE_S = 5.0


class Writer:
    """Runs jobs one after the other. `reserve` and `put` belong to one thread and raise what an earlier job raised; so does leaving `with`.

    `deadline_s`: longest wait for a job; every job has shorter ones of its own (a write, a report), so this one ends a replica whose GPU hangs.
    """

    def __init__(self, deadline_s: float = 600.0):
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        """Queued, the running one included."""
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kd-write", daemon=True)
        self._thread.start()

    def reserve(self) -> None:
        """Wait until fewer than NUM_STAGED jobs are under way. Errors: TeacherStalled."""
        self._wait(NUM_STAGED - 1)

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        with self._changed:
            self._raise()
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait for all jobs. Errors: TeacherStalled."""
        self._wait(0)

    def close(self) -> None:
        """End the thread after the running job, waiting a little for that; harmless twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self.close()

    def _wait(self, most_jobs: int) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: len(self._jobs) <= most_jobs or self._error, self._deadline_s)
            self._raise()
        if not in_time:
            raise TeacherStalled(f"rows of an answer have been on their way for {self._deadline_s:.0f} s: this rank's GPU or its transport does not move; "
                                 "end this replica, the student asks another one")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs[0]
            try:
                job()
            except BaseException as e:  # noqa: BLE001 -- raised on the serve loop's thread
                with self._changed:
                    self._error = e
                    self._changed.notify_all()
                return
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
