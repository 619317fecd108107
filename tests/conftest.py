"""What several test files share."""

from __future__ import annotations

import os

# One test process on a small machine: leave a core to the processes that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
