"""From a module to its ExpertWeights: the experts protocol, read attribute by attribute.

A module follows the protocol when it has ``num_experts``, ``down_proj``, and ``gate_up_proj`` or ``up_proj``.
Flags are read with the defaults of the field (gated, concatenated, not transposed); the activation comes from
the module and never from a config, since models override it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from routed_experts.errors import LayoutError, UnsupportedScheme
from routed_experts.gates import ACTIVATIONS, activation_name
from routed_experts.weights import SCALE_NAMES, TENSOR_NAMES, ExpertWeights

# Checked layouts by module. They hold no tensor and no function of the module's, or none could ever be freed.
_layouts: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ExpertWeights]] = weakref.WeakKeyDictionary()


def follows_protocol(module: nn.Module) -> bool:
    """Whether the module has the attributes of an experts module, whatever its class."""
    return (
        isinstance(getattr(module, "num_experts", None), int)
        and isinstance(getattr(module, "down_proj", None), Tensor)
        and any(isinstance(getattr(module, name, None), Tensor) for name in ("gate_up_proj", "up_proj"))
    )


def resolve(experts: ExpertWeights | nn.Module) -> ExpertWeights:
    """Return weights bound for one call: every live attribute is read once, checks are done once a layout.

    Raises:
        LayoutError: no experts module, or parameters that do not fit the flags that it declares.
        UnsupportedScheme: quantized parameters.
    """
    if isinstance(experts, ExpertWeights):
        return experts.bind()
    if not isinstance(experts, nn.Module):
        raise LayoutError(
            "experts cannot be run",
            found=type(experts).__name__,
            needed="ExpertWeights or an experts module",
            hint="ExpertWeights(gate_up_proj=..., down_proj=...) takes stacked tensors",
        )
    tensors = {name: getattr(experts, name, None) for name in TENSOR_NAMES}
    if torch.compiler.is_compiling():
        return _read(experts, tensors)
    known = _layouts.get(experts)
    if known is None:
        known = _remember(experts, tensors)
    functions = _functions(experts, tensors)
    if known[0] != _signature(experts, tensors, functions):
        known = _remember(experts, tensors)
    return known[1].with_tensors(tensors, **functions)


def _remember(module: nn.Module, tensors: dict[str, Any]) -> tuple[Any, ExpertWeights]:
    weights = _read(module, tensors)
    functions = _functions(module, tensors)
    layout = weights.with_tensors({}, **dict.fromkeys(functions))
    _layouts[module] = known = (_signature(module, tensors, functions), layout)
    return known


def _functions(module: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The attributes of ExpertWeights that are the module's own code."""
    gate = _own_gate(module) if tensors["gate_up_proj"] is not None else None
    activation = "silu" if gate is not None else _activation(module)
    name = activation_name(activation)
    act_fn = activation if name is None else ACTIVATIONS[name]
    return {
        "gate": gate,
        "activation": activation,
        "activation_name": name,
        "act_fn": act_fn,
        "post_expert_norm": _norm(module),
    }


def _signature(module: nn.Module, tensors: dict[str, Any], functions: dict[str, Any]) -> tuple[Any, ...]:
    """Everything the checks and the selection depend on; sharding and quantizing replace parameters in place."""
    shapes = tuple(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 if not t.is_meta else 0)
        for t in tensors.values()
    )
    flags = tuple(
        getattr(module, name, None) for name in ("num_experts", "has_gate", "is_transposed", "is_concatenated")
    )
    kinds = (functions["activation_name"], functions["gate"] is None, functions["post_expert_norm"] is None)
    return shapes, flags, kinds


def _read(module: nn.Module, tensors: dict[str, Any]) -> ExpertWeights:
    """Check a module's declared layout; ``tensors`` are its parameters as they are now."""
    _refuse_quantized(module)
    if not follows_protocol(module):
        raise _not_experts(module)
    functions = _functions(module, tensors)
    weights = object.__new__(ExpertWeights)
    weights._set(
        tensors,
        activation=functions["activation"],
        gate=functions["gate"],
        swiglu_limit=None,
        swiglu_alpha=None,
        has_gate=getattr(module, "has_gate", None),
        is_transposed=bool(getattr(module, "is_transposed", False)),
        is_concatenated=bool(getattr(module, "is_concatenated", True)),
        post_expert_norm=functions["post_expert_norm"],
        num_experts=int(module.num_experts),  # type: ignore[arg-type]
    )
    return weights


def _own_gate(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The module's gate unless it is the stock one, which ignores ``is_concatenated``: ours then does it right."""
    gate = getattr(module, "_apply_gate", None)
    home = getattr(gate, "__module__", "") or ""
    stock = home.endswith("integrations.moe") or home.startswith("routed_experts.")
    return None if gate is None or stock else gate


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    act = getattr(module, "act_fn", None)
    if not callable(act):
        raise LayoutError(
            f"{type(module).__name__} names no activation",
            found="neither a gate of its own (_apply_gate) nor act_fn",
            needed="module.act_fn",
            hint="set act_fn in the module, or give it a method _apply_gate((rows, 2I)) -> (rows, I)",
        )
    return act


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if not getattr(module, "has_post_expert_norm", False):
        return None
    norm = getattr(module, "post_expert_norm", None)
    if not callable(norm):
        raise LayoutError(
            f"{type(module).__name__} declares a norm it does not have",
            found=f"has_post_expert_norm=True, post_expert_norm={norm!r}",
            needed="a callable module.post_expert_norm",
            hint="set post_expert_norm, or has_post_expert_norm=False",
        )
    return norm


def _refuse_quantized(module: nn.Module) -> None:
    found = [name for name in SCALE_NAMES if getattr(module, name, None) is not None]
    if found:
        raise UnsupportedScheme(
            f"{type(module).__name__} is quantized, which this version does not run",
            found=", ".join(found),
            needed="floating-point weights without scales",
            hint="load the model with dequantization to bfloat16",
        )


def _not_experts(module: nn.Module) -> LayoutError:
    have = [n for n in ("num_experts", "gate_up_proj", "up_proj", "down_proj") if getattr(module, n, None) is not None]
    return LayoutError(
        f"{type(module).__name__} is not an experts module",
        found="attributes " + (", ".join(have) or "none of the protocol"),
        needed="num_experts (int), down_proj, and gate_up_proj or up_proj (3-D tensors)",
        hint="pass the module that holds the stacked weights, often model.layers[i].mlp.experts",
    )
