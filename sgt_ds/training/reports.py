"""Outputs of a run's figures: the log, metrics.jsonl and the exporter. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sgt_ds.growth import Decision
from sgt_ds.progress import duration
from sgt_ds.telemetry import Exporter, StepRecord
from sgt_ds.training.run_directory import MetricsFile

log = logging.getLogger(__name__)


class Reports:
    """One call for each kind of news. `metrics` is None on all ranks but the first."""

    def __init__(self, metrics: MetricsFile | None, telemetry: Exporter | None, steps: int) -> None:
        """`steps`: of the whole run."""
        self.metrics, self.telemetry, self._steps = metrics, telemetry, steps

    def step(self, record: StepRecord, seconds_left: float) -> None:
        """A logged update. `seconds_left`: until the run ends, by its updates so far."""
        if self.metrics is not None:
            self.metrics.write(record.as_metrics_row())
        if self.telemetry is not None:
            self.telemetry.publish(record)
        log.info("%s", self._progress_line(record, seconds_left))

    def decision(self, decision: Decision) -> None:
        """What growth decided."""
        log.info("step %d: %s: %s", decision.step, decision.rule, decision.reason)
        if self.telemetry is not None:
            margin = decision.margin
            self.telemetry.publish_decision(
                decision.rule,
                cause=decision.cause,
                margin=None if margin is None else {"layer": margin.layer, "head": margin.head},
                within_noise=None if margin is None else margin.within_noise,
            )

    def validation(self, step: int, loss: float) -> None:
        """The validation loss, in nats."""
        log.info("step %d: validation loss %.4f", step, loss)
        if self.telemetry is not None:
            self.telemetry.publish_validation(loss)
        if self.metrics is not None:
            self.metrics.write({"step": step, "validation_loss": loss})

    def evaluation(self, step: int, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Scores by name and metric."""
        for name, values in scores.items():
            told = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
            log.info("step %d: %s: %s", step, name, told)
        if self.telemetry is not None:
            self.telemetry.publish_evaluation(scores)
        if self.metrics is not None:
            self.metrics.write({"step": step, "evaluation": scores})

    def _progress_line(self, record: StepRecord, seconds_left: float) -> str:
        loops = " ".join(f"{layer}×{loop.depth}" for layer, loop in record.loops.loops.items())
        parts = (
            f"step {record.step}/{self._steps}",
            f"ETA {duration(seconds_left)}",
            f"loss {record.loss:.3f}",
            f"lr {record.learning_rate:.2e}",
            f"grad {record.grad_norm:.2f}",
            f"{record.tokens_per_second:,.0f} tok/s",
            record.phase + (f" {loops}" if loops else ""),
            f"FLOPs +{100 * record.overhead_ratio:.2f}%",
        )
        return "  ".join(parts)
