"""Writing the growth journal: append-only JSON lines that survive a crash and a resume.

One process writes: global rank 0. Reading is in `lines`. Knows no process group.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from sgt_ds import __version__
from sgt_ds.config import FromJournal, GrowthConfig, RunConfig, config_hash
from sgt_ds.errors import UserError
from sgt_ds.files import LineFile, fsync_directory, truncate
from sgt_ds.growth.decision import OPERATOR, Decision
from sgt_ds.growth.layers import layers_of_journal
from sgt_ds.growth.lines import FORMAT, find_journal, read_journal
from sgt_ds.growth.replay import continuity
from sgt_ds.growth.state import State
from sgt_ds.growth.statistics import Measurement, rows_to_json

log = logging.getLogger(__name__)


def settled_growth(config: RunConfig, journal: Path) -> GrowthConfig:
    """The growth settings with layers of another run's journal chosen: none is needed from here on.

    `journal`: of this run. Where it has been begun, its header has the list, and the other run may
    be gone. Raises: UserError where the other journal is needed and can't be used, or is there and
    says otherwise than `chosen`.
    """
    source = config.growth.layers
    if not isinstance(source, FromJournal):
        return config.growth
    chosen = _begun_layers(config, journal)
    if chosen is None and find_journal(source.from_journal) is None:
        if source.chosen is None:
            raise _lost_journal(source, begun=journal.exists())
        chosen = source.chosen
        log.warning(
            "growth.layers.chosen: using %s as given; %s is gone, so it cannot be checked that "
            "they are those of step %d",
            *(chosen, source.from_journal, source.step),
        )
    if chosen is None:
        chosen = list(layers_of_journal(source, config.growth, config.model))
        if source.chosen is not None and sorted(source.chosen) != chosen:
            message = (
                f"{source.chosen} differs from {chosen}, the choice of {source.from_journal}; "
                "remove it"
            )
            raise UserError("configuration", "growth.layers.chosen", message)
    update = {"layers": source.model_copy(update={"chosen": chosen})}
    return config.growth.model_copy(update=update)


def _lost_journal(source: FromJournal, *, begun: bool) -> UserError:
    """`begun`: whether the run directory holds a journal, so one of other settings."""
    remedy = "name an existing run directory or journal, or give the layers as a list"
    if begun:
        remedy = "restore the settings this run began with (its run.yaml), or restore the journal"
    return UserError(
        "configuration",
        "growth.layers.from_journal",
        f"there is no journal at {source.from_journal} from which to choose the layers of step "
        f"{source.step}; {remedy}",
    )


def _begun_layers(config: RunConfig, journal: Path) -> list[int] | None:
    """The layers with which a run of this configuration began its journal; None where none did."""
    if not journal.exists():
        return None
    with journal.open("rb") as stream:
        values = _values(stream.readline())
    if values.get("type") != "header" or values.get("config_hash") != config_hash(config):
        return None
    header, _ = read_journal(journal, live=True)
    layers = None if header is None else header.growth.layers
    return layers if isinstance(layers, list) else None


def journal_header(config: RunConfig, growth: GrowthConfig) -> dict[str, Any]:
    """Settings for a journal's first line: everything that a replay or an estimate needs.

    `growth`: as `resolve_growth` gives it: this journal replays without any other.
    """
    return {
        "version": __version__,
        "config_hash": config_hash(config),
        "method": config.method,
        "growth": growth.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json"),
        "sequence_length": config.data.sequence_length,
        "global_batch_size": config.training.global_batch_size,
        "steps": config.training.steps,
        "seed": config.training.seed,
        # What may change at a resume; here, how the run began.
        **({"fp8": True} if config.training.fp8 else {}),
    }


class Journal:
    """An open journal. Lines are gathered and written whole by `flush`, `sync` or a decision.

    A power cut may take what was written after the last `sync` or decision: a run goes on from a
    checkpoint, before which it syncs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_new = False
        """Whether it was begun by this process."""
        self._file = LineFile(path)

    @property
    def fault(self) -> str | None:
        """Why lines still wait in memory after a `sync`, if so: no checkpoint may be saved."""
        return self._file.fault

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> Journal:
        """Start a new journal. Raises: UserError where a non-empty file is there already."""
        if path.exists() and path.stat().st_size:
            raise UserError(path, None, "holds a journal already; choose another run_dir")
        journal = cls(path)
        journal.is_new = True
        journal._append({"type": "header", "format": FORMAT, **header})
        journal._file.sync()
        fsync_directory(path.parent)
        return journal

    @classmethod
    def open_or_create(cls, path: Path, header: Mapping[str, Any]) -> Journal:
        """Go on with a journal, a torn last line repaired; or start one where there is none.

        Raises: UserError where the file belongs to another run.
        """
        if path.exists():
            _repair(path)
        if not path.exists() or not path.stat().st_size:
            return cls.create(path, header)
        with path.open("rb") as stream:
            first = _values(stream.readline())
        if first.get("type") != "header":
            raise UserError(path, "line 1", "is not a journal header; choose another run_dir")
        if first.get("config_hash") != header.get("config_hash"):
            message = "belongs to a run with a different configuration; choose another run_dir"
            raise UserError(path, "line 1", message)
        return cls(path)

    def measure(self, measurement: Measurement) -> None:
        """Note one measured update."""
        self._append(
            {
                "type": "measure",
                "step": measurement.step,
                "entropy": rows_to_json(measurement.entropy),
                "stderr": rows_to_json(measurement.stderr),
                "sequences": measurement.sequences,
                **({"adopted": True} if measurement.adopted else {}),
            }
        )

    def decision(self, decision: Decision, flops: int) -> None:
        """Note one decision and `sync`. `flops`: spent so far."""
        self._append({"type": "decision", **decision.as_json(), "flops": flops})
        self.sync()

    def flush(self) -> None:
        """Write what was noted, where readers find it; or there is a `fault`, and it is kept."""
        self._file.offer()

    def sync(self) -> None:
        """Have it on the disk on return, or a `fault`: it is tried again then."""
        self._file.offer(sync=True)

    def cut_back(self, step: int, *, frozen: bool = True) -> None:
        """Drop the lines past `step`, where a resumed run goes on. `frozen`: as in `kept_part`."""
        self._file.flush()
        self._file.cut(kept_part(self.path, step, frozen=frozen)[0])

    def leads_to(self, state: State, step: int) -> bool:
        """Whether its lines lead to Θ as it is at `step`. Raises: UserError where one is damaged."""
        header, _ = read_journal(self.path, live=True)
        if header is None:
            return False
        seen = continuity(self.path, header)
        return seen.state == state and seen.last_step >= step

    def adopt(self, parent: Path, through: int) -> list[Measurement]:
        """Take over another run's measurements up to `through`, the step at which this one forks.

        The moving average at the fork comes from them: with them this journal replays by itself.
        What lies before `through` is marked: this run decided nothing there.
        Returns them. Raises: UserError where the parent's journal is damaged.
        """
        _, lines = read_journal(parent, live=True)
        taken = [
            replace(line, adopted=line.step < through)
            for line in lines
            if isinstance(line, Measurement) and line.step <= through
        ]
        for measurement in taken:
            self.measure(measurement)
        self._file.sync()
        return taken

    def close(self) -> None:
        """Write what was noted and close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._file.add(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n")


def kept_part(path: Path, step: int, *, frozen: bool = True) -> tuple[int, bool]:
    """Bytes of a journal up to `step`; and whether an operator's freeze lies beyond them.

    `frozen`: whether growth is frozen there. Where it is not, an operator's freeze at that very
    step came after the checkpoint, and lies beyond as well. A damaged line stays only before good
    ones: at the end a power cut left it.
    """
    keep = end = 0
    beyond = thaws = False
    with path.open("rb") as stream:
        for text in stream:
            end += len(text)
            values = _values(text)
            at = -1 if values.get("type") == "header" else values.get("step")
            if not isinstance(at, int):
                continue
            is_undone = not frozen and _is_request(values) and at == step
            beyond = beyond or is_undone or at > step
            if beyond:
                thaws = thaws or _is_request(values)
            else:
                keep = end
    return keep, thaws


def _repair(path: Path) -> None:
    """End the file with a whole line: a crash may have left a part of one."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end == len(content):
        return
    if _values(content[end:]):  # whole but for its newline
        with path.open("ab") as stream:
            stream.write(b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    else:
        truncate(path, end)


def _is_request(values: Mapping[str, Any]) -> bool:
    """Whether a line is a freeze that a person asked for."""
    return values.get("rule") == "freeze" and str(values.get("reason")).startswith(f"{OPERATOR}:")


def _values(text: bytes) -> dict[str, Any]:
    """The object of one line; empty where it is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
