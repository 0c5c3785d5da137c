"""A port of loopback, for what cannot be told to take one of the kernel's."""

import random
import socket

LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    """One that nobody has, below those that the kernel gives to connections: nobody gets it meanwhile either."""
    while True:
        port = random.SystemRandom().randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
