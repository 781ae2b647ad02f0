"""What commands that run a layer share: the layer of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from routed_experts.bench.shapes import Shape
from routed_experts.weights import ExpertWeights

# Names that configurations of MoE models give to K.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "top_k")


def layer_of(options: dict[str, Any], device: str) -> tuple[str, Shape, ExpertWeights]:
    """Return name, shape and weights of ``--checkpoint`` and ``--layer`` on ``device``."""
    folder: Path = options["checkpoint"]
    weights = ExpertWeights.from_checkpoint(folder, layer=options["layer"], device=device)
    top_k = options["top_k"] or _top_k(folder)
    if not 0 < top_k <= weights.num_experts:
        raise click.UsageError(f"give --top-k, from 1 to {weights.num_experts}: {folder} does not say it")
    shape = Shape(weights.num_experts, top_k, weights.hidden_size, weights.intermediate_size)
    return f"{folder.name} layer {options['layer']}", shape, weights


def _top_k(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return 0
    for part in (config, config.get("text_config") or {}):
        for name in _TOP_K:
            if isinstance(part.get(name), int):
                return int(part[name])
    return 0
