"""A free local port for one run: for a rendezvous or a launcher's store. Called by `train`, `run` and tests that start them."""

import errno
import random
import socket
from pathlib import Path

from megatron_kd.errors import ConfigError, rule

LOWEST = 20000
ATTEMPTS = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, below the range that outgoing connections take theirs from.

    A port of that range may be taken between the look and the use, even by a client that retries this very address and so connects to itself.
    Errors: ConfigError where none is found.
    """
    below = _first_outgoing_port()
    for _ in range(ATTEMPTS):
        port = random.SystemRandom().randrange(min(LOWEST, below - 2000), below)  # apart from seeds that a run sets
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(rule("host", host, f"must be an address of this machine ({error})", "Name a local address")) from error
            return port
    raise ConfigError(rule("free port", f"{ATTEMPTS} tried on {host}", "one must be free", "Name one: stream.rendezvous=HOST:PORT or MASTER_PORT"))


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
