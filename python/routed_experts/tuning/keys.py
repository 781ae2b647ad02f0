"""What a time, or a trial of tiles, is of. Whoever writes one and whoever looks for one call the same function."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from routed_experts import _core
from routed_experts.facts import Facts
from routed_experts.machine import describe_machine

Key = dict[str, Any]

# Of the problem: what decides how fast a row is, T apart.
_LAYER = (
    "num_experts",
    "num_top_k",
    "hidden_size",
    "intermediate_size",
    "dtype",
    "weight_dtype",
    "quantization",
    "has_gate",
    "is_transposed",
    "is_concatenated",
    "has_bias",
    "own_gate",
    "has_post_expert_norm",
)
# Calls that are never measured: gradients, and experts that are split over ranks.
_UNMEASURED = ("training", "expert_parallel", "process_group")


def key_of(facts: Facts, problem: dict[str, Any]) -> Key | None:
    """Return the key of a call's times, as plain data; None for calls that are not measured.

    A compiled call has the times of an eager one: ``auto`` is one operator there, which runs the backend as it is.
    """
    if any(problem[name] for name in _UNMEASURED):
        return None
    return _key(facts, problem, "graph" if problem["capturing"] else "eager")


def tiles_key_of(facts: Facts, problem: dict[str, Any]) -> Key | None:
    """Return the key of the tiles that a call runs with; None for calls whose tiles are not measured.

    These run each product by itself: gradients, gates and norms of one's own.
    """
    if problem["training"] or problem["own_gate"] or problem["has_post_expert_norm"]:
        return None
    return _key(facts, problem, "tiles")


def _key(facts: Facts, problem: dict[str, Any], state: str) -> Key:
    layer = {name: problem[name] for name in _LAYER}
    return {"device": _device(facts), "versions": _versions(facts), "layer": layer, "state": state}


def canonical(key: Key) -> str:
    """Return the key as text that is equal where keys are, tuples and lists alike."""
    return json.dumps(key, sort_keys=True)


def _device(facts: Facts) -> dict[str, Any]:
    if facts.device == "cpu":
        return {"kind": "cpu", "name": _processor(), "threads": torch.get_num_threads()}
    capability = None if facts.capability is None else list(facts.capability)
    return {"kind": facts.device, "name": facts.device_name, "capability": capability}


def _versions(facts: Facts) -> dict[str, Any]:
    triton = facts.packages.get("triton") if facts.device != "cpu" else None
    return {"routed-experts": _core.__version__, "torch": facts.torch, "triton": triton}


@functools.cache
def _processor() -> str:
    return str(describe_machine()["cpu"])
