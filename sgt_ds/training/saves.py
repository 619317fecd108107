"""The checkpoints of one run: taken when the trainer asks, reported when complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sgt_ds import checkpoints
from sgt_ds.config import RunConfig, RunLayout, config_hash
from sgt_ds.data import TokenSet
from sgt_ds.errors import SgtError
from sgt_ds.telemetry import Exporter
from sgt_ds.training.engine import Ranks

log = logging.getLogger(__name__)

# A save is collected between updates: shorter waits come with any disk.
TOLD_WAIT_SECONDS = 1.0


class RunCheckpoints:
    """Saves while training goes on, with what conversion needs beside the trainer's state.

    A save that fails is told, counted, and tried again when the next one is due: nothing but the
    saving stops. One is under way at a time; where the next is due before it is complete, training
    waits, so that the same run leaves the same checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        engine: Any,
        *,
        token_set: TokenSet,
        telemetry: Exporter | None,
        waiting: Callable[[], AbstractContextManager[None]],
        moved: Callable[[], None],
    ) -> None:
        """`token_set`: whose tokenizer turns the model's ids into text, for an export.

        `waiting`: surrounds every wait for the other ranks. `moved`: told of what is copied.
        """
        self._ranks, self._telemetry = ranks, telemetry
        self._directory = RunLayout(config.run_dir).checkpoints
        keep = config.checkpoint
        self._retention = checkpoints.Retention(keep.keep_last, keep.keep_every, keep.keep_best)
        self._saver = checkpoints.Saver(
            engine,
            self._directory,
            retention=self._retention,
            group=ranks.host_group,
            background=keep.background,
            waiting=waiting,
            moved=moved,
        )
        self._facts = {
            "model": config.model.model_dump(mode="json"),
            "method": config.method,
            "interval": config.growth.interval,
            "sequence_length": config.data.sequence_length,
            "tokenizer": str(token_set.tokenizer_file.resolve()),
            "tokenizer_sha256": token_set.tokenizer_sha256,
            "tokenizer_ids": token_set.vocab_size,
            "config": config.model_dump(mode="json"),
            "config_hash": config_hash(config),
        }
        self._overlap_told = False
        self.saved_step = -1
        """Step of the newest complete checkpoint of this run; -1 before the first."""

    def resumed(self, newest: Path) -> None:
        """The run continues from its newest good checkpoint, whose save may not have ended."""
        if self._ranks.is_main:
            checkpoints.settle(self._directory, newest, self._retention)

    def prepare(self) -> None:
        """Get what the first save needs, beside training."""
        self._saver.prepare()

    def is_under_way(self) -> bool:
        """Whether a save has begun and is not complete on all ranks. Any thread may ask."""
        return self._saver.is_under_way()

    def is_busy(self) -> bool:
        """Whether this rank still writes."""
        return self._saver.is_busy()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        validation_loss: float | None,
        wait: bool,
        fault: str | None,
    ) -> None:
        """Save the run as it is after `step` updates. Collective.

        `validation_loss`: of these weights, if known. `wait`: until it is complete. `fault`: why
        this rank can't save now, if so.
        Raises: SaveFailed on all ranks where `wait` and it failed; earlier checkpoints stay.
        """
        self._finish_before(step, wait=wait)
        try:
            self._saver.begin(
                step, {**self._facts, **state}, validation_loss=validation_loss, fault=fault
            )
            if wait:
                self._note(self._saver.wait())
        except checkpoints.SaveFailed as error:
            self._failed(error, last=wait)
            if wait:
                raise

    def proceed(self) -> None:
        """Bring a save under way forward; called where no rank is busy. Collective."""
        try:
            self._note(self._saver.advance())
        except checkpoints.SaveFailed as error:
            self._failed(error, last=False)

    def finish(self, *, last: bool = False) -> None:
        """Wait for a save under way; a failure is reported, not raised. Collective.

        `last`: the run ends without another one.
        """
        try:
            self._note(self._saver.wait())
        except checkpoints.SaveFailed as error:
            self._failed(error, last=last)

    def finish_after(self, error: SgtError) -> None:
        """Wait for a save under way where all ranks end for `error`. Collective; raises nothing.

        The error is told first: the rank that is to blame may be gone before the others have waited.
        """
        if not self._saver.is_under_way():
            return
        if self._ranks.is_main:
            log.error("%s", error)
        try:
            self.finish(last=True)
        except Exception as lost:  # the error matters more than what the wait meets
            log.warning("the save under way was not completed: %s", lost)

    def _finish_before(self, step: int, *, wait: bool) -> None:
        """As `finish`; says once that saves are due faster than they are written.

        `wait`: the save at `step` is waited for as well, which the end of a run asks for.
        """
        before, started = self._saver.step, time.perf_counter()
        self.finish()
        waited = time.perf_counter() - started
        done = before is not None and self.saved_step == before
        if not done or waited < TOLD_WAIT_SECONDS or wait or self._overlap_told:
            return
        if not self._ranks.is_main:
            return
        self._overlap_told = True
        log.warning(
            "step %d: training waited %.1f s for the checkpoint of step %d to be written; saves are "
            "due faster than this disk takes them: raise checkpoint.every",
            step,
            waited,
            before,
        )

    def newest(self) -> str:
        """The newest good checkpoint's path, for the message of a run that ends. Collective."""
        self.finish(last=True)
        found = self._ranks.from_main(lambda: checkpoints.newest_good(self._directory))
        return "none" if found is None else str(found.path)

    def close(self) -> None:
        """Give up what is under way; safe after an error."""
        self._saver.close()

    def _note(self, saved: checkpoints.Saved | None) -> None:
        if saved is None:
            return
        self.saved_step = saved.step
        log.info(
            "step %d: checkpoint saved in %.1f s, training paused for %.2f s",
            saved.step,
            saved.seconds,
            saved.stall_seconds,
        )
        if self._telemetry is not None:
            self._telemetry.publish_checkpoint(saved.seconds)

    def _failed(self, error: checkpoints.SaveFailed, *, last: bool) -> None:
        if self._ranks.is_main:  # the same error on all: one line is enough
            again = "" if last else "; retrying at the next one that is due"
            log.error("checkpoint: %s%s", error, again)
        if self._telemetry is not None:
            self._telemetry.publish_checkpoint_failure()
