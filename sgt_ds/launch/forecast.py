"""Step time beyond the machines at hand: a model from measured parts, checked against the points.

Points are what `sgt-ds bench train --json` writes. Pure arithmetic; knows no run and no device.

An update of A micro-batches on n ranks takes
  A × computing                                    (forward and backward, as measured)
+ A × what of reducing the gradients is not hidden (buckets go while backward computes)
+ optimizer: a fixed part and one that n ranks share, and gathering the parameters
+ growth: its reduce and broadcast, a + b·log2(n)
+ the rest                                         (as measured, the same at every n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

GRADIENT_BYTES = {"bf16": 2, "fp32": 4}
# Of the small collective, as training.collectives measures it.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Point:
    """A measured run. Seconds are those of one update."""

    ranks: int
    micro_batches: int
    tokens: int
    """Of one update, all ranks together."""
    step_seconds: float
    parts: Mapping[str, float]
    """Seconds by part, as in `telemetry.STEP_PARTS`."""
    growth_seconds: float


@dataclass(frozen=True)
class Link:
    """What joins ranks or hosts."""

    bytes_per_second: float
    """Each way, of one rank inside a host; of a host between hosts."""
    latency_seconds: float
    """Of a small all-reduce."""


@dataclass(frozen=True)
class StepSetting:
    """What a model's exchange depends on."""

    parameters: int
    bytes_per_gradient: int
    bucket_elements: int
    overlaps: bool
    """Whether buckets are reduced while backward computes."""
    all_reduces: bool
    """Whether every rank gets every sum (DeepSpeed's own choice), or only its share."""


@dataclass(frozen=True)
class Network:
    """Ranks of a host, and hosts; what joins them."""

    hosts: int
    ranks_per_host: int
    inside: Link
    between: Link | None = None
    """None for one host. Its latency is that of one hop."""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    def seconds(self, size: float, passes: int) -> float:
        """Of a collective over `size` bytes. `passes`: 2 all-reduce; 1 reduce-scatter, all-gather.

        A ring carries (n − 1)/n of the bytes in each pass over every link of it, and over every
        host's network as well; the slowest link sets the pace. Small messages climb a tree of
        hosts.
        """
        if self.ranks == 1:
            return 0.0
        carried = passes * (self.ranks - 1) / self.ranks * size
        slowest, latency = 0.0, 0.0
        if self.ranks_per_host > 1:
            slowest = carried / self.inside.bytes_per_second
            latency = self.inside.latency_seconds
        if self.between is not None and self.hosts > 1:
            slowest = max(slowest, carried / self.between.bytes_per_second)
            latency += 2 * math.log2(self.hosts) * self.between.latency_seconds
        return slowest + latency


@dataclass(frozen=True)
class StepModel:
    """The fitted parts. Seconds."""

    setting: StepSetting
    computing: float
    """Forward, backward and waiting for data, of one micro-batch."""
    backward: float
    """Of that, what reducing can hide behind."""
    optimizer_fixed: float
    optimizer_shared: float
    """Times 1/n."""
    growth_fixed: float
    growth_by_doubling: float
    rest: float

    def parts(self, network: Network, micro_batches: int) -> dict[str, float]:
        """Seconds of an update by part."""
        setting, ranks = self.setting, network.ranks
        doublings = math.log2(ranks)
        gathered = network.seconds(setting.parameters * setting.bytes_per_gradient, 1)
        return {
            "computing": micro_batches * self.computing,
            "reduce": micro_batches * self._reduce(network),
            "optimizer": self.optimizer_fixed + self.optimizer_shared / ranks,
            "gather": gathered,
            "growth": self.growth_fixed + self.growth_by_doubling * doublings,
            "rest": self.rest,
        }

    def with_bucket(self, elements: int) -> StepModel:
        """The same model with another `reduce_bucket_size`."""
        return replace(self, setting=replace(self.setting, bucket_elements=elements))

    def seconds(self, network: Network, micro_batches: int) -> float:
        """Of one update."""
        return sum(self.parts(network, micro_batches).values())

    def _reduce(self, network: Network) -> float:
        """What of one micro-batch's reducing is not hidden."""
        setting = self.setting
        elements = min(setting.parameters, setting.bucket_elements)
        buckets = math.ceil(setting.parameters / elements)
        passes = 2 if setting.all_reduces else 1
        one = network.seconds(elements * setting.bytes_per_gradient, passes)
        whole = one * setting.parameters / elements
        if not setting.overlaps:
            return whole
        # The last bucket is full when backward ends; the others have its time, but for the first's.
        return max(one, whole - self.backward * (buckets - 1) / buckets)


