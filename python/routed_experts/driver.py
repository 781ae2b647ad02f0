"""The GPUs of this machine as the NVIDIA driver's own tool names them; no CUDA context is made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_FIELDS = ("index", "uuid", "compute_cap", "memory.total", "driver_version", "name")
_SECONDS = 2.0


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index and identity, compute capability and bytes of memory (None if unknown), driver version."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    driver: str


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in CUDA's order; none if the driver does not answer in 2 s."""
    return visible(_ask(os.environ.get("PATH")), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES=variable`` leaves, in its order.

    The driver's tool ignores the variable. As in CUDA, the list ends at the first entry that is neither an index
    nor the beginning of one GPU's uuid.
    """
    if variable is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in variable.split(","):
        entry = entry.strip()
        matches = [gpu for gpu in gpus if (entry and gpu.uuid.startswith(entry)) or entry == str(gpu.index)]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


def forget_gpus() -> None:
    """Ask the driver anew next time."""
    _ask.cache_clear()


@lru_cache(maxsize=8)
def _ask(_path: str | None) -> tuple[Gpu, ...]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ()
    # The name comes last because it may hold commas.
    rows = (line.split(", ", len(_FIELDS) - 1) for line in done.stdout.splitlines())
    return tuple(_parse(row) for row in rows if len(row) == len(_FIELDS) and row[0].isdecimal())


def _parse(row: list[str]) -> Gpu:
    index, uuid, capability, memory, driver, name = row
    major, _, minor = capability.partition(".")
    known = major.isdecimal() and minor.isdecimal()
    return Gpu(
        index=int(index),
        uuid=uuid,
        name=name,
        capability=(int(major), int(minor)) if known else None,
        memory_bytes=int(memory) << 20 if memory.isdecimal() else None,
        driver=driver,
    )
