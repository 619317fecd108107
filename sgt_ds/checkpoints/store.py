"""The folder of a run's checkpoints: what exists, the newest good one, what may be removed.

Knows no torch until it looks into tensor files. DeepSpeed's own `latest` is never read; ours is a
pointer for people and tools, and resuming goes by what verifies.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sgt_ds.checkpoints.manifest import (
    ANOTHER,
    MANIFEST_NAME,
    STATE_NAME,
    check_sizes,
    read_json_object,
    read_manifest,
    record_of,
)
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import fsync_directory, write_text_atomically

log = logging.getLogger(__name__)

LATEST_NAME = "latest"
LONGEST_NAME = 64

_RNG_PREFIX = "rng_rank_"
_FOLDER = re.compile(r"step-([0-9]{8,})")
_PARTIAL_SUFFIX = ".partial"
_REPLACED_SUFFIX = ".replaced"
_LEFTOVER = re.compile(r"\.(step-[0-9]{8,})(\.partial|\.replaced)")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a folder, as its manifest and file sizes tell it.

    `fault`: why it is no whole checkpoint, or None; its contents are only read by `verify`.
    `latest`: whether the folder's pointer names it. `validation_loss`: of these weights, or None.
    """

    path: Path
    step: int
    sequence: int
    world_size: int
    size_bytes: int
    latest: bool
    fault: str | None
    validation_loss: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "path": str(self.path)}


def folder_name(step: int) -> str:
    """Name of the checkpoint of `step`: `step-00000250`."""
    return f"step-{step:08d}"


def partial_name(step: int) -> str:
    """Name under which that checkpoint is written until it is whole."""
    return f".{folder_name(step)}{_PARTIAL_SUFFIX}"


def rng_name(rank: int) -> str:
    """Name of a rank's random state in a checkpoint."""
    return f"{_RNG_PREFIX}{rank:05d}.safetensors"


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Checkpoints in `directory`, newest first; damaged ones too, with their fault.

    One whose manifest is damaged counts as newer than those of earlier steps; one that has none
    comes last: it is half removed.
    Raises: UserError where `directory` is not a folder.
    """
    if not directory.is_dir():
        raise UserError(
            directory,
            None,
            "no such folder of checkpoints; give a run directory, or its checkpoints/",
        )
    pointer = read_latest(directory)
    found = [
        _info(entry, int(match[1]), entry.name == pointer)
        for entry in directory.iterdir()
        if (match := _FOLDER.fullmatch(entry.name)) and entry.is_dir()
    ]
    found = [_placed(info, found) for info in found]
    return sorted(found, key=lambda info: (info.sequence, info.step), reverse=True)


def _placed(info: CheckpointInfo, all_of_them: list[CheckpointInfo]) -> CheckpointInfo:
    """The same with a place in the order, where a damaged manifest does not tell it."""
    if info.sequence >= 0 or not os.path.lexists(info.path / MANIFEST_NAME):
        return info
    before = [other.sequence for other in all_of_them if other.step < info.step]
    return replace(info, sequence=max(before, default=-1))


def read_latest(directory: Path) -> str | None:
    """Name that the pointer `latest` holds, or None where there is none."""
    pointer = directory / LATEST_NAME
    try:
        if pointer.is_symlink() or not pointer.is_file():  # it may lead anywhere, or never end
            return None
        with pointer.open("rb") as stream:
            name = stream.read(LONGEST_NAME).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _FOLDER.fullmatch(name) else None


def pointer_fault(directory: Path) -> str | None:
    """What is wrong with `latest`: it is there and names no checkpoint that is. None: nothing.

    Nothing that resumes reads it; it is for people and their scripts.
    """
    pointer = directory / LATEST_NAME
    if not pointer.exists() and not pointer.is_symlink():
        return None
    name = read_latest(directory)
    if name is not None and (directory / name).is_dir():
        return None
    return f"{LATEST_NAME}: does not name a checkpoint in this folder; the next save rewrites it"


def verify(path: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every file of the checkpoint `path`. Returns its faults, each naming the file.

    A fault is a missing, foreign or changed file, a damaged manifest or state, or a tensor file
    whose pickle asks for code. `on_bytes` hears of each piece read.
    """
    from sgt_ds.checkpoints.pickles import PAYLOAD_SUFFIX, payload_fault

    if not path.is_dir():
        return ["no such checkpoint; `sgt-ds checkpoint list RUN` lists those of a run"]
    try:
        manifest = read_manifest(path)
    except UserError as error:
        return [_fault_in(path, error)]
    faults = check_sizes(path, manifest)
    broken = {fault.split(":")[0] for fault in faults}
    for name, record in sorted(manifest.files.items()):
        if name in broken:
            continue
        try:
            if record_of(path / name, on_bytes) != record:
                faults.append(f"{name}: differs from what was written (xxh3 does not match)")
                continue
        except OSError as error:
            faults.append(f"{name}: {refusal(error, 'read', ANOTHER)}".removesuffix(f"; {ANOTHER}"))
            continue
        if name.endswith(PAYLOAD_SUFFIX) and (foreign := payload_fault(path / name)):
            faults.append(f"{name}: {foreign}")
    ranks = sum(name.startswith(_RNG_PREFIX) for name in manifest.files)
    if ranks != manifest.world_size:
        faults.append(
            f"{MANIFEST_NAME}: names the random state of {ranks} ranks, but its world_size is "
            f"{manifest.world_size}"
        )
    if not any(fault.startswith(f"{STATE_NAME}:") for fault in faults):
        try:
            state = read_state(path)
        except UserError as error:
            faults.append(_fault_in(path, error))
        else:
            faults += [
                f"{STATE_NAME}: {key} differs from {MANIFEST_NAME} ({wanted})"
                for key, wanted in (("step", manifest.step), ("world_size", manifest.world_size))
                if type(state.get(key)) is not int or state[key] != wanted
            ]
    return faults


