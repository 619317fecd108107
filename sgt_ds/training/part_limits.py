"""How long each phase of an update may take on this rank. Knows no file, thread or other rank."""

from __future__ import annotations

import time
from collections.abc import Hashable

# What may last long for good reasons: it is bounded by the time limit of collectives.
_PATIENT = frozenset(
    {"start", "compile_ahead", "data", "report", "checkpoint", "validation", "end"}
)

# Of these, and of the first reduction, those in which only a save holds up heartbeats: elsewhere a
# full disk cache may, or a library that loads or compiles and lets no thread continue.
_HEARD = frozenset({"compile_ahead", "data", "reduce", "end"})

# What forward, backward and optimizer may take, in units of the longest time that they have taken:
# in updates like earlier ones, and in those that may compile.
_USUAL, _COMPILING = 10.0, 2.0
_OWN_WORK = frozenset({"forward", "backward", "optimizer"})


class PartLimits:
    """Follows the parts of an update, and says how long the one in progress may take.

    `hang_seconds`: limit of a part; the run's own pace may lengthen that of forward, backward and
    optimizer. `patient_seconds`: limit of what may last, and of all: joining, the end of compilers
    beside this rank, data, its own work in the first update with a new shape of loops (it may
    compile), the first reduction, reports, validation, checkpoints.
    """

    def __init__(self, hang_seconds: float, patient_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self.patient_seconds = max(patient_seconds, hang_seconds)
        self.part = "start"
        """The part in progress."""
        self._entered = time.monotonic()
        self._may_compile, self._first = True, True
        self._seen: set[Hashable] = set()
        self._paces: dict[str, float] = {}  # by part: what this run's own pace allows, in seconds

    def update(self, shape: Hashable) -> None:
        """An update begins. `shape`: what the compiled blocks depend on; a new one may compile."""
        self._may_compile, self._first = shape not in self._seen, not self._seen
        self._seen.add(shape)

    def enter(self, part: str) -> None:
        """A part begins."""
        now = time.monotonic()
        if self.part in _OWN_WORK:
            pace = (_COMPILING if self._may_compile else _USUAL) * (now - self._entered)
            self._paces[self.part] = max(pace, self._paces.get(self.part, 0.0))
        self.part, self._entered = part, now

    @property
    def limit_seconds(self) -> float:
        """How long the part may take before it counts as a hang. Any thread may ask."""
        part = self.part
        if part in _PATIENT or (self._may_compile and part in _OWN_WORK):
            return self.patient_seconds
        if self._first and part == "reduce":  # its connections are made then
            return self.patient_seconds
        return min(self.patient_seconds, max(self.hang_seconds, self._paces.get(part, 0.0)))

    def silence_seconds(self, *, saves: bool) -> float:
        """How long this rank may give no heartbeat: a thread continues whatever training waits for.

        `saves`: whether a save is under way.
        """
        heard = self.part in _HEARD and not saves
        return self.hang_seconds if heard else self.limit_seconds
