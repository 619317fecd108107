"""`sgt-ds bench growth`: what growing costs a run in time: compiled when needed, ahead, and kept."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.bench_train import MAX_RANKS
from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_run, print_json, whole_number
from sgt_ds.errors import UserError

if TYPE_CHECKING:
    from sgt_ds.report import GrowthPause, RunHistory

# What compiles beside training has one thread and gives way to it: it may take this many times as
# long as the cold run's updates did, and a real run's first window leaves it more.
AHEAD_FACTOR = 4.0
# `kept` starts with what `cold` has compiled.
RUNS = ("cold", "ahead", "kept")


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "growth",
        "Time what each growth event costs a run: with a cold compile cache, compiled ahead beside "
        "training, and restarted on a new machine with the cache that the first run kept.",
        "sgt-ds bench growth run.yaml --num-gpus 2 --window 8",
        growth,
    )
    add_run(parser, "run configuration: model, data, batch, growth")
    parser.add_argument(
        "--num-gpus",
        type=whole_number(1, MAX_RANKS),
        default=1,
        metavar="N",
        help="number of ranks",
    )
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1),
        default=1,
        metavar="A",
        help="micro-batches per update",
    )
    parser.add_argument(
        "--window",
        type=whole_number(4),
        default=8,
        metavar="U",
        help="updates before the first decision and between decisions (default: 8)",
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="directory for the run directories"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


@dataclass
class _Measured:
    """What is known so far: by run, the pauses; `events`: how many decisions a run may take."""

    events: int
    first_window: int
    """Updates before the first decision of the run that compiles ahead."""
    pauses: dict[str, list[GrowthPause]] = field(default_factory=dict)
    compiled_bytes: int = 0
    said: str = ""
    """What rank 0 said of the process beside it."""


def growth(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.config import load_run_config, resolve_deepspeed
    from sgt_ds.data import check_data
    from sgt_ds.evaluation import check_evaluation
    from sgt_ds.launch import check_overrides, ending_on_sigterm, gpu_arguments, scratch_for
    from sgt_ds.report import growth_pauses

    config = load_run_config(options.run, options.overrides)
    if not config.training.compile:
        message = "is false, so nothing is compiled; set it to true"
        raise UserError(options.run, "training.compile", message)
    if config.method != "sgt":
        raise UserError(options.run, "method", f"is {config.method}; bench growth measures sgt")
    layers = config.growth.layers
    assert isinstance(layers, int), "sgt takes the number of layers"
    events = layers * config.growth.k_max
    words = _words(options, config.training.micro_batch_size)
    first = [*words, *_windows(options, events, options.window)]
    check_overrides(options.overrides, [*first, *_places(Path(), RUNS[0])])
    gpu_arguments(options.num_gpus)
    # Before the first run, and as one line: what its ranks would say.
    own = load_run_config(options.run, [*options.overrides, *first])
    resolve_deepspeed(own, options.num_gpus, options.run)
    check_data(own.data, own.model, own.evaluation)
    check_evaluation(own.evaluation, str(options.run))
    measured = _Measured(events, options.window)
    with ending_on_sigterm():
        try:
            with scratch_for(options.scratch) as scratch:
                for name in RUNS:
                    window = measured.first_window if name == "ahead" else options.window
                    own_words = [*words, *_windows(options, events, window)]
                    history = _run(options, own_words, scratch, name)
                    measured.pauses[name] = growth_pauses(history)
                    if name == "cold":
                        measured.first_window += _updates_to_compile(history, measured.pauses[name])
                    if name == "ahead":
                        measured.said = _said_of_compiling(history)
                    kept = (scratch / "compiled").glob("*.zip")
                    measured.compiled_bytes = sum(file.stat().st_size for file in kept)
        finally:
            if measured.pauses:
                _print(options, measured)


def _words(options: argparse.Namespace, micro_batch_size: int) -> list[str]:
    batch = micro_batch_size * options.micro_batches * options.num_gpus
    return [
        *("growth.entropy_every=1", "growth.freeze_at=null"),
        f"training.global_batch_size={batch}",
        *("training.log_every=1", "training.validate_every=1000000", "checkpoint.every=1000000"),
        *("resume=never", "telemetry.enabled=false", "data.exhausted=repeat"),
    ]


def _windows(options: argparse.Namespace, events: int, first: int) -> list[str]:
    """`first`: updates before the first decision."""
    steps = first + options.window * (events + 1)
    return [
        *(f"growth.t_start={first}", f"growth.interval={options.window}"),
        f"training.steps={steps}",
    ]


def _places(scratch: Path, name: str) -> list[str]:
    """Where a run leaves what it makes; only `ahead` compiles ahead, and shares its code with none."""
    from sgt_ds.launch import path_override

    ahead = name == "ahead"
    compiled = scratch / ("compiled-ahead" if ahead else "compiled")
    return [
        path_override("run_dir", scratch / name),
        path_override("training.compile_cache", compiled),
        f"training.compile_ahead={str(ahead).lower()}",
    ]


def _updates_to_compile(cold: RunHistory, pauses: Sequence[GrowthPause]) -> int:
    """Updates in which the cold run's kinds can be compiled beside training."""
    usual = statistics.median(update.step_seconds for update in cold.updates)
    lost = sum(max(0.0, pause.seconds) for pause in pauses)
    return math.ceil(AHEAD_FACTOR * lost / usual)


