"""The DeepSpeed JSON: what it owns, what RUN.yaml owns, and checks for contradictions.

RUN.yaml owns batch sizes, clipping, optimizer and schedule; the JSON owns ZeRO, precision and
communication. A key of the other's is accepted where it says the same, or `"auto"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sgt_ds.config.deepspeed_keys import NAMES_OF, check_keys
from sgt_ds.config.run import RunConfig
from sgt_ds.config.shipped import shipped_config, shipped_names
from sgt_ds.errors import UserError, refusal

Precision = Literal["bf16", "fp16", "fp32"]

SUPPORTED_STAGES = (0, 1, 2)


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration file: from the current directory, or as the package brings it.

    Raises: UserError where it is missing, is not a JSON object, or holds a key or a value that is
    none of DeepSpeed's.
    """
    if not path.exists():
        path = shipped_config(path) or path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            path,
            None,
            "no such DeepSpeed file; paths are relative to the current directory, and sgt-ds "
            f"ships {shipped_names('.json')}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, None, refusal(error, "read", "give a UTF-8 JSON file")) from None
    except RecursionError:
        raise UserError(path, None, "is nested too deeply; correct it") from None
    except json.JSONDecodeError as error:
        raise UserError(
            path, f"line {error.lineno}", f"is not valid JSON: {error.msg}; correct it"
        ) from None
    if not isinstance(values, dict):
        raise UserError(path, None, "must hold a JSON object, like ds_configs/zero2_bf16.json")
    _check_old_names(path, values)
    check_keys(path, values)
    return values


def _check_old_names(path: Path, values: dict[str, Any]) -> None:
    """Raises: UserError where a section is called what other versions and programs call it."""
    if "bfloat16" in values:
        raise UserError(path, "bfloat16", "is an old DeepSpeed name; write bf16")
    for key in {"fp8", "float8"} & values.keys():
        raise UserError(
            path, key, "is not a DeepSpeed section; remove it, and set training.fp8 in the run file"
        )


