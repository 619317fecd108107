"""Writers for TensorBoard and Weights & Biases. Optional; rank 0 only.

Each has a thread of its own behind a short queue: one that hangs loses rows, one that fails ends,
and training neither waits nor stops. Knows neither training nor the run directory's layout.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from sgt_ds.errors import UserError
from sgt_ds.lazy import is_installed
from sgt_ds.telemetry.metric import Kind
from sgt_ds.telemetry.metrics import BY_NAME
from sgt_ds.telemetry.snapshot import Snapshot, counters_of, families

log = logging.getLogger(__name__)

# Log intervals that a writer may lag behind before rows are dropped.
MAX_WAITING = 64
WAIT_AT_END_SECONDS = 10.0
_PLOTTED: tuple[Kind, ...] = ("gauge", "counter")
Values = dict[str, float]


class Writer(Protocol):
    """What TensorBoard and W&B have in common. Called in one thread only."""

    def write(self, step: int, values: Values) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Feeds one writer from a thread."""

    def __init__(self, name: str, open_writer: Callable[[], Writer]) -> None:
        """`open_writer` is called in the thread: a login that hangs holds nothing up."""
        self._name, self._open = name, open_writer
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(MAX_WAITING)
        self._told_full = False
        self._thread = threading.Thread(target=self._run, name=f"sgt-{name}", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        """Hand over a logged update. Never waits."""
        try:
            if self._thread.is_alive():
                self._queue.put_nowait(snapshot)
        except queue.Full:
            if not self._told_full:
                self._told_full = True
                log.warning("telemetry: %s is too slow; rows are lost (logged once)", self._name)

    def close(self) -> None:
        """Let it write what waits, for a while."""
        try:
            self._queue.put(None, timeout=WAIT_AT_END_SECONDS)
        except queue.Full:
            return
        self._thread.join(WAIT_AT_END_SECONDS)
        if self._thread.is_alive():
            log.warning("telemetry: %s did not finish in time; it may lack rows", self._name)

    def _run(self) -> None:
        try:
            writer = self._open()
            while (snapshot := self._queue.get()) is not None:
                writer.write(snapshot.step, plotted(snapshot))
            writer.close()
        except Exception as error:
            log.error("telemetry: %s failed; training continues without it: %s", self._name, error)


def check_trackers(names: Iterable[str]) -> None:
    """Raises: UserError where the package of a tracker is not installed. Imports none.

    `names`: of `tensorboard` and `wandb`.
    """
    for name in names:
        if not is_installed(name):
            raise _unusable(name, f"No module named '{name}'")


def plotted(snapshot: Snapshot) -> Values:
    """Every gauge and counter of the run as a whole, by name: `sgt_loop_depth/layer=3`."""

    def values() -> Iterator[tuple[str, float]]:
        for family in families(snapshot, counters_of(snapshot)):
            for sample in family.samples:
                metric = BY_NAME.get(sample.name)
                if metric is not None and metric.scope == "run" and metric.kind in _PLOTTED:
                    labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                    yield f"{sample.name}/{labels}".rstrip("/"), float(sample.value)

    return dict(values())


def tensorboard(folder: Path) -> Tracker:
    """Event files under `folder`. Raises: UserError where the package is missing."""
    module = _package("tensorboard", "tensorboard.summary")

    class Events:
        def __init__(self) -> None:
            self._writer = module.Writer(str(folder))

        def write(self, step: int, values: Values) -> None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

        def close(self) -> None:
            self._writer.close()

    return Tracker("tensorboard", Events)


def wandb(settings: Any, folder: Path, *, run: str, config: dict[str, Any]) -> Tracker:
    """A run of Weights & Biases. A resumed run continues in it, by its name and folder.

    `settings`: project, entity and mode; `sgt_ds.config.WandbConfig` is one. `config`: the resolved
    configuration, secrets already replaced. Raises: UserError where the package is missing.
    """
    package = _package("wandb", "wandb")

    class Online:
        def __init__(self) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = package.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                name=run,
                id=_run_id(folder),
                resume="allow",
                dir=str(folder),
                config=config,
                settings=package.Settings(console="off", disable_code=True, disable_git=True),
            )

        def write(self, step: int, values: Values) -> None:
            self._run.log(values, step=step)

        def close(self) -> None:
            self._run.finish()

    return Tracker("wandb", Online)


def _run_id(folder: Path) -> str:
    """The id of the run that `folder` holds, so that a resumed run continues in it."""
    file = folder / "run-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _package(name: str, module: str) -> Any:
    check_trackers([name])
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _unusable(name, str(error)) from None


def _unusable(name: str, why: str) -> UserError:
    return UserError(
        "this environment",
        f"telemetry.{name}",
        f"{why}; pip install 'sgt-ds[{name}]' or disable it",
    )
