"""`bench train`: whole runs through the launcher, comparing methods and numbers of ranks.

Every figure comes from what a run tells anybody: rows of its metrics.jsonl and starts.jsonl, and
its ranks' exporters, scraped as Prometheus would. Knows no model and no engine.
"""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.config import RunConfig, RunLayout, parse_variant
from sgt_ds.errors import SgtError
from sgt_ds.launch.bench_launch import launch_one, make_scratch, path_override
from sgt_ds.ports import free_ports
from sgt_ds.progress import Progress
from sgt_ds.telemetry import OWN_PARTS, TIMEOUT_HEADER

SCRAPE_SECONDS, FIRST_SCRAPE_SECONDS = 0.5, 0.05
_COUNT = ("sgt_step_duration_seconds_count", ())
# No parts of an update: these runs do both once, at their end.
_BESIDE = frozenset({"validation", "checkpoint"})
_PARTS = "sgt_step_part_seconds_total"
_PEAK = ("sgt_gpu_memory_peak_bytes", ())
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Variant:
    """One way to run the same file: a name, and the keys that it changes."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class RunSetting:
    """What is measured. Each run has `warm_up` intervals that do not count, then `intervals`."""

    run_yaml: Path
    config: RunConfig
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]
    ranks: tuple[int, ...]
    updates: int
    """Updates of an interval: one row of metrics, one wait for the device."""
    intervals: int
    warm_up: int
    repeats: int
    """Times that all runs are made, in turned order, so that a drift hits them alike."""
    global_batch: Mapping[int, int]
    """Sequences of an update, by number of ranks."""
    loads: bool = False
    """Resume each run once, to time loading."""

    @property
    def steps(self) -> int:
        """Updates of a run."""
        return (self.warm_up + self.intervals) * self.updates


@dataclass(frozen=True)
class RunFigures:
    """One run. Ratios are to vanilla of the same number of ranks and the same repeat."""

    variant: str
    ranks: int
    repeat: int
    global_batch_size: int
    step_seconds: float
    """Median over the intervals."""
    step_seconds_range: tuple[float, float]
    tokens_per_second_per_rank: float
    flops_per_token: float
    mfu_ratio: float | None
    rank_spread_ratio: float
    """Slowest rank's own work per update (data, forward) over the quickest's, less one."""
    parts: dict[str, float]
    """Share of each part of an update, mean of all ranks; no validation and no checkpoint."""
    growth_collective_seconds: float
    """Of growth's reduce and broadcast, per update, mean of all ranks."""
    checkpoint_seconds: float
    """The last save, which is waited for."""
    peak_memory_bytes: float | None
    """Allocated at most, of the rank that needed most; None without a GPU."""
    load_seconds: float | None = None
    """Checking and loading that save at a resume; None where it was not tried."""
    time_ratio: float | None = None
    flops_ratio: float | None = None
    scaling_ratio: float | None = None
    """Tokens per second and rank over those of the fewest ranks, same variant and repeat."""

    @property
    def flops_per_second_per_rank(self) -> float:
        """By the accountant's convention."""
        return self.tokens_per_second_per_rank * self.flops_per_token

    @property
    def excess(self) -> float | None:
        """Added time over added FLOPs; None for vanilla."""
        if self.time_ratio is None or self.flops_ratio is None or self.flops_ratio == 1:
            return None
        return (self.time_ratio - 1) / (self.flops_ratio - 1)

    def as_json(self) -> dict[str, Any]:
        """Plain values, the derived ones among them."""
        return {
            **asdict(self),
            "flops_per_second_per_rank": self.flops_per_second_per_rank,
            "excess": self.excess,
        }


def variant(text: str, num_layers: int, heads: int) -> Variant:
    """`vanilla`, or METHOD:LOOPS of `sgt`, `attention_loop`, `block_loop`, from the start on.

    `sgt:K` is what such a run ends as: the three deepest layers, `heads` heads, K passes each.
    Raises: UserError.
    """
    method, loops = parse_variant(text)
    if method == "vanilla":
        return Variant(text, ("method=vanilla",))
    layers = [layer for layer in range(num_layers - 3, num_layers) if layer > 0]
    listed = (f"growth.layers={layers}", f"growth.loops={loops}", "growth.entry=none")
    if method != "sgt":
        return Variant(text, (f"method={method}", *listed))
    # The method whose heads are fixed soonest; how they were chosen costs nothing.
    # The next window, at which the ranks compare their Θ and so wait, lies past the end.
    soon = (f"growth.stages=[{heads}]", "growth.t_start=1", "growth.interval=1000000")
    return Variant(text, ("method=high_entropy_loop", *listed, *soon))


