"""What a run ran on: versions, platform, threads and device, for the record beside the results."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import click

import perpend
from perpend.options import INVOCATION

_PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "safetensors")


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions are read from package metadata; threads and devices only where torch is already in use."""
    found: dict[str, Any] = {
        "perpend": perpend.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        found["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if torch.cuda.is_available():
            found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    elif device:
        found["device"] = device
    return found


def invocation() -> list[str] | None:
    """The words of the command line that is being run, as they were given; None where Python called."""
    context = click.get_current_context(silent=True)
    return context.meta.get(INVOCATION) if context else None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name as Linux knows it; elsewhere what Python says."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