def resolve_deepspeed(
    config: RunConfig, world_size: int, config_file: str | Path
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize` at `world_size` ranks.

    `config_file`: name of the YAML, for messages.
    Raises: UserError where the batch does not divide, or JSON and YAML contradict each other.
    """
    path, values = config.deepspeed, read_deepspeed_json(config.deepspeed)
    _check_supported(config, values)
    accumulation = accumulation_steps(config, world_size, config_file)
    _take_own_keys(config, values, accumulation, config_file)
    values.setdefault("zero_allow_untested_optimizer", True)
    # One progress line of ours instead of DeepSpeed's.
    values.setdefault("steps_per_print", 10**9)
    _quiet_timers(path, values)
    if precision_of(values) == "bf16":
        _guard_bf16(path, values)
    return values


def _check_supported(config: RunConfig, values: dict[str, Any]) -> None:
    """Raises: UserError where the JSON asks for a stage or precision that is not trained here."""
    path, stage = config.deepspeed, _stage(values)
    if type(stage) is not int or stage not in SUPPORTED_STAGES:  # true is 1 to Python
        raise UserError(
            path, "zero_optimization.stage", f"{stage!r} is not supported; use 0, 1 or 2"
        )
    if precision_of(values) == "fp16":
        raise UserError(
            path, "fp16.enabled", "fp16 training is not supported; enable bf16 or neither"
        )
    if config.training.fp8 and precision_of(values) != "bf16":
        raise UserError(
            path,
            "bf16.enabled",
            "must be true for training.fp8; set it, or use ds_configs/zero2_bf16.json (on a CPU "
            "zero2_bf16_cpu.json), or set training.fp8=false",
        )
    _check_together(path, values)


def _check_together(path: Path, values: dict[str, Any]) -> None:
    """Raises: UserError where DeepSpeed takes each value, and not all of them together."""
    for fault in (*_faults_of_reduction(values), *_faults_of_precision(values)):
        raise UserError(path, *fault)


def _faults_of_reduction(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and messages."""
    zero = values.get("zero_optimization", {})
    scatters = _stage(values) == 2 and zero.get("reduce_scatter", True) is not False
    if scatters and values.get("gradient_allreduce_op", "mean") == "mean":
        if values.get("gradient_predivide_factor", 1) != 1:
            message = "must be 1 with zero_optimization.reduce_scatter; remove it"
            yield "gradient_predivide_factor", message
        if values.get("prescale_gradients", False):
            message = "must be false with zero_optimization.reduce_scatter; remove it"
            yield "prescale_gradients", message
    if zero.get("compute_grad_norm") is False:
        message = "must be true, for gradients are clipped and judged by their norm; remove it"
        yield "zero_optimization.compute_grad_norm", message
    offload = zero.get("offload_optimizer")
    offloads = isinstance(offload, dict) and offload.get("device", "none") != "none"
    if (offloads or zero.get("cpu_offload") is True) and values.get(
        "zero_force_ds_cpu_optimizer", True
    ):
        key = "offload_optimizer" if offloads else "cpu_offload"
        message = (
            "needs zero_force_ds_cpu_optimizer: false at the top level, for the optimizer is "
            "torch's AdamW; set that, or remove this"
        )
        yield f"zero_optimization.{key}", message


def _faults_of_precision(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and messages."""
    precision, data_types = precision_of(values), values.get("data_types", {})
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if values.get("bf16", {}).get(key) is True:
            message = "must be false, for master weights and moments are float32; remove it"
            yield f"bf16.{key}", message
    if data_types.get("param_dtype") not in (None, *NAMES_OF[precision]):
        message = f"contradicts the precision, which is {precision}; remove it"
        yield "data_types.param_dtype", message
    added_in = data_types.get("grad_accum_dtype")
    if _stage(values) == 0 and added_in not in (None, *NAMES_OF["fp32"]):
        yield "data_types.grad_accum_dtype", "must be fp32 with stage 0; remove it"


def _take_own_keys(
    config: RunConfig, values: dict[str, Any], accumulation: int, config_file: str | Path
) -> None:
    """Fill in what RUN.yaml owns. Raises: UserError where the JSON says otherwise."""
    path, training, optimizer = config.deepspeed, config.training, config.optimizer
    for key, value, owner in (
        ("train_batch_size", training.global_batch_size, "training.global_batch_size"),
        ("train_micro_batch_size_per_gpu", training.micro_batch_size, "training.micro_batch_size"),
        ("gradient_accumulation_steps", accumulation, "training.global_batch_size"),
        ("gradient_clipping", optimizer.clip, "optimizer.clip"),
    ):
        said = values.get(key, "auto")
        if said not in ("auto", value):
            raise UserError(
                path,
                key,
                f"{said} contradicts {config_file}: {owner}, which makes it {value}; remove it "
                "here",
            )
        values[key] = value
    for key in ("optimizer", "scheduler"):
        if key in values:
            raise UserError(
                path, key, f"contradicts {config_file}: optimizer, which owns it; remove it here"
            )


def _quiet_timers(path: Path, values: dict[str, Any]) -> None:
    # It waits for the device twice a micro-batch; `sgt_tokens_per_second` needs none of it.
    throughput = values.setdefault("timers", {}).setdefault("throughput", {})
    if not isinstance(throughput, dict) or not isinstance(
        throughput.setdefault("enabled", False), bool
    ):
        raise UserError(
            path, "timers.throughput", 'must be {"enabled": false} or true; correct or remove it'
        )


def _guard_bf16(path: Path, values: dict[str, Any]) -> None:
    """No inf gradient, and sums of micro-batches in fp32 unless the JSON says otherwise.

    What the ranks sum in, the JSON says. Raises: UserError where it lets an inf gradient through,
    or has a stage that cannot add up in fp32.
    """
    if _stage(values) == 0:
        raise UserError(
            path,
            "zero_optimization.stage",
            "0 under bf16 cannot accumulate gradients in fp32; use 1 or 2",
        )
    # Without it an inf under a finite loss reaches Adam.
    if values["bf16"].setdefault("check_grad_overflow", True) is not True:
        raise UserError(
            path,
            "bf16.check_grad_overflow",
            "must be true, or an inf gradient reaches weights and optimizer; remove it",
        )
    # Without it the micro-batches' gradients add up in bf16.
    values.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def _stage(values: dict[str, Any]) -> Any:
    return values.get("zero_optimization", {}).get("stage", 0)


def accumulation_steps(config: RunConfig, world_size: int, config_file: str | Path) -> int:
    """Micro-batches of one update on one rank.

    Raises: UserError naming the batch sizes that divide.
    """
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    together = micro * world_size  # sequences that all ranks take at a time
    if batch % together:
        remedies = []
        per_rank = [size for size in range(1, batch + 1) if batch % (size * world_size) == 0]
        if per_rank:
            remedies.append(f"set training.micro_batch_size to one of {per_rank[-8:]}")
        # A host more or less: the numbers of ranks nearest to this one that the batch can take.
        fitting = [ranks for ranks in range(1, batch // micro + 1) if batch % (micro * ranks) == 0]
        if fitting:
            near = sorted(sorted(fitting, key=lambda ranks: abs(ranks - world_size))[:6])
            remedies.append(f"train on {', '.join(map(str, near))} ranks")
        sizes = [
            size
            for size in (batch // together * together, -(-batch // together) * together)
            if size
        ]
        remedies.append(f"for a new run, set it to {' or '.join(map(str, sizes))}")
        raise UserError(
            config_file,
            "training.global_batch_size",
            f"{batch} is not a multiple of training.micro_batch_size {micro} × {world_size} ranks; "
            + ", or ".join(remedies),
        )
    return batch // together


def precision_of(deepspeed: dict[str, Any]) -> Precision:
    """Precision of the forward and backward pass that a DeepSpeed configuration asks for."""
    for name in ("bf16", "fp16"):
        if deepspeed.get(name, {}).get("enabled"):
            return name
    return "fp32"
