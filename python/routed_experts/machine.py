"""What this machine is, for reports: asked of the system and of metadata; no CUDA context is made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "triton",
    "kernels",
    "transformers",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "deep_gemm",
    "sonicmoe",
    "quack-kernels",
    "matplotlib",
)

_GPU_FIELDS = ("index", "compute_cap", "memory.total", "driver_version", "name")
_GPU_TIMEOUT_S = 5


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

    GPUs come from ``nvidia-smi``, because asking torch or the runtime would initialise CUDA in this process.
    """
    gpus = [_gpu(line) for line in _query_gpus().splitlines() if line.count(",") >= len(_GPU_FIELDS) - 1]
    return [{"kind": "cpu", "name": _cpu_model()}, *visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def describe_packages() -> dict[str, str | None]:
    """Return the installed version of each optional package; None if absent."""
    return {name: _version(name) for name in PACKAGES}


def visible(gpus: list[dict[str, Any]], value: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES=value`` leaves, in its order.

    Only plain indices are understood; with names (GPU-..., MIG-...) all are returned. As in CUDA, the list
    ends at the first index that does not exist.
    """
    if value is None:
        return gpus
    try:
        indices = [int(part) for part in value.split(",")] if value.strip() else []
    except ValueError:
        return gpus
    by_index = {gpu["index"]: gpu for gpu in gpus}
    chosen = []
    for index in indices:
        if index not in by_index:
            break
        chosen.append(by_index[index])
    return chosen


def _query_gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    # Without a driver it explains itself on stdout.
    return done.stdout if done.returncode == 0 else ""


def _gpu(line: str) -> dict[str, Any]:
    # The name comes last because it may hold commas.
    index, capability, memory, driver, name = (part.strip() for part in line.split(",", len(_GPU_FIELDS) - 1))
    numbers = capability.split(".")
    known = len(numbers) == 2 and all(number.isdigit() for number in numbers)
    return {
        "kind": "cuda",
        "index": int(index),
        "name": name,
        "capability": tuple(int(number) for number in numbers) if known else None,
        "memory_bytes": int(memory) * 2**20 if memory.isdigit() else None,
        "driver": driver,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
