"""`sgt-ds bench forecast`: step time on unmeasured numbers of hosts, from measured parts."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    print_json,
    real_number,
    whole_number,
)
from sgt_ds.errors import UserError, refusal
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from sgt_ds.launch import Forecast, Link, Network, Point

HOSTS = [2, 4, 8, 16, 32, 64, 128]
LINKS = [200.0, 400.0]
# Of a link's nominal speed, and of one hop between hosts: usual for RDMA, and no measurements.
LINK_RATIO, HOP_MICROSECONDS = 0.85, 10.0
BYTES_PER_GIGABIT = 1e9 / 8
# Of a point that was measured: what the model says of others is worth no more.
LARGE_ERROR = 0.1
# What a measurement can't have fewer of than one, and what takes no less time than none.
COUNTS = {
    *("parameters", "sequence_length", "micro_batch_size", "bucket_elements"),
    *("ranks", "global_batch_size"),
}
TIMES = {"step_seconds", "growth_collective_seconds"}
REMEDY = "give the output of `sgt-ds bench scaling RUN.yaml --gpus 1,2 --json`"


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "forecast",
        "Forecast step times on several hosts from `bench scaling --json` measurements of one.",
        "sgt-ds bench forecast points.json --hosts 2 4 8 --gpus-per-host 8 --link 200 400",
        forecast,
    )
    parser.add_argument(
        "points",
        type=Path,
        metavar="POINTS.json",
        help="output of bench scaling --json or bench train --json",
    )
    parser.add_argument(
        "--hosts",
        nargs="+",
        type=whole_number(1, 10**5),
        default=HOSTS,
        metavar="H",
        help="numbers of hosts, one or more",
    )
    parser.add_argument(
        "--gpus-per-host",
        type=whole_number(1, 1024),
        metavar="N",
        help="GPUs per host (default: the largest number of ranks measured)",
    )
    parser.add_argument(
        "--link",
        nargs="+",
        type=real_number(0, 10**5, above=True),
        default=LINKS,
        metavar="GBPS",
        help="network bandwidth of one host, all its NICs together, in Gbit/s",
    )
    parser.add_argument(
        "--link-ratio",
        type=real_number(0, 1, above=True),
        default=LINK_RATIO,
        help="assumed share of the bandwidth that collectives reach",
    )
    parser.add_argument(
        "--hop-microseconds",
        type=real_number(0, 10**6),
        default=HOP_MICROSECONDS,
        help="assumed latency of a small message between hosts",
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number(1),
        metavar="G",
        help="sequences per update at every size (default: micro-batches per rank as measured)",
    )
    parser.add_argument(
        "--bucket-elements",
        type=whole_number(10**6),
        metavar="E",
        help="reduce_bucket_size of the forecast runs (default: as measured)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def forecast(options: argparse.Namespace) -> None:
    """Fit, check against the points, and print what is forecast."""
    document = _read(options.points)
    try:
        answers, per_host = _answers(document, options)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            options.points,
            None,
            f"is not a measurement of runs ({type(error).__name__}: {error}); {REMEDY}",
        ) from None
    bucket = options.bucket_elements or document["setting"]["bucket_elements"]
    if options.json:
        print_json(
            {
                "forecast": True,
                "assumed": {
                    "link_ratio": options.link_ratio,
                    "hop_microseconds": options.hop_microseconds,
                    "gpus_per_host": per_host,
                    "bucket_elements": bucket,
                },
                "variants": {
                    variant: {"checks": checks, "rows": [row.as_json() for row in rows]}
                    for variant, (checks, rows) in answers.items()
                },
            }
        )
        return
    for variant, (checks, rows) in answers.items():
        _print_table(variant, checks, rows)
        worst = max(abs(check["error_ratio"]) for check in checks)
        if worst > LARGE_ERROR:
            print(
                f"warning: {variant}: the model misses a measured point by "
                f"{100 * worst:.0f}%; measure again on an idle machine before relying on this",
                file=sys.stderr,
            )
    bases = {
        variant: min(_points(document, variant), key=lambda point: point.ranks)
        for variant in answers
    }
    _print_notes(bases, {variant: rows for variant, (_, rows) in answers.items()})
    left_out = "no rank is late, no other job is on the network"
    if bucket < document["setting"]["bucket_elements"]:
        left_out += ", and more buckets cost the cards nothing"
    print(
        f"FORECAST, not measured: {counted(per_host, 'GPU')} a host, collectives reach "
        f"{100 * options.link_ratio:g}% of a link, {options.hop_microseconds:g} µs a hop, buckets "
        "of "
        f"{bucket / 1e6:g} M elements; {left_out}"
    )


def _answers(
    document: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, tuple[list[dict[str, float]], list[Forecast]]], int]:
    """By variant, the model beside its points and what is forecast; and GPUs of a host."""
    from sgt_ds.launch import Link, Network, check_model, fit_model
    from sgt_ds.launch import forecast as forecast_one

    inside = _links(document, options.points)
    most = max(inside)
    per_host = options.gpus_per_host or most
    answers = {}
    for variant in dict.fromkeys(run["variant"] for run in document["runs"]):
        points = _points(document, variant)
        networks = {point.ranks: Network(1, point.ranks, inside[point.ranks]) for point in points}
        model = fit_model(_step_setting(document), points, networks)
        checks = check_model(model, points, networks)
        if options.bucket_elements is not None:
            model = model.with_bucket(options.bucket_elements)
        base = min(points, key=lambda point: point.ranks)
        rows = []
        for gigabits in options.link:
            speed = gigabits * BYTES_PER_GIGABIT * options.link_ratio
            between = Link(speed, options.hop_microseconds * 1e-6)
            for hosts in options.hosts:
                network = Network(hosts, per_host, inside[most], between)
                micro_batches = _micro_batches(options, document, network, base)
                if micro_batches is not None:
                    rows.append(forecast_one(model, base, network, gigabits, micro_batches))
        answers[variant] = (checks, rows)
    if not any(rows for _, rows in answers.values()):
        raise UserError(
            "--global-batch", None, "cannot be divided at any of these sizes; give another"
        )
    return answers, per_host


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(path, None, f"no such file; {REMEDY}") from None
    except OSError as error:
        raise UserError(path, None, refusal(error, "read", REMEDY)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(path, None, f"is not valid JSON ({error}); {REMEDY}") from None
    if isinstance(document, dict) and "weak" in document:  # of `bench scaling`
        document = document["weak"]
    wanted = {"setting", "runs", "collectives"}
    if not isinstance(document, dict) or not wanted <= document.keys() or not document["runs"]:
        raise UserError(
            path,
            None,
            f"is not a measurement of runs; {REMEDY}, or `bench train --json`",
        )
    for field, number in _numbers(document):
        _, _, key = field.rpartition(".")
        least = 1 if key in COUNTS else 0 if key in TIMES or ".parts." in field else -(2**63)
        if not least <= number < 2**63:
            raise UserError(
                path, field, f"{str(number)[:25]} is not a valid measurement; measure again"
            )
    return document


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """All numbers, with the keys that lead to them."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from _numbers(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, int | float):
        yield field, value


