"""What the machine says of itself, held against psutil."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch

from sgt_ds.telemetry import HardwareSampler
from sgt_ds.telemetry.hardware import OLD_AFTER_SECONDS, Hardware


def test_memory_and_disk_differ_from_what_psutil_says(tmp_path: Path) -> None:
    found = HardwareSampler(tmp_path, None).sample()
    memory = psutil.virtual_memory()
    assert found.memory_size_bytes == memory.total
    assert found.memory_available_bytes == pytest.approx(memory.available, rel=0.2)
    disk = shutil.disk_usage(tmp_path)
    assert found.disk_size_bytes == disk.total
    assert found.disk_free_bytes == pytest.approx(disk.free, rel=0.05)
    cards = psutil.net_io_counters(pernic=True)
    received = sum(card.bytes_recv for name, card in cards.items() if name != "lo")
    assert found.network_receive_bytes is not None
    assert 0 <= received - found.network_receive_bytes < 10**8
    assert found.gpu_power_watts is None


def test_a_sample_is_served_for_ever_after_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = HardwareSampler(tmp_path, None)
    assert sampler.latest() == Hardware()
    sampler.start()
    deadline = time.monotonic() + 30
    while sampler.latest() == Hardware():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sampler.close()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + OLD_AFTER_SECONDS + 1)
    assert sampler.latest() == Hardware()


def test_a_machine_without_nvml_tells_the_rest(tmp_path: Path) -> None:
    found = HardwareSampler(tmp_path, "GPU-00000000-0000-0000-0000-000000000000").sample()
    assert found.gpu_energy_joules is None
    assert found.memory_size_bytes is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tells_no_power(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    uuid = torch.cuda.get_device_properties(0).uuid
    found = HardwareSampler(tmp_path, f"GPU-{uuid}").sample()
    assert found.gpu_power_watts is not None
    assert 5 < found.gpu_power_watts < 3000
    assert found.gpu_energy_joules is not None
    assert found.gpu_energy_joules > 0
    assert found.gpu_utilization_ratio is not None
    assert 0 <= found.gpu_utilization_ratio <= 1
