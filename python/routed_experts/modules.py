"""Experts as a ready-made module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from routed_experts.calling import ARGUMENTS, call_experts
from routed_experts.errors import DtypeError, LayoutError
from routed_experts.gates import ACTIVATIONS, activation_name
from routed_experts.names import DEFAULT, parse_name

Activation = Callable[[torch.Tensor], torch.Tensor]


class RoutedExperts(nn.Module):
    """The experts of one Mixture-of-Experts layer; E experts, hidden size H, intermediate size I.

    Parameters, with U = 2I when ``has_gate`` and I otherwise (``is_transposed`` swaps the last two sizes):

    * ``gate_up_proj`` (``up_proj`` without gate): (E, U, H); ``down_proj``: (E, H, I)
    * with ``bias``: ``gate_up_proj_bias`` (``up_proj_bias``): (E, U); ``down_proj_bias``: (E, H)

    ``is_concatenated`` puts all gate columns before all up columns; False interleaves them, gate first.
    ``activation`` is a name or an elementwise callable; ``experts_implementation`` a backend name or "auto".
    ``bias=False`` registers the biases as None.

    Raises:
        LayoutError: a size below 1, or an activation that is neither a known name nor callable.
        DtypeError: a dtype that is not floating, or a backend name that is not a string.
        UnknownBackend: a backend name that is not registered.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "silu",
        bias: bool = False,
        has_gate: bool = True,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        experts_implementation: str = DEFAULT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = _size("num_experts", num_experts)
        self.hidden_size = _size("hidden_size", hidden_size)
        self.intermediate_size = _size("intermediate_size", intermediate_size)
        self.has_gate, self.has_bias = has_gate, bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.activation = activation
        self.act_fn = _activation_function(activation)
        self.experts_implementation = parse_name(experts_implementation)
        self._register_parameters(device, dtype)
        self.reset_parameters()

    def _register_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise DtypeError(
                "experts have floating weights",
                found=str(dtype),
                needed="a floating dtype",
                hint="build them in bfloat16 or float32",
            )
        experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        up, up_width = ("gate_up_proj", 2 * inner) if self.has_gate else ("up_proj", inner)
        for name, outputs, inputs in ((up, up_width, hidden), ("down_proj", hidden, inner)):
            shape = (experts, inputs, outputs) if self.is_transposed else (experts, outputs, inputs)
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            bias = torch.empty((experts, outputs), device=device, dtype=dtype) if self.has_bias else None
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias))

    def reset_parameters(self) -> None:
        """Draw weights from a normal of variance 1 / fan-in, so unit-scale rows stay so; biases become 0."""
        fan_in = {"down_proj": self.intermediate_size}
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=fan_in.get(name, self.hidden_size) ** -0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return (T, H) in the dtype of ``hidden_states`` (T, H); ids and weights are (T, K)."""
        arguments = (hidden_states, top_k_index, top_k_weights)
        return call_experts(self, self.experts_implementation, ARGUMENTS, arguments, {})

    def extra_repr(self) -> str:
        """Sizes first, then what differs from the defaults of the layout, then the backend."""
        flags = {
            "bias": (self.has_bias, False),
            "has_gate": (self.has_gate, True),
            "is_transposed": (self.is_transposed, False),
            "is_concatenated": (self.is_concatenated, True),
        }
        parts = [str(size) for size in (self.num_experts, self.hidden_size, self.intermediate_size)]
        parts.append(f"activation={self.activation!r}")
        parts += [f"{name}={value}" for name, (value, default) in flags.items() if value != default]
        return ", ".join([*parts, f"experts_implementation={self.experts_implementation!r}"])


def _size(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(
            f"bad {name}",
            found=repr(value),
            needed="an integer of at least 1",
            hint=f"RoutedExperts({name}=...) takes whole numbers",
        )
    return value


def _activation_function(activation: str | Activation) -> Activation:
    name = activation_name(activation)
    if name is not None:
        return ACTIVATIONS[name]
    if not callable(activation):
        raise LayoutError(
            "unknown activation", found=repr(activation), needed="a name or a callable", hint="'silu' is the usual one"
        )
    return activation
