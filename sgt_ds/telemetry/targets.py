"""Scrape targets in the form of Prometheus' file_sd and http_sd. Knows no hostfile syntax."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import TypedDict

from sgt_ds.errors import UserError

EVERY_ADDRESS = ("", "0.0.0.0", "::")


class TargetGroup(TypedDict):
    """One entry of a file_sd document."""

    targets: list[str]
    labels: dict[str, str]


def targets(hosts: Iterable[tuple[str, int]], *, run: str, port: int) -> list[TargetGroup]:
    """One entry a rank, with the labels run, host and rank.

    `hosts`: names (or addresses) and slots in the hostfile's order, in which the launcher numbers
    the ranks. `port`: telemetry.port; local rank r of a host listens on `port` + r.
    Raises: UserError where a port exceeds 65535.
    """
    groups: list[TargetGroup] = []
    for host, slots in hosts:
        if port < 1 or port + slots - 1 > 65535:
            raise UserError(
                "--port",
                None,
                f"{port} leaves no ports for {slots} ranks of {host}; choose another",
            )
        for local_rank in range(slots):
            groups.append(_group(host, host, port + local_rank, run, len(groups)))
    return groups


def own_target(bound: str, port: int, *, run: str, rank: int) -> TargetGroup:
    """The target of an exporter in this process. `bound`: the address that it listens on.

    One that listens on all addresses is announced under this host's name.
    """
    name = socket.gethostname()
    return _group(name, name if bound in EVERY_ADDRESS else bound, port, run, rank)


def beyond_loopback(groups: Sequence[TargetGroup]) -> list[TargetGroup]:
    """The targets of all ranks, as the host of the first one may announce them.

    The loopback of another host is not its own: it would be scraped twice, as ranks of both. So the
    other host's name stands there; nothing answers under it, and monitoring shows that.
    """
    own = groups[0]["labels"]["host"]
    return [
        group
        if group["labels"]["host"] == own or not _is_loopback(group["targets"][0])
        else {**group, "targets": [_at(group["labels"]["host"], group["targets"][0])]}
        for group in groups
    ]


def _is_loopback(target: str) -> bool:
    address = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _at(host: str, target: str) -> str:
    return f"{host}:{target.rpartition(':')[2]}"


def _group(host: str, address: str, port: int, run: str, rank: int) -> TargetGroup:
    where = f"[{address}]" if ":" in address else address  # IPv6
    return {
        "targets": [f"{where}:{port}"],
        # The last becomes the query of a scrape: whoever has taken the port since then refuses it.
        "labels": {"run": run, "host": host, "rank": str(rank), "__param_run": run},
    }
