"""`sgt-ds bench train`: methods and numbers of ranks compared, in whole runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import Parser, Subparsers, add_command, add_run, print_json, whole_number
from sgt_ds.errors import UserError
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from sgt_ds.config import RunConfig
    from sgt_ds.launch import RunFigures, RunSetting

# Of one host: more than any has GPUs.
MAX_RANKS = 1024
VARIANTS = ["vanilla", "sgt:1", "sgt:3"]


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "train",
        "Time whole runs through the launcher: methods against vanilla, on 1, 2, … ranks.",
        "sgt-ds bench train run.yaml --num-gpus 1 2 4 8 --variants vanilla sgt:3",
        train,
    )
    parser.add_argument(
        "--num-gpus",
        nargs="+",
        type=whole_number(1, MAX_RANKS),
        default=[1],
        metavar="N",
        help="numbers of ranks",
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number(1),
        metavar="G",
        help="sequences per update at every number of ranks (strong scaling)",
    )
    add_run_options(parser, VARIANTS)


def add_run_options(parser: Parser, variants: Sequence[str]) -> None:
    """Add what every bench of whole runs asks: the run file, the variants, how long, how often."""
    add_run(parser, "run configuration: model, data, batch, DeepSpeed")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(variants),
        metavar="V",
        help="vanilla, sgt:K (its fixed phase), attention_loop:K, block_loop:K",
    )
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1),
        default=1,
        metavar="A",
        help="micro-batches per update on each rank: the batch grows with the ranks (weak scaling)",
    )
    parser.add_argument("--updates", type=whole_number(1), default=4, help="updates per interval")
    parser.add_argument(
        "--intervals", type=whole_number(1), default=5, help="timed intervals of each run"
    )
    parser.add_argument(
        "--warm-up",
        type=whole_number(1),
        default=1,
        help="warm-up intervals before them; two updates at least where layers loop",
    )
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        default=1,
        help="repeats of all runs, in alternating order",
    )
    parser.add_argument(
        "--load", action="store_true", help="also resume each run once, to time loading"
    )
    parser.add_argument("--heads", type=whole_number(1), default=2, help="heads that loop in sgt:K")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="directory for the run directories"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


@dataclass
class Measured:
    """What a bench has measured so far: a run that fails, or is stopped, takes nothing from it."""

    setting: dict[str, Any]
    wanted: int
    figures: list[RunFigures] = field(default_factory=list)
    collectives: dict[int, Any] = field(default_factory=dict)
    roofline: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        from sgt_ds.launch import with_ratios

        return {
            "setting": self.setting,
            "complete": len(self.figures) == self.wanted,
            "runs": [run.as_json() for run in with_ratios(self.figures)],
            "collectives": self.collectives,
            "roofline": self.roofline,
        }


def train(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.launch import ending_on_sigterm, scratch_for

    setting = setting_of(options, options.global_batch)
    measured = to_measure(setting)
    with ending_on_sigterm():
        try:
            with scratch_for(options.scratch) as scratch:
                measured.roofline = roofline_of(measured, scratch)
                measure(setting, measured, scratch)
                if options.json:
                    measure_collectives(setting, measured, scratch)
        finally:  # a reader that is gone, as `| head`, is no failure of the runs
            if measured.figures and options.json:
                print_json(measured.as_json())
            elif measured.figures:
                print_table(setting, measured)


def setting_of(options: argparse.Namespace, global_batch_size: int | None) -> RunSetting:
    """The runs that the options ask for, all of them checked.

    `global_batch_size`: sequences of an update at every number of ranks; None: as many on each.
    Raises: UserError.
    """
    from sgt_ds.config import load_run_config
    from sgt_ds.data import check_data
    from sgt_ds.evaluation import check_evaluation
    from sgt_ds.launch import (
        RunSetting,
        check_overrides,
        gpu_arguments,
        own_overrides,
        variant,
    )

    for ranks in options.num_gpus:
        gpu_arguments(ranks)
    config = load_run_config(options.run, options.overrides)
    check_data(config.data, config.model, config.evaluation)
    check_evaluation(config.evaluation, str(options.run))
    micro = config.training.micro_batch_size
    global_batch = {
        ranks: global_batch_size or micro * options.micro_batches * ranks
        for ranks in options.num_gpus
    }
    for ranks, sequences in global_batch.items():
        if sequences % (micro * ranks):
            raise UserError(
                "--global-batch",
                None,
                f"{sequences} is not a multiple of {micro} sequences on each of {ranks} ranks",
            )
    for option, given in (("--variants", options.variants), ("--num-gpus", options.num_gpus)):
        if len(set(given)) < len(given):
            raise UserError(option, None, "names one twice; name each once, and use --repeats")
    variants = [variant(text, config.model.num_layers, options.heads) for text in options.variants]
    # Before the first run: a fault of the last one would cost the others.
    for chosen in variants:
        load_run_config(options.run, [*options.overrides, *chosen.overrides])
    for ranks, sequences in global_batch.items():
        batch = f"training.global_batch_size={sequences}"
        _setting(load_run_config(options.run, [*options.overrides, batch]), ranks, options.run)
    # A run's first update decides its loops, and the second compiles them.
    compiling = 1 if all(chosen.name == "vanilla" for chosen in variants) else 2
    setting = RunSetting(
        run_yaml=options.run,
        config=config,
        overrides=tuple(options.overrides),
        variants=tuple(variants),
        ranks=tuple(options.num_gpus),
        updates=options.updates,
        intervals=options.intervals,
        warm_up=max(options.warm_up, math.ceil(compiling / options.updates)),
        repeats=options.repeats,
        global_batch=global_batch,
        loads=options.load,
    )
    for chosen in setting.variants:
        own = own_overrides(setting, chosen, setting.ranks[0], Path("run"), 1)
        check_overrides(setting.overrides, own)
    return setting


def to_measure(setting: RunSetting) -> Measured:
    """What `measure` is to fill."""
    from sgt_ds.config import load_run_config

    fewest = min(setting.ranks)
    batch = f"training.global_batch_size={setting.global_batch[fewest]}"
    config = load_run_config(setting.run_yaml, [*setting.overrides, batch])
    wanted = setting.repeats * len(setting.variants) * len(setting.ranks)
    return Measured(_setting(config, fewest, setting.run_yaml), wanted)


def roofline_of(measured: Measured, scratch: Path) -> dict[str, float]:
    """What a device of this host does on a plain product and a copy, in the runs' precision."""
    from sgt_ds.launch import bench_roofline

    return bench_roofline(measured.setting["precision"], scratch)


