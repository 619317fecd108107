"""Hardware figures: memory, network, disk, and the GPU through NVML if available.

A thread of its own reads it, so that a disk or a driver that hangs holds up neither a scrape nor
training; what it last read is withdrawn when it grows old. Knows no torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SAMPLE_EVERY_SECONDS = 5.0
OLD_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One sample. None where this machine does not tell."""

    memory_available_bytes: int | None = None
    memory_size_bytes: int | None = None
    network_receive_bytes: int | None = None
    network_transmit_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    gpu_utilization_ratio: float | None = None
    gpu_power_watts: float | None = None
    gpu_energy_joules: float | None = None


class HardwareSampler:
    """Samples every few seconds from `start` to `close`."""

    def __init__(self, folder: Path | None, gpu_uuid: str | None) -> None:
        """`folder`: whose file system counts. `gpu_uuid`: as NVML writes it, `GPU-…`."""
        self._folder = folder
        self._gpu = _Nvml(gpu_uuid) if gpu_uuid is not None else None
        self._newest = (float("-inf"), Hardware())
        self._end = threading.Event()

    def start(self) -> None:
        """Begin to sample. Nothing waits for it."""
        threading.Thread(target=self._run, name="sgt-hardware", daemon=True).start()

    def close(self) -> None:
        """Let the thread end; it is not waited for."""
        self._end.set()

    def latest(self) -> Hardware:
        """The newest sample; an empty one where none was taken of late."""
        when, sample = self._newest
        return sample if time.monotonic() - when < OLD_AFTER_SECONDS else Hardware()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._newest = (time.monotonic(), self.sample())
            except Exception as error:
                log.warning("telemetry: hardware is no longer sampled: %r", error)
                return
            self._end.wait(SAMPLE_EVERY_SECONDS)

    def sample(self) -> Hardware:
        """Read everything now. May wait for a disk or a driver."""
        memory = _memory()
        network = _network()
        disk = _disk(self._folder)
        gpu = self._gpu.read() if self._gpu is not None else (None, None, None)
        return Hardware(*memory, *network, *disk, *gpu)


def _memory() -> tuple[int | None, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    except (OSError, ValueError, LookupError):  # not Linux
        return None, None


def _network() -> tuple[int | None, int | None]:
    try:
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
        fields = {name.strip(): rest.split() for name, rest in (line.split(":") for line in lines)}
        fields.pop("lo", None)
        received = sum(int(values[0]) for values in fields.values())
        return received, sum(int(values[8]) for values in fields.values())
    except (OSError, ValueError, LookupError):
        return None, None


def _disk(folder: Path | None) -> tuple[int | None, int | None]:
    if folder is None:
        return None, None
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class _Nvml:
    """One device of NVML. Whatever is missing (package, driver, counter) is simply not told."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._library: Any = None
        self._handle: Any = None

    def read(self) -> tuple[float | None, float | None, float | None]:
        """Utilisation (0–1), watts, joules."""
        if self._handle is None and not self._open():
            return None, None, None
        nvml, handle = self._library, self._handle

        def ask(question: Any) -> Any:
            try:
                return question(handle)
            except nvml.NVMLError:
                return None

        utilization = ask(nvml.nvmlDeviceGetUtilizationRates)
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
        millijoules = ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return (
            None if utilization is None else utilization.gpu / 100,
            None if milliwatts is None else milliwatts / 1000,
            None if millijoules is None else millijoules / 1000,
        )

    def _open(self) -> bool:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except Exception as error:  # no package, no driver, another vendor's device
            log.info("telemetry: no NVML here (%s): no utilisation, power or energy", error)
            self._uuid, self._handle = "", None
            return False
        self._library = nvml
        return True
