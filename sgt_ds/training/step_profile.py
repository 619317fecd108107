"""Device time of whole training steps by part, under torch's profiler. Knows no model and no run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sgt_ds.errors import UserError
from sgt_ds.progress import Progress
from sgt_ds.training.kernel_parts import CPU_GRAPH, IDLE, OTHER, PARTS, Work, own_times, part_of

LARGEST_KERNELS, LARGEST_UNMATCHED = 10, 3
# The profiler's own start is slow the first time.
PROFILE_WARM_UP_STEPS = 1

_MICROSECOND = 1e-6
# What an operation is called: `aten::mm`, not `autograd::engine::…` nor `torch::autograd::…`.
_NOT_OPERATIONS = ("autograd::", "torch::", "profiler::")
_LAUNCHES = ("cu", "hip")


class Event(Protocol):
    """What is read of torch's events, of which some have no types."""

    id: int
    name: str
    device_type: DeviceType
    is_async: bool
    is_user_annotation: bool
    time_range: Any
    cpu_parent: Any


@dataclass(frozen=True)
class PartTime:
    """One part of a step. All times are means over the profiled steps."""

    part: str
    """Of `PARTS`; `idle` is what is left of the step: nothing ran."""
    seconds: float
    step_ratio: float
    """Of its own step."""
    kernels: float
    """Per step."""
    seconds_by_step: tuple[float, ...]


@dataclass(frozen=True)
class KernelTime:
    """All calls of one kernel in a step."""

    name: str
    part: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class StepProfile:
    """One case of one mode. Times per step, means over the profiled steps."""

    mode: str
    case: str
    step_seconds: float
    """With the profiler on."""
    hidden_seconds: float
    """Of kernels that ran beside others: in no part, as no moment counts twice."""
    parts: tuple[PartTime, ...]
    """All of `PARTS`, in that order; together the step."""
    kernels: tuple[KernelTime, ...]
    """The largest."""
    unmatched: tuple[KernelTime, ...]
    """The largest of `other`."""


class Added(NamedTuple):
    """What a part of one case takes beyond vanilla's; negative where it takes less."""

    seconds: float
    step_ratio: float
    """Of vanilla's whole step."""
    lowest_seconds: float
    highest_seconds: float
    """Over the turns, in each of which every case takes one step."""


def profile_steps(
    device: torch.device, cases: Mapping[tuple[str, str], Callable[[], float]], steps: int
) -> list[StepProfile]:
    """Profile `steps` steps of each case, the cases by turns.

    `cases`: by mode and name, what takes one whole step, waits for the device and returns its
    seconds. Raises: UserError where the profiler sees nothing of the device.
    """
    found = {key: ReadSteps() for key in cases}
    total = len(cases) * (PROFILE_WARM_UP_STEPS + steps)
    with Progress("bench step, profile", total, "steps") as progress:
        for turn in range(PROFILE_WARM_UP_STEPS + steps):
            for key, step in cases.items():
                seconds, events = _profiled(device, step, read=turn >= PROFILE_WARM_UP_STEPS)
                if turn >= PROFILE_WARM_UP_STEPS:
                    found[key].add(seconds, work_of(events, device))
                progress.advance(1, " ".join(key))
    return [read.mean(mode, case) for (mode, case), read in found.items()]


def check_profiler(device: torch.device, step: Callable[[], float]) -> None:
    """Profile and read one step.

    Raises: UserError where the profiler sees nothing of the device.
    """
    _, events = _profiled(device, step, read=True)
    work_of(events, device)


def _profiled(
    device: torch.device, step: Callable[[], float], *, read: bool
) -> tuple[float, Sequence[Event]]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Without `acc_events` torch warns that a next cycle would clear them; there is none.
    with profile(activities=activities, acc_events=True) as profiler:
        seconds = step()
    # Reading takes seconds where kernels are many.
    return seconds, profiler.events() or () if read else ()


def work_of(events: Sequence[Event], device: torch.device) -> list[Work]:
    """The kernels among a profile's events, with what launched each."""
    work = list(_operations(events) if device.type == "cpu" else _kernels(events))
    if not work:
        mend = "start with KINETO_LOG_LEVEL=3 in the environment, and torch says why"
        raise UserError("--profile", None, f"the profiler saw nothing run on {device}; {mend}")
    return work


