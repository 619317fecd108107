"""The reference page of all metrics, generated from their tables.

`python -m sgt_ds.telemetry.reference > docs/metrics.md`
"""

from __future__ import annotations

from sgt_ds.telemetry.example import LOOPING_LAYERS, full_snapshot
from sgt_ds.telemetry.metric import STEP_BUCKETS_SECONDS, Metric
from sgt_ds.telemetry.metrics import METRICS
from sgt_ds.telemetry.snapshot import counters_of, families

# What prometheus_client's ProcessCollector adds on Linux.
PROCESS_SERIES = 6
LAYERS, HEADS = 16, 16
RANKS, RANKS_OF_A_HOST = 1024, 8

_HEAD = """\
# Metrics

<!-- Written by `python -m sgt_ds.telemetry.reference`; change sgt_ds/telemetry/metrics_run.py or metrics_rank.py instead. -->

Every rank serves `http://HOST:PORT/metrics` (and `/health`), where PORT is `telemetry.port` plus its
local rank. The rows of the table are defined in `sgt_ds/telemetry/metrics_run.py` and
`metrics_rank.py`. Units are base units, ratios are 0–1, layers and heads count from 0.

- **run** series describe the whole run; only global rank 0 serves them.
- **host** series describe a machine; local rank 0 of each host serves them.
- **rank** series describe one rank; every rank serves its own. Host and rank series carry no rank
  label of their own: the scrape target supplies `run`, `host` and `rank` (`sgt-ds monitor targets`).
- Counters of a run continue after a resume. If a crash sets the run back behind what a scraper has
  seen, those of its progress (updates, tokens, FLOPs) stay constant until the run has caught up, so
  `rate()` shows no jump; `sgt_rank_step` and all gauges show where the run really is. Those of events
  (skipped updates, growth decisions and stalls, failed checkpoints, entropies that were not finite)
  go on from what a scraper saw last: what happens again counts again. Counters of a rank start at 0
  with each process, as `rate()` expects.
- What scrapers saw last is kept in `RUN_DIR/control/counters.json`. Where that is not there, as in another
  `run_dir` with `resume: CHECKPOINT`, counters are absent until the checkpoint is loaded, and go on from
  what it holds: `increase()` takes neither for news. Only if that is less than what was seen under the
  same `run` label does Prometheus take it for a counter that began anew.
- A fork is a run of its own. Its events count from 0, and a parent's margins and checkpoint times are not
  served as its own; its updates, tokens and FLOPs go on from those of its parent, which its weights cost.
- What no longer applies is 0 or absent: the depth of a layer that does not loop is 0, its looped
  heads are absent, past phases are 0, a head without a finite entropy is absent.
- A run that has ended reports it before its port closes: `sgt_run_state` is `completed`, `stopped`
  or `failed`. A run that hangs stays `running` while `sgt_rank_last_progress_timestamp_seconds`
  ages; `sgt_rank_last_step_timestamp_seconds` also ages during evaluations and saves.
- `sgt_mfu_ratio` exists only on GPUs whose peak is known, `sgt_gpu_*` only on GPUs; utilisation,
  power and energy need NVML (`pip install 'sgt-ds[nvml]'`). The ratio is relative to the bf16 peak,
  under `training.fp8` too; float8's own peak is twice that.
- Phases of an update: `data` is the host's wait for the loader, `growth` its time in the growth
  controller, `validation` and `checkpoint` the time they hold up training. `forward`, `backward`,
  `reduce` and `optimizer` are device time between CUDA events on a GPU, read once the events have
  completed, and host time on a CPU. DeepSpeed sends gradients during the backward pass: `reduce` is
  only the remaining wait after the last backward pass of an update. The device works while the host
  waits, so on a GPU the phases may add up to more than an update.
- `process_*` of each rank (CPU seconds, memory, open files, start) come from prometheus_client.

| metric | type | unit | scope | labels | meaning |
|---|---|---|---|---|---|
"""

_TAIL = """
Buckets of `sgt_step_duration_seconds`, in seconds: {buckets}.

## Number of series

A model of {num_layers} layers of {num_heads} heads with {looping_layers} looping layers on \
{ranks:,} GPU ranks of {hosts} hosts, counted from a rendered scrape:

| | series |
|---|---|
| global rank 0, while a loop enters (all heads of the looping layers loop) | {first} |
| local rank 0 of every other host | {local} |
| every other rank | {other} |
| the whole run | {total:,} |
| each further head in one layer | 1, or 2 while it loops |
| each further source in `data.train` | 1 |
"""


def reference() -> str:
    """The page, Markdown."""
    first = series_of(run_wide=True, host_wide=True)
    local, other = (series_of(run_wide=False, host_wide=wide) for wide in (True, False))
    hosts = RANKS // RANKS_OF_A_HOST
    tail = _TAIL.format(
        buckets=", ".join(f"{bound:g}" for bound in STEP_BUCKETS_SECONDS),
        first=first,
        local=local,
        other=other,
        ranks=RANKS,
        hosts=hosts,
        total=first + (hosts - 1) * local + (RANKS - hosts) * other,
        num_layers=LAYERS,
        num_heads=HEADS,
        looping_layers=LOOPING_LAYERS,
    )
    return _HEAD + "".join(_row(metric) for metric in METRICS) + tail


def series_of(*, run_wide: bool, host_wide: bool) -> int:
    """How many series one rank of the example serves, every optional one among them."""
    snapshot = full_snapshot(LAYERS, HEADS, run_wide=run_wide, host_wide=host_wide)
    rendered = families(snapshot, counters_of(snapshot))
    return sum(len(family.samples) for family in rendered) + PROCESS_SERIES


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    columns = (f"`{metric.name}`", metric.kind, metric.unit, metric.scope, labels, metric.help)
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    print(reference(), end="")
