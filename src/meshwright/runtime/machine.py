"""The name of this machine, which identifies measurements."""

import platform
from pathlib import Path

from meshwright.runtime.launch import num_cores


def machine_name() -> str:
    """The processor and the number of cores that this process may use. Measurements depend on both."""
    return f"{cpu_model()}, {num_cores()} cores"


def cpu_model() -> str:
    """The processor's name, if the system reports it; else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()
