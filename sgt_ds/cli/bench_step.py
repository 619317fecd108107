"""`sgt-ds bench step`: one training step of some methods compared with vanilla."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from sgt_ds.cli.bench_step_profile import print_profiles
from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    chosen_device,
    print_json,
    warn,
    whole_number,
)
from sgt_ds.config import (
    PRESETS,
    Entry,
    GrowthConfig,
    float8_faults,
    growth_faults,
    parse_variant,
)
from sgt_ds.errors import UserError
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sgt_ds.training import Row, Setting

MODES = {"both": ("eager", "compiled"), "eager": ("eager",), "compiled": ("compiled",)}


def register(group: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        group,
        "step",
        "Compare the time of one training step with vanilla's, and with what its FLOPs predict.",
        "sgt-ds bench step --preset demo --variants sgt:2 --micro-batch-size 8 --seq-len 256",
        step,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="model shape")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["sgt:1", "sgt:3"],
        metavar="V",
        help="compared with vanilla, which always runs: sgt:K (its fixed phase), attention_loop:K, "
        "block_loop:K",
    )
    parser.add_argument(
        "--layers",
        type=whole_number(1),
        default=3,
        help="number of looping layers, the deepest ones",
    )
    parser.add_argument("--heads", type=whole_number(1), default=2, help="heads that loop (SGT)")
    parser.add_argument(
        "--entering",
        nargs="+",
        choices=[entry for entry in get_args(Entry) if entry != "none"],
        default=[],
        metavar="ENTRY",
        help="also time one layer's first entry window: decay, ramp",
    )
    parser.add_argument(
        "--micro-batch-size", type=whole_number(1), default=8, help="sequences per forward pass"
    )
    parser.add_argument(
        "--micro-batches",
        type=whole_number(1),
        default=1,
        help="micro-batches accumulated before each optimizer step; with several, the device has "
        "work queued, as in a run",
    )
    parser.add_argument("--seq-len", type=whole_number(1), default=256, help="sequence length")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of weights and activations"
    )
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="compute the blocks' matrix products in float8; needs --dtype bf16",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto uses a GPU if there is one",
    )
    parser.add_argument(
        "--mode", choices=list(MODES), default="both", help="with or without torch.compile"
    )
    parser.add_argument(
        "--rounds", type=whole_number(1), default=10, help="timed steps of each case"
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        type=whole_number(1),
        const=3,
        metavar="STEPS",
        help="after the rounds, profile some steps of each case (3 if no number is given): device "
        "time by part and by kernel, and what the case adds to vanilla's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def step(options: argparse.Namespace) -> None:
    """Measure and print."""
    model = PRESETS[options.preset]
    for variant in options.variants:
        parse_variant(variant)  # before the seconds that torch takes to load
    growth = GrowthConfig(layers=options.layers, heads=options.heads)
    for key, fault in growth_faults("sgt", growth, model):
        raise UserError(f"--{key.replace('_', '-')}", None, fault)

    if options.profile:
        # torch's profiler tells each start and end on stderr, between the lines of progress.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import torch

    # DeepSpeed, which this package loads, logs to what stdout is at its import: keep it out of --json.
    with contextlib.redirect_stdout(sys.stderr):
        from sgt_ds.training import Setting, bench_as_json, bench_step, measure_roofline

    device = chosen_device(options.device)
    setting = Setting(
        model=model,
        variants=tuple(options.variants),
        layers=options.layers,
        heads=options.heads,
        entering=tuple(options.entering),
        micro_batch_size=options.micro_batch_size,
        micro_batches=options.micro_batches,
        sequence_length=options.seq_len,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
        device=torch.device(device),
        rounds=options.rounds,
        modes=MODES[options.mode],
        fp8=options.fp8,
        profiled_steps=options.profile or 0,
    )
    if setting.fp8:
        _check_float8(setting)
    rows, profiles = bench_step(setting)
    document = {
        "preset": options.preset,
        **bench_as_json(setting, rows, profiles),
        "roofline": asdict(measure_roofline(setting.device, setting.dtype)),
    }
    if options.json:
        print_json(document)
    else:
        _print_table(document, rows)
        print_profiles(rows, profiles)


def _check_float8(setting: Setting) -> None:
    import torch

    from sgt_ds.model import float8_fault

    if setting.dtype is not torch.bfloat16:
        raise UserError("--fp8", None, "needs --dtype bf16; give both")
    for _, fault in float8_faults(setting.model, setting.sequence_length):
        raise UserError("--seq-len", None, fault)  # the presets' own sizes are multiples
    if lacking := float8_fault(setting.device):
        raise UserError("--fp8", None, f"there is {lacking}; leave it out")
    if setting.device.type == "cpu":
        warn("bench step", ["--fp8: a CPU emulates float8, many times slower than bf16"])


def _print_table(document: dict[str, Any], rows: Sequence[Row]) -> None:
    print(
        f"{document['preset']}: {document['parameters']:,} parameters, "
        f"{counted(document['micro_batches'], 'micro-batch')} of {document['micro_batch_size']} x {document['sequence_length']} a step, "
        f"{document['dtype']}{', products in float8' if document['fp8'] else ''}, "
        f"{document['device']} ({counted(document['threads'], 'thread')}), torch {document['torch']}, "
        f"median of {counted(document['rounds'], 'round')} after "
        f"{counted(document['warm_up_steps'], 'warm-up step')}"
    )
    print(
        f"{'':9}{'case':22}{'ms/step':>9}{'quartiles':>16}{'tokens/s':>11}{'peak MB':>9}"
        f"{'step':>8}{'fwd+bwd':>9}{'FLOPs':>8}{'excess':>8}{'roof':>7}"
    )
    roof = document["roofline"]["product_flops_per_second"]
    for row in rows:
        low, high = (1000 * seconds for seconds in row.step_seconds_quartiles)
        peak = "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f}"
        print(
            f"{row.mode:9}{row.case + ('' if row.entropy else ', no entropies'):22}"
            f"{1000 * row.step_seconds:9.1f}{f'{low:.1f}-{high:.1f}':>16}"
            f"{row.tokens_per_second:11,.0f}{peak:>9}{row.time_ratio:8.3f}"
            f"{row.forward_backward_ratio:9.3f}{row.flops_ratio:8.3f}"
            + (f"{row.excess:8.2f}" if row.excess is not None else f"{'':8}")
            + f"{100 * row.flops_per_second / roof:6.1f}%"
        )
    print("step, fwd+bwd, FLOPs: ratios to vanilla; excess: (fwd+bwd - 1) / (FLOPs - 1)")
    copied = document["roofline"]["copy_bytes_per_second"]
    print(
        "roof: FLOPs/s relative to a plain matrix product of "
        f"{document['roofline']['product_size']}³, "
        f"{roof / 1e12:.4g} TFLOP/s (a plain copy reads and writes {copied / 1e12:.3g} TB/s)"
    )