def own_overrides(
    setting: RunSetting, chosen: Variant, ranks: int, directory: Path, port: int
) -> list[str]:
    """The keys that a run has from its bench, whatever its file says.

    `port`: of the first of its exporters.
    """
    return [
        *chosen.overrides,
        path_override("run_dir", directory),
        f"training.steps={setting.steps}",
        f"training.log_every={setting.updates}",
        f"training.global_batch_size={setting.global_batch[ranks]}",
        *("training.validate_every=1000000", "checkpoint.every=1000000"),
        "training.compile_ahead=false",  # nothing computes beside what is timed
        *("telemetry.enabled=true", "telemetry.host=127.0.0.1", f"telemetry.port={port}"),
        "resume=never",
    ]


def bench_runs(setting: RunSetting, scratch: Path) -> Iterator[RunFigures]:
    """Make every run, in a folder of its own in `scratch`.

    Figures without ratios, each as soon as its run has ended.

    Raises: SgtError where one fails, with its last lines.
    """
    plan = [(ranks, variant) for ranks in setting.ranks for variant in setting.variants]
    with Progress("bench", len(plan) * setting.repeats * setting.steps, "steps") as progress:
        for repeat in range(setting.repeats):
            for ranks, chosen in plan if repeat % 2 == 0 else reversed(plan):
                yield _run(setting, scratch, chosen, ranks, repeat)
                progress.advance(setting.steps, f"{chosen.name} on {ranks}")


def bench_collectives(ranks: int, size: int, scratch: Path) -> dict[str, Any]:
    """Seconds of small and large collectives between `ranks` ranks of this host.

    `size`: bytes of a large one. Raises: SgtError where the launch fails.
    """
    make_scratch(scratch)
    file = scratch / f"collectives-{ranks}.json"
    launch_one(
        f"collectives on {ranks} ranks",
        ("sgt_ds.training.collectives", str(file), str(size)),
        ranks,
        file.with_suffix(".log"),
    )
    return {**json.loads(file.read_text()), "large_bytes": size}


def bench_roofline(precision: str, scratch: Path) -> dict[str, float]:
    """What one device of this host does on a plain product and copy, `Roofline`'s values.

    `precision`: bf16 or fp32. Raises: SgtError where the launch fails.
    """
    make_scratch(scratch)
    file = scratch / "roofline.json"
    words = ("sgt_ds.training.roofline", str(file), precision)
    launch_one("a plain product", words, 1, file.with_suffix(".log"))
    found: dict[str, float] = json.loads(file.read_text())
    return found


def with_ratios(figures: Sequence[RunFigures]) -> list[RunFigures]:
    """The figures with their ratios; some of a setting's runs may be missing."""
    vanilla = {(run.ranks, run.repeat): run for run in figures if run.variant == "vanilla"}
    first: dict[tuple[str, int], RunFigures] = {}
    for run in sorted(figures, key=lambda run: run.ranks):
        first.setdefault((run.variant, run.repeat), run)
    compared = []
    for run in figures:
        base, least = vanilla.get((run.ranks, run.repeat)), first[run.variant, run.repeat]
        run = replace(
            run,
            scaling_ratio=run.tokens_per_second_per_rank / least.tokens_per_second_per_rank,
        )
        if base is not None:
            run = replace(
                run,
                time_ratio=base.tokens_per_second_per_rank / run.tokens_per_second_per_rank,
                flops_ratio=run.flops_per_token / base.flops_per_token,
            )
        compared.append(run)
    return compared


def _run(
    setting: RunSetting, scratch: Path, chosen: Variant, ranks: int, repeat: int
) -> RunFigures:
    directory = scratch / f"{chosen.name.replace(':', '-')}-{ranks}-{repeat}"
    name, port = f"{chosen.name} on {ranks} ranks", free_ports(ranks)
    own = own_overrides(setting, chosen, ranks, directory, port)
    words = ["sgt_ds.train", str(setting.run_yaml), *setting.overrides, *own]
    make_scratch(scratch)
    scraper = _Scraper(range(port, port + ranks), setting.warm_up * setting.updates)
    with scraper:
        launch_one(name, words, ranks, directory.with_suffix(".log"))
    figures = _figures(setting, chosen.name, ranks, repeat, directory, scraper)
    if setting.loads:
        launch_one(
            f"{name}, resumed",
            [*words, "resume=auto"],
            ranks,
            directory.with_suffix(".resumed.log"),
        )
        newest = RunLayout(directory).starts.read_text().splitlines()[-1]
        figures = replace(figures, load_seconds=json.loads(newest)["load_seconds"])
    shutil.rmtree(RunLayout(directory).checkpoints)  # tens of gigabytes, of no more use
    return figures


