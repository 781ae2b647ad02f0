"""Bytes per dtype of a checkpoint's expert tensors: fused experts that a quantizer skipped stay visible."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from routed_experts.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def expert_bytes(folder: Path) -> dict[str, Any]:
    """Return ``{path, experts, other}``: tensors and bytes of each dtype, largest first.

    Reads headers only. Expert tensors are those with ``experts`` as one part of their dotted name, so shared
    experts count as other.

    Raises:
        CheckpointError: no safetensors files, a missing shard, or a file that cannot be read.
    """
    tensors: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    sizes: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for file in _files(folder):
        for name, dtype, count in _read_header(file):
            is_expert = "experts" in name.split(".")
            tensors[is_expert][dtype] += 1
            sizes[is_expert][dtype] += count

    def rows(is_expert: bool) -> list[dict[str, Any]]:
        counts = tensors[is_expert]
        largest_first = sizes[is_expert].most_common()
        return [{"dtype": dtype, "tensors": counts[dtype], "bytes": count} for dtype, count in largest_first]

    return {"path": str(folder), "experts": rows(True), "other": rows(False)}


def _files(folder: Path) -> list[Path]:
    """Return the files that hold the model; a folder may hold a second copy of it in other files."""
    if (folder / _INDEX).is_file():
        files = _shards(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{folder} is no complete safetensors checkpoint",
            found=f"no {', '.join(missing)}" if missing else "no *.safetensors file",
            needed="every file that the index names" if missing else "one or more *.safetensors files",
            hint="download the whole folder again"
            if missing
            else "give the folder that save_pretrained wrote",
        )
    return files


def _shards(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({index.parent / name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _unreadable(index, error, "a JSON object with a weight_map of tensor names to files") from error


def _read_header(file: Path) -> list[tuple[str, str, int]]:
    """Return name, dtype and bytes of each tensor; no tensor is read."""
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return [(name, one.get_dtype(), _bytes(one)) for name, one in slices.items()]
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error, "a safetensors file") from error


def _bytes(one: Any) -> int:
    dtype = one.get_dtype()
    # The number after the letters is the width of an element: F8_E4M3 has 8 bits, F4 has 4.
    width = re.match(r"[A-Z]+(\d+)", dtype)
    bits = int(width[1]) if width else 8
    return math.ceil(math.prod(one.get_shape()) * bits / 8)


def _unreadable(file: Path, error: Exception, needed: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read {file}",
        found=f"{type(error).__name__}: {error}",
        needed=needed,
        hint="download it again",
    )