def fit_model(
    setting: StepSetting, points: Sequence[Point], networks: Mapping[int, Network]
) -> StepModel:
    """A model from points of one variant. `networks`: of the measured ranks, by their number."""
    points = sorted(points, key=lambda point: point.ranks)
    least = points[0]
    per_micro = [
        {part: seconds / point.micro_batches for part, seconds in point.parts.items()}
        for point in points
    ]
    backward = _mean([own.get("backward", 0.0) for own in per_micro])
    computing = backward + _mean(
        [own.get("forward", 0.0) + own.get("data", 0.0) for own in per_micro]
    )
    size = setting.parameters * setting.bytes_per_gradient
    own_work = [
        (
            1 / point.ranks,
            point.parts.get("optimizer", 0.0) - networks[point.ranks].seconds(size, 1),
        )
        for point in points
    ]
    fixed, shared = _line(own_work)
    growth = _line([(math.log2(point.ranks), point.growth_seconds) for point in points])
    bare = StepModel(setting, computing, backward, fixed, shared, *growth, rest=0.0)
    rest = least.step_seconds - bare.seconds(networks[least.ranks], least.micro_batches)
    return StepModel(setting, computing, backward, fixed, shared, *growth, rest=max(0.0, rest))


def check_model(
    model: StepModel, points: Sequence[Point], networks: Mapping[int, Network]
) -> list[dict[str, float]]:
    """Each point beside what the model says of it; `error_ratio`: model over measured, less one."""
    rows = []
    for point in sorted(points, key=lambda point: point.ranks):
        seconds = model.seconds(networks[point.ranks], point.micro_batches)
        rows.append(
            {
                "ranks": point.ranks,
                "measured_seconds": point.step_seconds,
                "model_seconds": seconds,
                "error_ratio": seconds / point.step_seconds - 1,
            }
        )
    return rows


@dataclass(frozen=True)
class Forecast:
    """One row: so many hosts at one speed of link."""

    hosts: int
    ranks: int
    link_gigabits: float
    micro_batches: int
    step_seconds: float
    tokens_per_second_per_rank: float
    scaling_ratio: float
    """Tokens per second and rank over those of the fewest measured ranks."""
    parts: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def forecast(
    model: StepModel,
    base: Point,
    network: Network,
    link_gigabits: float,
    micro_batches: int,
) -> Forecast:
    """What the model says of a network that nobody measured. `base`: the fewest ranks' point."""
    parts = model.parts(network, micro_batches)
    seconds = sum(parts.values())
    tokens = base.tokens / base.ranks / base.micro_batches * micro_batches
    measured = base.tokens / base.ranks / base.step_seconds
    return Forecast(
        hosts=network.hosts,
        ranks=network.ranks,
        link_gigabits=link_gigabits,
        micro_batches=micro_batches,
        step_seconds=seconds,
        tokens_per_second_per_rank=tokens / seconds,
        scaling_ratio=tokens / seconds / measured,
        parts=parts,
    )


def link_of(collectives: Mapping[str, Any], ranks: int) -> Link:
    """What joins the ranks of a host, from the seconds of a small and a large all-reduce.

    Raises: ValueError where the two contradict each other.
    """
    seconds, size = collectives["all_reduce"], collectives["large_bytes"]
    small, large = seconds["small"], seconds["large"]
    if not 0 < small < large:
        raise ValueError(
            f"{size} bytes in {large:g} s, {SMALL_BYTES} bytes in {small:g} s: the large one must "
            "take longer"
        )
    if size / large < SMALL_BYTES / small:
        raise ValueError(
            f"{size} bytes in {large:g} s is fewer bytes per second than {SMALL_BYTES} bytes in "
            f"{small:g} s"
        )
    carried = 2 * (ranks - 1) / ranks * size
    return Link(carried / (large - small), small)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least squares line, neither below 0. One point: all is fixed."""
    xs, ys = [x for x, _ in points], [max(0.0, y) for _, y in points]
    middle, height = _mean(xs), _mean(ys)
    spread = math.fsum((x - middle) ** 2 for x in xs)
    if spread == 0:
        return height, 0.0
    slope = math.fsum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / spread
    if slope <= 0:
        return height, 0.0
    intercept = height - slope * middle
    if intercept >= 0:
        return intercept, slope
    return 0.0, math.fsum(map(math.prod, zip(xs, ys, strict=True))) / math.fsum(x * x for x in xs)
