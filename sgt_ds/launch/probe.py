"""Checks whether every host of a hostfile is fit to train with the others. Starts no training."""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgt_ds.errors import UserError, refusal
from sgt_ds.launch.command import is_this_host
from sgt_ds.launch.facts import Facts, Question, answer_file, question_file
from sgt_ds.launch.hostfile import Host
from sgt_ds.launch.ssh import Answer, ask, module_command

# What must be the same everywhere, and how it is called in messages.
SAME = {
    "python": "Python",
    "torch": "torch",
    "deepspeed": "deepspeed",
    "project": "sgt-ds",
    "ds_configs": "ds_configs/",
}
MAX_SKEW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Probed:
    """One host: its facts, or None where it did not answer, and what is wrong with it.

    `skew_seconds`: its clock against this machine's, to about the time of an answer.
    """

    host: Host
    facts: Facts | None
    skew_seconds: float
    faults: list[str]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.host.name,
            "slots": self.host.slots,
            "facts": None if self.facts is None else asdict(self.facts),
            "skew_seconds": round(self.skew_seconds, 3),
            "faults": self.faults,
        }


def probe(
    hosts: Sequence[Host],
    *,
    shared: Path,
    ssh_port: int | None = None,
    metrics_port: int | None = None,
    master_port: int | None = None,
) -> list[Probed]:
    """Ask all hosts at once. `shared`: a directory that all of them should see, and write to.

    `metrics_port`: of a host's first rank; `master_port`: of the first host. None: not looked at.
    One host that is this machine is asked as it would train, without ssh.
    """
    alone = len(hosts) == 1 and is_this_host(hosts[0])
    if not alone and shutil.which("ssh") is None:
        raise UserError(
            "--probe", None, "needs ssh, which is not installed; install openssh-client"
        )
    token = f"sgt-probe-{secrets.token_hex(6)}"
    mark = question_file(shared, token)
    questions = {
        host.name: Question(
            name=f"{number}",
            shared=str(shared.resolve()),
            token=token,
            ports=_ports(host, metrics_port, None if number else master_port),
        )
        for number, host in enumerate(hosts)
    }
    try:
        mark.write_text(token, encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            "--shared",
            None,
            f"{shared} does not exist; create it where all hosts see it, or name another directory",
        ) from None
    except OSError as error:
        message = refusal(error, "written to", instead="name another directory")
        raise UserError("--shared", None, f"{shared} {message}") from None
    try:
        answers = ask(
            {
                name: module_command(
                    "sgt_ds.launch.facts",
                    [json.dumps(asdict(question))],
                    None if alone else name,
                    ssh_port,
                )
                for name, question in questions.items()
            }
        )
        written = {name: answer_file(question).is_file() for name, question in questions.items()}
    finally:
        mark.unlink(missing_ok=True)
        for question in questions.values():
            answer_file(question).unlink(missing_ok=True)
    found = [_probed(host, answers[host.name], by_ssh=not alone) for host in hosts]
    usual = _usual([one.facts for one in found if one.facts is not None])
    for one in found:
        if one.facts is not None:
            one.faults.extend(_faults(one, usual, found))
            if not one.facts.reads_shared:
                one.faults.append(f"does not see what this machine writes to {shared}")
            elif not written[one.host.name]:
                one.faults.append(f"what it writes to {shared} is not visible here")
    return found


def table(found: Sequence[Probed]) -> str:
    """One line a host, and under it what is wrong."""
    head = ("host", "slots", "GPUs", "Python", "torch", "deepspeed", "sgt-ds", "ds_configs", "skew")
    rows: list[Sequence[str]] = [head]
    for one in found:
        facts = one.facts
        known = (
            ("?",) * 7
            if facts is None
            else (
                str(facts.gpus),
                *(str(getattr(facts, name)) for name in SAME),
                f"{one.skew_seconds:+.1f} s",
            )
        )
        rows.append((one.host.name, str(one.host.slots), *known))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)) for r in rows
    ]
    faults = [f"{one.host.name}: {fault}" for one in found for fault in one.faults]
    return "\n".join([*(line.rstrip() for line in lines), *faults])


def _ports(host: Host, metrics_port: int | None, master_port: int | None) -> list[int]:
    own = [] if master_port is None else [master_port]
    if metrics_port is not None:
        own += range(metrics_port, metrics_port + host.slots)
    return own


def _probed(host: Host, answer: Answer, *, by_ssh: bool) -> Probed:
    if answer.fault:
        how = "not reachable by ssh" if by_ssh else "cannot be queried"
        return Probed(host, None, 0.0, [f"{how}: {answer.fault}"])
    try:
        facts = Facts(**json.loads(answer.output.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return Probed(host, None, 0.0, [f"gave an unexpected answer: {answer.output[-100:]!r}"])
    return Probed(host, facts, facts.clock - answer.at, [])


def _usual(known: Sequence[Facts]) -> dict[str, str]:
    """What most hosts have; the first one's where there is no majority."""
    return {
        name: Counter(str(getattr(facts, name)) for facts in known).most_common(1)[0][0]
        for name in (SAME if known else ())
    }


def _faults(one: Probed, usual: dict[str, str], found: Sequence[Probed]) -> list[str]:
    facts, faults = one.facts, []
    assert facts is not None
    for name, title in SAME.items():
        own = str(getattr(facts, name))
        # DeepSpeed's files may lie elsewhere, or come with the package.
        if own == "missing" and (name != "ds_configs" or usual[name] != "missing"):
            faults.append(f"has no {title}")
        elif own != usual[name]:
            faults.append(f"has {title} {own}, others have {usual[name]}")
    some_have = any(other.facts is not None and other.facts.gpus for other in found)
    if some_have and facts.gpus < one.host.slots:
        faults.append(f"has {facts.gpus} GPUs for {one.host.slots} slots")
    if abs(one.skew_seconds) > MAX_SKEW_SECONDS:
        faults.append(f"its clock differs by {one.skew_seconds:+.1f} s")
    if facts.taken_ports:
        faults.append(f"ports in use: {', '.join(map(str, facts.taken_ports))}")
    return faults
