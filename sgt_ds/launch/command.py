"""The `deepspeed` command of a launch, and its rendezvous address. Starts nothing."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgt_ds.errors import UserError
from sgt_ds.launch.hostfile import Host, world_size

Launcher = Literal["pdsh", "openmpi"]

# Where hosts that can't ask each other meet by default.
DEFAULT_MASTER_PORT = 29500

_BACKENDS = {"pdsh": ("pdsh", "pdsh"), "openmpi": ("ompi_info", "openmpi-bin")}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run's ranks live.

    `hosts`: in rank order. `hostfile`: what the user gave, for messages; None for `--num-gpus`.
    `local`: all ranks on this machine, started without ssh. `node_rank`: this machine's place among
    `hosts` where something else starts each of them (Slurm, Kubernetes): no ssh there either.
    """

    hosts: tuple[Host, ...]
    hostfile: Path | None
    local: bool
    launcher: Launcher = "pdsh"
    launcher_arguments: str = ""
    ssh_port: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    node_rank: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return world_size(self.hosts)

    @property
    def remote_hosts(self) -> list[str]:
        """Hosts whose processes only ssh reaches."""
        if self.local or self.node_rank is not None:
            return []
        return [host.name for host in self.hosts if not is_this_host(host)]

    @property
    def own_hosts(self) -> list[Host]:
        """Entries of `hosts` that are this machine."""
        if self.node_rank is not None:
            return [self.hosts[self.node_rank]]
        return [host for host in self.hosts if self.local or is_this_host(host)]

    @property
    def launched_ranks(self) -> range:
        """Ranks that this launch starts: all, but where each host has a launch of its own."""
        if self.node_rank is None:
            return range(self.world_size)
        first = world_size(self.hosts[: self.node_rank])
        return range(first, first + self.hosts[self.node_rank].slots)

    @property
    def has_first_rank(self) -> bool:
        """Whether rank 0 is on this machine."""
        return self.hosts[0] in self.own_hosts


def deepspeed_command(
    target: Target,
    arguments: Sequence[str],
    *,
    hostfile: Path,
    master_address: str,
    master_port: int,
) -> list[str]:
    """Arguments of the launcher's process.

    `arguments`: for `sgt_ds.train`. `hostfile`: plain one, written for this launch.
    """
    command = [sys.executable, "-m", "sgt_ds.launch.multinode", "--log_level=warning"]
    if target.local:
        # A path that is not a file: else DeepSpeed takes /job/hostfile where a cluster has one.
        command += [
            f"--hostfile={hostfile.with_name('none')}",
            f"--num_gpus={target.world_size}",
        ]
    elif target.node_rank is not None:
        command += [f"--hostfile={hostfile}", "--no_ssh", f"--node_rank={target.node_rank}"]
        command.append(f"--master_addr={master_address}")
    else:
        command += [f"--hostfile={hostfile}", f"--launcher={target.launcher}", "--force_multi"]
        command.append(f"--master_addr={master_address}")
        more = target.launcher_arguments
        if target.launcher == "openmpi" and target.ssh_port is not None:
            # DeepSpeed hands the port to pdsh alone.
            more = f"--mca plm_rsh_args '-p {target.ssh_port}' {more}"
        if more:
            command.append(f"--launcher_args={more}")
        if target.ssh_port is not None:
            command.append(f"--ssh_port={target.ssh_port}")
    command.append(f"--master_port={master_port}")
    return [*command, "--module", "sgt_ds.train", *arguments]


def check_launcher(target: Target) -> None:
    """Raises: UserError where the program that starts ranks on other hosts is not installed."""
    if target.local or target.node_rank is not None:
        return
    program, package = _BACKENDS[target.launcher]
    for needed, source in ((program, package), ("ssh", "openssh-client")):
        if shutil.which(needed) is None:
            raise UserError(
                str(target.hostfile),
                f"--launcher {target.launcher}",
                f"needs {needed}, which is not installed; install {source}",
            )


def master_address(target: Target) -> str:
    """The address of the first host that the other hosts reach.

    DeepSpeed takes the first of `hostname -I`, which can be the wrong network.
    Raises: UserError where a host's name does not resolve.
    """
    if target.master_address is not None:
        return target.master_address
    if target.local:
        return "127.0.0.1"
    addresses = [_address(target, host) for host in target.hosts]
    if not addresses[0].startswith("127.") or len(addresses) == 1:
        return addresses[0]
    # Debian maps a machine's own name to 127.0.1.1: take the one we use towards the second host.
    return _own_address_towards(addresses[1])


def is_this_host(host: Host) -> bool:
    """Whether the name means the machine that this process runs on."""
    if host.is_loopback or host.name.lower() in (socket.gethostname().lower(), socket.getfqdn()):
        return True
    try:
        address = socket.gethostbyname(host.name)
    except OSError:
        return False
    return address.startswith("127.") or _own_address_towards(address) == address


def _address(target: Target, host: Host) -> str:
    try:
        return socket.gethostbyname(host.name)
    except OSError as error:
        raise UserError(
            str(target.hostfile), f"line {host.line}", f"{host.name} does not resolve ({error})"
        ) from None


def _own_address_towards(address: str) -> str:
    """The source address of this machine for packets to `address`. Sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
