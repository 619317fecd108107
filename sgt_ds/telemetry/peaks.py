"""Peak speed of GPUs, dense bf16, for the model FLOPs utilisation. Knows no torch.

From the vendors' data sheets (NVIDIA: A100, A10, A40, L4, L40S, H100, H200, GH200, HGX B200;
AMD: MI300X), in FLOP/s. Where a sheet states the speed with sparsity, half of it stands here.
"""

from __future__ import annotations

import re

# The first pattern that matches counts: variants of a model stand before the model.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bG?H200\b", 989e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bA800\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA10\b", 125e12),
    (r"\bL4\b", 121e12),
    (r"\bMI300X\b", 1307.4e12),
)


def peak_flops(device_name: str | None) -> float | None:
    """Dense bf16 FLOP/s of one GPU, by the name that `torch.cuda.get_device_name` gives.

    None where it is unknown: a CPU, a GPU that the table lacks, a slice of one (MIG).
    """
    if device_name is None or re.search(r"\bMIG\b", device_name):
        return None
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak
    return None