def measure(setting: RunSetting, measured: Measured, scratch: Path) -> None:
    """Make the runs in `scratch`; `measured` is filled as they end."""
    from sgt_ds.launch import bench_runs

    for run in bench_runs(setting, scratch):
        measured.figures.append(run)


def measure_collectives(setting: RunSetting, measured: Measured, scratch: Path) -> None:
    """Time the collectives that a forecast needs, at each number of ranks."""
    from sgt_ds.launch import GRADIENT_BYTES, bench_collectives

    shape = measured.setting
    bucket = shape["bucket_elements"] * GRADIENT_BYTES[shape["precision"]]
    for ranks in setting.ranks:
        if ranks > 1:
            measured.collectives[ranks] = bench_collectives(ranks, bucket, scratch)


def _setting(config: RunConfig, ranks: int, config_file: Path) -> dict[str, Any]:
    """What a forecast has to know beside the runs' figures."""
    from sgt_ds.config import resolve_deepspeed
    from sgt_ds.flops import layout_of_run, parameter_count

    layout = layout_of_run(config, ranks, config_file)
    zero = resolve_deepspeed(config, ranks, config_file).get("zero_optimization", {})
    scatters = zero.get("reduce_scatter", True)
    parameters = parameter_count(config.model)
    return {
        "parameters": parameters,
        "sequence_length": config.data.sequence_length,
        "micro_batch_size": layout.micro_batch_size,
        "precision": layout.precision,
        "fp8": config.training.fp8,
        "bucket_elements": min(parameters, layout.reduce_bucket_size),
        "overlaps": layout.overlap_comm,
        # With it DeepSpeed gives every rank all sums in one call, and each keeps its own.
        "all_reduces": not scatters or zero.get("use_multi_rank_bucket_allreduce", True),
    }


def print_table(setting: RunSetting, measured: Measured) -> None:
    """Print one line per run, what its updates are made of, and the roof over them."""
    from sgt_ds.launch import with_ratios

    figures = with_ratios(measured.figures)
    print(
        f"{'variant':18}{'ranks':>6}{'batch':>7}{'s/update':>10}{'least–most':>17}"
        f"{'tokens/s/rank':>15}{'MFU':>7}{'roof':>7}"
        f"{'time':>8}{'FLOPs':>8}{'excess':>8}{'scaling':>9}{'spread':>8}{'growth µs':>11}{'save s':>8}{'load s':>8}{'peak GB':>9}"
    )
    roof = measured.roofline["product_flops_per_second"]
    for run in figures:
        spread = "–".join(f"{seconds:.4f}" for seconds in run.step_seconds_range)
        print(
            f"{run.variant:18}{run.ranks:6}{run.global_batch_size:7}{run.step_seconds:10.4f}"
            f"{spread:>17}{run.tokens_per_second_per_rank:15,.0f}{_share(run.mfu_ratio):>7}"
            f"{_share(run.flops_per_second_per_rank / roof):>7}"
            f"{_added(run.time_ratio):>8}{_added(run.flops_ratio):>8}"
            + (f"{run.excess:8.2f}" if run.excess is not None else f"{'':8}")
            + f"{_share(run.scaling_ratio):>9}{100 * run.rank_spread_ratio:7.1f}%"
            f"{1e6 * run.growth_collective_seconds:11,.0f}{run.checkpoint_seconds:8.2f}"
            + (f"{run.load_seconds:8.2f}" if run.load_seconds is not None else f"{'':8}")
            + (f"{run.peak_memory_bytes / 1e9:9.1f}" if run.peak_memory_bytes else "")
        )
    for run in figures:
        shares = "  ".join(f"{part} {100 * share:.1f}%" for part, share in run.parts.items())
        print(f"phases of an update, {run.variant} on {run.ranks}: {shares}")
    size, copied = measured.roofline["product_size"], measured.roofline["copy_bytes_per_second"]
    print(
        f"s/update: median of {counted(setting.intervals, 'interval')} of "
        f"{counted(setting.updates, 'update')}, after "
        f"{setting.warm_up} to warm up; roof: FLOPs/s relative to a plain matrix product of "
        f"{size}³ in "
        f"{measured.setting['precision']} on one rank alone, {roof / 1e12:.4g} TFLOP/s (a plain "
        "copy "
        f"reads and writes {copied / 1e12:.3g} TB/s)"
    )
    print(
        "time, FLOPs: added to vanilla's on the same ranks; excess: their ratio; scaling: "
        "tokens/s/rank relative to the fewest ranks; spread: own work "
        "(data, forward) of the slowest rank over the quickest's"
    )


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f}%"


def _added(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.2f}%"
