"""Two hosts on one machine: namespaces for network, host name, processes, and an sshd in each.

They share the file system and the Python, as the hosts of a cluster do; a third namespace holds the
switch between them. Nothing of it reaches the machine's own network, and all of it goes away with
the block, however it ends. Needs root, iproute2, nftables, util-linux and openssh-server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SSH_PORT = 2222
NEEDED = ("ip", "nft", "nsenter", "setpriv", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_SSHD_CONFIG = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
{more}
"""
_SSH_CONFIG = """\
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class NoHosts(Exception):
    """Hosts can't be made here; the message says why."""


@dataclass
class Host:
    """One of them. `init`: its first process, as the machine numbers it; `port`: at the switch."""

    name: str
    address: str
    namespace: str
    port: str
    init: int = 0

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on this host."""
        enter = ["nsenter", "-t", str(self.init), "-n", "-u", "-p", "-m", "--"]
        return [*enter, "env", "-C", str(Path.cwd()), *command]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on this host. The process returned stands outside: see `inside`."""
        return subprocess.Popen(self.command(command), text=True, start_new_session=True, **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        return subprocess.run(
            self.command(command), text=True, capture_output=True, check=False, **options
        )

    def processes(self, part: str = "") -> list[int]:
        """Processes on this host, sshd's left out, whose command line holds `part`."""
        own = _namespace(self.init, "pid")
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and own and _namespace(int(entry.name), "pid") == own:
                line = command_line(int(entry.name))
                if line and part in line and not line.startswith(("sshd", "/usr/sbin/sshd")):
                    found.append(int(entry.name))
        return sorted(found)


@dataclass
class Hosts:
    """Both hosts and what is between them. `folder` holds keys and configuration."""

    first: Host
    second: Host
    switch: str
    folder: Path

    def __iter__(self) -> Iterator[Host]:
        return iter((self.first, self.second))

    def hostfile(self, path: Path, slots: int = 2) -> Path:
        """Write a hostfile of both."""
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self))
        return path

    def unplug(self, host: Host) -> None:
        """Take the host's cable out of the switch."""
        _ip("-n", self.switch, "link", "set", host.port, "down")

    def plug(self, host: Host) -> None:
        """Put it back."""
        _ip("-n", self.switch, "link", "set", host.port, "up")

    def drop(self, percent: int, *, tcp_except: int = 0) -> None:
        """Let each host lose this share of what arrives from the other; 0 ends it.

        `tcp_except`: a port that is spared, as that of sshd in a partition of the others.
        """
        for host in self:
            _run(["ip", "netns", "exec", host.namespace, "nft", "flush", "ruleset"])
            if not percent:
                continue
            chance = "" if percent == 100 else f"numgen random mod 100 < {percent}"
            spare = f"tcp sport {tcp_except} accept\ntcp dport {tcp_except} accept\n"
            rules = (
                "table inet faults {\nchain arriving {\ntype filter hook input priority 0;\n"
                f"{spare if tcp_except else ''}"
                f'iifname "eth0" {chance} drop\n}}\n}}\n'
            )
            _run(["ip", "netns", "exec", host.namespace, "nft", rules])

    def kill(self, host: Host) -> None:
        """End every process of a host at once, its first one too."""
        os.kill(host.init, signal.SIGKILL)

    def boot(self, host: Host, sshd: Mapping[str, str] | None = None) -> None:
        """Start a host's first process, an sshd. `sshd`: the environment of its sessions."""
        more = " ".join(f"{name}={value}" for name, value in (sshd or {}).items())
        config = self.folder / f"sshd_{host.name}"
        config.write_text(
            _SSHD_CONFIG.format(
                port=SSH_PORT, folder=self.folder, more=f"SetEnv {more}" if more else ""
            )
        )
        program = shutil.which("sshd", path=PATH)
        # Shared memory of its own: what names a segment after a process would meet the other host's.
        shared = "mount -t tmpfs -o size=1g tmpfs /dev/shm"
        server = f"exec {program} -D -f {config} -E {config}.log"
        inner = f"hostname {host.name} && {shared} && {server}"
        # Whatever ends this process, the kernel ends the host with it.
        tied = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", host.namespace]
        own = ["unshare", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            [*tied, *own, "sh", "-c", inner],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # where it is already killed, unshare complains
            env={**os.environ, "PATH": PATH},
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            children = _children(process.pid)
            if children and _listens(children[0]):
                host.init = children[0]
                return
            if process.poll() is not None:
                break
            time.sleep(0.05)
        process.kill()
        raise NoHosts(f"no sshd on {host.name}: see {config}.log")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make `host-a` and `host-b`, give them out, and take them away. Raises: NoHosts.

    Each one's own name resolves to 127.0.1.1, as Debian has it, and a network that only it sees
    comes first: what takes the wrong one of its addresses fails.
    """
    if os.geteuid() != 0:
        raise NoHosts("not root")
    for program in NEEDED:
        if shutil.which(program, path=PATH) is None:
            raise NoHosts(f"{program} is not installed")
    _sweep()
    tag = f"sgt{os.getpid()}-{secrets.token_hex(2)}"
    first = Host("host-a", "10.77.0.1", f"{tag}a", "pa")
    second = Host("host-b", "10.77.0.2", f"{tag}b", "pb")
    hosts = Hosts(first, second, f"{tag}s", folder)
    try:
        _wire(hosts)
        for name in ("key", "host_key"):
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)])
        Path("/run/sshd").mkdir(exist_ok=True)
        for host, other in ((first, second), (second, first)):
            _write_etc(host, other, folder)
            hosts.boot(host)
        yield hosts
    finally:
        for host in hosts:
            if host.init and _namespace(host.init, "pid"):
                hosts.kill(host)
        for namespace in (first.namespace, second.namespace, hosts.switch):
            _forget(namespace)


def command_line(pid: int) -> str:
    """The command line of a process; '' once it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def inside(process: subprocess.Popen[Any]) -> int:
    """The process that `Host.start` started, as the machine numbers it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if children := _children(process.pid):
            return children[0]
        time.sleep(0.02)
    raise AssertionError("it has ended")


def _forget(namespace: str) -> None:
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
    subprocess.run(
        ["ip", "netns", "del", namespace],
        check=False,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": PATH},
    )


def _sweep() -> None:
    """Take away the names that a killed process of this module has left."""
    for path in Path("/run/netns").glob("sgt*-*"):
        maker = path.name[3:].partition("-")[0]
        if maker.isdecimal() and not (Path("/proc") / maker).exists():
            _forget(path.name)


def _wire(hosts: Hosts) -> None:
    for namespace in (hosts.switch, hosts.first.namespace, hosts.second.namespace):
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", hosts.switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", hosts.switch, "link", "set", "br0", "up")
    for host in hosts:
        inside_host = ("-n", host.namespace)
        # The network that nobody else sees: a pair of which both ends stay here.
        _ip(*inside_host, "link", "add", "ens0", "type", "veth", "peer", "name", "ens0p")
        _ip(*inside_host, "addr", "add", "192.168.99.1/24", "dev", "ens0")
        _ip(*inside_host, "link", "set", "ens0", "up")
        _ip(*inside_host, "link", "set", "ens0p", "up")
        pair = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("-n", hosts.switch, "link", "add", host.port, *pair)
        _ip("-n", hosts.switch, "link", "set", host.port, "master", "br0", "up")
        _ip(*inside_host, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside_host, "link", "set", "eth0", "up")


def _write_etc(host: Host, other: Host, folder: Path) -> None:
    """What `ip netns exec` lays over /etc."""
    etc = Path("/etc/netns") / host.namespace
    (etc / "ssh").mkdir(parents=True)
    (etc / "ssh" / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    (etc / "hosts").write_text(
        f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
    )
    # Who comes by ssh has a bare home: what this machine's start-up files do is not of the tests.
    home = folder / f"home-{host.name}"
    home.mkdir()
    (etc / "passwd").write_text(_with_home(Path("/etc/passwd").read_text(), home))


def _with_home(passwd: str, home: Path) -> str:
    """The users, root's home moved."""
    users = [line.split(":") for line in passwd.splitlines()]
    return "".join(
        ":".join([*user[:5], str(home), *user[6:]] if user[0] == "root" else user) + "\n"
        for user in users
    )


def _listens(pid: int) -> bool:
    """Whether sshd of the process's network listens."""
    try:
        rows = (Path("/proc") / str(pid) / "net" / "tcp").read_text().splitlines()
    except OSError:
        return False
    return any(f":{SSH_PORT:04X} " in row and " 0A " in row for row in rows)


def _children(pid: int) -> list[int]:
    try:
        text = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _namespace(pid: int, kind: str) -> str:
    try:
        return str((Path("/proc") / str(pid) / "ns" / kind).readlink())
    except OSError:
        return ""


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH}
    )
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":  # a shell on the first host
    import tempfile

    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name)) as made:
        for one in made:
            print(f"{one.name}: {' '.join(one.command(['sh']))}", file=sys.stderr)
        subprocess.run(made.first.command(["sh"]), check=False)