def _said_of_compiling(history: RunHistory) -> str:
    """What rank 0 said of the process beside it; nothing where there was none."""
    from sgt_ds.config import RunLayout

    log = RunLayout(history.run_dir).logs / "rank-00000.log"
    lines = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = re.findall(r" INFO (.*(?:compiled|compiling) ahead.*)", lines)
    return str(found[-1]) if found else ""


def _run(options: argparse.Namespace, words: Sequence[str], scratch: Path, name: str) -> RunHistory:
    from sgt_ds.config import RunLayout
    from sgt_ds.launch import launch_one, make_scratch
    from sgt_ds.report import read_history

    torch_folder = scratch / f"torch-{name}"
    make_scratch(torch_folder)
    run_dir = scratch / name
    launch_one(
        f"the {name} run",
        ["sgt_ds.train", str(options.run), *options.overrides, *words, *_places(scratch, name)],
        options.num_gpus,
        run_dir.with_suffix(".log"),
        # As on a new machine. On a CPU precompiled headers stay elsewhere, whatever this says.
        {
            "TORCHINDUCTOR_CACHE_DIR": str(torch_folder),
            "TRITON_CACHE_DIR": str(torch_folder / "triton"),
        },
    )
    shutil.rmtree(RunLayout(run_dir).checkpoints)  # gigabytes, of no more use
    return read_history(run_dir)


def _print(options: argparse.Namespace, measured: _Measured) -> None:
    runs: dict[str, dict[str, Any]] = {
        name: {
            "first_update_excess_seconds": pauses[0].seconds,
            "growth_seconds": sum(pause.seconds for pause in pauses[1:]),
            "events": sum(pause.decided for pause in pauses),
            "pauses": [asdict(pause) for pause in pauses],
        }
        for name, pauses in measured.pauses.items()
    }
    if options.json:
        print_json(
            {
                "ranks": options.num_gpus,
                "complete": len(runs) == len(RUNS),
                "events_possible": measured.events,
                "compiled_bytes": measured.compiled_bytes,
                "ahead": {"first_window": measured.first_window, "said": measured.said},
                "runs": runs,
            }
        )
        return
    print(f"{'run':6}{'after step':>11}{'seconds':>9}  what is new")
    for name, pauses in measured.pauses.items():
        for pause in pauses:
            print(f"{name:6}{pause.step:11}{pause.seconds:9.2f}  {pause.what}")
    for name, told in runs.items():
        print(
            f"{name}: first update {told['first_update_excess_seconds']:.2f} s, growth "
            f"{told['growth_seconds']:.2f} s in {told['events']} of {measured.events} possible events, "
            "beyond what such updates otherwise take"
        )
    if "ahead" in runs:
        said = measured.said or "nothing was compiled ahead"
        print(f"ahead: {measured.first_window} updates before the first decision; {said}")
    print(f"kept: {measured.compiled_bytes / 1e6:.1f} MB of compiled code")
