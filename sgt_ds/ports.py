"""TCP ports for the rendezvous and for exporters. Knows no run.

The kernel lends ports of its ephemeral range to every outgoing connection, gloo's included: one
that was free when it was chosen may be taken a second later. So none is chosen from that range.
"""

from __future__ import annotations

import random
import socket
from itertools import chain
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _USUAL_EPHEMERAL = 10_000, 32_768


def free_ports(count: int = 1, *, host: str = "127.0.0.1", first: int | None = None) -> int:
    """The first of `count` ports in a row that no one on this machine uses now.

    `first`: the lowest to try; None begins at a random port below the ephemeral range, so that two
    that choose at the same time part. Raises: OSError where no such row is free.
    """
    end = 65_536 if first is not None else max(_ephemeral_start(), _LOWEST + count)
    start = random.SystemRandom().randrange(_LOWEST, end) if first is None else first
    wrapped = range(_LOWEST, start) if first is None else range(0)
    for port in chain(range(start, end - count + 1), wrapped):
        if all(is_free(host, port + offset) for offset in range(count)):
            return port
    raise OSError(f"no {count} consecutive TCP ports are free on {host} from {first or _LOWEST} on")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port of this machine's `host` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL
