"""The process beside a rank that compiles what growth will need. Fails no run.

The first update with new loops then finds their blocks in torch's folder of compiled code; if it comes
too early, the process is ended, since it may hold a lock of torch's that the rank would wait for. The
rank waits for that end, and for compilers that the process had started, within the limits below; it
waits for nothing else of it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import psutil
import torch

from sgt_ds.config import ModelConfig
from sgt_ds.flops import Layout, memory_per_rank
from sgt_ds.growth import Passes
from sgt_ds.progress import counted
from sgt_ds.training.compile_kinds import KIND_COMPILED, Work, kinds_of, one_block

log = logging.getLogger(__name__)

# A CUDA context with its libraries, and what they and the kernels' timing take beside a block.
_CONTEXT_BYTES = _LIBRARY_BYTES = 1 << 30
# Fragments: of the block's memory, and of the rank's own.
_BLOCK_SLACK, _RANK_SLACK = 2.0, 1.1
# How long the rank waits for a killed process to end, which a device may hold longer; and then for
# its C++ compilers to finish what the rank will need.
_END_SECONDS, _COMPILER_SECONDS = 5.0, 60.0
# Bytes of what it says at a time: a line for each kind, or for a fault.
_MOST_HEARD = 1 << 16


class CompileAhead:
    """Compiles the kinds of `work` that the first updates, without loops, do not need."""

    def __init__(self, work: Work, planned_bytes: int) -> None:
        """`planned_bytes`: what the rank itself may need of its device at its peak."""
        self.compiled = 0
        """Kinds that the process has compiled, as of the last look."""
        self._work = work
        self._planned_bytes = planned_bytes
        self._used: set[object] = set()  # kinds, by the rank itself
        self._decided = False
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._last_line, self._unfinished = b"", b""

    def proceed(self, passes: Mapping[int, Passes], *, measured: bool, grows: bool) -> None:
        """An update begins. Starts the process once the rank itself has compiled all kinds without
        loops, and sees how far it is.

        `passes`, `measured`: of the update. `grows`: whether others may come.
        """
        needed = {kind.graph for kind in kinds_of([passes], [measured])}
        plain = {kind.graph for kind in self._work.kinds if kind.passes is None}
        starts = bool(self._used) and plain <= self._used and not self._decided
        if self._process is not None:
            self._look(self._process)
            compiled = {kind.graph for kind in self._work.kinds[: self.compiled]}
            if not needed <= self._used | compiled:
                self._end("training needs the next kind now", _COMPILER_SECONDS)
            elif not grows:
                self._end("growth is over")
        self._used |= needed
        if starts:
            self._decided = True
            kinds = tuple(kind for kind in self._work.kinds if kind.graph not in self._used)
            if grows and kinds and self._fits(self._work):
                self._work = replace(self._work, kinds=kinds)
                self._start(self._work)

    def close(self, *, patient: bool = True) -> None:
        """End the process; what it has compiled stays. `patient`: wait for its compilers too."""
        self._end("the run ends", _COMPILER_SECONDS if patient else 0.0)

    def _end(self, why: str, compiler_seconds: float = 0.0) -> None:
        if (process := self._process) is None:
            return
        self._process, compilers = None, []
        with suppress(psutil.Error):
            beside = psutil.Process(process.pid)
            beside.suspend()  # that it starts no other
            compilers = beside.children(recursive=True)
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
        # Their files are where torch looks for them, and nothing locks them now: half of one would
        # be loaded.
        psutil.wait_procs(compilers, compiler_seconds)
        self._tell_early_end(why)

    def _tell_early_end(self, why: str) -> None:
        log.info(
            "compiling ahead ended after %s and %.0f s (%s); others are compiled when needed",
            counted(self.compiled, "kind"),
            time.monotonic() - self._started,
            why,
        )

    def _fits(self, work: Work) -> bool:
        device = torch.device(work.device)
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        rank = max(0, int(_RANK_SLACK * self._planned_bytes) - reserved)
        process = work.memory_bytes + _CONTEXT_BYTES
        if rank + process <= free:
            return True
        log.info(
            "kinds of block are not compiled ahead: the GPU has %.1f GiB free, the run may need "
            "%.1f more, and compiling %.1f",
            *(size / 2**30 for size in (free, rank, process)),
        )
        return False

    def _start(self, work: Work) -> None:
        command = [sys.executable, "-m", "sgt_ds.training.compile_kinds"]
        # One thread, and none of torch's own processes: its caller trains meanwhile.
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            with tempfile.TemporaryFile() as told:  # a pipe would wait for a slow reader
                told.write(work.as_json().encode() + b"\n")
                told.seek(0)
                # In the rank's process group: what ends the rank's ends this one too.
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=told,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            log.info("kinds of block are not compiled ahead: %s", error)
            return
        self._process, self._started = process, time.monotonic()
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        """Read what the process says; where it has ended, say so once."""
        status = process.poll()
        assert process.stdout is not None
        with suppress(BlockingIOError):
            self._hear(os.read(process.stdout.fileno(), _MOST_HEARD))
        if status is None:
            return
        process.stdout.close()
        self._process = None
        if status == 0:
            seconds = time.monotonic() - self._started
            kinds = counted(self.compiled, "kind")
            log.info("%s of block compiled ahead in %.0f s", kinds, seconds)
            return
        last = self._last_line.decode(errors="replace")
        self._tell_early_end(last if last.startswith("failed") else f"status {status}")

    def _hear(self, said: bytes) -> None:
        *lines, unfinished = (self._unfinished + said).split(b"\n")
        self._unfinished = unfinished[:_MOST_HEARD]
        self.compiled += lines.count(KIND_COMPILED.encode())
        self._last_line = lines[-1] if lines else self._last_line


def memory_for(
    model: ModelConfig, sequence_length: int, layout: Layout, passes: Iterable[Passes | None]
) -> int:
    """Bytes of a GPU that running one block forward and backward may take."""
    own = Layout(
        world_size=1,
        micro_batch_size=layout.micro_batch_size,
        zero_stage=0,
        precision=layout.precision,
        activation_checkpointing=layout.activation_checkpointing,
    )
    each = [{} if run is None else {0: run} for run in passes]
    memory = memory_per_rank(one_block(model), sequence_length, own, each)
    return int(_BLOCK_SLACK * (memory.total - memory.optimizer)) + _LIBRARY_BYTES
