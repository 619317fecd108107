"""One rank's updates under torch's profiler, with telemetry and without it by turns.

Prints a JSON line an update: its step, whether telemetry was there, and how often the host asked
the device for something that it has to wait for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from sgt_ds.config import load_run_config, prepare_run_directory
from sgt_ds.training import Heartbeat, build_trainer, join_ranks, leave_ranks

# The reading of a device's value by the host, and what CUDA calls waiting.
WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal")
CUDA_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

config = load_run_config(Path(sys.argv[1]))
ranks = join_ranks(60)
prepare_run_directory(config, resuming=False)
heartbeat = Heartbeat(config.run_dir, 0, hang_seconds=60, patient_seconds=60)
trainer = build_trainer(config, ranks, sys.argv[1], heartbeat)
exporter = trainer.telemetry
for turn in range(config.training.steps):
    trainer.telemetry = exporter if turn % 2 else None
    on_gpu = ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as found:
        trainer.train_step()
    counts = {event.key: event.count for event in found.key_averages()}
    waits = {name: counts[name] for name in (*WAITS, *CUDA_WAITS) if name in counts}
    row = {"step": trainer.clock.step, "telemetry": bool(turn % 2), "waits": waits}
    print(json.dumps(row), flush=True)
trainer.telemetry = exporter
trainer.close()
leave_ranks()
