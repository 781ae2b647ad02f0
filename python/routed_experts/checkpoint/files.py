"""Safetensors files of a checkpoint: headers on demand, data only for the tensors asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from routed_experts.errors import CheckpointError, UnsupportedScheme

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
}


class Header(NamedTuple):
    """What a file says of a tensor before its data is touched."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def few(items: Iterable[object], limit: int = 8) -> str:
    """Join the first items of a list that may be thousands long."""
    texts = [str(item) for item in items]
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return (", ".join(texts[:limit]) + rest) or "nothing"


class TensorFiles:
    """The tensors of one checkpoint by name. Files are opened when one of their tensors is first needed."""

    def __init__(self, source: Path, where: dict[str, Path], stack: ExitStack) -> None:
        self.source = source
        self.where = where
        self.bytes_read = 0
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def handle(self, path: Path) -> Any:
        """Open file, kept open until the checkpoint is closed. Raises CheckpointError if it is unreadable."""
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise _broken_file(path, error) from error
        return self._open[path]

    def header(self, name: str) -> Header:
        """Shape and dtype as stored. CheckpointError if its file lacks it, UnsupportedScheme for a dtype not read."""
        part = self._ask(name, lambda handle: handle.get_slice(name))
        name_of_dtype = part.get_dtype()
        dtype = (DTYPES | QUANTIZED_DTYPES).get(name_of_dtype)
        if dtype is None:
            raise UnsupportedScheme(
                f"{name} is stored in a dtype that is not read",
                found=str(name_of_dtype),
                needed=" or ".join(DTYPES | QUANTIZED_DTYPES),
                hint="dequantize the checkpoint first, or take one in FP8",
            )
        shape = tuple(part.get_shape())
        if name_of_dtype == "F4":  # counted in values there
            shape = (*shape[:-1], shape[-1] // 2)
        return Header(shape, dtype)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows ``start:stop`` of a tensor (by default all): a private memory map, aligned to its dtype.

        Packed pairs of FP4 come as the int8 bytes that they are.
        """
        if self.header(name).dtype == torch.float4_e2m1fn_x2:  # which files do not slice
            tensor = self._ask(name, lambda handle: handle.get_tensor(name)).view(torch.int8)[start:stop]
        elif start is None:
            tensor = self._ask(name, lambda handle: handle.get_tensor(name))
        else:
            tensor = self._ask(name, lambda handle: handle.get_slice(name)[start:stop])
        self.bytes_read += tensor.numel() * tensor.element_size()
        # Files may place a tensor at any byte; kernels may expect at least whole elements.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def metadata(self) -> dict[str, str]:
        """Free metadata of a checkpoint that is one file; empty for a sharded one."""
        files = set(self.where.values())
        return (self.handle(files.pop()).metadata() or {}) if len(files) == 1 else {}

    def _ask(self, name: str, question: Callable[[Any], Any]) -> Any:
        path = self.where[name]
        try:
            return question(self.handle(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path.name} does not give the tensor {name}",
                found=str(error),
                needed=f"{name} in {path}",
                hint="the index and the shards do not belong together; fetch the checkpoint again",
            ) from error


@contextmanager
def open_checkpoint(path: Path) -> Iterator[tuple[TensorFiles, dict[str, Any] | None]]:
    """The tensors of a folder or of a single file, and its config (None if there is no ``config.json``)."""
    with ExitStack() as stack:
        files = TensorFiles(path, {}, stack)
        if path.is_dir() and not (path / WEIGHTS).is_file():
            folder = path
            files.where = _index(path)
        else:
            file = path / WEIGHTS if path.is_dir() else _single_file(path)
            folder = file.parent
            files.where = dict.fromkeys(files.handle(file).keys(), file)
        config = folder / CONFIG
        yield files, read_json(config) if config.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken_file(path, error) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} is not a JSON object",
            found=type(value).__name__,
            needed="an object",
            hint="the file is corrupt; fetch it again",
        )
    return value


def _single_file(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at {path}",
            found="no such file or folder",
            needed=f"a folder with {WEIGHTS} or {INDEX}, or a .safetensors file",
            hint="check the path; a model on a hub has to be downloaded first",
        )
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a safetensors file",
            found=f"a file ending in {path.suffix or 'nothing'}",
            needed="a file ending in .safetensors, or its folder",
            hint="give the folder, or convert the checkpoint to safetensors",
        )
    return path


def _index(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"no safetensors checkpoint in {folder}",
            found=few(sorted(entry.name for entry in folder.iterdir())),
            needed=f"{WEIGHTS} or {INDEX}",
            hint="give a single .safetensors file by its own path; convert other formats to safetensors",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{index} has no usable weight_map",
            found=f"weight_map of type {type(weight_map).__name__}",
            needed="an object from tensor name to file name",
            hint="fetch the index again",
        )
    _check_shards(folder, sorted(set(weight_map.values())))
    return {name: folder / file for name, file in weight_map.items()}


def _check_shards(folder: Path, shards: list[str]) -> None:
    foreign = [shard for shard in shards if Path(shard).name != shard]
    if foreign:
        raise CheckpointError(
            f"the index of {folder} names files outside the folder",
            found=few(foreign),
            needed="plain file names",
            hint="do not trust this index; fetch the checkpoint again",
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"shards named by the index of {folder} are missing",
            found=f"{len(shards) - len(missing)} of {len(shards)} shards",
            needed=few(missing),
            hint="the download is incomplete; fetch the missing files",
        )


def _broken_file(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read",
        found=f"{type(error).__name__}: {error}",
        needed="a whole, readable file",
        hint="the file is truncated or corrupt; fetch it again",
    )
