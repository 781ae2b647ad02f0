"""What this machine is, for reports: asked of the system and of metadata; no CUDA context is made."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from routed_experts.driver import visible_gpus
from routed_experts.facts import PACKAGES, package_version

# What doctor lists beside the packages that decide which backend runs.
_BESIDE = ("quack-kernels", "matplotlib")


def describe_machine() -> dict[str, Any]:
    """Return system, processor, cores this process may use, memory in bytes, and the Python version."""
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
        "python": platform.python_version(),
    }


def describe_torch() -> dict[str, Any]:
    """Return version, threads, and the CUDA runtime torch was built with, which is not a compiler."""
    return {
        "version": torch.__version__,
        "built_with_cuda_runtime": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def describe_devices() -> list[dict[str, Any]]:
    """Return the CPU and the GPUs this process would see, in the driver's words.

    GPUs are the driver's, because asking torch or the runtime would initialise CUDA in this process.
    """
    gpus = [
        {
            "kind": "cuda",
            "index": gpu.index,
            "name": gpu.name,
            "capability": gpu.capability,
            "memory_bytes": gpu.memory_bytes,
            "driver": gpu.driver,
        }
        for gpu in visible_gpus()
    ]
    return [{"kind": "cpu", "name": _cpu_model()}, *gpus]


def describe_packages() -> dict[str, str | None]:
    """Return the installed version of each optional package; None if absent."""
    return {name: package_version(name) for name in (*PACKAGES, *_BESIDE)}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _cores() -> int:
    # Batch systems give a process fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
