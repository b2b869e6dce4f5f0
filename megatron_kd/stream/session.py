"""Session: one live control connection of the asking rank, to a teacher replica or to another rank of its own replica.

Owns a queue and a thread for sending, so that nobody who holds a lock waits for a peer's socket, and the time of the last sign of
life. What messages mean is the asker's business.
"""

import queue
import threading
import time

from megatron_kd.errors import WireError
from megatron_kd.stream.channel import Channel


class Session:
    """`send` never blocks. A peer that reads too slowly, or a full queue, ends the session: `receive` then raises."""

    def __init__(self, channel: Channel, name: str, *, send_timeout_s: float, max_queue: int = 1024):
        self.channel, self.name = channel, name
        self._timeout_s = send_timeout_s
        self._queue: queue.Queue[dict | None] = queue.Queue(max_queue)
        self._thread = threading.Thread(target=self._send_loop, name=f"kd-send-{name}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message from the peer."""
        return time.monotonic() - self.channel.last_received_s

    def send(self, message: dict) -> None:
        """Queue a message."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.channel.close()

    def _send_loop(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self.channel.send(message, timeout_s=self._timeout_s)
            except WireError:
                self.channel.close()
                return

    def close(self, *, flush_s: float = 0.0) -> None:
        """End the session; messages queued before get `flush_s` to leave."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        if flush_s > 0 and threading.current_thread() is not self._thread:
            self._thread.join(flush_s)
        self.channel.close()
