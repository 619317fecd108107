"""One rank of a run whose ZeRO reduces in place, or as DeepSpeed itself does: `zero_sums.py RUN [plain]`.

Writes into the run directory, of its share of the float32 master weights after the run, a digest,
and how many buckets of gradients were copied.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from sgt_ds.config import load_run_config, prepare_run_directory
from sgt_ds.training import Heartbeat, build_trainer, engine, join_ranks, leave_ranks

run, *mode = [word for word in sys.argv[1:] if not word.startswith("--")]
if mode == ["plain"]:
    engine.reduce_in_place = lambda *_: None
config = load_run_config(Path(run))
ranks = join_ranks(60)
ranks.on_main(lambda: prepare_run_directory(config, resuming=False))
heartbeat = Heartbeat(config.run_dir, ranks.rank, hang_seconds=60, patient_seconds=60)
trainer = build_trainer(config, ranks, run, heartbeat)
optimizer = trainer.engine.optimizer
flatten, copied = optimizer.flatten, 0


def counted(pieces: Any) -> Any:
    global copied
    copied += 1
    return flatten(pieces)


optimizer.flatten = counted
trainer.train()
digest = hashlib.sha256()
for part in optimizer.single_partition_of_fp32_groups:
    digest.update(part.detach().numpy().tobytes())
(config.run_dir / f"sums-{ranks.rank}.json").write_text(json.dumps([digest.hexdigest(), copied]))
trainer.close()
leave_ranks()
