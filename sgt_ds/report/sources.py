"""Where a view of a run comes from: its directory, or the exporter of its rank 0."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.config import RunLayout
from sgt_ds.errors import UserError, refusal
from sgt_ds.growth import DecisionLine, Header, Measurement, State, build_policy, read_journal
from sgt_ds.progress import duration
from sgt_ds.report.access import Access, NoAnswer, access_of_run
from sgt_ds.report.ranks import Ranks
from sgt_ds.report.rows import add_row, parsed
from sgt_ds.report.view import LayerView, RunView
from sgt_ds.telemetry import Outcome, read_outcome

SCRAPE_TIMEOUT_SECONDS = 5.0
# Reading a long journal may take seconds; it then takes this share of the time at most.
READING_SHARE = 0.1

Series = dict[str, dict[tuple[str, ...], float]]
"""Values by metric name and label values."""


class Source(Protocol):
    """Gives the newest view each time it is asked."""

    def read(self) -> RunView:
        """Raises: UserError where the source cannot be read."""


def open_source(target: str, access: Access | None = None) -> Source:
    """The source that a user named: a run directory, HOST:PORT, or a URL.

    `access`: what its exporters ask for; a run directory's own run.yaml tells the rest.
    Raises: UserError where it is none of them.
    """
    path, access = Path(target), access or Access()
    if path.is_dir():
        return DirectorySource(path, access)
    if re.fullmatch(r"https?://\S+", target):
        _check_port(target, target)
        return ExporterSource(target, access)
    if not path.exists() and re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+", target):
        _check_port(target, f"//{target}")
        return ExporterSource(f"{'https' if access.is_tls else 'http'}://{target}", access)
    raise UserError(target, None, "is not a run directory; give one, or HOST:PORT of an exporter")


def _check_port(target: str, url: str) -> None:
    """Raises: UserError of `target` where its port is none."""
    try:
        good = urlsplit(url).port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(target, None, "its port is not one of 1 to 65535; give telemetry.port")


class DirectorySource:
    """Reads metrics.jsonl and the growth journal of a run that may be running."""

    def __init__(self, run_dir: Path, access: Access) -> None:
        self._layout = RunLayout(run_dir)
        self._name = run_dir.resolve().name
        self._offset = self._lines = 0
        self._rows: list[dict[str, Any]] = []
        self._journal: tuple[Header | None, list[Measurement], State | None] = (None, [], None)
        self._read_again = 0.0
        self._ranks = Ranks(self._targets, *access_of_run(access, run_dir))

    def read(self) -> RunView:
        """The run as its files stand now."""
        if not self._layout.metrics.exists() and not self._journal_has_begun():
            message = "holds neither metrics.jsonl nor growth.jsonl; give a run directory"
            if self._layout.is_there():
                message = "has recorded nothing yet: no metrics and no growth; see logs"
            raise UserError(self._layout.run_dir, None, message)
        self._read_rows()
        self._read_journal()
        header, measured, state = self._journal
        trained = [row for row in self._rows if "loss" in row]
        last = trained[-1] if trained else {}
        validated = [row for row in self._rows if "validation_loss" in row]
        shown = measured[-1].step if measured else 0
        known, ranks = self._ranks.read()
        outcome = self._outcome()
        return RunView(
            name=self._name,
            method=header.method if header else "",
            state=self._news() if outcome is None else outcome.reason,
            is_over=outcome is not None,
            step=last.get("step", shown),
            steps=header.values.get("steps") if header else None,
            phase=last.get("phase"),
            losses=[math.nan if row["loss"] is None else row["loss"] for row in trained],
            validation_loss=validated[-1]["validation_loss"] if validated else None,
            learning_rate=last.get("learning_rate"),
            grad_norm=last.get("grad_norm"),
            tokens=last.get("tokens"),
            tokens_per_second=last.get("tokens_per_second"),
            overhead_ratio=last.get("overhead_ratio"),
            planned_overhead_ratio=None,
            mfu_ratio=None,
            layers=_layers_over_time(measured, state or State()),
            cells_mean=f"steps {measured[0].step} to {shown}" if measured else "",
            known_ranks=known,
            ranks=ranks,
        )

    def _targets(self) -> str | None:
        try:
            return self._layout.targets.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None  # of a run without exporters

    def _read_rows(self) -> None:
        """Take in what was added; all of it where a resume has cut the file back."""
        path = self._layout.metrics
        try:
            with path.open("rb") as stream:
                if path.stat().st_size < self._offset:
                    self._offset, self._lines, self._rows = 0, 0, []
                stream.seek(self._offset)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(path, None, refusal(error, "read")) from None
        lines, before = whole.split(b"\n") if newline else [], self._lines
        self._offset += len(whole) + len(newline)
        self._lines += len(lines)
        for number, line in enumerate(lines, start=before + 1):
            # A resume that grew past the old length before we looked: steps go back.
            if line.strip():
                add_row(self._rows, parsed(path, number, line))

    def _read_journal(self) -> None:
        begun = time.monotonic()
        if begun < self._read_again or not self._journal_has_begun():
            return
        header, lines = read_journal(self._layout.journal, live=True)
        measured: list[Measurement] = []
        state = None
        if header is not None:
            state = build_policy(header.method, header.growth, header.model).initial_state()
        for line in lines:
            if isinstance(line, DecisionLine):
                state = line.decision.after
            else:
                measured.append(line)
        self._journal = (header, measured, state)
        ended = time.monotonic()
        self._read_again = ended + (ended - begun) / READING_SHARE

    def _journal_has_begun(self) -> bool:
        """Whether anything is in it: a start makes it before it writes its first line."""
        journal = self._layout.journal
        return journal.exists() and journal.stat().st_size > 0

    def _outcome(self) -> Outcome | None:
        """How training ended; None while someone trains, or where no one said so."""
        outcome = read_outcome(self._layout.control)
        # A copied run's files have other times, in any order.
        return outcome if outcome is not None and outcome.written >= self._written() else None

    def _news(self) -> str:
        return f"newest row {duration(max(time.time() - self._written(), 0.0))} ago"

    def _written(self) -> float:
        files = [p for p in (self._layout.metrics, self._layout.journal) if p.exists()]
        return max(file.stat().st_mtime for file in files)


class ExporterSource:
    """Scrapes rank 0's exporter; remembers the losses that it saw."""

    def __init__(self, url: str, access: Access) -> None:
        self._target, self._access = url, access
        self._url = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
        self._losses: dict[float, float] = {}
        self._ranks = Ranks(self._targets, url.partition("://")[0], access)

    def read(self) -> RunView:
        """The run as its exporter tells it now."""
        series, info = _parse(self._scrape())
        if "sgt_rank_step" not in series:
            raise UserError(self._target, None, "is not the exporter of a run; give telemetry.port")
        # While a checkpoint is loaded, neither phase nor counters are known; updates are configured.
        if not {"sgt_growth_phase", "sgt_optimizer_steps_total", "sgt_run_steps"} & series.keys():
            message = "is not the run's rank 0; give the port of the first rank of the first host"
            raise UserError(self._target, None, message)
        step = series["sgt_rank_step"][()]
        loss = _single(series, "sgt_loss")
        if loss is not None:
            self._losses[step] = loss
        known, ranks = self._ranks.read()
        return RunView(
            name=info.get("run", ""),
            method=info.get("method", ""),
            state=_active(series, "sgt_run_state") or "",
            step=int(step),
            steps=int(_single(series, "sgt_run_steps") or 0) or None,
            phase=_active(series, "sgt_growth_phase"),
            losses=list(self._losses.values()),
            validation_loss=_single(series, "sgt_validation_loss"),
            learning_rate=_single(series, "sgt_learning_rate"),
            grad_norm=_single(series, "sgt_gradient_norm"),
            tokens=_single(series, "sgt_tokens_total"),
            tokens_per_second=_single(series, "sgt_tokens_per_second"),
            overhead_ratio=_single(series, "sgt_flops_overhead_ratio"),
            planned_overhead_ratio=_single(series, "sgt_flops_overhead_plan_ratio"),
            mfu_ratio=_single(series, "sgt_mfu_ratio"),
            layers=_layers_by_head(series),
            cells_mean="heads",
            known_ranks=known,
            ranks=ranks,
        )

    def _targets(self) -> str | None:
        url = self._url.removesuffix("/metrics") + "/targets"
        try:
            return self._access.fetch(url, SCRAPE_TIMEOUT_SECONDS)
        except NoAnswer:
            return None  # of a version that serves none

    def _scrape(self) -> str:
        try:
            return self._access.fetch(self._url, SCRAPE_TIMEOUT_SECONDS)
        except NoAnswer as silence:
            message = (
                f"does not answer as an exporter ({silence}); check the host, the port, and that "
                "it is running"
            )
            raise UserError(self._target, None, message) from None


