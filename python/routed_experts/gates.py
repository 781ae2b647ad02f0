"""Activations and gates: what stands between the two products of an expert.

One table of named activations; everything a user or a model passes is either one of these names, a callable
we can prove to be one of them, or a callable of its own that runs as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from routed_experts.errors import LayoutError

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": _identity,
}

# Names that models and configs use for the same functions. "gelu" is the exact one and stays apart from tanh's.
ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "linear": "identity",
}

# Modules that compute a named activation and nothing else, by (package, class): matched without importing it.
_KNOWN_MODULES = {
    ("torch", "SiLU"): "silu",
    ("torch", "ReLU"): "relu",
    ("torch", "Sigmoid"): "sigmoid",
    ("torch", "Tanh"): "tanh",
    ("torch", "Identity"): "identity",
    ("transformers", "SiLUActivation"): "silu",
    ("transformers", "GELUActivation"): "gelu",
    ("transformers", "NewGELUActivation"): "gelu_tanh",
    ("transformers", "GELUTanh"): "gelu_tanh",
    ("transformers", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers", "FastGELUActivation"): "gelu_tanh",
    ("transformers", "QuickGELUActivation"): "quick_gelu",
    ("transformers", "ReLUSquaredActivation"): "relu2",
    ("transformers", "LinearActivation"): "identity",
}

_KNOWN_FUNCTIONS: dict[Callable[..., Tensor], str] = {
    **{function: name for name, function in ACTIVATIONS.items()},
    torch.relu: "relu",
    torch.tanh: "tanh",
    F.sigmoid: "sigmoid",
    F.tanh: "tanh",
}


def activation_name(activation: str | Callable[[Tensor], Tensor]) -> str | None:
    """Return the canonical name of an activation, or None for a callable that is none of the known ones.

    Raises LayoutError for a string that names no activation.
    """
    if isinstance(activation, str):
        name = ALIASES.get(activation, activation)
        if name not in ACTIVATIONS:
            raise _unknown_activation(activation)
        return name
    if isinstance(activation, torch.nn.Module):
        return _module_name(activation)
    try:
        return _KNOWN_FUNCTIONS.get(activation)
    except TypeError:  # an unhashable callable is one of the user's own
        return None


def _module_name(module: torch.nn.Module) -> str | None:
    cls = type(module)
    if cls is torch.nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _KNOWN_MODULES.get((cls.__module__.partition(".")[0], cls.__name__))


def _unknown_activation(name: str) -> LayoutError:
    known = sorted({*ACTIVATIONS, *ALIASES})
    close = difflib.get_close_matches(name, known, n=1)
    return LayoutError(
        "unknown activation",
        found=repr(name),
        needed="one of " + ", ".join(known) + ", or a callable",
        hint=f"did you mean {close[0]!r}?" if close else "pass the function itself",
    )


def apply_gate(experts: ExpertWeights, up: Tensor) -> Tensor:
    """Turn the first product into the second one's input.

    ``up`` is (rows, 2I) for gated experts, else (rows, I); the result is (rows, I) in the same dtype.
    """
    if experts.gate is not None:
        return experts.gate(up)
    act = experts.act_fn
    if not experts.has_gate:
        return act(up)
    gate, linear = split_gate_up(up, experts.is_concatenated)
    limit, alpha = experts.swiglu_limit, experts.swiglu_alpha
    if limit is not None:
        gate = gate.clamp(max=limit)
        linear = linear.clamp(min=-limit, max=limit)
    if alpha is not None:
        return (linear + 1) * (gate * torch.sigmoid(alpha * gate))
    return act(gate) * linear


def split_gate_up(up: Tensor, is_concatenated: bool) -> tuple[Tensor, Tensor]:
    """Split (rows, 2I) into gate and up: halves when concatenated, even and odd columns otherwise."""
    if is_concatenated:
        gate, linear = up.chunk(2, dim=-1)
        return gate, linear
    return up[..., 0::2], up[..., 1::2]
