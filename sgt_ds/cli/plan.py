"""`sgt-ds plan`: FLOPs, growth, memory, time and cost of a run before you rent a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgt_ds.cli.frame import (
    Parser,
    Subparsers,
    add_command,
    add_run,
    print_json,
    real_number,
)
from sgt_ds.cli.growth_settings import (
    GROWTH_KEYS,
    add_growth_flags,
    check_used,
    count,
    flag_of,
    numbers,
)
from sgt_ds.errors import HERE, UserError
from sgt_ds.progress import counted

if TYPE_CHECKING:
    from sgt_ds.config import GrowthConfig, ModelConfig, RunConfig
    from sgt_ds.flops import Layout, Plan, Speed

GROWTH_FLAGS = (*GROWTH_KEYS, "entropy_every")

# Flags and the keys of a run that they stand for.
KEYS = {
    **{flag: f"growth.{flag}" for flag in GROWTH_FLAGS},
    "preset": "preset",
    "method": "method",
    "vocab_size": "model.vocab_size",
    "seq_len": "data.sequence_length",
    "global_batch": "training.global_batch_size",
    "steps": "training.steps",
    "micro_batch_size": "training.micro_batch_size",
    "activation_checkpointing": "training.activation_checkpointing",
    "compile": "training.compile",
}

_positive = real_number(0, 1e12, above=True)
_ratio = real_number(0, 1, above=True)


def register(commands: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "plan",
        "Predict a run's FLOPs, growth, memory, time and cost.",
        "sgt-ds plan --preset 573m --method sgt --k-max 3 --world-size 8 --mfu 0.4 "
        "--peak-tflops 989\n  sgt-ds plan RUN.yaml growth.k_max=2 --json",
        show,
    )
    add_run(parser, "plan this run", optional=True)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    _add_run_flags(parser)
    _add_growth_flags(parser)
    _add_layout_flags(parser)
    speed = parser.add_argument_group("time and cost")
    speed.add_argument("--mfu", type=_ratio, help="model FLOPs utilisation, above 0 and up to 1")
    speed.add_argument("--peak-tflops", type=_positive, help="peak of one GPU, in 10^12 FLOP/s")
    speed.add_argument("--price-per-gpu-hour", type=_positive, help="in any currency")


def _add_run_flags(parser: Parser) -> None:
    run = parser.add_argument_group("the run (defaults: the paper's; with RUN.yaml: its values)")
    run.add_argument("--preset", help="shape of the model (default: 573m)")
    run.add_argument("--method", help="growth policy (default: sgt)")
    run.add_argument("--vocab-size", type=count, help="number of tokenizer ids")
    run.add_argument("--seq-len", type=count, help="sequence length")
    run.add_argument("--global-batch", type=count, help="sequences per update")
    run.add_argument("--steps", type=count, help="updates in the whole run")
    run.add_argument(
        "--schedule",
        choices=("earliest", "latest", "lower"),
        default="earliest",
        help="when growth happens: at every window (default), as late as still fits, or never "
        "after the first layer",
    )
    run.add_argument("--journal", type=Path, help="take growth from this journal or run directory")


def _add_growth_flags(parser: Parser) -> None:
    growth = parser.add_argument_group("growth (RUN.yaml's keys of that name)")
    add_growth_flags(growth)
    growth.add_argument(
        "--exclude-layers", type=numbers, metavar="N,N", help="layers that never loop: 0,1"
    )
    growth.add_argument("--entropy-every", type=count, help="updates between measurements")


def _add_layout_flags(parser: Parser) -> None:
    layout = parser.add_argument_group("memory")
    layout.add_argument(
        "--world-size",
        type=count,
        help="number of ranks (default: 1 with RUN.yaml, else 8 or the largest smaller number "
        "that divides the batch)",
    )
    layout.add_argument("--micro-batch-size", type=count, help="sequences per forward pass")
    layout.add_argument("--zero-stage", type=int, choices=(0, 1, 2), help="ZeRO stage (default: 2)")
    layout.add_argument(
        "--precision", choices=("bf16", "fp32"), help="training precision (default: bf16)"
    )
    layout.add_argument(
        "--reduce-bucket-size",
        type=count,
        help="elements per gradient bucket (default: as in ds_configs/)",
    )
    layout.add_argument(
        "--activation-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute blocks in the backward pass",
    )
    layout.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile the blocks (default: yes)"
    )


def show(options: argparse.Namespace) -> None:
    """Print the plan."""
    from sgt_ds.flops import table

    result, preset = _plan(options)
    if options.json:
        print_json({"preset": preset, **result.as_json()})
    else:
        print(table(result, preset, ranks_assumed=options.world_size is None))


def _plan(options: argparse.Namespace) -> tuple[Plan, str | None]:
    """The plan, and the name of the preset where the shape is one."""
    from sgt_ds.config import PRESETS, load_run_config
    from sgt_ds.flops import PAPER_PRESET, Recipe, plan, recipe_of_journal, recipe_of_run
    from sgt_ds.growth import POLICIES, check_method, check_whole, journal_in, read_journal

    _check_known("--preset", options.preset, tuple(PRESETS))
    _check_known("--method", options.method, tuple(POLICIES))
    config: RunConfig | None = None
    journal = None if options.journal is None else journal_in(options.journal)
    if journal is not None and (header := read_journal(journal, live=True)[0]) is not None:
        check_whole(journal, header)
    preset: str | None = options.preset
    if options.run is not None:
        if "=" in str(options.run):
            raise UserError(
                HERE, str(options.run), "is an override, which needs RUN.yaml before it"
            )
        _check_said_once(options)
        config = load_run_config(options.run, options.overrides)
        check_method(config.method, str(options.run))
        recipe, preset = recipe_of_run(config), preset or config.preset
    elif journal is not None:
        recipe = recipe_of_journal(journal)
    else:
        recipe, preset = Recipe(), preset or PAPER_PRESET
    model = PRESETS[options.preset] if options.preset else recipe.model
    if options.vocab_size:
        model = model.model_copy(update={"vocab_size": options.vocab_size})
    method: str = options.method or recipe.method
    global_batch = options.global_batch or recipe.global_batch_size
    source = HERE if options.run is None else str(options.run)
    growth = _growth(options, recipe.growth, method, model, source)
    sequence_length = options.seq_len or recipe.sequence_length
    warnings = [] if config is None else _data_warnings(config, model, sequence_length)
    result = plan(
        model,
        method,
        growth,
        sequence_length=sequence_length,
        global_batch_size=global_batch,
        steps=options.steps or recipe.steps,
        layout=_layout(options, config, source, global_batch),
        warmup_steps=recipe.warmup_steps,
        assumption=options.schedule,
        journal=journal,
        speed=_speed(options),
    )
    asked = recipe.growth.layers if options.layers is None else options.layers
    if options.run is not None and isinstance(asked, int) and isinstance(growth.layers, list):
        warnings.append(
            f"training by {method} takes growth.layers as a list; this is planned for any "
            f"{counted(len(growth.layers), 'layer')}"
        )
    return replace(result, warnings=(*result.warnings, *warnings)), preset


def _data_warnings(config: RunConfig, model: ModelConfig, sequence_length: int) -> list[str]:
    """What is said of data that are not here: a plan needs none, training does.

    Raises: UserError where those that are here can't train what is planned.
    """
    from sgt_ds.data import check_data_here

    planned = config.data.model_copy(update={"sequence_length": sequence_length})
    absent = check_data_here(planned, model)
    if not absent:
        return []
    key, path = absent[0]
    more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
    return [
        f"{key}: {path} is not on this machine{more}; `sgt-ds train` needs it, and checks then "
        "whether it fits the model"
    ]


def _check_said_once(options: argparse.Namespace) -> None:
    """Raises: UserError where a flag and an override give the same key: one would be lost."""
    given = {key: flag for flag, key in KEYS.items() if getattr(options, flag) is not None}
    for override in options.overrides:
        name = override.partition("=")[0]
        for key, flag in given.items():
            shape = key == "preset" and name.partition(".")[0] == "model"
            if shape or f"{key}.".startswith(f"{name}."):
                message = f"conflicts with {override}, which sets the same key; give one of them"
                no = "no-" if getattr(options, flag) is False else ""
                raise UserError(HERE, f"--{no}{flag.replace('_', '-')}", message)


def _check_known(flag: str, value: str | None, known: tuple[str, ...]) -> None:
    from sgt_ds.config import nearest

    if value is not None and value not in known:
        hint = f"{nearest(value, known)}; known: {', '.join(known)}"
        raise UserError(HERE, flag, f"'{value}' is unknown{hint}")


def _growth(
    options: argparse.Namespace,
    base: GrowthConfig,
    method: str,
    model: ModelConfig,
    source: str,
) -> GrowthConfig:
    """The growth settings, checked against method and model."""
    from pydantic import ValidationError

    from sgt_ds.config import GrowthConfig, growth_faults, in_plain_words

    given = {key: value for key in GROWTH_FLAGS if (value := getattr(options, key)) is not None}
    check_used(HERE, method, given)
    values = {**base.model_dump(), **given}
    if method not in ("sgt", "vanilla") and isinstance(values["layers"], int):
        # Which layers loop changes no FLOPs: any so many of those that may.
        able = [n for n in range(model.num_layers) if n not in values["exclude_layers"]]
        if values["layers"] > len(able):
            raise UserError(
                HERE, "--layers", f"{values['layers']} exceeds the {len(able)} eligible layers"
            )
        values["layers"] = able[: values["layers"]]
    try:
        growth = GrowthConfig.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        key = str(detail["loc"][0])
        message = f"{in_plain_words(detail)} (got {values[key]!r})"
        raise UserError(HERE, flag_of(key), message) from None
    for key, fault in growth_faults(method, growth, model):
        mine = source == HERE or key in given
        raise UserError(*((HERE, flag_of(key)) if mine else (source, f"growth.{key}")), fault)
    return growth


def _layout(
    options: argparse.Namespace, config: RunConfig | None, source: str, global_batch: int
) -> Layout:
    from sgt_ds.flops import Layout, layout_of_run

    if config is None:
        world_size = options.world_size or _divisor(global_batch, 8)
        if global_batch % world_size:
            raise UserError(
                HERE,
                "--world-size",
                f"{world_size} ranks do not divide the {global_batch} sequences of an update; "
                f"{_nearby_divisors(global_batch, world_size)}",
            )
        micro = options.micro_batch_size or _divisor(global_batch // world_size, 8)
        layout = Layout(world_size=world_size, micro_batch_size=micro)
    else:
        layout = layout_of_run(config, options.world_size or 1, source)
        layout = replace(
            layout, micro_batch_size=options.micro_batch_size or layout.micro_batch_size
        )
    if global_batch % (layout.world_size * layout.micro_batch_size):
        field = "--micro-batch-size" if options.micro_batch_size else "training.micro_batch_size"
        raise UserError(
            HERE if options.micro_batch_size else source,
            field,
            f"{layout.micro_batch_size} × {layout.world_size} ranks does not divide the "
            f"{global_batch} sequences of an update; choose another number",
        )
    given: dict[str, Any] = {
        "zero_stage": options.zero_stage,
        "precision": options.precision,
        "reduce_bucket_size": options.reduce_bucket_size,
        "activation_checkpointing": options.activation_checkpointing,
        "compiled": options.compile,
    }
    return replace(layout, **{key: value for key, value in given.items() if value is not None})


def _speed(options: argparse.Namespace) -> Speed | None:
    from sgt_ds.flops import Speed

    if options.mfu is None and options.peak_tflops is None and options.price_per_gpu_hour is None:
        return None
    for flag, value in (("--mfu", options.mfu), ("--peak-tflops", options.peak_tflops)):
        if value is None:
            raise UserError(
                HERE, flag, "is missing: the time estimate needs --mfu and --peak-tflops"
            )
    return Speed(options.mfu, options.peak_tflops, options.price_per_gpu_hour)


def _nearby_divisors(number: int, size: int) -> str:
    """What to give in place of `size`, which does not divide `number`."""
    below = _divisor(number, size)
    above = next((each for each in range(size + 1, number + 1) if number % each == 0), None)
    return f"give {below}" + ("" if above is None else f" or {above}")


def _divisor(number: int, most: int) -> int:
    """The greatest divisor of `number` up to `most`."""
    return next(size for size in range(min(most, number), 0, -1) if number % size == 0)
