"""Typed run configuration: presets, RUN.yaml, overrides, DeepSpeed JSON. Imports no package."""

from sgt_ds.config.deepspeed import (
    Precision,
    accumulation_steps,
    precision_of,
    read_deepspeed_json,
    resolve_deepspeed,
)
from sgt_ds.config.evaluation import EvaluationConfig, TaskSource, TextSource
from sgt_ds.config.float8 import float8_faults
from sgt_ds.config.growth import (
    Direction,
    Entry,
    FromJournal,
    GrowthConfig,
    growth_faults,
    unused_key,
)
from sgt_ds.config.launcher import (
    launcher_number,
    told_local_size,
    told_rank,
    told_world_size,
)
from sgt_ds.config.layout import RunLayout
from sgt_ds.config.loading import (
    at_fault,
    config_differences,
    config_hash,
    dump_run_config,
    key_of_path,
    load_run_config,
)
from sgt_ds.config.messages import in_plain_words
from sgt_ds.config.model import PRESETS, ModelConfig
from sgt_ds.config.run import (
    CheckpointConfig,
    DataConfig,
    DataSource,
    OptimizerConfig,
    RunConfig,
    TelemetryConfig,
    TrainingConfig,
    WandbConfig,
)
from sgt_ds.config.run_directory import (
    check_only_run,
    check_run_directory,
    prepare_run_directory,
    save_run_config,
    start_warnings,
)
from sgt_ds.config.shipped import shipped_config, shipped_hostfile
from sgt_ds.config.start import check_start
from sgt_ds.config.suggestions import nearest
from sgt_ds.config.variants import parse_variant

__all__ = [
    "PRESETS",
    "CheckpointConfig",
    "DataConfig",
    "DataSource",
    "Direction",
    "Entry",
    "EvaluationConfig",
    "FromJournal",
    "GrowthConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Precision",
    "RunConfig",
    "RunLayout",
    "TaskSource",
    "TelemetryConfig",
    "TextSource",
    "TrainingConfig",
    "WandbConfig",
    "accumulation_steps",
    "at_fault",
    "check_only_run",
    "check_run_directory",
    "check_start",
    "config_differences",
    "config_hash",
    "dump_run_config",
    "float8_faults",
    "growth_faults",
    "in_plain_words",
    "key_of_path",
    "launcher_number",
    "load_run_config",
    "nearest",
    "parse_variant",
    "precision_of",
    "prepare_run_directory",
    "read_deepspeed_json",
    "resolve_deepspeed",
    "save_run_config",
    "shipped_config",
    "shipped_hostfile",
    "start_warnings",
    "told_local_size",
    "told_rank",
    "told_world_size",
    "unused_key",
]
