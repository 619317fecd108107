"""The dashboard of all runs: health, progress, where to look next."""

from __future__ import annotations

from sgt_ds.telemetry.dashboard_queries import age, time_left
from sgt_ds.telemetry.grafana import Dashboard, Query, Row
from sgt_ds.telemetry.grafana_panels import many_lines, stat, table

_ALL = 'run=~".+"'
_FIRST = 'run=~".+", rank="0"'

# Heading, unit, expression: in the order of the columns. Labels come from the first three.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "locale", f"max by (run) (sgt_rank_step{{{_ALL}}})"),
    (
        "progress",
        "percentunit",
        f"max by (run) (sgt_rank_step{{{_ALL}}}) / max by (run) (sgt_run_steps{{{_ALL}}})",
    ),
    ("time left", "s", time_left(_ALL)),
    ("loss", "none", f"max by (run) (sgt_loss{{{_ALL}}})"),
    ("validation loss", "none", f"max by (run) (sgt_validation_loss{{{_ALL}}})"),
    ("overhead", "percentunit", f"max by (run) (sgt_flops_overhead_ratio{{{_ALL}}})"),
    ("tokens/s", "locale", f"run:sgt_tokens_per_second:avg5m{{{_ALL}}}"),
    ("MFU", "percentunit", f"run:sgt_mfu_ratio:avg5m{{{_ALL}}}"),
    ("last update", "s", age("sgt_rank_last_step_timestamp_seconds", _ALL)),
    ("checkpoint", "s", age("sgt_checkpoint_last_success_timestamp_seconds", _ALL)),
    ("ranks up", "none", f"sum by (run) (up{{{_ALL}}})"),
)
_LABELLED = (
    f"max by (run, method, preset, world_size, device) (sgt_run_info{{{_FIRST}}})",
    f"max by (run, state) (run:sgt_run_state:last{{{_ALL}}})",
    f"max by (run, phase) (sgt_growth_phase{{{_ALL}}} == 1)",
)
_LABELS = ("run", "method", "preset", "state", "phase")
_FIRST_VALUE = len(_LABELLED)
_VALUES = [f"Value #{chr(ord('A') + place)}" for place in range(_FIRST_VALUE + len(_COLUMNS))]

_NOW = Row(
    "Now",
    (
        stat(
            "Runs in training",
            "none",
            "Runs whose rank 0 is up and reports the state running.",
            Query(f'count(sgt_run_state{{{_FIRST}, state="running"}} == 1)', "", newest=True),
        ),
        stat(
            "Ranks up",
            "none",
            "Exporters of all runs reached by the latest scrape.",
            Query(f"sum(up{{{_ALL}}})", "", newest=True),
        ),
        stat(
            "Paging alerts",
            "none",
            "Firing alerts that need immediate attention.",
            Query(
                'count(ALERTS{alertname=~"Sgt.*", alertstate="firing", severity="page"}) or vector(0)',
                "",
                newest=True,
            ),
        ),
        stat(
            "Other alerts",
            "none",
            "Firing alerts that can wait for the morning.",
            Query(
                'count(ALERTS{alertname=~"Sgt.*", alertstate="firing", severity!="page"}) '
                "or vector(0)",
                "",
                newest=True,
            ),
        ),
        stat(
            "Tokens per second",
            "locale",
            "All runs together.",
            Query(f"sum(run:sgt_tokens_per_second:avg5m{{{_ALL}}})", "", newest=True),
        ),
        stat(
            "Power",
            "watt",
            "All GPUs of all runs together, from NVML; empty without NVML.",
            Query(f"sum(run:sgt_gpu_power_watts:sum{{{_ALL}}})", "", newest=True),
        ),
    ),
)

_TABLES = Row(
    "Runs",
    (
        table(
            "All runs",
            "One row per run; its name links to its dashboard. State: running; ended (well) or down, if "
            "no rank answers any more. Ages are seconds since the last "
            "update and the newest complete checkpoint.",
            [
                Query(expr, "", newest=True, format="table")
                for expr in (*_LABELLED, *(expr for _, _, expr in _COLUMNS))
            ],
            {
                **{label: (label, "") for label in _LABELS},
                **{
                    name: (heading, unit)
                    for name, (heading, unit, _) in zip(
                        _VALUES[_FIRST_VALUE:], _COLUMNS, strict=True
                    )
                },
                "world_size": ("ranks", ""),
                "device": ("device", ""),
            },
            hidden=_VALUES[:_FIRST_VALUE],
            links={
                "run": (
                    "Open the run's dashboard",
                    "/d/sgt-run?var-run=${__value.text}&${__url_time_range}",
                )
            },
        ),
        table(
            "Firing alerts",
            "Of all runs; each alert has a page in monitoring/runbooks.",
            [
                Query(
                    "max by (severity, alertname, run, host, rank) "
                    '(ALERTS{alertname=~"Sgt.*", alertstate="firing"})',
                    "",
                    newest=True,
                    format="table",
                )
            ],
            {label: (label, "") for label in ("severity", "alertname", "run", "host", "rank")},
            hidden=["Value"],
            height=7,
        ),
    ),
)

_CURVES = Row(
    "Side by side",
    (
        many_lines(
            "Loss",
            "none",
            "Training loss of each run, nats per token.",
            Query(f"max by (run) (sgt_loss{{{_ALL}}})", "{{run}}"),
        ),
        many_lines(
            "FLOPs overhead",
            "percentunit",
            "Cumulative, beyond vanilla.",
            Query(f"run:sgt_flops_overhead_ratio:last{{{_ALL}}}", "{{run}}"),
        ),
        many_lines(
            "Throughput",
            "suffix: tokens/s",
            "Mean over five minutes.",
            Query(f"run:sgt_tokens_per_second:avg5m{{{_ALL}}}", "{{run}}"),
        ),
    ),
)

FLEET_DASHBOARD = Dashboard(
    uid="sgt-fleet",
    title="SGT fleet",
    description="All runs: health and progress.",
    rows=(_NOW, _TABLES, _CURVES),
    variables=(),
)
