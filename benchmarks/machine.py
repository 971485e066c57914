"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    return os.cpu_count() or 1


def describe() -> str:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{cpu()}, {cores()} cores ({capability}), {device}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
