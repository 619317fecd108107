"""Launching: hostfiles, checks before the start, the deepspeed command, supervision, stopping."""

from sgt_ds.launch.bench_launch import (
    check_overrides,
    ending_on_sigterm,
    gpu_arguments,
    launch_one,
    make_scratch,
    path_override,
    scratch_for,
)
from sgt_ds.launch.checks import (
    check_build_locks,
    check_compiler,
    check_launch,
    check_named_checkpoints,
    check_side_folders,
    fork_step,
)
from sgt_ds.launch.command import (
    DEFAULT_MASTER_PORT,
    Launcher,
    Target,
    deepspeed_command,
    is_this_host,
    master_address,
)
from sgt_ds.launch.environment import (
    forwarded_environment,
    forwarding_warnings,
    read_environment_file,
)
from sgt_ds.launch.forecast import (
    GRADIENT_BYTES,
    Forecast,
    Link,
    Network,
    Point,
    StepModel,
    StepSetting,
    check_model,
    fit_model,
    forecast,
    link_of,
)
from sgt_ds.launch.hostfile import Host, format_hostfile, is_hostfile, parse_hostfile, world_size
from sgt_ds.launch.probe import Probed, probe, table
from sgt_ds.launch.processes import RUN_ID_VARIABLE, kill_processes, processes_of
from sgt_ds.launch.record import RunRecord, read_record, supervision
from sgt_ds.launch.run_bench import (
    RunFigures,
    RunSetting,
    bench_collectives,
    bench_roofline,
    bench_runs,
    own_overrides,
    variant,
    with_ratios,
)
from sgt_ds.launch.run_processes import check_unattended
from sgt_ds.launch.stop import check_not_complete, stop
from sgt_ds.launch.supervisor import Launch, supervise
from sgt_ds.launch.watch import launch_name

__all__ = [
    "DEFAULT_MASTER_PORT",
    "GRADIENT_BYTES",
    "RUN_ID_VARIABLE",
    "Forecast",
    "Host",
    "Launch",
    "Launcher",
    "Link",
    "Network",
    "Point",
    "Probed",
    "RunFigures",
    "RunRecord",
    "RunSetting",
    "StepModel",
    "StepSetting",
    "Target",
    "bench_collectives",
    "bench_roofline",
    "bench_runs",
    "check_build_locks",
    "check_compiler",
    "check_launch",
    "check_model",
    "check_named_checkpoints",
    "check_not_complete",
    "check_overrides",
    "check_side_folders",
    "check_unattended",
    "deepspeed_command",
    "ending_on_sigterm",
    "fit_model",
    "forecast",
    "fork_step",
    "format_hostfile",
    "forwarded_environment",
    "forwarding_warnings",
    "gpu_arguments",
    "is_hostfile",
    "is_this_host",
    "kill_processes",
    "launch_name",
    "launch_one",
    "link_of",
    "make_scratch",
    "master_address",
    "own_overrides",
    "parse_hostfile",
    "path_override",
    "probe",
    "processes_of",
    "read_environment_file",
    "read_record",
    "scratch_for",
    "stop",
    "supervise",
    "supervision",
    "table",
    "variant",
    "with_ratios",
    "world_size",
]
