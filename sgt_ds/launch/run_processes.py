"""The processes of a recorded run, on all its hosts: whether some train it already, and their end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError
from sgt_ds.files import lock_is_held
from sgt_ds.launch.processes import kill_processes, on_hosts, processes_of
from sgt_ds.launch.record import RunRecord, in_training, read_record, remove_record


def check_idle(run_dir: Path) -> None:
    """Raises: UserError where another process trains the run. Makes nothing."""
    record = read_record(run_dir)
    if record is not None and (record.pid, record.host) == (os.getpid(), socket.gethostname()):
        return  # between two starts of this process's own
    if lock_is_held(RunLayout(run_dir).supervisor_lock):
        raise in_training(run_dir)
    check_unattended(run_dir)
    if lock_is_held(RunLayout(run_dir).training_lock):
        message = f"is being trained under the raw launcher; `sgt-ds stop {run_dir}` ends that run"
        raise UserError(run_dir, "run_dir", message)


def check_unattended(run_dir: Path) -> None:
    """Raises: UserError where processes of this run outlived a supervisor that was killed."""
    record = read_record(run_dir)
    if record is None:
        return
    count = len(processes_of(record.run_id))
    remote = on_hosts("list", record.run_id, record.remote_hosts, record.ssh_port)
    busy = [host for host, said in remote.items() if said.isdecimal() and int(said)]
    if count or busy:
        where = ", ".join(([record.host] if count else []) + busy)
        raise UserError(
            run_dir,
            "run_dir",
            f"is still being trained on {where}, by processes whose supervisor is gone; `sgt-ds "
            f"stop {run_dir}` stops them",
        )
    remove_record(run_dir)


def end_everywhere(record: RunRecord, *, hurried: bool = False) -> list[str]:
    """Kill every process of a run on every host. Returns what could not be made sure of.

    `hurried`: as in `on_hosts`.
    """
    left = []
    here = kill_processes(record.run_id)
    if here:
        left.append(f"{here} processes on this host cannot be killed")
    remote, port = record.remote_hosts, record.ssh_port
    for host, said in on_hosts("kill", record.run_id, remote, port, hurried=hurried).items():
        if said != "0":
            left.append(f"{host}: {said}")
    return left
