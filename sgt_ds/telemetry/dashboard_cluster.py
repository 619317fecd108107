"""The cluster dashboard: which rank is late, where its time goes, memory, power."""

from __future__ import annotations

from sgt_ds.telemetry.dashboard_queries import RANKS, RUN, RUN_HOST_RANK
from sgt_ds.telemetry.grafana import Dashboard, Query, Row
from sgt_ds.telemetry.grafana_panels import buckets_over_time, lines, many_lines, stat
from sgt_ds.telemetry.metric import STEP_PARTS

_RANK = "rank {{rank}} on {{host}}"
_HOST = 'run=~"$run", host=~"$host"'


# Not the duration of updates: ranks wait for each other, so it is the same on all.
_WORK = f"rank:sgt_step_work_seconds:mean5m{{{RANKS}}}"

_NOW = Row(
    "Now",
    (
        stat(
            "Ranks up",
            "none",
            "Exporters reached by the latest scrape.",
            Query(f"sum(up{{{RANKS}}})", "ranks", newest=True),
        ),
        stat(
            "Ranks down",
            "none",
            "Exporters that the latest scrape did not reach: dead, or cut off from Prometheus.",
            Query(f"count(up{{{RANKS}}} == 0) or vector(0)", "ranks", newest=True),
        ),
        stat(
            "Step spread",
            "none",
            "Highest minus lowest step. Ranks wait for each other: a value above 1 means that a "
            "rank hangs or was scraped earlier.",
            Query(
                f"max(sgt_rank_step{{{RANKS}}}) - min(sgt_rank_step{{{RANKS}}})", "", newest=True
            ),
        ),
        stat(
            "Slowest rank",
            "none",
            "The rank whose own work (data, forward) takes longest; the others wait for it.",
            Query(f"topk(1, {_WORK})", _RANK, newest=True),
            text_mode="name",
        ),
        stat(
            "Slowest rank above mean",
            "percentunit",
            "How much longer the slowest rank's own work takes than the mean of all ranks.",
            Query(f"run:sgt_step_work_seconds:imbalance_ratio{{{RUN}}}", "", newest=True),
        ),
        stat(
            "Power",
            "watt",
            "All GPUs together, from NVML; empty without NVML.",
            Query(f"run:sgt_gpu_power_watts:sum{{{RUN}}}", "", newest=True),
        ),
    ),
)

_STEPS = Row(
    "Update duration",
    (
        buckets_over_time(
            "Updates by duration",
            "s",
            "Number of updates of the selected ranks by duration, in each interval.",
            "sum by (le) "
            f"(increase(sgt_step_duration_seconds_bucket{{{RANKS}}}[$__rate_interval]))",
        ),
        lines(
            "Own work per update across ranks",
            "s",
            "Seconds of data and forward per update: fastest, median and slowest rank.",
            *(
                Query(f"quantile({share}, {_WORK})", name)
                for share, name in ((0, "quickest"), (0.5, "middle"), (1, "slowest"))
            ),
            width=12,
        ),
        many_lines(
            "Slowest ranks",
            "s",
            "The five ranks whose own work per update takes longest, over five minutes.",
            Query(f"topk(5, {_WORK})", _RANK),
            width=12,
        ),
        many_lines(
            "Time since the last update",
            "s",
            "A single rising line is a hanging rank.",
            Query(f"time() - sgt_rank_last_step_timestamp_seconds{{{RANKS}}}", _RANK),
            width=12,
        ),
    ),
)

_PARTS = Row(
    "Where the time goes",
    (
        lines(
            "Update phases",
            "percentunit",
            "Share of time spent in each phase of an update, mean over the selected ranks.",
            Query(f"avg by (part) (rank:sgt_step_part_seconds:rate5m{{{RANKS}}})", "{{part}}"),
            width=12,
            names=STEP_PARTS,
            stacked=True,
        ),
        many_lines(
            "Waiting for data",
            "percentunit",
            "Share of time that a rank waits for data.",
            Query(f"rank:sgt_data_wait_seconds:rate5m{{{RANKS}}}", _RANK),
            width=12,
        ),
        many_lines(
            "Reducing gradients",
            "percentunit",
            "Share of time in gradient collectives. The rank that waits least is the one the "
            "others wait for.",
            Query(f'rank:sgt_step_part_seconds:rate5m{{{RANKS}, part="reduce"}}', _RANK),
            width=12,
        ),
        many_lines(
            "Growth collectives",
            "percentunit",
            "Share of time in the growth controller's collectives.",
            Query(f"rate(sgt_growth_collective_seconds_total{{{RANKS}}}[5m])", _RANK),
            width=12,
        ),
    ),
)