def _links(document: dict[str, Any], path: Path) -> dict[int, Link]:
    """What joins the ranks, by their number."""
    from sgt_ds.launch import Link, link_of

    links = {}
    for ranks, measured in document["collectives"].items():
        try:
            links[int(ranks)] = link_of(measured, int(ranks))
        except ValueError as error:
            raise UserError(
                path,
                f"collectives.{ranks}.all_reduce",
                f"{error}; measure again on an otherwise idle host",
            ) from None
    if not links:
        raise UserError(
            path, "collectives", "cover one rank only; measure with --num-gpus 1 2 or more"
        )
    return {1: Link(float("inf"), 0.0), **links}


def _points(document: dict[str, Any], variant: str) -> list[Point]:
    """Measured runs of one variant, repeats by their median update."""
    from sgt_ds.launch import Point

    setting, points = document["setting"], []
    runs = [run for run in document["runs"] if run["variant"] == variant]
    for ranks in dict.fromkeys(run["ranks"] for run in runs):
        repeats = sorted(
            (run for run in runs if run["ranks"] == ranks), key=lambda run: run["step_seconds"]
        )
        run = repeats[len(repeats) // 2]
        batch = run["global_batch_size"]
        points.append(
            Point(
                ranks=ranks,
                micro_batches=batch // (ranks * setting["micro_batch_size"]),
                tokens=batch * setting["sequence_length"],
                step_seconds=run["step_seconds"],
                parts={name: share * run["step_seconds"] for name, share in run["parts"].items()},
                growth_seconds=statistics.median(
                    own["growth_collective_seconds"] for own in repeats
                ),
            )
        )
    return points


def _step_setting(document: dict[str, Any]) -> Any:
    from sgt_ds.launch import GRADIENT_BYTES, StepSetting

    setting = document["setting"]
    return StepSetting(
        parameters=setting["parameters"],
        bytes_per_gradient=GRADIENT_BYTES[setting["precision"]],
        bucket_elements=setting["bucket_elements"],
        overlaps=setting["overlaps"],
        all_reduces=setting["all_reduces"],
    )


def _micro_batches(
    options: argparse.Namespace, document: dict[str, Any], network: Network, base: Point
) -> int | None:
    """Of an update on one rank; None where the global batch can't be cut so."""
    if options.global_batch is None:
        return base.micro_batches
    share = document["setting"]["micro_batch_size"] * network.ranks
    micro_batches, left = divmod(options.global_batch, share)
    return micro_batches if micro_batches and not left else None


def _print_notes(bases: dict[str, Point], answers: dict[str, Sequence[Forecast]]) -> None:
    runs = {
        f"{counted(base.ranks, 'rank')}, A = {base.micro_batches}": None for base in bases.values()
    }
    print(
        "A: micro-batches per update on each rank; scaling: tokens/s/rank relative to the variant's "
        f"run that was measured on {' or '.join(runs)}"
    )
    if any(
        row.scaling_ratio > 1 and row.micro_batches > bases[variant].micro_batches
        for variant, rows in answers.items()
        for row in rows
    ):
        print(
            "scaling is above 100% where A is larger than there (--global-batch): what an update "
            "costs once is shared by more tokens"
        )


def _print_table(
    variant: str, checks: Sequence[dict[str, float]], rows: Sequence[Forecast]
) -> None:
    print(f"{variant}: the model against the points it was fitted to")
    for point in checks:
        print(
            f"  {counted(int(point['ranks']), 'rank'):>12}  measured {point['measured_seconds']:8.4f} s  "
            f"model {point['model_seconds']:8.4f} s  {100 * point['error_ratio']:+.2f}%"
        )
    print(
        f"{variant}: forecast\n{'hosts':>6}{'ranks':>7}{'Gb/s':>6}{'A':>5}{'s/update':>10}"
        f"{'tokens/s/rank':>15}{'scaling':>9}  computing / reduce / optimizer / gather / rest"
    )
    for row in rows:
        parts = row.parts
        last = parts["growth"] + parts["rest"]
        shown = (parts["computing"], parts["reduce"], parts["optimizer"], parts["gather"], last)
        print(
            f"{row.hosts:6}{row.ranks:7}{row.link_gigabits:6g}{row.micro_batches:5}"
            f"{row.step_seconds:10.4f}{row.tokens_per_second_per_rank:15,.0f}"
            f"{100 * row.scaling_ratio:8.1f}%  "
            + " / ".join(f"{100 * part / row.step_seconds:.1f}%" for part in shown)
        )
