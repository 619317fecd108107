"""Write a checkpoint that is whole or absent, from all ranks together.

DeepSpeed writes weights and optimizer, each rank its random state, rank 0 the rest. Order: write,
sync, read back, manifest, rename, `latest`, rotation. A fault on one rank ends the save on all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch

from sgt_ds import __version__
from sgt_ds.checkpoints import store
from sgt_ds.checkpoints.agreement import SaveFailed, agree_on_save, gather, rank_and_size
from sgt_ds.checkpoints.manifest import (
    DEEPEST_JSON,
    FORMAT,
    STATE_NAME,
    FileRecord,
    Manifest,
    check_sizes,
    nesting,
    record_of,
    write_manifest,
)
from sgt_ds.checkpoints.payload import hashed_file, safe_payload
from sgt_ds.checkpoints.rng import save_rng
from sgt_ds.files import fsync_directory

# DeepSpeed's conversion to another world size refuses a checkpoint without this table. Nothing in
# it needs filling in: no tensor parallelism, no parameter that is padded or averaged.
UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}


def rng_name(rank: int) -> str:
    """Name of a rank's random state."""
    return f"rng_rank_{rank:05d}.safetensors"


def save(
    engine: Any,
    directory: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    keep_last: int,
    group: Any = None,
) -> Path:
    """Save a run's state at `step`; every rank calls this. Returns the new checkpoint's path.

    `engine`: DeepSpeed engine. `directory`: the run's checkpoints, on a disk that all ranks share.
    `state`: JSON-able; rank 0's is written. `group`: host-side (gloo)
    process group of all ranks; None means a single process.
    Raises: SaveFailed on all ranks where any rank failed; earlier checkpoints are untouched then.
    ValueError where `state` is no plain JSON or contradicts what `save` adds, before anything is written.
    """
    document = _document(engine, step, state, group)
    rank, _ = rank_and_size(group)
    try:
        return _save(engine, directory, step, document, keep_last, group)
    except SaveFailed:
        if rank == 0:  # on a full disk the half that was written must not stay
            shutil.rmtree(directory / store.partial_name(step), ignore_errors=True)
        raise


def _save(
    engine: Any, directory: Path, step: int, document: bytes, keep_last: int, group: Any
) -> Path:
    rank, world_size = rank_and_size(group)
    name, partial = store.folder_name(step), directory / store.partial_name(step)
    sequence, fault = 0, None
    if rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            store.remove_leftovers(directory)
            sequence = store.next_sequence(directory)
            partial.mkdir()
        except OSError as error:
            fault = _reason(error)
    agree_on_save(fault, name, group)

    with safe_payload(engine) as payload:
        engine.save_checkpoint(
            str(directory), tag=partial.name, client_state=UNIVERSAL_INFO, save_latest=False
        )
    written, fault = payload.written, payload.fault
    if fault is None:
        try:
            _write_own_files(partial, rank, document, written)
            _read_back(partial, written)
        except OSError as error:
            fault = _reason(error)
    agree_on_save(fault, name, group)

    files = {file: record for share in gather(written, group) for file, record in share.items()}
    fault = None
    if rank == 0:
        try:
            _finish(directory, Manifest(step, sequence, world_size, files))
        except OSError as error:
            fault = _reason(error)
    agree_on_save(fault, name, group)
    path = directory / name
    if rank == 0:
        store.rotate(directory, path, keep_last)
    return path


def _document(engine: Any, step: int, state: Mapping[str, Any], group: Any) -> bytes:
    """The text of state.json."""
    if nesting(dict(state)) >= DEEPEST_JSON:
        raise ValueError(f"state is nested deeper than {DEEPEST_JSON} levels")
    document = {
        "format": FORMAT,
        "version": __version__,
        "step": step,
        "world_size": rank_and_size(group)[1],
        "zero_stage": int(engine.zero_optimization_stage()),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "parameters": parameter_shapes(engine),
    }
    contradicted = [key for key in document if key in state and state[key] != document[key]]
    if contradicted:
        raise ValueError(f"state says otherwise than the checkpoint about {contradicted}")
    return (json.dumps({**document, **state}, indent=1) + "\n").encode()


def parameter_shapes(engine: Any) -> dict[str, list[int]]:
    """Name and shape of every parameter of the engine's module."""
    return {name: list(tensor.shape) for name, tensor in engine.module.named_parameters()}


def _write_own_files(
    partial: Path, rank: int, document: bytes, written: dict[str, FileRecord]
) -> None:
    """The rank's random state, and on rank 0 state.json; synced, and added to `written`."""
    rng = partial / rng_name(rank)
    save_rng(rng)
    with rng.open("rb") as stream:
        os.fsync(stream.fileno())
    written[rng.name] = record_of(rng)
    if rank == 0:
        with hashed_file(partial / STATE_NAME) as stream:
            stream.write(document)
            written[STATE_NAME] = stream.record()


def _read_back(partial: Path, written: Mapping[str, FileRecord]) -> None:
    """Raises: OSError where the disk holds other bytes than were written."""
    for name, record in written.items():
        if record_of(partial / name) != record:
            raise OSError(f"{name} reads back other than it was written")


def _finish(directory: Path, manifest: Manifest) -> None:
    """Rank 0: manifest, rename, `latest`. Raises: OSError, and the folder is as before."""
    partial = directory / store.partial_name(manifest.step)
    if faults := check_sizes(partial, manifest):
        raise OSError(faults[0])
    write_manifest(partial, manifest)
    fsync_directory(partial)
    path = store.install(directory, manifest.step)
    store.point_latest(directory, path.name)


def _reason(error: OSError) -> str:
    return " ".join(str(error).split())
