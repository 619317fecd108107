"""Peak resident memory of this process. Knows no run.

`getrusage` will not do: what a process is started by leaves its own peak in the child's ru_maxrss.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_resident_bytes() -> int | None:
    """Most resident memory since the start, or the last reset, in bytes. None off Linux."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def reset_peak_resident() -> None:
    """Count from what is resident now. Where the kernel does not let, the peak stays."""
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
