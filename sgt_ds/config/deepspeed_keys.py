"""The keys of a DeepSpeed JSON and what may stand there: DeepSpeed 0.19's, which it is not asked.

It passes over a key that it does not know, and a value that it does not take ends a rank in a
traceback. A test compares these tables with the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sgt_ds.config.suggestions import nearest
from sgt_ds.errors import UserError


class Kind(NamedTuple):
    """What a key may hold. `words`: the end of "must be"."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    # 2e8 is how DeepSpeed's own examples write a bucket's size.
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _one_of(names: Iterable[str]) -> Kind:
    known = tuple(names)
    return Kind(f"one of {', '.join(known)}", lambda value: value in known)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _is_whole)
COUNT = Kind("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0)
SIZE = Kind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
FACTOR = Kind(
    "a number above 0", lambda value: type(value) in (int, float) and 0 < value < float("inf")
)
SECTION = Kind("an object", lambda value: isinstance(value, dict))
# Checked elsewhere, or not at all.
ANYTHING = Kind("anything", lambda value: True)

NAMES_OF: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
"""How DeepSpeed lets a data type be called."""
_DTYPE = _or_null(
    Kind(
        "one of fp32, bf16, fp16",
        lambda value: any(value in names for names in NAMES_OF.values()),
    )
)
_SENT_DTYPE = _or_null(
    Kind(
        "one of fp32, bf16, fp16",
        lambda value: isinstance(value, str) and value.lower() in ("fp32", "bf16", "fp16"),
    )
)

TOP_LEVEL: Mapping[str, Kind] = {
    # RUN.yaml owns them.
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), ANYTHING),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), ANYTHING),
    **dict.fromkeys(("optimizer", "scheduler"), ANYTHING),
    **dict.fromkeys(("bf16", "fp16", "zero_optimization", "data_types", "timers"), SECTION),
    **dict.fromkeys(
        ("communication_data_type", "seq_parallel_communication_data_type"), _SENT_DTYPE
    ),
    "gradient_allreduce_op": _one_of(("mean", "sum")),
    "gradient_predivide_factor": FACTOR,
    "steps_per_print": _or_null(SIZE),
    "vocabulary_size": _or_null(SIZE),
    "log_level": _or_null(_one_of(("debug", "info", "warning", "error", "critical"))),
    **dict.fromkeys(("prescale_gradients", "disable_allgather", "dump_state"), FLAG),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "disable_python_gc"), FLAG),
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), FLAG),
    **dict.fromkeys(("managed_gradient_accumulation", "dataloader_drop_last"), FLAG),
    "use_data_before_expert_parallelism": FLAG,
    **dict.fromkeys(("activation_checkpointing", "aio", "autotuning", "checkpoint"), SECTION),
    **dict.fromkeys(("comms_logger", "compile", "data_efficiency", "datastates_ckpt"), SECTION),
    **dict.fromkeys(("comet", "csv_monitor", "tensorboard", "wandb"), SECTION),
    **dict.fromkeys(("expert_parallel", "flops_profiler", "hybrid_engine", "pipeline"), SECTION),
    **dict.fromkeys(("tensor_parallel", "torch_autocast", "weight_quantization"), SECTION),
}

