"""Quantized checkpoints built by hand from random bytes, and what their tensors stand for, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import save, save_sharded
from safetensors.torch import load_file, save_file

E, H, I = 16, 40, 32  # noqa: E741 (the contract's letters); H ends in a short block
BLOCK = (16, 16)
UE8M0 = torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
ROLES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts."


def config(**changes: Any) -> dict[str, Any]:
    """DeepSeek V3's, with ``changes`` to the quantization block."""
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    return {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "n_routed_experts": E,
        "quantization_config": {key: value for key, value in (block | changes).items() if value != "absent"},
    }


def fp8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """e4m3 weights, any byte but NaN."""
    bytes_of = torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)
    return torch.where(bytes_of & 0x7F == 0x7F, 0x38, bytes_of).to(torch.uint8).view(torch.float8_e4m3fn)


def fp4(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Packed pairs, any byte, as int8 (N, K/2)."""
    packed = (shape[0], shape[1] // 2)
    return torch.randint(0, 256, packed, generator=generator, dtype=torch.uint8).view(torch.int8)


def grid(shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int]:
    return (1, 1) if block is None else (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def scales(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Small positive scales; powers of two unless they are float32."""
    if dtype == torch.float32:
        return torch.rand(shape, generator=generator) * 1e-3 + 1e-4
    exponents = torch.randint(114, 119, shape, generator=generator, dtype=torch.uint8)
    return exponents if dtype == torch.uint8 else exponents.view(UE8M0)


def matrices(
    layers: tuple[int, ...] = (1,),
    block: tuple[int, int] | None = BLOCK,
    dtype: torch.dtype = torch.float32,
    *,
    is_fp4: bool = False,
    suffix: str = "weight_scale_inv",
    names: dict[str, str] | None = None,
    static: bool = False,
) -> dict[str, torch.Tensor]:
    """One weight and one scale for each matrix of each expert."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in layers:
        for expert in range(E):
            for role, shape in ROLES.items():
                base = f"{prefix(layer)}{expert}.{(names or {}).get(role, role)}."
                tensors[base + "weight"] = fp4(shape, generator) if is_fp4 else fp8(shape, generator)
                scale = scales(grid(shape, (1, 32) if is_fp4 else block), dtype, generator)
                tensors[base + suffix] = scale.reshape(()) if block is None and not is_fp4 else scale
                if static:  # gate and up have one input
                    at = 0.25 * (expert + 1) + (1 if role == "down_proj" else 0)
                    tensors[base + "activation_scale"] = torch.tensor(at)
    return tensors


def stacked(
    tensors: dict[str, torch.Tensor], layer: int = 1, suffix: str = "weight_scale_inv"
) -> dict[str, torch.Tensor]:
    """What ``matrices`` are in memory: stacks under the names of ExpertWeights, without a prefix."""

    def stack(role: str, kind: str) -> torch.Tensor:
        named = [tensors[f"{prefix(layer)}{expert}.{role}.{kind}"] for expert in range(E)]
        return torch.stack([tensor if tensor.dim() == 2 else tensor.reshape(1, 1) for tensor in named])

    def pair(kind: str) -> torch.Tensor:
        both = [stack(role, kind) for role in ("gate_proj", "up_proj")]
        raw = torch.cat([part.view(torch.uint8) if part.element_size() == 1 else part for part in both], dim=1)
        return raw.view(both[0].dtype)

    return {
        "gate_up_proj": pair("weight"),
        "down_proj": stack("down_proj", "weight"),
        "gate_up_proj_scale_inv": pair(suffix),
        "down_proj_scale_inv": stack("down_proj", suffix),
    }


def values(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """One matrix, or a stack of them, in float64: stored value times the scale of its block."""
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8).long()
        weight, block = torch.stack([E2M1[codes & 15], E2M1[codes >> 4]], dim=-1).flatten(-2), (1, 32)
    if scale.dtype == torch.uint8:
        scale = scale.view(UE8M0)
    if block is None:
        return weight.double() * scale.double()
    rows = torch.arange(weight.shape[-2]) // block[0]
    columns = torch.arange(weight.shape[-1]) // block[1]
    return weight.double() * scale.double()[..., rows[:, None], columns]


def folder(path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any], *, shards: int = 0) -> Path:
    """A checkpoint of one file, or of several with an index."""
    if not shards:
        return save(path, tensors, settings)
    save_sharded(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(settings))
    return path


def change(path: Path, name: str, tensor: torch.Tensor | None, to_name: str | None = None) -> Path:
    """Replace, remove or add one tensor of a folder, wherever it is, and keep the index in step."""
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    file = path / where.get(name, next(iter(where.values()), "model.safetensors"))
    held = {key: value.clone() for key, value in load_file(file).items()}
    held.pop(name, None)
    where.pop(name, None)
    if tensor is not None:
        held[to_name or name] = tensor
        where[to_name or name] = file.name
    save_file(held, file)
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path
