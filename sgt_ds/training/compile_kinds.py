"""`python -m sgt_ds.training.compile_kinds`: compiles kinds of block beside a rank that trains.

Reads its work on standard input; writes a line for each kind that torch's folder of compiled code
holds then. Knows no engine and no run: a block is that of a model of one layer.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from sgt_ds.config import ModelConfig
from sgt_ds.growth import Passes
from sgt_ds.model import Transformer, loop_inputs

KIND_COMPILED = "compiled"
"""The line for each kind. The last line is `failed: …` where it ends before the last one."""

_PR_SET_PDEATHSIG = 1


class Kind(NamedTuple):
    """A block to compile: of what the layer runs beside its main pass, and whether measured."""

    passes: Passes | None
    measured: bool

    @property
    def graph(self) -> tuple[Any, bool]:
        """What tells it from other kinds."""
        return None if self.passes is None else self.passes.kind, self.measured


@dataclass(frozen=True)
class Work:
    """How a rank runs its blocks, all of which torch's keys depend on, and the kinds to come."""

    model: ModelConfig
    device: str
    """With its index."""
    dtype: str
    """Of the weights, as torch names it: `bfloat16`."""
    micro_batch_size: int
    sequence_length: int
    document_mask: bool
    activation_checkpointing: bool
    fp8: bool
    memory_bytes: int
    """Of a GPU: all that may be allocated."""
    kinds: tuple[Kind, ...] = ()
    threads: int = field(default_factory=torch.get_num_threads)
    """Code for a CPU holds their number."""
    rank_pid: int = field(default_factory=os.getpid)

    def as_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "model": self.model.model_dump()})

    @classmethod
    def from_json(cls, line: str) -> Work:
        """The work that `as_json` described."""
        values = json.loads(line)
        kinds = tuple(
            Kind(None if passes is None else Passes(**passes), measured)
            for passes, measured in values.pop("kinds")
        )
        return cls(**{**values, "model": ModelConfig(**values["model"]), "kinds": kinds})


def kinds_of(passes: Iterable[Mapping[int, Passes]], measured: Iterable[bool]) -> Iterator[Kind]:
    """Each kind once, by its first use. `measured`: whether entropies are, in some update."""
    told = set()
    for own in passes:
        for run in (None, *own.values()):
            for kind in (Kind(run, each) for each in measured):
                if kind.graph not in told:
                    told.add(kind.graph)
                    yield kind


def one_block(model: ModelConfig) -> ModelConfig:
    """The smallest model with a block of that shape."""
    return model.model_copy(update={"num_layers": 1, "vocab_size": 1})


def compile_kinds(work: Work) -> Iterator[Kind]:
    """Run each kind forward and backward once, as training does; gives those that are compiled."""
    device = torch.device(work.device)
    torch.set_num_threads(work.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, work.memory_bytes / total), device)
    model = Transformer(
        one_block(work.model),
        compile_blocks=True,
        activation_checkpointing=work.activation_checkpointing,
        fp8=work.fp8,
    ).to(device, getattr(torch, work.dtype))
    ids = torch.zeros(work.micro_batch_size, work.sequence_length, dtype=torch.int64, device=device)
    starts = torch.zeros_like(ids) if work.document_mask else None
    for kind in work.kinds:
        loops = loop_inputs({} if kind.passes is None else {0: kind.passes}, device)
        output = model(ids, loops=loops, measure=kind.measured, document_starts=starts)
        output.logits.sum().backward()  # the loss has been compiled by the rank itself
        model.zero_grad()
        yield kind


def main() -> int:
    """Compile what standard input says. Returns 0, or 1 where it could not be done."""
    work = Work.from_json(sys.stdin.readline())
    _end_with(work.rank_pid)
    os.nice(5)
    try:
        for _ in compile_kinds(work):
            print(KIND_COMPILED, flush=True)
    except Exception as error:
        said = (f"{error}".splitlines() or [""])[0][:300]
        print(f"failed: {type(error).__name__}: {said}", flush=True)
        return 1
    return 0


def _end_with(rank_pid: int) -> None:
    """Have the kernel kill this process when the rank ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_pid:  # it was quicker
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(main())
