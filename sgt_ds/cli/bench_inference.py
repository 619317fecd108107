"""`sgt-ds bench inference`: prefill and decode of exports, with and without loops."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    chosen_device,
    print_json,
    whole_number,
)
from sgt_ds.config import PRESETS
from sgt_ds.errors import UserError
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from sgt_ds.inference import InferenceRow, InferenceSetting


def register(group: Subparsers[Parser]) -> None:
    """Add the command to the group `bench`."""
    parser = add_command(
        group,
        "inference",
        "Time prefill and decode of exports: vanilla beside loops, interleaved.",
        "sgt-ds bench inference --preset 573m --dtype bf16 --device cuda",
        inference,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="demo", help="model shape")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["sgt:1", "sgt:2", "sgt:3", "block_loop:1"],
        metavar="V",
        help="compared with vanilla: sgt:K, attention_loop:K, block_loop:K",
    )
    parser.add_argument(
        "--layers",
        type=whole_number(1),
        default=3,
        help="number of looping layers, the deepest ones",
    )
    parser.add_argument("--heads", type=whole_number(1), default=2, help="heads that loop (SGT)")
    parser.add_argument(
        "--batch",
        type=whole_number(1, 10**6),
        nargs="+",
        default=[1, 2, 4],
        metavar="B",
        help="batch sizes, one or more",
    )
    parser.add_argument(
        "--prompt",
        type=whole_number(1, 10**6),
        default=128,
        metavar="N",
        help="prompt length in tokens",
    )
    parser.add_argument(
        "--generate", type=whole_number(1, 10**6), default=128, metavar="N", help="tokens decoded"
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of weights and activations"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto uses a GPU if there is one",
    )
    parser.add_argument(
        "--mode",
        choices=["auto", "eager", "compiled"],
        default="auto",
        help="compiled: static cache, and CUDA graphs on a GPU (auto: compiled on a GPU)",
    )
    parser.add_argument(
        "--rounds", type=whole_number(1, 10**6), default=5, help="rounds over all cases"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def inference(options: argparse.Namespace) -> None:
    """Measure and print."""
    import torch

    from sgt_ds.inference import InferenceSetting, bench_inference
    from sgt_ds.launch import ending_on_sigterm

    if len(set(options.variants)) < len(options.variants):
        raise UserError("--variants", None, "names one twice; name each once")
    device = chosen_device(options.device)
    compiled = device == "cuda" if options.mode == "auto" else options.mode == "compiled"
    setting = InferenceSetting(
        model=PRESETS[options.preset],
        variants=tuple(options.variants),
        layers=options.layers,
        heads=options.heads,
        batches=tuple(options.batch),
        prompt=options.prompt,
        generated=options.generate,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
        device=torch.device(device),
        compiled=compiled,
        rounds=options.rounds,
    )
    rows: list[InferenceRow] = []
    with ending_on_sigterm():
        try:
            for row in bench_inference(setting):
                rows.append(row)
        except (KeyboardInterrupt, SystemExit):
            if not rows:
                message = "stopped before all rounds of the first batch size: there are no rows"
                print(f"sgt-ds bench inference: {message}", file=sys.stderr)
            raise
        finally:  # what is known when it is stopped, too
            if options.json and rows:
                print_json(_as_json(options, setting, rows))
            elif rows:
                _print_table(options, setting, rows)


def _as_json(
    options: argparse.Namespace, setting: InferenceSetting, rows: Sequence[InferenceRow]
) -> dict[str, Any]:
    return {
        "preset": options.preset,
        "dtype": options.dtype,
        "device": setting.device.type,
        "compiled": setting.compiled,
        "prompt": setting.prompt,
        "generated": setting.generated,
        "rounds": setting.rounds,
        "complete": len(rows) == len(setting.batches) * len(setting.loops()),
        "rows": [row.as_json() for row in rows],
    }


def _print_table(
    options: argparse.Namespace, setting: InferenceSetting, rows: Sequence[InferenceRow]
) -> None:
    print(
        f"{options.preset}, {options.dtype}, {setting.device.type}, "
        f"{'compiled' if setting.compiled else 'eager'}, prompt {setting.prompt}, "
        f"generation {setting.generated}, median of {counted(setting.rounds, 'round')}; "
        "× is tokens/s by vanilla's"
    )
    for row in rows:
        low, high = row.decode_ratio_quartiles
        print(
            f"batch {row.batch}  {row.case:<18} prefill {row.prefill_tokens_per_second:>10,.0f} "
            f"tokens/s ×{row.prefill_ratio:.3f}   decode {row.decode_tokens_per_second:>8,.0f} "
            f"tokens/s ×{row.decode_ratio:.3f} ({low:.3f}–{high:.3f})"
        )
