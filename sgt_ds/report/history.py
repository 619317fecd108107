"""The full history of one run, from its directory: what a report shows. No page and no plot."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.flops import Outcome, Recipe, parameter_count, plan, recipe_of_journal
from sgt_ds.growth import (
    DecisionLine,
    EntropyAverage,
    Header,
    Measurement,
    State,
    build_policy,
    continuity,
    find_journal,
    read_journal,
)
from sgt_ds.report.rows import Row, add_row, is_count, number, read_objects


@dataclass(frozen=True, slots=True)
class Update:
    """One logged update; NaN where a row lacks the value. Cumulative values as in metrics.jsonl."""

    step: int
    tokens: float
    loss: float
    learning_rate: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    flops: float
    overhead_ratio: float
    phase: str


@dataclass(frozen=True, slots=True)
class Validation:
    """One validation loss, with how much the run had consumed by then (NaN where unknown)."""

    step: int
    tokens: float
    flops: float
    loss: float


@dataclass(frozen=True, slots=True)
class Score:
    """One score of an evaluation in the loop. `name`: of the task or text."""

    step: int
    name: str
    metric: str
    value: float


@dataclass(slots=True)
class Entropies:
    """Every measurement, as layer means and as variances between the heads of a layer.

    `means`, `variances`: [layer][measurement], NaN where not finite.
    `heads`: [layer][head], the current moving average, from which growth decides.
    """

    steps: list[int] = field(default_factory=list)
    means: list[array[float]] = field(default_factory=list)
    variances: list[array[float]] = field(default_factory=list)
    heads: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the training processes. `values`: the record's line, as written."""

    step: int
    reached: int | None
    time: float
    values: Row


@dataclass(frozen=True)
class Planned:
    """What the FLOPs were planned to be.

    `earliest`: growth at every window. `own`: with the growth that this run's entropies give; None
    where the journal lacks lines.
    """

    recipe: Recipe
    parameters: int
    earliest: Outcome
    own: Outcome | None


@dataclass(frozen=True)
class RunHistory:
    """One run. Without a journal there is no header, no growth and no plan."""

    name: str
    run_dir: Path
    header: Header | None
    updates: Sequence[Update]
    validations: Sequence[Validation]
    scores: Sequence[Score]
    entropies: Entropies
    initial: State
    decisions: Sequence[DecisionLine]
    starts: Sequence[Start]
    planned: Planned | None
    settings: str
    """Text of run.yaml; empty where there is none."""
    age_seconds: float
    """Since the newest line was written."""

    @property
    def method(self) -> str:
        """The growth method; `unknown` without a journal."""
        return self.header.method if self.header else "unknown"

    @property
    def steps(self) -> int | None:
        """Updates that the run is to apply."""
        return self.planned.recipe.steps if self.planned else None

    @property
    def last_step(self) -> int:
        """The newest step that any file tells of."""
        told = [self.updates[-1].step] if self.updates else []
        told += self.entropies.steps[-1:]
        return max(told, default=0)

    @property
    def states(self) -> list[tuple[int, State]]:
        """Θ from each step on, in order: the initial one, then every change of loops."""
        found = [(0, self.initial)]
        for line in self.decisions:
            if line.decision.changes_loops:
                found.append((line.decision.step, line.decision.after))
        return found

    @property
    def restarts(self) -> Sequence[Start]:
        """Every start but the first."""
        return self.starts[1:]


