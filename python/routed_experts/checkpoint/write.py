"""Writes one layer's experts as a folder that ``read_experts`` reads back, flags and all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from routed_experts.checkpoint.declared import BLOCK, Declaration, to_block
from routed_experts.checkpoint.files import CONFIG, DTYPES, INDEX, WEIGHTS
from routed_experts.errors import CheckpointError, UnsupportedExperts, UnsupportedScheme

_PREFIX = "model.layers.0.mlp.experts."
_ROLES = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def write_experts(weights: Any, path: str | os.PathLike[str]) -> None:
    """Write ``model.safetensors`` and ``config.json`` into the folder ``path``, made if it is not there.

    ``weights`` has the attributes of ``ExpertWeights``. Strided, expanded and aliased tensors are written
    densely. Each file appears whole or not at all, the config last.

    Raises, before anything is written: UnsupportedExperts for a gate, norm or activation that is a callable
    and for tensors without data, UnsupportedScheme for quantized weights, CheckpointError if the folder holds
    a checkpoint.
    """
    folder = Path(path)
    _refuse_callables(weights)
    tensors = {role: tensor for role in _ROLES if (tensor := getattr(weights, role, None)) is not None}
    _refuse_quantized(weights, tensors)
    _refuse_existing(folder)
    block = to_block(_declaration(weights, tensors))
    config = {"num_experts": tensors["down_proj"].shape[0], "hidden_act": weights.activation, BLOCK: block}
    metadata = {"format": "pt", BLOCK: json.dumps(block)}
    _write(folder, {_PREFIX + role: tensor for role, tensor in _dense(tensors).items()}, metadata, config)


def _declaration(weights: Any, tensors: dict[str, torch.Tensor]) -> Declaration:
    return Declaration(
        activation=weights.activation,
        swiglu_limit=weights.swiglu_limit,
        swiglu_alpha=weights.swiglu_alpha,
        has_gate="gate_up_proj" in tensors,
        has_bias=any(role.endswith("_bias") for role in tensors),
        is_transposed=bool(weights.is_transposed),
        is_concatenated=bool(weights.is_concatenated),
        counts=(tensors["down_proj"].shape[0],),
        tensors=tuple(tensors),
        shard=shard if isinstance(shard := getattr(weights, "shard", None), tuple) else None,
    )


def _refuse_callables(weights: Any) -> None:
    names = [name for name in ("gate", "post_expert_norm") if getattr(weights, name, None) is not None]
    if not isinstance(weights.activation, str):
        names.append("activation")
    if names:
        raise UnsupportedExperts(
            "these experts cannot be stored: part of what they compute is code",
            found=", ".join(f"{name}={getattr(weights, name)!r}" for name in names),
            needed="an activation given by name, no gate and no post_expert_norm",
            hint="name the activation, or save the module's state_dict and use from_module",
        )


def _refuse_quantized(weights: Any, tensors: dict[str, torch.Tensor]) -> None:
    plain = set(DTYPES.values())
    odd = [f"{role} {tensor.dtype}" for role, tensor in tensors.items() if tensor.dtype not in plain]
    scheme = getattr(weights, "quantization", None)
    if odd or scheme is not None:
        raise UnsupportedScheme(
            "quantized experts are not written by this version",
            found=", ".join(odd) or repr(scheme),
            needed="weights in float64, float32, float16 or bfloat16",
            hint="dequantize the experts first",
        )
    if any(tensor.is_meta for tensor in tensors.values()):
        raise UnsupportedExperts(
            "these experts have no data to store",
            found="tensors on the meta device",
            needed="materialized tensors",
            hint="load or initialize the weights first",
        )


def _refuse_existing(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder",
            found="a file",
            needed="a folder, or a path not in use",
            hint="the experts are written as a folder of two files; choose another path",
        )
    existing = [name for name in (WEIGHTS, INDEX, CONFIG) if (folder / name).exists()]
    if existing:
        raise CheckpointError(
            f"{folder} already holds a checkpoint",
            found=", ".join(existing),
            needed="a folder without these files",
            hint="remove them or choose another folder; nothing is overwritten",
        )


def _dense(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors without gradients. Where two share a storage one is copied: the format wants it."""
    dense: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for role, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        storage = plain.untyped_storage().data_ptr()
        dense[role] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return dense


def _write(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = [folder / f".{name}.{os.getpid()}.tmp" for name in (WEIGHTS, CONFIG)]
    try:
        save_file(tensors, temporary[0], metadata=metadata)
        temporary[1].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file, name in zip(temporary, (WEIGHTS, CONFIG), strict=True):
            file.rename(folder / name)
    finally:
        for file in temporary:
            file.unlink(missing_ok=True)
