"""Small checkpoints built by hand, tensor by tensor, for the checkpoint tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_experts.checkpoint import files
from safetensors import safe_open
from safetensors.torch import save_file

E, H, I = 4, 6, 5  # noqa: E741 (the contract's letters)
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": E}
PREFIX = "model.layers.1.mlp.experts."


def matrices(dtype: torch.dtype = torch.float32, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """One matrix per expert, every element of the layer different."""
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}{expert}.{role}.weight": torch.randn(shape, generator=generator).to(dtype)
        for expert in range(E)
        for role, shape in shapes.items()
    }


def stack(tensors: dict[str, torch.Tensor], role: str) -> torch.Tensor:
    """(E, N, K) of one role out of ``matrices``."""
    return torch.stack([tensors[f"{PREFIX}{expert}.{role}.weight"] for expert in range(E)])


def gate_up(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """(E, 2I, H), gate above up."""
    return torch.cat((stack(tensors, "gate_proj"), stack(tensors, "up_proj")), dim=1)


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """A folder with one safetensors file and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 3) -> Path:
    """The same, spread over several files with an index; neighbours in name go to different files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        name: f"model-{number % shards + 1:05d}-of-{shards:05d}.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def save_shifted(file: Path, tensors: dict[str, torch.Tensor], shift: int) -> None:
    """A safetensors file whose data begins ``shift`` bytes later than the usual aligned place."""
    header: dict[str, Any] = {"shift": {"dtype": "U8", "shape": [shift], "data_offsets": [0, shift]}}
    body = bytearray(shift)
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(body))


class Spy:
    """Stands in for safe_open and notes the data asked for; headers are not data."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.opened: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Spy:
        monkeypatch.setattr(files, "safe_open", self)
        return self

    def __call__(self, path: Path, **options: Any) -> _Spied:
        self.opened.append(Path(path).name)
        return _Spied(safe_open(path, **options), self)


class _Spied:
    def __init__(self, handle: Any, spy: Spy) -> None:
        self._handle, self._spy = handle, spy

    def __enter__(self) -> _Spied:
        self._handle.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._handle.__exit__(*details)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._spy.read.append(name)
        return self._handle.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        return _SpiedSlice(self._handle.get_slice(name), name, self._spy)


class _SpiedSlice:
    def __init__(self, part: Any, name: str, spy: Spy) -> None:
        self._part, self._name, self._spy = part, name, spy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        self._spy.read.append(f"{self._name}[{rows.start}:{rows.stop}]")
        return self._part[rows]
