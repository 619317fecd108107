"""Compiling before growth needs it, and what was compiled kept for the next start. Knows no step.

torch keeps compiled graphs in a folder of each host, which a new machine or container does not
have. A kept file holds them all: it is whole or absent, and every host may read it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from sgt_ds.config import RunConfig
from sgt_ds.files import atomic_writer
from sgt_ds.flops import plan
from sgt_ds.growth import Passes
from sgt_ds.model import LoopInputs, Transformer, loop_inputs
from sgt_ds.training.engine import Ranks

log = logging.getLogger("sgt_ds")

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompileCache:
    """One file of compiled graphs, for one version of torch and one kind of device."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        cuda = ranks.device.type == "cuda"
        device = torch.cuda.get_device_name(ranks.device) if cuda else "cpu"
        name = re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{device}")
        self.file = folder / f"{name}.compiled"
        self._ranks = ranks
        self._kept = _compiled_here()

    def load(self) -> None:
        """Hand torch what an earlier start compiled; one rank of each host reads. Collective."""
        if self._ranks.local_rank == 0:
            try:
                content = self.file.read_bytes()
            except FileNotFoundError:
                content = b""
            except OSError as error:
                log.warning("%s cannot be read (%s); compiling anew", self.file, error.strerror)
                content = b""
            digest, artifacts = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if artifacts and hashlib.sha256(artifacts).digest() != digest:
                log.warning("%s is damaged; compiling anew", self.file)
            elif artifacts:
                torch.compiler.load_cache_artifacts(artifacts)
        dist.barrier(group=self._ranks.host_group)

    def keep(self) -> None:
        """Write the file where this process has compiled anything since it was last written."""
        compiled = _compiled_here()
        if not self._ranks.is_main or compiled == self._kept:
            return
        found = torch.compiler.save_cache_artifacts()
        if found is None:
            return
        artifacts, _ = found
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(self.file) as stream:
                stream.write(hashlib.sha256(artifacts).digest() + artifacts)
        except OSError as error:  # costs time at the next start, and nothing else
            log.warning("%s cannot be written (%s)", self.file, error.strerror)
        self._kept = compiled


def compile_ahead(model: Transformer, config: RunConfig, ranks: Ranks) -> None:
    """Compile the kinds of block that the run may need, on this rank.

    Ranks of a host begin at different kinds and find in torch's folder what another has compiled.
    """
    data, training = config.data, config.training
    if not training.compile or data.document_mask:
        return
    kinds = list(_coming_kinds(config))
    first = ranks.local_rank % len(kinds)
    started = time.perf_counter()
    for passes, measure in kinds[first:] + kinds[:first]:
        loop: LoopInputs | None = None
        if passes is not None:
            loop = loop_inputs({0: passes}, ranks.device)[0]
        model.compile_ahead(training.micro_batch_size, data.sequence_length, loop, measure=measure)
    seconds = time.perf_counter() - started
    log.info("%d kinds of block compiled ahead in %.1f s", len(kinds), seconds)


def _coming_kinds(config: RunConfig) -> Iterator[tuple[Passes | None, bool]]:
    """Passes of a layer, and whether entropies are measured: one of each that has its own graph."""
    data, training = config.data, config.training
    planned = plan(
        config.model,
        config.method,
        config.growth,
        sequence_length=data.sequence_length,
        global_batch_size=training.global_batch_size,
        steps=training.steps,
    )
    looping: dict[object, Passes | None] = {None: None}
    for case in planned.cases.values():
        for segment, _ in case.segments:
            for passes in segment.passes.values():
                heads = passes.head_count(config.model.num_heads)
                graph = (
                    passes.depth,
                    passes.scope,
                    passes.heads is None,
                    heads,
                    passes.scale is None,
                )
                looping.setdefault(graph, passes)
    for kind in looping.values():
        yield kind, True
        if config.growth.entropy_every > 1:
            yield kind, False


def _compiled_here() -> int:
    return counters["inductor"]["fxgraph_cache_miss"]