def read_histories(run_dirs: Sequence[Path]) -> list[RunHistory]:
    """Read several, each under a name of its own: as much of its path as tells it from the others.

    Raises: UserError naming the file, and the line where there is one; or a run given twice.
    """
    paths = [run_dir.resolve() for run_dir in run_dirs]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise UserError(run_dirs[place], None, "is given twice; give each run once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    names = ["/".join(path.parts[-depth:]) for path in paths]
    return [read_history(run_dir, name) for run_dir, name in zip(run_dirs, names, strict=True)]


def read_history(run_dir: Path, name: str | None = None) -> RunHistory:
    """Read a run directory; the run may be training, or have been cut off at any moment.

    `name`: what to call it; else the last part of its path.
    Raises: UserError naming the file, and the line where there is one.
    """
    layout = RunLayout(run_dir)
    if not run_dir.is_dir():
        raise UserError(run_dir, None, "is not a run directory; give the run_dir of a run")
    journal = _begun_journal(run_dir)
    if not layout.metrics.exists() and journal is None:
        message = "holds neither metrics.jsonl nor growth.jsonl; give a run directory"
        if layout.is_there():
            message = "has recorded nothing yet: no metrics and no growth; see logs"
        raise UserError(run_dir, None, message)
    rows: list[Row] = []
    for row in read_objects(layout.metrics):
        add_row(rows, row)
    updates = [_update(layout.metrics, row) for row in rows if "loss" in row]
    header, entropies, initial, decisions = _read_growth(journal)
    return RunHistory(
        name=name or run_dir.resolve().name,
        run_dir=run_dir,
        header=header,
        updates=updates,
        validations=[
            _validation(layout.metrics, row, updates) for row in rows if "validation_loss" in row
        ],
        scores=[
            score for row in rows if "evaluation" in row for score in _scores(layout.metrics, row)
        ],
        entropies=entropies,
        initial=initial,
        decisions=decisions,
        starts=_read_starts(layout.starts),
        planned=None if journal is None or header is None else _planned(journal, header),
        settings=_text(layout.config),
        age_seconds=_age(path for path in (layout.metrics, journal) if path and path.exists()),
    )


def _begun_journal(run_dir: Path) -> Path | None:
    """The run's journal; None where there is none, or one that is still empty."""
    found = find_journal(run_dir)
    return found if found is not None and found.stat().st_size else None


def _update(path: Path, row: Row) -> Update:
    def value(key: str) -> float:
        return number(path, row, key)

    return Update(
        step=row["step"],
        tokens=value("tokens"),
        loss=value("loss"),
        learning_rate=value("learning_rate"),
        grad_norm=value("grad_norm"),
        step_seconds=value("step_seconds"),
        tokens_per_second=value("tokens_per_second"),
        flops=value("flops"),
        overhead_ratio=value("overhead_ratio"),
        phase=str(row.get("phase", "")),
    )


def _validation(path: Path, row: Row, updates: Sequence[Update]) -> Validation:
    step = row["step"]
    return Validation(
        step=step,
        tokens=_at(updates, step, "tokens"),
        flops=_at(updates, step, "flops"),
        loss=number(path, row, "validation_loss"),
    )


def _scores(path: Path, row: Row) -> list[Score]:
    tasks = row["evaluation"]
    if not isinstance(tasks, dict) or not all(isinstance(one, dict) for one in tasks.values()):
        raise UserError(
            path, f"step {row['step']}", "evaluation contains no scores; correct the row"
        )
    return [
        Score(row["step"], name, metric, number(path, {**metrics, "step": row["step"]}, metric))
        for name, metrics in tasks.items()
        for metric in metrics
    ]


def _at(updates: Sequence[Update], step: int, key: str) -> float:
    """A cumulative value at a step that may lie between two logged ones: on the line between."""
    place = bisect_left(updates, step, key=lambda update: update.step)
    after = updates[place] if place < len(updates) else None
    before = updates[place - 1] if place else None
    if after is not None and after.step == step:
        return float(getattr(after, key))
    low = 0.0 if before is None else float(getattr(before, key))
    start = 0 if before is None else before.step
    if after is None:
        # Past the newest row: at the pace of the last two.
        if place < 2:
            return math.nan
        earlier = updates[place - 2]
        pace = (low - float(getattr(earlier, key))) / max(1, start - earlier.step)
        return low + pace * (step - start)
    return low + (float(getattr(after, key)) - low) * (step - start) / (after.step - start)


def _read_growth(
    journal: Path | None,
) -> tuple[Header | None, Entropies, State, Sequence[DecisionLine]]:
    entropies, decisions = Entropies(), list[DecisionLine]()
    if journal is None:
        return None, entropies, State(), decisions
    header, lines = read_journal(journal, live=True)
    average = EntropyAverage(header.growth.entropy_ema if header else 0.0)
    for line in lines:
        if isinstance(line, Measurement):
            _take(entropies, line)
            entropies.heads = average.update(line).mean
        else:
            decisions.append(line)
    initial = State()
    if header is not None:
        initial = build_policy(header.method, header.growth, header.model).initial_state()
    return header, entropies, initial, decisions


def _take(entropies: Entropies, measurement: Measurement) -> None:
    if not entropies.means:
        layers = len(measurement.entropy)
        entropies.means = [array("d") for _ in range(layers)]
        entropies.variances = [array("d") for _ in range(layers)]
    entropies.steps.append(measurement.step)
    for layer, heads in enumerate(measurement.entropy):
        mean = math.fsum(heads) / len(heads)
        entropies.means[layer].append(mean)
        variance = math.fsum((value - mean) ** 2 for value in heads) / len(heads)
        entropies.variances[layer].append(variance)


def _planned(journal: Path, header: Header) -> Planned:
    recipe = recipe_of_journal(journal)
    is_whole = continuity(journal, header).gap is None
    planned = plan(
        recipe.model,
        recipe.method,
        recipe.growth,
        sequence_length=recipe.sequence_length,
        global_batch_size=recipe.global_batch_size,
        steps=recipe.steps,
        journal=journal if is_whole else None,
    )
    own = planned.outcome if is_whole else None
    return Planned(recipe, parameter_count(recipe.model), planned.cases["earliest"], own)


def _read_starts(path: Path) -> list[Start]:
    starts = []
    for row in read_objects(path):
        step, reached = row.get("step"), row.get("reached")
        if not isinstance(step, int) or not is_count(step):
            raise UserError(path, None, f"step is {str(step)[:40]!r}, not a count; remove the file")
        before = reached if isinstance(reached, int) and is_count(reached) else None
        starts.append(Start(step, before, number(path, row, "time"), row))
    return starts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(path, None, refusal(error, "read")) from None


def _age(files: Iterable[Path]) -> float:
    newest: float = max(file.stat().st_mtime for file in files)
    return max(0.0, time.time() - newest)
