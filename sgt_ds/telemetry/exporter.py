"""The exporter of one rank: training publishes to it, Prometheus reads it over HTTP.

No method that training calls after `start` raises or waits. Knows no torch and no file of the run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from sgt_ds.telemetry.hardware import HardwareSampler
from sgt_ds.telemetry.kept_counters import KeptCounters
from sgt_ds.telemetry.metric import INFO_LABELS, MARGIN_KINDS, RULES, STALL_REASONS
from sgt_ds.telemetry.record import StepRecord, Totals
from sgt_ds.telemetry.scrapers import Scrapers
from sgt_ds.telemetry.server import Endpoint, MetricsServer
from sgt_ds.telemetry.snapshot import (
    Counters,
    DeviceMemory,
    Snapshot,
    counters_of,
    events_beyond,
    families,
    highest,
)
from sgt_ds.telemetry.targets import TargetGroup
from sgt_ds.telemetry.trackers import Tracker

log = logging.getLogger(__name__)

# Scrapes within this time share one rendering, so that many scrapers cost as much as one.
RENDERING_LASTS_SECONDS = 0.2


class ModelShape(Protocol):
    """What is known of the model; `sgt_ds.config.ModelConfig` is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...


class Exporter(Collector):
    """Serves this rank's metrics on `config.port + local_rank`."""

    def __init__(
        self,
        config: Endpoint,
        *,
        run_wide: bool,
        local_rank: int,
        rank: int,
        info: Mapping[str, str],
        model: ModelShape,
        run_steps: int | None = None,
        checkpoint_steps: int | None = None,
        loads: bool = False,
        counters_file: Path | None = None,
        progressed_at: Callable[[], float] | None = None,
        hardware: HardwareSampler | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Nothing listens before `start`.

        `run_wide`: whether to serve the run-wide series (global rank 0).
        `info`: labels of sgt_run_info, names as in `metrics.INFO_LABELS`; no secrets.
        `run_steps`: updates that the run is configured to apply; `checkpoint_steps`: to take from
        one checkpoint to the next.
        `loads`: whether a checkpoint is to be loaded; counters of the run that no scraper has seen
        are then served once `begin` tells where they begin.
        `counters_file`: where the run-wide counters stand as scrapers last saw them, so that a
        run that crashed and resumed at an older checkpoint does not serve lower ones.
        `progressed_at`: when this rank last got on, in Unix seconds; asked by scrapes. None: only
        updates count.
        `hardware`: what the machine says of itself; started and closed with the exporter.
        `trackers`: get every logged update as well; closed with the exporter.
        """
        unknown = info.keys() - set(INFO_LABELS)
        if unknown:
            raise ValueError(f"sgt_run_info has no label {sorted(unknown)}; it has {INFO_LABELS}")
        self._endpoint, self._local_rank = config, local_rank
        self._kept: KeptCounters | None = None
        if counters_file is not None and run_wide:
            self._kept = KeptCounters(counters_file)
        self._snapshot = Snapshot(
            rank=rank,
            run_wide=run_wide,
            host_wide=local_rank == 0,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            info=dict(info),
            step_timestamp=time.time(),
            counts_steps=not loads,
            counts_events=not loads,
            run_steps=run_steps,
            checkpoint_steps=checkpoint_steps,
        )
        self._progressed_at = progressed_at
        self._hardware, self._trackers = hardware, trackers
        self._floors: Counters = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._server: MetricsServer | None = None
        self._faults_told: set[str] = set()
        self._scrape_failures = 0
        self._rendering = threading.Lock()
        self._rendered: dict[str, tuple[float, Snapshot, bytes]] = {}
        self._scrapers = Scrapers()

    def start(self) -> None:
        """Begin to serve. Raises: UserError where the address cannot be bound (telemetry.port)."""
        if self._kept is not None:
            self._floors = highest(self._floors, self._kept.read())
            before = events_beyond(self._snapshot, self._floors)
            self._snapshot = replace(self._snapshot, events_before=before)
        self._server = MetricsServer(
            self._endpoint, self._local_rank, self._render, self._snapshot.info.get("run")
        )
        if self._hardware is not None:
            self._hardware.start()

    def serve_targets(self, groups: Sequence[TargetGroup]) -> None:
        """Serve where all ranks are scraped, for Prometheus' http_sd. After `start`."""
        if self._server is not None:
            self._server.serve_targets(json.dumps(groups))

    @property
    def port(self) -> int:
        """The port that is served, or would be."""
        return self._server.port if self._server else self._endpoint.port + self._local_rank

    def close(self, wait_seconds: float = 0.0) -> None:
        """Release the port.

        `wait_seconds`: after `finish`, how long to wait at most until every scraper has read the
        end; nothing is waited for where none scraped of late.
        """
        for tracker in self._trackers:
            tracker.close()
        if self._server is None:
            return
        if self._snapshot.run_state != "running":
            self._scrapers.wait(wait_seconds)
        self._server.close()
        self._server = None
        if self._hardware is not None:
            self._hardware.close()

    def begin(self, step: int | None = None) -> None:
        """It is known how many events came before this process: their counters are served now.

        `step`: updates applied so far, if these are known as well.
        """

        def change(now: Snapshot) -> Snapshot:
            begun = replace(now, counts_events=True)
            return begun if step is None else replace(begun, counts_steps=True, step=step)

        self._change("begin", change)

    def observe_step(
        self,
        step: int,
        seconds: float,
        data_wait_seconds: float | None = None,
        *,
        part_seconds: Mapping[str, float] | None = None,
        collective_seconds: float | None = None,
    ) -> None:
        """An update made the count `step`. On every rank, each update; costs microseconds.

        `data_wait_seconds`: what this process has waited for data so far. The others: as in
        `publish_rank`; with the count, of which rules take the quotient.
        """

        def change(now: Snapshot) -> Snapshot:
            waited = now.data_wait_seconds if data_wait_seconds is None else data_wait_seconds
            passed = now.collective_seconds if collective_seconds is None else collective_seconds
            return replace(
                now,
                step=step,
                step_timestamp=time.time(),
                skipped_in_a_row=0,
                histogram=now.histogram.observe(seconds),
                data_wait_seconds=waited,
                part_seconds={**now.part_seconds, **(part_seconds or {})},
                collective_seconds=passed,
            )

        self._change("observe_step", change)
        if self._server is not None and not self._server.is_alive():
            self._tell_once("the server", "its thread has died; metrics are no longer served")

    def publish_rank(
        self,
        *,
        part_seconds: Mapping[str, float],
        collective_seconds: float,
        device_memory: DeviceMemory | None,
    ) -> None:
        """What this rank spent since its process began. On every rank, each logged update, and what
        comes between two updates.

        `part_seconds`: by `metric.STEP_PARTS`. `collective_seconds`: in growth's collectives.
        """

        def change(now: Snapshot) -> Snapshot:
            return replace(
                now,
                part_seconds={**now.part_seconds, **part_seconds},
                collective_seconds=collective_seconds,
                device_memory=device_memory,
            )

        self._change("publish_rank", change)

    def publish_totals(self, totals: Totals) -> None:
        """What the run has spent so far. Each update, skipped ones too."""
        self._change(
            "publish_totals",
            lambda now: replace(now, totals=totals, not_finite=totals.not_finite),
        )

    def publish(self, record: StepRecord) -> None:
        """A logged update. Counts it as `observe_step` does, unless that has been called for it."""

        def change(now: Snapshot) -> Snapshot:
            histogram, timestamp = now.histogram, now.step_timestamp
            if record.step > now.step:
                histogram, timestamp = histogram.observe(record.step_seconds), time.time()
            return replace(
                now,
                record=record,
                totals=record.totals,
                step=record.step,
                step_timestamp=timestamp,
                histogram=histogram,
                skipped_steps=record.skipped_steps,
                skipped_in_a_row=0,
                not_finite=record.not_finite,
                data_wait_seconds=record.data_wait_seconds,
            )

        self._change("publish", change)
        for tracker in self._trackers:
            tracker.put(self._snapshot)

    def publish_skip(self) -> None:
        """An update was skipped."""

        def change(now: Snapshot) -> Snapshot:
            return replace(
                now,
                skipped_steps=now.skipped_steps + 1,
                skipped_in_a_row=now.skipped_in_a_row + 1,
            )

        self._change("publish_skip", change)

    def publish_decision(
        self,
        kind: str,
        *,
        cause: str = "",
        margin: Mapping[str, float | None] | None = None,
        within_noise: bool | None = None,
    ) -> None:
        """A growth decision; `kind` is its rule, `cause` the few words with which it is explained.

        `margin`: in standard errors, by `metrics.MARGIN_KINDS`; None where it weighed nothing.
        """

        def change(now: Snapshot) -> Snapshot:
            counts = {**now.growth_events, kind: now.growth_events[kind] + 1}
            stalls = dict(now.growth_stalls)
            if kind == "stall":
                stalls[cause if cause in STALL_REASONS else "other"] += 1
            return replace(
                now,
                growth_events=counts,
                growth_stalls=stalls,
                growth_margin={kind: (margin or {}).get(kind) for kind in MARGIN_KINDS},
                within_noise=within_noise,
            )

        self._change("publish_decision", change)

    def publish_checkpoint(self, seconds: float) -> None:
        """A checkpoint is complete; it took `seconds`."""
        self._change(
            "publish_checkpoint",
            lambda now: replace(now, checkpoint_seconds=seconds, checkpoint_timestamp=time.time()),
        )

    def publish_load(self, seconds: float) -> None:
        """The checkpoint that this start continues from is loaded; it took `seconds`."""
        self._change("publish_load", lambda now: replace(now, load_seconds=seconds))

    def publish_checkpoint_failure(self) -> None:
        """A checkpoint could not be saved."""
        self._change(
            "publish_checkpoint_failure",
            lambda now: replace(now, checkpoint_failures=now.checkpoint_failures + 1),
        )

    def publish_validation(self, loss: float) -> None:
        """A validation loss, nats per token."""
        self._change("publish_validation", lambda now: replace(now, validation_loss=loss))

    def publish_evaluation(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Scores of an evaluation in the loop, by task or text, then by metric."""
        self._change("publish_evaluation", lambda now: replace(now, evaluation=scores))

    def finish(self, state: Literal["completed", "stopped", "failed"]) -> None:
        """The run has ended: complete, as asked, or by a failure. Serving goes on until `close`."""
        self._change("finish", lambda now: replace(now, run_state=state))

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint that is being taken now."""
        now = self._snapshot
        return {
            "counters": highest(counters_of(now), self._floors),
            "growth_events": dict(now.growth_events),
            "growth_stalls": dict(now.growth_stalls),
            "growth_margin": dict(now.growth_margin),
            "within_noise": now.within_noise,
            "step": now.step,
            "checkpoint_seconds": now.checkpoint_seconds,
            "checkpoint_failures": now.checkpoint_failures,
            "taken": time.time(),
        }

    def load_state_dict(
        self, values: Mapping[str, Any], *, skipped_steps: int, not_finite: int
    ) -> None:
        """Go on from where `state_dict` was taken; empty `values`: telemetry was off there.

        `skipped_steps`, `not_finite`: the run's totals there, from which training counts on.
        """

        def change(now: Snapshot) -> Snapshot:
            now = replace(now, skipped_steps=skipped_steps, not_finite=not_finite)
            loaded = from_values(now) if values else now
            return replace(loaded, events_before=events_beyond(loaded, self._floors))

        def from_values(now: Snapshot) -> Snapshot:
            events = {kind: int(values["growth_events"].get(kind, 0)) for kind in RULES}
            stalls, margin = values.get("growth_stalls", {}), values.get("growth_margin", {})
            self._floors = highest(self._floors, values["counters"])
            return replace(
                now,
                growth_events=events,
                growth_stalls={reason: int(stalls.get(reason, 0)) for reason in STALL_REASONS},
                growth_margin={kind: margin.get(kind) for kind in MARGIN_KINDS},
                within_noise=values.get("within_noise"),
                step=values["step"],
                checkpoint_seconds=values["checkpoint_seconds"],
                checkpoint_failures=values.get("checkpoint_failures", 0),
                # What can be loaded was completed, soon after its state was taken.
                checkpoint_timestamp=values["taken"],
            )

        self._change("load_state_dict", change)

    def collect(self) -> Iterator[Family]:
        """The metric current families, for prometheus_client."""
        now = self._snapshot
        now = replace(now, failures=now.failures + self._scrape_failures)
        if self._progressed_at is not None:
            now = replace(now, progress_timestamp=self._progressed_at())
        if self._hardware is not None:
            now = replace(now, hardware=self._hardware.latest())
        return families(now, highest(counters_of(now), self._floors))

    def _change(self, what: str, change: Callable[[Snapshot], Snapshot]) -> None:
        # Training is the only writer, so no lock; a reference is replaced in one piece.
        try:
            self._snapshot = change(self._snapshot)
        except Exception as error:
            self._failed(what, repr(error))

    def _failed(self, what: str, why: str) -> None:
        self._snapshot = replace(self._snapshot, failures=self._snapshot.failures + 1)
        self._tell_once(what, why)

    def _scrape_failed(self, error: Exception) -> None:
        # Not in the snapshot: training alone writes that.
        self._scrape_failures += 1
        self._tell_once("a scrape", repr(error))

    def _tell_once(self, what: str, why: str) -> None:
        if what not in self._faults_told:
            self._faults_told.add(what)
            log.error("telemetry: %s failed; training continues (logged once): %s", what, why)

    def _render(self, accept: str, scraper: str | None) -> tuple[str, bytes]:
        """What one scrape gets. In the server's threads."""
        encoder, content_type = choose_encoder(accept)
        with self._rendering:
            snapshot = self._snapshot
            cached = self._rendered.get(content_type)
            fresh = cached is not None and time.monotonic() - cached[0] < RENDERING_LASTS_SECONDS
            if cached is not None and fresh and cached[1].run_state == snapshot.run_state:
                body = cached[2]
            else:
                try:
                    body = encoder(self._registry)
                except Exception as error:
                    self._scrape_failed(error)
                    raise
                self._rendered = {content_type: (time.monotonic(), snapshot, body)}
        if self._kept is not None:
            try:
                self._kept.keep(highest(counters_of(snapshot), self._floors))
            except OSError as error:
                self._scrape_failed(error)
        if scraper is not None:
            self._scrapers.served(scraper, the_end=snapshot.run_state != "running")
        return content_type, body
