"""Write atomic checkpoints, from all ranks together, while training continues.

A save has three parts. *Taking*, by the training thread: DeepSpeed hands over weights and
optimizer, they are copied to host memory with the rank's random state. *Writing*, by a thread of
each rank: files, synced and read back. *Finishing*, by a thread of rank 0 once all ranks have
written: manifest, rename, `latest`, rotation. The threads touch files alone; every collective is
called by the training thread, at a place that is the same on all ranks (`advance`).
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import deepspeed
import torch

from sgt_ds import __version__
from sgt_ds.checkpoints import store
from sgt_ds.checkpoints.agreement import SaveFailed, agree_on_save, gather, rank_and_size
from sgt_ds.checkpoints.contents import parameter_shapes, saved_sizes
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
from sgt_ds.checkpoints.payload import SafePayload, safe_payload, write_hashed
from sgt_ds.checkpoints.retention import Retention, settle
from sgt_ds.checkpoints.rng import rng_bytes
from sgt_ds.checkpoints.snapshot import Snapshots
from sgt_ds.files import fsync_directory

log = logging.getLogger(__name__)

# DeepSpeed's conversion to another world size refuses a checkpoint without this table. Nothing in
# it needs filling in: no tensor parallelism, no parameter that is padded or averaged.
UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete.

    `seconds`: from its beginning until all of it was on the disk and in place. `stall_seconds`:
    how long the training thread of this rank did nothing else.
    """

    step: int
    path: Path
    seconds: float
    stall_seconds: float


class _Job:
    """Work of this rank on the disk, in a thread of its own. `fault`: why it failed, or None."""

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self.fault: str | None = None
        self._work = work
        self._thread = Thread(target=self._run, name="checkpoint") if background else None
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            reason = " ".join(str(error).split()) or repr(error)
            self.fault = (
                reason if isinstance(error, OSError) else f"{type(error).__name__}: {reason}"
            )


@dataclass
class _Flight:
    """The save under way. `written`: this rank's files. `finishing`: all ranks have written."""

    step: int
    sequence: int
    validation_loss: float | None
    started: float
    stall_seconds: float
    written: dict[str, FileRecord]
    job: _Job
    finishing: bool = False


