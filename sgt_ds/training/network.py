"""Which of this host's networks the ranks rendezvous on. Knows no process group."""

from __future__ import annotations

import os
import socket

import psutil

_OF_MPIRUN = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "MASTER_ADDR": "SGT_MASTER_ADDR",
    "MASTER_PORT": "SGT_MASTER_PORT",
}
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def adopt_mpirun() -> None:
    """Take the ranks of mpirun, and the meeting place that `sgt-ds train` chose for it.

    DeepSpeed's own way takes the first address of `hostname -I`, which can be the wrong network's,
    and needs mpi4py.
    """
    if "RANK" not in os.environ and all(name in os.environ for name in _OF_MPIRUN.values()):
        os.environ.update({name: os.environ[theirs] for name, theirs in _OF_MPIRUN.items()})


def choose_gloo_interface() -> None:
    """Let gloo use the network that leads to the ranks' meeting place, unless the user chose one.

    By itself it takes the address that the host's own name resolves to: where that is 127.0.1.1, as
    on Debian, or another network's, ranks of other hosts wait forever.
    """
    master = os.environ.get("MASTER_ADDR")
    if master is None or GLOO_INTERFACE in os.environ:
        return
    interface = interface_towards(master)
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this host reaches `host`, or is it. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return str(name)
    # All of 127.0.0.0/8 is the loopback's, whatever addresses it lists.
    return "lo" if own.startswith("127.") else None
