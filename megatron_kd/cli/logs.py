"""What a rank prints, in its own file; what a person should see, on the terminal.

Owns the redirection of stdout and stderr at the level of file descriptors, so that Megatron, torch and C++ libraries are caught too.
Called by `train` and `teach`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def to_file(path: Path | None) -> Iterator[TextIO]:
    """Send this process's stdout and stderr to `path` (appended) and yield the terminal's stderr; None redirects nothing."""
    if path is None:
        yield sys.stderr
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    terminal = os.fdopen(os.dup(saved[1]), "w", buffering=1)
    _flush()
    os.dup2(log, 1), os.dup2(log, 2)
    os.close(log)
    with contextlib.suppress(AttributeError):  # a test runner's stand-in for stdout cannot be reconfigured
        sys.stdout.reconfigure(line_buffering=True)
    try:
        yield terminal
    finally:
        _flush()
        for number, copy in zip((1, 2), saved):
            os.dup2(copy, number)
            os.close(copy)
        terminal.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            stream.flush()