class Saver:
    """Saves one run, one checkpoint at a time. Every rank has one and calls the same methods.

    `background`: whether writing happens beside training; what is written is the same.
    """

    def __init__(
        self,
        engine: Any,
        directory: Path,
        *,
        retention: Retention,
        group: Any = None,
        background: bool = True,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`engine`: DeepSpeed engine. `directory`: on a disk that all ranks share.

        `group`: host-side (gloo) process group of all ranks; None means a single process.
        `waiting`: surrounds every wait for the other ranks. `moved`: told of what this rank copies
        meanwhile.
        """
        self._engine, self._directory, self._group = engine, directory, group
        self._retention, self._background = retention, background
        self._waiting = waiting
        self._rank, self._world_size = rank_and_size(group)
        self._snapshots = Snapshots(moved)
        self._cancelled = Event()
        self._flight: _Flight | None = None

    def prepare(self) -> None:
        """Get the memory for a copy beside what follows: the first save finds it there."""
        if self._background:
            self._snapshots.prepare(saved_sizes(self._engine))

    @property
    def step(self) -> int | None:
        """Step of the save that is under way, the same on all ranks; None where there is none."""
        return None if self._flight is None else self._flight.step

    def is_under_way(self) -> bool:
        """Whether a save has begun and is not complete on all ranks. Any thread may ask."""
        return self._flight is not None

    def is_busy(self) -> bool:
        """Whether this rank still writes."""
        return self._flight is not None and self._flight.job.is_running()

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        validation_loss: float | None = None,
        fault: str | None = None,
    ) -> None:
        """Take the run's state at `step` and begin to write it. Collective.

        `state`: JSON-able; rank 0's is written. `validation_loss`: of these weights, if known.
        `fault`: why this rank can't save now, if so.
        Raises: SaveFailed on all ranks where nothing can be written; earlier checkpoints stay.
        ValueError where `state` is no plain JSON or contradicts what is added, or where a save is
        under way.
        """
        if self._flight is not None:
            raise ValueError(f"step {self._flight.step} is still being saved")
        started = time.perf_counter()
        document = self._document(step, state)
        sequence = 0
        if self._rank == 0 and fault is None:
            try:
                sequence = self._make_room(step)
            except OSError as error:
                fault = " ".join(str(error).split())
        with self._waiting():
            agree_on_save(fault, store.folder_name(step), self._group)

        payload = self._take(step)
        background = self._background and self._is_copied_everywhere(step, payload)
        rng = rng_bytes()
        written: dict[str, FileRecord] = {}
        folder = self._directory / store.partial_name(step)

        def write() -> None:
            self._write(folder, payload.taken, rng, document, written)

        job = _Job(write, background)
        stall = time.perf_counter() - started
        known = validation_loss is not None and math.isfinite(validation_loss)
        loss = validation_loss if known else None
        self._flight = _Flight(step, sequence, loss, started, stall, written, job)

    def advance(self) -> Saved | None:
        """Bring the save under way one part further, once no rank is busy. Collective.

        Returns the checkpoint when it is complete, else None.
        Raises: SaveFailed on all ranks where any rank failed; earlier checkpoints are untouched.
        """
        flight = self._flight
        if flight is None:
            return None
        entered = time.perf_counter()
        name = store.folder_name(flight.step)
        try:
            with self._waiting():
                agree_on_save(flight.job.fault, name, self._group)
        except SaveFailed:
            self._flight = None
            if self._rank == 0:  # on a full disk the half that was written must not stay
                folder = self._directory / store.partial_name(flight.step)
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if flight.finishing:
            self._flight = None
            now = time.perf_counter()
            stall = flight.stall_seconds + now - entered
            return Saved(flight.step, self._directory / name, now - flight.started, stall)
        with self._waiting():
            shares = gather(flight.written, self._group)
        files = {file: record for share in shares for file, record in share.items()}
        manifest = Manifest(
            flight.step, flight.sequence, self._world_size, files, flight.validation_loss
        )
        flight.finishing = True
        if self._rank == 0:
            flight.job = _Job(lambda: self._finish(manifest), self._background)
        flight.stall_seconds += time.perf_counter() - entered
        return None

    def wait(self) -> Saved | None:
        """Bring the save under way to its end. Collective. Returns and raises as `advance`."""
        saved = None
        while self._flight is not None:
            entered = time.perf_counter()
            self._flight.job.join()
            self._flight.stall_seconds += time.perf_counter() - entered
            saved = self.advance()
        return saved

    def close(self) -> None:
        """Give up what is under way: for a run that ends by an error. Not collective."""
        self._cancelled.set()
        if self._flight is not None:
            self._flight.job.join()
        self._snapshots.stop()

    def _make_room(self, step: int) -> int:
        """Rank 0: an empty folder to write into. Returns the checkpoint's sequence number."""
        self._directory.mkdir(parents=True, exist_ok=True)
        store.remove_leftovers(self._directory)
        sequence = store.next_sequence(self._directory)
        (self._directory / store.partial_name(step)).mkdir()
        return sequence

    def _take(self, step: int) -> SafePayload:
        """What DeepSpeed saves of this rank; a copy, if it is written later. Collective."""
        payload = SafePayload(self._snapshots.copy if self._background else lambda value: value)
        self._snapshots.begin()
        # DeepSpeed lets the ranks wait for each other, before and after what each one copies.
        with self._waiting(), safe_payload(self._engine, payload):
            self._engine.save_checkpoint(
                str(self._directory),
                tag=store.partial_name(step),
                client_state=UNIVERSAL_INFO,
                save_latest=False,
            )
        self._snapshots.end()
        return payload

    def _is_copied_everywhere(self, step: int, payload: SafePayload) -> bool:
        """Whether every rank had room for its copy. Collective.

        If not, all ranks write at once: none trains on while another still writes.
        """
        with self._waiting():
            faults = gather(payload.fault, self._group)
        full = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
        if not full:
            return True
        self._snapshots.close()
        if self._rank == 0:
            log.warning(
                "step %d: not enough memory for a copy of the checkpoint (%s); "
                "training waits until it is written",
                step,
                "; ".join(full),
            )
        return False

    def _document(self, step: int, state: Mapping[str, Any]) -> bytes:
        """The text of state.json."""
        if nesting(dict(state)) >= DEEPEST_JSON:
            raise ValueError(f"state is nested deeper than {DEEPEST_JSON} levels")
        document = {
            "format": FORMAT,
            "version": __version__,
            "step": step,
            "world_size": self._world_size,
            "zero_stage": int(self._engine.zero_optimization_stage()),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "parameters": parameter_shapes(self._engine),
        }
        contradicted = [key for key in document if key in state and state[key] != document[key]]
        if contradicted:
            raise ValueError(f"state contradicts the checkpoint about {contradicted}")
        return (json.dumps({**document, **state}, indent=1) + "\n").encode()

    def _write(
        self,
        folder: Path,
        taken: Mapping[str, Any],
        rng: bytes,
        document: bytes,
        written: dict[str, FileRecord],
    ) -> None:
        """Write the files of this rank, synced and read back; their records go into `written`."""

        def put(name: str, write: Callable[[Any], object]) -> None:
            written[name] = write_hashed(folder / name, write, self._cancelled)

        for name, content in taken.items():
            put(name, partial(torch.save, content))
        put(store.rng_name(self._rank), lambda stream: stream.write(rng))
        if self._rank == 0:
            put(STATE_NAME, lambda stream: stream.write(document))
        for name, record in written.items():
            if record_of(folder / name) != record:
                raise OSError(f"{name} reads back differently from what was written")

    def _finish(self, manifest: Manifest) -> None:
        """Rank 0: manifest, rename, `latest`, rotation.

        Raises: OSError where the checkpoint did not get its name, or may lose it in a power cut.
        """
        folder = self._directory / store.partial_name(manifest.step)
        if faults := check_sizes(folder, manifest):
            raise OSError(faults[0])
        write_manifest(folder, manifest)
        fsync_directory(folder)
        path = store.install(self._directory, manifest.step)
        settle(self._directory, path, self._retention)


def save(
    engine: Any,
    directory: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    keep_last: int,
    group: Any = None,
) -> Path:
    """Save a run's state at `step`, and wait for it. Collective. Returns the checkpoint's path.

    Arguments and errors are those of `Saver`.
    """
    saver = Saver(engine, directory, retention=Retention(keep_last), group=group, background=False)
    saver.begin(step, state)
    saved = saver.wait()
    assert saved is not None
    return saved.path
