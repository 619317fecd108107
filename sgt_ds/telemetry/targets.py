"""Scrape targets of a run in Prometheus' file_sd form. Knows no hostfile syntax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from sgt_ds.errors import UserError


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
        address = f"[{host}]" if ":" in host else host  # IPv6
        for local_rank in range(slots):
            groups.append(
                {
                    "targets": [f"{address}:{port + local_rank}"],
                    "labels": {"run": run, "host": host, "rank": str(len(groups))},
                }
            )
    return groups