def _figures(
    setting: RunSetting, name: str, ranks: int, repeat: int, directory: Path, scraper: _Scraper
) -> RunFigures:
    rows = [json.loads(line) for line in RunLayout(directory).metrics.read_text().splitlines()]
    speeds = [row["tokens_per_second"] for row in rows if "loss" in row][setting.warm_up :]
    if len(scraper.last) < ranks:
        raise SgtError(
            f"{directory}: only {len(scraper.last)} of {ranks} exporters could be scraped; its "
            "updates are too quick; raise --updates"
        )
    tokens = setting.global_batch[ranks] * setting.config.data.sequence_length
    seconds = sorted(tokens / speed for speed in speeds)
    timed = scraper.since_warm_up()
    counts = [series[_COUNT] for series in timed]
    own = [
        sum(series.get((_PARTS, (("part", part),)), 0.0) for part in OWN_PARTS) / count
        for series, count in zip(timed, counts, strict=True)
    ]
    last = list(scraper.last.values())
    main = next(series for series in last if ("sgt_flops_per_token", ()) in series)
    parts: dict[str, float] = {}
    for series in timed:
        for (metric, labels), value in series.items():
            if metric == _PARTS:
                part = dict(labels)["part"]
                if part not in _BESIDE:
                    parts[part] = parts.get(part, 0.0) + value
    spent = sum(parts.values()) or 1.0
    peaks = [series[_PEAK] for series in last if _PEAK in series]
    collectives = (series["sgt_growth_collective_seconds_total", ()] for series in timed)
    return RunFigures(
        variant=name,
        ranks=ranks,
        repeat=repeat,
        global_batch_size=setting.global_batch[ranks],
        step_seconds=statistics.median(seconds),
        step_seconds_range=(seconds[0], seconds[-1]),
        tokens_per_second_per_rank=statistics.median(speeds) / ranks,
        flops_per_token=main["sgt_flops_per_token", ()],
        mfu_ratio=_median_mfu(main, statistics.median(speeds)),
        rank_spread_ratio=max(own) / min(own) - 1,
        parts={part: value / spent for part, value in sorted(parts.items())},
        growth_collective_seconds=statistics.fmean(collectives) / counts[0],
        checkpoint_seconds=main.get(("sgt_checkpoint_duration_seconds", ()), 0.0),
        peak_memory_bytes=max(peaks, default=None),
    )


def _median_mfu(main: Series, tokens_per_second: float) -> float | None:
    """MFU at that speed: an exporter's of its last interval, carried over. None without a GPU."""
    last = main.get(("sgt_mfu_ratio", ()))
    return None if last is None else last * tokens_per_second / main["sgt_tokens_per_second", ()]


class _Scraper:
    """Scrapes a run's exporters while the block runs: what each said last and after warm-up."""

    def __init__(self, ports: Iterable[int], warm_up_steps: int) -> None:
        self.last: dict[int, Series] = {}
        self._warm: dict[int, Series] = {}
        self._warm_up_steps = warm_up_steps
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._scrape, args=(port,), daemon=True) for port in ports
        ]

    def __enter__(self) -> _Scraper:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def since_warm_up(self) -> list[Series]:
        """Last values less those at the end of the warm-up; where too quick to be seen, all."""
        found = []
        for port, series in sorted(self.last.items()):
            warm = self._warm.get(port, {})
            if warm.get(_COUNT) == series[_COUNT]:
                warm = {}
            found.append({key: value - warm.get(key, 0.0) for key, value in series.items()})
        return found

    def _scrape(self, port: int) -> None:
        # A short run's exporter is up for less than a usual pause.
        while not self._ended.wait(SCRAPE_SECONDS if port in self.last else FIRST_SCRAPE_SECONDS):
            # Not up yet, or gone already.
            with suppress(OSError, ValueError):
                address = f"http://127.0.0.1:{port}/metrics"
                # As Prometheus asks: the end of a run waits for who does.
                request = urllib.request.Request(address, headers={TIMEOUT_HEADER: "5"})
                with urllib.request.urlopen(request, timeout=5) as response:
                    series = _parse(response.read().decode())
                self.last[port] = series
                if port not in self._warm and series.get(_COUNT, 0) >= self._warm_up_steps:
                    self._warm[port] = series


def _parse(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
