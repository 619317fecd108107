"""`sgt-ds checkpoint`: list the checkpoints of a run, and verify every byte of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_group, print_json
from sgt_ds.errors import ALLOW_ACCESS, UserError
from sgt_ds.progress import counted


def register(commands: Subparsers[Parser]) -> None:
    """Add the commands."""
    group = add_group(commands, "checkpoint", "List and verify checkpoints.")
    listing = add_command(
        group,
        "list",
        "List the checkpoints of a run, newest first.",
        "sgt-ds checkpoint list runs/573m-sgt",
        show,
    )
    listing.add_argument(
        "directory", type=Path, metavar="DIR", help="run directory, or its checkpoints/"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    verifying = add_command(
        group,
        "verify",
        "Read every file of one checkpoint, or of all in a run, and report what is wrong.",
        "sgt-ds checkpoint verify runs/573m-sgt",
        check,
    )
    verifying.add_argument(
        "directory", type=Path, metavar="DIR", help="checkpoint, run directory, or its checkpoints/"
    )
    verifying.add_argument("--json", action="store_true", help="print JSON")


def show(options: argparse.Namespace) -> None:
    """Print the table."""
    from sgt_ds.checkpoints import list_checkpoints
    from sgt_ds.config import RunLayout

    folder = _folder(options.directory)
    found = list_checkpoints(folder)
    if not found and not RunLayout(folder).is_there() and not RunLayout(folder.parent).is_there():
        message = "holds neither a run nor checkpoints; give the directory of a run"
        raise UserError(options.directory, None, message)
    if options.json:
        print_json([info.as_json() for info in found])
        return
    for info in found:
        size = f"{info.size_bytes / 1e6:,.1f} MB"
        ranks = counted(info.world_size, "rank")
        loss = info.validation_loss
        mark = "" if loss is None else f"  validation loss {loss:.4f}"
        mark += "  latest" if info.latest else ""
        fault = f"  DAMAGED: {info.fault}" if info.fault else ""
        print(f"{info.path.name}  step {info.step:,}  {ranks}  {size}{mark}{fault}")
    if not found:
        print("no checkpoints yet")


def check(options: argparse.Namespace) -> int:
    """Print each checkpoint's faults. Returns 2 where there is one."""
    import sys
    from contextlib import ExitStack

    from sgt_ds.checkpoints import (
        MANIFEST_NAME,
        bytes_to_verify,
        list_checkpoints,
        pointer_fault,
        verify,
    )
    from sgt_ds.progress import Progress

    given: Path = options.directory
    if (given / MANIFEST_NAME).exists() or given.name.startswith("step-"):
        paths = [given]
        pointer = None
    else:
        paths = [info.path for info in list_checkpoints(_folder(given))]
        pointer = pointer_fault(_folder(given))
    if not paths:
        raise UserError(given, None, "holds no checkpoints; give the directory of a run that saved")
    total_bytes = sum(bytes_to_verify(path) for path in paths)
    with ExitStack() as stack:
        # A small checkpoint is read before a bar would be seen.
        large = total_bytes > 200e6
        bar = stack.enter_context(Progress("verify", total_bytes, "B")) if large else None
        on_bytes = bar.advance if bar is not None else None
        report = [(path, verify(path, on_bytes)) for path in paths]
    if options.json:
        print_json(
            [{"path": str(path), "good": not faults, "faults": faults} for path, faults in report]
        )
    remedy = _remedy(given, report)
    for path, faults in report:
        if not faults and not options.json:
            print(f"{path}: good")
        for number, fault in enumerate(faults, 1):
            is_last = number == len(faults) and path.is_dir()
            end = remedy if is_last and not fault.endswith(ALLOW_ACCESS) else ""
            print(f"sgt-ds: {path}: {fault}{end}", file=sys.stderr)
    if pointer is not None:
        print(f"sgt-ds: {_folder(given)}: {pointer}", file=sys.stderr)
    return 2 if pointer is not None or any(faults for _, faults in report) else 0


def _remedy(given: Path, report: list[tuple[Path, list[str]]]) -> str:
    """What to take in place of a damaged checkpoint, as the end of its line."""
    good = next((path for path, faults in report if not faults), None)
    if good is not None:
        return f"; use {good.name}"
    alone = [path for path, _ in report] == [given]
    if alone and any(path != given for path in given.parent.glob("step-*")):
        return f"; use another one: `sgt-ds checkpoint verify {given.parent}` lists the good ones"
    return "; none here is good; restore them from a copy, or retrain"


def _folder(directory: Path) -> Path:
    inner = directory / "checkpoints"
    return inner if inner.is_dir() else directory
