"""`sgt-ds eval`: tasks, perplexity, and comparison of two models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    add_group,
    check_new,
    keep_deepspeed_quiet,
    print_json,
    whole_number,
)
from sgt_ds.errors import UserError, in_field, refusal
from sgt_ds.evaluation import RULES, Metric, Rule, find_tasks

if TYPE_CHECKING:
    from sgt_ds.evaluation import Comparison, Perplexity, TaskResult
    from sgt_ds.inference import ScoredModel

_RULE_FLAGS = {rule.replace("_", "-"): rule for rule in RULES}
_EXTRAPOLATION = (1, 2, 3, 4)


def register(commands: Subparsers[Parser]) -> None:
    """Add the group and its commands."""
    group = add_group(commands, "eval", "Score a model on tasks or texts; compare two models.")
    _register_tasks(group)
    _register_perplexity(group)
    parser = add_command(
        group,
        "compare",
        "Compare two models item by item: bootstrap interval, McNemar's exact test.",
        "sgt-ds eval compare vanilla.jsonl sgt.jsonl",
        compare,
    )
    parser.add_argument("first", type=Path, metavar="A", help="file written by `eval tasks --out`")
    parser.add_argument(
        "second", type=Path, metavar="B", help="the same for another model, on the same data"
    )
    parser.add_argument(
        "--metric", choices=get_args(Metric), help="metric to compare (default: the rule's own)"
    )
    parser.add_argument(
        "--resamples",
        type=whole_number(100, 10**6),
        default=10_000,
        metavar="N",
        help="bootstrap resamples",
    )
    parser.add_argument(
        "--seed", type=whole_number(), default=0, metavar="S", help="random seed of the bootstrap"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="an export, any folder that transformers can load, or a run or checkpoint",
    )
    parser.add_argument("--tag", metavar="T", help="checkpoint of a run (default: the newest)")
    parser.add_argument(
        "--device", metavar="D", help="cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of the weights (default: as in the files; fp32 on a CPU)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=whole_number(1),
        default=4096,
        metavar="N",
        help="padded tokens per forward pass",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _register_tasks(group: Subparsers[Parser]) -> None:
    parser = add_command(
        group,
        "tasks",
        "Score multiple-choice tasks, zero-shot.",
        "sgt-ds eval tasks exports/573m-sgt --tasks arc_easy,mmlu --data eval --out sgt.jsonl",
        tasks,
    )
    _add_model(parser)
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAMES",
        help="comma-separated; `all`; `mmlu` for its groups",
    )
    parser.add_argument(
        "--data",
        default="datasets",
        metavar="PLACE",
        help="folder of TASK/SPLIT.jsonl[.zst|.gz], a file, a URL, or `datasets` for the public "
        "data sets through that package",
    )
    parser.add_argument(
        "--split", default="validation", metavar="NAME", help="split of the data set"
    )
    parser.add_argument(
        "--rule",
        choices=(*_RULE_FLAGS, "both"),
        default="olmo",
        help="rule for prompts and normalisation (docs/evaluation.md)",
    )
    parser.add_argument(
        "--limit",
        type=whole_number(1),
        metavar="N",
        help="score only the first N items of each task",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="new file: one JSON line per item")


def _register_perplexity(group: Subparsers[Parser]) -> None:
    parser = add_command(
        group,
        "perplexity",
        "Measure loss, perplexity and bits per byte, at the trained length and beyond.",
        "sgt-ds eval perplexity exports/573m-sgt shards/val --tokens 1000000 --extrapolate",
        perplexity,
    )
    _add_model(parser)
    parser.add_argument(
        "data", metavar="DATA", help="prepared set, .txt file, JSON Lines with `text`, or a URL"
    )
    parser.add_argument(
        "--window",
        type=whole_number(1),
        metavar="N",
        help="window length in positions (default: as trained)",
    )
    parser.add_argument(
        "--stride", type=whole_number(1), metavar="S", help="new tokens per window (default: all)"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(0),
        default=1_000_000,
        metavar="N",
        help="maximum tokens to read; 0 reads all (default: a million)",
    )
    parser.add_argument(
        "--apart", action="store_true", help="score each text separately instead of in one row"
    )
    parser.add_argument(
        "--extrapolate", action="store_true", help="also windows of 2, 3 and 4 times the length"
    )


def _check_model(directory: Path) -> None:
    from sgt_ds.data import is_set

    fault = None
    if not directory.exists():
        fault = "is not there"
    elif is_set(directory):
        fault = "is a prepared set, not a model"
    if fault is not None:
        raise UserError(directory, None, f"{fault}; give an export, a model or a run")


def _load(options: argparse.Namespace) -> ScoredModel:
    from sgt_ds.inference import load_scored_model

    return load_scored_model(
        options.directory, tag=options.tag, device=options.device, dtype=options.dtype
    )


def tasks(options: argparse.Namespace) -> None:
    """Load, score, print."""
    keep_deepspeed_quiet()
    chosen = find_tasks(options.tasks)
    rules: tuple[Rule, ...] = RULES if options.rule == "both" else (_RULE_FLAGS[options.rule],)
    from sgt_ds.evaluation import HUB, Suite, check_writable, load_questions
    from sgt_ds.inference import usable_device
    from sgt_ds.progress import Progress

    if options.out is not None:  # told before hours of scoring, not after
        check_new("--out", options.out)
        check_writable(options.out)
    _check_model(options.directory)
    usable_device(options.device)
    if options.data.partition(":")[0] == HUB and sys.stderr.isatty():  # for one who waits
        print(
            "eval: loading public data sets; --data FOLDER reads local files instead",
            file=sys.stderr,
        )
    with in_field("--data"):
        questions = [
            load_questions(task, rule, options.data, split=options.split, limit=options.limit)
            for rule in rules
            for task in chosen
        ]
    model = _load(options)
    suite = Suite(
        questions, model.encoder, positions=model.positions, batch_tokens=options.batch_tokens
    )
    with Progress("eval", len(suite.requests), "choices") as progress:
        values = suite.score(model.logits, model.device, on_batch=progress.advance)
    results = suite.results(values)
    try:  # the scores first: they are out whatever becomes of the file, and the other way round
        if options.json:
            print_json({"model": model.name, "tasks": [result.as_json() for result in results]})
        else:
            print(_table(_task_rows(results)), flush=True)
    finally:
        if options.out is not None:
            _write_out(options.out, results)


def _write_out(path: Path, results: list[TaskResult]) -> None:
    from sgt_ds.evaluation import write_items

    try:
        write_items(path, results)
    except OSError as error:
        message = refusal(error, "written", instead="name another file")
        raise UserError(
            "--out", None, f"{path} {message} to get the items too; the scores above are complete"
        ) from None


def perplexity(options: argparse.Namespace) -> None:
    """Load, measure, print."""
    keep_deepspeed_quiet()
    from sgt_ds.evaluation import PerplexityProbe, streams_of
    from sgt_ds.inference import usable_device
    from sgt_ds.progress import Progress

    usable_device(options.device)
    _check_model(options.directory)
    model = _load(options)
    window = options.window or model.positions
    if options.stride is not None and options.stride > window:
        raise UserError(
            "--stride", None, f"{options.stride} exceeds the window; give {window} or less"
        )
    streams = streams_of(
        options.data,
        model.encoder,
        tokens=options.tokens or None,
        apart=options.apart,
        verified=True,
    )
    longest = max(len(stream.tokens) for stream in streams) - 1
    rows: list[Perplexity] = []
    for size, stride in _windows(options, window, longest, model.most_positions):
        probe = PerplexityProbe(
            streams,
            window=size,
            length=min(window, model.positions),
            stride=stride,
            batch_tokens=options.batch_tokens,
        )
        with Progress(f"window {size}", probe.tokens, "tokens") as progress:
            sums = probe.score(model.logits, model.device, on_batch=progress.advance)
        rows.append(probe.result(sums))
    if options.json:
        print_json(
            {"model": model.name, "data": options.data, "windows": [row.as_json() for row in rows]}
        )
        return
    print(_table(_perplexity_rows(rows)))


def _windows(
    options: argparse.Namespace, window: int, longest: int, most: int | None
) -> list[tuple[int, int | None]]:
    """The windows that are asked for, with their strides, none longer than the longest text."""
    asked = [times * window for times in (_EXTRAPOLATION if options.extrapolate else (1,))]
    flag = "--extrapolate" if options.extrapolate else "--window"
    found: dict[int, int | None] = {}
    for size in asked:
        taken = min(size, longest)
        if most is not None and taken > most:
            raise UserError(flag, None, f"{taken} exceeds the model's {most} positions; use fewer")
        stride = options.stride and size // window * options.stride
        found.setdefault(taken, stride and min(stride, taken))
    if asked[-1] > longest and (options.window or options.extrapolate):
        note = f"the longest text has {longest} tokens to predict; longer windows are cut to that"
        print(f"sgt-ds eval perplexity: {flag}: {note}", file=sys.stderr)
    return list(found.items())


def compare(options: argparse.Namespace) -> None:
    """Read both files, compare, print."""
    from sgt_ds.evaluation import compare as compare_items
    from sgt_ds.evaluation import read_items

    first, second = ((path, read_items(path)) for path in (options.first, options.second))
    rows = compare_items(
        first, second, metric=options.metric, resamples=options.resamples, seed=options.seed
    )
    if options.json:
        print_json({"comparisons": [row.as_json() for row in rows]})
        return
    print(_table(_comparison_rows(rows)))


def _task_rows(results: list[TaskResult]) -> list[list[str]]:
    rows = [["task", "rule", "items", "chance", "acc", "acc_norm", "bpb", "reported"]]
    for result in results:
        cells = [result.task, result.rule, f"{len(result.items):,}", f"{result.chance:.3f}"]
        for metric in get_args(Metric):
            score = result.score(metric)
            cells.append(f"{score.value:.4f} ± {score.stderr:.4f}")
        rows.append([*cells, result.metric])
    return rows


def _perplexity_rows(rows: list[Perplexity]) -> list[list[str]]:
    table = [["window", "stride", "tokens", "loss", "perplexity", "bits/byte", "loss beyond"]]
    for row in rows:
        beyond = "" if row.beyond_loss is None else f"{row.beyond_loss:.4f}"
        table.append(
            [
                *(str(row.window), str(row.stride), f"{row.tokens:,}", f"{row.loss:.4f}"),
                *(f"{row.perplexity:.3f}", f"{row.bits_per_byte:.4f}", beyond),
            ]
        )
    return table


def _comparison_rows(rows: list[Comparison]) -> list[list[str]]:
    table = [["task", "rule", "metric", "items", "A", "B", "B − A", "95%", "only A", "only B", "p"]]
    for row in rows:
        split: list[Any] = [row.only_first, row.only_second]
        table.append(
            [
                *(row.task, row.rule, row.metric, f"{row.items:,}"),
                *(f"{row.first:.4f}", f"{row.second:.4f}", f"{row.difference:+.4f}"),
                f"[{row.low:+.4f}, {row.high:+.4f}]",
                *("" if count is None else str(count) for count in split),
                "" if row.p_value is None else f"{row.p_value:.4g}",
            ]
        )
    return table


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
