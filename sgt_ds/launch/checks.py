"""Faults that can be detected before a launch, except those of data sets.

Starts no training, imports no torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from sgt_ds.checkpoints import STATE_NAME, read_state
from sgt_ds.config import (
    ModelConfig,
    RunConfig,
    RunLayout,
    check_only_run,
    check_run_directory,
    check_start,
    resolve_deepspeed,
)
from sgt_ds.errors import UserError, refusal
from sgt_ds.launch.command import Target, check_launcher
from sgt_ds.launch.probe import probe
from sgt_ds.launch.run_processes import check_idle
from sgt_ds.progress import counted
from sgt_ds.telemetry import Certificate, check_trackers

STALE_LOCK_SECONDS = 300.0


def check_launch(config: RunConfig, config_file: str, target: Target) -> None:
    """Check batch sizes, the run directory, the DeepSpeed file, address and ports, launcher,
    compiler, build locks, packages that telemetry needs.

    `config_file`: name of the YAML, for messages. Raises: UserError, the first that is found.
    """
    check_launcher(target)
    resolve_deepspeed(config, target.world_size, config_file)
    check_run_directory(config)
    check_can_be_made(config.run_dir, "run_dir", config_file)
    if not target.node_rank:  # the first host's run may have begun
        check_only_run(config, config_file, target.hostfile)
        check_idle(config.run_dir)
    for host in target.own_hosts:
        _check_ports(config, config_file, host.slots)
        if target.master_port is not None and target.hosts[0] is host:
            _check_port("", target.master_port, "--master-port", None, "choose another")
    if config.training.compile:
        check_compiler(config_file)
    _check_password(config, config_file, target)
    telemetry = config.telemetry
    if telemetry.enabled and telemetry.certificate and telemetry.private_key:
        Certificate(telemetry.certificate, telemetry.private_key, telemetry.client_ca)
    if telemetry.enabled and target.has_first_rank:
        trackers = {"tensorboard": telemetry.tensorboard, "wandb": telemetry.wandb is not None}
        check_trackers(name for name, is_on in trackers.items() if is_on)
    check_named_checkpoints(config, config_file)
    _check_steps(config, config_file)
    # Once saved, a run needs its start no more.
    if config.init is not None and not RunLayout(config.run_dir).has_checkpoints():
        check_start(config.init)
    check_build_locks()
    check_hosts(config, target)


def check_side_folders(config: RunConfig, config_file: str, target: Target) -> None:
    """Look whether the ranks here can make and write the folders that a run fills beside `run_dir`.

    For a first start: a restart goes on without them, as does a run whose disk fails.
    Raises: UserError.
    """
    telemetry = config.telemetry
    if telemetry.enabled and telemetry.targets_dir is not None and target.has_first_rank:
        check_can_be_made(telemetry.targets_dir, "telemetry.targets_dir", config_file)
    cache = config.training.compile_cache
    if cache is None or not config.training.compile or not target.own_hosts:
        return
    # One that may only be read serves as well.
    if not os.access(f"{cache}/.", os.F_OK):
        check_can_be_made(cache, "training.compile_cache", config_file)


def check_can_be_made(folder: Path, field: str, config_file: str) -> None:
    """Leaves nothing behind. `field`: the key that names `folder`.

    Raises: UserError where nothing can be written to `folder`, or no folder can be made there.
    """
    path, key = folder.absolute(), field.rpartition(".")[2]
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise UserError(
            config_file, field, f"{there} is not a folder; choose a {key} other than {folder}"
        )
    try:
        # Permission bits tell too little: they let root write to /proc.
        Path(tempfile.mkdtemp(prefix=".sgt-ds-", dir=there)).rmdir()
    except OSError as error:
        raise UserError(
            config_file,
            field,
            f"{folder}: nothing can be created in {there} ({error.strerror}); choose another {key}",
        ) from None


def check_hosts(config: RunConfig, target: Target) -> None:
    """Ask all hosts by ssh whether they fit each other and see the run directory.

    Raises: UserError with the first fault, and how many more there are.
    """
    if not target.remote_hosts:
        return
    run_dir = config.run_dir.resolve()
    found = probe(
        target.hosts,
        shared=next(path for path in (run_dir, *run_dir.parents) if path.is_dir()),
        ssh_port=target.ssh_port,
        metrics_port=config.telemetry.port if _needs_its_ports(config) else None,
        master_port=target.master_port,
    )
    faults = [(one.host, fault) for one in found for fault in one.faults]
    if faults:
        host, fault = faults[0]
        more = f" (and {len(faults) - 1} more: `sgt-ds hostfile check --probe`)"
        raise UserError(
            str(target.hostfile),
            f"line {host.line}",
            f"{host.name} {fault}{more if len(faults) > 1 else ''}",
        )


def check_named_checkpoints(config: RunConfig, config_file: str) -> None:
    """Raises: UserError where `resume` or `fork` names no checkpoint, or one of another shape."""
    layout = RunLayout(config.run_dir)
    own = layout.checkpoints.resolve() if layout.has_checkpoints() else None
    for key, path in (("resume", config.resume), ("fork", config.fork)):
        if not isinstance(path, Path):
            continue
        # A run that has saved some loads no others: where it began may be gone.
        of_own = (path.resolve().parent, path.resolve(), RunLayout(path).checkpoints.resolve())
        if own is None or own in of_own:
            _check_is_checkpoint(path, key, config_file)
            check_architecture(config, config_file, path)


def _check_is_checkpoint(path: Path, key: str, config_file: str) -> None:
    try:
        if (path / STATE_NAME).exists():
            return
        fault = _fault_of_folder(path)
    except OSError as error:
        fault = refusal(error, "looked at")
    raise UserError(config_file, key, f"{path} {fault}")


def _fault_of_folder(path: Path) -> str:
    """What `path` is instead of a checkpoint, and the mend. Raises: OSError."""
    for run_dir, what in ((path, "a run directory"), (path.parent, "the folder of checkpoints")):
        newest = RunLayout(run_dir).newest_checkpoint()
        if newest is not None and path in (run_dir, newest.parent):
            return f"is {what}; name one checkpoint in it, e.g. {newest}"
    if not path.is_dir():
        return "is not a checkpoint directory; check the path"
    return (
        f"holds no {STATE_NAME}, so it is not a checkpoint; give one of a run, "
        "RUN_DIR/checkpoints/step-…"
    )


def fork_step(config: RunConfig) -> int:
    """The update after which a fork begins; 0 for another run, or one that has checkpoints."""
    if config.fork is None or RunLayout(config.run_dir).has_checkpoints():
        return 0
    step = read_state(config.fork).get("step")
    return step if isinstance(step, int) else 0


def _check_steps(config: RunConfig, config_file: str) -> None:
    """Raises: UserError where a fork has nothing left to train."""
    step = fork_step(config)
    if step >= config.training.steps:
        raise UserError(
            config_file,
            "training.steps",
            f"{config.training.steps} is not above the fork's step {step}; steps count from the "
            f"start of its parent, so give {step + 1} or more",
        )


def check_architecture(config: RunConfig, config_file: str, checkpoint: Path) -> None:
    """Raises: UserError where weights of `checkpoint` have another shape than the run's model."""
    try:
        theirs = ModelConfig.model_validate(read_state(checkpoint)["model"])
    except (KeyError, ValueError):
        return  # no run has saved it; what its tensors are, the ranks will see
    # Rows that pad the vocabulary are weights like others.
    shape = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "padded_vocab_size")
    for name in shape:
        if getattr(theirs, name) != getattr(config.model, name):
            key = name.removeprefix("padded_")
            saved = getattr(theirs, key)
            raise UserError(
                config_file,
                f"model.{key}",
                f"is {getattr(config.model, key)}, but {saved} in {checkpoint}; set {saved}, or "
                "name another checkpoint",
            )


