"""This machine: what to call it."""

import platform
from pathlib import Path

from meshwright.runtime.launch import num_cores


def machine_name() -> str:
    """Its processor and how many cores this process may use: what measurements of it depend on."""
    return f"{cpu_model()}, {num_cores()} cores"


def cpu_model() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()
