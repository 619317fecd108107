"""The process beside a rank that compiles what growth will need. Never waits, and fails no run.

The first update with new loops then finds their blocks in torch's folder of compiled code.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from sgt_ds.config import ModelConfig
from sgt_ds.flops import Layout, memory_per_rank
from sgt_ds.growth import Passes
from sgt_ds.training.compile_kinds import KIND_COMPILED, Work, kinds_of, one_block

log = logging.getLogger(__name__)

# A CUDA context with its libraries, and what they and the kernels' timing take beside a block.
_CONTEXT_BYTES = _LIBRARY_BYTES = 1 << 30
# Fragments: of the block's memory, and of the rank's own.
_BLOCK_SLACK, _RANK_SLACK = 2.0, 1.1
# How long a killed process may take to end; a device may hold it longer.
_END_SECONDS = 5.0


class CompileAhead:
    """Compiles the kinds of `work` that the first update has not."""

    def __init__(self, work: Work, planned_bytes: int) -> None:
        """`planned_bytes`: what the rank itself may need of its device at its peak."""
        self.compiled = 0
        """Kinds that the process has compiled, as of the last look."""
        self._work: Work | None = work
        self._planned_bytes = planned_bytes
        self._first: frozenset[object] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._said = 0.0, b""

    def proceed(self, passes: Mapping[int, Passes], *, measured: bool, grows: bool) -> None:
        """An update begins. Starts the process at the second one, and sees how far it is.

        `passes`, `measured`: of the update. `grows`: whether others may come.
        """
        if self._process is not None:
            self._look(self._process)
        elif self._first is None:
            self._first = frozenset(kind.graph for kind in kinds_of([passes], [measured]))
        elif self._work is not None:
            work, first, self._work = self._work, self._first, None
            kinds = tuple(kind for kind in work.kinds if kind.graph not in first)
            if grows and kinds and self._fits(work):
                self._start(replace(work, kinds=kinds))

    def close(self) -> None:
        """End the process; what it has compiled stays."""
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            if process.stdout is not None:
                process.stdout.close()

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
            # In the rank's process group: what ends the rank's ends this one too.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.info("kinds of block are not compiled ahead: %s", error)
            return
        self._process, self._started = process, time.monotonic()
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(OSError), process.stdin:  # where it has ended, the next look tells
            process.stdin.write(work.as_json().encode() + b"\n")

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        """Read what the process says; where it has ended, say so once."""
        status = process.poll()
        assert process.stdout is not None
        self._said += process.stdout.read() or b""
        self.compiled = self._said.count(KIND_COMPILED.encode() + b"\n")
        if status is None:
            return
        process.stdout.close()
        self._process = None
        seconds = time.monotonic() - self._started
        if status == 0:
            log.info("%d kinds of block compiled ahead in %.0f s", self.compiled, seconds)
            return
        last = (self._said.decode(errors="replace").splitlines() or [""])[-1]
        log.info(
            "compiling ahead ended after %d kinds and %.0f s (%s); others are compiled when needed",
            self.compiled,
            seconds,
            last if last.startswith("failed") else f"status {status}",
        )


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