_MEMORY = Row(
    "Memory",
    (
        many_lines(
            "GPU memory in use",
            "percentunit",
            "Memory held by tensors, as a share of the device's memory.",
            Query(
                f"sgt_gpu_memory_allocated_bytes{{{RANKS}}} / sgt_gpu_memory_size_bytes{{{RANKS}}}",
                _RANK,
            ),
        ),
        many_lines(
            "GPU memory reserved by the allocator",
            "bytes",
            "If it is far above what tensors hold, memory is fragmented.",
            Query(f"sgt_gpu_memory_reserved_bytes{{{RANKS}}}", _RANK),
        ),
        many_lines(
            "Peak GPU memory",
            "bytes",
            "The most that tensors have held since the process started.",
            Query(f"sgt_gpu_memory_peak_bytes{{{RANKS}}}", _RANK),
        ),
        many_lines(
            "Host memory in use",
            "percentunit",
            "Share of each host's memory that is not available without swapping.",
            Query(
                f"1 - sgt_host_memory_available_bytes{{{_HOST}}} "
                f"/ sgt_host_memory_size_bytes{{{_HOST}}}",
                "{{host}}",
            ),
            width=12,
        ),
        many_lines(
            "Memory of each rank's process",
            "bytes",
            "Resident memory on the host.",
            Query(f"process_resident_memory_bytes{{{RANKS}}}", _RANK),
            width=12,
        ),
    ),
)

_POWER = Row(
    "GPUs",
    (
        many_lines(
            "Utilisation",
            "percentunit",
            "Share of time in which a kernel was running, from NVML.",
            Query(f"sgt_gpu_utilization_ratio{{{RANKS}}}", _RANK),
        ),
        many_lines(
            "Power per GPU",
            "watt",
            "From NVML. A GPU that draws less than the others is throttled, or waiting.",
            Query(f"sgt_gpu_power_watts{{{RANKS}}}", _RANK),
        ),
        lines(
            "Energy per token",
            "joule",
            "Energy of all GPUs over five minutes, divided by the tokens trained in that time.",
            Query(
                f"sum by (run) (rate(sgt_gpu_energy_joules_total{{{RUN}}}[5m])) "
                f"/ on (run) max by (run) (rate(sgt_tokens_total{{{RUN}}}[5m]))",
                "energy",
            ),
        ),
    ),
)

_HOSTS = Row(
    "Hosts",
    (
        many_lines(
            "Network, received",
            "binBps",
            "All interfaces of a host except loopback; RDMA traffic is not included.",
            Query(f"rate(sgt_host_network_receive_bytes_total{{{_HOST}}}[5m])", "{{host}}"),
        ),
        many_lines(
            "Network, sent",
            "binBps",
            "All interfaces of a host except loopback; RDMA traffic is not included.",
            Query(f"rate(sgt_host_network_transmit_bytes_total{{{_HOST}}}[5m])", "{{host}}"),
        ),
        lines(
            "Free disk space",
            "bytes",
            "On the file system of the run directory.",
            Query(f"sgt_run_disk_free_bytes{{{RUN}}}", "free"),
        ),
        lines(
            "Telemetry failures",
            "none",
            "Failed publications and scrapes so far, of the selected ranks; training continued.",
            Query(f"sum(sgt_telemetry_failures_total{{{RANKS}}})", "failures"),
        ),
    ),
)

CLUSTER_DASHBOARD = Dashboard(
    uid="sgt-cluster",
    title="SGT cluster",
    description="The ranks and hosts of one run: which one is late, and why.",
    rows=(_NOW, _STEPS, _PARTS, _MEMORY, _POWER, _HOSTS),
    variables=RUN_HOST_RANK,
)
