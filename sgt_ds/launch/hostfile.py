"""Hostfiles: `host slots=N` lines in, hosts or one clear error out. Contacts no host.

Stricter than DeepSpeed, whose pattern takes `slots=0` and `slots=8x`, and which trains on one node
where the file is missing. What passes here means the same to DeepSpeed, pdsh, ssh and OpenMPI.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgt_ds.config import shipped_hostfile
from sgt_ds.errors import UserError, refusal

MAX_BYTES = 1 << 20
MAX_SLOTS = 1024

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_DOTTED = re.compile(r"[0-9.]+")
_SLOTS = re.compile(r"slots=([0-9]+)", re.ASCII)
_LOOPBACK = re.compile(r"localhost(?:\..*)?|127\.[0-9.]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Host:
    """One machine and how many ranks it runs. `line`: where the hostfile names it, from 1."""

    name: str
    slots: int
    line: int

    @property
    def is_loopback(self) -> bool:
        """Whether the name means the machine that reads it."""
        return _LOOPBACK.fullmatch(self.name) is not None


def parse_hostfile(path: Path) -> list[Host]:
    """Read a hostfile. Comments (`#`, also behind an entry), blank lines, tabs and CRLF are fine.

    Raises: UserError with the line's number, for anything that DeepSpeed, pdsh, ssh or OpenMPI
    would read otherwise than it looks.
    """
    hosts: list[Host] = []
    seen: dict[str, Host] = {}
    for number, line in enumerate(_lines(path), start=1):
        entry = line.split("#", 1)[0].strip(" \t")
        if not entry:
            continue
        host = _parse_entry(path, number, entry)
        key = host.name.rstrip(".").lower()
        if key in seen:
            raise UserError(
                path,
                f"line {number}",
                f"{host.name} is already on line {seen[key].line}; keep one line for it, with all "
                "its slots",
            )
        seen[key] = host
        hosts.append(host)
    if not hosts:
        raise UserError(path, None, "lists no hosts; write lines like `worker-1 slots=8`")
    if len(hosts) > 1:
        for host in hosts:
            if host.is_loopback:
                raise UserError(
                    path,
                    f"line {host.line}",
                    f"{host.name} means a different machine on each host; write the name by which "
                    "the other hosts reach it",
                )
    return hosts


def is_hostfile(path: Path) -> bool:
    """Whether it reads as one."""
    try:
        return path.is_file() and bool(parse_hostfile(path))
    except UserError:
        return False


def world_size(hosts: Sequence[Host]) -> int:
    """Ranks of all hosts together."""
    return sum(host.slots for host in hosts)


def format_hostfile(hosts: Sequence[Host]) -> str:
    """The plainest text that means these hosts."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def _lines(path: Path) -> list[str]:
    if not path.exists():
        example = shipped_hostfile(path)
        mend = "write one" if example is None else f"copy the example {example} and edit it"
        raise UserError(
            path,
            None,
            f"no such hostfile; check the path, relative to the current directory, or {mend}: one "
            "line per machine, e.g. `worker-1 slots=8`",
        )
    try:
        if not path.is_file():
            raise UserError(path, None, "is not a file; give the path of a hostfile")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(path, None, f"has more than {MAX_BYTES} bytes; is it a hostfile?")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(path, None, refusal(error, "read")) from None
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            path,
            "line 1",
            "begins with a byte-order mark, which becomes part of the host's name; "
            "save it as UTF-8 without BOM",
        )
    lines = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        line = line.removesuffix(b"\r")
        if any(byte < 0x20 and byte != 0x09 for byte in line) or 0x7F in line:
            raise UserError(path, f"line {number}", "holds a control character; remove it")
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise UserError(path, f"line {number}", "is not UTF-8; write plain ASCII") from None
    return lines


def _parse_entry(path: Path, number: int, entry: str) -> Host:
    field = f"line {number}"
    name, *rest = re.split(r"[ \t]+", entry)
    _check_name(path, field, name)
    if not rest:
        raise UserError(path, field, f"gives {name} no slots; write `{name} slots=8`")
    match = _SLOTS.fullmatch(rest[0])
    if match is None:
        raise UserError(
            path,
            field,
            f"{' '.join(rest)!r} is not `slots=N`; write it without spaces, N in digits",
        )
    if len(rest) > 1:
        raise UserError(
            path, field, f"{' '.join(rest[1:])!r} after the slots is not understood; remove it"
        )
    digits = match[1].lstrip("0")
    if not digits:
        raise UserError(path, field, f"slots=0 gives {name} no ranks; remove the line or raise it")
    if len(digits) > len(str(MAX_SLOTS)) or int(digits) > MAX_SLOTS:
        raise UserError(
            path,
            field,
            f"slots={match[1][:20]} is more than any host has; set {MAX_SLOTS} or fewer",
        )
    return Host(name, int(digits), number)


def _check_name(path: Path, field: str, name: str) -> None:
    if name.startswith("-"):
        raise UserError(path, field, f"{name!r} begins with '-': ssh would take it for an option")
    if "=" in name:
        raise UserError(
            path, field, f"{name!r} is where the host name belongs; write `host slots=8`"
        )
    if ":" in name:
        raise UserError(
            path,
            field,
            f"{name!r} holds ':', which DeepSpeed parses as `host:slots`; for an IPv6 address use "
            "a host name that /etc/hosts maps to it",
        )
    if "@" in name:
        raise UserError(
            path, field, f"{name!r} contains a user; set `User` for it in ~/.ssh/config"
        )
    if len(name) > 253 or _NAME.fullmatch(name) is None:
        raise UserError(
            path, field, f"{name[:80]!r} is not a host name; use letters, digits, '-', '_' and '.'"
        )
    if _DOTTED.fullmatch(name):
        parts = name.split(".")
        if len(parts) != 4 or any(not part or len(part) > 3 or int(part) > 255 for part in parts):
            raise UserError(
                path,
                field,
                f"{name!r} is not an IPv4 address: write four numbers from 0 to 255, or a host name",
            )
