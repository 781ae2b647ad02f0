"""From a module to its ExpertWeights: the experts protocol, read attribute by attribute.

A module follows the protocol when it has ``num_experts``, ``down_proj``, and ``gate_up_proj`` or ``up_proj``.
Flags are read with the defaults of the field (gated, concatenated, not transposed); the activation comes from
the module and never from a config, since models override it. Quantized experts have scales beside their projections.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from routed_experts.errors import LayoutError
from routed_experts.gates import ACTIVATIONS, activation_name
from routed_experts.known_gates import known_gate
from routed_experts.module_quantization import check_values, quantization_of, tensors_of
from routed_experts.module_shortcut import Shortcut, shortcut_to
from routed_experts.weights import ExpertWeights


class _Known(NamedTuple):
    """What is remembered of a module. It holds no tensor and no function of the module's: none could be freed."""

    signature: tuple[Any, ...]
    layout: ExpertWeights  # checked
    shortcut: Shortcut | None


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


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
        UnsupportedScheme: parameters quantized in a way that is not run here.
    """
    if torch.compiler.is_compiling() and isinstance(experts, nn.Module):
        return _read(experts, tensors_of(experts))
    return bind(experts)


def bind(experts: ExpertWeights | nn.Module) -> ExpertWeights:
    """Do what ``resolve`` does, outside of torch.compile."""
    if isinstance(experts, ExpertWeights):
        if experts._module is None:
            return experts
        experts = experts._module
    if not isinstance(experts, nn.Module):
        raise LayoutError(
            "experts cannot be run",
            found=type(experts).__name__,
            needed="ExpertWeights or an experts module",
            hint="ExpertWeights(gate_up_proj=..., down_proj=...) takes stacked tensors",
        )
    known = _known.get(experts)
    shortcut = None if known is None else known.shortcut
    bound = None if shortcut is None else shortcut.bind(experts)
    return _bind_anew(experts, known) if bound is None else bound


def _bind_anew(module: nn.Module, known: _Known | None) -> ExpertWeights:
    """Read a module attribute by attribute; check it, unless what is ``known`` of it still holds."""
    tensors = tensors_of(module)
    if known is None:
        known = _remember(module, tensors)
    else:
        fits = known.signature == _signature(module, tensors, _functions(module, tensors))
        if not fits or known.shortcut is not None:  # which did not find its way
            known = _remember(module, tensors, known.layout if fits else None)
    return known.layout.with_tensors(tensors, **_functions(module, tensors))


def _remember(module: nn.Module, tensors: dict[str, Any], layout: ExpertWeights | None = None) -> _Known:
    weights = _read(module, tensors)
    check_values(tensors)
    functions = _functions(module, tensors)
    if layout is None:
        layout = weights.with_tensors({}, **dict.fromkeys(functions.keys() - _plain(functions)))
    known = _Known(_signature(module, tensors, functions), layout, shortcut_to(module, layout, weights))
    _known[module] = known
    return known


def _plain(functions: dict[str, Any]) -> set[str]:
    """Those of ``functions`` that are plain data or ours, not the module's."""
    ours = {"activation_name", "act_fn"} if functions["activation_name"] is not None else set()
    return {"swiglu_limit", "swiglu_alpha", "is_concatenated", "quantization", *ours} | (
        {"activation"} if isinstance(functions["activation"], str) else set()
    )


def _functions(module: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The attributes of ExpertWeights that are the module's own code, or say which of ours does the same."""
    gate = _own_gate(module) if tensors["gate_up_proj"] is not None else None
    known = None if gate is None else known_gate(module)
    if known is not None:
        gate, activation = None, known.activation
    else:
        activation = "silu" if gate is not None else _activation(module)
    name = activation_name(activation)
    return {
        "gate": gate,
        "activation": activation,
        "activation_name": name,
        "act_fn": activation if name is None else ACTIVATIONS[name],
        "swiglu_limit": None if known is None else known.swiglu_limit,
        "swiglu_alpha": None if known is None else known.swiglu_alpha,
        # A gate splits as it does, whatever the module declares.
        "is_concatenated": bool(getattr(module, "is_concatenated", True)) if known is None else known.is_concatenated,
        "post_expert_norm": _norm(module),
        "quantization": quantization_of(module, tensors),
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
    numbers = (functions["swiglu_limit"], functions["swiglu_alpha"], functions["is_concatenated"])
    return weakref.ref(type(module)), shapes, flags, kinds, numbers, functions["quantization"]


def _read(module: nn.Module, tensors: dict[str, Any]) -> ExpertWeights:
    """Check a module's declared layout; ``tensors`` are its parameters as they are now."""
    if not follows_protocol(module):
        raise _not_experts(module)
    functions = _functions(module, tensors)
    weights = object.__new__(ExpertWeights)
    weights._set(
        tensors,
        activation=functions["activation"],
        gate=functions["gate"],
        swiglu_limit=functions["swiglu_limit"],
        swiglu_alpha=functions["swiglu_alpha"],
        has_gate=getattr(module, "has_gate", None),
        is_transposed=bool(getattr(module, "is_transposed", False)),
        is_concatenated=functions["is_concatenated"],
        post_expert_norm=functions["post_expert_norm"],
        quantization=functions["quantization"],
        num_experts=int(module.num_experts),  # type: ignore[arg-type]
    )
    return weights


def _own_gate(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The module's gate unless it is the stock one, which ignores ``is_concatenated``: ours then does it right."""
    gate = getattr(module, "_apply_gate", None)
    # The compiler of torch 2.9 knows the module of a function, and not that of a method.
    function = gate.__func__ if isinstance(gate, MethodType) else gate
    home = getattr(function, "__module__", "") or ""
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


def _not_experts(module: nn.Module) -> LayoutError:
    have = [n for n in ("num_experts", "gate_up_proj", "up_proj", "down_proj") if getattr(module, n, None) is not None]
    return LayoutError(
        f"{type(module).__name__} is not an experts module",
        found="attributes " + (", ".join(have) or "none of the protocol"),
        needed="num_experts (int), down_proj, and gate_up_proj or up_proj (3-D tensors)",
        hint="pass the module that holds the stacked weights, often model.layers[i].mlp.experts",
    )