def read_state(path: Path) -> dict[str, Any]:
    """The checkpoint's `state.json`: what the run put in, and what `save` added.

    Raises: UserError where it is missing or damaged.
    """
    if not os.path.lexists(path / STATE_NAME):
        raise UserError(
            path,
            STATE_NAME,
            "is missing: not a checkpoint; give one of a run, RUN_DIR/checkpoints/step-…",
        )
    return read_json_object(path / STATE_NAME)


def newest_good(directory: Path, *, until: int | None = None) -> CheckpointInfo | None:
    """The newest checkpoint of `directory` that verifies; None where there is none.

    `until`: look only at those of that step or earlier ones. Each one that is passed over is
    logged with the reason.
    """
    if not directory.is_dir():
        return None
    for info in list_checkpoints(directory):
        if until is not None and info.step > until:
            continue
        faults = [info.fault] if info.fault else verify(info.path)
        if not faults:
            return info
        more = f" and {len(faults) - 1} more faults" if len(faults) > 1 else ""
        log.warning("checkpoint %s is skipped: %s%s", info.path, faults[0], more)
    return None


def point_latest(directory: Path, name: str) -> None:
    """Move the pointer `latest` to `name`, atomically."""
    write_text_atomically(directory / LATEST_NAME, name + "\n")


def install(directory: Path, step: int) -> Path:
    """Give the whole, synced partial checkpoint of `step` its name. Returns its path.

    A checkpoint of that name (damaged, or of a history that the run went back behind) is replaced.
    """
    final = directory / folder_name(step)
    replaced = directory / f".{final.name}{_REPLACED_SUFFIX}"
    if final.exists():
        final.rename(replaced)
    (directory / partial_name(step)).rename(final)
    fsync_directory(directory)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def remove_leftovers(directory: Path) -> None:
    """Remove what a run that died while saving left; bring back what it had just set aside."""
    for entry in list(directory.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None:
            continue
        if match[2] == _REPLACED_SUFFIX and not (directory / match[1]).exists():
            entry.rename(directory / match[1])
            continue
        log.warning("removing %s, left over from an interrupted save", entry)
        shutil.rmtree(entry)


def next_sequence(directory: Path) -> int:
    """One more than the largest sequence number in `directory`."""
    return max((info.sequence for info in list_checkpoints(directory)), default=-1) + 1


def _info(path: Path, step: int, latest: bool) -> CheckpointInfo:
    try:
        if path.is_symlink():
            raise UserError(path, None, "is a link; move the checkpoint itself here")
        manifest = read_manifest(path)
        faults = check_sizes(path, manifest)
        if manifest.step != step:
            faults.append(f"{MANIFEST_NAME}: is for step {manifest.step}")
        return CheckpointInfo(
            path,
            step,
            manifest.sequence,
            manifest.world_size,
            manifest.total_bytes,
            latest,
            faults[0] if faults else None,
            manifest.validation_loss,
        )
    except (UserError, OSError) as error:
        # Nothing says how old it is.
        fault = _fault_in(path, error) if isinstance(error, UserError) else str(error)
        return CheckpointInfo(path, step, -1, 0, 0, latest, fault)


def _fault_in(path: Path, error: UserError) -> str:
    """An error of the checkpoint `path` as one of its faults, which name a file and no remedy."""
    told = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")
    return told.removesuffix(f"; {ANOTHER}")


def resolve(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest good one of a run or of its folder.

    Raises: UserError where `path` is neither, or none of its checkpoints is good.
    """
    if (path / MANIFEST_NAME).exists() or _FOLDER.fullmatch(path.name):
        return path
    for directory in (path / "checkpoints", path):
        if directory.is_dir():
            info = newest_good(directory)
            if info is None:
                raise UserError(directory, None, "holds no good checkpoint; name another folder")
            return info.path
    raise UserError(
        path,
        None,
        "no such run or checkpoint; give a run directory, its checkpoints/, or one of them",
    )


def bytes_to_verify(path: Path) -> int:
    """Bytes that `verify` reads, for a progress bar; 0 where nothing can be read."""
    try:
        manifest = read_manifest(path)
        broken = {fault.split(":")[0] for fault in check_sizes(path, manifest)}
    except (UserError, OSError):
        return 0
    return sum(record.size for name, record in manifest.files.items() if name not in broken)