_STAGE_3_COUNTS = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance"),
)
_STAGE_3_FLAGS = (
    *("gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params"),
    "allgather_sequential",
)
_ZERO: Mapping[str, Kind] = {
    "stage": ANYTHING,
    "reduce_bucket_size": SIZE,
    **dict.fromkeys(("allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"), COUNT),
    **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "allgather_partitions"), FLAG),
    **dict.fromkeys(("use_multi_rank_bucket_allreduce", "compute_grad_norm"), FLAG),
    **dict.fromkeys(("load_from_fp32_weights", "elastic_checkpoint", "legacy_stage1"), FLAG),
    **dict.fromkeys(("ignore_unused_parameters", "round_robin_gradients"), FLAG),
    **dict.fromkeys(("parameter_alignment", "zero_quantized_weights"), FLAG),
    **dict.fromkeys(("zero_quantized_nontrainable_weights", "zero_quantized_gradients"), FLAG),
    **dict.fromkeys(("memory_efficient_linear", "pipeline_loading_checkpoint"), FLAG),
    **dict.fromkeys(("override_module_apply", "log_trace_cache_warnings"), FLAG),
    **dict.fromkeys(("enable_sanity_checks", "save_muon_momentum_buffer_in_memory"), FLAG),
    "stage3_gather_fp16_weights_on_model_save": FLAG,
    **dict.fromkeys(("overlap_comm", "cpu_offload", "cpu_offload_param"), _or_null(FLAG)),
    "cpu_offload_use_pin_memory": _or_null(FLAG),
    **dict.fromkeys(("offload_param", "offload_optimizer", "zenflow"), _or_null(SECTION)),
    "leaf_module": SECTION,
    **{f"{prefix}{key}": COUNT for key in _STAGE_3_COUNTS for prefix in ("", "stage3_")},
    **{f"{prefix}{key}": FLAG for key in _STAGE_3_FLAGS for prefix in ("", "stage3_")},
    **dict.fromkeys(("module_granularity_threshold", "stage3_module_granularity_threshold"), WHOLE),
}
SECTIONS: Mapping[str, Mapping[str, Kind]] = {
    "zero_optimization": _ZERO,
    "bf16": {
        **dict.fromkeys(("enabled", "immediate_grad_update", "check_grad_overflow"), FLAG),
        **dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), FLAG),
    },
    # Refused where it is enabled.
    "fp16": {
        "enabled": FLAG,
        **dict.fromkeys(("auto_cast", "loss_scale", "initial_scale_power"), ANYTHING),
        **dict.fromkeys(("loss_scale_window", "hysteresis", "min_loss_scale"), ANYTHING),
        **dict.fromkeys(("consecutive_hysteresis", "fp16_master_weights_and_grads"), ANYTHING),
    },
    "data_types": {
        **dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), _DTYPE),
        "keep_in_fp32_modules": Kind(
            '"auto" or a list of names',
            lambda value: (
                value == "auto"
                or (isinstance(value, list) and all(isinstance(name, str) for name in value))
            ),
        ),
    },
    "timers": {"throughput": ANYTHING},
}
# Of these DeepSpeed takes "auto" for a key that is not there.
_TAKE_AUTO = frozenset({"zero_optimization", "bf16", "fp16"})


def check_keys(path: Path, values: Mapping[str, Any]) -> None:
    """Raises: UserError where a key is none of DeepSpeed's, or its value none that it takes."""
    _check(path, values, TOP_LEVEL, "")
    for section, known in SECTIONS.items():
        _check(path, values.get(section, {}), known, section)


def _check(path: Path, values: Mapping[str, Any], known: Mapping[str, Kind], section: str) -> None:
    for key, value in values.items():
        field = f"{section}.{key}" if section else key
        if key not in known:
            where = f"of {section}" if section else "of DeepSpeed"
            raise UserError(path, field, f"is not a key {where}{_hint(key, known)}")
        automatic = value == "auto" and section in _TAKE_AUTO and key != "enabled"
        if not automatic and not known[key].holds(value):
            message = f"must be {known[key].words} (got {value!r}); correct or remove it"
            raise UserError(path, field, message)


def _hint(key: str, known: Mapping[str, Kind]) -> str:
    """What was meant, as the end of a message."""
    if near := nearest(key, known, cutoff=0.8):
        return near
    if key in TOP_LEVEL:
        return f"; did you mean '{key}' at the top level, not in a section?"
    for section, keys in SECTIONS.items():
        if key in keys:
            return f"; did you mean '{section}.{key}'?"
    return nearest(key, known, cutoff=0.6) or "; remove it"
