"""`sgt-ds bench train`: methods and numbers of ranks beside each other, in whole runs."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import Parser, Subparsers, add_command, print_json, whole_number
from sgt_ds.errors import UserError

if TYPE_CHECKING:
    from sgt_ds.config import RunConfig
    from sgt_ds.launch import RunFigures

# Of one host: more than any has GPUs.
MOST_RANKS = 1024
VARIANTS = ["vanilla", "sgt:1", "sgt:3"]


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "train",
        "Time whole runs through the launcher: methods beside vanilla, on 1, 2, … ranks.",
        "sgt-ds bench train run.yaml --num-gpus 1 2 4 8 --variants vanilla sgt:3",
        train,
    )
    parser.add_argument("run", type=Path, metavar="RUN.yaml", help="model, data, batch, DeepSpeed")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `sgt-ds train`")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=VARIANTS,
        metavar="V",
        help="vanilla, sgt:K (its fixed phase), attention_loop:K, block_loop:K",
    )
    parser.add_argument(
        "--num-gpus",
        nargs="+",
        type=whole_number(1, MOST_RANKS),
        default=[1],
        metavar="N",
        help="ranks",
    )
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1),
        default=1,
        metavar="A",
        help="of an update on each rank: the batch grows with the ranks (weak scaling)",
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number(1),
        metavar="G",
        help="sequences of an update at every number of ranks (strong scaling)",
    )
    parser.add_argument("--updates", type=whole_number(1), default=4, help="of one interval")
    parser.add_argument("--intervals", type=whole_number(1), default=5, help="timed, of each run")
    parser.add_argument("--warm-up", type=whole_number(1), default=1, help="intervals before them")
    parser.add_argument(
        "--repeats", type=whole_number(1), default=1, help="of all runs, in turned order"
    )
    parser.add_argument("--heads", type=whole_number(1), default=2, help="that loop in sgt:K")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="for the runs' own directories")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def train(options: argparse.Namespace) -> None:
    """Measure and print."""
    from sgt_ds.config import load_run_config
    from sgt_ds.launch import (
        GRADIENT_BYTES,
        RunWish,
        bench_collectives,
        bench_runs,
        ending_on_sigterm,
        variant,
        with_ratios,
    )

    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip(", ") == "":
        raise UserError(
            "CUDA_VISIBLE_DEVICES",
            None,
            "is set and names no GPU, but DeepSpeed's launcher would take the first ones all the "
            "same; name those that are free by number, or unset it",
        )
    config = load_run_config(options.run, options.overrides)
    micro = config.training.micro_batch_size
    global_batch = {
        ranks: options.global_batch or micro * options.micro_batches * ranks
        for ranks in options.num_gpus
    }
    for ranks, sequences in global_batch.items():
        if sequences % (micro * ranks):
            raise UserError(
                "--global-batch",
                None,
                f"{sequences} is no multiple of {micro} sequences on each of {ranks} ranks",
            )
    scratch: Path | None = options.scratch
    if (
        scratch is not None
        and scratch.exists()
        and (not scratch.is_dir() or any(scratch.iterdir()))
    ):
        raise UserError("--scratch", None, f"{scratch} is no empty directory; give a new one")
    for option, given in (("--variants", options.variants), ("--num-gpus", options.num_gpus)):
        if len(set(given)) < len(given):
            raise UserError(option, None, "names one twice; name each once, and use --repeats")
    variants = [variant(text, config.model.num_layers, options.heads) for text in options.variants]
    kept = scratch is not None
    scratch = scratch or Path(tempfile.mkdtemp(prefix="sgt-ds-bench-"))
    for chosen in variants:  # before the first run: a fault of the last one would cost the others
        load_run_config(options.run, [*options.overrides, *chosen.overrides])
    fewest = min(options.num_gpus)
    batch = f"training.global_batch_size={global_batch[fewest]}"
    setting = _setting(
        load_run_config(options.run, [*options.overrides, batch]), fewest, options.run
    )
    wish = RunWish(
        run_yaml=options.run,
        config=config,
        overrides=tuple(options.overrides),
        variants=tuple(variants),
        ranks=tuple(options.num_gpus),
        updates=options.updates,
        intervals=options.intervals,
        warm_up=options.warm_up,
        repeats=options.repeats,
        global_batch=global_batch,
        scratch=scratch,
    )
    bucket = setting["bucket_elements"] * GRADIENT_BYTES[setting["precision"]]
    figures: list[RunFigures] = []
    collectives: dict[int, Any] = {}
    with ending_on_sigterm():
        try:
            for run in bench_runs(wish):
                figures.append(run)
            if options.json:
                for ranks in options.num_gpus:
                    if ranks > 1:
                        collectives[ranks] = bench_collectives(ranks, bucket, scratch)
        finally:  # a run that failed, or was stopped, takes nothing from those before it
            if figures and options.json:
                runs = [run.as_json() for run in with_ratios(figures)]
                complete = len(runs) == options.repeats * len(variants) * len(options.num_gpus)
                print_json(
                    {
                        "setting": setting,
                        "complete": complete,
                        "runs": runs,
                        "collectives": collectives,
                    }
                )
            elif figures:
                _print_table(with_ratios(figures))
    if not kept:  # what failed stays, to be read
        shutil.rmtree(scratch)


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
        "bucket_elements": min(parameters, layout.reduce_bucket_size),
        "overlaps": layout.overlap_comm,
        # With it DeepSpeed gives every rank all sums in one call, and each keeps its own.
        "all_reduces": not scatters or zero.get("use_multi_rank_bucket_allreduce", True),
    }


def _print_table(figures: Sequence[RunFigures]) -> None:
    print(
        f"{'variant':18}{'ranks':>6}{'batch':>7}{'s/update':>10}{'tokens/s/rank':>15}{'MFU':>7}"
        f"{'time':>8}{'FLOPs':>8}{'excess':>8}{'scaling':>9}{'spread':>8}{'growth µs':>11}{'save s':>8}{'peak GB':>9}"
    )
    for run in figures:
        print(
            f"{run.variant:18}{run.ranks:6}{run.global_batch_size:7}{run.step_seconds:10.4f}"
            f"{run.tokens_per_second_per_rank:15,.0f}{_share(run.mfu_ratio):>7}"
            f"{_added(run.time_ratio):>8}{_added(run.flops_ratio):>8}"
            + (f"{run.excess:8.2f}" if run.excess is not None else f"{'':8}")
            + f"{_share(run.scaling_ratio):>9}{100 * run.rank_spread_ratio:7.1f}%"
            f"{1e6 * run.growth_collective_seconds:11,.0f}{run.checkpoint_seconds:8.2f}"
            + (f"{run.peak_memory_bytes / 1e9:9.1f}" if run.peak_memory_bytes else "")
        )
    for run in figures:
        shares = "  ".join(f"{part} {100 * share:.1f}%" for part, share in run.parts.items())
        print(f"parts of an update, {run.variant} on {run.ranks}: {shares}")
    print(
        "time, FLOPs: added to vanilla's on as many ranks; excess: the one over the other; "
        "scaling: tokens/s/rank over those of the fewest ranks"
    )


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f}%"


def _added(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.2f}%"
