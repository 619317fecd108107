"""The training loop: one update read top to bottom, and what happens around it.

Built from finished parts (`build.py` joins them). Knows no file format and no DeepSpeed option.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sgt_ds.config import RunConfig
from sgt_ds.data import Loader
from sgt_ds.errors import StateMismatch
from sgt_ds.flops import FlopsCounter
from sgt_ds.growth import Decision, GrowthController, Passes
from sgt_ds.model import LoopInputs, loop_inputs
from sgt_ds.telemetry import Exporter
from sgt_ds.training.compile_ahead import CompileAhead
from sgt_ds.training.compiling import CompileCache
from sgt_ds.training.engine import Ranks, set_learning_rate
from sgt_ds.training.evaluation import Evaluation
from sgt_ds.training.faults import Requests, SkippedSteps
from sgt_ds.training.figures import AppliedUpdate, Clock, Figures
from sgt_ds.training.heartbeat import Heartbeat
from sgt_ds.training.integrity import compare_ranks
from sgt_ds.training.parts import StepParts
from sgt_ds.training.reports import Reports
from sgt_ds.training.run_directory import MetricsFile
from sgt_ds.training.saves import RunCheckpoints
from sgt_ds.training.schedule import learning_rate
from sgt_ds.training.throughput import Throughput
from sgt_ds.training.totals import StepTotals
from sgt_ds.training.validation import ValidationLoss

log = logging.getLogger(__name__)

# How long the exporters stay up for scrapers that have not yet read how the run ended: alerts take a
# run that vanished without a word for a dead one. A scrape interval of a minute fits; of half a
# minute after a stop, which has to end within a grace; after a failure alerts fire anyway, and the
# other ranks wait.
LAST_SCRAPE_SECONDS = {"completed": 65.0, "stopped": 35.0, "failed": 5.0}


class Trainer:
    """Trains until the last step, a request to stop, or divergence."""

    def __init__(
        self,
        config: RunConfig,
        *,
        ranks: Ranks,
        engine: Any,
        loader: Loader,
        growth: GrowthController,
        flops: FlopsCounter,
        telemetry: Exporter | None,
        metrics: MetricsFile | None,
        checkpoints: RunCheckpoints,
        requests: Requests,
        validation: ValidationLoss | None,
        evaluation: Evaluation | None,
        peak_flops: float | None,
        planned_overhead: Callable[[int], float],
        parts: StepParts,
        heartbeat: Heartbeat,
        compiled: CompileCache | None,
        ahead: CompileAhead | None,
    ) -> None:
        """`validation`, `evaluation`: None without a validation set, or without anything named.
        `compiled`, `ahead`: None where nothing is kept, or compiled ahead.
        `peak_flops`: of one device, None where unknown. `planned_overhead`: the cumulative FLOPs
        overhead that is planned at a step.
        """
        self.config = config
        self.ranks = ranks
        self.engine = engine
        self.loader = loader
        self.growth = growth
        self.flops = flops
        self.telemetry = telemetry
        self.metrics = metrics
        self.reports = Reports(metrics, telemetry, config.training.steps)
        self.checkpoints = checkpoints
        self.requests = requests
        self.validation = validation
        self.evaluation = evaluation
        self.parts = parts
        self.heartbeat = heartbeat
        self.compiled = compiled
        self.ahead = ahead
        self.clock = Clock()
        self.skips = SkippedSteps(config.training.max_skipped_steps)
        self._figures = Figures(
            self.clock,
            loader=loader,
            growth=growth,
            flops=flops,
            parts=parts,
            skips=self.skips,
            peak_flops=None if peak_flops is None else peak_flops * ranks.world_size,
            planned_overhead=planned_overhead,
        )
        self._throughput = Throughput()
        self._unreported: AppliedUpdate | None = None
        """The newest update, until it is in the log."""
        self._validated, self._evaluated = (-1, 0.0), -1
        """The step of the newest validation with its loss, and that of the newest evaluation."""
        self._end: Literal["completed", "stopped", "failed"] = "failed"
        self.asked_by_file = False
        """Whether the stop file ended the run, as any rank saw."""

    def train(self) -> Literal["completed", "stopped"]:
        """Run the remaining updates, or those until a request to stop. Returns which.

        Raises: Diverged, StateMismatch.
        """
        self.checkpoints.saved_step = self.clock.step  # what was loaded needs no second save
        self.checkpoints.prepare()
        self._throughput.begin(self.clock.step, self.clock.tokens)
        try:
            self._end = end = self._updates()
            self.heartbeat.enter("end")  # a run that failed tells the part in which it did
        except StateMismatch as error:
            with self.parts.host("checkpoint"):
                self.checkpoints.finish_after(error)
            raise
        finally:
            if self.telemetry is not None:
                self.telemetry.finish(self._end)
        return end

    def _updates(self) -> Literal["completed", "stopped"]:
        """Updates and what is due after each, until there is nothing more to do. Collective."""
        # A request from before the start holds for the very first update as well.
        freeze, stop, self.asked_by_file = self.ranks.any(
            self.requests.freeze(), self.requests.stop(), self.requests.asked_by_file()
        )
        self._apply_freeze(freeze)
        if stop:
            self._stop()
            return "stopped"
        applied = True
        while self._updates_left() > 0:
            applied = self.train_step()
            self.heartbeat.enter("agreement")
            freeze, stop, self.asked_by_file, writing = self.ranks.any(
                self.requests.freeze(),
                self.requests.stop(),
                self.requests.asked_by_file(),
                self.checkpoints.is_busy(),
            )
            self._apply_freeze(freeze)
            if not writing:
                with self.parts.host("checkpoint"):
                    self.checkpoints.proceed()
            if applied:  # after the freeze: the checkpoint of a step holds all of that step
                self._after_step()
            if stop and self._updates_left() > 0:
                self._stop()
                return "stopped"
        if self.clock.step < self.config.training.steps:
            self._end_with_the_data(skipped=not applied)
        else:
            log.info("step %d: the run is complete", self.clock.step)
        return "completed"

    def train_step(self) -> bool:
        """Take one optimizer step and record it. Returns whether an update was applied.

        Raises: Diverged after too many skips in a row; StateMismatch, naming the ranks.
        """
        started = time.perf_counter()
        clock, training = self.clock, self.config.training
        passes = self.growth.passes(clock.step)
        loops = loop_inputs(passes, self.ranks.device)
        measure = self.growth.measures(clock.step)
        self.heartbeat.update(
            clock.step, (measure, *((at, run.kind) for at, run in passes.items()))
        )
        self._announce(passes, measured=measure)
        rate = learning_rate(clock.step, training.steps, self.config.optimizer)
        set_learning_rate(self.engine.optimizer.param_groups, rate)

        totals = StepTotals(self.ranks.device)
        # token ids, int64 (sequences, positions + 1)
        for sample in self.heartbeat.each("data", self.loader.next_step()):
            ids, document_starts = sample.to(self.ranks.device)
            with self.parts.device("forward"):
                output = self.engine(
                    ids[:, :-1],
                    ids[:, 1:],
                    loops=loops,
                    measure=measure,
                    document_starts=document_starts,
                )
            with self.parts.device("backward"):
                self.engine.backward(output.loss)
            totals.add(output)
            with self.parts.device("optimizer"):
                self.engine.step()  # updates on the last micro-batch only

        tokens = training.global_batch_size * self.config.data.sequence_length
        clock.tokens += tokens
        self.flops.add(tokens, passes)
        # A finite loss can hide an inf gradient: the engine judges the reduced gradients,
        # and every rank gets the same verdict.
        if not self.engine.was_step_applied():
            self._count_skip()
            return False
        self.skips.applied()
        clock.step += 1
        with self.parts.host("growth"):
            if totals.entropy is not None:
                self.growth.observe(clock.step, totals.entropy)
            self.decide()
        seconds = time.perf_counter() - started
        self.parts.read_passed()  # without telemetry too: what is not read piles up
        if self.telemetry is not None:
            self.telemetry.observe_step(
                clock.step,
                seconds,
                self.loader.wait_seconds,
                part_seconds=self._figures.part_seconds(),
                collective_seconds=self.growth.collective_seconds,
            )
            self._publish_totals()
        grad_norm = self.engine.get_global_grad_norm()
        self._unreported = AppliedUpdate(totals, rate, seconds, grad_norm)
        if clock.step % training.log_every == 0 or self._updates_left() <= 0:
            self._report_step(self._unreported)
        return True

    def decide(self) -> None:
        """Let growth decide where a window is due; Θ acts from the next update. Collective.

        Raises: StateMismatch, naming the ranks.
        """
        self._report_decision(self.growth.decide(self.clock.step, self.flops.total))

    def _apply_freeze(self, freeze: bool) -> None:
        """End growth where a person asked for it, once."""
        if freeze:
            self._report_decision(self.growth.freeze(self.clock.step, self.flops.total))

    def _report_decision(self, decision: Decision | None) -> None:
        if decision is not None:
            self.reports.decision(decision)

    def save(self, *, validation_loss: float | None = None, wait: bool = False) -> None:
        """Save a checkpoint, beside training unless `wait`. Collective.

        `validation_loss`: of the current weights. Raises: SaveFailed where `wait` and it failed.
        """
        with self.parts.host("growth"):
            state = self.state_dict()  # brings the journal to here: resume cuts it back to here
        journal = self.growth.journal
        with self.parts.host("checkpoint"):
            if self.metrics is not None:
                self.metrics.sync()
            if self.compiled is not None:
                self.compiled.keep(beside=self.ahead.compiled if self.ahead is not None else 0)
            self.checkpoints.save(
                self.clock.step,
                state,
                validation_loss=validation_loss,
                wait=wait,
                fault=None if journal is None else journal.fault,
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes, beside the checkpoint's own `step`."""
        growth = self.growth.state_dict()
        self._publish_totals()  # with the entropies that growth has just waited for
        return {
            "entry": self.growth.policy.entry,
            "tokens": self.clock.tokens,
            "batches": self.loader.batches,
            "skipped_steps": self.skips.total,
            "data": self.loader.identity,
            "data_fingerprint": self.loader.fingerprint,
            "flops": self.flops.state_dict(),
            "state": self.growth.state.as_json(),
            "growth": growth,
            "telemetry": self.telemetry.state_dict() if self.telemetry is not None else {},
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go on from where a checkpoint was taken. `values`: its state, with `step`."""
        self.clock.step, self.clock.tokens = values["step"], values["tokens"]
        self.skips.total = values["skipped_steps"]
        self.loader.seek(values["batches"])
        self.flops.load_state_dict(values["flops"])
        self.growth.load_state_dict(values["growth"])
        if self.telemetry is not None:
            self.telemetry.load_state_dict(
                values["telemetry"],
                skipped_steps=self.skips.total,
                not_finite=self.growth.not_finite,
            )

    def cut_back(self, step: int) -> None:
        """Drop what journal and metrics hold past `step`: it will be written again."""
        if self.growth.journal is not None:
            self.growth.journal.cut_back(step, frozen=self.growth.frozen)
        if self.metrics is not None:
            self.metrics.cut_back(step)

    def close(self) -> None:
        """Close files, ports and threads; safe after an error.

        First what must reach the disk: the others may wait for a device that waits for a lost rank.
        """
        if self.growth.journal is not None:
            self.growth.journal.close()
        if self.metrics is not None:
            self.metrics.close()
        self.loader.close()
        self.checkpoints.close()
        if self.ahead is not None:
            self.ahead.close(patient=self._end != "failed")
        if self.telemetry is not None:
            training = self.config.training
            # Half of what a rank may spend at its end before it counts as hanging.
            longest = max(training.collective_timeout_seconds, training.hang_seconds) / 2
            self.telemetry.close(wait_seconds=min(LAST_SCRAPE_SECONDS[self._end], longest))

    def _after_step(self) -> None:
        """Checks, validation and checkpoint where they are due. Collective."""
        step, training = self.clock.step, self.config.training
        last = self._updates_left() <= 0
        saves = last or step % self.config.checkpoint.every == 0
        saves &= self.checkpoints.saved_step != step
        validates = last or step % training.validate_every == 0
        validates |= saves and self.config.checkpoint.keep_best
        compared, validation_loss = training.compare_ranks_every, None
        if compared is not None and (saves or step % compared == 0):
            self.heartbeat.enter("agreement")
            compare_ranks(self.engine.module, step, self.ranks)
        if validates and self.validation is not None:
            self._announce(self.growth.passes(step), measured=True)
            with self.parts.host("validation"):
                validation_loss = self._validate(self.validation)
        evaluation = self.evaluation if last or step % self.config.evaluation.every == 0 else None
        if evaluation is not None:  # before the save: a resume from it does not evaluate again
            with self.parts.host("validation"):
                self._evaluate(evaluation)
        if saves:
            self.save(validation_loss=validation_loss, wait=last)
        if validates or evaluation is not None or saves:
            self._throughput.skip(self.clock.tokens)
            self._publish_rank()

    def _announce(self, passes: Mapping[int, Passes], *, measured: bool) -> None:
        """Tell what compiles ahead which kinds of block come next: it may be at one of them."""
        if self.ahead is not None:
            self.heartbeat.enter("compile_ahead")  # compilers that it ends are waited for
            grows = self.growth.phase(self.clock.step) != "fixed" and self._updates_left() > 0
            self.ahead.proceed(passes, measured=measured, grows=grows)

    def _validate(self, validation: ValidationLoss) -> float:
        if self._validated[0] != self.clock.step:
            self._validated = self.clock.step, validation(self._loops())
            self.reports.validation(*self._validated)
        return self._validated[1]

    def _evaluate(self, evaluation: Evaluation) -> None:
        if self._evaluated != self.clock.step:
            scores = evaluation(self.clock.step, self._loops())
            self.reports.evaluation(self.clock.step, scores)
            self._evaluated = self.clock.step

    def _loops(self) -> dict[int, LoopInputs]:
        """How each looping layer runs in the next update."""
        return loop_inputs(self.growth.passes(self.clock.step), self.ranks.device)

    def _updates_left(self) -> int:
        """Updates to come if none is skipped: to the last step, or to where the data end."""
        left = self.config.training.steps - self.clock.step
        last = self.loader.last_batches
        return left if last is None else min(left, last - self.loader.batches)

    def _publish_rank(self) -> None:
        if self.telemetry is not None:
            self.parts.read_passed()
            self.telemetry.publish_rank(
                part_seconds=self._figures.part_seconds(),
                collective_seconds=self.growth.collective_seconds,
                device_memory=self.parts.device_memory(),
            )

    def _publish_totals(self) -> None:
        """What the run has spent: at every update, since a logged one may be minutes away."""
        if self.telemetry is not None and self.ranks.is_main:
            self.telemetry.publish_totals(self._figures.totals())

    def _end_with_the_data(self, *, skipped: bool) -> None:
        """Collective. `skipped`: the update of the last batch, so the one before it was the last."""
        log.info(
            "step %d: the run is complete: %s is exhausted (data.exhausted: stop)",
            self.clock.step,
            self.loader.exhausted_source,
        )
        with self.parts.host("checkpoint"):
            self.checkpoints.finish()
        if skipped:
            if self._unreported is not None:
                self._report_step(self._unreported)
            self._after_step()

    def _stop(self) -> None:
        log.info("step %d: stop requested", self.clock.step)
        with self.parts.host("checkpoint"):
            self.checkpoints.finish()
        if self.checkpoints.saved_step != self.clock.step:
            self.save(wait=True)  # and no validation: the grace may be short
        if self.ranks.is_main:
            self.requests.stopped()

    def _count_skip(self) -> None:
        # Its entropy enters neither the moving average nor the journal.
        log.warning("step %d: update skipped, gradients not finite", self.clock.step)
        if self.telemetry is not None:
            self.telemetry.publish_skip()
        self._publish_totals()
        with self.parts.host("checkpoint"):  # the newest one is read whole before the run ends
            self.skips.skipped(self.clock.step, self.checkpoints.newest)

    def _report_step(self, update: AppliedUpdate) -> None:
        """Log, metrics row and run-wide series. Waits for all that the device has to do.

        Otherwise an update waits for the verdict on its gradients, and where growth decides.
        Collective.
        """
        self._unreported = None
        # In no part: growth would be told to last as long as what the device has left to do.
        loss = update.totals.mean_loss()
        with self.parts.host("growth"):
            self.growth.flush()
        self._publish_rank()
        speed = self._throughput.tokens_per_second(self.clock.tokens)
        if self.ranks.is_main:
            record = self._figures.record(update, loss, speed)
            seconds_left = self._updates_left() * self._throughput.step_seconds(self.clock.step)
            self.reports.step(record, seconds_left)