def check_compiler(config_file: str) -> None:
    """Raises: UserError where torch.compile would find no C++ compiler."""
    chosen = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([chosen] if chosen else ["g++", "clang++"])):
        raise UserError(
            config_file,
            "training.compile",
            f"needs a C++ compiler, and {chosen or 'g++'} was not found; install one, or set it "
            "to false",
        )


def check_build_locks(cache: Path | None = None) -> None:
    """Raises: UserError where a killed build of an extension left a lock that makes runs hang.

    `cache`: torch's folder of extension builds, by default the one it uses.
    """
    if cache is None:
        given = os.environ.get("TORCH_EXTENSIONS_DIR")
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = Path(given) if given else base / "torch_extensions"
    for lock in sorted([*cache.glob("*/lock"), *cache.glob("*/*/lock")]):
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        if age > STALE_LOCK_SECONDS:
            raise UserError(
                lock,
                None,
                f"is {age / 60:.0f} minutes old: a killed build left it, and every run would wait "
                "for it; remove it",
            )


def _check_password(config: RunConfig, config_file: str, target: Target) -> None:
    """Other hosts read the resolved configuration, which holds asterisks in a password's place."""
    telemetry = config.telemetry
    if telemetry.enabled and telemetry.password is not None and not target.local:
        raise UserError(
            config_file,
            "telemetry.password",
            "is not passed to ranks on other hosts; use telemetry.password_file",
        )


def _needs_its_ports(config: RunConfig) -> bool:
    """Whether a metrics port that is taken ends the run."""
    return config.telemetry.enabled and config.telemetry.port_in_use == "error"


def _check_ports(config: RunConfig, config_file: str, ranks: int) -> None:
    telemetry = config.telemetry
    if not telemetry.enabled:
        return
    if telemetry.port + ranks - 1 > 65535:
        raise UserError(
            config_file,
            "telemetry.port",
            f"{telemetry.port} leaves no ports for {counted(ranks, 'rank')}; "
            f"set {65536 - ranks} or less",
        )
    _check_address(telemetry.host, config_file)
    if not _needs_its_ports(config):
        return
    for port in range(telemetry.port, telemetry.port + ranks):
        _check_port(
            telemetry.host,
            port,
            config_file,
            "telemetry.port",
            f"choose another ({counted(ranks, 'port')} from there on must be free), or set "
            "telemetry.port_in_use: next to take the next free one",
        )


def _check_address(host: str, config_file: str) -> None:
    """Raises: UserError where the exporters could listen on no port of `host`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family) as listener:
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            config_file,
            "telemetry.host",
            f"'{host}' is not an address of this machine ({why}); give one of its addresses, or "
            "0.0.0.0 for all",
        ) from None


def _check_port(host: str, port: int, file: str, field: str | None, remedy: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "ports end at 65535"
            raise UserError(file, field, f"port {port} cannot be used ({why}); {remedy}") from None