def _parse(text: str) -> tuple[Series, dict[str, str]]:
    series: Series = {}
    info: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "sgt_run_info":
                    info = sample.labels
                # Of our metrics with several labels: layer before head.
                labels = tuple(sample.labels[key] for key in sorted(sample.labels, reverse=True))
                series.setdefault(sample.name, {})[labels] = sample.value
    except ValueError:
        return {}, {}
    return series, info


def _single(series: Series, name: str) -> float | None:
    return series.get(name, {}).get(())


def _active(series: Series, name: str) -> str | None:
    return next((labels[0] for labels, value in series.get(name, {}).items() if value == 1), None)


def _layers_by_head(series: Series) -> list[LayerView]:
    depths = {int(labels[0]): int(v) for labels, v in series.get("sgt_loop_depth", {}).items()}
    means = {int(labels[0]): v for labels, v in series.get("sgt_layer_entropy_ratio", {}).items()}
    entropies = {
        (int(layer), int(head)): value
        for (layer, head), value in series.get("sgt_head_entropy_ratio", {}).items()
    }
    looped = {(int(layer), int(head)) for layer, head in series.get("sgt_looped_head", {})}
    width = 1 + max((head for _, head in entropies), default=-1)
    layers = []
    for layer in sorted(depths):
        heads = sorted(head for number, head in looped if number == layer)
        layers.append(
            LayerView(
                cells=[entropies.get((layer, head), math.nan) for head in range(width)],
                entropy=means.get(layer),
                depth=depths[layer],
                heads=None if width and len(heads) == width else heads,
            )
        )
    return layers


def _layers_over_time(measured: Sequence[Measurement], state: State) -> list[LayerView]:
    if not measured:
        return []
    layers = []
    for layer in range(len(measured[-1].entropy)):
        cells = [_mean(measurement.entropy[layer]) for measurement in measured]
        loop = state.loops.get(layer)
        layers.append(
            LayerView(
                cells=cells,
                entropy=cells[-1] if math.isfinite(cells[-1]) else None,
                depth=loop.depth if loop else 0,
                heads=loop.heads if loop else (),
            )
        )
    return layers


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