def _kernels(events: Sequence[Event]) -> Iterator[Work]:
    """A GPU's. Named regions of the host lie on its timeline too, and are no kernels."""
    regions = {event.name for event in events if event.is_user_annotation}
    # A launch has its kernel's number; operations are numbered on their own.
    launches = {
        event.id: event
        for event in events
        if event.device_type == DeviceType.CPU and event.name.startswith(_LAUNCHES)
    }
    for event in events:
        if event.device_type != DeviceType.CPU and event.name not in regions:
            yield _work(event, launches.get(event.id))


def _operations(events: Sequence[Event]) -> Iterator[Work]:
    """A CPU's: the outermost, which hold those that they are made of; and compiled graphs."""
    for event in events:
        if event.is_async:
            continue
        within = any(_is_operation(name) for name in _regions(event))
        if event.name.startswith(CPU_GRAPH) or (_is_operation(event.name) and not within):
            yield _work(event, event)


def _is_operation(name: str) -> bool:
    return "::" in name and not name.startswith(_NOT_OPERATIONS)


def _work(event: Event, launch: Event | None) -> Work:
    regions = () if launch is None else tuple(_regions(launch))
    return Work(event.name, event.time_range.start, event.time_range.end, regions)


def _regions(event: Event) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name


class ReadSteps:
    """Sums of one case's profiled steps; keeps no single kernel, of which a step has thousands."""

    def __init__(self) -> None:
        self._whole: list[float] = []
        self._hidden = 0.0
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._calls = Counter[tuple[str, str]]()
        self._by_step: dict[str, list[float]] = {part: [] for part in PARTS}

    def add(self, seconds: float, work: Sequence[Work]) -> None:
        """One step more: its seconds, and what ran in it."""
        self._whole.append(seconds)
        for times in self._by_step.values():
            times.append(0.0)
        self._by_step[IDLE][-1] = seconds
        for each, microseconds in zip(work, own_times(work), strict=True):
            part, own = part_of(each), microseconds * _MICROSECOND
            self._by_step[part][-1] += own
            self._by_step[IDLE][-1] -= own
            self._seconds[each.name, part] += own
            self._calls[each.name, part] += 1
            if not each.name.startswith(CPU_GRAPH):  # what it calls is a part of it, not beside it
                self._hidden += (each.end - each.start) * _MICROSECOND - own

    def mean(self, mode: str, case: str) -> StepProfile:
        """The mean of the steps."""
        steps = len(self._whole)
        step_seconds = sum(self._whole) / steps
        kernels = [
            KernelTime(name, part, seconds / steps, self._calls[name, part] / steps)
            for (name, part), seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
        ]

        def part_time(part: str, times: list[float]) -> PartTime:
            own = sum(times) / steps
            count = sum(each.calls for each in kernels if each.part == part)
            return PartTime(part, own, own / step_seconds, count, tuple(times))

        return StepProfile(
            mode,
            case,
            step_seconds,
            self._hidden / steps,
            tuple(part_time(part, times) for part, times in self._by_step.items()),
            tuple(kernels[:LARGEST_KERNELS]),
            tuple([each for each in kernels if each.part == OTHER][:LARGEST_UNMATCHED]),
        )


def vanilla_of(own: StepProfile, profiles: Iterable[StepProfile]) -> StepProfile:
    """Vanilla of the same mode, to which a case is compared."""
    return next(each for each in profiles if each.mode == own.mode and each.case == "vanilla")


def added(own: StepProfile, vanilla: StepProfile) -> list[Added]:
    """What each part of a case takes beyond vanilla's, in the order of `PARTS`."""
    pairs = zip(own.parts, vanilla.parts, strict=True)
    return [_added(mine, base, vanilla.step_seconds) for mine, base in pairs]


def _added(mine: PartTime, base: PartTime, step_seconds: float) -> Added:
    turns = zip(mine.seconds_by_step, base.seconds_by_step, strict=True)
    by_turn = [own - vanilla for own, vanilla in turns]
    seconds = mine.seconds - base.seconds
    return Added(seconds, seconds / step_seconds, min(by_turn), max(by_turn))


def profiles_as_json(steps: int, profiles: Sequence[StepProfile]) -> dict[str, Any]:
    """All of it as one document, with what each part adds to vanilla's."""
    cases = []
    for own in profiles:
        document = asdict(own)
        differences = added(own, vanilla_of(own, profiles))
        for part, difference in zip(document["parts"], differences, strict=True):
            part["added"] = difference._asdict()
        cases.append(document)
    return {"steps": steps, "warm_up_steps": PROFILE_WARM_UP_STEPS, "cases": cases}
